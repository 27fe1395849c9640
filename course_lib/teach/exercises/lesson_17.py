"""Lesson 17: two pathways, and what a network makes of them.

| exercise | it gets | what is new |
|---|---|---|
| brightness | x of any layout, flat, and its three steps | one kernel for every layout |
| integrate | three scalars, three maps of (n,) | weights that a block shares |
| integrate_backward | dy, the weights, the maps; blocks of whole warps | three sums in one pass |
| fold_batch_norm | a 1×1 convolution and a batch norm; a block per channel | what weights decide |
| two_streams | tasks, their streams, times and events | what overlaps, and what waits |
| checkpoint_memory | bytes that enter each stage, and bytes inside | a peak, not a sum |

Arrays of kernels are float32. `weight` of `brightness` and of `integrate_backward` is (3,), that of
`fold_batch_norm` (channels after, channels before). Maps are flat: a number of a map is one place
of one channel of one image. `partial` has a row of three for each block.
"""

import math
from functools import cache

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import block_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import with_plain_numbers
from course_lib.teach.checking.work import Spares
from course_lib.teach.exercise import Exercise, Tolerance, case

ZERO = np.float32(0)
HUGE = np.float32(1e38)  # three of them still are a number


# ---- brightness ------------------------------------------------------------------------------


@cuda.jit
def brightness(x, step_n, step_c, step_p, weight, y):
    P = y.shape[1]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        n, p = i // P, i % P
        first = n * step_n + p * step_p
        total = ZERO
        for c in range(3):
            total += weight[c] * x[first + c * step_c]
        y[n, p] = total


#: Numbers of a pixel, and places between two planes, at most.
MORE, GAP = 7, 4
FAR = 530  # half of what lies between two planes of a large picture


def _brightness_reference(x, step_n, step_c, step_p, weight, n_images, n_pixels):
    n, p = np.arange(int(n_images))[:, None], np.arange(int(n_pixels))
    return sum(weight[c] * x[n * step_n + c * step_c + p * step_p] for c in range(3))


def _steps(rng, N, P, layout):
    """(elements in all, step_n, step_c, step_p) of a layout; how many there are is not drawn."""
    more, gap = drawn(rng, 4, MORE), drawn(rng, 1, GAP)
    return {
        "first": (3 * N * P, 3 * P, P, 1),  # channels first
        "last": (3 * N * P, 3 * P, 1, 3),  # channels last
        "more": (MORE * N * P, more * P, 1, more),  # channels last, and some that nobody reads
        "gaps": (N * 3 * (P + GAP), 3 * (P + gap), P + gap, 1),  # planes begin at round places
        "planes": (3 * N * P, P, N * P, 1),  # all reds, then all greens, then all blues
        "far": (6 * N * FAR, 6 * FAR, 2 * FAR, 1),  # of a picture so large that these are a corner
    }[layout]


def _of_one_sign(rng, shape, scale):
    """Numbers to be added along the first axis: no two take each other away, so that a result is
    as exact as each of them."""
    return numbers(rng, shape, scale, 3 * scale) * rng.choice([-1, 1], shape[1:]).astype(np.float32)


def _extremes(rng):
    """Three columns of numbers to be added. In each all have one sign: infinity minus infinity is
    nothing."""
    return (rng.uniform(0.9, 1.0, (3, 3)) * (-HUGE, HUGE, -np.inf)).astype(np.float32)


def _pixels(rng, N, P, layout, kind):
    size, *steps = _steps(rng, N, P, layout)
    x = np.full(size, np.nan, dtype=np.float32)  # whoever reads a gap, spreads it
    at = _places(N, P, *steps)
    scale = {"faint": 1e-6, "large": 1e6}.get(kind, 1.0)
    values = _of_one_sign(rng, (3, N, P), scale)
    if kind == "extreme":
        values.reshape(3, -1)[:, rng.choice(N * P, 3, replace=False)] = 3 * _extremes(rng)
    x[at] = values
    share = rng.dirichlet([4.0, 7.0, 2.0]) * rng.uniform(0.9, 0.99)
    share *= -1 if kind == "negative" else 1
    return {"x": x, **dict(zip(("step_n", "step_c", "step_p"), map(np.int64, steps), strict=True)),
            "weight": share.astype(np.float32)}  # fmt: skip


def _places(N, P, step_n, step_c, step_p):
    c, n, p = np.ogrid[:3, :N, :P]
    return n * step_n + c * step_c + p * step_p


def _brightness_cases(rng):
    launches = [
        ((1, 1), "first", "plain", 1, 32),
        ((0, 4), "last", "plain", 1, 32),
        ((1, 2), "last", "plain", 1, 32),
        ((2, 3), "first", "plain", 1, 4),
        ((1, 5), "more", "extreme", 1, 8),
        ((3, 2), "planes", "plain", 2, 32),
        ((2, 7), "gaps", "faint", 1, 32),
        ((3, 9), "last", "large", 2, 8),
        ((2, 16), "first", "extreme", 1, 32),
        ((2, 33), "more", "plain", 1, 1),
        ((1, 70), "last", "extreme", 3, 32),
        ((3, 40), "planes", "plain", 1, 96),
        ((5, 61), "gaps", "negative", 2, 64),
        ((2, 4), "far", "plain", 1, 32),
        ((drawn(rng, 11, 12), drawn(rng, 105, 120)), "more", "plain", 2, 256),
    ]
    return [
        case(grid, block, **_pixels(rng, N, P, layout, kind), n_images=np.int64(N),
             n_pixels=np.int64(P))
        for (N, P), layout, kind, grid, block in launches
    ]  # fmt: skip


BRIGHTNESS = Exercise(
    name="brightness",
    title="Brightness, in whatever layout",
    solution=brightness,
    reference=_brightness_reference,
    cases=_brightness_cases,
    tolerance=Tolerance(1e-6, 0.0, "three products and two sums are rounded to float32"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.x, run.step_n, run.step_c, run.step_p, run.weight, run.y
    ),
    once=True,
    about=(Spares("x"),),
    forbids=("float64-promotion",),
    hints=(
        "Forget the layouts. If you stand at an element and want the same pixel of the next "
        "channel, how far do you go? And to the next pixel? To the next image?",
        "Result i belongs to image `i // P` and pixel `i % P`. Its red lies at "
        "`n * step_n + p * step_p`, green `step_c` further, and blue `2 * step_c` further.",
        "```python\nn, p = i // P, i % P\nfirst = n * step_n + ...\ntotal = ZERO\n"
        "for c in range(3):\n    total += weight[c] * x[first + ...]\ny[n, p] = total\n```",
    ),
)


# ---- integrate -------------------------------------------------------------------------------


@cuda.jit
def integrate(scalars, colour, brightness, integrated, y):
    weight = cuda.shared.array(3, np.float32)
    if cuda.threadIdx.x == 0:
        a, b, c = scalars[0], scalars[1], scalars[2]
        top = max(a, max(b, c))
        a, b, c = math.exp(a - top), math.exp(b - top), math.exp(c - top)
        total = a + b + c
        weight[0], weight[1], weight[2] = a / total, b / total, c / total
    cuda.syncthreads()
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = weight[0] * colour[i] + weight[1] * brightness[i] + weight[2] * integrated[i]


def _softmax(scalars):
    e = np.exp(scalars - scalars.max())
    return e / e.sum()


def _integrate_reference(scalars, colour, brightness, integrated):
    return _softmax(scalars) @ np.stack([colour, brightness, integrated])


#: Scalars as they may come: as they begin, learned, far from 0, a pathway shut, all but one shut.
_SCALARS = {
    "start": (0.5, 0.5, 0.0),
    "plain": (0.3, -0.9, 1.1),
    "above": (1e4, 1e4 + 1.5, 1e4 - 0.7),
    "below": (-3e4, -3e4 - 1.1, -3e4 + 0.4),
    "shut": (0.4, 1.2, -np.inf),
    "shut first": (-np.inf, 1.2, 0.4),
    "shut second": (0.9, -np.inf, -np.inf),
    "alone": (-3e38, 3e38, 0.0),
    "tiny": (1e-6, -2e-6, 3e-6),
    "first": (150.0, -1.0, 0.5),
    "second": (0.7, 150.0, 1.0),
    "third": (1.0, 0.2, 150.0),
}


def _maps(rng, n, kind):
    scalars = np.array(_SCALARS.get(kind, _SCALARS["plain"])) * rng.uniform(0.97, 1.0)
    scale = 1e-6 if kind == "faint" else 1.0
    names = "colour", "brightness", "integrated"
    maps = dict(zip(names, _of_one_sign(rng, (3, n), scale), strict=True))
    if kind == "extreme":
        for each, values in zip(maps.values(), _extremes(rng), strict=True):
            each[:3] = values
    return {"scalars": scalars.astype(np.float32)} | maps


def _integrate_cases(rng):
    launches = [
        (1, "start", 1, 32),
        (0, "plain", 1, 32),
        (2, "plain", 1, 32),
        (3, "extreme", 1, 4),
        (5, "above", 1, 8),
        (4, "first", 1, 32),
        (7, "below", 2, 32),
        (6, "second", 2, 3),
        (9, "third", 1, 32),
        (31, "shut", 1, 32),
        (32, "shut first", 1, 32),
        (33, "shut second", 1, 32),
        (40, "alone", 2, 16),
        (64, "tiny", 2, 32),
        (65, "plain", 1, 1),
        (97, "faint", 3, 32),
        (150, "extreme", 1, 48),
        (drawn(rng, 1030, 1200), "plain", 2, 288),
    ]
    return [case(grid, block, **_maps(rng, n, kind)) for n, kind, grid, block in launches]


INTEGRATE = Exercise(
    name="integrate",
    title="Three maps, weighed and added",
    solution=integrate,
    reference=_integrate_reference,
    cases=_integrate_cases,
    tolerance=Tolerance(
        5e-6, 0.0, "three exponentials, a quotient, three products and two sums are rounded"
    ),
    dtype=np.float32,
    once=True,
    about=(Spares("scalars", point=True),),
    forbids=("float64-promotion",),
    hints=(
        "The three weights are the same for every number of the maps. Who computes them, where "
        "can all threads of a block see them, and when may they look?",
        "One thread of each block takes the softmax of the three scalars, maximum first, and "
        "leaves the weights in shared memory. Then comes a barrier, and after it a grid-stride "
        "loop with one product for each map.",
        "```python\nif cuda.threadIdx.x == 0:\n    a, b, c = scalars[0], ...\n"
        "    top = max(a, max(b, c))\n    a, b, c = math.exp(a - top), ...\n"
        "    weight[0], ... = a / total, ...\ncuda.syncthreads()\n```",
    ),
)


# ---- integrate_backward ----------------------------------------------------------------------


@cuda.jit
def integrate_backward(
    dy, weight, colour, brightness, integrated, dcolour, dbrightness, dintegrated, partial
):
    scratch = cuda.shared.array(32, np.float32)
    a, b, c = ZERO, ZERO, ZERO
    for i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):
        g = dy[i]
        dcolour[i] = weight[0] * g
        dbrightness[i] = weight[1] * g
        dintegrated[i] = weight[2] * g
        a += g * colour[i]
        b += g * brightness[i]
        c += g * integrated[i]
    a, b, c = block_sum(a, scratch), block_sum(b, scratch), block_sum(c, scratch)
    if cuda.threadIdx.x == 0:
        row = cuda.blockIdx.x
        partial[row, 0], partial[row, 1], partial[row, 2] = a, b, c


def _integrate_backward_reference(dy, weight, colour, brightness, integrated, blocks, threads):
    maps = np.stack([colour, brightness, integrated])
    block_of = np.arange(dy.size) // int(threads) % int(blocks)
    partial = np.zeros((int(blocks), 3))
    np.add.at(partial, block_of, (maps * dy).T)
    return (*(w * dy for w in weight), partial)


def _integrate_backward_cases(rng):
    launches = [
        (1, "plain", 1, 32),
        (0, "plain", 2, 32),
        (2, "plain", 1, 32),
        (5, "shut", 1, 64),
        (33, "faint", 1, 32),
        (40, "large", 2, 32),
        (70, "plain", 1, 32),
        (90, "plain", 4, 32),
        (100, "shut", 2, 64),
        (150, "large", drawn(rng, 2, 4), 32 * drawn(rng, 1, 3)),
        (drawn(rng, 1030, 1090), "negative", 1, 544),
    ]
    return [
        case(grid, block, **_integrate_backward_inputs(rng, n, kind), blocks=np.int64(grid),
             threads=np.int64(block))
        for n, kind, grid, block in launches
    ]  # fmt: skip


def _integrate_backward_inputs(rng, n, kind):
    scale = {"faint": 1e-6, "large": 1e6}.get(kind, 1.0)
    weight = rng.dirichlet([5.0, 3.0, 2.0])
    if kind == "shut":
        weight[2], weight[0] = 0.0, weight[0] + weight[2]
    if kind == "negative":  # of no softmax, but weights all the same
        weight[1] *= -1
    names = "colour", "brightness", "integrated"
    maps = (numbers(rng, n, scale, mean * scale) for mean in (2.0, -3.0, 5.0))
    given = {"dy": numbers(rng, n, 1.0, 1.5), "weight": weight.astype(np.float32)}
    return given | dict(zip(names, maps, strict=True))


INTEGRATE_BACKWARD = Exercise(
    name="integrate_backward",
    title="Back to three maps, and to three weights",
    solution=integrate_backward,
    reference=_integrate_backward_reference,
    cases=_integrate_backward_cases,
    tolerance=Tolerance(
        1e-6, 3e-6, "products are rounded once, and each of a thousand of additions", scaled=True
    ),
    outputs=("dcolour", "dbrightness", "dintegrated", "partial"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.dy, run.weight, run.colour, run.brightness, run.integrated, run.dcolour,
        run.dbrightness, run.dintegrated, run.partial,
    ),
    once=True,
    repeatable=True,
    about=(Spares("dy"), Spares("colour"), Spares("brightness"), Spares("integrated")),
    forbids=("float64-promotion",),
    hints=(
        "Two questions, in one loop. What is the slope of y with respect to one number of a map? "
        "And in how many numbers of y does one weight take part?",
        "Each number of `dy` goes to three gradients, times the map's weight. On the way, three "
        "variables of the thread add up `dy` times each map. After the loop each of them goes "
        "through `block_sum`, which all threads must call; one thread writes the block's row.",
        "```python\nfor i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):\n    g = dy[i]\n"
        "    dcolour[i] = weight[0] * g\n    ...\n    a += g * colour[i]\n"
        "a, b, c = block_sum(a, scratch), ...\n```",
    ),
)


# ---- fold_batch_norm -------------------------------------------------------------------------


@cuda.jit
def fold_batch_norm(weight, bias, gamma, beta, mean, var, eps, folded, shift):
    k = cuda.blockIdx.x
    scale = gamma[k] / math.sqrt(var[k] + eps)
    for c in range(cuda.threadIdx.x, weight.shape[1], cuda.blockDim.x):
        folded[k, c] = scale * weight[k, c]
    if cuda.threadIdx.x == 0:
        shift[k] = beta[k] + scale * (bias[k] - mean[k])


def _fold_reference(weight, bias, gamma, beta, mean, var, eps):
    with np.errstate(invalid="ignore"):  # only a cause that is looked for gets below 0
        scale = gamma / np.sqrt(var + eps)
    return scale[:, None] * weight, beta + scale * (bias - mean)


def _fold_cases(rng):
    launches = [
        ((1, 1), "plain", 32),
        ((1, 0), "plain", 32),
        ((2, 1), "plain", 1),
        ((1, 3), "plain", 32),
        ((3, 2), "dead", 32),
        ((2, 5), "far", 4),
        ((4, 3), "plain", 33),
        ((3, 9), "faint", 4),
        ((2, 33), "wide", 32),
        ((5, 40), "dead", 16),
        ((5, 110), "faint", 64),
        ((drawn(rng, 3, 4), drawn(rng, 1030, 1060)), "plain", 256),
    ]
    return [case(K, block, **_norm(rng, K, C, kind)) for (K, C), kind, block in launches]


def _norm(rng, K, C, kind):
    scale = {"faint": 1e-6, "far": 1e4, "wide": 1e18}.get(kind, 1.0)
    var = scale**2 * rng.uniform(0.3, 3.0, K)
    if kind == "dead":  # a channel that is the same everywhere
        var[::2] *= 1e-20
    # Signs by which a channel's sums take nothing away from each other: so they are exact enough.
    sign = rng.choice([-1.0, 1.0], K)
    gamma = rng.uniform(0.4, 2.0, K) * rng.choice([-1.0, 1.0], K)
    given = {
        "weight": numbers(rng, (K, C), 1.0, 0.3),
        "bias": sign * scale * rng.uniform(0.5, 2.0, K),
        "gamma": gamma,
        "beta": sign * np.sign(gamma) * rng.uniform(0.3, 3.0, K),
        "mean": -sign * scale * rng.uniform(0.5, 4.0, K),
        "var": var,
        "eps": 1e-5 if kind == "dead" else rng.uniform(1e-4, 1e-3),
    }
    return {name: np.asarray(x).astype(np.float32)[()] for name, x in given.items()}


FOLD_BATCH_NORM = Exercise(
    name="fold_batch_norm",
    title="A batch norm inside a convolution",
    solution=fold_batch_norm,
    reference=_fold_reference,
    cases=_fold_cases,
    tolerance=Tolerance(
        2e-6, 0.0, "a root, a quotient, and three more operations are rounded to float32"
    ),
    outputs=("folded", "shift"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.weight, run.bias, run.gamma, run.beta, run.mean, run.var, run.eps, run.folded,
        run.shift,
    ),
    once=True,
    about=(Spares("weight"),),
    forbids=("float64-promotion",),
    hints=(
        "Write the batch norm's formula, and put the convolution's in place of its x. What stands "
        "before the inputs then, and what is left over?",
        "All weights of output channel k are multiplied by the same number, gamma over the root of "
        "(variance + eps). The new bias is `beta` and that number times (bias − mean). Threads of "
        "a block share the weights; one of them writes the bias.",
        "```python\nscale = gamma[k] / math.sqrt(...)\n"
        "for c in range(cuda.threadIdx.x, weight.shape[1], cuda.blockDim.x):\n"
        "    folded[k, c] = ...\nif cuda.threadIdx.x == 0:\n    shift[k] = beta[k] + ...\n```",
    ),
)


# ---- two_streams -----------------------------------------------------------------------------


def two_streams(stream, ms, waits_for, launch_ms):
    end, free = np.zeros(len(ms)), [0.0, 0.0]
    for i in range(len(ms)):
        begin = max((i + 1) * launch_ms, free[stream[i]])
        if waits_for[i] >= 0:
            begin = max(begin, end[waits_for[i]])
        end[i] = free[stream[i]] = begin + ms[i]
    return end


def _streams_reference(stream, ms, waits_for, launch_ms):
    """By asking each task when it ends, which asks those before it."""

    @cache
    def end(i):
        before = [j for j in range(i) if stream[j] == stream[i]][-1:]
        before += [waits_for[i]] if waits_for[i] >= 0 else []
        return ms[i] + max([(i + 1) * launch_ms, *(end(j) for j in before)])

    return np.array([end(i) for i in range(len(ms))], dtype=np.float64)


def _stream_cases(rng):
    n = drawn(rng, 260, 290)
    tasks = [
        ([], [], 0.0),
        ([0], [-1], 0.0),
        ([1], [-1], 0.01),
        ([0, 1], [-1, -1], 0.0),
        ([0, 1], [-1, 0], 0.01),
        ([0, 0, 1], [-1, -1, -1], 0.02),
        ([0, 1, 0, 1], [-1, -1, 1, 2], 0.0),
        ([1, 1, 1, 0], [-1, -1, -1, 0], 0.01),
        ([0, 1, 0, 1, 0, 1], [-1] * 6, 40.0),  # the host is slower than all of them
        ([0, 0, 0, 0, 0, 1, 1], [-1, -1, -1, -1, -1, -1, 5], 0.1),  # its own stream's event
        ([0, 1, 1, 0, 1, 0, 0], [-1, 0, -1, 2, -1, -1, 4], 0.3),
        ([0, 1, 0, 1, 0, 1, 0, 1], [-1, 0, -1, -1, 3, -1, -1, 6], 1.5),
        ([1, 0, 1, 0, 0, 1, 1, 0, 1, 0], [-1, -1, 1, -1, 2, -1, 4, -1, 3, 8], 0.5),
        (rng.integers(0, 2, n), [int(rng.integers(-1, i)) if i else -1 for i in range(n)], 0.4),
    ]
    return [
        case(
            1, 1, stream=np.array(streams, dtype=np.int64),
            ms=np.asarray(rng.uniform(0.5, 6.0, len(streams))),
            waits_for=np.array(waits, dtype=np.int64),
            launch_ms=np.float64(launch * rng.uniform(0.9, 1.1)),
        )
        for streams, waits, launch in tasks
    ]  # fmt: skip


TWO_STREAMS = Exercise(
    name="two_streams",
    title="When each task of two streams ends",
    solution=two_streams,
    kind="function",
    reference=_streams_reference,
    cases=_stream_cases,
    tolerance=Tolerance(1e-9, 0.0, "a dozen sums of float64 numbers"),
    outputs=("end",),
    dtype=np.float64,
    call=lambda function, run: with_plain_numbers(
        function, run, "stream", "ms", "waits_for", "launch_ms"
    ),
    hints=(
        "A task begins when the last of several things has happened. There are three: what does "
        "the host do, what does its stream do, and what has it been told to wait for?",
        "The host's order number i is there after `(i + 1) * launch_ms`. The stream is free when "
        "its last task has ended, so keep one number for each stream. And if `waits_for[i]` is not "
        "−1, the end of that task counts too. The latest of them is the beginning.",
        "```python\nend, free = np.zeros(len(ms)), [0.0, 0.0]\nfor i in range(len(ms)):\n"
        "    begin = max((i + 1) * launch_ms, free[...])\n    if waits_for[i] >= 0:\n"
        "        begin = max(...)\n    end[i] = free[stream[i]] = ...\n```",
    ),
)


# ---- checkpoint_memory -----------------------------------------------------------------------


def checkpoint_memory(entering, inside):
    whole = entering.sum() + inside.sum()
    held = np.cumsum(entering)
    return whole, (held + inside).max(initial=0)


def _memory_reference(entering, inside):
    """By walking back through the stages, and looking at what is there."""
    alive, peak = list(entering), 0
    for computed_again in inside[::-1]:
        peak = max(peak, sum(alive) + computed_again)
        alive.pop()
    return np.float64(sum(entering) + sum(inside)), np.float64(peak)


def _memory_cases(rng):
    n = drawn(rng, 260, 290)
    shapes = [
        ([], []),
        ([5], [0]),
        ([40], [300]),
        ([40, 20], [300, 100]),
        ([40, 60], [100, 300]),
        ([40, 0, 10], [900, 10, 10]),
        ([10, 20, 30, 40], [40, 30, 20, 10]),
        ([64, 64, 32, 16, 8], [700, 720, 400, 200, 90]),
        ([1] * 12, [5, 9, 2, 4, 3, 8, 7, 1, 6, 2, 9, 3]),
        ([8, 4, 2, 1, 64], [80, 40, 20, 10, 160]),
        (rng.integers(1, 40, n), rng.integers(1, 400, n)),
    ]
    return [
        case(1, 1, **{
            name: np.array([n * int(rng.integers(90_000, 110_000)) for n in each], dtype=np.int64)
            for name, each in (("entering", entering), ("inside", inside))
        })
        for entering, inside in shapes
    ]  # fmt: skip


def _pair_of_arrays(function, run):
    """Call a function of two arrays that returns two numbers, whole ones or not."""
    found = function(run.entering, run.inside)
    if not isinstance(found, tuple):
        return found
    return tuple(
        np.float64(each) if isinstance(each, int | float | np.number) else each for each in found
    )


CHECKPOINT_MEMORY = Exercise(
    name="checkpoint_memory",
    title="What checkpointing keeps",
    solution=checkpoint_memory,
    kind="function",
    reference=_memory_reference,
    cases=_memory_cases,
    tolerance=Tolerance(0.0, 0.0, "bytes are counted, and counting is exact"),
    outputs=("whole", "peak"),
    dtype=np.float64,
    call=_pair_of_arrays,
    hints=(
        "Walk backwards. When the gradient arrives at stage k, which stages have not been visited "
        "yet, and what is kept of each of them? What is made again just now?",
        "Without checkpointing all is there when the backward pass begins: both sums. With it, at "
        "stage k there is what enters stages 0 to k, and what is inside stage k alone. The largest "
        "of these is the peak; `np.cumsum` gives the first part for all k.",
        "```python\nwhole = entering.sum() + ...\nheld = np.cumsum(entering)\n"
        "return whole, (held + ...).max(initial=0)\n```",
    ),
)
