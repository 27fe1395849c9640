"""Lesson 13: transposed convolution, three kernels, two launchers and a function.

Most wrong kernels are the solution with one mistake in it, and `mistake` says which text stands in
place of which. The right ones are written out, and go other ways than the solutions. The messages
about races and memory outside an array are the sanitizer's own.
"""

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.teach.exercises.lesson_08 import conv2d_direct
from course_lib.teach.exercises.lesson_13 import (
    conv2d_dweight,
    conv2d_dx,
    conv_transpose2d_gather,
)

OUTSIDE = "out-of-bounds|negative"
VALUES = "wrong values"
RACE = "race"
ZERO = np.float32(0)
SOME = 32  # threads of a block


def enough(n_threads):
    """Blocks of `SOME` threads for so many."""
    return max(1, -(-n_threads // SOME))


# ---- conv_transpose2d_scatter(x, weight, y, stride, padding) ----------------------------------


@right("conv_transpose2d_scatter")
@cuda.jit
def scatter_product_by_product(x, weight, y, stride, padding):
    # A thread walks over single products, tap by tap, of whichever pixel they are.
    (N, C, H, W), (_, K, R, S), (P, Q) = x.shape, weight.shape, y.shape[2:]
    for i in range(cuda.grid(1), N * weight.size * H * W, cuda.gridsize(1)):
        h, w, s, r = i % H, i // H % W, i // (H * W) % S, i // (H * W * S) % R
        rest = i // (H * W * S * R)
        k, c, n = rest % K, rest // K % C, rest // (K * C)
        p, q = h * stride + r - padding, w * stride + s - padding
        if 0 <= p < P and 0 <= q < Q:
            cuda.atomic.add(y, (n, k, p, q), weight[c, k, r, s] * x[n, c, h, w])


@right("conv_transpose2d_scatter")
@cuda.jit
def scatter_all_channels_of_a_pixel(x, weight, y, stride, padding):
    # A thread for each pixel: it adds up its channels first, so that it needs fewer atomics.
    (N, C, H, W), (_, K, R, S), (P, Q) = x.shape, weight.shape, y.shape[2:]
    i = cuda.grid(1)
    if i < N * H * W:
        n, h, w = i // (H * W), i // W % H, i % W
        for r in range(max(0, padding - h * stride), R):
            p = h * stride - padding + r
            for s in range(max(0, padding - w * stride), S):
                q = w * stride - padding + s
                if p < P and q < Q:
                    for k in range(K):
                        total = ZERO
                        for c in range(C):
                            total += x[n, c, h, w] * weight[c, k, r, s]
                        cuda.atomic.add(y, (n, k, p, q), total)


@right("conv_transpose2d_scatter")
@cuda.jit
def scatter_that_collects(x, weight, y, stride, padding):
    # It gathers: right as well, and nothing has to be atomic.
    (_, C, H, W), (_, K, R, S), (P, Q) = x.shape, weight.shape, y.shape[2:]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        total = ZERO
        for c in range(C):
            for h in range(H):
                for w in range(W):
                    r, s = p + padding - h * stride, q + padding - w * stride
                    if r >= 0 and r < R and s >= 0 and s < S:
                        total += x[n, c, h, w] * weight[c, k, r, s]
        y[n, k, p, q] = total


ADDED = "cuda.atomic.add(y, (n, k, p, q), x[n, c, h, w] * weight[c, k, r, s])"
PLACE = "h * stride - padding + r, w * stride - padding + s"
mistakes("conv_transpose2d_scatter",
    ("scatter_no_atomic", RACE, ADDED, "y[n, k, p, q] += x[n, c, h, w] * weight[c, k, r, s]"),
    ("scatter_last_patch_wins", RACE, ADDED, "y[n, k, p, q] = x[n, c, h, w] * weight[c, k, r, s]"),
    ("scatter_read_then_exchanged", RACE, ADDED,
     "cuda.atomic.exch(y, (n, k, p, q), y[n, k, p, q] + x[n, c, h, w] * weight[c, k, r, s])"),
    ("scatter_no_guard", OUTSIDE, "i < x.size", "i >= 0"),
    ("scatter_paints_above", OUTSIDE, "if p >= 0 and ", "if "),
    ("scatter_paints_to_the_right", OUTSIDE, " and q < Q", ""),
    ("scatter_paints_below", OUTSIDE, "p < P", "p <= P"),
    ("scatter_padding_added", VALUES, PLACE, PLACE.replace("- padding", "+ padding")),
    ("scatter_no_stride", VALUES, PLACE, "h - padding + r, w - padding + s"),
    ("scatter_stride_divides", VALUES, PLACE,
     "(h - padding + r) // stride, (w - padding + s) // stride"),
    ("scatter_stride_of_padding", VALUES, PLACE,
     "(h - padding) * stride + r, (w - padding) * stride + s"),
    ("scatter_turned", VALUES, "weight[c, k, r, s]", "weight[c, k, R - 1 - r, S - 1 - s]"),
    ("scatter_weight_of_a_convolution", OUTSIDE + "|" + VALUES, "weight[c, k, r, s]",
     "weight[k, c, r, s]"),
    ("scatter_first_channel_only", VALUES, "range(K)", "range(1)"),
    ("scatter_first_picture_only", VALUES, "(n, k, p, q)", "(0, k, p, q)"),
    ("scatter_columns_of_H", OUTSIDE + "|" + VALUES, "i // W % H, i % W", "i // H % W, i % H"),
    ("scatter_stride_2", VALUES, PLACE, PLACE.replace("stride", "2")),
    ("scatter_three_taps", OUTSIDE + "|" + VALUES, "R, S = weight.shape[1:]",
     "R, S = weight.shape[1], 3, 3"))


# ---- conv_transpose2d_gather(x, weight, y, stride, padding) -----------------------------------


@right("conv_transpose2d_gather")
@cuda.jit
def gather_asks_every_tap(x, weight, y, stride, padding):
    # As in lesson 9: each tap is asked whether a pixel has put it here.
    (_, C, H, W), (_, K, R, S), (P, Q) = x.shape, weight.shape, y.shape[2:]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        q, p, k, n = i % Q, i // Q % P, i // (Q * P) % K, i // (Q * P * K)
        total = ZERO
        for c in range(C):
            for r in range(R):
                h, above = divmod(p + padding - r, stride)
                for s in range(S):
                    w, beside = divmod(q + padding - s, stride)
                    if above == 0 and beside == 0 and 0 <= h < H and 0 <= w < W:
                        total += weight[c, k, r, s] * x[n, c, h, w]
        y[n, k, p, q] = total


@right("conv_transpose2d_gather")
@cuda.jit
def gather_over_the_pixels(x, weight, y, stride, padding):
    # From the last pixel that reaches here back to the first: the taps follow from the pixels.
    (_, C, H, W), (_, K, R, S), (P, Q) = x.shape, weight.shape, y.shape[2:]
    i = cuda.grid(1)
    n, rest = divmod(i, K * P * Q)
    k, rest = divmod(rest, P * Q)
    p, q = divmod(rest, Q)
    if i < y.size:
        total = ZERO
        for h in range(min(H - 1, (p + padding) // stride), -1, -1):
            r = p + padding - h * stride
            if r >= R:
                break
            for w in range(min(W - 1, (q + padding) // stride), -1, -1):
                s = q + padding - w * stride
                if s >= S:
                    break
                for c in range(C):
                    total += x[n, c, h, w] * weight[c, k, r, s]
        y[n, k, p, q] = total


@wrong("conv_transpose2d_gather", "what y held before|NaN|uninit|wrong values")
@cuda.jit
def gather_that_scatters(x, weight, y, stride, padding):
    # Nobody has set y to 0 before.
    (_, C, H, W), (_, K, R, S), (P, Q) = x.shape, weight.shape, y.shape[2:]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        for r in range(R):
            for s in range(S):
                p, q = h * stride - padding + r, w * stride - padding + s
                if p >= 0 and p < P and q >= 0 and q < Q:
                    for k in range(K):
                        cuda.atomic.add(y, (n, k, p, q), x[n, c, h, w] * weight[c, k, r, s])


DOWN, RIGHT = "(p + padding) % stride, R, stride", "(q + padding) % stride, S, stride"
mistakes("conv_transpose2d_gather",
    ("gather_no_guard", OUTSIDE, "i < y.size", "i >= 0"),
    ("gather_takes_every_tap", VALUES, DOWN, "R", RIGHT, "S"),
    ("gather_every_tap_of_a_row", VALUES, RIGHT, "S"),
    ("gather_begins_at_tap_0", VALUES, DOWN, "0, R, stride", RIGHT, "0, S, stride"),
    ("gather_phase_without_padding", VALUES, DOWN, "p % stride, R, stride", RIGHT,
     "q % stride, S, stride"),
    ("gather_phase_of_minus_padding", VALUES, DOWN, "(p - padding) % stride, R, stride"),
    ("gather_first_tap_only", VALUES, DOWN,
     "(p + padding) % stride, min(R, (p + padding) % stride + 1)"),
    ("gather_reads_above", OUTSIDE, "if h >= 0 and ", "if "),
    ("gather_reads_below", OUTSIDE, "h < H", "h <= H"),
    ("gather_reads_to_the_right", OUTSIDE, " and w < W", ""),
    ("gather_like_forward", OUTSIDE + "|" + VALUES,
     "(p + padding - r) // stride, (q + padding - s) // stride",
     "p * stride - padding + r, q * stride - padding + s"),
    ("gather_turned", VALUES, "weight[c, k, r, s]", "weight[c, k, R - 1 - r, S - 1 - s]"),
    ("gather_weight_of_a_convolution", OUTSIDE + "|" + VALUES, "weight[c, k, r, s]",
     "weight[k, c, r, s]"),
    ("gather_first_channel_only", VALUES, "range(C)", "range(1)"),
    ("gather_last_product_only", VALUES, "total += x", "total = x"),
    ("gather_first_picture_only", VALUES, "x[n, c", "x[0, c"),
    ("gather_gaps_left_as_they_were", "never written|held before", "        y[n, k, p, q] = total",
     "        if total != 0:\n            y[n, k, p, q] = total"),
    ("gather_adds_to_y", "held before", "y[n, k, p, q] = total", "y[n, k, p, q] += total"),
    ("gather_in_float64", "float64-promotion", "total = ZERO", "total = 0.0"))


# ---- transposed_size(size, taps, stride, padding, output_padding) -----------------------------


@right("transposed_size")
def size_from_the_last_place(size, taps, stride, padding, output_padding):
    last = -padding + (size - 1) * stride + (taps - 1)
    return last + 1 - padding + output_padding


@right("transposed_size")
def size_by_search(size, taps, stride, padding, output_padding):
    # The smallest size of which a convolution makes so many, and the rest of the division more.
    found = 1
    while (found + 2 * padding - taps) // stride + 1 < size:
        found += 1
    return found + output_padding


FORMULA = "(size - 1) * stride + taps - 2 * padding + output_padding"
mistakes("transposed_size",
    ("size_times_stride", VALUES, FORMULA, "size * stride + taps - 2 * padding + output_padding"),
    ("size_only_times_stride", VALUES, FORMULA, "size * stride"),
    ("size_padding_once", VALUES, "2 * padding", "padding"),
    ("size_padding_added", VALUES, "- 2 * padding", "+ 2 * padding"),
    ("size_no_output_padding", VALUES, " + output_padding", ""),
    ("size_output_padding_twice", VALUES, "+ output_padding", "+ 2 * output_padding"),
    ("size_of_a_convolution", VALUES, FORMULA,
     "(size + 2 * padding - taps) // stride + 1 + output_padding"),
    ("size_one_tap_less", VALUES, "+ taps -", "+ taps - 1 -"),
    ("size_as_if_stride_2", VALUES, "* stride", "* 2"),
    ("size_as_a_float", "it returned a float", "return " + FORMULA,
     "return float(" + FORMULA + ")"),
    ("size_no_return", "is the return missing", "    return (", "    ("))


# ---- transposed_by_dx(x, weight, stride, padding, output_padding) -----------------------------


@right("transposed_by_dx")
def by_your_own_gather(x, weight, stride, padding, output_padding):
    taps = weight.shape[2:]
    sizes = [
        (n - 1) * stride + t - 2 * padding + output_padding
        for n, t in zip(x.shape[2:], taps, strict=True)
    ]
    y = np.zeros((x.shape[0], weight.shape[1], *sizes), np.float32)
    conv_transpose2d_gather[enough(y.size), SOME](x, weight, y, stride, padding)
    return y


@right("transposed_by_dx")
def by_a_full_convolution(x, weight, stride, padding, output_padding):
    # As a convolution of what was spread out, with the taps turned; the padding is cut off last.
    (N, C, H, W), (_, K, R, S) = x.shape, weight.shape
    rows, cols = ((n - 1) * stride + 1 for n in (H, W))
    spread = np.zeros((N, C, rows + 2 * (R - 1) + output_padding, cols + 2 * (S - 1)
                       + output_padding), np.float32)  # fmt: skip
    for h in range(H):
        for w in range(W):
            spread[:, :, R - 1 + h * stride, S - 1 + w * stride] = np.asarray(x[:, :, h, w])
    turned = np.ascontiguousarray(np.asarray(weight)[:, :, ::-1, ::-1].swapaxes(0, 1))
    whole = np.empty((N, K, rows + R - 1 + output_padding, cols + S - 1 + output_padding),
                     np.float32)  # fmt: skip
    zero = np.zeros(K, np.float32)
    conv2d_direct[enough(whole.size), SOME](spread, turned, zero, whole, 1, 0)
    below, beside = whole.shape[2] - padding, whole.shape[3] - padding
    return np.ascontiguousarray(whole[:, :, padding:below, padding:beside])


LAUNCH = "conv2d_dx[blocks(y.size), BLOCK](x, weight, y, stride, padding)"
mistakes("transposed_by_dx",
    ("by_dx_turned", VALUES, LAUNCH,
     LAUNCH.replace("weight", "np.ascontiguousarray(weight[:, :, ::-1, ::-1])")),
    ("by_dx_weight_transposed", VALUES + "|" + OUTSIDE, LAUNCH,
     LAUNCH.replace("weight", "np.ascontiguousarray(weight.swapaxes(0, 1))")),
    ("by_dx_options_changed_over", VALUES + "|" + "Error", LAUNCH,
     LAUNCH.replace("stride, padding", "padding, stride")),
    ("by_dx_no_stride", VALUES, LAUNCH, LAUNCH.replace("stride, padding", "1, padding")),
    ("by_dx_no_padding", VALUES, LAUNCH, LAUNCH.replace("stride, padding", "stride, 0")),
    ("by_dx_one_block", "never written|" + VALUES, "blocks(y.size)", "1"),
    # What is launched is up to the launcher: of how many threads, the check doesn't know.
    ("by_dx_threads_for_x", "(?m)never written$", "blocks(y.size), BLOCK",
     "blocks(x.size), 2"),
    ("by_dx_no_output_padding", "has shape", "(H, R, stride, padding, output_padding)",
     "(H, R, stride, padding, 0)"),
    ("by_dx_channels_of_x", "has shape", "(N, K, P, Q)", "(N, x.shape[1], P, Q)"),
    ("by_dx_rows_for_columns", "has shape", "(N, K, P, Q)", "(N, K, Q, P)"),
    ("by_dx_taps_changed_over", "has shape", "(H, R, ", "(H, S, ", "(W, S, ", "(W, R, "),
    ("by_dx_in_float64", "is float64", "dtype=np.float32", "dtype=float"),
    ("by_dx_no_return", "is the return missing", "    return y\n", ""),
    ("by_dx_launches_nothing", "never written|" + VALUES, "    " + LAUNCH + "\n", ""))


# ---- transposed_backward(dy, x, weight, stride, padding) --------------------------------------


@right("transposed_backward")
def backward_in_another_order(dy, x, weight, stride, padding):
    # dweight first, with fewer threads to a block; dx begins at 0.
    dx, dweight = np.zeros(x.shape, np.float32), np.zeros(weight.shape, np.float32)
    conv2d_dweight[dweight.size, 32](x, dy, dweight, stride, padding)
    for n in range(len(x)):  # picture by picture
        zero, size = np.zeros(x.shape[1], np.float32), dx[n : n + 1].size
        conv2d_direct[enough(size), SOME](
            dy[n : n + 1], weight, zero, dx[n : n + 1], stride, padding
        )
    return dx, dweight


@right("transposed_backward")
def backward_with_dx_spread_out(dy, x, weight, stride, padding):
    # dx by the gradient of a convolution of stride 1 whose result was thinned out.
    (N, C, H, W), (R, S) = x.shape, weight.shape[2:]
    P, Q = dy.shape[2:]
    every = np.empty((N, C, P + 2 * padding - R + 1, Q + 2 * padding - S + 1), np.float32)
    conv2d_direct[enough(every.size), SOME](
        dy, weight, np.zeros(C, np.float32), every, 1, padding
    )
    dx = np.ascontiguousarray(every[:, :, : stride * H : stride, : stride * W : stride])
    dweight = np.empty(weight.shape, np.float32)
    conv2d_dweight[enough(32 * dweight.size), SOME](x, dy, dweight, stride, padding)
    return dx, dweight


FOR_DX = "(dy, weight, no_bias, dx, stride, padding)"
FOR_DWEIGHT = "(x, dy, dweight, stride, padding)"
mistakes("transposed_backward",
    ("backward_dweight_as_in_lesson_9", "dweight|" + OUTSIDE, FOR_DWEIGHT,
     "(dy, x, dweight, stride, padding)"),
    ("backward_dx_turned", "wrong values in dx", FOR_DX,
     FOR_DX.replace("weight", "np.ascontiguousarray(weight[:, :, ::-1, ::-1])")),
    ("backward_dx_weight_transposed", "wrong values in dx|" + OUTSIDE, FOR_DX,
     FOR_DX.replace("weight", "np.ascontiguousarray(weight.swapaxes(0, 1))")),
    ("backward_dx_with_stride_1", "wrong values in dx", FOR_DX, FOR_DX.replace("stride", "1")),
    ("backward_dx_without_padding", "wrong values in dx", FOR_DX, FOR_DX.replace("padding", "0")),
    ("backward_dweight_without_padding", "wrong values in dweight", FOR_DWEIGHT,
     FOR_DWEIGHT.replace("padding", "0")),
    ("backward_dweight_with_stride_1", "wrong values in dweight", FOR_DWEIGHT,
     FOR_DWEIGHT.replace("stride", "1")),
    ("backward_a_thread_for_each_weight", "dweight", "blocks(32 * dweight.size)",
     "blocks(dweight.size)"),
    ("backward_one_as_bias", "wrong values in dx", "no_bias = np.zeros", "no_bias = np.ones"),
    ("backward_changed_over", "has shape|" + VALUES, "return dx, dweight", "return dweight, dx"),
    ("backward_no_dweight", "dweight",
     "    conv2d_dweight[blocks(32 * dweight.size), BLOCK]" + FOR_DWEIGHT + "\n", ""))


@wrong("transposed_backward", "wrong values in dx")
def backward_dx_by_dx(dy, x, weight, stride, padding):
    # Once more the transposed convolution, of dy, instead of the convolution.
    dx, dweight = np.zeros(x.shape, np.float32), np.empty(weight.shape, np.float32)
    whole = np.empty((*x.shape[:2], *dy.shape[2:]), np.float32)
    turned = np.ascontiguousarray(np.asarray(weight).swapaxes(0, 1))
    conv2d_dx[enough(whole.size), SOME](dy, turned, whole, 1, 0)
    dx[...] = whole[:, :, : x.shape[2], : x.shape[3]]
    conv2d_dweight[enough(32 * dweight.size), SOME](x, dy, dweight, stride, padding)
    return dx, dweight


# ---- upsample_into(x, weight, joined, first) --------------------------------------------------


@right("upsample_into")
@cuda.jit
def into_by_a_grid_stride_loop(x, weight, joined, first):
    # Tap by tap: the four taps of a patch are four runs over the pixels of x.
    N, C, H, W = x.shape
    K, P, Q = weight.shape[1], joined.shape[2], joined.shape[3]
    for i in range(cuda.grid(1), N * K * P * Q, cuda.gridsize(1)):
        q, p, k, n = i % Q, i // Q % P, i // (Q * P) % K, i // (Q * P * K)
        h, r = divmod(p, 2)
        w, s = divmod(q, 2)
        total = ZERO
        if h < H and w < W:
            for c in range(C - 1, -1, -1):
                total += weight[c, k, r, s] * x[n, c, h, w]
        joined[n, k + first, p, q] = total


@right("upsample_into")
@cuda.jit
def into_by_whole_patches(x, weight, joined, first):
    # A thread writes a patch of 2 × 2; patches beyond the picture are zeros, cut off at the rim.
    N, C, H, W = x.shape
    K, P, Q = weight.shape[1], joined.shape[2], joined.shape[3]
    rows, cols = (P + 1) // 2, (Q + 1) // 2
    i = cuda.grid(1)
    if i < N * K * rows * cols:
        n, k, h, w = i // (K * rows * cols), i // (rows * cols) % K, i // cols % rows, i % cols
        for r in range(min(2, P - 2 * h)):
            for s in range(min(2, Q - 2 * w)):
                total = ZERO
                for c in range(C if h < H and w < W else 0):
                    total += x[n, c, h, w] * weight[c, k, r, s]
                joined[n, first + k, 2 * h + r, 2 * w + s] = total


mistakes("upsample_into",
    ("into_no_guard", OUTSIDE, "i < N * K * P * Q", "i >= 0"),
    ("into_the_first_channels", VALUES + "|" + OUTSIDE, "joined[n, first + k,", "joined[n, k,"),
    ("into_one_channel_too_far", VALUES + "|" + OUTSIDE, "joined[n, first + k,",
     "joined[n, first + k + 1,"),
    ("into_one_channel", VALUES + "|more than one|race", "joined[n, first + k,",
     "joined[n, first,"),
    ("into_adds", VALUES, "q] = total", "q] += total"),
    ("into_reads_below", OUTSIDE, "if p < 2 * H and q < 2 * W", "if q < 2 * W"),
    ("into_reads_to_the_right", OUTSIDE + "|" + VALUES, " and q < 2 * W", ""),
    ("into_repeats_the_rim", VALUES, "if p < 2 * H and q < 2 * W", "if C > 0",
     "x[n, c, p // 2, q // 2]", "x[n, c, min(p // 2, H - 1), min(q // 2, W - 1)]"),
    ("into_rim_left_as_it_was", VALUES, "        joined[n, first + k, p, q] = total",
     "        if p < 2 * H and q < 2 * W:\n            joined[n, first + k, p, q] = total"),
    ("into_nearest", VALUES, "weight[c, k, p % 2, q % 2]", "weight[c, k, 0, 0]"),
    ("into_taps_turned", VALUES, "p % 2, q % 2]", "1 - p % 2, 1 - q % 2]"),
    ("into_taps_changed_over", VALUES, "p % 2, q % 2]", "q % 2, p % 2]"),
    ("into_rows_of_H", OUTSIDE + "|" + VALUES, "p // 2, q // 2]", "p % H, q % W]"),
    ("into_first_channel_of_x", VALUES, "range(C)", "range(1)"),
    ("into_weight_of_a_convolution", OUTSIDE + "|" + VALUES, "weight[c, k, p", "weight[k, c, p"),
    ("into_first_picture_only", VALUES, "x[n, c", "x[0, c"),
    ("into_in_float64", "float64-promotion", "total = ZERO", "total = 0.0"))
