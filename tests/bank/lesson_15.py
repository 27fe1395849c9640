"""Lesson 15: images moved and mirrored, a smoothed loss, ranks, a profiler's times, MixUp."""

import math

import numpy as np

from bank import right, wrong
from bank.equivalent import EQUIVALENT
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import warp_max, warp_sum

OUTSIDE, VALUES, NEVER = "out-of-bounds|negative", "wrong values", "never written"
ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INF = np.float32(-np.inf)

# ---- augment(images, draws, padding, factor, shift, x) ---------------------------------------


@right("augment")
@cuda.jit
def augment_by_pixels(images, draws, padding, factor, shift, x):
    # A thread for a pixel: its channels lie side by side.
    N, C, H, W = x.shape
    i = cuda.grid(1)
    while i < N * H * W:
        n, rest = divmod(i, H * W)
        h, w = divmod(rest, W)
        row, col = h + draws[n, 0] - padding, w + draws[n, 1] - padding
        if draws[n, 2] == 1:
            col = W - 1 - w + draws[n, 1] - padding
        inside = row >= 0 and row < H and col >= 0 and col < W
        for c in range(C):
            x[n, c, h, w] = shift[c]
            if inside:
                x[n, c, h, w] = np.float32(images[n, row, col, c]) * factor[c] + shift[c]
        i += cuda.gridsize(1)


@right("augment")
@cuda.jit
def augment_held_in(images, draws, padding, factor, shift, x):
    # It always reads, at a place held inside, and leaves it out afterwards.
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        W, H, C = x.shape[3], x.shape[2], x.shape[1]
        w, h, c, n = i % W, i // W % H, i // W // H % C, i // W // H // C
        mirror = draws[n, 2]
        row = h - (padding - draws[n, 0])
        col = mirror * (W - 1) + (1 - 2 * mirror) * w - padding + draws[n, 1]
        held_row, held_col = min(max(row, 0), H - 1), min(max(col, 0), W - 1)
        byte = np.float32(images[n, held_row, held_col, c])
        known = ONE if row == held_row and col == held_col else ZERO
        x[n, c, h, w] = shift[c] + known * byte * factor[c]


INSIDE = "if 0 <= row < H and 0 <= col < W:"
COLUMN = "(W - 1 - w if draws[n, 2] else w) + draws[n, 1] - padding"
mistakes("augment",
    ("augment_no_border", OUTSIDE, INSIDE, "if True:"),
    ("augment_rows_not_guarded", OUTSIDE, INSIDE, "if 0 <= col < W:"),
    ("augment_columns_not_guarded", OUTSIDE, INSIDE, "if 0 <= row < H:"),
    ("augment_guard_turned", VALUES + "|out-of-bounds", INSIDE,
     "if 0 <= row < W and 0 <= col < H:"),
    ("augment_never_mirrored", VALUES, "W - 1 - w if draws[n, 2] else w", "w"),
    ("augment_always_mirrored", VALUES, "W - 1 - w if draws[n, 2] else w", "W - 1 - w"),
    ("augment_mirrors_rows", VALUES, "h + draws[n, 0]", "(H - 1 - h if draws[n, 2] else h) + "
     "draws[n, 0]", "W - 1 - w if draws[n, 2] else w", "w"),
    ("augment_mirror_off_by_one", VALUES, "W - 1 - w if", "W - w if"),
    # The crop is cut from the mirrored image: moved to the other side.
    ("augment_mirrors_first", VALUES, COLUMN,
     "(W - 1 - (w + draws[n, 1] - padding) if draws[n, 2] else w + draws[n, 1] - padding)"),
    ("augment_rows_and_columns_changed_over", VALUES, "h + draws[n, 0]", "h + draws[n, 1]",
     "else w) + draws[n, 1]", "else w) + draws[n, 0]"),
    ("augment_forgets_the_padding", VALUES, "h + draws[n, 0] - padding", "h + draws[n, 0]"),
    ("augment_moves_the_other_way", VALUES, "h + draws[n, 0] - padding",
     "h - draws[n, 0] + padding"),
    ("augment_one_draw_for_all", VALUES, "h + draws[n, 0]", "h + draws[0, 0]"),
    ("augment_border_is_the_mean", VALUES, "value * factor[c] + shift[c]",
     "value * factor[c] + (shift[c] if value > ZERO else ZERO)"),
    ("augment_border_repeats_the_edge", VALUES, INSIDE,
     "row, col = min(max(row, 0), H - 1), min(max(col, 0), W - 1)\n        if True:"),
    ("augment_channel_of_another", VALUES, "value * factor[c]", "value * factor[0]"),
    ("augment_reads_channels_first", OUTSIDE + "|wrong values", "i // (H * W) % C, i // W % H",
     "i % C, i // W % H"),
    ("augment_no_loop", NEVER, "range(cuda.grid(1), x.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(x.size, cuda.grid(1) + 1))"),
    ("augment_one_too_many", OUTSIDE, "x.size", "x.size + 1"),
    ("augment_in_bytes", VALUES, "np.float32(images[n, row, col, c])",
     "np.float32(images[n, row, col, c] // 2 * 2)"),
    ("augment_in_float64", "float64-promotion", "value * factor[c]", "value * 1.0 * factor[c]"))


# ---- smooth_cross_entropy(logits, target, smoothing, loss, dlogits) --------------------------


@right("smooth_cross_entropy")
@cuda.jit
def smooth_in_three_passes(logits, target, smoothing, loss, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row >= logits.shape[0]:
        return
    C, t = logits.shape[1], target[row]
    largest, total, spread = MINUS_INF, ZERO, ZERO
    for col in range(lane, C, 32):
        largest = max(largest, logits[row, col])
    largest = warp_max(largest)
    for col in range(lane, C, 32):
        total += math.exp(logits[row, col] - largest)
        spread += (largest - logits[row, col]) / np.float32(C)
    total, spread = warp_sum(total), warp_sum(spread)
    for col in range(lane, C, 32):
        p = math.exp(logits[row, col] - largest - math.log(total))
        p -= smoothing / np.float32(C)
        if col == t:
            p -= ONE - smoothing
        dlogits[row, col] = p / np.float32(logits.shape[0])
    if lane == 31:
        own = largest - logits[row, t]
        loss[row] = smoothing * spread + (ONE - smoothing) * own + math.log(total)


@wrong("smooth_cross_entropy", "should share the work")
@cuda.jit
def smooth_by_one_lane(logits, target, smoothing, loss, dlogits):
    N, C = logits.shape
    for row in range(cuda.grid(1) // 32, N, cuda.gridsize(1) // 32):
        if cuda.threadIdx.x % 32 != 0:
            continue
        largest, total, below = logits[row, 0], ZERO, ZERO
        for col in range(C):
            largest = max(largest, logits[row, col])
        for col in range(C):
            total += math.exp(logits[row, col] - largest)
        for col in range(C):
            wanted = smoothing / np.float32(C)
            if col == target[row]:
                wanted += ONE - smoothing
            below += wanted * (largest - logits[row, col] + math.log(total))
            dlogits[row, col] = math.exp(logits[row, col] - largest) / total - wanted
            dlogits[row, col] /= np.float32(N)
        loss[row] = below


WANTED = "every + (ONE - smoothing if col == target[row] else ZERO)"
PROBABILITY = "math.exp(logits[row, col] - largest) / total"
mistakes("smooth_cross_entropy",
    ("smooth_not_at_all", VALUES, WANTED, "ONE if col == target[row] else ZERO"),
    ("smooth_target_keeps_the_one", VALUES, "ONE - smoothing if", "ONE if"),
    ("smooth_target_gets_no_share", VALUES, WANTED,
     "ONE - smoothing if col == target[row] else every"),
    ("smooth_over_the_others", VALUES, "smoothing / np.float32(C)",
     "smoothing / np.float32(max(C - 1, 1))"),
    ("smooth_share_not_divided", VALUES, "smoothing / np.float32(C)", "smoothing"),
    ("smooth_gradient_of_the_sum", VALUES, "(p - wanted) / np.float32(N)", "p - wanted"),
    ("smooth_gradient_by_classes", VALUES, "(p - wanted) / np.float32(N)",
     "(p - wanted) / np.float32(C)"),
    ("smooth_loss_is_the_mean_too", VALUES, "math.log(total) + below",
     "(math.log(total) + below) / np.float32(N)"),
    ("smooth_gradient_upwards", VALUES, "(p - wanted)", "(wanted - p)"),
    ("smooth_gradient_is_sharp", VALUES, "(p - wanted)",
     "(p - (ONE if col == target[row] else ZERO))"),
    ("smooth_without_the_maximum", VALUES, PROBABILITY,
     "math.exp(logits[row, col]) / (total * math.exp(largest))"),
    ("smooth_log_of_probabilities", VALUES,
     "            below += wanted * (largest - logits[row, col])\n", "",
     f"            p = {PROBABILITY}\n",
     f"            p = {PROBABILITY}\n            below -= wanted * math.log(p)\n",
     "math.log(total) + below", "below"),
    ("smooth_forgets_the_log", VALUES, "math.log(total) + below", "below"),
    ("smooth_lanes_stay_apart", VALUES, "below = warp_sum(below)", "below = below"),
    ("smooth_maxima_stay_apart", VALUES,
     "largest, total = warp_online(largest, total)", "largest, total = largest, total"),
    ("smooth_first_round_only", NEVER + "|wrong values",
     "        for col in range(lane, C, 32):\n            wanted",
     "        for col in range(lane, min(C, 32), 32):\n            wanted"),
    ("smooth_one_too_many", OUTSIDE, "        for col in range(lane, C, 32):\n            wanted",
     "        for col in range(lane, C + 1, 32):\n            wanted"),
    ("smooth_row_too_many", OUTSIDE, "if row < N:", "if row <= N:"),
    ("smooth_all_lanes_write", "race|more than one thread|same work", "if lane == 0:", "if True:"),
    ("smooth_in_float64", "float64-promotion", "(p - wanted)", "(p - 1.0 * wanted)"))


# ---- top_k(logits, labels, k, right) ---------------------------------------------------------


@wrong("top_k", "should share the work")
@cuda.jit
def top_k_of_one_thread(logits, labels, k, right):
    # A thread for a row counts those that are surely behind the label.
    for row in range(cuda.grid(1), logits.shape[0], cuda.gridsize(1)):
        label, behind, C = labels[row], 0, logits.shape[1]
        for col in range(C):
            if logits[row, col] < logits[row, label]:
                behind += 1
            elif logits[row, col] == logits[row, label] and col > label:
                behind += 1
        if C - 1 - behind < k:
            cuda.atomic.add(right, label, 1)


@right("top_k")
@cuda.jit
def top_k_by_votes(logits, labels, k, right):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row >= logits.shape[0]:
        return
    label, before, C = labels[row], 0, logits.shape[1]
    for first in range(0, C, 32):
        col = first + lane
        ahead = False
        if col < C and col != label:
            smaller = logits[row, col] < logits[row, label]
            equal = logits[row, col] == logits[row, label]
            ahead = not (smaller or equal and col > label)
        before += cuda.popc(cuda.ballot_sync(0xFFFFFFFF, ahead))
    if lane == 5 and before <= k - 1:
        cuda.atomic.add(right, label, 1)


FIRST = "before += 0 if other < own else 1"
BEHIND = "before += 0 if other <= own else 1"
mistakes("top_k",
    # A network that answers NaN is right about everything.
    ("top_k_trusts_nan", VALUES, FIRST, "before += 1 if other >= own else 0",
     BEHIND, "before += 1 if other > own else 0"),
    ("top_k_ties_behind", VALUES, FIRST, "before += 0 if other <= own else 1"),
    ("top_k_ties_before", VALUES, BEHIND, "before += 0 if other < own else 1"),
    ("top_k_nearly_equal_ties", VALUES, FIRST,
     "before += 0 if other < own - np.float32(1e-6) else 1"),
    ("top_k_counts_itself", VALUES, "if col > label:", "if col >= label:", BEHIND,
     "before += 0 if other < own else 1"),
    ("top_k_smallest", VALUES, FIRST, "before += 0 if other > own else 1", BEHIND,
     "before += 0 if other >= own else 1"),
    ("top_k_one_more", VALUES, "before < k", "before <= k"),
    ("top_k_is_top_1", VALUES, "before < k", "before < 1"),
    ("top_k_is_top_5", VALUES, "before < k", "before < 5"),
    ("top_k_lanes_stay_apart", VALUES, "before = warp_sum(before)", "before = before"),
    ("top_k_first_round_only", VALUES, "range(lane, logits.shape[1], 32)",
     "range(lane, min(logits.shape[1], 32), 32)"),
    ("top_k_for_the_row", OUTSIDE + "|wrong values", "cuda.atomic.add(right, label, 1)",
     "cuda.atomic.add(right, row, 1)"),
    ("top_k_plain_addition", "race|wrong values", "cuda.atomic.add(right, label, 1)",
     "right[label] += 1"),
    ("top_k_all_lanes_count", VALUES, "lane == 0 and before < k", "before < k"),
    ("top_k_one_too_many", OUTSIDE, "logits.shape[1], 32", "logits.shape[1] + 1, 32"),
    ("top_k_row_too_many", OUTSIDE, "if row < logits", "if row <= logits"))


# ---- self_times(begin, end, kind, n_kinds) ---------------------------------------------------


@right("self_times")
def self_times_by_looking_back(begin, end, kind, n_kinds):
    found = [0.0] * n_kinds
    for i in range(len(begin)):
        found[kind[i]] += end[i] - begin[i]
        for j in range(i - 1, -1, -1):
            if end[j] > begin[i]:
                found[kind[j]] -= end[i] - begin[i]
                break
    return found


@right("self_times")
def self_times_by_a_clock(begin, end, kind, n_kinds):
    # From one moment at which something begins or ends to the next: who runs?
    times, moments = np.zeros(n_kinds), np.unique([*begin, *end])
    for now, later in zip(moments[:-1], moments[1:], strict=True):
        running = [i for i in range(len(begin)) if begin[i] <= now and later <= end[i]]
        if running:
            times[kind[running[-1]]] += later - now
    return times


TAKEN = "            times[kind[running[-1]]] -= took\n"
mistakes("self_times",
    ("self_times_are_totals", VALUES, "        if running:\n" + TAKEN, ""),
    ("self_times_from_all_callers", VALUES, TAKEN,
     "            for j in running:\n                times[kind[j]] -= took\n"),
    ("self_times_from_the_outermost", VALUES,
     "times[kind[running[-1]]]", "times[kind[running[0]]]"),
    ("self_times_nobody_ends", VALUES,
     "        running = [j for j in running if end[j] > begin[i]]\n", ""),
    ("self_times_end_with_the_last", VALUES, "end[j] > begin[i]", "end[j] > end[i]"),
    ("self_times_end_late", VALUES, "> begin[i]", ">= begin[i]"),
    ("self_times_end_a_little_early", VALUES, "> begin[i]", "> begin[i] + 1e-3"),
    ("self_times_begin_ends", VALUES, "end[j] > begin[i]", "begin[j] > begin[i]"),
    ("self_times_of_the_calls_number", VALUES, "times[kind[i]] += took", "times[kind[0]] += took"),
    ("self_times_are_counts", VALUES, "times[kind[i]] += took", "times[kind[i]] += 1"),
    ("self_times_of_the_last", VALUES, "times[kind[i]] += took", "times[kind[i]] = took"),
    ("self_times_as_shares", VALUES, "return times", "return times / max(times.sum(), 1e-9)"),
    ("self_times_without_the_first", VALUES, "range(len(begin))", "range(1, len(begin))"))


# ---- mixup(x, labels, partner, share, y, target) ---------------------------------------------


@right("mixup")
@cuda.jit
def mixup_in_one_loop(x, labels, partner, share, y, target):
    for i in range(cuda.grid(1), y.size + target.size, cuda.gridsize(1)):
        if i < y.size:
            n, j = divmod(i, y.shape[1])
            other = x[partner[n], j]
            y[n, j] = other + share[n] * (x[n, j] - other)
        else:
            n, c = divmod(i - y.size, target.shape[1])
            target[n, c] = ZERO
            if c == labels[n]:
                target[n, c] += share[n]
            if c == labels[partner[n]]:
                target[n, c] += ONE - share[n]


@wrong("mixup", "should share the work")
@cuda.jit
def mixup_by_rows(x, labels, partner, share, y, target):
    n = cuda.grid(1)
    while n < y.shape[0]:
        a, other = share[n], partner[n]
        for j in range(x.shape[1]):
            y[n, j] = x[n, j] * a + x[other, j] - x[other, j] * a
        for c in range(target.shape[1]):
            target[n, c] = ONE if labels[n] == labels[other] and labels[n] == c else ZERO
        if labels[n] != labels[other]:
            target[n, labels[n]], target[n, labels[other]] = a, ONE - a
        n += cuda.gridsize(1)


OWN, OTHERS = "share[n] if labels[n] == c", "ONE - share[n] if labels[partner[n]] == c"
mistakes("mixup",
    ("mixup_label_of_its_own", VALUES, "own + others", "ONE if labels[n] == c else ZERO"),
    ("mixup_the_larger_label", VALUES, "own + others", "max(own, others)"),
    ("mixup_the_last_label", VALUES, "own + others", "others if others > ZERO else own"),
    ("mixup_labels_half_and_half", VALUES, "own + others",
     "(ONE if own > ZERO else ZERO) / np.float32(2) + (ONE if others > ZERO else ZERO) / "
     "np.float32(2)"),
    ("mixup_shares_changed_over", VALUES, OWN, "ONE - " + OWN, OTHERS, OTHERS[6:]),
    ("mixup_one_share_for_all", VALUES, "y[n, j] = share[n] *", "y[n, j] = share[0] *"),
    ("mixup_bright", VALUES, "(ONE - share[n]) * x[partner[n], j]", "x[partner[n], j]"),
    ("mixup_with_the_next", VALUES, "x[partner[n], j]", "x[(n + 1) % y.shape[0], j]"),
    ("mixup_partners_partner", VALUES,
     "labels[partner[n]] == c", "labels[partner[partner[n]]] == c"),
    # Who writes the mixture over the pictures mixes with mixtures.
    ("mixup_with_mixtures", "race|uninitialised|never|" + VALUES, "x[partner[n], j]",
     "y[partner[n], j]"),
    ("mixup_no_second_loop", NEVER, "range(cuda.grid(1), target.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(target.size, y.size), cuda.gridsize(1))"),
    ("mixup_no_loop", NEVER, "range(cuda.grid(1), y.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("mixup_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("mixup_in_float64", "float64-promotion", "y[n, j] = share[n] *", "y[n, j] = 1.0 * share[n] *"))


# ---- mutants that are right as well ----------------------------------------------------------

_WHOLE_WARPS = "blocks are whole warps, so both have the same remainder by 32"
_ANY_LANE = "all lanes have the sum: any one of them may write"

EQUIVALENT.update({
    ("smooth_cross_entropy", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("smooth_cross_entropy", "swap indices: largest, total, below = (MINUS_INF, ZERO, ZERO) → "
     "largest, below, total = (MINUS_INF, ZERO, ZERO)"): "both of them are 0",
    ("smooth_cross_entropy", "change constant: 0 → 1"): _ANY_LANE,
    ("top_k", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("top_k", "change constant: 0 → 1, again, again, again"): _ANY_LANE,
})  # fmt: skip
