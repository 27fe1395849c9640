"""The rungs of max pooling that move one element at a time: `naive` and `rows`.

Both know one number of the memory format, `inner`: how many channels lie side by side. Contiguous
images are N·C outer planes with inner = 1, channels-last ones are N outer images with inner = C.
Element (h, w) of plane `outer`, channel c, lies at (outer·H·W + h·W + w)·inner + c.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics import load, store

LOWEST = np.float32(-np.inf)


@cuda.jit(device=True)
def first_inside(start, step):
    """How many steps lead from `start` to the first place that is not before the image."""
    return 0 if start >= 0 else (step - 1 - start) // step


@cuda.jit(device=True)
def window_max(x, base, inner, h, w, H, W, KH, KW, DH, DW, offsets):
    """(largest value, where it is) of the window at (h, w); a NaN is larger than all.

    Where: in the plane if `offsets`, else in the window. The first of equals counts, as in PyTorch,
    and the last NaN.
    """
    best, first_row, first_col = LOWEST, first_inside(h, DH), first_inside(w, DW)
    at = first_row * KW + first_col
    if offsets:
        at = (h + first_row * DH) * W + w + first_col * DW
    for kh in range(first_row, KH):
        row = h + kh * DH
        if row < H:
            for kw in range(first_col, KW):
                col = w + kw * DW
                if col < W:
                    value = load(x, base + (row * W + col) * inner)
                    if value > best or value != value:
                        best = value
                        at = row * W + col if offsets else kh * KW + kw
    return best, at


@cuda.jit(device=True)
def gathered(dy, indices, base, inner, h, w, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW, offsets):
    """The sum of dy over the windows whose largest element is (h, w), in the order of memory."""
    total = ZERO
    top, left = h + PH, w + PW
    first_row = max(0, (top - (KH - 1) * DH + SH - 1) // SH)
    first_col = max(0, (left - (KW - 1) * DW + SW - 1) // SW)
    for row in range(first_row, min(top // SH, OH - 1) + 1):
        kh = (top - row * SH) // DH
        for col in range(first_col, min(left // SW, OW - 1) + 1):
            kw = (left - col * SW) // DW
            i = base + (row * OW + col) * inner
            mine = h * W + w if offsets else kh * KW + kw
            # With a dilation the window may step over (h, w).
            if indices[i] == mine and kh * DH == top - row * SH and kw * DW == left - col * SW:
                total += load(dy, i)
    return total


@cuda.jit
def naive_kernel(x, y, indices, inner, offsets, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW):
    i = cuda.grid(1)
    if i < y.shape[0]:
        c, pixel = i % inner, i // inner
        outer, row, col = pixel // (OH * OW), pixel // OW % OH, pixel % OW
        base = outer * H * W * inner + c
        h, w = row * SH - PH, col * SW - PW
        best, at = window_max(x, base, inner, h, w, H, W, KH, KW, DH, DW, offsets)
        store(y, i, best)
        indices[i] = at


@cuda.jit
def rows_kernel(x, y, indices, inner, offsets, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW):
    # A block for each row of the output: what its threads have in common is found once.
    outer, row = cuda.blockIdx.x // OH, cuda.blockIdx.x % OH
    start = cuda.blockIdx.x * OW * inner
    h = row * SH - PH
    for j in range(cuda.threadIdx.x, OW * inner, cuda.blockDim.x):
        base = outer * H * W * inner + j % inner
        w = j // inner * SW - PW
        best, at = window_max(x, base, inner, h, w, H, W, KH, KW, DH, DW, offsets)
        store(y, start + j, best)
        indices[start + j] = at


@cuda.jit
def relu_kernel(y, indices, nowhere):
    """ReLU of y; where that makes it 0, its index is `nowhere`. For kernels that can't do it."""
    i = cuda.grid(1)
    if i < y.shape[0] and load(y, i) <= ZERO:
        store(y, i, ZERO)
        indices[i] = nowhere


@cuda.jit
def naive_backward_kernel(
    dy, indices, dx, inner, offsets, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW
):
    i = cuda.grid(1)
    if i < dx.shape[0]:
        c, pixel = i % inner, i // inner
        outer, h, w = pixel // (H * W), pixel // W % H, pixel % W
        base = outer * OH * OW * inner + c
        total = gathered(
            dy, indices, base, inner, h, w, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW, offsets
        )
        store(dx, i, total)


@cuda.jit
def rows_backward_kernel(
    dy, indices, dx, inner, offsets, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW
):
    outer, h = cuda.blockIdx.x // H, cuda.blockIdx.x % H
    start = cuda.blockIdx.x * W * inner
    for j in range(cuda.threadIdx.x, W * inner, cuda.blockDim.x):
        base = outer * OH * OW * inner + j % inner
        total = gathered(
            dy, indices, base, inner, h, j // inner, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW,
            offsets,
        )  # fmt: skip
        store(dx, start + j, total)
