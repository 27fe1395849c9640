"""The rung `registers`: each row is read once, 16 bytes at a time, and held in registers.

Rows of up to TEAM_COLS elements share a block: `team` neighbouring lanes of a warp take one, and
reduce it by shuffles alone. Longer rows get a block each, of as many warps as the row fills. A
kernel exists for each number of 16-byte slots per thread (`rows.py` says what a slot is).
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import (
    MAX_WIDTH,
    ZERO,
    block_max_once,
    block_sum_once,
    load_row,
    store_row,
    team_max,
    team_sum,
)
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    fast_exp,
    vector_width,
    wait_for_previous_kernel,
)


def forward_kernels(formulas, n_slots):
    """(team kernel, block kernel) of y = f(x) for `n_slots` slots per thread."""
    keep, row_factor, finish = formulas.keep, formulas.row_factor, formulas.finish

    @cuda.jit(device=True)
    def largest_of(values, width):
        m = values[0, 0]
        for u in range(n_slots):
            for k in range(width):
                m = max(m, values[u, k])
        return m

    @cuda.jit(device=True)
    def exponentials(values, width, m):
        total = ZERO
        for u in range(n_slots):
            for k in range(width):
                difference = values[u, k] - m
                exponential = fast_exp(difference)
                total += exponential
                values[u, k] = keep(difference, exponential)
        return total

    @cuda.jit(device=True)
    def finish_all(values, width, factor):
        for u in range(n_slots):
            for k in range(width):
                values[u, k] = finish(values[u, k], factor)

    @cuda.jit
    def team_kernel(x, y, n_rows, n_cols, team_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        team = 1 << team_bits
        thread = cuda.grid(1)
        row, rank = thread >> team_bits, thread & (team - 1)
        # Lanes without a row take part in the shuffles all the same.
        length = n_cols if row < n_rows else 0
        width = vector_width(x)
        load_row(values, n_slots, x, row * n_cols, length, rank, team, vectors, LOWEST)
        m = team_max(largest_of(values, width), team)
        factor = row_factor(team_sum(exponentials(values, width, m), team))
        finish_all(values, width, factor)
        store_row(values, n_slots, y, row * n_cols, length, rank, team, vectors)

    @cuda.jit
    def block_kernel(x, y, n_cols, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_max = cuda.shared.array(32, np.float32)
        scratch_sum = cuda.shared.array(32, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        start = cuda.blockIdx.x * n_cols
        width = vector_width(x)
        load_row(values, n_slots, x, start, n_cols, tid, n_threads, vectors, LOWEST)
        m = block_max_once(largest_of(values, width), scratch_max)
        factor = row_factor(block_sum_once(exponentials(values, width, m), scratch_sum))
        finish_all(values, width, factor)
        store_row(values, n_slots, y, start, n_cols, tid, n_threads, vectors)

    return team_kernel, block_kernel


def backward_kernels(formulas, n_slots):
    """(team kernel, block kernel) of dx = f'(dy, y) for `n_slots` slots per thread and array."""
    term, gradient = formulas.term, formulas.gradient

    @cuda.jit(device=True)
    def sum_of_terms(upstream, values, width):
        total = ZERO
        for u in range(n_slots):
            for k in range(width):
                total += term(upstream[u, k], values[u, k])
        return total

    @cuda.jit(device=True)
    def gradients(upstream, values, width, total):
        for u in range(n_slots):
            for k in range(width):
                upstream[u, k] = gradient(upstream[u, k], values[u, k], total)

    @cuda.jit
    def team_kernel(dy, y, dx, n_rows, n_cols, team_bits, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        team = 1 << team_bits
        thread = cuda.grid(1)
        row, rank = thread >> team_bits, thread & (team - 1)
        length = n_cols if row < n_rows else 0
        width = vector_width(dy)
        load_row(upstream, n_slots, dy, row * n_cols, length, rank, team, vectors, ZERO)
        load_row(values, n_slots, y, row * n_cols, length, rank, team, vectors, ZERO)
        total = team_sum(sum_of_terms(upstream, values, width), team)
        gradients(upstream, values, width, total)
        store_row(upstream, n_slots, dx, row * n_cols, length, rank, team, vectors)

    @cuda.jit
    def block_kernel(dy, y, dx, n_cols, vectors):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        start = cuda.blockIdx.x * n_cols
        width = vector_width(dy)
        load_row(upstream, n_slots, dy, start, n_cols, tid, n_threads, vectors, ZERO)
        load_row(values, n_slots, y, start, n_cols, tid, n_threads, vectors, ZERO)
        total = block_sum_once(sum_of_terms(upstream, values, width), scratch)
        gradients(upstream, values, width, total)
        store_row(upstream, n_slots, dx, start, n_cols, tid, n_threads, vectors)

    return team_kernel, block_kernel
