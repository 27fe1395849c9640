"""One part of a set of images, decoded once and kept in memory as bytes."""

import hashlib
import importlib
import io
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps  # torchvision brings it along
from torch.utils.data import DataLoader, Dataset

from . import streamed
from .files import DataError, content

#: What PIL and zipfile raise for a file that is cut short, spoilt, or something else altogether.
UNREADABLE = (
    OSError, SyntaxError, ValueError, Image.DecompressionBombError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
MOST_WORKERS = 32  # which read faster than any disk
CHUNK = 256  # images that a process decodes at a time
NAMES = "names "  # before a hash that leaves the pixels out
HASHED = 4  # images whose bytes are hashed at a time


@dataclass(frozen=True, eq=False)
class DecodedImages(Dataset):
    """One part of a set. `part[i]` is (image, label); the whole is in `images`, `labels`.

    images   uint8 (N, 3, image_size, image_size), a tensor or `Streamed`
    labels   int64 (N,): places in `classes`
    classes  the classes' names
    names    the images' names: their paths within the set
    """

    images: torch.Tensor | streamed.Streamed
    labels: torch.Tensor
    classes: tuple[str, ...]
    names: tuple[str, ...]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])

    def digest(self, pixels=True):
        """A hash of all names, classes, labels and pixels: two sets with the same are the same.

        pixels  False: leave them out, which takes no time
        """
        content = hashlib.sha256(repr((self.classes, self.names, self.images.shape)).encode())
        content.update(self.labels.numpy())
        for part in self.images.split(HASHED) if pixels else ():
            content.update(part.numpy())
        return content.hexdigest()


def digests(training, validation, earlier=None):
    """A hash of both parts: of their pixels, or where they are streamed, of all else.

    earlier  what a run kept of its images, which says what of them is hashed now
    """
    streams = isinstance(training.images, streamed.Streamed)
    pixels = not (streams if earlier is None else earlier.startswith(NAMES))
    found = f"{training.digest(pixels)} {validation.digest(pixels)}"
    return found if pixels else NAMES + found


def chosen(found, train, fraction, seed):
    """The names in the training part of `found`, or in the validation part.

    Within each class, names are ordered by a hash of them and the seed. So the split depends on
    no library's random numbers, and a file that is added moves hardly any other.
    """
    if found.held is not None:
        return {item[0] for item in found.items if (item[0] in found.held) != train}
    classes = {}
    for name, label, _ in found.items:
        classes.setdefault(label, []).append(name)
    names_of_part = set()
    for names in classes.values():
        by_hash(names, seed)
        held_out = min(max(round(fraction * len(names)), 1), len(names) - 1)
        names_of_part.update(names[held_out:] if train else names[:held_out])
    return names_of_part


def by_hash(names, seed):
    """Order `names`, a list, by a hash of each and the seed."""
    names.sort(key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())


def decoded(files, image_size, read, *, progress=None):
    """The images of `files` as uint8 (N, 3, image_size, image_size), decoded by threads.

    read      read(file, image_size) makes one
    progress  called as tqdm is, around the images being read
    """
    images = torch.empty((len(files), 3, image_size, image_size), dtype=torch.uint8)
    # Decoding gives up the interpreter's lock, so threads share the work.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda file: read(file, image_size), files)
        if progress is not None:
            made = progress(made, total=len(files), unit=" images", leave=False)
        for place, image in zip(images, made, strict=True):
            place.copy_(image)
    return images


def decoded_by_processes(files, image_size, read, *, workers, prefetch=2, progress=None):
    """As `decoded`, by `workers` processes: small images take longer in Python than in the decoder.

    prefetch  how many chunks of 256 images each process makes ahead
    """
    importlib.import_module("torchvision.transforms.v2")  # once: processes that are forked have it
    images = torch.empty((len(files), 3, image_size, image_size), dtype=torch.uint8)
    bar = progress and progress(total=len(files), unit=" images", leave=False)
    # What is no tensor goes through a pipe, and needs no shared memory, of which containers have
    # little.
    loader = DataLoader(
        _Chunks(files, image_size, read), batch_size=None, num_workers=workers,
        prefetch_factor=prefetch, collate_fn=_as_it_is,
    )  # fmt: skip
    start = 0
    for found in loader:
        if isinstance(found, str):
            raise DataError(found)
        images[start : start + len(found)] = torch.from_numpy(found)
        start += len(found)
        if bar:
            bar.update(len(found))
    if bar:
        bar.close()
    return images


class _Chunks(Dataset):
    """Chunks of decoded images, NumPy (n, 3, size, size); or what is wrong, as a sentence."""

    def __init__(self, files, image_size, read):
        self.files, self.image_size, self.read = files, image_size, read

    def __len__(self):
        return -(-len(self.files) // CHUNK)

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        files = self.files[index * CHUNK : (index + 1) * CHUNK]
        try:
            return np.stack([self.read(file, self.image_size).numpy() for file in files])
        except DataError as error:
            return str(error)


def _as_it_is(chunk):
    return chunk


def processes():
    """How many decode: one for each core that this process may run on."""
    shared = hasattr(os, "sched_getaffinity")
    return min(len(os.sched_getaffinity(0)) if shared else os.cpu_count(), MOST_WORKERS)


def require_room(n, image_size):
    """Raise DataError where `n` images cannot be held in this machine's memory."""
    needed, here = n * 3 * image_size**2, streamed.memory()
    if needed > here:
        raise DataError(
            f"{n} images of {image_size} × {image_size} take {needed / 1e9:,.1f} GB, and this "
            f"machine has {here / 1e9:,.1f} GB of memory: choose a smaller image_size."
        )


def read(file, image_size):
    """The image in `file` as uint8 (3, image_size, image_size): its middle square, scaled.

    Grey, CMYK and palette images become red, green and blue. Raises DataError, with its name.
    """
    from torchvision.transforms.v2 import functional  # takes seconds, which few programs need spend

    try:
        with Image.open(io.BytesIO(content(file))) as opened:
            image = functional.pil_to_tensor(_coloured(ImageOps.exif_transpose(opened)))
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{file} is no whole image ({error}). Replace it by a good copy, or remove it."
        ) from None
    image = functional.center_crop(image, [min(image.shape[1:])])
    return functional.resize(image, [image_size, image_size], antialias=True)


def _coloured(image):
    """PIL's `image` in red, green and blue."""
    if image.mode.startswith("I;16"):  # PIL would cut 16-bit greys off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")
