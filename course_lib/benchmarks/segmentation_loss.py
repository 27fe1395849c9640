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

from course_lib import ops
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
from course_lib.kernels import cross_entropy, dice

SHAPES = [(8, 2, 512, 512), (8, 7, 256, 256), (8, 5, 512, 512), (4, 21, 512, 512)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 4
LOSSES = ("cross_entropy", "dice")
DIRECTIONS = {"forward": (1, 1), "both": (3, 2)}  # arrays of logits, of targets, that are moved
COMMAND = "python -m course_lib bench segmentation_loss --record"
OURS = "ours"
IGNORED, SHARE = -1, 0.1
WEIGHTS = dict(dice_weight=0.5, cross_entropy_weight=0.5)
# Of the loss, relative to it, and of the gradient, relative to its largest element. PyTorch rounds
# probabilities on the way to bfloat16, hence its own.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
PEER_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 2e-2}


def cases(*, shapes=None, dtypes=None):
    """Each loss and direction at each shape; of `shapes`, (N, C, H, W), alone if given."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for loss in LOSSES:
                for direction in DIRECTIONS:
                    n_bytes = least_bytes(direction, shape, dtype)
                    build = functools.partial(_build, loss, direction, shape, dtype, n_bytes)
                    name = f"segmentation_loss.{loss}.{direction}"
                    yield Case(name, shape, dtype, COMMAND, n_bytes, build, default=OURS)


def draw(generator):
    """A shape that nobody chose."""
    H, W = (size(generator, 32, 512) for _ in range(2))
    return size(generator, 1, 16), size(generator, 2, 32), H, W


class Buffers:
    """One set of logits and targets."""

    def __init__(self, make, shape, dtype):
        N, C, H, W = shape
        self.logits = make.normal(*shape, dtype=dtype, scale=3)
        self.target = make.integers(C, N, H, W)
        if not make.is_empty:
            self.target[torch.rand((N, H, W), device=make.device) < SHARE] = IGNORED
        self.dloss = make.ones(dtype=dtype)


def ours(loss, direction, buffers):
    """(loss, dlogits or None), by our kernels."""
    logits, target = buffers.logits, buffers.target
    module, options = (dice, WEIGHTS) if loss == "dice" else (cross_entropy, {})
    found, *saved = module.forward(logits, target, ignore_index=IGNORED, **options)
    if direction == "forward":
        return found, None
    saved = logits, target, *saved
    return found, module.backward(buffers.dloss, *saved, ignore_index=IGNORED)


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


def _build(loss, direction, shape, dtype, n_bytes, make, n_sets):
    sets = [Buffers(make, shape, dtype) for _ in range(n_sets)]
    eager = functools.partial(theirs, loss, direction)

    def peer(function):
        return rotating(lambda one: function(one.logits, one.target), sets)

    def right():
        true = theirs(loss, "both", sets[0].logits.double(), sets[0].target)

        def judged(label, found, is_ours):
            wrong = (found[0].double() - true[0]).abs() / true[0]
            if found[1] is not None:
                error = (found[1].double() - true[1]).abs().max() / true[1].abs().max()
                wrong = torch.maximum(wrong, error)
            judge(label, wrong.item(), (TOLERANCE if is_ours else PEER_TOLERANCE)[dtype])

        return judged

    return Work(
        {OURS: rotating(functools.partial(ours, loss, direction), sets)},
        lambda: {EAGER: peer(eager), COMPILED: peer(compiled(eager))},
        right,
        limit=lambda: copies(make, n_bytes, n_sets),
        facts=lambda: _memory(loss, shape, dtype, make) if direction == "both" else {},
    )


def _memory(loss, shape, dtype, make):
    one = Buffers(Make(make.device), shape, dtype)
    functions = {
        "cross_entropy": lambda x, t: ops.cross_entropy(x, t, ignore_index=IGNORED),
        "dice": lambda x, t: ops.dice_loss(x, t, ignore_index=IGNORED, **WEIGHTS),
    }
    ways = {OURS: functions[loss], EAGER: functools.partial(peer_loss, loss)}
    return {"peak_extra_bytes": peak_memory(ways, one.logits, one.target)}


run = runner(cases, rounds=20)
