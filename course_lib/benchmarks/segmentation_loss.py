"""The losses of segmentation on a GPU: ours beside PyTorch eager, torch.compile and a copy.

Cross-entropy, and Dice with cross-entropy, of logits (N, C, H, W), contiguous, and a class for each
pixel, of which a tenth is ignored: forward, and forward with backward. Before anything is timed it
is checked, against float64. Memory is the limit: rows say how much of a copy's bandwidth is reached
with the bytes that must be moved, logits and targets once each way and the gradient once.
"""

import functools
import math

import torch
import torch.nn.functional as F

from course_lib import bench, ops
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.kernels import cross_entropy, dice
from course_lib.kernels.softmax import columns, strided

SHAPES = [(8, 2, 512, 512), (8, 7, 256, 256), (8, 5, 512, 512), (4, 21, 512, 512)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 4
LOSSES = ("cross_entropy", "dice")
DIRECTIONS = {"forward": (1, 1), "both": (3, 2)}  # arrays of logits, of targets, that are moved
DEVICE = "cuda"
COMMAND = "python -m course_lib bench segmentation_loss --record"
CALLS = 20
IGNORED, SHARE = -1, 0.1
WEIGHTS = dict(dice_weight=0.5, cross_entropy_weight=0.5)
# Of the loss, relative to it, and of the gradient, relative to its largest element. PyTorch rounds
# probabilities on the way to bfloat16, hence its own.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
PEER_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 2e-2}


def run(*, shapes=SHAPES, dtypes=DTYPES, rounds=20, progress=lambda cases: cases):
    """Check, then time, each case; of `shapes`, (N, C, H, W), alone if given. Returns records."""
    cases = [
        (loss, direction, tuple(shape), dtype)
        for shape in shapes
        for dtype in dtypes
        for loss in LOSSES
        for direction in DIRECTIONS
    ]
    return bench.collected(_measure(*case, rounds) for case in progress(cases))


class Buffers:
    """One set of logits and targets."""

    def __init__(self, shape, dtype):
        N, C, H, W = shape
        self.logits = torch.randn(shape, device=DEVICE).mul_(3).to(getattr(torch, dtype))
        self.target = torch.randint(C, (N, H, W), device=DEVICE)
        self.target[torch.rand((N, H, W), device=DEVICE) < SHARE] = IGNORED
        self.dloss = torch.ones((), device=DEVICE, dtype=self.logits.dtype)


def ours(loss, direction, buffers):
    """(loss, dlogits or None), by our kernels."""
    logits, target = buffers.logits, buffers.target
    if loss == "dice":
        found, factors = dice.forward(logits, target, ignore_index=IGNORED, **WEIGHTS)
        if direction == "forward":
            return found, None
        saved = logits, target, factors
        return found, dice.backward(buffers.dloss, *saved, ignore_index=IGNORED)
    found, *saved = cross_entropy.forward(logits, target, ignore_index=IGNORED)
    if direction == "forward":
        return found, None
    saved = logits, target, *saved
    return found, cross_entropy.backward(buffers.dloss, *saved, ignore_index=IGNORED)


def peer_loss(loss, logits, target):
    """The loss in PyTorch's operators."""
    entropy = F.cross_entropy(logits, target, ignore_index=IGNORED)
    if loss == "cross_entropy":
        return entropy
    valid = (target != IGNORED).unsqueeze(1)
    p = logits.softmax(1) * valid
    t = F.one_hot(target.clamp_min(0), logits.shape[1]).movedim(-1, 1) * valid
    both, size = (p * t).sum((0, 2, 3)), p.sum((0, 2, 3)) + t.sum((0, 2, 3))
    found = 1 - ((2 * both + 1) / (size + 1)).mean()
    return WEIGHTS["dice_weight"] * found + WEIGHTS["cross_entropy_weight"] * entropy


def theirs(loss, direction, logits, target):
    """(loss, dlogits or None), by PyTorch."""
    if direction == "forward":
        return peer_loss(loss, logits, target), None
    gradient, found = torch.func.grad_and_value(functools.partial(peer_loss, loss))(logits, target)
    return found, gradient


def least_bytes(direction, shape, dtype):
    """Bytes that must be moved."""
    of_logits, of_target = DIRECTIONS[direction]
    n = math.prod(shape)
    return n * getattr(torch, dtype).itemsize * of_logits + n // shape[1] * 8 * of_target


def _measure(loss, direction, shape, dtype, rounds):
    n_bytes = least_bytes(direction, shape, dtype)
    sets = bench.buffer_sets(n_bytes)
    buffers = [Buffers(shape, dtype) for _ in range(sets)]
    expected = theirs(loss, "both", buffers[0].logits.double(), buffers[0].target)
    candidates = _candidates(loss, direction, buffers)
    for label, candidate in candidates.items():
        allowed = (TOLERANCE if label == "ours" else PEER_TOLERANCE)[dtype]
        _check(label, candidate(0), expected, allowed)
    del expected
    candidates |= copies(n_bytes, sets)
    timings = bench.device_times(candidates, calls=max(CALLS, sets), rounds=rounds)
    copy = fastest_copy(timings)
    rows = [
        bench.row(label, "ours" if label == "ours" else "peer", timing, n_bytes, copy)
        for label, timing in timings.items()
    ]
    name = f"segmentation_loss.{loss}.{direction}"
    record = bench.make_record(
        name, shape, dtype, n_bytes, copy, rows, kernel_hashes()[name], COMMAND
    )
    record["default"] = "ours"
    if direction == "both":
        del candidates, buffers
        record["peak_extra_bytes"] = peak_memory(loss, shape, dtype)
    return record


def _candidates(loss, direction, buffers):
    torch.compiler.reset()  # or it gives up after a few functions, and runs them eagerly
    eager = functools.partial(theirs, loss, direction)
    compiled = torch.compile(
        eager, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs"
    )
    kept = [None] * len(buffers)  # gradients written again at once would be in the cache

    def candidate(function):
        def call(i):
            i %= len(buffers)
            kept[i] = function(buffers[i])
            return kept[i]

        return call

    return {
        "ours": candidate(functools.partial(ours, loss, direction)),
        "PyTorch eager": candidate(lambda one: eager(one.logits, one.target)),
        "torch.compile": candidate(lambda one: compiled(one.logits, one.target)),
    }


def _check(label, results, expected, allowed):
    (loss, gradient), (true_loss, true_gradient) = results, expected
    wrong = (loss.double() - true_loss).abs() / true_loss
    if gradient is not None:
        error = (gradient.double() - true_gradient).abs().max() / true_gradient.abs().max()
        wrong = torch.maximum(wrong, error)
    if not wrong <= allowed:
        raise AssertionError(f"{label} is wrong, so it is not timed: error {wrong.item():.2e}")


def peak_memory(loss, shape, dtype):
    """Bytes at the peak of both passes through autograd, beside logits and target, by label."""
    one = Buffers(shape, dtype)
    logits, target, found = one.logits.requires_grad_(), one.target, {}
    functions = {
        "cross_entropy": lambda x, t: ops.cross_entropy(x, t, ignore_index=IGNORED),
        "dice": lambda x, t: ops.dice_loss(x, t, ignore_index=IGNORED, **WEIGHTS),
    }
    eager = functools.partial(peer_loss, loss)
    for label, function in (("ours", functions[loss]), ("PyTorch eager", eager)):
        for _ in range(2):  # the first run may load libraries
            logits.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            function(logits, target).backward()
            torch.cuda.synchronize()
            found[label] = torch.cuda.max_memory_allocated() - before
    return found


def kernel_hash(loss):
    """Of all that may be launched here, and of what decides it."""
    decide = strided.slots_for, columns.fit_vectors, columns.seen_from
    if loss == "dice":
        kernels = *dice.VARIANTS["fused"], *dice.BACKWARD_VARIANTS["fused"]
        return bench.kernel_hash((*kernels, *decide))
    of = cross_entropy.strided
    kernels = *of.FORWARD.values(), *of.BACKWARD.values(), cross_entropy.finish_kernel
    return bench.kernel_hash((*kernels, *decide))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {
        f"segmentation_loss.{loss}.{direction}": kernel_hash(loss)
        for loss in LOSSES
        for direction in DIRECTIONS
    }
