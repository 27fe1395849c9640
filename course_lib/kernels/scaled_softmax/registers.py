"""The rung `registers`: a row is read once, 16 bytes at a time, and held in registers.

Some lanes of a warp take a row, or a block does (`blocks/row_teams`). A kernel exists for each
number of 16-byte slots per thread (`blocks/rows` says what a slot is), and each kind of mask.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE, ZERO
from course_lib.kernels.blocks.row_teams import place_of_thread, row_max, row_sum
from course_lib.kernels.blocks.rows import load_row, store_row
from course_lib.kernels.blocks.softmax_formulas import SOFTMAX
from course_lib.kernels.blocks.softmax_steps import backward_steps, forward_steps, shift_for
from course_lib.kernels.scaled_softmax.scores import KINDS, factor_of, mask_of_row, seen_of_row
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.words import load_words


@cuda.jit(device=True)
def fill_unseen(values, n_slots, width, seen, rank, n_ranks, vectors, number):
    """Fill the slots of columns from `seen` on: a vector may reach beyond. 32 bits are faster."""
    if np.int32(n_slots * width * n_ranks) > np.int32(seen):
        first, step = (rank * width, 1) if vectors else (rank, n_ranks)
        for u in range(n_slots):
            for k in range(width):
                if np.int32(first + k * step + u * width * n_ranks) >= np.int32(seen):
                    values[u, k] = number


def forward_kernel(kind, n_slots):
    """The kernel for one kind of mask, with `n_slots` slots per thread."""
    read, masked = KINDS[kind]
    is_additive, is_boolean = kind == "additive", kind == "boolean"
    is_masked = kind != "plain"
    largest, exponentials, finish = forward_steps(SOFTMAX, n_slots)

    @cuda.jit(device=True)
    def read_words(marks, mask, at, seen, width, rank, n_ranks):
        """The same of a boolean mask, `width` bytes at once."""
        flags = cuda.local.array((n_slots, 2), np.uint32)
        for u in range(n_slots):
            col = (rank + u * n_ranks) * width
            if col < seen:
                if width == 4:
                    load_words(flags[u], 0, mask, at + col, 4)
                else:
                    load_words(flags[u], 0, mask, at + col, 8)
        for u in range(n_slots):
            if (rank + u * n_ranks) * width < seen:
                for k in range(width):
                    flag = flags[u, k >> 2] >> np.uint32(8 * (k & 3)) & np.uint32(255)
                    marks[u, k] = ONE if flag else ZERO

    @cuda.jit(device=True)
    def read_marks(marks, mask, at, rows, seen, width, rank, n_ranks, vectors):
        """Fill the slots with the mask's elements; all loads come before the first use."""
        fill_unseen(marks, n_slots, width, 0, rank, n_ranks, vectors, ZERO)
        if vectors and is_additive:
            load_row(marks, n_slots, mask, at, seen, rank, n_ranks, vectors, ZERO)
        elif is_boolean and vectors and rows.words:
            read_words(marks, mask, at, seen, width, rank, n_ranks)
        elif vectors:
            for u in range(n_slots):
                col = (rank + u * n_ranks) * width
                if col < seen:
                    for k in range(width):
                        marks[u, k] = read(mask, at + col + k)
        else:
            for u in range(n_slots):
                for k in range(width):
                    col = (u * width + k) * n_ranks + rank
                    if col < seen:
                        marks[u, k] = read(mask, at + col * rows.col)

    @cuda.jit
    def registers_kernel(x, mask, y, rows, team_bits, vectors):
        """A row's softmax in one pass.

        x, mask, y, rows  as of `online.online_kernel`
        team_bits  log2 of the lanes that share a row, or WHOLE_BLOCK
        vectors    whether rows begin on 16-byte boundaries, an additive mask's too, and columns of
                   a mask are neighbours
        """
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_m, scratch_s = cuda.shared.array(32, np.float32), cuda.shared.array(32, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        marks = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        start, width = row * rows.n_cols, vector_width(x)
        seen = seen_of_row(row, rows)  # lanes without a row take part in the shuffles
        load_row(values, n_slots, x, start, seen, rank, n_ranks, vectors, ZERO)
        if is_masked:
            at = mask_of_row(row, rows)
            read_marks(marks, mask, at, rows, seen, width, rank, n_ranks, vectors)
        for u in range(n_slots):
            for k in range(width):
                values[u, k] = masked(values[u, k] * rows.scale, marks[u, k])
        fill_unseen(values, n_slots, width, seen, rank, n_ranks, vectors, LOWEST)
        m = shift_for(row_max(largest(values, width), team_bits, scratch_m))
        total = row_sum(exponentials(values, width, m), team_bits, scratch_s)
        finish(values, width, factor_of(total))
        length = rows.n_cols if row < rows.n_rows else 0
        store_row(values, n_slots, y, start, length, rank, n_ranks, vectors)

    return registers_kernel


def backward_kernel(n_slots):
    """The kernel with `n_slots` slots per thread and array."""
    total_of, gradients = backward_steps(SOFTMAX, n_slots)

    @cuda.jit
    def registers_backward_kernel(dy, y, dx, rows, team_bits, vectors):
        """A row's dx in one pass.

        dy, y, dx, rows  as of `online.online_backward_kernel`
        team_bits, vectors  as of `registers_kernel`
        """
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        start, width = row * rows.n_cols, vector_width(dy)
        seen = seen_of_row(row, rows)
        load_row(upstream, n_slots, dy, start, seen, rank, n_ranks, vectors, ZERO)
        load_row(values, n_slots, y, start, seen, rank, n_ranks, vectors, ZERO)
        fill_unseen(upstream, n_slots, width, seen, rank, n_ranks, vectors, ZERO)
        total = row_sum(total_of(upstream, values, width), team_bits, scratch)
        gradients(upstream, values, width, total)
        for u in range(n_slots):
            for k in range(width):
                upstream[u, k] *= rows.scale
        length = rows.n_cols if row < rows.n_rows else 0
        store_row(upstream, n_slots, dx, start, length, rank, n_ranks, vectors)

    return registers_backward_kernel
