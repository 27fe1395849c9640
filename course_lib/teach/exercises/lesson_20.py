"""Lesson 20: FlashAttention, backwards: weights are computed again, not remembered.

| exercise | it gets | what is new |
|---|---|---|
| attention_delta | do, o, delta; a warp per row | what a row needs of all its keys, one number |
| flash_attention_dkdv | do, q, k, v, lse, delta, scale, dk, dv | weights made again from lse |
| flash_attention_dq | do, q, k, v, lse, delta, scale, dq | the other walk, without atomics |
| predict_backward | five numbers | bytes and FLOPs: kept or again, two walks or one |

Arrays are float32: q, do and dq of (N, T, D), k, v, dk and dv of (N, S, D), lse and delta of
(N, T), where N is all heads of all sequences. Both tiled kernels are causal, with the mask aligned
lower right, and have 64 threads. Dao et al., FlashAttention (2022, arXiv 2205.14135), algorithm 4;
Dao, FlashAttention-2 (2023, arXiv 2307.08691), algorithm 2.
"""

import dataclasses
import math

import numpy as np

from course_lib import cuda, reference
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import pair_of
from course_lib.teach.checking.work import Bounds, Spares, Uses
from course_lib.teach.exercise import Exercise, Tolerance, case
from course_lib.teach.exercises.lesson_19 import PADDED, SLOTS, TILE, fetch_tile

ALL = 0xFFFFFFFF
ZERO = np.float32(0)

# ---- attention_delta -------------------------------------------------------------------------


@cuda.jit
def attention_delta(do, o, delta):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < o.shape[0]:
        total = ZERO
        for d in range(lane, o.shape[1], 32):
            total += do[row, d] * o[row, d]
        for step in range(5):
            total += cuda.shfl_xor_sync(ALL, total, 1 << step)
        if lane == 0:
            delta[row] = total


def _delta_cases(rng):
    launches = [
        (1, 1, 1, 32),
        (0, 3, 1, 64),
        (2, 3, 1, 64),
        (3, 31, 3, 32),
        (5, 2, 2, 128),
        (4, 32, 1, 192),
        (2, 33, 1, 96),
        (1, 64, 2, 32),
        (7, 5, 4, 64),
        (drawn(rng, 9, 12), drawn(rng, 65, 90), 2, 256),
        (drawn(rng, 13, 16), drawn(rng, 110, 127), 2, 512),
    ]
    return [
        case(
            grid,
            block,
            do=numbers(rng, (rows, D), 1.0, 0.8),
            o=numbers(rng, (rows, D), 2.0, 1.5),
        )
        for rows, D, grid, block in launches
    ]


ATTENTION_DELTA = Exercise(
    name="attention_delta",
    title="One number for each row: delta",
    solution=attention_delta,
    forms=(("for step in range(5):", "for step in (16, 8, 4, 2, 1):", "1 << step", "step"),),
    reference=lambda do, o: (do * o).sum(1),
    cases=_delta_cases,
    tolerance=Tolerance(1e-5, 1e-4, "up to 127 products of some tens are added in float32"),
    outputs=("delta",),
    dtype=np.float32,
    once=True,
    about=(Uses("shuffles", point=False),),
    forbids=("float64-promotion",),
    hints=(
        "A warp has a row. Which numbers of the row does lane 5 take, and who has the whole sum?",
        "Lane 5 takes 5, 37, 69, …: `range(lane, D, 32)`. Each lane adds up its products; then a "
        "butterfly of five rounds gives all lanes the sum, and one of them writes it.",
        "```python\nfor d in range(lane, o.shape[1], ...):\n    total += do[row, d] * ...\n"
        "for step in range(...):\n    total += cuda.shfl_xor_sync(ALL, total, 1 << ...)\n```",
    ),
)


# ---- cases of the backward pass --------------------------------------------------------------


_BACKWARD = Tolerance(
    1e-4, 5e-4, "scores and lse of some 120 are rounded to float32, then exp is taken of them"
)


def _backward(rng, N, T, S, D, kind, size):
    """Return do, q, k, v, lse, delta and scale, such that a wrong exponent shows.

    By `kind`, scores lie around 100 ("above": exp overflows), around -120 ("below": exp of -lse
    does), rise from key to key ("rising": those that a query must not see are far above), or
    differ from query to query by a hundred ("rows": with another one's lse exp is 0 or infinite).
    They are so large by one column, of some `size` in q. The rounding of scores goes into dk
    times that column of q, into dq times that of k: of the two it should be the small one.
    """
    scale = np.float32(rng.uniform(0.5, 0.9) / math.sqrt(D))
    q, k = numbers(rng, (N, T, D), 0.7, 0.5), numbers(rng, (N, S, D), 0.7, 0.3)
    v, do = numbers(rng, (N, S, D), 0.6, 0.7), numbers(rng, (N, T, D), 0.5, 0.6)
    queries, keys = (1 + 0.004 * rng.random((N, n)) for n in (T, S))  # no two numbers are equal
    if kind == "rows":
        q[..., 0] = queries * size * (rng.permutation(T) / max(T - 1, 1) - 0.5)
        k[..., 0] = keys * 150 / size / scale
    elif kind != "plain":
        key = np.arange(S)
        at = {"above": 100.0 + 0 * key, "below": -120.0 + 0 * key, "rising": 4.0 * key}[kind]
        q[..., 0], k[..., 0] = size * queries, keys * at / size / scale
    options = {"scale": float(scale), "causal": True, "lower_right": True}
    o, lse = (
        each[:, 0] for each in reference.attention(q[:, None], k[:, None], v[:, None], **options)
    )
    delta = (do * o).sum(-1).astype(np.float32)
    kept = {"lse": lse.astype(np.float32), "delta": delta, "scale": scale}
    return {"do": do, "q": q, "k": k, "v": v, **kept}


def _gradients(do, q, k, v, lse, delta, scale):
    four = (each[:, None] for each in (do, q, k, v))
    options = {"scale": float(scale), "causal": True, "lower_right": True}
    return tuple(each[:, 0] for each in reference.attention_backward(*four, **options)[:3])


def _tiled(rng, sizes, of_keys):
    """Return launches with a block for each tile of 8 keys, or of 8 queries, of each head."""
    return [
        case(
            (max(1, -(-(S if of_keys else T) // TILE)), max(1, N)),
            TILE * TILE,
            **_backward(rng, N, T, S, D, kind, size=4 if of_keys else 32),
        )
        for (N, T, S, D), kind in sizes
    ]


def _long(cases, n_queries, n_keys):
    """Return a launch of one block, on rows of two numbers, with so many queries and keys."""
    large = max(cases, key=lambda case: case.size[1:])
    rows = {"do": n_queries, "q": n_queries, "k": n_keys, "v": n_keys}
    few = {x: np.resize(large.inputs[x][0, :, :2], (1, n, 2)) for x, n in rows.items()}
    few |= {x: np.full((1, n_queries), 50, np.float32) for x in ("lse", "delta")}
    return dataclasses.replace(large, grid=1, inputs=large.inputs | few)


# ---- flash_attention_dkdv --------------------------------------------------------------------


@cuda.jit(device=True)
def dot(a, i, b, j, D):
    """The dot product of row i of the tile a and row j of the tile b."""
    total = ZERO
    for d in range(D):
        total += a[i, d] * b[j, d]
    return total


@cuda.jit
def flash_attention_dkdv(do, q, k, v, lse, delta, scale, dk, dv):
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    dos = cuda.shared.array((TILE, PADDED), np.float32)
    weights = cuda.shared.array((TILE, TILE), np.float32)
    dscores = cuda.shared.array((TILE, TILE), np.float32)
    dkeys = cuda.local.array(SLOTS, np.float32)
    dvalues = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, top = q.shape, k.shape[1], TILE * cuda.blockIdx.x
    j = top + row
    fetch_tile(ks, k, n, top)
    fetch_tile(vs, v, n, top)
    for d in range(col, D, TILE):
        dkeys[d // TILE] = dvalues[d // TILE] = ZERO
    for first in range(max(0, top + T - S) // TILE * TILE, T, TILE):
        fetch_tile(qs, q, n, first)
        fetch_tile(dos, do, n, first)
        cuda.syncthreads()
        i, weight, dscore = first + col, ZERO, ZERO
        if i < T and j <= i + S - T:
            weight = math.exp(scale * dot(qs, col, ks, row, D) - lse[n, i])
            dscore = weight * (dot(dos, col, vs, row, D) - delta[n, i])
        weights[row, col], dscores[row, col] = weight, dscore
        cuda.syncthreads()
        for d in range(col, D, TILE):
            for other in range(TILE):
                dvalues[d // TILE] += weights[row, other] * dos[other, d]
                dkeys[d // TILE] += dscores[row, other] * qs[other, d]
        cuda.syncthreads()
    if j < S:
        for d in range(col, D, TILE):
            dk[n, j, d], dv[n, j, d] = dkeys[d // TILE] * scale, dvalues[d // TILE]


def _dkdv_cases(rng):
    T = drawn(rng, 28, 31)  # four tiles: one too many for each shows in the readings
    sizes = [
        ((1, 1, 1, 1), "above"),
        ((1, 0, 2, 3), "plain"),
        ((1, 2, 0, 3), "plain"),
        ((1, 3, 3, 2), "below"),
        ((2, 2, 3, 1), "plain"),
        ((1, 4, 2, 2), "plain"),
        ((1, 9, 9, 9), "rising"),
        ((1, 17, 8, 2), "rows"),
        ((1, 3, 11, 4), "above"),
        ((2, 11, 3, 5), "below"),
        ((1, 8, 16, 2), "rising"),
        ((1, 1, 2, 64), "plain"),
        ((1, 3, 1, drawn(rng, 41, 47)), "plain"),
        ((1, drawn(rng, 34, 39), 4, 2), "below"),
        ((1, 5, drawn(rng, 34, 39), 1), "plain"),
        ((1, T, T, drawn(rng, 4, 5)), "plain"),
    ]
    return _tiled(rng, sizes, of_keys=True)


def _launch_dkdv(kernel, run):
    run.launch(kernel, run.do, run.q, run.k, run.v, run.lse, run.delta, run.scale, run.dk, run.dv)


FLASH_ATTENTION_DKDV = Exercise(
    name="flash_attention_dkdv",
    title="dk and dv: a tile of keys, and all queries pass by",
    solution=flash_attention_dkdv,
    reference=lambda *inputs: _gradients(*inputs)[1:],
    cases=_dkdv_cases,
    tolerance=_BACKWARD,
    outputs=("dk", "dv"),
    dtype=np.float32,
    call=_launch_dkdv,
    once=True,
    about=(
        Spares("q", point=True),
        Spares("do", point=True),
        Bounds("queries", 40, 80, lambda cases, number: _long(cases, number, number)),
        Uses("shared memory", point=False),
    ),
    forbids=("float64-promotion",),
    hints=(
        "Thread (row, col) stands for key `top + row` and query `first + col`. Which of the five "
        "formulas does it need for its weight and its dscore? And which is the first query that "
        "sees any key of this tile?",
        "Query `i` sees key `j` if `j <= i + S - T`, so key `top` is first seen by query "
        "`top + T - S`, or by query 0 if that is negative; rounded down to a tile. The weight is "
        "`exp(scale · q · k - lse)` with the lse of *its query*, computed only if the query exists "
        "and sees the key: elsewhere lse may be −∞, or no memory of yours. dv gets the weights, dk "
        "gets the dscores, and the scale once.",
        "```python\nfor first in range(max(0, top + ...) // TILE * TILE, T, TILE):\n    ...\n"
        "    if i < T and j <= ...:\n"
        "        weight = math.exp(scale * dot(qs, col, ks, ..., D) - ...)\n"
        "        dscore = weight * (dot(dos, col, ..., ..., D) - ...)\n    ...\n"
        "    dvalues[d // TILE] += weights[row, other] * ...\n"
        "    dkeys[d // TILE] += dscores[row, other] * ...\n```",
    ),
)


# ---- flash_attention_dq ----------------------------------------------------------------------


@cuda.jit
def flash_attention_dq(do, q, k, v, lse, delta, scale, dq):
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    dos = cuda.shared.array((TILE, PADDED), np.float32)
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    dscores = cuda.shared.array((TILE, TILE), np.float32)
    dqueries = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, top = q.shape, k.shape[1], TILE * cuda.blockIdx.x
    i = top + row
    fetch_tile(qs, q, n, top)
    fetch_tile(dos, do, n, top)
    for d in range(col, D, TILE):
        dqueries[d // TILE] = ZERO
    for first in range(0, min(S, top + TILE + S - T), TILE):
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        j, dscore = first + col, ZERO
        if i < T and j <= i + S - T:
            weight = math.exp(scale * dot(qs, row, ks, col, D) - lse[n, i])
            dscore = weight * (dot(dos, row, vs, col, D) - delta[n, i])
        dscores[row, col] = dscore
        cuda.syncthreads()
        for d in range(col, D, TILE):
            for other in range(TILE):
                dqueries[d // TILE] += dscores[row, other] * ks[other, d]
        cuda.syncthreads()
    if i < T:
        for d in range(col, D, TILE):
            dq[n, i, d] = dqueries[d // TILE] * scale


def _dq_cases(rng):
    T = drawn(rng, 28, 32)  # four tiles: one too many for each shows in the readings
    sizes = [
        ((1, 1, 1, 1), "above"),
        ((1, 0, 2, 3), "plain"),
        ((1, 2, 0, 3), "plain"),
        ((1, 3, 3, 2), "below"),
        ((2, 2, 3, 1), "plain"),
        ((1, 4, 2, 2), "plain"),
        ((1, 9, 9, 3), "rising"),
        ((1, 17, 8, 2), "rows"),
        ((1, 3, 11, 4), "above"),
        ((2, 11, 3, 9), "below"),
        ((1, 8, 16, 2), "rising"),
        ((1, 1, 2, 64), "plain"),
        ((1, 1, 3, drawn(rng, 41, 60)), "plain"),
        ((1, 4, drawn(rng, 34, 39), 2), "below"),
        ((1, drawn(rng, 34, 39), 5, 1), "plain"),
        ((1, T, T, drawn(rng, 9, 12)), "plain"),
    ]
    return _tiled(rng, sizes, of_keys=False)


def _launch_dq(kernel, run):
    run.launch(kernel, run.do, run.q, run.k, run.v, run.lse, run.delta, run.scale, run.dq)


FLASH_ATTENTION_DQ = Exercise(
    name="flash_attention_dq",
    title="dq: a tile of queries, and all keys pass by",
    solution=flash_attention_dq,
    reference=lambda *inputs: _gradients(*inputs)[0],
    cases=_dq_cases,
    tolerance=_BACKWARD,
    outputs=("dq",),
    dtype=np.float32,
    call=_launch_dq,
    once=True,
    about=(
        Spares("k", point=True),
        Spares("v", point=True),
        Bounds("keys", 72, 144, lambda cases, number: _long(cases, 1, number)),
        Uses("shared memory", point=False),
    ),
    forbids=("float64-promotion",),
    hints=(
        "It is the walk of the forward kernel: the queries stay, the keys pass by. Rows and "
        "columns have changed roles since dk and dv.",
        "Thread (row, col) stands for query `top + row` and key `first + col`. The loop ends where "
        "that of `flash_attention_causal` does. Weight and dscore as before, and only under the "
        "same condition. Then row `row` of the dscores is multiplied with the tile of *keys*, "
        "and the scale comes in once.",
        "```python\nfor first in range(0, min(S, top + TILE + ...), TILE):\n    ...\n"
        "    if i < T and j <= ...:\n"
        "        weight = math.exp(scale * dot(qs, row, ks, ..., D) - ...)\n"
        "        dscore = weight * (dot(dos, row, ..., ..., D) - ...)\n    ...\n"
        "    dqueries[d // TILE] += dscores[row, other] * ...\n```",
    ),
)


# ---- predict_backward ------------------------------------------------------------------------


def predict_backward(B, H, T, D, ROWS):
    heads, product = B * H, 2 * T * T * D  # FLOPs of one product of one head
    kept = heads * 2 * 4 * T * T
    two_walks = heads * 7 * product
    one_walk = heads * 5 * product
    atomics = heads * -(-T // ROWS) * T * D
    return kept, two_walks, one_walk, atomics


def _predict_reference(B, H, T, D, ROWS):
    kept = sum(B * H * T * T * 4 for _ in ("written", "read"))
    dkdv, dq = ("score", "dweight", "dv", "dk"), ("score", "dweight", "dq")
    flops = B * H * T * T * (D + D)  # a multiplication and an addition
    blocks = B * H * math.ceil(T / ROWS)
    return kept, len(dkdv + dq) * flops, len({*dkdv, *dq}) * flops, blocks * T * D


def _drawn(rng, *ranges):
    return tuple(drawn(rng, *each) for each in ranges)


def _predict_cases(rng):
    sizes = [
        (1, 1, 1, 1, 1),
        (1, 1, 5, 2, 8),
        (2, 1, 8, 3, 8),
        (1, 3, 17, 4, 8),
        (2, 4, 64, 16, 16),
        (1, 32, 4096, 128, 64),
        (3, 2, 100, 7, 33),
        *(_drawn(rng, (2, 9), (2, 40), (100, 999), (3, 300), (3, 90)) for _ in range(3)),
        _drawn(rng, (10, 19), (50, 99), (65_537, 70_000), (257, 300), (130, 200)),
    ]
    names = "B", "H", "T", "D", "ROWS"
    return [case(1, 1, **dict(zip(names, map(np.int64, each), strict=True))) for each in sizes]


PREDICT_BACKWARD = Exercise(
    name="predict_backward",
    title="Kept or computed again, two walks or one",
    solution=predict_backward,
    kind="function",
    reference=_predict_reference,
    cases=_predict_cases,
    tolerance=Tolerance(1e-12, 0.0, "products of whole numbers"),
    outputs=("kept", "two_walks", "one_walk", "atomics"),
    dtype=np.float64,
    call=pair_of,
    hints=(
        "Count the inner loops of your two kernels that run over T · T · D: each is one product. "
        "Which of them stand in both kernels?",
        "dk and dv: score, dweight, dv, dk. dq: score, dweight, dq. In one walk, score and dweight "
        "are computed once. Then each block of ROWS keys adds its part to dq of *all* queries: T · "
        "D additions for each block.",
        "```python\nkept = heads * 2 * 4 * ...\ntwo_walks = heads * ... * product\n"
        "one_walk = heads * ... * product\natomics = heads * -(-T // ...) * ...\n```",
    ),
)
