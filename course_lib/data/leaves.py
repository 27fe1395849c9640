"""Leaf-disease sets: read, split and kept in memory as bytes."""

import torch

from . import decoded, generated, layouts
from .decoded import DecodedImages
from .layouts import Found
from .streamed import Streamed

AHEAD = 2  # batches that each process decodes before they are asked for


class LeafImages(DecodedImages):
    """One part of a leaf set, as `DecodedImages`."""


def leaves(
    root=None,
    *,
    image_size=64,
    train=True,
    validation_fraction=0.2,
    seed=0,
    progress=None,
    memory=None,
):
    """The training part of a leaf-disease set, or with `train=False` its validation part.

    root                 a folder, or a zip of one: cassava's `train.csv` + `train_images`, or one
                         folder of images for each class, or folders `train` and `val` of such
                         folders. None: a small set of five classes, drawn by this module, the
                         same on every machine
    image_size           the images' height and width: the middle square of each image, scaled
    validation_fraction  what part of each class is for validation, where no `val` says so
    seed                 of that split: it and a file's name alone say which part the file is in
    progress             called as tqdm is, around the images being read
    memory               bytes: where the decoded images of the whole set take more, `images` are
                         `Streamed`. None: all are decoded now

    Images are decoded once and kept as bytes: 21,000 of 224 x 224 take 3.2 GB.

    Raises DataError, which names the file and what to do.
    """
    require_sensible(image_size, validation_fraction)
    if root is None:
        found, read = Found(generated.CLASSES, generated.items(), None), generated.draw
    else:
        found, read = layouts.find(root), decoded.read
    chosen = decoded.chosen(found, train, validation_fraction, seed)
    names, labels, files = zip(*(item for item in found.items if item[0] in chosen), strict=True)
    if memory is not None and len(found.items) * 3 * image_size**2 > memory:
        options = {"workers": decoded.processes(), "ahead": AHEAD, "limit": memory}
        images = Streamed(files, image_size, read, **options)
    else:
        decoded.require_room(len(found.items), image_size)
        images = decoded.decoded(files, image_size, read, progress=progress)
    return LeafImages(images, torch.tensor(labels), tuple(found.classes), names)


def require_sensible(image_size, validation_fraction):
    """Raise ValueError for sizes and shares that no set can have."""
    if not isinstance(image_size, int) or image_size < 1:
        raise ValueError(f"image_size must be a number of pixels, 1 or more; not {image_size!r}")
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must be between 0 and 1, such as 0.2; not {validation_fraction!r}"
        )
