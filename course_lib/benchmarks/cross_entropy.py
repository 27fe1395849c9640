"""Cross-entropy on a GPU: our rungs beside PyTorch eager, torch.compile and a copy.

Forward, backward, and both one after the other, with class indices and the mean. Before anything is
timed it is checked, against float64. The record of both also holds the peak of the memory that each
way took beside logits and target, its gradient included.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F

from course_lib import ops, reference
from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
    Case,
    Make,
    Work,
    compiled,
    copies,
    judge,
    peak_memory,
    rotating,
    runner,
    size,
)
from course_lib.kernels import cross_entropy

SHAPES = [(128, 200), (16384, 1000), (8192, 32000), (4096, 50304)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 2
#: The rungs that take logits of two dimensions, and the one that AUTO takes of these.
RUNGS = [name for name in cross_entropy.FORWARD if name != "strided"]
DEFAULT = cross_entropy.default_variant(N_DIMS)
DIRECTIONS = {"forward": 1, "backward": 2, "both": 3}  # arrays of logits' size that must be moved
COMMAND = "python -m course_lib bench cross_entropy --record"
SAMPLE = 64  # rows whose gradient is checked, from both ends
CHUNK = 1 << 24  # elements taken to float64 at once for the loss of all rows
# The largest error allowed before anything is timed: of the loss, relative to it, and of the
# gradient, relative to the row's largest. Eager PyTorch rounds the log-probabilities to their
# dtype, hence its own.
_TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}
_PEER_TOLERANCE = {"float32": 4e-6, "bfloat16": 8e-2, "float16": 1e-2}
_aten = torch.ops.aten
_MEAN, _IGNORE = 1, -100  # as aten's operators want them


def cases(*, shapes=None, dtypes=None):
    """Each direction at each shape, (rows, classes), and dtype."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for direction, n_arrays in DIRECTIONS.items():
                n_bytes = n_arrays * math.prod(shape) * getattr(torch, dtype).itemsize
                build = functools.partial(_build, direction, shape, dtype, n_bytes)
                name = f"cross_entropy.{direction}"
                yield Case(name, shape, dtype, COMMAND, n_bytes, build, default=DEFAULT)


def draw(generator):
    """A shape that nobody chose."""
    n_classes = size(generator, 2, 65536)
    return size(generator, 16, max(17, (1 << 27) // n_classes)), n_classes


class Buffers:
    """One set of what a call reads and writes."""

    def __init__(self, make, shape, dtype):
        n_rows, n_classes = shape
        self.logits = make.normal(*shape, dtype=dtype, scale=3)
        self.target = make.integers(n_classes, n_rows)
        self.dlogits = make.empty(*shape, dtype=dtype)
        self.dloss = make.ones(dtype=dtype)
        self.loss, *self.saved = cross_entropy.forward(self.logits, self.target)

    @functools.cached_property
    def eager(self):
        return EagerBuffers(self)


class EagerBuffers:
    """What eager PyTorch keeps beside: the log-probabilities, and the gradient by them."""

    def __init__(self, buffers):
        self.log_p, self.dlog_p = (torch.empty_like(buffers.logits) for _ in range(2))
        self.loss, self.total_weight = (torch.empty_like(buffers.dloss) for _ in range(2))
        eager_forward(buffers, self)


def ours_forward(buffers, variant):
    buffers.loss, *buffers.saved = cross_entropy.forward(
        buffers.logits, buffers.target, variant=variant
    )
    return buffers.loss, None


def ours_backward(buffers, variant):
    dlogits = cross_entropy.backward(
        buffers.dloss, buffers.logits, buffers.target, *buffers.saved, variant=variant,
        out=buffers.dlogits,
    )  # fmt: skip
    return None, dlogits


def eager_forward(buffers, eager):
    """What F.cross_entropy runs, into memory that is there."""
    _aten._log_softmax.out(buffers.logits, 1, False, out=eager.log_p)
    _aten.nll_loss_forward.output(
        eager.log_p, buffers.target, None, _MEAN, _IGNORE, output=eager.loss,
        total_weight=eager.total_weight,
    )  # fmt: skip
    return eager.loss, None


def eager_backward(buffers, eager):
    """What autograd runs for F.cross_entropy, into memory that is there."""
    _aten.nll_loss_backward.grad_input(
        buffers.dloss, eager.log_p, buffers.target, None, _MEAN, _IGNORE, eager.total_weight,
        grad_input=eager.dlog_p,
    )  # fmt: skip
    dtype = buffers.logits.dtype
    _aten._log_softmax_backward_data.out(eager.dlog_p, eager.log_p, 1, dtype, out=buffers.dlogits)
    return None, buffers.dlogits


def _both(forward, backward):
    def both(*arguments):
        loss, _ = forward(*arguments)
        return loss, backward(*arguments)[1]

    return both


def _loss_and_gradient(logits, target):
    gradient, loss = torch.func.grad_and_value(F.cross_entropy)(logits, target)
    return loss, gradient


def _backward_of_log_p(dloss, log_p, target, total_weight):
    dlog_p = _aten.nll_loss_backward(dloss, log_p, target, None, _MEAN, _IGNORE, total_weight)
    return _aten._log_softmax_backward_data(dlog_p, log_p, 1, log_p.dtype)


def _build(direction, shape, dtype, n_bytes, make, n_sets):
    sets = [Buffers(make, shape, dtype) for _ in range(n_sets)]
    ours = {"forward": ours_forward, "backward": ours_backward}.get(
        direction, _both(ours_forward, ours_backward)
    )
    return Work(
        {rung: rotating(lambda one, rung=rung: ours(one, rung), sets) for rung in RUNGS},
        lambda: _peers(direction, sets),
        lambda: functools.partial(_judge, _expected(sets[0]), dtype),
        [sets[0].dlogits],
        lambda: copies(make, n_bytes, n_sets),
        facts=lambda: _memory(shape, dtype, make) if direction == "both" else {},
    )


def _peers(direction, sets):
    functions = {"forward": eager_forward, "backward": eager_backward}
    eager = functions.get(direction, _both(eager_forward, eager_backward))
    if direction == "backward":
        fused = compiled(_backward_of_log_p)

        def call(one):
            beside = one.eager
            return None, fused(one.dloss, beside.log_p, one.target, beside.total_weight)

    elif direction == "forward":
        fused = compiled(F.cross_entropy)

        def call(one):
            return fused(one.logits, one.target), None

    else:
        fused = compiled(_loss_and_gradient)

        def call(one):
            return fused(one.logits, one.target)

    return {
        EAGER: rotating(lambda one: eager(one, one.eager), sets),
        COMPILED: rotating(call, sets),
    }


def _ends(tensor):
    return torch.cat([tensor[:SAMPLE], tensor[-SAMPLE:]])


def _expected(buffers):
    """(the loss over all rows, the gradient of some of them and its scale), in float64."""
    logits, target = buffers.logits, buffers.target
    n_rows, n_classes = logits.shape
    step, loss = max(1, CHUNK // n_classes), 0.0
    for start in range(0, n_rows, step):
        part = logits[start : start + step].double(), target[start : start + step]
        loss += F.cross_entropy(*part, reduction="sum").item()
    arrays = _ends(logits).double().cpu().numpy(), _ends(target).cpu().numpy()
    gradient = reference.cross_entropy_backward(1 / n_rows, *arrays, reduction="sum")
    # The gradient is the difference of the probability and, at the label, 1.
    return loss / n_rows, gradient, reference.softmax(arrays[0]).max(1, keepdims=True) / n_rows


def _judge(expected, dtype, label, results, is_ours):
    tolerance = (_TOLERANCE if is_ours else _PEER_TOLERANCE)[dtype]
    loss, dlogits = results
    true_loss, gradient, scale = expected
    if loss is not None:
        judge(label, abs(loss.double().item() - true_loss) / true_loss, tolerance)
    if dlogits is not None:
        if dlogits.isnan().any():
            judge(label, math.nan, 0)
        error = np.abs(_ends(dlogits).double().cpu().numpy() - gradient)
        judge(label, (error / np.maximum(scale, np.abs(gradient))).max(), tolerance)


def _memory(shape, dtype, make):
    one = Make(make.device)
    functions = {"ours": ops.cross_entropy, EAGER: F.cross_entropy}
    logits, target = one.normal(*shape, dtype=dtype), one.integers(shape[1], shape[0])
    return {"peak_extra_bytes": peak_memory(functions, logits, target)}


run = runner(cases, rounds=20)
