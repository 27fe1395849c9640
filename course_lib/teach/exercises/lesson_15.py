"""Lesson 15: real photographs: made ready, scored, timed, and a loss that is not too sure.

| exercise | it gets | what is new |
|---|---|---|
| augment | bytes of (N, H, W, C), draws, x of (N, C, H, W); any launch | a read with an offset |
| smooth_cross_entropy | logits, target, smoothing, …; a warp per row | loss and gradient at once |
| top_k | logits, labels, k, right; a warp per row | a rank without sorting |
| self_times | when calls begin and end | a profiler's "self" |
| mixup | x, labels, partner, share, y, target; any launch | two labels |

Arrays are float32, but images are bytes, and labels, targets, partners and draws are int64. `draws`
is (N, 3): rows and columns by which an image is moved, and whether it is mirrored.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import online_add, warp_online, warp_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.work import Spares, Uses
from course_lib.teach.exercise import Exercise, Tolerance, case

ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INF = np.float32(-np.inf)


# ---- augment ---------------------------------------------------------------------------------


@cuda.jit
def augment(images, draws, padding, factor, shift, x):
    H, W, C = images.shape[1:]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        row = h + draws[n, 0] - padding
        col = (W - 1 - w if draws[n, 2] else w) + draws[n, 1] - padding
        value = ZERO
        if 0 <= row < H and 0 <= col < W:
            value = np.float32(images[n, row, col, c])
        x[n, c, h, w] = value * factor[c] + shift[c]


def _augment_reference(images, draws, padding, factor, shift):
    N, H, W, C = images.shape
    x = np.tile(np.asarray(shift, np.float64), (N, H, W, 1))
    for n, h, w in np.ndindex(N, H, W):
        down, right, flip = (int(each) for each in draws[n])
        row, col = h + down - int(padding), (W - 1 - w if flip else w) + right - int(padding)
        if 0 <= row < H and 0 <= col < W:
            x[n, h, w] += images[n, row, col] * factor
    return np.moveaxis(x, 3, 1)


def _augment_cases(rng):
    launches = [
        ((1, 1, 1, 1), 0, 1, 32),
        ((0, 2, 2, 3), 1, 1, 32),
        ((1, 2, 3, 3), 0, 1, 32),
        ((1, 1, 2, 3), 1, 2, 1),
        ((2, 3, 2, 1), 1, 1, 32),
        ((2, 4, 5, 3), 2, 1, 32),
        ((3, 3, 4, 2), drawn(rng, 2, 4), 2, 16),
        ((2, 5, 4, 4), 1, 1, 33),
        ((1, 2, 3, drawn(rng, 5, 7)), 1, 1, 32),
        ((4, 6, 6, 3), 2, 2, 64),
        ((4, drawn(rng, 9, 11), drawn(rng, 11, 13), 3), drawn(rng, 6, 8), 2, 256),
    ]
    return [
        case(grid, block, images=rng.integers(1, 256, shape).astype(np.uint8),
             draws=_draws(rng, shape[0], padding), padding=np.int64(padding),
             factor=rng.uniform(0.01, 0.03, shape[3]).astype(np.float32),
             shift=rng.uniform(-2.5, 1.5, shape[3]).astype(np.float32))
        for shape, padding, grid, block in launches
    ]  # fmt: skip


def _draws(rng, n, padding):
    """Return n draws: the first image is moved down and mirrored, the second to the right."""
    draws = rng.integers(0, 2 * padding + 1, (n, 3))
    draws[:, 2] = rng.integers(0, 2, n)
    draws[:2] = np.array([[2 * padding, 0, 1], [0, 2 * padding, 0]])[:n]
    return draws


AUGMENT = Exercise(
    name="augment",
    title="Moved, mirrored, scaled, and laid out anew",
    solution=augment,
    reference=_augment_reference,
    cases=_augment_cases,
    tolerance=Tolerance(1e-6, 2e-6, "a product and a sum in float32, of numbers below 10"),
    outputs=("x",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.images, run.draws, run.padding, run.factor, run.shift, run.x
    ),
    once=True,
    about=(Spares("images"),),
    forbids=("float64-promotion",),
    hints=(
        "Begin at the result: thread i has one number of x. Which image, channel, row and column "
        "is it? From which row and column of the photograph does it come, and are they in it?",
        "x is (N, C, H, W), so the column is `i % W`. The row of the photograph is "
        "`h + draws[n, 0] - padding`. For the column, mirror first: `W - 1 - w` in place of w. "
        "What lies outside is a black pixel, a byte 0, which is scaled like any other.",
        "```python\nn, c, h, w = i // (C * H * W), i // (H * W) % C, ..., i % W\n"
        "row = h + draws[n, 0] - padding\ncol = (W - 1 - w if ... else w) + ...\n"
        "if 0 <= row < H and ...:\n    value = np.float32(images[n, row, col, c])\n```",
    ),
)


# ---- smooth_cross_entropy --------------------------------------------------------------------


@cuda.jit
def smooth_cross_entropy(logits, target, smoothing, loss, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    N, C = logits.shape
    if row < N:
        largest, total, below = MINUS_INF, ZERO, ZERO
        for col in range(lane, C, 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        every = smoothing / np.float32(C)
        for col in range(lane, C, 32):
            wanted = every + (ONE - smoothing if col == target[row] else ZERO)
            below += wanted * (largest - logits[row, col])
            p = math.exp(logits[row, col] - largest) / total
            dlogits[row, col] = (p - wanted) / np.float32(N)
        below = warp_sum(below)
        if lane == 0:
            loss[row] = math.log(total) + below


def _smooth_reference(logits, target, smoothing):
    N, C = logits.shape
    wanted = np.full(logits.shape, smoothing / C)
    wanted[np.arange(N), target % C] += 1 - smoothing
    below = logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
    total = np.exp(below).sum(axis=1, keepdims=True)
    loss = (wanted * (np.log(total) - below)).sum(axis=1)
    return loss, (np.exp(below) / total - wanted) / max(N, 1)


_SMOOTH = [
    ((0, 3), "plain", 1, 32),
    ((1, 1), "plain", 1, 32),
    ((1, 2), "below", 1, 64),
    ((2, 3), "above", 1, 96),
    ((3, 5), "plain", 3, 32),
    ((4, 4), "sharp", 2, 64),
    ((2, 7), "bottom", 2, 32),
    ((5, 31), "plain", 2, 96),
    ((3, 33), "spread", 3, 32),
    ((2, 64), "bottom", 1, 64),
    ((2, 97), "above", 1, 128),
    ((1, 200), "spread", 1, 96),
]


def _smooth_cases(rng):
    many_rows = (35, 2), "plain", 5, 256
    long_row = (1, drawn(rng, 1030, 1060)), "spread", 1, 32
    largest = (drawn(rng, 20, 24), drawn(rng, 67, 90)), "spread", 3, 256
    return [case(grid, block, **_smooth_inputs(rng, shape, kind))
            for shape, kind, grid, block in [*_SMOOTH, many_rows, long_row, largest]]  # fmt: skip


def _smooth_inputs(rng, shape, kind):
    scale, offset = {"spread": (8, 0), "above": (4, 1e4), "below": (4, -1e4)}.get(kind, (1, 0.5))
    logits = numbers(rng, shape, scale, offset)
    target = rng.integers(0, shape[1], shape[0])
    target[:1], target[1:2] = shape[1] - 1, 0
    if kind == "bottom":  # a class that is out of the question, but not infinitely so
        logits[np.arange(shape[0]), (target + 1) % shape[1]] = -3e38
    smoothing = 0.0 if kind == "sharp" else rng.uniform(0.1, 0.4)
    return {"logits": logits, "target": target, "smoothing": np.float32(smoothing)}


SMOOTH_CROSS_ENTROPY = Exercise(
    name="smooth_cross_entropy",
    title="A loss that is not too sure, with its gradient",
    solution=smooth_cross_entropy,
    reference=_smooth_reference,
    cases=_smooth_cases,
    tolerance=Tolerance(2e-5, 2e-6, "a few hundred products and additions are rounded in float32"),
    outputs=("loss", "dlogits"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.logits, run.target, run.smoothing, run.loss, run.dlogits
    ),
    once=True,
    about=(Spares("logits"), Uses("shuffles", point=False)),
    repeatable=True,
    forbids=("float64-promotion",),
    hints=(
        "Maximum and sum of a row are lesson 5's. After them, walk through the row once more: "
        "what is wanted of each class, how much does its distance from the maximum add to the "
        "loss, and what is its gradient?",
        "`wanted` is `smoothing / C` for every class, and `1 - smoothing` more for the target. "
        "The row's loss is log(total) and the sum of `wanted * (largest - x)`: no term is "
        "negative, so nothing cancels. The gradient is `(p - wanted) / N`: N rows, of whose "
        "losses the mean is taken. Lanes share the columns; `warp_sum` joins them.",
        "```python\nfor col in range(lane, C, 32):\n"
        "    wanted = every + (ONE - smoothing if ... else ZERO)\n"
        "    below += wanted * (largest - logits[row, col])\n"
        "    p = math.exp(...) / total\n    dlogits[row, col] = ...\n"
        "below = warp_sum(below)\nif lane == 0:\n    loss[row] = ...\n```",
    ),
)


# ---- top_k -----------------------------------------------------------------------------------


@cuda.jit
def top_k(logits, labels, k, right):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label, before = labels[row], 0
        own = logits[row, label]
        for col in range(lane, logits.shape[1], 32):
            other = logits[row, col]
            if col < label:
                before += 0 if other < own else 1
            if col > label:
                before += 0 if other <= own else 1
        before = warp_sum(before)
        if lane == 0 and before < k:
            cuda.atomic.add(right, label, 1)


def _top_k_reference(logits, labels, k):
    N, C = logits.shape
    labels, right = labels % C, np.zeros(C, np.int64)
    for row, label in zip(logits, labels, strict=True):
        rank = sum(not (row[c] < row[label]) for c in range(label))
        rank += sum(not (row[c] <= row[label]) for c in range(label + 1, C))
        right[label] += rank < k
    return right


_RANKED = [
    ((0, 3), 1, "plain", 1, 32),
    ((1, 1), 1, "plain", 1, 32),
    ((2, 2), 1, "ties", 1, 64),
    ((3, 4), 2, "plain", 3, 32),
    ((4, 5), 1, "NaN", 2, 64),
    ((5, 6), 3, "ties", 2, 96),
    ((3, 7), 7, "NaN", 3, 32),
    ((4, 33), 5, "below", 2, 64),
    ((6, 40), 4, "ties", 3, 64),
    ((3, 70), 5, "NaN", 3, 32),
    ((7, 97), 3, "infinite", 7, 32),
    ((2, 200), 5, "plain", 1, 128),
]


def _top_k_cases(rng):
    many_rows = (35, 3), 2, "near", 5, 256
    long_row = (2, drawn(rng, 1030, 1058)), drawn(rng, 260, 290), "plain", 1, 64
    largest = (32, drawn(rng, 84, 95)), drawn(rng, 3, 9), "plain", 4, 256
    return [
        case(grid, block, **_ranked(rng, shape, k, kind), k=np.int64(k))
        for shape, k, kind, grid, block in [*_RANKED, many_rows, long_row, largest]
    ]


def _ranked(rng, shape, k, kind):
    """Return logits whose label is the k-th largest, or just behind it, or wherever it is."""
    logits = numbers(rng, shape, 2.0, -1e4 if kind == "below" else 0.0)
    labels = rng.integers(0, shape[1], shape[0])
    for row in range(shape[0]):
        order = np.argsort(-logits[row], kind="stable")
        if row % 3 == 1:  # it matters that nobody leaves out the last column, the 32nd or the 33rd
            ends = [shape[1] - 1, min(31 + row // 4, shape[1] - 2)]
            largest = logits[row, order[:2]]
            logits[row, order[:2]], logits[row, ends] = logits[row, ends], largest
            order = np.argsort(-logits[row], kind="stable")
        if row % 3 < 2:
            labels[row] = order[min(k - 1 + row % 3, shape[1] - 1)]
        if kind == "near":  # the last bit decides, against the one with the smaller number
            first, last = sorted(order[k - 1 : k + 1])
            logits[row, last] = logits[row, order[k - 1]]
            logits[row, first] = np.nextafter(logits[row, last], np.float32(-np.inf))
            labels[row] = first if row % 3 == 1 else last
        if kind == "ties":  # with the label, at three places
            logits[row, rng.choice(shape[1], min(3, shape[1]))] = logits[row, labels[row]]
    if kind == "NaN":  # all of one row, the label of another, and one that pushes a label out
        logits[0], logits[1, labels[1]] = np.nan, np.nan
        order = np.argsort(-logits[2], kind="stable")
        labels[2], logits[2, order[-1]] = order[min(k - 1, shape[1] - 2)], np.nan
    if kind == "infinite":
        logits[0, labels[0]], logits[1, labels[1]] = np.inf, -np.inf
        logits[2:4, ::2] = -np.inf
        # Two, three and all are equally infinite: what counts is where the label stands.
        logits[4, labels[4]] = logits[4, labels[4] - 1] = np.inf
        logits[5, [3, 40, 96]], labels[5] = np.inf, 96
        logits[6], labels[6] = -np.inf, 2
    return {"logits": logits, "labels": labels}


TOP_K = Exercise(
    name="top_k",
    title="Among the k largest, without sorting",
    solution=top_k,
    reference=_top_k_reference,
    cases=_top_k_cases,
    outputs=("right",),
    dtype=np.int32,
    start=0,
    call=lambda kernel, run: run.launch(kernel, run.logits, run.labels, run.k, run.right),
    about=(Spares("logits"), Uses("shuffles", point=False)),
    hints=(
        "To know whether the label is among the k largest you need not know which the others are. "
        "How many stand before it?",
        "A class stands before the label if its logit is larger, or as large and its number is "
        "smaller. Turn the question round, because of NaN: it stands before the label *unless* it "
        "is smaller (or, for those behind the label, as large). Every comparison with NaN is "
        "false. Each lane counts its columns, `warp_sum` adds the counts up.",
        "```python\nif col < label:\n    before += 0 if other < own else 1\n"
        "if col > label:\n    before += 0 if ... else 1\n```\n"
        "Then `before = warp_sum(before)`, and one lane counts the image, with an atomic, if "
        "`before` is smaller than k.",
    ),
)


# ---- self_times ------------------------------------------------------------------------------


def self_times(begin, end, kind, n_kinds):
    times, running = np.zeros(n_kinds), []
    for i in range(len(begin)):
        running = [j for j in running if end[j] > begin[i]]
        took = end[i] - begin[i]
        if running:
            times[kind[running[-1]]] -= took
        times[kind[i]] += took
        running.append(i)
    return times


def _self_reference(begin, end, kind, n_kinds):
    times = np.zeros(int(n_kinds))
    for i, (first, last) in enumerate(zip(begin, end, strict=True)):
        around = [j for j in range(i) if begin[j] <= first and last <= end[j]]
        times[kind[i]] += last - first
        if around:  # the one that began last
            times[kind[around[-1]]] -= last - first
    return times


def _self_cases(rng):
    # How many calls each call makes, and how many kinds there are.
    trees = [([], 1), ([0], 1), ([1, 0], 2), ([0, 0], 2), ([2, 0, 0], 3), ([1, 1, 0], 2),
             ([2, 1, 0, 0, 1, 0], 3), ([3, 0, 2, 0, 0, 1, 0, 0], 4),
             ([2, 2, 1, 0, 0, 3, 0, 1, 1, 0, 0, 0, 2, 0, 0], 5),
             (_tree(rng, drawn(rng, 260, 290)), drawn(rng, 9, 40))]  # fmt: skip
    # The last but one is as if in seconds: what is a small number elsewhere is a large one there.
    units = [1.0] * (len(trees) - 2) + [1e-6, 1.0]
    return [case(1, 1, **_calls(rng, tree, unit), kind=rng.integers(0, kinds, len(tree)),
                 n_kinds=np.int64(kinds))
            for (tree, kinds), unit in zip(trees, units, strict=True)]  # fmt: skip


def _tree(rng, n):
    """Return how many calls each of n calls makes, in the order in which they begin."""
    made, promised = [], 0
    for number in range(n):
        promised = max(promised - 1, 0)  # it was promised, or nobody has called it
        made.append(int(min(rng.integers(0, 4), n - 1 - number - promised)))
        promised += made[-1]
    return made


def _calls(rng, tree, unit):
    """Return when each call begins and ends: in the order in which they begin."""
    begin, end, clock, counts = [], [], rng.uniform(0, 50), iter(tree)

    def one(made):
        nonlocal clock
        number = len(begin)
        begin.append(clock)
        end.append(0.0)
        for _ in range(made):
            # Some begin with what called them, and some when the one before has just ended.
            clock += rng.choice([0.0, rng.uniform(1, 9)])
            one(next(counts))
        # Some end with the last that they called.
        clock += rng.choice([0.0, rng.uniform(1, 9)]) if made else rng.uniform(1, 9)
        end[number] = clock

    for made in counts:
        one(made)
        clock += rng.choice([0.0, 3.5])
    return {"begin": unit * np.array(begin), "end": unit * np.array(end)}


def _times_of(function, run):
    """Call it as the lesson does: `kind` is a list."""
    kind = run.kind.tolist()
    found = function(run.begin, run.end, kind, int(run.n_kinds))
    if kind != run.kind.tolist():
        raise ValueError("it changes kind, which is not its own")
    return None if found is None else np.asarray(found, np.float64)


SELF_TIMES = Exercise(
    name="self_times",
    title="Whose time is it?",
    solution=self_times,
    kind="function",
    reference=_self_reference,
    cases=_self_cases,
    tolerance=Tolerance(1e-12, 1e-9, "sums and differences of a few times in float64"),
    outputs=("times",),
    dtype=np.float64,
    call=_times_of,
    hints=(
        "Walk through the calls in the order in which they begin. Which of the earlier ones are "
        "still running when this one begins? To which of these does it belong?",
        "Keep a list of the running calls. Before each call, leave out those that have ended by "
        "then. The last one in the list has called it: the time of call i counts for its own "
        "kind, and not for the kind of the caller.",
        "```python\nrunning = [j for j in running if end[j] > ...]\n"
        "took = end[i] - begin[i]\nif running:\n    times[kind[running[-1]]] -= ...\n"
        "times[kind[i]] += ...\nrunning.append(i)\n```",
    ),
)


# ---- mixup -----------------------------------------------------------------------------------


@cuda.jit
def mixup(x, labels, partner, share, y, target):
    P, C = y.shape[1], target.shape[1]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        n, j = i // P, i % P
        y[n, j] = share[n] * x[n, j] + (ONE - share[n]) * x[partner[n], j]
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        n, c = i // C, i % C
        own = share[n] if labels[n] == c else ZERO
        others = ONE - share[n] if labels[partner[n]] == c else ZERO
        target[n, c] = own + others


def _mixup_reference(x, labels, partner, share, n_classes):
    if not len(x):
        return x, np.zeros((0, int(n_classes)))
    partner, share = partner % len(x), share[:, None]
    hot = (labels[:, None] == np.arange(int(n_classes))).astype(np.float64)
    return tuple(share * each + (1 - share) * each[partner] for each in (x, hot))


def _mixup_cases(rng):
    launches = [
        ((1, 1), 1, 1, 32),
        ((0, 3), 2, 1, 32),
        ((2, 1), 2, 1, 32),
        ((2, 3), 4, 2, 1),
        ((3, 4), 2, 1, 32),
        ((4, 2), 7, 1, 32),
        ((5, 9), 3, 2, 16),
        ((6, 12), 10, 2, 33),
        ((7, 20), 5, 2, 64),
        ((6, 1), drawn(rng, 180, 200), 1, 256),
        ((8, drawn(rng, 130, 150)), drawn(rng, 5, 9), 1, 256),
    ]
    return [
        case(grid, block, x=numbers(rng, shape, 1.0, 0.5),
             labels=rng.integers(0, n_classes, shape[0]), partner=_partners(rng, shape[0]),
             share=rng.uniform(0.05, 0.95, shape[0]).astype(np.float32),
             n_classes=np.int64(n_classes))
        for shape, n_classes, grid, block in launches
    ]  # fmt: skip


def _partners(rng, n):
    """Return whom each of n is mixed with: some are nobody's partner, some are their own."""
    partner = rng.integers(0, max(n, 1), n)
    if n > 2:
        partner[:3] = 1, 1, 1
    return partner


MIXUP = Exercise(
    name="mixup",
    title="Two pictures in one, with two labels",
    solution=mixup,
    reference=_mixup_reference,
    cases=_mixup_cases,
    tolerance=Tolerance(1e-6, 1e-6, "two products and a sum in float32"),
    outputs=("y", "target"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.x, run.labels, run.partner, run.share, run.y, run.target
    ),
    once=True,
    about=(Spares("x"),),
    forbids=("float64-promotion",),
    hints=(
        "There are two results, of different sizes. A loop for each, both from `cuda.grid(1)` on. "
        "And what if both pictures are of the same class?",
        "Row n of y is `share[n]` of picture n and the rest of picture `partner[n]`. In target, "
        "class c gets `share[n]` if it is the picture's own, and `1 - share[n]` if it is the "
        "partner's. If it is both, it gets both: 1.",
        "```python\ny[n, j] = share[n] * x[n, j] + (ONE - share[n]) * x[..., j]\n"
        "own = share[n] if labels[n] == c else ZERO\n"
        "others = ... if labels[partner[n]] == c else ZERO\n```",
    ),
)
