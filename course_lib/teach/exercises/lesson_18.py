"""Lesson 18: attention as three kernels, and the matrix between them.

| exercise | it gets | what is new |
|---|---|---|
| predict_attention | B, H, T, D | what grows with the square of T |
| attention_scores | q, k, scores; 8 × 8 threads per tile, B · H in z | a product for each head |
| scaled_softmax | scores, mask, scale, causal, y, lse; a warp per row | masks, rows of nothing |
| attention_output | weights, v, o; as attention_scores | the other product, not transposed |
| attention | q, k, v, mask, causal | a launcher of all three; scale = 1 / √D |
| scaled_softmax_backward | dy, y, scale, dscores; a warp per row | no mask is needed |

Arrays are float32: q, o (B, H, T, D), k, v (B, H, S, D), scores, weights, y and their gradients
(B, H, T, S), lse (B, H, T). The mask is bool, True where a query may look; each of its four axes
has the length of that of the scores, or 1.
"""

import math

import numpy as np

from course_lib import cuda, reference
from course_lib.runtime.intrinsics import online_add, warp_online, warp_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import pair_of, with_plain_numbers
from course_lib.teach.checking.work import Launches, Shares, Spares, Uses
from course_lib.teach.exercise import Exercise, Tolerance, case

ZERO, MINUS_INF = np.float32(0), np.float32(-np.inf)
TILE = 8  # rows and columns of a tile: a block has 8 × 8 threads
PADDED = 9  # numbers in a line of the tile that is read by columns: no two in one bank
BLOCK = 128  # threads of a block where a warp has a row


def _blocks(n, size):
    return max(1, -(-n // size))


# ---- predict_attention -----------------------------------------------------------------------


def predict_attention(B, H, T, D):
    matrix, inputs = 4 * B * H * T * T, 4 * B * H * T * D
    moved = (2 * inputs + matrix) + 2 * matrix + (matrix + 2 * inputs)
    flops = 2 * (2 * B * H * T * T * D)
    return matrix, moved, flops, 4 * D


def _prediction_reference(B, H, T, D):
    n_scores, n_numbers = B * H * T**2, B * H * T * D
    read = (n_numbers + n_numbers) + n_scores + (n_scores + n_numbers)
    written = n_scores + n_scores + n_numbers
    products = n_scores * D + n_numbers * T  # each with an addition
    return n_scores * 4, (read + written) * 4, products * 2, (n_numbers * 4) / (B * H * T)


def _prediction_cases(rng):
    problems = [
        (1, 1, 1, 1),
        (1, 1, 2, 3),
        (1, 1, 4, 1),
        (2, 1, 3, 2),
        (1, 3, 5, 4),
        (2, 4, 7, 8),
        (1, 12, 128, 64),
        (8, 16, 1024, 64),
        (1, 32, 4096, 128),
        (drawn(rng, 2, 9), drawn(rng, 3, 40), drawn(rng, 9, 99), drawn(rng, 33, 99)),
        (drawn(rng, 2, 9), drawn(rng, 3, 40), drawn(rng, 100, 999), drawn(rng, 33, 99)),
        (drawn(rng, 30, 60), drawn(rng, 65, 90), drawn(rng, 66_000, 90_000), drawn(rng, 130, 300)),
    ]
    return [case(1, 1, **dict(zip("BHTD", map(np.int64, each), strict=True))) for each in problems]


PREDICT_ATTENTION = Exercise(
    name="predict_attention",
    title="What attention costs",
    solution=predict_attention,
    forms=(
        (
            *(", inputs = 4 * B * H * T * T, 4 * B * H * T * D", " = 4 * B * H * T * T"),
            "(2 * inputs + matrix) + 2 * matrix + (matrix + 2 * inputs)",
            "4 * matrix + 4 * 4 * B * H * T * D",
            *("2 * (2 * B * H * T * T * D)", "4 * B * H * T * T * D"),
        ),
    ),
    kind="function",
    reference=_prediction_reference,
    cases=_prediction_cases,
    tolerance=Tolerance(1e-12, 0.0, "whole numbers, which float64 may round past 2⁵³"),
    outputs=("matrix_bytes", "moved_bytes", "flops", "crossover"),
    dtype=np.float64,
    call=pair_of,
    hints=(
        "Write down the shape of each array, and below it how many numbers it has. There are only "
        "two sizes among them.",
        "The matrix has B · H · T · T numbers; q, k, v and o have B · H · T · D each. The first "
        "kernel reads two of those and writes the matrix, the second reads and writes the matrix, "
        "the third reads the matrix and one of those and writes one. A score is D products and as "
        "many additions; so is each number of o, with T of them.",
        "```python\nmatrix, inputs = 4 * B * H * T * T, 4 * B * H * T * D\n"
        "moved = (2 * inputs + matrix) + ... + ...\nflops = 2 * (2 * B * H * ...)\n```\n"
        "And T · T = 4 · T · D gives the last one.",
    ),
)


# ---- attention_scores ------------------------------------------------------------------------


@cuda.jit
def attention_scores(q, k, scores):
    sq = cuda.shared.array((TILE, TILE), np.float32)
    sk = cuda.shared.array((TILE, PADDED), np.float32)
    (H, T, D), S = q.shape[1:], k.shape[2]
    b, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    tx, ty, total = cuda.threadIdx.x, cuda.threadIdx.y, ZERO
    i, j = TILE * cuda.blockIdx.y + ty, TILE * cuda.blockIdx.x + tx
    key = TILE * cuda.blockIdx.x + ty
    for first in range(0, D, TILE):
        d = first + tx
        sq[ty, tx] = q[b, h, i, d] if i < T and d < D else ZERO
        sk[ty, tx] = k[b, h, key, d] if key < S and d < D else ZERO
        cuda.syncthreads()
        for n in range(TILE):
            total += sq[ty, n] * sk[tx, n]
        cuda.syncthreads()
    if i < T and j < S:
        scores[b, h, i, j] = total


#: (B, H, T, S, D): each size of its own, small ones first.
_PRODUCTS = (
    (1, 1, 1, 1, 1),
    (1, 1, 2, 3, 0),
    (1, 1, 1, 2, 3),
    (1, 1, 3, 2, 2),
    (2, 1, 2, 1, 3),
    (1, 2, 2, 3, 4),
    (2, 3, 3, 2, 5),
    (3, 2, 1, 4, 2),
    (1, 1, 8, 8, 8),
    (1, 2, 9, 5, 7),
    (1, 1, 6, 17, 9),
)


def _products(rng):
    """Return the problems above, some with one axis longer than a warp, and a large one."""
    return [
        *_PRODUCTS,
        (1, 1, 2, 3, drawn(rng, 130, 140)),
        (1, 1, drawn(rng, 33, 38), 1, 1),
        (1, 1, 1, drawn(rng, 33, 38), 2),
        (drawn(rng, 5, 7), 1, 1, 2, 1),
        (1, drawn(rng, 5, 7), 2, 1, 1),
        (2, 3, drawn(rng, 9, 13), drawn(rng, 9, 13), drawn(rng, 9, 13)),
    ]


def _scores_cases(rng):
    found = []
    for B, H, T, S, D in _products(rng):
        grid = _blocks(S, TILE), _blocks(T, TILE), B * H
        q, k = numbers(rng, (B, H, T, D), 1.5, 1.0), numbers(rng, (B, H, S, D), 1.0, 0.7)
        found.append(case(grid, (TILE, TILE), q=q, k=k))
    return found


_SUMS = Tolerance(
    1e-6, 2e-5, "float32 rounds sums of up to 140 products, each of some size", scaled=True
)

ATTENTION_SCORES = Exercise(
    name="attention_scores",
    title="Each query meets each key",
    solution=attention_scores,
    reference=lambda q, k: np.einsum("bhtd,bhsd->bhts", q, k),
    cases=_scores_cases,
    tolerance=_SUMS,
    outputs=("scores",),
    dtype=np.float32,
    once=True,
    about=(Uses("shared memory", point=False),),
    repeatable=True,
    hints=(
        "It is the tile of lesson 8, with two rows that are multiplied in place of a row and a "
        "column. And there is a matrix for each head of each example: which one is this block's?",
        "blockIdx.z counts heads first: `z // H` is the example, `z % H` the head. The thread "
        "fetches number `first + tx` of query `i` and of key `TILE * blockIdx.x + ty`: its score "
        "is about key j, but it *fetches* for its neighbours. A barrier before the products, "
        "and one after.",
        "```python\nsq[ty, tx] = q[b, h, i, d] if i < T and d < D else ZERO\nsk[ty, tx] = ...\n"
        "cuda.syncthreads()\nfor n in range(TILE):\n    total += sq[ty, n] * sk[..., n]\n"
        "cuda.syncthreads()\n```",
    ),
)


# ---- scaled_softmax --------------------------------------------------------------------------


@cuda.jit
def scaled_softmax(scores, mask, scale, causal, y, lse):
    B, H, T, S = scores.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < B * H * T:
        b, h, i = row // (H * T), row // T % H, row % T
        mb, mh, mi = b % mask.shape[0], h % mask.shape[1], i % mask.shape[2]
        m, s = MINUS_INF, ZERO
        for j in range(lane, S, 32):
            if mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal):
                m, s = online_add(m, s, scale * scores[b, h, i, j])
        m, s = warp_online(m, s)
        for j in range(lane, S, 32):
            value = ZERO
            if mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal):
                value = math.exp(scale * scores[b, h, i, j] - m) / s
            y[b, h, i, j] = value
        if lane == 0:
            lse[b, h, i] = m + math.log(s)


def _mask(rng, shape, kind):
    """Return a mask whose axes are those of `shape`, or 1, as the `kind` of rule has them."""
    B, H, T, S = shape
    if kind == "all":
        return np.ones((1, 1, 1, 1), bool)
    if kind == "lengths":  # later keys are padding; one example has none but padding
        lengths = rng.integers(1, S + 1, B)
        lengths[B // 2] = 0 if B > 1 else S // 2
        return (np.arange(S) < lengths[:, None, None, None]).reshape(B, 1, 1, S)
    if kind == "left":  # earlier keys are padding: with `causal`, early queries see nothing
        first = 1 + np.arange(B) % max(S - 1, 1)
        return (np.arange(S) >= first[:, None, None, None]).reshape(B, 1, 1, S)
    axes = {"pairs": (1, 1, T, S), "heads": (1, H, 1, S), "queries": (B, 1, T, 1)}
    found = rng.random(axes.get(kind, shape)) < 0.6
    if found.shape[2] > 1:
        found[..., found.shape[2] // 2, :] = False  # a query that may look nowhere
    found.flat[-1] = True
    return found


def _scores(rng, shape, kind, scale):
    """Return scores which, times the scale, are as `kind` says: no two rows alike."""
    spread, offset = {"above": (4, 150), "below": (6, -160), "wide": (25, 0)}.get(kind, (2, 0))
    x = numbers(rng, shape, spread, offset)
    if kind == "rows" and x.size:  # what is right for one row is nothing, or infinite, for another
        n_rows = int(np.prod(shape[:3]))
        x += (90 * rng.permutation(n_rows) % 1000 - 300.0).reshape(*shape[:3], 1)
    return (x / scale).astype(np.float32)


#: ((B, H, T, S), mask, scores, causal, grid, block)
_ROWS = (
    ((1, 1, 1, 1), "all", "plain", False, 1, 32),
    ((1, 1, 1, 2), "all", "above", False, 1, 64),
    ((1, 1, 2, 0), "all", "plain", False, 1, 64),
    ((1, 1, 2, 2), "all", "plain", True, 1, 64),
    ((1, 1, 3, 2), "pairs", "below", False, 1, 96),
    ((2, 2, 1, 3), "heads", "plain", False, 2, 64),
    ((3, 1, 1, 2), "lengths", "plain", False, 1, 96),
    ((2, 1, 3, 3), "left", "above", True, 2, 96),
    ((2, 2, 2, 3), "every", "rows", False, 1, 288),
    ((2, 3, 2, 2), "queries", "wide", True, 3, 128),
    ((2, 2, 2, 3), "pairs", "rows", False, 2, 128),
    ((1, 1, 4, 33), "every", "peaks", False, 1, 128),
    ((1, 2, 1, 40), "heads", "wide", False, 2, 32),
    ((1, 1, 5, 7), "all", "rows", True, 1, 160),
    ((1, 2, 2, 65), "every", "below", False, 2, 64),
)


def _softmax_inputs(rng, shape, rule, kind, causal):
    scale = np.float32(rng.choice([0.05, 0.125, 0.3, 2.5]) * (1 + rng.random() / 4))
    mask = _mask(rng, shape, rule)
    scores = _scores(rng, shape, kind, scale)
    if kind == "peaks":  # what nobody may look at is far above all others
        hidden = ~np.broadcast_to(mask, shape)
        scores[hidden] += np.float32(300 / scale) * (1 + rng.random(hidden.sum(), np.float32))
    return {"scores": scores, "mask": mask, "scale": scale, "causal": np.bool_(causal)}


def _rows(rng):
    """Return the launches above, and others whose sizes are drawn; the last is the largest."""
    many = (1, 2, drawn(rng, 9, 11), 3), "left", "plain", True, 3, 256
    examples = (drawn(rng, 5, 7), 2, 1, 2), "lengths", "rows", False, 2, 224
    long = (1, 1, 1, drawn(rng, 1030, 1060)), "all", "plain", False, 1, 32
    triangle = (1, 1, drawn(rng, 12, 14), drawn(rng, 15, 17)), "all", "plain", True, 2, 224
    large = (2, 2, drawn(rng, 5, 6), drawn(rng, 77, 90)), "every", "rows", False, 3, 256
    return [*_ROWS, many, examples, long, triangle, large]


def _softmax_cases(rng):
    return [case(grid, block, **_softmax_inputs(rng, *each)) for *each, grid, block in _rows(rng)]


def _seen(mask, causal, shape):
    T, S = shape[2:]
    return np.broadcast_to(mask, shape) & (np.tri(T, S, dtype=bool) if causal else True)


def _softmax_reference(scores, mask, scale, causal):
    x = np.where(_seen(mask, causal, scores.shape), scale * scores, -np.inf)
    m = x.max(axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isneginf(m), 0.0, m)
    terms = np.exp(x - m)
    s = terms.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return terms / np.where(s == 0, 1.0, s), (m + np.log(s))[..., 0]


SCALED_SOFTMAX = Exercise(
    name="scaled_softmax",
    title="Scale, mask and softmax in one kernel",
    solution=scaled_softmax,
    reference=_softmax_reference,
    cases=_softmax_cases,
    tolerance=Tolerance(
        1e-4, 3e-6, "scale · score is rounded, by 1e-5 where it is 150; exp makes a factor of it"
    ),
    outputs=("y", "lse"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.scores, run.mask, run.scale, run.causal, run.y, run.lse
    ),
    once=True,
    about=(Spares("scores"), Shares(evenly=True)),
    hints=(
        "A score that may not be looked at takes no part: neither in the maximum nor in the sum. "
        "Which lanes have nothing to add in a row of which nothing may be seen?",
        "First loop: `online_add` of `scale * score`, for the keys that this query may look at. "
        "Then `warp_online`. Second loop: `exp(scale · score − m) / s` for the same keys, 0 for "
        "the others, so that no row divides by an empty sum. lse is m + log s, and −inf where s is "
        "0. An axis of the mask with length 1 has one entry for all: `b % mask.shape[0]` finds it.",
        "```python\nfor j in range(lane, S, 32):\n"
        "    if mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal):\n"
        "        m, s = online_add(m, s, ...)\nm, s = warp_online(m, s)\n"
        "for j in range(lane, S, 32):\n    value = ZERO\n    if ...:\n"
        "        value = ...\n    y[b, h, i, j] = value\n```",
    ),
)


# ---- attention_output ------------------------------------------------------------------------


@cuda.jit
def attention_output(weights, v, o):
    sw = cuda.shared.array((TILE, TILE), np.float32)
    sv = cuda.shared.array((TILE, TILE), np.float32)
    (H, S, D), T = v.shape[1:], o.shape[2]
    b, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    tx, ty, total = cuda.threadIdx.x, cuda.threadIdx.y, ZERO
    i, d = TILE * cuda.blockIdx.y + ty, TILE * cuda.blockIdx.x + tx
    for first in range(0, S, TILE):
        sw[ty, tx] = weights[b, h, i, first + tx] if i < T and first + tx < S else ZERO
        sv[ty, tx] = v[b, h, first + ty, d] if first + ty < S and d < D else ZERO
        cuda.syncthreads()
        for n in range(TILE):
            total += sw[ty, n] * sv[n, tx]
        cuda.syncthreads()
    if i < T and d < D:
        o[b, h, i, d] = total


def _output_cases(rng):
    found = []
    for B, H, T, D, S in _products(rng):  # what was the inner length is S here
        weights = numbers(rng, (B, H, T, S), 0.6, 0.8)
        v = numbers(rng, (B, H, S, D), 1.5, 1.0)
        grid = _blocks(D, TILE), _blocks(T, TILE), B * H
        found.append(case(grid, (TILE, TILE), weights=weights, v=v))
    return found


ATTENTION_OUTPUT = Exercise(
    name="attention_output",
    title="The mean of the values",
    solution=attention_output,
    reference=lambda weights, v: np.einsum("bhts,bhsd->bhtd", weights, v),
    cases=_output_cases,
    tolerance=_SUMS,
    outputs=("o",),
    dtype=np.float32,
    once=True,
    about=(Uses("shared memory", point=False),),
    repeatable=True,
    hints=(
        "Compare the two sums. In q·kᵀ two *rows* were multiplied, number by number. What is it "
        "here that the keys, over which is summed, count in the weights, and what in v?",
        "The tile of the weights is fetched as q was, with keys along x. The tile of v is fetched "
        "as it lies: key `first + ty`, number `d`. Then `sw[ty, n]` meets `sv[n, tx]`. What is "
        "past the last key must be 0 in both, since NaN · 0 is NaN.",
        "```python\nsv[ty, tx] = v[b, h, first + ty, d] if ... else ZERO\ncuda.syncthreads()\n"
        "for n in range(TILE):\n    total += sw[ty, n] * sv[...]\ncuda.syncthreads()\n```",
    ),
)


# ---- attention -------------------------------------------------------------------------------


def grid(n_cols, n_rows, n_heads):
    """Blocks of 8 × 8 threads for so many matrices."""
    return -(-n_cols // TILE), -(-n_rows // TILE), n_heads


def attention(q, k, v, mask, causal):
    (B, H, T, D), S = q.shape, k.shape[2]
    scores, weights = np.empty((2, B, H, T, S), np.float32)
    lse, o = np.empty((B, H, T), np.float32), np.empty((B, H, T, D), np.float32)
    scale = np.float32(1 / math.sqrt(D))
    attention_scores[grid(S, T, B * H), (TILE, TILE)](q, k, scores)
    n_blocks = -(-B * H * T * 32 // BLOCK)
    scaled_softmax[n_blocks, BLOCK](scores, mask, scale, causal, weights, lse)
    attention_output[grid(D, T, B * H), (TILE, TILE)](weights, v, o)
    return o, lse


#: ((B, H, T, S, D), mask, causal): of the axes that make the grids, each is the longest once.
_HEADS = (
    ((1, 1, 1, 1, 1), "all", False),
    ((1, 1, 2, 1, 2), "all", True),
    ((1, 1, 2, 3, 2), "all", False),
    ((2, 1, 1, 2, 3), "lengths", False),
    ((1, 2, 3, 2, 2), "left", True),
    ((2, 3, 2, 2, 1), "every", False),
    ((1, 1, 2, 9, 3), "pairs", False),
    ((1, 1, 3, 4, 17), "all", True),
    ((1, 3, 11, 2, 1), "all", False),  # one row more than eight blocks have warps
)


def _attention_cases(rng):
    large = (1, 2, drawn(rng, 5, 7), drawn(rng, 17, 20), drawn(rng, 9, 12)), "every", True
    wide = (1, 1, 2, 3, drawn(rng, 33, 40)), "all", False
    long = (1, 1, 1, drawn(rng, 40, 50), 2), "all", False
    found = []
    for (B, H, T, S, D), rule, causal in (*_HEADS, wide, long, large):
        q, k = numbers(rng, (B, H, T, D), 1.2, 0.4), numbers(rng, (B, H, S, D), 1.0, 0.3)
        v, mask = numbers(rng, (B, H, S, D), 1.5, 1.0), _mask(rng, (B, H, T, S), rule)
        found.append(case(1, 1, q=q, k=k, v=v, mask=mask, causal=np.bool_(causal)))
    return found


ATTENTION = Exercise(
    name="attention",
    title="Three kernels, one launcher",
    solution=attention,
    kind="launcher",
    reference=lambda q, k, v, mask, causal: reference.attention(
        q, k, v, mask=mask, causal=bool(causal)
    ),
    cases=_attention_cases,
    tolerance=Tolerance(
        2e-4, 2e-5, "exp makes a factor of what a rounded score is off, then sums are rounded"
    ),
    outputs=("o", "lse"),
    dtype=np.float32,
    call=lambda function, run: with_plain_numbers(function, run, "q", "k", "v", "mask", "causal"),
    about=(Launches(),),
    repeatable=True,
    hints=(
        "Each kernel fills one array (the second one two). How large is each, and how many blocks "
        "does that take? Work from what is *written*, not from what is read.",
        "Grids: S columns and T rows of B · H matrices for the scores, a warp for each of "
        "B · H · T rows, D columns and T rows for o. `grid` counts the tiles. The scale is 1 / √D, "
        "as a float32, with D the length of a query.",
        "```python\nscale = np.float32(1 / math.sqrt(D))\n"
        "attention_scores[grid(S, T, B * H), (TILE, TILE)](q, k, scores)\n"
        "scaled_softmax[..., BLOCK](scores, mask, scale, causal, weights, lse)\n"
        "attention_output[grid(..., ..., B * H), (TILE, TILE)](weights, ...)\nreturn o, lse\n```",
    ),
)


# ---- scaled_softmax_backward -----------------------------------------------------------------


@cuda.jit
def scaled_softmax_backward(dy, y, scale, dscores):
    B, H, T, S = y.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < B * H * T:
        b, h, i = row // (H * T), row // T % H, row % T
        total = ZERO
        for j in range(lane, S, 32):
            total += y[b, h, i, j] * dy[b, h, i, j]
        total = warp_sum(total)
        for j in range(lane, S, 32):
            dscores[b, h, i, j] = scale * y[b, h, i, j] * (dy[b, h, i, j] - total)


def _backward_cases(rng):
    found = []
    for *each, grid, block in _rows(rng):
        scores, mask, scale, causal = _softmax_inputs(rng, *each).values()
        y, _ = _softmax_reference(scores.astype(np.float64), mask, np.float64(scale), causal)
        hidden = ~_seen(mask, causal, y.shape)
        scores[hidden] = -np.inf  # for the forward function: the kernel does not get them
        dy, y = numbers(rng, y.shape, 2.0, 3.0), y.astype(np.float32)
        found.append(case(grid, block, dy=dy, y=y, scores=scores, scale=scale))
    return found


def _dscores(dy, y, scores, scale):
    return scale * y * (dy - (y * dy).sum(axis=-1, keepdims=True))


SCALED_SOFTMAX_BACKWARD = Exercise(
    name="scaled_softmax_backward",
    title="Its gradient, without a mask",
    solution=scaled_softmax_backward,
    reference=_dscores,
    cases=_backward_cases,
    tolerance=Tolerance(
        2e-5, 2e-5, "float32 rounds a sum of products, then a difference; the scale is up to 3"
    ),
    outputs=("dscores",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(kernel, run.dy, run.y, run.scale, run.dscores),
    once=True,
    primal=lambda y, scores, scale: _softmax_reference(scores, True, scale, False)[0],
    about=(Spares("y"), Spares("dy"), Shares(evenly=True)),
    hints=(
        "`y = softmax(scale · scores)` is two functions, one in the other. Go back through the "
        "outer one first; you have done that in lesson 4.",
        "Softmax gives y · (dy − Σ y · dy), the gradient of `scale · scores`. A factor on the way "
        "there is a factor on the way back. Where nothing may be seen y is 0, and so is the "
        "gradient, of itself.",
        "```python\nfor j in range(lane, S, 32):\n    total += y[b, h, i, j] * ...\n"
        "total = warp_sum(total)\nfor j in range(lane, S, 32):\n"
        "    dscores[b, h, i, j] = scale * ... * (dy[b, h, i, j] - ...)\n```",
    ),
)
