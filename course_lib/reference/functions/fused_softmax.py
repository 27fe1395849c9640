"""Softmax fused with what surrounds it: dropout behind it, batch normalisation and ReLU before it.

Derivations: notebook 05.
"""

import numpy as np

from .double import double
from .softmax import softmax, softmax_backward


def philox(counter, key):
    """Philox4x32-10 of an array of counters (…, 4) and one key (2 words): numbers (…, 4), uint32.

    Salmon, Moraes, Dror and Shaw (2011), written for arrays, with Python's own integers for the
    key: nothing is shared with the kernels' generator.
    """
    words = [np.asarray(counter)[..., i].astype(np.uint64) for i in range(4)]
    first, second = (int(word) for word in key)
    for _ in range(10):
        left, right = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            right >> np.uint64(32) ^ words[1] ^ np.uint64(first),
            right & np.uint64(0xFFFFFFFF),
            left >> np.uint64(32) ^ words[3] ^ np.uint64(second),
            left & np.uint64(0xFFFFFFFF),
        ]
        first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
    return np.stack(words, axis=-1).astype(np.uint32)


def random_numbers(n, seed, offset):
    """The uint32 numbers of the elements `offset` … `offset + n − 1` for `seed`, mod 2⁶⁴."""
    first, last = offset // 4, (offset + n + 3) // 4
    group = np.arange(first, last, dtype=np.uint64)
    zero = np.zeros_like(group)
    counter = np.stack([group & np.uint64(0xFFFFFFFF), group >> np.uint64(32), zero, zero], axis=-1)
    seed %= 2**64
    return philox(counter, (seed % 2**32, seed // 2**32)).ravel()[offset % 4 :][:n]


def dropout_mask(shape, p, seed, offset):
    """Which elements dropout keeps: those whose 16-bit number is at least p·2¹⁶, rounded.

    The 16-bit number of element i is the lower half of number i // 2 if i is even, else the upper.
    """
    n = int(np.prod(shape, dtype=np.int64))
    first = offset // 2
    words = random_numbers((offset + n + 1) // 2 - first, seed, first)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1).ravel()
    return (halves[offset % 2 :][:n] >= round(p * 2**16)).reshape(shape)


def _dropout(values, p, seed, offset):
    mask = dropout_mask(values.shape, p, seed, offset)
    # Multiplied, not selected: a NaN that is dropped stays NaN, as in PyTorch.
    return values * mask * (1 / (1 - p) if round(p * 2**16) < 2**16 else 0.0)


def softmax_dropout(x, p, seed, offset):
    """softmax(x) over the last axis, then dropout: each element zeroed with probability p."""
    return _dropout(softmax(x), p, seed, offset)


def softmax_dropout_backward(dz, x, p, seed, offset):
    """dx, from the gradient of softmax_dropout's output and its input."""
    (dz,) = double(dz)
    return softmax_backward(_dropout(dz, p, seed, offset), softmax(x))


def _normalise(x, mean, var, weight, bias, eps):
    x, mean, var, weight, bias = double(x, mean, var, weight, bias)
    normal = (x - mean) / np.sqrt(var + eps)
    return normal, normal * weight + bias


def bn_relu_softmax(x, mean, var, weight, bias, eps=1e-5):
    """softmax(relu(batch_norm(x))) over the features of x (N, C), with given statistics."""
    _, z = _normalise(x, mean, var, weight, bias, eps)
    return softmax(np.where(z <= 0, 0.0, z))


def bn_relu_softmax_backward(dy, y, x, mean, var, weight, bias, eps=1e-5):
    """(dx, dweight, dbias), from dy, the output y and the inputs of bn_relu_softmax."""
    normal, z = _normalise(x, mean, var, weight, bias, eps)
    dz = np.where(z <= 0, 0.0, softmax_backward(dy, y))
    var, weight = double(var, weight)
    dx = dz * weight / np.sqrt(var + eps)
    return dx, (dz * normal).sum(axis=0), dz.sum(axis=0)
