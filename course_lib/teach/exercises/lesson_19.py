"""Lesson 19: FlashAttention, attention whose matrix of scores is never written down.

| exercise | it gets | what is new |
|---|---|---|
| predict_flash | five numbers | bytes with a matrix of scores, and without |
| attention_streaming | q, k, v, scale, o, lse; a warp per query | m, sum and output, rescaled |
| flash_attention | the same; 64 threads per tile of 8 queries | tiles of keys and values |
| flash_attention_causal | the same | tiles that are skipped, rows that see nothing |
| merge_attention | o1, lse1, o2, lse2, o, lse; enough threads | results of parts of the keys |

Arrays are float32: q and o of (N, T, D), k and v of (N, S, D), lse of (N, T), where N is all
heads of all sequences. Dao et al., FlashAttention (2022, arXiv 2205.14135); how maximum and sum are
merged is of lesson 3.
"""

import dataclasses
import math

import numpy as np

from course_lib import cuda, reference
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import pair_of
from course_lib.teach.checking.work import Bounds, Spares, Uses
from course_lib.teach.exercise import Exercise, Tolerance, case

ALL = 0xFFFFFFFF
ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INF = np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min  # as low as a float32 goes that is no infinity
TILE = 8  # queries of a block, and keys of a tile: a block has 64 threads
MOST = 64  # numbers of a row of q, k and v, in the tiled kernels
PADDED = 65  # MOST and one that is not used
SLOTS = 8  # numbers of a row of o that each of 8 threads keeps
LANE_SLOTS = 4  # the same, where 32 lanes share a row of up to 128


# ---- predict_flash ---------------------------------------------------------------------------


def predict_flash(B, H, T, D, ROWS):
    heads, array, matrix = B * H, 4 * T * D, 4 * T * T  # bytes of q, k, v or o, of the scores
    three_kernels = heads * (4 * array + 4 * matrix)
    tiled = heads * (2 * array + 2 * array * -(-T // ROWS))
    flops = heads * 4 * T * T * D
    return three_kernels, tiled, flops / tiled


def _predict_reference(B, H, T, D, ROWS):
    n_tiles = math.ceil(T / ROWS)
    queries_and_results = 2 * B * H * T * D * 4
    matrices = [B * H * T * T * 4 for _ in ("written", "read", "written", "read")]
    tiled = queries_and_results + n_tiles * 2 * B * H * T * D * 4
    products = 2 * B * H * T * T * D  # for the scores, and for the output
    return queries_and_results * 2 + sum(matrices), tiled, 2 * products / tiled


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


PREDICT_FLASH = Exercise(
    name="predict_flash",
    title="Bytes with a matrix of scores, and without",
    solution=predict_flash,
    kind="function",
    reference=_predict_reference,
    cases=_predict_cases,
    tolerance=Tolerance(1e-12, 0.0, "products of whole numbers"),
    outputs=("three_kernels", "tiled", "flops_per_byte"),
    dtype=np.float64,
    call=pair_of,
    hints=(
        "Go through the three kernels one by one. What does each read, and what does it write? The "
        "matrix of scores has T · T numbers for each head, q, k, v and o have T · D.",
        "The matrix is written by the first kernel, read and written by the second, read by the "
        "third. With tiles there is no matrix: a block reads its queries, writes its results, and "
        "reads *all* keys and values. How many blocks are there for a head, if the last one may "
        "have fewer queries?",
        "```python\nthree_kernels = heads * (4 * array + ... * matrix)\n"
        "tiled = heads * (2 * array + 2 * array * -(-T // ...))\n"
        "flops = heads * ... * T * T * D\n```",
    ),
)


# ---- cases of attention ----------------------------------------------------------------------


#: Scores up to a few hundred are rounded by 1e-5, which exp makes a factor, and values are some 10.
_ATTENTION = Tolerance(
    1e-5, 2e-4, "scores of some hundreds and their sums are rounded to float32, then exp is taken"
)


def _offsets(rng, kind, N, S):
    """Return what is added to the scores of each key, of shape (N, S) or what broadcasts to it."""
    key = np.arange(S)
    if kind == "spike":  # one key is far above all others: the first, the last, one between
        return 200.0 * (key == rng.choice([0, S // 2, S - 1]))
    return {
        "above": 100.0,
        "below": -120.0,
        "rising": 0.5 * key,  # nearly every key brings a new maximum, and the old ones still count
        "falling": -0.5 * key,  # the first key is the largest
        "lowest": -2e38 - 1e38 * rng.random((N, S)),  # of each row only the largest is left
        "ends": rng.choice([-3e38, 3e38], (N, S)) * rng.random((N, S)),  # infinitely far apart
    }[kind]


def _attention(rng, N, T, S, D, kind):
    """Return q, k, v and scale, such that mistakes with the maximum show."""
    scale = np.float32(rng.uniform(0.5, 0.9) / math.sqrt(D))
    q, k = numbers(rng, (N, T, D), 1.0, 0.8), numbers(rng, (N, S, D), 1.0, 0.3)
    v = numbers(rng, (N, S, D), 2.0, 1.5)
    nearly = 1 + 0.01 * rng.random((N, max(T, S)))  # no two numbers are equal
    if kind in ("flat", "lowest", "ends"):
        q *= np.float32(1e-6 if kind == "flat" else 1e-30)
    if kind == "rows":  # no two queries are alike: with another one's maximum, exp is 0 or infinite
        q[..., 0] = nearly[:, :T] * 30 * (rng.permutation(T) / max(T - 1, 1) - 0.5)
        k[..., 0] = nearly[:, :S] * 10 / scale
    elif kind not in ("plain", "flat"):
        q[..., 0] = nearly[:, :T]
        offsets = _offsets(rng, kind, N, S)
        k[..., 0] = offsets if kind in ("lowest", "ends") else k[..., 0] + offsets / scale
    return {"q": q, "k": k, "v": v, "scale": scale}


def _reference(causal, q, k, v, scale):
    options = {"scale": float(scale), "causal": causal, "lower_right": True}
    o, lse = reference.attention(q[:, None], k[:, None], v[:, None], **options)
    return o[:, 0], lse[:, 0]


def _many_keys(cases, n_keys):
    """Return a launch on one query, of two numbers, with so many keys: some over and over."""
    large = max(cases, key=lambda case: case.size[1:])
    n_rows = {"q": 1, "k": n_keys, "v": n_keys}
    few = {x: np.resize(large.inputs[x][0, :, :2], (1, n, 2)) for x, n in n_rows.items()}
    return dataclasses.replace(large, grid=1, inputs=large.inputs | few)


def _launch(kernel, run):
    run.launch(kernel, run.q, run.k, run.v, run.scale, run.o, run.lse)


#: What every kernel here is about: memory that does not grow with the keys, and keys read seldom.
_ABOUT = (
    Spares("k", point=True),
    Spares("v", point=True),
    Bounds("keys", 72, 144, _many_keys),
)


#: A key's part is added up in a register, and stored once.
_IN_A_REGISTER = (
    "acc[d // TILE] *= factor",
    "value = acc[d // TILE] * factor",
    "acc[d // TILE] += weights[row, j] * vs[j, d]",
    "value += weights[row, j] * vs[j, d]\n            acc[d // TILE] = value",
)

#: Causal: it is asked of each key whether it exists, too.
_GUARDED = (
    *("TILE * (cuda.blockIdx.x + 1)", "TILE * cuda.blockIdx.x + TILE"),
    *("first + col <= i", "first + col < S and first + col <= i"),
)


# ---- attention_streaming ---------------------------------------------------------------------


@cuda.jit
def attention_streaming(q, k, v, scale, o, lse):
    acc = cuda.local.array(LANE_SLOTS, np.float32)
    N, T, D = q.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < N * T:
        n, i = row // T, row % T
        m, total = MINUS_INF, ZERO
        for d in range(lane, D, 32):
            acc[d // 32] = ZERO
        for j in range(k.shape[1]):
            score = ZERO
            for d in range(lane, D, 32):
                score += q[n, i, d] * k[n, j, d]
            for step in range(5):
                score += cuda.shfl_xor_sync(ALL, score, 1 << step)
            new = max(m, score * scale)
            factor, weight = math.exp(m - new), math.exp(score * scale - new)
            m, total = new, total * factor + weight
            for d in range(lane, D, 32):
                acc[d // 32] = acc[d // 32] * factor + weight * v[n, j, d]
        for d in range(lane, D, 32):
            o[n, i, d] = acc[d // 32] / total if total > ZERO else ZERO
        if lane == 0:
            lse[n, i] = m + math.log(total)


def _streaming_cases(rng):
    launches = [
        ((1, 1, 1, 1), "above", 1, 32),
        ((1, 2, 0, 3), "plain", 1, 64),
        ((0, 1, 2, 3), "plain", 1, 32),
        ((1, 2, 3, 1), "below", 2, 32),
        ((2, 1, 3, 2), "plain", 1, 96),
        ((1, 3, 2, 4), "rows", 2, 64),
        ((1, 2, 5, 33), "falling", 1, 64),
        ((1, 1, 9, 40), "rising", 2, 32),
        ((1, 1, 2, 128), "plain", 1, 32),
        ((3, 2, 4, 3), "spike", 3, 64),
        ((1, 2, 4, 5), "lowest", 1, 64),
        ((2, 1, 5, 2), "ends", 1, 64),
        ((1, 2, 3, 6), "flat", 2, 32),
        ((1, 1, drawn(rng, 33, 40), 2), "rising", 1, 32),
        ((drawn(rng, 2, 3), drawn(rng, 9, 11), 1, 1), "rows", drawn(rng, 6, 7), 192),
        ((2, 3, drawn(rng, 5, 7), drawn(rng, 100, 127)), "plain", 1, 256),
    ]
    return [
        case(grid, block, **_attention(rng, *shape, kind)) for shape, kind, grid, block in launches
    ]


ATTENTION_STREAMING = Exercise(
    name="attention_streaming",
    title="Attention, a key at a time",
    solution=attention_streaming,
    forms=(
        (
            *("for step in range(5):", "for step in (16, 8, 4, 2, 1):"),
            *("1 << step)", "step)\n            score *= scale"),
            *("score * scale", "score"),
        ),
    ),
    reference=lambda *inputs: _reference(False, *inputs),
    cases=_streaming_cases,
    tolerance=_ATTENTION,
    outputs=("o", "lse"),
    dtype=np.float32,
    call=_launch,
    once=True,
    about=(*_ABOUT, Uses("shuffles", point=False)),
    forbids=("float64-promotion",),
    hints=(
        "A score is a product of two rows, and 32 lanes share them: each lane has its part, and a "
        "butterfly adds up. Then all lanes know the score, and each goes on with its own columns "
        "of v.",
        "With a new maximum, everything that was summed up with the old one is too large, by the "
        "factor `exp(m - new)`: the sum *and* the output. Then comes the new key, with the weight "
        "`exp(score - new)`. The first key needs no case of its own, since `exp(-inf)` is 0. "
        "Divide once, at the end; without any key there is nothing to divide by.",
        "```python\nnew = max(m, score * scale)\n"
        "factor, weight = math.exp(m - ...), math.exp(score * scale - ...)\n"
        "m, total = new, total * ... + ...\nfor d in range(lane, D, 32):\n"
        "    acc[d // 32] = acc[d // 32] * ... + ... * v[n, j, d]\n```",
    ),
)


# ---- flash_attention -------------------------------------------------------------------------


@cuda.jit(device=True)
def fetch_tile(tile, x, n, first):
    """Rows first … first + 7 of x[n] go to shared memory, by 64 threads; 0 past the last row."""
    row, col = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    for d in range(col, x.shape[2], TILE):
        tile[row, d] = x[n, first + row, d] if first + row < x.shape[1] else ZERO


@cuda.jit(device=True)
def row_max(value):
    """The largest `value` of the 8 threads that have a row of the tile, in each of them."""
    for step in range(3):
        value = max(value, cuda.shfl_xor_sync(ALL, value, 1 << step))
    return value


@cuda.jit(device=True)
def row_sum(value):
    """The sum of `value` over the 8 threads that have a row of the tile, in each of them."""
    for step in range(3):
        value += cuda.shfl_xor_sync(ALL, value, 1 << step)
    return value


@cuda.jit
def flash_attention(q, k, v, scale, o, lse):
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    weights = cuda.shared.array((TILE, TILE), np.float32)
    acc = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, i = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    m, total = LOWEST, ZERO
    for d in range(col, D, TILE):
        qs[row, d], acc[d // TILE] = q[n, i, d] if i < T else ZERO, ZERO
    for first in range(0, S, TILE):
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        score = ZERO
        for d in range(D):
            score += qs[row, d] * ks[col, d]
        score = score * scale if first + col < S else MINUS_INF
        new = max(m, row_max(score))
        factor, weight = math.exp(m - new), math.exp(score - new)
        m, total = new, total * factor + row_sum(weight)
        weights[row, col] = weight
        cuda.syncthreads()
        for d in range(col, D, TILE):
            acc[d // TILE] *= factor
            for j in range(TILE):
                acc[d // TILE] += weights[row, j] * vs[j, d]
        cuda.syncthreads()
    if i < T:
        for d in range(col, D, TILE):
            o[n, i, d] = acc[d // TILE] / total if total > ZERO else ZERO
        if col == 0:
            lse[n, i] = m + math.log(total)


def _tiled(rng, sizes):
    """Return launches with a block for each tile of 8 queries of each head."""
    return [
        case((max(1, -(-T // TILE)), max(1, N)), TILE * TILE, **_attention(rng, N, T, S, D, kind))
        for (N, T, S, D), kind in sizes
    ]


def _flash_cases(rng):
    sizes = [
        ((1, 1, 1, 1), "above"),
        ((1, 2, 0, 3), "plain"),
        ((1, 0, 2, 3), "plain"),
        ((1, 3, 2, 2), "below"),
        ((2, 2, 9, 1), "plain"),
        ((1, 17, 3, 1), "rows"),
        ((1, 8, 16, 3), "falling"),
        ((1, 5, 19, 9), "rising"),
        ((2, 3, 11, 4), "spike"),
        ((1, 2, 10, 5), "lowest"),
        ((1, 3, 12, 2), "ends"),
        ((1, 4, 5, 7), "flat"),
        ((1, 1, drawn(rng, 34, 39), 2), "rising"),
        ((1, 1, 3, drawn(rng, 41, 60)), "plain"),
        ((1, drawn(rng, 10, 14), drawn(rng, 25, 31), drawn(rng, 9, 12)), "plain"),
    ]
    return _tiled(rng, sizes)


FLASH_ATTENTION = Exercise(
    name="flash_attention",
    title="FlashAttention, with tiles in shared memory",
    solution=flash_attention,
    forms=(_IN_A_REGISTER,),
    reference=lambda *inputs: _reference(False, *inputs),
    cases=_flash_cases,
    tolerance=_ATTENTION,
    outputs=("o", "lse"),
    dtype=np.float32,
    call=_launch,
    once=True,
    about=(*_ABOUT, Uses("shared memory", point=False)),
    forbids=("float64-promotion",),
    hints=(
        "It is the streaming kernel, eight keys at a time. Where it had one score, there are eight "
        "now, one for each thread of the row; so the new maximum is one of the old maximum and "
        "eight scores, and eight weights go into the sum.",
        "`new = max(m, row_max(score))`; the factor and the weight as before; the sum gets "
        "`row_sum(weight)`. A thread needs all eight weights of its row for its columns of the "
        "output, so they go through `weights`, with a barrier between writing and reading. A last "
        "barrier keeps fast warps from fetching the next tile while others still use this one.",
        "```python\nnew = max(m, row_max(score))\n"
        "factor, weight = math.exp(m - ...), math.exp(score - ...)\n"
        "m, total = new, total * ... + row_sum(...)\nweights[row, col] = weight\n"
        "cuda.syncthreads()\nfor d in range(col, D, TILE):\n    acc[d // TILE] *= ...\n"
        "    for j in range(TILE):\n        acc[d // TILE] += ...\ncuda.syncthreads()\n```",
    ),
)


# ---- flash_attention_causal ------------------------------------------------------------------


@cuda.jit
def flash_attention_causal(q, k, v, scale, o, lse):
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    weights = cuda.shared.array((TILE, TILE), np.float32)
    acc = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, i = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    m, total = LOWEST, ZERO
    for d in range(col, D, TILE):
        qs[row, d], acc[d // TILE] = q[n, i, d] if i < T else ZERO, ZERO
    for first in range(0, min(S, TILE * (cuda.blockIdx.x + 1) + S - T), TILE):
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        score = ZERO
        for d in range(D):
            score += qs[row, d] * ks[col, d]
        score = score * scale if first + col <= i + S - T else MINUS_INF
        new = max(m, row_max(score))
        factor, weight = math.exp(m - new), math.exp(score - new)
        m, total = new, total * factor + row_sum(weight)
        weights[row, col] = weight
        cuda.syncthreads()
        for d in range(col, D, TILE):
            acc[d // TILE] *= factor
            for j in range(TILE):
                acc[d // TILE] += weights[row, j] * vs[j, d]
        cuda.syncthreads()
    if i < T:
        for d in range(col, D, TILE):
            o[n, i, d] = acc[d // TILE] / total if total > ZERO else ZERO
        if col == 0:
            lse[n, i] = m + math.log(total)


def _causal_cases(rng):
    T = drawn(rng, 28, 32)  # four tiles: one too many for each shows in the readings
    sizes = [
        ((1, 1, 1, 1), "above"),
        ((1, 2, 0, 3), "plain"),
        ((1, 3, 3, 2), "below"),
        ((2, 2, 3, 1), "plain"),
        ((1, 4, 2, 2), "plain"),
        ((1, 9, 9, 3), "rising"),
        ((1, 8, 17, 2), "falling"),
        ((1, 11, 3, 4), "above"),
        ((2, 3, 11, 9), "spike"),
        ((1, 10, 10, 2), "lowest"),
        ((1, 5, 9, 2), "ends"),
        ((1, 17, 12, 1), "rows"),
        ((1, 1, 3, drawn(rng, 41, 60)), "plain"),
        ((1, 4, drawn(rng, 34, 39), 2), "rising"),
        ((1, drawn(rng, 34, 39), 5, 1), "plain"),
        ((1, T, T, drawn(rng, 9, 12)), "plain"),
    ]
    return _tiled(rng, sizes)


FLASH_ATTENTION_CAUSAL = Exercise(
    name="flash_attention_causal",
    title="Causal: tiles that are never fetched",
    solution=flash_attention_causal,
    forms=(_IN_A_REGISTER, _GUARDED, (*_IN_A_REGISTER, *_GUARDED)),
    reference=lambda *inputs: _reference(True, *inputs),
    cases=_causal_cases,
    tolerance=_ATTENTION,
    outputs=("o", "lse"),
    dtype=np.float32,
    call=_launch,
    once=True,
    about=(*_ABOUT, Uses("shared memory", point=False)),
    forbids=("float64-promotion",),
    hints=(
        "Two changes. Which keys may query `i` look at? And which is the last key that *any* query "
        "of this tile may look at?",
        "Query `i` looks at key `j` if `j <= i + S - T`: that is the mask, by element. The last "
        "query of the tile is `TILE * (cuda.blockIdx.x + 1) - 1`, so the loop ends before key "
        "`TILE * (cuda.blockIdx.x + 1) + S - T`, or before S if that is less. All threads of a "
        "block must go round equally often, because of the barriers.",
        "```python\nfor first in range(0, min(S, TILE * (cuda.blockIdx.x + 1) + ...), TILE):\n"
        "    ...\n    score = score * scale if first + col <= ... else MINUS_INF\n```",
    ),
)


# ---- merge_attention -------------------------------------------------------------------------


@cuda.jit
def merge_attention(o1, lse1, o2, lse2, o, lse):
    D = o.shape[1]
    i = cuda.grid(1)
    if i < o.size:
        row, d = i // D, i % D
        largest = max(max(lse1[row], lse2[row]), LOWEST)
        w1, w2 = math.exp(lse1[row] - largest), math.exp(lse2[row] - largest)
        total = w1 + w2
        o[row, d] = (w1 * o1[row, d] + w2 * o2[row, d]) / total if total > ZERO else ZERO
        if d == 0:
            lse[row] = largest + math.log(total)


def _merge_reference(o1, lse1, o2, lse2):
    lse = np.logaddexp(lse1, lse2)
    shift = np.where(np.isneginf(lse), 0.0, lse)
    w1, w2 = np.exp(lse1 - shift)[:, None], np.exp(lse2 - shift)[:, None]
    return w1 * o1 + w2 * o2, lse


def _merge_cases(rng):
    launches = [
        (1, 1, 1, 32),
        (0, 2, 1, 32),
        (1, 3, 1, 8),
        (3, 2, 3, 2),
        (7, 5, 2, 32),
        (13, 3, 5, 8),
        (25, 4, 1, 128),
        (49, 1, 2, 64),
        (drawn(rng, 50, 56), drawn(rng, 33, 36), 3, 672),
    ]
    return [case(grid, block, **_parts(rng, n_rows, D)) for n_rows, D, grid, block in launches]


def _parts(rng, n_rows, D):
    """Return results of two parts: near, far, equal, and of no key that may be seen."""
    o1, o2 = numbers(rng, (n_rows, D), 2.0, 1.5), numbers(rng, (n_rows, D), 2.0, -1.0)
    lse1, lse2 = numbers(rng, n_rows, 2.0), numbers(rng, n_rows, 2.0)
    kind = np.arange(n_rows) % 8
    for offset, which in ((100, 1), (-120, 2)):
        lse1[kind == which] += np.float32(offset)
        lse2[kind == which] += np.float32(offset)
    lse1[kind == 3] += np.float32(300)
    lse2[kind == 4] += np.float32(300)
    for lse, o, nothing in ((lse1, o1, (0, 5)), (lse2, o2, (0, 6))):
        lse[np.isin(kind, nothing)], o[np.isin(kind, nothing)] = -np.inf, 0
    lse2[kind == 7] = lse1[kind == 7]
    return {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}


MERGE_ATTENTION = Exercise(
    name="merge_attention",
    title="Merging results of parts of the keys",
    solution=merge_attention,
    reference=_merge_reference,
    cases=_merge_cases,
    tolerance=Tolerance(
        1e-5, 2e-5, "differences of log-sum-exps up to some hundreds are rounded to float32"
    ),
    outputs=("o", "lse"),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "`exp(lse)` is the sum of all exponentials of a part. So how much of the whole belongs to "
        "part 1?",
        "The weights are `exp(lse1)` and `exp(lse2)`, and both may overflow: subtract the larger "
        "of the two first. The result is the mean of o1 and o2 with these weights; the new lse is "
        "that larger one plus the logarithm of the sum of the weights. If neither part has seen a "
        "key, o is 0 and lse is minus infinity, and −∞ − (−∞) must not be computed.",
        "```python\nlargest = max(max(lse1[row], lse2[row]), LOWEST)\n"
        "w1, w2 = math.exp(lse1[row] - ...), math.exp(...)\ntotal = w1 + w2\n"
        "o[row, d] = (w1 * o1[row, d] + ...) / total if total > ZERO else ...\n```",
    ),
)
