"""Sets of images to tell apart: class folders, Tiny-ImageNet, CIFAR-100, or a few drawn leaves."""

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from . import decoded, generated, layouts
from .decoded import DecodedImages
from .files import DataError, zipped
from .layouts import Found
from .leaves import require_sensible
from .streamed import Streamed

CIFAR100, INSIDE = "cifar100", "cifar-100-python"  # the name of the set, and of its folder
FEW = 4 * decoded.CHUNK  # images that take less time than to start processes


def images(
    root=None, *, image_size=None, validation_fraction=0.2, subset=None, seed=0, downloads=None,
    download=False, cache=None, workers=None, prefetch=2, progress=None, memory=None,
):  # fmt: skip
    """(training part, validation part) of a set of images, two `DecodedImages`.

    root                 a folder or zip as `layouts` tells, Tiny-ImageNet among them, or a folder
                         that holds CIFAR-100's; "cifar100"; None: 500 leaves of five classes that
                         the course draws, the same everywhere
    image_size           height and width: the middle square of each image, scaled. None: 64, and
                         of CIFAR-100 its own 32
    validation_fraction  what part of each class is for validation, where the set has no split
    subset               2 or more: so many classes, the first by name; below 1: that share of the
                         images to train on, of each class alike. None: all
    seed                 of the split and of the share
    downloads, download  the folder that holds CIFAR-100, and whether torchvision may fetch it there
    cache                a folder that keeps the decoded images for the next time, as one file
    workers, prefetch    processes that decode, and how many chunks of 256 images each makes ahead;
                         None: one for each core, where there are more than a few images. What is in
                         a zip is decoded by threads
    progress             called as tqdm is, around the images being read
    memory               bytes: where the decoded images take more, `images` are `Streamed`, decoded
                         each time by `workers`, each `prefetch` batches ahead, and not cached.
                         None: all are decoded now; DataError where this machine cannot hold them

    Raises ValueError for sizes and shares that cannot be, and DataError, which names the file and
    what to do. Tiny-ImageNet is of Stanford's cs231n; Krizhevsky, "Learning Multiple Layers of
    Features from Tiny Images" (2009).
    """
    require_sensible(image_size or 64, validation_fraction)
    _require_subset(subset)
    if str(root) == CIFAR100 or root is not None and (Path(root) / INSIDE).is_dir():
        found, read = _cifar100(root, downloads, download), _resized
        size = image_size or 32
    elif root is None:
        found, read = Found(generated.CLASSES, generated.items(), None), generated.draw
        size = image_size or 64
    else:
        found, read = layouts.find(root), decoded.read
        size = image_size or 64
    held = decoded.chosen(found, False, validation_fraction, seed)
    found = _subset(found, held, subset, seed)
    streams = memory is not None and len(found.items) * 3 * size**2 > memory
    if not streams:
        decoded.require_room(len(found.items), size)
    # Those to train on come first, so that each part is a view of what is decoded.
    items = sorted(found.items, key=lambda item: item[0] in held)
    n_training = sum(name not in held for name, _, _ in items)

    def make():
        return _decoded([file for _, _, file in items], size, read, workers, prefetch, progress)

    names, labels, files = zip(*items, strict=True)
    parts = slice(n_training), slice(n_training, None)
    if streams:
        workers = decoded.processes() if workers is None else workers
        options = {"workers": workers, "ahead": prefetch, "limit": memory}
        pixels = [Streamed(files[part], size, read, **options) for part in parts]
    else:
        held = make() if cache is None else _cached(Path(cache), found.classes, items, size, make)
        pixels = [held[part] for part in parts]
    return tuple(
        DecodedImages(images, torch.tensor(labels[part]), tuple(found.classes), names[part])
        for images, part in zip(pixels, parts, strict=True)
    )


def _require_subset(subset):
    if subset is None:
        return
    if not (0 < subset < 1 or subset >= 2 and subset == int(subset)):
        raise ValueError(
            "load_subset must be a number of classes, 2 or more, or a share of the images above 0 "
            f"and below 1; not {subset!r}"
        )


def _subset(found, held, subset, seed):
    """`found` with what `subset` leaves of it."""
    if subset is None:
        return found
    if subset >= 2:
        if subset > len(found.classes):
            raise ValueError(
                f"load_subset asks for {subset:g} classes, and the set has {len(found.classes)}"
            )
        items = [item for item in found.items if item[1] < subset]
        return Found(found.classes[: int(subset)], items, found.held)
    names = [[] for _ in found.classes]
    for name, label, _ in found.items:
        if name not in held:
            names[label].append(name)
    left = set(held)
    for of_class in names:
        decoded.by_hash(of_class, seed)
        left.update(of_class[: max(1, round(subset * len(of_class)))])
    return Found(found.classes, [item for item in found.items if item[0] in left], found.held)


def _decoded(files, size, read, workers, prefetch, progress):
    if workers is None:
        workers = 0 if len(files) <= FEW else decoded.processes()
    # Processes would share one place in a zip's file, and read what is another's.
    if workers == 0 or zipped(files[0]):
        return decoded.decoded(files, size, read, progress=progress)
    return decoded.decoded_by_processes(
        files, size, read, workers=workers, prefetch=prefetch, progress=progress
    )


def _cached(folder, classes, items, size, make):
    """What `make` makes, kept in `folder`; or what it once made of the same files."""
    path = folder / f"images-{size}-{_facts(classes, items)}.npy"
    try:
        if path.is_file():
            kept = np.load(path, allow_pickle=False)
            if kept.shape == (len(items), 3, size, size) and kept.dtype == np.uint8:
                return torch.from_numpy(kept)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be used ({error}): remove it, or name another folder for the cache."
        ) from None
    kept = make()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            np.save(file, kept.numpy())
        os.replace(file.name, path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}): make room, or name another folder for the cache."
        ) from None
    return kept


def _facts(classes, items):
    """A hash of the files' names, sizes and times: another file, or a changed one, has another."""
    content = hashlib.sha256(repr(classes).encode())
    for name, label, file in items:
        facts = ()
        if isinstance(file, Path):
            status = file.stat()
            facts = status.st_size, status.st_mtime_ns
        elif zipped(file):
            facts = file.root.getinfo(file.at).CRC, file.root.getinfo(file.at).file_size
        content.update(repr((name, label, facts)).encode())
    return content.hexdigest()[:16]


def _cifar100(root, downloads, download):
    from torchvision.datasets import CIFAR100 as Theirs

    folder = Path(root)
    if str(root) == CIFAR100:
        if downloads is None:
            raise ValueError("cifar100 needs a folder for what is downloaded")
        folder = Path(downloads) / CIFAR100
    try:
        parts = [Theirs(folder, train=train, download=download) for train in (True, False)]
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        cure = "try again" if download else "add --download, and torchvision fetches it"
        raise DataError(f"{folder} has no whole CIFAR-100 ({error}): {cure}.") from None
    items, held = [], set()
    for part, word in zip(parts, ("train", "val"), strict=True):
        for number, (label, image) in enumerate(zip(part.targets, part.data, strict=True)):
            items.append((f"{word}/{number:05d}", int(label), image))
            if word == "val":
                held.add(items[-1][0])
    return Found(list(parts[0].classes), items, frozenset(held))


def _resized(image, image_size):
    """NumPy uint8 (H, W, 3) as uint8 (3, image_size, image_size)."""
    from torchvision.transforms.v2 import functional

    image = torch.from_numpy(image).permute(2, 0, 1)
    return functional.resize(image, [image_size, image_size], antialias=True)
