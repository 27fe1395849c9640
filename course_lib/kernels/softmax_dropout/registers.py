"""The rung `registers`: each row is read once, 16 bytes at a time, and held in registers.

A kernel exists for each number of 16-byte slots per thread (`blocks/rows.py`), and one for rows
that no block can hold, which reads them in parts, twice.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.dropout_mask import kept_slots, multiply_kept
from course_lib.kernels.blocks.row_teams import place_of_thread, row_max, row_sum
from course_lib.kernels.blocks.rows import load_row, store_row
from course_lib.kernels.blocks.softmax_formulas import SOFTMAX, exponential
from course_lib.kernels.blocks.softmax_steps import backward_steps, forward_steps, online_step
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    block_online,
    vector_width,
    wait_for_previous_kernel,
)

reciprocal = SOFTMAX.row_factor


def forward_kernels(n_slots):
    """(kernel for rows that fit, kernel for longer ones) with `n_slots` slots per thread."""
    largest, exponentials, _ = forward_steps(SOFTMAX, n_slots)
    add_online = online_step(n_slots)

    @cuda.jit
    def registers_kernel(
        x, z, stats, n_rows, n_cols, team_bits, vectors, scale, threshold, offset, key0, key1
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_max = cuda.shared.array(32, np.float32)
        scratch_sum = cuda.shared.array(32, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        start, width = row * n_cols, vector_width(x)
        # Lanes without a row take part in the shuffles all the same.
        length = n_cols if row < n_rows else 0
        load_row(values, n_slots, x, start, length, rank, n_ranks, vectors, LOWEST)
        # Memory takes its time: the random numbers are drawn while the loads are under way.
        kept = kept_slots(
            n_slots, width, offset + start, length, rank, n_ranks, vectors, threshold, key0, key1
        )
        m = row_max(largest(values, width), team_bits, scratch_max)
        s = row_sum(exponentials(values, width, m), team_bits, scratch_sum)
        multiply_kept(values, n_slots, width, kept, reciprocal(s) * scale)
        store_row(values, n_slots, z, start, length, rank, n_ranks, vectors)
        if rank == 0 and row < n_rows:
            stats[2 * row] = m
            stats[2 * row + 1] = s

    @cuda.jit
    def long_kernel(
        x, z, stats, n_rows, n_cols, team_bits, vectors, scale, threshold, offset, key0, key1
    ):
        # A block reads its row in parts, once for maximum and sum and once more to finish.
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        width = vector_width(x)
        start, end, step = row * n_cols, (row + 1) * n_cols, n_slots * width * n_ranks
        m, s = LOWEST, ZERO
        part = start
        while part < end:
            load_row(values, n_slots, x, part, end - part, rank, n_ranks, vectors, LOWEST)
            m, s = add_online(values, width, m, s)
            part += step
        m, s = block_online(m, s, scratch_m, scratch_s)
        factor = reciprocal(s) * scale
        part = start
        while part < end:
            load_row(values, n_slots, x, part, end - part, rank, n_ranks, vectors, LOWEST)
            kept = kept_slots(
                n_slots, width, offset + part, end - part, rank, n_ranks, vectors, threshold,
                key0, key1,
            )  # fmt: skip
            exponentials(values, width, m)
            multiply_kept(values, n_slots, width, kept, factor)
            store_row(values, n_slots, z, part, end - part, rank, n_ranks, vectors)
            part += step
        if rank == 0:
            stats[2 * row] = m
            stats[2 * row + 1] = s

    return registers_kernel, long_kernel


def backward_kernels(n_slots):
    """(kernel for rows that fit, kernel for longer ones) with `n_slots` slots per array."""
    total_of, gradients = backward_steps(SOFTMAX, n_slots)

    @cuda.jit(device=True)
    def load_pair(
        g, y, dz, x, m, factor, first, start, n_cols, rank, n_ranks, vectors, scale, threshold,
        key0, key1,
    ):  # fmt: skip
        """Fill the slots of g = dz·mask / (1 − p) and of y; returns this thread's part of Σ y·g."""
        width = vector_width(x)
        load_row(g, n_slots, dz, start, n_cols, rank, n_ranks, vectors, ZERO)
        load_row(y, n_slots, x, start, n_cols, rank, n_ranks, vectors, LOWEST)
        kept = kept_slots(
            n_slots, width, first + start, n_cols, rank, n_ranks, vectors, threshold, key0, key1
        )
        multiply_kept(g, n_slots, width, kept, scale)
        for u in range(n_slots):
            for k in range(width):
                y[u, k] = exponential(y[u, k] - m, width) * factor
        return total_of(g, y, width)

    @cuda.jit(device=True)
    def store_gradient(g, y, total, dx, start, n_cols, rank, n_ranks, vectors):
        gradients(g, y, vector_width(dx), total)
        store_row(g, n_slots, dx, start, n_cols, rank, n_ranks, vectors)

    @cuda.jit
    def registers_backward_kernel(
        dz, x, stats, dx, n_rows, n_cols, team_bits, vectors, scale, threshold, offset, key0, key1
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        g = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        y = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        start, length, m, factor = row * n_cols, np.int64(0), ZERO, ZERO
        if row < n_rows:
            length, m, factor = n_cols, stats[2 * row], reciprocal(stats[2 * row + 1])
        total = load_pair(
            g, y, dz, x, m, factor, offset, start, length, rank, n_ranks, vectors, scale,
            threshold, key0, key1,
        )  # fmt: skip
        total = row_sum(total, team_bits, scratch)
        store_gradient(g, y, total, dx, start, length, rank, n_ranks, vectors)

    @cuda.jit
    def long_backward_kernel(
        dz, x, stats, dx, n_rows, n_cols, team_bits, vectors, scale, threshold, offset, key0, key1
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        g = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        y = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        start, end, step = row * n_cols, (row + 1) * n_cols, n_slots * vector_width(x) * n_ranks
        m, factor = stats[2 * row], reciprocal(stats[2 * row + 1])
        total = ZERO
        part = start
        while part < end:
            total += load_pair(
                g, y, dz, x, m, factor, offset, part, end - part, rank, n_ranks, vectors, scale,
                threshold, key0, key1,
            )  # fmt: skip
            part += step
        total = row_sum(total, team_bits, scratch)
        part = start
        while part < end:
            load_pair(
                g, y, dz, x, m, factor, offset, part, end - part, rank, n_ranks, vectors, scale,
                threshold, key0, key1,
            )  # fmt: skip
            store_gradient(g, y, total, dx, part, end - part, rank, n_ranks, vectors)
            part += step

    return registers_backward_kernel, long_backward_kernel
