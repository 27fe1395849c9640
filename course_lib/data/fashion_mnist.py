"""Fashion-MNIST: 70,000 small grey pictures of clothes, or a few drawn ones like them."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from . import drawn_clothes
from .files import DataError

CLASSES = drawn_clothes.CLASSES
SIDE = 28
#: Where a set may lie below the folder that is named; the last is where torchvision puts it.
FOLDERS = ("", "raw", "FashionMNIST/raw")
LARGEST = 1 << 30  # bytes of a file, unpacked: twenty times the real set's
PARTS = {True: "train", False: "t10k"}


def fashion_mnist(root=None, *, train=True, download=False):
    """(images, labels) of the training part, or with `train=False` of the test part.

    root      the folder with the set's four IDX files, as they are published (.gz) or unpacked, or
              where torchvision has put them; None: a small set, drawn by this package, the same on
              every machine
    download  have torchvision fetch the set into `root` where it is not there yet

    images uint8 (N, 28, 28), labels int64 (N,): places in `CLASSES`. Raises DataError, which names
    the file and what to do. Xiao, Rasul and Vollgraf, "Fashion-MNIST" (2017).
    """
    if root is None:
        return drawn_clothes.drawn(train)
    folder = _folder_of(Path(root), download)
    images = _read(_file(folder, f"{PARTS[train]}-images-idx3-ubyte"), 3)
    labels = _read(_file(folder, f"{PARTS[train]}-labels-idx1-ubyte"), 1)
    if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels):
        raise DataError(
            f"{folder} has {len(labels)} labels and images of shape {tuple(images.shape)}, where "
            f"there should be as many images of {SIDE} × {SIDE}: fetch the set again."
        )
    if len(labels) and labels.max() >= len(CLASSES):
        raise DataError(f"{folder} has the label {labels.max()}; there are 0 to 9: fetch it again.")
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def _folder_of(root, download):
    for below in FOLDERS:
        if any((root / below).glob(f"{PARTS[True]}-images-idx3-ubyte*")):
            return root / below
    if not download:
        raise DataError(
            f"{root} has no Fashion-MNIST: name the folder with train-images-idx3-ubyte.gz and the "
            "three other files."
        )
    from torchvision.datasets import FashionMNIST

    try:
        FashionMNIST(root, download=True)
    except (OSError, RuntimeError) as error:
        why = " ".join(str(error).split())  # torchvision's has several lines
        raise DataError(
            f"Fashion-MNIST could not be downloaded to {root} ({why}). Try again, or fetch its "
            "four files elsewhere and name their folder."
        ) from error
    return root / FOLDERS[-1]


def _file(folder, name):
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise DataError(f"{folder} lacks {name} or {name}.gz: fetch the set again.")


def _read(path, n_dims):
    """The bytes of an IDX file: a header that tells type, dimensions and sizes, and the numbers."""
    damaged = DataError(f"{path} is no whole IDX file of bytes: fetch it again.")
    start = 4 + 4 * n_dims
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            zeros, kind, dims, *sizes = struct.unpack(f">HBB{n_dims}I", file.read(start))
            n = math.prod(sizes)
            if (zeros, kind, dims) != (0, 8, n_dims) or n > LARGEST:  # 8: unsigned bytes
                raise damaged
            content = file.read(n + 1)  # no more, whatever it unpacks to
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise damaged from error
    if len(content) != n:
        raise damaged
    return np.frombuffer(content, np.uint8).reshape(sizes).copy()
