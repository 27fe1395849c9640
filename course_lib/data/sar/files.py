"""One image or label file as an array: NumPy's .npy, PNG, or TIFF with the extra `sar`."""

import importlib.util
import io
from pathlib import Path

import numpy as np
from PIL import Image  # torchvision brings it along

from ..layouts import DataError

SUFFIXES = (".npy", ".png", ".tif", ".tiff")
#: PNGs that PIL gives as one number for each pixel; of others it makes grey or colours.
SINGLE = ("L", "I", "I;16", "I;16B")


def image(path):
    """The image in the file at `path`: (C, H, W), (H, W, C) or (H, W)."""
    return _array(path, _grey_or_coloured)


def label(path, coloured):
    """The label in the file at `path`: (H, W), or where `coloured` of a PNG (H, W, 3)."""
    return _array(path, _three_colours if coloured else _indexes)


def content(path):
    """The bytes of the file at `path`."""
    path = Path(path)
    try:
        if not path.is_file():  # to open a pipe would be to wait for ever
            what = "is no regular file" if path.exists() else "is not there"
            raise DataError(f"{path} {what}: name a file that can be read.")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}): see to its permissions.") from None


def damaged(path, error):
    """The DataError for a file that a decoder could not read."""
    why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return DataError(f"{path} is no whole file of its kind ({why}): replace it by a good copy.")


def _array(path, pixels):
    stored = io.BytesIO(content(path))
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is none of {', '.join(SUFFIXES)}: convert it to one of these.")
    if suffix.startswith(".tif"):
        _require_tiff(path)
    try:
        if suffix == ".npy":
            # Never a pickle: to open one is to run what it holds.
            return np.lib.format.read_array(stored, allow_pickle=False)
        return _png(stored, pixels) if suffix == ".png" else _tiff(stored)
    # On spoilt bytes decoders raise whatever their code runs into, MemoryError included.
    except Exception as error:
        raise damaged(path, error) from error


def _png(stored, pixels):
    with Image.open(stored, formats=("PNG",)) as opened:
        opened.load()
        return np.asarray(pixels(opened))


def _grey_or_coloured(opened):
    if opened.mode in SINGLE:
        return opened
    return opened.convert("L" if opened.mode in ("1", "LA") else "RGB")


def _indexes(opened):
    return opened


def _three_colours(opened):
    return opened.convert("RGB")


def _require_tiff(path):
    for package in ("tifffile", "imagecodecs"):
        if importlib.util.find_spec(package) is None:
            raise DataError(
                f"{path} needs {package}, which is not installed: pip install tifffile imagecodecs."
            )


def _tiff(stored):
    import tifffile

    with tifffile.TiffFile(stored) as opened:
        series = opened.series[0]
        array = series.asarray()
        # The value by which GDAL marks pixels without data.
        marked = series.keyframe.tags.valueof("GDAL_NODATA")
    if marked is not None and array.dtype.kind == "f":
        array = np.where(array == float(marked.strip("\0 ")), np.nan, array)
    return array
