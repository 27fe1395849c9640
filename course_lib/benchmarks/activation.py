"""Activations on a GPU: our rungs beside PyTorch eager, torch.compile and a copy."""

import functools
import math

import numpy as np
import torch

from course_lib import reference
from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
    Case,
    Work,
    compiled,
    copies,
    judge,
    rotating,
    runner,
    size,
)  # fmt: skip
from course_lib.kernels import activation

COMMAND = "python -m course_lib bench activation --record"
SHAPES = [(128, 200), (32, 64, 28, 28), (32, 256, 14, 14), (1024, 10000), (16384, 8192)]
DTYPES = ("float32", "bfloat16")
_aten = torch.ops.aten
_FORWARD_PEERS = {
    "relu": lambda x, out: torch.clamp_min(x, 0, out=out),
    "sigmoid": lambda x, out: torch.sigmoid(x, out=out),
    "swish": lambda x, out: _aten.silu.out(x, out=out),
    "relu6": lambda x, out: _aten.hardtanh.out(x, 0, 6, out=out),
    "leaky_relu": lambda x, out: _aten.leaky_relu.out(x, 0.01, out=out),
    "hard_sigmoid": lambda x, out: _aten.hardsigmoid.out(x, out=out),
    "hard_swish": lambda x, out: _aten.hardswish.out(x, out=out),
    "gelu": lambda x, out: _aten.gelu.out(x, out=out),
    "gelu_tanh": lambda x, out: _aten.gelu.out(x, approximate="tanh", out=out),
}
_BACKWARD_PEERS = {
    "relu": lambda dy, y, out: _aten.threshold_backward.grad_input(dy, y, 0, grad_input=out),
    "sigmoid": lambda dy, y, out: _aten.sigmoid_backward.grad_input(dy, y, grad_input=out),
    "swish": lambda dy, x, out: _aten.silu_backward.grad_input(dy, x, grad_input=out),
    "relu6": lambda dy, y, out: _aten.hardtanh_backward.grad_input(dy, y, 0, 6, grad_input=out),
    "leaky_relu": lambda dy, x, out: _aten.leaky_relu_backward.grad_input(
        dy, x, 0.01, False, grad_input=out
    ),
    "hard_sigmoid": lambda dy, x, out: _aten.hardsigmoid_backward.grad_input(
        dy, x, grad_input=out
    ),
    "hard_swish": lambda dy, x, out: _aten.hardswish_backward.out(dy, x, out=out),
    "gelu": lambda dy, x, out: _aten.gelu_backward.grad_input(dy, x, grad_input=out),
    "gelu_tanh": lambda dy, x, out: _aten.gelu_backward.grad_input(
        dy, x, approximate="tanh", grad_input=out
    ),
}
SAMPLE = 1 << 20  # elements checked at each end of an array
# The largest error allowed before anything is timed, relative to the largest |y|. PyTorch's own is
# allowed four times as much: it is a peer here, not under test.
_TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}


def cases(*, shapes=None, dtypes=None):
    """Every activation and direction at each shape and dtype."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for operation in activation.OPERATIONS.values():
                for direction in ("forward", "backward"):
                    n_arrays = 2 if direction == "forward" else 3
                    n_bytes = n_arrays * math.prod(shape) * getattr(torch, dtype).itemsize
                    build = functools.partial(_build, operation, direction, shape, dtype, n_bytes)
                    yield Case(
                        f"{operation.name}.{direction}", shape, dtype, COMMAND, n_bytes, build,
                    )  # fmt: skip


def draw(generator):
    """A shape that nobody chose."""
    return size(generator, 1, 4096), size(generator, 32, 16384)


class Buffers:
    """One set of what a call reads and writes."""

    def __init__(self, make, operation, direction, shape, dtype):
        x = make.normal(*shape, dtype=dtype, scale=3)
        self.inputs, self.output = (x,), make.empty(*shape, dtype=dtype)
        if direction == "backward":
            saved = x if operation.saves == "x" or make.is_empty else operation.forward(x)
            self.inputs = make.normal(*shape, dtype=dtype), saved


def _build(operation, direction, shape, dtype, n_bytes, make, n_sets):
    sets = [Buffers(make, operation, direction, shape, dtype) for _ in range(n_sets)]
    forward = direction == "forward"
    call = operation.forward if forward else operation.backward
    peer = (_FORWARD_PEERS if forward else _BACKWARD_PEERS)[operation.name]
    truth = getattr(reference, operation.name + ("" if forward else "_backward"))

    def peers():
        fused = compiled(functools.partial(_out_of_place, peer), fullgraph=False, mode=None)
        return {
            EAGER: rotating(lambda one: peer(*one.inputs, one.output), sets),
            COMPILED: rotating(lambda one: fused(*one.inputs), sets),
        }

    return Work(
        {
            rung: rotating(
                lambda one, rung=rung: call(*one.inputs, variant=rung, out=one.output), sets
            )
            for rung in (operation.FORWARD if forward else operation.BACKWARD)
        },
        peers,
        lambda: functools.partial(_judge, truth, sets[0].inputs, dtype),
        [sets[0].output],
        lambda: copies(make, n_bytes, n_sets),
    )  # fmt: skip


def _out_of_place(peer, *inputs):
    return peer(*inputs, torch.empty_like(inputs[0]))


def _judge(truth, inputs, dtype, label, found, is_ours):
    if found.isnan().any():
        judge(label, math.nan, 0)
    # Both ends of a long array stand for all of it: float64 on the CPU takes its time.
    for part in (slice(None, SAMPLE), slice(-SAMPLE, None)):
        expected = truth(*(tensor.flatten()[part].double().cpu().numpy() for tensor in inputs))
        actual = found.flatten()[part].double().cpu().numpy()
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        judge(label, error, _TOLERANCE[dtype] * (1 if is_ours else 4))


run = runner(cases, rounds=30)
