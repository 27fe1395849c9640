"""Layer normalisation over the last axis, forward and backward."""

import numpy as np

from .double import double


def layer_norm(x, weight=None, bias=None, *, eps=1e-5):
    """(y, mean, 1/σ); the latter two of the shape of x without its last axis."""
    (x,) = double(x)
    with np.errstate(invalid="ignore", divide="ignore"):  # rows with ±inf, or of nothing
        mean = x.mean(axis=-1) if x.shape[-1] else np.zeros(x.shape[:-1])
        apart = x - mean[..., None]
        rstd = 1 / np.sqrt((apart**2).sum(axis=-1) / x.shape[-1] + eps)
        y = apart * rstd[..., None]
        y = y if weight is None else y * double(weight)[0]
        return y if bias is None else y + double(bias)[0], mean, rstd


def layer_norm_backward(dy, x, weight, mean, rstd):
    """(dx, dweight, dbias) from forward's x, weight (or None), mean and 1/σ."""
    dy, x, mean, rstd = double(dy, x, mean, rstd)
    x_hat = (x - mean[..., None]) * rstd[..., None]
    rows = tuple(range(x.ndim - 1))
    dweight, dbias = (dy * x_hat).sum(axis=rows), dy.sum(axis=rows)
    g = dy if weight is None else dy * double(weight)[0]
    of_row = g.sum(axis=-1, keepdims=True), (g * x_hat).sum(axis=-1, keepdims=True)
    n = max(1, x.shape[-1])
    return rstd[..., None] * (g - of_row[0] / n - x_hat * of_row[1] / n), dweight, dbias
