"""Lesson 01: relu, relu_grid_stride, nchw_index, sigmoid, swish_backward, column_sum."""

import math

import numpy as np

from bank import right
from bank.mistakes import mistakes
from course_lib import cuda

#: The words of the sanitizer.
OUTSIDE = "out-of-bounds"
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)

# ---- relu(x, y) ------------------------------------------------------------------------------


@right("relu")
@cuda.jit
def relu_returns_early(x, y):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i >= x.shape[0]:
        return
    y[i] = x[i] if x[i] > ZERO else ZERO


@right("relu")
@cuda.jit
def relu_two_branches(x, y):
    i = cuda.grid(1)
    if i < len(x):
        if x[i] > 0:
            y[i] = x[i]
        else:
            y[i] = 0


@right("relu")
@cuda.jit
def relu_by_a_loop(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = max(x[i], ZERO)


mistakes("relu",
    ("relu_no_guard",
     r"out-of-bounds in line \d+, `y\[i\] = max\(x\[i\], np\.float32\(0\)\)`\n.*reads `x\[1\]`",
     "    if i < x.size:\n        y[i]", "    y[i]"),
    ("relu_one_too_many", OUTSIDE, "i < x.size", "i <= x.size"),
    ("relu_one_too_few", r"y\[0\] was never written", "x.size", "x.size - 1"),
    ("relu_from_one", r"y\[0\] was never written", "cuda.grid(1)", "cuda.grid(1) + 1"),
    ("relu_first_block_only", "never written", "cuda.grid(1)", "cuda.threadIdx.x"),
    ("relu_blocks_of_32", "never written", relu_returns_early, "cuda.blockDim.x", "32"),
    ("relu_whole_blocks", "never written", "x.size", "x.size // cuda.blockDim.x * cuda.blockDim.x"),
    ("relu_positive_only", "never written", "i < x.size", "i < x.size and x[i] > 0"),
    ("relu_absolute", "with abs in place of max", "max(x[i], np.float32(0))", "abs(x[i])"),
    ("relu_minimum", "wrong values in y", "max", "min"),
    ("relu_leaky", "wrong exactly where x is negative", relu_returns_early, "else ZERO",
     "else np.float32(0.01) * x[i]"),
    ("relu_six", "wrong values in y", "max(x[i], np.float32(0))",
     "min(max(x[i], np.float32(0)), np.float32(6))"),
    ("relu_in_place", "changes its input x", "y[i] =", "x[i] = y[i] ="),
    ("relu_added", "depends on what y held before", "y[i] =", "y[i] +="),
    ("relu_hides_a_nan", "depends on what y held before", "max(x[i], np.float32(0))",
     "max(y[i], max(x[i], np.float32(0)))"),
    ("relu_into_the_neighbour", "race-between-blocks", "np.float32(0))\n",
     "np.float32(0))\n        if i + 1 < x.size:\n            y[i + 1] = 5\n"),
    ("relu_backwards", "in place of `i`; line", "y[i]", "y[x.size - 1 - i]"),
    ("relu_wrapped", OUTSIDE, "y[i]", "y[i - 1]", "x[i]", "x[i - 1]"))


# ---- relu_grid_stride(x, y) ------------------------------------------------------------------


@right("relu_grid_stride")
@cuda.jit
def stride_while(x, y):
    i = cuda.grid(1)
    while i < x.size:
        y[i] = max(x[i], ZERO)
        i += cuda.gridsize(1)


@right("relu_grid_stride")
@cuda.jit
def stride_by_hand(x, y):
    start = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    for i in range(start, x.shape[0], step):
        y[i] = x[i] if x[i] > 0 else ZERO


@right("relu_grid_stride")
@cuda.jit
def stride_chapters(x, y):
    share = math.ceil(x.size / cuda.gridsize(1))
    first = cuda.grid(1) * share
    for i in range(first, min(first + share, x.size)):
        y[i] = max(x[i], ZERO)


mistakes("relu_grid_stride",
    ("stride_no_loop", r"never written: the launch has 2 threads for 3 elements", stride_while,
     "while", "if"),
    ("stride_from_own_block", "never written", "cuda.grid(1)", "cuda.threadIdx.x"),
    ("stride_too_long", "never written", "cuda.gridsize(1)", "cuda.gridsize(1) + 1"),
    ("stride_of_64", "never written", "cuda.gridsize(1)", "64"),
    ("stride_whole_rounds", "never written", "x.size",
     "x.size // cuda.gridsize(1) * cuda.gridsize(1)"),
    ("stride_rounds_without_guard", OUTSIDE, "x.size",
     "math.ceil(x.size / cuda.gridsize(1)) * cuda.gridsize(1)"),
    ("stride_stands_still", r"endless loop in line \d+, `while i < x\.size:`\n.*for ever",
     stride_while, "        i += cuda.gridsize(1)\n", ""),
    ("stride_last_missing", "never written", "x.size", "x.size - 1"),
    ("stride_one_too_many", OUTSIDE, "x.size", "x.size + 1"),
    ("stride_chapters_rounded_down", "never written", stride_chapters,
     "math.ceil(x.size / cuda.gridsize(1))", "x.size // cuda.gridsize(1)"))


# ---- nchw_index(x, bias, y) ------------------------------------------------------------------


@right("nchw_index")
@cuda.jit
def nchw_digits(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i >= N * C * H * W:
        return
    rest, w = i // W, i % W
    rest, h = rest // H, rest % H
    n, c = rest // C, rest % C
    y[n, c, h, w] = x[n, c, h, w] + bias[c]


@right("nchw_index")
@cuda.jit
def nchw_from_the_left(x, bias, y):
    i = cuda.grid(1)
    if i < x.size:
        C, H, W = x.shape[1:]
        n = i // (C * H * W)
        i -= n * C * H * W
        c = i // (H * W)
        i -= c * H * W
        y[n, c, i // W, i % W] = x[n, c, i // W, i % W] + bias[c]


mistakes("nchw_index",
    ("nchw_no_guard", OUTSIDE, "i < N * C * H * W", "i >= 0"),
    ("nchw_bias_of_picture", "wrong values in y", "bias[c]", "bias[n % C]"),
    ("nchw_channel_not_wrapped", OUTSIDE, "i // (W * H) % C", "i // (W * H)"),
    ("nchw_height_for_width", OUTSIDE + "|never written", "w = i % W", "w = i % H",
     "h = i // W % H", "h = i // H % W"),
    ("nchw_picture_without_channels", "never written|" + OUTSIDE, "i // (W * H * C)",
     "i // (W * H) % N"),
    ("nchw_one_picture", "never written", "i < N * C * H * W", "i < C * H * W"),
    ("nchw_no_bias", "without one part of a sum", " + bias[c]", ""),
    ("nchw_first_bias", "wrong values in y", "bias[c]", "bias[0]"),
    ("nchw_bias_as_if_channels_last", "wrong values in y", "bias[c]", "bias[i % C]"))


# ---- sigmoid(x, y) ---------------------------------------------------------------------------


@right("sigmoid")
@cuda.jit
def sigmoid_textbook(x, y):
    # exp may become infinite here, but 1 / infinity is the right 0.
    i = cuda.grid(1)
    if i < x.size:
        y[i] = ONE / (ONE + math.exp(-x[i]))


@right("sigmoid")
@cuda.jit
def sigmoid_by_tanh(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = HALF + HALF * math.tanh(HALF * x[i])


@right("sigmoid")
@cuda.jit
def sigmoid_two_branches(x, y):
    i = cuda.grid(1)
    if i < x.size:
        if x[i] >= 0:
            y[i] = ONE / (ONE + math.exp(-x[i]))
        else:
            e = math.exp(x[i])
            y[i] = e / (ONE + e)


mistakes("sigmoid",
    ("sigmoid_in_float64", r"float64-promotion in line \d+, `y\[i\] = 1\.0 / ",
     "y[i] = one / (one + e)", "y[i] = 1.0 / (1.0 + e)", "else e / (one + e)",
     "else e / (1.0 + e)"),
    # Infinity divided by infinity, where x is large.
    ("sigmoid_overflows", "NaN was computed from finite inputs", "-abs(x[i])", "x[i]",
     "one / (one + e) if x[i] >= 0 else ", ""),
    ("sigmoid_mirrored", "wrong values in y", sigmoid_textbook, "-x[i]", "x[i]"),
    ("sigmoid_of_size_only", "with abs too much; line", sigmoid_textbook, "-x[i]",
     "-abs(x[i])"),
    ("sigmoid_clipped", "wrong values in y", sigmoid_textbook, "-x[i]",
     "-min(max(x[i], np.float32(-5)), np.float32(5))"),
    ("sigmoid_hard", "wrong values in y", sigmoid_by_tanh, "HALF + HALF * math.tanh(HALF * x[i])",
     "min(max(x[i] / np.float32(6) + HALF, ZERO), ONE)"),
    ("sigmoid_tanh", "wrong values in y", sigmoid_by_tanh, "HALF + HALF * math.tanh(HALF * x[i])",
     "math.tanh(x[i])"),
    ("sigmoid_no_guard", OUTSIDE, sigmoid_textbook, "i < x.size", "i >= 0"),
    ("sigmoid_wrong_at_zero", "wrong exactly where x is 0", sigmoid_textbook, "math.exp(-x[i]))",
     "math.exp(-x[i])) if x[i] != 0 else ZERO"))


# ---- swish_backward(dy, x, dx) ---------------------------------------------------------------


@cuda.jit(device=True)
def safe_sigmoid(x):
    e = math.exp(-abs(x))
    return ONE / (ONE + e) if x >= 0 else e / (ONE + e)


@right("swish_backward")
@cuda.jit
def swish_with_a_function(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = safe_sigmoid(x[i])
        dx[i] = dy[i] * s * (ONE + x[i] * (ONE - s))


@right("swish_backward")
@cuda.jit
def swish_from_swish(dy, x, dx):
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        s = safe_sigmoid(x[i])
        y = x[i] * s
        dx[i] = dy[i] * (y + s * (ONE - y))


mistakes("swish_backward",
    ("swish_forgets_second_term", "wrong values in dx", " + x[i] * s * (one - s)", ""),
    ("swish_wrong_sign", "wrong values in dx", "s + x[i]", "s - x[i]"),
    ("swish_downhill", r"with `-dy\[i\]` in place of `dy\[i\]`", "dy[i]", "-dy[i]"),
    ("swish_without_dy", "wrong values in dx", "dy[i] * ", ""),
    ("swish_overflows", "NaN was computed from finite inputs", "-abs(x[i])", "x[i]",
     "one / (one + e) if x[i] >= 0 else ", ""),
    ("swish_zero_at_zero", "wrong exactly where x is 0", "(one - s))",
     "(one - s)) if x[i] != 0 else np.float32(0)"),
    ("swish_into_dy", "changes its input dy", "dx[i] =", "dy[i] = dx[i] ="),
    ("swish_accumulates", "depends on what dx held before", "dx[i] =", "dx[i] +="),
    ("swish_sigmoid_of_size", "one side of a choice taken always",
     " if x[i] >= 0 else e / (one + e)", ""))


# ---- column_sum(x, y) ------------------------------------------------------------------------


@right("column_sum")
@cuda.jit
def columns_from_the_bottom(x, y):
    col = cuda.grid(1)
    if col >= y.size:
        return
    total = 0.0
    for row in range(x.shape[0] - 1, -1, -1):
        total += x[row, col]
    y[col] = total


@right("column_sum")
@cuda.jit
def columns_in_place_of_a_total(x, y):
    for col in range(cuda.grid(1), x.shape[1], cuda.gridsize(1)):
        y[col] = 0
        for row in range(x.shape[0]):
            y[col] += x[row, col]


mistakes("column_sum",
    # Thread `col` adds up row number `col`.
    ("columns_as_rows", OUTSIDE + "|never written", "n_rows, n_cols =", "n_cols, n_rows =",
     "x[row, col]", "x[col, row]"),
    ("columns_indices_swapped", OUTSIDE, "x[row, col]", "x[col, row]"),
    ("columns_no_guard", OUTSIDE, "col < n_cols", "col >= 0"),
    ("columns_last_row_missing", "no part", "range(n_rows)", "range(n_rows - 1)"),
    ("columns_first_row_missing", "no part", "range(n_rows)", "range(1, n_rows)"),
    ("columns_never_cleared", "depends on what y held before", columns_in_place_of_a_total,
     "        y[col] = 0\n", ""),
    ("columns_mean", "in place of `total`; line", "= total", "= total / max(n_rows, 1)"),
    ("columns_empty_not_zero", "never written", "col < n_cols", "col < n_cols and n_rows > 0"),
    ("columns_running_total", "wrong values in y", "total +=", "total ="))
