"""Leaf-disease sets: their layouts, the split, the drawn set, and what is refused by name."""

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from course_lib import data
from course_lib.data import files


def picture(seed, size=(20, 16), mode="RGB", form="PNG"):
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels, mode).save(content, form)
    return content.getvalue()


def fill(folder, names):
    """Put a small picture of its own at each of `names`."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed))


def by_folder(root):
    fill(root, [f"{name}/{i}.png" for name in ("rust", "healthy") for i in range(10)])
    return root


def by_table(root, lines=None, names=None):
    fill(root, [f"train_images/{i}.jpg" for i in range(8)])
    lines = lines or ["image_id,label", *(f"{i}.jpg,{3 if i % 2 else 1}" for i in range(8))]
    (root / "train.csv").write_text("\n".join(lines))
    if names is not None:
        (root / "label_num_to_disease_map.json").write_text(json.dumps(names))
    return root


def zipped(folder, path, prefix=""):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, prefix + str(file.relative_to(folder)))
    return path


# ------------------------------------------------------------------------- the layouts


def test_a_folder_for_each_class(tmp_path):
    root = by_folder(tmp_path)
    (root / "healthy" / "notes.txt").write_text("no image")
    (root / "healthy" / ".hidden.png").write_text("no image")
    (root / ".git").mkdir()
    fill(root / "rust", ["deeper/down.png"])
    part = data.leaves(root, image_size=8)
    rest = data.leaves(root, image_size=8, train=False)
    assert part.classes == rest.classes == ("healthy", "rust")
    assert part.images.shape == (17, 3, 8, 8) and part.images.dtype == torch.uint8
    assert len(part) == 17 and len(rest) == 4
    everything = set(part.names) | set(rest.names)
    assert everything == {f"{c}/{i}.png" for c in part.classes for i in range(10)} | {
        "rust/deeper/down.png"
    }
    for image, label, name in zip(part.images, part.labels, part.names, strict=True):
        assert part.classes[label] == name.split("/")[0]
        assert image.float().std() > 1
    image, label = part[3]
    assert torch.equal(image, part.images[3]) and label == part.labels[3]


@pytest.mark.parametrize("names, classes", [
    (None, ("1", "3")),
    ({"1": "mosaic", "3": "healthy", "4": "rust"}, ("mosaic", "healthy")),
])
def test_cassavas_table(tmp_path, names, classes):
    part = data.leaves(by_table(tmp_path, names=names), image_size=8, validation_fraction=0.5)
    assert part.classes == classes and len(part) == 4
    for name, label in zip(part.names, part.labels.tolist(), strict=True):
        assert label == int(name.removesuffix(".jpg")) % 2


@pytest.mark.parametrize("make", [by_folder, by_table])
@pytest.mark.parametrize("prefix", ["", "inner/", "a/b/"])
def test_a_zip_holds_what_its_folder_holds(tmp_path, make, prefix):
    folder = make(tmp_path / "set")
    packed = zipped(folder, tmp_path / "set.zip", prefix)
    for train in (True, False):
        one, other = (data.leaves(root, image_size=8, train=train) for root in (folder, packed))
        assert one.digest() == other.digest()


def test_images_of_any_kind_become_square_and_red_green_blue(tmp_path):
    root = by_folder(tmp_path)
    (root / "rust" / "grey.png").write_bytes(picture(1, mode="L"))
    (root / "rust" / "thin.png").write_bytes(picture(1, size=(1, 3000)))
    (root / "rust" / "one.png").write_bytes(picture(1, size=(1, 1)))
    Image.new("CMYK", (9, 9)).save(root / "rust" / "print.jpg")
    Image.new("RGBA", (9, 9)).save(root / "rust" / "clear.png")
    assert data.leaves(root, image_size=8, validation_fraction=0.05).images.shape == (23, 3, 8, 8)


def test_the_middle_square_is_kept(tmp_path):
    by_folder(tmp_path)
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    for name in ("a", "b"):
        Image.fromarray(wide).save(tmp_path / "rust" / f"{name}.png")
    parts = [data.leaves(tmp_path, image_size=10, train=train) for train in (True, False)]
    found = {n: i for part in parts for n, i in zip(part.names, part.images, strict=True)}
    assert (found["rust/a.png"] == 200).all()


def split(root, held="val"):
    by_folder(root / "train")
    fill(root, [f"{held}/{name}/{i}.png" for name in ("healthy", "rust") for i in range(3)])
    return root


@pytest.mark.parametrize("held", ["val", "valid", "Validation", "test"])
@pytest.mark.parametrize("pack", [False, True])
def test_a_set_that_is_split_keeps_its_split(tmp_path, held, pack):
    root = split(tmp_path / "set", held)
    root = zipped(root, tmp_path / "set.zip", "inner/") if pack else root
    part, rest = (data.leaves(root, image_size=4, train=train) for train in (True, False))
    assert part.classes == rest.classes == ("healthy", "rust")
    assert torch.bincount(part.labels).tolist() == [10, 10]
    assert torch.bincount(rest.labels).tolist() == [3, 3]
    assert all(name.startswith("train/") for name in part.names)
    assert all(name.startswith(f"{held}/") for name in rest.names)


def test_of_several_parts_the_validation_part_is_taken(tmp_path):
    root = split(tmp_path)
    (root / "test").mkdir()
    rest = data.leaves(root, image_size=4, train=False)
    assert {name.split("/")[0] for name in rest.names} == {"val"}


def test_parts_that_do_not_fit_are_refused(tmp_path):
    root = split(tmp_path)
    fill(root, ["val/mould/1.png"])
    refused(root, "the folders train and val", "train holds healthy, rust", "holds healthy, mould,")
    (root / "train" / "mould").mkdir()
    refused(root, "'mould'", "no image to train on")
    (root / "val" / "mould" / "1.png").unlink()
    fill(root, ["train/mould/1.png"])
    refused(root, "'mould'", "no image to validate with")


def test_links_that_lead_round_count_once(tmp_path):
    root = by_folder(tmp_path / "set")
    before = data.leaves(root, image_size=4).digest()
    (root / "healthy" / "round").symlink_to("..")
    (root / "healthy" / "itself").symlink_to(".")
    (root / "healthy" / "other").symlink_to("../rust")
    assert data.leaves(root, image_size=4).digest() == before
    (root / "also").symlink_to("rust")
    refused(root, root / "rust", "leads to a folder that is in the set already")
    (root / "also").unlink()
    fill(tmp_path, ["elsewhere/1.png", "elsewhere/2.png"])
    (root / "linked").symlink_to(tmp_path / "elsewhere")  # another's images are welcome
    assert data.leaves(root, image_size=4).classes == ("healthy", "linked", "rust")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_in_a_zip_twice_counts_once(tmp_path):
    root = by_folder(tmp_path / "set")
    packed = zipped(root, tmp_path / "set.zip")
    (root / "rust" / "1.png").write_bytes(picture(99))
    with zipfile.ZipFile(packed, "a") as archive:
        archive.write(root / "rust" / "1.png", "rust/1.png")
    for train in (True, False):
        one, other = (data.leaves(place, image_size=8, train=train) for place in (root, packed))
        assert one.digest() == other.digest()  # the later member, as unpacking leaves it


# --------------------------------------------------------------------------- the split


def test_the_split_is_per_class_and_follows_from_the_seed(tmp_path):
    root = by_folder(tmp_path)
    held = {}
    for seed in range(20):
        part = data.leaves(root, image_size=1, train=False, seed=seed)
        assert sorted(part.labels.tolist()) == [0, 0, 1, 1]
        other = data.leaves(root, image_size=1, seed=seed)
        assert not set(part.names) & set(other.names) and len(other) == 16
        held[seed] = part.names
    assert len(set(held.values())) > 15
    # Written down, so that it is the same on every machine and in every version.
    assert held[0] == ("healthy/0.png", "healthy/9.png", "rust/4.png", "rust/5.png")


def test_each_part_has_an_image_of_each_class(tmp_path):
    fill(tmp_path, ["a/0.png", "a/1.png", "b/0.png", "b/1.png"])
    for fraction in (0.01, 0.5, 0.99):
        for train in (True, False):
            part = data.leaves(tmp_path, image_size=2, validation_fraction=fraction, train=train)
            assert part.labels.tolist() == [0, 1]


# ----------------------------------------------------------------------- the drawn set


def test_the_drawn_set_is_the_same_everywhere():
    part = data.leaves(image_size=24)
    rest = data.leaves(image_size=24, train=False)
    assert torch.bincount(part.labels).tolist() == [80] * 5
    assert torch.bincount(rest.labels).tolist() == [20] * 5
    assert part.classes == ("blight", "healthy", "mosaic", "rust", "spots")
    pixels = hashlib.sha256(part.images.numpy()).hexdigest()
    assert pixels[:16] == "068138a3af422a4a"
    assert len(set(map(bytes, part.images.numpy()))) == 400


def test_the_mean_colour_does_not_tell_drawn_leaves_apart():
    parts = [data.leaves(image_size=24, train=train) for train in (True, False)]
    colours = [part.images.double().mean((2, 3)) for part in parts]
    # The nearest of the training images by mean colour, and the nearest mean of a class.
    nearest = parts[0].labels[torch.cdist(colours[1], colours[0]).argmin(1)]
    means = torch.stack([colours[0][parts[0].labels == label].mean(0) for label in range(5)])
    for found in (nearest, torch.cdist(colours[1], means).argmin(1)):
        assert (found == parts[1].labels).double().mean() < 0.45


@pytest.mark.parametrize("size", [1, 2, 33])
def test_drawn_leaves_come_in_any_size(size):
    part = data.leaves(image_size=size, train=False, validation_fraction=0.01)
    assert part.images.shape == (5, 3, size, size)


# ---------------------------------------------------------------------- what is refused


def refused(root, *words, **options):
    with pytest.raises(data.DataError) as caught:
        data.leaves(root, image_size=8, **options)
    for word in words:
        assert str(word) in str(caught.value)


def test_what_is_no_set(tmp_path):
    refused(tmp_path / "absent", tmp_path / "absent", "There is no")
    refused(tmp_path, tmp_path, "no folder of images")
    (tmp_path / "file.zip").write_bytes(b"PK but not really")
    refused(tmp_path / "file.zip", "file.zip", "neither a folder nor a whole zip")
    fill(tmp_path / "flat", ["a.png", "b.png"])
    refused(tmp_path / "flat", "one folder of images for each class")
    fill(tmp_path / "single", ["only/a.png", "only/b.png"])
    refused(tmp_path / "single", "one class only", "only")


def test_a_class_of_one_or_none(tmp_path):
    root = by_folder(tmp_path)
    (root / "empty").mkdir()
    refused(root, "'empty'", "no image")
    fill(root, ["empty/alone.png"])
    refused(root, "'empty'", "only empty/alone.png")


@pytest.mark.parametrize("spoil", [
    lambda content: b"",
    lambda content: content[: len(content) // 2],
    lambda content: b"text",
    lambda content: content[:60] + bytes(40) + content[100:],
])
@pytest.mark.parametrize("pack", [False, True])
def test_a_spoilt_image_is_named(tmp_path, spoil, pack):
    root = by_folder(tmp_path / "set")
    for file in root.glob("rust/[0-4].png"):  # some in either part
        file.write_bytes(spoil(file.read_bytes()))
    refused(zipped(root, tmp_path / "set.zip") if pack else root, "rust/", "Replace it")


def marked(packed, offsets, value):
    """The zip with a byte of every member's two headers changed."""
    content = bytearray(packed.read_bytes())
    for mark, offset in zip((b"PK\3\4", b"PK\1\2"), offsets, strict=True):
        at = content.find(mark)
        while at >= 0:
            content[at + offset] = value
            at = content.find(mark, at + 4)
    packed.write_bytes(content)
    return packed


@pytest.mark.parametrize("offsets, value", [((6, 8), 1), ((8, 10), 9)])  # encrypted; Deflate64
@pytest.mark.parametrize("make", [by_folder, by_table])
def test_a_zip_that_cannot_be_unpacked_here(tmp_path, offsets, value, make):
    packed = zipped(make(tmp_path / "set"), tmp_path / "set.zip")
    refused(marked(packed, offsets, value), "set.zip/", "cannot be unpacked here", "unpack the zip")


@pytest.mark.parametrize("pack", [False, True])
def test_a_file_larger_than_any_image_is_not_read(tmp_path, pack, monkeypatch):
    root = by_folder(tmp_path / "set")
    with open(root / "rust" / "0.png", "wb") as file:
        file.truncate(1 << 20)
    packed = tmp_path / "set.zip"
    if pack:
        with zipfile.ZipFile(zipped(root, packed), "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rust/00.png", bytes(1 << 20))
    monkeypatch.setattr(files, "LARGEST", (1 << 20) - 1)
    for train in (True, False):
        with pytest.raises(data.DataError, match="0.png has 1,048,576 bytes, more than any image"):
            data.leaves(packed if pack else root, image_size=8, train=train)
            data.leaves(packed if pack else root, image_size=8, train=not train)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    root = by_folder(tmp_path / "set")
    (root / "rust" / "gone.png").symlink_to("nowhere")
    refused(root, "gone.png", "is no file, or a link to none")
    (root / "rust" / "gone.png").unlink()
    os.mkfifo(root / "rust" / "pipe.png")
    refused(root, "pipe.png", "is no file, or a link to none")
    refused(root / "rust" / "pipe.png", "neither a folder nor a whole zip")


@pytest.mark.parametrize("size", [100_000_000, 10**30])
def test_images_for_which_there_is_no_room(tmp_path, size):
    with pytest.raises(data.DataError, match="GB of memory: choose a smaller image_size"):
        data.leaves(by_folder(tmp_path), image_size=size)


def test_a_zip_with_a_changed_byte(tmp_path):
    packed = zipped(by_folder(tmp_path / "set"), tmp_path / "set.zip")
    content = bytearray(packed.read_bytes())
    for at in range(200, len(content) // 2, 300):
        content[at] ^= 1
    packed.write_bytes(content)
    refused(packed, "set.zip/", "Replace it")


@pytest.mark.parametrize("lines, words", [
    (["image,label", "0.jpg,1"], ["train.csv", "no column image_id", "image, label"]),
    (["0.jpg,1"], ["no column image_id and no column label"]),
    ([""], ["no column image_id"]),
    (["image_id,label", "0.jpg,1", "99.jpg,3"], ["line 3", "'99.jpg'", "add the file"]),
    (["image_id,label", "0.jpg,1", "0.jpg,3"], ["line 3", "a second time"]),
    (["image_id,label", "0.jpg,rust"], ["line 2", "'rust'"]),
    (["image_id,label", "0.jpg"], ["line 2", "None"]),
    (["image_id,label"], ["two classes or more, not 0"]),
    (["image_id,label", "0.jpg,1", "1.jpg,1"], ["two classes or more, not 1"]),
    (["image_id,label", "0.jpg,1", "1.jpg,1", "2.jpg,0"], ["'0'", "only 2.jpg"]),
])
def test_a_wrong_table(tmp_path, lines, words):
    refused(by_table(tmp_path, lines), *words)


def test_what_belongs_to_a_table(tmp_path):
    root = by_table(tmp_path, names=["a list"])
    refused(root, "label_num_to_disease_map.json", "names by label")
    (root / "label_num_to_disease_map.json").write_text("{")
    refused(root, "label_num_to_disease_map.json", "not JSON")
    (root / "train.csv").write_bytes(b"\xff\xfe\x00")
    refused(root, "train.csv", "UTF-8")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "train.csv").write_text("image_id,label\n")
    refused(tmp_path / "bare", "train_images")


@pytest.mark.parametrize("options", [
    {"image_size": 0}, {"image_size": 2.5}, {"validation_fraction": 0}, {"validation_fraction": 1},
    {"validation_fraction": float("nan")},
])
def test_senseless_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        data.leaves(**options)


# ----------------------------------------------------------------------- the real thing


def test_real_leaves():
    folder = os.environ.get("COURSE_DATA")
    packed = Path(folder or "") / "plantvillage5.zip"
    if folder is None or not packed.is_file():
        pytest.skip("COURSE_DATA names no folder with plantvillage5.zip")
    part = data.leaves(packed, image_size=32)
    rest = data.leaves(packed, image_size=32, train=False)
    assert torch.bincount(part.labels).tolist() == [80] * 5
    assert torch.bincount(rest.labels).tolist() == [20] * 5
    assert part.classes[1] == "potato_early_blight"
    held = [name.removeprefix("pepper_bell_bacterial_spot/") for name in rest.names[:2]]
    assert held == ["005.jpg", "008.jpg"]
