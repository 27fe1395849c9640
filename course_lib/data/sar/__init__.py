"""Radar scenes whose every pixel is labelled: read or drawn, cut into tiles, split by scene.

`load` reads tiles of Sentinel-1 chips, Sen1Floods11's GeoTIFFs, folders of arrays or pictures, one
large scene, or draws scenes of its own. `split` and `folds` part them so that no scene is on both
sides, `augmented` turns a tile, and `best_threshold` tells what is reached without a network.
"""

from .augmenting import augmented
from .intensity import decibels
from .loading import load
from .scenes import NO_DATA, SarScenes
from .splitting import GAP, folds, leave_out, split
from .threshold import best_threshold, threshold_iou

__all__ = [
    "GAP", "NO_DATA", "SarScenes", "augmented", "best_threshold", "decibels", "folds", "leave_out",
    "load", "split", "threshold_iou",
]  # fmt: skip
