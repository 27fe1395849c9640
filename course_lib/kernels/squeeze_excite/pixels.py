"""How a block walks its part of a channels-last image: some neighbouring channels of some pixels.

Where all pixels begin on 16-byte boundaries (`vectors`), a block has `n_columns` columns of
threads: a column stands for as many channels as 16 bytes hold, and its threads take every n_rows-th
pixel.
Elsewhere a warp takes neighbouring channels of a pixel, element by element.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE
from course_lib.runtime.intrinsics import load, load_vector, store, vector_width
from course_lib.runtime.intrinsics.streaming import load_vector_once, store_vector_once

WARPS = BLOCK_SIZE // 32
PADDED_SIZE = BLOCK_SIZE + 1  # so that neither writing nor reading meets a bank twice
SCRATCH = MAX_WIDTH * PADDED_SIZE
UNROLL = 4  # pixels in flight per thread
DOT_UNROLL = 2


@cuda.jit(device=True)
def place_of_thread(n_columns, low, high, width, n_mine):
    """(column, first pixel, pixels to the next); none are left for threads without channels."""
    n_rows = BLOCK_SIZE // n_columns
    row, col = cuda.threadIdx.x // n_columns, cuda.threadIdx.x % n_columns
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


def sums_of_pixels(product, unroll):
    """The function that sums pixels: of x, or with `product` of dy·x (else `dy` is not read)."""

    @cuda.jit(device=True)
    def sum_vectors(values, dy, x, start, low, high, C, n_mine, n_columns, scratch):
        a = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        b = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        totals = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(x)
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
                    load_vector(a[u], x, i + u * n_rows * C)
                    if product:
                        load_vector(b[u], dy, i + u * n_rows * C)
            for k in range(width):
                part = ZERO  # fewer roundings than adding each to a long sum
                for u in range(unroll):
                    part += a[u, k] * b[u, k] if product else a[u, k]
                totals[k] += part
            pixel += unroll * n_rows
            i += unroll * n_rows * C
        add_rows(values, totals, scratch, width, n_columns, n_mine)

    @cuda.jit(device=True)
    def sum_elements(values, dy, x, start, low, high, C, n_mine, scratch):
        tid = cuda.threadIdx.x
        base = 0
        while base < n_mine:
            channel = base + tid % 32
            total = ZERO
            i, stop = start + (low + tid // 32) * C + channel, start + high * C
            while i < stop and channel < n_mine:
                total += load(dy, i) * load(x, i) if product else load(x, i)
                i += WARPS * C
            scratch[tid] = total
            cuda.syncthreads()
            if tid < 32 and channel < n_mine:
                other = tid + 32
                while other < BLOCK_SIZE:
                    total += scratch[other]
                    other += 32
                values[channel] = total
            cuda.syncthreads()

            base += 32

    @cuda.jit(device=True)
    def sum_pixels(values, dy, x, start, low, high, C, n_mine, n_columns, vectors, scratch):
        """values[i] = Σ over pixels `low` to `high` of the block's channel `i`, shared.

        Its channel 0 of pixel 0 is element `start`; `scratch` as in `add_rows`.
        """
        if vectors:
            sum_vectors(values, dy, x, start, low, high, C, n_mine, n_columns, scratch)
        else:
            sum_elements(values, dy, x, start, low, high, C, n_mine, scratch)

    return sum_pixels


sum_pixels = sums_of_pixels(False, UNROLL)
dot_pixels = sums_of_pixels(True, DOT_UNROLL)


def scaling(shifted):
    """The function that scales pixels, and with `shifted` adds a number as well."""

    @cuda.jit(device=True)
    def scale_vectors(x, y, start, low, high, C, n_mine, n_columns, factors, shifts):
        values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        factor = cuda.local.array(MAX_WIDTH, np.float32)
        shift = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(x)
        col, pixel, n_rows = place_of_thread(n_columns, low, high, width, n_mine)
        if pixel < high:
            for k in range(width):
                factor[k] = factors[col * width + k]
                if shifted:
                    shift[k] = shifts[col * width + k]
        i = start + pixel * C + col * width
        while pixel < high:
            for u in range(UNROLL):
                for k in range(width):
                    values[u, k] = ZERO
                if pixel + u * n_rows < high:
                    load_vector_once(values[u], x, i + u * n_rows * C)
            for u in range(UNROLL):
                for k in range(width):
                    values[u, k] *= factor[k]
                    if shifted:
                        values[u, k] += shift[k]
                if pixel + u * n_rows < high:
                    store_vector_once(y, i + u * n_rows * C, values[u])
            pixel += UNROLL * n_rows
            i += UNROLL * n_rows * C

    @cuda.jit(device=True)
    def scale_elements(x, y, start, low, high, C, n_mine, factors, shifts):
        pixel = low + cuda.threadIdx.x // 32
        while pixel < high:
            channel = cuda.threadIdx.x % 32
            while channel < n_mine:
                i = start + pixel * C + channel
                value = load(x, i) * factors[channel]
                if shifted:
                    value += shifts[channel]
                store(y, i, value)

                channel += 32
            pixel += WARPS

    @cuda.jit(device=True)
    def scale_pixels(x, y, start, low, high, C, n_mine, n_columns, vectors, factors, shifts):
        """y = x · factor (+ shift) of pixels `low` to `high`; the rest as for the sums."""
        if vectors:
            scale_vectors(x, y, start, low, high, C, n_mine, n_columns, factors, shifts)
        else:
            scale_elements(x, y, start, low, high, C, n_mine, factors, shifts)

    return scale_pixels


scale_pixels = scaling(False)
scale_and_shift_pixels = scaling(True)
