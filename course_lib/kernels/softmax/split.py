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
from course_lib.kernels.blocks.shifted_rows import first_slot, shifted_part
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


@cuda.jit(device=True)
def fetch(cache, place, x, start, n_cols, vectors, beyond):
    """Begin to copy x[start:start + n_cols] to cache[place:]; `arrive` waits for the end.

    In the cache, every row is made of vectors: the elements before and behind it that fill the
    first and the last one up are `beyond`. With `vectors` these are those of x, as in
    `blocks.shifted_rows`, and each thread copies what it will read; else elements go one by one.
    """
    tid, n_threads, width = cuda.threadIdx.x, cuda.blockDim.x, vector_width(x)
    first = first_slot(x, start, vectors)
    place -= first
    if vectors:
        col = first + tid * width
        while col < n_cols:
            if col >= 0 and col + width <= n_cols:
                copy_async(cache, place + col, x, start + col)
            else:
                for k in range(width):
                    copy_element(cache, place, x, start, col + k, n_cols, beyond)
            col += n_threads * width
    else:
        for col in range(tid, (n_cols + width - 1) & -width, n_threads):
            copy_element(cache, place, x, start, col, n_cols, beyond)


@cuda.jit(device=True)
def copy_element(cache, place, x, start, col, n_cols, beyond):
    """cache[place + col] = x[start + col]; `beyond` outside of the row."""
    value = beyond
    if col >= 0 and col < n_cols:
        value = load(x, start + col)
    store(cache, place + col, value)


@cuda.jit(device=True)
def store_within(y, start, col, n_cols, values):
    """y[start + col:] = the vector `values`, all that lies in the row."""
    width = vector_width(y)
    if col >= 0 and col + width <= n_cols:
        store_vector(y, start + col, values)
    else:
        for k in range(width):
            if col + k >= 0 and col + k < n_cols:
                store(y, start + col + k, values[k])


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
        start, n_mine = shifted_part(x, n_cols, length, part_bits, vectors)
        before = first_slot(x, start, vectors)
        fetch(cache, 0, x, start, n_mine, vectors, LOWEST)
        arrive(vectors)
        m, s = LOWEST, ZERO
        col = first
        while col < n_mine - before:
            load_vector(values[0], cache, col)
            m, s = add_online(values, width, m, s)
            col += stride
        m, s = cluster_online(m, s, scratch_m, scratch_s, part_bits)
        if part_bits > 0:
            cluster_sync()  # no block may leave while others read its scratch
        factor = row_factor(s)
        col = first
        while col < n_mine - before:
            load_vector(values[0], cache, col)
            exponentials(values, width, m)
            finish(values, width, factor)
            if vectors:
                store_within(y, start, before + col, n_mine, values[0])
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
        start, n_mine = shifted_part(dy, n_cols, length, part_bits, vectors)
        before = first_slot(dy, start, vectors)
        fetch(cache, 0, dy, start, n_mine, vectors, ZERO)
        fetch(cache, length, y, start, n_mine, vectors, ZERO)
        arrive(vectors)
        total = ZERO
        col = first
        while col < n_mine - before:
            load_vector(upstream[0], cache, col)
            load_vector(values[0], cache, length + col)
            total += total_of(upstream, values, width)
            col += stride
        total = cluster_sum(total, scratch, part_bits)
        if part_bits > 0:
            cluster_sync()  # no block may leave while others read its scratch
        col = first
        while col < n_mine - before:
            load_vector(upstream[0], cache, col)
            load_vector(values[0], cache, length + col)
            gradients(upstream, values, width, total)
            if vectors:
                store_within(dx, start, before + col, n_mine, upstream[0])
            else:
                store_vector(cache, col, upstream[0])
            col += stride
        deliver(cache, dx, start, n_mine, vectors)

    return split_backward_kernel
