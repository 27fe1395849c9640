"""The dense layers, computed by each block for as much of them as it needs.

The first layer is linear in the channels' means. So a block that has the means of some channels can
write what they add to each of the R hidden numbers, to a *slot* of its own; whoever needs the
hidden numbers adds up the slots of the sample, always in the same order. Of the second layer a
block computes the outputs of its own channels. Each block thus reads the weights of its own
channels and no others, and nobody reads all of both layers. Backward it is the same in reverse.

Slots lie as (sample, slot, R), R rounded up to a multiple of 4, so that 16 bytes are read at a
time. All functions are for blocks of BLOCK_SIZE threads, and every thread must call them.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import team_sum
from course_lib.kernels.squeeze_excite.formulas import ZERO
from course_lib.runtime.intrinsics import load, load_vector

BLOCK_SIZE = 256  # a power of two
CHUNK = 1024  # hidden numbers that are worked on at a time
MOST_CHANNELS = 256  # of a block
QUAD = 4  # float32 numbers in 16 bytes
TOTALS = QUAD * BLOCK_SIZE  # float32 of the array that `sum_slots` needs
UNROLL = 4  # loads in flight per thread


@cuda.jit(device=True)
def slot_size(R):
    """Elements from one slot to the next."""
    return (R + QUAD - 1) & -QUAD


@cuda.jit(device=True)
def sum_slots(totals, slots, n, n_slots, R, first, count):
    """totals[i] = the sum of element `first` + i of the slots of sample `n`, for i < `count`.

    `totals` is a shared array of TOTALS float32; `first` is a multiple of QUAD, `count` at
    most CHUNK. Begins and ends with a barrier.
    """
    tid, n_vectors = cuda.threadIdx.x, (count + QUAD - 1) // QUAD
    values = cuda.local.array((UNROLL, QUAD), np.float32)
    mine = cuda.local.array(QUAD, np.float32)
    for k in range(QUAD):
        mine[k] = ZERO
    n_groups = 1  # of threads; each takes every n_groups-th slot
    while 2 * n_groups * n_vectors <= BLOCK_SIZE:
        n_groups *= 2
    slot = tid // n_vectors
    start = n * n_slots * slot_size(R) + first + tid % n_vectors * QUAD
    cuda.syncthreads()
    if slot < n_groups:
        while slot < n_slots:
            for u in range(UNROLL):
                for k in range(QUAD):
                    values[u, k] = ZERO
                other = slot + u * n_groups
                if other < n_slots:
                    load_vector(values[u], slots, start + other * slot_size(R))
            for u in range(UNROLL):
                for k in range(QUAD):
                    mine[k] += values[u, k]
            slot += UNROLL * n_groups
        for k in range(QUAD):
            totals[tid * QUAD + k] = mine[k]
    cuda.syncthreads()
    half = n_groups // 2 * n_vectors * QUAD
    while half >= n_vectors * QUAD:
        i = tid
        while i < half:
            totals[i] += totals[i + half]
            i += BLOCK_SIZE
        cuda.syncthreads()
        half //= 2


@cuda.jit(device=True)
def dot(weight, start, step, vector, rank, n_ranks, count):
    """This thread's share of Σ weight[start + i·step] · vector[i] over i < `count`."""
    values = cuda.local.array(UNROLL, np.float32)
    total = ZERO
    i = rank
    while i < count:
        for u in range(UNROLL):
            values[u] = ZERO
            if i + u * n_ranks < count:
                values[u] = load(weight, start + (i + u * n_ranks) * step)
        for u in range(UNROLL):
            if i + u * n_ranks < count:
                total += values[u] * vector[i + u * n_ranks]
        i += UNROLL * n_ranks
    return total


@cuda.jit(device=True)
def by_rows(out, place, weight, length, row, n_rows, col, n_cols, vector, added):
    """out[place + i] = Σ weight[row + i, col + j] · vector[j], over j < n_cols, for i < n_rows.

    Rows of `weight` are `length` long; neighbouring threads read neighbours in a row. With `added`
    the sums are added to what `out` holds. `vector` is shared, and complete. Ends without a
    barrier.
    """
    tid, team = cuda.threadIdx.x, 1
    while team < 32 and 2 * UNROLL * team < n_cols:
        team *= 2
    base = 0
    while base < n_rows:
        i = base + tid // team
        total = ZERO
        if i < n_rows:
            total = dot(weight, (row + i) * length + col, 1, vector, tid % team, team, n_cols)
        total = team_sum(total, team)
        if tid % team == 0 and i < n_rows:
            out[place + i] = out[place + i] + total if added else total
        base += BLOCK_SIZE // team


@cuda.jit(device=True)
def by_columns(out, place, weight, length, row, n_rows, col, n_cols, vector, scratch, added):
    """out[place + j] = Σ weight[row + i, col + j] · vector[i], over i < n_rows, for j < n_cols.

    As `by_rows`; `scratch` is a shared array of BLOCK_SIZE float32. Ends with a barrier.
    """
    tid, tile = cuda.threadIdx.x, 1
    while tile < 32 and tile < n_cols:
        tile *= 2
    base = 0
    while base < n_cols:
        j = base + tid % tile
        total = ZERO
        if j < n_cols:
            start = row * length + col + j
            total = dot(weight, start, length, vector, tid // tile, BLOCK_SIZE // tile, n_rows)
        scratch[tid] = total
        cuda.syncthreads()
        half = BLOCK_SIZE // 2
        while half >= tile:
            if tid < half:
                scratch[tid] += scratch[tid + half]
            cuda.syncthreads()
            half //= 2
        if tid < tile and j < n_cols:
            out[place + j] = out[place + j] + scratch[tid] if added else scratch[tid]
        cuda.syncthreads()
        base += tile
