"""The rung `direct`: the sums as they are written, each term read from memory.

Forward and dx have a thread for each result, in the order in which results lie in memory; dweight
has a warp for each weight. dbias, which all rungs share, has some blocks for each channel.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import index_of, output_of, place_of
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    block_sum,
    load,
    store,
    wait_for_previous_kernel,
    warp_sum,
)

BLOCK_SIZE = 128
BIAS_BLOCK_SIZE = 256


@cuda.jit
def direct_kernel(
    x, weight, bias, y, biased, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, channels_last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i = cuda.grid(1)
    if i < y.shape[0]:
        n, k, p, q = place_of(i, K, P, Q, channels_last)
        n_channels = C // groups
        first = k // (K // groups) * n_channels
        total = ZERO
        for c in range(n_channels):
            for r in range(R):
                h = p * stride_h - pad_h + r * dilation_h
                if h >= 0 and h < H:
                    for s in range(S):
                        w = q * stride_w - pad_w + s * dilation_w
                        if w >= 0 and w < W:
                            place = index_of(k, c, r, s, n_channels, R, S, channels_last)
                            at = index_of(n, first + c, h, w, C, H, W, channels_last)
                            total += load(x, at) * load(weight, place)
        if biased:
            total += load(bias, k)
        store(y, i, total)


@cuda.jit
def direct_dx_kernel(
    dy, weight, dx, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, channels_last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i = cuda.grid(1)
    if i < dx.shape[0]:
        n, c, h, w = place_of(i, C, H, W, channels_last)
        n_channels, n_outputs = C // groups, K // groups
        first = c // n_channels * n_outputs
        total = ZERO
        for k in range(first, first + n_outputs):
            for r in range(R):
                p = output_of(h, r, P, stride_h, pad_h, dilation_h)
                if p >= 0:
                    for s in range(S):
                        q = output_of(w, s, Q, stride_w, pad_w, dilation_w)
                        if q >= 0:
                            own = c % n_channels
                            place = index_of(k, own, r, s, n_channels, R, S, channels_last)
                            at = index_of(n, k, p, q, K, P, Q, channels_last)
                            total += load(dy, at) * load(weight, place)
        store(dx, i, total)


@cuda.jit
def direct_dweight_kernel(
    dy, x, dweight, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, channels_last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i, lane_id = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if i < dweight.shape[0]:
        n_channels = C // groups
        k, c, r, s = place_of(i, n_channels, R, S, channels_last)
        c += k // (K // groups) * n_channels
        total = ZERO
        pixel = np.int64(lane_id)  # of all images
        while pixel < np.int64(N) * P * Q:
            n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
            h = p * stride_h - pad_h + r * dilation_h
            w = q * stride_w - pad_w + s * dilation_w
            if h >= 0 and h < H and w >= 0 and w < W:
                at = index_of(n, c, h, w, C, H, W, channels_last)
                total += load(dy, index_of(n, k, p, q, K, P, Q, channels_last)) * load(x, at)
            pixel += 32
        total = warp_sum(total)
        if lane_id == 0:
            store(dweight, i, total)


@cuda.jit
def dbias_kernel(dy, partial, length, n_splits, N, K, n_pixels, channels_last):
    # Block `k * n_splits + split` sums `length` pixels of channel k; partial is (splits, K).
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(32, np.float32)
    k, split = cuda.blockIdx.x // n_splits, cuda.blockIdx.x % n_splits
    i, stop = split * length + cuda.threadIdx.x, min((split + 1) * length, N * n_pixels)
    n, pixel = i // n_pixels, i % n_pixels
    total = ZERO
    while i < stop:
        total += load(dy, index_of(n, k, 0, pixel, K, 1, n_pixels, channels_last))
        i += BIAS_BLOCK_SIZE
        pixel += BIAS_BLOCK_SIZE
        while pixel >= n_pixels:
            pixel -= n_pixels
            n += 1
    total = block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        partial[split * K + k] = total
