"""The rung `split` where shared memory cannot hold a row: any length, any chip, read twice.

Several blocks share a row. The first kernel finds the statistics of each block's part (maximum and
sum of exponentials, in one pass); the second merges those of its row, reads the part again and
finishes it.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.rows import block_sum_once
from course_lib.kernels.blocks.shifted_rows import (
    first_slot,
    load_shifted,
    shifted_part,
    store_shifted,
)
from course_lib.kernels.blocks.softmax_steps import backward_steps, forward_steps, online_step
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    block_online,
    online_merge,
    vector_width,
    wait_for_previous_kernel,
)

STREAM_SLOTS = 4  # slots of 16 bytes in flight per thread


add_online = online_step(STREAM_SLOTS)


@cuda.jit(device=True)
def stream_online(x, start, n_cols, rank, n_ranks):
    """This thread's (m, s) of x[start:start + n_cols], of which it reads its share once."""
    width = vector_width(x)
    values = cuda.local.array((STREAM_SLOTS, MAX_WIDTH), np.float32)
    m, s = LOWEST, ZERO
    done = first_slot(x, start)
    while done < n_cols:
        load_shifted(values, STREAM_SLOTS, x, start, n_cols, done, rank, n_ranks, LOWEST)
        m, s = add_online(values, width, m, s)
        done += STREAM_SLOTS * width * n_ranks
    return m, s


def forward_kernels(formulas):
    """Of y = f(x): (kernel of the parts' statistics, kernel that finishes)."""
    row_factor = formulas.row_factor
    steps = forward_steps(formulas, STREAM_SLOTS)
    exponentials, finish = steps.exponentials, steps.finish

    @cuda.jit
    def statistics_kernel(x, statistics, n_cols, length, part_bits):
        # statistics[2·b] and [2·b + 1]: maximum and sum of block b's part
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        tid = cuda.threadIdx.x
        start, n_mine = shifted_part(x, n_cols, length, part_bits)
        m, s = stream_online(x, start, n_mine, tid, cuda.blockDim.x)
        m, s = block_online(m, s, scratch_m, scratch_s)
        if tid == 0:
            statistics[2 * cuda.blockIdx.x] = m
            statistics[2 * cuda.blockIdx.x + 1] = s

    @cuda.jit
    def finish_kernel(x, y, statistics, n_cols, length, part_bits):
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((STREAM_SLOTS, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        width = vector_width(x)
        start, n_mine = shifted_part(x, n_cols, length, part_bits)
        first = cuda.blockIdx.x >> part_bits << part_bits  # of this row's blocks
        m, s = LOWEST, ZERO
        for part in range(1 << part_bits):
            other = 2 * (first + part)
            m, s = online_merge(m, s, statistics[other], statistics[other + 1])
        factor = row_factor(s)
        done = first_slot(x, start)
        while done < n_mine:
            load_shifted(values, STREAM_SLOTS, x, start, n_mine, done, tid, n_threads, LOWEST)
            exponentials(values, width, m)
            finish(values, width, factor)
            store_shifted(values, STREAM_SLOTS, y, start, n_mine, done, tid, n_threads)
            done += STREAM_SLOTS * width * n_threads

    return statistics_kernel, finish_kernel


@cuda.jit(device=True)
def load_both(upstream, values, dy, y, start, n_mine, done, tid, n_threads):
    load_shifted(upstream, STREAM_SLOTS, dy, start, n_mine, done, tid, n_threads, ZERO)
    load_shifted(values, STREAM_SLOTS, y, start, n_mine, done, tid, n_threads, ZERO)


def backward_kernels(formulas):
    """Of dx = f'(dy, y): (kernel of the parts' sums, kernel that finishes)."""
    total_of, gradients = backward_steps(formulas, STREAM_SLOTS)

    @cuda.jit
    def statistics_kernel(dy, y, sums, n_cols, length, part_bits):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        upstream = cuda.local.array((STREAM_SLOTS, MAX_WIDTH), np.float32)
        values = cuda.local.array((STREAM_SLOTS, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        width = vector_width(dy)
        start, n_mine = shifted_part(dy, n_cols, length, part_bits)
        total = ZERO
        done = first_slot(dy, start)
        while done < n_mine:
            load_both(upstream, values, dy, y, start, n_mine, done, tid, n_threads)
            total += total_of(upstream, values, width)
            done += STREAM_SLOTS * width * n_threads
        total = block_sum_once(total, scratch)
        if tid == 0:
            sums[cuda.blockIdx.x] = total

    @cuda.jit
    def finish_kernel(dy, y, dx, sums, n_cols, length, part_bits):
        allow_next_kernel()
        wait_for_previous_kernel()
        upstream = cuda.local.array((STREAM_SLOTS, MAX_WIDTH), np.float32)
        values = cuda.local.array((STREAM_SLOTS, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        width = vector_width(dy)
        start, n_mine = shifted_part(dy, n_cols, length, part_bits)
        first = cuda.blockIdx.x >> part_bits << part_bits
        total = ZERO
        for part in range(1 << part_bits):
            total += sums[first + part]
        done = first_slot(dy, start)
        while done < n_mine:
            load_both(upstream, values, dy, y, start, n_mine, done, tid, n_threads)
            gradients(upstream, values, width, total)
            store_shifted(upstream, STREAM_SLOTS, dx, start, n_mine, done, tid, n_threads)
            done += STREAM_SLOTS * width * n_threads

    return statistics_kernel, finish_kernel
