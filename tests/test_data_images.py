"""`data.images`: layouts, subsets, processes and the cache; and what is refused by name."""

import numpy as np
import pytest
import torch
from image_sets import NUMBERS, class_folders, picture, tiny_imagenet
from PIL import Image
from test_data import zipped

from course_lib import data
from course_lib.data import decoded


def test_tiny_imagenet_as_it_is_published(tmp_path):
    root = tiny_imagenet(tmp_path / "outer" / "tiny-imagenet-200")
    training, held = data.images(tmp_path / "outer", image_size=16)
    assert training.classes == held.classes == ("goldfish", "salamander", "bullfrog")
    assert training.images.shape == (18, 3, 16, 16) and training.images.dtype == torch.uint8
    assert torch.bincount(training.labels).tolist() == [6, 6, 6]
    assert torch.bincount(held.labels).tolist() == [2, 2, 2]
    for name, label in zip(training.names, training.labels.tolist(), strict=True):
        assert name.split("/")[1] == NUMBERS[label]
    lines = (root / "val" / "val_annotations.txt").read_text().splitlines()
    told = {line.split("\t")[0]: NUMBERS.index(line.split("\t")[1]) for line in lines}
    for name, label in zip(held.names, held.labels.tolist(), strict=True):
        assert told[name.removeprefix("val/")] == label
    packed = zipped(root, tmp_path / "set.zip")
    cached = {"cache": tmp_path / "cache"}
    for options in ({}, {"workers": 2}, cached, cached):
        for one, other in zip(
            data.images(packed, image_size=16, **options), (training, held), strict=True
        ):
            assert one.digest() == other.digest()
    leaf = data.leaves(root, image_size=16)  # one reader of layouts for all
    assert leaf.digest() == training.digest()


@pytest.mark.parametrize("emptied", ["removed", "left"])
def test_tiny_imagenet_with_its_validation_images_moved_into_folders(tmp_path, emptied):
    root = tiny_imagenet(tmp_path)
    expected = data.images(root, image_size=8)
    for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
        name, number, *_ = line.split("\t")
        folder = root / "val" / number / "images"
        folder.mkdir(parents=True, exist_ok=True)
        (root / "val" / "images" / name).rename(folder / name)
    if emptied == "removed":
        (root / "val" / "images").rmdir()
    for found, one in zip(data.images(root, image_size=8), expected, strict=True):
        assert found.classes == one.classes
        assert torch.equal(found.images, one.images) and torch.equal(found.labels, one.labels)


def test_classes_of_one_word_are_told_apart(tmp_path):
    root = tiny_imagenet(tmp_path)
    words = (root / "words.txt").read_text().replace("bullfrog", "goldfish")
    (root / "words.txt").write_text(words)
    names = f"goldfish ({NUMBERS[0]})", "salamander", f"goldfish ({NUMBERS[2]})"
    assert data.images(root, image_size=8)[0].classes == names
    (root / "words.txt").unlink()
    assert data.images(root, image_size=8)[0].classes == NUMBERS


def without_annotations(root):
    (root / "val" / "val_annotations.txt").unlink()


def unknown_class(root):
    table = root / "val" / "val_annotations.txt"
    table.write_text(table.read_text().replace(NUMBERS[1], "n99999999", 1))


def unknown_image(root):
    (root / "val" / "images" / "val_3.JPEG").unlink()


def image_without_line(root):
    picture(root / "val" / "images" / "val_77.JPEG", 1)


def line_twice(root):
    table = root / "val" / "val_annotations.txt"
    table.write_text(table.read_text() + table.read_text().splitlines()[0] + "\n")


def class_without_images(root):
    for file in (root / "train" / NUMBERS[2] / "images").iterdir():
        file.unlink()


def cut_short(root):
    file = root / "train" / NUMBERS[0] / "images" / f"{NUMBERS[0]}_2.JPEG"
    file.write_bytes(file.read_bytes()[:200])


def no_image(root):
    (root / "val" / "images" / "val_1.JPEG").write_text("no image")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("spoil, words", [
    (without_annotations, "has no val_annotations.txt beside it"),
    (unknown_class, "val_annotations.txt, line 3 names the class 'n99999999', of which"),
    (unknown_image, "line 4 names 'val_3.JPEG', which .* does not hold"),
    (image_without_line, "has no line for val_77.JPEG"),
    (line_twice, "line 7 names 'val_0.JPEG' a second time"),
    (class_without_images, "The class 'bullfrog' of .* has no image to train on"),
    (cut_short, "n01443537_2.JPEG is no whole image"),
    (no_image, "val_1.JPEG is no whole image"),
])
def test_what_is_wrong_is_told_with_its_place(tmp_path, spoil, words, workers):
    if workers and spoil not in (cut_short, no_image):
        return  # found before a process starts
    root = tiny_imagenet(tmp_path)
    spoil(root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(data.DataError, match=words):
        data.images(root, image_size=16, workers=workers, cache=tmp_path.parent / "cache")
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_processes_decode_what_threads_decode(tmp_path, monkeypatch):
    monkeypatch.setattr(decoded, "CHUNK", 4)  # several chunks, the last one short
    root, bars = tiny_imagenet(tmp_path), []

    class Bar:
        def __init__(self, **options):
            bars.append([options["total"], 0])

        def update(self, n):
            bars[-1][1] += n

        def close(self):
            pass

    one = data.images(root, image_size=12, workers=0)
    other = data.images(root, image_size=12, workers=2, progress=Bar)
    assert [part.digest() for part in one] == [part.digest() for part in other]
    assert bars == [[24, 24]]


@pytest.mark.parametrize("mode, form", [
    ("L", "png"), ("CMYK", "jpg"), ("P", "png"), ("RGBA", "png"), ("1", "png"), ("I;16", "png"),
])
def test_images_of_any_kind_become_red_green_and_blue(tmp_path, mode, form):
    root = class_folders(tmp_path, per_class=2)
    if mode == "I;16":
        grey = Image.fromarray(np.full((16, 16), 40_000, np.uint16))
    else:
        grey = Image.new("RGB", (16, 16), (156, 156, 156))
        grey = grey.quantize() if mode == "P" else grey.convert(mode)
    grey.save(root / "red" / f"odd.{form}")
    part = next(p for p in data.images(root, image_size=8) if f"red/odd.{form}" in p.names)
    image = part.images[part.names.index(f"red/odd.{form}")]
    if mode != "1":
        assert (image.int() - 156).abs().max() <= 4
    assert torch.equal(image[0], image[1])


def test_a_subset_is_classes_or_a_share(tmp_path):
    root = tiny_imagenet(tmp_path)
    training, held = data.images(root, image_size=8, subset=2)
    assert training.classes == ("goldfish", "salamander") and len(training) == 12
    assert held.labels.max() == 1 and len(held) == 4
    training, held = data.images(root, image_size=8, subset=0.5)
    assert torch.bincount(training.labels).tolist() == [3, 3, 3] and len(held) == 6
    again, _ = data.images(root, image_size=8, subset=0.5)
    other, _ = data.images(root, image_size=8, subset=0.5, seed=1)
    assert training.names == again.names and training.names != other.names
    for wrong in (0, 1, -2, 2.5, float("nan")):
        with pytest.raises(ValueError, match="load_subset must be a number of classes"):
            data.images(root, subset=wrong)
    with pytest.raises(ValueError, match="asks for 4 classes, and the set has 3"):
        data.images(root, subset=4)


def test_the_cache_is_used_and_dropped_when_a_file_changes(tmp_path, monkeypatch):
    root, cache = tiny_imagenet(tmp_path / "set"), tmp_path / "cache"
    first = data.images(root, image_size=8, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(decoded, "decoded", None)  # not callable: nothing is decoded again
        again = data.images(root, image_size=8, cache=cache)
        with pytest.raises(TypeError):
            data.images(root, image_size=9, cache=cache)
    assert [part.digest() for part in first] == [part.digest() for part in again]
    picture(root / "val" / "images" / "val_0.JPEG", 5, size=17)
    changed = data.images(root, image_size=8, cache=cache)
    assert changed[1].digest() != first[1].digest() and len(list(cache.iterdir())) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(data.DataError, match="cannot be used"):
        data.images(root, image_size=8, cache=tmp_path / "file")


def test_a_spoilt_cache_is_told(tmp_path):
    root, cache = tiny_imagenet(tmp_path / "set"), tmp_path / "cache"
    data.images(root, image_size=8, cache=cache)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(data.DataError, match="cannot be used .*: remove it, or name another"):
        data.images(root, image_size=8, cache=cache)


def test_many_images_are_decoded_by_all_cores(tmp_path, monkeypatch):
    root, asked, real = tiny_imagenet(tmp_path), [], decoded.decoded_by_processes

    def spy(*given, workers, **options):
        asked.append(workers)
        return real(*given, workers=1, **options)

    monkeypatch.setattr(decoded, "decoded_by_processes", spy)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(48), raising=False)
    data.images(root, image_size=8)
    assert asked == []  # so few that threads are faster
    monkeypatch.setitem(data.images.__globals__, "FEW", 5)
    data.images(root, image_size=8)
    assert asked == [32]


class Cifar:
    """What `torchvision.datasets.CIFAR100` gives."""

    classes = ["apple", "bear"]

    def __init__(self, root, train, download):
        if not download:
            raise RuntimeError("Dataset not found or corrupted.")
        self.targets = [0, 1, 1]
        self.data = np.full((3, 32, 32, 3), 7 if train else 9, np.uint8)


def test_cifar_100_comes_through_torchvision(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR100", Cifar)
    training, held = data.images("cifar100", downloads=tmp_path, download=True)
    assert training.images.shape == (3, 3, 32, 32) and (training.images == 7).all()
    assert (held.images == 9).all() and held.labels.tolist() == [0, 1, 1]
    assert training.classes == ("apple", "bear")
    with pytest.raises(data.DataError, match="no whole CIFAR-100 .*: add --download"):
        data.images("cifar100", downloads=tmp_path)


def test_a_set_of_its_own_and_a_seeded_split(tmp_path):
    training, held = data.images(image_size=8)
    assert training.digest() == data.leaves(image_size=8).digest() and len(held) == 100
    root = class_folders(tmp_path)
    one, other = (data.images(root, image_size=8, seed=seed) for seed in (0, 1))
    assert len(one[0]) == 16 and len(one[1]) == 4
    assert one[1].names != other[1].names
    with pytest.raises(data.DataError, match="There is no"):
        data.images(tmp_path / "absent")
    with pytest.raises(data.DataError, match="take 600.* GB"):
        data.images(root, image_size=100_000)
