"""The order in which `kernels.batches` takes a training set, computed on the host."""

import numpy as np

N_ROUNDS = 6
_PHILOX = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def batch_order(n, seed, epoch):
    """The numbers below `n` in the order of an epoch, int64 (n,); `seed` from 0 to 2⁶⁴ − 1.

    A Feistel network over the next power of 4 whose rounds are Philox4x32-10; results beyond n
    are put through it again.
    """
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    order = np.arange(n, dtype=np.uint64)
    todo = np.ones(n, bool)
    while todo.any():
        left, right = order[todo] >> half_bits, order[todo] & mask
        for k in range(N_ROUNDS):
            left, right = right, left ^ (_philox(right, k, epoch, seed) & mask)
        order[todo] = (left << half_bits) | right
        todo = order >= n
    return order.astype(np.int64)


def _philox(first, second, third, key):
    """The first of the four numbers that the counter (first, second, third, 0) gives."""
    counter = [first, np.full_like(first, second), np.full_like(first, third), 0 * first]
    keys = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    for _ in range(10):
        a, b = _PHILOX[0] * counter[0], _PHILOX[1] * counter[2]
        counter = [
            (b >> _HALF) ^ counter[1] ^ keys[0], b & _LOW,
            (a >> _HALF) ^ counter[3] ^ keys[1], a & _LOW,
        ]  # fmt: skip
        keys = [(k + w) & _LOW for k, w in zip(keys, _WEYL, strict=True)]
    return counter[0]
