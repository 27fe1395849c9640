"""Philox4x32-10: random numbers by their position, in any order, with nothing to remember.

The generator is a function of a 128-bit counter and a 64-bit key that gives four random uint32
numbers. Threads need no state and no order among themselves, and a backward pass computes the very
numbers of its forward pass again. The same bits come out on a GPU and in the simulator: all
arithmetic is on integers, and every width is written out, because numba widens the product of two
uint32 to 64 bits where NumPy wraps it.

Source: J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(2011). PyTorch and cuRAND use the same generator.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.host import device

if device.use_simulator():
    cuda = simulator.cuda
else:
    from numba import cuda

N_ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
# What the key grows by each round: the fractions of the golden ratio and of the root of 3.
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)


@cuda.jit(device=True)
def philox4x32(c0, c1, c2, c3, key0, key1):
    """Four random uint32 numbers from a counter (c0 … c3) and a key; all uint32."""
    for _ in range(N_ROUNDS):
        product0 = MULTIPLIER_0 * np.uint64(c0)
        product1 = MULTIPLIER_1 * np.uint64(c2)
        c0 = np.uint32(np.uint32(product1 >> HALF) ^ c1 ^ key0)
        c2 = np.uint32(np.uint32(product0 >> HALF) ^ c3 ^ key1)
        c1 = np.uint32(product1 & LOW)
        c3 = np.uint32(product0 & LOW)
        key0 = np.uint32((np.uint64(key0) + WEYL_0) & LOW)
        key1 = np.uint32((np.uint64(key1) + WEYL_1) & LOW)
    return c0, c1, c2, c3


def _philox4x32(c0, c1, c2, c3, key0, key1):
    """`philox4x32` in the simulator, in Python's integers: a tenth of the time of NumPy's."""
    low = 0xFFFFFFFF
    multiplier0, multiplier1 = int(MULTIPLIER_0), int(MULTIPLIER_1)
    weyl0, weyl1 = int(WEYL_0), int(WEYL_1)
    c0, c1, c2, c3, key0, key1 = int(c0), int(c1), int(c2), int(c3), int(key0), int(key1)
    for _ in range(N_ROUNDS):
        product0, product1 = multiplier0 * c0, multiplier1 * c2
        c0, c1 = product1 >> 32 ^ c1 ^ key0, product1 & low
        c2, c3 = product0 >> 32 ^ c3 ^ key1, product0 & low
        key0, key1 = key0 + weyl0 & low, key1 + weyl1 & low
    return np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)


simulator.register_twin(philox4x32, _philox4x32)


@cuda.jit(device=True)
def philox_four(group, key0, key1):
    """The random uint32 numbers of the elements 4·group … 4·group + 3; `group` ≥ 0, int64."""
    low, high = np.uint32(group & 0xFFFFFFFF), np.uint32(group >> 32)
    return philox4x32(low, high, np.uint32(0), np.uint32(0), key0, key1)


@cuda.jit(device=True)
def philox_one(element, key0, key1):
    """The random uint32 number of one element; four times the work of `philox_four` for each."""
    n0, n1, n2, n3 = philox_four(element >> 2, key0, key1)
    word = element & 3
    if word == 0:
        return n0
    if word == 1:
        return n1
    return n2 if word == 2 else n3


def key_of(seed):
    """The key of a Python int, taken modulo 2⁶⁴, as two uint32 numbers for a kernel."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an int, not {seed!r}")
    seed = int(seed) % (1 << 64)
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
