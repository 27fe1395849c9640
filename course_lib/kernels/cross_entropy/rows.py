"""How `naive`, `online` and `vectorised` are launched: on logits (n_rows, n_classes)."""

import functools
import math

from course_lib.kernels.cross_entropy import finishing
from course_lib.kernels.cross_entropy.backward_kernels import make_backward_kernels
from course_lib.kernels.cross_entropy.forward_kernels import (
    BLOCK_SIZE,
    N_STATS,
    make_forward_kernels,
)
from course_lib.kernels.cross_entropy.targets import KINDS
from course_lib.kernels.operation import Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

ENOUGH_THREADS = 132 * 512  # keep the largest chip of today busy
LANES_UP_TO = 512  # vectors of a row that one warp's lanes read at most
PER_LANE, PER_THREAD = 4, 16  # vectors of a row that a lane, a thread of a block, reads about
LEAST_BLOCK, MOST_BLOCK = 128, 512  # threads
FEWER_ROWS_MOST_BLOCK = 1024
MOST_TEAM = 1 << 14  # threads that share a row in the backward pass

#: Kind of target -> rung -> kernel.
FORWARD_KERNELS = {name: make_forward_kernels(kind) for name, kind in KINDS.items()}
BACKWARD_KERNELS = {name: make_backward_kernels(kind) for name, kind in KINDS.items()}


def launch_forward(
    launcher, kernels, kind, logits, target, weights, numbers, loss, normaliser, reduction
):
    """Fill `loss` and `normaliser`; the stats of each row."""
    n_rows, n_classes = logits.shape
    stats = arrays.empty((n_rows, N_STATS), like=logits, dtype="float32")
    losses = finishing.place_for(n_rows, loss, reduction)
    if n_rows:
        operands = (logits, target, *weights, stats, losses, *numbers)
        by_vectors = (logits, *_soft(kind, target))
        launcher(kernels[kind], n_rows, n_classes, operands, by_vectors, True)
    finishing.finish(losses, stats, N_STATS, loss, normaliser, reduction)
    return stats


def launch_backward(
    launcher, kernels, kind, dloss, dloss_step, logits, target, weights, stats, normaliser,
    dlogits, numbers,
):  # fmt: skip
    """Fill dlogits. There is a row at least."""
    operands = (
        dloss, dloss_step, logits, target, *weights, stats, normaliser, dlogits, *numbers,
    )  # fmt: skip
    by_vectors = (logits, dlogits, *_soft(kind, target))
    launcher(kernels[kind], *logits.shape, operands, by_vectors, False)


# Launchers of one rung's kernel. `by_vectors` are the arrays of logits' shape; for `together`, see
# `plan`.


def _launch_naive(kernel, n_rows, n_classes, operands, by_vectors, together):
    launch(kernel, math.ceil(n_rows / BLOCK_SIZE), BLOCK_SIZE, *operands, flat=True)


def _launch_online(kernel, n_rows, n_classes, operands, by_vectors, together):
    launch(kernel, n_rows, BLOCK_SIZE, *operands, flat=True)


def _launch_vectorised(kernel, n_rows, n_classes, operands, by_vectors, together):
    team, block = plan(n_rows, n_classes * by_vectors[0].dtype.itemsize, together)
    launch(
        kernel, math.ceil(n_rows * team / block), block,
        *operands, _offset(*by_vectors), team.bit_length() - 1, flat=True, overlap=True,
    )  # fmt: skip


def plan(n_rows, n_bytes, together=True):
    """(threads that share a row, threads of a block) for `n_rows` rows of `n_bytes` each.

    `together` says that the threads of a row add something up, so they must be in one block.
    """
    n_vectors = math.ceil(n_bytes / VECTOR_BYTES)
    if n_vectors <= LANES_UP_TO:
        team = min(32, _power_of_two(n_vectors / PER_LANE))
        while n_rows * team < ENOUGH_THREADS and team < min(32, n_vectors):
            team *= 2
    else:
        team = max(LEAST_BLOCK, min(MOST_BLOCK, _power_of_two(n_vectors / PER_THREAD)))
        most = FEWER_ROWS_MOST_BLOCK if together else MOST_TEAM
        while n_rows * team < ENOUGH_THREADS and team < min(most, n_vectors / 2):
            team *= 2
    return team, team if together and team > 32 else BLOCK_SIZE


def _power_of_two(x):
    return 1 << max(0, math.ceil(math.log2(x)))


def _offset(*operands):
    """Elements from the last 16-byte boundary to each of the arrays; -1 where they disagree."""
    offsets = {arrays.address_of(operand) % VECTOR_BYTES for operand in operands}
    return offsets.pop() // operands[0].dtype.itemsize if len(offsets) == 1 else -1


def _soft(kind, target):
    return (target,) if kind == "probabilities" else ()


def _rungs(launch_pass, kernels, more=()):
    for name, launcher in (
        ("naive", _launch_naive),
        ("online", _launch_online),
        ("vectorised", _launch_vectorised),
    ):
        mine = {kind: kernels[kind][name] for kind in KINDS}
        run = functools.partial(launch_pass, launcher, mine)
        yield Rung(name, run, (*mine.values(), *more))


FORWARD_RUNGS = tuple(_rungs(launch_forward, FORWARD_KERNELS, finishing.KERNELS))
BACKWARD_RUNGS = tuple(_rungs(launch_backward, BACKWARD_KERNELS))


def specialisations(dtype):
    """(label, kernel, argument types) of all that is compiled for `dtype`; arrays as (dtype, 1)."""
    row, numbers = ("float32", 1), ["int64", "int64", "float32", "float32"]
    array = (dtype, 1)
    for kind in KINDS:
        target = array if kind == "probabilities" else ("int64", 1)
        inputs = [array, target, array, "boolean"]
        found_dloss = [array, "int64"]
        for name, kernel in FORWARD_KERNELS[kind].items():
            split = ["int64"] * 2 if name == "vectorised" else []
            label = f"cross_entropy {{}} {name}, {kind} {dtype}"
            types = [*inputs, row, row, *numbers, *split]
            yield label.format("forward"), kernel, types
            types = [*found_dloss, *inputs, row, row, array, *numbers, *split]
            yield label.format("backward"), BACKWARD_KERNELS[kind][name], types
