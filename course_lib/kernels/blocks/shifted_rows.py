"""Rows that begin anywhere, read and written 16 bytes at a time: their ends go by elements.

As in `rows`, a thread holds slots of 16 bytes, `values[u, k]`; here arrays begin on 16-byte
boundaries, and rows anywhere. The slots of a row begin at the last boundary at or before it: slot
(u, k) of the thread of rank `rank` among `n_ranks` holds the row's element

    done + (rank + u·n_ranks)·width + k

where `done` is what `first_slot` says, and a multiple of a turn's elements more in every further
turn. A slot that lies in the row is one access; of the others, elements in the row are an access
each, and those outside are `beyond`. So slots must be enough for `row_plan.reach` elements.
"""

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import load, store, store_vector, vector_width
from course_lib.runtime.intrinsics.predicated import load_vector_if

FAR = 1 << 30  # elements: more than the slots of one turn


@cuda.jit(device=True)
def first_slot(x, start):
    """Elements from x[start] to the first slot: 0 or less."""
    return -(start & (vector_width(x) - 1))


@cuda.jit(device=True)
def shifted_part(x, n_cols, length, part_bits):
    """(first element, number of elements) of this block's part of its row, cut at boundaries."""
    row, part = cuda.blockIdx.x >> part_bits, cuda.blockIdx.x & ((1 << part_bits) - 1)
    begin = part * length + first_slot(x, row * n_cols)
    stop = min(begin + length, n_cols)
    begin = min(max(begin, 0), n_cols)
    return row * n_cols + begin, max(stop - begin, 0)


@cuda.jit(device=True)
def bounds(n_cols, done):
    """(where the row begins, where it ends), in elements from the first slot; in 32 bits."""
    return np.int32(max(-done, 0)), np.int32(min(n_cols - done, FAR))


@cuda.jit(device=True)
def is_inside(at, width, begin, end):
    """Whether the slot at this element lies in the row."""
    return at >= begin and np.int32(at + width) <= end


@cuda.jit(device=True)
def load_shifted(values, n_slots, x, start, n_cols, done, rank, n_ranks, beyond):
    """Fill the slots from x[start:start + n_cols]."""
    width, base = vector_width(x), start + done
    begin, end = bounds(n_cols, done)
    first, stride = np.int32(rank * width), np.int32(n_ranks * width)
    for u in range(n_slots):
        at = np.int32(first + u * stride)
        load_vector_if(values[u], x, base + at, is_inside(at, width, begin, end))
    if begin > 0 or np.int32(n_slots * stride) > end:
        for u in range(n_slots):
            at = np.int32(first + u * stride)
            if not is_inside(at, width, begin, end):
                for k in range(width):
                    values[u, k] = beyond
                    if at >= begin and at < end:
                        values[u, k] = load(x, base + at)
                    at = np.int32(at + 1)


@cuda.jit(device=True)
def store_shifted(values, n_slots, y, start, n_cols, done, rank, n_ranks):
    """The reverse of `load_shifted`."""
    width, base = vector_width(y), start + done
    begin, end = bounds(n_cols, done)
    for u in range(n_slots):
        at = np.int32((rank + u * n_ranks) * width)
        if is_inside(at, width, begin, end):
            store_vector(y, base + at, values[u])
        elif at < end:
            for k in range(width):
                if at >= begin and at < end:
                    store(y, base + at, values[u, k])
                at = np.int32(at + 1)
