"""The rungs `scatter` and `gather`: the sums as they are written, each term read from memory.

`scatter` has a thread for each element of x, which adds what it makes to float32 sums by atomics.
`gather` has a thread for each result, which finds the elements of x that reach it.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import index_of, output_of, place_of
from course_lib.runtime.intrinsics import allow_next_kernel, load, store, wait_for_previous_kernel

BLOCK_SIZE = 128


@cuda.jit
def start_kernel(sums, bias, biased, K, n_pixels, channels_last):
    # Every sum begins as its channel's bias.
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.grid(1))
    if i < sums.shape[0]:
        k = i % K if channels_last else i // n_pixels % K
        sums[i] = load(bias, k) if biased else ZERO


@cuda.jit
def scatter_kernel(
    x, weight, sums, N, C, H, W, K, R, S, P, Q, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, channels_last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i = cuda.grid(1)
    if i < x.shape[0]:
        n, c, h, w = place_of(i, C, H, W, channels_last)
        per_group = K // groups
        first = c // (C // groups) * per_group
        value = load(x, i)
        for k in range(per_group):
            for r in range(R):
                p = h * stride_h - pad_h + r * dilation_h
                if p >= 0 and p < P:
                    for s in range(S):
                        q = w * stride_w - pad_w + s * dilation_w
                        if q >= 0 and q < Q:
                            place = index_of(c, k, r, s, per_group, R, S, channels_last)
                            at = index_of(n, first + k, p, q, K, P, Q, channels_last)
                            cuda.atomic.add(sums, at, value * load(weight, place))


@cuda.jit
def finish_kernel(sums, y, y_n, y_k, y_p, y_q, K, P, Q, channels_last):
    # The sums, rounded, to where y lies: its element (n, k, p, q) at n·y_n + k·y_k + p·y_p + q·y_q.
    allow_next_kernel()
    wait_for_previous_kernel()
    i = cuda.grid(1)
    if i < sums.shape[0]:
        n, k, p, q = place_of(i, K, P, Q, channels_last)
        store(y, n * y_n + k * y_k + p * y_p + q * y_q, sums[i])


@cuda.jit
def gather_kernel(
    x, weight, bias, y, biased, y_n, y_k, y_p, y_q, N, C, H, W, K, R, S, P, Q, stride_h, stride_w,
    pad_h, pad_w, dilation_h, dilation_w, groups, channels_last,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.grid(1))
    if i < np.int64(N) * K * P * Q:
        n, k, p, q = place_of(i, K, P, Q, channels_last)
        n_channels, per_group = C // groups, K // groups
        first = k // per_group * n_channels
        own = k % per_group
        total = ZERO
        for c in range(first, first + n_channels):
            for r in range(R):
                h = output_of(p, r, H, stride_h, pad_h, dilation_h)
                if h >= 0:
                    for s in range(S):
                        w = output_of(q, s, W, stride_w, pad_w, dilation_w)
                        if w >= 0:
                            place = index_of(c, own, r, s, per_group, R, S, channels_last)
                            at = index_of(n, c, h, w, C, H, W, channels_last)
                            total += load(x, at) * load(weight, place)
        if biased:
            total += load(bias, k)
        store(y, n * y_n + k * y_k + p * y_p + q * y_q, total)
