"""Water by a threshold: what is darker than it. What a network has to beat."""

import numpy as np

from .scenes import NO_DATA

WATER = 1


def best_threshold(scenes, band=0):
    """(threshold, IoU): of all thresholds, the one below which a band finds the water best.

    It is chosen on the very pixels it is scored on, so no other threshold does better on them. All
    pixels of all scenes are pooled; values are those of `images`. Without water, IoU is 0.
    """
    labelled = scenes.labels != NO_DATA
    values = scenes.images[:, band][labelled]
    order = np.argsort(values, kind="stable")
    values, water = values[order], scenes.labels[labelled][order] == WATER
    found = np.cumsum(water)
    iou = found / (water.sum() + np.arange(1, len(values) + 1) - found)
    last = np.append(values[1:] != values[:-1], True)  # equal values fall on one side together
    best = np.argmax(np.where(last, iou, -1))
    above = values[best + 1] if best + 1 < len(values) else np.float32(np.inf)
    return float(above), float(iou[best])


def threshold_iou(scenes, threshold, band=0):
    """The IoU of water and what lies below `threshold` in a band, all pixels pooled."""
    labelled = scenes.labels != NO_DATA
    below = scenes.images[:, band][labelled] < threshold
    water = scenes.labels[labelled] == WATER
    return float((below & water).sum() / max((below | water).sum(), 1))
