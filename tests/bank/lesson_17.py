"""Lesson 17: brightness of any layout, two pathways weighed, and what streams and memory cost.

Most wrong kernels are the solution with one mistake in it, and `mistake` says which text stands in
place of which. The right ones are written out.
"""

import math

import numpy as np

from bank import right, wrong
from bank.equivalent import EQUIVALENT
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import block_sum, warp_sum

OUTSIDE, VALUES, NEVER = "out-of-bounds|negative", "wrong values", "never written"
ZERO, ONE = np.float32(0), np.float32(1)

# ---- brightness(x, step_n, step_c, step_p, weight, y) ----------------------------------------


@right("brightness")
@cuda.jit
def brightness_written_out(x, step_n, step_c, step_p, weight, y):
    i = cuda.grid(1)
    while i < y.shape[0] * y.shape[1]:
        n, p = divmod(i, y.shape[1])
        red = n * step_n + p * step_p
        green, blue = red + step_c, red + 2 * step_c
        y[n, p] = x[red] * weight[0] + (x[green] * weight[1] + x[blue] * weight[2])
        i += cuda.gridsize(1)


@right("brightness")
@cuda.jit
def brightness_from_blue(x, step_n, step_c, step_p, weight, y):
    # A thread goes through the pixels of all images by adding steps, from blue to red.
    for p in range(cuda.grid(1), y.shape[1], cuda.gridsize(1)):
        for n in range(y.shape[0]):
            at, total = n * step_n + p * step_p + 2 * step_c, ZERO
            for c in range(2, -1, -1):
                total = total + x[at] * weight[c]
                at -= step_c
            y[n, p] = total


TERM, FIRST = "weight[c] * x[first + c * step_c]", "first = n * step_n + p * step_p"
LOOP = "range(cuda.grid(1), y.size, cuda.gridsize(1))"
mistakes("brightness",
    ("brightness_mean_of_three", VALUES, TERM, "x[first + c * step_c] / np.float32(3)"),
    ("brightness_of_the_standard", VALUES, TERM,
     "(np.float32(0.299), np.float32(0.587), np.float32(0.114))[c] * x[first + c * step_c]"),
    ("brightness_blue_for_red", VALUES, "weight[c]", "weight[2 - c]"),
    ("brightness_of_green_alone", VALUES, "range(3)", "range(1, 2)"),
    ("brightness_without_blue", VALUES, "range(3)", "range(2)"),
    ("brightness_a_fourth_colour", VALUES + "|" + OUTSIDE, "range(3)", "range(4)"),
    ("brightness_channels_first", VALUES + "|" + OUTSIDE, TERM, "weight[c] * x[first + c * P]"),
    ("brightness_channels_last", VALUES + "|" + OUTSIDE, TERM, "weight[c] * x[first + c]"),
    ("brightness_pixels_are_neighbours", VALUES, FIRST, "first = n * step_n + p"),
    ("brightness_images_are_packed", VALUES + "|" + OUTSIDE, FIRST,
     "first = n * 3 * P + p * step_p"),
    ("brightness_of_the_first_image", VALUES, FIRST, "first = p * step_p"),
    ("brightness_steps_changed_over", VALUES + "|" + OUTSIDE, FIRST,
     "first = n * step_p + p * step_n"),
    ("brightness_no_loop", NEVER, LOOP, "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("brightness_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("brightness_every_thread_all_images", "more than one thread|race", LOOP, "range(y.size)"),
    ("brightness_in_float64", "float64-promotion", "total = ZERO", "total = 0.0"))


# ---- integrate(scalars, colour, brightness, integrated, y) -----------------------------------


@right("integrate")
@cuda.jit
def integrate_by_three_threads(scalars, colour, brightness, integrated, y):
    # Three threads fetch a scalar each; every thread takes the softmax of what lies in shared.
    shared = cuda.shared.array(3, np.float32)
    for k in range(cuda.threadIdx.x, 3, cuda.blockDim.x):
        shared[k] = scalars[k]
    cuda.syncthreads()
    top, total = max(max(shared[0], shared[1]), shared[2]), ZERO
    for k in range(3):
        total += math.exp(shared[k] - top)
    i = cuda.grid(1)
    while i < y.size:
        found = math.exp(shared[0] - top) * colour[i]
        found += math.exp(shared[1] - top) * brightness[i]
        found += math.exp(shared[2] - top) * integrated[i]
        y[i] = found / total
        i += cuda.gridsize(1)


@right("integrate")
@cuda.jit
def integrate_by_the_last_thread(scalars, colour, brightness, integrated, y):
    # Seen from each scalar itself: 1 over the sum of exponentials of differences.
    weight = cuda.shared.array(4, np.float32)
    if cuda.threadIdx.x == cuda.blockDim.x - 1:
        for k in range(3):
            weight[k] = scalars[k]
        top = max(weight[0], max(weight[1], weight[2]))
        for k in range(3):
            weight[k] = math.exp(weight[k] - top)
        weight[3] = ONE / (weight[0] + weight[1] + weight[2])
    cuda.syncthreads()
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        found = weight[2] * weight[3] * integrated[i]
        found += weight[1] * weight[3] * brightness[i]
        y[i] = found + weight[0] * weight[3] * colour[i]


@wrong("integrate", "scalars is read")
@cuda.jit
def integrate_reads_for_every_number(scalars, colour, brightness, integrated, y):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        top = max(scalars[0], max(scalars[1], scalars[2]))
        a, b = math.exp(scalars[0] - top), math.exp(scalars[1] - top)
        c = math.exp(scalars[2] - top)
        y[i] = (a * colour[i] + b * brightness[i] + c * integrated[i]) / (a + b + c)


MAXIMUM, QUOTIENTS = "top = max(a, max(b, c))", "a / total, b / total, c / total"
mistakes("integrate",
    ("integrate_without_the_maximum", VALUES, MAXIMUM, "top = ZERO"),
    ("integrate_maximum_of_two", VALUES, MAXIMUM, "top = max(a, b)"),
    ("integrate_smallest", VALUES, MAXIMUM, "top = min(a, min(b, c))"),
    ("integrate_no_softmax", VALUES, QUOTIENTS, "scalars[0], scalars[1], scalars[2]"),
    ("integrate_not_divided", VALUES, QUOTIENTS, "a, b, c"),
    ("integrate_mean", VALUES, QUOTIENTS, "total / total / np.float32(3), "
     "total / total / np.float32(3), total / total / np.float32(3)"),
    ("integrate_by_every_thread", "scalars is read|race", "    if cuda.threadIdx.x == 0:",
     "    if True:"),
    ("integrate_sum_of_two", VALUES, "total = a + b + c", "total = a + b"),
    ("integrate_pathways_changed_over", VALUES, "weight[0] * colour[i] + weight[1] * brightness",
     "weight[1] * colour[i] + weight[0] * brightness"),
    ("integrate_forgets_what_was_before", VALUES, " + weight[2] * integrated[i]", ""),
    ("integrate_no_barrier", "race|uninitialised", "    cuda.syncthreads()\n", ""),
    ("integrate_one_warp_waits", "race|uninitialised", "cuda.syncthreads()", "cuda.syncwarp()"),
    ("integrate_in_the_first_block_only", "uninitialised|" + VALUES, "cuda.threadIdx.x == 0",
     "cuda.grid(1) == 0"),
    ("integrate_no_loop", NEVER, LOOP, "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("integrate_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("integrate_in_float64", "float64-promotion", "y[i] = weight[0]", "y[i] = 1.0 * weight[0]"))


# ---- integrate_backward(dy, weight, colour, brightness, integrated, …) -----------------------


@right("integrate_backward")
@cuda.jit
def backward_by_shuffles(
    dy, weight, colour, brightness, integrated, dcolour, dbrightness, dintegrated, partial
):
    # Each warp adds up by itself; three threads add the warps, in their order.
    sums = cuda.shared.array((3, 32), np.float32)
    t, a, b, c = cuda.threadIdx.x, ZERO, ZERO, ZERO
    i = cuda.grid(1)
    while i < dy.size:
        a, b, c = a + dy[i] * colour[i], b + dy[i] * brightness[i], c + dy[i] * integrated[i]
        dcolour[i], dbrightness[i] = dy[i] * weight[0], dy[i] * weight[1]
        dintegrated[i] = dy[i] * weight[2]
        i += cuda.gridsize(1)
    a, b, c = warp_sum(a), warp_sum(b), warp_sum(c)
    if t % 32 == 0:
        sums[0, t // 32], sums[1, t // 32], sums[2, t // 32] = a, b, c
    cuda.syncthreads()
    if t < 3:
        total = ZERO
        for warp in range(cuda.blockDim.x // 32):
            total += sums[t, warp]
        partial[cuda.blockIdx.x, t] = total


@right("integrate_backward")
@cuda.jit
def backward_in_four_loops(
    dy, weight, colour, brightness, integrated, dcolour, dbrightness, dintegrated, partial
):
    scratch = cuda.shared.array(32, np.float32)
    for i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):
        dcolour[i], dbrightness[i], dintegrated[i] = (
            dy[i] * weight[0], dy[i] * weight[1], dy[i] * weight[2]
        )  # fmt: skip
    for k in range(3):
        total = ZERO
        for i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):
            if k == 0:
                total += colour[i] * dy[i]
            elif k == 1:
                total += brightness[i] * dy[i]
            else:
                total += integrated[i] * dy[i]
        total = block_sum(total, scratch)
        if cuda.threadIdx.x == cuda.blockDim.x - 1:
            partial[cuda.blockIdx.x, k] = total


@wrong("integrate_backward", "partial is right, but its last bits")
@cuda.jit
def backward_with_atomics(
    dy, weight, colour, brightness, integrated, dcolour, dbrightness, dintegrated, partial
):
    # Right to some digits, in another order with other digits.
    sums = cuda.shared.array(3, np.float32)
    if cuda.threadIdx.x < 3:
        sums[cuda.threadIdx.x] = ZERO
    cuda.syncthreads()
    for i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):
        dcolour[i], dbrightness[i] = dy[i] * weight[0], dy[i] * weight[1]
        dintegrated[i] = dy[i] * weight[2]
        cuda.atomic.add(sums, 0, dy[i] * colour[i])
        cuda.atomic.add(sums, 1, dy[i] * brightness[i])
        cuda.atomic.add(sums, 2, dy[i] * integrated[i])
    cuda.syncthreads()
    if cuda.threadIdx.x < 3:
        partial[cuda.blockIdx.x, cuda.threadIdx.x] = sums[cuda.threadIdx.x]


SUMS = "a, b, c = block_sum(a, scratch), block_sum(b, scratch), block_sum(c, scratch)"
ROW = "partial[row, 0], partial[row, 1], partial[row, 2] = a, b, c"
ALL = "range(cuda.grid(1), dy.size, cuda.gridsize(1))"
mistakes("integrate_backward",
    ("backward_without_the_weight", VALUES, "weight[0] * g", "g"),
    ("backward_weights_changed_over", VALUES, "weight[0] * g", "weight[1] * g",
     "dbrightness[i] = weight[1] * g", "dbrightness[i] = weight[0] * g"),
    ("backward_the_map_for_its_weight", VALUES, "weight[2] * g", "integrated[i] * g"),
    ("backward_sums_without_dy", VALUES, "a += g * colour[i]", "a += colour[i]"),
    ("backward_sum_of_dy", VALUES, "c += g * integrated[i]", "c += g"),
    ("backward_sums_weighed", VALUES, "a += g * colour[i]", "a += weight[0] * g * colour[i]"),
    ("backward_last_number_only", VALUES, "b += g * brightness[i]", "b = g * brightness[i]"),
    ("backward_threads_stay_apart", VALUES, SUMS, "a = block_sum(a, scratch)"),
    ("backward_of_one_warp", VALUES, backward_by_shuffles, "range(cuda.blockDim.x // 32)",
     "range(1)"),
    ("backward_of_8_warps", "out-of-bounds|wrong values", backward_by_shuffles, "(3, 32)",
     "(3, 8)"),
    ("backward_columns_changed_over", VALUES, ROW,
     "partial[row, 1], partial[row, 0], partial[row, 2] = a, b, c"),
    ("backward_all_in_the_first_row", "race|never written|wrong values", "row = cuda.blockIdx.x",
     "row = 0"),
    ("backward_every_thread_writes", "more than one thread|race", "if cuda.threadIdx.x == 0:",
     "if True:"),
    ("backward_some_stay_away", "shuffle-inactive-lane|barrier", SUMS,
     "if cuda.grid(1) >= dy.size:\n        return\n    " + SUMS),
    ("backward_no_loop", NEVER + "|wrong values", ALL,
     "range(cuda.grid(1), min(dy.size, cuda.grid(1) + 1))"),
    ("backward_one_too_many", OUTSIDE, "dy.size", "dy.size + 1"),
    ("backward_in_float64", "float64-promotion", "a, b, c = ZERO, ZERO, ZERO",
     "a, b, c = 0.0, ZERO, ZERO"))


# ---- fold_batch_norm(weight, bias, gamma, beta, mean, var, eps, folded, shift) ---------------


@right("fold_batch_norm")
@cuda.jit
def fold_by_the_last_thread(weight, bias, gamma, beta, mean, var, eps, folded, shift):
    k, t = cuda.blockIdx.x, cuda.threadIdx.x
    root = math.sqrt(var[k] + eps)
    c = t
    while c < weight.shape[1]:
        folded[k, c] = weight[k, c] * gamma[k] / root
        c += cuda.blockDim.x
    if t == cuda.blockDim.x - 1:
        shift[k] = (bias[k] - mean[k]) * gamma[k] / root + beta[k]


@right("fold_batch_norm")
@cuda.jit
def fold_with_a_shared_scale(weight, bias, gamma, beta, mean, var, eps, folded, shift):
    shared = cuda.shared.array(1, np.float32)
    k = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        shared[0] = gamma[k] * (ONE / math.sqrt(eps + var[k]))
        shift[k] = beta[k] - shared[0] * (mean[k] - bias[k])
    cuda.syncthreads()
    for c in range(cuda.threadIdx.x, folded.shape[1], cuda.blockDim.x):
        folded[k, c] = shared[0] * weight[k, c]


SCALE, SHIFT = "gamma[k] / math.sqrt(var[k] + eps)", "beta[k] + scale * (bias[k] - mean[k])"
mistakes("fold_batch_norm",
    ("fold_no_root", VALUES, SCALE, "gamma[k] / (var[k] + eps)"),
    ("fold_no_eps", VALUES, SCALE, "gamma[k] / math.sqrt(var[k])"),
    ("fold_eps_behind_the_root", VALUES, SCALE, "gamma[k] / (math.sqrt(var[k]) + eps)"),
    ("fold_eps_squared", VALUES, SCALE, "gamma[k] / math.sqrt(var[k] + eps * eps)"),
    ("fold_no_gamma", VALUES, SCALE, "math.sqrt(var[k] + eps) / (var[k] + eps)"),
    ("fold_turned_round", VALUES, SCALE, "gamma[k] * math.sqrt(var[k] + eps)"),
    ("fold_forgets_the_mean", VALUES, SHIFT, "beta[k] + scale * bias[k]"),
    ("fold_forgets_the_bias", VALUES, SHIFT, "beta[k] - scale * mean[k]"),
    ("fold_forgets_beta", VALUES, SHIFT, "scale * (bias[k] - mean[k])"),
    ("fold_bias_is_not_scaled", VALUES, SHIFT, "beta[k] + bias[k] - scale * mean[k]"),
    ("fold_mean_is_not_scaled", VALUES, SHIFT, "beta[k] + scale * bias[k] - mean[k]"),
    ("fold_scales_beta", VALUES, SHIFT, "scale * (beta[k] + bias[k] - mean[k])"),
    ("fold_by_the_input_channel", VALUES + "|" + OUTSIDE, "scale * weight[k, c]",
     "gamma[c] / math.sqrt(var[c] + eps) * weight[k, c]"),
    ("fold_of_the_first_channel", VALUES, SCALE, "gamma[0] / math.sqrt(var[0] + eps)"),
    ("fold_no_loop", NEVER, "range(cuda.threadIdx.x, weight.shape[1], cuda.blockDim.x)",
     "range(cuda.threadIdx.x, min(weight.shape[1], cuda.blockDim.x), cuda.blockDim.x)"),
    ("fold_one_too_many", OUTSIDE, "weight.shape[1],", "weight.shape[1] + 1,"),
    ("fold_every_thread_writes", "more than one thread|race", "if cuda.threadIdx.x == 0:",
     "if True:"),
    ("fold_in_float64", "float64-promotion", SCALE, "1.0 * gamma[k] / math.sqrt(var[k] + eps)"))


# ---- two_streams(stream, ms, waits_for, launch_ms) -------------------------------------------


@right("two_streams")
def streams_with_a_dictionary(stream, ms, waits_for, launch_ms):
    found, last = [], {}
    for i, (where, needed) in enumerate(zip(stream.tolist(), waits_for.tolist(), strict=True)):
        ready = [launch_ms * (i + 1), last.get(where, 0.0)]
        ready.append(found[needed] if needed != -1 else 0.0)
        last[where] = max(ready) + float(ms[i])
        found.append(last[where])
    return np.array(found, dtype=np.float64)


@right("two_streams")
def streams_until_nothing_changes(stream, ms, waits_for, launch_ms):
    # Tasks end too early at first, and are put off until nobody objects.
    n = len(ms)
    end, before = np.zeros(n), None
    while before is None or (end != before).any():
        before = end.copy()
        for i in range(n):
            begin = launch_ms * (i + 1)
            for j in range(i):
                if stream[j] == stream[i] or j == waits_for[i]:
                    begin = max(begin, end[j])
            end[i] = begin + ms[i]
    return end


BEGIN, AWAITED = "max((i + 1) * launch_ms, free[stream[i]])", "max(begin, end[waits_for[i]])"
KEEP = "end[i] = free[stream[i]] = begin + ms[i]"
mistakes("two_streams",
    ("streams_one_after_the_other", VALUES, "free[stream[i]])", "max(free))"),
    ("streams_all_in_the_first", VALUES, "free[stream[i]])", "free[0])", KEEP,
     "end[i] = free[0] = begin + ms[i]"),
    ("streams_without_an_order", VALUES, BEGIN, "(i + 1) * launch_ms"),
    ("streams_orders_cost_nothing", VALUES, BEGIN, "free[stream[i]]"),
    ("streams_first_order_is_free", VALUES, "(i + 1) * launch_ms", "i * launch_ms"),
    ("streams_each_pays_its_order", VALUES, BEGIN, "free[stream[i]] + launch_ms"),
    ("streams_events_forgotten", VALUES, AWAITED, "begin"),
    ("streams_never_wait_for_the_first", VALUES, "waits_for[i] >= 0", "waits_for[i] > 0"),
    ("streams_wait_for_all_before", VALUES, AWAITED, "max(begin, end[: waits_for[i] + 1].max())"),
    ("streams_wait_and_forget_their_own", VALUES, AWAITED, "end[waits_for[i]]"),
    ("streams_earliest", VALUES, AWAITED, "min(begin, end[waits_for[i]])"),
    ("streams_when_they_begin", VALUES, KEEP, "end[i] = begin\n        free[stream[i]] = "
     "begin + ms[i]"))


# ---- checkpoint_memory(entering, inside) -----------------------------------------------------


@right("checkpoint_memory")
def memory_stage_by_stage(entering, inside):
    held = peak = whole = 0
    for enters, computes in zip(entering.tolist(), inside.tolist(), strict=True):
        held, whole = held + enters, whole + enters + computes
        peak = max(peak, held + computes)
    return whole, peak


@right("checkpoint_memory")
def memory_from_the_end(entering, inside):
    left = int(np.sum(entering))
    whole, peak = left + int(np.sum(inside)), 0
    for k in reversed(range(len(inside))):
        peak = max(peak, left + int(inside[k]))
        left -= int(entering[k])
    return whole, peak


PEAK, HELD = "(held + inside).max(initial=0)", "np.cumsum(entering)"
mistakes("checkpoint_memory",
    ("memory_all_enter_at_once", VALUES, PEAK, "entering.sum() + inside.max(initial=0)"),
    ("memory_what_enters_is_let_go", VALUES, PEAK, "(entering + inside).max(initial=0)"),
    ("memory_inside_alone", VALUES, PEAK, "inside.max(initial=0)"),
    ("memory_what_enters_alone", VALUES, PEAK, "held.max(initial=0)"),
    ("memory_at_the_last_stage", VALUES + "|IndexError", PEAK, "(held + inside)[-1]"),
    ("memory_at_the_largest_stage", VALUES + "|ValueError", PEAK,
     "(held + inside)[inside.argmax()]"),
    ("memory_without_the_stages_own_input", VALUES, PEAK,
     "(held - entering + inside).max(initial=0)"),
    ("memory_inside_adds_up", VALUES, HELD, "np.cumsum(entering + inside)"),
    ("memory_from_the_end_on", VALUES, HELD, "np.cumsum(entering[::-1])[::-1]"),
    ("memory_whole_forgets_what_enters", VALUES, "entering.sum() + inside.sum()", "inside.sum()"),
    ("memory_whole_is_a_peak", VALUES, "entering.sum() + inside.sum()",
     "(entering + inside).max(initial=0)"),
    ("memory_fails_on_no_stages", "ValueError", PEAK, "(held + inside).max()"))


# ---- mutants that are right as well ----------------------------------------------------------

_BOTH_ZERO = "all of them are 0"
_NOBODY = "the last task has not run yet, and its 0 puts nobody off"

EQUIVALENT.update({
    ("integrate", "change constant: 3 → 4"): "shared memory that nobody uses does no harm",
    ("integrate_backward", "change constant: 32 → 33"): "a number that nobody uses does no harm",
    ("integrate_backward", "change constant: 32 → 31"): "no block of a case has 32 warps",
    ("integrate_backward", "change constant: 0 → 1"): "all threads have the sums: any may write",
    **{
        ("integrate_backward", f"swap indices: a, b, c = (ZERO, ZERO, ZERO) → {order} = "
         "(ZERO, ZERO, ZERO)"): _BOTH_ZERO
        for order in ("b, a, c", "c, b, a", "a, c, b")
    },
    ("two_streams", "change constant: 0.0 → -1.0"): "the first order is later in any case",
    ("two_streams", "change constant: 0.0 → -1.0, again"): "the first order is later in any case",
    ("two_streams", "drop guard: if waits_for[i] >= 0"): _NOBODY,
    ("two_streams", "change constant: 0 → -1"): _NOBODY,
})  # fmt: skip
