"""The rung `split`: rows too long for one block's registers, still read only once.

A cluster of blocks shares a row. Each holds its part in registers, as `registers` does, and they
exchange maxima and sums through distributed shared memory (`runtime.cluster`). Rows too long for a
cluster, and chips without clusters, take the kernels of `streamed` instead.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import MAX_WIDTH, ZERO, load_row, my_part, store_row
from course_lib.kernels.softmax.steps import backward_steps, forward_steps
from course_lib.runtime.cluster import cluster_sync, load_from_cluster
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    vector_width,
    wait_for_previous_kernel,
    warp_max,
    warp_sum,
)


@cuda.jit(device=True)
def cluster_max(value, scratch, n_parts):
    """Largest `value` of all threads of a cluster. `scratch` is used for this alone."""
    lane_id, warp_id = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    value = warp_max(value)
    if lane_id == 0:
        scratch[warp_id] = value
    cluster_sync()
    value = LOWEST
    if lane_id < cuda.blockDim.x >> 5:
        for rank in range(n_parts):
            value = max(value, load_from_cluster(scratch, lane_id, rank))
    return warp_max(value)


@cuda.jit(device=True)
def cluster_sum(value, scratch, n_parts):
    """Sum of `value` over all threads of a cluster. `scratch` is used for this alone."""
    lane_id, warp_id = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    value = warp_sum(value)
    if lane_id == 0:
        scratch[warp_id] = value
    cluster_sync()
    value = ZERO
    if lane_id < cuda.blockDim.x >> 5:
        for rank in range(n_parts):
            value += load_from_cluster(scratch, lane_id, rank)
    return warp_sum(value)


def forward_kernel(formulas, n_slots):
    """The kernel of y = f(x) for `n_slots` slots per thread."""
    row_factor = formulas.row_factor
    largest, exponentials, finish = forward_steps(formulas, n_slots)

    @cuda.jit
    def cluster_kernel(x, y, n_cols, length, part_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_max = cuda.shared.array(32, np.float32)
        scratch_sum = cuda.shared.array(32, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        width = vector_width(x)
        start, n_mine = my_part(n_cols, length, part_bits)
        load_row(values, n_slots, x, start, n_mine, tid, n_threads, vectors, LOWEST)
        m = cluster_max(largest(values, width), scratch_max, 1 << part_bits)
        total = cluster_sum(exponentials(values, width, m), scratch_sum, 1 << part_bits)
        finish(values, width, row_factor(total))
        store_row(values, n_slots, y, start, n_mine, tid, n_threads, vectors)
        cluster_sync()  # others may still be reading this block's scratch

    return cluster_kernel


def backward_kernel(formulas, n_slots):
    """The kernel of dx = f'(dy, y) for `n_slots` slots per thread and array."""
    total_of, gradients = backward_steps(formulas, n_slots)

    @cuda.jit
    def cluster_kernel(dy, y, dx, n_cols, length, part_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        width = vector_width(dy)
        start, n_mine = my_part(n_cols, length, part_bits)
        load_row(upstream, n_slots, dy, start, n_mine, tid, n_threads, vectors, ZERO)
        load_row(values, n_slots, y, start, n_mine, tid, n_threads, vectors, ZERO)
        total = cluster_sum(total_of(upstream, values, width), scratch, 1 << part_bits)
        gradients(upstream, values, width, total)
        store_row(upstream, n_slots, dx, start, n_mine, tid, n_threads, vectors)
        cluster_sync()  # others may still be reading this block's scratch

    return cluster_kernel
