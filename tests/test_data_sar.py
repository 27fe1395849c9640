"""Radar scenes: the drawn ones, and those of every source."""

import numpy as np
import pytest
import tifffile
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from sar_files import SHAPE, arrays, chips, classes, decibels, picture, refused, save, tile_file

from course_lib.data import DataError, sar
from course_lib.data.sar import drawn, intensity

# -------------------------------------------------------------------------- the drawn scenes


def test_drawn_scenes_are_the_same_everywhere():
    scenes = sar.load()
    assert scenes.images.shape == (64, 2, 64, 64) and scenes.images.dtype == np.float32
    assert scenes.labels.shape == (64, 64, 64) and scenes.labels.dtype == np.int64
    assert scenes.classes == ("land", "water") and scenes.bands == ("VV", "VH")
    assert len(set(scenes.scenes)) == 64 and np.isfinite(scenes.images).all()
    assert sum(scenes.not_finite.values()) == (scenes.labels == -1).sum() == 2415
    assert scenes.class_counts().tolist() == [216837, 42892]
    assert scenes.digest()[:16] == "6faaf65e9311e870"
    few = sar.load(n_scenes=3)
    assert few.digest() == scenes.take([0, 1, 2]).digest()
    assert few.digest() != sar.load(n_scenes=3, seed=1).digest()


@pytest.mark.parametrize("seed", range(3))
def test_a_threshold_finds_but_part_of_the_drawn_water(seed):
    scenes = sar.load(seed=seed)
    for band in (0, 1):
        limit, iou = sar.best_threshold(scenes, band)
        assert 0.4 < iou < 0.65 and -25 < sar.decibels(limit) < -14


def test_drawn_speckle_is_gamma_distributed_with_so_many_looks():
    power = 10 ** (drawn._speckle(np.random.default_rng(5), (400, 400)) / 10)
    assert power.mean() == pytest.approx(1, abs=0.01)
    assert power.var() == pytest.approx(1 / drawn.LOOKS, rel=0.02)
    skewness = ((power - power.mean()) ** 3).mean() / power.std() ** 3
    assert skewness == pytest.approx(2 / drawn.LOOKS**0.5, rel=0.05)


@pytest.mark.parametrize("size", [1, 16, 33])
def test_drawn_scenes_of_any_size(size):
    scenes = sar.load(n_scenes=8, image_size=size)
    assert scenes.images.shape == (8, 2, size, size)


# --------------------------------------------------------------- what files hold, and tiles


@pytest.mark.parametrize("below", ["", "v1.1/data/flood_events/HandLabeled"])
@pytest.mark.parametrize("options", [
    {}, {"compression": "zlib", "predictor": 3}, {"compression": "lzw"}, {"tile": (16, 16)},
    {"planarconfig": "separate"},
])
def test_sen1floods11s_chips(tmp_path, below, options):
    scenes = sar.load(chips(tmp_path, below, **options), image_size=16, normalize=False)
    assert scenes.scenes == ("Ghana_2", "Spain_1") and scenes.bands == ("VV", "VH")
    assert scenes.classes == ("land", "water")
    for tile, label, seed in zip(scenes.images, scenes.labels, (1, 0), strict=True):
        assert (tile[:, :12, :10] == decibels(seed)).all()
        assert (label[:12, :10] == classes(seed)).all()
        assert not tile[:, 12:].any() and (label[12:] == -1).all() and (label[:, 10:] == -1).all()


def test_bands_that_lie_last_and_gdals_mark_for_no_data(tmp_path):
    chips(tmp_path)
    image = decibels(0)
    image[0, 3, 4] = -9999
    tifffile.imwrite(
        tmp_path / "S1Hand/Spain_1_S1Hand.tif", np.moveaxis(image, 0, 2),
        planarconfig="contig", extratags=[(42113, "s", 0, "-9999", True)],
    )  # fmt: skip
    scenes = sar.load(tmp_path, image_size=16, normalize=False)
    assert scenes.not_finite == {"Spain_1": 1} and scenes.labels[1, 3, 4] == -1
    assert (scenes.images[1, :, 3, 5] == image[:, 3, 5]).all()


@pytest.mark.parametrize("as_stored", [
    lambda image: image, lambda image: np.moveaxis(image, 0, 2), lambda image: image[:1],
    lambda image: image[0], lambda image: image.astype(">f8"), np.asfortranarray,
])
def test_folders_of_arrays(tmp_path, as_stored):
    save(tmp_path / "images/a.npy", as_stored(decibels(0)))
    save(tmp_path / "labels/a.npy", classes(0))
    scenes = sar.load(tmp_path, image_size=5)
    n_bands = scenes.images.shape[1]
    assert len(scenes) == 6 and set(scenes.scenes) == {"a"} and scenes.classes == ("0", "1")
    expected = (decibels(0)[:n_bands, 5:10, 5:] - np.float32(-15)) / np.float32(7)
    np.testing.assert_array_equal(scenes.images[3], expected)
    np.testing.assert_array_equal(scenes.labels[3], classes(0)[5:10, 5:])
    assert scenes.places.tolist() == [[row, column] for row in (0, 5, 10) for column in (0, 5)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9))
def test_tiles_hold_each_pixel_once(height, width, size):
    image = np.arange(2 * height * width, dtype=np.float32).reshape(2, height, width)
    label = np.arange(height * width).reshape(height, width)
    images, labels, places = sar.loading.tiles(image, label, size, (7, 3))
    assert sorted(labels[labels >= 0].tolist()) == list(range(height * width))
    for tile, mask, (row, column) in zip(images, labels, places - (7, 3), strict=True):
        inside = label[row : row + size, column : column + size]
        rows, columns = inside.shape
        assert (mask[:rows, :columns] == inside).all() and (mask >= 0).sum() == inside.size
        assert (tile[:, mask < 0] == 0).all()
        assert (tile[0, :rows, :columns] == inside).all()


def test_a_file_of_tiles(tmp_path):
    path = tile_file(tmp_path / "tiles.npz")
    scenes = sar.load(path, image_size=4, normalize=False)
    assert len(scenes) == 16 and scenes.scenes[::4] == ("Ghana", "Ghana", "India", "India")
    assert scenes.places[4:8].tolist() == [[0, 8], [0, 12], [4, 8], [4, 12]]
    stored = np.load(path)
    expected = stored["s1_db_x100"][1, :, :4, 4:] / np.float32(100)
    np.testing.assert_array_equal(scenes.images[5], expected)
    np.testing.assert_array_equal(scenes.labels[5], stored["masks"][1, :4, 4:])
    assert sar.load(tmp_path, image_size=4, normalize=False).digest() == scenes.digest()
    with pytest.raises(ValueError, match="labels must be None"):
        sar.load(path, path)


def test_one_large_picture_with_an_index_of_five_classes(tmp_path):
    scenes = sar.load(picture(tmp_path), image_size=32, num_classes=5, ignore_label=0)
    assert len(scenes) == 9 and set(scenes.scenes) == {"bay"}
    assert scenes.classes == ("1", "2", "3", "4", "5") and scenes.images.shape[1] == 3
    index = np.array(Image.open(tmp_path / "bay_label.png")).astype(np.int64)
    np.testing.assert_array_equal(scenes.labels[0], index[:32, :32] - 1)
    assert scenes.class_counts().tolist() == np.bincount(index.ravel())[1:].tolist()
    grey = np.array(Image.open(tmp_path / "bay.png"))[:32, :32, 1] / 255
    np.testing.assert_allclose(scenes.images[0, 1], (grey - 0.5) / 0.25, atol=1e-6)


@pytest.mark.parametrize("image, label", [
    ("image.png", "label.png"), ("bay.png", "bay_label2d.png"), ("bay_image.png", "bay-mask.png"),
    ("images/x.png", "labels/x.png"), ("images/x.png", "labels/x_label.png"),
])
def test_where_a_picture_and_its_label_may_lie(tmp_path, image, label):
    root = picture(tmp_path / "bay")
    for name, place in (("bay.png", image), ("bay_label.png", label)):
        (root / place).parent.mkdir(exist_ok=True)
        (root / name).rename(tmp_path / "moved")
        (tmp_path / "moved").rename(root / place)
    found = sar.load(root, num_classes=6)
    assert set(found.scenes) == {"x" if "x" in image else "bay"}
    named = sar.load(root / image, root / label, num_classes=6)
    assert (named.labels == found.labels).all()


@pytest.mark.parametrize("mode", ["P", "RGB"])
def test_labels_that_are_colours(tmp_path, mode):
    picture(tmp_path, labels=2)
    index = Image.open(tmp_path / "bay_label.png")
    coloured = Image.fromarray(np.array(index), "P")
    coloured.putpalette([0, 0, 0, 0, 0, 255, 200, 100, 0])
    coloured.convert(mode).save(tmp_path / "bay_label.png")
    colours = {"#000000": 0, "#0000Ff": 1, (200, 100, 0): 2}
    scenes = sar.load(tmp_path, ignore_label=0, label_colours=colours)
    assert scenes.classes == ("1", "2")
    np.testing.assert_array_equal(scenes.labels[0], np.array(index)[:64, :64].astype(int) - 1)
    if mode == "P":  # without colours it is the index that counts
        plain = sar.load(tmp_path, ignore_label=0, num_classes=2)
        assert plain.digest() == scenes.digest()
    else:
        refused("bay_label.png", "label_colours", source=tmp_path)
    del colours["#0000Ff"]
    row, column = np.argwhere(np.array(index) == 1)[0]
    refused(
        "bay_label.png", "#0000ff", f"row {row}, column {column}", source=tmp_path,
        label_colours=colours, num_classes=3,
    )  # fmt: skip


@pytest.mark.parametrize("mode, bands, largest", [
    ("1", 1, 255), ("L", 1, 255), ("LA", 1, 255), ("P", 3, 255), ("RGBA", 3, 255),
    ("I;16", 1, 65535),
])
def test_pictures_of_any_mode(tmp_path, mode, bands, largest):
    picture(tmp_path)
    image = Image.new("I;16", (70, 90), 40_000) if "16" in mode else Image.new("L", (70, 90), 255)
    (image if "16" in mode else image.convert(mode)).save(tmp_path / "bay.png")
    scenes = sar.load(tmp_path, num_classes=6, normalize=False)
    expected = 40_000 / largest if "16" in mode else 1
    assert scenes.images.shape[1] == bands
    assert scenes.images[0] == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------- no data, units and labels


def test_pixels_that_are_not_finite_or_zero_have_no_data_and_are_counted(tmp_path):
    arrays(tmp_path)
    image = decibels(0)
    image[0, 2, 3], image[1, 4, 5], image[:, 6, 7] = np.nan, np.inf, -np.inf
    image[:, 8, 0] = image[0, 9, 1] = 0  # beyond the swath in both bands; in one it is a number
    save(tmp_path / "images/a.npy", image)
    scenes = sar.load(tmp_path, image_size=12)
    assert scenes.not_finite == {"a": 4} and np.isfinite(scenes.images).all()
    assert scenes.labels[0][9, 1] != -1
    for place in ((2, 3), (4, 5), (6, 7), (8, 0)):
        assert scenes.labels[0][place] == -1 and not scenes.images[(0, slice(None), *place)].any()
    assert scenes.take([1]).not_finite == {}
    save(tmp_path / "images/a.npy", np.full_like(image, np.nan))
    refused("images/a.npy", "no pixel with data", source=tmp_path)


def test_units(tmp_path):
    arrays(tmp_path)
    plain = sar.load(tmp_path)
    power = 10 ** (decibels(0).astype(np.float64) / 10)
    power[0, 1, 1] = 0
    save(tmp_path / "images/a.npy", power)
    refused("a.npy", "below 0", "unit", source=tmp_path)
    save(tmp_path / "images/b.npy", 10 ** (decibels(1).astype(np.float64) / 10))
    scenes = sar.load(tmp_path, unit="power")
    assert scenes.not_finite == {"a": 1}
    kept = scenes.labels != -1
    np.testing.assert_allclose(
        np.moveaxis(scenes.images, 1, 3)[kept], np.moveaxis(plain.images, 1, 3)[kept], atol=1e-5
    )
    as_is = sar.load(tmp_path, unit="as_is")
    assert as_is.images[1, 0, 5, 5] == np.float32(10 ** (decibels(1)[0, 5, 5] / np.float64(10)))
    save(tmp_path / "images/a.npy", np.full((2, *SHAPE), 1e300))
    refused("a.npy", "finite", source=tmp_path, unit="as_is")
    refused("a.npy", "grey", source=tmp_path, unit="grey")


def test_decibels_are_clipped_and_scaled(tmp_path):
    image = decibels(0)
    image[0, :, :2] = -100, 40
    save(tmp_path / "images/a.npy", image)
    save(tmp_path / "labels/a.npy", classes(0))
    tile = sar.load(tmp_path, image_size=10).images[0]
    assert (tile[0, :, :2] == np.float32([-20 / 7, 20 / 7])).all()
    back = sar.decibels(tile)
    assert back[0, 0, 0] == pytest.approx(intensity.LOWEST_DB)
    np.testing.assert_allclose(back[1], image[1, :10], atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.uint64, bool])
def test_labels_of_any_whole_type(tmp_path, dtype):
    arrays(tmp_path, ["a"])
    label = classes(0, low=0).astype(dtype)
    save(tmp_path / "labels/a.npy", label)
    np.testing.assert_array_equal(sar.load(tmp_path, image_size=10).labels[0], label[:10])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.one_of(st.none(), st.integers(-2, 9)), st.integers(-3, 300),
       st.integers(0, 19))
@example(2, None, -3, 7)
@example(5, 0, 6, 0)
def test_a_label_out_of_range_is_never_clipped(num_classes, ignored, value, place):
    code = sar.loading.LabelCode(num_classes, ignored)
    allowed = [label for label in range(num_classes + 1) if label != ignored][:num_classes]
    label = np.full((4, 5), allowed[0], np.int16)
    label.flat[place] = value
    if value in allowed or value in (-1, ignored):
        found = code.read(label, "x.png")
        expected = -1 if value in (-1, ignored) else allowed.index(value)
        assert found.flat[place] == expected and (np.delete(found, place) == 0).all()
    else:
        words = f"x.png.* {value}, .*row {place // 5}, column {place % 5}:"
        with pytest.raises(DataError, match=words):
            code.read(label, "x.png")


def test_a_label_too_large_for_int64_is_no_minus_one(tmp_path):
    arrays(tmp_path, ["a"])
    label = np.zeros(SHAPE, np.uint64)
    label[2, 3] = 2**64 - 1
    save(tmp_path / "labels/a.npy", label)
    refused("labels/a.npy", 2**64 - 1, "row 2, column 3", source=tmp_path)
