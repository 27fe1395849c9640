"""Lesson 05: what fusing brings, cross-entropy and its gradient, layers before and after softmax.

The wrong kernels are a right one with one mistake in it, and `mistake` says which text stands in
place of which. The messages about shuffles, races and memory outside an array are the sanitizer's
own.
"""

import math

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import online_add, online_merge, warp_max, warp_online, warp_sum
from course_lib.runtime.intrinsics.philox import philox_four, philox_one

OUTSIDE = "out-of-bounds"
ALL = 0xFFFFFFFF
MINUS_INF = np.float32(-np.inf)
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


ONE_LIMIT = "max(memory_us, arithmetic_us)"
ALL_LIMIT = "max(memory_us, n_operations * arithmetic_us)"
mistakes("predict_fusion",
    ("fusion_adds_memory_and_arithmetic", "wrong values in chain_us", ONE_LIMIT,
     "memory_us + arithmetic_us", ALL_LIMIT, "memory_us + n_operations * arithmetic_us"),
    ("fusion_without_arithmetic", "wrong values in fused_us",
     "arithmetic_us = flops * n / (tflops * 1e6)", "arithmetic_us = 0"),
    # As if one kernel had the arithmetic of one operation only.
    ("fusion_saves_arithmetic", "wrong values in fused_us", ALL_LIMIT, ONE_LIMIT),
    ("fusion_one_launch_for_the_chain", "wrong values in chain_us",
     "n_operations * (launch_us + max(memory_us, arithmetic_us))",
     "launch_us + n_operations * max(memory_us, arithmetic_us)"),
    ("fusion_launches_each_operation", "wrong values in fused_us", "return chain, launch_us",
     "return chain, n_operations * launch_us"),
    ("fusion_only_reads", "wrong values in chain_us", "8 * n", "4 * n"),
    ("fusion_counts_numbers_for_bytes", "wrong values in chain_us", "8 * n", "2 * n"),
    ("fusion_wrong_unit", "wrong values in chain_us", "(gbps * 1e3)", "gbps", "(tflops * 1e6)",
     "tflops"),
    ("fusion_the_smaller_limit", "wrong values in chain_us", ONE_LIMIT,
     ONE_LIMIT.replace("max", "min"), ALL_LIMIT, ALL_LIMIT.replace("max", "min")),
    ("fusion_other_way_round", "wrong values in chain_us", f"chain, launch_us + {ALL_LIMIT}",
     f"launch_us + {ALL_LIMIT}, chain"),
    ("fusion_no_return", "is the return missing", "return ", ""))


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


@wrong("cross_entropy", "should share the work")
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


LOSS = "(largest - logits[row, target[row]]) + math.log(total)"
mistakes("cross_entropy",
    ("entropy_no_maximum", "wrong values in m", entropy_in_two_passes,
     "largest = warp_max(largest)", "largest = ZERO"),
    # m + log s is rounded to the digits of m: at 10,000, three of them are left after the point.
    ("entropy_adds_the_logarithm_first", "wrong values in loss", LOSS,
     "(largest + math.log(total)) - logits[row, target[row]]"),
    ("entropy_ignores_nothing", OUTSIDE, "if target[row] != IGNORED:", "if True:"),
    ("entropy_ignored_is_not_written", "never written", "            loss[row] = ZERO\n", ""),
    ("entropy_without_the_logarithm", "wrong values in loss", "math.log(total)", "total"),
    # The log-probability, and not minus it.
    ("entropy_wrong_sign", "a minus sign too much", LOSS, f"-({LOSS})"),
    ("entropy_lanes_stay_apart", "wrong values in",
     "        largest, total = warp_online(largest, total)\n", ""),
    ("entropy_merges_sums_as_they_are", "wrong values in s", "warp_online(largest, total)",
     "warp_max(largest), warp_sum(total)"),
    ("entropy_saves_the_logarithm", "wrong values in s", "s[row] = largest, total",
     "s[row] = largest, math.log(total)"),
    ("entropy_no_guard", OUTSIDE, "if row < logits.shape[0]:", "if True:"),
    # Lanes without a column are missing in the shuffles.
    ("entropy_ignored_lanes_stay_away", "shuffle-inactive-lane", "row < logits.shape[0]",
     "row < logits.shape[0] and lane < logits.shape[1]"),
    ("entropy_all_lanes_write", "race|same work", "if lane == 0:", "if True:"),
    # The first number of a lane may be minus infinity: -inf - -inf.
    ("entropy_masked_is_nan", "wrong values in s|NaN",
     "largest, total = online_add(largest, total, logits[row, col])",
     "new = max(largest, logits[row, col])\n"
     "            total *= math.exp(largest - new)\n"
     "            total += math.exp(logits[row, col] - new)\n"
     "            largest = new"))


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


mistakes("cross_entropy_backward",
    ("gradient_without_one_hot", "wrong values in dlogits", "dx -= ONE", "pass"),
    ("gradient_ignores_nothing", "wrong values in dlogits", "if label != IGNORED:", "if True:"),
    ("gradient_ignored_is_not_written", "never written", "row < logits.shape[0]",
     "row < logits.shape[0] and target[row] != IGNORED"),
    ("gradient_without_dloss", "wrong values in dlogits|times what it should be", "dx * scale",
     "dx"),
    ("gradient_dloss_of_the_first_row", "wrong values in dlogits|times what it should be",
     "dloss[row]", "dloss[0]"),
    ("gradient_wrong_sign", "wrong sign|wrong values in dlogits", "dx * scale", "-dx * scale"),
    ("gradient_dloss_before_one_hot", "wrong values in dlogits", "/ total", "/ total * scale",
     "dx * scale", "dx"),
    ("gradient_no_maximum", "NaN was computed|overflow",
     "math.exp(logits[row, col] - largest) / total",
     "math.exp(logits[row, col]) / (math.exp(largest) * total)"),
    ("gradient_not_divided", "wrong values in dlogits", " / total", ""),
    # exp(x - lse): at 10,000 lse has lost three of its digits.
    ("gradient_by_rounded_lse", "wrong values in dlogits", "- largest) / total",
     "- (largest + math.log(total)))"),
    ("gradient_target_of_a_lane", "wrong values in dlogits", "col == label", "lane == label"),
    ("gradient_first_round_only", "never written", "range(lane, logits.shape[1], 32)",
     "range(lane, min(logits.shape[1], 32), 32)"),
    ("gradient_no_guard", OUTSIDE, "if row < logits.shape[0]:", "if True:"),
    # Lane 0 changes what another lane writes, and nothing decides who comes first.
    ("gradient_mended_by_another_lane", "race", gradient_mends_the_target, "label % 32 == lane",
     "lane == 0"))


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


NORMAL = "(x[row, col] - mean[col]) * scale + bias[col]"
mistakes("bn_relu_softmax",
    # ReLU makes 0 of the minus infinity that stands for "no column", and exp of 0 counts.
    ("layers_relu_of_what_is_not_there", "wrong values in y", f"max({NORMAL}, ZERO)", NORMAL,
     "m = max(m, values[k])",
     "values[k] = max(values[k], ZERO)\n            m = max(m, values[k])"),
    # Right on paper. Where the mean is 5000, two large products are subtracted.
    ("layers_scale_and_shift", "wrong values in y", NORMAL,
     "x[row, col] * scale + (bias[col] - mean[col] * scale)"),
    ("layers_without_relu", "wrong values in y", f"max({NORMAL}, ZERO)", NORMAL),
    ("layers_relu_before_the_bias", "wrong values in y", " + bias[col], ZERO)",
     ", ZERO) + bias[col]"),
    ("layers_without_eps", "wrong values in y", "var[col] + EPS", "var[col]"),
    ("layers_eps_after_the_root", "wrong values in y", "math.sqrt(var[col] + EPS)",
     "(math.sqrt(var[col]) + EPS)"),
    ("layers_divide_by_the_variance", "wrong values in y", "math.sqrt(var[col] + EPS)",
     "(var[col] + EPS)"),
    # A feature is a column, and not a row.
    ("layers_parameters_of_the_row", OUTSIDE + "|wrong values in y",
     "weight[col] / math.sqrt(var[col]", "weight[row] / math.sqrt(var[row]", NORMAL,
     "(x[row, col] - mean[row]) * scale + bias[row]"),
    ("layers_no_maximum", "NaN was computed|overflow|wrong values in y", "math.exp(values[k] - m)",
     "math.exp(values[k])"),
    ("layers_sum_of_a_lane", "wrong values in y", layers_in_three_passes,
     "        s = warp_sum(s)\n", ""),
    ("layers_no_end_of_row", OUTSIDE, "if col < x.shape[1]:\n                scale",
     "if True:\n                scale"),
    ("layers_shuffle_in_the_guard", "shuffle-inactive-lane", layers_online, "row < x.shape[0]",
     "row < x.shape[0] and lane < x.shape[1]"),
    ("layers_no_guard", OUTSIDE, layers_online, "if row < x.shape[0]:", "if True:"),
    ("layers_eps_in_float64", "float64", "+ EPS", "+ 1e-5"))


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


@wrong("softmax_dropout_backward", "should share the work")
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


KEPT = "kept(row * n_cols + col, seed, p)"
FACTOR = "ONE / (ONE - p)"
mistakes("softmax_dropout_backward",
    ("dropout_no_mask", "wrong values in dx", dropout_mask_in_bits, KEPT, "True", FACTOR, "ONE"),
    # In the order of the forward pass: first softmax, then the mask.
    ("dropout_mask_after_softmax", "wrong values in dx", f"if {KEPT}:\n                y =",
     "if True:\n                y =", "total += y * dz[row, col] * factor",
     "total += y * dz[row, col]", "dy = ZERO", "dx[row, col] = ZERO",
     "dy = dz[row, col] * factor\n            dx[row, col] = y * (dy - total)",
     "dx[row, col] = y * (dz[row, col] - total) * factor"),
    # A dropped element still has a part in the sum of its row, and so a gradient.
    ("dropout_dropped_have_no_gradient", "wrong values in dx", dropout_mask_in_bits,
     "(dz[row, col] * factor * hot - total)", "(dz[row, col] * factor - total) * hot"),
    ("dropout_sum_without_mask", "wrong values in dx", f"if {KEPT}:\n                y =",
     "if True:\n                y ="),
    ("dropout_not_scaled", "times what it should be|wrong values in dx", FACTOR, "ONE"),
    ("dropout_divides_by_p", "times what it should be|wrong values in dx", FACTOR,
     "ONE / max(p, np.float32(1e-3))"),
    ("dropout_other_way_round", "wrong values in dx", dropout_mask_in_bits, f"if {KEPT}:",
     f"if not {KEPT}:"),
    # All rows get the mask of the first one.
    ("dropout_mask_of_the_column", "wrong values in dx", dropout_mask_in_bits, KEPT,
     "kept(col, seed, p)"),
    # As if a generator went on: the second loop draws other numbers than the first.
    ("dropout_another_mask_each_time", "wrong values in dx", f"{KEPT}:\n                dy =",
     "kept(x.size + row * n_cols + col, seed, p):\n                dy ="),
    ("dropout_sum_of_a_lane", "wrong values in dx", "        total = warp_sum(total)\n", ""),
    ("dropout_shuffle_of_the_kept", "shuffle", "y * dz[row, col] * factor",
     "warp_sum(y * dz[row, col] * factor)", "        total = warp_sum(total)\n", ""),
    # The store has moved into the `if` above it.
    ("dropout_dropped_are_not_written", "never written", "            dx[row, col] =",
     "                dx[row, col] ="),
    ("dropout_no_guard", OUTSIDE, "if row < x.shape[0]:", "if True:"),
    ("dropout_y_is_the_exponential", "wrong values in dx|NaN", dropout_grid_stride,
     "(s[row] * (ONE - p))", "(ONE - p)", "warp_sum(total) / s[row]", "warp_sum(total)"))
