"""Numbers for inputs: PyTorch's tensors, or NumPy's arrays where PyTorch is not installed."""

import math

import numpy as np

from course_lib.runtime.host.arrays import is_tensor


class _Missing:
    """Stands for PyTorch, and for all that is in it, where it is not installed."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


try:
    import torch
except ModuleNotFoundError:
    torch = _Missing()
HAS_TORCH = not isinstance(torch, _Missing)


class Draw:
    """Random float32 numbers and integers by a seed: always the same, made on the CPU."""

    def __init__(self, seed):
        if HAS_TORCH:
            self._generator = torch.Generator().manual_seed(seed)
        else:
            self._generator = np.random.default_rng(seed)

    def normal(self, shape):
        """Of mean 0 and variance 1."""
        if HAS_TORCH:
            return torch.randn(shape, generator=self._generator)
        return np.asarray(self._generator.standard_normal(shape, np.float32))

    def uniform(self, shape):
        """Between 0 and 1."""
        if HAS_TORCH:
            return torch.rand(shape, generator=self._generator)
        return np.asarray(self._generator.random(shape, np.float32))

    def integers(self, high, shape):
        """From 0 to high - 1."""
        if HAS_TORCH:
            return torch.randint(high, shape, generator=self._generator)
        return self._generator.integers(high, size=shape)


def beside(found, x):
    """`found` where x is, and of its kind: a tensor on the same device, or an array."""
    if is_tensor(x):
        return found.to(x.device)
    return found.numpy() if is_tensor(found) else found


def alike(found, x):
    """`found` where x is, of its kind and dtype."""
    return found.to(x) if is_tensor(x) else beside(found, x).astype(x.dtype)


def gradient(x, shape=None):
    """A dy for x, of its dtype and shape, or of `shape`: as random, and not correlated with it."""
    shape = tuple(x.shape if shape is None else shape)
    return alike(Draw(math.prod(shape) + 1).normal(shape), x)


def saved(peer, truth, *inputs):
    """What a forward pass saves: PyTorch's result, or without it the right one in x's dtype."""
    if is_tensor(inputs[0]):
        return peer(*inputs)
    return truth(*inputs).astype(inputs[0].dtype)
