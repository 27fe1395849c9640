"""How `registers` shares rows out among threads: plain numbers, from plain numbers."""

import math
from typing import NamedTuple

from course_lib.kernels.blocks.row_teams import WHOLE_BLOCK
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES

VALUES = 16  # numbers of each array that a thread holds, at most
#: The same backward, by whether rows begin on 16-byte boundaries: else places need registers too.
BACKWARD_VALUES = {True: VALUES, False: VALUES // 2}
#: Threads of the largest block, whose registers then fit every multiprocessor.
FORWARD_THREADS, BACKWARD_THREADS = 512, 384
FORWARD_LIMIT = FORWARD_THREADS * VALUES  # most elements of a row that `registers` holds
BACKWARD_LIMIT = {vectors: BACKWARD_THREADS * n for vectors, n in BACKWARD_VALUES.items()}
FORWARD_TEAMS, BACKWARD_TEAMS = 128, 256  # threads of a block that several rows share
FEW_THREADS = 128  # for a row, up to which fewer slots are better than fewer threads
RESIDENT = 512  # threads for each multiprocessor, backward: blocks stay, and no others wait
LEAST_BLOCKS = 2  # for each multiprocessor, however few rows are left for each of them
PARTIAL_BYTES = 16  # for each block and column: partial sums are written and read again
PARTIAL_SHARE = 1 / 8  # of all that is moved, that these may be


class RowPlan(NamedTuple):
    """`n_slots` per thread; `team_bits` as in `row_teams`; `n_teams` in a block of `n_threads`."""

    n_slots: int
    team_bits: int
    n_threads: int
    n_teams: int


def most_slots(itemsize, values=VALUES):
    """16-byte slots that hold so many numbers."""
    return values * itemsize // VECTOR_BYTES


def forward_plan(n_cols, itemsize):
    """The `RowPlan` of rows of `n_cols` <= FORWARD_LIMIT."""
    n_vectors, most = math.ceil(n_cols * itemsize / VECTOR_BYTES), most_slots(itemsize)
    for n_threads in (32, FEW_THREADS):
        n_slots = 1
        while n_slots < most and n_vectors > n_threads * n_slots:
            n_slots *= 2
        if n_vectors <= n_threads * n_slots:
            break
    return _shared_out(n_vectors, n_slots, FORWARD_TEAMS)


def backward_plan(n_cols, itemsize, vectors):
    """The `RowPlan` of rows of `n_cols` <= BACKWARD_LIMIT[vectors]."""
    n_vectors = math.ceil(n_cols * itemsize / VECTOR_BYTES)
    return _shared_out(n_vectors, most_slots(itemsize, BACKWARD_VALUES[vectors]), BACKWARD_TEAMS)


def record_bytes(vectors):
    """Of a thread's sums down its columns, in shared memory; every chip has room for a block's."""
    return 4 * (2 * BACKWARD_VALUES[vectors] + 1)


def _shared_out(n_vectors, n_slots, of_teams):
    n_ranks = math.ceil(n_vectors / n_slots)
    if n_ranks <= 32:
        team_bits = (n_ranks - 1).bit_length()
        return RowPlan(n_slots, team_bits, of_teams, of_teams >> team_bits)
    return RowPlan(n_slots, WHOLE_BLOCK, 32 * math.ceil(n_ranks / 32), 1)


def n_blocks(found, n_rows, itemsize, n_multiprocessors):
    """Blocks of the `RowPlan` `found`, backward: as many as run at once, but few for few rows."""
    at_once = n_multiprocessors * max(1, RESIDENT // found.n_threads)
    cheap = int(n_rows * 3 * itemsize * PARTIAL_SHARE / PARTIAL_BYTES)
    wanted = min(at_once, max(LEAST_BLOCKS * n_multiprocessors, cheap))
    return min(wanted, math.ceil(n_rows / found.n_teams))


def on_boundaries(n_cols, *operands):
    """Whether rows of `n_cols` of the first operand's dtype begin on 16-byte boundaries in all of
    the operands; weight and bias, which may be of another dtype, are one such row."""
    if n_cols * operands[0].dtype.itemsize % VECTOR_BYTES:
        return False
    return not any(arrays.address_of(operand) % VECTOR_BYTES for operand in operands)
