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
from course_lib.runtime.intrinsics import FULL_MASK, load
from course_lib.runtime.mailbox import look, post

HEADER = 2  # words of the mailbox that count launches and blocks
LANES = 8  # that work on one row of a matrix together
AHEAD = 4  # words asked for before the first is waited for


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
def begin(box):
    """The mark of this launch: one more than launches before it used this mailbox."""
    return cuda.ldcv(box, 0) + 1


@cuda.jit(device=True)
def finish(box, mark):
    """The last block to finish sets the count; every block has read it before it got here."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        if cuda.atomic.add(box, 1, 1) == cuda.gridDim.x - 1:
            cuda.stwt(box, 1, np.int64(0))
            cuda.stwt(box, 0, np.int64(mark))


@cuda.jit(device=True)
def copy_matrices(tables, to_hidden, from_hidden, by_rows, by_columns, R, C, first, n_channels):
    """The part's columns of the matrix to the hidden layer, and its rows of the one from it.

    Whichever of the two is stored as (R, C) is `by_rows`, the other, (C, R), `by_columns`; they go
    to tables[to_hidden + r·n_channels + j] and tables[from_hidden + j·R + r].
    """
    i = np.int64(cuda.threadIdx.x)
    while i < R * n_channels:
        r = quotient(i, n_channels)
        j = i - r * n_channels
        tables[to_hidden + i] = load(by_rows, r * C + first + j)
        tables[from_hidden + i] = load(by_columns, first * R + i)
        i += cuda.blockDim.x


@cuda.jit(device=True)
def copy_matrices_swapped(tables, to_hidden, from_hidden, by_rows, by_columns, R, C, first, n):
    """`copy_matrices` for the backward pass: (C, R) leads to the hidden layer, (R, C) from it."""
    i = np.int64(cuda.threadIdx.x)
    while i < R * n:
        r = quotient(i, n)
        j = i - r * n
        tables[from_hidden + j * R + r] = load(by_rows, r * C + first + j)
        j = quotient(i, R)
        r = i - j * R
        tables[to_hidden + r * n + j] = load(by_columns, first * R + i)
        i += cuda.blockDim.x


@cuda.jit(device=True)
def post_hidden(box, base, mark, tables, to_hidden, shares, R, n_channels):
    """Post the part's share of each hidden number, from the shares of its channels."""
    rank, team = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
    n_teams = cuda.blockDim.x // LANES
    first = 0
    while first < R:
        r, total = first + team, ZERO
        if r < R:
            j = np.int64(rank)
            while j < n_channels:
                total += tables[to_hidden + r * n_channels + j] * tables[shares + j]
                j += LANES
        total = lanes_sum(total, LANES)
        if r < R and rank == 0:
            post(box, base + r, total, mark)
        first += n_teams


@cuda.jit(device=True)
def wait_for(box, i, mark):
    """The value of word `i`, once it has come."""
    value, found = look(box, i)
    while found != mark:
        value, found = look(box, i)
    return value


@cuda.jit(device=True)
def sum_of_words(box, first, step, n, mark):
    """The sum of `n` words, `step` apart, in order."""
    total = ZERO
    k = 0
    while k + AHEAD <= n:
        i = first + k * step
        a, mark_a = look(box, i)
        b, mark_b = look(box, i + step)
        c, mark_c = look(box, i + 2 * step)
        d, mark_d = look(box, i + 3 * step)
        if mark_a != mark:
            a = wait_for(box, i, mark)
        if mark_b != mark:
            b = wait_for(box, i + step, mark)
        if mark_c != mark:
            c = wait_for(box, i + 2 * step, mark)
        if mark_d != mark:
            d = wait_for(box, i + 3 * step, mark)
        total += a
        total += b
        total += c
        total += d
        k += AHEAD
    while k < n:
        total += wait_for(box, first + k * step, mark)
        k += 1
    return total


@cuda.jit(device=True)
def collect_hidden(box, base, n_words, n_parts, mark, tables, scratch, target, R):
    """tables[target + r] = the sum over all parts' shares of hidden number r.

    The thread with number r % blockDim.x writes it; a barrier must follow before others read it.
    """
    tid, n_columns = cuda.threadIdx.x, min(np.int64(cuda.blockDim.x), R)
    n_rows, row = quotient(cuda.blockDim.x, n_columns), quotient(tid, n_columns)
    column = tid - row * n_columns
    first = 0
    while first < R:
        r = first + column
        if row < n_rows and r < R:
            n_mine = quotient(n_parts - row + n_rows - 1, n_rows)
            start, step = base + row * n_words + r, n_rows * n_words
            tables[scratch + tid] = sum_of_words(box, start, step, n_mine, mark)
        cuda.syncthreads()
        if row == 0 and r < R:
            total = ZERO
            for other in range(n_rows):
                total += tables[scratch + other * n_columns + column]
            tables[target + r] = total
        cuda.syncthreads()
        first += n_columns


@cuda.jit(device=True)
def row_times_hidden(tables, from_hidden, hidden, R, j, n_channels):
    """Σ over r of the second matrix's row `j` times the hidden numbers: in all LANES lanes."""
    total = ZERO
    if j < n_channels:
        r = np.int64(cuda.threadIdx.x % LANES)
        while r < R:
            total += tables[from_hidden + j * R + r] * tables[hidden + r]
            r += LANES
    return lanes_sum(total, LANES)
