"""Lesson 16: which device, which bits, scaled gradients and their scale, clipping, averages."""

import math

import numpy as np

from bank import right, wrong
from bank.equivalent import EQUIVALENT
from bank.mistakes import mistakes
from course_lib import cuda

OUTSIDE, VALUES, NEVER = "out-of-bounds|negative", "wrong values", "never written"
ZERO, ONE, INF, TINY = np.float32(0), np.float32(1), np.float32(np.inf), np.float32(1e-6)
NEW = np.float32(10)
EXPONENT = 0x7F800000

# ---- pick_device(wanted, find_mps, find_cuda) ------------------------------------------------


@right("pick_device")
def pick_by_names(wanted, find_mps, find_cuda):
    if wanted == "cpu":
        return "cpu", "bfloat16"
    if wanted == "mps":
        if not find_mps():
            raise ValueError("no mps")
        return "mps", "float16"
    if wanted == "cuda":
        if (found := find_cuda()) is None:
            raise ValueError("no cuda")
        return "cuda", "float16" if found[0] < 8 else "bfloat16"
    if wanted is not None and wanted != "auto":
        raise ValueError(f"{wanted} is no device")
    if find_mps():
        return "mps", "float16"
    capability = find_cuda()
    if capability is None:
        return "cpu", "bfloat16"
    return "cuda", ("float16", "bfloat16")[capability[0] > 7]


@right("pick_device")
def pick_along_a_list(wanted, find_mps, find_cuda):
    order = ("mps", "cuda", "cpu")
    if wanted in order:
        order = (wanted,)
    elif wanted not in ("auto", None):
        raise ValueError(f"unknown: {wanted}")
    for name in order:
        if name == "cpu":
            return name, "bfloat16"
        found = find_mps() if name == "mps" else find_cuda()
        if found:
            old = name == "mps" or found < (8,)
            return name, "float16" if old else "bfloat16"
    raise ValueError(f"{wanted} was asked for, and is not here")


KNOWN = ('    if wanted not in (None, "auto", "mps", "cuda", "cpu"):\n'
         '        raise ValueError(f"the device must be auto, mps, cuda or cpu, not {wanted!r}")\n')
MISSING = ('    if wanted in ("mps", "cuda"):\n'
           '        raise ValueError(f"there is no {wanted} here")\n')
CHOICE = "\n  expected  "
mistakes("pick_device",
    ("pick_falls_back_in_silence", CHOICE, MISSING, ""),
    ("pick_takes_any_name", CHOICE, KNOWN, ""),
    ("pick_takes_parts_of_names", CHOICE, 'wanted not in (None, "auto", "mps", "cuda", "cpu"):',
     'wanted is not None and wanted not in "auto mps cuda cpu":'),
    ("pick_takes_longer_names", CHOICE, 'wanted not in (None, "auto", "mps", "cuda", "cpu"):',
     'wanted and not wanted.startswith(("auto", "mps", "cuda", "cpu")):'),
    ("pick_takes_no_name_for_none", CHOICE, "if wanted not in (None, ",
     "if wanted and wanted not in (None, "),
    ("pick_does_not_know_auto", CHOICE, '(None, "auto", "mps", "cuda", '
     '"cpu")', '(None, "mps", "cuda", "cpu")'),
    ("pick_cuda_first", CHOICE, 'if wanted in (None, "auto", "mps") and find_mps()',
     'if wanted in (None, "auto", "mps") and not find_cuda() and find_mps()'),
    ("pick_mps_for_cuda", CHOICE, '(None, "auto", "mps") and', '(None, "auto", "mps", "cuda") and'),
    ("pick_cuda_for_mps", CHOICE, '(None, "auto", "cuda") and',
     '(None, "auto", "cuda", "mps") and'),
    ("pick_always_asks", "the CPU was asked for by name",
     'if wanted in (None, "auto", "mps") and find_mps()',
     'if find_mps() and wanted in (None, "auto", "mps")'),
    ("pick_bfloat16_on_old_chips", CHOICE, ' if capability >= (8, 0) else "float16"', ""),
    ("pick_newer_than_ampere_only", CHOICE, ">= (8, 0)", ">= (9, 0)"),
    ("pick_compares_text", CHOICE, "capability >= (8, 0)", 'str(capability[0]) >= "8"'),
    ("pick_bfloat16_on_mps", CHOICE, '"mps", "float16"', '"mps", "bfloat16"'),
    ("pick_float16_on_the_cpu", CHOICE, 'return "cpu", "bfloat16"', 'return "cpu", "float16"'),
    ("pick_device_alone", "not a device and a precision", 'return "mps", "float16"',
     'return "mps"'),
    ("pick_another_error", CHOICE + "a ValueError that names 'cuda'", 'raise ValueError(f"there',
     'raise RuntimeError(f"there'),
    ("pick_error_without_a_name", CHOICE + "a ValueError that names",
     'cuda or cpu, not {wanted!r}"', 'cuda or cpu"'))


# ---- round_bits(x, kept, y) ------------------------------------------------------------------


@right("round_bits")
@cuda.jit
def round_by_the_rest(x, kept, y):
    i = cuda.grid(1)
    while i < x.size:
        bits, unit = np.int64(x[i]), np.int64(1) << (23 - kept)
        rest = bits % unit
        down = bits - rest
        if (bits >> 23) % 256 == 255:
            down = bits
        elif rest > unit // 2 or (rest == unit // 2 and down // unit % 2 == 1):
            down += unit
        y[i] = down
        i += cuda.gridsize(1)


@right("round_bits")
@cuda.jit
def round_apart_from_the_sign(x, kept, y):
    drop = 23 - kept
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        sign, size = np.int64(x[i]) >> 31, np.int64(x[i]) & 0x7FFFFFFF
        if size < EXPONENT:
            below = (1 << (drop - 1)) - 1
            if (size >> drop) % 2 == 1:
                below += 1
            size = (size + below) & ~((1 << drop) - 1)
        y[i] = (sign << 31) + size


ROUNDED = "(bits + (1 << (drop - 1)) - 1 + odd)"
mistakes("round_bits",
    ("round_cuts_off", VALUES, ROUNDED, "bits"),
    ("round_ties_up", VALUES, ROUNDED, "(bits + (1 << (drop - 1)))"),
    ("round_ties_down", VALUES, ROUNDED, "(bits + (1 << (drop - 1)) - 1)"),
    ("round_ties_to_odd", VALUES, ROUNDED, "(bits + (1 << (drop - 1)) - odd)"),
    ("round_by_a_whole", VALUES, ROUNDED, "(bits + (1 << drop) - 1 + odd)"),
    ("round_odd_of_the_last_bit", VALUES, "(bits >> drop) & 1", "bits & 1"),
    ("round_odd_of_what_goes", VALUES, "(bits >> drop) & 1", "(bits >> (drop - 1)) & 1"),
    ("round_makes_infinity_of_nan", VALUES, "if bits & EXPONENT != EXPONENT:", "if True:"),
    ("round_leaves_the_large", VALUES, "if bits & EXPONENT != EXPONENT:",
     "if bits < EXPONENT:"),
    ("round_to_tf32_always", VALUES, "23 - kept", "13"),
    ("round_keeps_one_less", VALUES, "23 - kept", "24 - kept"),
    ("round_forgets_to_shift_back", VALUES, " >> drop << drop", " >> drop"),
    ("round_not_in_place", NEVER, "        y[i] = bits", "            y[i] = bits"),
    ("round_no_loop", NEVER, "range(cuda.grid(1), x.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(x.size, cuda.grid(1) + 1))"),
    ("round_one_too_many", OUTSIDE, "x.size", "x.size + 1"))


# ---- unscale(g, scale, y, found) -------------------------------------------------------------


@right("unscale")
@cuda.jit
def unscale_by_a_factor(g, scale, y, found):
    i, factor, bad = cuda.grid(1), ONE / scale[0], 0
    while i < g.size:
        y[i] = g[i] * factor
        if y[i] - y[i] != ZERO:  # of an infinity and of NaN that is NaN
            y[i], bad = ZERO, 1
        i += cuda.gridsize(1)
    if bad:
        cuda.atomic.max(found, 0, 1)


@wrong("unscale", "wrong values in y")
@cuda.jit
def unscale_looks_at_what_it_got(g, scale, y, found):
    # A scale below 1 makes numbers larger: a finite one may become infinite.
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        bad = math.isinf(g[i]) or math.isnan(g[i])
        y[i] = ZERO if bad else g[i] / scale[0]
        if bad:
            cuda.atomic.exch(found, 0, 1)


@right("unscale")
@cuda.jit
def unscale_exchanging(g, scale, y, found):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        bad = math.isinf(g[i] / scale[0]) or math.isnan(g[i])
        y[i] = ZERO if bad else g[i] / scale[0]
        if bad:
            cuda.atomic.exch(found, 0, 1)


FINITE, RAISED = "if not abs(y[i]) < INF:", "found[0] = 1"
mistakes("unscale",
    ("unscale_infinities_only", VALUES, FINITE, "if abs(y[i]) == INF:"),
    ("unscale_nan_only", VALUES, FINITE, "if y[i] != y[i]:"),
    ("unscale_plus_infinity_only", VALUES, FINITE, "if y[i] == INF or y[i] != y[i]:"),
    ("unscale_not_below", VALUES, FINITE, "if abs(y[i]) >= INF:"),
    ("unscale_never_looks", VALUES, FINITE, "if False:"),
    ("unscale_always_found", VALUES, FINITE, "if True:"),
    ("unscale_by_65504", VALUES, FINITE, "if not abs(g[i]) < np.float32(65504):"),
    # 0 · NaN is NaN.
    ("unscale_times_zero", VALUES, "y[i] = ZERO", "y[i] *= ZERO"),
    ("unscale_lets_them_pass", VALUES, "            y[i] = ZERO\n", ""),
    ("unscale_no_flag", VALUES, f"            {RAISED}\n", ""),
    ("unscale_counts", VALUES, RAISED, "cuda.atomic.add(found, 0, 1)"),
    ("unscale_adds_without_an_atomic", "race|wrong values", RAISED, "found[0] += 1"),
    ("unscale_last_one_decides", "race|wrong values", FINITE, f"found[0] = 0\n        {FINITE}"),
    ("unscale_multiplies", VALUES, "g[i] / scale[0]", "g[i] * scale[0]"),
    ("unscale_not_at_all", VALUES, "g[i] / scale[0]", "g[i]"),
    ("unscale_one_scale_each", OUTSIDE, "scale[0]", "scale[i]"),
    ("unscale_no_loop", VALUES, "range(cuda.grid(1), g.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(g.size, cuda.grid(1) + 1))"),
    ("unscale_one_too_many", OUTSIDE, "g.size", "g.size + 1"))


# ---- next_scale(found, scale, good, growth, backoff, interval, new_scale, new_good) ----------


@right("next_scale")
@cuda.jit
def next_scale_by_factors(found, scale, good, growth, backoff, interval, new_scale, new_good):
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == cuda.blockDim.x - 1:
        count, factor = good[0] + 1, ONE
        if found[0] > 0:
            count, factor = 0, backoff
        if count >= interval:
            count, factor = 0, growth
        if scale[0] > np.float32(3.4e38) / factor:
            factor = ONE
        new_good[0], new_scale[0] = count, scale[0] * factor


@right("next_scale")
@cuda.jit
def next_scale_by_the_rest(found, scale, good, growth, backoff, interval, new_scale, new_good):
    i = cuda.grid(1)
    if i > 0:
        return
    if found[0]:
        new_good[0] = 0
        new_scale[0] = backoff * scale[0]
        return
    new_good[0] = (good[0] + 1) % interval
    new_scale[0] = scale[0]
    if new_good[0] == 0 and not math.isinf(scale[0] * growth):
        new_scale[0] = growth * scale[0]


mistakes("next_scale",
    ("next_scale_never_shrinks", VALUES, "scale[0] * backoff, 0", "scale[0], 0"),
    ("next_scale_never_grows", VALUES, "larger if larger < INF else scale[0]", "scale[0]"),
    ("next_scale_grows_to_infinity", VALUES, "larger if larger < INF else scale[0]", "larger"),
    ("next_scale_grows_each_time", VALUES, "good[0] + 1 == interval", "good[0] + 1 <= interval"),
    ("next_scale_one_step_late", VALUES, "good[0] + 1 == interval", "good[0] == interval"),
    ("next_scale_counts_on_after_overflow", VALUES, "scale[0] * backoff, 0",
     "scale[0] * backoff, good[0]"),
    ("next_scale_bad_one_counts_as_good", VALUES, "scale[0] * backoff, 0", "scale[0] * backoff, 1"),
    ("next_scale_count_goes_on", VALUES, "            new_good[0] = 0\n",
     "            new_good[0] = good[0] + 1\n"),
    ("next_scale_does_not_count", VALUES, "scale[0], good[0] + 1", "scale[0], good[0]"),
    ("next_scale_found_is_one", VALUES, "found[0] != 0", "found[0] == 1"),
    ("next_scale_halves", VALUES, "scale[0] * backoff", "scale[0] / np.float32(2)"),
    ("next_scale_by_2000", VALUES, "== interval", "== 2000"),
    ("next_scale_by_every_block", "race|more than one thread|same work", "cuda.grid(1) == 0",
     "cuda.threadIdx.x == 0"),
    ("next_scale_by_every_thread", "race|more than one thread|same work", "cuda.grid(1) == 0",
     "cuda.grid(1) >= 0"))


# ---- clip(g, squares, max_norm, y) -----------------------------------------------------------


@right("clip")
@cuda.jit
def clip_by_one_comparison(g, squares, max_norm, y):
    norm, i = ZERO, cuda.grid(1)
    for k in range(squares.size - 1, -1, -1):
        norm += squares[k]
    norm = math.sqrt(norm) + TINY
    while i < g.size:
        y[i] = g[i]
        if norm > max_norm:
            y[i] = g[i] * max_norm / norm
        i += cuda.gridsize(1)


@right("clip")
@cuda.jit
def clip_with_a_shared_factor(g, squares, max_norm, y):
    factor = cuda.shared.array(1, np.float32)
    if cuda.threadIdx.x == 0:
        total = ZERO
        for k in range(squares.size):
            total += squares[k]
        factor[0] = ONE / max(ONE, (math.sqrt(total) + TINY) / max_norm)
    cuda.syncthreads()
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = factor[0] * g[i]


FACTOR = "min(max_norm / (math.sqrt(total) + TINY), ONE)"
mistakes("clip",
    ("clip_makes_longer", VALUES, FACTOR, "max_norm / (math.sqrt(total) + TINY)"),
    ("clip_never_shortens", VALUES, FACTOR, "max(max_norm / (math.sqrt(total) + TINY), ONE)"),
    ("clip_forgets_the_root", VALUES, "math.sqrt(total)", "total"),
    ("clip_root_of_each", VALUES, "total += squares[k]", "total += math.sqrt(squares[k])",
     "math.sqrt(total)", "total"),
    ("clip_by_the_first_part", VALUES, "range(squares.size)", "range(1)"),
    ("clip_without_the_last_part", VALUES, "range(squares.size)", "range(squares.size - 1)"),
    ("clip_by_the_largest_part", VALUES, "total += squares[k]", "total = max(total, squares[k])"),
    ("clip_each_number", VALUES, "g[i] * factor", "min(max(g[i], -max_norm), max_norm)"),
    ("clip_divides_by_zero", VALUES, FACTOR, "max_norm / max(math.sqrt(total), max_norm) "
     "if total > ZERO else ZERO", "g[i] * factor", "g[i] / math.sqrt(total) * math.sqrt(total) "
     "* factor"),
    ("clip_without_tiny", VALUES, "(math.sqrt(total) + TINY)", "math.sqrt(total)"),
    ("clip_tiny_under_the_root", VALUES, "(math.sqrt(total) + TINY)", "math.sqrt(total + TINY)"),
    ("clip_to_one", VALUES, FACTOR, "min(ONE / (math.sqrt(total) + TINY), ONE)"),
    ("clip_norm_of_its_own", VALUES, "        y[i] = g[i] * factor",
     "        y[i] = g[i] * min(max_norm / (abs(g[i]) + TINY), ONE)"),
    ("clip_one_part_too_many", OUTSIDE, "range(squares.size)", "range(squares.size + 1)"),
    ("clip_no_loop", NEVER, "range(cuda.grid(1), g.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(g.size, cuda.grid(1) + 1))"),
    ("clip_one_too_many", OUTSIDE, "g.size", "g.size + 1"),
    ("clip_in_float64", "float64-promotion", "+ TINY", "+ 1e-6"))


# ---- ema(weight, average, steps, decay, y) ---------------------------------------------------


@right("ema")
@cuda.jit
def ema_as_a_sum(weight, average, steps, decay, y):
    i = cuda.grid(1)
    while i < weight.size:
        young = np.float32(steps[0] + 1) / np.float32(steps[0] + 10)
        kept = young if young < decay else decay
        y[i] = kept * average[i] + (ONE - kept) * weight[i]
        i += cuda.gridsize(1)


@right("ema")
@cuda.jit
def ema_by_what_is_new(weight, average, steps, decay, y):
    new = max(ONE - decay, np.float32(9) / (np.float32(steps[0]) + NEW))
    for i in range(cuda.grid(1), average.size, cuda.gridsize(1)):
        y[i] = weight[i] * new + average[i] - average[i] * new


KEPT = "min(decay, (ONE + n) / (NEW + n))"
mistakes("ema",
    ("ema_old_from_the_start", VALUES, KEPT, "decay"),
    ("ema_young_for_ever", VALUES, KEPT, "(ONE + n) / (NEW + n)"),
    ("ema_old_from_a_hundredth_on", VALUES, KEPT, "(ONE + n) / (NEW + n) if n < 100 else decay"),
    ("ema_takes_the_larger", VALUES, KEPT, "max(decay, (ONE + n) / (NEW + n))"),
    ("ema_by_the_next_step", VALUES, "np.float32(steps[0])", "np.float32(steps[0] + 1)"),
    ("ema_from_zero", VALUES, "(ONE + n)", "n"),
    ("ema_the_other_way_round", VALUES, "(ONE - kept) * (weight", "kept * (weight"),
    ("ema_away_from_it", VALUES, "(weight[i] - average[i])", "(average[i] - weight[i])"),
    ("ema_is_the_weight", VALUES, "average[i] + (ONE - kept)", "average[i] + ONE"),
    ("ema_grows", VALUES, "(weight[i] - average[i])", "weight[i]"),
    ("ema_a_step_for_each_number", OUTSIDE + "|" + VALUES, "steps[0]", "steps[cuda.grid(1)]"),
    ("ema_in_whole_numbers", VALUES, "(ONE + n) / (NEW + n)",
     "np.float32((1 + steps[0]) // (10 + steps[0]))"),
    ("ema_no_loop", NEVER, "range(cuda.grid(1), y.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("ema_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("ema_in_float64", "float64-promotion", "np.float32(steps[0])", "steps[0] / 1"))


# ---- mutants that are right as well ----------------------------------------------------------

EQUIVALENT.update({
    ("pick_device", "change constant: 0 → -1"): "no chip has a capability between 7.5 and 8.0",
})  # fmt: skip
