"""The rung `registers`: each row is read once, 16 bytes at a time, and held in registers.

Forward, the mean comes first, and then, of what is left of each element, the sum and the sum of
squares. That second sum would be 0 but for the rounding of the mean, and so tells what the mean
lacks: a row far from zero keeps its digits.

Backward, blocks stay: each takes every `gridDim`-th row, or group of rows, one for each of its
teams (`row_teams`). So it sums the gradients of weight and bias down its rows without another
look at them, in shared memory: each thread has a record there, which no other touches until all
rows are done. A block that is alone then has the gradients themselves.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE, ZERO
from course_lib.kernels.blocks.moments import reciprocal_deviation
from course_lib.kernels.blocks.row_teams import place_of_thread, row_sum, row_sums
from course_lib.kernels.blocks.rows import load_row, store_row
from course_lib.kernels.layer_norm.features import count_held, load_features, store_slot
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    store,
    vector_width,
    wait_for_previous_kernel,
)

# The largest blocks then fit on every multiprocessor.
FORWARD_REGISTERS, BACKWARD_REGISTERS = 128, 168
# Into which a column's teams are cut, so that threads add side by side; with fewer, one adds all.
LEAST_SHARES, SHARES = 4, 16


def forward_kernel(n_slots, vectors):
    """The kernel of y for `n_slots` slots of 16 bytes per thread; `vectors` as in
    `backward_kernel`."""

    @cuda.jit(max_registers=FORWARD_REGISTERS)
    def registers_kernel(
        x, y, weight, bias, has_weight, has_bias, means, rstds, eps,
        n_rows, n_cols, team_bits,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        scratch_of_two = cuda.shared.array(64, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        features = cuda.local.array((2, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        width, share = vector_width(x), ONE / np.float32(n_cols)
        # Lanes without a row take part in the shuffles all the same.
        length = n_cols if row < n_rows else 0
        load_row(values, n_slots, x, row * n_cols, length, rank, n_ranks, vectors, ZERO)
        n_mine = count_held(n_slots, width, length, rank, n_ranks, vectors)
        total = ZERO
        for u in range(n_slots):
            for k in range(width):
                total += values[u, k]
        mean = row_sum(total, team_bits, scratch) * share
        rest = squares = ZERO
        for u in range(n_slots):
            for k in range(width):
                values[u, k] = values[u, k] - mean if u * width + k < n_mine else ZERO
                rest += values[u, k]
                squares += values[u, k] * values[u, k]
        rest, squares = row_sums(rest, squares, team_bits, scratch_of_two, 0)
        lacking = rest * share
        variance = squares * share - lacking * lacking
        rstd = reciprocal_deviation(ZERO if variance < ZERO else variance, eps)
        if rank == 0 and row < n_rows:
            means[row], rstds[row] = mean + lacking, rstd
        for u in range(n_slots):
            load_features(
                features, 0, weight, has_weight, ONE, 0, n_cols, u, width, rank, n_ranks, vectors
            )
            load_features(
                features, 1, bias, has_bias, ZERO, 0, n_cols, u, width, rank, n_ranks, vectors
            )
            for k in range(width):
                values[u, k] = (values[u, k] - lacking) * rstd * features[0, k] + features[1, k]
            # At once, or the features of all slots would be loaded first, and need registers.
            store_slot(values, u, y, row * n_cols, length, rank, n_ranks, vectors)

    return registers_kernel


def backward_kernel(n_slots, vectors):
    """The kernel of dx and the columns' partial sums.

    n_slots  slots of 16 bytes per thread and array
    vectors  whether rows begin on 16-byte boundaries
    """

    @cuda.jit(device=True)
    def record_size(width):
        """Words of a thread's sums in shared memory. Odd, so that banks do not conflict."""
        return 2 * n_slots * width + 1

    @cuda.jit(device=True)
    def word_of(col, width, n_ranks):
        """Where the first team has its sums of a column, in the table."""
        if vectors:  # as `column_of`, the other way around
            vector = col // width
            rank, slot = vector % n_ranks, vector // n_ranks * width + col % width
        else:
            rank, slot = col % n_ranks, col // n_ranks
        return rank * record_size(width) + 2 * slot

    @cuda.jit(device=True)
    def add_teams(table, word, step, first, end, stride):
        """Both sums of a column over teams `first`, `first` + `stride` … before `end`."""
        of_weight = of_bias = ZERO
        team = first
        while team < end:
            of_weight += table[word + team * step]
            of_bias += table[word + team * step + 1]
            team += stride
        return of_weight, of_bias

    @cuda.jit(device=True)
    def write_sums(table, partial, dweight, dbias, width, n_cols, n_ranks, n_teams):
        """The block's share of both sums, over its first `n_teams` teams.

        Several threads take a column's teams where columns are few; the first adds up theirs.
        """
        n_threads, step = np.int64(cuda.blockDim.x), n_ranks * record_size(width)
        n_shares = min(n_teams, n_threads // n_cols, SHARES)
        n_added = n_shares if n_shares >= LEAST_SHARES else n_teams
        cuda.syncthreads()
        if n_shares >= LEAST_SHARES:
            i = np.int64(cuda.threadIdx.x)
            while i < n_cols * n_shares:
                share = i // n_cols
                word = word_of(i - share * n_cols, width, n_ranks)
                of_weight, of_bias = add_teams(table, word, step, share, n_teams, n_shares)
                table[word + share * step], table[word + share * step + 1] = of_weight, of_bias
                i += n_threads
            cuda.syncthreads()
        start, col = 2 * np.int64(cuda.blockIdx.x) * n_cols, np.int64(cuda.threadIdx.x)
        while col < n_cols:
            word = word_of(col, width, n_ranks)
            of_weight, of_bias = add_teams(table, word, step, 0, n_added, 1)
            if cuda.gridDim.x == 1:
                store(dweight, col, of_weight)
                store(dbias, col, of_bias)
            else:
                partial[start + col], partial[start + n_cols + col] = of_weight, of_bias
            col += n_threads

    @cuda.jit(max_registers=BACKWARD_REGISTERS)
    def registers_backward_kernel(
        dy, x, weight, has_weight, means, rstds, dx, partial, dweight, dbias, sums,
        n_rows, n_cols, team_bits,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(128, np.float32)
        table = cuda.shared.array(0, np.float32)
        d = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        h = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        scale = cuda.local.array((1, MAX_WIDTH), np.float32)
        row, rank, n_ranks = place_of_thread(team_bits)
        width, share = vector_width(x), ONE / np.float32(n_cols)
        n_teams = max(1, cuda.blockDim.x >> team_bits)
        record = np.int64(cuda.threadIdx.x) * record_size(width)
        for word in range(2 * n_slots * width):
            table[record + word] = ZERO
        first, half = np.int64(cuda.blockIdx.x) * n_teams, 0  # of the block's rows, of `scratch`
        while first < n_rows:
            mean = rstd = ZERO
            if row < n_rows:
                mean, rstd = means[row], rstds[row]
            length = n_cols if row < n_rows else 0
            load_row(d, n_slots, dy, row * n_cols, length, rank, n_ranks, vectors, ZERO)
            load_row(h, n_slots, x, row * n_cols, length, rank, n_ranks, vectors, ZERO)
            n_mine = count_held(n_slots, width, length, rank, n_ranks, vectors)
            total = product = ZERO
            for u in range(n_slots):
                load_features(
                    scale, 0, weight, has_weight, ONE, 0, n_cols, u, width, rank, n_ranks, vectors
                )
                for k in range(width):
                    # Past the end of a row, x − mean could overflow.
                    h[u, k] = (h[u, k] - mean) * rstd if u * width + k < n_mine else ZERO
                    word = record + 2 * (u * width + k)
                    table[np.uint64(word)] += d[u, k] * h[u, k]
                    table[np.uint64(word + 1)] += d[u, k]
                    d[u, k] *= scale[0, k]
                    total += d[u, k]
                    product += d[u, k] * h[u, k]
            # Two halves in turns: who writes to one again has seen, at the barrier of the call
            # between, that all have read it.
            total, product = row_sums(total, product, team_bits, scratch, half)
            half = 64 - half
            total, product = total * share, product * share
            for u in range(n_slots):
                for k in range(width):
                    d[u, k] = rstd * (d[u, k] - total - h[u, k] * product)
            store_row(d, n_slots, dx, row * n_cols, length, rank, n_ranks, vectors)
            first += cuda.gridDim.x * n_teams
            row += cuda.gridDim.x * n_teams
        if sums:
            n_busy = min(n_teams, n_rows - np.int64(cuda.blockIdx.x) * n_teams)
            write_sums(table, partial, dweight, dbias, width, n_cols, n_ranks, n_busy)

    return registers_backward_kernel
