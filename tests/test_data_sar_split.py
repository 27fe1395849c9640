"""Radar scenes: parted by scene, or into blocks of one; turned; found by a threshold; real ones."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from course_lib.data import DataError, sar
from course_lib.data.sar import splitting, tiling

REAL = Path(os.environ.get("COURSE_DATA", "absent")) / "sen1floods11" / "tiles128.npz"
needs_real = pytest.mark.skipif(
    not REAL.is_file(), reason="COURSE_DATA names no folder with sen1floods11/tiles128.npz"
)


def one_scene(labels, size, bands=1):
    """A scene whose pixels are 1, 2, 3, …: each tells its own place."""
    numbers = np.arange(1, labels.size + 1, dtype=np.float32).reshape(1, *labels.shape)
    images, labels, places = tiling.tiles(numbers.repeat(bands, 0), labels, size)
    n_classes = max(int(labels.max()) + 1, 2)
    classes = tuple(str(label) for label in range(n_classes))
    return sar.SarScenes(images, labels, ("bay",) * len(images), places, classes, ("x",), {})


def several(n, tiles=3):
    """`n` scenes of `tiles` tiles each, not in order."""
    names = tuple(f"scene {(i * 7) % n:02d}" for i in range(n * tiles))
    random = np.random.default_rng(n)
    return sar.SarScenes(
        random.random((n * tiles, 1, 2, 2), np.float32), random.integers(-1, 2, (n * tiles, 2, 2)),
        names, np.zeros((n * tiles, 2), np.int64), ("land", "water"), ("x",), {"scene 00": 3},
    )  # fmt: skip


def places_of(part, width):
    """{(row, column)} of every pixel whose image or label is not blank."""
    size = part.labels.shape[1]
    found = set()
    for image, label, (row, column) in zip(part.images, part.labels, part.places, strict=True):
        for i, j in np.argwhere((image != 0).any(axis=0) | (label >= 0)).tolist():
            assert image[0, i, j] == (row + i) * width + column + j + 1 and max(i, j) < size
            found.add((int(row) + i, int(column) + j))
    return found


# ------------------------------------------------------------------------------- by scene


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.floats(0.01, 0.99), st.integers(0, 99))
def test_no_scene_is_on_both_sides(n, train_ratio, seed):
    scenes = several(n, 7 if n % 7 else 5)
    names = set(scenes.scenes)
    assume(len(names) > 1)
    training, validation = sar.split(scenes, train_ratio, seed)
    sides = set(training.scenes), set(validation.scenes)
    assert not sides[0] & sides[1] and sides[0] | sides[1] == names and all(sides)
    assert len(training) + len(validation) == len(scenes)
    assert abs(len(sides[1]) - (1 - train_ratio) * len(names)) <= 1
    again = sar.split(scenes.take(np.arange(len(scenes))[::-1]), train_ratio, seed)
    assert {*again[1].scenes} == sides[1]
    for part in (training, validation):
        for image, name in zip(part.images, part.scenes, strict=True):
            assert any(name == scenes.scenes[i] for i in np.argwhere(scenes.images == image)[:, 0])
        assert part.not_finite == ({"scene 00": 3} if "scene 00" in part.scenes else {})


def test_the_seed_chooses_the_scenes():
    scenes = several(10)
    held = {sar.split(scenes, 0.8, seed)[1].scenes for seed in range(8)}
    assert len(held) > 4
    # Written down: the choice depends on no library's random numbers.
    assert {*sar.split(scenes, 0.8, 0)[1].scenes} == {"scene 01", "scene 07"}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 23), st.data())
def test_folds_leave_each_scene_out_once(n, data):
    scenes = several(n, 5 if n % 7 == 0 else 7)
    names = sorted(set(scenes.scenes))
    assume(len(names) > 1)
    k = data.draw(st.integers(2, len(names)))
    folds = sar.folds(scenes, k)
    assert len(folds) == k and [name for fold in folds for name in fold] == names
    assert {len(fold) for fold in folds} <= {len(names) // k, -(-len(names) // k)}
    for fold in folds:
        training, validation = sar.leave_out(scenes, fold)
        assert {*validation.scenes} == {*fold} and {*training.scenes} == {*names} - {*fold}
    assert sar.folds(scenes) == tuple((name,) for name in names)


# ------------------------------------------------------------------- blocks of one scene


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 40), st.integers(8, 40), st.integers(3, 9), st.integers(0, 12),
       st.floats(0.3, 0.9), st.integers(0, 9))
def test_blocks_of_one_scene_are_a_gap_apart(height, width, size, gap, train_ratio, seed):
    label = np.random.default_rng(seed).integers(-1, 3, (height, width))
    scenes = one_scene(label, size)
    before = scenes.digest()
    try:
        training, validation = sar.split(scenes, train_ratio, seed, gap)
    except DataError:
        assert 2 * (size + gap) >= max(height, width) // 2  # only where there is little room
        return
    assert scenes.digest() == before
    sides = [places_of(part, width) for part in (training, validation)]
    assert not sides[0] & sides[1]
    ours, theirs = (np.array(sorted(side)) for side in sides)
    near = abs(ours[:, None] - theirs[None]).max(axis=2).min()
    assert near > gap  # so many pixels and no fewer lie between
    for part in (training, validation):
        assert part.class_counts().any()
    # Nothing else is lost: a pixel that is on neither side is near the validation's.
    for pixel in np.argwhere(np.ones_like(label, bool)):
        if tuple(pixel.tolist()) not in sides[0] | sides[1]:
            assert abs(theirs - pixel).max(axis=1).min() <= gap


def test_blocks_hold_every_class_where_they_can():
    label = np.zeros((40, 160), np.int64)
    label[:20, 100:] = 1
    label[20:, 100:] = 2  # in the right part alone: most blocks would lack a class
    scenes = one_scene(label, 8)
    held = set()
    for seed in range(12):
        training, validation = sar.split(scenes, 0.8, seed, gap=4)
        assert (training.class_counts() > 0).all() and (validation.class_counts() > 0).all()
        share = validation.class_counts().sum() / label.size
        assert 0.1 < share < 0.3
        held.add(validation.places.tobytes())
    assert len(held) > 1  # the seed draws among them


def test_a_block_holds_about_its_share_of_what_is_labelled():
    label = np.zeros((40, 160), np.int64)
    label[:, :80] = -1
    for seed in range(12):
        training, validation = sar.split(one_scene(label, 8), 0.8, seed, gap=2)
        counts = [part.class_counts().sum() for part in (training, validation)]
        assert 0.1 <= counts[1] / sum(counts) <= 0.3


def test_classes_come_before_the_share():
    label = np.full((8, 160), -1)
    label[:, 32:128] = 0
    label[0, :8] = label[0, 152:] = 1  # both ends have class 1, and hardly any other pixel
    label[1, ::40] = 0
    for seed in range(6):
        training, validation = sar.split(one_scene(label, 8), 0.8, seed, gap=2)
        assert training.class_counts().all() and validation.class_counts().all()


@pytest.mark.parametrize("axis", [0, 1])
def test_classes_are_counted_line_by_line(axis):
    label = np.random.default_rng(1).integers(-1, 4, (13, 22))
    counts = splitting._counts_by_line(one_scene(label, 5), axis)
    for line, count in zip(label if axis == 0 else label.T, counts, strict=False):
        assert count.tolist() == [(line == number).sum() for number in range(4)]
    assert counts.sum() == (label >= 0).sum()


def test_a_large_single_scene_is_split_quickly_and_to_the_ratio():
    label = np.random.default_rng(0).integers(0, 5, (600, 800))
    training, validation = sar.split(one_scene(label, 32, bands=3), 0.75)
    n_training, n_validation = (part.class_counts().sum() for part in (training, validation))
    assert n_validation / label.size == pytest.approx(0.25, abs=0.06)
    assert 0 < label.size - n_training - n_validation <= 2 * sar.GAP * 800


def test_too_little_to_split():
    whole = one_scene(np.eye(8, dtype=np.int64), 8)
    with pytest.raises(DataError, match="one scene of 1 tiles.*32 pixels apart"):
        sar.split(whole)
    four = one_scene(np.eye(16, dtype=np.int64), 8)
    with pytest.raises(DataError, match="8 pixels apart"):
        sar.split(four, gap=8)
    assert len(sar.split(four, gap=7)[0]) == 2
    blank = several(4)
    blank.labels[np.array(blank.scenes) != "scene 01"] = -1
    with pytest.raises(DataError, match="No scene for .* labelled pixel.*scene 01"):
        sar.split(blank, 0.5)


@pytest.mark.parametrize("act, words", [
    (lambda scenes: sar.split(scenes, 0), "train_ratio"),
    (lambda scenes: sar.split(scenes, float("nan")), "train_ratio"),
    (lambda scenes: sar.split(scenes.take([0]), gap=-1), "gap"),
    (lambda scenes: sar.split(scenes.take([0]), gap=1.5), "gap"),
    (lambda scenes: sar.folds(scenes, 1), "k must be 2 to 4"),
    (lambda scenes: sar.folds(scenes, 5), "k must be 2 to 4"),
    (lambda scenes: sar.leave_out(scenes, ["elsewhere"]), "elsewhere"),
    (lambda scenes: sar.leave_out(scenes, []), "left out"),
    (lambda scenes: sar.leave_out(scenes, set(scenes.scenes)), "must stay"),
])
def test_senseless_options(act, words):
    with pytest.raises(ValueError, match=words) as caught:
        act(several(4))
    assert not isinstance(caught.value, DataError)


# ----------------------------------------------------------------------------- turned


def test_image_and_label_are_turned_together():
    label = np.arange(9).reshape(3, 3)
    image = np.stack([label, label + 100]).astype(np.float32)
    ways = set()
    for index in range(100):
        turned, mask = sar.augmented(image, label, 5, index)
        assert turned.dtype == np.float32 and mask.dtype == np.int64
        assert turned.flags.c_contiguous and mask.flags.c_contiguous
        assert (turned[0] == mask).all() and (turned[1] == mask + 100).all()
        again = sar.augmented(image, label, 5, index)
        assert (again[0] == turned).all() and (again[1] == mask).all()
        ways.add(mask.tobytes())
    square = [np.rot90(label, k) for k in range(4)]
    assert ways == {np.ascontiguousarray(a).tobytes() for s in square for a in (s, s[:, ::-1])}
    others = [sar.augmented(image, label, 6, i)[1].tobytes() for i in range(20)]
    assert others != [sar.augmented(image, label, 5, i)[1].tobytes() for i in range(20)]
    turned[:] = -1
    mask[:] = -1
    assert image.min() == 0 and label.min() == 0


# ------------------------------------------------------------------------- by a threshold


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_no_threshold_does_better_than_the_best(seed, levels):
    random = np.random.default_rng(seed)
    images = random.integers(0, levels, (2, 2, 3, 3)).astype(np.float32)
    labels = random.integers(-1, 2, (2, 3, 3))
    assume((labels >= 0).any())
    scenes = sar.SarScenes(images, labels, ("a", "b"), None, ("land", "water"), ("x", "y"), {})
    threshold, iou = sar.best_threshold(scenes, 1)
    values, water = images[:, 1][labels >= 0], labels[labels >= 0] == 1
    for limit in (*range(1, levels), np.inf):
        below = values < limit
        by_hand = (below & water).sum() / (below | water).sum() if (below | water).any() else 0
        assert by_hand <= iou + 1e-12
        assert sar.threshold_iou(scenes, limit, 1) == pytest.approx(by_hand)
    assert sar.threshold_iou(scenes, threshold, 1) == pytest.approx(iou)


# ----------------------------------------------------------------------- the real thing


@needs_real
def test_real_radar():
    scenes = sar.load(REAL, image_size=128)
    stored = np.load(REAL)
    assert scenes.images.shape == (176, 2, 128, 128) and scenes.bands == ("VV", "VH")
    assert scenes.class_counts().tolist() == [1_705_918, 794_034] and scenes.not_finite == {}
    assert (scenes.labels == stored["masks"]).all() and (scenes.places == stored["rowcol"]).all()
    assert (np.array(scenes.scenes) == stored["chip"]).all()
    expected = (stored["s1_db_x100"] / 100).clip(-35, 5)
    np.testing.assert_allclose(sar.decibels(scenes.images), expected, atol=1e-4)
    vv, vh = (sar.best_threshold(scenes, band)[1] for band in (0, 1))
    assert vv == pytest.approx(0.4008, abs=1e-3) and vh == pytest.approx(0.6740, abs=1e-3)


@needs_real
def test_real_folds_are_written_down():
    scenes = sar.load(REAL, image_size=128)
    assert [fold for (fold,) in sar.folds(scenes)] == [
        "Ghana_53713", "Ghana_97059", "India_900498", "Mekong_333434", "Nigeria_812045",
        "Pakistan_849790", "Somalia_699062", "Spain_6860600", "Spain_7370579", "Sri-Lanka_534068",
        "USA_905409",
    ]  # fmt: skip
    training, validation = sar.leave_out(scenes, ["Spain_7370579"])
    assert len(training) == 160 and {*validation.scenes} == {"Spain_7370579"}
    # One chip alone, in blocks: what was cut into tiles is one scene still.
    training, validation = sar.split(validation, 0.75)
    kept = training.places[:, None] - validation.places[None]
    assert (abs(kept).max(axis=2) >= 128).all() and len(training) + len(validation) == 16
