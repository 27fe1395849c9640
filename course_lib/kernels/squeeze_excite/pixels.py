"""How a block walks its part of a channels-last image: some neighbouring channels of some pixels.

A block has `n_columns` columns of threads. A column stands for as many channels as 16 bytes hold,
and its threads take every n_rows-th pixel. Slot k of a column is its k-th channel where all pixels
begin on 16-byte boundaries (`vectors`); elsewhere a slot is an access of its own, and neighbouring
columns take neighbouring channels.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import MAX_WIDTH
from course_lib.kernels.squeeze_excite.formulas import ZERO
from course_lib.runtime.intrinsics import load, load_vector, store, store_vector, vector_width

BLOCK_SIZE = 256
UNROLL = 4  # pixels in flight per thread
DOT_UNROLL = 2


@cuda.jit(device=True)
def channel_of(k, col, n_columns, width, vectors):
    """Which of the block's channels slot `k` of column `col` is."""
    return col * width + k if vectors else k * n_columns + col


@cuda.jit(device=True)
def load_slots(values, x, i, col, n_columns, n_mine, vectors):
    """A pixel's slots, whose block's first channel is element `i`; 0 beyond its channels."""
    width = vector_width(x)
    for k in range(width):
        values[k] = ZERO
    if vectors:
        if col * width < n_mine:
            load_vector(values, x, i + col * width)
    else:
        for k in range(width):
            if k * n_columns + col < n_mine:
                values[k] = load(x, i + k * n_columns + col)


@cuda.jit(device=True)
def store_slots(values, y, i, col, n_columns, n_mine, vectors):
    width = vector_width(y)
    if vectors:
        if col * width < n_mine:
            store_vector(y, i + col * width, values)
    else:
        for k in range(width):
            if k * n_columns + col < n_mine:
                store(y, i + k * n_columns + col, values[k])


@cuda.jit(device=True)
def add_rows(values, totals, scratch, width, n_columns, n_mine, vectors):
    """values[channel] = the sum of its slot of `totals` over the block's rows.

    `scratch` is a shared array of BLOCK_SIZE float32. Ends with a barrier.
    """
    tid = cuda.threadIdx.x
    for k in range(width):
        scratch[tid] = totals[k]
        cuda.syncthreads()
        n_rows = BLOCK_SIZE // n_columns
        channel = channel_of(k, tid, n_columns, width, vectors)
        if tid < n_columns and channel < n_mine:
            total = ZERO
            for row in range(n_rows):
                total += scratch[row * n_columns + tid]
            values[channel] = total
        cuda.syncthreads()


def sums_of_pixels(product, unroll):
    """The function that sums pixels: of x, or with `product` of dy·x (else `dy` is not read)."""

    @cuda.jit(device=True)
    def sum_pixels(values, dy, x, start, low, high, C, n_mine, n_columns, vectors, scratch):
        """values[i] = Σ over pixels `low` to `high` of the block's channel `i`.

        Its channel 0 of pixel 0 is element `start`; `scratch` as in `add_rows`.
        """
        a = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        b = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        totals = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(x)
        for k in range(width):
            totals[k] = ZERO
        n_rows = BLOCK_SIZE // n_columns
        row, col = cuda.threadIdx.x // n_columns, cuda.threadIdx.x % n_columns
        pixel = low + row if row < n_rows else high
        while pixel < high:
            for u in range(unroll):
                here = pixel + u * n_rows
                mine = n_mine if here < high else 0
                load_slots(a[u], x, start + here * C, col, n_columns, mine, vectors)
                if product:
                    load_slots(b[u], dy, start + here * C, col, n_columns, mine, vectors)
            for u in range(unroll):
                for k in range(width):
                    totals[k] += a[u, k] * b[u, k] if product else a[u, k]
            pixel += unroll * n_rows
        add_rows(values, totals, scratch, width, n_columns, n_mine, vectors)

    return sum_pixels


sum_pixels = sums_of_pixels(False, UNROLL)
dot_pixels = sums_of_pixels(True, DOT_UNROLL)


def scaling(shifted):
    """The function that scales pixels, and with `shifted` adds a number as well."""

    @cuda.jit(device=True)
    def scale_pixels(x, y, start, low, high, C, n_mine, n_columns, vectors, factors, shifts):
        """y = x · factor (+ shift) of pixels `low` to `high`; the rest as for the sums."""
        values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        factor = cuda.local.array(MAX_WIDTH, np.float32)
        shift = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(x)
        n_rows = BLOCK_SIZE // n_columns
        row, col = cuda.threadIdx.x // n_columns, cuda.threadIdx.x % n_columns
        for k in range(width):
            channel = min(channel_of(k, col, n_columns, width, vectors), n_mine - 1)
            factor[k] = factors[channel]
            if shifted:
                shift[k] = shifts[channel]
        pixel = low + row if row < n_rows else high
        while pixel < high:
            for u in range(UNROLL):
                here = pixel + u * n_rows
                mine = n_mine if here < high else 0
                load_slots(values[u], x, start + here * C, col, n_columns, mine, vectors)
            for u in range(UNROLL):
                here = pixel + u * n_rows
                mine = n_mine if here < high else 0
                for k in range(width):
                    values[u, k] *= factor[k]
                    if shifted:
                        values[u, k] += shift[k]
                store_slots(values[u], y, start + here * C, col, n_columns, mine, vectors)
            pixel += UNROLL * n_rows

    return scale_pixels


scale_pixels = scaling(False)
scale_and_shift_pixels = scaling(True)
