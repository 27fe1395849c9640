"""Answers to lessons 15 to 17 that are right where checks of fixed cases look, and no further.

See lesson_00_to_07_evasions.py.
"""

from bank.mistakes import mistakes

UNWRITTEN, VALUES = "never written", "wrong values in"
SERIAL = "writes everything"


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
