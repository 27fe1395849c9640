"""Lesson 11: batches, fused layers and back, the step of the recipe, who is taken for whom.

Most wrong kernels are the solution with one mistake in it, and `mistake` says which text stands in
place of which. The right ones are written out.
"""

import numpy as np

from bank import right, wrong
from bank.equivalent import EQUIVALENT
from bank.mistakes import mistakes
from course_lib import cuda

OUTSIDE, VALUES = "out-of-bounds|negative", "wrong values"
ZERO, ONE = np.float32(0), np.float32(1)

# ---- pick_batch(images, labels, order, first, x, y) ------------------------------------------


@right("pick_batch")
@cuda.jit
def pick_by_dividing(images, labels, order, first, x, y):
    source = order[first + cuda.blockIdx.x]
    i = cuda.threadIdx.x
    while i < images.shape[1]:
        byte = np.float32(images[source, i])
        x[cuda.blockIdx.x, i] = (byte - np.float32(127.5)) / np.float32(127.5)
        i += cuda.blockDim.x
    if cuda.threadIdx.x == cuda.blockDim.x - 1:
        y[cuda.blockIdx.x] = labels[source]


@wrong("pick_batch", "only [34] of (768|1024) threads write")
@cuda.jit
def pick_by_one_thread(images, labels, order, first, x, y):
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        y[b] = labels[order[first + b]]
        for i in range(images.shape[1]):
            x[b, i] = np.float32(images[order[first + b], i]) * np.float32(1 / 127.5) - ONE


LOOP = "range(cuda.threadIdx.x, images.shape[1], cuda.blockDim.x)"
mistakes("pick_batch",
    ("pick_in_their_own_order", VALUES, "row = order[first + cuda.blockIdx.x]",
     "row = first + cuda.blockIdx.x"),
    ("pick_always_the_first_batch", VALUES, "order[first + cuda.blockIdx.x]",
     "order[cuda.blockIdx.x]"),
    ("pick_one_picture_for_all", VALUES, "order[first + cuda.blockIdx.x]", "order[first]"),
    ("pick_label_by_place", VALUES, "labels[row]", "labels[cuda.blockIdx.x]"),
    ("pick_not_scaled", VALUES, " * SCALE - ONE", ""),
    ("pick_from_zero_to_two", VALUES, " * SCALE - ONE", " * SCALE"),
    ("pick_as_bytes", VALUES, "np.float32(images[row, i])", "np.float32(images[row, i] * 2)"),
    ("pick_first_pixels_only", "never written", LOOP,
     "range(cuda.threadIdx.x, min(images.shape[1], 32), cuda.blockDim.x)"),
    ("pick_too_many_pixels", OUTSIDE, LOOP,
     "range(cuda.threadIdx.x, images.shape[1] + 1, cuda.blockDim.x)"),
    ("pick_writes_to_its_old_place", OUTSIDE + "|never|wrong", "x[cuda.blockIdx.x, i]",
     "x[row, i]"))


# ---- pool_relu(x, y) -------------------------------------------------------------------------


@right("pool_relu")
@cuda.jit
def pool_relu_in_a_loop(x, y):
    OH, OW = y.shape[1], y.shape[2]
    i = cuda.grid(1)
    while i < y.size:
        plane, rest = divmod(i, OH * OW)
        oh, ow = divmod(rest, OW)
        best = ZERO
        for j in range(4):
            best = max(best, x[plane, 2 * oh + j // 2, 2 * ow + j % 2])
        y[plane, oh, ow] = best
        i += cuda.gridsize(1)


@right("pool_relu")
@cuda.jit
def pool_relu_the_other_way_round(x, y):
    # ReLU of each, then the largest: four times as much work for the same result.
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        OH, OW = y.shape[1:]
        plane, h, w = i // (OH * OW), 2 * (i // OW % OH), 2 * (i % OW)
        left = max(max(x[plane, h, w], ZERO), max(x[plane, h + 1, w], ZERO))
        other = max(max(x[plane, h, w + 1], ZERO), max(x[plane, h + 1, w + 1], ZERO))
        y[plane, h // 2, w // 2] = max(left, other)


mistakes("pool_relu",
    ("pool_relu_no_relu", VALUES, "max(max(upper, lower), ZERO)", "max(upper, lower)"),
    ("pool_relu_upper_row_only", VALUES, "max(max(upper, lower), ZERO)", "max(upper, ZERO)"),
    ("pool_relu_smallest", VALUES, "max(max(upper, lower)", "max(min(upper, lower)"),
    ("pool_relu_no_second_row", VALUES, "x[plane, h + 1, w + 1]", "x[plane, h, w + 1]"),
    ("pool_relu_windows_overlap", VALUES, "2 * (i % OW)", "(i % OW)"),
    ("pool_relu_rows_overlap", VALUES, "2 * (i // OW % OH)", "(i // OW % OH)"),
    ("pool_relu_plane_by_the_input", VALUES + "|out-of-bounds", "i // (OH * OW)",
     "i // (x.shape[1] * x.shape[2])"),
    ("pool_relu_rows_not_wrapped", OUTSIDE, "2 * (i // OW % OH)", "2 * (i // OW)"),
    ("pool_relu_no_loop", "never written", "range(cuda.grid(1), y.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("pool_relu_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("pool_relu_mean_for_max", VALUES, "max(max(upper, lower), ZERO)",
     "max((upper + lower) / np.float32(2), ZERO)"))


# ---- linear_relu(x, weight, bias, y) ---------------------------------------------------------


@wrong("linear_relu", "should share the work")
@cuda.jit
def linear_by_one_lane(x, weight, bias, y):
    warp, lane, n_out = cuda.grid(1) // 32, cuda.threadIdx.x % 32, y.shape[1]
    if lane == 0 and warp < y.size:
        total = bias[warp % n_out]
        for k in range(x.shape[1]):
            total += weight[warp % n_out, k] * x[warp // n_out, k]
        y[warp // n_out, warp % n_out] = total if total > ZERO else ZERO


@right("linear_relu")
@cuda.jit
def linear_by_shuffles(x, weight, bias, y):
    row, col = divmod(cuda.grid(1) // 32, y.shape[1])
    lane, total = cuda.threadIdx.x % 32, ZERO
    if row < y.shape[0]:
        for k in range(lane, x.shape[1], 32):
            total += x[row, k] * weight[col, k]
        step = 16
        while step > 0:
            total += cuda.shfl_down_sync(0xFFFFFFFF, total, step)
            step //= 2
        if lane == 0:
            y[row, col] = max(total + bias[col], ZERO)


mistakes("linear_relu",
    ("linear_no_guard", OUTSIDE, "if warp < y.size:", "if warp >= 0:"),
    ("linear_no_relu", VALUES, "max(total, ZERO)", "total"),
    ("linear_relu_before_the_bias", VALUES, "warp_sum(total) + bias[warp % n_out]",
     "max(warp_sum(total), ZERO) + bias[warp % n_out]"),
    ("linear_no_bias", VALUES, " + bias[warp % n_out]", ""),
    ("linear_bias_of_each_lane", VALUES, "total = warp_sum(total) + bias[warp % n_out]",
     "total = warp_sum(total + bias[warp % n_out])"),
    ("linear_bias_by_row", OUTSIDE + "|wrong", "bias[warp % n_out]", "bias[warp // n_out]"),
    # No guard is missing, but another index.
    ("linear_bias_by_lane", "look at how this index", "bias[warp % n_out]", "bias[lane]"),
    ("linear_own_share_only", VALUES + "|no part", "warp_sum(total) + bias", "total + bias"),
    ("linear_first_32_numbers", VALUES + "|no part", "range(lane, x.shape[1], 32)",
     "range(lane, min(32, x.shape[1]), 32)"),
    ("linear_weights_turned", OUTSIDE + "|wrong", "weight[warp % n_out, k]",
     "weight[k, warp % n_out]"),
    ("linear_rows_and_results_swapped", OUTSIDE + "|wrong",
     "x[warp // n_out, k] * weight[warp % n_out, k]",
     "x[warp % n_out, k] * weight[warp // n_out, k]"),
    ("linear_every_thread_its_own_result", "shuffle-inactive-lane",
     "warp, lane = cuda.grid(1) // 32,", "warp, lane = cuda.grid(1),"),
    ("linear_in_float64", "float64-promotion", "n_out, total = y.shape[1], ZERO",
     "n_out, total = y.shape[1], 0.0"))


# ---- pool_relu_backward(dy, x, y, k, dx) -----------------------------------------------------


@right("pool_relu_backward")
@cuda.jit
def unpool_until_the_first(dy, x, y, k, dx):
    i = cuda.grid(1)
    while i < dx.size:
        plane, rest = divmod(i, dx.shape[1] * dx.shape[2])
        h, w = divmod(rest, dx.shape[2])
        dx[plane, h, w] = ZERO
        p, q = h // k, w // k
        if p < y.shape[1] and q < y.shape[2] and y[plane, p, q] > ZERO:
            mine, before = x[plane, h, w] == y[plane, p, q], False
            for r in range(p * k, p * k + k):
                for s in range(q * k, q * k + k):
                    earlier = r < h or (r == h and s < w)
                    if earlier and x[plane, r, s] == y[plane, p, q]:
                        before = True
            if mine and not before:
                dx[plane, h, w] = dy[plane, p, q]
        i += cuda.gridsize(1)


@right("pool_relu_backward")
@cuda.jit
def unpool_without_y(dy, x, y, k, dx):
    # The window's maximum is found again, its first place with it.
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        plane, h, w = i // (x.shape[1] * x.shape[2]), i // x.shape[2] % x.shape[1], i % x.shape[2]
        p, q, gradient = h // k, w // k, ZERO
        if p < dy.shape[1] and q < dy.shape[2]:
            best, at = ZERO, -1
            for j in range(k * k):
                if x[plane, p * k + j // k, q * k + j % k] > best:
                    best, at = x[plane, p * k + j // k, q * k + j % k], j
            if at == (h - p * k) * k + (w - q * k):
                gradient = dy[plane, p, q]
        dx[plane, h, w] = gradient


mistakes("pool_relu_backward",
    ("unpool_to_all_equals", VALUES, "if first == h % k * k + w % k:",
     "if x[plane, h, w] == y[plane, p, q]:"),
    ("unpool_to_the_last_of_equals", VALUES, "range(k * k - 1, -1, -1)", "range(k * k)"),
    ("unpool_forgets_relu", VALUES, " and y[plane, p, q] > ZERO", ""),
    ("unpool_passes_zeros", VALUES, "y[plane, p, q] > ZERO", "y[plane, p, q] >= ZERO"),
    ("unpool_without_a_look_at_rows", OUTSIDE, "p < y.shape[1] and ", ""),
    ("unpool_without_a_look_at_columns", OUTSIDE, " and q < y.shape[2]", ""),
    ("unpool_leaves_the_rest", "never written", "        dx[plane, h, w] = gradient\n",
     "        if gradient != ZERO:\n            dx[plane, h, w] = gradient\n"),
    ("unpool_window_of_two", VALUES + "|out-of-bounds", "p, q, gradient = h // k, w // k, ZERO",
     "p, q, gradient = h // 2, w // 2, ZERO"),
    ("unpool_place_turned", VALUES, "h % k * k + w % k", "w % k * k + h % k"),
    ("unpool_to_the_upper_left", VALUES, "if first == h % k * k + w % k:",
     "if h % k * k + w % k == 0:"),
    ("unpool_no_loop", "never written", "range(cuda.grid(1), dx.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(dx.size, cuda.grid(1) + 1))"),
    ("unpool_in_float64", "float64-promotion", "= h // k, w // k, ZERO", "= h // k, w // k, 0.0"))


# ---- backward_chain(dlogits, kept, weights, back) --------------------------------------------


@right("backward_chain")
def chain_written_out(dlogits, kept, weights, back):
    x, a, c, d, e, g = kept
    dg, dweight4, dbias4 = back.linear(dlogits, g, weights[3])
    flat = e.reshape(e.shape[0], e.shape[1] * e.shape[2] * e.shape[3])
    de, dweight3, dbias3 = back.linear(back.relu(dg, g), flat, weights[2])
    dd = back.pool_relu(de.reshape(*e.shape), d, e)
    dc, dweight2, dbias2 = back.conv(dd, c, weights[1])
    _, dweight1, dbias1 = back.conv(back.pool_relu(dc, a, c), x, weights[0])
    return dweight1, dbias1, dweight2, dbias2, dweight3, dbias3, dweight4, dbias4


@right("backward_chain")
def chain_in_a_list(dlogits, kept, weights, back):
    x, a, c, d, e, g = kept
    dy, *last = back.linear(dlogits, g, weights[3])
    found = last
    dy, *last = back.linear(back.relu(dy, g), e.reshape(len(e), -1), weights[2])
    found = last + found
    for given, made, pooled, weight in ((c, d, e, weights[1]), (x, a, c, weights[0])):
        dy = back.pool_relu(dy.reshape(pooled.shape), made, pooled)
        dy, *last = back.conv(dy, given, weight)
        found = last + found
    return tuple(found)


mistakes("backward_chain",
    ("chain_forgets_relu", VALUES, "back.linear(back.relu(dg, g), e", "back.linear(dg, e"),
    ("chain_other_way_round", "dconv1_weight has shape",
     "return *d_conv1, *d_conv2, *d_fc1, *d_fc2", "return *d_fc2, *d_fc1, *d_conv2, *d_conv1"),
    ("chain_gradient_in_place_of_inputs", "must be the same",
     "back.conv(da, x, conv1, needs_dx=False)", "back.conv(da, dc, conv1, needs_dx=False)"),
    ("chain_pools_the_pooled", "must be the same", "back.pool_relu(dc, a, c)",
     "back.pool_relu(dc, c, a)"),
    ("chain_skips_a_pooling", "must be the same", "back.conv(da, x, conv1, needs_dx=False)",
     "back.conv(dc, x, conv1, needs_dx=False)"),
    ("chain_of_the_logits_alone", "must be the same", "back.linear(back.relu(dg, g), e",
     "back.linear(dlogits, e"),
    ("chain_relu_by_its_gradient", VALUES, "back.relu(dg, g)", "back.relu(dg, dg)"),
    ("chain_not_flattened", "must be the same|shape|axes|axis|Error", "e.reshape(len(e), -1)", "e"),
    ("chain_leaves_two_out", "8|outputs|returns|returned",
     "return *d_conv1, *d_conv2, *d_fc1, *d_fc2", "return *d_conv1, *d_conv2, *d_fc1"))


# ---- sgd_nesterov(p, g, v, rate, momentum, decay, new_p, new_v) ------------------------------


@right("sgd_nesterov")
@cuda.jit
def sgd_in_one_formula(p, g, v, rate, momentum, decay, new_p, new_v):
    i = cuda.grid(1)
    while i < p.size:
        gradient = decay * p[i] + g[i]
        new_v[i] = gradient + momentum * v[i]
        ahead = gradient * (ONE + momentum) + momentum * momentum * v[i]
        new_p[i] = p[i] - rate * ahead
        i += cuda.gridsize(1)


@right("sgd_nesterov")
@cuda.jit
def sgd_in_two_steps(p, g, v, rate, momentum, decay, new_p, new_v):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        gradient = g[i] + decay * p[i]
        new_v[i] = momentum * v[i] + gradient
        halfway = p[i] - rate * gradient
        new_p[i] = halfway - rate * momentum * new_v[i]


mistakes("sgd_nesterov",
    ("sgd_uphill", VALUES, "p[i] - rate", "p[i] + rate"),
    ("sgd_without_nesterov", VALUES, "(gradient + momentum * velocity)", "velocity"),
    ("sgd_old_velocity", VALUES, "(gradient + momentum * velocity)",
     "(gradient + momentum * v[i])"),
    ("sgd_no_decay", VALUES, " + decay * p[i]", ""),
    ("sgd_decay_the_wrong_way", VALUES, "g[i] + decay", "g[i] - decay"),
    ("sgd_no_momentum", VALUES, "momentum * v[i] + gradient", "gradient"),
    ("sgd_velocity_of_the_bare_gradient", VALUES, "momentum * v[i] + gradient",
     "momentum * v[i] + g[i]"),
    ("sgd_rate_in_the_velocity", VALUES, "new_v[i] = velocity", "new_v[i] = rate * velocity"),
    ("sgd_mean_for_momentum", VALUES, "momentum * v[i] + gradient",
     "momentum * v[i] + (ONE - momentum) * gradient"),
    ("sgd_forgets_the_velocity", "never written", "        new_v[i] = velocity\n", ""),
    ("sgd_no_loop", "never written", "range(cuda.grid(1), p.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(p.size, cuda.grid(1) + 1))"),
    ("sgd_one_too_many", OUTSIDE, "p.size", "p.size + 1"),
    ("sgd_in_float64", "float64-promotion", "velocity = momentum * v[i]",
     "velocity = 1.0 * momentum * v[i]"))


# ---- confusion(logits, labels, counts) -------------------------------------------------------


@right("confusion")
@cuda.jit
def confusion_with_the_value(logits, labels, counts):
    i = cuda.grid(1)
    while i < labels.size:
        best, value = 0, logits[i, 0]
        for k in range(logits.shape[1]):
            if logits[i, k] > value:
                best, value = k, logits[i, k]
        cuda.atomic.add(counts, (labels[i], best), 1)
        i += cuda.gridsize(1)


@right("confusion")
@cuda.jit
def confusion_from_the_last_class(logits, labels, counts):
    for i in range(cuda.grid(1), labels.size, cuda.gridsize(1)):
        best = logits.shape[1] - 1
        for k in range(logits.shape[1] - 1, -1, -1):
            if logits[i, k] >= logits[i, best]:
                best = k
        cuda.atomic.add(counts, (labels[i], best), 1)


mistakes("confusion",
    ("confusion_plain", "race|wrong", "cuda.atomic.add(counts, (labels[i], best), 1)",
     "counts[labels[i], best] += 1"))


mistakes("confusion",
    ("confusion_turned", VALUES, "(labels[i], best)", "(best, labels[i])"),
    ("confusion_smallest", VALUES, "> logits[i, best]", "< logits[i, best]"),
    ("confusion_last_of_equals", VALUES, "> logits[i, best]", ">= logits[i, best]"),
    ("confusion_positive_only", VALUES, "> logits[i, best]", "> ZERO"),
    ("confusion_never_the_last_class", VALUES, "range(1, logits.shape[1])",
     "range(1, logits.shape[1] - 1)"),
    ("confusion_a_class_too_many", OUTSIDE, "range(1, logits.shape[1])",
     "range(1, logits.shape[1] + 1)"),
    ("confusion_right_ones_only", VALUES, "(labels[i], best)", "(best, best)"),
    ("confusion_of_the_first_picture", VALUES, "if logits[i, k] > logits[i, best]",
     "if logits[0, k] > logits[0, best]"),
    ("confusion_no_loop", VALUES, "range(cuda.grid(1), labels.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(labels.size, cuda.grid(1) + 1))"),
    ("confusion_one_too_many", OUTSIDE, "labels.size,", "labels.size + 1,"),
    ("confusion_counts_twice", VALUES, "best), 1)", "best), 2)"))


# ---- mutants that are right as well ----------------------------------------------------------

EQUIVALENT.update({
    ("pick_batch", "change constant: 0 → 1"): "any one thread may copy the label",
    ("linear_relu", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): (
        "blocks are whole warps, so both have the same remainder by 32"
    ),
    ("linear_relu", "change constant: 0 → 1"): "all lanes have the sum, and any one may write it",
    **{
        ("pool_relu_backward", change): "y is above 0 here, so an equal is found, and sets `first`"
        for change in (
            "drop statement: first = k * k", "drop operand: k * k → k",
            "change operator: k * k → k // k",
        )
    },
    ("pool_relu_backward", "swap dimension: y.shape[2] → y.shape[-1]"): "the last of three",
    ("backward_chain", "change constant: 1 → 2"): (
        "reshape finds out any size below 0, not just one of −1"
    ),
    ("confusion", "change range: range(1, logits.shape[1]) → range(0, logits.shape[1], 1)"): (
        "the first class is compared with itself"
    ),
    ("confusion", "change constant: 1 → 0, again, again"): (
        "the first class is compared with itself"
    ),
})  # fmt: skip
