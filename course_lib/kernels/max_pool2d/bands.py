"""The kernels of the rung `vectorised` for contiguous images: forward some windows, backward any.

A block takes a *band* to shared memory: some rows of a plane, or several whole planes where they
are small. Either way a band is one stretch of memory, and so is what it becomes, whatever the width
of the image: it is moved 16 bytes at a time, and only in shared memory do windows and rows matter.

Forward, a band is of the output, and the rows of x that its windows reach are copied, all of them
on their way at the same time. Backward, a band is of dx: it begins as zeros, every window that
reaches it adds its dy where its index says, and the sums are written out. Windows may share an
element, so they take turns: in each of a·b *rounds* go those whose row is one number modulo a and
whose column is one modulo b, with a and b so large that none of these overlap. No atomics, and the
order of additions is always the same.

Loops are written with `while`, because a `range` whose step is known at run time alone begins with
a division.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.max_pool2d.ladder import LOWEST
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.shared import copy_async, dynamic_shared, wait_for_copies

AT_ONCE = 2  # windows whose dy and index a thread has on their way
SHIFT = 22  # of `row_of`: exact while rows · OH stays below 2²²


@cuda.jit(device=True)
def row_of(i, multiplier, OH):
    """(i // OH, i % OH), by a multiplication; a multiplier of 0 stands for a single plane."""
    plane = (i * multiplier) >> SHIFT
    return plane, i - plane * OH


@cuda.jit(device=True)
def divided(i, n):
    """(i // n, i % n) of numbers below 2³², which a GPU divides far faster than wider ones."""
    quotient = np.int64(np.uint32(i) // np.uint32(n))
    return quotient, i - quotient * n


@cuda.jit(device=True)
def copy_band(target, x, start, stop, offset):
    """Copy x[start:stop]; element j comes to lie at target[j - base]. Returns `base`."""
    width, tid, step = vector_width(x), cuda.threadIdx.x, cuda.blockDim.x
    base = start - ((start + offset) & (width - 1))
    first = min(start if base == start else base + width, stop)
    n_vectors = (stop - first) // width
    vector = tid
    while vector < n_vectors:
        at = first + vector * width
        copy_async(target, at - base, x, at)
        vector += step
    i = start + tid
    while i < first:
        store(target, i - base, load(x, i))
        i += step
    i = first + n_vectors * width + tid
    while i < stop:
        store(target, i - base, load(x, i))
        i += step
    wait_for_copies()
    cuda.syncthreads()
    return base


@cuda.jit(device=True)
def edge_max(x, at, h, w, H, W, KH, KW):
    """(largest value, where in the window) of the undilated window at (h, w), wherever it lies.

    x[at] is its first element, and may be nowhere.
    """
    best, position = LOWEST, max(-h, 0) * KW + max(-w, 0)
    for kh in range(KH):
        for kw in range(KW):
            if h + kh >= 0 and h + kh < H and w + kw >= 0 and w + kw < W:
                value = load(x, at + kh * W + kw)
                if value > best or value != value:
                    best, position = value, kh * KW + kw
    return best, position


@cuda.jit(device=True)
def rows_reached(first, n, H, KH, SH, PH, DH):
    """(first, end) of the rows of x that the windows of `n` rows of the output reach."""
    top = min(max(first * SH - PH, 0), H)
    bottom = (first + n - 1) * SH - PH + (KH - 1) * DH + 1
    return top, max(min(bottom, H), top)


def make_forward_kernel(fixed):
    """The kernel for windows of `fixed` rows and columns without dilation."""
    height, breadth = fixed

    @cuda.jit
    def band_kernel(
        x, y, indices, n_planes, planes, rows, bands, multiplier, bits, offset, offsets, H, W, OH,
        OW, KH, KW, SH, SW, PH, PW, DH, DW,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        band = dynamic_shared(x)
        plane, first_row = divided(cuda.blockIdx.x, bands)
        plane, first_row = plane * planes, first_row * rows
        n_rows = min(rows, OH - first_row) * min(planes, n_planes - plane)
        top, bottom = 0, H * min(planes, n_planes - plane)
        if planes == 1:
            top, bottom = rows_reached(first_row, n_rows, H, KH, SH, PH, DH)
        base = plane * H * W
        base -= copy_band(band, x, base + top * W, base + bottom * W, offset)
        first_col, n_columns = cuda.threadIdx.x & ((1 << bits) - 1), 1 << bits
        i = cuda.threadIdx.x >> bits
        while i < n_rows:
            own, row = row_of(i, multiplier, OH)
            start = ((plane + own) * OH + first_row + row) * OW
            h = (first_row + row) * SH - PH
            col = first_col
            while col < OW:
                w = col * SW - PW
                place = h * W + w
                best, at = edge_max(band, base + own * H * W + place, h, w, H, W, height, breadth)
                if offsets:
                    at = place + at // breadth * W + at % breadth
                store(y, start + col, best)
                indices[start + col] = at
                col += n_columns
            i += cuda.blockDim.x >> bits

    return band_kernel


#: The windows that most networks have, with their loops unrolled.
FORWARD_KERNELS = {fixed: make_forward_kernel(fixed) for fixed in ((2, 2), (3, 3))}


@cuda.jit(device=True)
def place_of(at, row, col, top, offsets, inverse, W, KH, KW, SH, SW, PH, PW, DH, DW):
    """Where index `at` of the window (row, col) points, from row `top` of the plane on.

    Less than 0 where that is before it, or nowhere at all.
    """
    if offsets:
        # A window that steps over all columns has, as in PyTorch, an index beyond its row.
        if DW > W and (at % W - (col * SW - PW)) % DW != 0:
            return np.int64(-1)
        return at - top * W
    kh = (at * inverse) >> 16  # at // KW, exact below 256
    if kh >= KH:
        return np.int64(-1)
    w = col * SW - PW + (at - kh * KW) * DW
    return (row * SH - PH + kh * DH - top) * W + w if w < W else -1


@cuda.jit(device=True)
def add_windows(
    sums, dy, indices, plane, n_here, base, top, bottom, round_row, round_col, a, b, bits, offsets,
    inverse, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW,
):  # fmt: skip
    """One round: of each plane the windows round_row, round_row + a, … of round_col, ….

    Rows `top` … `bottom` - 1 of the first plane lie in `sums`, from `base` on.
    """
    low = max(top + PH - (KH - 1) * DH + SH - 1, 0) // SH
    high = min((bottom - 1 + PH) // SH + 1, OH)
    low += (round_row - low) % a
    n_rows = max(high - low + a - 1, 0) // a
    first_col = round_col + (cuda.threadIdx.x & ((1 << bits) - 1)) * b
    step, end = cuda.blockDim.x >> bits, n_here * n_rows
    ats = cuda.local.array(AT_ONCE, np.int64)
    values = cuda.local.array(AT_ONCE, np.float32)
    first = cuda.threadIdx.x >> bits
    while first < end:
        col = first_col
        while col < OW:
            for u in range(AT_ONCE):
                if first + u * step < end:
                    own, row = divided(first + u * step, n_rows)
                    i = ((plane + own) * OH + low + row * a) * OW + col
                    ats[u], values[u] = indices[i], load(dy, i)
            for u in range(AT_ONCE):
                if first + u * step < end:
                    own, row = divided(first + u * step, n_rows)
                    at = place_of(
                        ats[u], low + row * a, col, top, offsets, inverse, W, KH, KW, SH, SW, PH,
                        PW, DH, DW,
                    )  # fmt: skip
                    if at >= 0 and at < (bottom - top) * W:
                        sums[base + own * H * W + at] += values[u]
            col += b << bits
        first += AT_ONCE * step


@cuda.jit(device=True)
def write_band(sums, dx, start, stop, base):
    """dx[start:stop] = sums[start - base : stop - base]; dx[base] lies on a 16-byte boundary."""
    width, tid, step = vector_width(dx), cuda.threadIdx.x, cuda.blockDim.x
    values = cuda.local.array(MAX_WIDTH, np.float32)
    first = min(start if base == start else base + width, stop)
    n_vectors = (stop - first) // width
    vector = tid
    while vector < n_vectors:
        at = first + vector * width
        load_vector(values, sums, at - base)
        if width == MAX_WIDTH:
            load_vector(values[4:], sums, at - base + 4)
        store_vector(dx, at, values)
        vector += step
    i = start + tid
    while i < first:
        store(dx, i, sums[i - base])
        i += step
    i = first + n_vectors * width + tid
    while i < stop:
        store(dx, i, sums[i - base])
        i += step


def make_backward_kernel(alone):
    """The kernel for windows that never overlap (`alone`: a single round), or for any."""

    @cuda.jit
    def band_backward_kernel(
        dy, indices, dx, n_planes, planes, rows, bands, a, b, bits, offset, inverse, offsets, H, W,
        OH, OW, KH, KW, SH, SW, PH, PW, DH, DW,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        sums = cuda.shared.array(0, np.float32, alignment=VECTOR_BYTES)
        plane, top = divided(cuda.blockIdx.x, bands)
        plane, top = plane * planes, top * rows
        bottom, n_here = min(top + rows, H), min(planes, n_planes - plane)
        start = (plane * H + top) * W
        stop = start + ((n_here - 1) * H + bottom - top) * W
        base = start - ((start + offset) & (vector_width(dx) - 1))
        i = cuda.threadIdx.x
        while i < stop - base:
            sums[i] = ZERO
            i += cuda.blockDim.x
        for round_row in range(1 if alone else a):
            for round_col in range(1 if alone else b):
                cuda.syncthreads()
                add_windows(
                    sums, dy, indices, plane, n_here, start - base, top, bottom, round_row,
                    round_col, 1 if alone else a, 1 if alone else b, bits, offsets, inverse, H, W,
                    OH, OW, KH, KW, SH, SW, PH, PW, DH, DW,
                )  # fmt: skip
        cuda.syncthreads()
        write_band(sums, dx, start, stop, base)

    return band_backward_kernel


#: Whether windows never overlap -> kernel.
BACKWARD_KERNELS = {alone: make_backward_kernel(alone) for alone in (True, False)}
