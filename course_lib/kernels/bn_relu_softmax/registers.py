"""The rung `registers`: each row is read once, 16 bytes at a time, and held in registers.

Blocks stay: each takes every `stride`-th row, or every stride-th group of rows, so that a feature's
mean, slope and bias are computed once per block. They lie in dynamic shared memory, those of one
thread's slots (`blocks/rows.py`) together: their addresses are one number and constants. Such a
block can sum the gradients of weight and bias down its rows, too, without another look at them.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.row_teams import place_of_thread, row_max, row_sum
from course_lib.kernels.blocks.rows import load_row, store_row
from course_lib.kernels.blocks.softmax_formulas import SOFTMAX
from course_lib.kernels.blocks.softmax_steps import backward_steps, forward_steps
from course_lib.kernels.bn_relu_softmax.features import relu_of, scale_of
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    load,
    vector_width,
    wait_for_previous_kernel,
)

reciprocal = SOFTMAX.row_factor


@cuda.jit(device=True)
def column_of(u, k, width, rank, n_ranks, vectors):
    """The column that slot (u, k) of a thread holds, as in `blocks/rows.py`."""
    if vectors:
        return (rank + u * n_ranks) * width + k
    return (u * width + k) * n_ranks + rank


@cuda.jit(device=True)
def record_size(n_slots, width):
    """Words of a thread's record: three for each slot. Odd, so that banks do not conflict."""
    return 3 * n_slots * width + 1


@cuda.jit(device=True)
def tabulate(table, n_slots, width, mean, var, weight, bias, eps, n_cols, n_ranks, vectors):
    """Fill the table: a record for each rank."""
    rank = cuda.threadIdx.x
    if rank < n_ranks:
        for u in range(n_slots):
            for k in range(width):
                col = column_of(u, k, width, rank, n_ranks, vectors)
                word = rank * record_size(n_slots, width) + 3 * (u * width + k)
                if col < n_cols:
                    table[word] = load(mean, col)
                    table[word + 1] = scale_of(weight, var, eps, col)
                    table[word + 2] = load(bias, col)
                else:
                    table[word] = ZERO
                    table[word + 1] = ZERO
                    table[word + 2] = ZERO
    cuda.syncthreads()


@cuda.jit(device=True)
def feature(table, record, slot, which):
    """A number of a slot's feature: 0 its mean, 1 its slope, 2 its bias.

    The index is unsigned: for a signed one numba provides for negative numbers, as Python has them,
    and each word would take an address register of its own.
    """
    return table[np.uint64(record + 3 * slot + which)]


def forward_kernel(n_slots, vectors):
    """The kernel with `n_slots` slots per thread, for rows on 16-byte boundaries or for others."""
    largest, exponentials, finish = forward_steps(SOFTMAX, n_slots)

    @cuda.jit(device=True)
    def activate(values, table, width, n_cols, rank, n_ranks):
        record = rank * record_size(n_slots, width)
        for u in range(n_slots):
            for k in range(width):
                slot = u * width + k
                centred = values[u, k] - feature(table, record, slot, 0)
                a, shift = feature(table, record, slot, 1), feature(table, record, slot, 2)
                h = relu_of(centred * a + shift)
                inside = column_of(u, k, width, rank, n_ranks, vectors) < n_cols
                values[u, k] = h if inside else LOWEST

    @cuda.jit
    def registers_kernel(x, y, mean, var, weight, bias, eps, n_rows, n_cols, team_bits, n_shared):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_max = cuda.shared.array(32, np.float32)
        scratch_sum = cuda.shared.array(32, np.float32)
        table = cuda.shared.array(0, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        following = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        width, stride = vector_width(x), cuda.gridDim.x * n_shared
        length = n_cols if row < n_rows else 0
        load_row(following, n_slots, x, row * n_cols, length, rank, n_ranks, vectors, ZERO)
        tabulate(table, n_slots, width, mean, var, weight, bias, eps, n_cols, n_ranks, vectors)
        first = cuda.blockIdx.x * n_shared  # of the block's rows: the same for all its threads
        while first < n_rows:
            for u in range(n_slots):
                for k in range(width):
                    values[u, k] = following[u, k]
            # The next row is under way while this one is worked on.
            coming = row + stride
            length = n_cols if coming < n_rows else 0
            load_row(following, n_slots, x, coming * n_cols, length, rank, n_ranks, vectors, ZERO)
            activate(values, table, width, n_cols, rank, n_ranks)
            m = row_max(largest(values, width), team_bits, scratch_max)
            s = row_sum(exponentials(values, width, m), team_bits, scratch_sum)
            finish(values, width, reciprocal(s))
            length = n_cols if row < n_rows else 0
            store_row(values, n_slots, y, row * n_cols, length, rank, n_ranks, vectors)
            first += stride
            row = coming

    return registers_kernel


def backward_kernel(n_slots, vectors):
    """The kernel with `n_slots` slots per thread and array; `vectors` as in `forward_kernel`."""
    total_of, gradients = backward_steps(SOFTMAX, n_slots)

    @cuda.jit(device=True)
    def to_inputs(d, h, weight_sum, bias_sum, table, width, rank):
        """From the gradient d of relu(z), and x in `h`: dx in `d`; adds to the two sums."""
        record = rank * record_size(n_slots, width)
        for u in range(n_slots):
            for k in range(width):
                slot = u * width + k
                a = feature(table, record, slot, 1)
                centred = h[u, k] - feature(table, record, slot, 0)
                z = centred * a + feature(table, record, slot, 2)
                dz = ZERO if z <= ZERO else d[u, k]
                weight_sum[u, k] += dz * centred
                bias_sum[u, k] += dz
                d[u, k] = dz * a

    @cuda.jit(device=True)
    def write_sums(weight_sum, bias_sum, table, partial, width, n_cols, rank, n_ranks):
        """The block's share of both sums, over all its teams in order."""
        n_teams, team = cuda.blockDim.x // n_ranks, cuda.threadIdx.x // n_ranks
        cuda.syncthreads()  # the table's place is taken by the sums of each team
        for u in range(n_slots):
            for k in range(width):
                col = column_of(u, k, width, rank, n_ranks, vectors)
                if col < n_cols:
                    table[2 * team * n_cols + col] = weight_sum[u, k]
                    table[(2 * team + 1) * n_cols + col] = bias_sum[u, k]
        cuda.syncthreads()
        j = np.int64(cuda.threadIdx.x)
        while j < 2 * n_cols:
            total = ZERO
            for other in range(n_teams):
                total += table[2 * other * n_cols + j]
            partial[2 * cuda.blockIdx.x * n_cols + j] = total
            j += cuda.blockDim.x

    @cuda.jit
    def registers_backward_kernel(
        dy, y, x, mean, var, weight, bias, dx, partial,
        eps, n_rows, n_cols, team_bits, n_shared,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        table = cuda.shared.array(0, np.float32)
        d = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        e = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        h = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        weight_sum = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        bias_sum = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        width = vector_width(x)
        for u in range(n_slots):
            for k in range(width):
                weight_sum[u, k] = ZERO
                bias_sum[u, k] = ZERO
        tabulate(table, n_slots, width, mean, var, weight, bias, eps, n_cols, n_ranks, vectors)
        first, stride = cuda.blockIdx.x * n_shared, cuda.gridDim.x * n_shared
        while first < n_rows:
            start = row * n_cols
            length = n_cols if row < n_rows else 0
            load_row(d, n_slots, dy, start, length, rank, n_ranks, vectors, ZERO)
            load_row(e, n_slots, y, start, length, rank, n_ranks, vectors, ZERO)
            load_row(h, n_slots, x, start, length, rank, n_ranks, vectors, ZERO)
            total = row_sum(total_of(d, e, width), team_bits, scratch)
            gradients(d, e, width, total)
            to_inputs(d, h, weight_sum, bias_sum, table, width, rank)
            store_row(d, n_slots, dx, start, length, rank, n_ranks, vectors)
            first += stride
            row += stride
            cuda.syncthreads()  # before `scratch` is used again
        write_sums(weight_sum, bias_sum, table, partial, width, n_cols, rank, n_ranks)

    return registers_backward_kernel
