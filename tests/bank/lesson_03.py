"""Lesson 03: softmax, by a thread, a block and a warp per row, and online.

The messages about races, barriers and memory that nobody set are the sanitizer's own.
"""

import math

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime import intrinsics
from course_lib.runtime.intrinsics import block_max, block_online, block_sum, warp_max, warp_sum

OUTSIDE = "out-of-bounds"
RACE = "race"
NAN = "NaN was computed"
VALUES = "wrong values in y"
ALL = 0xFFFFFFFF
ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INF = np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min

# ---- softmax_naive(x, y) ---------------------------------------------------------------------


@right("softmax_naive")
@cuda.jit
def naive_keeps_the_exponentials(x, y):
    # y holds exp(x - max) until the sum is known: a pass less over x, one more over y.
    row = cuda.grid(1)
    if row >= x.shape[0]:
        return
    largest, total = MINUS_INF, ZERO
    for col in range(x.shape[1]):
        largest = max(largest, x[row, col])
    for col in range(x.shape[1]):
        y[row, col] = math.exp(x[row, col] - largest)
        total += y[row, col]
    for col in range(x.shape[1]):
        y[row, col] /= total


@right("softmax_naive")
@cuda.jit
def naive_grid_stride_reciprocal(x, y):
    for row in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        largest, total = LOWEST, ZERO
        for col in range(x.shape[1]):
            if x[row, col] > largest:
                largest = x[row, col]
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        factor = ONE / total if total > ZERO else ZERO
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - largest) * factor


@right("softmax_naive")
@cuda.jit
def naive_online(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(x.shape[1]):
            m, s = intrinsics.online_add(m, s, x[row, col])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_naive")
@cuda.jit
def naive_through_the_logarithm(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(x.shape[1]):
            largest = max(largest, x[row, col])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        for col in range(x.shape[1]):
            y[row, col] = math.exp((x[row, col] - largest) - math.log(total))


mistakes("softmax_naive",
    ("naive_no_maximum", NAN, " - largest)\n", ")\n", " - largest) /", ") /"),
    # Right unless a whole row is far below 0.
    ("naive_maximum_from_zero", NAN, "largest = MINUS_INF", "largest = ZERO"),
    ("naive_subtracts_the_first", NAN, "max(largest, x[row, col])", "x[row, 0]"),
    ("naive_subtracts_the_mean", NAN, "largest = MINUS_INF", "largest = ZERO",
     "largest = max(largest, x[row, col])", "largest += x[row, col] / np.float32(n_cols)"),
    ("naive_maximum_without_the_last", NAN, "largest = MINUS_INF",
     "largest = x[row, 0] if n_cols > 0 else ZERO", "range(n_cols):\n            largest",
     "range(n_cols - 1):\n            largest"),
    # In half precision, which ends at 65,504, 1e4 is a multiple of 8; the largest element is not.
    ("naive_maximum_in_half_precision", NAN, "total = np.float32(0)",
     "total = np.float32(0)\n        largest = np.float32(np.float16(largest * np.float32(4)))"),
    ("naive_never_divides", "times what it should be|" + VALUES, " / total", ""),
    # The maximum is subtracted in the sum, and forgotten where the result is written.
    ("naive_shifts_only_above", NAN, " - largest) / total", ") / (total * math.exp(largest))"),
    ("naive_no_guard", OUTSIDE, "row < n_rows", "row >= 0"))


@wrong("softmax_naive", OUTSIDE + "|never written")
@cuda.jit
def naive_by_columns(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        largest, total = MINUS_INF, ZERO
        for row in range(x.shape[0]):
            largest = max(largest, x[row, col])
        for row in range(x.shape[0]):
            total += math.exp(x[row, col] - largest)
        for row in range(x.shape[0]):
            y[row, col] = math.exp(x[row, col] - largest) / total


mistakes("softmax_naive",
    ("naive_in_float64", "float64", "total = np.float32(0)", "total = 0.0"))


# ---- softmax_shared(x, y) --------------------------------------------------------------------


@right("softmax_shared")
@cuda.jit
def shared_two_arrays(x, y):
    # With a memory for each tree, nobody overwrites what another one has still to read.
    a = cuda.shared.array(256, np.float32)
    b = cuda.shared.array(256, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    a[t] = MINUS_INF
    for col in range(t, x.shape[1], n):
        a[t] = max(a[t], x[row, col])
    step = n
    while step > 1:
        step //= 2
        cuda.syncthreads()
        if t < step:
            a[t] = max(a[t], a[t + step])
    cuda.syncthreads()
    b[t] = ZERO
    for col in range(t, x.shape[1], n):
        b[t] += math.exp(x[row, col] - a[0])
    step = n
    while step > 1:
        step //= 2
        cuda.syncthreads()
        if t < step:
            b[t] += b[t + step]
    cuda.syncthreads()
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - a[0]) / b[0]


@right("softmax_shared")
@cuda.jit
def shared_by_shuffles(x, y):
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = LOWEST, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    largest = block_max(largest, scratch)
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@right("softmax_shared")
@cuda.jit
def shared_online(x, y):
    a = cuda.shared.array(32, np.float32)
    b = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    m, s = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        m, s = intrinsics.online_add(m, s, x[row, col])
    m, s = block_online(m, s, a, b)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_shared", "should share the work")
@cuda.jit
def shared_one_thread_reduces(x, y):
    s = cuda.shared.array(256, np.float32)
    found = cuda.shared.array(2, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    s[t] = MINUS_INF
    for col in range(t, x.shape[1], n):
        s[t] = max(s[t], x[row, col])
    cuda.syncthreads()
    if t == 0:
        found[0] = s[0]
        for k in range(1, n):
            found[0] = max(found[0], s[k])
    cuda.syncthreads()
    s[t] = ZERO
    for col in range(t, x.shape[1], n):
        s[t] += math.exp(x[row, col] - found[0])
    cuda.syncthreads()
    if t == 0:
        found[1] = ZERO
        for k in range(n):
            found[1] += s[k]
    cuda.syncthreads()
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - found[0]) / found[1]


mistakes("softmax_shared",
    ("shared_no_barrier_between_the_trees", RACE,
     "    cuda.syncthreads()  # all have read it: s may be used again\n", ""),
    ("shared_no_first_barrier", RACE, "s[t] = largest\n    cuda.syncthreads()\n",
     "s[t] = largest\n"),
    ("shared_no_barrier_between_rounds", RACE,
     "+= s[t + step]\n        cuda.syncthreads()\n        step //= 2\n",
     "+= s[t + step]\n        step //= 2\n    cuda.syncthreads()\n"),
    # The barrier after the last round is what the division has to wait for.
    ("shared_no_barrier_after_the_sum", RACE, shared_two_arrays,
     "    cuda.syncthreads()\n    for col in range(t, x.shape[1], n):\n        y",
     "    for col in range(t, x.shape[1], n):\n        y"),
    ("shared_barrier_inside_if", "barrier-(mismatch|divergence)|exited-before-barrier|race",
     "s[t + step])\n        cuda", "s[t + step])\n            cuda"),
    ("shared_leaves_early", "barrier-(mismatch|divergence)|exited-before-barrier|inactive-lane",
     shared_by_shuffles, "cuda.blockDim.x\n",
     "cuda.blockDim.x\n    if t >= x.shape[1]:\n        return\n"),
    ("shared_unset_tail", "uninitialised-read", "    s[t] = largest",
     "    if t < n_cols:\n        s[t] = largest"),
    # Each thread divides by the sum of its own share.
    ("shared_own_sum_only", VALUES, shared_by_shuffles, "    total = block_sum(total, scratch)\n",
     ""),
    # Sums of different maxima must not be added as they are.
    ("shared_own_maximum", VALUES, shared_by_shuffles,
     "    largest = block_max(largest, scratch)\n", "", "    total = block_sum",
     "    largest = block_max(largest, scratch)\n    total = block_sum"),
    ("shared_no_maximum", NAN, shared_by_shuffles, " - largest)\n", ")\n", " - largest) /", ") /"),
    ("shared_maximum_of_the_first_warp", NAN + "|never written|" + VALUES, shared_by_shuffles,
     "block_max(largest, scratch)", "warp_max(largest)"),
    ("shared_first_round_only", "never written", "x.shape[1]", "min(x.shape[1], cuda.blockDim.x)"))


# ---- softmax_warp(x, y) ----------------------------------------------------------------------


@right("softmax_warp")
@cuda.jit
def warp_down_then_broadcast(x, y):
    row, lane = cuda.grid(1) // 32, cuda.laneid
    if row >= x.shape[0]:
        return
    largest, total, step = MINUS_INF, ZERO, 16
    for col in range(lane, x.shape[1], 32):
        largest = max(largest, x[row, col])
    while step > 0:
        largest = max(largest, cuda.shfl_down_sync(ALL, largest, step))
        step //= 2
    largest = cuda.shfl_sync(ALL, largest, 0)
    for col in range(lane, x.shape[1], 32):
        total += math.exp(x[row, col] - largest)
    step = 16
    while step > 0:
        total += cuda.shfl_down_sync(ALL, total, step)
        step //= 2
    total = cuda.shfl_sync(ALL, total, 0)
    for col in range(lane, x.shape[1], 32):
        y[row, col] = math.exp(x[row, col] - largest) / total


@right("softmax_warp")
@cuda.jit
def warp_by_the_course(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        factor = ONE / warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) * factor


@right("softmax_warp")
@cuda.jit
def warp_online_of_the_course(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_warp")
@cuda.jit
def warp_in_shared(x, y):
    s = cuda.shared.array(1024, np.float32)
    t, row, lane = cuda.threadIdx.x, cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total, first = MINUS_INF, ZERO, t - lane
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        s[t] = largest
        cuda.syncwarp()
        for k in range(32):
            largest = max(largest, s[first + k])
        cuda.syncwarp()
        s[t] = ZERO
        for col in range(lane, x.shape[1], 32):
            s[t] += math.exp(x[row, col] - largest)
        cuda.syncwarp()
        for k in range(32):
            total += s[first + k]
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


mistakes("softmax_warp",
    ("warp_shared_for_128_threads", OUTSIDE, warp_in_shared, "1024", "128"),
    # Down, as for a sum that one lane writes: the other lanes subtract another number.
    ("warp_maximum_in_lane_0_only", VALUES, warp_down_then_broadcast,
     "    largest = cuda.shfl_sync(ALL, largest, 0)\n", ""),
    ("warp_sum_in_lane_0_only", VALUES, warp_down_then_broadcast,
     "    total = cuda.shfl_sync(ALL, total, 0)\n", ""),
    ("warp_shuffle_in_the_guard", "shuffle-inactive-lane", "row < x.shape[0]",
     "row < x.shape[0] and lane < x.shape[1]"),
    # In the last round of the loop some lanes have no column, and are asked all the same.
    ("warp_shuffle_in_the_loop", "shuffle-inactive-lane", warp_by_the_course,
     "x[row, col])\n        largest = warp_max(largest)\n", "warp_max(x[row, col]))\n"),
    ("warp_maximum_from_zero", NAN, "largest = MINUS_INF", "largest = ZERO"),
    ("warp_no_maximum", NAN, " - largest)\n", ")\n", " - largest) /", ") /"),
    ("warp_no_guard", OUTSIDE, "row < x.shape[0]", "row >= 0"),
    ("warp_row_per_block", "never written", "cuda.grid(1) // 32, cuda.threadIdx.x % 32",
     "cuda.blockIdx.x, cuda.threadIdx.x", "row < x.shape[0]", "row < x.shape[0] and lane < 32"),
    ("warp_reads_past_the_row", OUTSIDE, "largest = MINUS_INF", "largest = x[row, lane]"),
    # Six rounds: the last one adds the lane's own sum once more.
    ("warp_sums_twice", "times what it should be|" + VALUES, "range(5):\n            total",
     "range(6):\n            total", "total, 1 << k", "total, (1 << k) % 32"))


# ---- online_merge(m1, s1, m2, s2, m, s) ------------------------------------------------------


@right("online_merge")
@cuda.jit
def merge_by_the_course(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = intrinsics.online_merge(m1[i], s1[i], m2[i], s2[i])


@right("online_merge")
@cuda.jit
def merge_scales_the_smaller(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        a, b = m1[i], m2[i]
        if a == b:
            m[i], s[i] = a, s1[i] + s2[i]
        elif a > b:
            m[i], s[i] = a, s1[i] + s2[i] * math.exp(b - a)
        else:
            m[i], s[i] = b, s2[i] + s1[i] * math.exp(a - b)


@right("online_merge")
@cuda.jit
def merge_from_the_lowest_number(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        largest = max(m1[i], m2[i])
        base = max(largest, LOWEST)  # finite, so that no difference is -inf - -inf
        m[i] = largest
        s[i] = s1[i] * math.exp(m1[i] - base) + s2[i] * math.exp(m2[i] - base)


mistakes("online_merge",
    ("merge_adds_as_they_are", "wrong values in s", " * math.exp(m1[i] - largest)", "",
     " * math.exp(m2[i] - largest)", ""),
    ("merge_of_nothing_is_nan", "wrong values in s", merge_from_the_lowest_number,
     "max(largest, LOWEST)", "largest"),
    ("merge_scales_the_wrong_way", "wrong values in s", "m1[i] - largest", "largest - m1[i]",
     "m2[i] - largest", "largest - m2[i]"),
    ("merge_scales_the_sum", "wrong values in s",
     "s1[i] * math.exp(m1[i] - largest) + s2[i] * math.exp(m2[i] - largest)",
     "(s1[i] + s2[i]) * math.exp(min(m1[i], m2[i]) - largest)"),
    ("merge_swaps_the_factors", "wrong values in s", "= s1[i] *", "= s2[i] *", "+ s2[i] *",
     "+ s1[i] *"),
    # On paper the same: the sum of both without a maximum, brought to the new one. It overflows.
    ("merge_without_shift", "wrong values in s",
     "s1[i] * math.exp(m1[i] - largest) + s2[i] * math.exp(m2[i] - largest)",
     "(s1[i] * math.exp(m1[i]) + s2[i] * math.exp(m2[i])) * math.exp(-largest)"),
    ("merge_takes_the_smaller", "wrong values in m", "max(", "min("),
    # A part without a number is merged by doing nothing, and then nothing is written.
    ("merge_skips_empty_parts", "wrong values in m|wrong values in s|never written", "i < m1.size",
     "i < m1.size and m1[i] > MINUS_INF and m2[i] > MINUS_INF"),
    ("merge_in_place", "input|m1", "s[i] = s1[i] * math.exp(m1[i] - largest)",
     "s1[i] *= math.exp(m1[i] - largest)\n            s[i] = s1[i]"),
    ("merge_no_guard", OUTSIDE, "i < m1.size", "i >= 0"))


# ---- softmax_online(x, y) --------------------------------------------------------------------


@right("softmax_online")
@cuda.jit
def online_by_the_course(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_online")
@cuda.jit
def online_every_number_is_a_pair(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_merge(m, s, x[row, col], ONE)
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_online")
@cuda.jit
def online_without_branches(x, y):
    # Starts at the lowest finite number, so that no difference is -inf - -inf.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            new = max(m, x[row, col])
            s = s * math.exp(m - new) + math.exp(x[row, col] - new)
            m = new
        largest = warp_max(m)
        factor = ONE / warp_sum(s * math.exp(m - largest))
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) * factor


@wrong("softmax_online", "x is read three times; the lesson's way reads it twice")
@cuda.jit
def online_in_three_passes(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


mistakes("softmax_online",
    ("online_forgets_to_rescale", VALUES, "s = s * math.exp(m - value) + ONE", "s += ONE"),
    # m is already the new one when the sum is brought to it: the factor is always 1.
    ("online_rescales_too_late", VALUES, online_without_branches, "new = max(", "m = new = max("),
    ("online_rescales_the_wrong_way", NAN + "|" + VALUES, "s * math.exp(m - value)",
     "(s * math.exp(value - m) if m > MINUS_INF else ZERO)"),
    # -inf - -inf: wrong only where a lane's first number is masked.
    ("online_masked_numbers_are_nan", NAN, online_without_branches, "LOWEST", "MINUS_INF"),
    # Lanes without a number merge (-inf, 0) with (-inf, 0) by the plain formula.
    ("online_idle_lanes_are_nan", NAN, "m, s = intrinsics.online_merge(m, s, m2, s2)",
     "new = max(m, m2)\n"
     "            s = s * math.exp(m - new) + s2 * math.exp(m2 - new)\n"
     "            m = new"),
    ("online_merges_lanes_by_adding", VALUES, online_by_the_course, "intrinsics.warp_online(m, s)",
     "warp_max(m), warp_sum(s)"),
    # The other lane's sum is merged with the maximum that has just been changed.
    ("online_shuffles_the_merged_maximum", NAN + "|" + VALUES,
     "m2 = cuda.shfl_xor_sync(0xFFFFFFFF, m, 1 << k)",
     "m = max(m, cuda.shfl_xor_sync(0xFFFFFFFF, m, 1 << k))", "(m, s, m2, s2)", "(m, s, m, s2)"),
    ("online_own_pair_only", VALUES, online_by_the_course,
     "        m, s = intrinsics.warp_online(m, s)\n", ""),
    ("online_starts_at_zero", NAN, "m, s = MINUS_INF, ZERO", "m, s = ZERO, ZERO"),
    ("online_merges_in_the_loop", "shuffle-inactive-lane", online_by_the_course,
     "        m, s = intrinsics.warp",
     "            if col + 32 >= x.shape[1]:\n                m, s = intrinsics.warp"))
