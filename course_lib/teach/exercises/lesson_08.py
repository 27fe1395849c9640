"""Lesson 08: convolution, from a thread per result to a matrix product that is never written down.

| exercise | it gets | what is new |
|---|---|---|
| output_size | five numbers | padding, stride, dilation |
| conv2d_direct | x, weight, bias, y, stride, padding; enough threads | a window per thread |
| convolution_work | six numbers | FLOPs and bytes, so intensity |
| conv2d_tiled | x, weight, y; 64 threads per tile of 8 × 8 and filter | the halo |
| im2col | x, columns, R, S, P, Q, stride, padding; enough threads | the matrix of all terms |
| implicit_gemm | x, weight of (K, C·R·S), y, R, S, stride, padding; blocks of 64 | no matrix |

Arrays are float32: x of (N, C, H, W), weight of (K, C, R, S), y of (N, K, P, Q). `conv2d_tiled` has
filters of 3 × 3, stride 1 and padding 1.
"""

import numpy as np

from course_lib import cuda, reference
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import number_of, pair_of
from course_lib.teach.checking.work import Spares, Uses
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case

ZERO = np.float32(0)
TILE = 8  # rows and columns of a tile: a block has 64 threads
HALO = TILE + 2  # of a tile with its rim of one pixel, for filters of 3 × 3


# ---- output_size -----------------------------------------------------------------------------


def output_size(size, taps, stride, padding, dilation):
    reach = dilation * (taps - 1) + 1
    return (size + 2 * padding - reach) // stride + 1


def _size_reference(size, taps, stride, padding, dilation):
    # By counting: a window may begin wherever it still ends inside.
    first, last = -padding, size + padding - 1
    return sum(at + dilation * (taps - 1) <= last for at in range(first, last + 1, stride))


def _size_cases(rng):
    windows = [
        (1, 1, 1, 0, 1),
        (5, 3, 1, 0, 1),
        (5, 3, 1, 1, 1),
        (6, 3, 2, 1, 1),
        (7, 3, 2, 1, 1),
        (8, 1, 3, 0, 1),
        (9, 3, 1, 2, 2),
        (10, 4, 3, 1, 2),
        (28, 5, 2, 2, 1),
        (380, 3, 2, 1, 1),
        (3, 5, 1, 1, 1),
        (4, 3, 5, 4, 3),
        *((drawn(rng, 50, 90), *(drawn(rng, 2, 6) for _ in range(4))) for _ in range(2)),
        (drawn(rng, 70_000, 90_000), *(drawn(rng, 7, 12) for _ in range(4))),
    ]
    names = "size", "taps", "stride", "padding", "dilation"
    return [case(1, 1, **dict(zip(names, map(np.int64, each), strict=True))) for each in windows]


OUTPUT_SIZE = Exercise(
    name="output_size",
    title="How large is the result?",
    solution=output_size,
    kind="function",
    reference=_size_reference,
    cases=_size_cases,
    tolerance=EXACT,
    outputs=("P",),
    dtype=np.int64,
    call=number_of,
    hints=(
        "Take paper: 7 pixels, 3 taps. Draw the first place of the window and the last one. Over "
        "how many pixels does it move from the one to the other?",
        "A window reaches over `dilation * (taps - 1) + 1` pixels. What is left of "
        "`size + 2 * padding` is how far it can move. With a stride it stops only at every "
        "`stride`-th place, and the first place counts, too.",
        "```python\nreach = dilation * (taps - 1) + 1\n"
        "return (size + 2 * padding - reach) // stride + ...\n```",
    ),
)


# ---- conv2d_direct ---------------------------------------------------------------------------


@cuda.jit
def conv2d_direct(x, weight, bias, y, stride, padding):
    C, H, W = x.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = y.shape[1:]
    i = cuda.grid(1)
    if i < y.size:
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        total = bias[k]
        for c in range(C):
            for r in range(R):
                for s in range(S):
                    h, w = p * stride - padding + r, q * stride - padding + s
                    if h >= 0 and h < H and w >= 0 and w < W:
                        total += x[n, c, h, w] * weight[k, c, r, s]
        y[n, k, p, q] = total


#: ((N, C, H, W), (K, R, S), stride, padding): each size of its own, small ones first.
_CONVOLUTIONS = (
    ((1, 1, 1, 1), (1, 1, 1), 1, 0),
    ((1, 1, 2, 3), (1, 2, 1), 1, 0),
    ((0, 1, 2, 2), (2, 1, 1), 1, 0),
    ((1, 2, 3, 2), (1, 1, 2), 1, 1),
    ((2, 1, 3, 4), (2, 3, 3), 1, 1),
    ((1, 2, 5, 4), (3, 3, 2), 2, 1),
    ((2, 3, 4, 3), (2, 2, 3), 1, 2),
    ((1, 1, 7, 5), (2, 1, 3), 3, 1),
    ((1, 1, 5, 6), (1, 3, 4), 4, 3),
    ((1, 1, 3, 4), (1, 7, 6), 1, 5),
    ((5, 2, 2, 1), (1, 1, 1), 1, 0),
)


def _convolutions(rng):
    """Return the problems above, some whose options or channels are drawn, and a large one."""
    options = drawn(rng, 1, 4), drawn(rng, 0, 4)
    channels = (1, drawn(rng, 9, 12), 2, 2), (drawn(rng, 13, 16), 1, 2), 1, 0
    large = (2, 1, 1, drawn(rng, 530, 600)), (1, 1, 2), 1, 0
    drawn_options = (1, 2, 6, 5), (2, 4, 3), *options
    strides = (1, 1, drawn(rng, 11, 14), drawn(rng, 11, 14)), (2, 1, 3), drawn(rng, 5, 9), 1
    several = (2, 2, drawn(rng, 6, 7), drawn(rng, 8, 9)), (3, 3, 2), 1, drawn(rng, 1, 2)
    return [*_CONVOLUTIONS, drawn_options, strides, channels, several, large]


def _convolution(rng, x_shape, filters, stride, padding):
    """Return inputs of a convolution: x, weight, bias, and the options as scalars."""
    K, R, S = filters
    return {
        "x": numbers(rng, x_shape, 1.5, 1.0),
        "weight": numbers(rng, (K, x_shape[1], R, S), 0.8, 0.3),
        "bias": numbers(rng, K, 2.0, 3.0),
        "stride": np.int64(stride),
        "padding": np.int64(padding),
    }


def _blocks(n_threads, block):
    return max(1, -(-n_threads // block))


def _direct_cases(rng):
    found = []
    for number, problem in enumerate(_convolutions(rng)):
        n_threads = int(np.prod(_y_shape(*problem)))
        block = 512 if n_threads > 300 else (32, 1, 8, 64)[number % 4]
        found.append(case(_blocks(n_threads, block), block, **_convolution(rng, *problem)))
    return found


def _y_shape(shape, filters, stride, padding):
    N, _, H, W = shape
    K, R, S = filters
    return N, K, *(
        output_size(size, taps, stride, padding, 1) for size, taps in ((H, R), (W, S))
    )  # fmt: skip


SUMS = Tolerance(0.0, 2e-5, "float32 rounds sums of up to some dozens of products", scaled=True)

CONV2D_DIRECT = Exercise(
    name="conv2d_direct",
    title="Convolution, a thread per result",
    solution=conv2d_direct,
    reference=lambda x, weight, bias, stride, padding: reference.conv2d(
        x, weight, bias, stride=int(stride), padding=int(padding)
    ),
    cases=_direct_cases,
    tolerance=SUMS,
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.x, run.weight, run.bias, run.y, run.stride, run.padding
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "First the place: y has N · K · P · Q numbers, row by row. The last index of four changes "
        "with each number, the one before it after every Q numbers, and so on. Then the sum, "
        "whose three loops run over the filter.",
        "`q = i % Q`, `p = i // Q % P`, then `k` and `n` in the same way. The window of (p, q) "
        "begins at row `p * stride - padding` and column `q * stride - padding`. A tap that lies "
        "outside of the picture meets a 0: it adds nothing, and x must not be read there.",
        "```python\nfor c in range(C):\n    for r in range(R):\n        for s in range(S):\n"
        "            h, w = p * stride - padding + r, ...\n"
        "            if h >= 0 and h < H and ...:\n"
        "                total += x[n, c, h, w] * weight[...]\n```",
    ),
)


# ---- convolution_work ------------------------------------------------------------------------


def convolution_work(N, C, K, H, R, groups):
    flops = 2 * N * K * H * H * (C // groups) * R * R
    n_numbers = N * C * H * H + K * (C // groups) * R * R + N * K * H * H
    return flops, 4 * n_numbers


def _work_reference(N, C, K, H, R, groups):
    per_group = C / groups
    per_result = per_group * R**2  # products, each with an addition
    n_results = N * K * H**2
    return n_results * per_result * 2, (N * C * H**2 + K * per_result + n_results) * 4


def _work_cases(rng):
    layers = [
        (1, 1, 1, 1, 1, 1),
        (1, 2, 3, 5, 3, 1),
        (2, 3, 3, 4, 3, 3),
        (32, 64, 128, 64, 3, 1),
        (8, 64, 64, 56, 3, 64),
        (1, 16, 32, 7, 5, 4),
        (3, 10, 20, 9, 1, 1),
        (4, 6, 12, 8, 7, 6),
        *((drawn(rng, 70, 99), g * drawn(rng, 9, 30), g * drawn(rng, 9, 30),
           drawn(rng, 50, 99), drawn(rng, 4, 9), g) for g in (drawn(rng, 2, 3), drawn(rng, 4, 9))),
        (drawn(rng, 1030, 1100), 7 * drawn(rng, 150, 170), 7 * drawn(rng, 150, 170),
         drawn(rng, 1030, 1100), drawn(rng, 10, 15), 7),
    ]
    names = "N", "C", "K", "H", "R", "groups"
    return [case(1, 1, **dict(zip(names, map(np.int64, each), strict=True))) for each in layers]


CONVOLUTION_WORK = Exercise(
    name="convolution_work",
    title="FLOPs and bytes of a convolution",
    solution=convolution_work,
    kind="function",
    reference=_work_reference,
    cases=_work_cases,
    tolerance=Tolerance(1e-12, 0.0, "products of whole numbers"),
    outputs=("flops", "n_bytes"),
    dtype=np.float64,
    call=pair_of,
    hints=(
        "How many numbers has y? How many products does each of them take, and how many "
        "operations is a product that is added up?",
        "y has N · K · H · H numbers, with padding as large as x. Each is a sum over R · R taps in "
        "the C / groups channels of its group: a multiplication and an addition for each. Moved "
        "are x, weight and y, once, 4 bytes a number. The weight has (C / groups) · R · R numbers "
        "for each of K filters.",
        "```python\nflops = 2 * N * K * H * H * ... * R * R\n"
        "return flops, 4 * (N * C * H * H + ... + N * K * H * H)\n```",
    ),
)


# ---- conv2d_tiled ----------------------------------------------------------------------------


@cuda.jit
def conv2d_tiled(x, weight, y):
    halo = cuda.shared.array((HALO, HALO), np.float32)
    C, H, W = x.shape[1:]
    K, t, total = y.shape[1], cuda.threadIdx.x, ZERO
    n, k = cuda.blockIdx.z // K, cuda.blockIdx.z % K
    top, left = TILE * cuda.blockIdx.y, TILE * cuda.blockIdx.x
    row, col = t // TILE, t % TILE
    for c in range(C):
        for i in range(t, HALO * HALO, TILE * TILE):
            h, w = top - 1 + i // HALO, left - 1 + i % HALO
            inside = h >= 0 and h < H and w >= 0 and w < W
            halo[i // HALO, i % HALO] = x[n, c, h, w] if inside else ZERO
        cuda.syncthreads()
        for r in range(3):
            for s in range(3):
                total += halo[row + r, col + s] * weight[k, c, r, s]
        cuda.syncthreads()
    if top + row < H and left + col < W:
        y[n, k, top + row, left + col] = total


def _tiled_cases(rng):
    sizes = [
        ((1, 1, 1, 1), 1),
        ((1, 0, 2, 1), 1),
        ((1, 2, 4, 3), 1),
        ((1, 1, 2, 3), 2),
        ((2, 1, 3, 1), 1),
        ((1, 1, 9, 3), 1),
        ((1, 1, 8, 10), 1),
        ((1, 2, 1, 5), 1),
        ((1, drawn(rng, 5, 6), 2, 1), 1),
        ((1, 1, 1, 2), drawn(rng, 9, 12)),
        ((5, 1, 1, 2), 1),
        ((1, 1, 1, drawn(rng, 65, 70)), 1),
        ((1, 2, drawn(rng, 17, 20), drawn(rng, 17, 22)), 1),
    ]
    found = []
    for shape, K in sizes:
        inputs = _convolution(rng, shape, (K, 3, 3), 1, 1)
        grid = _blocks(shape[3], 8), _blocks(shape[2], 8), shape[0] * K
        found.append(case(grid, 64, x=inputs["x"], weight=inputs["weight"]))
    return found


CONV2D_TILED = Exercise(
    name="conv2d_tiled",
    title="A tile and its halo in shared memory",
    solution=conv2d_tiled,
    reference=lambda x, weight: reference.conv2d(x, weight, padding=1),
    cases=_tiled_cases,
    tolerance=SUMS,
    dtype=np.float32,
    once=True,
    about=(Uses("shared memory"), Spares("x", point=True)),
    forbids=("float64-promotion",),
    hints=(
        "The block needs 100 pixels and has 64 threads. Which pixel of the picture is the upper "
        "left one of the halo? It is not (top, left).",
        "Thread t fetches places t and t + 64 of the halo, if there are such. Place i is in row "
        "`i // HALO` and column `i % HALO` of it, and comes from row `top - 1 + i // HALO` of the "
        "picture. Outside of the picture, 0. Then everybody waits; and once more before the halo "
        "is overwritten by the next channel.",
        "```python\nfor i in range(t, HALO * HALO, TILE * TILE):\n"
        "    h, w = top - 1 + i // HALO, ...\n    inside = h >= 0 and h < H and ...\n"
        "    halo[i // HALO, i % HALO] = x[n, c, h, w] if inside else ZERO\n```",
    ),
)


# ---- im2col ----------------------------------------------------------------------------------


@cuda.jit
def im2col(x, columns, R, S, P, Q, stride, padding):
    H, W = x.shape[2:]
    i = cuda.grid(1)
    if i < columns.size:
        term, pixel = i // columns.shape[1], i % columns.shape[1]
        c, r, s = term // (R * S), term // S % R, term % S
        n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
        h, w = p * stride - padding + r, q * stride - padding + s
        inside = h >= 0 and h < H and w >= 0 and w < W
        columns[term, pixel] = x[n, c, h, w] if inside else ZERO


#: As `_CONVOLUTIONS`; the number of filters is of no account here.
_COLUMNS = (
    ((1, 1, 1, 1), (1, 1, 1), 1, 0),
    ((1, 1, 2, 3), (1, 2, 1), 1, 0),
    ((0, 1, 2, 2), (1, 1, 1), 1, 0),
    ((1, 2, 3, 2), (1, 1, 2), 1, 1),
    ((2, 1, 3, 4), (1, 2, 3), 1, 1),
    ((2, 2, 5, 4), (1, 3, 2), 2, 1),
    ((1, 1, 7, 5), (1, 1, 3), 3, 1),
    ((1, 2, 1, 4), (1, 1, 2), 2, 0),
    ((1, 1, 5, 6), (1, 3, 4), 4, 3),
    ((1, 1, 2, 1), (1, 7, 6), 1, 5),
)


def _im2col_cases(rng):
    found = []
    options = drawn(rng, 1, 4), drawn(rng, 0, 4)
    large = (1, 1, 1, drawn(rng, 530, 600)), (1, 1, 2), 1, 0
    problems = [*_COLUMNS, ((1, 2, 6, 5), (1, drawn(rng, 2, 4), drawn(rng, 2, 5)), *options)]
    problems.append(((1, drawn(rng, 9, 12), 2, 2), (1, 1, 2), 1, 0))
    problems.append(((1, 1, 11, 11), (1, 1, 2), drawn(rng, 5, 9), 1))
    problems.append(((5, 1, 2, 2), (1, 1, 2), 1, 0))
    problems.append(((1, 2, drawn(rng, 8, 9), drawn(rng, 8, 9)), (1, 3, 2), 1, 0))
    problems.append(large)
    for number, problem in enumerate(problems):
        shape, (_, R, S), stride, padding = problem
        N, _, P, Q = _y_shape(*problem)
        block = 288 if problem is large else (32, 8, 64)[number % 3]
        grid = _blocks(shape[1] * R * S * N * P * Q, block)
        sizes = {"R": R, "S": S, "P": P, "Q": Q, "stride": stride, "padding": padding}
        found.append(
            case(
                grid, block,
                x=numbers(rng, shape, 1.5, 1.0),
                **{name: np.int64(value) for name, value in sizes.items()},
            )
        )  # fmt: skip
    return found


def _im2col_reference(x, R, S, P, Q, stride, padding):
    N, C = x.shape[:2]
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    columns = np.zeros((C, R, S, N, P, Q))
    for r, s in np.ndindex(int(R), int(S)):
        rows, cols = (slice(at, at + stride * n, stride) for at, n in ((r, P), (s, Q)))
        columns[:, r, s] = x[:, :, rows, cols][:, :, :P, :Q].swapaxes(0, 1)
    return columns.reshape(C * R * S, N * P * Q)


IM2COL = Exercise(
    name="im2col",
    title="The matrix of all terms",
    solution=im2col,
    reference=_im2col_reference,
    cases=_im2col_cases,
    tolerance=EXACT,
    outputs=("columns",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.x, run.columns, run.R, run.S, run.P, run.Q, run.stride, run.padding
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "Two numbers become three each. The row says which weight is meant (channel, row and "
        "column of the filter), the column which result (picture, row and column of y).",
        "As in the direct kernel: `s = term % S`, `r = term // S % R`, `c = term // (R * S)`; and "
        "the same for `pixel` with Q and P. Then `h` and `w`, and 0 outside of the picture.",
        "```python\nc, r, s = term // (R * S), term // S % R, term % S\nn, p, q = ...\n"
        "h, w = p * stride - padding + r, ...\n```",
    ),
)


# ---- implicit_gemm ---------------------------------------------------------------------------


@cuda.jit
def implicit_gemm(x, weight, y, R, S, stride, padding):
    a = cuda.shared.array((TILE, TILE), np.float32)
    b = cuda.shared.array((TILE, TILE), np.float32)
    N, _, H, W = x.shape
    (K, n_terms), (P, Q) = weight.shape, y.shape[2:]
    row, col, total = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE, ZERO
    k, pixel = TILE * cuda.blockIdx.y + row, TILE * cuda.blockIdx.x + col
    n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
    for first in range(0, n_terms, TILE):
        known = k < K and first + col < n_terms
        a[row, col] = weight[k, first + col] if known else ZERO
        term = first + row
        c, r, s = term // (R * S), term // S % R, term % S
        h, w = p * stride - padding + r, q * stride - padding + s
        inside = h >= 0 and h < H and w >= 0 and w < W
        b[row, col] = x[n, c, h, w] if n < N and term < n_terms and inside else ZERO
        cuda.syncthreads()
        for j in range(TILE):
            total += a[row, j] * b[j, col]
        cuda.syncthreads()
    if k < K and n < N:
        y[n, k, p, q] = total


#: As `_CONVOLUTIONS`.
_PRODUCTS = (
    ((1, 1, 1, 1), (1, 1, 1), 1, 0),
    ((1, 1, 2, 3), (1, 2, 1), 1, 0),
    ((1, 1, 3, 4), (1, 1, 2), 2, 0),
    ((1, 2, 3, 2), (2, 1, 2), 1, 1),
    ((2, 1, 2, 3), (2, 3, 3), 1, 1),
    ((1, 3, 4, 1), (9, 3, 2), 2, 1),
    ((1, 1, 2, 2), (2, 2, 1), 1, 0),
    ((2, 1, 1, 3), (1, 1, 2), 2, 0),
    ((1, 1, 3, 4), (1, 7, 6), 1, 5),
    ((5, 2, 1, 1), (1, 1, 1), 1, 0),
)


def _implicit_cases(rng):
    found = []
    filters = 2, drawn(rng, 2, 4), drawn(rng, 2, 4)
    drawn_options = (1, 2, 4, 5), filters, drawn(rng, 1, 4), drawn(rng, 0, 4)
    large = (2, 2, drawn(rng, 6, 7), 8), (drawn(rng, 9, 12), 3, 2), 2, 3
    problems = (
        *_PRODUCTS,
        drawn_options,
        ((1, 1, 11, 11), (1, 2, 3), drawn(rng, 5, 9), 1),
        ((1, drawn(rng, 33, 36), 1, 2), (2, 1, 1), 1, 0),  # as a matrix that is written down
        ((1, 1, 1, 2), (drawn(rng, 17, 20), 1, 1), 1, 0),
        ((1, 1, 1, drawn(rng, 65, 70)), (1, 1, 1), 1, 0),
        large,
    )
    for problem in problems:
        shape, (K, R, S), stride, padding = problem
        N, _, P, Q = _y_shape(*problem)
        inputs = _convolution(rng, *problem)
        sizes = {"R": R, "S": S, "stride": stride, "padding": padding}
        found.append(
            case(
                (_blocks(N * P * Q, 8), _blocks(K, 8)), 64,
                x=inputs["x"], weight=inputs["weight"].reshape(K, -1),
                **{name: np.int64(value) for name, value in sizes.items()},
            )
        )  # fmt: skip
    return found


def _implicit_reference(x, weight, R, S, stride, padding):
    weight = weight.reshape(len(weight), x.shape[1], int(R), int(S))
    return reference.conv2d(x, weight, stride=int(stride), padding=int(padding))


IMPLICIT_GEMM = Exercise(
    name="implicit_gemm",
    title="A matrix product whose matrix is never made",
    solution=implicit_gemm,
    reference=_implicit_reference,
    cases=_implicit_cases,
    tolerance=SUMS,
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.x, run.weight, run.y, run.R, run.S, run.stride, run.padding
    ),
    once=True,
    about=(Uses("shared memory", point=False),),
    forbids=("float64-promotion",),
    hints=(
        "`b[row, col]` is element (first + row, pixel) of the matrix that im2col would have "
        "written. You have written the lines that find it.",
        "Three things may be missing: the term (there may be no eighth one left), the picture "
        "(the last tile is wider than the matrix), and the pixel of the picture, because of the "
        "padding. In all three cases b gets a 0, since a sum does not notice it. Two barriers: "
        "before the tiles are used, and before they are overwritten.",
        "```python\nterm = first + row\nc, r, s = ...\nh, w = ...\n"
        "inside = h >= 0 and ...\n"
        "b[row, col] = x[n, c, h, w] if n < N and term < ... and inside else ZERO\n"
        "cuda.syncthreads()\n```",
    ),
)
