"""Lesson 19: FlashAttention with tiles, and causal. The lesson's other kernels: lesson_19.py."""

import math

import numpy as np

from bank import right, wrong
from bank.lesson_19 import GROWS, LSE, NAN, OUTSIDE, RACE, READ_K, VALUES
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.teach.exercises.lesson_19 import (
    ALL,
    LOWEST,
    MINUS_INF,
    MOST,
    PADDED,
    SLOTS,
    TILE,
    ZERO,
    fetch_tile,
    row_max,
    row_sum,
)

# ---- flash_attention(q, k, v, scale, o, lse), and causal -------------------------------------


@right("flash_attention")
@cuda.jit
def flash_a_thread_for_each_row(q, k, v, scale, o, lse):
    # All 64 threads fetch; then eight of them do a row each, alone.
    ks = cuda.shared.array((TILE, MOST), np.float32)
    vs = cuda.shared.array((TILE, MOST), np.float32)
    qs = cuda.local.array(MOST, np.float32)
    acc = cuda.local.array(MOST, np.float32)
    (_, T, D), S, n, t = q.shape, k.shape[1], cuda.blockIdx.y, cuda.threadIdx.x
    i, m, total = 8 * cuda.blockIdx.x + t, LOWEST, ZERO
    mine = t < 8 and i < T
    for d in range(D):
        qs[d], acc[d] = q[n, i, d] if mine else ZERO, ZERO
    for first in range(0, S, 8):
        cuda.syncthreads()
        for place in range(t, 8 * D, 64):
            j, d = place // D, place % D
            if first + j < S:
                ks[j, d], vs[j, d] = k[n, first + j, d], v[n, first + j, d]
        cuda.syncthreads()
        for j in range(min(8, S - first) if mine else 0):
            score = ZERO
            for d in range(D):
                score += qs[d] * ks[j, d]
            score *= scale
            new = max(m, score)
            factor, weight, m = math.exp(m - new), math.exp(score - new), new
            total = total * factor + weight
            for d in range(D):
                acc[d] = acc[d] * factor + weight * vs[j, d]
    if mine:
        for d in range(D):
            o[n, i, d] = acc[d] / total if total > ZERO else ZERO
        lse[n, i] = m + math.log(total) if total > ZERO else MINUS_INF


WIDE = 16  # keys of a tile


@right("flash_attention")
@cuda.jit
def flash_sixteen_keys(q, k, v, scale, o, lse):
    # Tiles of 16 keys: each thread has two scores. Weights go from lane to lane.
    qs = cuda.shared.array((TILE, MOST), np.float32)
    ks = cuda.shared.array((WIDE, PADDED), np.float32)
    vs = cuda.shared.array((WIDE, PADDED), np.float32)
    acc = cuda.local.array(SLOTS, np.float32)
    weights = cuda.local.array(2, np.float32)
    (_, T, D), S, n = q.shape, k.shape[1], cuda.blockIdx.y
    t, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
    row, col = t // 8, t % 8
    i, m, total = 8 * cuda.blockIdx.x + row, MINUS_INF, ZERO
    for slot in range(SLOTS):
        acc[slot] = ZERO
    for d in range(col, D, 8):
        qs[row, d] = ZERO
        if i < T:
            qs[row, d] = q[n, i, d] * scale
    for first in range(0, S, WIDE):
        cuda.syncthreads()
        for place in range(t, WIDE * D, 64):
            j, d = place // D, place % D
            ks[j, d], vs[j, d] = ZERO, ZERO
            if first + j < S:
                ks[j, d], vs[j, d] = k[n, first + j, d], v[n, first + j, d]
        cuda.syncthreads()
        new = m
        for half in range(2):
            score = ZERO
            for d in range(D):
                score += qs[row, d] * ks[8 * half + col, d]
            weights[half] = score if first + 8 * half + col < S else MINUS_INF
            new = max(new, row_max(weights[half]))
        factor = math.exp(m - new)
        m, total = new, total * factor
        for half in range(2):
            weights[half] = math.exp(weights[half] - m)
            total += row_sum(weights[half])
        for slot in range(SLOTS):
            acc[slot] *= factor
        for j in range(WIDE):
            weight = cuda.shfl_sync(ALL, weights[j // 8], lane - col + j % 8)
            for d in range(col, D, 8):
                acc[d // 8] += weight * vs[j, d]
    if i < T:
        for d in range(col, D, 8):
            o[n, i, d] = acc[d // 8] / total if total > ZERO else ZERO
        if col == 7:
            lse[n, i] = m + math.log(total)


@right("flash_attention")
@cuda.jit
def flash_output_in_shared(q, k, v, scale, o, lse):
    # As the paper has it: m, the sum and the output of each row lie in shared memory.
    tiles = cuda.shared.array((4, TILE, MOST), np.float32)
    scores = cuda.shared.array((TILE, TILE), np.float32)
    stats = cuda.shared.array((3, TILE), np.float32)
    (_, T, D), S, n = q.shape, k.shape[1], cuda.blockIdx.y
    row, col, top = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8, 8 * cuda.blockIdx.x
    if col == 0:
        stats[0, row], stats[1, row] = MINUS_INF, ZERO
    for d in range(col, D, 8):
        tiles[3, row, d] = ZERO
    fetch_tile(tiles[0], q, n, top)
    for first in range(0, S, 8):
        fetch_tile(tiles[1], k, n, first)
        fetch_tile(tiles[2], v, n, first)
        cuda.syncthreads()
        score = ZERO
        for d in range(D):
            score += tiles[0, row, d] * tiles[1, col, d]
        scores[row, col] = score * scale if first + col < S else MINUS_INF
        cuda.syncthreads()
        if col == 0:
            m = stats[0, row]
            for j in range(8):
                m = max(m, scores[row, j])
            stats[2, row] = math.exp(stats[0, row] - m)
            total = stats[1, row] * stats[2, row]
            for j in range(8):
                scores[row, j] = math.exp(scores[row, j] - m)
                total += scores[row, j]
            stats[0, row], stats[1, row] = m, total
        cuda.syncthreads()
        for d in range(col, D, 8):
            tiles[3, row, d] *= stats[2, row]
            for j in range(8):
                tiles[3, row, d] += scores[row, j] * tiles[2, j, d]
        cuda.syncthreads()
    if top + row < T:
        for d in range(col, D, 8):
            o[n, top + row, d] = tiles[3, row, d] / stats[1, row] if S > 0 else ZERO
        if col == 0:
            lse[n, top + row] = stats[0, row] + math.log(stats[1, row]) if S > 0 else MINUS_INF


@right("flash_attention_causal")
@cuda.jit
def causal_a_thread_for_each_row(q, k, v, scale, o, lse):
    ks = cuda.shared.array((TILE, MOST), np.float32)
    vs = cuda.shared.array((TILE, MOST), np.float32)
    acc = cuda.local.array(MOST, np.float32)
    (_, T, D), S, n, t = q.shape, k.shape[1], cuda.blockIdx.y, cuda.threadIdx.x
    i, m, total = 8 * cuda.blockIdx.x + t, MINUS_INF, ZERO
    for d in range(D):
        acc[d] = ZERO
    end = S - max(0, T - 8 * (cuda.blockIdx.x + 1))  # behind the last key that anybody here sees
    for first in range(0, end, 8):
        cuda.syncthreads()
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        last = min(8, i + S - T + 1 - first)
        for j in range(last if t < 8 and i < T else 0):
            score = ZERO
            for d in range(D):
                score += q[n, i, d] * ks[j, d]
            score *= scale
            if score > m:
                factor = math.exp(m - score)
                total *= factor
                for d in range(D):
                    acc[d] *= factor
                m = score
            weight = math.exp(score - m)
            total += weight
            for d in range(D):
                acc[d] += weight * vs[j, d]
    if t < 8 and i < T:
        for d in range(D):
            o[n, i, d] = acc[d] / total if total > ZERO else ZERO
        lse[n, i] = m + math.log(total)


@right("flash_attention_causal")
@cuda.jit
def causal_from_the_diagonal_back(q, k, v, scale, o, lse):
    # The tiles in reverse order, and a maximum that may stay infinite.
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    weights = cuda.shared.array((TILE, TILE), np.float32)
    acc = cuda.local.array(SLOTS, np.float32)
    (_, T, D), S, n = q.shape, k.shape[1], cuda.blockIdx.y
    row, col, top = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8, 8 * cuda.blockIdx.x
    i, m, total = top + row, MINUS_INF, ZERO
    for slot in range(SLOTS):
        acc[slot] = ZERO
    fetch_tile(qs, q, n, top)
    n_tiles = (min(S, top + 8 + S - T) + 7) // 8
    for tile in range(n_tiles - 1, -1, -1):
        fetch_tile(ks, k, n, 8 * tile)
        fetch_tile(vs, v, n, 8 * tile)
        cuda.syncthreads()
        score = ZERO
        for d in range(D):
            score += qs[row, d] * ks[col, d] * scale
        if 8 * tile + col > i + S - T or 8 * tile + col >= S:
            score = MINUS_INF
        new = max(m, row_max(score))
        shift = ZERO if new == MINUS_INF else new
        factor, weights[row, col] = math.exp(m - shift), math.exp(score - shift)
        cuda.syncwarp()
        m, total = new, total * factor + row_sum(weights[row, col])
        for d in range(col, D, 8):
            acc[d // 8] *= factor
            for j in range(8):
                acc[d // 8] += weights[row, j] * vs[j, d]
        cuda.syncthreads()
    if i < T:
        for d in range(col, D, 8):
            o[n, i, d] = ZERO
            if m > MINUS_INF:
                o[n, i, d] = acc[d // 8] / total
        if col == 0:
            lse[n, i] = m if m == MINUS_INF else m + math.log(total)


BARRIER = "        cuda.syncthreads()\n"
FETCH = "        fetch_tile(vs, v, n, first)\n"
FACTORS = "factor, weight = math.exp(m - new), math.exp(score - new)"
for _name, _of in (("flash", "flash_attention"), ("causal", "flash_attention_causal")):
    mistakes(_of,
        (f"{_name}_no_barrier_before", RACE + "|uninitialised", FETCH + BARRIER, FETCH),
        (f"{_name}_no_barrier_between", RACE + "|uninitialised",
         "weights[row, col] = weight\n" + BARRIER, "weights[row, col] = weight\n"),
        (f"{_name}_no_barrier_after", RACE, BARRIER + "    if i < T", "    if i < T"),
        (f"{_name}_output_keeps_its_scale", VALUES, "            acc[d // TILE] *= factor\n", ""),
        (f"{_name}_sum_keeps_its_scale", VALUES, "total * factor + row", "total + row"),
        (f"{_name}_factor_inverted", NAN, "math.exp(m - new)", "math.exp(new - m)"),
        (f"{_name}_maximum_not_kept", NAN, "m, total = new,", "m, total = m,"),
        (f"{_name}_weight_by_the_old_maximum", NAN, "math.exp(score - new)", "math.exp(score - m)"),
        (f"{_name}_rescales_every_key", VALUES,
         "acc[d // TILE] *= factor\n            for j in range(TILE):\n",
         "for j in range(TILE):\n                acc[d // TILE] *= factor\n"),
        (f"{_name}_each_thread_its_maximum", NAN, "max(m, row_max(score))", "max(m, score)"),
        (f"{_name}_each_thread_its_sum", VALUES, "row_sum(weight)", "weight"),
        (f"{_name}_no_maximum", NAN, "new = max(m, row_max(score))", "new = ZERO"),
        (f"{_name}_maximum_of_the_tile", VALUES, "max(m, row_max(score))", "row_max(score)"),
        (f"{_name}_lse_of_two", LSE, "math.log(", "math.log2("),
        (f"{_name}_lse_without_maximum", LSE, "m + math.log(total)", "math.log(total)"),
        (f"{_name}_never_divides", VALUES, " / total if total > ZERO else ZERO", ""),
        (f"{_name}_nothing_by_nothing", NAN, " / total if total > ZERO else ZERO", " / total"),
        (f"{_name}_no_scale", VALUES, "score * scale if", "score if"),
        (f"{_name}_scale_twice", VALUES, "score * scale if", "score * scale * scale if"),
        (f"{_name}_masked_is_zero", VALUES, " else MINUS_INF", " else ZERO"),
        (f"{_name}_maximum_from_zero", VALUES, "m, total = LOWEST", "m, total = ZERO"),
        (f"{_name}_writes_outside", OUTSIDE, "    if i < T:\n", "    if i >= 0:\n"),
        (f"{_name}_reads_outside", OUTSIDE, "q[n, i, d] if i < T else ZERO", "q[n, i, d]"),
        (f"{_name}_values_transposed", OUTSIDE + "|uninitialised|" + VALUES, "vs[j, d]",
         "vs[d, j]"),
        (f"{_name}_weights_transposed", RACE + "|" + VALUES, "weights[row, j]", "weights[j, row]"),
        (f"{_name}_keys_on_their_side", OUTSIDE + "|uninitialised|" + VALUES, "ks[col, d]",
         "ks[d, col]"),
        (f"{_name}_keys_of_the_row", VALUES, "ks[col, d]", "ks[row, d]"),
        (f"{_name}_slot_of_the_column", VALUES + "|in place of `//`", "acc[d // TILE] += w",
         "acc[d % TILE] += w"),
        (f"{_name}_first_tile_only", VALUES, "range(0, ", "range(0, min(TILE, S) if S else "),
        (f"{_name}_leaves_early", "barrier|exit|inactive", "    m, total = LOWEST, ZERO\n",
         "    m, total = LOWEST, ZERO\n    if i >= T:\n        return\n"),
        (f"{_name}_keys_for_queries", OUTSIDE + "|" + VALUES + "|never written",
         "(_, T, D), S, i = q.shape, k.shape[1],", "(_, S, D), T, i = q.shape, k.shape[1],"),
        (f"{_name}_up_to_32", OUTSIDE, "local.array(SLOTS,", "local.array(4,"),
        (f"{_name}_all_write_lse", "race|several threads|more than one thread", "if col == 0",
         "if col < 2"))
mistakes("flash_attention",
    ("flash_tail_scored_0", VALUES, " if first + col < S else MINUS_INF", ""),
    ("flash_tail_of_one_more", VALUES, "first + col < S", "first + col <= S"),
    ("flash_whole_tiles_only", VALUES, "range(0, S, TILE)", "range(0, S - TILE + 1, TILE)"),
    ("flash_first_keys_over_and_over", VALUES, "(ks, k, n, first)", "(ks, k, n, 0)"),
    ("flash_first_head_for_all", VALUES, "(vs, v, n, first)", "(vs, v, 0, first)"),
    ("flash_of_16_queries", "never written", "    if i < T:\n", "    if i < min(T, 16):\n"),
    ("flash_of_32_keys", VALUES, "range(0, S, TILE)", "range(0, min(S, 32), TILE)"),
    ("flash_divides_every_time", VALUES, "+= weights[row, j] * vs[j, d]",
     "+= weights[row, j] * vs[j, d] / total"))
mistakes("flash_attention_causal",
    ("causal_maximum_from_infinity", NAN, "m, total = LOWEST", "m, total = MINUS_INF"),
    ("causal_not_masked", VALUES, "first + col <= i + S - T", "first + col < S"),
    ("causal_not_to_itself", VALUES, "first + col <= i", "first + col < i"),
    ("causal_one_too_far", VALUES, "first + col <= i + S", "first + col <= i + 1 + S"),
    ("causal_aligned_above", VALUES, "first + col <= i + S - T", "first + col <= i"),
    ("causal_looks_ahead", VALUES, "first + col <= i + S - T", "first + col >= i + S - T"),
    ("causal_skips_nothing", READ_K, "min(S, TILE * (cuda.blockIdx.x + 1) + S - T)", "S"),
    ("causal_skips_one_too_late", READ_K, "(cuda.blockIdx.x + 1)", "(cuda.blockIdx.x + 2)"),
    ("causal_skips_one_too_early", VALUES, "(cuda.blockIdx.x + 1)", "cuda.blockIdx.x"),
    ("causal_tiles_aligned_above", VALUES + "|" + READ_K, "(cuda.blockIdx.x + 1) + S - T)",
     "(cuda.blockIdx.x + 1))"),
    ("causal_each_row_its_end", "barrier|exit|inactive|race",
     "TILE * (cuda.blockIdx.x + 1) + S - T", "i + 1 + S - T"),
    ("causal_masked_by_1e30", VALUES, "else MINUS_INF", "else np.float32(-1e30)"),
    ("causal_lse_of_nothing_is_0", LSE, "m + math.log(total)",
     "m + math.log(total) if total > ZERO else ZERO"),
    ("causal_lse_of_nothing_is_finite", LSE, "math.log(total)",
     "math.log(max(total, np.float32(1e-30)))"),
    ("causal_of_32_queries", "never written", "    if i < T:\n", "    if i < min(T, 32):\n"),
    ("causal_leaves_nothing", "never written", "    if i < T:\n",
     "    if i < T and i + S - T >= 0:\n"))


@wrong("flash_attention", READ_K)
@cuda.jit
def flash_without_tiles(q, k, v, scale, o, lse):
    acc = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), i = q.shape, TILE * cuda.blockIdx.x + row
    m, total = LOWEST, ZERO
    for d in range(col, D, TILE):
        acc[d // TILE] = ZERO
    for j in range(k.shape[1]):
        part = ZERO
        for d in range(col, D, TILE):
            part += (q[n, i, d] if i < T else ZERO) * k[n, j, d]
        score = row_sum(part) * scale
        new = max(m, score)
        factor, weight, m = math.exp(m - new), math.exp(score - new), new
        total = total * factor + weight
        for d in range(col, D, TILE):
            acc[d // TILE] = acc[d // TILE] * factor + weight * v[n, j, d]
    if i < T:
        for d in range(col, D, TILE):
            o[n, i, d] = acc[d // TILE] / total if total > ZERO else ZERO
        if col == 0:
            lse[n, i] = m + math.log(total)


@wrong("flash_attention", GROWS)
@cuda.jit
def flash_keeps_its_scores(q, k, v, scale, o, lse):
    # Tiles, and a strip of the matrix: eight rows with a score for each key.
    scores = cuda.shared.array((TILE, 512), np.float32)
    tile = cuda.shared.array((TILE, PADDED), np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, i = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    m, total = LOWEST, ZERO
    for first in range(0, S, TILE):
        fetch_tile(tile, k, n, first)
        cuda.syncthreads()
        score = ZERO
        for d in range(D):
            score += (q[n, i, d] if i < T else ZERO) * tile[col, d]
        scores[row, first + col] = score * scale if first + col < S else MINUS_INF
        m = max(m, row_max(scores[row, first + col]))
        cuda.syncthreads()
    for j in range(S):
        total += math.exp(scores[row, j] - m)
    for d in range(col, D if i < T else 0, TILE):
        o[n, i, d] = ZERO
    for first in range(0, S, TILE):
        fetch_tile(tile, v, n, first)
        cuda.syncthreads()
        for d in range(col, D if i < T else 0, TILE):
            for j in range(min(TILE, S - first)):
                o[n, i, d] += math.exp(scores[row, first + j] - m) / total * tile[j, d]
        cuda.syncthreads()
    if i < T and col == 0:
        lse[n, i] = m + math.log(total)
