"""How well pixels were told apart: from how often each class was taken for each other one.

Pixels of unknown class (`losses.NO_DATA`) do not count. Sums over all images come first, the ratio
last: an average of ratios would let a small image count as much as a large one.
"""

import numpy as np

from course_lib.backend import get_array_module, get_backend

from .losses import NO_DATA


def confusion_matrix(prediction, target, n_classes):
    """NumPy int64 (n_classes, n_classes): how many pixels of class i were taken for class j.

    prediction, target  integer arrays of one shape and backend. ValueError where they are not, or
                        hold a class that there is not.
    """
    if tuple(prediction.shape) != tuple(target.shape):
        raise ValueError(
            f"prediction and target must have one shape, not {tuple(prediction.shape)} and "
            f"{tuple(target.shape)}"
        )
    xp = get_array_module(target)
    # One number for each pair of classes, and one for all pixels that do not count.
    pair = xp.where(target == NO_DATA, n_classes**2, target * n_classes + prediction)
    for classes in (prediction, target):
        known = (classes >= NO_DATA) & (classes < n_classes)
        if not bool(xp.all(known)):
            raise ValueError(
                f"classes are 0 to {n_classes - 1}, not {int(xp.min(classes))} to "
                f"{int(xp.max(classes))}"
            )
    counts = np.bincount(get_backend().to_cpu(pair).ravel(), minlength=n_classes**2 + 1)
    return counts[:-1].reshape(n_classes, n_classes)


def iou_score(matrix):
    """Intersection over union of each class, from a confusion matrix; NaN for a class not there."""
    both, either = np.diag(matrix), matrix.sum(0) + matrix.sum(1) - np.diag(matrix)
    return _ratio(both, either)


def dice_coefficient(matrix):
    """2·intersection/(sum of sizes) of each class; NaN for a class that is not there."""
    return _ratio(2 * np.diag(matrix), matrix.sum(0) + matrix.sum(1))


def calculate_class_weights(target, n_classes):
    """float32 NumPy (n_classes,): weights that give each class present the same say in all.

    A class of a share s of the pixels has the weight 1/(s·n), n classes being present; one that is
    not there has 0.
    """
    target = get_backend().to_cpu(target)
    counts = np.bincount(target[target != NO_DATA].ravel(), minlength=n_classes)
    if len(counts) > n_classes:
        raise ValueError(f"classes are 0 to {n_classes - 1}, not up to {len(counts) - 1}")
    present = counts > 0
    weights = np.zeros(n_classes, np.float32)
    weights[present] = counts.sum() / (counts[present] * present.sum())
    return weights


def _ratio(above, below):
    return np.where(below > 0, above / np.maximum(below, 1), np.nan)
