"""Lesson 13: transposed convolution, handed out, collected, and as a gradient; and the U-Net.

| exercise | it gets | what is new |
|---|---|---|
| conv_transpose2d_scatter | x, weight, y of 0, stride, padding; enough threads for x | patches |
| conv_transpose2d_gather | x, weight, y, stride, padding; enough threads for y | which taps fit |
| transposed_size | five numbers | output_padding |
| transposed_by_dx | x, weight, stride, padding, output_padding | by lesson 9's dx |
| transposed_backward | dy, x, weight, stride, padding | gradients, by lessons 8 and 9 |
| upsample_into | x, weight of (C, K, 2, 2), joined, first; enough threads | no copy |

Arrays are float32: x and dx of (N, C, H, W), weight and dweight of (C, K, R, S), y and dy of
(N, K, P, Q). What `output_padding` was, a kernel sees by the size of y.
"""

import numpy as np

from course_lib import cuda, reference
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import number_of, with_plain_numbers
from course_lib.teach.checking.work import Launches
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case
from course_lib.teach.exercises.lesson_08 import conv2d_direct
from course_lib.teach.exercises.lesson_09 import conv2d_dweight, conv2d_dx

ZERO = np.float32(0)
BLOCK = 64


def blocks(n_threads):
    """How many blocks of 64 threads there must be for so many threads; at least one."""
    return max(1, -(-n_threads // BLOCK))


# ---- conv_transpose2d_scatter ----------------------------------------------------------------


@cuda.jit
def conv_transpose2d_scatter(x, weight, y, stride, padding):
    C, H, W = x.shape[1:]
    K, R, S = weight.shape[1:]
    P, Q = y.shape[2:]
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        for r in range(R):
            for s in range(S):
                p, q = h * stride - padding + r, w * stride - padding + s
                if p >= 0 and p < P and q >= 0 and q < Q:
                    for k in range(K):
                        cuda.atomic.add(y, (n, k, p, q), x[n, c, h, w] * weight[c, k, r, s])


#: ((N, C, H, W), (K, R, S), stride, padding, output_padding): each size of its own, small first.
#: Patches overlap, touch, and leave gaps.
_PROBLEMS = (
    ((1, 1, 1, 1), (1, 1, 1), 1, 0, 0),
    ((0, 1, 2, 1), (2, 2, 1), 1, 0, 0),
    ((1, 1, 2, 1), (1, 1, 2), 2, 0, 0),
    ((1, 1, 1, 3), (2, 3, 2), 2, 0, 1),
    ((1, 2, 3, 2), (1, 3, 3), 2, 1, 0),
    ((2, 1, 2, 3), (3, 2, 2), 3, 0, 2),
    ((1, 3, 2, 4), (2, 2, 3), 1, 1, 0),
    ((2, 2, 4, 3), (3, 3, 4), 2, 2, 1),
    ((1, 1, 3, 2), (2, 5, 3), 4, 1, 3),
    ((1, 1, 4, 5), (1, 3, 4), 3, 1, 1),
)

#: Two more, (N, C, H, W) and (K, R, S): one whose stride (1 to 4) and paddings are drawn, and one
#: whose patches are large and far apart.
_DRAWN = ((1, 2, 3, 4), (2, 4, 3))
_FAR = ((1, 1, 2, 2), (1, 6, 7))


def _problems(rng):
    """Yield the problems, the two more, and one of a drawn size."""
    yield from _PROBLEMS
    yield *_FAR, 6, 3, 4
    stride = drawn(rng, 1, 4)
    yield *_DRAWN, stride, drawn(rng, 0, 1), drawn(rng, 0, stride - 1)
    yield (1, 2, drawn(rng, 8, 9), drawn(rng, 9, 10)), (2, 3, 2), 2, drawn(rng, 0, 1), 1


def _inputs(rng, shape, filters, stride, padding, output_padding):
    """Return x, weight and the options, as a dictionary."""
    K, R, S = filters
    return {
        "x": numbers(rng, shape, 1.5, 1.0),
        "weight": numbers(rng, (shape[1], K, R, S), 0.8, 0.3),
        "stride": np.int64(stride),
        "padding": np.int64(padding),
        "output_padding": np.int64(output_padding),
    }


def _y_shape(shape, filters, *options):
    sizes = (
        transposed_size(n, taps, *options)
        for n, taps in zip(shape[2:], filters[1:], strict=True)
    )
    return shape[0], filters[0], *sizes


def _transposed(x, weight, stride, padding, output_padding):
    options = {"stride": int(stride), "padding": int(padding)}
    return reference.conv_transpose2d(x, weight, output_padding=int(output_padding), **options)


def _scatter_cases(rng):
    found = []
    for number, problem in enumerate(_problems(rng)):
        n_threads = int(np.prod(problem[0]))
        block = 256 if n_threads > 100 else (32, 1, 8, 64)[number % 4]
        grid = max(1, -(-n_threads // block))
        found.append(case(grid, block, **_inputs(rng, *problem)))
    # More numbers of x than of anything else, and one tap for each.
    many = (1, 1, drawn(rng, 23, 24), drawn(rng, 23, 25)), (1, 1, 1), 1, 0, 0
    return [*found, case(2, 320, **_inputs(rng, *many))]


def _launched(kernel, run):
    run.launch(kernel, run.x, run.weight, run.y, run.stride, run.padding)


SUMS = Tolerance(0.0, 2e-5, "float32 rounds sums of up to some dozens of products", scaled=True)

CONV_TRANSPOSE2D_SCATTER = Exercise(
    name="conv_transpose2d_scatter",
    title="Transposed convolution, painted",
    solution=conv_transpose2d_scatter,
    reference=_transposed,
    cases=_scatter_cases,
    tolerance=SUMS,
    dtype=np.float32,
    start=0,
    call=_launched,
    forbids=("float64-promotion",),
    hints=(
        "The thread has one number of x. Where does its patch begin in y, if the patches lie "
        "`stride` apart and the first one begins at `-padding`? And who else may add to the same "
        "place at the same time?",
        "Tap (r, s) of the patch goes to row `h * stride - padding + r` and column "
        "`w * stride - padding + s` of y. If that is outside of y, it is cut off. It goes into "
        "all K channels, with a weight of its own for each: `weight[c, k, r, s]`. Other threads "
        "add there as well, so each addition is an atomic one.",
        "```python\np, q = h * stride - padding + r, ...\nif p >= 0 and p < P and ...:\n"
        "    for k in range(K):\n"
        "        cuda.atomic.add(y, (n, k, p, q), x[n, c, h, w] * ...)\n```",
    ),
)


# ---- conv_transpose2d_gather -----------------------------------------------------------------


@cuda.jit
def conv_transpose2d_gather(x, weight, y, stride, padding):
    C, H, W = x.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = y.shape[1:]
    i = cuda.grid(1)
    if i < y.size:
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        total = ZERO
        for r in range((p + padding) % stride, R, stride):
            for s in range((q + padding) % stride, S, stride):
                h, w = (p + padding - r) // stride, (q + padding - s) // stride
                if h >= 0 and h < H and w >= 0 and w < W:
                    for c in range(C):
                        total += x[n, c, h, w] * weight[c, k, r, s]
        y[n, k, p, q] = total


def _gather_cases(rng):
    found = []
    # Few numbers that make many.
    many = (1, 1, 3, 4), (1, 2, 1), 15, 0, 0
    for number, problem in enumerate((*_problems(rng), many)):
        n_threads = int(np.prod(_y_shape(*problem)))
        block = 512 if n_threads > 500 else (32, 1, 8, 64)[number % 4]
        grid = max(1, -(-n_threads // block))
        found.append(case(grid, block, **_inputs(rng, *problem)))
    return found


CONV_TRANSPOSE2D_GATHER = Exercise(
    name="conv_transpose2d_gather",
    title="Transposed convolution, collected",
    solution=conv_transpose2d_gather,
    reference=_transposed,
    cases=_gather_cases,
    tolerance=SUMS,
    dtype=np.float32,
    call=_launched,
    once=True,
    forbids=("float64-promotion",),
    repeatable=True,
    hints=(
        "The thread owns y[n, k, p, q]. Pixel h has painted row p with tap r if "
        "p = h · stride − padding + r. For which r is there such an h?",
        "`p + padding - r` must be a multiple of the stride. The first such r is "
        "`(p + padding) % stride`, and the others follow at a distance of `stride`: that is a "
        "range with a step. Then `h = (p + padding - r) // stride`, which may still lie outside "
        "of x; the same for columns. Sum over the channels c of x.",
        "```python\nfor r in range((p + padding) % stride, R, stride):\n"
        "    for s in range(...):\n        h, w = (p + padding - r) // stride, ...\n"
        "        if h >= 0 and h < H and ...:\n            for c in range(C):\n"
        "                total += x[n, c, h, w] * weight[...]\n```",
    ),
)


# ---- transposed_size -------------------------------------------------------------------------


def transposed_size(size, taps, stride, padding, output_padding):
    return (size - 1) * stride + taps - 2 * padding + output_padding


def _size_reference(size, taps, stride, padding, output_padding):
    # By painting: the places that patches touch, with the padding cut off and the rest added.
    first = np.arange(size) * stride
    touched = np.unique(first[:, None] + np.arange(taps))
    return int(touched.max() + 1) - 2 * padding + output_padding


def _size_cases(rng):
    problems = [
        (1, 1, 1, 0, 0),
        (1, 3, 2, 1, 0),
        (4, 2, 2, 0, 0),
        (4, 3, 2, 1, 0),
        (4, 3, 2, 1, 1),
        (5, 3, 1, 1, 0),
        (7, 4, 2, 1, 0),
        (3, 5, 3, 2, 2),
        (6, 2, 4, 0, 3),
        (16, 2, 2, 0, 1),
        (130, 7, 5, 3, 4),
    ]
    stride = drawn(rng, 2, 8)
    problems.append((3, 5, 10 + stride, 1, 9))
    sizes = drawn(rng, 2, 299), drawn(rng, 5, 8), stride
    problems.append((*sizes, drawn(rng, 0, 2), drawn(rng, 0, stride - 1)))
    problems.append((drawn(rng, 66_000, 70_000), drawn(rng, 9, 20), 9, drawn(rng, 3, 4), 8))
    problems.append((2, drawn(rng, 66_000, 70_000), 7, drawn(rng, 1030, 1060), 5))
    names = "size", "taps", "stride", "padding", "output_padding"
    return [case(1, 1, **dict(zip(names, map(np.int64, each), strict=True))) for each in problems]


TRANSPOSED_SIZE = Exercise(
    name="transposed_size",
    title="How large does it get?",
    solution=transposed_size,
    kind="function",
    reference=_size_reference,
    cases=_size_cases,
    tolerance=EXACT,
    outputs=("P",),
    dtype=np.int64,
    call=number_of,
    hints=(
        "Take paper: 3 pixels, patches of 3 taps, stride 2. Draw the patches below each other. "
        "Where does the last one begin, and where does it end?",
        "The last patch begins at `(size - 1) * stride` and has `taps` places. The padding is cut "
        "off on both sides; `output_padding` is added on one.",
        "```python\nreturn (size - 1) * stride + ... - 2 * padding + ...\n```",
    ),
)


# ---- transposed_by_dx ------------------------------------------------------------------------


def transposed_by_dx(x, weight, stride, padding, output_padding):
    (N, _, H, W), (_, K, R, S) = x.shape, weight.shape
    P = transposed_size(H, R, stride, padding, output_padding)
    Q = transposed_size(W, S, stride, padding, output_padding)
    y = np.empty((N, K, P, Q), dtype=np.float32)
    conv2d_dx[blocks(y.size), BLOCK](x, weight, y, stride, padding)
    return y


#: As `_PROBLEMS`, without an empty batch: a launch of no thread is an error on a GPU. The y of the
#: last one has 64 elements, just as many as a block has threads.
_LAUNCHES = (
    *(each for each in _PROBLEMS[:-1] if each[0][0]),
    ((1, 1, 4, 2), (2, 2, 2), 2, 0, 0),
)


def _by_dx_cases(rng):
    *_, far, options, large = _problems(rng)
    drawn_ones = far, options, large
    return [case(1, 1, **_inputs(rng, *problem)) for problem in (*_LAUNCHES, *drawn_ones)]


TRANSPOSED_BY_DX = Exercise(
    name="transposed_by_dx",
    title="Transposed convolution, by an old kernel",
    solution=transposed_by_dx,
    kind="launcher",
    reference=_transposed,
    cases=_by_dx_cases,
    tolerance=SUMS,
    dtype=np.float32,
    call=lambda function, run: with_plain_numbers(
        function, run, "x", "weight", "stride", "padding", "output_padding"
    ),
    about=(Launches(),),
    repeatable=True,
    hints=(
        "`conv2d_dx(dy, weight, dx, stride, padding)` gets what came out of a convolution, and "
        "fills an array as large as what went in. Which of our two arrays is the small one?",
        "The convolution that we run backwards went from y's size to x's. So our x stands in the "
        "place of its dy, and our y in the place of its dx. Its filters made C channels of K, so "
        "its weight is (C, K, R, S): that is ours as it is.",
        "```python\nP = transposed_size(H, R, ...)\ny = np.empty((N, K, P, Q), ...)\n"
        "conv2d_dx[blocks(y.size), BLOCK](x, ..., y, stride, padding)\n```",
    ),
)


# ---- transposed_backward ---------------------------------------------------------------------


def transposed_backward(dy, x, weight, stride, padding):
    dx, dweight = np.empty(x.shape, np.float32), np.empty(weight.shape, np.float32)
    no_bias = np.zeros(x.shape[1], np.float32)
    conv2d_direct[blocks(dx.size), BLOCK](dy, weight, no_bias, dx, stride, padding)
    conv2d_dweight[blocks(32 * dweight.size), BLOCK](x, dy, dweight, stride, padding)
    return dx, dweight


#: Each weight takes a warp, and the simulator time: few weights. Of the last four, one has a dx as
#: large as a block and one more weights than there are lanes. Then a dx that is larger than a block
#: and than dy, and more weights than numbers of dx and of dy: a grid belongs to what it fills.
_BACKWARD = (
    ((1, 1, 1, 1), (1, 1, 1), 1, 0, 0),
    ((1, 1, 2, 1), (1, 1, 2), 2, 0, 0),
    ((1, 1, 1, 3), (2, 3, 1), 2, 0, 1),
    ((1, 2, 2, 1), (1, 2, 3), 2, 1, 0),
    ((2, 1, 2, 3), (3, 1, 2), 3, 0, 2),
    ((1, 3, 2, 4), (2, 2, 1), 1, 0, 0),
    ((2, 2, 3, 2), (1, 2, 2), 2, 0, 1),
    ((1, 1, 3, 2), (1, 4, 2), 4, 2, 3),
    ((2, 2, 4, 4), (1, 1, 2), 3, 0, 0),
    ((1, 1, 2, 3), (11, 3, 1), 2, 1, 1),
    ((1, 3, 5, 5), (1, 1, 1), 1, 0, 0),
    ((1, 3, 1, 1), (1, 3, 3), 1, 1, 0),
)


def _backward_cases(rng):
    found = []
    stride = drawn(rng, 1, 4)
    options = (1, 1, 3, 2), (1, 2, 3), stride, drawn(rng, 0, 1), drawn(rng, 0, stride - 1)
    far = (1, 1, 2, 2), (1, 6, 1), 6, 2, 3
    large = (2, 1, drawn(rng, 7, 8), drawn(rng, 8, 9)), (1, 2, 2), 2, 0, 1
    for problem in (*_BACKWARD, far, options, large):
        inputs = _inputs(rng, *problem)
        dy = numbers(rng, _y_shape(*problem), 1.5, 1.0)
        found.append(case(1, 1, dy=dy, **inputs))
    return found


def _gradients(dy, x, weight, stride, padding, output_padding):
    options = {"stride": int(stride), "padding": int(padding)}
    options["output_padding"] = int(output_padding)
    return reference.conv_transpose2d_backward(dy, x, weight, **options)[:2]


TRANSPOSED_BACKWARD = Exercise(
    name="transposed_backward",
    title="The gradients of a transposed convolution",
    solution=transposed_backward,
    kind="launcher",
    reference=_gradients,
    cases=_backward_cases,
    tolerance=SUMS,
    outputs=("dx", "dweight"),
    dtype=np.float32,
    call=lambda function, run: with_plain_numbers(
        function, run, "dy", "x", "weight", "stride", "padding"
    ),
    primal=_transposed,
    about=(Launches(),),
    repeatable=True,
    hints=(
        "Forward was a multiplication by a transposed matrix. What does one multiply by on the "
        "way back, and which kernel of lesson 8 does that?",
        "dx is the convolution of dy with the same weight, stride and padding, and with a bias of "
        "0: `conv2d_direct(x, weight, bias, y, stride, padding)`, dy in the place of its x. For "
        "dweight take `conv2d_dweight(dy, x, dweight, stride, padding)`: what that convolution "
        "got is our dy, and the gradient of what it made stands in our x.",
        "```python\nconv2d_direct[blocks(dx.size), BLOCK](dy, weight, no_bias, dx, ...)\n"
        "conv2d_dweight[blocks(32 * dweight.size), BLOCK](x, ..., dweight, stride, padding)\n```",
    ),
)


# ---- upsample_into ---------------------------------------------------------------------------


@cuda.jit
def upsample_into(x, weight, joined, first):
    C, H, W = x.shape[1:]
    N, _, P, Q = joined.shape
    K = weight.shape[1]
    i = cuda.grid(1)
    if i < N * K * P * Q:
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        total = ZERO
        if p < 2 * H and q < 2 * W:
            for c in range(C):
                total += x[n, c, p // 2, q // 2] * weight[c, k, p % 2, q % 2]
        joined[n, first + k, p, q] = total


#: ((N, C, H, W), K, channels of joined, the first of them, rows and columns more than 2·H, 2·W).
_JOINED = (
    ((1, 1, 1, 1), 1, 1, 0, 0, 0),
    ((0, 1, 1, 2), 1, 2, 1, 0, 0),
    ((1, 1, 1, 2), 1, 2, 1, 0, 0),
    ((1, 2, 2, 1), 1, 3, 1, 1, 0),
    ((2, 1, 1, 1), 2, 4, 2, 0, 1),
    ((1, 3, 2, 3), 2, 3, 0, 0, 0),
    ((2, 2, 3, 2), 3, 6, 3, 1, 1),
    ((1, 4, 2, 5), 2, 5, 2, 0, 1),
    ((2, 3, 5, 4), 2, 4, 2, 1, 0),
    ((1, 2, 4, 5), 2, 4, 2, 1, 1),
    ((1, 1, 3, 4), 24, 27, 2, 0, 0),
)
HELD = np.float32(7)  # by the concatenation before the launch


def _joined_cases(rng):
    found = []
    K, after = drawn(rng, 1, 2), drawn(rng, 0, 2)
    first = drawn(rng, 5, 9)
    large = (1, 3, drawn(rng, 8, 9), drawn(rng, 11, 12)), K, first + K + after, first, 1, 1
    for number, (shape, K, channels, first, below, beside) in enumerate((*_JOINED, large)):
        N, C, H, W = shape
        P, Q = 2 * H + below, 2 * W + beside
        block = 512 if N * K * P * Q > 350 else (32, 1, 8, 64)[number % 4]
        sizes = {"first": first, "channels": channels, "P": P, "Q": Q}
        found.append(
            case(
                max(1, -(-N * K * P * Q // block)), block,
                x=numbers(rng, shape, 1.5, 1.0), weight=numbers(rng, (C, K, 2, 2), 0.8, 0.3),
                **{name: np.int64(value) for name, value in sizes.items()},
            )
        )  # fmt: skip
    return found


def _joined_reference(x, weight, first, channels, P, Q):
    N, _, H, W = x.shape
    joined = np.full((N, int(channels), int(P), int(Q)), float(HELD))
    own = joined[:, int(first) : int(first) + weight.shape[1]]
    own[...] = 0
    own[:, :, : 2 * H, : 2 * W] = reference.conv_transpose2d(x, weight, stride=2)
    return joined


UPSAMPLE_INTO = Exercise(
    name="upsample_into",
    title="Into a part of a concatenation",
    solution=upsample_into,
    reference=_joined_reference,
    cases=_joined_cases,
    tolerance=SUMS,
    outputs=("joined",),
    dtype=np.float32,
    start=float(HELD),
    call=lambda kernel, run: run.launch(kernel, run.x, run.weight, run.joined, run.first),
    once=True,
    forbids=("float64-promotion",),
    repeatable=True,
    hints=(
        "With 2 × 2 taps and stride 2, patches neither overlap nor leave gaps. Which single pixel "
        "of x, and which single tap, has painted (p, q)?",
        "Pixel (p // 2, q // 2), with tap (p % 2, q % 2). Only the sum over the channels c is "
        "left. Beyond row 2 · H − 1 and column 2 · W − 1 no patch reaches: these get a 0. The "
        "result belongs into channel `first + k`, and the other channels belong to somebody else.",
        "```python\nif p < 2 * H and q < 2 * W:\n    for c in range(C):\n"
        "        total += x[n, c, p // 2, ...] * weight[c, k, p % 2, ...]\n"
        "joined[n, ..., p, q] = total\n```",
    ),
)
