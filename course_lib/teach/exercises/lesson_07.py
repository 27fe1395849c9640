"""Lesson 07: from kernels to a module that goes into other people's networks.

| exercise | it gets | what is new |
|---|---|---|
| amdahl | two arrays: shares and speed-ups | what a faster part does for the whole |
| describe_block | the operator's arguments, without numbers | a fake implementation |
| block_function | two launchers | autograd with five gradients |
| swap_blocks | a network, a type, a function | modules replaced, parameters kept |
| hard_gate_backward | dy, x, logit, dlogit; a warp per plane | a gate with corners |

`hard_gate_backward` has float32 arrays: dy and x of (n_planes, n_places), the others an element for
each plane, which is one channel of one image.
"""

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.work import Shares, Spares
from course_lib.teach.exercise import Exercise, Tolerance, case
from course_lib.teach.exercises.blocks import (
    PARAMETERS,
    block_backward,
    block_forward,
    describe,
    swap_and_run,
    train_block,
)
from course_lib.teach.late_torch import torch, warm_up

ZERO, THREE, SIX = np.float32(0), np.float32(3), np.float32(6)


# ---- amdahl ----------------------------------------------------------------------------------


def amdahl(shares, speedups):
    rest = 1 - shares.sum()
    whole = 1 / (rest + (shares / speedups).sum())
    return whole, 1 / rest


def _amdahl_reference(shares, speedups):
    saved = sum(share - share / times for share, times in zip(shares, speedups, strict=True))
    with np.errstate(divide="ignore"):  # only a cause that is looked for gets there
        return 1 / np.float64(1 - saved), 1 / np.float64(1 - sum(shares))


def _amdahl_cases(rng):
    many = drawn(rng, 1030, 1060)
    parts = [
        ([], []),
        ([0.0], [7.0]),
        ([0.5], [2.0]),
        ([0.9], [0.5]),  # it has become slower
        ([0.25], [100.0]),
        ([0.3, 0.2], [3.0, 1.5]),
        ([0.1, 0.6, 0.05], [4.0, 1.1, 0.8]),
        (list(rng.dirichlet([1.0] * 13)[:12]), list(rng.uniform(1.5, 8.0, 12))),
        ((rng.dirichlet([1.0] * (many + 1))[:many]), rng.uniform(0.5, 8.0, many)),
    ]
    return [
        case(1, 1, shares=_nudged(rng, shares), speedups=_nudged(rng, speedups))
        for shares, speedups in parts
    ]


def _nudged(rng, values):
    values = np.array(values, dtype=np.float64)
    return values * rng.uniform(0.96, 0.99, values.shape)


def _pair_of(function, run):
    """Call a function that returns two numbers, of whatever kind of float."""
    found = function(run.shares, run.speedups)
    if not isinstance(found, tuple | list):
        return found
    return tuple(
        np.float64(each) if isinstance(each, int | float | np.number) else each for each in found
    )


AMDAHL = Exercise(
    name="amdahl",
    title="What a faster part brings",
    solution=amdahl,
    kind="function",
    reference=_amdahl_reference,
    cases=_amdahl_cases,
    tolerance=Tolerance(1e-9, 0.0, "a thousand sums and quotients of float64 numbers"),
    outputs=("whole", "limit"),
    dtype=np.float64,
    call=_pair_of,
    hints=(
        "Say the whole took 1 second. How many seconds did each part take, and how many does it "
        "take now? And what about the time that belongs to no part?",
        "A part of share `s` took `s` seconds, and takes `s / speedup` now. What belongs to no "
        "part takes `1 − Σ s`, as before. The speed-up is the old time, 1, over the sum of the "
        "new ones. For the limit, let every speed-up grow without end.",
        "```python\nrest = 1 - shares.sum()\nwhole = 1 / (rest + (...).sum())\n"
        "return whole, 1 / ...\n```",
    ),
)


# ---- describe_block --------------------------------------------------------------------------


def describe_block(x, weight1, bias1, weight2, bias2):
    (n_images, n_channels), n_hidden = x.shape[:2], weight1.shape[0]
    y = torch.empty_like(x)
    mean = x.new_empty((n_images, n_channels), dtype=torch.float32)
    hidden = x.new_empty((n_images, n_hidden), dtype=torch.float32)
    logit = torch.empty_like(mean)
    return y, mean, hidden, logit


def _describe_reference(n, c, h, w, r, kind, channels_last):
    return np.float64(n * c * h * w * (4 if kind == 0 else 2) + 4 * (2 * n * c + n * r))


def _describe_cases(rng):
    warm_up()
    shift = int(rng.integers(0, 3))
    launches = [
        (1, 1, 1, 1, 1, 0, 0),
        (0, 3, 2, 2, 2, 0, 0),
        (1, 2, 3, 1, 5, 2, 0),
        (2, 3, 4, 5, 1, 0, 0),
        (3, 6, 2, 4, 2, 1, 1),
        (2, 5, 7, 3, 4, 2, 1),
        (1, 16, 5, 5, 4, 0, 1),
        (4, 8, 9, 9, 8, 1, 0),
        (drawn(rng, 5, 9), 2 * drawn(rng, 9, 20), drawn(rng, 9, 20), drawn(rng, 21, 30),
         drawn(rng, 9, 17), drawn(rng, 0, 2), drawn(rng, 0, 1)),
    ]
    names = ("n", "c", "h", "w", "r", "kind", "channels_last")
    return [
        case(1, 1, **dict(zip(names, (*map(np.int64, each[:-1]), np.bool_(each[-1])), strict=True)))
        for each in ((n, c, h + shift * (n > 3), *rest) for n, c, h, *rest in launches)
    ]


DESCRIBE_BLOCK = Exercise(
    name="describe_block",
    title="An operator without numbers",
    solution=describe_block,
    kind="function",
    reference=_describe_reference,
    cases=_describe_cases,
    tolerance=Tolerance(0.0, 0.0, "bytes are counted, and counting is exact"),
    outputs=("n_bytes",),
    dtype=np.float64,
    call=describe,
    hints=(
        "Go through the four results of the kernel. For each: which shape, which type, on which "
        "device, and how does it lie in memory? Nothing may be computed, since there are no "
        "numbers.",
        "`torch.empty_like(x)` is like `x` in everything, also in how it lies in memory. "
        "`x.new_empty(shape, dtype=...)` is on the device of `x`. What is saved has float32, "
        "whatever type `x` has.",
        "```python\ny = torch.empty_like(...)\n"
        "mean = x.new_empty((n_images, n_channels), dtype=...)\n"
        "hidden = x.new_empty((n_images, ...), dtype=...)\n```",
    ),
)


# ---- block_function --------------------------------------------------------------------------


def block_function(compute_forward, compute_backward):
    class SqueezeExcite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w1, b1, w2, b2, gate):
            ctx.gate, (y, *saved) = gate, compute_forward(x, w1, b1, w2, b2, gate=gate)
            ctx.save_for_backward(x, w1, w2, *saved)
            return y

        @staticmethod
        def backward(ctx, dy):
            return *compute_backward(dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate), None

    return SqueezeExcite.apply


def _block_reference(x, weight1, bias1, weight2, bias2, dy, gate):
    results, gradients = [], []
    for sign, this_dy, this_gate in ((1, dy, str(gate)), (-1, np.ones_like(dy), "sigmoid")):
        inputs = [sign * each for each in (x, weight1, bias1, weight2, bias2)]
        y, *saved = block_forward(*inputs, this_gate)
        x_, weight1_, _, weight2_, _ = inputs
        results.append(y)
        gradients += block_backward(this_dy, x_, weight1_, weight2_, *saved, this_gate)
    return *results, *gradients


def _block_inputs(rng, shape, n_hidden):
    n_channels = shape[1]
    return {
        "x": numbers(rng, shape, 1.0, 0.5),
        "weight1": numbers(rng, (n_hidden, n_channels), 0.6),
        "bias1": numbers(rng, (n_hidden,), 0.4),
        "weight2": numbers(rng, (n_channels, n_hidden), 0.6),
        "bias2": numbers(rng, (n_channels,), 0.4),
    }


def _block_cases(rng):
    warm_up()
    shapes = [
        ((1, 1, 1, 1), 1, "sigmoid"),
        ((1, 2, 1, 3), 2, "hard_sigmoid"),
        ((2, 3, 2, 2), 3, "sigmoid"),  # both weights have one shape
        ((3, 4, 1, 2), 2, "hard_sigmoid"),
        ((2, 5, 3, 3), 2, "sigmoid"),
        ((4, 3, 5, 4), 6, "hard_sigmoid"),
        ((1, 7, 2, 5), 3, "sigmoid"),
        ((2, 2, 6, 1), 5, "hard_sigmoid"),
        ((3, drawn(rng, 9, 17), 4, drawn(rng, 7, 9)), drawn(rng, 5, 8), "hard_sigmoid"),
    ]
    return [
        case(
            1, 1, **_block_inputs(rng, shape, n_hidden),
            dy=numbers(rng, shape, 2.0, 1.0), gate=np.str_(gate),
        )
        for shape, n_hidden, gate in shapes
    ]  # fmt: skip


_GRADIENTS = ("dx", *(f"d{name}" for name in PARAMETERS))

BLOCK_FUNCTION = Exercise(
    name="block_function",
    title="A block with five gradients",
    solution=block_function,
    kind="function",
    reference=_block_reference,
    cases=_block_cases,
    tolerance=Tolerance(1e-5, 1e-5, "float32 rounds what is saved", scaled=True),
    outputs=("y", "y_other", *_GRADIENTS, *(f"{name}_other" for name in _GRADIENTS)),
    call=train_block,
    hints=(
        "What does compute_backward want? Some of it comes from the arguments of forward, some "
        "from its results, one from PyTorch. And how many arguments did forward have, after "
        "`ctx`?",
        "`compute_forward` returns `y, mean, hidden, logit`. Save tensors with one call of "
        "`ctx.save_for_backward`, in the order in which compute_backward wants them; `gate` is no "
        "tensor and goes into `ctx.gate`. `backward` returns a gradient for each argument of "
        "`forward`, in their order, and `None` for what has none.",
        "```python\ny, *saved = compute_forward(x, w1, b1, w2, b2, gate=gate)\n"
        "ctx.save_for_backward(x, ..., *saved)\n...\n"
        "found = compute_backward(dy.contiguous(), ..., gate=ctx.gate)\n```",
    ),
)


# ---- swap_blocks -----------------------------------------------------------------------------


def swap_blocks(model, old_type, make_new):
    swapped = []
    for name, old in list(model.named_modules()):
        if isinstance(old, old_type):
            new = make_new(old)
            new.fc1, new.fc2 = old.fc1, old.fc2
            new.train(old.training)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
            swapped.append(name)
    return swapped


def _network_reference(x, weight1, bias1, weight2, bias2, dy):
    order = [i for i in (0, 1, 3, 2) if i < len(weight1)]  # as the network calls its blocks
    saved, dweight2 = {}, np.zeros_like(weight2)
    for i in order:
        y, *statistics = block_forward(x, weight1[i], bias1[i], weight2[i], bias2[i], "sigmoid")
        saved[i] = x, weight1[i], weight2[i], *statistics
        x = y
    for i in reversed(order):
        dy, _, _, dweight2[i], _ = block_backward(dy, *saved[i], "sigmoid")
    return x, dy, dweight2


def _swap_cases(rng):
    warm_up()
    cases = []
    for n_blocks, shape, n_hidden in [
        (1, (1, 1, 1, 1), 1),
        (0, (1, 2, 1, 1), 2),
        (2, (1, 3, 2, 2), 2),
        (3, (2, 4, 3, 2), 1),
        (4, (2, 3, 2, 3), 3),
        (1, (3, 2, 1, 4), 5),
        (2, (1, 5, 2, 1), 1),
        (4, (1, 2, 3, 3), 2),
        (3, (drawn(rng, 4, 6), 6, drawn(rng, 5, 7), 4), drawn(rng, 3, 5)),
    ]:
        inputs = [_block_inputs(rng, shape, n_hidden) for _ in range(n_blocks)]
        sizes = (n_hidden, shape[1]), (n_hidden,), (shape[1], n_hidden), (shape[1],)
        stacked = {
            name: np.array([each[name] for each in inputs], np.float32).reshape(n_blocks, *size)
            for name, size in zip(PARAMETERS, sizes, strict=True)
        }
        x, dy = numbers(rng, shape, 1.0, 0.5), numbers(rng, shape, 2.0, 1.0)
        cases.append(case(1, 1, x=x, **stacked, dy=dy))
    return cases


SWAP_BLOCKS = Exercise(
    name="swap_blocks",
    title="New blocks in an old network",
    solution=swap_blocks,
    kind="function",
    reference=_network_reference,
    cases=_swap_cases,
    tolerance=Tolerance(2e-5, 2e-5, "four blocks of float32, one after the other", scaled=True),
    outputs=("y", "dx", "dweight2"),
    call=swap_and_run,
    hints=(
        "`model.named_modules()` goes through all modules, at any depth, with names such as "
        "`features.1.0.block.2`. Who holds the module of this name? And what of the old block "
        "must the new one have, apart from its sizes?",
        "The name up to its last dot is the parent's: `model.get_submodule(parent)` finds it, and "
        "`setattr` on it puts the new block in. Give the new block the old one's `fc1` and `fc2` "
        "themselves, not copies, and its training mode: `new.train(old.training)`.",
        "```python\nfor name, old in list(model.named_modules()):\n"
        "    if isinstance(old, old_type):\n        new = make_new(old)\n        ...\n"
        '        parent, _, last = name.rpartition(".")\n'
        "        setattr(model.get_submodule(...), last, new)\n```",
    ),
)


# ---- hard_gate_backward ----------------------------------------------------------------------


@cuda.jit
def hard_gate_backward(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total)
        if lane == 0:
            z = logit[plane]
            dlogit[plane] = total / SIX if -THREE < z and z < THREE else ZERO


def _hard_reference(dy, x, logit):
    inside = (logit > -3) & (logit < 3)
    return np.where(inside, (dy * x).sum(axis=1) / 6, 0.0)


def _logits(rng, n):
    """Return numbers on all three pieces of the gate, the first of them on the slope."""
    logit = numbers(rng, n, 2.5)
    logit[:1] = rng.uniform(-2.9, 2.9)
    return logit


def _hard_cases(rng):
    launches = [
        ((0, 4), 1, 32),
        ((1, 1), 1, 32),
        ((1, 0), 1, 32),
        ((2, 3), 1, 64),
        ((3, 31), 2, 64),
        ((3, 64), 2, 64),
        ((1, drawn(rng, 1030, 1060)), 1, 32),
        ((6, 35), 2, 128),
        ((drawn(rng, 33, 40), 3), 4, 320),
        ((drawn(rng, 13, 15), drawn(rng, 110, 120)), 1, 512),
    ]
    cases = [
        case(
            grid, block, dy=numbers(rng, shape, 2.0, 3.0), x=numbers(rng, shape, 1.0, 2.0),
            logit=_logits(rng, shape[0]),
        )
        for shape, grid, block in launches
    ]  # fmt: skip
    # At the corners and next to them. There finite differences see both sides at once; x is large
    # so that they leave this case alone.
    three = np.float32(3)
    corners = [-three, three, np.nextafter(-three, ZERO), np.nextafter(three, ZERO), -4, 5, 0, 1.5]
    wide = numbers(rng, (8, 6), 50.0, 300.0)
    logit = np.array(corners, np.float32)
    return [*cases, case(2, 128, dy=numbers(rng, (8, 6), 2.0, 3.0), x=wide, logit=logit)]


HARD_GATE_BACKWARD = Exercise(
    name="hard_gate_backward",
    title="Backward through a gate with corners",
    solution=hard_gate_backward,
    reference=_hard_reference,
    cases=_hard_cases,
    tolerance=Tolerance(
        1e-5, 2e-6, "float32 rounds a sum of up to 1,060 products, then a quotient", scaled=True
    ),
    outputs=("dlogit",),
    call=lambda kernel, run: run.launch(kernel, run.dy, run.x, run.logit, run.dlogit),
    once=True,
    primal=lambda x, logit: x * np.clip((logit[:, None] + 3) / 6, 0, 1),
    about=(Spares("dy"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "The gate of a plane multiplies all its numbers. So all of them have a say in how the "
        "loss reacts to the gate: a sum over the plane. And how does the gate react to the logit, "
        "on the slope and on the two flat pieces?",
        "Each lane adds `dy · x` of its places, `warp_sum` makes it the sum of the plane. On the "
        "slope the gate grows by 1/6 for each 1 of the logit; where it is flat, at −3 and 3 too, "
        "the gradient is 0, whatever the sum is.",
        "```python\nfor place in range(lane, x.shape[1], 32):\n    total += ...\n"
        "total = warp_sum(total)\nif lane == 0:\n    z = logit[plane]\n"
        "    dlogit[plane] = total / SIX if ... else ZERO\n```",
    ),
)
