"""The mask of dropout, from the generator: for one element, and for all slots of a thread.

Element i has half of the generator's number i // 2: its lower 16 bits if i is even, its upper ones
if i is odd. A call of the generator so serves eight elements; with a whole number for each, drawing
would take longer than memory does. `threshold` is compared with those 16 bits, followed by zeros.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics.philox import key_of, philox_four, philox_one

HALF = np.uint32(16)


@cuda.jit(device=True)
def is_kept(element, threshold, key0, key1):
    """Whether dropout keeps one element; a whole call of the generator for it."""
    number = philox_one(element >> 1, key0, key1)
    if element & 1 == 0:
        number = np.uint32(number << HALF)
    return number >= threshold


@cuda.jit(device=True)
def keep_pair(number, threshold):
    """Bit 0: whether the element with the lower half of `number` is kept; bit 1: the upper."""
    # The upper half needs no masking: what stands below it cannot turn the comparison.
    pair = 1 if np.uint32(number << HALF) >= threshold else 0
    return pair | 2 if number >= threshold else pair


@cuda.jit(device=True)
def dropped(value, element, scale, threshold, key0, key1):
    """`value` after dropout. Multiplied, not selected: a NaN stays NaN, as in PyTorch."""
    return value * (scale if is_kept(element, threshold, key0, key1) else ZERO)


@cuda.jit(device=True)
def kept_slots(n_slots, width, first, n_cols, rank, n_ranks, vectors, threshold, key0, key1):
    """Which slots of a thread dropout keeps: bit u·width + k stands for slot (u, k).

    Slots and `vectors` as in `rows`; `first` is the generator's number of the row's
    element 0, a multiple of the width where `vectors` is True.
    """
    bits = np.uint32(0)
    if vectors:
        for u in range(n_slots):
            col = (rank + u * n_ranks) * width
            if col < n_cols:
                n0, n1, n2, n3 = philox_four((first + col) >> 3, key0, key1)
                if width == 4 and (first + col) & 4:
                    n0, n1 = n2, n3
                kept = keep_pair(n0, threshold) | keep_pair(n1, threshold) << 2
                if width == 8:
                    kept |= keep_pair(n2, threshold) << 4 | keep_pair(n3, threshold) << 6
                bits = np.uint32(bits | np.uint32(kept << (u * width)))
    else:
        for u in range(n_slots):
            for k in range(width):
                col = (u * width + k) * n_ranks + rank
                if col < n_cols and is_kept(first + col, threshold, key0, key1):
                    bits = np.uint32(bits | np.uint32(1 << (u * width + k)))
    return bits


@cuda.jit(device=True)
def multiply_kept(values, n_slots, width, kept, factor):
    """Every slot times `factor` if its bit in `kept` is set, else times 0."""
    zero = factor * ZERO  # NaN where `factor` is: such a row is NaN throughout
    for u in range(n_slots):
        for k in range(width):
            bit = np.uint32(1 << (u * width + k))
            values[u, k] *= factor if kept & bit else zero


def generator_arguments(p, seed, offset, n_elements):
    """(scale, threshold, offset, key0, key1) as kernels take them."""
    if not isinstance(p, (int, float, np.number)):
        raise TypeError(f"p must be a number, not {p!r}")
    if not 0 <= p <= 1:  # NaN is refused too
        raise ValueError(f"p must be a probability between 0 and 1, not {p!r}")
    if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
        raise TypeError(f"offset must be an int, not {offset!r}")
    if not 0 <= offset < 2**63 - n_elements:
        raise ValueError(
            f"offset must be at least 0, and less than 2**63 together with the {n_elements:,} "
            f"elements; it is {offset}"
        )
    n_dropped = round(p * 2**16)  # of the 2¹⁶ numbers an element may draw
    # p = 1 drops all: the one threshold beyond uint32 is not needed where everything is times 0.
    scale = 1 / (1 - p) if n_dropped < 2**16 else 0.0
    threshold = min(n_dropped << 16, 2**32 - 1)
    return np.float32(scale), np.uint32(threshold), int(offset), *key_of(seed)
