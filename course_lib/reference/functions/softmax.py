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


def scaled_softmax(x, mask=None, *, scale=1.0, causal=False):
    """softmax(scale·x + mask) of scores (…, T, S); a row that sees nothing, or −inf alone, is 0.

    mask    broadcast to x: bool, True where a score is seen; or numbers to be added
    causal  row i sees scores 0 … i
    """
    scores = double(x)[0] * scale
    seen = np.tri(*scores.shape[-2:], dtype=bool) if causal else np.True_
    mask = None if mask is None else np.asarray(mask)
    if mask is not None and mask.dtype == bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + double(mask)[0]
    scores = np.where(seen, scores, -np.inf)
    nothing = (scores == -np.inf).all(axis=-1, keepdims=True)
    return np.where(nothing, 0.0, softmax(np.where(nothing, 0.0, scores)))


def scaled_softmax_backward(dy, y, *, scale=1.0, causal=False):
    """dx = scale·y·(dy − Σ y·dy); `y` is scaled_softmax's output, and unseen dy take no part."""
    (dy,) = double(dy)
    return scale * softmax_backward(np.tril(dy) if causal else dy, y)
