"""How a block walks its part of a channels-last image: some neighbouring channels of some pixels.

A block has columns of threads, each with some channels, whose threads take every n_rows-th pixel.
Where all pixels begin on 16-byte boundaries (`vectors`), these are the channels that 16 bytes hold,
`n_columns` columns a block. Elsewhere it is one channel, and twice as many are on their way.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import access
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE
from course_lib.runtime.intrinsics import load, load_vector, store
from course_lib.runtime.intrinsics.streaming import load_vector_once, store_vector_once

PADDED_SIZE = BLOCK_SIZE + 1  # so that neither writing nor reading meets a bank twice
SCRATCH = MAX_WIDTH * PADDED_SIZE
UNROLL = 4  # pixels in flight per thread
DOT_UNROLL = 2


@cuda.jit(device=True)
def place_of_thread(n_columns, low, high, width, n_mine):
    """(column, first pixel, pixels to the next); none are left for threads without channels."""
    n_rows, _ = divided(BLOCK_SIZE, n_columns)
    row, col = divided(cuda.threadIdx.x, n_columns)
    pixel = low + row if row < n_rows and col * width < n_mine else high
    return col, pixel, n_rows


@cuda.jit(device=True)
def add_rows(values, totals, scratch, width, n_columns, n_mine):
    """values[channel] = the sum of its slot of `totals` over the block's rows of threads.

    `scratch` is a shared array of SCRATCH float32. Ends with a barrier.
    """
    tid = cuda.threadIdx.x
    for k in range(width):
        scratch[k * PADDED_SIZE + tid] = totals[k]
    cuda.syncthreads()
    if tid < n_mine:
        first = tid % width * PADDED_SIZE + tid // width
        total = ZERO
        for row in range(BLOCK_SIZE // n_columns):
            total += scratch[first + row * n_columns]
        values[tid] = total
    cuda.syncthreads()


def summing(product, unroll, vectors):
    """The function that sums, by columns of a vector or of an element."""
    width_of = access(vectors).width

    @cuda.jit(device=True)
    def sum_columns(values, dy, x, start, low, high, C, n_mine, n_columns, scratch):
        a = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        b = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        totals = cuda.local.array(MAX_WIDTH, np.float32)
        width = width_of(x)
        for k in range(width):
            totals[k] = ZERO
        col, pixel, n_rows = place_of_thread(n_columns, low, high, width, n_mine)
        i = start + pixel * C + col * width
        while pixel < high:
            for u in range(unroll):
                for k in range(width):
                    a[u, k] = ZERO
                    b[u, k] = ZERO
                if pixel + u * n_rows < high:
                    if vectors:
                        load_vector(a[u], x, i + u * n_rows * C)
                    else:
                        a[u, 0] = load(x, i + u * n_rows * C)
                    if product and vectors:
                        load_vector(b[u], dy, i + u * n_rows * C)
                    elif product:
                        b[u, 0] = load(dy, i + u * n_rows * C)
            for k in range(width):
                part = ZERO  # fewer roundings than adding each to a long sum
                for u in range(unroll):
                    part += a[u, k] * b[u, k] if product else a[u, k]
                totals[k] += part
            pixel += unroll * n_rows
            i += unroll * n_rows * C
        add_rows(values, totals, scratch, width, n_columns, n_mine)

    return sum_columns


def sums_of_pixels(product, unroll):
    """The function that sums pixels: of x, or with `product` of dy·x (else `dy` is not read)."""
    sum_vectors = summing(product, unroll, True)
    sum_elements = summing(product, 2 * unroll, False)

    @cuda.jit(device=True)
    def sum_pixels(values, dy, x, start, low, high, C, n_mine, n_columns, vectors, scratch):
        """values[i] = Σ over pixels `low` to `high` of the block's channel `i`, shared.

        Its channel 0 of pixel 0 is element `start`; `scratch` as in `add_rows`.
        """
        if vectors:
            sum_vectors(values, dy, x, start, low, high, C, n_mine, n_columns, scratch)
        else:
            sum_elements(values, dy, x, start, low, high, C, n_mine, n_mine, scratch)

    return sum_pixels


sum_pixels = sums_of_pixels(False, UNROLL)
dot_pixels = sums_of_pixels(True, DOT_UNROLL)


def scaling_columns(shifted, unroll, vectors):
    """As `summing`, the function that scales."""
    width_of = access(vectors).width

    @cuda.jit(device=True)
    def scale_columns(x, y, start, low, high, C, n_mine, n_columns, factors, shifts):
        values = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        factor = cuda.local.array(MAX_WIDTH, np.float32)
        shift = cuda.local.array(MAX_WIDTH, np.float32)
        width = width_of(x)
        col, pixel, n_rows = place_of_thread(n_columns, low, high, width, n_mine)
        if pixel < high:
            for k in range(width):
                factor[k] = factors[col * width + k]
                if shifted:
                    shift[k] = shifts[col * width + k]
        i = start + pixel * C + col * width
        while pixel < high:
            for u in range(unroll):
                for k in range(width):
                    values[u, k] = ZERO
                if pixel + u * n_rows < high:
                    if vectors:
                        load_vector_once(values[u], x, i + u * n_rows * C)
                    else:
                        values[u, 0] = load(x, i + u * n_rows * C)
            for u in range(unroll):
                for k in range(width):
                    values[u, k] *= factor[k]
                    if shifted:
                        values[u, k] += shift[k]
                if pixel + u * n_rows < high:
                    if vectors:
                        store_vector_once(y, i + u * n_rows * C, values[u])
                    else:
                        store(y, i + u * n_rows * C, values[u, 0])
            pixel += unroll * n_rows
            i += unroll * n_rows * C

    return scale_columns


def scaling(shifted):
    """The function that scales pixels, and with `shifted` adds a number as well."""
    scale_vectors = scaling_columns(shifted, UNROLL, True)
    scale_elements = scaling_columns(shifted, 2 * UNROLL, False)

    @cuda.jit(device=True)
    def scale_pixels(x, y, start, low, high, C, n_mine, n_columns, vectors, factors, shifts):
        """y = x · factor (+ shift) of pixels `low` to `high`; the rest as for the sums."""
        if vectors:
            scale_vectors(x, y, start, low, high, C, n_mine, n_columns, factors, shifts)
        else:
            scale_elements(x, y, start, low, high, C, n_mine, n_mine, factors, shifts)

    return scale_pixels


scale_pixels = scaling(False)
scale_and_shift_pixels = scaling(True)
