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
from course_lib.teach.cases import numbers
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
        ((3, 3, 4, 2), 3, 2, 16),
        ((2, 5, 4, 4), 1, 1, 33),
        ((4, 6, 6, 3), 2, 2, 64),
        ((3, 9, 11, 3), 4, 3, 96),
    ]
    return [
        case(grid, block, images=rng.integers(1, 256, shape).astype(np.uint8),
             draws=_draws(rng, shape[0], padding), padding=np.int64(padding),
             factor=rng.uniform(0.01, 0.03, shape[3]).astype(np.float32),
             shift=rng.uniform(-2.5, -1.5, shape[3]).astype(np.float32))
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
    ((3, 200), "spread", 1, 96),
]


def _smooth_cases(rng):
    return [case(grid, block, **_smooth_inputs(rng, shape, kind))
            for shape, kind, grid, block in _SMOOTH]  # fmt: skip


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
