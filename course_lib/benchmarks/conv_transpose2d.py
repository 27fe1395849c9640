"""Transposed convolutions on a GPU: ours beside cuDNN, torch.compile and a copy.

Filters of 2 × 2 with stride 2, as a U-Net's way up has them; forward and the gradients of x and
weight, each by itself, in float32, TF32 and bfloat16. Every candidate is checked against float64
before anything is timed, and its error is kept. cuDNN searches for its fastest algorithm (benchmark
mode), and gets the images in either memory format. Rows say how much of a copy's bandwidth is
reached with the bytes that must be moved, and TFLOP/s: with many channels arithmetic is the limit.
"""

import functools
import math

import torch
import torch.nn.functional as F

from course_lib.benchmarks import conv2d
from course_lib.benchmarks.case import Case, Work, copies, runner, size
from course_lib.benchmarks.conv2d import DIRECTIONS, MODES, OURS
from course_lib.kernels import conv_transpose2d as kernels
from course_lib.kernels.operation import AUTO

#: (N, C, K, H): images, their channels, those of the result, height and width.
SHAPES = [(8, 128, 64, 128), (8, 256, 128, 64), (8, 512, 256, 32), (8, 1024, 512, 16)]
#: Measured with every rung, in float32; the others with the default alone.
LADDER = [(4, 64, 32, 32)]
N_DIMS = 4
SIDE = 2  # of the filter, and the stride
COMMAND = "python -m course_lib bench conv_transpose2d --record"
_aten = torch.ops.aten


def cases(*, shapes=None, dtypes=None):
    """Each mode and direction at each shape; of `shapes`, (N, C, K, H), alone if given."""
    for shape in map(tuple, SHAPES + LADDER if shapes is None else shapes):
        for mode in MODES:
            if dtypes is None or mode.dtype in dtypes:
                yield from (_case(shape, mode, direction) for direction in DIRECTIONS)


def draw(generator):
    """A shape that nobody chose."""
    C, K = (size(generator, 8, 512, 8) for _ in range(2))
    return size(generator, 1, 16), C, K, size(generator, 7, 96)


def _case(shape, mode, direction):
    flops, n_elements = sizes(shape)
    n_bytes = n_elements * getattr(torch, mode.dtype).itemsize
    return Case(
        f"conv_transpose2d.{direction}{mode.suffix}", shape, mode.dtype, COMMAND, n_bytes,
        functools.partial(_build, shape, mode, direction, n_bytes), default=OURS, flops=flops,
        settings=functools.partial(conv2d.settings, mode.precision == "tf32"),
        facts={"precision": mode.precision, "layout": mode.layout},
    )  # fmt: skip


def sizes(shape):
    """(FLOPs, elements that must be moved), whatever the direction."""
    N, C, K, H = shape
    pixels = N * H * H
    return 2 * pixels * C * K * SIDE**2, pixels * C + C * K * SIDE**2 + pixels * K * SIDE**2


def ours(buffers, direction, mode, variant):
    """y, dx or dweight, by a rung of ours."""
    x, weight, dy = buffers.all(mode.layout)
    options = {"stride": SIDE, "precision": mode.precision, "variant": variant}
    if direction == "forward":
        return kernels.forward(x, weight, **options)
    needs = direction == "dx", direction == "dweight", False
    found = kernels.backward(dy, x, weight, with_bias=False, needs=needs, **options)
    return found[DIRECTIONS.index(direction) - 1]


def theirs(x, weight, dy, direction):
    """The same by PyTorch, whose transposed convolutions on a GPU are cuDNN's."""
    if direction == "forward":
        return F.conv_transpose2d(x, weight, stride=SIDE)
    needs = [direction == "dx", direction == "dweight", False]
    step, none, one = [SIDE] * 2, [0, 0], [1, 1]
    found = _aten.convolution_backward(dy, x, weight, None, step, none, one, True, none, 1, needs)
    return found[DIRECTIONS.index(direction) - 1]


def _build(shape, mode, direction, n_bytes, make, n_sets):
    N, C, K, H = shape
    parts = (N, C, H, H), (C, K, SIDE, SIDE), (N, K, SIDE * H, SIDE * H), 1 / math.sqrt(C)
    sets = [conv2d.Buffers(make, *parts, mode.dtype) for _ in range(n_sets)]
    variants = {OURS: AUTO}
    if shape in LADDER and mode is MODES[0]:
        variants = {rung: rung for rung in kernels.FORWARD} | variants
    return Work(
        conv2d.candidates(ours, sets, direction, mode, variants),
        functools.partial(conv2d.peers, theirs, sets, direction, mode),
        functools.partial(conv2d.right, theirs, sets[0], direction, mode),
        limit=lambda: copies(make, n_bytes, n_sets),
    )


run = runner(cases, rounds=10)
