"""Softmax and its logarithm, over the last axis. Derivations: notebooks 03 and 04."""

import numpy as np

from .double import double


def _shifted(x):
    # A row without finite values gives NaN, as in PyTorch: -inf - -inf, inf - inf.
    largest = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        return x - largest


def softmax(x):
    """exp(x) / Σ exp(x), of the same shape; without overflow for any finite x."""
    e = np.exp(_shifted(*double(x)))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_backward(dy, y):
    """dx = y·(dy − Σ y·dy); `y` is softmax's output."""
    dy, y = double(dy, y)
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


def log_softmax(x):
    """x − log Σ exp(x), of the same shape."""
    x = _shifted(*double(x))
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def log_softmax_backward(dy, y):
    """dx = dy − exp(y)·Σ dy; `y` is log_softmax's output."""
    dy, y = double(dy, y)
    return dy - np.exp(y) * dy.sum(axis=-1, keepdims=True)
