"""The mask of dropout, from the generator: for one element, and for all slots of a thread."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import ZERO
from course_lib.runtime.philox import philox_four, philox_one


@cuda.jit(device=True)
def dropped(value, element, scale, threshold, key0, key1):
    """`value` after dropout. Multiplied, not selected: a NaN stays NaN, as in PyTorch."""
    return value * (scale if philox_one(element, key0, key1) >= threshold else ZERO)


@cuda.jit(device=True)
def kept_slots(n_slots, width, first, n_cols, rank, n_ranks, vectors, threshold, key0, key1):
    """Which slots of a thread dropout keeps: bit u·width + k stands for slot (u, k).

    Slots and `vectors` as in `softmax/rows.py`; `first` is the generator's number of the row's
    element 0, a multiple of 4 where `vectors` is True.
    """
    bits = np.uint32(0)
    if vectors:
        for u in range(n_slots):
            col = (rank + u * n_ranks) * width
            if col < n_cols:
                for k in range(0, width, 4):
                    n0, n1, n2, n3 = philox_four((first + col + k) >> 2, key0, key1)
                    four = 1 if n0 >= threshold else 0
                    four |= 2 if n1 >= threshold else 0
                    four |= 4 if n2 >= threshold else 0
                    four |= 8 if n3 >= threshold else 0
                    bits = np.uint32(bits | np.uint32(four << (u * width + k)))
    else:
        for u in range(n_slots):
            for k in range(width):
                col = (u * width + k) * n_ranks + rank
                if col < n_cols and philox_one(first + col, key0, key1) >= threshold:
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
