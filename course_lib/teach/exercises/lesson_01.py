"""Lesson 01: threads and memory.

| exercise | the kernel gets | what is new |
|---|---|---|
| relu | x, y of n elements | the guard |
| relu_grid_stride | the same, any launch | a thread handles several elements |
| nchw_index | x, y of (N, C, H, W), bias of C | from a flat number to four indices |
| column_sum | x of (n_rows, n_cols), y of n_cols | which index neighbours share |
| sigmoid | x, y of n elements | exp that overflows; float32 throughout |
| swish_backward | dy, x, dx of n elements | a derivative |

All arrays are float32. Outputs come last and have the shape of `x`, except for `column_sum`.
"""

import math

import numpy as np

from course_lib import cuda, reference
from course_lib.teach.checking.cases import GUARDED, drawn, extremes, numbers, spread, with_zeros
from course_lib.teach.checking.work import Shares
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case


@cuda.jit
def relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], np.float32(0))


def added_exactly(rng, shape):
    """Return multiples of 1/4096 of which float32 adds up two thousand without rounding."""
    return (rng.integers(-6000, 8000, shape) / 4096).astype(np.float32)


def guarded(rng):
    """Return launches of a guarded kernel as (n, grid, block), the last one large and drawn."""
    return [*GUARDED, (drawn(rng, 1030, 1500), 3, 512)]


def _of_any_size(rng, n):
    """Return numbers of every size that float32 has, the largest and subnormal ones as well."""
    x = extremes(rng, spread(rng, n))
    if n > 30:
        most = np.finfo(np.float32).max
        x[rng.choice(n, 4, replace=False)] = 1e-40, -1e-40, most, -most
    return x


def _relu_cases(rng):
    return [case(grid, block, x=_of_any_size(rng, n)) for n, grid, block in guarded(rng)]


RELU = Exercise(
    name="relu",
    title="ReLU with a guard",
    solution=relu,
    reference=reference.relu,
    cases=_relu_cases,
    once=True,
    tolerance=EXACT,
    hints=(
        "Blocks come whole: 100 elements in blocks of 32 need four blocks, which are 128 threads. "
        "What do the last 28 do?",
        "Take the thread's number `i` from `cuda.grid(1)`. Only a thread whose `i` is less than "
        "`x.size` may touch the arrays; the others do nothing.",
        "```python\ni = cuda.grid(1)\nif i < ...:\n    y[i] = max(x[i], np.float32(0))\n```",
    ),
)


@cuda.jit
def relu_grid_stride(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = max(x[i], np.float32(0))


def _grid_stride_cases(rng):
    # Fewer threads than elements: a whole round more, a part of one, several.
    few = [(3, 2, 1), (33, 1, 32), (64, 1, 32), (100, 3, 7), (200, 2, 32), (257, 1, 64)]
    launches = *GUARDED[:7], *few, (drawn(rng, 4100, 4500), 1, 288)
    return [case(grid, block, x=_of_any_size(rng, n)) for n, grid, block in launches]


RELU_GRID_STRIDE = Exercise(
    name="relu_grid_stride",
    title="Any number of threads",
    solution=relu_grid_stride,
    reference=reference.relu,
    cases=_grid_stride_cases,
    tolerance=EXACT,
    once=True,
    about=(Shares(evenly=True),),
    hints=(
        "With 64 threads and 200 elements, a thread has to handle more than one. Thread 0 could "
        "take elements 0, 64, 128 and 192. Which ones does thread 5 take?",
        "A thread starts at its own number and steps by the number of threads in the whole grid, "
        "until it is past the end. `cuda.gridsize(1)` is that number of threads. The loop also "
        "does the work of the guard.",
        "```python\nfor i in range(cuda.grid(1), x.size, ...):\n    y[i] = ...\n```",
    ),
)


@cuda.jit
def nchw_index(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < N * C * H * W:
        w = i % W
        h = i // W % H
        c = i // (W * H) % C
        n = i // (W * H * C)
        y[n, c, h, w] = x[n, c, h, w] + bias[c]


def _nchw_cases(rng):
    # All four lengths differ in most cases, so that no two indices can be swapped unseen.
    launches = [
        ((1, 1, 1, 1), 1, 32),
        ((0, 3, 2, 2), 1, 32),
        ((1, 5, 1, 1), 1, 8),
        ((3, 1, 1, 2), 1, 32),
        ((1, 2, 1, 3), 2, 4),
        ((2, 3, 4, 5), 4, 32),
        ((5, 4, 3, 2), 2, 64),
        ((1, 3, 7, 6), 4, 48),
        ((4, 2, 2, 4), 2, 32),
        ((3, 5, 2, 7), 7, 32),
        # Each of the four lengths by itself is large once.
        ((drawn(rng, 260, 280), 2, 1, 1), 2, 288),
        ((1, drawn(rng, 260, 280), 1, 2), 2, 288),
        ((2, 1, drawn(rng, 260, 280), 1), 2, 288),
        ((1, 1, 1, drawn(rng, 1030, 1060)), 3, 384),
        ((2, drawn(rng, 9, 11), drawn(rng, 8, 9), 10), 4, 512),
    ]
    return [
        case(grid, block, x=numbers(rng, shape), bias=_biases(rng, shape[1]))
        for shape, grid, block in launches
    ]


def _biases(rng, n):
    """Return numbers of both signs, far larger than those of x, and in most cases a zero."""
    bias = rng.choice([-1, 1], n).astype(np.float32) * numbers(rng, n, 10.0, 100.0)
    bias[4:5] = 0
    return bias


NCHW_INDEX = Exercise(
    name="nchw_index",
    title="A bias for each channel of an image",
    solution=nchw_index,
    reference=lambda x, bias: x + bias[:, None, None],
    cases=_nchw_cases,
    once=True,
    tolerance=Tolerance(1e-6, 1e-6, "one addition, rounded once to float32"),
    hints=(
        "The last index changes fastest: neighbours in memory differ in `w`. After `W` of them, "
        "`h` goes up by one. It is how an odometer counts.",
        "Take the digits off from the right: `w` is what remains when `i` is divided by `W`. "
        "What is left, `i // W`, counts rows: its remainder by `H` is `h`. Then `c`, then `n`.",
        "```python\nw = i % W\nh = i // W % H\nc = i // (W * H) % ...\nn = i // ...\n```",
    ),
)


@cuda.jit
def column_sum(x, y):
    n_rows, n_cols = x.shape
    col = cuda.grid(1)
    if col < n_cols:
        total = np.float32(0)
        for row in range(n_rows):
            total += x[row, col]
        y[col] = total


def _column_cases(rng):
    launches = [
        ((1, 1), 1, 32),
        ((0, 3), 1, 32),
        ((drawn(rng, 5, 9), drawn(rng, 1030, 1500)), 3, 512),
        ((drawn(rng, 1030, 1100), 3), 1, 8),
        ((3, 0), 1, 32),
        ((drawn(rng, 70, 90), 3), 1, 8),
        ((1, 5), 1, 8),
        ((5, 1), 1, 8),
        ((3, 2), 1, 4),
        ((2, 33), 2, 32),
        ((33, 2), 2, 32),
        ((7, 40), 4, 16),
        ((8, 8), 1, 8),
    ]
    kinds = ((1.0, 0.0), (1.0, 1000.0), (1e-6, 0.0))
    return [
        case(grid, block, x=numbers(rng, shape, *kinds[k % 3]))
        for k, (shape, grid, block) in enumerate(launches)
    ]


COLUMN_SUM = Exercise(
    name="column_sum",
    title="One thread per column",
    solution=column_sum,
    reference=lambda x: x.sum(axis=0),
    cases=_column_cases,
    once=True,
    tolerance=Tolerance(3e-6, 5e-6, "each of up to 1,100 additions rounds to float32", scaled=True),
    hints=(
        "One thread owns one column and adds up what is in it. How many threads are needed: "
        "`n_rows` or `n_cols`?",
        "The thread's number is `col`. Loop over the rows, adding `x[row, col]` to a total that "
        "starts at `np.float32(0)`. Write `y[col]` once, after the loop.",
        "```python\nfor row in range(n_rows):\n    total += x[row, col]\ny[...] = total\n```",
    ),
)


@cuda.jit
def sigmoid(x, y):
    i = cuda.grid(1)
    if i < x.size:
        # exp of a number that is not positive: it may vanish, and never overflows.
        e = math.exp(-abs(x[i]))
        one = np.float32(1)
        y[i] = one / (one + e) if x[i] >= 0 else e / (one + e)


def _sigmoid_cases(rng):
    ends = [-np.inf, np.inf, 1, 2, 3, 4]
    small = [[-1e4, 1e4], [-89.0, 89.0, 0.0, -0.0], ends]
    return [case(1, 8, x=np.array(x, np.float32)) for x in small] + [
        case(grid, block, x=_scaled(rng, n, k)) for k, (n, grid, block) in enumerate(guarded(rng))
    ]


def _scaled(rng, n, k):
    """Return n numbers of the k-th scale, in the last case with infinities."""
    x = with_zeros(rng, numbers(rng, n, (30.0, 1.0, 1e3, 1e-6)[k % 4]))
    return extremes(rng, x) if n > 500 else x


SIGMOID = Exercise(
    name="sigmoid",
    title="Sigmoid that doesn't overflow",
    solution=sigmoid,
    reference=reference.sigmoid,
    cases=_sigmoid_cases,
    once=True,
    tolerance=Tolerance(2e-6, 1.2e-7, "a few float32 roundings of numbers near 1"),
    forbids=("float64-promotion",),
    hints=(
        "In float32, `exp` overflows to infinity from about 89 on. Which step of your formula "
        "meets a number as large as that, and what is infinity divided by infinity?",
        "Only take `exp` of numbers that are not positive. With `e = exp(-|x|)` the result is "
        "`1 / (1 + e)` for positive `x`; for negative `x`, multiply above and below by `e`.",
        "```python\ne = math.exp(-abs(x[i]))\nif x[i] >= 0:\n    y[i] = one / (one + e)\n"
        "else:\n    y[i] = ...\n```",
    ),
)


@cuda.jit
def swish_backward(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(-abs(x[i]))
        one = np.float32(1)
        s = one / (one + e) if x[i] >= 0 else e / (one + e)
        dx[i] = dy[i] * (s + x[i] * s * (one - s))


def _swish_cases(rng):
    return [
        case(grid, block, dy=_gradients(rng, n), x=_finite(_scaled(rng, n, k)))
        for k, (n, grid, block) in enumerate(guarded(rng))
    ]


def _gradients(rng, n):
    """Return gradients, in the last case with zeros."""
    dy = numbers(rng, n, 2.0, 0.5)
    return with_zeros(rng, dy) if n > 500 else dy


def _finite(x):
    """Return `x` without infinities, where swish has no derivative, and without numbers so large
    that 1 is lost beside them, as it is in y + s · (1 − y).
    """
    return np.clip(x, np.float32(-3.3e38), np.float32(1e6))


SWISH_BACKWARD = Exercise(
    name="swish_backward",
    title="The gradient of swish",
    solution=swish_backward,
    reference=reference.swish_backward,
    cases=_swish_cases,
    once=True,
    tolerance=Tolerance(1e-5, 1e-5, "1 - s loses digits in float32 when s is near 1"),
    outputs=("dx",),
    primal=reference.swish,
    hints=(
        "Swish is `x * s` with `s = sigmoid(x)`, a product, and `x` is in both factors. The "
        "gradient that comes in, `dy`, multiplies everything.",
        "By the product rule the derivative is `s + x * ds`, and the derivative of the sigmoid "
        "is `ds = s * (1 - s)`. Compute `s` as in the exercise before, without overflow.",
        "```python\ns = ...  # the sigmoid of x[i]\ndx[i] = dy[i] * (s + x[i] * s * (...))\n```",
    ),
)
