"""How a row is shared out among threads: measured choices for the rungs `registers` and `split`."""

from collections import namedtuple

from course_lib.runtime.intrinsics import VECTOR_BYTES

#: Slots per thread that kernels are made for. A slot is 16 bytes of each input array.
SLOTS = (1, 2, 4, 8)
MOST_VALUES = 32  # float32 numbers that a thread holds, of all arrays: half its registers
MOST_THREADS = 1024
#: Elements of a row that fit the registers of one block, by the number of arrays held.
ROW_LIMIT = {n_arrays: MOST_THREADS * MOST_VALUES // n_arrays for n_arrays in (1, 2)}
TEAM_VALUES = 16  # values per thread, where rows are long enough, of a team within a warp
BLOCK_SIZE = 256  # of blocks that several rows share

#: `team_bits`: log2 of the lanes per row, or None where a block of `n_threads` takes a row.
Plan = namedtuple("Plan", "n_slots team_bits n_threads")


def plan(n_rows, n_cols, itemsize, n_arrays):
    """The `Plan` for rows of `n_cols` elements, `n_arrays` of which are held at once.

    `n_cols` must not exceed ROW_LIMIT[n_arrays].
    """
    width = VECTOR_BYTES // itemsize
    n_vectors = -(-n_cols // width)
    most_slots = MOST_VALUES // (n_arrays * width)
    slots = [n for n in SLOTS if n <= most_slots]
    for n_slots in slots:
        if n_vectors <= 32 * n_slots:
            team_bits = max(0, (-(-n_vectors // n_slots) - 1).bit_length())
            return Plan(n_slots, team_bits, BLOCK_SIZE)
    n_slots = slots[-1]
    for fewer in slots:
        if n_vectors <= 256 * fewer:
            n_slots = fewer
            break
    n_threads = -(-n_vectors // (32 * n_slots)) * 32
    return Plan(n_slots, None, n_threads)
