"""Lesson 05: what fusing brings, cross-entropy and its gradient, layers before and after softmax.

The messages about shuffles, races and memory outside an array are the sanitizer's own.
"""

import math

import numpy as np

from bank import right, wrong
from course_lib import cuda
from course_lib.runtime.intrinsics import (
    online_add,
    online_merge,
    warp_max,
    warp_online,
    warp_sum,
)
from course_lib.runtime.philox import philox_four, philox_one

OUTSIDE = "out-of-bounds"
ALL = 0xFFFFFFFF
MINUS_INF = np.float32(-np.inf)
LOWEST = np.float32(-3.4e38)
ZERO, ONE = np.float32(0), np.float32(1)
IGNORED, SLOTS, EPS = -100, 4, np.float32(1e-5)
TWO_16, ROUND = np.float32(2**16), np.float32(0.5)

# ---- predict_fusion(n, n_operations, flops, gbps, tflops, launch_us) -------------------------


@right("predict_fusion")
def fusion_in_seconds(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 8 * n / (gbps * 1e9), flops * n / (tflops * 1e12)
    chain = n_operations * (launch_us + 1e6 * max(memory, one))
    return chain, launch_us + 1e6 * max(memory, one * n_operations)


@right("predict_fusion")
def fusion_kernel_by_kernel(n, n_operations, flops, gbps, tflops, launch_us):
    chain = work = 0.0
    for _ in range(n_operations):
        work += flops * n / tflops / 1e6
        chain += launch_us + max(8 * n / gbps / 1e3, flops * n / tflops / 1e6)
    return chain, launch_us + max(8 * n / gbps / 1e3, work)


@right("predict_fusion")
def fusion_by_the_ridge(n, n_operations, flops, gbps, tflops, launch_us):
    def time(work):
        bound = tflops * 1e3 / gbps  # FLOPs per byte where both limits meet
        limit = 8 * n / gbps / 1e3 if work < 8 * bound else work * n / tflops / 1e6
        return launch_us + limit

    return n_operations * time(flops), time(n_operations * flops)


@wrong("predict_fusion", "wrong values in chain_us")
def fusion_adds_memory_and_arithmetic(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 8 * n / (gbps * 1e3), flops * n / (tflops * 1e6)
    return n_operations * (launch_us + memory + one), launch_us + memory + n_operations * one


@wrong("predict_fusion", "wrong values in fused_us")
def fusion_without_arithmetic(n, n_operations, flops, gbps, tflops, launch_us):
    memory = 8 * n / (gbps * 1e3)
    return n_operations * (launch_us + memory), launch_us + memory


@wrong("predict_fusion", "wrong values in fused_us")
def fusion_saves_arithmetic(n, n_operations, flops, gbps, tflops, launch_us):
    # As if one kernel had the arithmetic of one operation only.
    one = launch_us + max(8 * n / (gbps * 1e3), flops * n / (tflops * 1e6))
    return n_operations * one, one


@wrong("predict_fusion", "wrong values in chain_us")
def fusion_one_launch_for_the_chain(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 8 * n / (gbps * 1e3), flops * n / (tflops * 1e6)
    return launch_us + n_operations * max(memory, one), launch_us + max(memory, n_operations * one)


@wrong("predict_fusion", "wrong values in fused_us")
def fusion_launches_each_operation(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 8 * n / (gbps * 1e3), flops * n / (tflops * 1e6)
    chain = n_operations * (launch_us + max(memory, one))
    return chain, n_operations * launch_us + max(memory, n_operations * one)


@wrong("predict_fusion", "wrong values in chain_us")
def fusion_only_reads(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 4 * n / (gbps * 1e3), flops * n / (tflops * 1e6)
    chain = n_operations * (launch_us + max(memory, one))
    return chain, launch_us + max(memory, n_operations * one)


@wrong("predict_fusion", "wrong values in chain_us")
def fusion_counts_numbers_for_bytes(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 2 * n / (gbps * 1e3), flops * n / (tflops * 1e6)
    chain = n_operations * (launch_us + max(memory, one))
    return chain, launch_us + max(memory, n_operations * one)


@wrong("predict_fusion", "wrong values in chain_us")
def fusion_wrong_unit(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 8 * n / gbps, flops * n / tflops
    chain = n_operations * (launch_us + max(memory, one))
    return chain, launch_us + max(memory, n_operations * one)


@wrong("predict_fusion", "wrong values in chain_us")
def fusion_the_smaller_limit(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 8 * n / (gbps * 1e3), flops * n / (tflops * 1e6)
    chain = n_operations * (launch_us + min(memory, one))
    return chain, launch_us + min(memory, n_operations * one)


@wrong("predict_fusion", "wrong values in chain_us")
def fusion_other_way_round(n, n_operations, flops, gbps, tflops, launch_us):
    memory, one = 8 * n / (gbps * 1e3), flops * n / (tflops * 1e6)
    chain = n_operations * (launch_us + max(memory, one))
    return launch_us + max(memory, n_operations * one), chain


@wrong("predict_fusion", "is the return missing")
def fusion_no_return(n, n_operations, flops, gbps, tflops, launch_us):
    n_operations * (launch_us + 8 * n / (gbps * 1e3))


# ---- cross_entropy(logits, target, loss, m, s) -----------------------------------------------


@right("cross_entropy")
@cuda.jit
def entropy_in_two_passes(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest = max(largest, logits[row, col])
        largest = warp_max(largest)
        for col in range(lane, logits.shape[1], 32):
            total += math.exp(logits[row, col] - largest)
        total = warp_sum(total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            label = target[row]
            if label >= 0:
                loss[row] = math.log(total) - (logits[row, label] - largest)


@right("cross_entropy")
@cuda.jit
def entropy_thread_per_row(logits, target, loss, m, s):
    if cuda.grid(1) % 32 == 0 and cuda.grid(1) // 32 < logits.shape[0]:
        row = cuda.grid(1) // 32
        largest, total = MINUS_INF, ZERO
        for col in range(logits.shape[1]):
            largest, total = online_add(largest, total, logits[row, col])
        m[row], s[row] = largest, total
        if target[row] == IGNORED:
            loss[row] = ZERO
        else:
            loss[row] = largest - logits[row, target[row]] + math.log(total)


@right("cross_entropy")
@cuda.jit
def entropy_lane_of_the_target(logits, target, loss, m, s):
    # The lane that reads the target's score keeps it; a shuffle takes it to all.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label = target[row]
        largest, total, at_label = MINUS_INF, ZERO, ZERO
        for col in range(lane, logits.shape[1], 32):
            value = logits[row, col]
            if col == label:
                at_label = value
            if value > largest:
                largest, total = value, total * math.exp(largest - value) + ONE
            elif value != MINUS_INF:
                total += math.exp(value - largest)
        for k in range(5):
            other_m = cuda.shfl_xor_sync(ALL, largest, 1 << k)
            other_s = cuda.shfl_xor_sync(ALL, total, 1 << k)
            largest, total = online_merge(largest, total, other_m, other_s)
        at_label = warp_sum(at_label)
        if lane == 31:
            m[row], s[row] = largest, total
            loss[row] = ZERO if label == IGNORED else largest - at_label + math.log(total)


@wrong("cross_entropy", "wrong values in loss")
@cuda.jit
def entropy_no_maximum(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        total = ZERO
        for col in range(lane, logits.shape[1], 32):
            total += math.exp(logits[row, col])
        total = warp_sum(total)
        if lane == 0:
            m[row], s[row], loss[row] = ZERO, total, ZERO
            if target[row] != IGNORED:
                loss[row] = math.log(total) - logits[row, target[row]]


@wrong("cross_entropy", "wrong values in loss")
@cuda.jit
def entropy_adds_the_logarithm_first(logits, target, loss, m, s):
    # m + log s is rounded to the digits of m: at 10,000, three of them are left after the point.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            if target[row] != IGNORED:
                lse = largest + math.log(total)
                loss[row] = lse - logits[row, target[row]]


@wrong("cross_entropy", OUTSIDE)
@cuda.jit
def entropy_ignores_nothing(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row] = largest, total
            loss[row] = (largest - logits[row, target[row]]) + math.log(total)


@wrong("cross_entropy", "never written")
@cuda.jit
def entropy_ignored_is_not_written(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row] = largest, total
            if target[row] != IGNORED:
                loss[row] = (largest - logits[row, target[row]]) + math.log(total)


@wrong("cross_entropy", "wrong values in loss")
@cuda.jit
def entropy_without_the_logarithm(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            if target[row] != IGNORED:
                loss[row] = largest - logits[row, target[row]] + total


@wrong("cross_entropy", "wrong sign")
@cuda.jit
def entropy_wrong_sign(logits, target, loss, m, s):
    # The log-probability, and not minus it.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            if target[row] != IGNORED:
                loss[row] = logits[row, target[row]] - largest - math.log(total)


@wrong("cross_entropy", "wrong values in")
@cuda.jit
def entropy_lanes_stay_apart(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            if target[row] != IGNORED:
                loss[row] = largest - logits[row, target[row]] + math.log(total)


@wrong("cross_entropy", "wrong values in loss")
@cuda.jit
def entropy_merges_sums_as_they_are(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_max(largest), warp_sum(total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            if target[row] != IGNORED:
                loss[row] = largest - logits[row, target[row]] + math.log(total)


@wrong("cross_entropy", "wrong values in s")
@cuda.jit
def entropy_saves_the_logarithm(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, math.log(total), ZERO
            if target[row] != IGNORED:
                loss[row] = largest - logits[row, target[row]] + math.log(total)


@wrong("cross_entropy", OUTSIDE)
@cuda.jit
def entropy_no_guard(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    largest, total = MINUS_INF, ZERO
    for col in range(lane, logits.shape[1], 32):
        largest, total = online_add(largest, total, logits[row, col])
    largest, total = warp_online(largest, total)
    if lane == 0:
        m[row], s[row], loss[row] = largest, total, ZERO
        if target[row] != IGNORED:
            loss[row] = largest - logits[row, target[row]] + math.log(total)


@wrong("cross_entropy", "shuffle-inactive-lane")
@cuda.jit
def entropy_ignored_lanes_stay_away(logits, target, loss, m, s):
    # Lanes without a column are missing in the shuffles.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0] and lane < logits.shape[1]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            if target[row] != IGNORED:
                loss[row] = largest - logits[row, target[row]] + math.log(total)


@wrong("cross_entropy", "race|same work")
@cuda.jit
def entropy_all_lanes_write(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        m[row], s[row], loss[row] = largest, total, ZERO
        if target[row] != IGNORED:
            loss[row] = largest - logits[row, target[row]] + math.log(total)


@wrong("cross_entropy", "wrong values in s|NaN")
@cuda.jit
def entropy_masked_is_nan(logits, target, loss, m, s):
    # The first number of a lane may be minus infinity: -inf - -inf.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            value = logits[row, col]
            new = max(largest, value)
            total = total * math.exp(largest - new) + math.exp(value - new)
            largest = new
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row], loss[row] = largest, total, ZERO
            if target[row] != IGNORED:
                loss[row] = largest - logits[row, target[row]] + math.log(total)


# ---- cross_entropy_backward(dloss, logits, target, m, s, dlogits) ----------------------------


@right("cross_entropy_backward")
@cuda.jit
def gradient_element_by_element(dloss, logits, target, m, s, dlogits):
    # No element needs another one, so any thread may take any.
    i, n_cols = cuda.grid(1), logits.shape[1]
    while i < logits.size:
        row, col = i // n_cols, i % n_cols
        hot = ONE if col == target[row] else ZERO
        y = math.exp(logits[row, col] - m[row]) / s[row]
        dlogits[row, col] = ZERO if target[row] == IGNORED else (y - hot) * dloss[row]
        i += cuda.gridsize(1)


@right("cross_entropy_backward")
@cuda.jit
def gradient_mends_the_target(dloss, logits, target, m, s, dlogits):
    # All as if there was no target; then the lane that wrote its column subtracts.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label = target[row]
        scale = dloss[row] if label != IGNORED else ZERO
        for col in range(lane, logits.shape[1], 32):
            dlogits[row, col] = math.exp(logits[row, col] - m[row]) / s[row] * scale
        if label >= 0 and label % 32 == lane:
            dlogits[row, label] -= scale


@right("cross_entropy_backward")
@cuda.jit
def gradient_by_reciprocal(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label, largest, scale = target[row], m[row], ONE / s[row]
        col = lane
        while col < logits.shape[1]:
            if label == IGNORED:
                dlogits[row, col] = ZERO
            else:
                y = math.exp(logits[row, col] - largest) * scale
                dlogits[row, col] = dloss[row] * (y - ONE if col == label else y)
            col += 32


@wrong("cross_entropy_backward", "wrong values in dlogits")
@cuda.jit
def gradient_without_one_hot(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            y = math.exp(logits[row, col] - m[row]) / s[row]
            dlogits[row, col] = y * dloss[row] if target[row] != IGNORED else ZERO


@wrong("cross_entropy_backward", "wrong values in dlogits")
@cuda.jit
def gradient_ignores_nothing(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = math.exp(logits[row, col] - m[row]) / s[row]
            if col == target[row]:
                dx -= ONE
            dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "never written")
@cuda.jit
def gradient_ignored_is_not_written(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0] and target[row] != IGNORED:
        for col in range(lane, logits.shape[1], 32):
            dx = math.exp(logits[row, col] - m[row]) / s[row]
            if col == target[row]:
                dx -= ONE
            dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "wrong values in dlogits|times what it should be")
@cuda.jit
def gradient_without_dloss(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = math.exp(logits[row, col] - m[row]) / s[row]
                if col == target[row]:
                    dx -= ONE
            dlogits[row, col] = dx


@wrong("cross_entropy_backward", "wrong values in dlogits|times what it should be")
@cuda.jit
def gradient_dloss_of_the_first_row(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = math.exp(logits[row, col] - m[row]) / s[row]
                if col == target[row]:
                    dx -= ONE
            dlogits[row, col] = dx * dloss[0]


@wrong("cross_entropy_backward", "wrong sign|wrong values in dlogits")
@cuda.jit
def gradient_wrong_sign(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = -math.exp(logits[row, col] - m[row]) / s[row]
                if col == target[row]:
                    dx += ONE
            dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "wrong values in dlogits")
@cuda.jit
def gradient_dloss_before_one_hot(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = dloss[row] * math.exp(logits[row, col] - m[row]) / s[row]
                if col == target[row]:
                    dx -= ONE
            dlogits[row, col] = dx


@wrong("cross_entropy_backward", "NaN was computed|overflow")
@cuda.jit
def gradient_no_maximum(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = math.exp(logits[row, col]) / (math.exp(m[row]) * s[row])
                if col == target[row]:
                    dx -= ONE
            dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "wrong values in dlogits")
@cuda.jit
def gradient_not_divided(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = math.exp(logits[row, col] - m[row])
                if col == target[row]:
                    dx -= ONE
            dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "wrong values in dlogits")
@cuda.jit
def gradient_by_rounded_lse(dloss, logits, target, m, s, dlogits):
    # exp(x - lse): at 10,000 lse has lost three of its digits.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        lse = m[row] + math.log(s[row])
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = math.exp(logits[row, col] - lse)
                if col == target[row]:
                    dx -= ONE
            dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "wrong values in dlogits")
@cuda.jit
def gradient_target_of_a_lane(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if target[row] != IGNORED:
                dx = math.exp(logits[row, col] - m[row]) / s[row]
                if lane == target[row]:
                    dx -= ONE
            dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "never written")
@cuda.jit
def gradient_first_round_only(dloss, logits, target, m, s, dlogits):
    row, col = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0] and col < logits.shape[1]:
        dx = ZERO
        if target[row] != IGNORED:
            dx = math.exp(logits[row, col] - m[row]) / s[row]
            if col == target[row]:
                dx -= ONE
        dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", OUTSIDE)
@cuda.jit
def gradient_no_guard(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    for col in range(lane, logits.shape[1], 32):
        dx = ZERO
        if target[row] != IGNORED:
            dx = math.exp(logits[row, col] - m[row]) / s[row]
            if col == target[row]:
                dx -= ONE
        dlogits[row, col] = dx * dloss[row]


@wrong("cross_entropy_backward", "race")
@cuda.jit
def gradient_mended_by_another_lane(dloss, logits, target, m, s, dlogits):
    # Lane 0 mends what another lane writes, and nothing decides who comes first.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label = target[row]
        scale = dloss[row] if label != IGNORED else ZERO
        for col in range(lane, logits.shape[1], 32):
            dlogits[row, col] = math.exp(logits[row, col] - m[row]) / s[row] * scale
        if label >= 0 and lane == 0:
            dlogits[row, label] -= scale


# ---- bn_relu_softmax(x, mean, var, weight, bias, y) ------------------------------------------


@cuda.jit(device=True)
def activation(x, mean, var, weight, bias, row, col):
    scale = weight[col] / math.sqrt(var[col] + EPS)
    return max((x[row, col] - mean[col]) * scale + bias[col], ZERO)


@right("bn_relu_softmax")
@cuda.jit
def layers_in_three_passes(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = ZERO, ZERO  # after ReLU nothing is below 0
        for col in range(lane, x.shape[1], 32):
            m = max(m, activation(x, mean, var, weight, bias, row, col))
        m = warp_max(m)
        for col in range(lane, x.shape[1], 32):
            s += math.exp(activation(x, mean, var, weight, bias, row, col) - m)
        s = warp_sum(s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(activation(x, mean, var, weight, bias, row, col) - m) / s


@right("bn_relu_softmax")
@cuda.jit
def layers_online(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = online_add(m, s, activation(x, mean, var, weight, bias, row, col))
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            z = activation(x, mean, var, weight, bias, row, col)
            y[row, col] = math.exp(z - m) * (ONE / s)


@right("bn_relu_softmax")
@cuda.jit
def layers_divide_by_the_root(x, mean, var, weight, bias, y):
    values = cuda.local.array(SLOTS, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = ZERO, ZERO
        for k in range(SLOTS):
            col = 32 * k + lane
            values[k] = MINUS_INF
            if col < x.shape[1]:
                normal = (x[row, col] - mean[col]) / math.sqrt(var[col] + EPS)
                z = normal * weight[col] + bias[col]
                values[k] = z if z > ZERO else ZERO
            m = max(m, values[k])
        m = warp_max(m)
        for k in range(SLOTS):
            s += math.exp(values[k] - m)
        s = warp_sum(s)
        for k in range(SLOTS):
            if 32 * k + lane < x.shape[1]:
                y[row, 32 * k + lane] = math.exp(values[k] - m) / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_relu_of_what_is_not_there(x, mean, var, weight, bias, y):
    # ReLU makes 0 of the minus infinity that stands for "no column", and exp of 0 counts.
    values = cuda.local.array(SLOTS, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for k in range(SLOTS):
            col = 32 * k + lane
            values[k] = MINUS_INF
            if col < x.shape[1]:
                scale = weight[col] / math.sqrt(var[col] + EPS)
                values[k] = (x[row, col] - mean[col]) * scale + bias[col]
            values[k] = max(values[k], ZERO)
            m = max(m, values[k])
        m = warp_max(m)
        for k in range(SLOTS):
            values[k] = math.exp(values[k] - m)
            s += values[k]
        s = warp_sum(s)
        for k in range(SLOTS):
            col = 32 * k + lane
            if col < x.shape[1]:
                y[row, col] = values[k] / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_scale_and_shift(x, mean, var, weight, bias, y):
    # Right on paper. Where the mean is 5000, two large products are subtracted.
    values = cuda.local.array(SLOTS, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for k in range(SLOTS):
            col = 32 * k + lane
            values[k] = MINUS_INF
            if col < x.shape[1]:
                scale = weight[col] / math.sqrt(var[col] + EPS)
                shift = bias[col] - mean[col] * scale
                values[k] = max(x[row, col] * scale + shift, ZERO)
            m = max(m, values[k])
        m = warp_max(m)
        for k in range(SLOTS):
            values[k] = math.exp(values[k] - m)
            s += values[k]
        s = warp_sum(s)
        for k in range(SLOTS):
            col = 32 * k + lane
            if col < x.shape[1]:
                y[row, col] = values[k] / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_without_relu(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col] + EPS)
            m, s = online_add(m, s, (x[row, col] - mean[col]) * scale + bias[col])
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col] + EPS)
            y[row, col] = math.exp((x[row, col] - mean[col]) * scale + bias[col] - m) / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_relu_before_the_bias(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col] + EPS)
            m, s = online_add(m, s, max((x[row, col] - mean[col]) * scale, ZERO) + bias[col])
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col] + EPS)
            z = max((x[row, col] - mean[col]) * scale, ZERO) + bias[col]
            y[row, col] = math.exp(z - m) / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_without_eps(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col])
            m, s = online_add(m, s, max((x[row, col] - mean[col]) * scale + bias[col], ZERO))
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col])
            z = max((x[row, col] - mean[col]) * scale + bias[col], ZERO)
            y[row, col] = math.exp(z - m) / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_eps_after_the_root(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / (math.sqrt(var[col]) + EPS)
            m, s = online_add(m, s, max((x[row, col] - mean[col]) * scale + bias[col], ZERO))
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / (math.sqrt(var[col]) + EPS)
            z = max((x[row, col] - mean[col]) * scale + bias[col], ZERO)
            y[row, col] = math.exp(z - m) / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_divide_by_the_variance(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / (var[col] + EPS)
            m, s = online_add(m, s, max((x[row, col] - mean[col]) * scale + bias[col], ZERO))
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / (var[col] + EPS)
            z = max((x[row, col] - mean[col]) * scale + bias[col], ZERO)
            y[row, col] = math.exp(z - m) / s


@wrong("bn_relu_softmax", OUTSIDE + "|wrong values in y")
@cuda.jit
def layers_parameters_of_the_row(x, mean, var, weight, bias, y):
    # A feature is a column, and not a row.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        scale, m, s = weight[row] / math.sqrt(var[row] + EPS), MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = online_add(m, s, max((x[row, col] - mean[row]) * scale + bias[row], ZERO))
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            z = max((x[row, col] - mean[row]) * scale + bias[row], ZERO)
            y[row, col] = math.exp(z - m) / s


@wrong("bn_relu_softmax", "NaN was computed|overflow|wrong values in y")
@cuda.jit
def layers_no_maximum(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        s = ZERO
        for col in range(lane, x.shape[1], 32):
            s += math.exp(activation(x, mean, var, weight, bias, row, col))
        s = warp_sum(s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(activation(x, mean, var, weight, bias, row, col)) / s


@wrong("bn_relu_softmax", "wrong values in y")
@cuda.jit
def layers_sum_of_a_lane(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = ZERO, ZERO
        for col in range(lane, x.shape[1], 32):
            m = max(m, activation(x, mean, var, weight, bias, row, col))
        m = warp_max(m)
        for col in range(lane, x.shape[1], 32):
            s += math.exp(activation(x, mean, var, weight, bias, row, col) - m)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(activation(x, mean, var, weight, bias, row, col) - m) / s


@wrong("bn_relu_softmax", OUTSIDE)
@cuda.jit
def layers_no_end_of_row(x, mean, var, weight, bias, y):
    values = cuda.local.array(SLOTS, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for k in range(SLOTS):
            values[k] = activation(x, mean, var, weight, bias, row, 32 * k + lane)
            m = max(m, values[k])
        m = warp_max(m)
        for k in range(SLOTS):
            values[k] = math.exp(values[k] - m)
            s += values[k]
        s = warp_sum(s)
        for k in range(SLOTS):
            if 32 * k + lane < x.shape[1]:
                y[row, 32 * k + lane] = values[k] / s


@wrong("bn_relu_softmax", "shuffle-inactive-lane")
@cuda.jit
def layers_shuffle_in_the_guard(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0] and lane < x.shape[1]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = online_add(m, s, activation(x, mean, var, weight, bias, row, col))
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(activation(x, mean, var, weight, bias, row, col) - m) / s


@wrong("bn_relu_softmax", OUTSIDE)
@cuda.jit
def layers_no_guard(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    m, s = MINUS_INF, ZERO
    for col in range(lane, x.shape[1], 32):
        m, s = online_add(m, s, activation(x, mean, var, weight, bias, row, col))
    m, s = warp_online(m, s)
    for col in range(lane, x.shape[1], 32):
        y[row, col] = math.exp(activation(x, mean, var, weight, bias, row, col) - m) / s


@wrong("bn_relu_softmax", "float64")
@cuda.jit
def layers_eps_in_float64(x, mean, var, weight, bias, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col] + 1e-5)
            m, s = online_add(m, s, max((x[row, col] - mean[col]) * scale + bias[col], ZERO))
        m, s = warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            scale = weight[col] / math.sqrt(var[col] + 1e-5)
            z = max((x[row, col] - mean[col]) * scale + bias[col], ZERO)
            y[row, col] = math.exp(z - m) / s


# ---- softmax_dropout_backward(dz, x, m, s, p, seed, dx) --------------------------------------


@cuda.jit(device=True)
def kept(i, seed, p):
    number = philox_one(i // 2, np.uint32(seed), np.uint32(0))
    half = number >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF)
    return half >= np.uint32(p * TWO_16 + ROUND)


@right("softmax_dropout_backward")
@cuda.jit
def dropout_mask_in_bits(dz, x, m, s, p, seed, dx):
    # The mask is drawn once, and kept in the bits of a register.
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total, bits = ONE / (ONE - p), ZERO, 0
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                bits |= 1 << (col // 32)
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col]
        total = warp_sum(total) * factor
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            hot = ONE if bits >> (col // 32) & 1 else ZERO
            dx[row, col] = y * (dz[row, col] * factor * hot - total)


@right("softmax_dropout_backward")
@cuda.jit
def dropout_without_philox_one(dz, x, m, s, p, seed, dx):
    # A thread for each row; the generator gives the numbers of eight neighbours by one call.
    thread, n_cols, threshold = cuda.grid(1), x.shape[1], np.uint32(p * TWO_16 + ROUND)
    if thread % 32 == 0 and thread // 32 < x.shape[0]:
        row, factor, total = thread // 32, ONE / (ONE - p), ZERO
        for done in range(2):
            for col in range(n_cols):
                i = row * n_cols + col
                four = philox_four(i // 8, np.uint32(seed), np.uint32(0))
                number = four[0]
                for k in range(1, 4):
                    if i // 2 % 4 == k:
                        number = four[k]
                half = number >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF)
                dy = dz[row, col] * factor if half >= threshold else ZERO
                y = math.exp(x[row, col] - m[row]) / s[row]
                if done == 0:
                    total += y * dy
                else:
                    dx[row, col] = y * (dy - total)


@right("softmax_dropout_backward")
@cuda.jit
def dropout_grid_stride(dz, x, m, s, p, seed, dx):
    lane, n_cols = cuda.laneid, x.shape[1]
    row = cuda.grid(1) // 32
    while row < x.shape[0]:
        scale, total = ONE / (s[row] * (ONE - p)), ZERO
        for col in range(lane, n_cols, 32):
            if kept(col + row * n_cols, seed, p):
                total += math.exp(x[row, col] - m[row]) * dz[row, col]
        total = warp_sum(total) / s[row]
        for col in range(lane, n_cols, 32):
            dy = dz[row, col] if kept(col + row * n_cols, seed, p) else ZERO
            dx[row, col] = math.exp(x[row, col] - m[row]) * scale * (dy - total)
        row += cuda.gridsize(1) // 32


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_no_mask(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, n_cols, 32):
            total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col]
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dx[row, col] = y * (dz[row, col] - total)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_mask_after_softmax(dz, x, m, s, p, seed, dx):
    # In the order of the forward pass: first softmax, then the mask.
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, n_cols, 32):
            total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col]
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            dx[row, col] = ZERO
            if kept(row * n_cols + col, seed, p):
                y = math.exp(x[row, col] - m[row]) / s[row]
                dx[row, col] = y * (dz[row, col] - total) / (ONE - p)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_dropped_have_no_gradient(dz, x, m, s, p, seed, dx):
    # A dropped element still has a part in the sum of its row, and so a gradient.
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            dx[row, col] = ZERO
            if kept(row * n_cols + col, seed, p):
                y = math.exp(x[row, col] - m[row]) / s[row]
                dx[row, col] = y * (dz[row, col] * factor - total)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_sum_without_mask(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = dz[row, col] * factor if kept(row * n_cols + col, seed, p) else ZERO
            dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "times what it should be|wrong values in dx")
@cuda.jit
def dropout_not_scaled(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col]
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = dz[row, col] if kept(row * n_cols + col, seed, p) else ZERO
            dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "times what it should be|wrong values in dx")
@cuda.jit
def dropout_divides_by_p(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / max(p, np.float32(1e-3)), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = dz[row, col] * factor if kept(row * n_cols + col, seed, p) else ZERO
            dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_other_way_round(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if not kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = ZERO if kept(row * n_cols + col, seed, p) else dz[row, col] * factor
            dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_mask_of_the_column(dz, x, m, s, p, seed, dx):
    # All rows get the mask of the first one.
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = dz[row, col] * factor if kept(col, seed, p) else ZERO
            dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_another_mask_each_time(dz, x, m, s, p, seed, dx):
    # As if a generator went on: the second loop draws other numbers than the first.
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            again = kept(x.size + row * n_cols + col, seed, p)
            dx[row, col] = y * ((dz[row, col] * factor if again else ZERO) - total)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_sum_of_a_lane(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = dz[row, col] * factor if kept(row * n_cols + col, seed, p) else ZERO
            dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "shuffle")
@cuda.jit
def dropout_shuffle_of_the_kept(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                y = math.exp(x[row, col] - m[row]) / s[row]
                total += warp_sum(y * dz[row, col] * factor)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = dz[row, col] * factor if kept(row * n_cols + col, seed, p) else ZERO
            dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "never written")
@cuda.jit
def dropout_dropped_are_not_written(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                y = math.exp(x[row, col] - m[row]) / s[row]
                dx[row, col] = y * (dz[row, col] * factor - total)


@wrong("softmax_dropout_backward", OUTSIDE)
@cuda.jit
def dropout_no_guard(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    factor, total = ONE / (ONE - p), ZERO
    for col in range(lane, n_cols, 32):
        if kept(row * n_cols + col, seed, p):
            total += math.exp(x[row, col] - m[row]) / s[row] * dz[row, col] * factor
    total = warp_sum(total)
    for col in range(lane, n_cols, 32):
        y = math.exp(x[row, col] - m[row]) / s[row]
        dy = dz[row, col] * factor if kept(row * n_cols + col, seed, p) else ZERO
        dx[row, col] = y * (dy - total)


@wrong("softmax_dropout_backward", "wrong values in dx|NaN")
@cuda.jit
def dropout_y_is_the_exponential(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row])
            dy = dz[row, col] * factor if kept(row * n_cols + col, seed, p) else ZERO
            dx[row, col] = y * (dy - total)
