"""How blocks work together that hold a sample: `resident`.

A plane may begin in one block and end in another: each has a share of its sum. And all blocks of a
sample meet before they go on with what they have found together.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite.dense import quotient
from course_lib.runtime.intrinsics import load
from course_lib.runtime.intrinsics.signals import count, look


@cuda.jit(device=True)
def keep_weights(kept, weight1, weight2, R, C, c, n_mine):
    """The weights of the block's channels: R rows of weight1's, then n_mine rows of weight2's."""
    i = np.int64(cuda.threadIdx.x)
    while i < R * n_mine:
        row = quotient(i, n_mine)
        kept[i] = load(weight1, row * C + c + i - row * n_mine)
        kept[R * n_mine + i] = load(weight2, c * R + i)
        i += cuda.blockDim.x


@cuda.jit(device=True)
def note_sums(values, edges, totals, slot, n, C, c, n_mine, n_pixels, low, high):
    """totals[n, c + i] = values[i] of the block's planes; of those that it shares, its share.

    edges[slot] is that of a plane which began in another block, then of one which ends in another.
    """
    tid = np.int64(cuda.threadIdx.x)
    if tid < n_mine:
        if (c + tid) * n_pixels < low:
            edges[2 * slot] = values[tid]
        elif (c + tid + 1) * n_pixels > high:
            edges[2 * slot + 1] = values[tid]
        else:
            totals[n * C + c + tid] = values[tid]


@cuda.jit(device=True)
def finish_sums(edges, totals, first_n, step, N, n_blocks, rank, share, C, last, n_pixels):
    """The total of plane `last`, which begins in this block and ends in another, in its samples."""
    n = first_n + np.int64(cuda.threadIdx.x) * step
    while n < N:
        total = edges[2 * (n * n_blocks + rank) + 1]
        other = rank + 1
        while other < n_blocks and other * share < (last + 1) * n_pixels:
            total += edges[2 * (n * n_blocks + other)]
            other += 1
        totals[n * C + last] = total
        n += cuda.blockDim.x * step


@cuda.jit(device=True)
def meet(counters, n, n_blocks):
    """Wait until all blocks of sample `n` have come here: what they wrote before can be read.

    Returns what `leave` wants to know.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        count(counters, n, 1)
        while look(counters, n) < n_blocks:
            pass
    cuda.syncthreads()
    return cuda.atomic.add(counters, n, 1) if cuda.threadIdx.x == 0 else 0


@cuda.jit(device=True)
def leave(counters, n, n_blocks, counted):
    """The last block that saw all others come sets the counter back to 0.

    Not at once: by now `counted` has arrived, and nobody waits for it.
    """
    if cuda.threadIdx.x == 0 and counted == 2 * n_blocks - 1:
        cuda.atomic.exch(counters, n, 0)


@cuda.jit(device=True)
def follow(counters, place, n_leading):
    """Wait until the block that is `n_leading` before this one says `lead`."""
    if cuda.threadIdx.x == 0:
        while look(counters, place - n_leading) == 0:
            pass
        cuda.atomic.exch(counters, place - n_leading, 0)
    cuda.syncthreads()


@cuda.jit(device=True)
def lead(counters, place):
    """This block's run has come: the one that shares its multiprocessor may begin."""
    if cuda.threadIdx.x == 0:
        cuda.atomic.exch(counters, place, 1)
