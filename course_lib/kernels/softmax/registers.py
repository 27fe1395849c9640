"""The rung `registers`: each row is read once, 16 bytes at a time, and held in registers.

Rows of up to TEAM_COLS elements share a block: `team` neighbouring lanes of a warp take one, and
reduce it by shuffles alone. Longer rows get a block each, of as many warps as the row fills. A
kernel exists for each number of 16-byte slots per thread (`blocks/shifted_rows.py` says what those
are).
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.rows import (
    block_max_once,
    block_sum_once,
    team_max,
    team_sum,
)
from course_lib.kernels.blocks.shifted_rows import first_slot, load_shifted, store_shifted
from course_lib.kernels.blocks.softmax_steps import backward_steps, forward_steps
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    vector_width,
    wait_for_previous_kernel,
)


def forward_kernels(formulas, n_slots):
    """(team kernel, block kernel) of y = f(x) for `n_slots` slots per thread."""
    row_factor = formulas.row_factor
    largest, exponentials, finish = forward_steps(formulas, n_slots)

    @cuda.jit
    def team_kernel(x, y, n_rows, n_cols, team_bits):
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        team = 1 << team_bits
        thread = cuda.grid(1)
        row, rank = thread >> team_bits, thread & (team - 1)
        # Lanes without a row take part in the shuffles all the same.
        length = n_cols if row < n_rows else 0
        width = vector_width(x)
        start = row * n_cols
        done = first_slot(x, start)
        load_shifted(values, n_slots, x, start, length, done, rank, team, LOWEST)
        m = team_max(largest(values, width), team)
        factor = row_factor(team_sum(exponentials(values, width, m), team))
        finish(values, width, factor)
        store_shifted(values, n_slots, y, start, length, done, rank, team)

    @cuda.jit
    def block_kernel(x, y, n_cols):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_max = cuda.shared.array(32, np.float32)
        scratch_sum = cuda.shared.array(32, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        start = cuda.blockIdx.x * n_cols
        width = vector_width(x)
        done = first_slot(x, start)
        load_shifted(values, n_slots, x, start, n_cols, done, tid, n_threads, LOWEST)
        m = block_max_once(largest(values, width), scratch_max)
        factor = row_factor(block_sum_once(exponentials(values, width, m), scratch_sum))
        finish(values, width, factor)
        store_shifted(values, n_slots, y, start, n_cols, done, tid, n_threads)

    return team_kernel, block_kernel


def backward_kernels(formulas, n_slots):
    """(team kernel, block kernel) of dx = f'(dy, y) for `n_slots` slots per thread and array."""
    total_of, gradients = backward_steps(formulas, n_slots)

    @cuda.jit
    def team_kernel(dy, y, dx, n_rows, n_cols, team_bits):
        allow_next_kernel()
        wait_for_previous_kernel()
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        team = 1 << team_bits
        thread = cuda.grid(1)
        row, rank = thread >> team_bits, thread & (team - 1)
        length = n_cols if row < n_rows else 0
        width = vector_width(dy)
        start = row * n_cols
        done = first_slot(dy, start)
        load_shifted(upstream, n_slots, dy, start, length, done, rank, team, ZERO)
        load_shifted(values, n_slots, y, start, length, done, rank, team, ZERO)
        total = team_sum(total_of(upstream, values, width), team)
        gradients(upstream, values, width, total)
        store_shifted(upstream, n_slots, dx, start, length, done, rank, team)

    @cuda.jit
    def block_kernel(dy, y, dx, n_cols):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        start = cuda.blockIdx.x * n_cols
        width = vector_width(dy)
        done = first_slot(dy, start)
        load_shifted(upstream, n_slots, dy, start, n_cols, done, tid, n_threads, ZERO)
        load_shifted(values, n_slots, y, start, n_cols, done, tid, n_threads, ZERO)
        total = block_sum_once(total_of(upstream, values, width), scratch)
        gradients(upstream, values, width, total)
        store_shifted(upstream, n_slots, dx, start, n_cols, done, tid, n_threads)

    return team_kernel, block_kernel
