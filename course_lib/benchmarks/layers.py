"""Max pooling, batch normalisation and optimisers on a GPU, beside PyTorch's and a copy.

All of them move memory and compute little, so the limit is a copy of as many bytes. Each is timed
at a size of more than four L2 caches, and at a small one that the Fashion-MNIST network has. What
comes out is checked before: pooling exactly, the rest against float64.

Peers: pooling and batch normalisation by PyTorch's own kernels, batch normalisation by cuDNN's too;
optimisers by ``foreach=True``, which is PyTorch's default on a GPU, and by ``fused=True``. The
optimisers' rows also have the time that a step takes as Python sees it.
"""

import functools
import math

import torch
import torch.nn.functional as F

from course_lib import optim
from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
    FORMATS,
    Case,
    Work,
    compiled,
    copies,
    distance,
    judge,
    rotating,
    runner,
    size,
)  # fmt: skip
from course_lib.kernels import batch_norm, max_pool2d

POOLED = [(64, 64, 224, 224), (32, 64, 26, 26), (32, 128, 11, 11)]
#: (kernel size, stride, padding) and the end of the record's name.
WINDOWS = [((2, 2, 0), ""), ((3, 2, 1), ".3x3")]
NORMALISED = [(128, 128, 112, 112), (32, 64, 26, 26)]
DTYPES = ("float32", "bfloat16")
#: Shapes of the parameters: many large ones, and those of the Fashion-MNIST network.
PARAMETERS = [
    [(4096, 4096)] * 6,
    [(64, 1, 3, 3), (64,), (128, 64, 3, 3), (128,), (256, 3200), (256,), (10, 256), (10,)],
]
#: Optimiser: (class, its options, arrays of the parameters' size that a step reads and writes).
OPTIMISERS = {
    "sgd": ("SGD", dict(lr=1e-3, momentum=0.9), 5),
    "adamw": ("AdamW", dict(lr=1e-3), 7),
}
COMMAND = "python -m course_lib bench layers --record"
CUDNN, OURS = "cuDNN", "ours"
EPS, MOMENTUM = 1e-5, 0.1
#: Errors allowed before anything is timed: ‖found − true‖ ÷ ‖true‖.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
OF_NAIVE = 2e-3  # a single thread adds up a million numbers, one after the other
SAMPLE = 2  # images, or channels, that are checked, from both ends
_aten = torch.ops.aten


def cases(*, shapes=None, dtypes=None):
    """Pooling, batch normalisation and optimisers; of `shapes`, N·C·H·W, the former two alone."""
    images = None if shapes is None else [tuple(shape) for shape in shapes if len(shape) == 4]
    for dtype in dtypes or DTYPES:
        for layout in FORMATS:
            for shape in POOLED if images is None else images:
                for window, end in WINDOWS:
                    yield from _pooling_cases(shape, window, end, dtype, layout)
            for shape in NORMALISED if images is None else images:
                for direction in NORM_ARRAYS:
                    yield _norm_case(direction, shape, dtype, layout)
    if "float32" in (dtypes or DTYPES):
        for name in OPTIMISERS:
            for parameters in PARAMETERS:
                if shapes is None or (sum(map(math.prod, parameters)),) in map(tuple, shapes):
                    yield _step_case(name, parameters)


def draw(generator):
    """A shape that nobody chose."""
    H, W = (size(generator, 8, 128) for _ in range(2))
    return size(generator, 1, 64), size(generator, 8, 512), H, W


def _suffix(layout):
    return "" if layout == "contiguous" else f".{layout}"


# ------------------------------------------------------------------------------- pooling


def _pooling_cases(shape, window, end, dtype, layout):
    kernel_size, stride, padding = window
    N, C, *sides = shape
    if min(sides) + 2 * padding < kernel_size:
        return
    itemsize = getattr(torch, dtype).itemsize
    windows = [(side + 2 * padding - kernel_size) // stride + 1 for side in sides]
    n_bytes = math.prod(shape) * itemsize + N * C * math.prod(windows) * (itemsize + 1)
    for direction in ("forward", "backward"):
        yield Case(
            f"max_pool2d.{direction}{end}{_suffix(layout)}", shape, dtype, COMMAND, n_bytes,
            functools.partial(_build_pooling, direction, shape, windows, window, dtype, layout,
                              n_bytes), default=_ladder(max_pool2d, direction).auto[0],
        )  # fmt: skip


class Pooled:
    """One set of images, and of gradients by what pooling makes of them."""

    def __init__(self, make, shape, windows, dtype, layout):
        self.x = make.normal(*shape, dtype=dtype, layout=layout)
        self.dy = make.normal(*shape[:2], *windows, dtype=dtype, layout=layout)


def _build_pooling(direction, shape, windows, window, dtype, layout, n_bytes, make, n_sets):
    sets = [Pooled(make, shape, windows, dtype, layout) for _ in range(n_sets)]
    first, (kernel_size, stride, padding) = sets[0], window
    options = dict(stride=stride, padding=padding)
    pair = [kernel_size] * 2, [stride] * 2, [padding] * 2, [1, 1], False
    _, at = max_pool2d.forward(first.x, kernel_size, index_dtype="uint8", **options)

    def ours(one, rung):
        if direction == "forward":
            chosen = dict(index_dtype="uint8", variant=rung, **options)
            return max_pool2d.forward(one.x, kernel_size, **chosen)
        return max_pool2d.backward(one.dy, at, shape, kernel_size, variant=rung, **options)

    def peers():
        _, at_64 = _aten.max_pool2d_with_indices(first.x, *pair)

        def eager(x, dy):
            if direction == "forward":
                return _aten.max_pool2d_with_indices(x, *pair)
            return _aten.max_pool2d_with_indices_backward(dy, first.x, *pair, at_64)

        return _eager_and_compiled(eager, sets)

    def right():
        if direction == "forward":
            by_eager, _ = _aten.max_pool2d_with_indices(first.x, *pair)
            return lambda label, found, _: _equal(label, found[0], by_eager)
        part = slice(0, SAMPLE)
        images = first.x[part].double()
        _, at_64 = _aten.max_pool2d_with_indices(images, *pair)
        true = _aten.max_pool2d_with_indices_backward(
            first.dy[part].double(), images, *pair, at_64
        )
        return lambda label, found, _: _close(label, found[part], true, dtype)

    return Work(
        _by_rung(max_pool2d, direction, ours, sets), peers, right,
        limit=lambda: copies(make, n_bytes, n_sets),
    )  # fmt: skip


def _eager_and_compiled(eager, sets):
    """Peers of a function of x and dy."""

    def peer(function):
        return rotating(lambda one: function(one.x, one.dy), sets)

    return {EAGER: peer(eager), COMPILED: peer(compiled(eager, fullgraph=False))}


# ------------------------------------------------------------------ batch normalisation

#: Arrays of the images' size that must be moved, by direction.
NORM_ARRAYS = {"forward": 3, "backward": 5, "inference": 2}


def _norm_case(direction, shape, dtype, layout):
    n_bytes = NORM_ARRAYS[direction] * math.prod(shape) * getattr(torch, dtype).itemsize
    build = functools.partial(_build_norm, direction, shape, dtype, layout, n_bytes)
    name = f"batch_norm.{direction}{_suffix(layout)}"
    default = _ladder(batch_norm, direction).auto[0]
    return Case(name, shape, dtype, COMMAND, n_bytes, build, default=default)


class Normalised:
    """One set of images and of gradients, and what belongs to the channels, which sets share."""

    def __init__(self, make, shape, dtype, layout, channels):
        self.x, self.dy = (
            make.normal(*shape, dtype=dtype, layout=layout, shift=0.2) for _ in range(2)
        )
        self.channels = channels


def _build_norm(direction, shape, dtype, layout, n_bytes, make, n_sets):
    C = shape[1]
    weight, bias, var = (make.uniform(C, low=0.5) for _ in range(3))
    affine, running = (weight, bias), (make.normal(C), var)
    fixed = running if make.is_empty else tuple(tensor.clone() for tensor in running)
    sets = [Normalised(make, shape, dtype, layout, affine) for _ in range(n_sets)]
    # What the backward passes take: the statistics of the first set.
    _, mean, rstd = batch_norm.forward(sets[0].x, *affine)
    ours = {
        "forward": lambda one, rung: batch_norm.forward(one.x, *affine, *running, variant=rung),
        "backward": lambda one, rung: batch_norm.backward(
            one.dy, one.x, weight, mean, rstd, variant=rung
        ),
        "inference": lambda one, rung: (
            batch_norm.inference(one.x, *affine, *fixed, variant=rung),
        ),
    }[direction]

    def peers():
        eager = {
            "forward": lambda x, dy: _aten.native_batch_norm(
                x, *affine, *running, True, MOMENTUM, EPS
            ),
            "backward": lambda x, dy: _aten.native_batch_norm_backward(
                dy, x, weight, None, None, mean, rstd, True, EPS, [True] * 3
            ),
            "inference": lambda x, dy: _aten.native_batch_norm(
                x, *affine, *fixed, False, MOMENTUM, EPS
            ),
        }[direction]
        found = _eager_and_compiled(eager, sets)
        # cuDNN wants weights of the images' dtype.
        if direction != "inference" and dtype == "float32" and _has_cudnn(make.device):
            found[CUDNN] = rotating(_by_cudnn(direction, sets[0].x, affine, running), sets)
        return found

    def right():
        true = _true_batch_norm(direction, sets[0].x, sets[0].dy, affine, fixed)

        def judged(label, found, _):
            for part, expected in zip(found, true, strict=False):
                _close(label, _ends(part), expected, dtype)

        return judged

    return Work(
        _by_rung(batch_norm, direction, ours, sets), peers, right,
        limit=lambda: copies(make, n_bytes, n_sets),
    )  # fmt: skip


def _by_cudnn(direction, x, affine, running):
    if direction == "forward":
        return lambda one: _cudnn(one.x, affine, running)
    weight, _ = affine
    _, mean, rstd, reserve = _cudnn(x, affine, tuple(tensor.clone() for tensor in running))
    return lambda one: _aten.cudnn_batch_norm_backward(
        one.x, one.dy, weight, None, None, mean, rstd, EPS, reserve
    )


def _has_cudnn(device):
    return torch.backends.cudnn.is_available() and device.type == "cuda"


def _cudnn(x, affine, running):
    """(y, mean, rstd, reserve) by cuDNN."""
    return _aten.cudnn_batch_norm(x, *affine, *running, True, MOMENTUM, EPS)


def _true_batch_norm(direction, x, dy, affine, fixed):
    """What a candidate gives first, in float64, of some channels: [y], or [dx, dweight, dbias]."""
    x, dy, weight, bias, mean, var = (
        _ends(t).double() for t in (x, dy, *affine, *fixed)
    )  # fmt: skip
    if direction == "inference":
        return [F.batch_norm(x, mean, var, weight, bias, False, MOMENTUM, EPS)]
    if direction == "forward":
        return [F.batch_norm(x, None, None, weight, bias, True, MOMENTUM, EPS)]
    mean, rstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + EPS).rsqrt()
    return _aten.native_batch_norm_backward(
        dy, x, weight, None, None, mean, rstd, True, EPS, [True] * 3
    )


def _ends(tensor):
    """The first and the last channels, as a tensor of their own."""
    dim = 1 if tensor.dim() == 4 else 0
    last = tensor.shape[dim] - SAMPLE
    return torch.cat([tensor.narrow(dim, 0, SAMPLE), tensor.narrow(dim, last, SAMPLE)], dim)


# ---------------------------------------------------------------------------- optimisers


def _step_case(name, shapes):
    n_elements = sum(map(math.prod, shapes))
    n_bytes = OPTIMISERS[name][2] * 4 * n_elements
    return Case(
        f"{name}.step", (n_elements,), "float32", COMMAND, n_bytes,
        functools.partial(_build_step, name, shapes, n_bytes), default=OURS,
        facts={"n_tensors": len(shapes)},
    )  # fmt: skip


def _build_step(name, shapes, n_bytes, make, n_sets):
    kind, options, _ = OPTIMISERS[name]
    start, gradients = ([make.normal(*shape) for shape in shapes] for _ in range(2))

    def optimiser(classes, **more):
        parameters = [
            torch.nn.Parameter(p if make.is_empty else p.clone()) for p in start
        ]  # fmt: skip
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        if name != "sgd" and make.device.type == "cuda":
            more["capturable"] = True  # or a graph can't hold it
        return getattr(classes, kind)(parameters, **options, **more)

    made = optimiser(optim)
    theirs = {}

    def ours(i):
        if not make.is_empty:
            return made.step()
        for group in made.param_groups:  # also where `step` would leave CPU tensors to PyTorch
            made._step_group(group)

    if make.is_empty:
        for p in made.param_groups[0]["params"]:  # or PyTorch fills them with zeros
            states = made._names(made.param_groups[0])
            made.state[p] = {state: torch.empty_like(p) for state in states}
            made.state[p]["step"] = torch.zeros(())
    ours(0)  # makes the states, and the tables of addresses

    def peers():
        for label in ("foreach", "fused"):
            theirs[f"PyTorch {label}"] = optimiser(torch.optim, **{label: True})
        for other in theirs.values():
            other.step()
        first = [p.double() for p in made.param_groups[0]["params"]]
        for label, other in theirs.items():
            for p, q in zip(first, other.param_groups[0]["params"], strict=True):
                error = distance(q, p)
                judge(f"ours of {name}.step, beside {label},", error, TOLERANCE["float32"])
        return {label: lambda i, other=other: other.step() for label, other in theirs.items()}

    return Work(
        {OURS: ours}, peers, lambda: lambda label, found, is_ours: None,
        limit=lambda: copies(make, n_bytes, n_sets),
        python=lambda: {OURS: ours} | {
            label: lambda i, other=other: other.step() for label, other in theirs.items()
        },
    )  # fmt: skip


# ------------------------------------------------------------------------- what all share


def _ladder(operation, direction):
    return getattr(operation, direction.upper())


def _by_rung(operation, direction, ours, sets):
    """{rung: call(i)} of ours(one, rung)."""
    return {
        rung: rotating(lambda one, rung=rung: ours(one, rung), sets)
        for rung in _ladder(operation, direction)
    }


def _equal(label, found, expected):
    if not torch.equal(found, expected):
        raise AssertionError(f"{label} is wrong, so it is not timed: not equal to PyTorch's")


def _close(label, found, expected, dtype):
    allowed = max(OF_NAIVE, TOLERANCE[dtype]) if label == "naive" else TOLERANCE[dtype]
    judge(label, distance(found, expected), allowed)


run = runner(cases, rounds=10)
