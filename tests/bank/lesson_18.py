"""Lesson 18: what attention costs, its three kernels, their launcher, and one step back."""

import math

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import online_add, online_merge, warp_max, warp_online, warp_sum
from course_lib.teach.exercises.lesson_18 import (
    TILE,
    attention_output,
    attention_scores,
    scaled_softmax,
)

OUTSIDE, VALUES, UNWRITTEN = "out-of-bounds", "wrong values in", "never written"
WITHOUT = "behaves exactly like the right one without "
ZERO, ONE, MINUS_INF = np.float32(0), np.float32(1), np.float32(-np.inf)
ALL = 0xFFFFFFFF

# ---- predict_attention(B, H, T, D) -----------------------------------------------------------


@right("predict_attention")
def prediction_by_kernels(B, H, T, D):
    n_scores, n = B * H * T * T, B * H * T * D
    moved = 0
    for read, written in ((2 * n, n_scores), (n_scores, n_scores), (n_scores + n, n)):
        moved += 4 * (read + written)
    return n_scores * 4, moved, 2 * D * n_scores + 2 * T * n, 4 * D


@right("predict_attention")
def prediction_factored(B, H, T, D):
    heads = B * H
    return 4 * heads * T**2, 16 * heads * T * (T + D), 4 * heads * T**2 * D, D * 4


MOVED = "moved = (2 * inputs + matrix) + 2 * matrix + (matrix + 2 * inputs)"
mistakes("predict_attention",
    ("prediction_of_one_head", "wrong values in matrix_bytes",
     "matrix, inputs = 4 * B * H * T * T,", "matrix, inputs = 4 * B * T * T,"),
    ("prediction_counts_numbers", "wrong values in matrix_bytes",
     "4 * B * H * T * T, 4 * B * H * T * D", "B * H * T * T, B * H * T * D"),
    ("prediction_softmax_reads_only", "wrong values in moved_bytes", MOVED,
     MOVED.replace("2 * matrix", "matrix")),
    ("prediction_forgets_the_values", "wrong values in moved_bytes", MOVED,
     MOVED.replace("(matrix + 2 * inputs)", "(matrix + inputs)")),
    ("prediction_never_writes_the_matrix", "wrong values in moved_bytes", MOVED,
     "moved = 4 * inputs"),
    ("prediction_of_one_product", "wrong values in flops", "2 * (2 * B * H * T * T * D)",
     "2 * B * H * T * T * D"),
    ("prediction_without_additions", "wrong values in flops", "2 * (2 * B * H * T * T * D)",
     "2 * (B * H * T * T * D)"),
    ("prediction_crosses_at_the_head", "wrong values in crossover", "flops, 4 * D", "flops, D"),
    ("prediction_crosses_in_the_root", "wrong values in crossover", "flops, 4 * D",
     "flops, 2 * D"),
    ("prediction_no_return", "is the return missing", "return ", ""))

# ---- attention_scores(q, k, scores) ----------------------------------------------------------


@right("attention_scores")
@cuda.jit
def scores_of_a_thread_each(q, k, scores):
    # Without shared memory: each thread reads a query and a key of its own.
    H, T, D = q.shape[1:]
    b, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    j, i = cuda.grid(3)[:2]
    if i < T and j < k.shape[2]:
        total = ZERO
        for d in range(D):
            total += q[b, h, i, d] * k[b, h, j, d]
        scores[b, h, i, j] = total


@right("attention_scores")
@cuda.jit
def scores_with_turned_keys(q, k, scores):
    # The keys' tile is turned while it is stored, so that it is read by rows.
    sq = cuda.shared.array((TILE, TILE), np.float32)
    sk = cuda.shared.array((TILE, TILE), np.float32)
    B, H, S, D = k.shape
    batch, head = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, col = cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x
    total = ZERO
    for step in range((D + TILE - 1) // TILE):
        sq[y, x] = ZERO
        sk[x, y] = ZERO
        if step * TILE + x < D:
            if row < q.shape[2]:
                sq[y, x] = q[batch, head, row, step * TILE + x]
            if cuda.blockIdx.x * TILE + y < S:
                sk[x, y] = k[batch, head, cuda.blockIdx.x * TILE + y, step * TILE + x]
        cuda.syncthreads()
        for n in range(min(TILE, D - step * TILE)):
            total += sq[y, n] * sk[n, x]
        cuda.syncthreads()
    if row < q.shape[2] and col < S:
        scores[batch, head, row, col] = total


HEADS = "b, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H"
mistakes("attention_scores",
    ("scores_keys_not_transposed", "two indices of an array made inside swapped",
     "sk[tx, n]", "sk[n, tx]"),
    ("scores_heads_and_batch_swapped", f"{OUTSIDE}|{VALUES}|{UNWRITTEN}", HEADS,
     "b, h = cuda.blockIdx.z % H, cuda.blockIdx.z // H"),
    ("scores_of_the_first_head", f"{VALUES}|{UNWRITTEN}", HEADS, "b, h = cuda.blockIdx.z // H, 0"),
    ("scores_heads_counted_by_batch", f"{OUTSIDE}|{VALUES}|{UNWRITTEN}", HEADS,
     "b, h = cuda.blockIdx.z // q.shape[0], cuda.blockIdx.z % q.shape[0]"),
    ("scores_fetches_its_own_key", r"`j` in place of `TILE \* cuda.blockIdx.x \+ ty`",
     "key = TILE * cuda.blockIdx.x + ty", "key = j"),
    ("scores_no_barrier_before", "race", "else ZERO\n        cuda.syncthreads()\n        for",
     "else ZERO\n        for"),
    ("scores_no_barrier_after", "race", "sk[tx, n]\n        cuda.syncthreads()\n", "sk[tx, n]\n"),
    ("scores_keys_end_with_queries", f"{OUTSIDE}|{VALUES}", "key < S and", "key < T and"),
    ("scores_no_guard_for_d", OUTSIDE, "if i < T and d < D", "if i < T"),
    ("scores_no_guard_for_keys", OUTSIDE, "if key < S and d < D", "if d < D"),
    ("scores_no_guard_for_the_result", OUTSIDE, "if i < T and j < S:", "if i < T:"),
    ("scores_square", f"{OUTSIDE}|{UNWRITTEN}", "if i < T and j < S:", "if i < T and j < T:"),
    ("scores_T_and_S_swapped", f"{OUTSIDE}|{VALUES}", "scores[b, h, i, j]", "scores[b, h, j, i]"),
    ("scores_transposed", f"{OUTSIDE}|{VALUES}",
     "i, j = TILE * cuda.blockIdx.y + ty, TILE * cuda.blockIdx.x + tx",
     "i, j = TILE * cuda.blockIdx.x + ty, TILE * cuda.blockIdx.y + tx"),
    ("scores_of_whole_tiles", VALUES, "range(0, D, TILE)", "range(0, D // TILE * TILE, TILE)"),
    ("scores_of_the_first_tile", VALUES, "range(0, D, TILE)", "range(0, TILE, TILE)"),
    ("scores_scaled_already", VALUES, "= total", "= total / np.float32(math.sqrt(D))"),
    ("scores_tile_repeated", VALUES, "d = first + tx", "d = tx"))

# ---- scaled_softmax(scores, mask, scale, causal, y, lse) -------------------------------------


@right("scaled_softmax")
@cuda.jit
def softmax_in_three_passes(scores, mask, scale, causal, y, lse):
    # The masked scores are kept in y: a maximum, then a sum, then the quotient.
    B, H, T, S = scores.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row >= B * H * T:
        return
    b, h, i = row // (H * T), row // T % H, row % T
    mb, mh, mi = min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1), min(i, mask.shape[2] - 1)
    largest, total = MINUS_INF, ZERO
    for j in range(lane, S, 32):
        seen = mask[mb, mh, mi, min(j, mask.shape[3] - 1)]
        x = scores[b, h, i, j] * scale if seen and not (causal and j > i) else MINUS_INF
        y[b, h, i, j] = x
        largest = max(largest, x)
    largest = warp_max(largest)
    if largest == MINUS_INF:
        for j in range(lane, S, 32):
            y[b, h, i, j] = ZERO
        if lane == 0:
            lse[b, h, i] = MINUS_INF
        return
    for j in range(lane, S, 32):
        x = math.exp(y[b, h, i, j] - largest)
        y[b, h, i, j] = x
        total += x
    total = warp_sum(total)
    for j in range(lane, S, 32):
        y[b, h, i, j] /= total
    if lane == 0:
        lse[b, h, i] = largest + math.log(total)


@cuda.jit(device=True)
def rule(mask, causal, b, h, i, j):
    """Whether query i may look at key j; the strides of what broadcasts are 0."""
    B, H, T, S = mask.shape
    return mask[b * (B > 1), h * (H > 1), i * (T > 1), j * (S > 1)] and not (causal and j > i)


@right("scaled_softmax")
@cuda.jit
def softmax_merging_by_shuffles(scores, mask, scale, causal, y, lse):
    # Masked scores are −inf, and the shift is 0 where nothing else was met.
    (H, T, S), warp, lane = scores.shape[1:], cuda.grid(1) // 32, cuda.threadIdx.x & 31
    i, h, b = warp % T, warp // T % H, warp // T // H
    if b < scores.shape[0]:
        m, s = MINUS_INF, ZERO
        for j in range(lane, S, 32):
            x = scores[b, h, i, j] * scale if rule(mask, causal, b, h, i, j) else MINUS_INF
            if x > m:
                m, s = x, s * math.exp(m - x) + ONE
            elif x != MINUS_INF:
                s += math.exp(x - m)
        for k in range(5):
            other = cuda.shfl_xor_sync(ALL, m, 1 << k)
            m, s = online_merge(m, s, other, cuda.shfl_xor_sync(ALL, s, 1 << k))
        shift = ZERO if math.isinf(m) else m
        for j in range(S - 1 - lane, -1, -32):
            x = scores[b, h, i, j] * scale if rule(mask, causal, b, h, i, j) else MINUS_INF
            y[b, h, i, j] = math.exp(x - shift) / s if s != ZERO else ZERO
        if lane == 31:
            lse[b, h, i] = shift + math.log(s) if s != ZERO else MINUS_INF


# Masked scores are set to −inf, as the formula says, and nobody asks for rows of them.
@wrong("scaled_softmax", "NaN was computed")
@cuda.jit
def softmax_by_the_book(scores, mask, scale, causal, y, lse):
    B, H, T, S = scores.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < B * H * T:
        b, h, i = row // (H * T), row // T % H, row % T
        mb, mh, mi = b % mask.shape[0], h % mask.shape[1], i % mask.shape[2]
        largest, total = MINUS_INF, ZERO
        for j in range(lane, S, 32):
            x = scale * scores[b, h, i, j]
            if not mask[mb, mh, mi, j % mask.shape[3]] or (causal and j > i):
                x = MINUS_INF
            y[b, h, i, j] = x
            largest = max(largest, x)
        largest = warp_max(largest)
        for j in range(lane, S, 32):
            y[b, h, i, j] = math.exp(y[b, h, i, j] - largest)
            total += y[b, h, i, j]
        total = warp_sum(total)
        for j in range(lane, S, 32):
            y[b, h, i, j] /= total
        if lane == 0:
            lse[b, h, i] = largest + math.log(total) if total > ZERO else MINUS_INF


# A plain softmax of all scores, and then the mask: the rows do not sum to 1.
@wrong("scaled_softmax", f"{WITHOUT}the condition of an `if`")
@cuda.jit
def softmax_then_mask(scores, mask, scale, causal, y, lse):
    B, H, T, S = scores.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < B * H * T:
        b, h, i = row // (H * T), row // T % H, row % T
        mb, mh, mi = b % mask.shape[0], h % mask.shape[1], i % mask.shape[2]
        m, s = MINUS_INF, ZERO
        for j in range(lane, S, 32):
            m, s = online_add(m, s, scale * scores[b, h, i, j])
        m, s = warp_online(m, s)
        for j in range(lane, S, 32):
            value = ZERO
            if mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal):
                value = math.exp(scale * scores[b, h, i, j] - m) / s
            y[b, h, i, j] = value
        if lane == 0:
            lse[b, h, i] = m + math.log(s) if s > ZERO else MINUS_INF


SEEN = "mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal)"
FIRST, SECOND = (f"if {SEEN}:\n                {each} = " for each in ("m, s", "value"))
ADD = "m, s = online_add(m, s, scale * scores[b, h, i, j])"


def both(new):
    """The rule that says what may be seen, changed in both loops."""
    return FIRST, FIRST.replace(SEEN, new), SECOND, SECOND.replace(SEEN, new)


mistakes("scaled_softmax",
    ("softmax_no_scale", VALUES, ADD, ADD.replace("scale * ", ""),
     "exp(scale * scores", "exp(scores"),
    ("softmax_scale_in_the_sum_only", f"{WITHOUT}one of its factors",
     "exp(scale * scores", "exp(scores"),
    ("softmax_scale_twice", VALUES, ADD, ADD.replace("scale * ", "scale * scale * "),
     "exp(scale * scores", "exp(scale * scale * scores"),
    ("softmax_divides_by_the_scale", VALUES, ADD, "m, s = online_add(m, s, scores[b, h, i, j] / "
     "scale)", "exp(scale * scores[b, h, i, j] - m)", "exp(scores[b, h, i, j] / scale - m)"),
    ("softmax_causal_ignored", f"{WITHOUT}one part of an `and`",
     *both("mask[mb, mh, mi, j % mask.shape[3]]")),
    ("softmax_always_causal", VALUES, *both("mask[mb, mh, mi, j % mask.shape[3]] and j <= i")),
    ("softmax_causal_off_by_one", "`<` in place of `<=`", *both(SEEN.replace("j <= i", "j < i"))),
    ("softmax_causal_off_by_one_above", "a limit that is one too large",
     *both(SEEN.replace("j <= i", "j <= i + 1"))),
    ("softmax_causal_transposed", "`j >= i` in place of `j <= i`",
     *both(SEEN.replace("j <= i", "j >= i"))),
    ("softmax_causal_from_the_end", VALUES, *both(SEEN.replace("j <= i", "j <= i + S - T"))),
    ("softmax_mask_ignored", f"{WITHOUT}one part of an `and`", *both("(j <= i or not causal)")),
    ("softmax_mask_turned_round", VALUES, *both(f"not {SEEN}")),
    ("softmax_mask_or_causal", "`and` and `or` mixed up", *both(SEEN.replace(" and (", " or ("))),
    ("softmax_mask_only_afterwards", f"{WITHOUT}the condition of an `if`",
     FIRST, FIRST.replace(SEEN, "j <= i or not causal")),
    ("softmax_mask_only_in_the_sum", VALUES, SECOND, SECOND.replace(SEEN, "s > ZERO")),
    # 0 is a score like any other: e^0 counts.
    ("softmax_masked_are_zero", VALUES, FIRST,
     f"if not ({SEEN}):\n                m, s = online_add(m, s, ZERO)\n"
     "            else:\n                m, s = "),
    ("softmax_mask_of_the_first_example", r"`0` in place of `b % mask.shape\[0\]`",
     "mb, mh, mi = b % mask.shape[0]",
     "mb, mh, mi = 0"),
    ("softmax_mask_of_the_first_head", r"`0` in place of `h % mask.shape\[1\]`",
     "h % mask.shape[1]", "0"),
    ("softmax_mask_of_the_first_query", r"`0` in place of `i % mask.shape\[2\]`",
     "i % mask.shape[2]", "0"),
    ("softmax_mask_axes_swapped", f"{OUTSIDE}|{VALUES}", *both(SEEN.replace(
        "mh, mi", "mi, mh"))),
    ("softmax_mask_does_not_broadcast", OUTSIDE, "mb, mh, mi = b % mask.shape[0], "
     "h % mask.shape[1], i % mask.shape[2]", "mb, mh, mi = b, h, i"),
    ("softmax_empty_rows_are_even", VALUES, "            y[b, h, i, j] = value\n",
     "            y[b, h, i, j] = value if s > ZERO else np.float32(1) / np.float32(S)\n"),
    ("softmax_lse_of_nothing_is_zero", "wrong values in lse", "= m + math.log(s)",
     "= m + math.log(s) if s > ZERO else ZERO"),
    ("softmax_lse_without_maximum", f"{WITHOUT}one part of a sum",
     "m + math.log(s)", "math.log(s)"),
    ("softmax_lse_in_log2", "`math.log2` in place of `math.log`", "math.log(s)", "math.log2(s)"),
    ("softmax_no_maximum", "overflows to infinity", ADD,
     "s += math.exp(scale * scores[b, h, i, j])", "m, s = warp_online(m, s)",
     "m, s = ZERO, warp_sum(s)"),
    ("softmax_maximum_of_masked_ones", "or 0 is divided by 0", "        m, s = warp_online(m, s)\n",
     "        m, s = warp_online(m, s)\n        top, ignored = MINUS_INF, ZERO\n"
     "        for j in range(lane, S, 32):\n"
     "            top, ignored = online_add(top, ignored, scale * scores[b, h, i, j])\n"
     "        top, ignored = warp_online(top, ignored)\n"
     "        if s > ZERO:\n            m, s = top, s * math.exp(m - top)\n"),
    ("softmax_lanes_alone", VALUES, "        m, s = warp_online(m, s)\n", ""),
    ("softmax_of_32_keys", f"{VALUES}|{UNWRITTEN}", f"range(lane, S, 32):\n            {FIRST}",
     f"range(lane, min(S, 32), 32):\n            {FIRST}"),
    ("softmax_writes_32_keys", UNWRITTEN, "range(lane, S, 32):\n            value",
     "range(lane, min(S, 32), 32):\n            value"),
    ("softmax_over_the_queries", f"{OUTSIDE}|{VALUES}", ADD,
     "m, s = online_add(m, s, scale * scores[b, h, j, i])"),
    ("softmax_heads_and_batch_swapped", f"{OUTSIDE}|{VALUES}",
     "row // (H * T), row // T % H, row % T", "row // T % H, row // (H * T), row % T"),
    ("softmax_rows_counted_by_keys", f"{OUTSIDE}|{VALUES}", "row // (H * T), row // T % H, row % T",
     "row // (H * S), row // S % H, row % S"),
    ("softmax_no_guard", OUTSIDE, "if row < B * H * T:", "if True:"),
    ("softmax_rows_of_one_example", UNWRITTEN, "if row < B * H * T:", "if row < H * T:"),
    ("softmax_masked_not_written", UNWRITTEN, "            y[b, h, i, j] = value\n",
     "            if value > ZERO:\n                y[b, h, i, j] = value\n"))

# ---- attention_output(weights, v, o) ---------------------------------------------------------


@right("attention_output")
@cuda.jit
def output_of_a_thread_each(weights, v, o):
    B, H, T, S = weights.shape
    head = cuda.blockIdx.z
    d, i = cuda.grid(3)[:2]
    if i < T and d < v.shape[3]:
        total = ZERO
        for j in range(S):
            total += weights[head // H, head % H, i, j] * v[head // H, head % H, j, d]
        o[head // H, head % H, i, d] = total


@right("attention_output")
@cuda.jit
def output_with_a_tile_of_values(weights, v, o):
    # Only v is shared; the weights are read where they lie, the same one by a line of threads.
    tile = cuda.shared.array((TILE, TILE), np.float32)
    H, S, D = v.shape[1:]
    b, h, x, y = cuda.blockIdx.z // H, cuda.blockIdx.z % H, cuda.threadIdx.x, cuda.threadIdx.y
    row, col, total = cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x, ZERO
    for start in range(0, S, TILE):
        cuda.syncthreads()
        if start + y < S and col < D:
            tile[y, x] = v[b, h, start + y, col]
        cuda.syncthreads()
        if row < o.shape[2] and col < D:
            for n in range(min(TILE, S - start)):
                total += weights[b, h, row, start + n] * tile[n, x]
    if row < o.shape[2] and col < D:
        o[b, h, row, col] = total


mistakes("attention_output",
    ("output_values_transposed", "two indices of an array made inside swapped",
     "sv[n, tx]", "sv[tx, n]"),
    ("output_weights_transposed", VALUES, "sw[ty, n]", "sw[n, ty]"),
    ("output_by_columns_of_weights", f"{OUTSIDE}|{VALUES}", "weights[b, h, i, first + tx]",
     "weights[b, h, first + tx, i]"),
    ("output_heads_and_batch_swapped", f"{OUTSIDE}|{VALUES}|{UNWRITTEN}", HEADS,
     "b, h = cuda.blockIdx.z % H, cuda.blockIdx.z // H"),
    ("output_values_of_the_first_head", VALUES, "v[b, h, first + ty, d]", "v[b, 0, first + ty, d]"),
    ("output_no_barrier_before", "race", "else ZERO\n        cuda.syncthreads()\n        for",
     "else ZERO\n        for"),
    ("output_no_barrier_after", "race", "sv[n, tx]\n        cuda.syncthreads()\n", "sv[n, tx]\n"),
    ("output_no_guard_for_keys", OUTSIDE, "if first + ty < S and d < D", "if d < D"),
    ("output_no_guard_for_weights", OUTSIDE, "if i < T and first + tx < S", "if i < T"),
    ("output_no_guard_for_d", OUTSIDE, "if i < T and d < D:", "if i < T:"),
    ("output_over_the_queries", VALUES, "range(0, S, TILE)", "range(0, T, TILE)"),
    ("output_over_the_numbers", VALUES, "range(0, S, TILE)", "range(0, D, TILE)"),
    ("output_of_whole_tiles", VALUES, "range(0, S, TILE)", "range(0, S // TILE * TILE, TILE)"),
    ("output_of_the_last_tile", r"`=` in place of `\+=`",
     "            total += sw", "            total = sw"),
    ("output_of_tiles_apart", VALUES, "        for n in range(TILE):",
     "        total = ZERO\n        for n in range(TILE):"),
    ("output_keys_stay_the_first", VALUES, "v[b, h, first + ty, d]", "v[b, h, ty, d]"))

# ---- attention(q, k, v, mask, causal) --------------------------------------------------------


@cuda.jit
def output_scaled(weights, v, factor, o):
    H, S, D = v.shape[1:]
    b, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    d, i = cuda.grid(3)[:2]
    if i < o.shape[2] and d < D:
        total = ZERO
        for j in range(S):
            total += weights[b, h, i, j] * v[b, h, j, d]
        o[b, h, i, d] = total * factor


@right("attention")
def attention_from_other_kernels(q, k, v, mask, causal):
    B, H, T, D = q.shape
    S = k.shape[2]
    scores = np.empty((B, H, T, S), np.float32)
    weights = np.empty_like(scores)
    o, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    grid = (S + 7) // 8, (T + 7) // 8, B * H
    scores_of_a_thread_each[grid, (8, 8)](q, k, scores)
    softmax_in_three_passes[B * H * T, 32](scores, mask, np.float32(D**-0.5), causal, weights, lse)
    output_scaled[((D + 7) // 8, (T + 7) // 8, B * H), (8, 8)](weights, v, np.float32(1), o)
    return o, lse


@right("attention")
def attention_in_place(q, k, v, mask, causal):
    # The queries are scaled before, and the weights take the place of the scores.
    B, H, T, D = q.shape
    weights = np.empty((B, H, T, k.shape[2]), np.float32)
    lse, o = np.empty((B, H, T), np.float32), np.empty((B, H, T, D), np.float32)
    tall, wide, deep = (math.ceil(n / TILE) for n in (T, k.shape[2], D))
    scaled = q * np.float32(1 / math.sqrt(D))
    attention_scores[(wide, tall, B * H), (TILE, TILE)](scaled, k, weights)
    one = np.float32(1)
    scaled_softmax[-(-B * H * T // 8), 256](weights, mask, one, causal, weights, lse)
    attention_output[(deep, tall, B * H), (TILE, TILE)](weights, v, o)
    return o, lse


SCALE = "scale = np.float32(1 / math.sqrt(D))"
ROWS = "n_blocks = -(-B * H * T * 32 // BLOCK)"
mistakes("attention",
    ("attention_not_scaled", "line 5, `scale = ", SCALE, "scale = np.float32(1)"),
    ("attention_scaled_by_d", f"{WITHOUT}sqrt", SCALE, "scale = np.float32(1 / D)"),
    ("attention_scaled_up", VALUES, SCALE, "scale = np.float32(math.sqrt(D))"),
    ("attention_scaled_by_the_keys", VALUES, SCALE, "scale = np.float32(1 / math.sqrt(S))"),
    ("attention_scaled_twice", "line 6, `attention_scores", "(q, k, scores)",
     "(q * scale, k, scores)"),
    ("attention_never_causal", "line 8, `scaled_softmax", "scale, causal, weights",
     "scale, False, weights"),
    ("attention_always_causal", VALUES, "scale, causal, weights", "scale, True, weights"),
    ("attention_without_softmax", "line 9, `attention_output", "TILE)](weights, v, o)",
     "TILE)](scores, v, o)"),
    ("attention_with_keys_for_values", VALUES, "](weights, v, o)", "](weights, k, o)"),
    ("attention_keys_and_queries_swapped", f"{OUTSIDE}|{VALUES}", "](q, k, scores)",
     "](k, q, scores)"),
    ("attention_one_head", f"{VALUES}|{UNWRITTEN}",
     "attention_output[grid(D, T, B * H)", "attention_output[grid(D, T, B)"),
    ("attention_scores_of_one_head", "line 6, `attention_scores",
     "attention_scores[grid(S, T, B * H)", "attention_scores[grid(S, T, H)"),
    ("attention_grid_of_keys_for_output", "line 9, `attention_output", "[grid(D, T, B * H)",
     "[grid(S, T, B * H)"),
    ("attention_grid_transposed", "line 6, `attention_scores", "[grid(S, T, B * H)",
     "[grid(T, S, B * H)"),
    ("attention_a_thread_for_each_row", f"{VALUES}|{UNWRITTEN}", ROWS,
     "n_blocks = -(-B * H * T // BLOCK)"),
    ("attention_rows_rounded_down", "line 7, `n_blocks", ROWS,
     "n_blocks = B * H * T * 32 // BLOCK"),
    ("attention_rows_of_one_example", f"{VALUES}|{UNWRITTEN}", ROWS,
     "n_blocks = -(-H * T * 32 // BLOCK)"),
    ("attention_other_way_round", "shape", "return o, lse", "return lse, o"),
    ("attention_returns_no_lse", "2 values", "return o, lse", "return o"),
    ("attention_no_return", "is the return missing", "return o, lse", "o, lse"))


@wrong("attention", "no kernel was launched")
def attention_by_numpy(q, k, v, mask, causal):
    x = q @ k.swapaxes(2, 3) / np.float32(math.sqrt(q.shape[3]))
    seen = np.broadcast_to(mask, x.shape)
    if causal:
        seen = seen & np.tri(*x.shape[2:], dtype=bool)
    x = np.where(seen, x, -np.inf)
    m = np.where(seen.any(-1, keepdims=True), x.max(-1, keepdims=True), 0)
    e = np.exp(x - m)
    s = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(s))[..., 0].astype(np.float32)
    return (e / np.where(s, s, 1) @ v).astype(np.float32), lse


# ---- scaled_softmax_backward(dy, y, scale, dscores) ------------------------------------------


@right("scaled_softmax_backward")
@cuda.jit
def backward_by_shuffles(dy, y, scale, dscores):
    H, T, S = y.shape[1:]
    row, lane = cuda.grid(1) // 32, cuda.laneid
    if row < dy.shape[0] * H * T:
        b, h, i = row // T // H, row // T % H, row % T
        total = ZERO
        for first in range(0, S, 32):
            if first + lane < S:
                total += y[b, h, i, first + lane] * dy[b, h, i, first + lane]
        for k in range(5):
            total += cuda.shfl_xor_sync(ALL, total, 1 << k)
        for first in range(0, S, 32):
            j = first + lane
            if j < S:
                share = y[b, h, i, j]
                dscores[b, h, i, j] = scale * (share * dy[b, h, i, j] - share * total)


@right("scaled_softmax_backward")
@cuda.jit
def backward_scaled_first(dy, y, scale, dscores):
    # dscores holds scale · y · dy until the row's sum is known.
    B, H, T, S = dy.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row >= B * H * T:
        return
    b, h, i = row // (H * T), row // T % H, row % T
    total = ZERO
    for j in range(lane, S, 32):
        part = scale * (y[b, h, i, j] * dy[b, h, i, j])
        dscores[b, h, i, j] = part
        total += part
    total = warp_sum(total)
    for j in range(lane, S, 32):
        dscores[b, h, i, j] -= y[b, h, i, j] * total


DSCORES = "scale * y[b, h, i, j] * (dy[b, h, i, j] - total)"
mistakes("scaled_softmax_backward",
    ("backward_no_scale", VALUES, DSCORES, DSCORES.removeprefix("scale * ")),
    ("backward_divides_by_scale", VALUES, DSCORES, DSCORES.removeprefix("scale * ") + " / scale"),
    ("backward_scale_twice", VALUES, DSCORES, f"scale * {DSCORES}"),
    ("backward_scale_of_dy_only", VALUES, DSCORES, "y[b, h, i, j] * (scale * dy[b, h, i, j] - "
     "total)"),
    ("backward_without_the_sum", VALUES, DSCORES, "scale * y[b, h, i, j] * dy[b, h, i, j]"),
    ("backward_diagonal_only", VALUES, DSCORES,
     "scale * y[b, h, i, j] * (np.float32(1) - y[b, h, i, j]) * dy[b, h, i, j]"),
    ("backward_sum_of_dy", VALUES, "total += y[b, h, i, j] * dy", "total += dy"),
    ("backward_adds_the_sum", VALUES, "- total)", "+ total)"),
    ("backward_y_forgotten", VALUES, DSCORES, "scale * (dy[b, h, i, j] - total)"),
    ("backward_lanes_alone", VALUES, "        total = warp_sum(total)\n", ""),
    ("backward_of_32_keys", VALUES, "range(lane, S, 32):\n            total",
     "range(lane, min(S, 32), 32):\n            total"),
    ("backward_writes_32_keys", UNWRITTEN, "range(lane, S, 32):\n            dscores",
     "range(lane, min(S, 32), 32):\n            dscores"),
    ("backward_masked_not_written", UNWRITTEN, "            dscores[b, h, i, j] = ",
     "            if y[b, h, i, j] > ZERO:\n                dscores[b, h, i, j] = "),
    ("backward_heads_and_batch_swapped", f"{OUTSIDE}|{VALUES}|{UNWRITTEN}",
     "row // (H * T), row // T % H", "row // T % H, row // (H * T)"),
    ("backward_no_guard", OUTSIDE, "if row < B * H * T:", "if True:"),
    ("backward_over_the_queries", f"{OUTSIDE}|{VALUES}", "total += y[b, h, i, j] * dy[b, h, i, j]",
     "total += y[b, h, j, i] * dy[b, h, j, i]"))
