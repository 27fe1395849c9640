"""Lesson 21: more than one GPU: what devices exchange that train one network, and how.

| exercise | it gets | what is new |
|---|---|---|
| joint_batch | what devices found of their parts of a batch | gradients add up, statistics don't |
| ring_reduce_scatter | x, inbox, arrived, y; a block is a device | a flag for each arrival |
| ring_all_gather | part, arrived, y; a block is a device | pieces that are passed on |
| all_reduce_cost | bytes, devices, latency, bandwidth | a model: latency and bytes |

Arrays of the kernels are float32, but for `arrived`, an int32 for each device, 0 at first. There
are as many pieces of a gradient as devices: x is (devices, pieces, n). Row r of an array stands for
the memory of device r: a device reads its own row, and writes to its own and to its right
neighbour's. The ring is that of Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations (2009); the model that of Thakur, Rabenseifner and Gropp, Optimization of
collective communication operations in MPICH (2005).
"""

import math

import numpy as np

from course_lib import cuda, simulator
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import pair_of
from course_lib.teach.checking.rings import RingAlone
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case

# ---- joint_batch -----------------------------------------------------------------------------


def joint_batch(gradients, means, variances, counts):
    share = counts / counts.sum()
    gradient, mean = share @ gradients, share @ means
    variance = share @ (variances + (means - mean) ** 2)
    return gradient, mean, variance


def _joint_reference(gradients, means, variances, counts):
    total, counts = counts.sum(), counts[:, None]
    gradient = (gradients * counts).sum(0) / total
    mean = (means * counts).sum(0) / total
    squares = ((variances + means**2) * counts).sum(0) / total
    return gradient, mean, squares - mean**2


def _joint_cases(rng):
    shapes = [(1, 1, 1), (2, 1, 1), (2, 3, 2), (3, 2, 4), (4, 7, 3), (5, 16, 6), (8, 5, 5)]
    shapes.append((drawn(rng, 5, 9), drawn(rng, 40, 60), drawn(rng, 10, 20)))
    return [
        case(
            1,
            1,
            gradients=numbers(rng, (devices, weights), 2.0, 1.0, np.float64),
            means=numbers(rng, (devices, channels), 3.0, 2.0, np.float64),
            variances=0.2 + rng.gamma(2.0, 1.0, (devices, channels)),
            counts=rng.permutation(np.arange(1, devices + 1)) * 3 + 1,
        )
        for devices, weights, channels in shapes
    ]


JOINT_BATCH = Exercise(
    name="joint_batch",
    title="What the joint batch would have given",
    solution=joint_batch,
    kind="function",
    reference=_joint_reference,
    cases=_joint_cases,
    tolerance=Tolerance(1e-10, 1e-10, "float64 sums of a few numbers; the reference cancels some"),
    outputs=("gradient", "mean", "variance"),
    dtype=np.float64,
    hints=(
        "Device 0 has 24 pictures and device 1 has 8. What is the mean of all 32 losses, if you "
        "know the mean of the 24 and the mean of the 8?",
        "Each mean counts with its share of the pictures, `counts / counts.sum()`: that of the "
        "losses, and so their gradient, and that of the channels. A variance is the mean square of "
        "the distance from a mean, and that mean is another one now: by "
        "`(means - mean) ** 2` more.",
        "```python\nshare = counts / ...\ngradient, mean = share @ ..., share @ means\n"
        "variance = share @ (variances + (means - ...) ** 2)\n```",
    ),
)


# ---- ring_reduce_scatter ---------------------------------------------------------------------


@cuda.jit(device=True)
def wait_for(arrived, rank, number):
    """All threads of the block wait until `number` pieces have arrived at device `rank`."""
    if cuda.threadIdx.x == 0:
        while cuda.atomic.add(arrived, rank, 0) < number:
            pass
        cuda.threadfence()  # what is read below is no older than the flag
    cuda.syncthreads()


@cuda.jit
def ring_reduce_scatter(x, inbox, arrived, y):
    rank, ranks, t = cuda.blockIdx.x, x.shape[0], cuda.threadIdx.x
    right = (rank + 1) % ranks
    for step in range(ranks):
        piece = (rank - 1 - step) % ranks
        wait_for(arrived, rank, step)
        for i in range(t, x.shape[2], cuda.blockDim.x):
            total = x[rank, piece, i]
            if step > 0:
                total += inbox[rank, step - 1, i]
            if step < ranks - 1:
                inbox[right, step, i] = total
            else:
                y[rank, i] = total
        cuda.syncthreads()
        if t == 0 and step < ranks - 1:
            cuda.threadfence()
            cuda.atomic.add(arrived, right, 1)


def _rings(rng):
    """Return devices, numbers in a piece, and threads of a block."""
    return [
        (1, 1, 32),
        (2, 1, 1),
        (2, 0, 32),
        (3, 1, 1),
        (2, 5, 2),
        (3, 3, 64),
        (4, 2, 32),
        (1, 40, 32),
        (2, 70, 64),
        (5, 7, 3),
        (drawn(rng, 6, 7), drawn(rng, 35, 45), 256),
    ]


def _scatter_cases(rng):
    return [
        case(ranks, threads, x=numbers(rng, (ranks, ranks, n), 2.0, 1.0))
        for ranks, n, threads in _rings(rng)
    ]


def _with_inbox(kernel, run):
    """Launch it with flags at 0, and an inbox of poison: a place for each piece that comes."""
    ranks, _, n = run.x.shape
    inbox = np.full((ranks, max(ranks - 1, 1), n), np.nan, np.float32)
    _launch(kernel, run, run.x, inbox)


def _launch(kernel, run, *before):
    """Launch it with these arrays, flags at 0 and the output."""
    ranks = run.y.shape[0]
    given = [*before, np.zeros(ranks, np.int32)]
    if not run.engine.simulated:
        given = [cuda.to_device(each) if isinstance(each, np.ndarray) else each for each in given]
    # So few devices never go round that often unless they wait in vain.
    with simulator.options(max_steps=25_000):
        run.launch(kernel, *given, run.y)


RING_REDUCE_SCATTER = Exercise(
    name="ring_reduce_scatter",
    title="Sums that go round the ring",
    solution=ring_reduce_scatter,
    reference=lambda x: x.sum(0),
    cases=_scatter_cases,
    tolerance=Tolerance(1e-5, 1e-5, "seven numbers at most are added in float32"),
    dtype=np.float32,
    call=_with_inbox,
    once=True,
    about=(RingAlone(),),
    repeatable=True,
    hints=(
        "Go through the table of four devices: what does device 2 send in step 0, what has come "
        "until step 1, and to what is it added? Which piece must it be in the last step, so that "
        "each device ends with its own?",
        "Piece `(rank - 1 - step) % ranks`: in step 0 the left neighbour's, in the last step its "
        "own. In step `step`, as many pieces must have arrived. A step is announced to the right "
        "neighbour once *all* threads have written (`cuda.syncthreads()`): one thread puts a "
        "fence, then adds 1 to its flag, atomically.",
        "```python\nwait_for(arrived, rank, ...)\n...\ncuda.syncthreads()\n"
        "if t == 0 and step < ranks - 1:\n    cuda.threadfence()\n"
        "    cuda.atomic.add(arrived, ..., 1)\n```",
    ),
)


# ---- ring_all_gather -------------------------------------------------------------------------


@cuda.jit
def ring_all_gather(part, arrived, y):
    rank, ranks, t = cuda.blockIdx.x, part.shape[0], cuda.threadIdx.x
    right = (rank + 1) % ranks
    for i in range(t, part.shape[1], cuda.blockDim.x):
        y[rank, rank, i] = part[rank, i]
    for step in range(ranks - 1):
        piece = (rank - step) % ranks
        wait_for(arrived, rank, step)
        for i in range(t, part.shape[1], cuda.blockDim.x):
            y[right, piece, i] = y[rank, piece, i]
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, right, 1)


def _gather_cases(rng):
    return [
        case(ranks, threads, part=numbers(rng, (ranks, n), 2.0, 1.0))
        for ranks, n, threads in _rings(rng)
    ]


RING_ALL_GATHER = Exercise(
    name="ring_all_gather",
    title="Pieces that go round the ring",
    solution=ring_all_gather,
    reference=lambda part: np.stack([part] * len(part)),
    cases=_gather_cases,
    tolerance=EXACT,
    dtype=np.float32,
    call=lambda kernel, run: _launch(kernel, run, run.part),
    once=True,
    about=(RingAlone(),),
    repeatable=True,
    hints=(
        "In step 0 a device sends the piece that it has. What can it send in step 1?",
        "What has just come from the left: `(rank - step) % ranks`. It lies in `y[rank, piece]` "
        "already, and goes to `y[right, piece]`. Waiting and announcing are as before.",
        "```python\npiece = (rank - ...) % ranks\nwait_for(arrived, rank, ...)\n"
        "for i in range(t, part.shape[1], cuda.blockDim.x):\n"
        "    y[right, piece, i] = y[rank, ..., i]\n```",
    ),
)


# ---- all_reduce_cost -------------------------------------------------------------------------


def all_reduce_cost(n_bytes, ranks, latency, gbps):
    per_us = 1000 * gbps  # bytes in a microsecond
    gather = latency + (ranks - 1) * n_bytes / per_us
    tree = 2 * math.ceil(math.log2(ranks)) * (latency + n_bytes / per_us)
    ring = 2 * (ranks - 1) * (latency + n_bytes / ranks / per_us)
    return gather, tree, ring


def _cost_reference(n_bytes, ranks, latency, gbps):
    whole = latency + n_bytes * 1e-3 / gbps
    piece = latency + n_bytes * 1e-3 / (ranks * gbps)
    rounds, reached = 0, 1
    while reached < ranks:
        rounds, reached = rounds + 1, 2 * reached
    others = ranks - 1
    gather = latency + others * n_bytes * 1e-3 / gbps
    return gather, rounds * whole * 2, others * piece + others * piece


def _cost_cases(rng):
    sizes = [(1, 2), (1000, 2), (4, 3), (4096, 4), (10_000, 5), (10**8, 8), (10**9, 1024)]
    sizes += [(drawn(rng, 10**3, 10**7), drawn(rng, 6, 99)) for _ in range(3)]
    sizes.append((drawn(rng, 5 * 10**9, 10**10), drawn(rng, 1025, 4000)))
    return [
        case(
            1,
            1,
            n_bytes=np.int64(n_bytes),
            ranks=np.int64(ranks),
            latency=np.float64(rng.uniform(0.5, 20)),
            gbps=np.float64(rng.uniform(2, 500)),
        )
        for n_bytes, ranks in sizes
    ]


ALL_REDUCE_COST = Exercise(
    name="all_reduce_cost",
    title="Gather, tree, ring: a model of what they cost",
    solution=all_reduce_cost,
    kind="function",
    reference=_cost_reference,
    cases=_cost_cases,
    tolerance=Tolerance(1e-12, 0.0, "a few float64 operations"),
    outputs=("gather", "tree", "ring"),
    dtype=np.float64,
    call=pair_of,
    hints=(
        "How many messages go one after another, and how long is one of them? A message of b bytes "
        "takes the latency, and then b / bandwidth. Which messages may be on their way together?",
        "Gather: R − 1 messages, all bytes in each. They set out together, so the latency counts "
        "once, but they come through one link. Tree: with each round half of those that are left "
        "have handed on theirs, so there are ⌈log₂ R⌉ rounds up, and as many down. Ring: 2 (R − 1) "
        "steps, with an R-th of the bytes in each. And 1 GB/s is 1,000 bytes in a microsecond.",
        "```python\nper_us = 1000 * gbps\ngather = latency + (ranks - 1) * ...\n"
        "tree = 2 * math.ceil(...) * (latency + ...)\n"
        "ring = 2 * ... * (latency + n_bytes / ... / per_us)\n```",
    ),
)
