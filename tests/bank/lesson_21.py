"""Lesson 21: more than one GPU. Most wrong kernels are the solution with one mistake in it."""

import numpy as np

from bank import right, wrong
from bank.mistakes import changed, mistakes
from course_lib import cuda
from course_lib.teach.exercise import exercises
from course_lib.teach.exercises.lesson_21 import wait_for

RACE = "race"
VALUES = "wrong values in y|times what it should be|never written"

# ---- joint_batch(gradients, means, variances, counts) ----------------------------------------


@right("joint_batch")
def joint_by_sums(gradients, means, variances, counts):
    weights = counts[:, None] / counts.sum()
    mean = (weights * means).sum(axis=0)
    squares = (weights * (variances + means**2)).sum(axis=0)
    return (weights * gradients).sum(axis=0), mean, squares - mean**2


@right("joint_batch")
def joint_device_by_device(gradients, means, variances, counts):
    gradient, mean, variance, seen = 0 * gradients[0], 0 * means[0], 0 * variances[0], 0
    for rank, count in enumerate(counts):
        new = count / (seen + count)
        gradient = gradient + new * (gradients[rank] - gradient)
        apart = means[rank] - mean
        variance = (1 - new) * variance + new * variances[rank] + new * (1 - new) * apart**2
        mean, seen = mean + new * apart, seen + count
    return gradient, mean, variance


mistakes("joint_batch",
    ("joint_plain_mean", "wrong values in gradient", "counts / counts.sum()",
     "np.ones(len(counts)) / len(counts)"),
    ("joint_sum", "wrong values in gradient", "counts / counts.sum()", "np.ones(len(counts))"),
    ("joint_counts_alone", "wrong values in gradient", "counts / counts.sum()", "counts"),
    ("joint_mean_variance", "wrong values in variance", " + (means - mean) ** 2", ""),
    ("joint_deviations", "wrong values in variance", "(means - mean) ** 2", "abs(means - mean)"),
    ("joint_variance_from_zero", "wrong values in variance", "(means - mean) ** 2", "means ** 2"),
    ("joint_plain_channel_mean", "wrong values in mean", "share @ means", "means.mean(0)"),
    ("joint_first_gradient", "wrong values in gradient", "share @ gradients", "gradients[0]"))


# ---- ring_reduce_scatter(x, inbox, arrived, y) -----------------------------------------------


@right("ring_reduce_scatter")
@cuda.jit
def scatter_the_other_way(x, inbox, arrived, y):
    # To the left: each piece goes round the other way, and the last step stands by itself.
    rank, ranks, t = cuda.blockIdx.x, x.shape[0], cuda.threadIdx.x
    left = (rank + ranks - 1) % ranks
    for step in range(ranks - 1):
        piece = (rank + 1 + step) % ranks
        wait_for(arrived, rank, step)
        for i in range(t, x.shape[2], cuda.blockDim.x):
            before = inbox[rank, step - 1, i] if step else np.float32(0)
            inbox[left, step, i] = before + x[rank, piece, i]
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, left, 1)
    wait_for(arrived, rank, ranks - 1)
    for i in range(t, x.shape[2], cuda.blockDim.x):
        y[rank, i] = x[rank, rank, i] + (inbox[rank, ranks - 2, i] if ranks > 1 else np.float32(0))


@right("ring_reduce_scatter")
@cuda.jit
def scatter_with_both_ends_apart(x, inbox, arrived, y):
    # The first step waits for nothing, and the last one sends nothing.
    rank, ranks, t = cuda.blockIdx.x, x.shape[0], cuda.threadIdx.x
    right, piece = 0 if rank == ranks - 1 else rank + 1, rank
    for step in range(ranks - 1):
        piece = piece - 1 if piece > 0 else ranks - 1
        if step > 0:
            wait_for(arrived, rank, step)
        for i in range(t, x.shape[2], cuda.blockDim.x):
            if step == 0:
                inbox[right, step, i] = x[rank, piece, i]
            else:
                inbox[right, step, i] = x[rank, piece, i] + inbox[rank, step - 1, i]
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, right, 1)
    wait_for(arrived, rank, ranks - 1)
    for i in range(t, x.shape[2], cuda.blockDim.x):
        total = x[rank, rank, i]
        if ranks > 1:
            total += inbox[rank, ranks - 2, i]
        y[rank, i] = total


@wrong("ring_reduce_scatter", r"writes inbox\[\d\], the memory of device \d, in line \d+, `inb")
@cuda.jit
def scatter_without_a_ring(x, inbox, arrived, y):
    # Each device sends every piece to the one whose it is: as many bytes, and no ring.
    rank, ranks, t = cuda.blockIdx.x, x.shape[0], cuda.threadIdx.x
    for step in range(1, ranks):
        to = (rank + step) % ranks
        for i in range(t, x.shape[2], cuda.blockDim.x):
            inbox[to, step - 1, i] = x[rank, to, i]
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, to, 1)
    wait_for(arrived, rank, ranks - 1)
    for i in range(t, x.shape[2], cuda.blockDim.x):
        total = x[rank, rank, i]
        for step in range(1, ranks):
            total += inbox[rank, step - 1, i]
        y[rank, i] = total


TELL = """        cuda.syncthreads()
        if t == 0 and step < ranks - 1:
            cuda.threadfence()
            cuda.atomic.add(arrived, right, 1)
"""
mistakes("ring_reduce_scatter",
    ("scatter_without_a_fence", "fence", "            cuda.threadfence()\n", ""),
    ("scatter_without_a_barrier", "all lanes|syncthreads", "        cuda.syncthreads()\n", ""),
    ("scatter_does_not_wait", RACE, "        wait_for(arrived, rank, step)\n", ""),
    ("scatter_no_flags", RACE, TELL, "", "        wait_for(arrived, rank, step)\n", ""),
    ("scatter_never_tells", "deadlock", "cuda.atomic.add(arrived, right, 1)", "pass"),
    ("scatter_tells_itself", RACE + "|deadlock", "add(arrived, right, 1)", "add(arrived, rank, 1)"),
    ("scatter_waits_for_the_right", RACE + "|deadlock", "wait_for(arrived, rank, step)",
     "wait_for(arrived, right, step)"),
    ("scatter_waits_for_one", RACE, "rank, step)\n", "rank, min(step, 1))\n"),
    ("scatter_waits_one_too_many", "deadlock", "rank, step)\n", "rank, step + 1)\n"),
    ("scatter_waits_one_too_few", RACE, "rank, step)\n", "rank, step - 1)\n"),
    ("scatter_tells_without_atomic", RACE + "|deadlock", "cuda.atomic.add(arrived, right, 1)",
     "arrived[right] += 1"),
    ("scatter_every_thread_tells", RACE + "|only when all", "if t == 0 and", "if"),
    ("scatter_tells_first", RACE, TELL, "", "        for i in range",
     TELL + "        for i in range"),
    ("scatter_one_piece_on", VALUES, "(rank - 1 - step) % ranks", "(rank - step) % ranks"),
    ("scatter_same_piece", VALUES, "(rank - 1 - step) % ranks", "(rank - 1) % ranks"),
    ("scatter_forwards", VALUES, "(rank - 1 - step) % ranks", "(rank + 1 + step) % ranks"),
    ("scatter_passes_on_alone", VALUES, "total += inbox", "total = inbox"),
    ("scatter_adds_nothing", VALUES, "total += inbox[rank, step - 1, i]", "pass"),
    ("scatter_ends_early", VALUES + "|deadlock", "range(ranks)", "range(ranks - 1)"),
    ("scatter_one_thread_short", VALUES + "|same work|more than one thread",
     "range(t, x.shape[2], cuda.blockDim.x)", "range(t, x.shape[2] - 1, cuda.blockDim.x)"))


@wrong("ring_reduce_scatter", r"reads x\[\d\], the memory of device \d, in line \d+, `total \+= x")
@cuda.jit
def scatter_by_direct_sums(x, inbox, arrived, y):
    # Each device reads all memories: no inbox, no flag.
    rank, ranks = cuda.blockIdx.x, x.shape[0]
    for i in range(cuda.threadIdx.x, x.shape[2], cuda.blockDim.x):
        total = np.float32(0)
        for o in range(ranks):
            total += x[(rank + o) % ranks, rank, i]
        y[rank, i] = total


@wrong("ring_reduce_scatter", "one of .* threads writes|share the work|the memory of device")
@cuda.jit
def scatter_by_device_0(x, inbox, arrived, y):
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        for piece in range(x.shape[0]):
            for i in range(x.shape[2]):
                total = x[0, piece, i]
                for rank in range(1, x.shape[0]):
                    total += x[rank, piece, i]
                y[piece, i] = total


# ---- ring_all_gather(part, arrived, y) -------------------------------------------------------


@right("ring_all_gather")
@cuda.jit
def gather_the_other_way(part, arrived, y):
    rank, ranks, t = cuda.blockIdx.x, part.shape[0], cuda.threadIdx.x
    left = (rank + ranks - 1) % ranks
    for step in range(ranks):
        piece = (rank + step) % ranks
        wait_for(arrived, rank, step)
        for i in range(t, part.shape[1], cuda.blockDim.x):
            value = y[rank, piece, i] if step else part[rank, i]
            if step == 0:
                y[rank, rank, i] = value
            if step < ranks - 1:
                y[left, piece, i] = value
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, left, 1)


@right("ring_all_gather")
@cuda.jit
def gather_from_the_first_step_apart(part, arrived, y):
    rank, ranks, t = cuda.blockIdx.x, part.shape[0], cuda.threadIdx.x
    right = 0 if rank == ranks - 1 else rank + 1
    for i in range(t, part.shape[1], cuda.blockDim.x):
        y[rank, rank, i] = part[rank, i]
        if ranks > 1:
            y[right, rank, i] = part[rank, i]
    piece = rank
    for step in range(1, ranks - 1):
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, right, 1)
        piece = piece - 1 if piece > 0 else ranks - 1
        wait_for(arrived, rank, step)
        for i in range(t, part.shape[1], cuda.blockDim.x):
            y[right, piece, i] = y[rank, piece, i]


WAITS = "        wait_for(arrived, rank, step)\n"
SAID = """        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, right, 1)
"""
mistakes("ring_all_gather",
    ("gather_without_a_fence", "fence", "            cuda.threadfence()\n", ""),
    ("gather_without_a_barrier", "all lanes|syncthreads", "        cuda.syncthreads()\n", ""),
    ("gather_does_not_wait", RACE, "        wait_for(arrived, rank, step)\n", ""),
    ("gather_no_flags", RACE, SAID, "", "        wait_for(arrived, rank, step)\n", ""),
    ("gather_never_tells", "deadlock", "cuda.atomic.add(arrived, right, 1)", "pass"),
    ("gather_tells_itself", RACE + "|deadlock", "add(arrived, right, 1)", "add(arrived, rank, 1)"),
    ("gather_waits_one_too_many", "deadlock", "rank, step)\n", "rank, step + 1)\n"),
    ("gather_waits_one_too_few", RACE + "|`step - 1` in place of `step`", "rank, step)\n",
     "rank, step - 1)\n"),
    ("gather_every_thread_tells", RACE + "|only when all|in place of `t == 0`", "if t == 0:\n",
     "if True:\n"),
    ("gather_own_piece_again", VALUES + "|race|more than one thread|same work",
     "(rank - step) % ranks", "rank"),
    ("gather_forwards", VALUES + "|race|NaN", "(rank - step) % ranks", "(rank + step) % ranks"),
    ("gather_keeps_nothing", VALUES, "y[rank, rank, i] = part[rank, i]",
     "y[right, rank, i] = part[rank, i]"),
    ("gather_from_part", VALUES, "= y[rank, piece, i]", "= part[rank, i]"),
    ("gather_one_step_too_few", VALUES, "range(ranks - 1)", "range(ranks - 2)"),
    ("gather_one_step_too_many", VALUES + "|race|more than one thread|same work",
     "range(ranks - 1)", "range(ranks)"),
    ("gather_from_all_memories", r"reads part\[\d\], the memory of device \d, in line \d+, `y\[r",
     WAITS, "", SAID, "", "= y[rank, piece, i]", "= part[piece, i]"),
    ("gather_as_a_star", r"writes y\[\d\], the memory of device \d, in line \d+, `y\[other, rank",
     WAITS, "", SAID, "", "piece = (rank - step)", "other = (rank + step + 1)",
     "y[right, piece, i] = y[rank, piece, i]", "y[other, rank, i] = part[rank, i]"))


@wrong("ring_all_gather", r"reads y\[\d\], the memory of device \d, in line \d+, `y\[rank, piece")
@cuda.jit
def gather_that_fetches(part, arrived, y):
    # From the left neighbour's memory, which no device may read.
    rank, ranks, t = cuda.blockIdx.x, part.shape[0], cuda.threadIdx.x
    left = (rank - 1) % ranks
    for step in range(ranks):
        piece = (rank - step) % ranks
        wait_for(arrived, rank, step)
        for i in range(t, part.shape[1], cuda.blockDim.x):
            y[rank, piece, i] = part[rank, i] if step == 0 else y[left, piece, i]
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, (rank + 1) % ranks, 1)


@wrong("ring_all_gather", "one of .* threads|share the work|only |the memory of device")
@cuda.jit
def gather_by_device_0(part, arrived, y):
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        for rank in range(y.shape[0]):
            for piece in range(y.shape[0]):
                for i in range(part.shape[1]):
                    y[rank, piece, i] = part[piece, i]


# ---- all_reduce_cost(n_bytes, ranks, latency, gbps) ------------------------------------------


@right("all_reduce_cost")
def cost_by_rounds(n_bytes, ranks, latency, gbps):
    def message(size):
        return latency + size / (gbps * 1e3)

    rounds = (ranks - 1).bit_length()
    phases = 2
    return (
        message((ranks - 1) * n_bytes),
        phases * rounds * message(n_bytes),
        phases * (ranks - 1) * message(n_bytes / ranks),
    )


@right("all_reduce_cost")
def cost_in_seconds(n_bytes, ranks, latency, gbps):
    rounds = 0
    while 2**rounds < ranks:
        rounds += 1
    lag, rate = latency * 1e-6, gbps * 1e9
    times = [
        lag + (ranks - 1) * n_bytes / rate,
        2 * (rounds * lag + rounds * n_bytes / rate),
        2 * ((ranks - 1) * lag + n_bytes * (1 - 1 / ranks) / rate),
    ]
    return [time * 1e6 for time in times]


mistakes("all_reduce_cost",
    ("cost_gather_one_by_one", "wrong values in gather", "gather = latency",
     "gather = (ranks - 1) * latency"),
    ("cost_gather_both_ways", "wrong values in gather|times", "gather = latency + (ranks - 1) *",
     "gather = 2 * latency + 2 * (ranks - 1) *"),
    ("cost_gather_from_itself", "wrong values in gather", "gather = latency + (ranks - 1)",
     "gather = latency + ranks"),
    ("cost_tree_rounds_down", "wrong values in tree", "math.ceil(", "math.floor("),
    ("cost_tree_natural", "wrong values in tree", "math.log2(", "math.log("),
    ("cost_tree_one_way", "wrong values in tree|half", "tree = 2 * ", "tree = "),
    ("cost_ring_all_bytes", "wrong values in ring", "n_bytes / ranks / per_us", "n_bytes / per_us"),
    ("cost_ring_one_way", "wrong values in ring|half", "ring = 2 * ", "ring = "),
    ("cost_ring_one_latency", "wrong values in ring", "ring = 2 * (ranks - 1) * (latency + n_bytes "
     "/ ranks / per_us)", "ring = latency + 2 * (ranks - 1) * n_bytes / ranks / per_us"),
    ("cost_whole_pieces", "wrong values in ring", "n_bytes / ranks /", "n_bytes // ranks /"),
    ("cost_in_milliseconds", "wrong values in|times", "1000 * gbps", "1e6 * gbps"))


# ---- the fence of those who wait, in both rings ----------------------------------------------

WAITED = r"loop on line \d+ that waits for the flag and what relies on it there is no .*fence\(\)"
ASK = "while cuda.atomic.add(arrived, rank, 0) < step:\n"
LOOP = f"            {ASK}                pass\n"
FIRST, THEN = "        if t == 0:\n", "        cuda.syncthreads()\n"
for each, short in (("ring_reduce_scatter", "scatter"), ("ring_all_gather", "gather")):
    mistakes(each,
        (f"{short}_waits_without_a_fence", WAITED, WAITS, FIRST + LOOP + THEN),
        (f"{short}_fences_before_it_waits", WAITED, WAITS,
         f"{FIRST}            cuda.threadfence()\n{LOOP}{THEN}"),
        (f"{short}_waits_with_a_fence_of_the_block", WAITED + r" \(threadfence_block", WAITS,
         f"{FIRST}{LOOP}            cuda.threadfence_block()\n{THEN}"))
    # All threads look at the flag: slow, and right.
    right(each)(changed(each, f"{short}_all_threads_ask", exercises()[each].solution, [
        WAITS, f"        {ASK}            pass\n        cuda.threadfence()\n{THEN}"]))
