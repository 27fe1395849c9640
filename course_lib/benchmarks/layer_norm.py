"""Layer normalisation on a GPU: our rungs beside PyTorch eager, torch.compile and a copy.

Forward with the statistics that the backward pass needs; backward with the gradients of weight and
bias, which are of the rows' dtype, as PyTorch wants them. What comes out is held to float64 before
anything is timed.
"""

import functools
import math

import torch

from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
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
from course_lib.kernels import layer_norm

#: Rows and columns: small, those of transformers, no multiple of a vector, too long for registers.
SHAPES = [
    (128, 768), (65536, 256), (16384, 768), (16384, 1024), (8192, 4096), (8192, 1023),
    (2048, 8192), (1024, 50304),
]  # fmt: skip
DTYPES = ("float32", "bfloat16")
N_DIMS = 2
COMMAND = "python -m course_lib bench layer_norm --record"
EPS = 1e-5
#: Arrays of the rows' size that must be moved.
ARRAYS = {"forward": 2, "backward": 3}
#: Errors allowed before anything is timed: ‖found − true‖ ÷ ‖true‖.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
_aten = torch.ops.aten


def cases(*, shapes=None, dtypes=None):
    """Both passes at each shape, (rows, columns)."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for direction, n_arrays in ARRAYS.items():
                n_bytes = n_arrays * math.prod(shape) * getattr(torch, dtype).itemsize
                vectors = shape[-1] * getattr(torch, dtype).itemsize % 16 == 0
                build = functools.partial(_build, direction, shape, dtype, n_bytes)
                yield Case(
                    f"layer_norm.{direction}", shape, dtype, COMMAND, n_bytes, build,
                    default=layer_norm.default_variant(direction, shape[-1], vectors),
                )  # fmt: skip


def draw(generator):
    """A shape that nobody chose."""
    n_cols = size(generator, 16, 32768)
    return size(generator, 16, max(17, (1 << 26) // n_cols)), n_cols


class Buffers:
    """One set of what a call reads: x, or dy, x and the statistics of its rows."""

    def __init__(self, make, direction, shape, dtype):
        self.inputs = (make.normal(*shape, dtype=dtype, shift=0.2),)
        if direction == "backward":
            x, dy = *self.inputs, make.normal(*shape, dtype=dtype)
            mean, rstd = (make.empty(shape[0]) for _ in range(2))
            if not make.is_empty:
                var, mean = torch.var_mean(x.float(), -1, correction=0)
                rstd = torch.rsqrt(var + EPS)
            self.inputs = dy, x, mean, rstd


def _build(direction, shape, dtype, n_bytes, make, n_sets):
    sets = [Buffers(make, direction, shape, dtype) for _ in range(n_sets)]
    weight, bias = (make.normal(shape[1], dtype=dtype) for _ in range(2))

    def ours(one, rung):
        if direction == "forward":
            return layer_norm.forward(*one.inputs, weight, bias, variant=rung)
        dy, x, *statistics = one.inputs
        return layer_norm.backward(dy, x, weight, *statistics, variant=rung)

    def eager(*inputs):
        return _by_torch(direction, inputs, weight, bias)

    def peers():
        found = {EAGER: eager, COMPILED: compiled(eager, fullgraph=False)}
        return {
            label: rotating(lambda one, call=call: call(*one.inputs), sets)
            for label, call in found.items()
        }

    def right():
        inputs = (each.double() for each in sets[0].inputs)
        true = _by_torch(direction, inputs, weight.double(), bias.double())

        def judged(label, found, _):
            # Forward the rows alone: PyTorch's statistics have another shape.
            parts = zip(found, true[:1] if direction == "forward" else true, strict=False)
            return max(
                judge(label, distance(part, expected), TOLERANCE[dtype]) for part, expected in parts
            )

        return judged

    return Work(
        {
            rung: rotating(lambda one, rung=rung: ours(one, rung), sets)
            for rung in getattr(layer_norm, direction.upper())
        },
        peers, right, limit=lambda: copies(make, n_bytes, n_sets),
    )  # fmt: skip


def _by_torch(direction, inputs, weight, bias):
    """(y, …), or the gradients of x, weight and bias, by PyTorch's own."""
    if direction == "forward":
        (x,) = inputs
        return _aten.native_layer_norm(x, x.shape[-1:], weight, bias, EPS)
    dy, x, mean, rstd = inputs
    of_rows = mean[:, None], rstd[:, None]
    return _aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], *of_rows, weight, bias, [True] * 3
    )


run = runner(cases, rounds=20)
