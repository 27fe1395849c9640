"""Cross-entropy of logits, with everything that PyTorch's has. Derivation: notebook 05."""

import numpy as np

from .double import double
from .softmax import log_softmax, softmax


class _Target:
    """How much of each class a row is to be: `on_label` of its label, `shares` of every class.

    `weights` are what the rows count in a mean. Rows with an ignored index have zeros, those with
    an index out of range NaN.
    """

    def __init__(self, n_rows, n_classes, target, weight, ignore_index, label_smoothing):
        weight = np.ones(n_classes) if weight is None else double(weight)[0]
        keep, spread = 1 - label_smoothing, label_smoothing / n_classes
        self.labels, self.weights = None, np.ones(n_rows)
        self.ignored = np.zeros(n_rows, bool)
        target = np.asarray(target)
        if target.ndim == 2:
            self.on_label = np.zeros(n_rows)
            self.shares = weight * (keep * double(target)[0] + spread)
            return
        self.ignored = target == ignore_index
        valid = ~self.ignored & (target >= 0) & (target < n_classes)
        self.labels = np.where(valid, target, 0)
        self.weights = np.where(valid, weight[self.labels], np.where(self.ignored, 0.0, np.nan))
        self.on_label = keep * self.weights
        self.shares = np.tile(spread * weight, (n_rows, 1)) if label_smoothing else None


def _rows(logits, target):
    """A row for each pixel, where logits are (N, C, d1, …) and class indices (N, d1, …)."""
    if logits.ndim == 2:
        return logits, target
    return np.moveaxis(logits, 1, -1).reshape(-1, logits.shape[1]), np.reshape(target, -1)


def cross_entropy(
    logits, target, *, weight=None, ignore_index=-100, label_smoothing=0.0, reduction="mean"
):
    """Σ q·(lse − x) over the classes of each row of `logits` (n_rows, n_classes), reduced.

    logits  also (N, C, d1, …), with class indices (N, d1, …): each pixel is a row
    target  class indices (n_rows,) or probabilities (n_rows, n_classes); q is made of them, of
            the class weights (n_classes,) and of the smoothing

    The loss of a row with an index out of range is NaN; that of an ignored row is 0.
    """
    (logits,) = double(logits)
    shape = logits.shape[:1] + logits.shape[2:]
    logits, target = _rows(logits, target)
    wanted = _Target(*logits.shape, target, weight, ignore_index, label_smoothing)
    with np.errstate(invalid="ignore", divide="ignore"):
        y, losses = log_softmax(logits), np.zeros(len(logits))
        if wanted.shares is not None:
            losses -= (wanted.shares * y).sum(axis=1)
        if wanted.labels is not None:
            losses -= wanted.on_label * y[np.arange(len(y)), wanted.labels]
        losses = np.where(wanted.ignored, 0.0, losses)
        if reduction == "none":
            return losses.reshape(shape)
        return losses.sum() / (wanted.weights.sum() if reduction == "mean" else 1.0)


def cross_entropy_backward(
    dloss, logits, target, *, weight=None, ignore_index=-100, label_smoothing=0.0, reduction="mean"
):
    """dlogits = dloss/normaliser · (softmax(x)·Σ q − q); `dloss` is of the loss's shape.

    The gradient of an ignored row is 0, that of a row with an index out of range NaN.
    """
    dloss, logits = double(dloss, logits)
    pixels = logits.shape[:1] + logits.shape[2:] + logits.shape[1:2]
    logits, target = _rows(logits, target)
    wanted = _Target(*logits.shape, target, weight, ignore_index, label_smoothing)
    q = np.zeros(logits.shape) if wanted.shares is None else wanted.shares.copy()
    if wanted.labels is not None:
        q[np.arange(len(q)), wanted.labels] += wanted.on_label
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = dloss / (wanted.weights.sum() if reduction == "mean" else 1.0)
        dlogits = np.reshape(scale, (-1, 1)) * (softmax(logits) * q.sum(axis=1, keepdims=True) - q)
    broken = np.isnan(wanted.weights)[:, None]
    dlogits = np.where(wanted.ignored[:, None], 0.0, np.where(broken, np.nan, dlogits))
    return np.moveaxis(dlogits.reshape(pixels), -1, 1)
