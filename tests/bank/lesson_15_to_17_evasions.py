"""Answers to lessons 15 to 17 that are right where checks of fixed cases look, and no further.

See lesson_00_to_07_evasions.py.
"""

import math

import numpy as np

from bank import right, wrong
from bank.lesson_15 import (
    augment_by_pixels,
    augment_held_in,
    mixup_by_rows,
    mixup_in_one_loop,
    self_times_by_looking_back,
    smooth_by_one_lane,
    smooth_in_three_passes,
    top_k_by_votes,
    top_k_of_one_thread,
)
from bank.lesson_16 import (
    clip_by_one_comparison,
    clip_with_a_shared_factor,
    ema_as_a_sum,
    next_scale_by_factors,
    next_scale_by_the_rest,
    pick_along_a_list,
    round_by_the_rest,
    unscale_by_a_factor,
    unscale_exchanging,
)
from bank.lesson_17 import (
    backward_by_shuffles,
    brightness_from_blue,
    brightness_written_out,
    fold_by_the_last_thread,
    integrate_by_three_threads,
    memory_from_the_end,
    streams_with_a_dictionary,
)
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import block_sum

OUTSIDE, UNWRITTEN, VALUES = "out-of-bounds", "never written", "wrong values in"
SERIAL = "writes everything"
ZERO, ONE = np.float32(0), np.float32(1)


def all_of(n):
    """The loop over n numbers that every thread shares, and the one of a single thread."""
    return f"range(cuda.grid(1), {n}, cuda.gridsize(1))", f"range(cuda.grid(1) * {n}, {n})"


# ---- lesson 15 -------------------------------------------------------------------------------

mistakes("augment",
    ("augment_by_one_thread", SERIAL, *all_of("x.size")),
    ("augment_of_432", UNWRITTEN, "cuda.grid(1), x.size,", "cuda.grid(1), min(x.size, 432),"),
    ("augment_paddings_of_two", VALUES, "h + draws[n, 0] - padding",
     "h + draws[n, 0] - min(padding, 2)"))
mistakes("smooth_cross_entropy",
    ("smooth_of_five_rows", UNWRITTEN, "if row < N:", "if row < min(N, 5):"))
mistakes("top_k",
    ("top_k_of_six_rows", VALUES, "if row < logits.shape[0]:", "if row < min(logits.shape[0], 6):"))
mistakes("self_times",
    ("self_times_of_fifteen_calls", VALUES, "range(len(begin))", "range(min(len(begin), 15))"))
mistakes("mixup",
    ("mixup_by_one_thread", SERIAL, *all_of("y.size"), *all_of("target.size")),
    ("mixup_of_140", UNWRITTEN, "cuda.grid(1), y.size,", "cuda.grid(1), min(y.size, 140),"))

mistakes("augment",
    ("augment_of_1024", UNWRITTEN, augment_held_in, "range(cuda.grid(1), x.size,",
     "range(cuda.grid(1), min(x.size, 1024),"),
    ("augment_four_channels", UNWRITTEN, augment_by_pixels, "for c in range(C)",
     "for c in range(min(C, 4))"),
    ("augment_paddings_of_five", VALUES, augment_held_in, "(padding - draws[n, 0])",
     "(min(padding, 5) - draws[n, 0])"),
    ("augment_mirrored_before_the_crop", VALUES, augment_by_pixels,
     "col = W - 1 - w + draws[n, 1] - padding", "col = W - 1 - col"),
    ("augment_columns_of_draws_swapped", VALUES, augment_by_pixels,
     "row, col = h + draws[n, 0] - padding, w + draws[n, 1] - padding",
     "row, col = h + draws[n, 1] - padding, w + draws[n, 0] - padding"))
mistakes("smooth_cross_entropy",
    ("smooth_of_32_rows", UNWRITTEN, smooth_in_three_passes, "row >= logits.shape[0]",
     "row >= min(logits.shape[0], 32)"),
    ("smooth_of_1024_columns", UNWRITTEN, smooth_in_three_passes,
     "    for col in range(lane, C, 32):\n        p = math",
     "    for col in range(lane, min(C, 1024), 32):\n        p = math"),
    ("smooth_not_over_the_rows", VALUES, smooth_by_one_lane,
     "            dlogits[row, col] /= np.float32(N)\n", ""),
    ("smooth_total_forgotten", VALUES, smooth_by_one_lane, " / total - wanted", " - wanted"),
    ("smooth_total_not_in_the_loss", VALUES, smooth_in_three_passes, " * own + math.log(total)",
     " * own"))
mistakes("top_k",
    ("top_k_of_32_rows", VALUES, top_k_by_votes, "row >= logits.shape[0]",
     "row >= min(logits.shape[0], 32)"),
    ("top_k_of_1024_columns", VALUES, top_k_by_votes, "range(0, C, 32)",
     "range(0, min(C, 1024), 32)"),
    ("top_k_one_too_few", VALUES, top_k_by_votes, "before <= k - 1", "before < k - 1"),
    ("top_k_infinite_ties_before", VALUES, top_k_of_one_thread, "and col > label:",
     "and col > label and not math.isinf(logits[row, label]):"))
mistakes("self_times", ("self_times_of_256_calls", VALUES, self_times_by_looking_back,
                        "range(len(begin))", "range(min(len(begin), 256))"))


@wrong("self_times", "'list' object has no attribute|list")
def self_times_of_an_array(begin, end, kind, n_kinds):
    # The lesson's next cell gives a list of kinds.
    took = end - begin
    found = np.array([took[kind.astype(int) == k].sum() for k in range(n_kinds)])
    for i in range(len(begin)):
        around = [j for j in range(i) if end[j] > begin[i]]
        if around:
            found[kind[around[-1]]] -= took[i]
    return found


mistakes("mixup",
    ("mixup_of_1024", UNWRITTEN, mixup_in_one_loop, "range(cuda.grid(1), y.size + target.size,",
     "range(cuda.grid(1), min(y.size, 1024) + target.size,", "if i < y.size:",
     "if i < min(y.size, 1024):", "divmod(i - y.size,", "divmod(i - min(y.size, 1024),"),
    ("mixup_of_32_classes", UNWRITTEN, mixup_by_rows, "range(target.shape[1])",
     "range(min(target.shape[1], 32))"))


mistakes("mixup",
    # Each makes the row of its partner, as if everybody were the partner of one.
    ("mixup_handed_out", "race|never written|" + VALUES, "i // P", "partner[i // P]",
     "i // C", "partner[i // C]"))


# ---- lesson 16 -------------------------------------------------------------------------------

mistakes("pick_device",
    ("pick_known_chips_only", "\n  expected  ", "capability >= (8, 0)",
     "capability in ((8, 0), (8, 6), (9, 0), (12, 0))"))
mistakes("round_bits",
    ("round_by_one_thread", SERIAL, *all_of("x.size")),
    ("round_of_90", UNWRITTEN, "cuda.grid(1), x.size,", "cuda.grid(1), min(x.size, 90),"),
    ("round_ten_bits_at_most", VALUES, "23 - kept", "23 - min(kept, 10)"))
mistakes("unscale",
    ("unscale_by_one_thread", SERIAL, *all_of("g.size")),
    ("unscale_of_90", VALUES, "cuda.grid(1), g.size,", "cuda.grid(1), min(g.size, 90),"))
mistakes("next_scale",
    ("next_scale_doubles", VALUES, "scale[0] * growth", "scale[0] + scale[0]"),
    ("next_scale_of_short_rows", VALUES, "== interval", "== min(interval, 2000)"))
mistakes("clip",
    ("clip_by_one_thread", SERIAL, *all_of("g.size")),
    ("clip_of_95", UNWRITTEN, "cuda.grid(1), g.size,", "cuda.grid(1), min(g.size, 95),"),
    ("clip_of_33_parts", VALUES, "range(squares.size)", "range(min(squares.size, 33))"))
mistakes("ema",
    ("ema_by_one_thread", SERIAL, *all_of("y.size")),
    ("ema_of_90", UNWRITTEN, "cuda.grid(1), y.size,", "cuda.grid(1), min(y.size, 90),"))

mistakes("pick_device",
    ("pick_takes_a_number", "\n  expected  ", pick_along_a_list, "if wanted in order:",
     'if wanted and wanted.split(":")[0] in order:', "order = (wanted,)",
     'order = (wanted.split(":")[0],)'),
    ("pick_takes_capitals", "\n  expected  ", pick_along_a_list,
     '    order = ("mps", "cuda", "cpu")',
     '    wanted = wanted and wanted.lower()\n    order = ("mps", "cuda", "cpu")'))


@wrong("pick_device", "was asked for by name, and find_(mps|cuda)\\(\\) was called")
def pick_looks_for_both(wanted, find_mps, find_cuda):
    if wanted not in (None, "auto", "mps", "cuda", "cpu"):
        raise ValueError(f"no such device: {wanted}")
    if wanted == "cpu":
        return "cpu", "bfloat16"
    mps, capability = find_mps(), find_cuda()
    if mps and wanted != "cuda":
        return "mps", "float16"
    if capability and wanted != "mps":
        return "cuda", "bfloat16" if capability[0] >= 8 else "float16"
    if wanted in ("mps", "cuda"):
        raise ValueError(f"{wanted} is not here")
    return "cpu", "bfloat16"


mistakes("round_bits",
    ("round_of_1024", UNWRITTEN, round_by_the_rest, "while i < x.size",
     "while i < min(x.size, 1024)"),
    ("round_20_bits_at_most", VALUES, round_by_the_rest, "(23 - kept)", "(23 - min(kept, 20))"),
    ("round_two_bits_at_least", VALUES, round_by_the_rest, "(23 - kept)", "(23 - max(kept, 2))"))
mistakes("unscale",
    ("unscale_of_1024", UNWRITTEN + "|" + VALUES, unscale_by_a_factor, "while i < g.size",
     "while i < min(g.size, 1024)"),
    ("unscale_stops_at_the_first", UNWRITTEN + "|" + VALUES, unscale_by_a_factor,
     "y[i], bad = ZERO, 1", "y[i], bad = ZERO, 1\n            break"),
    ("unscale_leaves_bad_ones_out", UNWRITTEN + "|" + VALUES, unscale_exchanging,
     "y[i] = ZERO if bad else g[i] / scale[0]",
     "if not bad:\n            y[i] = g[i] / scale[0]"),
    ("unscale_up_to_3e38", VALUES, unscale_exchanging, "math.isinf(g[i] / scale[0])",
     "abs(g[i] / scale[0]) > np.float32(3e38)"),
    ("unscale_whole_scales", VALUES, unscale_by_a_factor, "ONE / scale[0]",
     "ONE / max(np.float32(math.floor(scale[0])), np.float32(0.25))"))
mistakes("next_scale",
    ("next_scale_whole_growth", VALUES, next_scale_by_the_rest, "= growth * scale[0]",
     "= np.float32(math.floor(growth)) * scale[0]"),
    ("next_scale_below_2_127", VALUES, next_scale_by_factors, "np.float32(3.4e38)",
     "np.float32(1.7e38)"),
    ("next_scale_rows_of_65536", VALUES, next_scale_by_the_rest, "% interval",
     "% min(interval, 65536)"))
mistakes("clip",
    ("clip_of_1024", UNWRITTEN, clip_by_one_comparison, "while i < g.size",
     "while i < min(g.size, 1024)"),
    ("clip_of_256_parts", VALUES, clip_with_a_shared_factor, "range(squares.size)",
     "range(min(squares.size, 256))"),
    ("clip_parts_of_its_own", VALUES, clip_with_a_shared_factor, "range(squares.size)",
     "range(min(squares.size, g.size))"),
    ("clip_a_norm_of_0", VALUES, clip_by_one_comparison, "if norm > max_norm:",
     "if norm > max_norm and max_norm > ZERO:"))


@right("clip")
@cuda.jit
def clip_by_all_threads(g, squares, max_norm, y):
    # The threads of a block share the parts, as blocks of whole warps may.
    scratch, total = cuda.shared.array(32, np.float32), ZERO
    for k in range(cuda.threadIdx.x, squares.size, cuda.blockDim.x):
        total += squares[k]
    norm = math.sqrt(block_sum(total, scratch)) + np.float32(1e-6)
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        y[i] = g[i] * min(max_norm / norm, ONE)


mistakes("ema",
    ("ema_of_1024", UNWRITTEN, ema_as_a_sum, "while i < weight.size",
     "while i < min(weight.size, 1024)"),
    ("ema_of_the_larger", VALUES, ema_as_a_sum, "young if young < decay else decay",
     "decay if young < decay else young"))

# ---- lesson 17 -------------------------------------------------------------------------------

mistakes("brightness",
    ("brightness_by_one_thread", SERIAL, *all_of("y.size")),
    ("brightness_of_95", UNWRITTEN, "cuda.grid(1), y.size,", "cuda.grid(1), min(y.size, 95),"),
    ("brightness_of_small_planes", VALUES, "c * step_c", "c * min(step_c, 64)"))
mistakes("integrate",
    ("integrate_by_one_thread", SERIAL, *all_of("y.size")),
    ("integrate_without_the_largest", VALUES, "top = max(a, max(b, c))", "top = min(a, ZERO)"))
mistakes("integrate_backward",
    ("integrate_backward_of_95", VALUES,
     "cuda.grid(1), dy.size,", "cuda.grid(1), min(dy.size, 95),"))
mistakes("fold_batch_norm",
    ("fold_by_one_thread", "only 3 of 768 threads write",
     "range(cuda.threadIdx.x, weight.shape[1], cuda.blockDim.x)",
     "range(cuda.threadIdx.x * weight.shape[1], weight.shape[1])"),
    ("fold_of_32_channels", UNWRITTEN, "cuda.threadIdx.x, weight.shape[1],",
     "cuda.threadIdx.x, min(weight.shape[1], 32),"))
mistakes("two_streams",
    ("two_streams_of_eight_tasks", VALUES, "range(len(ms))", "range(min(len(ms), 8))"))
mistakes("checkpoint_memory",
    ("memory_of_six_stages", VALUES, "entering.sum()", "entering[:6].sum()"))
mistakes("brightness",
    ("brightness_of_1024", UNWRITTEN, brightness_written_out, "while i < y.shape[0] * y.shape[1]",
     "while i < min(y.shape[0] * y.shape[1], 1024)"),
    ("brightness_weights_above_0", VALUES, brightness_from_blue, "x[at] * weight[c]",
     "x[at] * abs(weight[c])"),
    ("brightness_of_planes_below_1024", VALUES + "|" + OUTSIDE, brightness_written_out,
     "red + step_c,", "red + min(step_c, 1024),"))
mistakes("integrate",
    ("integrate_of_1024", UNWRITTEN, integrate_by_three_threads, "while i < y.size",
     "while i < min(y.size, 1024)"),
    ("integrate_never_shuts_the_first", VALUES, integrate_by_three_threads,
     "found = math.exp(shared[0] - top) * colour[i]",
     "found = (ONE if math.isinf(shared[0]) else math.exp(shared[0] - top)) * colour[i]"))
mistakes("integrate_backward",
    ("integrate_backward_of_1024", UNWRITTEN, backward_by_shuffles, "while i < dy.size",
     "while i < min(dy.size, 1024)"),
    ("integrate_backward_of_16_warps", OUTSIDE + "|" + VALUES, backward_by_shuffles, "(3, 32)",
     "(3, 16)"),
    ("integrate_backward_weights_above_0", VALUES, backward_by_shuffles, "dy[i] * weight[1]",
     "dy[i] * abs(weight[1])"))
mistakes("fold_batch_norm",
    ("fold_of_1024_channels", UNWRITTEN, fold_by_the_last_thread, "while c < weight.shape[1]",
     "while c < min(weight.shape[1], 1024)"),
    ("fold_eps_of_1e_4_at_least", VALUES, fold_by_the_last_thread, "var[k] + eps",
     "var[k] + max(eps, np.float32(1e-4))"))
mistakes("two_streams",
    ("two_streams_of_256_tasks", "end has shape", streams_with_a_dictionary,
     "zip(stream.tolist(),", "zip(stream.tolist()[:256],", "waits_for.tolist(),",
     "waits_for.tolist()[:256],"))
mistakes("checkpoint_memory",
    ("memory_of_256_stages", VALUES, memory_from_the_end, "range(len(inside))",
     "range(min(len(inside), 256))"))
