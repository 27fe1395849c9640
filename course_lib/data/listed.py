"""Layouts that list classes: ImageNet-1K's `val`, all images in one folder, and Places-365's.

ImageNet-1K's list is one of `LISTS`, beside the images, in the folder above, in the devkit, or
where Kaggle has put it. Its lines name an image and its class, or only the class, in order of the
images' names. The class is a folder of `train`, or the place of one, from 0.

Places-365 has `CATEGORIES`, a list of the images to train on and one of those to validate with.
"""

import re

from . import files
from .files import DataError

#: The list of Kaggle, of TensorFlow's scripts, of Caffe's, and the devkit's own.
LISTS = (
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "val.txt",
    "ILSVRC2012_validation_ground_truth.txt",
)
DEVKIT, META = LISTS[3], "meta.mat"
CATEGORIES = "categories_places365.txt"
#: Of Places-365: (list, folders it may be of) of the images to train on, and to validate with.
STANDARD = (
    "places365_train_standard.txt",
    ("data_256_standard", "data_256", "data_large_standard", "data_large"),
)
CHALLENGE = (
    "places365_train_challenge.txt",
    ("data_256_challenge", "data_large_challenge", "data_256", "data_large"),
)
HELD = "places365_val.txt", ("val_256", "val_large")


def is_flat(held):
    """Whether the folder to validate with has images and no folders."""
    names = (item.name.lower() for item in held.iterdir() if item.is_file())
    return not files.folders_in(held) and any(name.endswith(files.IMAGE_FILES) for name in names)


def by_list(top, training, held, root):
    """(classes, items, names of those to validate with) of ImageNet-1K, its `val` flat."""
    folders = files.folders_in(training)
    numbers = [folder.name for folder in folders]
    if len(numbers) < 2:
        raise DataError(f"{training} must hold a folder for each of two classes or more.")
    images = {
        item.name: item
        for item in sorted(held.iterdir(), key=lambda item: item.name)
        if item.name.lower().endswith(files.IMAGE_FILES)
    }
    places = [held, *files.around(top)]
    table = next((f for name in LISTS for p in places if (f := p / name).is_file()), None)
    if table is None:
        raise DataError(
            f"{held} holds images and no folder for each class, so a list must tell their classes: "
            f"put {', '.join(LISTS[:-1])} or {LISTS[-1]} into {top}."
        )
    labels = _labels(table, images, numbers)
    seen = {files.real_path(part) for part in (top, training, held)}
    items = [
        (f"{training.name}/{name}", label, file)
        for name, label, file in files.by_classes(folders, seen)
    ]
    found = {f"{held.name}/{name}": (label, images[name]) for name, label in labels.items()}
    items += [(name, *rest) for name, rest in found.items()]
    return files.in_words(top, numbers), items, frozenset(found)


def _labels(table, images, numbers):
    """{name of an image: its label} as the list `table` tells."""
    known = {number: label for label, number in enumerate(numbers)}
    if table.name == DEVKIT:
        known = _of_devkit(table, known)
    elif not known.keys() & {str(label) for label in range(len(numbers))}:
        known |= {str(label): label for label in range(len(numbers))}
    stems, in_order = {name.rpartition(".")[0]: name for name in images}, iter(images)
    labels = {}
    for line, text in enumerate(files.text_of(table).splitlines(), 1):
        words, place = re.split(r"[,\s]+", text.strip()), f"{table}, line {line}"
        if words in ([""], ["ImageId", "PredictionString"]):
            continue
        if len(words) == 1:
            name = next(in_order, None)
            if name is None:
                raise DataError(f"{place} is of no image: there are {len(images)}. Mend the list.")
        else:
            name = words.pop(0)
            name = stems.get(name, name)
        if name not in images:
            raise DataError(f"{place} names {name!r}, which is not among the images: add the file.")
        if name in labels:
            raise DataError(f"{place} names {name!r} a second time: keep one of the two lines.")
        if words[0] not in known:
            raise DataError(f"{place} names the class {words[0]!r}, which is not to train on.")
        labels[name] = known[words[0]]
    left = sorted(images.keys() - labels.keys())
    if left:
        raise DataError(f"{table} has no line for {left[0]}: mend the list.")
    return labels


def _of_devkit(table, known):
    """{the devkit's own number of a class: its label}, by the table of both that lies beside it."""
    meta = table.parent / META
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError(
            f"{table} numbers classes as {META} does, which takes SciPy to read: install scipy, or "
            f"put {LISTS[0]} there instead."
        ) from None
    try:
        rows = loadmat(str(meta), squeeze_me=True)["synsets"]
        return {str(int(row[0])): known[str(row[1])] for row in rows if str(row[1]) in known}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{meta} cannot be read ({error}): put back the devkit's.") from None


def places365(top):
    """(classes, items, names of those to validate with) of Places-365 as it is published."""
    classes, labels = [], {}
    for place, (name, number) in _pairs(top / CATEGORIES):
        if not number.isdecimal() or int(number) != len(classes):
            raise DataError(f"{place} must number the class {len(classes)}, not {number!r}.")
        labels[number] = len(classes)
        classes.append(re.sub("^/./", "", name))
    training = STANDARD if (top / STANDARD[0]).is_file() else CHALLENGE
    items, held = [], []
    for (table, folders), into in ((training, items), (HELD, held)):
        if not (top / table).is_file():
            raise DataError(f"{top} has {CATEGORIES} and no {table}: add it.")
        folder = next((f for name in folders if (f := top / name).is_dir()), None)
        if folder is None:
            raise DataError(f"{top} has none of the folders {', '.join(folders)}: unpack one.")
        present = {}
        for place, (name, number) in _pairs(top / table):
            *way, name = name.strip("/").split("/")
            way = "/".join(way)
            if way not in present:
                inside = folder / way if way else folder
                there = inside.iterdir() if inside.is_dir() else ()
                present[way] = {item.name: item for item in there}
            if name not in present[way]:
                raise DataError(f"{place} names {name!r}, which {folder / way} does not hold.")
            if number not in labels:
                raise DataError(f"{place} names the class {number}: there are {len(classes)}.")
            called = "/".join(filter(None, (folder.name, way, name)))
            into.append((called, labels[number], present[way][name]))
    return classes, items + held, frozenset(name for name, *_ in held)


def _pairs(table):
    """(where it is, the two words) of each line of a list."""
    for line, text in enumerate(files.text_of(table).splitlines(), 1):
        if text.strip():
            words = text.split()
            if len(words) != 2:
                raise DataError(f"{table}, line {line}: expected a name and a number, not {text!r}")
            yield f"{table}, line {line}", words
