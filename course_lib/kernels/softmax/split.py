"""The rung `split`: rows too long for one block's registers, still read only once.

A row, 16 bytes at a time, is copied asynchronously into shared memory, which holds more of it than
registers could, and whose copies need no registers while they are on their way. If it is too long
for one block's shared memory, a cluster of blocks shares it: each holds a part, and they exchange
what they found through distributed shared memory (`runtime.cluster`). Rows too long for a cluster,
and chips without what this takes, go to the kernels of `streamed` instead.

A thread reads from shared memory only what it copied itself, so no barrier is needed for that.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import MAX_WIDTH, ZERO, load_row, my_part, store_row
from course_lib.kernels.softmax.steps import backward_steps, forward_steps, online_step
from course_lib.runtime.cluster import cluster_sync, load_from_cluster
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    load,
    online_merge,
    store,
    vector_width,
    wait_for_previous_kernel,
    warp_online,
    warp_sum,
)
from course_lib.runtime.shared import copy_async, dynamic_shared, wait_for_copies

# More registers would leave room for fewer threads; these leave none for a longer stride.
SLOTS = 1
FORWARD_REGISTERS, BACKWARD_REGISTERS = 48, 64


@cuda.jit(device=True)
def fetch(cache, place, x, start, n_cols, vectors):
    """Begin to copy x[start:start + n_cols] to cache[place:]: each thread what `load_row` gives it.

    To be waited for by `wait_for_copies`.
    """
    tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
    if vectors:
        width = vector_width(x)
        col = tid * width
        while col < n_cols:
            copy_async(cache, place + col, x, start + col)
            col += n_threads * width
    else:
        col = tid
        while col < n_cols:
            store(cache, place + col, load(x, start + col))
            col += n_threads


@cuda.jit(device=True)
def meet(part_bits):
    """A barrier for all threads that share a row."""
    if part_bits == 0:
        cuda.syncthreads()
    else:
        cluster_sync()


@cuda.jit(device=True)
def cluster_online(m, s, scratch_m, scratch_s, part_bits):
    """The online pair of all threads that share a row, in each of them."""
    lane_id, warp_id = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    m, s = warp_online(m, s)
    if lane_id == 0:
        scratch_m[warp_id] = m
        scratch_s[warp_id] = s
    meet(part_bits)
    m, s = LOWEST, ZERO
    if lane_id < cuda.blockDim.x >> 5:
        for rank in range(1 << part_bits):
            other_m = load_from_cluster(scratch_m, lane_id, rank)
            other_s = load_from_cluster(scratch_s, lane_id, rank)
            m, s = online_merge(m, s, other_m, other_s)
    return warp_online(m, s)


@cuda.jit(device=True)
def cluster_sum(value, scratch, part_bits):
    """The sum of `value` over all threads that share a row, in each of them."""
    lane_id, warp_id = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    value = warp_sum(value)
    if lane_id == 0:
        scratch[warp_id] = value
    meet(part_bits)
    value = ZERO
    if lane_id < cuda.blockDim.x >> 5:
        for rank in range(1 << part_bits):
            value += load_from_cluster(scratch, lane_id, rank)
    return warp_sum(value)


def forward_kernel(formulas):
    """The kernel of y = f(x)."""
    row_factor = formulas.row_factor
    steps = forward_steps(formulas, SLOTS)
    exponentials, finish, add_online = steps.exponentials, steps.finish, online_step(SLOTS)

    @cuda.jit(max_registers=FORWARD_REGISTERS)
    def split_kernel(x, y, n_cols, length, part_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        cache = dynamic_shared(x)
        values = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        width = vector_width(x)
        stride = SLOTS * width * n_threads
        start, n_mine = my_part(n_cols, length, part_bits)
        fetch(cache, 0, x, start, n_mine, vectors)
        wait_for_copies()
        m, s = LOWEST, ZERO
        done = 0
        while done < n_mine:
            load_row(values, SLOTS, cache, done, n_mine - done, tid, n_threads, vectors, LOWEST)
            m, s = add_online(values, width, m, s)
            done += stride
        m, s = cluster_online(m, s, scratch_m, scratch_s, part_bits)
        if part_bits > 0:
            cluster_sync()  # no block may leave while others read its scratch
        factor = row_factor(s)
        done = 0
        while done < n_mine:
            left = n_mine - done
            load_row(values, SLOTS, cache, done, left, tid, n_threads, vectors, LOWEST)
            exponentials(values, width, m)
            finish(values, width, factor)
            store_row(values, SLOTS, y, start + done, left, tid, n_threads, vectors)
            done += stride

    return split_kernel


def backward_kernel(formulas):
    """The kernel of dx = f'(dy, y)."""
    total_of, gradients = backward_steps(formulas, SLOTS)

    @cuda.jit(max_registers=BACKWARD_REGISTERS)
    def split_backward_kernel(dy, y, dx, n_cols, length, part_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        cache = dynamic_shared(dy)  # dy, and from `length` on y
        upstream = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
        values = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        width = vector_width(dy)
        stride = SLOTS * width * n_threads
        start, n_mine = my_part(n_cols, length, part_bits)
        fetch(cache, 0, dy, start, n_mine, vectors)
        fetch(cache, length, y, start, n_mine, vectors)
        wait_for_copies()
        total = ZERO
        done = 0
        while done < n_mine:
            left, there = n_mine - done, length + done
            load_row(upstream, SLOTS, cache, done, left, tid, n_threads, vectors, ZERO)
            load_row(values, SLOTS, cache, there, left, tid, n_threads, vectors, ZERO)
            total += total_of(upstream, values, width)
            done += stride
        total = cluster_sum(total, scratch, part_bits)
        if part_bits > 0:
            cluster_sync()  # no block may leave while others read its scratch
        done = 0
        while done < n_mine:
            left, there = n_mine - done, length + done
            load_row(upstream, SLOTS, cache, done, left, tid, n_threads, vectors, ZERO)
            load_row(values, SLOTS, cache, there, left, tid, n_threads, vectors, ZERO)
            gradients(upstream, values, width, total)
            store_row(upstream, SLOTS, dx, start + done, left, tid, n_threads, vectors)
            done += stride

    return split_backward_kernel
