"""Lesson 09: the gradients of a convolution, three kernels and a function.

Most wrong kernels are the solution with one mistake in it, and `mistake` says which text stands in
place of which. The right ones are written out, and so is what adds up with atomics. The messages
about races and memory outside an array are the sanitizer's own.
"""

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import warp_sum

OUTSIDE = "out-of-bounds|negative"
VALUES = "wrong values"
ALL = 0xFFFFFFFF
ZERO = np.float32(0)

# ---- dx_as_convolution(dy, weight, H, W, stride, padding) -------------------------------------


@right("dx_as_convolution")
def spread_number_by_number(dy, weight, H, W, stride, padding):
    R, S = weight.shape[2:]
    spread = np.zeros((*dy.shape[:2], H + R - 1, W + S - 1), np.float32)
    for p in range(dy.shape[2]):
        for q in range(dy.shape[3]):
            spread[..., R - 1 - padding + p * stride, S - 1 - padding + q * stride] = dy[..., p, q]
    return spread, np.flip(weight, (2, 3)).transpose(1, 0, 2, 3)


@right("dx_as_convolution")
def spread_by_indices(dy, weight, H, W, stride, padding):
    _, C, R, S = weight.shape
    spread = np.zeros((len(dy), len(weight), H + R - 1, W + S - 1), dtype=np.float32)
    rows = R - 1 - padding + stride * np.arange(dy.shape[2])
    cols = S - 1 - padding + stride * np.arange(dy.shape[3])
    spread[:, :, rows[:, None], cols] = dy
    return spread, np.ascontiguousarray(np.moveaxis(weight, 0, 1)[..., ::-1, ::-1])


mistakes("dx_as_convolution",
    ("spread_not_turned", "wrong values in turned|expected", "[:, :, ::-1, ::-1]", ""),
    ("spread_rows_turned_only", "wrong values in turned", "::-1, ::-1]", "::-1]"),
    ("spread_not_transposed", "turned has shape", ".swapaxes(0, 1)", ""),
    ("spread_filters_on_their_side", "turned", "swapaxes(0, 1)", "transpose(1, 0, 3, 2)"),
    ("spread_too_small", "spread has shape|broadcast", "H + R - 1", "H"),
    ("spread_starts_at_once", "wrong values in spread|broadcast",
     "top, left = R - 1 - padding, S - 1 - padding", "top, left = 0, 0"),
    ("spread_padding_added", "wrong values in spread|broadcast", "R - 1 - padding",
     "R - 1 + padding"),
    ("spread_without_padding", "wrong values in spread|broadcast", "R - 1 - padding", "R - 1"),
    ("spread_not_spread", "wrong values in spread|broadcast", "top : top + stride * P : stride",
     "top : top + P"),
    ("spread_in_float64", "spread is float64", ", dtype=dy.dtype", ""),
    ("spread_no_return", "is the return missing", "    return spread, weight",
     "    spread, weight"))


# ---- conv2d_dx(dy, weight, dx, stride, padding) -----------------------------------------------


@right("conv2d_dx")
@cuda.jit
def dx_over_the_results(dy, weight, dx, stride, padding):
    # From the first result that may have read the pixel to the last: no remainders.
    C, H, W = dx.shape[1:]
    R, S = weight.shape[2:]
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        w, h, c, n = i % W, i // W % H, i // (W * H) % C, i // (W * H * C)
        total = ZERO
        for p in range(dy.shape[2]):
            r = h + padding - p * stride
            if r >= 0 and r < R:
                for q in range(dy.shape[3]):
                    s = w + padding - q * stride
                    if s >= 0 and s < S:
                        for k in range(dy.shape[1]):
                            total += weight[k, c, r, s] * dy[n, k, p, q]
        dx[n, c, h, w] = total


@right("conv2d_dx")
@cuda.jit
def dx_filter_by_filter(dy, weight, dx, stride, padding):
    i, (C, H, W) = cuda.grid(1), dx.shape[1:]
    n, rest = divmod(i, C * H * W)
    c, rest = divmod(rest, H * W)
    h, w = divmod(rest, W)
    if i < dx.size:
        total = ZERO
        for k in range(weight.shape[0]):
            for r in range(min(weight.shape[2], h + padding + 1)):
                p, left_down = divmod(h + padding - r, stride)
                for s in range(min(weight.shape[3], w + padding + 1)):
                    q, left_right = divmod(w + padding - s, stride)
                    if left_down + left_right == 0 and p < dy.shape[2] and q < dy.shape[3]:
                        total += dy[n, k, p, q] * weight[k, c, r, s]
        dx[n, c, h, w] = total


@wrong("conv2d_dx", "what dx held before|NaN|uninit|wrong values")
@cuda.jit
def dx_scattered(dy, weight, dx, stride, padding):
    # A thread for each result hands its gradient out; nobody has set dx to 0 before.
    C, H, W = dx.shape[1:]
    K, P, Q = dy.shape[1:]
    for i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        for c in range(C):
            for r in range(weight.shape[2]):
                for s in range(weight.shape[3]):
                    h, w = p * stride - padding + r, q * stride - padding + s
                    if h >= 0 and h < H and w >= 0 and w < W:
                        cuda.atomic.add(dx, (n, c, h, w), dy[n, k, p, q] * weight[k, c, r, s])


MET = "down % stride == 0 and right % stride == 0"
mistakes("conv2d_dx",
    ("dx_no_guard", OUTSIDE, "i < dx.size", "i >= 0"),
    ("dx_like_forward", VALUES + "|" + OUTSIDE, "h + padding - r, w + padding - s",
     "h - padding + r, w - padding + s"),
    ("dx_no_remainder", VALUES, MET, "stride > 0"),
    ("dx_remainder_of_rows_only", VALUES, " and right % stride == 0", ""),
    ("dx_no_padding", VALUES, "h + padding - r", "h - r"),
    ("dx_stride_multiplied", VALUES + "|" + OUTSIDE, "down // stride", "down * stride"),
    ("dx_reads_above", OUTSIDE, "met and p >= 0 and", "met and"),
    ("dx_reads_to_the_right", OUTSIDE, " and q < Q", ""),
    ("dx_reads_below", OUTSIDE, "p < P", "p <= P"),
    ("dx_turned_twice", VALUES, "weight[k, c, r, s]", "weight[k, c, R - 1 - r, S - 1 - s]"),
    ("dx_not_transposed", OUTSIDE, "weight[k, c, r, s]", "weight[c, k, r, s]"),
    ("dx_first_filter_only", VALUES, "range(K)", "range(1)"),
    ("dx_last_term_only", VALUES, "total += dy", "total = dy"),
    ("dx_first_picture_only", VALUES, "dy[n, k, p, q]", "dy[0, k, p, q]"),
    ("dx_rows_of_dy", VALUES + "|" + OUTSIDE, "C, H, W = dx.shape[1:]", "C, W, H = dx.shape[1:]"),
    ("dx_in_float64", "float64-promotion", "total = ZERO", "total = 0.0"))


# ---- conv2d_dweight(dy, x, dweight, stride, padding) ------------------------------------------


@wrong("conv2d_dweight", "should share the work")
@cuda.jit
def dweight_by_one_lane(dy, x, dweight, stride, padding):
    # Lane 0 does it all: right, and 31 lanes look on.
    i, (C, R, S) = cuda.grid(1) // 32, dweight.shape[1:]
    if cuda.grid(1) % 32 == 0 and i < dweight.size:
        k, c, r, s = i // (C * R * S), i // (R * S) % C, i // S % R, i % S
        total = ZERO
        for n in range(x.shape[0]):
            for p in range(dy.shape[2]):
                h = p * stride - padding + r
                for q in range(dy.shape[3]):
                    w = q * stride - padding + s
                    if h >= 0 and w >= 0 and h < x.shape[2] and w < x.shape[3]:
                        total += x[n, c, h, w] * dy[n, k, p, q]
        dweight[k, c, r, s] = total


@right("conv2d_dweight")
@cuda.jit
def dweight_line_by_line(dy, x, dweight, stride, padding):
    # The lanes share each line of dy. Left out of it is what meets a pixel beside the picture.
    i, lane = cuda.grid(1) // 32, cuda.laneid
    k, c = i // (dweight.size // dweight.shape[0]), i // (dweight.shape[2] * dweight.shape[3])
    r, s = i // dweight.shape[3] % dweight.shape[2], i % dweight.shape[3]
    if i < dweight.size:
        total = ZERO
        for line in range(x.shape[0] * dy.shape[2]):
            n, p = divmod(line, dy.shape[2])
            h = p * stride + r - padding
            if h >= 0 and h < x.shape[2]:
                for q in range(lane, dy.shape[3], 32):
                    w = q * stride + s - padding
                    if w >= 0 and w < x.shape[3]:
                        total += x[n, c % x.shape[1], h, w] * dy[n, k, p, q]
        total = warp_sum(total)
        if lane == 0:
            dweight[k, c % x.shape[1], r, s] = total


@right("conv2d_dweight")
@cuda.jit
def dweight_by_a_butterfly(dy, x, dweight, stride, padding):
    # The reduction written out, with a tap that is not inside as a product with 0.
    warp, lane = divmod(cuda.grid(1), 32)
    k, rest = divmod(warp, dweight.shape[1] * dweight.shape[2] * dweight.shape[3])
    c, rest = divmod(rest, dweight.shape[2] * dweight.shape[3])
    r, s = divmod(rest, dweight.shape[3])
    if k < dweight.shape[0]:
        total = ZERO
        for place in range(lane, dy.shape[0] * dy.shape[2] * dy.shape[3], 32):
            line, q = divmod(place, dy.shape[3])
            n, p = divmod(line, dy.shape[2])
            h, w = p * stride + r - padding, q * stride + s - padding
            known = h >= 0 and h < x.shape[2] and w >= 0 and w < x.shape[3]
            total += dy[n, k, p, q] * (x[n, c, h, w] if known else ZERO)
        for step in range(5):
            total += cuda.shfl_xor_sync(ALL, total, 1 << step)
        if lane == 31:
            dweight[k, c, r, s] = total


@wrong("conv2d_dweight", "what dweight held before|NaN|wrong values|float")
@cuda.jit
def dweight_with_atomics(dy, x, dweight, stride, padding):
    # All lanes add to the weight itself, which nobody has set to 0.
    C, R, S = dweight.shape[1:]
    N, _, P, Q = dy.shape
    i, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if i < dweight.size:
        k, c, r, s = i // (C * R * S), i // (R * S) % C, i // S % R, i % S
        for pixel in range(lane, N * P * Q, 32):
            n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
            h, w = p * stride - padding + r, q * stride - padding + s
            if h >= 0 and h < x.shape[2] and w >= 0 and w < x.shape[3]:
                cuda.atomic.add(dweight, (k, c, r, s), dy[n, k, p, q] * x[n, c, h, w])


mistakes("conv2d_dweight",
    ("dweight_no_guard", OUTSIDE, "i < dweight.size", "i >= 0"),
    ("dweight_no_sum_of_lanes", VALUES, "        total = warp_sum(total)\n", ""),
    ("dweight_first_32_pixels", VALUES, "range(lane, N * P * Q, 32)",
     "range(lane, min(32, N * P * Q), 32)"),
    ("dweight_every_lane_reads_all", VALUES, "range(lane, N * P * Q, 32)", "range(N * P * Q)"),
    ("dweight_one_picture", VALUES, "N * P * Q", "P * Q"),
    ("dweight_turned", VALUES, "- padding + r", "- padding + R - 1 - r"),
    ("dweight_like_dx", VALUES, "p * stride - padding + r, q * stride - padding + s",
     "p * stride + padding - r, q * stride + padding - s"),
    ("dweight_no_stride", VALUES, "p * stride - padding", "p - padding"),
    ("dweight_reads_above", OUTSIDE, "if h >= 0 and ", "if "),
    ("dweight_reads_below", OUTSIDE, "h < H", "h <= H"),
    ("dweight_reads_to_the_right", OUTSIDE, " and w < W", ""),
    ("dweight_filters_for_channels", OUTSIDE + "|" + VALUES, "dy[n, k, p, q] * x[n, c, h, w]",
     "dy[n, c, p, q] * x[n, k, h, w]"),
    ("dweight_last_product_only", VALUES, "total += dy", "total = dy"),
    ("dweight_without_x", VALUES, " * x[n, c, h, w]", ""),
    ("dweight_rows_of_P", OUTSIDE + "|" + VALUES, "pixel // Q % P, pixel % Q",
     "pixel // P % Q, pixel % P"),
    ("dweight_some_lanes_at_the_shuffle", "lane|shuffle", "        total = warp_sum(total)\n",
     "        if lane < N * P * Q:\n            total = warp_sum(total)\n"))


# ---- conv2d_dbias(dy, dbias) ------------------------------------------------------------------


@wrong("conv2d_dbias", "should share the work|threads (read|write);")
@cuda.jit
def dbias_by_one_warp(dy, dbias):
    N, _, P, Q = dy.shape
    k, lane, total = cuda.blockIdx.x, cuda.threadIdx.x, ZERO
    if lane < 32:
        for n in range(N):
            for p in range(P):
                for q in range(lane, Q, 32):
                    total += dy[n, k, p, q]
        total = warp_sum(total)
    if lane == 0:
        dbias[k] = total


@right("conv2d_dbias")
@cuda.jit
def dbias_by_a_tree(dy, dbias):
    # Blocks are whole warps, not powers of two: an odd number in the middle waits for a round.
    partial = cuda.shared.array(256, np.float32)
    t, left = cuda.threadIdx.x, cuda.blockDim.x
    partial[t] = ZERO
    for place in range(t, dy.shape[2] * dy.shape[3], left):
        for n in range(dy.shape[0]):
            partial[t] += dy[n, cuda.blockIdx.x, place // dy.shape[3], place % dy.shape[3]]
    while left > 1:
        cuda.syncthreads()
        half = (left + 1) // 2
        if t + half < left:
            partial[t] += partial[t + half]
        left = half
    if t == 0:
        dbias[cuda.blockIdx.x] = partial[0]


@right("conv2d_dbias")
@cuda.jit
def dbias_two_shuffles(dy, dbias):
    # The first warp adds up the warps' sums, by a second round of shuffles.
    partial = cuda.shared.array(32, np.float32)
    N, _, P, Q = dy.shape
    k, t, total = cuda.blockIdx.x, cuda.threadIdx.x, ZERO
    for line in range(t // 32, N * P, cuda.blockDim.x // 32):
        for q in range(t % 32, Q, 32):
            total += dy[line // P, k, line % P, q]
    total = warp_sum(total)
    if t % 32 == 0:
        partial[t // 32] = total
    cuda.syncthreads()
    if t < 32:
        total = warp_sum(partial[t] if t < cuda.blockDim.x // 32 else ZERO)
        if t == 0:
            dbias[k] = total


@wrong("conv2d_dbias", "what dbias held before|NaN|wrong values|float")
@cuda.jit
def dbias_with_atomics(dy, dbias):
    # Nobody has set dbias to 0.
    N, _, P, Q = dy.shape
    k = cuda.blockIdx.x
    for pixel in range(cuda.threadIdx.x, N * P * Q, cuda.blockDim.x):
        cuda.atomic.add(dbias, k, dy[pixel // (P * Q), k, pixel // Q % P, pixel % Q])


mistakes("conv2d_dbias",
    ("dbias_no_barrier", "race|uninitialised", "    cuda.syncthreads()\n", ""),
    ("dbias_first_warp_only", VALUES + "|no part", "range(cuda.blockDim.x // 32)", "range(1)"),
    ("dbias_all_eight_warps", "uninitialised", "range(cuda.blockDim.x // 32)", "range(8)"),
    ("dbias_one_picture", VALUES, "N * P * Q", "P * Q"),
    ("dbias_one_number_each", VALUES, "range(t, N * P * Q, cuda.blockDim.x)",
     "range(t, min(t + 1, N * P * Q))"),
    ("dbias_picture_for_channel", OUTSIDE + "|" + VALUES, "dy[pixel // (P * Q), k, ",
     "dy[k, pixel // (P * Q), "),
    ("dbias_first_picture_again", VALUES, "dy[pixel // (P * Q), k", "dy[0, k"),
    ("dbias_first_channel_only", VALUES, ", k, pixel", ", 0, pixel"),
    ("dbias_mean", VALUES, "dbias[k] = total", "dbias[k] = total / np.float32(max(N * P * Q, 1))"),
    ("dbias_no_sum_of_lanes", VALUES, "    total = warp_sum(total)\n", ""),
    ("dbias_every_thread_reads_all", VALUES + "|times what", "range(t, N * P * Q, cuda.blockDim.x)",
     "range(N * P * Q)"),
    ("dbias_counts_the_first_warp_twice", VALUES, "    if t == 0:\n        total = ZERO\n",
     "    if t == 0:\n"),
    ("dbias_rows_of_P", OUTSIDE + "|" + VALUES, "pixel // Q % P, pixel % Q",
     "pixel // P % Q, pixel % P"),
    ("dbias_in_float64", "float64-promotion", "cuda.threadIdx.x, ZERO", "cuda.threadIdx.x, 0.0"))
