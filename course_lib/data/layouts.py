"""Where the images of a data set are, and of which class each is.

Two layouts are known, in a folder or in a zip of one:

* cassava's, as Kaggle ships it: `train.csv` with the columns `image_id` and `label`, the images in
  `train_images`, and perhaps the classes' names in `label_num_to_disease_map.json`;
* one folder for each class, as `torchvision.datasets.ImageFolder` reads it.
"""

import csv
import io
import json
import zipfile
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

TABLE, IMAGES = "train.csv", "train_images"
CLASS_NAMES = "label_num_to_disease_map.json"
COLUMNS = ("image_id", "label")
EXPECTED = (
    f"Expected a folder (or a zip of one) that holds {TABLE} beside {IMAGES}, or one folder of "
    "images for each class."
)


class DataError(ValueError):
    """A data set that cannot be used; the message names the file and what to do."""


def find(root):
    """(class names, [(name, label, file)]) of the data set at `root`, in order of the names.

    A name is the file's path under `root`, the same in a folder and in a zip of it; a file has
    `read_bytes`.
    """
    top = _below_wrappers(_open(Path(root).expanduser()))
    if (top / TABLE).is_file():
        classes, found = _by_table(top)
    else:
        classes, found = _by_folder(top, root)
    for label, name in enumerate(classes):
        members = [item[0] for item in found if item[1] == label]
        if len(members) < 2:
            held = f"only {members[0]}" if members else "no image"
            raise DataError(
                f"The class {name!r} of {root} has {held}. It needs two images at least, one to "
                "train on and one to validate with: add images, or remove the class."
            )
    return classes, sorted(found, key=lambda item: item[0])


def _open(root):
    if root.is_dir():
        return root
    if not root.exists():
        raise DataError(f"There is no {root}. {EXPECTED}")
    if not zipfile.is_zipfile(root):
        raise DataError(f"{root} is neither a folder nor a whole zip file. {EXPECTED}")
    return zipfile.Path(root)


def _below_wrappers(top):
    """The folder that holds the layout; archives often wrap it in a folder of their own."""
    while not (top / TABLE).is_file():
        folders = _folders(top)
        if len(folders) != 1 or not _folders(folders[0]) and not (folders[0] / TABLE).is_file():
            break
        [top] = folders
    return top


def _folders(folder):
    """Its folders by name, without hidden ones and those that macOS adds to a zip."""
    inside = (item for item in folder.iterdir() if item.is_dir())
    wanted = (item for item in inside if not item.name.startswith((".", "__")))
    return sorted(wanted, key=lambda item: item.name)


def _images(folder, prefix):
    """(name, file) of every image in `folder` and the folders in it."""
    for item in folder.iterdir():
        if item.name.startswith("."):
            continue
        if item.is_dir():
            yield from _images(item, f"{prefix}/{item.name}")
        elif item.name.lower().endswith(IMG_EXTENSIONS):
            yield f"{prefix}/{item.name}", item


def _by_folder(top, root):
    folders = _folders(top)
    if not folders:
        raise DataError(f"{root} holds no folder of images. {EXPECTED}")
    if len(folders) == 1:
        raise DataError(f"{root} holds one class only, {folders[0].name!r}. {EXPECTED}")
    found = [
        (name, label, file)
        for label, folder in enumerate(folders)
        for name, file in _images(folder, folder.name)
    ]
    return [folder.name for folder in folders], found


def _by_table(top):
    table, images = top / TABLE, top / IMAGES
    if not images.is_dir():
        raise DataError(f"{table} has no folder {IMAGES} beside it: unpack the images there.")
    reader = csv.DictReader(io.StringIO(_text(table), newline=""))
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
        if name not in present:
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
        names = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not JSON ({error}): repair or remove it.") from None
    if not isinstance(names, dict):
        raise DataError(f'{file} must hold names by label, such as {{"0": "healthy"}}.')
    return {number: str(name) for number, name in names.items()}


def _text(file):
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error}): save it as UTF-8.") from None
