"""Pairs of files, an image and its label: where they lie in a folder.

Three layouts are known:

* Sen1Floods11's chips: `S1Hand/<chip>_S1Hand.tif`, two bands in decibels, beside
  `LabelHand/<chip>_LabelHand.tif`, of −1 no data, 0 land and 1 water;
* `images/<scene>.npy` beside `labels/<scene>.npy`, or .png or .tif, each of either;
* both in one folder: `<scene>.png` or `<scene>_image.png` beside `<scene>_label.png`.
"""

import re
from pathlib import Path

from ..layouts import DataError
from . import files
from .source import Raw, Source

CHIPS = ("S1Hand", "LabelHand")
#: Where Sen1Floods11's folders lie below the folder that is named.
CHIPS_BELOW = ("", "HandLabeled", "data/flood_events/HandLabeled",
               "v1.1/data/flood_events/HandLabeled")  # fmt: skip
FOLDERS = ("images", "labels")
#: What a file's name ends in, or is; what stands before it is the scene's name.
LABEL_ENDING = re.compile(r"(?:(.*)[_-])?(?:label|labels|mask|gt)(?:2d)?", re.IGNORECASE)
IMAGE_ENDING = re.compile(r"(?:(.*)[_-])?(?:image|img)", re.IGNORECASE)
EXPECTED = (
    "expected S1Hand beside LabelHand, images beside labels, or a <scene>.png beside its "
    "<scene>_label.png (or .npy, or .tif)"
)


def source(images, labels=None, coloured=False):
    """The `Source` of a folder of pairs, or of one image file and its label file.

    labels    the folder of the labels, or the label file, where they are not found by a layout
    coloured  whether labels are colours
    """
    of_chips = False
    if labels is not None:
        labels = Path(labels).expanduser()
        if images.is_dir() != labels.is_dir():
            raise DataError(f"{images} and {labels} must be two folders or two files.")
        pairs = _in_two(images, labels) if images.is_dir() else [(images.stem, images, labels)]
    elif images.is_dir():
        pairs, of_chips = _in_folder(images)
    else:
        raise DataError(f"{images} is one file, and labels names no label file to go with it.")

    def read():
        for name, image, label in pairs:
            pixels, classes = files.image(image), files.label(label, coloured)
            yield Raw(name, pixels, classes, str(image), str(label))

    if of_chips:
        return Source(len(pairs), read, ("land", "water"), ("VV", "VH"))
    return Source(len(pairs), read)


def _in_folder(root):
    """([(scene, image, label)], whether it is Sen1Floods11's layout)."""
    for below in CHIPS_BELOW:
        first, second = (root / below / name for name in CHIPS)
        if first.is_dir() and second.is_dir():
            return _matched(_by_name(first, CHIPS[0]), _by_name(second, CHIPS[1]), root), True
    first, second = (root / name for name in FOLDERS)
    if first.is_dir() and second.is_dir():
        return _in_two(first, second), False
    images, labels = {}, {}
    for file in _listed(root):
        matched = LABEL_ENDING.fullmatch(file.stem)
        _add(labels if matched else images, _scene(file, matched, IMAGE_ENDING), file)
    return _matched(images, labels, root), False


def _in_two(images, labels):
    return _matched(_by_name(images, IMAGE_ENDING), _by_name(labels, LABEL_ENDING), images)


def _listed(folder):
    """The files that can be read, by name; hidden ones are none of the set's."""
    try:
        wanted = [file for file in folder.iterdir() if not file.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error}): see to its permissions.") from None
    return sorted(file for file in wanted if file.suffix.lower() in files.SUFFIXES)


def _by_name(folder, ending):
    """{scene: file} of `folder`."""
    if isinstance(ending, str):
        ending = re.compile(rf"(.+)_{ending}")
    found = {}
    for file in _listed(folder):
        _add(found, _scene(file, None, ending), file)
    return found


def _scene(file, matched, ending):
    """The scene that `file` is of: its name without the ending, or its folder's if that is all."""
    matched = matched or ending.fullmatch(file.stem)
    return (matched[1] or file.parent.name) if matched else file.stem


def _add(found, scene, file):
    if scene in found:
        raise DataError(f"{file} and {found[scene].name} are both of {scene!r}: keep one of them.")
    found[scene] = file


def _matched(images, labels, root):
    if not images and not labels:
        raise DataError(f"{root} holds no scenes: {EXPECTED}.")
    for scene in sorted(images.keys() ^ labels.keys()):
        has, lacks = ("image", "label") if scene in images else ("label", "image")
        file = images.get(scene) or labels.get(scene)
        raise DataError(f"{file} has no {lacks} to go with this {has}: {EXPECTED}.")
    return [(scene, images[scene], labels[scene]) for scene in sorted(images)]
