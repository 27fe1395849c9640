"""Lesson 19: FlashAttention: bytes foreseen, a key at a time, and a merge.

The kernels with tiles are in lesson_19_tiles.py.
Most wrong kernels are the solution with one mistake in it, and `mistakes` says which text stands in
place of which. The messages about barriers, races and memory outside an array are the sanitizer's
own.
"""

import math

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import online_merge, warp_max, warp_sum
from course_lib.teach.exercises.lesson_19 import (
    LANE_SLOTS,
    LOWEST,
    MINUS_INF,
    ONE,
    ZERO,
)

OUTSIDE = "out-of-bounds|negative"
VALUES = "wrong values in|times what it should be"
LSE = "wrong values in lse"
NAN = "NaN was computed|" + VALUES
RACE = "race"
GROWS = "should not grow with the number of keys"
READ_K = "k is read"

# ---- predict_flash(B, H, T, D, ROWS) ---------------------------------------------------------


@right("predict_flash")
def predict_kernel_by_kernel(B, H, T, D, ROWS):
    row, matrix = 4 * D, 4 * T**2
    scores, softmax, output = 2 * T * row + matrix, 2 * matrix, matrix + 2 * T * row
    n_blocks = math.ceil(T / ROWS)
    tiled = B * H * (T * row + n_blocks * 2 * T * row + T * row)
    return B * H * (scores + softmax + output), tiled, 4 * B * H * T**2 * D / tiled


@right("predict_flash")
def predict_by_blocks(B, H, T, D, ROWS):
    tiled = 0
    for first in range(0, T, ROWS):
        tiled += 2 * min(ROWS, T - first) * D + 2 * T * D
    return [16 * B * H * T * (T + D), 4 * B * H * tiled, T * T * D / tiled]


mistakes("predict_flash",
    ("predict_softmax_in_place", "wrong values in three_kernels", "4 * matrix", "3 * matrix"),
    ("predict_one_head", "wrong values in", "array, matrix = B * H", "array, matrix = 1"),
    ("predict_numbers_for_bytes", "wrong values in", "4 * T * D, 4 * T * T  #", "T * D, T * T  #"),
    ("predict_keys_once", "wrong values in tiled", " * -(-T // ROWS)", ""),
    ("predict_whole_tiles", "wrong values in tiled", "-(-T // ROWS)", "(T // ROWS)"),
    ("predict_queries_each_time", "wrong values in tiled", "2 * array + 2 * array *",
     "4 * array *"),
    ("predict_keys_alone", "wrong values in tiled", "+ 2 * array *", "+ array *"),
    ("predict_one_product", "wrong values in flops_per_byte", "heads * 4 * T", "heads * 2 * T"),
    ("predict_multiplications", "wrong values in flops_per_byte", "heads * 4 * T", "heads * T"),
    ("predict_flops_of_the_first_way", "wrong values in flops_per_byte", "flops / tiled",
     "flops / three_kernels"),
    ("predict_two_answers", "three|3 values", ", flops / tiled", ""))


# ---- attention_streaming(q, k, v, scale, o, lse) ---------------------------------------------


@right("attention_streaming")
@cuda.jit
def streaming_in_two_cases(q, k, v, scale, o, lse):
    # Rescales only where there is a new maximum, as lesson 3 has derived it.
    acc = cuda.local.array(LANE_SLOTS, np.float32)
    T, lane, row = q.shape[1], cuda.threadIdx.x % 32, cuda.grid(1) // 32
    if row >= q.shape[0] * T:
        return
    n, i, m, total = row // T, row % T, MINUS_INF, ZERO
    for slot in range(LANE_SLOTS):
        acc[slot] = ZERO
    for j in range(k.shape[1]):
        part = ZERO
        for d in range(lane, q.shape[2], 32):
            part += q[n, i, d] * scale * k[n, j, d]
        score = warp_sum(part)
        weight = ONE
        if score > m:
            factor = math.exp(m - score)
            total *= factor
            for slot in range(LANE_SLOTS):
                acc[slot] *= factor
            m = score
        else:
            weight = math.exp(score - m)
        total += weight
        for d in range(lane, q.shape[2], 32):
            acc[d // 32] += weight * v[n, j, d]
    for d in range(lane, q.shape[2], 32):
        o[n, i, d] = acc[d // 32] / max(total, np.float32(1e-30))
    if lane == 0:
        lse[n, i] = m + math.log(total)


@right("attention_streaming")
@cuda.jit
def streaming_lanes_share_keys(q, k, v, scale, o, lse):
    # Each lane reads every 32nd key; in the end the 32 parts are merged.
    acc = cuda.local.array(128, np.float32)
    (N, T, D), lane, row = q.shape, cuda.threadIdx.x % 32, cuda.grid(1) // 32
    if row < N * T:
        n, i, m, total = row // T, row % T, LOWEST, ZERO
        for d in range(D):
            acc[d] = ZERO
        for j in range(lane, k.shape[1], 32):
            score = ZERO
            for d in range(D):
                score += q[n, i, d] * k[n, j, d]
            score *= scale
            new = max(m, score)
            factor, weight, m = math.exp(m - new), math.exp(score - new), new
            total = total * factor + weight
            for d in range(D):
                acc[d] = acc[d] * factor + weight * v[n, j, d]
        largest = warp_max(m)
        factor = math.exp(m - largest)
        total = warp_sum(total * factor)
        for d in range(D):
            value = warp_sum(acc[d] * factor)
            if lane == d % 32:
                o[n, i, d] = value / total if total > ZERO else ZERO
        if lane == 0:
            lse[n, i] = largest + math.log(total)


@right("attention_streaming")
@cuda.jit
def streaming_by_the_merge(q, k, v, scale, o, lse):
    # A key is a part of its own, with the pair (score, 1). The queries wait in registers.
    acc = cuda.local.array(LANE_SLOTS, np.float32)
    qs = cuda.local.array(LANE_SLOTS, np.float32)
    (N, T, D), lane = q.shape, cuda.threadIdx.x % 32
    for row in range(cuda.grid(1) // 32, N * T, cuda.gridsize(1) // 32):
        n, i = row // T, row % T
        m, total = LOWEST, ZERO
        for d in range(lane, D, 32):
            qs[d // 32], acc[d // 32] = q[n, i, d], ZERO
        for j in range(k.shape[1]):
            score = ZERO
            for d in range(lane, D, 32):
                score += qs[d // 32] * k[n, j, d]
            score = scale * warp_sum(score)
            before = m
            m, total = online_merge(m, total, score, ONE)
            for d in range(lane, D, 32):
                slot = d // 32
                acc[slot] = acc[slot] * math.exp(before - m) + math.exp(score - m) * v[n, j, d]
        if lane == 31:
            lse[n, i] = MINUS_INF
            if total > ZERO:
                lse[n, i] = m + math.log(total)
        for d in range(lane, D, 32):
            o[n, i, d] = acc[d // 32] / (total if total > ZERO else ONE)


FACTOR = "math.exp(m - new)"
mistakes("attention_streaming",
    ("streaming_output_keeps_its_scale", VALUES, "acc[d // 32] * factor + w", "acc[d // 32] + w"),
    ("streaming_sum_keeps_its_scale", VALUES, "total * factor + weight", "total + weight"),
    ("streaming_factor_inverted", NAN, FACTOR, "math.exp(new - m)"),
    ("streaming_maximum_not_kept", NAN, "m, total = new,", "m, total = m,"),
    ("streaming_maximum_of_the_last", VALUES, "max(m, score * scale)", "score * scale"),
    ("streaming_weight_by_the_old_maximum", NAN, "score * scale - new)", "score * scale - m)"),
    ("streaming_divides_every_time", VALUES, " + weight * v[n, j, d]",
     " + weight * v[n, j, d] / total"),
    ("streaming_never_divides", VALUES, " / total if total > ZERO else ZERO", ""),
    ("streaming_lse_of_two", LSE, "math.log(", "math.log2("),
    ("streaming_lse_without_maximum", LSE, "m + math.log(total)", "math.log(total)"),
    ("streaming_lse_before_the_logarithm", LSE, "math.log(total)", "total"),
    ("streaming_no_scale", VALUES, "max(m, score * scale)", "max(m, score)",
     "score * scale - new", "score - new"),
    ("streaming_scale_twice", VALUES, "max(m, score * scale)", "max(m, score * scale * scale)",
     "score * scale - new", "score * scale * scale - new"),
    ("streaming_scale_in_the_maximum_only", NAN, "score * scale - new", "score - new"),
    ("streaming_scale_of_its_own", VALUES, "        m, total = MINUS_INF, ZERO\n",
     "        m, total = MINUS_INF, ZERO\n        scale = ONE / math.sqrt(np.float32(D))\n"),
    ("streaming_no_maximum", NAN, "max(m, score * scale)", "ZERO"),
    ("streaming_maximum_from_zero", VALUES, "m, total = MINUS_INF", "m, total = ZERO"),
    ("streaming_maximum_from_1e30", VALUES, "m, total = MINUS_INF", "m, total = np.float32(-1e30)"),
    ("streaming_no_guard", OUTSIDE, "row < N * T", "row >= 0"),
    ("streaming_heads_for_queries", OUTSIDE + "|" + VALUES, "row // T, row % T",
     "row % T, row // T"),
    ("streaming_keys_for_queries", OUTSIDE + "|never written|" + VALUES + "|ZeroDivision|race",
     "row // T, row % T", "row // k.shape[1], row % k.shape[1]"),
    ("streaming_as_many_keys_as_queries", OUTSIDE + "|" + VALUES, "range(k.shape[1])", "range(T)"),
    ("streaming_without_the_last_key", VALUES, "range(k.shape[1])", "range(k.shape[1] - 1)"),
    ("streaming_first_key_only", VALUES, "range(k.shape[1])", "range(min(1, k.shape[1]))"),
    ("streaming_each_lane_its_own_score", VALUES + "|" + NAN, "range(5)", "range(0)"),
    ("streaming_score_in_lane_0", VALUES, "shfl_xor_sync", "shfl_down_sync"),
    ("streaming_four_rounds", VALUES, "range(5)", "range(4)"),
    ("streaming_up_to_64", OUTSIDE, "local.array(LANE_SLOTS,", "local.array(2,"),
    ("streaming_nothing_by_nothing", NAN, " / total if total > ZERO else ZERO", " / total"),
    ("streaming_output_not_set", "uninitialised-read", "acc[d // 32] = ZERO", "pass"),
    ("streaming_values_transposed", OUTSIDE + "|" + VALUES, "v[n, j, d]", "v[n, d, j]"),
    ("streaming_first_head_for_all", VALUES, "k[n, j, d]", "k[0, j, d]"),
    ("streaming_adds_up_keys", VALUES, "v[n, j, d]", "k[n, j, d]"),
    ("streaming_all_lanes_write_lse", "race|several threads|more than one thread",
     "if lane == 0", "if lane < 2"),
    ("streaming_in_float64", "float64", "m, total = MINUS_INF, ZERO", "m, total = MINUS_INF, 0.0"))


@wrong("attention_streaming", READ_K)
@cuda.jit
def streaming_in_three_passes(q, k, v, scale, o, lse):
    # No matrix, but every score is made three times.
    (N, T, D), lane, row = q.shape, cuda.threadIdx.x % 32, cuda.grid(1) // 32
    if row < N * T:
        n, i, m, total = row // T, row % T, MINUS_INF, ZERO
        for j in range(k.shape[1]):
            part = ZERO
            for d in range(lane, D, 32):
                part += q[n, i, d] * k[n, j, d]
            m = max(m, warp_sum(part) * scale)
        for j in range(k.shape[1]):
            part = ZERO
            for d in range(lane, D, 32):
                part += q[n, i, d] * k[n, j, d]
            total += math.exp(warp_sum(part) * scale - m)
        for d in range(lane, D, 32):
            o[n, i, d] = ZERO
        for j in range(k.shape[1]):
            part = ZERO
            for d in range(lane, D, 32):
                part += q[n, i, d] * k[n, j, d]
            weight = math.exp(warp_sum(part) * scale - m) / total
            for d in range(lane, D, 32):
                o[n, i, d] += weight * v[n, j, d]
        if lane == 0:
            lse[n, i] = m + math.log(total)


@wrong("attention_streaming", GROWS)
@cuda.jit
def streaming_keeps_its_scores(q, k, v, scale, o, lse):
    # A row of the matrix after all: one score for each key.
    scores = cuda.shared.array((6, 1024), np.float32)
    (N, T, D), lane, row = q.shape, cuda.threadIdx.x % 32, cuda.grid(1) // 32
    warp, S = cuda.threadIdx.x // 32, k.shape[1]
    if row < N * T:
        n, i, m, total = row // T, row % T, MINUS_INF, ZERO
        for j in range(S):
            part = ZERO
            for d in range(lane, D, 32):
                part += q[n, i, d] * k[n, j, d]
            part = warp_sum(part) * scale
            m = max(m, part)
            if lane == 0:
                scores[warp, j] = part
        cuda.syncwarp()
        for j in range(S):
            total += math.exp(scores[warp, j] - m)
        for d in range(lane, D, 32):
            value = ZERO
            for j in range(S):
                value += math.exp(scores[warp, j] - m) * v[n, j, d]
            o[n, i, d] = value / total if total > ZERO else ZERO
        if lane == 0:
            lse[n, i] = m + math.log(total)


@wrong("attention_streaming", READ_K)
@cuda.jit
def streaming_every_lane_multiplies_all(q, k, v, scale, o, lse):
    acc = cuda.local.array(LANE_SLOTS, np.float32)
    (N, T, D), lane, row = q.shape, cuda.threadIdx.x % 32, cuda.grid(1) // 32
    if row < N * T:
        n, i, m, total = row // T, row % T, LOWEST, ZERO
        for d in range(lane, D, 32):
            acc[d // 32] = ZERO
        for j in range(k.shape[1]):
            score = ZERO
            for d in range(D):
                score += q[n, i, d] * k[n, j, d]
            score *= scale
            new = max(m, score)
            factor, weight, m = math.exp(m - new), math.exp(score - new), new
            total = total * factor + weight
            for d in range(lane, D, 32):
                acc[d // 32] = acc[d // 32] * factor + weight * v[n, j, d]
        for d in range(lane, D, 32):
            o[n, i, d] = acc[d // 32] / total if total > ZERO else ZERO
        if lane == 0:
            lse[n, i] = m + math.log(total)


# Right where checks of fixed cases look, and wrong elsewhere; and who does the work.
mistakes("predict_flash",
    ("predict_short_rows", "wrong values in", "4 * T * D, ", "4 * T * min(D, 256), "),
    ("predict_small_models", "wrong values in", "matrix = B * H", "matrix = min(B * H, 400)"))
mistakes("attention_streaming",
    ("streaming_of_32_keys", VALUES, "range(k.shape[1])", "range(min(k.shape[1], 32))"),
    ("streaming_of_16_queries", "never written", "row < N * T", "row < min(N * T, 16)"),
    ("streaming_with_a_table_for_32", OUTSIDE, "        m, total = MINUS_INF, ZERO\n",
     "        m, total = MINUS_INF, ZERO\n        scores = cuda.local.array(32, np.float32)\n",
     "        new = max", "        scores[j] = score\n            new = max"))


@wrong("attention_streaming", "writes everything|share the work")
@cuda.jit
def streaming_by_one_thread(q, k, v, scale, o, lse):
    if cuda.grid(1) == 0:
        for n in range(q.shape[0]):
            for i in range(q.shape[1]):
                m, total = LOWEST, ZERO
                for d in range(q.shape[2]):
                    o[n, i, d] = ZERO
                for j in range(k.shape[1]):
                    score = ZERO
                    for d in range(q.shape[2]):
                        score += q[n, i, d] * k[n, j, d]
                    new = max(m, score * scale)
                    factor, weight, m = math.exp(m - new), math.exp(score * scale - new), new
                    total = total * factor + weight
                    for d in range(q.shape[2]):
                        o[n, i, d] = o[n, i, d] * factor + weight * v[n, j, d]
                for d in range(q.shape[2]):
                    o[n, i, d] = o[n, i, d] / total if total > ZERO else ZERO
                lse[n, i] = m + math.log(total)


# ---- merge_attention(o1, lse1, o2, lse2, o, lse) ---------------------------------------------


@right("merge_attention")
@cuda.jit
def merge_by_the_difference(o1, lse1, o2, lse2, o, lse):
    # The share of the smaller part, from the distance of the two alone.
    row, d = cuda.grid(1) // max(1, o.shape[1]), cuda.grid(1) % max(1, o.shape[1])
    if row >= o.shape[0]:
        return
    least, most = min(lse1[row], lse2[row]), max(lse1[row], lse2[row])
    ratio = math.exp(least - most) if least > MINUS_INF else ZERO
    first, second = o1[row, d], o2[row, d]
    if lse1[row] < lse2[row]:
        first, second = second, first
    o[row, d] = first + (second - first) * (ratio / (ONE + ratio))
    if d == o.shape[1] - 1:
        lse[row] = most + math.log(ONE + ratio)


@right("merge_attention")
@cuda.jit
def merge_by_shares_of_the_whole(o1, lse1, o2, lse2, o, lse):
    for i in range(cuda.grid(1), o.size, cuda.gridsize(1)):
        row, d = i // o.shape[1], i % o.shape[1]
        largest, total = online_merge(lse1[row], ONE, lse2[row], ONE)
        whole, value = MINUS_INF, ZERO
        if largest > MINUS_INF:
            whole = largest + math.log(total)
            value = math.exp(lse1[row] - whole) * o1[row, d]
            value += math.exp(lse2[row] - whole) * o2[row, d]
        o[row, d] = value
        if d == 0:
            lse[row] = whole


@wrong("merge_attention", "should share the work")
@cuda.jit
def merge_a_row_a_thread(o1, lse1, o2, lse2, o, lse):
    row = cuda.grid(1)
    if row < o.shape[0]:
        largest = max(max(lse1[row], lse2[row]), LOWEST)
        w1, w2 = math.exp(lse1[row] - largest), math.exp(lse2[row] - largest)
        for d in range(o.shape[1]):
            value = w1 * o1[row, d] + w2 * o2[row, d]
            o[row, d] = value / (w1 + w2) if w1 + w2 > ZERO else ZERO
        lse[row] = largest + math.log(w1 + w2)


LARGEST = "largest = max(max(lse1[row], lse2[row]), LOWEST)"
mistakes("merge_attention",
    ("merge_no_shift", NAN, LARGEST, "largest = ZERO"),
    ("merge_shift_of_the_first", NAN, LARGEST, "largest = max(lse1[row], LOWEST)"),
    ("merge_nothing_with_nothing", NAN, LARGEST, "largest = max(lse1[row], lse2[row])"),
    ("merge_divides_by_nothing", NAN, " / total if total > ZERO else ZERO", " / total"),
    ("merge_the_mean", VALUES, "(w1 * o1[row, d] + w2 * o2[row, d]) / total",
     "(o1[row, d] + o2[row, d]) / np.float32(2)"),
    ("merge_adds_up", VALUES, "(w1 * o1[row, d] + w2 * o2[row, d]) / total",
     "o1[row, d] + o2[row, d]"),
    ("merge_weights_swapped", VALUES, "w1 * o1[row, d] + w2 * o2", "w2 * o1[row, d] + w1 * o2"),
    ("merge_never_divides", VALUES, ") / total if", ") if"),
    ("merge_lse_is_the_larger", LSE, "largest + math.log(total)", "largest"),
    ("merge_lse_is_the_sum", LSE, "largest + math.log(total)", "lse1[row] + lse2[row]"),
    ("merge_lse_of_two", LSE, "math.log(", "math.log2("),
    ("merge_lse_without_the_larger", LSE, "largest + math.log", "math.log"),
    ("merge_lse_as_a_weight", NAN, "math.exp(lse1[row] - largest)", "lse1[row]",
     "math.exp(lse2[row] - largest)", "lse2[row]"),
    ("merge_no_guard", OUTSIDE, "i < o.size", "i >= 0"),
    ("merge_columns_for_rows", OUTSIDE + "|" + VALUES, "i // D, i % D", "i % D, i // D"),
    ("merge_all_write_lse", "race|several threads|more than one thread", "if d == 0", "if d < 2"),
    ("merge_of_512", "never written", "i < o.size", "i < min(o.size, 1024)"),
    ("merge_in_float64", "float64", "total = w1 + w2", "total = w1 + w2 + 0.0"))
