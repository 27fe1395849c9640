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

from course_lib import bench, ops, reference
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.kernels import cross_entropy

SHAPES = [(128, 200), (16384, 1000), (8192, 32000), (4096, 50304)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 2
DIRECTIONS = {"forward": 1, "backward": 2, "both": 3}  # arrays of logits' size that must be moved
DEVICE = "cuda"
COMMAND = "python -m course_lib bench cross_entropy --record"
LONGEST_CALL = 50_000  # µs; a slower rung is left out, and the record says so
REPLAY = 5_000  # µs that one replay of a captured graph may take
SAMPLE = 64  # rows whose gradient is checked, from both ends
CHUNK = 1 << 24  # elements taken to float64 at once for the loss of all rows
# The largest error allowed before anything is timed: of the loss, relative to it, and of the
# gradient, relative to the row's largest. Eager PyTorch rounds the log-probabilities to their
# dtype, hence its own.
_TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}
_PEER_TOLERANCE = {"float32": 4e-6, "bfloat16": 8e-2, "float16": 1e-2}
_aten = torch.ops.aten
_MEAN, _IGNORE = 1, -100  # as aten's operators want them


def run(*, names=None, shapes=SHAPES, dtypes=DTYPES, rounds=20, progress=lambda cases: cases):
    """Check, then time, each case. Returns records.

    Of `names`, such as ["cross_entropy.forward"], only these. Raises ValueError for a shape that
    is not (n_rows, n_classes), both positive.
    """
    for shape in shapes:
        if len(shape) != 2 or not all(shape):
            raise ValueError(f"a shape is (rows, classes), both positive; not {tuple(shape)}")
    cases = [
        (direction, tuple(shape), dtype)
        for shape in shapes
        for dtype in dtypes
        for direction in DIRECTIONS
        if names is None or f"cross_entropy.{direction}" in names
    ]
    return [_measure(*case, rounds) for case in progress(cases)]


def kernel_hash(direction):
    """Of all that the default variant may launch here, and of what decides it."""
    forward, backward = (
        [table["indices"][cross_entropy.DEFAULT]]
        for table in (cross_entropy.FORWARD_KERNELS, cross_entropy.BACKWARD_KERNELS)
    )
    forward.append(cross_entropy.finish_kernel)
    kernels = {"forward": forward, "backward": backward, "both": forward + backward}
    return bench.kernel_hash((*kernels[direction], cross_entropy.plan))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {f"cross_entropy.{direction}": kernel_hash(direction) for direction in DIRECTIONS}


class _Buffers:
    """One set of what a call reads and writes."""

    def __init__(self, shape, dtype):
        dtype = getattr(torch, dtype)
        n_rows, n_classes = shape
        self.logits = torch.randn(shape, device=DEVICE).mul_(3).to(dtype)
        self.target = torch.randint(n_classes, (n_rows,), device=DEVICE)
        self.dlogits = torch.empty_like(self.logits)
        self.dloss = torch.ones((), device=DEVICE, dtype=dtype)
        self.loss, *self.saved = cross_entropy.forward(self.logits, self.target)


class _EagerBuffers:
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


def _measure(direction, shape, dtype, rounds):
    n_bytes = DIRECTIONS[direction] * math.prod(shape) * getattr(torch, dtype).itemsize
    sets = bench.buffer_sets(n_bytes)
    buffers = [_Buffers(shape, dtype) for _ in range(sets)]
    eager = [_EagerBuffers(one) for one in buffers]
    expected = _expected(buffers[0])
    ours, left_out = _ours(direction, buffers), {}
    peers = _peers(direction, buffers, eager)
    calls = {}
    for label, candidate in (ours | peers).items():
        buffers[0].dlogits.fill_(math.nan)
        tolerance = (_TOLERANCE if label in ours else _PEER_TOLERANCE)[dtype]
        _check(label, candidate(0), expected, tolerance)
        microseconds = _once(candidate)
        if microseconds > LONGEST_CALL and label in ours:
            left_out[label] = f"a call takes {microseconds / 1e3:,.0f} ms"
            del ours[label]
        calls[label] = max(1, min(max(60, sets), int(REPLAY / microseconds)))
    candidates = ours | peers | copies(n_bytes, sets)
    calls |= dict.fromkeys(candidates.keys() - calls.keys(), max(calls.values()))
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    copy = fastest_copy(timings)
    rows = [
        bench.row(label, "ours" if label in ours else "peer", timing, n_bytes, copy)
        for label, timing in timings.items()
    ]
    record = bench.make_record(
        f"cross_entropy.{direction}", shape, dtype, n_bytes, copy, rows, kernel_hash(direction),
        COMMAND,
    )  # fmt: skip
    record |= {"default": cross_entropy.DEFAULT, "left_out": left_out}
    if direction == "both":
        del candidates, ours, peers, eager, buffers
        record["peak_extra_bytes"] = peak_memory(shape, dtype)
    return record


def _ours(direction, buffers):
    functions = {"forward": ours_forward, "backward": ours_backward}
    function = functions.get(direction, _both(ours_forward, ours_backward))
    return {
        variant: lambda i, variant=variant: function(buffers[i % len(buffers)], variant)
        for variant in cross_entropy.VARIANTS
    }


def _peers(direction, buffers, eager):
    functions = {"forward": eager_forward, "backward": eager_backward}
    function = functions.get(direction, _both(eager_forward, eager_backward))
    torch.compiler.reset()  # or it gives up after a few functions, and runs them eagerly
    compile_ = functools.partial(
        torch.compile, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs"
    )
    kept = [None] * len(buffers)  # as long as ours: written again at once, it would be in the cache
    if direction == "backward":
        compiled = compile_(_backward_of_log_p)

        def call(i):
            one, beside = buffers[i], eager[i]
            return None, compiled(one.dloss, beside.log_p, one.target, beside.total_weight)

    elif direction == "forward":
        compiled = compile_(F.cross_entropy)

        def call(i):
            return compiled(buffers[i].logits, buffers[i].target), None

    else:
        compiled = compile_(_loss_and_gradient)

        def call(i):
            return compiled(buffers[i].logits, buffers[i].target)

    def compiled_candidate(i):
        i %= len(kept)
        kept[i] = call(i)
        return kept[i]

    return {
        "PyTorch eager": lambda i: function(buffers[i % len(buffers)], eager[i % len(eager)]),
        "torch.compile": compiled_candidate,
    }


def _once(candidate):
    """µs that one call takes, roughly: the start of a launch counts too."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    candidate(0)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


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


def _check(label, results, expected, tolerance):
    loss, dlogits = results
    true_loss, gradient, scale = expected
    if loss is not None:
        error = abs(loss.double().item() - true_loss) / true_loss
        if not error <= tolerance:
            raise AssertionError(f"{label} is wrong, so it is not timed: loss off by {error:.2e}")
    if dlogits is not None:
        if dlogits.isnan().any():
            raise AssertionError(f"{label} left elements unwritten, so it is not timed")
        error = np.abs(_ends(dlogits).double().cpu().numpy() - gradient)
        error = (error / np.maximum(scale, np.abs(gradient))).max()
        if not error <= tolerance:
            raise AssertionError(f"{label} is wrong, so it is not timed: error {error:.2e}")


def peak_memory(shape, dtype):
    """Bytes at the peak of a forward and a backward pass, beside logits and target, by label."""
    n_rows, n_classes = shape
    logits = torch.randn(shape, device=DEVICE).to(getattr(torch, dtype)).requires_grad_()
    target = torch.randint(n_classes, (n_rows,), device=DEVICE)

    found = {}
    for label, function in (("ours", ops.cross_entropy), ("PyTorch eager", F.cross_entropy)):
        for _ in range(2):  # the first run may load libraries
            logits.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            function(logits, target).backward()
            torch.cuda.synchronize()
            found[label] = torch.cuda.max_memory_allocated() - before
    return found
