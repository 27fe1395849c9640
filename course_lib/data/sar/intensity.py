"""What an image file holds, as the numbers that a network is given.

Decibels are clipped to −35 … 5 and then (dB + 15) / 7: Sentinel-1's two bands over land and water
have about that mean and spread. Grey values 0 … the largest their type holds become 0 … 1 and
then (grey − 0.5) / 0.25.
"""

import numpy as np

from ..layouts import DataError

LOWEST_DB, HIGHEST_DB = -35.0, 5.0
MEAN_DB, SPREAD_DB = -15.0, 7.0
MEAN_GREY, SPREAD_GREY = 0.5, 0.25

#: What pixels may be, and each unit's mean: what stands where there is no data before they are
#: normalised. `power` is linear, and becomes decibels.
MEANS = {"decibels": MEAN_DB, "power": MEAN_DB, "grey": MEAN_GREY, "as_is": 0.0}


def unit_of(image, name):
    """The unit of an array of which nothing is said: decibels where it is floating-point."""
    if image.dtype.kind == "u":
        return "grey"
    if image.dtype.kind != "f":
        raise DataError(
            f"{name} holds {image.dtype} numbers, which may be decibels or not: say what they are "
            "by unit, or store decibels as float32."
        )
    if not (image < 0).any() and not np.isnan(image).all():
        raise DataError(
            f"{name} holds no number below 0, so these are no decibels: say what they are by "
            "unit='power' or unit='as_is'."
        )
    return "decibels"


def bands_first(image, label, image_name, label_name):
    """(C, H, W) of an image that is (C, H, W), (H, W, C) or (H, W), as its label's shape tells."""
    if image.dtype.kind not in "fui":
        raise DataError(f"{image_name} holds {image.dtype}: real numbers were expected.")
    if image.ndim == 2:
        image = image[None]
    if image.ndim == 3 and image.shape[1:] != label.shape and image.shape[:2] == label.shape:
        image = np.moveaxis(image, 2, 0)
    if image.ndim != 3 or image.shape[1:] != label.shape:
        raise DataError(
            f"{image_name} has the shape {image.shape} and {label_name} the shape {label.shape}: "
            "expected one height and width for both."
        )
    if not image.size:
        raise DataError(f"{image_name} holds no pixel: its shape is {image.shape}.")
    return image


def prepared(image, unit, normalize, name):
    """(float32 (C, H, W), bool (H, W)): the image, and where there is no data.

    That is where any of its bands is not finite, or where all hold exactly 0 dB: with zeros
    products fill what lies beyond the swath, and no ground has them.

    normalize  False: decibels and grey values 0 … 1 as they are, neither clipped nor scaled
    """
    if unit == "grey":
        if image.dtype.kind != "u":
            raise DataError(f"{name} holds {image.dtype}; grey values are unsigned integers.")
        image = image.astype(np.float32) / np.float32(np.iinfo(image.dtype).max)
    elif unit == "power":
        with np.errstate(divide="ignore", invalid="ignore"):
            image = 10 * np.log10(image.astype(np.float64))
    with np.errstate(over="ignore"):
        image = image.astype(np.float32)
    missing = ~np.isfinite(image).all(axis=0)
    if unit == "decibels":
        missing |= (image == 0).all(axis=0)
    if missing.all():
        raise DataError(
            f"{name} has no pixel with data: each is NaN or infinite in a band, or 0 dB in all. "
            "Remove the scene."
        )
    image = np.where(missing, np.float32(MEANS[unit]), image)
    return _normalized(image, unit) if normalize else image, missing


def decibels(values):
    """The decibels of normalised values: those that were clipped come back as the limits."""
    return values * np.float32(SPREAD_DB) + np.float32(MEAN_DB)


def _normalized(image, unit):
    if unit == "as_is":
        return image
    if unit == "grey":
        return (image - np.float32(MEAN_GREY)) / np.float32(SPREAD_GREY)
    return (image.clip(LOWEST_DB, HIGHEST_DB) - np.float32(MEAN_DB)) / np.float32(SPREAD_DB)
