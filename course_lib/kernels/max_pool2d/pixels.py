"""The kernels of the rung `vectorised` for any window, without shared memory.

A thread makes an output, or an element of dx; or, where every channels-last pixel begins on a
16-byte boundary (`vectors`), as many channels as 16 bytes hold. Neighbouring threads take
neighbouring channels, then the next pixel's. `inner` channels lie side by side: C, or 1 of
contiguous images. Neighbouring windows share elements; those come from the caches.

Numbers within a plane are int32, which numba would widen with every operation: hence the casts.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import access
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.max_pool2d.ladder import LOWEST
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    wait_for_previous_kernel,
)


@cuda.jit(device=True)
def first_step(start, step):
    """How many steps lead from `start` to the first place that is not before 0."""
    return divided(np.int32(step - 1 - start), step)[0] if start < 0 else np.int32(0)


@cuda.jit(device=True)
def place_of(i, height, width, n_columns):
    """(plane, row, column of pixels, column of channels) of thread i."""
    line, j = divided(i, np.int32(width * n_columns))
    plane, row = divided(line, height)
    col, column = divided(j, n_columns)
    return np.int64(plane), row, col, column


@functools.cache
def forward_kernel(vectors):
    width_of, _, store_numbers = access(vectors)

    @cuda.jit
    def pixel_kernel(
        x, y, indices, n_threads, inner, n_columns, offsets,
        H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW,
    ):  # fmt: skip
        """y and the indices of x, all flat; `offsets`: whether indices count places of a plane."""
        allow_next_kernel()
        width = width_of(x)
        values = cuda.local.array(MAX_WIDTH, np.float32)
        best = cuda.local.array(MAX_WIDTH, np.float32)
        at = cuda.local.array(MAX_WIDTH, np.int32)
        H, W, KH, KW = np.int32(H), np.int32(W), np.int32(KH), np.int32(KW)
        i = np.int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        wait_for_previous_kernel()
        if 0 <= i < n_threads:
            plane, row, col, column = place_of(i, OH, OW, n_columns)
            h, w = np.int32(row * SH - PH), np.int32(col * SW - PW)
            kh, first_col = first_step(h, DH), first_step(w, DW)
            h, w = np.int32(h + kh * DH), np.int32(w + first_col * DW)
            for k in range(width):
                best[k] = LOWEST
                at[k] = np.int32(h * W + w) if offsets else np.int32(kh * KW + first_col)
            base = plane * H * W * inner + np.int32(column * width)
            while kh < KH and h < H:
                kw, q = first_col, w
                here = base + np.int64(np.int32(h * W + q)) * inner
                while kw < KW and q < W:
                    if vectors:
                        load_vector(values, x, here)
                    else:
                        values[0] = load(x, here)
                    place = np.int32(h * W + q) if offsets else np.int32(kh * KW + kw)
                    for k in range(width):
                        if values[k] > best[k] or values[k] != values[k]:
                            best[k], at[k] = values[k], place
                    kw, q, here = np.int32(kw + 1), np.int32(q + DW), here + DW * inner
                kh, h = np.int32(kh + 1), np.int32(h + DH)
            here = np.int64(i) * width
            store_numbers(y, here, best)
            for k in range(width):
                indices[here + k] = at[k]

    return pixel_kernel


@functools.cache
def backward_kernel(vectors):
    width_of, _, store_numbers = access(vectors)

    @cuda.jit(device=True)
    def windows_of(place, n_windows, kernel, stride, dilation):
        """(first window that reaches a place of the padded image, the one behind the last)."""
        reach = np.int32(place - (kernel - 1) * dilation)
        first = divided(np.int32(reach + stride - 1), stride)[0] if reach > 0 else np.int32(0)
        return first, min(np.int32(divided(place, stride)[0] + 1), np.int32(n_windows))

    @cuda.jit(device=True)
    def position_in(place, window, stride, dilation):
        """Which position of a window a place is; -1 where a dilation steps over it."""
        apart = np.int32(place - window * stride)
        if dilation == 1:
            return apart
        found, over = divided(apart, dilation)
        return found if over == 0 else np.int32(-1)

    @cuda.jit
    def pixel_backward_kernel(
        dy, indices, dx, n_threads, inner, n_columns, offsets,
        H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW,
    ):  # fmt: skip
        """dx of dy and the indices, all flat; arguments as of `pixel_kernel`."""
        allow_next_kernel()
        width = width_of(dx)
        values = cuda.local.array(MAX_WIDTH, np.float32)
        sums = cuda.local.array(MAX_WIDTH, np.float32)
        i = np.int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        wait_for_previous_kernel()
        if 0 <= i < n_threads:
            plane, h, w, column = place_of(i, H, W, n_columns)
            for k in range(width):
                sums[k] = ZERO
            top, left = np.int32(h + PH), np.int32(w + PW)
            row, stop_row = windows_of(top, OH, KH, SH, DH)
            first_col, stop_col = windows_of(left, OW, KW, SW, DW)
            base = plane * OH * OW * inner + np.int32(column * width)
            while row < stop_row:
                kh, col = position_in(top, row, SH, DH), first_col
                start = base + np.int64(np.int32(row * OW + col)) * inner
                while kh >= 0 and col < stop_col:
                    kw = position_in(left, col, SW, DW)
                    if kw >= 0:
                        if vectors:
                            load_vector(values, dy, start)
                        else:
                            values[0] = load(dy, start)
                        mine = np.int32(h * W + w) if offsets else np.int32(kh * KW + kw)
                        for k in range(width):
                            if indices[start + k] == mine:
                                sums[k] += values[k]
                    col, start = np.int32(col + 1), start + inner
                row = np.int32(row + 1)
            store_numbers(dx, np.int64(i) * width, sums)

    return pixel_backward_kernel
