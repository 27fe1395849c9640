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
def fetch(cache, place, x, start, n_cols, beyond):
    """Begin to copy x[start:start + n_cols] to cache[place:]; `wait_for_copies` waits for the end.

    The cache begins with the vector that the row begins in (`blocks.shifted_rows`); elements that
    fill up the first and the last vector are `beyond`. Each thread copies what it will read.
    """
    width = vector_width(x)
    first = first_slot(x, start)
    place -= first
    col = first + cuda.threadIdx.x * width
    while col < n_cols:
        if col >= 0 and col + width <= n_cols:
            copy_async(cache, place + col, x, start + col)
        else:
            for k in range(width):
                value = beyond
                if col + k >= 0 and col + k < n_cols:
                    value = load(x, start + col + k)
                store(cache, place + col + k, value)
        col += cuda.blockDim.x * width


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
    def split_kernel(x, y, n_cols, length, part_bits):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        cache = dynamic_shared(x)
        values = cuda.local.array((1, MAX_WIDTH), np.float32)
        width = vector_width(x)
        first, stride = cuda.threadIdx.x * width, cuda.blockDim.x * width
        start, n_mine = shifted_part(x, n_cols, length, part_bits)
        before = first_slot(x, start)
        fetch(cache, 0, x, start, n_mine, LOWEST)
        wait_for_copies()
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
            store_within(y, start, before + col, n_mine, values[0])
            col += stride

    return split_kernel


def backward_kernel(formulas):
    """The kernel of dx = f'(dy, y)."""
    total_of, gradients = backward_steps(formulas, 1)

    @cuda.jit(max_registers=BACKWARD_REGISTERS)
    def split_backward_kernel(dy, y, dx, n_cols, length, part_bits):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        cache = dynamic_shared(dy)  # dy, and from `length` on y
        upstream = cuda.local.array((1, MAX_WIDTH), np.float32)
        values = cuda.local.array((1, MAX_WIDTH), np.float32)
        width = vector_width(dy)
        first, stride = cuda.threadIdx.x * width, cuda.blockDim.x * width
        start, n_mine = shifted_part(dy, n_cols, length, part_bits)
        before = first_slot(dy, start)
        fetch(cache, 0, dy, start, n_mine, ZERO)
        fetch(cache, length, y, start, n_mine, ZERO)
        wait_for_copies()
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
            store_within(dx, start, before + col, n_mine, upstream[0])
            col += stride

    return split_backward_kernel
