"""The kernels of the rung `vectorised` for channels-last images and any window.

A thread takes 16 bytes of channels, a block a row of pixels, of the output or of dx; neighbouring
threads take neighbouring channels, then the next pixel's. Every pixel must begin on a 16-byte
boundary. Neighbouring windows share elements; those come from the caches.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.max_pool2d.bands import divided
from course_lib.kernels.max_pool2d.ladder import LOWEST, first_inside
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load_vector,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)


@cuda.jit
def pixel_kernel(
    x, y, indices, C, n_columns, offsets, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW
):
    allow_next_kernel()
    wait_for_previous_kernel()
    width = vector_width(x)
    values = cuda.local.array(MAX_WIDTH, np.float32)
    best = cuda.local.array(MAX_WIDTH, np.float32)
    at = cuda.local.array(MAX_WIDTH, np.int32)
    image, row = divided(cuda.blockIdx.x, OH)
    h = row * SH - PH
    first_row = first_inside(h, DH)
    j = cuda.threadIdx.x
    while j < OW * n_columns:
        col, column = divided(j, n_columns)
        w = col * SW - PW
        first_col = first_inside(w, DW)
        place = (h + first_row * DH) * W + w + first_col * DW
        for k in range(width):
            best[k], at[k] = LOWEST, place if offsets else first_row * KW + first_col
        start = image * H * W * C + column * width
        for kh in range(first_row, KH):
            if h + kh * DH < H:
                for kw in range(first_col, KW):
                    if w + kw * DW < W:
                        place = (h + kh * DH) * W + w + kw * DW
                        load_vector(values, x, start + place * C)
                        for k in range(width):
                            if values[k] > best[k] or values[k] != values[k]:
                                best[k] = values[k]
                                at[k] = place if offsets else kh * KW + kw
        start = (cuda.blockIdx.x * OW + col) * C + column * width
        store_vector(y, start, best)
        for k in range(width):
            indices[start + k] = at[k]
        j += cuda.blockDim.x


@cuda.jit
def pixel_backward_kernel(
    dy, indices, dx, C, n_columns, offsets, H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW
):
    allow_next_kernel()
    wait_for_previous_kernel()
    width = vector_width(dx)
    values = cuda.local.array(MAX_WIDTH, np.float32)
    sums = cuda.local.array(MAX_WIDTH, np.float32)
    image, h = divided(cuda.blockIdx.x, H)
    top = h + PH
    first_row = max(0, (top - (KH - 1) * DH + SH - 1) // SH)
    j = cuda.threadIdx.x
    while j < W * n_columns:
        w, column = divided(j, n_columns)
        left = w + PW
        for k in range(width):
            sums[k] = ZERO
        for row in range(first_row, min(top // SH, OH - 1) + 1):
            kh = (top - row * SH) // DH
            for col in range(
                max(0, (left - (KW - 1) * DW + SW - 1) // SW), min(left // SW, OW - 1) + 1
            ):
                kw = (left - col * SW) // DW
                # With a dilation the window may step over (h, w).
                if kh * DH == top - row * SH and kw * DW == left - col * SW:
                    start = ((image * OH + row) * OW + col) * C + column * width
                    load_vector(values, dy, start)
                    mine = h * W + w if offsets else kh * KW + kw
                    for k in range(width):
                        if indices[start + k] == mine:
                            sums[k] += values[k]
        store_vector(dx, (cuda.blockIdx.x * W + w) * C + column * width, sums)
        j += cuda.blockDim.x
