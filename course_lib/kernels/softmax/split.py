"""The rung `split`: rows too long for one block's registers, still read only once.

A row, 16 bytes at a time, is copied asynchronously into shared memory, which holds more of it than
registers could, and whose copies need no registers while they are on their way. If it is too long
for one block's shared memory, a cluster of blocks shares it: each holds a part, and they exchange
what they found through distributed shared memory (`intrinsics.cluster`). Rows too long for a
cluster, and chips without what this takes, go to the kernels of `streamed` instead.

What a thread copies asynchronously only it reads, so no barrier is needed between the two.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.rows import load_row, my_part, store_row
from course_lib.kernels.blocks.softmax_steps import backward_steps, forward_steps, online_step
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    load,
    load_vector,
    online_merge,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
    warp_online,
    warp_sum,
)
from course_lib.runtime.intrinsics.cluster import cluster_sync, load_from_cluster
from course_lib.runtime.intrinsics.shared import copy_async, dynamic_shared, wait_for_copies

# More would leave room for fewer threads on a multiprocessor.
FORWARD_REGISTERS, BACKWARD_REGISTERS = 48, 64
FETCH_SLOTS = 1  # loads in flight where they can't be asynchronous, in slots of 16 bytes


@cuda.jit(device=True)
def fetch(cache, place, x, start, n_cols, vectors, beyond):
    """Begin to copy x[start:start + n_cols] to cache[place:]; `arrive` waits for the end.

    Rows that are not made of whole 16-byte vectors go element by element, and the last vector is
    filled up with `beyond`: in the cache, every row is made of vectors.
    """
    tid, n_threads, width = cuda.threadIdx.x, cuda.blockDim.x, vector_width(x)
    if vectors:
        col = tid * width
        while col < n_cols:
            copy_async(cache, place + col, x, start + col)
            col += n_threads * width
    else:
        values = cuda.local.array((FETCH_SLOTS, MAX_WIDTH), np.float32)
        whole = (n_cols + width - 1) & -width
        done = 0
        while done < whole:
            here, left = start + done, n_cols - done
            load_row(values, FETCH_SLOTS, x, here, left, tid, n_threads, False, beyond)
            there, left = place + done, whole - done
            store_row(values, FETCH_SLOTS, cache, there, left, tid, n_threads, False)
            done += FETCH_SLOTS * width * n_threads


@cuda.jit(device=True)
def arrive(vectors):
    """Until the thread's vectors are there, wherever they came from."""
    wait_for_copies()
    if not vectors:
        cuda.syncthreads()


@cuda.jit(device=True)
def deliver(cache, y, start, n_cols, vectors):
    """Copy cache[:n_cols] to y[start:], element by element, where it could not go by vectors."""
    if not vectors:
        cuda.syncthreads()
        col = cuda.threadIdx.x
        while col < n_cols:
            store(y, start + col, load(cache, col))
            col += cuda.blockDim.x


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
    steps, add_online = forward_steps(formulas, 1), online_step(1)
    exponentials, finish = steps.exponentials, steps.finish

    @cuda.jit(max_registers=FORWARD_REGISTERS)
    def split_kernel(x, y, n_cols, length, part_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        cache = dynamic_shared(x)
        values = cuda.local.array((1, MAX_WIDTH), np.float32)
        width = vector_width(x)
        first, stride = cuda.threadIdx.x * width, cuda.blockDim.x * width
        start, n_mine = my_part(n_cols, length, part_bits)
        fetch(cache, 0, x, start, n_mine, vectors, LOWEST)
        arrive(vectors)
        m, s = LOWEST, ZERO
        col = first
        while col < n_mine:
            load_vector(values[0], cache, col)
            m, s = add_online(values, width, m, s)
            col += stride
        m, s = cluster_online(m, s, scratch_m, scratch_s, part_bits)
        if part_bits > 0:
            cluster_sync()  # no block may leave while others read its scratch
        factor = row_factor(s)
        col = first
        while col < n_mine:
            load_vector(values[0], cache, col)
            exponentials(values, width, m)
            finish(values, width, factor)
            if vectors:
                store_vector(y, start + col, values[0])
            else:
                store_vector(cache, col, values[0])
            col += stride
        deliver(cache, y, start, n_mine, vectors)

    return split_kernel


def backward_kernel(formulas):
    """The kernel of dx = f'(dy, y)."""
    total_of, gradients = backward_steps(formulas, 1)

    @cuda.jit(max_registers=BACKWARD_REGISTERS)
    def split_backward_kernel(dy, y, dx, n_cols, length, part_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        cache = dynamic_shared(dy)  # dy, and from `length` on y
        upstream = cuda.local.array((1, MAX_WIDTH), np.float32)
        values = cuda.local.array((1, MAX_WIDTH), np.float32)
        width = vector_width(dy)
        first, stride = cuda.threadIdx.x * width, cuda.blockDim.x * width
        start, n_mine = my_part(n_cols, length, part_bits)
        fetch(cache, 0, dy, start, n_mine, vectors, ZERO)
        fetch(cache, length, y, start, n_mine, vectors, ZERO)
        arrive(vectors)
        total = ZERO
        col = first
        while col < n_mine:
            load_vector(upstream[0], cache, col)
            load_vector(values[0], cache, length + col)
            total += total_of(upstream, values, width)
            col += stride
        total = cluster_sum(total, scratch, part_bits)
        if part_bits > 0:
            cluster_sync()  # no block may leave while others read its scratch
        col = first
        while col < n_mine:
            load_vector(upstream[0], cache, col)
            load_vector(values[0], cache, length + col)
            gradients(upstream, values, width, total)
            if vectors:
                store_vector(dx, start + col, upstream[0])
            else:
                store_vector(cache, col, upstream[0])
            col += stride
        deliver(cache, dx, start, n_mine, vectors)

    return split_backward_kernel
