"""The rung `depthwise`, for groups == C: each channel of x is convolved by itself.

There are R·S products for each number read, too few for a matrix product. Memory is the limit: a
thread makes one result at a time, and its neighbours, which read almost the same part of x, find it
in the cache. The taps of a channel are read once by a block where it stays within a plane, and by
each thread from the cache where neighbours are other channels (channels-last).

dweight: a block for each channel of y and part of the pixels, which it passes over once for every
TAPS taps; parts are added up by `total_kernel`.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided, index_of
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    block_sum,
    load,
    store,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 256
TAPS = 9  # that one pass of dweight sums up


@cuda.jit(device=True)
def plane_or_pixel(i, n_pixels, n_channels, channels_last):
    """(image, channel, pixel) of element `i` of an array."""
    if channels_last:
        whole = i // n_channels
        return whole // n_pixels, np.int32(i - whole * n_channels), np.int32(whole % n_pixels)
    plane = i // n_pixels
    return plane // n_channels, np.int32(plane % n_channels), np.int32(i - plane * n_pixels)


@cuda.jit
def depthwise_kernel(
    x, weight, bias, y, biased, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.blockIdx.x) * BLOCK_SIZE + cuda.threadIdx.x
    if i < y.shape[0]:
        n, k, pixel = plane_or_pixel(i, P * Q, K, last)
        p, q = divided(pixel, Q)
        c, _ = divided(k, K // C)
        plane, step = index_of(n, c, 0, 0, C, H, W, last), C if last else 1
        total = ZERO
        for r in range(R):
            h = np.int32(p * stride_h - pad_h + r * dilation_h)
            if h >= 0 and h < H:
                for s in range(S):
                    w = np.int32(q * stride_w - pad_w + s * dilation_w)
                    if w >= 0 and w < W:
                        value = load(x, plane + (np.int64(h) * W + w) * step)
                        total += value * load(weight, (np.int64(k) * R + r) * S + s)
        if biased:
            total += load(bias, k)
        store(y, i, total)


@cuda.jit(device=True)
def row_sum(dy, weight, plane, taps, p, w, S, Q, stride, pad, dilation, step):
    """What one row of dy gives a pixel of dx in column `w`."""
    total = ZERO
    for s in range(S):
        reached = np.int32(w + pad - s * dilation)
        if reached >= 0:
            q, rest = divided(reached, stride)
            if rest == 0 and q < Q:
                total += load(dy, plane + (np.int64(p) * Q + q) * step) * load(weight, taps + s)
    return total


@cuda.jit
def depthwise_dx_kernel(
    dy, weight, dx, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.blockIdx.x) * BLOCK_SIZE + cuda.threadIdx.x
    if i < dx.shape[0]:
        n, c, pixel = plane_or_pixel(i, H * W, C, last)
        h, w = divided(pixel, W)
        total, step = ZERO, K if last else 1
        for k in range(c * (K // C), (c + 1) * (K // C)):
            plane = index_of(n, k, 0, 0, K, P, Q, last)
            for r in range(R):
                reached = np.int32(h + pad_h - r * dilation_h)
                if reached >= 0:
                    p, rest = divided(reached, stride_h)
                    if rest == 0 and p < P:
                        taps = (np.int64(k) * R + r) * S
                        total += row_sum(
                            dy, weight, plane, taps, p, w, S, Q, stride_w, pad_w, dilation_w, step
                        )
        store(dx, i, total)


@cuda.jit
def depthwise_dweight_kernel(
    dy, x, partial, length, n_splits, N, C, H, W, K, R, S, P, Q, stride_h, stride_w,
    pad_h, pad_w, dilation_h, dilation_w, groups, last,
):  # fmt: skip
    # Block `k * n_splits + split` sums `length` pixels; partial is (splits, K, R, S).
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(32, np.float32)
    sums = cuda.local.array(TAPS, np.float32)
    k, split = cuda.blockIdx.x // n_splits, cuda.blockIdx.x % n_splits
    x_step, dy_step = (C, K) if last else (1, 1)
    stop = min((split + 1) * np.int64(length), np.int64(N) * P * Q)
    for tap in range(0, R * S, TAPS):
        for u in range(TAPS):
            sums[u] = ZERO
        pixel = split * np.int64(length) + cuda.threadIdx.x
        while pixel < stop:
            n = pixel // (P * Q)
            p, q = divided(pixel - n * (P * Q), Q)
            plane = index_of(n, k // (K // C), 0, 0, C, H, W, last)
            at = index_of(n, k, 0, 0, K, P, Q, last) + (pixel - n * (P * Q)) * dy_step
            upstream = load(dy, at)
            for u in range(TAPS):
                r, s = divided(tap + u, S)
                h = np.int32(p * stride_h - pad_h + r * dilation_h)
                w = np.int32(q * stride_w - pad_w + s * dilation_w)
                if r < R and h >= 0 and h < H and w >= 0 and w < W:
                    sums[u] += upstream * load(x, plane + (np.int64(h) * W + w) * x_step)
            pixel += BLOCK_SIZE
        for u in range(TAPS):
            total = block_sum(sums[u], scratch)
            if cuda.threadIdx.x == 0 and tap + u < R * S:
                partial[(split * np.int64(K) + k) * (R * S) + tap + u] = total
