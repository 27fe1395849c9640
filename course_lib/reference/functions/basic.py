"""Activations and pooling."""

import math

import numpy as np

from .double import double


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


def relu6(x):
    """min(max(x, 0), 6), NaN passed through."""
    (x,) = double(x)
    return np.clip(x, 0.0, 6.0)


def relu6_backward(dy, y):
    """dy where 0 < y < 6, else 0; `y` is relu6's output (its input does as well)."""
    dy, y = double(dy, y)
    return np.where((y <= 0) | (y >= 6), 0.0, dy)


def leaky_relu(x, negative_slope=0.01):
    """x where x > 0, else negative_slope·x."""
    (x,) = double(x)
    return np.where(x > 0, x, x * negative_slope)


def leaky_relu_backward(dy, x, negative_slope=0.01):
    """dy where x > 0, else negative_slope·dy; `x` is leaky_relu's input."""
    dy, x = double(dy, x)
    return np.where(x > 0, dy, dy * negative_slope)


def hard_sigmoid(x):
    """min(max(x + 3, 0), 6) / 6, NaN passed through."""
    (x,) = double(x)
    return np.clip(x + 3.0, 0.0, 6.0) / 6.0


def hard_sigmoid_backward(dy, x):
    """dy / 6 where -3 < x < 3, else 0; `x` is hard_sigmoid's input."""
    dy, x = double(dy, x)
    return np.where((x > -3) & (x < 3), dy / 6.0, 0.0)


def hard_swish(x):
    """x·hard_sigmoid(x)."""
    (x,) = double(x)
    with np.errstate(invalid="ignore"):  # -inf · 0 is NaN, as in PyTorch
        return x * hard_sigmoid(x)


def hard_swish_backward(dy, x):
    """dy·(x/3 + 1/2) where -3 < x < 3, dy from 3 on, 0 up to -3; `x` is hard_swish's input."""
    dy, x = double(dy, x)
    return np.where(x <= -3, 0.0, np.where(x < 3, dy * (x / 3.0 + 0.5), dy))


def gelu(x):
    """x·Φ(x), with the normal distribution Φ."""
    (x,) = double(x)
    with np.errstate(invalid="ignore"):
        return x * _normal(x)


def gelu_backward(dy, x):
    """dy·(Φ(x) + x·φ(x)), with the normal distribution and its density; `x` is gelu's input."""
    dy, x = double(dy, x)
    with np.errstate(invalid="ignore"):
        return dy * (_normal(x) + x * np.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi))


def _normal(x):
    """Φ(x), to the last digits below zero too."""
    halves = [0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x.ravel().tolist()]
    return np.array(halves, dtype=np.float64).reshape(x.shape)


def gelu_tanh(x):
    """x·(1 + tanh u)/2 = x·sigmoid(2u), u = √(2/π)·(x + 0.044715·x³): GELU, nearly."""
    (x,) = double(x)
    with np.errstate(invalid="ignore"):
        return x * sigmoid(_twice_u(x))


def gelu_tanh_backward(dy, x):
    """dy·s·(1 + x·2u'·(1 − s)) with s = sigmoid(2u); `x` is gelu_tanh's input."""
    dy, x = double(dy, x)
    s = sigmoid(_twice_u(x))
    slope = 2.0 * math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x * x)
    with np.errstate(invalid="ignore"):
        return dy * s * (1.0 + x * slope * (1.0 - s))


def _twice_u(x):
    return 2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)


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
