"""The kernels of upsampling: which pixels a pixel of y is made of, forwards and backwards.

Along each axis pixel `at` of y lies at `places` of x, by `ratio` of x's pixels for one of y's:

    nearest                     ⌊at·ratio⌋
    bilinear                    (at + ½)·ratio − ½, not below 0
    bilinear, aligned corners   at·ratio

A bilinear place lies between two pixels, and takes of each what the place is near to it. Backward
is the same read the other way: a thread goes through the pixels of y that may have taken of its
pixel of x, a few more than have, and asks of each what forward took.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import index_of, place_of
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 128
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
ONE, HALF = np.float32(1), np.float32(0.5)


@cuda.jit(device=True)
def nearest_of(at, ratio, n, aligned):
    """(first pixel, second, share of the second) of pixel `at`, on a line of n pixels."""
    first = min(np.int64(np.float32(at) * ratio), n - 1)
    return first, first, ZERO


@cuda.jit(device=True)
def linear_of(at, ratio, n, aligned):
    place = np.float32(at) * ratio
    if not aligned:
        place = max((np.float32(at) + HALF) * ratio - HALF, ZERO)
    first = min(np.int64(place), n - 1)
    share = min(max(place - np.float32(first), ZERO), ONE)
    return first, min(first + 1, n - 1), share


@cuda.jit(device=True)
def reach_of(pixel, ratio, n_out, aligned):
    """(first, stop) of pixels of y that may take of `pixel`: some too many, none too few."""
    if ratio <= ZERO:
        return np.int64(0), n_out
    shift = ZERO if aligned else HALF
    first = (np.float32(pixel - 1) + shift) / ratio - shift - ONE
    stop = (np.float32(pixel + 1) + shift) / ratio - shift + ONE + ONE
    # Float32 may be off by a pixel in 2²⁴, or many more in longer lines.
    slack = np.int64(n_out >> 20)
    begin = np.int64(max(first, ZERO)) - slack
    return max(begin, np.int64(0)), min(np.int64(min(stop, np.float32(n_out))) + 1 + slack, n_out)


def forward_kernels(bilinear):
    """(a thread for each element of y, a thread for 16 bytes of it)."""
    source_of = linear_of if bilinear else nearest_of

    @cuda.jit(device=True)
    def mixed(x, n, c, rows, columns, C, H, W, channels_last):
        """An element of y: rows and columns are what `source_of` says of each axis."""
        h, h_next, down = rows
        w, w_next, right = columns
        found = load(x, index_of(n, c, h, w, C, H, W, channels_last))
        if bilinear:
            other = load(x, index_of(n, c, h, w_next, C, H, W, channels_last))
            below = load(x, index_of(n, c, h_next, w, C, H, W, channels_last))
            last = load(x, index_of(n, c, h_next, w_next, C, H, W, channels_last))
            upper = (ONE - right) * found + right * other
            found = (ONE - down) * upper + down * ((ONE - right) * below + right * last)
        return found

    @cuda.jit
    def direct_kernel(
        x, y, C, H, W, P, Q, ratio_h, ratio_w, aligned, channels_last
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        i = cuda.grid(1)
        if i < y.shape[0]:
            n, c, p, q = place_of(i, C, P, Q, channels_last)
            rows = source_of(p, ratio_h, H, aligned)
            columns = source_of(q, ratio_w, W, aligned)
            store(y, i, mixed(x, n, c, rows, columns, C, H, W, channels_last))

    @cuda.jit
    def vectorised_kernel(
        x, y, C, H, W, P, Q, ratio_h, ratio_w, aligned, channels_last
    ):
        # 16 bytes of y are neighbours in a row; or, channels-last, channels of one pixel, and so
        # are those of x.
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array(MAX_WIDTH, np.float32)
        some = cuda.local.array((3, MAX_WIDTH), np.float32)
        width = vector_width(y)
        i = np.int64(cuda.grid(1)) * width
        if i < y.shape[0]:
            n, c, p, q = place_of(i, C, P, Q, channels_last)
            rows = source_of(p, ratio_h, H, aligned)
            h, h_next, down = rows
            if channels_last:
                w, w_next, right = source_of(q, ratio_w, W, aligned)
                load_vector(values, x, index_of(n, c, h, w, C, H, W, channels_last))
                if bilinear:
                    load_vector(some[0], x, index_of(n, c, h, w_next, C, H, W, channels_last))
                    load_vector(some[1], x, index_of(n, c, h_next, w, C, H, W, channels_last))
                    at = index_of(n, c, h_next, w_next, C, H, W, channels_last)
                    load_vector(some[2], x, at)
                    for k in range(width):
                        upper = (ONE - right) * values[k] + right * some[0, k]
                        lower = (ONE - right) * some[1, k] + right * some[2, k]
                        values[k] = (ONE - down) * upper + down * lower
            else:
                for k in range(width):
                    columns = source_of(q + k, ratio_w, W, aligned)
                    values[k] = mixed(x, n, c, rows, columns, C, H, W, channels_last)
            store_vector(y, i, values)

    return direct_kernel, vectorised_kernel


def backward_kernel(bilinear):
    """A thread for each element of dx."""
    source_of = linear_of if bilinear else nearest_of

    @cuda.jit(device=True)
    def taken(pixel, at, ratio, n, aligned):
        """(whether pixel `at` of y takes of `pixel`, how much)."""
        first, second, share = source_of(at, ratio, n, aligned)
        amount = ONE - share if first == pixel else ZERO
        if bilinear and second == pixel:
            amount += share
        return first == pixel or second == pixel, amount

    @cuda.jit
    def direct_backward_kernel(
        dy, dx, C, H, W, P, Q, ratio_h, ratio_w, aligned, channels_last
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        i = cuda.grid(1)
        if i < dx.shape[0]:
            n, c, h, w = place_of(i, C, H, W, channels_last)
            first_p, stop_p = reach_of(h, ratio_h, P, aligned)
            first_q, stop_q = reach_of(w, ratio_w, Q, aligned)
            if h == H - 1:  # which whatever lies beyond takes, too
                stop_p = np.int64(P)
            if w == W - 1:
                stop_q = np.int64(Q)
            total = ZERO
            for p in range(first_p, stop_p):
                takes, down = taken(h, p, ratio_h, H, aligned)
                if takes:
                    row = ZERO
                    for q in range(first_q, stop_q):
                        takes, right = taken(w, q, ratio_w, W, aligned)
                        if takes:
                            at = index_of(n, c, p, q, C, P, Q, channels_last)
                            row += right * load(dy, at)
                    total += down * row
            store(dx, i, total)

    return direct_backward_kernel
