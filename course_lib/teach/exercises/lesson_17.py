"""Lesson 17: two pathways, and what a network makes of them.

| exercise | it gets | what is new |
|---|---|---|
| brightness | x of any layout, flat, and its three steps | one kernel for every layout |
| integrate | three scalars, three maps of (n,) | weights that a block shares |

Arrays are float32. `weight` is (3,). In `integrate` and back, maps are flat: a number of a map is
one place of one channel of one image.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.teach.cases import numbers
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


def _brightness_reference(x, step_n, step_c, step_p, weight, n_images, n_pixels):
    n, p = np.arange(int(n_images))[:, None], np.arange(int(n_pixels))
    return sum(weight[c] * x[n * step_n + c * step_c + p * step_p] for c in range(3))


def _steps(N, P, layout):
    """(elements in all, step_n, step_c, step_p) of a layout."""
    return {
        "first": (3 * N * P, 3 * P, P, 1),  # channels first
        "last": (3 * N * P, 3 * P, 1, 3),  # channels last
        "four": (4 * N * P, 4 * P, 1, 4),  # channels last, and a fourth that nobody reads
        "gaps": (N * (3 * P + 7), 3 * P + 7, P + 2, 1),  # each plane begins at a round place
        "planes": (3 * N * P, P, N * P, 1),  # all reds, then all greens, then all blues
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
    size, *steps = _steps(N, P, layout)
    x = np.full(size, np.nan, dtype=np.float32)  # whoever reads a gap, spreads it
    at = _places(N, P, *steps)
    scale = {"faint": 1e-6, "large": 1e6}.get(kind, 1.0)
    values = _of_one_sign(rng, (3, N, P), scale)
    if kind == "extreme":
        values.reshape(3, -1)[:, rng.choice(N * P, 3, replace=False)] = 3 * _extremes(rng)
    x[at] = values
    share = rng.dirichlet([4.0, 7.0, 2.0]) * rng.uniform(0.9, 0.99)
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
        ((1, 5), "four", "extreme", 1, 8),
        ((3, 2), "planes", "plain", 2, 32),
        ((2, 7), "gaps", "faint", 1, 32),
        ((3, 9), "last", "large", 2, 8),
        ((2, 16), "first", "extreme", 1, 32),
        ((2, 33), "four", "plain", 1, 1),
        ((1, 70), "last", "extreme", 3, 32),
        ((3, 40), "planes", "plain", 1, 96),
        ((5, 61), "gaps", "plain", 2, 64),
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
        (40, "alone", 2, 16),
        (64, "tiny", 2, 32),
        (65, "plain", 1, 1),
        (97, "faint", 3, 32),
        (150, "extreme", 1, 48),
        (700, "plain", 2, 96),
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
    reads={"scalars": 3},
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
