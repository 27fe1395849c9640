"""Leaf-disease sets: read, split and kept in memory as bytes."""

import hashlib
import io
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image, ImageOps  # torchvision brings it along
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from . import generated, layouts
from .layouts import DataError, Found

#: What PIL and zipfile raise for a file that is cut short, spoilt, or something else altogether.
UNREADABLE = (
    OSError, SyntaxError, ValueError, Image.DecompressionBombError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LeafImages(Dataset):
    """One part of a leaf set. `dataset[i]` is (image, label); the whole is in `images`, `labels`.

    images   uint8 (N, 3, image_size, image_size)
    labels   int64 (N,): places in `classes`
    classes  the classes' names
    names    the images' names: their paths within the set
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    names: tuple[str, ...]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])

    def digest(self):
        """A hash of all names, classes, labels and pixels: two sets with the same are the same."""
        content = hashlib.sha256(repr((self.classes, self.names, self.images.shape)).encode())
        content.update(self.labels.numpy())
        content.update(self.images.numpy())
        return content.hexdigest()


def leaves(root=None, *, image_size=64, train=True, validation_fraction=0.2, seed=0, progress=None):
    """The training part of a leaf-disease set, or with `train=False` its validation part.

    root                 a folder, or a zip of one: cassava's `train.csv` + `train_images`, or one
                         folder of images for each class, or folders `train` and `val` of such
                         folders. None: a small set of five classes, drawn by this module, the
                         same on every machine
    image_size           the images' height and width: the middle square of each image, scaled
    validation_fraction  what part of each class is for validation, where no `val` says so
    seed                 of that split: it and a file's name alone say which part the file is in
    progress             called as tqdm is, around the images being read

    Images are decoded once and kept as bytes: 21,000 of 224 x 224 take 3.2 GB.

    Raises DataError, which names the file and what to do.
    """
    if not isinstance(image_size, int) or image_size < 1:
        raise ValueError(f"image_size must be a number of pixels, 1 or more; not {image_size!r}")
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must be between 0 and 1, such as 0.2; not {validation_fraction!r}"
        )
    if root is None:
        found, read = Found(generated.CLASSES, generated.items(), None), generated.draw
    else:
        found, read = layouts.find(root), _read
    chosen = _chosen(found, train, validation_fraction, seed)
    names, labels, files = zip(*(item for item in found.items if item[0] in chosen), strict=True)
    _require_room(len(found.items), image_size)
    images = torch.empty((len(names), 3, image_size, image_size), dtype=torch.uint8)
    # Decoding gives up the interpreter's lock, so threads share the work.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda file: read(file, image_size), files)
        if progress is not None:
            made = progress(made, total=len(files), unit=" images", leave=False)
        for place, image in zip(images, made, strict=True):
            place.copy_(image)
    return LeafImages(images, torch.tensor(labels), tuple(found.classes), names)


def _chosen(found, train, fraction, seed):
    """The names in the training part of `found`, or in the validation part.

    Within each class, names are ordered by a hash of them and the seed. So the split depends on
    no library's random numbers, and a file that is added moves hardly any other.
    """
    if found.held is not None:
        return {item[0] for item in found.items if (item[0] in found.held) != train}
    classes = {}
    for name, label, _ in found.items:
        classes.setdefault(label, []).append(name)
    chosen = set()
    for names in classes.values():
        names.sort(key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
        held_out = min(max(round(fraction * len(names)), 1), len(names) - 1)
        chosen.update(names[held_out:] if train else names[:held_out])
    return chosen


def _require_room(n, image_size):
    """Raise DataError where `n` images cannot be held in this machine's memory."""
    needed, here = n * 3 * image_size**2, _memory()
    if needed > here:
        raise DataError(
            f"{n} images of {image_size} × {image_size} take {needed / 1e9:,.1f} GB, and this "
            f"machine has {here / 1e9:,.1f} GB of memory: choose a smaller image_size."
        )


def _memory():
    """Bytes of memory that this machine has; more than any has where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 60


def _read(file, image_size):
    """The image in `file` as uint8 (3, image_size, image_size)."""
    try:
        with Image.open(io.BytesIO(layouts.content(file))) as opened:
            image = pil_to_tensor(ImageOps.exif_transpose(opened).convert("RGB"))
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{file} is no whole image ({error}). Replace it by a good copy, or remove it."
        ) from None
    image = v2.functional.center_crop(image, [min(image.shape[1:])])
    return v2.functional.resize(image, [image_size, image_size], antialias=True)
