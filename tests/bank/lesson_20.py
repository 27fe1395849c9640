"""Lesson 20: FlashAttention, backwards. Most wrong kernels are the solution with one mistake."""

import math

import numpy as np

from bank import right, wrong
from bank.lesson_19 import GROWS, NAN, OUTSIDE, RACE, READ_K, VALUES
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach.exercises.lesson_19 import MOST, PADDED, SLOTS, TILE, fetch_tile, row_sum
from course_lib.teach.exercises.lesson_20 import ZERO

READ_Q = "q is read|do is read"
DK, DV = "wrong values in dk|times what it should be", "wrong values in dv"

# ---- attention_delta(do, o, delta) -----------------------------------------------------------


@right("attention_delta")
@cuda.jit
def delta_by_warps_in_strides(do, o, delta):
    for row in range(cuda.grid(1) // 32, o.shape[0], cuda.gridsize(1) // 32):
        total = ZERO
        for d in range(cuda.threadIdx.x % 32, o.shape[1], 32):
            total += do[row, d] * o[row, d]
        total = warp_sum(total)
        if cuda.threadIdx.x % 32 == 31:
            delta[row] = total


@right("attention_delta")
@cuda.jit
def delta_downwards(do, o, delta):
    row, d, total = cuda.grid(1) // 32, cuda.grid(1) % 32, ZERO
    lane = d
    if row >= delta.size:
        return
    while d < do.shape[1]:
        total += o[row, d] * do[row, d]
        d += 32
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_down_sync(0xFFFFFFFF, total, step)
    if lane == 0:
        delta[row] = total


mistakes("attention_delta",
    ("delta_of_o_alone", VALUES, "do[row, d] * o[row, d]", "o[row, d] * o[row, d]"),
    ("delta_of_do_alone", VALUES, "do[row, d] * o[row, d]", "do[row, d]"),
    ("delta_of_sums", VALUES, "do[row, d] * o[row, d]", "do[row, d] + o[row, d]"),
    ("delta_not_cleared", VALUES + "|NaN was computed|before|uninitialised", "total += do",
     "total = do"),
    ("delta_of_16_lanes", VALUES, "range(5)", "range(4)"),
    ("delta_of_32_columns", VALUES, "range(lane, o.shape[1], 32)",
     "range(lane, min(32, o.shape[1]), 32)"),
    ("delta_from_column_0", VALUES, "range(lane, o.shape[1], 32)", "range(0, o.shape[1], 32)"),
    ("delta_no_guard", OUTSIDE, "row < o.shape[0]", "row >= 0"),
    ("delta_guard_of_columns", OUTSIDE + "|never written", "row < o.shape[0]",
     "row < o.shape[1]"),
    ("delta_a_thread_a_row", "shuffle-inactive-lane|never written", "cuda.grid(1) // 32",
     "cuda.grid(1)"),
    ("delta_mean", VALUES, "delta[row] = total", "delta[row] = total / o.shape[1]"),
    ("delta_all_write", "race|several threads|more than one thread", "if lane == 0", "if lane < 2"),
    ("delta_in_float64", "float64", "total = ZERO", "total = 0.0"))


# ---- flash_attention_dkdv(do, q, k, v, lse, delta, scale, dk, dv) ----------------------------


@right("flash_attention_dkdv")
@cuda.jit
def dkdv_a_thread_for_each_key(do, q, k, v, lse, delta, scale, dk, dv):
    # All 64 threads fetch; then eight of them do a key each, alone.
    qs = cuda.shared.array((TILE, MOST), np.float32)
    dos = cuda.shared.array((TILE, MOST), np.float32)
    dkeys = cuda.local.array(MOST, np.float32)
    dvalues = cuda.local.array(MOST, np.float32)
    (_, T, D), S, n, t = q.shape, k.shape[1], cuda.blockIdx.y, cuda.threadIdx.x
    j = 8 * cuda.blockIdx.x + t
    mine = t < 8 and j < S
    for d in range(D):
        dkeys[d], dvalues[d] = ZERO, ZERO
    for first in range(max(0, 8 * cuda.blockIdx.x + T - S), T, 8):
        fetch_tile(qs, q, n, first)
        fetch_tile(dos, do, n, first)
        cuda.syncthreads()
        for row in range(min(8, T - first) if mine else 0):
            i = first + row
            if i + S >= j + T:
                score, dweight = -lse[n, i], -delta[n, i]
                for d in range(D):
                    score += qs[row, d] * k[n, j, d] * scale
                    dweight += dos[row, d] * v[n, j, d]
                weight = math.exp(score)
                for d in range(D):
                    dkeys[d] += weight * dweight * scale * qs[row, d]
                    dvalues[d] += weight * dos[row, d]
        cuda.syncthreads()
    if mine:
        for d in range(D):
            dk[n, j, d], dv[n, j, d] = dkeys[d], dvalues[d]


@right("flash_attention_dkdv")
@cuda.jit
def dkdv_from_the_last_query_back(do, q, k, v, lse, delta, scale, dk, dv):
    # Queries in reverse order, scaled when they are fetched; weights turned round in memory.
    tiles = cuda.shared.array((4, TILE, PADDED), np.float32)
    found = cuda.shared.array((2, TILE, TILE), np.float32)
    sums = cuda.local.array((2, SLOTS), np.float32)
    (_, T, D), S, n = q.shape, k.shape[1], cuda.blockIdx.y
    query, key, top = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8, 8 * cuda.blockIdx.x
    for slot in range(SLOTS):
        sums[0, slot], sums[1, slot] = ZERO, ZERO
    fetch_tile(tiles[0], k, n, top)
    fetch_tile(tiles[1], v, n, top)
    for tile in range((T + 7) // 8 - 1, max(0, top + T - S) // 8 - 1, -1):
        i, j = 8 * tile + query, top + key
        fetch_tile(tiles[2], q, n, 8 * tile)
        fetch_tile(tiles[3], do, n, 8 * tile)
        cuda.syncthreads()
        score, dweight = ZERO, ZERO
        for d in range(D):
            score += tiles[2, query, d] * tiles[0, key, d]
            dweight += tiles[3, query, d] * tiles[1, key, d]
        found[0, query, key], found[1, query, key] = ZERO, ZERO
        if i < T and j + T - S <= i:
            found[0, query, key] = math.exp(score * scale - lse[n, i])
            found[1, query, key] = found[0, query, key] * (dweight - delta[n, i]) * scale
        cuda.syncthreads()
        for d in range(key, D, 8):
            for other in range(8):
                sums[0, d // 8] += found[1, other, query] * tiles[2, other, d]
                sums[1, d // 8] += found[0, other, query] * tiles[3, other, d]
        cuda.syncthreads()
    for d in range(key, D if top + query < S else 0, 8):
        dk[n, top + query, d], dv[n, top + query, d] = sums[0, d // 8], sums[1, d // 8]


# ---- flash_attention_dq(do, q, k, v, lse, delta, scale, dq) ----------------------------------


@right("flash_attention_dq")
@cuda.jit
def dq_a_thread_for_each_query(do, q, k, v, lse, delta, scale, dq):
    ks = cuda.shared.array((TILE, MOST), np.float32)
    vs = cuda.shared.array((TILE, MOST), np.float32)
    dquery = cuda.local.array(MOST, np.float32)
    (_, T, D), S, n, t = q.shape, k.shape[1], cuda.blockIdx.y, cuda.threadIdx.x
    i = 8 * cuda.blockIdx.x + t
    mine = t < 8 and i < T
    for d in range(D):
        dquery[d] = ZERO
    for first in range(0, S - max(0, T - 8 * (cuda.blockIdx.x + 1)), 8):
        cuda.syncthreads()
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        for row in range(min(8, i + S - T + 1 - first) if mine else 0):
            score, dweight = ZERO, ZERO
            for d in range(D):
                score += q[n, i, d] * ks[row, d]
                dweight += do[n, i, d] * vs[row, d]
            dscore = math.exp(score * scale - lse[n, i]) * (dweight - delta[n, i])
            for d in range(D):
                dquery[d] += dscore * ks[row, d]
    if mine:
        for d in range(D):
            dq[n, i, d] = dquery[d] * scale


@right("flash_attention_dq")
@cuda.jit
def dq_from_the_diagonal_back(do, q, k, v, lse, delta, scale, dq):
    tiles = cuda.shared.array((4, TILE, PADDED), np.float32)
    dqueries = cuda.local.array(SLOTS, np.float32)
    (_, T, D), S, n = q.shape, k.shape[1], cuda.blockIdx.y
    row, col, top = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8, 8 * cuda.blockIdx.x
    i, lane = top + row, cuda.threadIdx.x % 32
    for slot in range(SLOTS):
        dqueries[slot] = ZERO
    fetch_tile(tiles[0], q, n, top)
    fetch_tile(tiles[1], do, n, top)
    for tile in range((min(S, top + 8 + S - T) + 7) // 8 - 1, -1, -1):
        fetch_tile(tiles[2], k, n, 8 * tile)
        fetch_tile(tiles[3], v, n, 8 * tile)
        cuda.syncthreads()
        score, dweight, dscore = ZERO, ZERO, ZERO
        for d in range(D):
            score += tiles[0, row, d] * tiles[2, col, d]
            dweight += tiles[1, row, d] * tiles[3, col, d]
        if i < T and 8 * tile + col + T <= i + S:
            dscore = scale * math.exp(score * scale - lse[n, i]) * (dweight - delta[n, i])
        for other in range(8):
            theirs = cuda.shfl_sync(0xFFFFFFFF, dscore, lane - col + other)
            for d in range(col, D, 8):
                dqueries[d // 8] += theirs * tiles[2, other, d]
        cuda.syncthreads()
    for d in range(col, D if i < T else 0, 8):
        dq[n, i, d] = dqueries[d // 8]


# ---- mistakes in either ----------------------------------------------------------------------

BARRIER = "        cuda.syncthreads()\n"
SEEN = "if i < T and j <= i + S - T:"
for _name, _of, _at, _fetch, _put, _end, _sums in (
    ("dkdv", "flash_attention_dkdv", "qs, col, ks, row", "        fetch_tile(dos, do, n, first)\n",
     "weights[row, col], dscores[row, col] = weight, dscore\n", "    if j < S", "dkeys"),
    ("dq", "flash_attention_dq", "qs, row, ks, col", "        fetch_tile(vs, v, n, first)\n",
     "dscores[row, col] = dscore\n", "    if i < T:\n        for", "dqueries"),
):  # fmt: skip
    SCORE = f"scale * dot({_at}, D)"
    DWEIGHT = f"dot({_at.replace('qs', 'dos').replace('ks', 'vs')}, D)"
    WEIGHT = f"math.exp({SCORE} - lse[n, i])"
    GUARDED = SEEN + "\n            weight = " + WEIGHT
    mistakes(_of,
        (f"{_name}_no_barrier_before", RACE + "|uninitialised", _fetch + BARRIER, _fetch),
        (f"{_name}_no_barrier_between", RACE + "|uninitialised", _put + BARRIER, _put),
        (f"{_name}_no_barrier_after", RACE, BARRIER + _end, _end),
        (f"{_name}_no_scale_in_the_score", NAN, SCORE, f"dot({_at}, D)"),
        (f"{_name}_scale_of_the_difference", NAN, WEIGHT,
         f"math.exp(scale * (dot({_at}, D) - lse[n, i]))"),
        (f"{_name}_scale_twice", NAN, SCORE, "scale * " + SCORE),
        (f"{_name}_no_delta", VALUES, f"({DWEIGHT} - delta[n, i])", DWEIGHT),
        (f"{_name}_delta_added", VALUES, "- delta", "+ delta"),
        (f"{_name}_delta_of_the_key", OUTSIDE + "|" + VALUES, "delta[n, i]", "delta[n, j]"),
        (f"{_name}_lse_of_the_key", OUTSIDE + "|" + NAN, "lse[n, i]", "lse[n, j]"),
        (f"{_name}_lse_of_the_tile", OUTSIDE + "|" + NAN, "lse[n, i]", "lse[n, first]"),
        (f"{_name}_first_head_for_all", VALUES, "lse[n, i]", "lse[0, i]"),
        (f"{_name}_exp_of_the_score", NAN, WEIGHT, f"math.exp({SCORE})"),
        (f"{_name}_exp_two", NAN, WEIGHT,
         f"math.exp(({SCORE} - lse[n, i]) * np.float32(0.6931472))"),
        (f"{_name}_lse_of_two", NAN, "lse[n, i]", "lse[n, i] * np.float32(1.442695)"),
        (f"{_name}_softmax_of_the_tile", NAN, "weight = " + WEIGHT,
         "total = ZERO\n            for other in range(TILE):\n                total += math.exp("
         f"{SCORE.replace('ks, row', 'ks, other').replace('ks, col', 'ks, other')})\n"
         f"            weight = math.exp({SCORE}) / total"),
        (f"{_name}_divides_by_exp_lse", NAN, WEIGHT, f"math.exp({SCORE}) / math.exp(lse[n, i])"),
        (f"{_name}_multiplies_by_exp_of_minus_lse", NAN, WEIGHT,
         f"math.exp({SCORE}) * math.exp(-lse[n, i])"),
        (f"{_name}_dscore_without_weight", VALUES, "dscore = weight * (", "dscore = ("),
        (f"{_name}_not_causal", NAN, SEEN, "if i < T and j < S:"),
        (f"{_name}_not_to_itself", VALUES, "j <= i + S", "j < i + S"),
        (f"{_name}_one_too_far", NAN, "j <= i + S - T", "j <= i + 1 + S - T"),
        (f"{_name}_aligned_above", NAN, "j <= i + S - T", "j <= i"),
        (f"{_name}_looks_ahead", NAN, "j <= i + S - T", "j >= i + S - T"),
        (f"{_name}_tail_of_queries", OUTSIDE, "if i < T and j", "if j"),
        (f"{_name}_masked_is_0", NAN, GUARDED,
         f"if i < T:\n            weight = math.exp(({SCORE} if j <= i + S - T else ZERO) - "
         "lse[n, i])"),
        (f"{_name}_masks_by_a_factor", NAN, GUARDED,
         f"if i < T:\n            weight = {WEIGHT} * np.float32(j <= i + S - T)"),
        (f"{_name}_masked_is_lowest", NAN, GUARDED,
         f"if i < T:\n            weight = math.exp(({SCORE} if j <= i + S - T else "
         "np.float32(-1e30)) - max(lse[n, i], np.float32(-1e30)))"),
        (f"{_name}_dweight_of_keys", VALUES, DWEIGHT, f"dot({_at}, D)"),
        (f"{_name}_T_and_S_swapped", OUTSIDE + "|never written|" + NAN,
         "(_, T, D), S, top = q.shape, k.shape[1],", "(_, S, D), T, top = q.shape, k.shape[1],"),
        (f"{_name}_dscores_on_their_side", RACE + "|" + VALUES, "dscores[row, other]",
         "dscores[other, row]"),
        (f"{_name}_writes_outside", OUTSIDE, _end, _end.replace("j < S", "j >= 0")
         .replace("i < T", "i >= 0")),
        (f"{_name}_up_to_32", OUTSIDE, f"{_sums} = cuda.local.array(SLOTS,",
         f"{_sums} = cuda.local.array(4,"),
        (f"{_name}_of_32_rows", "never written", _end, _end.replace("j < S", "j < min(S, 32)")
         .replace("i < T", "i < min(T, 32)")))
mistakes("flash_attention_dkdv",
    ("dk_without_scale", DK, "dkeys[d // TILE] * scale", "dkeys[d // TILE]"),
    ("dk_scale_twice", DK, "dkeys[d // TILE] * scale", "dkeys[d // TILE] * scale * scale"),
    ("dv_with_scale", DV, " * scale, dvalues[d // TILE]", " * scale, dvalues[d // TILE] * scale"),
    ("dv_of_dscores", DV, "weights[row, other] * dos", "dscores[row, other] * dos"),
    ("dk_of_weights", DK, "dscores[row, other] * qs", "weights[row, other] * qs"),
    ("dk_of_the_keys", DK, "* qs[other, d]", "* ks[other, d]"),
    ("dv_of_the_values", DV, "* dos[other, d]", "* vs[other, d]"),
    ("dv_of_the_queries", DV, "* dos[other, d]", "* qs[other, d]"),
    ("dv_on_its_side", RACE + "|" + VALUES, "weights[row, other]", "weights[other, row]"),
    ("dkdv_not_cleared", "uninitialised|NaN|" + VALUES,
     "dkeys[d // TILE] = dvalues[d // TILE] = ZERO", "dkeys[d // TILE] = ZERO"),
    ("dkdv_the_last_tile_alone", VALUES, "            for other in range(TILE):\n",
     "            dkeys[d // TILE] = dvalues[d // TILE] = ZERO\n"
     "            for other in range(TILE):\n"),
    ("dkdv_adds_up_one_slot", VALUES, "            for other in range(TILE):\n",
     "            dkeys[d // TILE] = dkeys[d // TILE] if d < TILE else ZERO\n"
     "            for other in range(TILE):\n"),
    ("dkdv_skips_nothing", READ_Q, "range(max(0, top + T - S) // TILE * TILE, T, TILE)",
     "range(0, T, TILE)"),
    ("dkdv_skips_one_too_late", READ_Q, "max(0, top + T - S) // TILE * TILE",
     "max(0, top + T - S - TILE) // TILE * TILE"),
    ("dkdv_skips_one_too_early", VALUES, "max(0, top + T - S) // TILE * TILE",
     "max(0, top + TILE + T - S) // TILE * TILE"),
    ("dkdv_skips_as_aligned_above", VALUES + "|" + READ_Q, "max(0, top + T - S)", "top"),
    ("dkdv_whole_tiles_only", VALUES, "TILE * TILE, T, TILE)",
     "TILE * TILE, T // TILE * TILE, TILE)"),
    ("dkdv_same_queries_again", VALUES, "(dos, do, n, first)", "(dos, do, n, 0)"),
    ("dkdv_swapped", VALUES, "dk[n, j, d], dv[n, j, d]", "dv[n, j, d], dk[n, j, d]"))
mistakes("flash_attention_dq",
    ("dq_without_scale", VALUES, "dqueries[d // TILE] * scale", "dqueries[d // TILE]"),
    ("dq_scale_squared", VALUES, "dqueries[d // TILE] * scale",
     "dqueries[d // TILE] * scale * scale"),
    # What cuDNN's backward pass did: PyTorch issue 196678.
    ("dq_padding_is_0", NAN, SEEN + "\n            weight = math.exp(scale",
     "if i < T and (j <= i + S - T or j >= S):\n            weight = math.exp(scale"),
    ("dq_of_the_values", VALUES, "* ks[other, d]", "* vs[other, d]"),
    ("dq_of_the_queries", VALUES, "* ks[other, d]", "* qs[other, d]"),
    ("dq_of_weights", VALUES, "dscores[row, col] = dscore",
     "dscores[row, col] = ZERO\n        if dscore != ZERO:\n"
     "            dscores[row, col] = weight"),
    ("dq_not_cleared", "uninitialised|NaN|" + VALUES,
     "        dqueries[d // TILE] = ZERO\n", "        pass\n"),
    ("dq_the_last_tile_alone", VALUES, "            for other in range(TILE):\n",
     "            dqueries[d // TILE] = ZERO\n            for other in range(TILE):\n"),
    ("dq_skips_nothing", READ_K, "min(S, top + TILE + S - T)", "S"),
    ("dq_skips_one_too_late", READ_K, "top + TILE + S - T", "top + 2 * TILE + S - T"),
    ("dq_skips_one_too_early", VALUES, "top + TILE + S - T", "top + S - T"),
    ("dq_same_keys_again", VALUES, "(ks, k, n, first)", "(ks, k, n, 0)"),
    ("dq_each_row_its_end", "barrier|exit|inactive|race", "top + TILE + S - T",
     "top + row + 1 + S - T"))


@wrong("flash_attention_dq", RACE + "|uninitialised|" + VALUES)
@cuda.jit
def dq_added_by_blocks_of_keys(do, q, k, v, lse, delta, scale, dq):
    # The walk of dk and dv: each block has a tile of keys, and all of them add to the same dq.
    dscores = cuda.shared.array((TILE, TILE), np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, top = q.shape, k.shape[1], TILE * cuda.blockIdx.x
    for first in range(0, T, TILE):
        i, j, score, dweight, dscore = first + row, top + col, ZERO, ZERO, ZERO
        if i < T and j <= i + S - T:
            for d in range(D):
                score += q[n, i, d] * k[n, j, d]
                dweight += do[n, i, d] * v[n, j, d]
            dscore = math.exp(score * scale - lse[n, i]) * (dweight - delta[n, i])
        dscores[row, col] = dscore
        cuda.syncthreads()
        for d in range(col, D if i < T else 0, TILE):
            for other in range(min(TILE, S - top)):
                dq[n, i, d] += dscores[row, other] * k[n, top + other, d] * scale
        cuda.syncthreads()


@wrong("flash_attention_dq", READ_K)
@cuda.jit
def dq_without_tiles(do, q, k, v, lse, delta, scale, dq):
    dqueries = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, i = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    for d in range(col, D, TILE):
        dqueries[d // TILE] = ZERO
    for j in range(min(S, TILE * (cuda.blockIdx.x + 1) + S - T)):
        score, dweight, dscore = ZERO, ZERO, ZERO
        for d in range(col, D if i < T else 0, TILE):
            score += q[n, i, d] * k[n, j, d]
            dweight += do[n, i, d] * v[n, j, d]
        score, dweight = row_sum(score), row_sum(dweight)
        if i < T and j <= i + S - T:
            dscore = math.exp(score * scale - lse[n, i]) * (dweight - delta[n, i])
            for d in range(col, D, TILE):
                dqueries[d // TILE] += dscore * k[n, j, d]
    for d in range(col, D if i < T else 0, TILE):
        dq[n, i, d] = dqueries[d // TILE] * scale


@wrong("flash_attention_dq", GROWS)
@cuda.jit
def dq_keeps_its_weights(do, q, k, v, lse, delta, scale, dq):
    # Keys and dscores stay until the end, and are multiplied all at once.
    dscores = cuda.shared.array((TILE, 256), np.float32)
    ks = cuda.shared.array(2560, np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, i = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    end = min(S, TILE * (cuda.blockIdx.x + 1) + S - T)
    for first in range(0, end, TILE):
        fetch_tile(vs, v, n, first)
        for d in range(col, D, TILE):
            ks[(first + row) * D + d] = k[n, first + row, d] if first + row < S else ZERO
        cuda.syncthreads()
        score, dweight, dscore = ZERO, ZERO, ZERO
        if i < T and first + col <= i + S - T:
            for d in range(D):
                score += q[n, i, d] * ks[(first + col) * D + d]
                dweight += do[n, i, d] * vs[col, d]
            dscore = math.exp(score * scale - lse[n, i]) * (dweight - delta[n, i])
        dscores[row, first + col] = dscore
        cuda.syncthreads()
    for d in range(col, D if i < T else 0, TILE):
        total = ZERO
        for j in range(end):
            total += dscores[row, j] * ks[j * D + d]
        dq[n, i, d] = total * scale


@wrong("flash_attention_dkdv", "should not grow with the number of queries")
@cuda.jit
def dkdv_keeps_its_weights(do, q, k, v, lse, delta, scale, dk, dv):
    # Queries, weights and dscores stay until the end, and are multiplied all at once.
    found = cuda.shared.array((2, TILE, 256), np.float32)
    passed = cuda.shared.array((2, 2560), np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, j = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    begin = max(0, TILE * cuda.blockIdx.x + T - S) // TILE * TILE
    for first in range(begin, T, TILE):
        for d in range(col, D if first + row < T else 0, TILE):
            at = (first - begin + row) * D + d
            passed[0, at], passed[1, at] = q[n, first + row, d], do[n, first + row, d]
        cuda.syncthreads()
        i, weight, dscore = first + col, ZERO, ZERO
        if i < T and j <= i + S - T:
            score, dweight = ZERO, ZERO
            for d in range(D):
                score += passed[0, (i - begin) * D + d] * k[n, j, d]
                dweight += passed[1, (i - begin) * D + d] * v[n, j, d]
            weight = math.exp(score * scale - lse[n, i])
            dscore = weight * (dweight - delta[n, i])
        found[0, row, i - begin], found[1, row, i - begin] = weight, dscore
    cuda.syncthreads()
    for d in range(col, D if j < S else 0, TILE):
        dkey, dvalue = ZERO, ZERO
        for i in range(T - begin):
            dkey += found[1, row, i] * passed[0, i * D + d]
            dvalue += found[0, row, i] * passed[1, i * D + d]
        dk[n, j, d], dv[n, j, d] = dkey * scale, dvalue


# ---- predict_backward(B, H, T, D, ROWS) ------------------------------------------------------


@right("predict_backward")
def predict_product_by_product(B, H, T, D, ROWS):
    again, gradients = 2 * (2 * T * T * D), 3 * (2 * T * T * D)
    n_blocks = math.ceil(T / ROWS)
    one_walk = again + gradients
    return 8 * B * H * T**2, B * H * (one_walk + again), B * H * one_walk, B * H * T * D * n_blocks


@right("predict_backward")
def predict_as_multiples(B, H, T, D, ROWS):
    cells = B * H * T * T
    return [cells * 8, cells * D * 14, cells * D * 10, B * H * T * D * ((T + ROWS - 1) // ROWS)]


mistakes("predict_backward",
    ("predict_kept_written_only", "wrong values in kept|half", "heads * 2 * 4", "heads * 4"),
    ("predict_kept_in_numbers", "wrong values in kept|times", "heads * 2 * 4", "heads * 2"),
    ("predict_six_products", "wrong values in two_walks", "heads * 7", "heads * 6"),
    ("predict_four_products", "wrong values in one_walk", "heads * 5", "heads * 4"),
    ("predict_atomics_once", "wrong values in atomics", "-(-T // ROWS) * T", "T"),
    ("predict_whole_tiles_of_keys", "wrong values in atomics", "-(-T // ROWS)", "(T // ROWS)"),
    ("predict_flops_by_ones", "wrong values in", "2 * T * T * D  #", "T * T * D  #"),
    ("predict_backward_one_head", "wrong values in", "heads, product = B * H,",
     "heads, product = H,"))
