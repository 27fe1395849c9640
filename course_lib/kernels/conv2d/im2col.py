"""The rung `im2col`: the matrix is made after all, and multiplied as a 1 × 1 convolution.

Each pixel of y gets a column of what its filter meets, C·R·S numbers, R·S times as much memory as
x. To keep that bounded, images are worked on a few at a time. The product is `implicit_gemm`'s: a
1 × 1 convolution of an image with C·R·S channels, which gathers nothing.

dx: the same product backwards gives the gradient of the columns, and each pixel of x adds up those
of its copies (col2im): a gather, so no atomics. dweight: the product of dy and the columns.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import index_of, output_of, place_of
from course_lib.runtime.intrinsics import allow_next_kernel, load, store, wait_for_previous_kernel

BLOCK_SIZE = 256


@cuda.jit(device=True)
def channel_of(c, r, s, n_channels, R, S, last):
    """The channel of the columns that holds channel `c` of x at tap (r, s), in its own group."""
    group, own = c // n_channels, c % n_channels
    if last:
        return group * (n_channels * R * S) + (r * S + s) * n_channels + own
    return group * (n_channels * R * S) + (own * R + r) * S + s


@cuda.jit
def im2col_kernel(
    x, columns, first, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, last,
):  # fmt: skip
    # columns is (images, C·R·S, P, Q), of the images of x from `first` on.
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.blockIdx.x) * BLOCK_SIZE + cuda.threadIdx.x
    if i < columns.shape[0]:
        n, column, p, q = place_of(i, C * R * S, P, Q, last)
        n_channels = C // groups
        n_terms = n_channels * R * S
        group, t = column // n_terms, column % n_terms
        if last:
            c, tap = t % n_channels, t // n_channels
        else:
            c, tap = t // (R * S), t % (R * S)
        h = p * stride_h - pad_h + tap // S * dilation_h
        w = q * stride_w - pad_w + tap % S * dilation_w
        value = ZERO
        if h >= 0 and h < H and w >= 0 and w < W:
            value = load(x, index_of(first + n, group * n_channels + c, h, w, C, H, W, last))
        store(columns, i, value)


@cuda.jit
def col2im_kernel(
    columns, dx, first, n_images, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.blockIdx.x) * BLOCK_SIZE + cuda.threadIdx.x
    if i < np.int64(n_images) * C * H * W:
        n, c, h, w = place_of(i, C, H, W, last)
        total = ZERO
        for r in range(R):
            p = output_of(h, r, P, stride_h, pad_h, dilation_h)
            if p >= 0:
                for s in range(S):
                    q = output_of(w, s, Q, stride_w, pad_w, dilation_w)
                    if q >= 0:
                        column = channel_of(c, r, s, C // groups, R, S, last)
                        total += load(columns, index_of(n, column, p, q, C * R * S, P, Q, last))
        store(dx, np.int64(first) * C * H * W + i, total)
