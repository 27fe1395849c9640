"""Lesson 14: multilooking, decibels, intersection over union, and the Dice loss.

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
from course_lib.teach.exercises.lesson_14 import probability

OUTSIDE, VALUES, NEVER = "out-of-bounds|negative", "wrong values", "never written"
NO_DATA, FULL = -1, 0xFFFFFFFF
ZERO, ONE, TWO, TEN = np.float32(0), np.float32(1), np.float32(2), np.float32(10)
INF = np.float32(np.inf)

# ---- multilook(power, n, y) ------------------------------------------------------------------


@right("multilook")
@cuda.jit
def multilook_pixel_by_pixel(power, n, y):
    i = cuda.grid(1)
    while i < y.shape[0] * y.shape[1]:
        row, col = divmod(i, y.shape[1])
        total, count = ZERO, 0
        for k in range(n * n):
            value = power[row * n + k // n, col * n + k % n]
            if not (value <= ZERO or math.isnan(value)):
                total, count = total + value, count + 1
        y[row, col] = ZERO
        if count:
            y[row, col] = total / np.float32(count)
        i += cuda.gridsize(1)


@right("multilook")
@cuda.jit
def multilook_running_mean(power, n, y):
    # The mean is moved towards each new pixel: no sum that could become too large.
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        at_row, at_col = i // y.shape[1], i % y.shape[1]
        mean, count = ZERO, ZERO
        for col in range(n * at_col, n * at_col + n):
            for row in range(n * at_row, n * at_row + n):
                value = power[row, col]
                if value > ZERO:
                    count += ONE
                    mean += (value - mean) / count
        y[at_row, at_col] = mean


SUM, KNOWN = "total += power[row, col]", "if power[row, col] > ZERO:"
DIVIDE = "total / count if count > ZERO else ZERO"
mistakes("multilook",
    ("multilook_in_decibels", VALUES, SUM, "total += math.log10(power[row, col])", DIVIDE,
     "TEN ** (total / count) if count > ZERO else ZERO"),
    ("multilook_of_roots", VALUES, SUM, "total += math.sqrt(power[row, col])", DIVIDE,
     "(total / count) ** TWO if count > ZERO else ZERO"),
    ("multilook_over_all_pixels", VALUES, DIVIDE, "total / np.float32(n * n)"),
    ("multilook_sum", VALUES, DIVIDE, "total"),
    ("multilook_brightest", VALUES, SUM, "total = max(total, power[row, col])", DIVIDE, "total"),
    ("multilook_spreads_nan", VALUES, KNOWN, "if power[row, col] != ZERO:"),
    ("multilook_counts_gaps", VALUES, "                    count += ONE\n",
     "                count += ONE\n"),
    ("multilook_divides_by_nothing", VALUES, DIVIDE, "total / count"),
    ("multilook_leaves_gaps_unwritten", NEVER, f"y[i // OW, i % OW] = {DIVIDE}",
     "if count > ZERO:\n            y[i // OW, i % OW] = total / count"),
    ("multilook_of_two_by_two", VALUES + "|" + OUTSIDE, "i // OW * n, i % OW * n",
     "i // OW * 2, i % OW * 2"),
    ("multilook_windows_overlap", VALUES, "i // OW * n, i % OW * n", "i // OW, i % OW"),
    ("multilook_window_too_wide", VALUES + "|" + OUTSIDE, "range(first_col, first_col + n)",
     "range(first_col, first_col + n + 1)"),
    ("multilook_rows_by_the_input", VALUES + "|" + OUTSIDE, "OW = y.shape[1]",
     "OW = power.shape[1] // 2"),
    ("multilook_turned", VALUES + "|" + OUTSIDE, KNOWN, "if power[col, row] > ZERO:", SUM,
     "total += power[col, row]"),
    ("multilook_no_loop", NEVER, "range(cuda.grid(1), y.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("multilook_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("multilook_in_float64", "float64-promotion", "count += ONE", "count += 1.0"))


# ---- prepare(power, label, low, high, mean, spread, x, y, missing) ---------------------------


@right("prepare")
@cuda.jit
def prepare_with_a_shared_counter(power, label, low, high, mean, spread, x, y, missing):
    count = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        count[0] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < label.size:
        fine = True
        for band in range(power.shape[0]):
            value = power[band, i]
            fine = fine and value > ZERO and not math.isinf(value)
        for band in range(power.shape[0]):
            value = power[band, i] if fine else ONE
            decibels = max(min(math.log10(value) * TEN, high), low)
            x[band, i] = (decibels - mean) / spread if fine else ZERO
        if fine:
            y[i] = label[i]
        else:
            y[i] = NO_DATA
            cuda.atomic.add(count, 0, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        missing[cuda.blockIdx.x] = count[0]


@right("prepare")
@cuda.jit
def prepare_by_ballots(power, label, low, high, mean, spread, x, y, missing):
    counts = cuda.shared.array(32, np.int32)
    i, t = cuda.grid(1), cuda.threadIdx.x
    lost = False
    if i < label.size:
        for band in range(power.shape[0]):
            lost = lost or not power[band, i] > ZERO or power[band, i] == INF
        for band in range(power.shape[0]):
            if lost:
                x[band, i] = ZERO
            else:
                decibels = TEN * math.log10(power[band, i])
                decibels = high if decibels > high else low if decibels < low else decibels
                x[band, i] = decibels / spread - mean / spread
        y[i] = label[i]
        if lost:
            y[i] = NO_DATA
    votes = cuda.ballot_sync(FULL, lost)
    if t % 32 == 0:
        counts[t // 32] = cuda.popc(votes)
    cuda.syncthreads()
    if t == cuda.blockDim.x - 1:
        total = 0
        for warp in range(cuda.blockDim.x // 32):
            total += counts[warp]
        missing[cuda.blockIdx.x] = total


FINE = "if not (power[band, i] > ZERO and power[band, i] < INF):"
SCALED = "(min(max(decibels, low), high) - mean) / spread"
COUNT = "    count = cuda.syncthreads_count(lost)\n"
mistakes("prepare",
    ("prepare_lets_nan_pass", VALUES, FINE, "if power[band, i] <= ZERO or power[band, i] == INF:"),
    ("prepare_lets_zero_pass", VALUES, "power[band, i] > ZERO and", "power[band, i] >= ZERO and"),
    ("prepare_lets_infinity_pass", VALUES, FINE, "if not power[band, i] > ZERO:"),
    ("prepare_last_band_decides", VALUES, FINE + "\n                lost = 1",
     FINE.replace("if not (", "lost = 1 - int(")[:-1]),
    ("prepare_first_band_decides", VALUES, FINE, FINE.replace("[band, i]", "[0, i]")),
    ("prepare_no_data_becomes_land", VALUES, "NO_DATA if lost", "0 if lost"),
    ("prepare_keeps_the_label", VALUES, "NO_DATA if lost else label[i]", "label[i]"),
    ("prepare_unknown_becomes_land", VALUES, "NO_DATA if lost else label[i]",
     "NO_DATA if lost else max(label[i], 0)"),
    ("prepare_lost_is_not_written", NEVER, "            x[band, i] = ZERO\n", ""),
    ("prepare_natural_logarithm", VALUES, "math.log10", "math.log"),
    ("prepare_twenty_for_ten", VALUES, "TEN * math.log10", "TWO * TEN * math.log10"),
    ("prepare_does_not_clip", VALUES, SCALED, "(decibels - mean) / spread"),
    ("prepare_clips_below_only", VALUES, SCALED, "(max(decibels, low) - mean) / spread"),
    ("prepare_clips_too_late", VALUES, SCALED, "min(max((decibels - mean) / spread, low), high)"),
    ("prepare_fixed_limits", VALUES, SCALED,
     "(min(max(decibels, np.float32(-35)), np.float32(5)) - mean) / spread"),
    ("prepare_limits_swapped", VALUES, SCALED, "(min(max(decibels, high), low) - mean) / spread"),
    ("prepare_multiplies_by_spread", VALUES, SCALED, SCALED.replace("/", "*")),
    ("prepare_counts_labels_too", "wrong values in missing", COUNT,
     "    if i < label.size and label[i] == NO_DATA:\n        lost = 1\n" + COUNT),
    ("prepare_barrier_within_the_guard", "barrier", COUNT,
     "    count = 0\n    if i < label.size:\n    " + COUNT),
    ("prepare_counts_its_own_alone", "wrong values in missing", COUNT, "    count = lost\n"),
    ("prepare_every_thread_writes_the_count", "race|more than one thread|same work",
     "if cuda.threadIdx.x == 0:", "if True:"),
    ("prepare_no_guard", OUTSIDE, "if i < label.size:", "if True:"),
    ("prepare_counts_in_the_first_place", VALUES + "|race|" + NEVER, "missing[cuda.blockIdx.x]",
     "missing[0]"),
    ("prepare_in_float64", "float64-promotion", "TEN * math.log10", "10.0 * math.log10"))


# ---- iou(prediction, target, absent, score) --------------------------------------------------


@right("iou")
@cuda.jit
def iou_by_a_tree(prediction, target, absent, score):
    # Room for the largest block there is; the tree adds what is beyond the half to the half.
    both, either = cuda.shared.array(1024, np.int32), cuda.shared.array(1024, np.int32)
    c, t = cuda.blockIdx.x, cuda.threadIdx.x
    both[t], either[t] = 0, 0
    for i in range(t, target.size, cuda.blockDim.x):
        if target[i] >= 0:
            both[t] += prediction[i] == c and target[i] == c
            either[t] += prediction[i] == c or target[i] == c
    n = cuda.blockDim.x
    while n > 1:
        cuda.syncthreads()
        half = (n + 1) // 2
        if t + half < n:
            both[t] += both[t + half]
            either[t] += either[t + half]
        n = half
    if t == 0:
        score[c] = absent if either[0] == 0 else np.float32(both[0]) / np.float32(either[0])


@right("iou")
@cuda.jit
def iou_by_votes(prediction, target, absent, score):
    # The barrier that counts, once for each round of the block.
    c, both, found, true = cuda.blockIdx.x, 0, 0, 0
    for first in range(0, target.size, cuda.blockDim.x):
        i = first + cuda.threadIdx.x
        is_found, is_true = 0, 0
        if i < target.size and target[i] != NO_DATA:
            is_found = 1 if prediction[i] == c else 0
            is_true = 1 if target[i] == c else 0
        both += cuda.syncthreads_count(is_found * is_true)
        found += cuda.syncthreads_count(is_found)
        true += cuda.syncthreads_count(is_true)
    if cuda.threadIdx.x == cuda.blockDim.x - 1:
        union = found + true - both
        score[c] = np.float32(both) / np.float32(union) if union else absent


KNOWN_PIXEL = "if target[i] != NO_DATA:"
RATIO = "np.float32(counts[0]) / np.float32(counts[1])"
ZEROED = "    if t == 0:\n        counts[0], counts[1] = 0, 0\n"
mistakes("iou",
    ("iou_counts_unknown_pixels", VALUES, KNOWN_PIXEL, "if True:"),
    ("iou_unknown_is_land", VALUES, KNOWN_PIXEL, "if True:", "target[i] == c\n",
     "max(target[i], 0) == c\n"),
    ("iou_ignores_class_zero", VALUES, KNOWN_PIXEL, "if target[i] > 0:"),
    ("iou_skips_what_was_not_answered", VALUES, KNOWN_PIXEL,
     "if target[i] != NO_DATA and prediction[i] != NO_DATA:"),
    ("iou_over_the_truth", VALUES, "1 if found or true else 0", "1 if true else 0"),
    ("iou_over_what_was_found", VALUES, "1 if found or true else 0", "1 if found else 0"),
    ("iou_over_the_sum", VALUES, "1 if found or true else 0", "int(found) + int(true)"),
    ("iou_is_dice", VALUES, RATIO, f"TWO * {RATIO} / (ONE + {RATIO})"),
    ("iou_is_accuracy", VALUES, "1 if found or true else 0", "1", "1 if found and true else 0",
     "1 if prediction[i] == target[i] else 0"),
    ("iou_absent_is_one", VALUES, "score[c] = absent", "score[c] = ONE"),
    ("iou_absent_is_nan", VALUES,
     "        score[c] = absent\n        if counts[1] > 0:\n            score", "        score"),
    ("iou_absent_is_not_written", NEVER, "        score[c] = absent\n", ""),
    ("iou_smoothed", VALUES, RATIO,
     "(np.float32(counts[0]) + ONE) / (np.float32(counts[1]) + ONE)"),
    ("iou_whole_numbers", VALUES, RATIO, "np.float32(counts[0] // counts[1])"),
    ("iou_no_first_barrier", "race|wrong values", ZEROED + "    cuda.syncthreads()\n", ZEROED),
    ("iou_no_last_barrier", "race|wrong values",
     "    cuda.atomic.add(counts, 1, either)\n    cuda.syncthreads()\n",
     "    cuda.atomic.add(counts, 1, either)\n"),
    ("iou_plain_addition", "race", "cuda.atomic.add(counts, 0, both)", "counts[0] += both"),
    ("iou_counters_not_zeroed", "uninitialised|wrong values", ZEROED + "    cuda.syncthreads()\n",
     ""),
    ("iou_first_round_only", VALUES, "range(t, target.size, cuda.blockDim.x)",
     "range(t, min(target.size, cuda.blockDim.x), cuda.blockDim.x)"),
    ("iou_blocks_of_64", VALUES, "range(t, target.size, cuda.blockDim.x)",
     "range(t, target.size, 64)"),
    ("iou_one_too_many", OUTSIDE, "target.size,", "target.size + 1,"),
    ("iou_all_threads_write", "race|more than one thread|same work",
     "    if t == 0:\n        score[c] = absent", "    if True:\n        score[c] = absent"))


@wrong("iou", "more than one thread|race|wrong values")
@cuda.jit
def iou_by_every_thread_alone(prediction, target, absent, score):
    # Each thread counts all pixels, and all of them write the same.
    c, both, either = cuda.blockIdx.x, 0, 0
    for i in range(target.size):
        if target[i] != NO_DATA:
            both += 1 if prediction[i] == c and target[i] == c else 0
            either += 1 if prediction[i] == c or target[i] == c else 0
    score[c] = np.float32(both) / np.float32(either) if either > 0 else absent


# ---- dice_sums(logits, target, sums) ---------------------------------------------------------


@right("dice_sums")
@cuda.jit
def dice_sums_by_shuffles(logits, target, sums):
    partial = cuda.shared.array((3, 32), np.float32)
    c, t = cuda.blockIdx.x, cuda.threadIdx.x
    both, found, true, i = ZERO, ZERO, ZERO, t
    while i < target.size:
        n, j = divmod(i, target.shape[1])
        if target[n, j] >= 0:
            p = probability(logits, n, c, j)
            hot = ONE if target[n, j] == c else ZERO
            both, found, true = both + p * hot, found + p, true + hot
        i += cuda.blockDim.x
    both, found, true = warp_sum(both), warp_sum(found), warp_sum(true)
    if t % 32 == 0:
        partial[0, t // 32], partial[1, t // 32], partial[2, t // 32] = both, found, true
    cuda.syncthreads()
    if t < 3:
        total = ZERO
        for warp in range(cuda.blockDim.x // 32):
            total += partial[t, warp]
        sums[c, t] = total


@right("dice_sums")
@cuda.jit
def dice_sums_image_by_image(logits, target, sums):
    # The softmax by hand, seen from the logit of the class itself.
    scratch = cuda.shared.array(32, np.float32)
    N, C, P = logits.shape
    c, both, others, true = cuda.blockIdx.x, ZERO, ZERO, ZERO
    for n in range(N):
        for j in range(cuda.threadIdx.x, P, cuda.blockDim.x):
            if target[n, j] == NO_DATA:
                continue
            top = logits[n, c, j]
            for k in range(C):
                top = max(top, logits[n, k, j])
            total = ZERO
            for k in range(C):
                total += math.exp(logits[n, k, j] - top)
            p = math.exp(logits[n, c, j] - top) / total
            if target[n, j] == c:
                both += p
                true += ONE
            else:
                others += p
    true = block_sum(true, scratch)
    others = block_sum(others, scratch)
    both = block_sum(both, scratch)
    if cuda.threadIdx.x == 31:
        sums[c, 1] = both + others
        sums[c, 0], sums[c, 2] = both, true


KNOWN_LABEL = "if target[n, j] != NO_DATA:"
mistakes("dice_sums",
    ("dice_sums_of_unknown_pixels", VALUES, KNOWN_LABEL, "if True:"),
    ("dice_sums_without_class_zero", VALUES, KNOWN_LABEL, "if target[n, j] > 0:"),
    ("dice_sums_of_the_own_class", VALUES,
     "            found += p\n            if target[n, j] == c:\n",
     "            if target[n, j] == c:\n                found += p\n"),
    ("dice_sums_at_least_a_millionth", VALUES, "p = probability(logits, n, c, j)",
     "p = max(probability(logits, n, c, j), np.float32(1e-6))"),
    ("dice_sums_hard", VALUES, "p = probability(logits, n, c, j)",
     "p = ONE if probability(logits, n, c, j) > np.float32(0.5) else ZERO"),
    ("dice_sums_of_logits", VALUES, "p = probability(logits, n, c, j)", "p = logits[n, c, j]"),
    ("dice_sums_by_sigmoid", VALUES, "p = probability(logits, n, c, j)",
     "p = ONE / (ONE + math.exp(-logits[n, c, j]))"),
    ("dice_sums_without_the_maximum", VALUES, "p = probability(logits, n, c, j)",
     "total = ZERO\n            for k in range(logits.shape[1]):\n"
     "                total += math.exp(logits[n, k, j])\n"
     "            p = math.exp(logits[n, c, j]) / total"),
    ("dice_sums_of_squares", VALUES, "found += p", "found += p * p"),
    ("dice_sums_counts_probability", VALUES, "true += ONE", "true += p"),
    ("dice_sums_first_image_only", VALUES, "probability(logits, n, c, j)",
     "probability(logits, 0, c, j)"),
    ("dice_sums_threads_stay_apart", VALUES, "found = block_sum(found, scratch)", "found = found"),
    ("dice_sums_lanes_stay_apart", VALUES, dice_sums_by_shuffles,
     "warp_sum(both), warp_sum(found), ", "warp_sum(both), found, "),
    ("dice_sums_of_8_warps", "out-of-bounds|wrong values", dice_sums_by_shuffles, "(3, 32)",
     "(3, 8)"),
    ("dice_sums_first_round_only", VALUES, "range(t, N * P, cuda.blockDim.x)",
     "range(t, min(N * P, cuda.blockDim.x), cuda.blockDim.x)"),
    ("dice_sums_of_another_class", VALUES, "if target[n, j] == c:", "if target[n, j] == 0:"),
    ("dice_sums_columns_swapped", VALUES, "sums[c, 0], sums[c, 1], sums[c, 2]",
     "sums[c, 0], sums[c, 2], sums[c, 1]"),
    ("dice_sums_mean", VALUES, "= both, found, true",
     "= both / (N * P), found / (N * P), true / (N * P)"),
    ("dice_sums_one_too_many", OUTSIDE, "range(t, N * P,", "range(t, N * P + 1,"),
    ("dice_sums_some_stay_away", "shuffle-inactive-lane|barrier",
     "    both = block_sum(both, scratch)\n",
     "    if t >= N * P:\n        return\n    both = block_sum(both, scratch)\n"),
    ("dice_sums_all_threads_write", "race|more than one thread|same work", "if t == 0:",
     "if True:"),
    ("dice_sums_in_float64", "float64-promotion", "true += ONE", "true += 1.0"))


# ---- dice_gradient(dloss, logits, target, sums, smooth, dlogits) -----------------------------


@right("dice_gradient")
@cuda.jit
def dice_gradient_element_by_element(dloss, logits, target, sums, smooth, dlogits):
    # A thread for a pixel, which computes the slopes again for each class. Nothing is kept.
    i = cuda.grid(1)
    if i < target.size:
        n, j = divmod(i, target.shape[1])
        for c in range(logits.shape[1]):
            dx = ZERO
            if target[n, j] != NO_DATA:
                for k in range(logits.shape[1]):
                    size = sums[k, 1] + sums[k, 2] + smooth
                    g = (TWO * sums[k, 0] + smooth) / (size * size)
                    g -= TWO / size if target[n, j] == k else ZERO
                    hot = ONE if k == c else ZERO
                    dx += g * probability(logits, n, k, j) * (hot - probability(logits, n, c, j))
            dlogits[n, c, j] = dloss * dx / np.float32(logits.shape[1])


@right("dice_gradient")
@cuda.jit
def dice_gradient_factors_first(dloss, logits, target, sums, smooth, dlogits):
    i, C, P = cuda.grid(1), logits.shape[1], logits.shape[2]
    if i >= target.size:
        return
    n, j = i // P, i % P
    label, inner, scale = target[n, j], ZERO, dloss / np.float32(C)
    if label < 0:
        for c in range(C):
            dlogits[n, c, j] = ZERO
        return
    for c in range(C):
        size = sums[c, 1] + sums[c, 2] + smooth
        dice = (sums[c, 0] + sums[c, 0] + smooth) / size
        p = probability(logits, n, c, j)
        inner += p * dice / size
        if c == label:
            inner -= p * TWO / size
    for c in range(C):
        size = sums[c, 1] + sums[c, 2] + smooth
        dice = (sums[c, 0] + sums[c, 0] + smooth) / size
        own = TWO if c == label else ZERO
        p = probability(logits, n, c, j)
        dlogits[n, c, j] = scale * p * ((dice - own) / size - inner)


DX = "probability(logits, n, c, j) * (dlogits[n, c, j] - inner)"
G = "((TWO * sums[c, 0] + smooth) / size - TWO * t) / size / np.float32(C)"
SIZE = "sums[c, 1] + sums[c, 2] + smooth"
mistakes("dice_gradient",
    # The softmax's diagonal alone, as if each logit had to do with its own probability only.
    ("dice_gradient_diagonal_only", VALUES, DX,
     "probability(logits, n, c, j) * (ONE - probability(logits, n, c, j)) * dlogits[n, c, j]"),
    ("dice_gradient_stops_at_probabilities", VALUES, DX, "dlogits[n, c, j]"),
    ("dice_gradient_no_inner", VALUES, "(dlogits[n, c, j] - inner)", "dlogits[n, c, j]"),
    ("dice_gradient_upwards", VALUES, "dloss * dx", "-dloss * dx"),
    ("dice_gradient_without_dloss", VALUES, "dloss * dx", "dx"),
    ("dice_gradient_of_a_product", VALUES, G, "-TWO * t / size / np.float32(C)"),
    ("dice_gradient_forgets_the_two", VALUES, "- TWO * t)", "- t)"),
    ("dice_gradient_numerator_without_the_two", VALUES, "(TWO * sums[c, 0] + smooth)",
     "(sums[c, 0] + smooth)"),
    ("dice_gradient_size_not_squared", VALUES, G,
     "((TWO * sums[c, 0] + smooth) - TWO * t) / size / np.float32(C)"),
    ("dice_gradient_not_smooth_above", VALUES, "(TWO * sums[c, 0] + smooth)", "(TWO * sums[c, 0])"),
    ("dice_gradient_not_smooth_below", VALUES, SIZE, SIZE[:-9]),
    ("dice_gradient_smooth_is_one", VALUES, SIZE, SIZE[:-6] + "ONE"),
    ("dice_gradient_sum_over_classes", VALUES, " / np.float32(C)", ""),
    ("dice_gradient_for_two_classes", VALUES, " / np.float32(C)", " / TWO"),
    ("dice_gradient_pulls_at_unknown_pixels", VALUES, "dloss * dx if label != NO_DATA else ZERO",
     "dloss * dx"),
    ("dice_gradient_leaves_unknown_pixels", NEVER + "|wrong values",
     "        n, j = i // P, i % P\n",
     "        n, j = i // P, i % P\n        if target[n, j] == NO_DATA:\n            return\n"),
    ("dice_gradient_own_class_only", VALUES,
     "            inner += probability(logits, n, c, j) * g\n",
     "            if label == c:\n                inner += probability(logits, n, c, j) * g\n"),
    ("dice_gradient_sums_changed_over", VALUES, "(TWO * sums[c, 0]", "(TWO * sums[c, 2]"),
    ("dice_gradient_no_guard", OUTSIDE, "if i < N * P:", "if i >= 0:"),
    ("dice_gradient_images_mixed_up", "race|" + VALUES, "n, j = i // P, i % P",
     "n, j = i // N % N, i % P"),
    ("dice_gradient_in_float64", "float64-promotion", "(TWO * sums[c, 0]", "(2.0 * sums[c, 0]"))


# ---- mutants that are right as well ----------------------------------------------------------

_BOTH_ZERO = "all of them are 0"
_ANY_THREAD = "all threads have waited, and have the sum: any one of them may write it"

EQUIVALENT.update({
    ("multilook", "swap indices: total, count = (ZERO, ZERO) → count, total = (ZERO, ZERO)"): (
        _BOTH_ZERO
    ),
    ("prepare", "change constant: 1 → 2, again"): "the barrier counts what is not 0",
    ("prepare", "change constant: 0 → 1, again"): _ANY_THREAD,
    ("iou", "change constant: 2 → 3"): "shared memory that nobody uses does no harm",
    ("iou", "drop guard: if t == 0"): (
        "several threads set a counter to 0 before the barrier: harmless"
    ),
    ("iou", "swap indices: counts[0], counts[1] = (0, 0) → counts[1], counts[0] = (0, 0)"): (
        _BOTH_ZERO
    ),
    ("iou", "swap indices: both, either = (0, 0) → either, both = (0, 0)"): _BOTH_ZERO,
    ("iou", "swap indices: found, true = (prediction[i] == c, target[i] == c) → "
     "true, found = (prediction[i] == c, target[i] == c)"): (
        "intersection and union do not ask which of the two is the truth"
    ),
    ("dice_sums", "change constant: 32 → 33"): "shared memory that nobody uses does no harm",
    ("dice_sums", "change constant: 32 → 31"): "no block of a case has 32 warps",
    ("dice_sums", "change constant: 0 → 1"): _ANY_THREAD,
    ("dice_sums", "swap indices: both, found, true = (ZERO, ZERO, ZERO) → "
     "found, both, true = (ZERO, ZERO, ZERO)"): _BOTH_ZERO,
    ("dice_sums", "swap indices: both, found, true = (ZERO, ZERO, ZERO) → "
     "true, found, both = (ZERO, ZERO, ZERO)"): _BOTH_ZERO,
    ("dice_sums", "swap indices: both, found, true = (ZERO, ZERO, ZERO) → "
     "both, true, found = (ZERO, ZERO, ZERO)"): _BOTH_ZERO,
})  # fmt: skip
