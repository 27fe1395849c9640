"""Softmax of attention scores on a GPU: our rungs beside PyTorch eager, torch.compile and a copy.

Scores of eight sequences of 512 tokens in twelve heads, scaled; as they are, causal, and with a
boolean mask of keys. PyTorch's is softmax(scale·x), filled with −inf where a score is not seen; its
masks are made beforehand. What comes out is held to float64 before anything is timed.
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
)
from course_lib.kernels import scaled_softmax as kernels

SHAPES = [(8, 12, 512, 512)]
DTYPES = ("float32", "bfloat16")
KINDS = {"forward": ("", ".causal", ".mask"), "backward": ("", ".causal")}
N_DIMS = 4
COMMAND = "python -m course_lib bench scaled_softmax --record"
SCALE = 0.125
#: Errors allowed before anything is timed: ‖found − true‖ ÷ ‖true‖.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def cases(*, shapes=None, dtypes=None):
    """Both passes of each kind, at each shape, (B, H, T, S)."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for direction, kinds in KINDS.items():
                for kind in kinds:
                    yield _case(direction, kind, shape, dtype)


def draw(generator):
    """A shape that nobody chose."""
    T, S = size(generator, 16, 2048), size(generator, 16, 4096)
    return size(generator, 1, 8), size(generator, 1, max(2, min(16, (1 << 23) // (T * S)))), T, S


def _case(direction, kind, shape, dtype):
    B, H, T, S = shape
    n = seen = math.prod(shape)
    if kind == ".causal":  # what is not seen is not read
        seen = B * H * sum(min(i + 1, S) for i in range(T))
    n_read = seen if direction == "forward" else 2 * seen
    n_bytes = (n + n_read) * getattr(torch, dtype).itemsize + B * S * (kind == ".mask")
    build = functools.partial(_build, direction, kind, shape, dtype, n_bytes)
    default = "registers" if S <= kernels.ROW_LIMIT else "online"
    name = f"scaled_softmax.{direction}{kind}"
    return Case(name, shape, dtype, COMMAND, n_bytes, build, default=default)


class Buffers:
    """One set of what a call reads: x, or dy and y; the mask; and what PyTorch fills with −inf."""

    def __init__(self, make, direction, kind, shape, dtype):
        B, _, T, S = shape
        self.options, self.mask = dict(scale=SCALE, causal=kind == ".causal"), None
        self.hidden = None
        self.inputs = (make.normal(*shape, dtype=dtype, scale=8),)
        if kind == ".mask":
            self.mask = make.ones(B, 1, 1, S).bool()
            self.mask[..., S - S // 8 :] = False
            self.hidden = ~self.mask
        elif kind:
            self.hidden = ~torch.ones(T, S, dtype=torch.bool, device=make.device).tril()
        if direction == "backward":
            y = make.empty(*shape, dtype=dtype)
            if not make.is_empty:
                y = _forward(*self.inputs, self.hidden)
            self.inputs = make.normal(*shape, dtype=dtype), y

    def ours(self, rung):
        if len(self.inputs) == 1:
            return kernels.forward(*self.inputs, self.mask, variant=rung, **self.options)
        return kernels.backward(*self.inputs, variant=rung, **self.options)


def _forward(x, hidden):
    scores = x * SCALE
    return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -math.inf), -1)


def _backward(dy, y, hidden):
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype) * SCALE


def _build(direction, kind, shape, dtype, n_bytes, make, n_sets):
    sets = [Buffers(make, direction, kind, shape, dtype) for _ in range(n_sets)]
    eager = _forward if direction == "forward" else _backward

    def peers():
        return {
            label: rotating(lambda one, call=call: call(*one.inputs, one.hidden), sets)
            for label, call in ((EAGER, eager), (COMPILED, compiled(eager)))
        }

    def right():
        true = eager(*(x.double() for x in sets[0].inputs), sets[0].hidden)
        return lambda label, found, _: judge(label, distance(found, true), TOLERANCE[dtype])

    rungs = getattr(kernels, direction.upper())
    ours = {rung: rotating(lambda one, rung=rung: one.ours(rung), sets) for rung in rungs}
    return Work(ours, peers, right, limit=lambda: copies(make, n_bytes, n_sets))


run = runner(cases, rounds=20)
