"""ImageNet-1K and Places-365 as they are published: a list tells which image is of which class."""

import sys
import types

import numpy as np
import pytest
import torch
from image_sets import NUMBERS, WORDS, picture
from test_data import zipped

from course_lib import data

HELD = [f"ILSVRC2012_val_{number:08}" for number in range(1, 7)]
LABELS = [2, 0, 1, 1, 0, 2]  # of the images in `val`, in order
NAMES = "goldfish", "salamander", "bullfrog"


def imagenet(root):
    for label, number in enumerate(NUMBERS):
        for i in range(3):
            picture(root / "train" / number / f"{number}_{i}.JPEG", 10 * i + label)
    for name, label in zip(HELD, LABELS, strict=True):
        picture(root / "val" / f"{name}.JPEG", 1000 + label)
    (root / "test").mkdir()  # has images without a class
    words = "".join(f"{n} {word}\n" for n, word in zip(NUMBERS, WORDS, strict=True))
    (root / "LOC_synset_mapping.txt").write_text(words)
    return root


def kaggle(root):
    top = imagenet(root / "ILSVRC" / "Data" / "CLS-LOC")
    (root / "ILSVRC" / "Annotations").mkdir()
    (top / "LOC_synset_mapping.txt").rename(root / "LOC_synset_mapping.txt")
    lines = [f"{n},{NUMBERS[i]} 1 2 3 4 \n" for n, i in zip(HELD, LABELS, strict=True)]
    table = root / "LOC_val_solution.csv"
    table.write_text("ImageId,PredictionString\n" + "".join(reversed(lines)))
    return root


def caffe(root):
    lines = [f"{n}.JPEG {i}\n" for n, i in zip(HELD, LABELS, strict=True)]
    (imagenet(root) / "val.txt").write_text("".join(lines))
    return root


def synsets(root):
    table = imagenet(root) / "val" / "imagenet_2012_validation_synset_labels.txt"
    table.write_text("".join(f"{NUMBERS[i]}\n" for i in LABELS))
    return root


def devkit(root):
    """The devkit numbers classes in an order of its own, and has more of them."""
    folder = imagenet(root) / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    (folder / "meta.mat").write_bytes(b"read by a stand-in")
    table = folder / "ILSVRC2012_validation_ground_truth.txt"
    table.write_text("".join(f"{(30, 10, 20)[i]}\n" for i in LABELS))
    return root


def loadmat(path, squeeze_me):
    """What SciPy's gives of the devkit's table."""
    assert open(path, "rb").read() == b"read by a stand-in" and squeeze_me
    rows = [(10, NUMBERS[1]), (20, NUMBERS[2]), (30, NUMBERS[0]), (1001, "n00001740")]
    return {"synsets": np.array(rows, dtype=[("ID", "i4"), ("WNID", "U9")])}


def with_scipy(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "scipy", types.ModuleType("scipy"))
    monkeypatch.setitem(sys.modules, "scipy.io", found)


@pytest.mark.parametrize("layout", [kaggle, caffe, synsets, devkit])
@pytest.mark.parametrize("pack", [False, True])
def test_imagenet_with_its_images_to_validate_in_one_folder(tmp_path, monkeypatch, layout, pack):
    scipy = types.ModuleType("scipy.io")
    scipy.loadmat = loadmat
    with_scipy(monkeypatch, scipy)
    root = layout(tmp_path / "set")
    if pack and layout is devkit:
        return  # SciPy reads no file in a zip
    training, held = data.images(zipped(root, tmp_path / "s.zip") if pack else root, image_size=8)
    assert training.classes == held.classes == NAMES
    assert training.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert held.labels.tolist() == LABELS and held.names == tuple(f"val/{n}.JPEG" for n in HELD)
    means = torch.stack([training.images[3 * i].float().mean((1, 2)) for i in range(3)])
    for image, label in zip(held.images, LABELS, strict=True):  # each class has its colour
        assert (means - image.float().mean((1, 2))).abs().sum(1).argmin() == label


def test_imagenet_with_its_images_to_validate_in_folders(tmp_path):
    root = devkit(tmp_path)
    for name, label in zip(HELD, LABELS, strict=True):
        (root / "val" / NUMBERS[label]).mkdir(exist_ok=True)
        (root / "val" / f"{name}.JPEG").rename(root / "val" / NUMBERS[label] / f"{name}.JPEG")
    training, held = data.images(root, image_size=8)
    assert held.labels.tolist() == sorted(LABELS) and training.classes == NAMES


def places(root):
    """Places-365's files and folders, with three of its classes."""
    classes = "/a/airfield", "/a/apartment_building/outdoor", "/b/bakery/shop"
    rows = {"train": [], "val": []}
    for label, name in enumerate(classes):
        for i in range(2):
            rows["train"].append(f"{name}/{i:08}.jpg {label}\n")
            picture(root / "data_256" / f"{name[1:]}/{i:08}.jpg", 10 * i + label)
        rows["val"].append(f"Places365_val_{9 - label:08}.jpg {label}\n")
        picture(root / "val_256" / f"Places365_val_{9 - label:08}.jpg", 100 + label)
    (root / "categories_places365.txt").write_text(
        "".join(f"{name} {label}\n" for label, name in enumerate(classes))
    )
    (root / "places365_train_standard.txt").write_text("".join(rows["train"]))
    (root / "places365_val.txt").write_text("".join(rows["val"]))
    return root


@pytest.mark.parametrize("kind", ["standard", "challenge", "packed"])
def test_places_as_it_is_published(tmp_path, kind):
    root = places(tmp_path / "set")
    if kind == "challenge":
        table = root / "places365_train_standard.txt"
        table.rename(root / "places365_train_challenge.txt")
    root = zipped(root, tmp_path / "set.zip") if kind == "packed" else root
    training, held = data.images(root, image_size=8)
    assert training.classes == ("airfield", "apartment_building/outdoor", "bakery/shop")
    assert training.labels.tolist() == [0, 0, 1, 1, 2, 2] and held.labels.tolist() == [2, 1, 0]
    assert training.names[2] == "data_256/a/apartment_building/outdoor/00000000.jpg"
    assert held.names[0] == "val_256/Places365_val_00000007.jpg"


def changed(name, old, new):
    def change(root):
        file = next(root.rglob(name))
        file.write_text(file.read_text().replace(old, new, 1))
    return change


def without(name):
    return lambda root: next(root.rglob(name)).unlink()


@pytest.mark.parametrize("layout, spoil, words", [
    (caffe, without("val.txt"), "a list must tell their classes: put LOC_val_solution.csv, "),
    (caffe, without(f"{HELD[3]}.JPEG"), f"val.txt, line 4 names '{HELD[3]}.JPEG', which is not"),
    (caffe, changed("val.txt", f"{HELD[1]}.JPEG 0\n", ""), f"no line for {HELD[1]}.JPEG"),
    (caffe, changed("val.txt", HELD[1], HELD[0]), "line 2 names .* a second time"),
    (caffe, changed("val.txt", " 2", " 3"), "line 1 names the class '3', which is not"),
    (synsets, changed("*labels.txt", "\n", f"\n{NUMBERS[0]}\n"), "line 7 is of no image: there"),
    (kaggle, changed("LOC_val*", NUMBERS[0], "n0"), "line 3 names the class 'n0'"),
    (devkit, without("meta.mat"), "meta.mat cannot be read"),
    (places, without("places365_val.txt"), "and no places365_val.txt: add it"),
    (places, without("Places365_val_00000008.jpg"), "places365_val.txt, line 2 names 'Places"),
    (places, changed("places365_val.txt", " 2", " 7"), "line 3 names the class 7: there are 3"),
    (places, changed("categories*", " 1", " 4"), "line 2 must number the class 1, not '4'"),
    (places, changed("places365_val.txt", " 0", ""), "line 1: expected a name and a number"),
    (places, lambda root: (root / "val_256").rename(root / "val_128"), "none of the folders val_2"),
])
def test_what_a_list_lacks_is_told(tmp_path, monkeypatch, layout, spoil, words):
    scipy = types.ModuleType("scipy.io")
    scipy.loadmat = loadmat
    with_scipy(monkeypatch, scipy)
    root = layout(tmp_path)
    spoil(root)
    with pytest.raises(data.DataError, match=words):
        data.images(root, image_size=8)


def test_the_devkits_numbers_take_scipy(tmp_path, monkeypatch):
    with_scipy(monkeypatch, None)
    with pytest.raises(data.DataError, match="install scipy, or put LOC_val_solution.csv there"):
        data.images(devkit(tmp_path))
