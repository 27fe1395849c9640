"""Weight and bias of the columns, and what becomes of one element.

    x̂ = (x − mean)·rstd     y = x̂·weight + bias
    g = dy·weight           dx = rstd·(g − Σ g/n − x̂·Σ g·x̂/n), both sums over the row's n columns

The gradients of weight and bias are sums down the columns, Σ dy·x̂ and Σ dy, taken in two stages so
that their order is fixed: partial sums of some rows each, then `finish_kernel`.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

FINISH_BLOCK_SIZE = 512
MOST_ROW_BITS = 6  # log2 of the rows of threads: 8 neighbouring columns are 32 bytes, a sector
AT_ONCE = 8  # parts that a thread loads before it uses the first


@cuda.jit(device=True)
def column_of(u, k, width, rank, n_ranks, vectors):
    """The column that slot (u, k) of a thread holds, as in `blocks/rows.py`."""
    if vectors:
        return (rank + u * n_ranks) * width + k
    return (u * width + k) * n_ranks + rank


@cuda.jit(device=True)
def count_held(n_slots, width, length, rank, n_ranks, vectors):
    """How many numbers of a row of `length` a thread holds: they are its first ones."""
    found = 0
    if vectors:
        for u in range(n_slots):
            if column_of(u, 0, width, rank, n_ranks, True) < length:
                found += width
    else:
        for slot in range(n_slots * width):
            if slot * n_ranks + rank < length:
                found += 1
    return found


@cuda.jit(device=True)
def load_features(
    target, place, array, given, absent, start, n_cols, u, width, rank, n_ranks, vectors
):
    """Fill target[place] with what array[start:start + n_cols] has for the thread's slot `u`.

    `absent` where nothing is `given`, and past the end. `width` is that of the rows' elements: 16
    bytes of halves go with two vectors of float32.
    """
    for k in range(width):
        target[place, k] = absent
    if given:
        if vectors:
            col, part = column_of(u, 0, width, rank, n_ranks, vectors), vector_width(array)
            piece = cuda.local.array(MAX_WIDTH, np.float32)
            if col < n_cols:
                for first in range(0, width, part):
                    load_vector(piece, array, start + col + first)
                    for k in range(part):
                        target[place, first + k] = piece[k]
        else:
            for k in range(width):
                col = column_of(u, k, width, rank, n_ranks, vectors)
                if col < n_cols:
                    target[place, k] = load(array, start + col)


@cuda.jit(device=True)
def store_slot(values, u, y, start, n_cols, rank, n_ranks, vectors):
    """What slot `u` of a thread holds goes to y[start:start + n_cols]."""
    width = vector_width(y)
    if vectors:
        col = column_of(u, 0, width, rank, n_ranks, vectors)
        if col < n_cols:
            store_vector(y, start + col, values[u])
    else:
        for k in range(width):
            col = column_of(u, k, width, rank, n_ranks, vectors)
            if col < n_cols:
                store(y, start + col, values[u, k])


@cuda.jit(device=True)
def feature(array, given, absent, col):
    """The same for one column."""
    if given:
        return load(array, col)
    return absent


@cuda.jit
def finish_kernel(partial, dweight, dbias, n_parts, n_cols, row_bits):
    # partial[part] holds Σ dy·x̂ of each column, then Σ dy of each. 2 ** `row_bits` rows of threads
    # share the parts of as many columns as are left for them in the block.
    sums = cuda.shared.array(FINISH_BLOCK_SIZE, np.float32)
    found = cuda.local.array(AT_ONCE, np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    n_columns = FINISH_BLOCK_SIZE >> row_bits
    tid, n_rows = cuda.threadIdx.x, 1 << row_bits
    row = tid // n_columns
    col = cuda.blockIdx.x * n_columns + tid % n_columns
    total = ZERO
    if col < 2 * n_cols:
        part = row
        while part < n_parts:
            for u in range(AT_ONCE):
                found[u] = load(partial, min(part + u * n_rows, n_parts - 1) * 2 * n_cols + col)
            for u in range(AT_ONCE):
                if part + u * n_rows < n_parts:
                    total += found[u]
            part += AT_ONCE * n_rows
    sums[tid] = total
    step = n_rows >> 1
    while step > 0:
        cuda.syncthreads()
        if row < step:
            sums[tid] += sums[tid + step * n_columns]
        step >>= 1
    if row == 0:
        if col < n_cols:
            store(dweight, col, sums[tid])
        elif col < 2 * n_cols:
            store(dbias, col - n_cols, sums[tid])


def finish(partial, n_parts, n_cols, dweight, dbias):
    """Add up the partial sums of the columns: the last launch, where there are several parts."""
    row_bits = finish_plan(n_parts)
    launch(
        finish_kernel, math.ceil(2 * n_cols / (FINISH_BLOCK_SIZE >> row_bits)), FINISH_BLOCK_SIZE,
        partial, dweight, dbias, n_parts, n_cols, row_bits, flat=True, overlap=True,
    )  # fmt: skip


def finish_plan(n_parts):
    """log2 of the rows of threads that share so many parts."""
    return min(MOST_ROW_BITS, (math.ceil(n_parts / AT_ONCE) - 1).bit_length())
