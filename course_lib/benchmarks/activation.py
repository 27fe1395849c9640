"""Activations on a GPU: our rungs beside PyTorch eager, torch.compile and a copy."""

import functools
import math

import numpy as np
import torch

from course_lib import bench, reference
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.kernels import activation
from course_lib.runtime.fingerprint import fingerprint

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


def run(*, names=None, shapes=SHAPES, dtypes=DTYPES, rounds=30, progress=lambda cases: cases):
    """Check, then time, every activation, direction, shape and dtype. Returns records.

    Of `names`, such as ["relu.forward"], only these.
    """
    cases = [
        (operation, direction, tuple(shape), dtype)
        for shape in shapes
        for dtype in dtypes
        for operation in activation.OPERATIONS.values()
        for direction in ("forward", "backward")
        if names is None or f"{operation.name}.{direction}" in names
    ]
    return [_measure(*case, rounds) for case in progress(cases)]


def _measure(operation, direction, shape, dtype, rounds):
    n_inputs = 1 if direction == "forward" else 2
    n = math.prod(shape)
    n_bytes = (n_inputs + 1) * n * getattr(torch, dtype).itemsize
    sets = bench.buffer_sets(n_bytes)
    inputs = [_inputs(operation, direction, shape, dtype) for _ in range(sets)]
    outputs = [torch.empty_like(inputs[0][0]) for _ in range(sets)]
    if direction == "forward":
        ours, variants = operation.forward, operation.VARIANTS
        peer, truth = _FORWARD_PEERS[operation.name], getattr(reference, operation.name)
    else:
        ours, variants = operation.backward, operation.BACKWARD_VARIANTS
        peer = _BACKWARD_PEERS[operation.name]
        truth = getattr(reference, f"{operation.name}_backward")
    torch.compiler.reset()  # or it gives up after a few functions, and runs them eagerly
    compiled = torch.compile(functools.partial(_out_of_place, peer), dynamic=False)
    candidates = {
        variant: lambda i, variant=variant: ours(
            *inputs[i % sets], variant=variant, out=outputs[i % sets]
        )
        for variant in variants
    }
    candidates["PyTorch eager"] = lambda i: peer(*inputs[i % sets], outputs[i % sets])
    for label, candidate in candidates.items():
        tolerance = _TOLERANCE[dtype] * (1 if label in variants else 4)
        _check(label, candidate, inputs[0], outputs[0], truth, tolerance)
    candidates["torch.compile"] = lambda i: compiled(*inputs[i % sets])
    candidates |= copies(n_bytes, sets)
    timings = bench.device_times(candidates, calls=max(20, sets), rounds=rounds)
    copy = fastest_copy(timings)
    rows = [
        bench.row(label, "ours" if label in variants else "peer", timing, n_bytes, copy)
        for label, timing in timings.items()
    ]
    return bench.make_record(
        f"{operation.name}.{direction}", shape, dtype, n_bytes, copy, rows,
        fingerprint(variants[activation.DEFAULT]), "python -m course_lib bench activation --record",
    )  # fmt: skip


def _out_of_place(peer, *inputs):
    return peer(*inputs, torch.empty_like(inputs[0]))


def _inputs(operation, direction, shape, dtype):
    x = torch.randn(shape, device="cuda").mul_(3).to(getattr(torch, dtype))
    if direction == "forward":
        return (x,)
    return torch.randn_like(x), x if operation.saves == "x" else operation.forward(x)


def _check(label, candidate, inputs, output, truth, tolerance):
    output.fill_(math.nan)
    candidate(0)
    if output.isnan().any():
        raise AssertionError(f"{label} left elements unwritten, so it is not timed")
    # Both ends of a long array stand for all of it: float64 on the CPU takes its time.
    for part in (slice(None, SAMPLE), slice(-SAMPLE, None)):
        expected = truth(*(tensor.flatten()[part].double().cpu().numpy() for tensor in inputs))
        actual = output.flatten()[part].double().cpu().numpy()
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        if not error <= tolerance:
            raise AssertionError(f"{label} is wrong, so it is not timed: error {error:.2e}")
