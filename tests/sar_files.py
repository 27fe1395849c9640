"""Small files of radar scenes, in every layout that is read, and what it means to refuse one."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from course_lib.data import DataError, sar

SHAPE = 12, 10


def decibels(seed, shape=(2, *SHAPE)):
    return np.random.default_rng(seed).uniform(-25, -5, shape).astype(np.float32)


def classes(seed, shape=SHAPE, low=-1, high=2):
    label = np.random.default_rng(seed).integers(low, high, shape).astype(np.int16)
    label.flat[:2] = 0, 1
    return label


def save(path, array):
    """One array, as the file that `path` ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".png":
        Image.fromarray(array).save(path)
    else:
        tifffile.imwrite(path, array, photometric="minisblack")
    return path


def chips(root, below="", names=("Spain_1", "Ghana_2"), **options):
    for seed, name in enumerate(names):
        image = root / below / f"S1Hand/{name}_S1Hand.tif"
        image.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(image, decibels(seed), photometric="minisblack", **options)
        save(root / below / f"LabelHand/{name}_LabelHand.tif", classes(seed))
    return root


def arrays(root, names=("a", "b")):
    for seed, name in enumerate(names):
        save(root / f"images/{name}.npy", decibels(seed))
        save(root / f"labels/{name}.npy", classes(seed))
    return root


def picture(root, shape=(90, 70), labels=5):
    """One scene as PolSAR scenes are shared: a coloured picture and an index for each pixel."""
    random = np.random.default_rng(3)
    save(root / "bay.png", random.integers(0, 256, (*shape, 3), np.uint8))
    save(root / "bay_label.png", random.integers(0, labels + 1, shape, np.uint8))
    return root


def tile_file(path, **changed):
    n, side = 4, 8
    held = {
        "s1_db_x100": (decibels(0, (n, 2, side, side)) * 100).astype(np.int16),
        "masks": classes(0, (n, side, side)).astype(np.int8),
        "chip": np.array(["Ghana", "Ghana", "India", "India"]),
        "rowcol": np.array([[0, 0], [0, side]] * 2, np.int16),
        **changed,
    }
    np.savez(path, **{key: array for key, array in held.items() if array is not None})
    return path


def refused(*words, **options):
    """`load` raises one sentence that has all of these words."""
    with pytest.raises(DataError) as caught:
        sar.load(**options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message
