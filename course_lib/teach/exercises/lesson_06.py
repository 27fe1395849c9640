"""Lesson 06: squeeze-and-excitation, a layer that weighs the channels of a picture.

| exercise | it gets | what is new |
|---|---|---|
| squeeze | x of (N, P, C), mean of (N, C); a block per picture and 32 channels | channels last |
| excite | mean, two layers, hidden, gate; a block per picture | two layers in one kernel |
| scale_channels | x flat, gate, y flat, n_pixels, channels_last; any launch | both layouts |
| squeeze_excite_fused | x of (N, C, P), …; any number of blocks of a warp | blocks that wait |
| squeeze_excite_backward | dy, x, …, dx, dbias1, dbias2; a block per picture | its gradient |

All arrays are float32, but for the counters `done`. P is the number of pixels, H · W;
R the length of the hidden vector, MOST at most in `excite` and a warp's 32 in
`squeeze_excite_fused`.
"""

import math

import numpy as np

from course_lib import cuda, simulator
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.work import Shares, Spares, Uses
from course_lib.teach.exercise import Exercise, Tolerance, case
from course_lib.teach.exercises.lesson_01 import added_exactly

MOST = 128  # hidden numbers
ALL = 0xFFFFFFFF
ZERO, ONE = np.float32(0), np.float32(1)


# ---- squeeze ---------------------------------------------------------------------------------


@cuda.jit
def squeeze(x, mean):
    partial = cuda.shared.array((8, 32), np.float32)
    _, P, C = x.shape
    warp, lane, n_warps = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32, cuda.blockDim.x // 32
    n, c = cuda.blockIdx.x, 32 * cuda.blockIdx.y + lane
    total = ZERO
    if c < C:
        for p in range(warp, P, n_warps):
            total += x[n, p, c]
    partial[warp, lane] = total
    cuda.syncthreads()
    if warp == 0 and c < C:
        total = ZERO
        for k in range(n_warps):
            total += partial[k, lane]
        mean[n, c] = total / np.float32(P)


def _squeeze_cases(rng):
    launches = [
        ((1, 1, 1), (1, 1), 32),
        ((2, 1, 0), (2, 1), 64),
        ((1, 2, 3), (1, 1), 64),
        ((2, 3, 2), (2, 1), 32),
        ((2, 5, 5), (2, 1), 96),
        ((3, 4, 31), (3, 1), 64),
        ((1, 11, 33), (1, 2), 128),
        ((2, 20, 5), (2, 1), 256),
        ((5, 3, 7), (5, 1), 32),
        ((1, 2, drawn(rng, 260, 280)), (1, 9), 64),
        ((1, drawn(rng, 65, 80), drawn(rng, 65, 90)), (1, 3), 256),
    ]
    cases = [
        case(grid, block, x=numbers(rng, shape, *((1.0, 0.0), (1.0, 30.0), (1e-6, 0.0))[k % 3]))
        for k, (shape, grid, block) in enumerate(launches)
    ]
    return [*cases, case((1, 1), 128, x=added_exactly(rng, (1, drawn(rng, 1030, 1060), 2)))]


SQUEEZE = Exercise(
    name="squeeze",
    title="The mean of each channel, channels last",
    solution=squeeze,
    reference=lambda x: x.mean(axis=1),
    cases=_squeeze_cases,
    tolerance=Tolerance(0.0, 1e-6, "float32 rounds each of a few dozen additions", scaled=True),
    outputs=("mean",),
    once=True,
    about=(Spares("x"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "Which numbers lie beside each other in memory? Those of one pixel, channel after channel. "
        "So neighbouring lanes should have neighbouring channels. Who adds up the pixels?",
        "A lane has channel `c` and no other. Warp `w` takes pixels `w`, `w + n_warps`, … of it. "
        "Then `partial[w, lane]` holds the sum of that warp. After a barrier, the first warp adds "
        "up the column of its lane, and divides by `np.float32(P)`.",
        "```python\nfor p in range(warp, P, n_warps):\n    total += x[n, p, c]\n"
        "partial[warp, lane] = total\n...  # all warps must have written\n"
        "if warp == 0 and c < C:\n    ...\n```",
    ),
)


# ---- excite ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def sigmoid(x):
    """1 / (1 + exp(-x)); 0 and not NaN where exp overflows."""
    return ONE / (ONE + math.exp(-x))


@cuda.jit
def excite(mean, weight1, bias1, weight2, bias2, hidden, gate):
    active = cuda.shared.array(MOST, np.float32)
    n, R, C = cuda.blockIdx.x, bias1.size, bias2.size
    for r in range(cuda.threadIdx.x, R, cuda.blockDim.x):
        total = bias1[r]
        for c in range(C):
            total += weight1[r, c] * mean[n, c]
        hidden[n, r] = total
        active[r] = total * sigmoid(total)
    cuda.syncthreads()
    for c in range(cuda.threadIdx.x, C, cuda.blockDim.x):
        total = bias2[c]
        for r in range(R):
            total += weight2[c, r] * active[r]
        gate[n, c] = sigmoid(total)


def _layers(rng, C, R):
    """Return the parameters of both layers, of a size at which no gate is simply 0 or 1."""
    return {
        "weight1": numbers(rng, (R, C), 0.8, 0.2) / np.float32(max(C, 1) ** 0.5),
        "bias1": numbers(rng, R, 0.5, 0.1),
        "weight2": numbers(rng, (C, R), 0.8, 0.3) / np.float32(max(R, 1) ** 0.5),
        "bias2": numbers(rng, C, 0.7, 0.2),
    }


def _sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _excitation(mean, weight1, bias1, weight2, bias2):
    hidden = mean @ weight1.T + bias1
    return hidden, _sigmoid((hidden * _sigmoid(hidden)) @ weight2.T + bias2)


def _excite_cases(rng):
    launches = [
        ((1, 1, 1), 32),
        ((1, 0, 2), 32),
        ((1, 2, 1), 64),
        ((2, 1, 3), 32),
        ((2, 3, 2), 64),
        ((3, 5, 4), 32),
        ((1, drawn(rng, 260, 280), 2), 64),
        ((1, 3, 40), 32),
        ((1, 9, 33), 96),
        ((5, 2, 1), 32),
        ((1, drawn(rng, 11, 12), drawn(rng, 105, 128)), 320),
    ]
    cases = [
        case(n, block, mean=numbers(rng, (n, C), 2.0, 1.0), **_layers(rng, C, R))
        for (n, C, R), block in launches
    ]
    # Numbers of which exp is infinite, above 0 and below, in both layers.
    far = {name: each * np.float32(300) for name, each in _layers(rng, 6, 4).items()}
    return [*cases, case(2, 64, mean=numbers(rng, (2, 6), 2.0, 1.0), **far)]


EXCITE = Exercise(
    name="excite",
    title="Two small layers in one kernel",
    solution=excite,
    reference=_excitation,
    cases=_excite_cases,
    tolerance=Tolerance(
        2e-5, 1e-5, "float32 rounds sums of up to 40 products, and two exponentials"
    ),
    outputs=("hidden", "gate"),
    once=True,
    about=(Uses("shared memory", point=False),),
    forbids=("float64-promotion",),
    hints=(
        "The second layer needs every number of the first. Who has written them, and where can all "
        "threads of the block see them?",
        "First loop: thread `t` makes hidden numbers `t`, `t + blockDim.x`, …: the bias, and a row "
        "of `weight1` times the means. `hidden` gets the number itself, `active` what swish makes "
        "of it. Then a barrier. Second loop: the same with channels, `weight2` and `active`.",
        "```python\ntotal = bias1[r]\nfor c in range(C):\n    total += weight1[r, c] * ...\n"
        "hidden[n, r] = total\nactive[r] = total * sigmoid(...)\n```",
    ),
)


# ---- scale_channels --------------------------------------------------------------------------


@cuda.jit
def scale_channels(x, gate, y, n_pixels, channels_last):
    C = gate.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n = i // (C * n_pixels)
        c = i % C if channels_last else i // n_pixels % C
        y[i] = x[i] * gate[n, c]


def _scale_cases(rng):
    launches = [
        ((1, 1, 1), False, 1, 32),
        ((0, 3, 2), True, 1, 32),
        ((1, 2, 2), True, 1, 32),
        ((1, 2, 3), False, 2, 4),
        ((2, 3, 5), True, 1, 32),
        ((3, 2, 4), False, 1, 32),
        ((2, 5, 3), True, 3, 8),
        ((2, 7, 5), False, 2, 32),
        ((3, 4, 7), True, 1, 96),
        ((3, 5, 8), False, 4, 32),
        ((1, drawn(rng, 260, 280), 2), False, 1, 64),
        ((1, 2, drawn(rng, 260, 280)), True, 2, 32),
        ((drawn(rng, 9, 11), 3, 2), True, 1, 32),
        ((4, drawn(rng, 9, 12), drawn(rng, 30, 40)), bool(rng.integers(2)), 1, 320),
    ]
    return [
        case(
            grid, block, x=numbers(rng, n * C * P, 2.0, 1.0), gate=0.1 + rng.random((n, C), "f"),
            n_pixels=np.int64(P), channels_last=np.bool_(last),
        )
        for (n, C, P), last, grid, block in launches
    ]  # fmt: skip


def _scale_reference(x, gate, n_pixels, channels_last):
    n, C = gate.shape
    if channels_last:
        return (x.reshape(n, n_pixels, C) * gate[:, None]).ravel()
    return (x.reshape(n, C, n_pixels) * gate[:, :, None]).ravel()


SCALE_CHANNELS = Exercise(
    name="scale_channels",
    title="Weigh the channels, in both layouts",
    solution=scale_channels,
    reference=_scale_reference,
    cases=_scale_cases,
    tolerance=Tolerance(1e-7, 0.0, "one product, rounded once to float32"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.x, run.gate, run.y, run.n_pixels, run.channels_last
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "Write down the first twelve elements of a batch with 3 channels of 2 pixels, in both "
        "orders. After how many elements does the channel change? And the picture?",
        "A picture has `C * n_pixels` elements in both orders. Channels first: the channel changes "
        "after `n_pixels` elements. Channels last: it changes with each element. After the last "
        "channel comes the first one again, and that is what `% C` is for.",
        "```python\nn = i // (C * n_pixels)\nc = ... % C if channels_last else ... % C\n"
        "y[i] = x[i] * gate[n, c]\n```",
    ),
)


# ---- squeeze_excite_fused --------------------------------------------------------------------


@cuda.jit(device=True)
def pool_group(x, weight1, partial, n, g):
    """What channels g, g + G, g + 2 G, … of picture n add to its hidden vector."""
    lane, P, share = cuda.threadIdx.x, x.shape[2], ZERO
    for c in range(g, x.shape[1], partial.shape[1]):
        total = ZERO
        for p in range(lane, P, 32):
            total += x[n, c, p]
        mean = warp_sum(total) / np.float32(P)
        if lane < partial.shape[2]:
            share += weight1[lane, c] * mean
    if lane < partial.shape[2]:
        partial[n, g, lane] = share


@cuda.jit(device=True)
def scale_group(x, bias1, weight2, bias2, partial, y, n, g):
    """Weigh the same channels, once all groups of the picture have left their shares."""
    cuda.threadfence()  # what others did before they announced it is seen from here on
    lane, active = cuda.threadIdx.x, ZERO
    if lane < bias1.size:
        total = bias1[lane]
        for k in range(partial.shape[1]):
            total += partial[n, k, lane]
        active = total * sigmoid(total)
    for c in range(g, x.shape[1], partial.shape[1]):
        product = weight2[c, lane] * active if lane < bias1.size else ZERO
        gate = sigmoid(bias2[c] + warp_sum(product))
        for p in range(lane, x.shape[2], 32):
            y[n, c, p] = x[n, c, p] * gate


@cuda.jit
def squeeze_excite_fused(x, weight1, bias1, weight2, bias2, done, partial, y):
    N, G, lane = partial.shape[0], partial.shape[1], cuda.threadIdx.x
    for item in range(cuda.blockIdx.x, 2 * N * G, cuda.gridDim.x):
        n, k = item // (2 * G), item % (2 * G)
        if k < G:
            pool_group(x, weight1, partial, n, k)
            cuda.syncwarp()
            if lane == 0:
                cuda.threadfence()
                cuda.atomic.add(done, n, 1)
        else:
            if lane == 0:
                while cuda.atomic.add(done, n, 0) < G:
                    pass
            cuda.syncwarp()
            scale_group(x, bias1, weight2, bias2, partial, y, n, k - G)


def _fused_cases(rng):
    launches = [
        ((1, 1, 1, 1), 1, 1),
        ((0, 2, 3, 2), 1, 1),
        ((1, 1, 1, 1), 2, 2),
        ((1, 2, 2, 1), 2, 1),
        ((2, 1, 3, 2), 1, 2),
        ((1, 3, 4, 2), 2, 3),
        ((3, 2, 1, 1), 2, 2),
        ((2, 2, 33, 3), 2, 3),
        ((1, 2, drawn(rng, 260, 280), 2), 1, 2),
        ((3, drawn(rng, 10, 12), 2, 3), drawn(rng, 6, 8), 7),
        ((2, drawn(rng, 5, 7), drawn(rng, 70, 80), drawn(rng, 17, 31)), drawn(rng, 3, 4), 3),
    ]
    return [
        case(
            grid, 32, x=numbers(rng, (n, C, P), 2.0, 1.0), **_layers(rng, C, R),
            groups=np.int64(groups),
        )
        for (n, C, P, R), groups, grid in launches
    ]  # fmt: skip


def _block_reference(x, weight1, bias1, weight2, bias2, groups=None):
    mean = x.mean(axis=2)
    return x * _excitation(mean, weight1, bias1, weight2, bias2)[1][:, :, None]


def _with_counters(kernel, run):
    """Launch it with counters at 0, and with poison where the groups leave their shares."""
    n, groups = run.x.shape[0], int(run.groups)
    room = [
        np.zeros(n, np.int32),
        np.full((n, groups, run.bias1.shape[0]), np.nan, np.float32),
    ]
    if not run.engine.simulated:
        room = [cuda.to_device(each) for each in room]
    layers = run.weight1, run.bias1, run.weight2, run.bias2
    # Three blocks never go round that often unless they wait in vain.
    with simulator.options(max_steps=25_000):
        run.launch(kernel, run.x, *layers, *room, run.y)


SQUEEZE_EXCITE_FUSED = Exercise(
    name="squeeze_excite_fused",
    title="Blocks that wait for each other",
    solution=squeeze_excite_fused,
    reference=_block_reference,
    cases=_fused_cases,
    tolerance=Tolerance(
        2e-5, 2e-5, "float32 rounds the means, two short sums of products, two exponentials"
    ),
    dtype=np.float32,
    call=_with_counters,
    once=True,
    about=(Spares("x"),),
    forbids=("float64-promotion",),
    hints=(
        "Three questions. Which picture has item 17, if each has 2 G items? When may others know "
        "that a group has left its share? And who has to look whether all groups have?",
        "Announce: all lanes have written (`cuda.syncwarp()`); then lane 0 alone puts a fence "
        "and adds 1 to `done[n]`. Wait: lane 0 asks for `done[n]`, by adding 0 to it, until it is "
        "G. The others wait for lane 0 at `cuda.syncwarp()`.",
        "```python\nif lane == 0:\n    while cuda.atomic.add(done, n, 0) < ...:\n"
        "        pass\ncuda.syncwarp()\n```",
    ),
)


# ---- squeeze_excite_backward -----------------------------------------------------------------


@cuda.jit(device=True)
def swish_slope(x):
    """The derivative of swish, x · sigmoid(x)."""
    s = sigmoid(x)
    return s * (ONE + x * (ONE - s))


@cuda.jit(device=True)
def product_sum(dy, x, n, c):
    """The sum of dy · x over the pixels of a channel, for all lanes of the warp that calls."""
    total = ZERO
    for p in range(cuda.threadIdx.x % 32, x.shape[2], 32):
        total += dy[n, c, p] * x[n, c, p]
    return warp_sum(total)


@cuda.jit
def squeeze_excite_backward(dy, x, weight1, weight2, hidden, gate, dx, dbias1, dbias2):
    _, C, P = x.shape
    n, warp, lane = cuda.blockIdx.x, cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    for c in range(warp, C, cuda.blockDim.x // 32):
        total = product_sum(dy, x, n, c)
        if lane == 0:
            dbias2[n, c] = total * gate[n, c] * (ONE - gate[n, c])
    cuda.syncthreads()
    for r in range(cuda.threadIdx.x, dbias1.shape[1], cuda.blockDim.x):
        total = ZERO
        for c in range(C):
            total += weight2[c, r] * dbias2[n, c]
        dbias1[n, r] = total * swish_slope(hidden[n, r])
    cuda.syncthreads()
    for c in range(warp, C, cuda.blockDim.x // 32):
        dmean = ZERO
        for r in range(dbias1.shape[1]):
            dmean += weight1[r, c] * dbias1[n, r]
        for p in range(lane, P, 32):
            dx[n, c, p] = dy[n, c, p] * gate[n, c] + dmean / np.float32(P)


def _backward_inputs(rng, shape):
    """Return dy, all that the forward pass had, and what it has saved.

    The biases have a row for each picture here, so that their gradients have as well. The kernel
    gets neither of them.
    """
    n, C, P, R = shape
    x, found = numbers(rng, (n, C, P), 2.0, 1.0), _layers(rng, C, R)
    found["bias1"], found["bias2"] = numbers(rng, (n, R), 0.5, 0.1), numbers(rng, (n, C), 0.7, 0.2)
    saved = _excitation(x.mean(axis=2, dtype=np.float64), *found.values())
    hidden, gate = (each.astype(np.float32) for each in saved)
    dy = numbers(rng, (n, C, P), 1.5, 1.0)
    return {"dy": dy, "x": x, **found, "hidden": hidden, "gate": gate}


def _backward_cases(rng):
    launches = [
        ((1, 1, 1, 1), 32),
        ((2, 1, 1, 1), 32),
        ((1, 1, 2, 2), 64),
        ((1, 2, 3, 1), 32),
        ((2, 3, 2, 2), 64),
        ((2, 2, 5, 3), 32),
        ((1, 3, 33, 2), 96),
        ((1, 1, 2, 70), 64),
        ((1, drawn(rng, 36, 40), 1, 2), 64),
        ((1, 1, drawn(rng, 260, 280), 1), 32),
        ((5, 2, 1, 1), 32),
        ((1, drawn(rng, 11, 12), drawn(rng, 35, 50), drawn(rng, 33, 40)), 320),
    ]
    return [case(shape[0], block, **_backward_inputs(rng, shape)) for shape, block in launches]


def _backward_reference(dy, x, weight1, bias1, weight2, bias2, hidden, gate):
    dlogit = (dy * x).sum(axis=2) * gate * (1 - gate)
    s = _sigmoid(hidden)
    dhidden = (dlogit @ weight2) * s * (1 + hidden * (1 - s))
    dmean = dhidden @ weight1
    return dy * gate[:, :, None] + dmean[:, :, None] / x.shape[2], dhidden, dlogit


SQUEEZE_EXCITE_BACKWARD = Exercise(
    name="squeeze_excite_backward",
    title="The gradient, back through the gate",
    solution=squeeze_excite_backward,
    reference=_backward_reference,
    cases=_backward_cases,
    tolerance=Tolerance(
        2e-5, 2e-6, "float32 rounds three sums of up to a few dozen products", scaled=True
    ),
    outputs=("dx", "dbias1", "dbias2"),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(
        kernel, run.dy, run.x, run.weight1, run.weight2, run.hidden, run.gate, run.dx, run.dbias1,
        run.dbias2,
    ),
    once=True,
    primal=lambda x, weight1, bias1, weight2, bias2, hidden, gate: _block_reference(
        x, weight1, bias1, weight2, bias2
    ),
    about=(Spares("dy"),),
    forbids=("float64-promotion",),
    hints=(
        "Go backwards: scale, second layer, swish, first layer, mean. What each step hands on is "
        "what the step before it needs, and between two of them all threads have to meet.",
        "1. Lane 0 writes `total` times gate · (1 − gate) to `dbias2`. 2. Column r of `weight2` "
        "times that row, times `swish_slope(hidden)`, is `dbias1`. 3. Column c of `weight1` times "
        "that one is `dmean`. 4. dy · gate, and dmean / P added to it.",
        "```python\nfor c in range(C):\n    total += weight2[c, r] * dbias2[n, c]\n"
        "dbias1[n, r] = total * swish_slope(...)\n```\n"
        "The last loop: `dx[n, c, p] = dy[n, c, p] * ... + dmean / np.float32(P)`.",
    ),
)  # fmt: skip
