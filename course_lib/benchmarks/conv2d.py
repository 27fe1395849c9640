"""Convolutions on a GPU: ours beside cuDNN and torch.compile, in float32, TF32 and bfloat16.

Filters of 3 × 3 with padding 1, forward and the gradients of x and weight, each by itself. Every
candidate is checked against float64 before anything is timed, and its error is kept: what is
called float32 is to be as exact as cuDNN with TF32 switched off. cuDNN searches for its fastest
algorithm (benchmark mode), and gets the images in either memory format. Arithmetic is the limit of
these sizes, so rows say TFLOP/s, and the record what the chip could do at most.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from course_lib.benchmarks import peaks
from course_lib.benchmarks.case import (
    COMPILED,
    FORMATS,
    OTHER,
    Case,
    Work,
    compiled,
    distance,
    judge,
    rotating,
    runner,
    size,
)
from course_lib.kernels import conv2d as kernels
from course_lib.kernels.operation import AUTO

#: (N, C, K, H): images, their channels, filters, height and width.
SHAPES = [(32, 64, 128, 64), (32, 128, 128, 56), (64, 256, 256, 28)]
#: Measured with every rung, in float32; the others with the default alone.
LADDER = [(8, 32, 32, 28)]
DIRECTIONS = ("forward", "dx", "dweight")
N_DIMS = 4
TAPS, PADDING = 3, 1
COMMAND = "python -m course_lib bench conv2d --record"
OURS, PEER = "ours", "cuDNN"
LONGEST_CALL = 400_000  # µs; a slower rung is left out, and the record says so


class Mode(NamedTuple):
    """How numbers are multiplied and where they lie; `limit` is the peak that bounds it."""

    dtype: str
    precision: str
    layout: str
    suffix: str  # of the record's name
    limit: str
    allowed: float  # error before anything is timed: ‖found − true‖ ÷ ‖true‖, float64 being true


MODES = (
    Mode("float32", "float32", "contiguous", "", "fma", 5e-5),
    Mode("float32", "tf32", "contiguous", ".tf32", "tf32", 1e-3),
    Mode("bfloat16", "float32", "channels-last", ".channels-last", "bfloat16", 6e-3),
)


def cases(*, shapes=None, dtypes=None):
    """Each mode and direction at each shape; of `shapes`, (N, C, K, H), alone if given."""
    for shape in map(tuple, SHAPES + LADDER if shapes is None else shapes):
        for mode in MODES:
            if dtypes is None or mode.dtype in dtypes:
                yield from (_case(shape, mode, direction) for direction in DIRECTIONS)


def draw(generator):
    """A shape that nobody chose."""
    C, K = (size(generator, 8, 256, 8) for _ in range(2))
    return size(generator, 1, 64), C, K, size(generator, 7, 64)


@contextlib.contextmanager
def settings(tf32):
    """cuDNN in benchmark mode, with TF32 or without."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, cudnn.benchmark = tf32, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.benchmark = before


def _case(shape, mode, direction):
    N, C, K, H = shape
    n_elements = N * C * H * H + K * C * TAPS * TAPS + N * K * H * H
    return Case(
        f"conv2d.{direction}{mode.suffix}", shape, mode.dtype, COMMAND,
        n_elements * getattr(torch, mode.dtype).itemsize,
        functools.partial(_build, shape, mode, direction),
        default=OURS, flops=2 * N * K * H * H * C * TAPS * TAPS, longest=LONGEST_CALL,
        settings=functools.partial(settings, mode.precision == "tf32"),
        facts={"precision": mode.precision, "layout": mode.layout, "limit": mode.limit},
    )  # fmt: skip


class Buffers:
    """One set of what a convolution and its gradients read: x, weight and dy, in both formats."""

    def __init__(self, make, x, weight, dy, scale, dtype):
        shapes = {"x": (x, 1), "weight": (weight, scale), "dy": (dy, 1)}
        for name, (shape, scale) in shapes.items():
            tensor = make.normal(*shape, dtype=dtype, scale=scale)
            formats = {k: _laid_out(make, tensor, k, dtype) for k in FORMATS}
            setattr(self, name, formats)

    def all(self, layout):
        return [self.x[layout], self.weight[layout], self.dy[layout]]


def _laid_out(make, tensor, layout, dtype):
    if make.is_empty:
        return make.empty(*tensor.shape, dtype=dtype, layout=layout)
    return tensor.contiguous(memory_format=FORMATS[layout])


def ours(buffers, direction, mode, variant):
    """y, dx or dweight, by a rung of ours."""
    x, weight, dy = buffers.all(mode.layout)
    options = {"padding": PADDING, "precision": mode.precision, "variant": variant}
    if direction == "forward":
        return kernels.forward(x, weight, **options)
    needs = direction == "dx", direction == "dweight", False
    return kernels.backward(dy, x, weight, with_bias=False, needs=needs, **options)[
        DIRECTIONS.index(direction) - 1
    ]


def theirs(x, weight, dy, direction):
    """The same by PyTorch, whose convolutions on a GPU are cuDNN's."""
    if direction == "forward":
        return F.conv2d(x, weight, padding=PADDING)
    needs = [direction == "dx", direction == "dweight", False]
    pad, one = [PADDING] * 2, [1, 1]
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, one, pad, one, False, [0, 0], 1, needs
    )[DIRECTIONS.index(direction) - 1]


def _build(shape, mode, direction, make, n_sets):
    N, C, K, H = shape
    parts = (N, C, H, H), (K, C, TAPS, TAPS), (N, K, H, H), 1 / math.sqrt(C * TAPS * TAPS)
    sets = [Buffers(make, *parts, mode.dtype) for _ in range(n_sets)]
    variants = {OURS: AUTO}
    if shape in LADDER and mode is MODES[0]:
        special = "depthwise", "few_channels"
        variants = {rung: rung for rung in kernels.FORWARD if rung not in special} | variants
    return Work(
        candidates(ours, sets, direction, mode, variants),
        functools.partial(peers, theirs, sets, direction, mode),
        functools.partial(right, theirs, sets[0], direction, mode),
        facts=lambda: {"peaks_tflops": peaks.peaks()},
    )


def candidates(ours, sets, direction, mode, variants):
    """{label: call(i)} of ours."""
    return {
        label: rotating(
            lambda buffers, variant=variant: ours(buffers, direction, mode, variant), sets
        )
        for label, variant in variants.items()
    }


def peers(theirs, sets, direction, mode):
    """{label: call(i)} of PyTorch's: in either memory format, and compiled."""

    def peer(function, layout):
        return rotating(lambda buffers: function(*buffers.all(layout)), sets)

    eager = functools.partial(theirs, direction=direction)
    return {
        PEER: peer(eager, mode.layout),
        f"{PEER}, {OTHER[mode.layout]}": peer(eager, OTHER[mode.layout]),
        COMPILED: peer(compiled(eager), mode.layout),
    }


def right(theirs, buffers, direction, mode):
    """What is right on these buffers, as a judge."""
    expected = theirs(*(each.double() for each in buffers.all("contiguous")), direction)
    return lambda label, found, _: judge(label, distance(found, expected), mode.allowed)


run = runner(cases, rounds=10)
