"""Soft Dice loss over the classes of each pixel, with cross-entropy beside it if wanted."""

import numpy as np

from .cross_entropy import cross_entropy, cross_entropy_backward
from .double import double
from .softmax import softmax


class _Sums:
    """Of pixels as rows: probabilities p, targets t, which rows count, and the sums per class."""

    def __init__(self, logits, target, ignore_index, smooth):
        (logits,) = double(logits)
        self.n_classes = logits.shape[1]
        self.logits = np.moveaxis(logits, 1, -1).reshape(-1, self.n_classes)
        self.target = np.asarray(target).reshape(-1)
        self.valid = self.target != ignore_index
        broken = self.valid & ((self.target < 0) | (self.target >= self.n_classes))
        labels = np.where(self.valid & ~broken, self.target, 0)
        with np.errstate(invalid="ignore"):
            self.p = np.where(self.valid[:, None], softmax(self.logits), 0.0)
        self.t = np.eye(self.n_classes)[labels] * self.valid[:, None]
        self.p[broken] = np.nan
        both = (self.p * self.t).sum(0)
        # A class that nobody has or predicts, without `smooth`: 0/0, which counts as 1.
        size = self.p.sum(0) + self.t.sum(0) + smooth
        nothing = size == 0
        self.size = np.where(nothing, np.inf, size)
        self.dice = np.where(nothing, 1.0, (2 * both + smooth) / self.size)


def dice_loss(
    logits, target, *, weight=None, ignore_index=-100, smooth=1.0, dice_weight=1.0,
    cross_entropy_weight=0.0,
):  # fmt: skip
    """dice_weight·(1 − mean of the classes' dice) + cross_entropy_weight·cross-entropy.

    logits (N, C, …), target class indices (N, …), weight (C,) of the cross-entropy. Of a class,
    dice = (2·Σ p·t + smooth)/(Σ p + Σ t + smooth) over pixels that are not ignored, p = softmax.
    Where all are ignored both parts are 0.
    """
    sums = _Sums(logits, target, ignore_index, smooth)
    if not sums.valid.any():
        return np.float64(0)
    loss = dice_weight * (1 - sums.dice.mean())
    if cross_entropy_weight:
        options = dict(weight=weight, ignore_index=ignore_index)
        loss += cross_entropy_weight * cross_entropy(sums.logits, sums.target, **options)
    return loss


def dice_loss_backward(
    dloss, logits, target, *, weight=None, ignore_index=-100, smooth=1.0, dice_weight=1.0,
    cross_entropy_weight=0.0,
):  # fmt: skip
    """dlogits, of the shape of `logits`; 0 for ignored pixels."""
    sums = _Sums(logits, target, ignore_index, smooth)
    p, t = sums.p, sums.t
    dp = dice_weight / sums.n_classes * (sums.dice - 2 * t) / sums.size
    dlogits = p * (dp - (p * dp).sum(1, keepdims=True))
    if cross_entropy_weight and sums.valid.any():
        dlogits += cross_entropy_weight * cross_entropy_backward(
            1.0, sums.logits, sums.target, weight=weight, ignore_index=ignore_index
        )
    dlogits = np.where(sums.valid[:, None], double(dloss)[0] * dlogits, 0.0)
    N, _, *others = np.shape(logits)
    return np.moveaxis(dlogits.reshape(N, *others, sums.n_classes), -1, 1)
