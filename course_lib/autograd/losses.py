"""Losses of a segmentation: logits (N, C, H, W) against a class for each pixel.

`target` is (N, H, W), int64: a class from 0 to C − 1, or NO_DATA where nobody knows. Such pixels
count nothing. Where no pixel counts, the loss is 0 and so is its gradient. A class of any other
number makes the loss NaN: on a GPU nobody waits to see whether one is there.

Each loss knows its gradient with respect to the logits x in closed form, from p = softmax(x) over
the classes. The softmax couples all classes of a pixel: dx_c = p_c·(g_c − Σ_k p_k·g_k) for the
gradient g of p. Derivations: the notebook on radar images.
"""

from course_lib.backend import get_array_module

from .tape import Function, as_tensor

NO_DATA = -1


class _Loss(Function):
    """What losses share: p, the classes as 0 and 1, and which pixels count."""

    def look(self, logits, target):
        if logits.ndim != 4 or tuple(target.shape) != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(
                f"logits must be (N, C, H, W) and target (N, H, W), not {tuple(logits.shape)} and "
                f"{tuple(target.shape)}"
            )
        xp = get_array_module(logits)
        if not xp.isdtype(target.dtype, "integral"):
            raise ValueError(f"target holds classes, which are integers, not {target.dtype}")
        n_classes, dtype = logits.shape[1], logits.dtype
        classes = xp.arange(n_classes, dtype=target.dtype, device=logits.device)
        one_hot = xp.astype(target[:, None] == classes[:, None, None], dtype)
        counts = xp.astype(target != NO_DATA, dtype)[:, None]
        unknown = xp.any((target < NO_DATA) | (target >= n_classes))
        nan, zero = (
            xp.asarray(value, dtype=dtype, device=logits.device) for value in (float("nan"), 0.0)
        )
        self.poison = xp.where(unknown, nan, zero)
        shifted = logits - xp.max(logits, axis=1, keepdims=True)
        total = xp.sum(xp.exp(shifted), axis=1, keepdims=True, dtype=dtype)
        log_p = shifted - xp.log(total)
        return xp, log_p, one_hot, counts


class _CrossEntropy(_Loss):
    def __init__(self, weight):
        self.weight = weight

    def look(self, logits, target):
        """Keep each pixel's share of the mean, p and the classes; returns xp and log p."""
        xp, log_p, self.one_hot, counts = super().look(logits, target)
        dtype = logits.dtype
        if self.weight is not None:
            if tuple(self.weight.shape) != (logits.shape[1],):
                raise ValueError(
                    f"weight must have shape ({logits.shape[1]},), not {tuple(self.weight.shape)}"
                )
            of_pixel = xp.sum(self.one_hot * self.weight[:, None, None], axis=1, dtype=dtype)
            counts = counts * of_pixel[:, None]
        normaliser = xp.sum(counts, dtype=dtype)
        self.share = counts / xp.where(normaliser == 0, xp.ones_like(normaliser), normaliser)
        self.p = xp.exp(log_p)
        return xp, log_p

    def forward(self, logits, target):
        xp, log_p = self.look(logits, target)
        return -xp.sum(self.share * self.one_hot * log_p, dtype=logits.dtype) + self.poison

    def backward(self, dy):
        return (dy + self.poison) * self.share * (self.p - self.one_hot), None


class _Focal(_CrossEntropy):
    def __init__(self, gamma, weight):
        self.gamma, self.weight = gamma, weight

    def forward(self, logits, target):
        xp, log_p = self.look(logits, target)
        right, log_right = (
            xp.sum(self.one_hot * a, axis=1, keepdims=True, dtype=a.dtype) for a in (self.p, log_p)
        )
        # Of the loss of a pixel, −wrong^gamma·log(right): d/d right, times right, because
        # d right/dx_c = right·(1[c is right] − p_c).
        wrong = 1 - right
        self.slope = -(wrong**self.gamma)
        if self.gamma > 0:
            one, zero = xp.ones_like(wrong), xp.zeros_like(wrong)
            power = xp.where(wrong == 0, one, wrong) ** (self.gamma - 1)
            power = xp.where(wrong == 0, zero, power)
            self.slope = self.slope + self.gamma * power * right * log_right
        loss = -(wrong**self.gamma) * log_right
        return xp.sum(self.share * loss, dtype=logits.dtype) + self.poison

    def backward(self, dy):
        return (dy + self.poison) * self.share * self.slope * (self.one_hot - self.p), None


class _Dice(_Loss):
    def __init__(self, smooth):
        self.smooth = smooth

    def forward(self, logits, target):
        xp, log_p, one_hot, counts = self.look(logits, target)
        self.p, self.xp = xp.exp(log_p), xp
        self.counts, self.one_hot = counts, one_hot * counts

        def total(a):
            return xp.sum(a, axis=(0, 2, 3), dtype=logits.dtype)

        self.common = 2 * total(self.p * self.one_hot) + self.smooth
        self.sizes = total(self.p * counts) + total(self.one_hot) + self.smooth
        # 0 where nothing counts: nothing was predicted wrongly.
        self.any = xp.astype(xp.any(counts > 0), logits.dtype)
        dice = xp.mean(self.common / self.sizes)
        return self.any * (1 - dice) + self.poison

    def backward(self, dy):
        xp, n_classes = self.xp, len(self.common)
        common, sizes = self.common[:, None, None], self.sizes[:, None, None]
        # d loss/dp; p stands in both sums.
        g = -(2 * self.one_hot / sizes - self.counts * common / (sizes * sizes)) / n_classes
        inner = xp.sum(self.p * g, axis=1, keepdims=True, dtype=g.dtype)
        return (dy + self.poison) * self.any * self.p * (g - inner), None


def weighted_cross_entropy(logits, target, weight=None):
    """−log p of the right class, averaged over pixels, each counted by its class's weight.

    logits  Tensor (N, C, H, W)
    target  array (N, H, W) of integers; NO_DATA where no class is known
    weight  array (C,) of logits' dtype; None: all classes count alike

    The result is a Tensor of shape (). ValueError for shapes and dtypes that do not fit.
    """
    return _CrossEntropy(weight)(logits, as_tensor(target, ()))


def focal_loss(logits, target, gamma=2.0, weight=None):
    """Cross-entropy that cares less about pixels it is sure of (Lin and others, 2017).

    gamma  0 gives `weighted_cross_entropy`; the other arguments are that one's
    """
    if gamma < 0:
        raise ValueError(f"gamma must be 0 or more, not {gamma}")
    return _Focal(gamma, weight)(logits, as_tensor(target, ()))


def dice_loss(logits, target, smooth=1.0):
    """1 − the Dice coefficient 2·Σ p·t/(Σ p + Σ t), softly, averaged over the classes.

    smooth  is added above and below, so that a class that is not there has a value, near 1 where it
            is not predicted either (Milletari, Navab and Ahmadi, 2016)
    """
    return _Dice(smooth)(logits, as_tensor(target, ()))


def combined_loss(logits, target, weight=None, dice_share=0.5, smooth=1.0):
    """(1 − dice_share)·weighted_cross_entropy + dice_share·dice_loss."""
    cross_entropy = weighted_cross_entropy(logits, target, weight)
    return cross_entropy * (1 - dice_share) + dice_loss(logits, target, smooth) * dice_share
