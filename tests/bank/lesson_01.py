"""Lesson 01: relu, relu_grid_stride, nchw_index, sigmoid, swish_backward, column_sum."""

import math

import numpy as np

from bank import right, wrong
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


@wrong("relu", r"out-of-bounds in line \d+, `y\[i\] = max\(x\[i\], ZERO\)`\n.*reads `x\[1\]`")
@cuda.jit
def relu_no_guard(x, y):
    i = cuda.grid(1)
    y[i] = max(x[i], ZERO)


@wrong("relu", OUTSIDE)
@cuda.jit
def relu_one_too_many(x, y):
    i = cuda.grid(1)
    if i <= x.size:
        y[i] = max(x[i], ZERO)


@wrong("relu", r"y\[0\] was never written")
@cuda.jit
def relu_one_too_few(x, y):
    i = cuda.grid(1)
    if i < x.size - 1:
        y[i] = max(x[i], ZERO)


@wrong("relu", r"y\[0\] was never written")
@cuda.jit
def relu_from_one(x, y):
    i = cuda.grid(1) + 1
    if i < x.size:
        y[i] = max(x[i], ZERO)


@wrong("relu", "never written")
@cuda.jit
def relu_first_block_only(x, y):
    i = cuda.threadIdx.x
    if i < x.size:
        y[i] = max(x[i], ZERO)


@wrong("relu", "never written")
@cuda.jit
def relu_blocks_of_32(x, y):
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < x.size:
        y[i] = max(x[i], ZERO)


@wrong("relu", "never written")
@cuda.jit
def relu_whole_blocks(x, y):
    i = cuda.grid(1)
    if i < x.size // cuda.blockDim.x * cuda.blockDim.x:
        y[i] = max(x[i], ZERO)


@wrong("relu", "never written")
@cuda.jit
def relu_positive_only(x, y):
    i = cuda.grid(1)
    if i < x.size and x[i] > 0:
        y[i] = x[i]


@wrong("relu", "wrong exactly where x is negative")
@cuda.jit
def relu_absolute(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = abs(x[i])


@wrong("relu", "wrong values in y")
@cuda.jit
def relu_minimum(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = min(x[i], ZERO)


@wrong("relu", "wrong exactly where x is negative")
@cuda.jit
def relu_leaky(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] if x[i] > 0 else np.float32(0.01) * x[i]


@wrong("relu", "wrong values in y")
@cuda.jit
def relu_six(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = min(max(x[i], ZERO), np.float32(6))


@wrong("relu", "changes its input x")
@cuda.jit
def relu_in_place(x, y):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = max(x[i], ZERO)
        y[i] = x[i]


@wrong("relu", "depends on what y held before")
@cuda.jit
def relu_added(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] += max(x[i], ZERO)


@wrong("relu", "depends on what y held before")
@cuda.jit
def relu_hides_a_nan(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(y[i], max(x[i], ZERO))


@wrong("relu", "race-between-blocks")
@cuda.jit
def relu_into_the_neighbour(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], ZERO)
        if i + 1 < x.size:
            y[i + 1] = 5


@wrong("relu", "the right values at the wrong places")
@cuda.jit
def relu_backwards(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[x.size - 1 - i] = max(x[i], ZERO)


@wrong("relu", OUTSIDE)
@cuda.jit
def relu_wrapped(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i - 1] = max(x[i - 1], ZERO)


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


@wrong("relu_grid_stride", r"never written: the launch has 2 threads for 3 elements")
@cuda.jit
def stride_no_loop(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", "never written")
@cuda.jit
def stride_from_own_block(x, y):
    for i in range(cuda.threadIdx.x, x.size, cuda.gridsize(1)):
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", "never written")
@cuda.jit
def stride_too_long(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1) + 1):
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", "never written")
@cuda.jit
def stride_of_64(x, y):
    for i in range(cuda.grid(1), x.size, 64):
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", "never written")
@cuda.jit
def stride_whole_rounds(x, y):
    rounds = x.size // cuda.gridsize(1)
    for k in range(rounds):
        i = cuda.grid(1) + k * cuda.gridsize(1)
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", OUTSIDE)
@cuda.jit
def stride_rounds_without_guard(x, y):
    for k in range(math.ceil(x.size / cuda.gridsize(1))):
        i = cuda.grid(1) + k * cuda.gridsize(1)
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", r"deadlock in line \d+, `while i < x\.size:`\n.*for ever")
@cuda.jit
def stride_stands_still(x, y):
    i = cuda.grid(1)
    while i < x.size:
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", "never written")
@cuda.jit
def stride_last_missing(x, y):
    for i in range(cuda.grid(1), x.size - 1, cuda.gridsize(1)):
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", OUTSIDE)
@cuda.jit
def stride_one_too_many(x, y):
    for i in range(cuda.grid(1), x.size + 1, cuda.gridsize(1)):
        y[i] = max(x[i], ZERO)


@wrong("relu_grid_stride", "never written")
@cuda.jit
def stride_chapters_rounded_down(x, y):
    share = x.size // cuda.gridsize(1)
    first = cuda.grid(1) * share
    for i in range(first, min(first + share, x.size)):
        y[i] = max(x[i], ZERO)


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


@wrong("nchw_index", OUTSIDE)
@cuda.jit
def nchw_no_guard(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
    y[n, c, h, w] = x[n, c, h, w] + bias[c]


@wrong("nchw_index", "wrong values in y")
@cuda.jit
def nchw_bias_of_picture(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        y[n, c, h, w] = x[n, c, h, w] + bias[n % C]


@wrong("nchw_index", OUTSIDE)
@cuda.jit
def nchw_channel_not_wrapped(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W), i // W % H, i % W
        y[n, c, h, w] = x[n, c, h, w] + bias[c]


@wrong("nchw_index", OUTSIDE + "|never written")
@cuda.jit
def nchw_height_for_width(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // H % W, i % H
        y[n, c, h, w] = x[n, c, h, w] + bias[c]


@wrong("nchw_index", "never written|" + OUTSIDE)
@cuda.jit
def nchw_picture_without_channels(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (H * W) % N, i // (H * W) % C, i // W % H, i % W
        y[n, c, h, w] = x[n, c, h, w] + bias[c]


@wrong("nchw_index", "never written")
@cuda.jit
def nchw_one_picture(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < C * H * W:
        c, h, w = i // (H * W), i // W % H, i % W
        y[0, c, h, w] = x[0, c, h, w] + bias[c]


@wrong("nchw_index", "every wrong element is that of x, unchanged")
@cuda.jit
def nchw_no_bias(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        y[n, c, h, w] = x[n, c, h, w]


@wrong("nchw_index", "wrong values in y")
@cuda.jit
def nchw_first_bias(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        y[n, c, h, w] = x[n, c, h, w] + bias[0]


@wrong("nchw_index", "wrong values in y")
@cuda.jit
def nchw_bias_as_if_channels_last(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        y[n, c, h, w] = x[n, c, h, w] + bias[i % C]


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


@wrong("sigmoid", r"float64-promotion in line \d+, `y\[i\] = 1\.0 / ")
@cuda.jit
def sigmoid_in_float64(x, y):
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(-abs(x[i]))
        y[i] = 1.0 / (1.0 + e) if x[i] >= 0 else e / (1.0 + e)


@wrong("sigmoid", "NaN was computed from finite inputs")
@cuda.jit
def sigmoid_overflows(x, y):
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(x[i])
        y[i] = e / (ONE + e)


@wrong("sigmoid", "wrong values in y")
@cuda.jit
def sigmoid_mirrored(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = ONE / (ONE + math.exp(x[i]))


@wrong("sigmoid", "wrong exactly where x is negative")
@cuda.jit
def sigmoid_of_size_only(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = ONE / (ONE + math.exp(-abs(x[i])))


@wrong("sigmoid", "wrong values in y")
@cuda.jit
def sigmoid_clipped(x, y):
    i = cuda.grid(1)
    if i < x.size:
        clipped = min(max(x[i], np.float32(-5)), np.float32(5))
        y[i] = ONE / (ONE + math.exp(-clipped))


@wrong("sigmoid", "wrong values in y")
@cuda.jit
def sigmoid_hard(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = min(max(x[i] / np.float32(6) + HALF, ZERO), ONE)


@wrong("sigmoid", "wrong values in y")
@cuda.jit
def sigmoid_tanh(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = math.tanh(x[i])


@wrong("sigmoid", OUTSIDE)
@cuda.jit
def sigmoid_no_guard(x, y):
    i = cuda.grid(1)
    y[i] = ONE / (ONE + math.exp(-x[i]))


@wrong("sigmoid", "wrong exactly where x is 0")
@cuda.jit
def sigmoid_wrong_at_zero(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = ONE / (ONE + math.exp(-x[i])) if x[i] != 0 else ZERO


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


@wrong("swish_backward", "wrong values in dx")
@cuda.jit
def swish_forgets_second_term(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        dx[i] = dy[i] * safe_sigmoid(x[i])


@wrong("swish_backward", "wrong values in dx")
@cuda.jit
def swish_wrong_sign(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = safe_sigmoid(x[i])
        dx[i] = dy[i] * (s - x[i] * s * (ONE - s))


@wrong("swish_backward", "right size and the wrong sign")
@cuda.jit
def swish_downhill(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = safe_sigmoid(x[i])
        dx[i] = -dy[i] * (s + x[i] * s * (ONE - s))


@wrong("swish_backward", "wrong values in dx")
@cuda.jit
def swish_without_dy(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = safe_sigmoid(x[i])
        dx[i] = s + x[i] * s * (ONE - s)


@wrong("swish_backward", "NaN was computed from finite inputs")
@cuda.jit
def swish_overflows(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(x[i])
        s = e / (ONE + e)
        dx[i] = dy[i] * (s + x[i] * s * (ONE - s))


@wrong("swish_backward", "wrong exactly where x is 0")
@cuda.jit
def swish_zero_at_zero(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = safe_sigmoid(x[i])
        dx[i] = dy[i] * (s + x[i] * s * (ONE - s)) if x[i] != 0 else ZERO


@wrong("swish_backward", "changes its input dy")
@cuda.jit
def swish_into_dy(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = safe_sigmoid(x[i])
        dy[i] *= s + x[i] * s * (ONE - s)
        dx[i] = dy[i]


@wrong("swish_backward", "depends on what dx held before")
@cuda.jit
def swish_accumulates(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = safe_sigmoid(x[i])
        dx[i] += dy[i] * (s + x[i] * s * (ONE - s))


@wrong("swish_backward", "wrong exactly where x is negative")
@cuda.jit
def swish_sigmoid_of_size(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        s = ONE / (ONE + math.exp(-abs(x[i])))
        dx[i] = dy[i] * (s + x[i] * s * (ONE - s))


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


@wrong("column_sum", OUTSIDE + "|never written")
@cuda.jit
def columns_as_rows(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        total = ZERO
        for col in range(x.shape[1]):
            total += x[row, col]
        y[row] = total


@wrong("column_sum", OUTSIDE)
@cuda.jit
def columns_indices_swapped(x, y):
    n_rows, n_cols = x.shape
    col = cuda.grid(1)
    if col < n_cols:
        total = ZERO
        for row in range(n_rows):
            total += x[col, row]
        y[col] = total


@wrong("column_sum", OUTSIDE)
@cuda.jit
def columns_no_guard(x, y):
    col = cuda.grid(1)
    total = ZERO
    for row in range(x.shape[0]):
        total += x[row, col]
    y[col] = total


@wrong("column_sum", "no part")
@cuda.jit
def columns_last_row_missing(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        total = ZERO
        for row in range(x.shape[0] - 1):
            total += x[row, col]
        y[col] = total


@wrong("column_sum", "no part")
@cuda.jit
def columns_first_row_missing(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        total = ZERO
        for row in range(1, x.shape[0]):
            total += x[row, col]
        y[col] = total


@wrong("column_sum", "depends on what y held before")
@cuda.jit
def columns_never_cleared(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        for row in range(x.shape[0]):
            y[col] += x[row, col]


@wrong("column_sum", "times what it should be")
@cuda.jit
def columns_mean(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        total = ZERO
        for row in range(x.shape[0]):
            total += x[row, col]
        y[col] = total / x.shape[0] if x.shape[0] else ZERO


@wrong("column_sum", "never written")
@cuda.jit
def columns_empty_not_zero(x, y):
    col = cuda.grid(1)
    if col < x.shape[1] and x.shape[0] > 0:
        total = ZERO
        for row in range(x.shape[0]):
            total += x[row, col]
        y[col] = total


@wrong("column_sum", "wrong values in y")
@cuda.jit
def columns_running_total(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        total = ZERO
        for row in range(x.shape[0]):
            total = x[row, col]
        y[col] = total
