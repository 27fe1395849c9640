"""How blocks take tasks from a queue, and wait for those that others have taken before them.

Each block does one task: it sums a part of something (a sample, a channel), or it goes on with such
a part once all sums of it are there. Blocks take their tasks in the order in which they start, by a
*ticket*: a number in memory, to which each adds one. The order runs through all parts twice, but
the second time follows `lead` parts behind the first, before the L2 cache has forgotten them:

    ticket      0 ... lead - 1       lead      lead + 1   lead + 2       lead + 3   ...
    task        sum 0 ... lead - 1   sum lead  scale 0    sum lead + 1   scale 1    ...

All that a block waits for has smaller tickets: other blocks have started on it, and never wait
themselves. So no promise is needed of how many blocks run at once. And it does not matter who does
a task, or when: two runs agree bit for bit.
"""


import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics.signals import count, look

READY = 32  # where in the counters the samples' own begin: the ticket has 128 bytes to itself


@cuda.jit(device=True)
def draw(drawn, counters):
    """The block's ticket, by way of `drawn`, a shared int32."""
    if cuda.threadIdx.x == 0:
        drawn[0] = cuda.atomic.add(counters, 0, 1)
        if drawn[0] == cuda.gridDim.x - 1:  # the last
            cuda.atomic.exch(counters, 0, 0)  # as the next launch expects it
    cuda.syncthreads()
    return np.int64(drawn[0])


@cuda.jit(device=True)
def task_of(ticket, n_tasks, lead):
    """(whether to sum a part, or else to scale it; the part)."""
    n_parts, step = n_tasks >> 1, ticket - lead
    if step < 0:
        return True, ticket
    if step >= 2 * (n_parts - lead):  # nothing is left to sum
        return False, step - (n_parts - lead)
    return step & 1 == 0, (step >> 1) + (0 if step & 1 else lead)


@cuda.jit(device=True)
def is_last(counters, n, n_slots, drawn):
    """Count a part of sample `n` as summed. Whether it was the last: then all sums can be read."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        drawn[0] = count(counters, READY + n, 1)
    cuda.syncthreads()
    return drawn[0] == n_slots - 1


@cuda.jit(device=True)
def tell_ready(counters, n):
    """All that the blocks that scale sample `n` need has been written."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        count(counters, READY + n, 1)


@cuda.jit(device=True)
def wait_until_ready(counters, n, n_slots):
    """Wait for `tell_ready`. Returns what `leave` wants to know."""
    if cuda.threadIdx.x == 0:
        while look(counters, READY + n) <= n_slots:
            pass
    cuda.syncthreads()
    return cuda.atomic.add(counters, READY + n, 1) if cuda.threadIdx.x == 0 else 0


@cuda.jit(device=True)
def leave(counters, n, n_slots, counted):
    """The last block that waited for sample `n` sets its counter back to 0."""
    if cuda.threadIdx.x == 0 and counted == 2 * n_slots:
        cuda.atomic.exch(counters, READY + n, 0)
