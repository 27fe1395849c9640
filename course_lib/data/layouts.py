"""Where the images of a data set are, and of which class each is.

Six layouts are known, in a folder or in a zip of one:

* cassava's, as Kaggle ships it: `train.csv` with the columns `image_id` and `label`, the images in
  `train_images`, and perhaps the classes' names in `label_num_to_disease_map.json`;
* one folder for each class, as `torchvision.datasets.ImageFolder` reads it;
* two such folders, `train` and `val` (or `valid`, `validation`, `test`): the set's own split;
* Tiny-ImageNet's: `train` is such a folder, and `val` has all its images in `images`, the class of
  each in `val_annotations.txt`; `words.txt` may say what classes are called;
* ImageNet-1K's, its `val` flat and a list beside it, and Places-365's: `listed` tells how.

What is in a folder twice, by a link or as a second member of that name, counts once.
"""

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import NamedTuple

from . import files, listed
from .files import DataError

TABLE, IMAGES = "train.csv", "train_images"
CLASS_NAMES = "label_num_to_disease_map.json"
COLUMNS = ("image_id", "label")
#: The folders of a set that is split already; of several to validate with, the first is taken.
TRAINING, VALIDATION = "train", ("val", "valid", "validation", "test")
#: Tiny-ImageNet's files.
ANNOTATIONS, ANNOTATED = "val_annotations.txt", "images"
EXPECTED = (
    f"Expected a folder (or a zip of one) that holds {TABLE} beside {IMAGES}, or one folder of "
    f"images for each class, or folders {TRAINING} and {VALIDATION[0]} of such folders."
)


class Found(NamedTuple):
    """What `find` found: class names, [(name, label, file)] in order of the names, and the split.

    held  the names that the set itself keeps for validation, or None where it has no split
    """

    classes: list
    items: list
    held: frozenset | None


def find(root):
    """`Found` of the data set at `root`.

    A name is the file's path under `root`, the same in a folder and in a zip of it;
    `files.content` reads a file.
    """
    try:
        found = _find(root)
    except OSError as error:
        raise DataError(f"{root} cannot be read ({error}).") from error
    members = [[] for _ in found.classes]
    for name, label, _ in found.items:
        members[label].append(name)
    for name, of_class in zip(found.classes, members, strict=True):
        _require_enough(root, name, of_class, found)
    return found


def _find(root):
    top = _below_wrappers(_open(Path(root).expanduser()))
    held = None
    if (top / files.KAGGLE).is_dir():
        top = top / files.KAGGLE
    if (top / TABLE).is_file():
        classes, items = _by_table(top)
    elif (top / listed.CATEGORIES).is_file():
        classes, items, held = listed.places365(top)
    elif (parts := _parts(top)) is not None:
        split = listed.by_list if listed.is_flat(parts[1]) else _by_parts
        split = _by_annotations if _annotated(parts[1]) else split
        classes, items, held = split(top, *parts, root)
    else:
        classes, items = _by_folder(top, root)
    return Found(classes, sorted(items, key=lambda item: item[0]), held)


def _require_enough(root, name, members, found):
    if found.held is not None:
        n_held = sum(member in found.held for member in members)
        if not 0 < n_held < len(members):
            part = "train on" if n_held else "validate with"
            raise DataError(
                f"The class {name!r} of {root} has no image to {part}: add some, or remove it."
            )
    elif len(members) < 2:
        held = f"only {members[0]}" if members else "no image"
        raise DataError(
            f"The class {name!r} of {root} has {held}. It needs two images at least, one to "
            "train on and one to validate with: add images, or remove the class."
        )


def _open(root):
    if root.is_dir():
        return root
    if not root.exists():
        raise DataError(f"There is no {root}. {EXPECTED}")
    if not root.is_file() or not zipfile.is_zipfile(root):
        raise DataError(f"{root} is neither a folder nor a whole zip file. {EXPECTED}")
    try:
        return zipfile.Path(root)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DataError(f"{root} is no whole zip file ({error}). {EXPECTED}") from None


def _below_wrappers(top):
    """The folder that holds the layout; archives often wrap it in a folder of their own."""
    while not _has_table(top):
        folders = files.folders_in(top)
        if len(folders) != 1 or not files.folders_in(folders[0]) and not _has_table(folders[0]):
            break
        [top] = folders
    return top


def _has_table(folder):
    return any((folder / name).is_file() for name in (TABLE, listed.CATEGORIES))


def _parts(top):
    """The folders (to train on, to validate with) of a set that is split already, or None."""
    folders = {folder.name.lower(): folder for folder in files.folders_in(top)}
    folders = {name: folder for name, folder in folders.items() if files.DEVKIT not in name}
    known = {TRAINING, *VALIDATION}
    if TRAINING not in folders or len(folders) < 2 or not folders.keys() <= known:
        return None
    held = next(folders[name] for name in VALIDATION if name in folders)
    return folders[TRAINING], held


def _by_parts(top, training, held, root):
    classes = [folder.name for folder in files.folders_in(training)]
    emptied = held / ANNOTATED if ANNOTATED not in classes else None
    held_folders = files.folders_in(held)
    if emptied in held_folders and not any(emptied.iterdir()):
        held_folders.remove(emptied)
    others = [folder.name for folder in held_folders]
    if len(classes) < 2 or classes != others:
        raise DataError(
            f"{root} has the folders {training.name} and {held.name}, so both must hold the same "
            f"folders, one for each class: {_listed(training, classes)}, and "
            f"{_listed(held, others)}."
        )
    seen = {files.real_path(part) for part in (top, training, held)}
    items = [
        (f"{part.name}/{name}", label, file)
        for part, folders in ((training, files.folders_in(training)), (held, held_folders))
        for name, label, file in files.by_classes(folders, seen)
    ]
    held_names = frozenset(item[0] for item in items if item[0].startswith(f"{held.name}/"))
    return files.in_words(top, classes), items, held_names


def _annotated(held):
    """Whether the folder to validate with is one of Tiny-ImageNet's, whole or not.

    Scripts that move its images into a folder for each class leave the table behind.
    """
    there = [folder.name for folder in files.folders_in(held)]
    return there == [ANNOTATED] or not there and (held / ANNOTATIONS).is_file()


def _by_annotations(top, training, held, root):
    table, images = held / ANNOTATIONS, held / ANNOTATED
    if not table.is_file():
        raise DataError(f"{images} has no {ANNOTATIONS} beside it, which tells classes: add it.")
    if not images.is_dir():
        raise DataError(f"{table} has no folder {ANNOTATED} beside it: unpack the images there.")
    folders = files.folders_in(training)
    numbers = [folder.name for folder in folders]
    if len(numbers) < 2:
        raise DataError(f"{training} must hold a folder for each of two classes or more.")
    seen = {files.real_path(part) for part in (top, training, held)}
    items = [
        (f"{training.name}/{name}", label, file)
        for name, label, file in files.by_classes(folders, seen)
    ]
    present = {item.name: item for item in images.iterdir()}
    labels, held_names = {name: label for label, name in enumerate(numbers)}, {}
    for line, text in enumerate(files.text_of(table).splitlines(), 1):
        name, _, rest = text.partition("\t")
        number, place = rest.partition("\t")[0].strip(), f"{table}, line {line}"
        if not text.strip():
            continue
        if number not in labels:
            raise DataError(
                f"{place} names the class {number!r}, of which {training} has no folder: mend the "
                "line, or add the images to train on."
            )
        if name not in present:
            raise DataError(f"{place} names {name!r}, which {images} does not hold: add the file.")
        if name in held_names:
            raise DataError(f"{place} names {name!r} a second time: keep one of the two lines.")
        held_names[name] = f"{held.name}/{name}"
        items.append((held_names[name], labels[number], present[name]))
    left = sorted(
        name for name in present.keys() - held_names if name.lower().endswith(files.IMAGE_FILES)
    )
    if left:
        raise DataError(f"{table} has no line for {left[0]}, which {images} holds: add its class.")
    return files.in_words(top, numbers), items, frozenset(held_names.values())


def _listed(folder, names):
    several = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    return f"{folder.name} holds {several or 'none'}"


def _by_folder(top, root):
    folders = files.folders_in(top)
    if not folders:
        raise DataError(f"{root} holds no folder of images. {EXPECTED}")
    if len(folders) == 1:
        raise DataError(f"{root} holds one class only, {folders[0].name!r}. {EXPECTED}")
    seen = {files.real_path(top)}
    return [folder.name for folder in folders], list(files.by_classes(folders, seen))


def _by_table(top):
    table, images = top / TABLE, top / IMAGES
    if not images.is_dir():
        raise DataError(f"{table} has no folder {IMAGES} beside it: unpack the images there.")
    reader = csv.DictReader(io.StringIO(files.text_of(table), newline=""))
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise DataError(
            f"{table} has no column {' and no column '.join(missing)}: its first line must name "
            f"{' and '.join(COLUMNS)}; it names {', '.join(reader.fieldnames or ['nothing'])}."
        )
    # One look into the folder; to ask for each file alone takes minutes in a zip.
    present = {item.name: item for item in images.iterdir()}
    found, numbers = {}, set()
    for row in _rows(reader, table):
        name, label = row["image_id"], row["label"]
        place = f"{table}, line {reader.line_num}"
        try:
            number = int(label)
        except (TypeError, ValueError):
            raise DataError(f"{place}: the label must be a whole number, not {label!r}.") from None
        if name not in present or not present[name].is_file():
            raise DataError(f"{place} names {name!r}, which {images} does not hold: add the file.")
        if name in found:
            raise DataError(f"{place} names {name!r} a second time: keep one of the two lines.")
        found[name] = number
        numbers.add(number)
    if len(numbers) < 2:
        raise DataError(f"{table} must name images of two classes or more, not {len(numbers)}.")
    labels = {number: label for label, number in enumerate(sorted(numbers))}
    names = _class_names(top / CLASS_NAMES)
    items = [(name, labels[number], present[name]) for name, number in found.items()]
    return [names.get(str(number), str(number)) for number in labels], items


def _rows(reader, table):
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"{table}, line {reader.line_num}: {error}. Mend the line.") from None


def _class_names(file):
    """{label as text: name}, empty where the file is not there."""
    if not file.is_file():
        return {}
    try:
        names = json.loads(files.text_of(file))
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not JSON ({error}): repair or remove it.") from None
    if not isinstance(names, dict):
        raise DataError(f'{file} must hold names by label, such as {{"0": "healthy"}}.')
    return {number: str(name) for number, name in names.items()}
