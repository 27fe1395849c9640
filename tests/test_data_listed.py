"""ImageNet-1K and Places-365 as they are published: a list tells which image is of which class."""

import sys
import types

import pytest
from image_sets import NUMBERS, WORDS, picture
from test_data import zipped

from course_lib import data

HELD = [f"ILSVRC2012_val_{number:08}" for number in range(1, 7)]
LABELS = [2, 0, 1, 1, 0, 2]  # of the images in `val`, in order
SYNSETS = "imagenet_2012_validation_synset_labels.txt"
DEVKIT = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
PLACES = "/a/airfield", "/a/apartment_building/outdoor", "/b/bakery/shop"


def imagenet(table, line, top="", words="LOC_synset_mapping.txt"):
    """A maker of ImageNet's folders in `top`, with `line(i, n)` for each image in the list `table`:
    number i, of class n."""
    def make(root):
        for label, number in enumerate(NUMBERS):
            for i in range(2):
                picture(root / top / "train" / number / f"{number}_{i}.JPEG", 10 * i + label)
        for name, label in zip(HELD, LABELS, strict=True):
            picture(root / top / "val" / f"{name}.JPEG", 1000 + label)
        (root / top / "test").mkdir()  # whose images are of no class that is told
        (root / table).parent.mkdir(parents=True, exist_ok=True)
        lines = [line(*each) for each in enumerate(LABELS)]
        head = ["ImageId,PredictionString"] if table.endswith("csv") else []
        (root / table).write_text("\n".join(head + lines) + "\n")
        (root / words).write_text("".join(map("{} {}\n".format, NUMBERS, WORDS)))
        (root / table).with_name("meta.mat").write_text("read by a stand-in")
        return root
    return make


kaggle = imagenet("LOC_val_solution.csv", lambda i, n: f"{HELD[i]},{NUMBERS[n]} 1 2 3 4 ",
                  "ILSVRC/Data/CLS-LOC")  # fmt: skip
caffe = imagenet("val.txt", lambda i, n: f"{HELD[i]}.JPEG {n}", words="synset_words.txt")
synsets = imagenet(f"val/{SYNSETS}", lambda i, n: NUMBERS[n])
devkit = imagenet(DEVKIT, lambda i, n: str((30, 10, 20)[n]))  # numbered in an order of its own


@pytest.fixture(autouse=True)
def scipy(monkeypatch):
    """SciPy's reader, which gives what it gives of the devkit's table."""
    def loadmat(path, squeeze_me):
        assert open(path).read() == "read by a stand-in" and squeeze_me
        rows = (10, NUMBERS[1]), (20, NUMBERS[2]), (30, NUMBERS[0]), (1001, "n00001740")
        return {"synsets": rows}

    module = types.ModuleType("scipy.io")
    module.loadmat = loadmat
    monkeypatch.setitem(sys.modules, "scipy", types.ModuleType("scipy"))
    monkeypatch.setitem(sys.modules, "scipy.io", module)


@pytest.mark.parametrize("make, pack", [
    (kaggle, False), (kaggle, True), (caffe, False), (synsets, True), (devkit, False),
])
def test_imagenet_with_its_images_to_validate_in_one_folder(tmp_path, make, pack):
    root = make(tmp_path / "set")
    training, held = data.images(zipped(root, tmp_path / "s.zip") if pack else root, image_size=8)
    assert training.classes == held.classes == ("goldfish", "salamander", "bullfrog")
    assert training.labels.tolist() == [0, 0, 1, 1, 2, 2] and held.labels.tolist() == LABELS
    assert held.names == tuple(f"val/{name}.JPEG" for name in HELD)
    for image, label in zip(held.images, LABELS, strict=True):  # each class has its colour
        errors = (training.images[::2].float() - image.float()).mean((2, 3)).abs().sum(1)
        assert errors.argmin() == label


def test_imagenet_with_its_images_to_validate_in_folders(tmp_path):
    root = devkit(tmp_path)
    for name, label in zip(HELD, LABELS, strict=True):
        (root / "val" / NUMBERS[label]).mkdir(exist_ok=True)
        (root / "val" / f"{name}.JPEG").rename(root / "val" / NUMBERS[label] / f"{name}.JPEG")
    assert data.images(root, image_size=8)[1].labels.tolist() == sorted(LABELS)


def places(root):
    """Places-365's files and folders, with three of its classes."""
    training, held = "", ""
    for label, name in enumerate(PLACES):
        for i in range(2):
            training += f"{name}/{i:08}.jpg {label}\n"
            picture(root / "data_256" / f"{name[1:]}/{i:08}.jpg", 10 * i + label)
        held += f"Places365_val_{9 - label:08}.jpg {label}\n"
        picture(root / "val_256" / f"Places365_val_{9 - label:08}.jpg", 100 + label)
    (root / "categories_places365.txt").write_text("".join(
        f"{name} {label}\n" for label, name in enumerate(PLACES)
    ))
    (root / "places365_train_standard.txt").write_text(training)
    (root / "places365_val.txt").write_text(held)
    return root


@pytest.mark.parametrize("kind", ["challenge", "packed"])
def test_places_as_it_is_published(tmp_path, kind):
    root = places(tmp_path / "set")
    if kind == "challenge":
        table = root / "places365_train_standard.txt"
        table.rename(root / "places365_train_challenge.txt")
    training, held = data.images(
        zipped(root, tmp_path / "set.zip") if kind == "packed" else root, image_size=8
    )
    assert training.classes == ("airfield", "apartment_building/outdoor", "bakery/shop")
    assert training.labels.tolist() == [0, 0, 1, 1, 2, 2] and held.labels.tolist() == [2, 1, 0]
    assert training.names[2] == "data_256/a/apartment_building/outdoor/00000000.jpg"


@pytest.mark.parametrize("make, file, old, new, words", [
    (caffe, "val.txt", None, None, "a list must tell their classes: put LOC_val_solution.csv, "),
    (caffe, f"{HELD[3]}.*", None, None, f"val.txt, line 4 names '{HELD[3]}.JPEG', which is not"),
    (caffe, "val.txt", f"{HELD[1]}.JPEG 0\n", "", f"no line for {HELD[1]}.JPEG"),
    (caffe, "val.txt", HELD[1], HELD[0], "line 2 names .* a second time"),
    (caffe, "val.txt", " 2", " 3", "line 1 names the class '3', which is not"),
    (synsets, SYNSETS, "\n", f"\n{NUMBERS[0]}\n", "line 7 is of no image: there"),
    (kaggle, "LOC_val*", NUMBERS[0], "n0", "line 3 names the class 'n0'"),
    (devkit, "meta.mat", None, None, "meta.mat cannot be read"),
    (places, "places365_val.txt", None, None, "and no places365_val.txt: add it"),
    (places, "*_val_00000008.jpg", None, None, "places365_val.txt, line 2 names 'Places"),
    (places, "places365_val.txt", " 2", " 7", "line 3 names the class 7: there are 3"),
    (places, "categories*", " 1", " 4", "line 2 must number the class 1, not '4'"),
    (places, "places365_val.txt", " 0", "", "line 1: expected a name and a number"),
])
def test_what_a_list_lacks_is_told(tmp_path, make, file, old, new, words):
    file = next(make(tmp_path).rglob(file))
    if old is None:
        file.unlink()
    else:
        file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(data.DataError, match=words):
        data.images(tmp_path, image_size=8)


def test_the_devkits_numbers_take_scipy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(data.DataError, match="install scipy, or put LOC_val_solution.csv there"):
        data.images(devkit(tmp_path))
