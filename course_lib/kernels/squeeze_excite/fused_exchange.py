"""What the rung `fused` does between pooling and scaling: the small layers, shared out over blocks.

The blocks that hold the parts of a sample are a *team*. The hidden layer is linear in the means, so
each of them can do its share of it alone: the columns of the first matrix that belong to the
channels of its part, times their sums. It posts the R numbers in a mailbox (`runtime.mailbox`);
each block of the team adds up those of all parts, in one order, and so knows the hidden layer
after one exchange. Of the second matrix it needs the rows of its own channels alone. Backward the
same happens with the matrices' roles swapped.

`tables` is the block's shared memory as float32: see `plan.Tables` for what lies where.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.activation import ZERO
from course_lib.runtime.intrinsics import FULL_MASK, load, store
from course_lib.runtime.mailbox import look, post

HEADER = 2  # words of the mailbox that count launches and blocks
LANES = 8  # that work on one row of a matrix together
TEAMS = 32 // LANES  # of such lanes in a warp
MOST_MARKS = (1 << 30) - 1
COPIES = 4  # numbers of each matrix that a thread has on their way
AHEAD = 6  # words asked for before the first is waited for


@cuda.jit(device=True)
def quotient(a, b):
    """a // b of numbers from 0 to 2³² − 1, for which the chip needs a quarter of the time."""
    return np.int64(np.uint32(a) // np.uint32(b))


@cuda.jit(device=True)
def lanes_sum(value, n_lanes):
    """Sum over `n_lanes` neighbouring lanes, a power of two; all 32 lanes must call."""
    step = n_lanes >> 1
    while step > 0:
        value += cuda.shfl_xor_sync(FULL_MASK, value, step)
        step >>= 1
    return value


@cuda.jit(device=True)
def begin(box, shared_mark):
    """Put the mark of this launch into shared_mark[0]: one more than that of the launch before.

    The last block to read it sets it for the next launch. One thread does it, while the others go
    on; a barrier must follow.
    """
    if cuda.threadIdx.x == cuda.blockDim.x - 1:
        mark = (cuda.ldcv(box, 0) & MOST_MARKS) + 1
        shared_mark[0] = mark
        if cuda.atomic.add(box, 1, 1) == cuda.gridDim.x - 1:
            cuda.stwt(box, 1, np.int64(0))
            cuda.stwt(box, 0, np.int64(mark))


@cuda.jit(device=True)
def sum_of_splits(tables, at, n):
    """tables[at] + … + tables[at + n − 1]."""
    total, other, stop = load(tables, at), ZERO, at + n
    at += 1
    while at + 1 < stop:
        total += load(tables, at)
        other += load(tables, at + 1)
        at += 2
    return total + other + (load(tables, at) if at < stop else ZERO)


@cuda.jit(device=True)
def lanes_dot(tables, a, a_step, b, n):
    """Σ over k < n of tables[a + k·a_step] · tables[b + k], in all of LANES lanes."""
    rank, total, other = cuda.threadIdx.x % LANES, ZERO, ZERO
    i, j, end, step = a + rank * a_step, b + rank, b + n, LANES * a_step
    while j + 3 * LANES < end:
        total += load(tables, i) * load(tables, j)
        other += load(tables, i + step) * load(tables, j + LANES)
        total += load(tables, i + 2 * step) * load(tables, j + 2 * LANES)
        other += load(tables, i + 3 * step) * load(tables, j + 3 * LANES)
        i += 4 * step
        j += 4 * LANES
    while j < end:
        total += load(tables, i) * load(tables, j)
        i += step
        j += LANES
    total += other
    for step in (4, 2, 1):
        total += cuda.shfl_xor_sync(FULL_MASK, total, step)
    return total


@cuda.jit(device=True)
def copy_matrices(tables, rows_at, columns_at, by_rows, by_columns, R, C, first, n_channels):
    """The part's share of both matrices: of `by_rows`, (R, C), and of `by_columns`, (C, R).

    They go to tables[rows_at + r·n_channels + j] and tables[columns_at + j·R + r]: neighbours stay
    neighbours. All loads are on their way before the first is waited for.
    """
    values = cuda.local.array((2, COPIES), np.float32)
    n_threads, n = cuda.blockDim.x, R * n_channels
    done = np.int64(cuda.threadIdx.x)
    while done < n:
        for u in range(COPIES):
            i = done + u * n_threads
            if i < n:
                r = quotient(i, n_channels)
                values[0, u] = load(by_rows, r * C + first + i - r * n_channels)
                values[1, u] = load(by_columns, first * R + i)
        for u in range(COPIES):
            i = done + u * n_threads
            if i < n:
                store(tables, rows_at + i, values[0, u])
                store(tables, columns_at + i, values[1, u])
        done += COPIES * n_threads


@cuda.jit(device=True)
def copy_vector(tables, at, vector, first, n):
    """tables[at + j] = vector[first + j]."""
    j = np.int64(cuda.threadIdx.x)
    while j < n:
        store(tables, at + j, load(vector, first + j))
        j += cuda.blockDim.x


@cuda.jit(device=True)
def post_hidden(box, base, n_parts, mark, tables, matrix, r_step, j_step, R, n_channels):
    """Post the part's share of each hidden number, from the shares of its channels at the start
    of `tables`.

    The matrix has its element (r, j) at tables[matrix + r·r_step + j·j_step].
    """
    team, is_first_lane = np.int64(cuda.threadIdx.x // LANES), cuda.threadIdx.x % LANES == 0
    first = team & -TEAMS  # of this warp: warps without a row of their own have nothing to do
    while first < R:
        n = n_channels if team < R else 0
        total = lanes_dot(tables, matrix + team * r_step, j_step, 0, n)
        if team < R and is_first_lane:
            post(box, base + team * n_parts, total, mark)
        team += cuda.blockDim.x // LANES
        first += cuda.blockDim.x // LANES


@cuda.jit(device=True)
def sum_of_words(box, first, step, n, mark):
    """The sum of `n` words, `step` apart, in order, once all have come."""
    values = cuda.local.array(AHEAD, np.float32)
    marks = cuda.local.array(AHEAD, np.int64)
    total = ZERO
    done = 0
    while done < n:
        for u in range(AHEAD):
            if done + u < n:
                values[u], marks[u] = look(box, first + (done + u) * step)
        for u in range(AHEAD):
            if done + u < n:
                value, found = values[u], marks[u]
                while found != mark:
                    value, found = look(box, first + (done + u) * step)
                total += value
        done += AHEAD
    return total


def collecting(finish):
    """collect(…): the sums over all parts of the hidden numbers' shares, and what is made of them.

    finish(total, given, activation) returns what is saved for number r, where `given` is
    given[given_at + r], and what goes to tables[at + r]. A barrier must follow.
    """

    @cuda.jit(device=True)
    def collect(
        box, base, n_parts, mark, lanes, tables, at, R, given, given_at, saved, saved_at,
        is_first, activation,
    ):  # fmt: skip
        rank, r = cuda.threadIdx.x & (lanes - 1), quotient(cuda.threadIdx.x, lanes)
        n_teams, n_mine = quotient(cuda.blockDim.x, lanes), quotient(n_parts - rank - 1, lanes) + 1
        first = r - quotient(cuda.threadIdx.x & 31, lanes)  # of this warp
        while first < R:
            total, here = ZERO, ZERO
            if r < R:
                here = load(given, given_at + r)
                if rank < n_parts:
                    total = sum_of_words(box, base + r * n_parts + rank, lanes, n_mine, mark)
            total = lanes_sum(total, lanes)
            if r < R and rank == 0:
                value, hidden = finish(total, here, activation)
                if is_first:
                    store(saved, saved_at + r, value)
                store(tables, at + r, hidden)
            r += n_teams
            first += n_teams

    return collect
