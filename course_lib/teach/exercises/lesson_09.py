"""Lesson 09: the gradients of a convolution, which are convolutions themselves.

| exercise | it gets | what is new |
|---|---|---|
| dx_as_convolution | dy, weight, H, W, stride, padding | spread out, turned and transposed |
| conv2d_dx | dy, weight, dx, stride, padding; enough threads | gathered: who has read me? |
| conv2d_dweight | dy, x, dweight, stride, padding; a warp for each weight | a sum over all pixels |
| conv2d_dbias | dy, dbias; a block of whole warps, 8 at most, for each channel | a plain sum |

Arrays are float32: x and dx of (N, C, H, W), weight and dweight of (K, C, R, S), dy of
(N, K, P, Q).
"""

import numpy as np

from course_lib import cuda, reference
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import with_plain_numbers
from course_lib.teach.checking.work import Shares, Spares
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case
from course_lib.teach.exercises.lesson_01 import added_exactly
from course_lib.teach.exercises.lesson_08 import output_size

ZERO = np.float32(0)


# ---- dx_as_convolution -----------------------------------------------------------------------


def dx_as_convolution(dy, weight, H, W, stride, padding):
    N, K, P, Q = dy.shape
    R, S = weight.shape[2:]
    spread = np.zeros((N, K, H + R - 1, W + S - 1), dtype=dy.dtype)
    top, left = R - 1 - padding, S - 1 - padding
    spread[:, :, top : top + stride * P : stride, left : left + stride * Q : stride] = dy
    return spread, weight[:, :, ::-1, ::-1].swapaxes(0, 1)


#: ((N, C, H, W), (K, R, S), stride, padding): each size of its own, small ones first.
_CONVOLUTIONS = (
    ((1, 1, 1, 1), (1, 1, 1), 1, 0),
    ((1, 1, 3, 2), (1, 2, 1), 1, 0),
    ((0, 1, 2, 2), (2, 1, 1), 1, 0),
    ((1, 2, 3, 2), (1, 2, 2), 1, 1),
    ((2, 1, 3, 3), (3, 3, 3), 1, 1),
    ((1, 2, 4, 5), (2, 3, 2), 2, 1),
    ((1, 1, 7, 4), (2, 2, 3), 3, 1),
    ((2, 3, 3, 4), (2, 1, 3), 2, 0),
    ((1, 1, 14, 6), (1, 3, 4), 4, 2),
    ((1, 1, 3, 4), (1, 7, 6), 1, 5),
    ((5, 2, 2, 1), (1, 1, 1), 1, 0),
)


def _convolutions(rng):
    """Return the problems above, some whose options or channels are drawn, and a large one."""
    options = drawn(rng, 1, 4), drawn(rng, 0, 2)
    channels = (1, drawn(rng, 9, 12), 2, 2), (drawn(rng, 13, 16), 1, 2), 1, 0
    drawn_options = (1, 2, 6, 5), (2, 4, 3), *options
    strides = (1, 1, drawn(rng, 11, 14), drawn(rng, 11, 14)), (2, 2, 3), drawn(rng, 5, 9), 1
    several = (2, 2, drawn(rng, 7, 8), drawn(rng, 8, 9)), (2, 3, 2), drawn(rng, 1, 2), 1
    large = (2, 1, 1, drawn(rng, 530, 600)), (1, 1, 2), 1, 0
    return [*_CONVOLUTIONS, drawn_options, strides, channels, several, large]


def _dy_shape(shape, filters, stride, padding):
    K, R, S = filters
    sizes = (
        output_size(n, taps, stride, padding, 1) for n, taps in zip(shape[2:], (R, S), strict=True)
    )
    return shape[0], K, *sizes


def _inputs(rng, shape, filters, stride, padding):
    """Return dy, x, weight and the options, as a dictionary."""
    K, R, S = filters
    return {
        "dy": numbers(rng, _dy_shape(shape, filters, stride, padding), 1.5, 1.0),
        "x": numbers(rng, shape, 1.5, 1.0),
        "weight": numbers(rng, (K, shape[1], R, S), 0.8, 0.3),
        "stride": np.int64(stride),
        "padding": np.int64(padding),
    }


def _spread_cases(rng):
    found = []
    # A 1 × 1 filter has no room for padding: the window would see nothing but zeros.
    for shape, filters, stride, padding in _convolutions(rng):
        if padding >= min(filters[1:]):
            continue
        given = _inputs(rng, shape, filters, stride, padding)
        sizes = {"H": np.int64(shape[2]), "W": np.int64(shape[3])}
        options = {"stride": given["stride"], "padding": given["padding"]}
        found.append(case(1, 1, dy=given["dy"], weight=given["weight"], **sizes, **options))
    return found


def _spread_reference(dy, weight, H, W, stride, padding):
    K, C, R, S = weight.shape
    spread = np.zeros((len(dy), K, int(H) + R - 1, int(W) + S - 1))
    for p, q in np.ndindex(dy.shape[2:]):
        spread[:, :, p * stride + R - 1 - padding, q * stride + S - 1 - padding] = dy[:, :, p, q]
    turned = np.zeros((C, K, R, S))
    for r, s in np.ndindex(R, S):
        turned[:, :, r, s] = weight[:, :, R - 1 - r, S - 1 - s].T
    return spread, turned


DX_AS_CONVOLUTION = Exercise(
    name="dx_as_convolution",
    title="The gradient as a convolution",
    solution=dx_as_convolution,
    kind="function",
    reference=_spread_reference,
    cases=_spread_cases,
    tolerance=EXACT,
    outputs=("spread", "turned"),
    dtype=np.float32,
    call=lambda function, run: with_plain_numbers(
        function, run, "dy", "weight", "H", "W", "stride", "padding"
    ),
    hints=(
        "Take one pixel of x, a filter of 3 taps, stride 1, padding 1. Which results have read "
        "it, and by which tap each? Write the taps down from left to right.",
        "`spread` is zeros with dy in it: the first of dy at row `R - 1 - padding`, the next "
        "`stride` rows further on. `turned` has rows and columns of each filter backwards, and "
        "its first two axes changed over.",
        "```python\nspread = np.zeros((N, K, H + R - 1, W + S - 1), dtype=dy.dtype)\n"
        "top, left = R - 1 - padding, S - 1 - padding\n"
        "spread[:, :, top : top + stride * P : stride, ...] = dy\n"
        "return spread, weight[:, :, ::-1, ...].swapaxes(...)\n```",
    ),
)


# ---- conv2d_dx -------------------------------------------------------------------------------


@cuda.jit
def conv2d_dx(dy, weight, dx, stride, padding):
    C, H, W = dx.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = dy.shape[1:]
    i = cuda.grid(1)
    if i < dx.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        total = ZERO
        for r in range(R):
            for s in range(S):
                down, right = h + padding - r, w + padding - s
                p, q = down // stride, right // stride
                met = down % stride == 0 and right % stride == 0
                if met and p >= 0 and p < P and q >= 0 and q < Q:
                    for k in range(K):
                        total += dy[n, k, p, q] * weight[k, c, r, s]
        dx[n, c, h, w] = total


def _blocks(n_threads, block):
    return max(1, -(-n_threads // block))


def _dx_cases(rng):
    found = []
    for number, problem in enumerate(_convolutions(rng)):
        n_threads = int(np.prod(problem[0]))
        block = 320 if n_threads > 300 else (32, 1, 8, 64)[number % 4]
        grid = _blocks(n_threads, block)
        found.append(case(grid, block, **_inputs(rng, *problem)))
    return found


def _gradients(dy, x, weight, stride, padding):
    return reference.conv2d_backward(dy, x, weight, stride=int(stride), padding=int(padding))


def _forward(x, weight, stride, padding):
    return reference.conv2d(x, weight, stride=int(stride), padding=int(padding))


SUMS = Tolerance(0.0, 2e-5, "float32 rounds sums of up to some dozens of products", scaled=True)

CONV2D_DX = Exercise(
    name="conv2d_dx",
    title="The gradient of x, gathered",
    solution=conv2d_dx,
    reference=lambda *inputs: _gradients(*inputs)[0],
    cases=_dx_cases,
    tolerance=SUMS,
    outputs=("dx",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.dy, run.weight, run.dx, run.stride, run.padding
    ),
    once=True,
    primal=_forward,
    forbids=("float64-promotion",),
    repeatable=True,
    hints=(
        "The pixel asks each tap of the filter: is there a result that has met me with you? "
        "Solve h = p · stride − padding + r for p.",
        "`down = h + padding - r` is p · stride. If `down` is no multiple of the stride, no window "
        "has ever put tap r there. If it is, p may still lie outside of dy. (In Python, and in "
        "numba, the remainder of a negative number is never negative.)",
        "```python\nif down % stride == 0 and right % stride == 0 and p >= 0 and p < P and ...:\n"
        "    for k in range(K):\n        total += dy[n, k, p, q] * weight[...]\n```",
    ),
)


# ---- conv2d_dweight --------------------------------------------------------------------------


@cuda.jit
def conv2d_dweight(dy, x, dweight, stride, padding):
    H, W = x.shape[2:]
    C, R, S = dweight.shape[1:]
    N, _, P, Q = dy.shape
    i, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if i < dweight.size:
        k, c, r, s = i // (C * R * S), i // (R * S) % C, i // S % R, i % S
        total = ZERO
        for pixel in range(lane, N * P * Q, 32):
            n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
            h, w = p * stride - padding + r, q * stride - padding + s
            if h >= 0 and h < H and w >= 0 and w < W:
                total += dy[n, k, p, q] * x[n, c, h, w]
        total = warp_sum(total)
        if lane == 0:
            dweight[k, c, r, s] = total


def _dweight_cases(rng):
    problems = (
        ((1, 1, 1, 1), (1, 1, 1), 1, 0),
        ((1, 1, 3, 2), (1, 2, 1), 1, 0),
        ((0, 1, 2, 2), (2, 1, 1), 1, 0),
        ((1, 2, 3, 2), (1, 1, 2), 1, 1),
        ((2, 1, 3, 4), (3, 1, 2), 1, 1),
        ((1, 2, 4, 5), (1, 2, 2), 2, 1),
        ((2, 1, 5, 7), (1, 2, 1), 1, 0),
        ((1, 1, 4, 2), (2, 2, 2), 2, 0),
        ((1, 1, 5, 6), (1, 3, 2), 4, 3),
        ((1, 1, 6, 5), (2, 2, 1), drawn(rng, 1, 4), drawn(rng, 0, 3)),
        ((1, 1, drawn(rng, 11, 14), drawn(rng, 11, 14)), (1, 1, 2), drawn(rng, 5, 9), 1),
        ((1, 1, 3, 4), (1, 7, 6), 1, 3),
        ((5, drawn(rng, 9, 10), 1, 2), (2, 1, 1), 1, 0),
        ((1, 1, 1, 2), (drawn(rng, 9, 12), 1, 1), 1, 0),
        ((3, 1, drawn(rng, 9, 10), drawn(rng, 10, 11)), (2, 2, 2), 1, 1),
    )
    found = []
    for number, problem in enumerate(problems):
        (_, C, _, _), (K, R, S) = problem[:2]
        block = 512 if problem is problems[-1] else (32, 64, 96)[number % 3]
        found.append(case(_blocks(32 * K * C * R * S, block), block, **_inputs(rng, *problem)))
    return found


CONV2D_DWEIGHT = Exercise(
    name="conv2d_dweight",
    title="The gradient of the weights",
    solution=conv2d_dweight,
    reference=lambda *inputs: _gradients(*inputs)[1],
    cases=_dweight_cases,
    tolerance=SUMS,
    outputs=("dweight",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.dy, run.x, run.dweight, run.stride, run.padding
    ),
    once=True,
    primal=_forward,
    about=(Spares("dy"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    repeatable=True,
    hints=(
        "A weight takes part in every result of its filter, once. With which pixel of x has it "
        "been multiplied there? It is the very line of the forward pass.",
        "Lane `lane` takes pixels lane, lane + 32, … of the N · P · Q pixels of dy. For each: "
        "picture, row and column; the pixel of x that tap (r, s) met there; if it is inside, one "
        "product. Then the lanes add up with `warp_sum`, and one of them writes.",
        "```python\nfor pixel in range(lane, N * P * Q, 32):\n    n, p, q = pixel // (P * Q), ...\n"
        "    h, w = p * stride - padding + r, ...\n"
        "    if h >= 0 and ...:\n        total += dy[n, k, p, q] * x[...]\n"
        "total = warp_sum(total)\n```",
    ),
)


# ---- conv2d_dbias ----------------------------------------------------------------------------


@cuda.jit
def conv2d_dbias(dy, dbias):
    partial = cuda.shared.array(8, np.float32)
    N, _, P, Q = dy.shape
    k, t, total = cuda.blockIdx.x, cuda.threadIdx.x, ZERO
    for pixel in range(t, N * P * Q, cuda.blockDim.x):
        total += dy[pixel // (P * Q), k, pixel // Q % P, pixel % Q]
    total = warp_sum(total)
    if t % 32 == 0:
        partial[t // 32] = total
    cuda.syncthreads()
    if t == 0:
        total = ZERO
        for warp in range(cuda.blockDim.x // 32):
            total += partial[warp]
        dbias[k] = total


def _dbias_cases(rng):
    launches = [
        ((1, 1, 1, 1), 32),
        ((0, 2, 3, 2), 32),
        ((1, 2, 1, 3), 64),
        ((2, 1, 3, 2), 32),
        ((3, 2, 4, 3), 96),
        ((2, 3, 6, 4), 32),
        ((2, 1, 9, 15), 256),
        ((1, 1, 5, 1), 32),
        ((5, drawn(rng, 9, 12), 1, 2), 32),
        ((3, 3, drawn(rng, 10, 11), drawn(rng, 17, 19)), 256),
    ]
    cases = [case(shape[1], block, dy=numbers(rng, shape, 1.5, 1.0)) for shape, block in launches]
    return [*cases, case(1, 64, dy=added_exactly(rng, (1, 1, 1, drawn(rng, 1030, 1060))))]


CONV2D_DBIAS = Exercise(
    name="conv2d_dbias",
    title="The gradient of the bias",
    solution=conv2d_dbias,
    reference=lambda dy: dy.sum(axis=(0, 2, 3)),
    cases=_dbias_cases,
    tolerance=Tolerance(0.0, 2e-5, "float32 rounds each of some dozens of additions", scaled=True),
    outputs=("dbias",),
    dtype=np.float32,
    once=True,
    about=(Spares("dy"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    repeatable=True,
    hints=(
        "The bias of channel k was added to each result of channel k, in all pictures. What is "
        "the gradient of a sum's term?",
        "The block deals the N · P · Q numbers of its channel like cards. Each warp adds up with "
        "`warp_sum`; one lane of each leaves the sum in `partial`; after a barrier, one thread "
        "adds these up, in the order of the warps.",
        "```python\nfor pixel in range(t, N * P * Q, cuda.blockDim.x):\n"
        "    total += dy[pixel // (P * Q), k, ...]\ntotal = warp_sum(total)\n"
        "if t % 32 == 0:\n    partial[t // 32] = ...\ncuda.syncthreads()\n```",
    ),
)
