"""Answers to lesson 18 that are right where checks of fixed cases look, and no further.

See lesson_00_to_07_evasions.py.
"""

import math

import numpy as np

from bank import right, wrong
from bank.lesson_18 import (
    attention_from_other_kernels,
    attention_in_place,
    backward_by_shuffles,
    backward_scaled_first,
    output_of_a_thread_each,
    output_with_a_tile_of_values,
    scores_of_a_thread_each,
    scores_with_turned_keys,
    softmax_in_three_passes,
    softmax_merging_by_shuffles,
)
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.teach.exercises.lesson_18 import (
    attention_output,
    attention_scores,
    scaled_softmax,
)

OUTSIDE, UNWRITTEN, VALUES = "out-of-bounds", "never written", "wrong values in"
SERIAL, TWICE = "writes everything", "several threads do the same work"
TILE, BLOCK, ZERO = 8, 128, np.float32(0)

# ---- sizes that small cases don't exceed -----------------------------------------------------

mistakes("attention_scores",
    ("scores_of_128_numbers", VALUES, "range(0, D, TILE)", "range(0, min(D, 128), TILE)"),
    ("scores_of_32_queries", UNWRITTEN, "if i < T and j < S:", "if i < min(T, 32) and j < S:"),
    ("scores_of_32_keys", UNWRITTEN, scores_of_a_thread_each, "j < k.shape[2]",
     "j < min(k.shape[2], 32)"),
    ("scores_of_four_examples", f"{UNWRITTEN}|{VALUES}", scores_with_turned_keys,
     "cuda.blockIdx.z // H,", "min(cuda.blockIdx.z // H, 3),"),
    ("scores_of_four_heads", f"{UNWRITTEN}|{VALUES}", "cuda.blockIdx.z % H",
     "cuda.blockIdx.z % min(H, 4)"))
mistakes("attention_output",
    ("output_of_128_keys", VALUES, "range(0, S, TILE)", "range(0, min(S, 128), TILE)"),
    ("output_of_32_numbers", UNWRITTEN, output_of_a_thread_each, "d < v.shape[3]",
     "d < min(v.shape[3], 32)"),
    ("output_of_32_queries", UNWRITTEN, output_with_a_tile_of_values,
     "    if row < o.shape[2] and col < D:\n        o",
     "    if row < min(o.shape[2], 32) and col < D:\n        o"))
mistakes("scaled_softmax",
    ("softmax_of_1024_keys", VALUES, softmax_in_three_passes, "    for j in range(lane, S, 32):\n"
     "        x = math.exp", "    for j in range(lane, min(S, 1024), 32):\n        x = math.exp"),
    ("softmax_of_four_examples", VALUES, "mb, mh, mi = b % mask.shape[0]",
     "mb, mh, mi = b % min(mask.shape[0], 4)"),
    ("softmax_of_two_heads", OUTSIDE, "h % mask.shape[1]", "h % 2"),
    ("softmax_from_minus_65504", f"{VALUES}|NaN", "m, s = MINUS_INF, ZERO",
     "m, s = np.float32(-100), ZERO"),
    ("softmax_of_16_rows", UNWRITTEN, softmax_merging_by_shuffles, "if b < scores.shape[0]:",
     "if b < scores.shape[0] and warp < 16:"))
mistakes("scaled_softmax_backward",
    ("backward_of_1024_keys", VALUES, backward_by_shuffles,
     "in range(0, S, 32):\n            if first",
     "in range(0, min(S, 1024), 32):\n            if first"),
    ("backward_of_16_rows", UNWRITTEN, backward_scaled_first, "if row >= B * H * T:",
     "if row >= min(B * H * T, 16):"))
mistakes("attention",
    ("attention_of_eight_blocks", f"{VALUES}|{UNWRITTEN}", "n_blocks = -(-B * H * T * 32 // BLOCK)",
     "n_blocks = min(8, -(-B * H * T * 32 // BLOCK))"),
    ("attention_of_one_tile_of_keys", f"{VALUES}|{UNWRITTEN}", attention_in_place,
     "attention_scores[(wide,", "attention_scores[(1,"),
    ("attention_of_four_tiles_of_numbers", f"{VALUES}|{UNWRITTEN}", attention_from_other_kernels,
     "((D + 7) // 8, (T", "(min(4, (D + 7) // 8), (T"))

# ---- rules that hold for the masks of a lesson -----------------------------------------------

SEEN = "mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal)"
SUM = f"if {SEEN}:\n                m, s = "
mistakes("scaled_softmax",
    # Right where nothing hidden is far above what may be seen: exp then makes 0 of all the rest.
    ("softmax_mask_as_a_factor", VALUES, SUM,
     f"if ({SEEN}) or s == ZERO:\n                m, s = "),
    # Adds a large negative number instead: where nothing may be seen, all weights are alike.
    ("softmax_hides_by_a_number", VALUES, softmax_in_three_passes, "else MINUS_INF\n        y",
     "else np.float32(-1e30)\n        y"),
    ("softmax_padding_of_heads", VALUES, softmax_in_three_passes, "min(h, mask.shape[1] - 1)",
     "mask.shape[1] - 1"),
    ("softmax_last_query_sees_all", VALUES, softmax_in_three_passes, "not (causal and j > i)",
     "not (causal and j > i and i < T - 1)"),
    ("softmax_causal_without_mask", VALUES, SEEN + ":\n                value",
     "(j <= i if causal else mask[mb, mh, mi, j % mask.shape[3]]):\n                value"))
mistakes("attention",
    ("attention_causal_as_lower_right", VALUES, "scaled_softmax[n_blocks, BLOCK](scores, mask, "
     "scale, causal, weights, lse)", "seen = np.tri(T, S, S - T, dtype=bool) if causal else True\n"
     "    whole = np.ascontiguousarray(np.broadcast_to(mask & seen, scores.shape))\n"
     "    scaled_softmax[n_blocks, BLOCK](scores, whole, scale, False, weights, lse)"),
    ("attention_mask_of_the_first_example", VALUES, "(scores, mask, scale",
     "(scores, mask[:1], scale"))

# ---- who does the work -----------------------------------------------------------------------


@wrong("scaled_softmax", "should share the work")
@cuda.jit
def softmax_by_one_lane(scores, mask, scale, causal, y, lse):
    B, H, T, S = scores.shape
    row = cuda.grid(1) // 32
    if cuda.threadIdx.x % 32 == 0 and row < B * H * T:
        b, h, i = row // (H * T), row // T % H, row % T
        mb, mh, mi = b % mask.shape[0], h % mask.shape[1], i % mask.shape[2]
        largest, total = np.float32(-np.inf), ZERO
        for j in range(S):
            if mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal):
                largest = max(largest, scale * scores[b, h, i, j])
        for j in range(S):
            y[b, h, i, j] = ZERO
            if mask[mb, mh, mi, j % mask.shape[3]] and (j <= i or not causal):
                y[b, h, i, j] = math.exp(scale * scores[b, h, i, j] - largest)
                total += y[b, h, i, j]
        for j in range(S):
            if total > ZERO:
                y[b, h, i, j] /= total
        lse[b, h, i] = largest + math.log(total)


@wrong("attention_output", SERIAL)
@cuda.jit
def output_by_one_thread(weights, v, o):
    B, H, T, D = o.shape
    if cuda.grid(1) == 0 and cuda.threadIdx.y + cuda.blockIdx.y + cuda.blockIdx.z == 0:
        for b in range(B):
            for h in range(H):
                for i in range(T):
                    for d in range(D):
                        total = ZERO
                        for j in range(v.shape[2]):
                            total += weights[b, h, i, j] * v[b, h, j, d]
                        o[b, h, i, d] = total


mistakes("attention_scores",
    ("scores_of_every_head_in_each_block", TWICE, scores_of_a_thread_each,
     "    if i < T and j < k.shape[2]:\n        total",
     "    for head in range(H if i < T and j < k.shape[2] else 0):\n        h, total = head, ZERO\n"
     "        total"))
mistakes("scaled_softmax",
    ("softmax_lse_of_every_lane", TWICE, "if lane == 0:", "if lane >= 0:"),
    ("softmax_changes_the_scores", "changes its input scores", "m, s = warp_online(m, s)",
     "m, s = warp_online(m, s)\n        if lane < S:\n"
     "            scores[b, h, i, lane] = scale * scores[b, h, i, lane] / scale"))


@wrong("attention", "there before any kernel|have no part in it")
def attention_for_show(q, k, v, mask, causal):
    # Kernels are launched, and NumPy's result is returned.
    (B, H, T, D), S = q.shape, k.shape[2]
    scores, weights = np.empty((2, B, H, T, S), np.float32)
    lse, o = np.empty((B, H, T), np.float32), np.empty((B, H, T, D), np.float32)
    tall, scale = -(-T // TILE), np.float32(1 / math.sqrt(D))
    attention_scores[(-(-S // TILE), tall, B * H), (TILE, TILE)](q, k, scores)
    scaled_softmax[-(-B * H * T // 4), BLOCK](scores, mask, scale, causal, weights, lse)
    attention_output[(-(-D // TILE), tall, B * H), (TILE, TILE)](weights, v, o)
    x = q @ k.swapaxes(2, 3) * scale
    seen = np.broadcast_to(mask & np.tri(T, S, dtype=bool) if causal else mask, x.shape)
    x = np.where(seen, x, -np.inf)
    e = np.exp(x - np.where(seen.any(-1, keepdims=True), x.max(-1, keepdims=True), 0))
    total = e.sum(-1, keepdims=True)
    return (e / np.where(total, total, 1) @ v).astype(np.float32), lse


# ---- right, of yet another make --------------------------------------------------------------


@right("attention")
def attention_one_example_at_a_time(q, k, v, mask, causal):
    # A launch for each example, on parts of the arrays; the mask is written out.
    scale, whole = np.float32(q.shape[3] ** -0.5), (*q.shape[:3], k.shape[2])
    mask = np.ascontiguousarray(np.broadcast_to(mask, whole))
    o, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    for b in range(len(q)):
        part, n_heads = slice(b, b + 1), q.shape[1]
        scores, weights = np.empty((2, 1, *whole[1:]), np.float32)
        tall, wide, deep = (-(-n // TILE) for n in (*whole[2:], q.shape[3]))
        attention_scores[(wide, tall, n_heads), (TILE, TILE)](q[part], k[part], scores)
        scaled_softmax[n_heads * whole[2], 32](
            scores, mask[part], scale, causal, weights, lse[part]
        )
        attention_output[(deep, tall, n_heads), (TILE, TILE)](weights, v[part], o[part])
    return o, lse
