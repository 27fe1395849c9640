"""One .npz of tiles that were cut from Sentinel-1 chips.

    s1_db_x100  int16 (n, 2, H, W): VV and VH in hundredths of a decibel
    masks       integers (n, H, W): 1 water, 0 land, −1 no data
    chip        text (n,): the chip that each tile was cut from
    rowcol      integers (n, 2): the tile's first row and column within the chip
"""

import io
import zipfile

import numpy as np

from ..layouts import DataError
from . import files
from .source import Raw, Source

#: Each array: the kinds of type it may have, and its dimensions.
ARRAYS = {"s1_db_x100": ("iu", 4), "masks": ("iu", 3), "chip": ("U", 1), "rowcol": ("iu", 2)}


def source(path):
    """The `Source` of the tiles in the file at `path`."""
    arrays = _arrays(path)
    decibels, masks, chips, places = (arrays[key] for key in ARRAYS)

    def read():
        for i, (image, mask, chip) in enumerate(zip(decibels, masks, chips, strict=True)):
            name = f"{path}, tile {i}"
            place = int(places[i, 0]), int(places[i, 1])
            yield Raw(str(chip), image.astype(np.float32) / 100, mask, name, name, place)

    return Source(len(chips), read, ("land", "water"), ("VV", "VH"), "decibels")


def _arrays(path):
    stored = io.BytesIO(files.content(path))
    if not zipfile.is_zipfile(stored):
        raise files.damaged(path, "no whole zip file, which an .npz is")
    try:
        with np.load(stored, allow_pickle=False) as opened:
            arrays = {key: opened[key] for key in ARRAYS if key in opened}
    # On spoilt bytes decoders raise whatever their code runs into, MemoryError included.
    except Exception as error:
        raise files.damaged(path, error) from error
    for key, (kinds, n_dims) in ARRAYS.items():
        if key not in arrays:
            raise DataError(f"{path} has no array {key!r}: expected {', '.join(ARRAYS)}.")
        array = arrays[key]
        if array.dtype.kind not in kinds or array.ndim != n_dims:
            raise DataError(
                f"{path}: {key} is {array.dtype} of shape {array.shape}; expected "
                f"{'text' if kinds == 'U' else 'integers'} of {n_dims} dimensions."
            )
    decibels, masks, chips, places = (arrays[key] for key in ARRAYS)
    n, bands, *side = decibels.shape
    expected = (2, (n, *side), (n,), (n, 2))
    if (bands, masks.shape, chips.shape, places.shape) != expected:
        shapes = ", ".join(f"{key} {array.shape}" for key, array in arrays.items())
        raise DataError(f"{path} has shapes that do not go together: {shapes}.")
    if not n:
        raise DataError(f"{path} holds no tile.")
    if places.min() < 0:
        raise DataError(f"{path} has a row or column below 0 in rowcol: {places.min()}.")
    return arrays
