"""Lesson 05: softmax fused with its loss, with the layers before it, with dropout after it.

| exercise | it gets | what is new |
|---|---|---|
| predict_fusion | six numbers | what a chain of kernels costs, and one kernel in its place |
| cross_entropy | logits, target, loss, m, s; a warp per row | a loss without probabilities |
| cross_entropy_backward | dloss, logits, target, m, s, dlogits; the same | softmax − one-hot |
| bn_relu_softmax | x, mean, var, weight, bias, y; a warp per row | other layers while loading |
| softmax_dropout_backward | dz, x, m, s, p, seed, dx; a warp per row | a mask drawn again |

`logits`, `x` and their gradients are float32 of (n_rows, n_cols); `loss`, `m` and `s` have an
element per row, the parameters of batch normalisation one per column. `target` is int64, a class or
IGNORED. Rows of `bn_relu_softmax` have at most 32 · SLOTS numbers.
"""

import math

import numpy as np

from course_lib import cuda, reference
from course_lib.reference.functions.fused_softmax import random_numbers
from course_lib.runtime.intrinsics import online_add, warp_max, warp_online, warp_sum
from course_lib.runtime.intrinsics.philox import philox_one
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import pair_of
from course_lib.teach.checking.work import Shares, Spares
from course_lib.teach.exercise import Exercise, Tolerance, case

IGNORED = -100  # a target that means: this row counts nothing
EPS = np.float32(1e-5)
SLOTS = 4  # numbers of a row that each lane holds
ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INF = np.float32(-np.inf)
TWO_16, ROUND = np.float32(2**16), np.float32(0.5)


# ---- predict_fusion --------------------------------------------------------------------------


def predict_fusion(n, n_operations, flops, gbps, tflops, launch_us):
    memory_us = 8 * n / (gbps * 1e3)  # n numbers read and n written; GB/s is 1000 bytes per µs
    arithmetic_us = flops * n / (tflops * 1e6)
    chain = n_operations * (launch_us + max(memory_us, arithmetic_us))
    return chain, launch_us + max(memory_us, n_operations * arithmetic_us)


def _fusion_reference(n, n_operations, flops, gbps, tflops, launch_us):
    def seconds(n_flops):
        return launch_us * 1e-6 + max(2 * 4 * n / (gbps * 1e9), n_flops * n / (tflops * 1e12))

    return seconds(flops) * n_operations * 1e6, seconds(flops * n_operations) * 1e6


def _fusion_cases(rng):
    chains = [
        (0, 3, 5, 4000, 60, 2),
        (1, 1, 1, 1000, 10, 1),
        (25_600, 3, 5, 4000, 60, 2),
        (1_000_000, 2, 100, 4000, 60, 2),
        (1_000_000, 2, 400, 4000, 60, 2),
        (33_000_000, 3, 5, 4000, 60, 2),
        (33_000_000, 4, 60, 4000, 60, 3),
        (5_000_000, 1, 1000, 900, 14, 5),
        (7_000_000, 6, 20, 320, 8, 4),
        (drawn(rng, 10**6, 10**7), drawn(rng, 7, 12), drawn(rng, 2, 9), 500, 70, 6),
        (drawn(rng, 10**8, 10**9), drawn(rng, 70, 99), drawn(rng, 900, 2000), 70_000, 5000, 90),
    ]
    return [
        case(
            1, 1,
            n=np.int64(n), n_operations=np.int64(k), flops=np.int64(flops),
            gbps=np.float64(gbps * (1 + rng.random() / 8)),
            tflops=np.float64(tflops * (1 + rng.random() / 8)),
            launch_us=np.float64(launch + rng.random() / 8),
        )
        for n, k, flops, gbps, tflops, launch in chains
    ]  # fmt: skip


def _by_name(function, run):
    """Call it as the lesson does: with the array's size, and all else by name."""
    return pair_of(lambda n, *others: function(n, **dict(zip(_NAMES, others, strict=True))), run)


_NAMES = "n_operations", "flops", "gbps", "tflops", "launch_us"

PREDICT_FUSION = Exercise(
    name="predict_fusion",
    title="What fusing will bring",
    solution=predict_fusion,
    kind="function",
    reference=_fusion_reference,
    cases=_fusion_cases,
    tolerance=Tolerance(1e-9, 0.0, "a handful of products and sums of float64 numbers"),
    outputs=("chain_us", "fused_us"),
    dtype=np.float64,
    call=_by_name,
    hints=(
        "Time one kernel of the chain first. It has to move its bytes and to do its arithmetic, "
        "both at the same time. Which of the two decides how long it takes?",
        "A kernel takes `launch_us` and the larger one of two times: bytes / bandwidth and FLOPs / "
        "rate. A GB/s is 1000 bytes per µs, a TFLOP/s is 10⁶ FLOPs per µs. The fused kernel moves "
        "the bytes of one kernel, and does the arithmetic of all of them.",
        "```python\nmemory_us = 8 * n / (gbps * 1e3)\narithmetic_us = flops * n / (tflops * 1e6)\n"
        "chain = n_operations * (launch_us + max(...))\n```",
    ),
)


# ---- cross_entropy ---------------------------------------------------------------------------


@cuda.jit
def cross_entropy(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            largest, total = online_add(largest, total, logits[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row] = largest, total
            loss[row] = ZERO
            if target[row] != IGNORED:
                loss[row] = (largest - logits[row, target[row]]) + math.log(total)


#: Where the largest score of a row is: first, last, in the second round of a warp, and elsewhere.
_PEAKS = (0, -1, 32, 7, 21)


def _logits(rng, shape, kind):
    """Return rows in which it shows when the maximum is missing, wrong, or that of another row."""
    scale, offset = {
        "spread": (8, 0), "above": (4, 1e4), "below": (6, -1e5), "flat": (1e-6, 0)
    }.get(kind, (1, 0))  # fmt: skip
    logits = numbers(rng, shape, scale, offset)
    n_rows, n_cols = shape
    if kind == "rows":  # no two rows alike, and one class so far above that exp of others is 0
        logits += (500 * rng.permutation(n_rows)[:, None]).astype(np.float32)
        peaks = np.arange(0, n_rows, 2), rng.integers(0, n_cols, (n_rows + 1) // 2)
        logits[peaks] += 120 + 100 * rng.random(len(peaks[0]), np.float32)
    if kind == "spike":
        for row in range(n_rows):
            logits[row, _PEAKS[row % len(_PEAKS)] % n_cols] += 6 + 1.5 * row
    return logits


def _targets(rng, logits, kind):
    """Return a class per row, the first and the last among them, and mask others."""
    n_rows, n_cols = logits.shape
    target = rng.integers(0, n_cols, n_rows)
    target[: n_rows // 2][:2] = n_cols - 1
    target[n_rows // 2 :][:1] = 0 if n_rows > 1 else n_cols - 1
    if kind == "masked":
        mask = rng.random(logits.shape) < 0.4
        mask[-1] = True  # all but one
        mask[np.arange(n_rows), target] = False  # the loss of a masked class is infinite
        logits[mask] = -np.inf
    if kind == "ignored":
        target[::2] = IGNORED
    return target


def _cross_entropy_inputs(rng, shape, kind):
    logits = _logits(rng, shape, kind)
    return {"logits": logits, "target": _targets(rng, logits, kind)}


_ROWS = [
    ((0, 3), "plain", 1, 32),
    ((1, 1), "above", 1, 32),
    ((2, 1), "plain", 1, 64),
    ((1, 2), "below", 1, 64),
    ((3, 5), "ignored", 1, 96),
    ((5, 31), "plain", 2, 96),
    ((1, 33), "spread", 1, 32),
    ((2, 40), "masked", 2, 32),
    ((3, 7), "above", 2, 64),
    ((5, 70), "spike", 2, 96),
    ((4, 64), "below", 1, 128),
    ((1, 200), "flat", 1, 32),
    ((4, 9), "rows", 1, 128),
]


def _rows(rng):
    """Return the launches above, and one that is larger than all of them and drawn."""
    many = (drawn(rng, 33, 40), 3), "ignored", 4, 320
    long = (1, drawn(rng, 1030, 1060)), "plain", 1, 32
    return [*_ROWS, many, long, ((drawn(rng, 9, 12), drawn(rng, 257, 300)), "rows", 1, 512)]


def _cross_entropy_cases(rng):
    return [
        case(grid, block, **_cross_entropy_inputs(rng, shape, kind))
        for shape, kind, grid, block in _rows(rng)
    ]


def _pair(logits):
    """Return the largest number of each row, and the sum of exp(x − largest)."""
    m = logits.max(axis=1, initial=-np.inf)
    return m, np.exp(logits - m[:, None]).sum(axis=1)


def _cross_entropy_reference(logits, target):
    loss = reference.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
    return loss, *_pair(logits)


CROSS_ENTROPY = Exercise(
    name="cross_entropy",
    title="A loss without probabilities",
    solution=cross_entropy,
    reference=_cross_entropy_reference,
    cases=_cross_entropy_cases,
    tolerance=Tolerance(
        2e-5, 1e-6, "a few hundred additions are rounded; so is log of a sum that is nearly 1"
    ),
    outputs=("loss", "m", "s"),
    dtype=np.float32,
    once=True,
    about=(Spares("logits"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "Only two numbers of a row are needed, and lesson 3 finds both in one pass. Then the loss "
        "is a matter of a single thread.",
        "`online_add` for each number that the lane reads, `warp_online` once, and all lanes have "
        "the row's m and s. Lane 0 writes them, and the loss m − x + log s, with the x of the "
        "target. m and x lie close together: subtract them first, then add the logarithm.",
        "```python\nfor col in range(lane, logits.shape[1], 32):\n"
        "    largest, total = online_add(largest, total, ...)\n"
        "largest, total = warp_online(...)\nif lane == 0:\n    ...\n```",
    ),
)


# ---- cross_entropy_backward ------------------------------------------------------------------


@cuda.jit
def cross_entropy_backward(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label, largest, total, scale = target[row], m[row], s[row], dloss[row]
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            if label != IGNORED:
                dx = math.exp(logits[row, col] - largest) / total
                if col == label:
                    dx -= ONE
            dlogits[row, col] = dx * scale


def _cross_entropy_gradients(rng, shape, kind):
    found = _cross_entropy_inputs(rng, shape, kind)
    m, s = _pair(found["logits"].astype(np.float64))
    dloss = numbers(rng, shape[0], 2.0, 3.0)
    dloss[3:4] = 0  # a row that the loss leaves out
    return {"dloss": dloss, **found, "m": m.astype(np.float32), "s": s.astype(np.float32)}


def _cross_entropy_backward_cases(rng):
    return [
        case(grid, block, **_cross_entropy_gradients(rng, shape, kind))
        for shape, kind, grid, block in _rows(rng)
    ]


def _dlogits_reference(dloss, logits, target, m, s):
    one_hot = np.arange(logits.shape[1]) == target[:, None]
    with np.errstate(over="ignore"):  # where the check tries what another m would change
        y = np.exp(logits - m[:, None]) / s[:, None]
    return np.where(target[:, None] == IGNORED, 0.0, dloss[:, None] * (y - one_hot))


def _losses(logits, target, m, s):
    target = target.astype(np.int64)  # tests pass all inputs as float64
    return reference.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")


CROSS_ENTROPY_BACKWARD = Exercise(
    name="cross_entropy_backward",
    title="Softmax minus one-hot",
    solution=cross_entropy_backward,
    reference=_dlogits_reference,
    cases=_cross_entropy_backward_cases,
    tolerance=Tolerance(
        1e-5, 3e-6, "x − m, exp and a division are rounded, then a difference with 1 is; dloss "
        "multiplies it by up to 20",
    ),  # fmt: skip
    outputs=("dlogits",),
    dtype=np.float32,
    once=True,
    primal=_losses,
    about=(Shares(evenly=True),),
    forbids=("float64-promotion",),
    hints=(
        "Each element has a formula of its own: no sum over the row is left to be found. What do "
        "you need of the row?",
        "y = exp(x − m) / s, minus 1 at the target's column, and all of it times the row's "
        "`dloss`. An ignored row has the loss 0, whatever its scores: its gradient is 0, and it "
        "has to be written.",
        "```python\ndx = ZERO\nif label != IGNORED:\n    dx = math.exp(...) / ...\n"
        "    if col == ...:\n        dx -= ONE\n```",
    ),
)


# ---- bn_relu_softmax -------------------------------------------------------------------------


@cuda.jit
def bn_relu_softmax(x, mean, var, weight, bias, y):
    values = cuda.local.array(SLOTS, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for k in range(SLOTS):
            col = 32 * k + lane
            values[k] = MINUS_INF
            if col < x.shape[1]:
                scale = weight[col] / math.sqrt(var[col] + EPS)
                values[k] = max((x[row, col] - mean[col]) * scale + bias[col], ZERO)
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


def _bn_inputs(rng, shape, kind):
    """Return rows and the parameters of their columns, no two of them alike."""
    n_cols = shape[1]
    mean = numbers(rng, n_cols, 2.0, {"far": 5000.0, "below": -3.0}.get(kind, 0.0))
    var = (0.1 + 3 * rng.random(n_cols)).astype(np.float32)
    weight = (rng.choice([-1.0, 1.0], n_cols) * (0.5 + 2 * rng.random(n_cols))).astype(np.float32)
    bias = numbers(rng, n_cols, 1.0, 0.5)
    if kind == "still":  # features that hardly vary: eps decides
        var[::2] = (1e-6 * (1 + rng.random(n_cols)[::2])).astype(np.float32)
        var[:1] = 0
    if kind == "off":  # ReLU leaves nothing: all are equal
        bias -= np.float32(60)
    x = mean + np.sqrt(var) * numbers(rng, shape, {"wide": 40.0}.get(kind, 1.5))
    return {"x": x.astype(np.float32), "mean": mean, "var": var, "weight": weight, "bias": bias}


def _bn_cases(rng):
    launches = [
        ((0, 3), "plain", 1, 32),
        ((1, 1), "plain", 1, 32),
        ((3, 2), "plain", 1, 96),
        ((2, 5), "still", 1, 64),
        ((2, 7), "far", 2, 32),
        ((3, 31), "off", 1, 96),
        ((1, 33), "plain", 1, 32),
        ((5, 20), "wide", 2, 96),
        ((2, 64), "below", 1, 64),
        ((3, 97), "wide", 3, 32),
        ((1, 128), "plain", 1, 32),
        ((drawn(rng, 17, 20), 3), "plain", 2, 320),
        ((drawn(rng, 10, 14), drawn(rng, 97, 127)), "plain", 1, 512),
    ]
    return [case(grid, block, **_bn_inputs(rng, *each)) for *each, grid, block in launches]


def _bn_reference(x, mean, var, weight, bias):
    with np.errstate(invalid="ignore"):  # where the check tries what another var would change
        return reference.bn_relu_softmax(x, mean, var, weight, bias, float(EPS))


BN_RELU_SOFTMAX = Exercise(
    name="bn_relu_softmax",
    title="Three layers in one kernel",
    solution=bn_relu_softmax,
    reference=_bn_reference,
    cases=_bn_cases,
    tolerance=Tolerance(
        1e-4, 1e-30, "z is rounded, by 1e-5 where it is 100, and exp turns that into a factor"
    ),
    once=True,
    about=(Spares("x"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "It is `softmax_registers` of lesson 4 with a little arithmetic between the load and the "
        "maximum. What must a lane know about a column?",
        "For column `col`: subtract the mean, multiply by `weight / sqrt(var + EPS)`, add the "
        "bias, take `max(…, ZERO)`. Do it only where there is a column: what is not there must "
        "stay minus infinity. ReLU would make a 0 of it, and exp of 0 counts.",
        "```python\nif col < x.shape[1]:\n    scale = weight[col] / math.sqrt(...)\n"
        "    values[k] = max((x[row, col] - ...) * scale + ..., ZERO)\nm = max(m, values[k])\n```",
    ),
)


# ---- softmax_dropout_backward ----------------------------------------------------------------


@cuda.jit(device=True)
def kept(i, seed, p):
    """Whether dropout keeps element `i`: a random 16-bit number below p · 2¹⁶ drops it."""
    number = philox_one(i // 2, np.uint32(seed), np.uint32(0))
    half = number >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF)
    return half >= np.uint32(p * TWO_16 + ROUND)


@cuda.jit
def softmax_dropout_backward(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            if kept(row * n_cols + col, seed, p):
                y = math.exp(x[row, col] - m[row]) / s[row]
                total += y * dz[row, col] * factor
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = ZERO
            if kept(row * n_cols + col, seed, p):
                dy = dz[row, col] * factor
            dx[row, col] = y * (dy - total)


def _mask(shape, p, seed):
    n = int(np.prod(shape))
    words = random_numbers(-(-n // 2), int(seed), 0)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=1).ravel()[:n]
    return halves.reshape(shape) >= int(np.float32(p) * TWO_16 + ROUND)


def _dropout_gradient(dz, x, m, s, p, seed):
    dy = dz * _mask(x.shape, p, seed) / (1 - p)
    with np.errstate(over="ignore", invalid="ignore"):  # as above
        y = np.exp(x - m[:, None]) / s[:, None]
        return y * (dy - (y * dy).sum(axis=1, keepdims=True))


def _dropout_inputs(rng, shape, kind, p):
    x = _logits(rng, shape, kind)
    if kind == "masked":
        x[:, 1::3] = -np.inf
    m, s = _pair(x.astype(np.float64))
    return {
        "dz": numbers(rng, shape, 2.0, 3.0), "x": x, "m": m.astype(np.float32),
        "s": s.astype(np.float32), "p": np.float32(p), "seed": np.int64(rng.integers(1, 2**32)),
    }  # fmt: skip


def _dropout_cases(rng):
    launches = [
        ((0, 3), "plain", 0.5, 1, 32),
        ((1, 1), "plain", rng.uniform(0.2, 0.3), 1, 32),
        ((1, 5), "plain", 0.0, 1, 64),
        ((2, 3), "above", 0.5, 1, 64),
        ((3, 10), "spread", 0.25, 1, 96),
        ((2, 33), "masked", 0.5, 2, 32),
        ((3, 31), "below", rng.uniform(0.05, 0.15), 2, 64),
        ((2, 40), "spread", 0.75, 1, 96),
        ((1, drawn(rng, 260, 270)), "flat", 0.5, 1, 32),
        ((drawn(rng, 17, 20), 3), "plain", 0.3, 2, 320),
        ((drawn(rng, 6, 8), drawn(rng, 65, 80)), "rows", rng.uniform(0.3, 0.9), 1, 256),
    ]
    return [case(grid, block, **_dropout_inputs(rng, *each)) for *each, grid, block in launches]


SOFTMAX_DROPOUT_BACKWARD = Exercise(
    name="softmax_dropout_backward",
    title="A mask that is drawn again",
    solution=softmax_dropout_backward,
    reference=_dropout_gradient,
    cases=_dropout_cases,
    tolerance=Tolerance(
        2e-5, 5e-6, "float32 rounds y, then a sum of products, then a difference"
    ),
    outputs=("dx",),
    once=True,
    primal=lambda x, m, s, p, seed: (
        reference.softmax(x) * _mask(x.shape, p, seed) / (1 - p) if x.size else x
    ),
    call=lambda kernel, run: run.launch(
        kernel, run.dz, run.x, run.m, run.s, run.p, run.seed, run.dx
    ),
    about=(Shares(evenly=True),),
    forbids=("float64-promotion",),
    hints=(
        "Backwards means: in the reverse order. First through dropout, from `dz` to `dy`; then "
        "through softmax, from `dy` to `dx`, which is `softmax_backward` of lesson 4.",
        "`dy` is `dz * factor` where `kept(i, seed, p)`, else 0, with i = row · n_cols + col, as "
        "in the forward pass. The mask is asked for in both loops. `y` is not given: it is "
        "`exp(x − m) / s`, for dropped elements as well.",
        "```python\ni = row * n_cols + col\nif kept(i, seed, p):\n    total += y * ...\n```\n"
        "In the second loop: `dx[row, col] = y * (dy - total)`, with `dy` 0 where it was dropped.",
    ),
)
