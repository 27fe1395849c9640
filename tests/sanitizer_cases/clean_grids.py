"""Correct: warps without barriers, locks, flags and fences between blocks."""

import numpy as np
from numba import cuda, float32, int32, uint32

from sanitizer_cases.case import correct, floats, ints

N = 32
FULL = 0xFFFFFFFF


@correct(2, 64, floats(128, 4))
@cuda.jit
def warp_synchronous_tree(x, y):
    """Each warp adds up its own part of shared memory: syncwarp is barrier enough."""
    sums = cuda.shared.array(64, float32)
    tid = cuda.threadIdx.x
    lane = cuda.laneid
    sums[tid] = x[cuda.grid(1)]
    cuda.syncwarp()
    half = 16
    while half > 0:
        if lane < half:
            sums[tid] += sums[tid + half]
        cuda.syncwarp()
        half //= 2
    if lane == 0:
        y[cuda.grid(1) // 32] = sums[tid]


@correct(1, 32, floats(32, 1))
@cuda.jit
def shuffle_tree(x, y):
    value = x[cuda.laneid]
    for step in range(5):
        value += cuda.shfl_down_sync(FULL, value, 16 >> step)
    if cuda.laneid == 0:
        y[0] = value


@correct(1, 32, floats(32, 32))
@cuda.jit
def half_warps_with_masks(x, y):
    lane = cuda.laneid
    value = x[lane]
    if lane < 16:
        value += cuda.shfl_xor_sync(0x0000FFFF, value, 8)
    else:
        value -= cuda.shfl_xor_sync(0xFFFF0000, value, 8)
    y[lane] = value


@correct(1, 32, floats(20, 20))
@cuda.jit
def shuffle_under_a_ballot(x, y):
    lane = cuda.laneid
    mask = cuda.ballot_sync(FULL, lane < x.size)
    if lane < x.size:
        y[lane] = cuda.shfl_sync(mask, x[lane], 0)


@correct(1, 32, floats(32, 1))
@cuda.jit
def shuffle_orders_memory(x, y):
    """A warp operation is a meeting point for memory too."""
    tile = cuda.shared.array(32, float32)
    lane = cuda.laneid
    tile[lane] = x[lane]
    cuda.any_sync(FULL, x[lane] > 0)
    if lane == 0:
        y[0] = tile[31]


@correct(6, 3, ints(1, 1))
@cuda.jit
def spin_lock(lock, total):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            cuda.nanosleep(uint32(20))
        cuda.threadfence()
        total[0] += cuda.blockIdx.x + 1
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)


@correct(5, 1, ints(1, 1, 5))
@cuda.jit
def ticket_lock(tickets, serving, log):
    mine = cuda.atomic.add(tickets, 0, 1)
    while cuda.atomic.add(serving, 0, 0) != mine:
        cuda.nanosleep(uint32(10))
    cuda.threadfence()
    log[mine] = cuda.blockIdx.x
    if mine > 0:
        log[mine] += log[mine - 1]
    cuda.threadfence()
    cuda.atomic.add(serving, 0, 1)


@correct(4, N, lambda: (*floats(4 * N, 4)(), *ints(1)(), *floats(1)()))
@cuda.jit
def last_block_with_fences(x, partial, finished, total):
    sums = cuda.shared.array(N, float32)
    is_last = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    sums[tid] = x[cuda.grid(1)]
    cuda.syncthreads()
    if tid == 0:
        block_sum = float32(0)
        for k in range(N):
            block_sum += sums[k]
        partial[cuda.blockIdx.x] = block_sum
        cuda.threadfence()
        is_last[0] = cuda.atomic.add(finished, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0] and tid == 0:
        cuda.threadfence()
        grid_sum = float32(0)
        for block in range(cuda.gridDim.x):
            grid_sum += partial[block]
        total[0] = grid_sum


@correct(3, N, lambda: (*floats(3 * N, 3 * N)(), *ints(1)(), *floats(1)()))
@cuda.jit
def last_block_after_everyone_fences(x, partial, finished, total):
    """Every thread fences its own result, then thread 0 counts for its block."""
    is_last = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    partial[cuda.grid(1)] = 2 * x[cuda.grid(1)]
    cuda.threadfence()
    cuda.syncthreads()
    if tid == 0:
        is_last[0] = cuda.atomic.add(finished, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        cuda.threadfence()
        value = float32(0)
        for i in range(tid, partial.size, N):
            value += partial[i]
        cuda.atomic.add(total, 0, value)


@correct(2, 1, lambda: (*ints(1)(), *floats(1, 1)()))
@cuda.jit
def flag_after_data(flag, data, out):
    if cuda.blockIdx.x == 0:
        data[0] = 42
        cuda.threadfence()
        cuda.atomic.exch(flag, 0, 1)
    else:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(uint32(20))
        cuda.threadfence()
        out[0] = data[0]


@correct(2, 1, lambda: (*ints(1)(), *floats(1, 1)()))
@cuda.jit
def flag_stored_past_the_cache(flag, data, out):
    """The flag is stored after a fence, and read again in each round because of the sleep."""
    if cuda.blockIdx.x == 0:
        data[0] = 42
        cuda.threadfence()
        cuda.stwt(flag, 0, int32(1))
    else:
        while flag[0] == 0:
            cuda.nanosleep(uint32(20))
        cuda.threadfence()
        out[0] = data[0]


@correct(4, N, lambda: (*floats(4 * N, 4)(), *ints(1)(), *floats(1)()))
@cuda.jit
def last_block_resets_the_counter(x, partial, finished, total):
    """The last block's own atomic came after those of all others, so that a store may follow it."""
    is_last = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    cuda.atomic.add(partial, cuda.blockIdx.x, x[cuda.grid(1)])
    cuda.threadfence()
    cuda.syncthreads()
    if tid == 0:
        ticket = cuda.atomic.add(finished, 0, 1)
        is_last[0] = ticket == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        cuda.threadfence()
        if tid == 1:
            for block in range(cuda.gridDim.x):
                total[0] += partial[block]
            finished[0] = 0


@correct(5, 1, lambda: (*ints(1)(), np.zeros(5, np.int32), np.zeros(5, np.int32),
                        np.zeros(5, np.int32)))
@cuda.jit
def look_back(ticket, state, totals, y):
    """A running sum over blocks: each adds to what the one before has published."""
    block = cuda.atomic.add(ticket, 0, 1)
    total = block + 1
    if block > 0:
        while cuda.atomic.add(state, block - 1, 0) == 0:
            cuda.nanosleep(uint32(10))
        cuda.threadfence()
        total += totals[block - 1]
    totals[block] = total
    cuda.threadfence()
    cuda.atomic.exch(state, block, 1)
    y[block] = total


@correct(2, N, floats(2 * N, 2 * N))
@cuda.jit
def grid_barrier_between_steps(x, y):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    x[i] = 2 * x[i]
    grid.sync()
    y[i] = x[(i + 1) % x.size]


@correct(4, N, floats(4 * N, 1))
@cuda.jit
def atomic_sum_over_blocks(x, y):
    cuda.atomic.add(y, 0, x[cuda.grid(1)])


@correct(3, N, floats(500, 500))
@cuda.jit
def grid_stride_map(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = 2 * x[i] + 1
