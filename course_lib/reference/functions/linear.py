"""The linear layer: each row of x is multiplied by a matrix. Derivation: notebook 10."""

import numpy as np

from .double import double


def linear(x, weight, bias=None, *, activation="none"):
    """y = x·weightᵀ + bias, then max(y, 0) if `activation` is "relu"; x (..., I), weight (O, I)."""
    x, weight = double(x, weight)
    with np.errstate(invalid="ignore", over="ignore"):
        y = x @ weight.T
        if bias is not None:
            y = y + double(bias)[0]
    if activation == "relu":
        return np.where(y <= 0, 0.0, y)  # NaN passes
    return y


def linear_backward(dy, x, weight):
    """(dx, dweight, dbias): dy·weight, dyᵀ·x and dy, the last two summed over all rows."""
    dy, x, weight = double(dy, x, weight)
    n_rows = int(np.prod(x.shape[:-1]))
    rows, inputs = dy.reshape(n_rows, dy.shape[-1]), x.reshape(n_rows, x.shape[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        return dy @ weight, rows.T @ inputs, rows.sum(axis=0)
