"""The kernels of upsampling: which pixels a pixel of y is made of, forwards and backwards.

Along each axis pixel `at` of y lies at `places` of x, by `ratio` of x's pixels for one of y's:

    nearest                     ⌊at·ratio⌋
    bilinear                    (at + ½)·ratio − ½, not below 0
    bilinear, aligned corners   at·ratio

A bilinear place lies between two pixels, and takes of each what the place is near to it.

A thread has a column of results and walks down some rows of them. What it must know of its column
is found once, and so is what a row of x (forward) or of dy (backward) comes to in that column: the
results of two rows may need it. Along both axes the first pixel of x rises with that of y, so the
pixels of y that take of one of x are neighbours, and a walk through dy in its order ends each dx
before the next but one begins. Whole numbers are 32 bits wide, but for places in memory.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import access
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.predicated import load_vector_if

BLOCK_SIZE = 128
HALF = np.float32(0.5)
MOST_PLACE = np.float32(2**31 - 128)  # the largest float32 that is an int32


class Walk(NamedTuple):
    """Images of planes, contiguous N·C or channels-last N, and how results are dealt out.

    A plane's row has `inner` numbers a pixel, 1 or C, and `across` threads, `units` a pixel; a
    plane has `parts` of `rows` rows each. This launch has `n_threads`, from plane `first` on.
    """

    first: int
    n_threads: np.int32
    across: np.int32
    units: np.int32
    parts: np.int32
    rows: np.int32
    inner: np.int32
    H: np.int32
    W: np.int32
    P: np.int32
    Q: np.int32
    ratio_h: float
    ratio_w: float
    aligned: bool


@cuda.jit(device=True)
def nearest_of(at, ratio, n, aligned):
    """(first pixel, second, share of the second) of pixel `at`, on a line of n pixels."""
    first = min(np.int32(min(np.float32(at) * ratio, MOST_PLACE)), np.int32(n - 1))
    return first, first, ZERO


@cuda.jit(device=True)
def linear_of(at, ratio, n, aligned):
    place = np.float32(at) * ratio
    if not aligned:
        place = max((np.float32(at) + HALF) * ratio - HALF, ZERO)
    first = min(np.int32(min(place, MOST_PLACE)), np.int32(n - 1))
    share = min(max(place - np.float32(first), ZERO), ONE)
    return first, min(np.int32(first + 1), np.int32(n - 1)), share


@cuda.jit(device=True)
def position(walk):
    """(plane, part, place among `across`) of this thread, and whether it has one."""
    i = np.int32(cuda.blockIdx.x * BLOCK_SIZE + cuda.threadIdx.x)
    line, j = divided(i, walk.across)
    plane, part = divided(line, walk.parts)
    return walk.first + plane, part, j, 0 <= i < walk.n_threads


def forward_kernel(bilinear, kind):
    """A thread walks down an element of y's rows; or 16 bytes, some `channels` or `columns`."""
    source_of = linear_of if bilinear else nearest_of
    width_of, _, store_numbers = access(kind != "element")

    @cuda.jit(device=True)
    def row_of(values, x, at, firsts, seconds, shares, width):
        """What a row of x, which begins at x[at], comes to in the thread's columns."""
        others = cuda.local.array(MAX_WIDTH, np.float32)
        if kind == "channels":
            load_vector(values, x, at + firsts[0])
            if bilinear:
                load_vector(others, x, at + seconds[0])
        else:
            for k in range(width):
                values[k] = load(x, at + firsts[k])
                if bilinear:
                    others[k] = load(x, at + seconds[k])
        if bilinear:
            for k in range(width):
                right = shares[0] if kind == "channels" else shares[k]
                values[k] = (ONE - right) * values[k] + right * others[k]

    @cuda.jit
    def walking_kernel(x, y, walk):
        """y of x, both flat; `walk` a `Walk`."""
        allow_next_kernel()
        width = width_of(y)
        plane, part, j, is_mine = position(walk)
        firsts = cuda.local.array(MAX_WIDTH, np.int32)
        seconds = cuda.local.array(MAX_WIDTH, np.int32)
        shares = cuda.local.array(MAX_WIDTH, np.float32)
        upper = cuda.local.array(MAX_WIDTH, np.float32)
        lower = cuda.local.array(MAX_WIDTH, np.float32)
        values = cuda.local.array(MAX_WIDTH, np.float32)
        inner = walk.inner
        if kind == "columns":
            q, c = np.int32(j * width), np.int32(0)
        else:
            q, unit = divided(j, walk.units)
            c = np.int32(unit * width)
        for k in range(1 if kind == "channels" else width):
            first, second, shares[k] = source_of(
                np.int32(q + k), walk.ratio_w, walk.W, walk.aligned
            )
            firsts[k], seconds[k] = np.int32(first * inner + c), np.int32(second * inner + c)
        p = np.int32(part * walk.rows)
        stop = min(np.int32(p + walk.rows), walk.P) if is_mine else p
        x_row, y_row = np.int64(np.int32(walk.W * inner)), np.int64(np.int32(walk.Q * inner))
        source = plane * walk.H * x_row
        at = (plane * walk.P + p) * y_row + np.int32(q * inner + c)
        held = held_next = np.int32(-1)  # the rows of x of `upper` and `lower`
        wait_for_previous_kernel()
        while p < stop:
            h, h_next, down = source_of(p, walk.ratio_h, walk.H, walk.aligned)
            if h != held:
                if bilinear and h == held_next:
                    for k in range(width):
                        upper[k] = lower[k]
                else:
                    row_of(upper, x, source + h * x_row, firsts, seconds, shares, width)
                if bilinear:
                    row_of(lower, x, source + h_next * x_row, firsts, seconds, shares, width)
                held, held_next = h, h_next
            for k in range(width):
                values[k] = upper[k]
                if bilinear:
                    values[k] = (ONE - down) * upper[k] + down * lower[k]
            store_numbers(y, at, values)
            at += y_row
            p = np.int32(p + 1)

    return walking_kernel


def backward_kernel(bilinear, vectors):
    """A thread walks down an element of dx's rows; or 16 bytes, some channels of a pixel."""
    source_of = linear_of if bilinear else nearest_of
    width_of, _, store_numbers = access(vectors)
    taps = 4 if bilinear else 2  # of a pixel in a row of dy, where y is twice as large: few have 5

    @cuda.jit(device=True)
    def begin_of(pixel, ratio, n, n_out, aligned):
        """The first of y's pixels whose first pixel of x is `pixel` or one behind it."""
        if pixel <= 0 or pixel >= n or ratio <= ZERO:
            return np.int32(0) if pixel <= 0 else n_out
        shift = ZERO if aligned or not bilinear else HALF
        guess = max((np.float32(pixel) + shift) / ratio - shift, ZERO)
        at = min(np.int32(min(guess, MOST_PLACE)), n_out)
        while at > 0 and source_of(np.int32(at - 1), ratio, n, aligned)[0] >= pixel:
            at = np.int32(at - 1)
        while at < n_out and source_of(at, ratio, n, aligned)[0] < pixel:
            at = np.int32(at + 1)
        return at

    @cuda.jit(device=True)
    def amount_of(pixel, first, second, share):
        """How much a pixel of y takes of `pixel`, by what `source_of` says of it."""
        amount = ONE - share if first == pixel else ZERO
        if bilinear and second == pixel:
            amount += share
        return amount

    @cuda.jit(device=True)
    def load_numbers(values, dy, at, valid):
        if vectors:
            load_vector_if(values, dy, at, valid)
        else:
            values[0] = ZERO
            if valid:
                values[0] = load(dy, at)

    @cuda.jit(device=True)
    def add_taps(row, dy, at, inner, n, amounts, width):
        """row += the taps of dy[at], `n` of them and at most `taps`, in the order of memory."""
        values = cuda.local.array((taps, MAX_WIDTH), np.float32)
        for u in range(taps):
            load_numbers(values[u], dy, at + np.int64(np.int32(u * inner)), u < n)
        for u in range(taps):
            for k in range(width):
                row[k] += amounts[u] * values[u, k]

    @cuda.jit(device=True)
    def find_amounts(amounts, w, q, stop, walk):
        for u in range(taps):
            amounts[u] = ZERO
            if q + u < stop:
                first, second, share = source_of(
                    np.int32(q + u), walk.ratio_w, walk.W, walk.aligned
                )
                amounts[u] = amount_of(w, first, second, share)

    @cuda.jit
    def walking_backward_kernel(dy, dx, walk):
        """dx of dy, both flat; `walk` a `Walk`."""
        allow_next_kernel()
        width, inner = width_of(dx), walk.inner
        plane, part, j, is_mine = position(walk)
        w, unit = divided(j, walk.units)
        c, h = np.int32(unit * width), np.int32(part * walk.rows)
        stop = min(np.int32(h + walk.rows), walk.H) if is_mine else h
        back = 1 if bilinear else 0  # the second pixel is one behind the first
        q = begin_of(np.int32(w - back), walk.ratio_w, walk.W, walk.Q, walk.aligned)
        q_stop = begin_of(np.int32(w + 1), walk.ratio_w, walk.W, walk.Q, walk.aligned)
        p = begin_of(np.int32(h - back), walk.ratio_h, walk.H, walk.P, walk.aligned)
        amounts, more = cuda.local.array(taps, np.float32), cuda.local.array(taps, np.float32)
        find_amounts(amounts, w, q, q_stop, walk)
        row = cuda.local.array(MAX_WIDTH, np.float32)
        total = cuda.local.array(MAX_WIDTH, np.float32)
        rest = cuda.local.array(MAX_WIDTH, np.float32)  # what the next row of dx has so far
        for k in range(width):
            rest[k] = ZERO
        dx_row, dy_row = np.int64(np.int32(walk.W * inner)), np.int64(np.int32(walk.Q * inner))
        source = (plane * walk.P + p) * dy_row + np.int32(q * inner + c)
        at = (plane * walk.H + h) * dx_row + np.int32(w * inner + c)
        wait_for_previous_kernel()
        while h < stop:
            for k in range(width):
                total[k], rest[k] = rest[k], ZERO
            while p < walk.P and source_of(p, walk.ratio_h, walk.H, walk.aligned)[0] <= h:
                for k in range(width):
                    row[k] = ZERO
                add_taps(row, dy, source, inner, np.int32(q_stop - q), amounts, width)
                beyond = np.int32(q + taps)
                while beyond < q_stop:
                    find_amounts(more, w, beyond, q_stop, walk)
                    here = source + np.int64(np.int32((beyond - q) * inner))
                    add_taps(row, dy, here, inner, np.int32(q_stop - beyond), more, width)
                    beyond = np.int32(beyond + taps)
                first, second, share = source_of(p, walk.ratio_h, walk.H, walk.aligned)
                down = amount_of(h, first, second, share)
                for k in range(width):
                    total[k] += down * row[k]
                    if bilinear and second > h:
                        rest[k] += share * row[k]
                source += dy_row
                p = np.int32(p + 1)
            store_numbers(dx, at, total)
            at += dx_row
            h = np.int32(h + 1)

    return walking_backward_kernel
