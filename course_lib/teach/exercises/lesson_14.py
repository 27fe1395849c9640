"""Lesson 14: from a radar's power to a loss that finds water.

| exercise | it gets | what is new |
|---|---|---|
| multilook | power of (H, W), n, y of (H // n, W // n); any launch | the mean of what adds up |
| prepare | power of (bands, n), label of (n,), …; a thread per pixel | a barrier that counts |
| iou | prediction and target of (n,), absent, score; a block per class | two counts, one ratio |
| dice_sums | logits of (N, C, P), target of (N, P), sums; a block per class | softly counted |
| dice_gradient | dloss, logits, target, sums, smooth, dlogits; a thread per pixel | a quotient |

Arrays are float32, but labels, targets and predictions are int64: a class, or NO_DATA. In `power`
a pixel that is not above 0 (NaN is not) has no data. `sums` is (C, 3). Blocks of `iou`
have any number of threads, those of `dice_sums` are whole warps.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import block_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.exercise import Exercise, Tolerance, case

NO_DATA = -1
ZERO, ONE, TWO, TEN = np.float32(0), np.float32(1), np.float32(2), np.float32(10)
INF = np.float32(np.inf)


# ---- multilook -------------------------------------------------------------------------------


@cuda.jit
def multilook(power, n, y):
    OW = y.shape[1]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        first_row, first_col = i // OW * n, i % OW * n
        total, count = ZERO, ZERO
        for row in range(first_row, first_row + n):
            for col in range(first_col, first_col + n):
                if power[row, col] > ZERO:
                    total += power[row, col]
                    count += ONE
        y[i // OW, i % OW] = total / count if count > ZERO else ZERO


def _multilook_reference(power, n):
    n = int(n)
    OH, OW = power.shape[0] // n, power.shape[1] // n
    windows = power[: OH * n, : OW * n].reshape(OH, n, OW, n)
    known = windows > 0
    total = np.where(known, windows, 0).sum(axis=(1, 3))
    return total / np.maximum(known.sum(axis=(1, 3)), 1)


def _power(rng, shape, kind="plain"):
    """Return powers of 1e-4 to 10, and pixels without data in all but the plain kinds."""
    power = 10.0 ** rng.uniform(-4, 1, shape)
    power *= {"faint": 1e-12, "faintest": 1e-30, "strong": 1e25}.get(kind, 1.0)
    power = power.astype(np.float32)
    if kind == "gaps":
        power[rng.random(shape) < 0.35] = np.nan
        power = np.where(rng.random(shape) < 0.15, -power, power)
        power[0, 0] = 0.0
    if kind == "bright":  # more than a number can hold, in the last pixel of a window
        power[1, 1] = np.inf
    if kind == "edge":  # whole windows beyond the swath
        power[:, : shape[-1] // 2] = np.nan
        power[0, 1:], power[0, 0] = np.nan, 0.0
    return power


def _multilook_cases(rng):
    launches = [
        ((1, 1), 1, "plain", 1, 32),
        ((2, 2), 3, "plain", 1, 32),
        ((2, 3), 1, "gaps", 1, 4),
        ((2, 4), 2, "plain", 1, 32),
        ((5, 4), 2, "edge", 1, 32),
        ((7, 6), 3, "gaps", 2, 1),
        ((4, 4), 2, "bright", 1, 32),
        ((4, 9), 3, "faintest", 1, 32),
        ((5, 11), 5, "faint", 2, 32),
        ((9, 12), 4, "gaps", 1, 33),
        ((14, 7), 7, "strong", 1, 2),
        ((13, 22), 2, "edge", 1, 16),
        ((24, drawn(rng, 43, 46)), 1, "gaps", 1, 256),
        ((drawn(rng, 36, 39), drawn(rng, 41, 49)), drawn(rng, 2, 3), "gaps", 1, 288),
    ]
    return [
        case(grid, block, power=_power(rng, shape, kind), n=np.int64(n))
        for shape, n, kind, grid, block in launches
    ]


MULTILOOK = Exercise(
    name="multilook",
    title="Less speckle, fewer pixels",
    solution=multilook,
    reference=_multilook_reference,
    cases=_multilook_cases,
    tolerance=Tolerance(1e-5, 0.0, "float32 rounds sums of up to 49 positive numbers"),
    call=lambda kernel, run: run.launch(kernel, run.power, run.n, run.y),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "A result is the mean of a window of n × n pixels. Where does the window of result i "
        "begin? And how many of its pixels are there to be averaged?",
        "Result i lies in row `i // OW` and column `i % OW`; its window begins n times further. "
        "Add up power, and count, where `power[row, col] > ZERO`: a comparison with NaN is false. "
        "Divide by the count; where nothing was counted the result is 0.",
        "```python\nfor row in range(first_row, first_row + n):\n    for col in range(...):\n"
        "        if power[row, col] > ZERO:\n            total += ...\n            count += ONE\n"
        "y[i // OW, i % OW] = total / count if ... else ZERO\n```",
    ),
)


# ---- prepare ---------------------------------------------------------------------------------


@cuda.jit
def prepare(power, label, low, high, mean, spread, x, y, missing):
    i, lost = cuda.grid(1), 0
    if i < label.size:
        for band in range(power.shape[0]):
            if not (power[band, i] > ZERO and power[band, i] < INF):
                lost = 1
        y[i] = NO_DATA if lost else label[i]
        for band in range(power.shape[0]):
            x[band, i] = ZERO
            if not lost:
                decibels = TEN * math.log10(power[band, i])
                x[band, i] = (min(max(decibels, low), high) - mean) / spread
    count = cuda.syncthreads_count(lost)
    if cuda.threadIdx.x == 0:
        missing[cuda.blockIdx.x] = count


def _prepare_reference(power, label, low, high, mean, spread, blocks, threads):
    lost = ~((power > 0) & np.isfinite(power)).all(axis=0)
    decibels = 10 * np.log10(np.where(lost, 1.0, power))
    x = np.where(lost, 0.0, (decibels.clip(low, high) - mean) / spread)
    missing = np.zeros(int(blocks), np.int64)
    np.add.at(missing, np.arange(lost.size) // int(threads), lost)
    return x, np.where(lost, NO_DATA, label), missing


def _prepare_cases(rng):
    launches = [
        (1, 1, "plain", 1, 32),
        (2, 0, "plain", 1, 32),
        (1, 2, "gaps", 1, 32),
        (2, 3, "gaps", 1, 32),
        (2, 31, "second", 1, 32),
        (3, 20, "gaps", 2, 32),
        (2, 64, "clipped", 2, 32),
        (1, 70, "gaps", 2, 64),
        (2, 33, "extreme", 2, 32),
        (2, 100, "lost", 3, 96),
        (2, 300, "gaps", 2, 256),
        (5, 9, "gaps", 1, 32),
        (1, 1043, "gaps", 3, drawn(rng, 12, 16) * 32),
        (4, drawn(rng, 620, 700), "gaps", 2, 352),
    ]
    return [
        case(grid, block, **_prepare_inputs(rng, bands, n, kind), blocks=np.int64(grid),
             threads=np.int64(block))
        for bands, n, kind, grid, block in launches
    ]  # fmt: skip


def _prepare_inputs(rng, bands, n, kind):
    power = _power(rng, (bands, n), kind)
    if kind == "second":  # only there is something missing
        power[1, ::3] = np.nan
        power[1, 1::7] = np.inf
    if kind == "extreme":
        power[:, ::2] *= rng.choice([1e-33, 1e37], (bands, len(power[0, ::2])))
        power[:, 9], power[:, 10] = 1e-40, 3.3e38  # which a float32 holds, and just so
        power[0, 5], power[-1, 6], power[0, 7] = -0.0, -np.inf, np.inf
    if kind == "lost":
        power[0] = np.nan
    label = rng.integers(NO_DATA, 5, n)
    ends = (-12, -8) if kind == "clipped" else (-35, 5)
    low, high = (rng.uniform(end - 2, end + 2) for end in ends)
    given = {"low": low, "high": high, "mean": rng.uniform(-19, -9), "spread": rng.uniform(3, 9)}
    return {"power": power, "label": label} | {k: np.float32(v) for k, v in given.items()}


PREPARE = Exercise(
    name="prepare",
    title="Decibels, and what is missing",
    solution=prepare,
    reference=_prepare_reference,
    cases=_prepare_cases,
    tolerance=Tolerance(
        1e-5, 1e-5, "a logarithm is rounded, near −20 by 1e-6, then a difference and a quotient"
    ),
    outputs=("x", "y", "missing"),
    dtype={"x": np.float32, "y": np.int64, "missing": np.int32},
    call=lambda kernel, run: run.launch(
        kernel, run.power, run.label, run.low, run.high, run.mean, run.spread, run.x, run.y,
        run.missing,
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "First find out whether the pixel is lost: one bad band is enough. Only then write, every "
        "band of it. And who may come to the barrier: all threads, or those with a pixel?",
        "A band has data where `power > ZERO and power < INF`; NaN fails both. A lost pixel gets "
        "x 0 in every band and the label NO_DATA. Outside of the guard, *every* thread of the "
        "block calls `cuda.syncthreads_count(lost)`, and one of them writes what it returns.",
        "```python\nfor band in range(power.shape[0]):\n"
        "    if not (power[band, i] > ZERO and ...):\n        lost = 1\n"
        "y[i] = NO_DATA if lost else ...\n```\n"
        "x is `(min(max(decibels, low), high) - mean) / spread`. At the end, outside of the `if`: "
        "`count = cuda.syncthreads_count(lost)`.",
    ),
)


# ---- iou -------------------------------------------------------------------------------------


@cuda.jit
def iou(prediction, target, absent, score):
    counts = cuda.shared.array(2, np.int32)
    c, t = cuda.blockIdx.x, cuda.threadIdx.x
    if t == 0:
        counts[0], counts[1] = 0, 0
    cuda.syncthreads()
    both, either = 0, 0
    for i in range(t, target.size, cuda.blockDim.x):
        if target[i] != NO_DATA:
            found, true = prediction[i] == c, target[i] == c
            both += 1 if found and true else 0
            either += 1 if found or true else 0
    cuda.atomic.add(counts, 0, both)
    cuda.atomic.add(counts, 1, either)
    cuda.syncthreads()
    if t == 0:
        score[c] = absent
        if counts[1] > 0:
            score[c] = np.float32(counts[0]) / np.float32(counts[1])


def _iou_reference(prediction, target, absent, n_classes):
    known, found = target != NO_DATA, []
    for c in range(int(n_classes)):
        predicted, true = (prediction == c) & known, target == c
        either = (predicted | true).sum()
        found.append((predicted & true).sum() / either if either else absent)
    return np.array(found)


def _iou_cases(rng):
    launches = [
        (1, 1, "perfect", 32),
        (0, 2, "plain", 32),
        (3, 2, "unknown", 32),
        (2, 1, "plain", 64),
        (9, 2, "unanswered", 1),
        (20, 3, "absent", 32),
        (33, 2, "only found", 32),
        (45, 4, "absent", 33),
        (70, 2, "perfect", 96),
        (90, 2, "rare", 64),
        (60, 11, "unanswered", 7),
        (5, drawn(rng, 33, 36), "plain", 1),
        (drawn(rng, 1400, 1900), 2, "plain", 512),
        (1100, 1, "plain", 1024),
    ]
    return [
        case(n_classes, block, **_masks(rng, n, n_classes, kind),
             absent=np.float32(rng.uniform(-3, -2)), n_classes=np.int64(n_classes))
        for n, n_classes, kind, block in launches
    ]  # fmt: skip


def _masks(rng, n, n_classes, kind):
    """Return prediction and target of n pixels, no two classes of which are equally frequent."""
    share = np.arange(1, n_classes + 1) / (n_classes * (n_classes + 1) / 2)
    if kind == "rare":
        share = np.array([0.97, 0.03])
    target = rng.choice(n_classes, n, p=share)
    prediction = np.where(rng.random(n) < 0.4, rng.integers(0, n_classes, n), target)
    if kind == "absent":
        target[target == 1] = 0
        prediction[prediction == 1] = 0
    if kind == "only found":  # a class that is predicted, and nowhere in truth
        target[:] = 0
        prediction[::4] = 1
    if kind == "perfect":
        prediction = target.copy()
    if kind == "unanswered":  # who answers NO_DATA has not found the pixel's class
        prediction[::3] = NO_DATA
    target[1:][rng.random(max(n - 1, 0)) < 0.2] = NO_DATA
    if kind == "unknown":
        target[:] = NO_DATA
    return {"prediction": prediction, "target": target}


IOU = Exercise(
    name="iou",
    title="Intersection over union",
    solution=iou,
    reference=_iou_reference,
    cases=_iou_cases,
    tolerance=Tolerance(1e-6, 0.0, "one quotient of whole numbers is rounded"),
    outputs=("score",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.prediction, run.target, run.absent, run.score
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "Two numbers are wanted for a class: of how many pixels do both, prediction and target, "
        "say that they are of it, and of how many does one of them at least?",
        "Each thread counts its pixels in two variables of its own, without those whose target is "
        "NO_DATA. Then all of them add to two shared counters: zeroed by one thread, a barrier, "
        "atomics, a barrier. One thread divides, or writes `absent` where the union is empty.",
        "```python\nif t == 0:\n    counts[0], counts[1] = 0, 0\ncuda.syncthreads()\n"
        "for i in range(t, target.size, cuda.blockDim.x):\n    if target[i] != NO_DATA:\n"
        "        found, true = prediction[i] == c, target[i] == c\n        both += ...\n"
        "cuda.atomic.add(counts, 0, both)\n```\n`either` goes to `counts[1]`; then a barrier.",
    ),
)


# ---- dice_sums -------------------------------------------------------------------------------


@cuda.jit(device=True)
def probability(logits, n, c, j):
    """Softmax over the classes: that of class c, for pixel j of image n."""
    top, total = logits[n, 0, j], ZERO
    for k in range(1, logits.shape[1]):
        top = max(top, logits[n, k, j])
    for k in range(logits.shape[1]):
        total += math.exp(logits[n, k, j] - top)
    return math.exp(logits[n, c, j] - top) / total


@cuda.jit
def dice_sums(logits, target, sums):
    scratch = cuda.shared.array(32, np.float32)
    N, P = target.shape
    c, t = cuda.blockIdx.x, cuda.threadIdx.x
    both, found, true = ZERO, ZERO, ZERO
    for i in range(t, N * P, cuda.blockDim.x):
        n, j = i // P, i % P
        if target[n, j] != NO_DATA:
            p = probability(logits, n, c, j)
            found += p
            if target[n, j] == c:
                both += p
                true += ONE
    both = block_sum(both, scratch)
    found = block_sum(found, scratch)
    true = block_sum(true, scratch)
    if t == 0:
        sums[c, 0], sums[c, 1], sums[c, 2] = both, found, true


def _softmax(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return e / e.sum(axis=1, keepdims=True)


def _one_hot(target, n_classes):
    return (target[:, None] == np.arange(n_classes)[:, None]).astype(np.float64)


def _sums(logits, target):
    t = _one_hot(target, logits.shape[1])
    p = _softmax(logits) * (target != NO_DATA)[:, None]
    return np.stack([a.sum(axis=(0, 2)) for a in (p * t, p, t)], axis=1)


def _segmented(rng, shape, kind):
    """Return logits and a target in which it shows when a class, a pixel or the maximum is lost."""
    scale, offset = {"above": (3, 1e4), "below": (3, -1e4), "sure": (60, 0), "flat": (1e-6, 0)}.get(
        kind, (1.5, 0.5)
    )
    N, C, P = shape
    # Each class has another mean, else all sums of a class would be alike.
    logits = numbers(rng, shape, scale, offset) + np.float32(scale / 3) * np.arange(
        C, dtype=np.float32
    )[:, None]
    if kind == "unlikely":  # one class, in every pixel
        logits[:, 0] -= np.float32(40)
    target = rng.integers(0, C, (N, P))
    if kind == "absent":
        target[target == C - 1] = 0
    if kind != "plain":
        target[rng.random((N, P)) < 0.25] = NO_DATA
    if kind == "unknown":
        target[:] = NO_DATA
    return {"logits": logits.astype(np.float32), "target": target}


def _dice_sums_cases(rng):
    launches = [
        ((1, 1, 1), "plain", 32),
        ((0, 2, 3), "plain", 32),
        ((1, 2, 2), "plain", 32),
        ((1, 2, 3), "unknown", 32),
        ((2, 2, 5), "above", 32),
        ((2, 3, 7), "absent", 32),
        ((1, 2, 35), "sure", 32),
        ((1, 3, 9), "below", 32),
        ((1, 2, 70), "flat", 32),
        ((2, 2, 40), "unlikely", 64),
        ((2, 11, 3), "ignored", 32),
        ((2, 2, drawn(rng, 200, 240)), "ignored", 256),
        ((1, 1, drawn(rng, 1030, 1060)), "ignored", 544),
    ]
    return [
        case(shape[1], block, **_segmented(rng, shape, kind)) for shape, kind, block in launches
    ]


DICE_SUMS = Exercise(
    name="dice_sums",
    title="Counting softly",
    solution=dice_sums,
    reference=_sums,
    cases=_dice_sums_cases,
    tolerance=Tolerance(
        3e-5, 1e-30, "exp of a difference up to 100 is off by 1e-5; all terms are positive"
    ),
    outputs=("sums",),
    dtype=np.float32,
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "It is the kernel of `iou` with probabilities in place of yes and no. Which of the three "
        "sums takes a probability from every pixel, and which only from those of class c?",
        "For each pixel that is not NO_DATA: `found` gets the probability of class c, always. "
        "Where the target *is* c, `both` gets it as well, and `true` gets 1. At the end each of "
        "the three goes through `block_sum`, which all threads must call.",
        "```python\nif target[n, j] != NO_DATA:\n    p = probability(logits, n, c, j)\n"
        "    found += ...\n    if target[n, j] == c:\n        both += ...\n        true += ...\n"
        "both = block_sum(both, scratch)\n```",
    ),
)


# ---- dice_gradient ---------------------------------------------------------------------------


@cuda.jit
def dice_gradient(dloss, logits, target, sums, smooth, dlogits):
    N, C, P = logits.shape
    i = cuda.grid(1)
    if i < N * P:
        n, j = i // P, i % P
        label, inner = target[n, j], ZERO
        for c in range(C):
            size = sums[c, 1] + sums[c, 2] + smooth
            t = ONE if label == c else ZERO
            g = ((TWO * sums[c, 0] + smooth) / size - TWO * t) / size / np.float32(C)
            inner += probability(logits, n, c, j) * g
            dlogits[n, c, j] = g
        for c in range(C):
            dx = probability(logits, n, c, j) * (dlogits[n, c, j] - inner)
            dlogits[n, c, j] = dloss * dx if label != NO_DATA else ZERO


def _dice(logits, target, smooth):
    """1 − the mean over the classes of (2·Σ p·t + smooth) / (Σ p + Σ t + smooth)."""
    both, found, true = _sums(logits, target).T
    return 1 - ((2 * both + smooth) / (found + true + smooth)).mean()


def _dice_gradient_reference(dloss, logits, target, sums, smooth):
    n_classes = logits.shape[1]
    p, t = _softmax(logits), _one_hot(target, n_classes)
    both, found, true = sums.T[..., None]
    common, size = 2 * both + smooth, found + true + smooth
    g = (common / size - 2 * t) / size / n_classes
    dx = p * (g - (p * g).sum(axis=1, keepdims=True))
    return np.where(target[:, None] == NO_DATA, 0.0, dloss * dx)


def _dice_gradient_cases(rng):
    launches = [
        ((1, 1, 1), "plain", 1, 32),
        ((0, 2, 3), "plain", 1, 32),
        ((1, 3, 2), "plain", 1, 32),
        ((1, 2, 3), "unknown", 1, 4),
        ((2, 2, 5), "above", 2, 8),
        ((3, 3, 7), "absent", 1, 32),
        ((2, 2, 17), "sure", 2, 32),
        ((2, 4, 9), "below", 3, 7),
        ((1, 3, 20), "flat", 1, 64),
        ((3, 5, 11), "ignored", 2, 32),
        ((2, 3, 70), "ignored", 2, 96),
        ((1, 11, 3), "plain", 1, 32),
        ((1, 1, 1043), "ignored", 3, 384),
        ((1, 2, drawn(rng, 900, 960)), "above", 2, 512),
    ]
    return [
        case(grid, block, **_dice_gradient_inputs(rng, shape, kind))
        for shape, kind, grid, block in launches
    ]


def _dice_gradient_inputs(rng, shape, kind):
    given = _segmented(rng, shape, kind)
    sums = _sums(given["logits"].astype(np.float64), given["target"]).astype(np.float32)
    # The gradient of a mean over pixels is small: so large a dloss makes numbers near 1 of it.
    dloss = np.float32(rng.uniform(2, 4) * max(1, shape[0] * shape[2]))
    dloss *= np.float32(-1 if kind == "ignored" else 1)
    smooth = np.float32(rng.uniform(0.001, 0.002) if kind == "absent" else rng.uniform(0.3, 3))
    return {"dloss": dloss, **given, "sums": sums, "smooth": smooth}


DICE_GRADIENT = Exercise(
    name="dice_gradient",
    title="Back through a quotient and softmax",
    solution=dice_gradient,
    reference=_dice_gradient_reference,
    cases=_dice_gradient_cases,
    tolerance=Tolerance(
        5e-5, 2e-5, "exp, two quotients and two differences are rounded, of numbers up to some 10"
    ),
    outputs=("dlogits",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.dloss, run.logits, run.target, run.sums, run.smooth, run.dlogits
    ),
    once=True,
    primal=lambda logits, target, sums, smooth: _dice(logits, target, smooth),
    forbids=("float64-promotion",),
    hints=(
        "Two steps back, and the text has derived both: from the loss to the probabilities, g_c, "
        "and from these to the logits. Which part of the second step needs all classes?",
        "With common = 2·both + smooth and size = found + true + smooth of class c, "
        "g_c = (common / size − 2 t) / size / C, where t is 1 for the pixel's own class. A first "
        "loop adds up `inner` = Σ p_c · g_c, a second writes dloss · p_c · (g_c − inner). An "
        "ignored pixel gets 0.",
        "```python\nfor c in range(C):\n    size = sums[c, 1] + sums[c, 2] + smooth\n"
        "    t = ONE if label == c else ZERO\n    g = ((TWO * sums[c, 0] + smooth) / size - ...) "
        "/ size / np.float32(C)\n    inner += probability(logits, n, c, j) * ...\n```\n"
        "The second loop needs g again: compute it once more, or keep it in `dlogits`.",
    ),
)
