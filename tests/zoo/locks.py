"""Waiting for other threads: locks, and finding out who is last."""

import numpy as np
from numba import float32, int32, uint32

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case

BLOCK_SIZE = 64


@cuda.jit
def spin_lock_kernel(lock, total, order):
    """One thread per block holds the lock at a time; plain reads and writes under it."""
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            cuda.nanosleep(uint32(20))
        cuda.threadfence()
        place = total[0]
        order[place] = cuda.blockIdx.x
        total[0] = place + 1
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)


@case
def spin_lock(rng):
    blocks = int(rng.integers(11, 30))
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    order = np.full(blocks, -1, np.int32)
    plan = Plan([Launch(spin_lock_kernel, blocks, 3, (lock, total, order))])
    plan.expect(lock, [0]).expect(total, [blocks])
    return plan.expect(order, np.arange(blocks), transform=np.sort)


@cuda.jit
def lane_lock_kernel(lock, total):
    """Every lane wants the lock: it must be let go inside the loop, or its warp never ends."""
    done = False
    while not done:
        if cuda.atomic.cas(lock, 0, 0, 1) == 0:
            cuda.threadfence()
            total[0] += cuda.threadIdx.x
            cuda.threadfence()
            cuda.atomic.exch(lock, 0, 0)
            done = True


@case
def spin_lock_within_a_warp(rng):
    threads = int(rng.integers(33, 60))
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int64)
    plan = Plan([Launch(lane_lock_kernel, 2, threads, (lock, total))])
    return plan.expect(total, [threads * (threads - 1)]).expect(lock, [0])


@cuda.jit
def ticket_lock_kernel(tickets, serving, log):
    """First come, first served: draw a number, wait until it is called."""
    if cuda.threadIdx.x == 0:
        mine = cuda.atomic.add(tickets, 0, 1)
        while cuda.atomic.add(serving, 0, 0) != mine:
            cuda.nanosleep(uint32(10))
        cuda.threadfence()
        log[mine] = cuda.blockIdx.x
        cuda.threadfence()
        cuda.atomic.add(serving, 0, 1)


@case
def ticket_lock(rng):
    blocks = int(rng.integers(11, 30))
    tickets, serving = np.zeros(1, np.int32), np.zeros(1, np.int32)
    log = np.full(blocks, -1, np.int64)
    plan = Plan([Launch(ticket_lock_kernel, blocks, 5, (tickets, serving, log))])
    plan.expect(serving, [blocks])
    return plan.expect(log, np.arange(blocks), transform=np.sort)


@cuda.jit(device=True)
def block_sum(value, shared):
    tid = cuda.threadIdx.x
    shared[tid] = value
    cuda.syncthreads()
    half = BLOCK_SIZE // 2
    while half > 0:
        if tid < half:
            shared[tid] += shared[tid + half]
        cuda.syncthreads()
        half //= 2
    return shared[0]


@cuda.jit
def last_block_kernel(x, partial, finished, total):
    """The block that finishes last adds up what all the blocks have left."""
    shared = cuda.shared.array(BLOCK_SIZE, float32)
    is_last = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    i = cuda.grid(1)
    value = x[i] if i < x.size else float32(0)
    block_total = block_sum(value, shared)
    if tid == 0:
        partial[cuda.blockIdx.x] = block_total
        cuda.threadfence()
        is_last[0] = cuda.atomic.add(finished, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        cuda.threadfence()
        value = float32(0)
        for block in range(tid, cuda.gridDim.x, BLOCK_SIZE):
            value += partial[block]
        value = block_sum(value, shared)
        if tid == 0:
            total[0] = value


@case
def last_block_reduction(rng):
    x = rng.standard_normal(1555).astype(np.float32) + np.float32(1)
    blocks = blocks_for(x.size, BLOCK_SIZE)
    partial, finished = np.zeros(blocks, np.float32), np.zeros(1, np.int32)
    total = np.full(1, np.nan, np.float32)
    plan = Plan([Launch(last_block_kernel, blocks, BLOCK_SIZE, (x, partial, finished, total))])
    return plan.expect(total, [x.sum(dtype=np.float64)], 1e-5).expect(finished, [blocks])
