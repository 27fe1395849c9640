"""`numba.cuda.random`: the xoroshiro128+ generator, with the same numbers as numba's.

Source: D. Blackman and S. Vigna, "Scrambled linear pseudorandom number generators" (2018).
"""

import functools
import math as _math

import numpy as np

from course_lib.simulator.cuda_api.arrays import DeviceArray
from course_lib.simulator.cuda_api.mathlib import math as _gpu

#: One generator's state: two 64-bit words.
xoroshiro128p_dtype = np.dtype([("s0", np.uint64), ("s1", np.uint64)], align=True)

_MASK = (1 << 64) - 1
_JUMP = 0xBEAC0467EBA5FACB, 0xD86B048B86AA9922
_TWO_PI32, _TWO_PI64 = np.float32(2 * _math.pi), 2 * _math.pi


def _seed_state(seed):
    """SplitMix64 of the seed, as numba uses it: the same word twice."""
    z = (int(seed) + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    z ^= z >> 31
    return z, z


def _advance(s0, s1):
    s1 ^= s0
    return ((s0 << 55 | s0 >> 9) & _MASK ^ s1 ^ s1 << 14 & _MASK,
            (s1 << 36 | s1 >> 28) & _MASK)


def _slow_jump(s0, s1):
    j0 = j1 = 0
    for word in _JUMP:
        for bit in range(64):
            if word >> bit & 1:
                j0, j1 = j0 ^ s0, j1 ^ s1
            s0, s1 = _advance(s0, s1)
    return j0, j1


@functools.cache
def _jump_tables():
    """Per byte of the state, what it adds to the state 2**64 steps on: a jump is linear."""
    columns = []
    for bit in range(128):
        s0, s1 = _slow_jump(1 << bit & _MASK, 1 << bit >> 64)
        columns.append(s0 | s1 << 64)
    tables = []
    for byte in range(16):
        table = [0] * 256
        for value in range(1, 256):
            low = value & -value
            table[value] = table[value ^ low] ^ columns[8 * byte + low.bit_length() - 1]
        tables.append(table)
    return tables


def _jump(s0, s1):
    state, result = s0 | s1 << 64, 0
    for table in _jump_tables():
        result ^= table[state & 255]
        state >>= 8
    return result & _MASK, result >> 64


def init_xoroshiro128p_state(states, index, seed):
    """Set one state from a 64-bit seed."""
    array = _writable(states)
    array[index]["s0"], array[index]["s1"] = _seed_state(seed)


def xoroshiro128p_jump(states, index):
    """Advance one state by 2**64 steps."""
    array = _writable(states)
    state = array[index]
    state["s0"], state["s1"] = _jump(int(state["s0"]), int(state["s1"]))


def _writable(states):
    return states._array if isinstance(states, DeviceArray) else states


def xoroshiro128p_next(states, index):
    """The next random uint64 of one state."""
    return np.uint64(_next(states, index))


def _next(states, index):
    array = _writable(states)
    state = array[index]
    s0, s1 = int(state["s0"]), int(state["s1"])
    state["s0"], state["s1"] = _advance(s0, s1)
    return s0 + s1 & _MASK


def xoroshiro128p_uniform_float64(states, index):
    """A float64 in [0, 1)."""
    return np.float64((_next(states, index) >> 11) / (1 << 53))


def xoroshiro128p_uniform_float32(states, index):
    """A float32 in [0, 1)."""
    return np.float32((_next(states, index) >> 11) / (1 << 53))


def uint64_to_unit_float64(x):
    """A uint64 as a float64 in [0, 1)."""
    return np.float64((int(x) >> 11) / (1 << 53))


def uint64_to_unit_float32(x):
    """A uint64 as a float32 in [0, 1)."""
    return np.float32(uint64_to_unit_float64(x))


def xoroshiro128p_normal_float32(states, index):
    """A normally distributed float32; takes two steps (Box-Muller)."""
    u1 = xoroshiro128p_uniform_float32(states, index)
    u2 = xoroshiro128p_uniform_float32(states, index)
    return _gpu.sqrt(np.float32(-2) * _gpu.log(u1)) * _gpu.cos(_TWO_PI32 * u2)


def xoroshiro128p_normal_float64(states, index):
    """A normally distributed float64, from two float32 draws as in numba."""
    u1 = xoroshiro128p_uniform_float32(states, index)
    u2 = xoroshiro128p_uniform_float32(states, index)
    return np.float64(_gpu.sqrt(-2.0 * float(_gpu.log(u1))) * _gpu.cos(_TWO_PI64 * float(u2)))


def init_xoroshiro128p_states_cpu(states, seed, subsequence_start):
    """Fill a host array of states, 2**64 steps apart."""
    state = _seed_state(int(seed) & _MASK)
    for _ in range(int(subsequence_start)):
        state = _jump(*state)
    for index in range(states.shape[0]):
        if index:
            state = _jump(*state)
        states[index] = state


def init_xoroshiro128p_states(states, seed, subsequence_start=0, stream=0):
    """Fill a device array of states, 2**64 steps apart."""
    init_xoroshiro128p_states_cpu(_writable(states), seed, subsequence_start)


def create_xoroshiro128p_states(n, seed, subsequence_start=0, stream=0):
    """A device array of `n` independent generators' states.

    Parameters
    ----------
    n : int
    seed : int, taken as uint64
    subsequence_start : int
        How many times 2**64 steps the first state lies after the seed's.
    """
    states = np.empty(n, xoroshiro128p_dtype)
    init_xoroshiro128p_states_cpu(states, seed, subsequence_start)
    return DeviceArray(states)
