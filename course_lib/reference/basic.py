"""Activations and pooling."""

import numpy as np

from ._double import double


def relu(x):
    """max(x, 0), NaN passed through."""
    (x,) = double(x)
    return np.where(x <= 0, 0.0, x)


def relu_backward(dy, y):
    """dy where y > 0, else 0; `y` is relu's output (its input does as well)."""
    dy, y = double(dy, y)
    return np.where(y <= 0, 0.0, dy)


def sigmoid(x):
    """1 / (1 + e⁻ˣ), without overflow for any x."""
    (x,) = double(x)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def sigmoid_backward(dy, y):
    """dy·y·(1 − y); `y` is sigmoid's output."""
    dy, y = double(dy, y)
    return dy * y * (1.0 - y)


def swish(x):
    """x·sigmoid(x), also called SiLU."""
    (x,) = double(x)
    with np.errstate(invalid="ignore"):  # -inf · 0 is NaN, as in PyTorch
        return x * sigmoid(x)


def swish_backward(dy, x):
    """dy·s·(1 + x·(1 − s)) with s = sigmoid(x); `x` is swish's input."""
    dy, x = double(dy, x)
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


def global_avg_pool(x):
    """Mean of each plane: N·C·H·W to N·C. An empty plane's mean is NaN."""
    (x,) = double(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        return x.sum(axis=(2, 3)) / np.float64(x.shape[2] * x.shape[3])


def global_avg_pool_backward(dy, size):
    """dy[n, c] / (H·W) for each of the H·W elements of its plane; `size` is (H, W)."""
    (dy,) = double(dy)
    H, W = size
    return np.broadcast_to(dy[:, :, None, None] / (H * W), (*dy.shape, H, W))
