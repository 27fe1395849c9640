"""Softmax on a GPU: our rungs beside PyTorch eager, torch.compile, Triton and a copy.

Forward at every shape and dtype beside all three, backward beside eager; log-softmax at one shape.
Before anything is timed it is checked, against float64. Ends with the readers' table
(`softmax_table`): what a batch of 128 rows of 200 classes costs.
"""

import functools
import importlib.util
import math

import numpy as np
import torch

from course_lib import bench, reference
from course_lib.benchmarks import softmax_table
from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
    Case,
    Work,
    chosen,
    compiled,
    copies,
    judge,
    measure,
    rotating,
    size,
)
from course_lib.kernels import softmax
from course_lib.runtime.host.launch import on_gpu

SHAPES = [
    (128, 200), (128, 1000), (1024, 10000), (49152, 512), (16384, 1024), (8192, 4096),
    (4096, 50304), (2048, 131072),
]  # fmt: skip
LOG_SHAPES = [(8192, 4096)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 2
COMMAND = "python -m course_lib bench softmax --record"
SAMPLE = 1 << 19  # elements checked at each end: float64 on the CPU takes its time
TUNED_ELEMENTS = 1 << 28  # in one replay while the settings of Triton are chosen
SHORTEST_SPLIT = 4096  # columns from which on `split` is timed: it is for long rows
# The largest error allowed before anything is timed: forward relative to the row's largest |y|,
# backward to its largest |y| times its largest |dy|; log-softmax, see `_expected`. A
# peer is allowed four times as much: it is not under test.
_TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}
_aten = torch.ops.aten
_EAGER = {
    "softmax.forward": lambda x, out: torch.softmax(x, -1, out=out),
    "log_softmax.forward": lambda x, out: torch.log_softmax(x, -1, out=out),
    "softmax.backward": lambda dy, y, out: _aten._softmax_backward_data.out(
        dy, y, -1, y.dtype, grad_input=out
    ),
    "log_softmax.backward": lambda dy, y, out: _aten._log_softmax_backward_data.out(
        dy, y, -1, y.dtype, out=out
    ),
}


def cases(*, shapes=None, dtypes=None):
    """Softmax at each shape, (rows, columns), log-softmax at LOG_SHAPES and at given ones."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for operation in softmax.OPERATIONS.values():
                if operation is softmax.softmax or shape in LOG_SHAPES:
                    for direction in ("forward", "backward"):
                        yield _case(operation, direction, shape, dtype)


def draw(generator):
    """A shape that nobody chose."""
    n_cols = size(generator, 16, 65536)
    return size(generator, 16, max(17, (1 << 27) // n_cols)), n_cols


def _case(operation, direction, shape, dtype):
    forward = direction == "forward"
    n_bytes = (2 if forward else 3) * math.prod(shape) * getattr(torch, dtype).itemsize
    return Case(
        f"{operation.name}.{direction}", shape, dtype, COMMAND, n_bytes,
        functools.partial(_build, operation, forward, shape, dtype, n_bytes),
        default=_default(operation, forward, shape, dtype),
    )  # fmt: skip


def _ladder(operation, forward):
    return operation.FORWARD if forward else operation.BACKWARD


def _default(operation, forward, shape, dtype):
    """The rung that AUTO takes."""
    device = "cuda" if on_gpu() else "cpu"
    x = torch.empty(1, dtype=getattr(torch, dtype), device=device).expand(shape)
    return softmax.default_choice(_ladder(operation, forward), (x,) * (1 if forward else 2)).rung


def run(*, names=None, shapes=None, dtypes=None, rounds=20, progress=lambda cases: cases,
        device="cuda"):  # fmt: skip
    """Check, then time, each case. Returns records, the readers' table among them.

    Of `names`, such as ["softmax.forward"], only these.
    """
    found = list(chosen(cases(shapes=shapes, dtypes=dtypes), names))

    def measured():
        yield from (measure(case, rounds=rounds, device=device) for case in progress(found))
        if names is None or "softmax.table" in names:
            yield from softmax_table.run(rounds=rounds)

    return bench.collected(measured())


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}, of the readers' table."""
    return {"softmax.table": softmax_table.kernel_hash()}


class Buffers:
    """One set of what a call reads and writes."""

    def __init__(self, make, operation, forward, shape, dtype):
        x = make.normal(*shape, dtype=dtype, scale=3)
        self.inputs, self.output = (x,), make.empty(*shape, dtype=dtype)
        if not forward:
            y = x if make.is_empty else operation.forward(x)
            self.inputs = make.normal(*shape, dtype=dtype), y


def _build(operation, forward, shape, dtype, n_bytes, make, n_sets):
    sets = [Buffers(make, operation, forward, shape, dtype) for _ in range(n_sets)]
    call = operation.forward if forward else operation.backward
    eager = _EAGER[f"{operation.name}.{'forward' if forward else 'backward'}"]
    default = _default(operation, forward, shape, dtype)
    log = operation is softmax.log_softmax

    def ours(one, rung):
        if rung.startswith("split") and shape[-1] < SHORTEST_SPLIT and default != "split":
            raise ValueError(f"it is for rows of {SHORTEST_SPLIT:,} elements and more")
        if rung.startswith("strided"):
            raise ValueError("it is for another axis than the last")
        return call(*one.inputs, variant=rung, out=one.output)

    def peers():
        found = {EAGER: rotating(lambda one: eager(*one.inputs, one.output), sets)}
        return found | _compiled(operation, forward, sets) | (_triton(log, sets) if forward else {})

    return Work(
        {
            rung: rotating(lambda one, rung=rung: ours(one, rung), sets)
            for rung in _ladder(operation, forward).variants
        },
        peers,
        lambda: functools.partial(_judge, _expected(operation, forward, sets[0].inputs), dtype),
        [sets[0].output],
        lambda: copies(make, n_bytes, n_sets),
    )


def _compiled(operation, forward, sets):
    log = operation is softmax.log_softmax
    if forward:
        function = functools.partial(torch.log_softmax if log else torch.softmax, dim=-1)
    else:
        of = _aten._log_softmax_backward_data if log else _aten._softmax_backward_data
        function = lambda dy, y: of(dy, y, -1, y.dtype)  # noqa: E731
    # Its best of several schedules each; the mode that bears the name also tunes by descent,
    # which takes minutes for all shapes.
    fused = compiled(lambda *inputs: function(*inputs), mode=None, options={"max_autotune": True})
    return {COMPILED: rotating(lambda one: fused(*one.inputs), sets)}


def _triton(log, sets):
    if importlib.util.find_spec("triton") is None:
        return {}
    from course_lib.benchmarks import softmax_triton

    xs, outputs = [one.inputs[0] for one in sets], [one.output for one in sets]
    calls = max(1, min(60, TUNED_ELEMENTS // xs[0].numel()))
    best = softmax_triton.tuned(xs, outputs, log=log, calls=calls)
    return {} if best is None else {"Triton": best}


def _ends(tensor):
    """Whole rows from both ends, which stand for all: float64 on the CPU takes its time."""
    n_rows = min(tensor.shape[0], max(1, SAMPLE // tensor.shape[1]))
    return torch.cat([tensor[:n_rows], tensor[-n_rows:]]).double().cpu().numpy()


def _expected(operation, forward, inputs):
    """(the right result, the scale of its rows' errors), of the sampled rows."""
    arrays = [_ends(tensor) for tensor in inputs]
    suffix = "" if forward else "_backward"
    truth = getattr(reference, f"{operation.name}{suffix}")(*arrays)
    largest = [np.abs(array).max(axis=-1, keepdims=True) for array in (truth, *arrays)]
    if forward:
        return truth, largest[0]
    if operation is softmax.softmax:
        return truth, largest[1] * largest[2]
    # dy is summed over the row, and the partial sums of n numbers of either sign grow like √n.
    partial_sum = largest[1] * math.sqrt(truth.shape[-1])
    return truth, np.maximum(
        largest[1], np.exp(arrays[1]).max(axis=-1, keepdims=True) * partial_sum
    )


def _judge(expected, dtype, label, result, is_ours):
    if result.isnan().any():
        judge(label, math.nan, 0)
    truth, scale = expected
    error = (np.abs(_ends(result) - truth) / scale).max()
    judge(label, error, _TOLERANCE[dtype] * (1 if is_ours else 4))
