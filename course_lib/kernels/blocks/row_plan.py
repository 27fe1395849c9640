"""How a row is shared out among threads: the choices, measured, of every kernel that holds rows."""

from collections import namedtuple

from course_lib.runtime.intrinsics import VECTOR_BYTES

#: Slots per thread that kernels are made for. A slot is 16 bytes of each array held.
SLOTS = (1, 2, 4, 8)
MOST_VALUES = 32  # of each array that a thread holds
TEAM_VALUES = 32  # of all arrays together that a thread of a team holds
TEAM_SLOTS = 4
TEAM_BLOCK = 128  # threads of a block that several rows share
FEW_THREADS = 128  # threads per row up to which fewer slots beat fewer threads
STREAM_THREADS = 256
STREAM_PART = 1 << 15  # elements of a row for each block, where a row is not held
MOST_STREAM_PART_BITS = 8
#: `team_bits`: log2 of the lanes per row, or None where a block of `n_threads` takes a row.
RowPlan = namedtuple("RowPlan", "n_slots team_bits n_threads")
#: 2 ** `part_bits` blocks of `n_threads` share a row, `length` elements each.
PartPlan = namedtuple("PartPlan", "part_bits n_threads length")


def usable_slots(itemsize):
    """Of SLOTS, those that a thread's registers hold in float32."""
    return [n for n in SLOTS if n * VECTOR_BYTES // itemsize <= MOST_VALUES]


def fits_team(n_slots, itemsize, n_arrays):
    """Whether threads of a team are given as many slots."""
    values = n_slots * VECTOR_BYTES // itemsize * n_arrays
    return n_slots <= TEAM_SLOTS and values <= TEAM_VALUES


def row_plan(n_cols, itemsize, n_arrays):
    """The `RowPlan` for rows of `n_cols` <= ROW_LIMIT[n_arrays] elements."""
    return team_plan(n_cols, itemsize, n_arrays) or block_plan(n_cols, itemsize)


def team_plan(n_cols, itemsize, n_arrays):
    """The `RowPlan` by which lanes of a warp take a row; None if it is too long for them."""
    n_vectors = -(-n_cols * itemsize // VECTOR_BYTES)
    for n_slots in SLOTS:
        if n_vectors <= 32 * n_slots and fits_team(n_slots, itemsize, n_arrays):
            team_bits = (-(-n_vectors // n_slots) - 1).bit_length()
            return RowPlan(n_slots, team_bits, TEAM_BLOCK)
    return None


def block_plan(n_cols, itemsize):
    """The `RowPlan` by which a block takes a row."""
    width = VECTOR_BYTES // itemsize
    n_vectors = -(-n_cols // width)
    most_slots = MOST_VALUES // width
    fitting = (n for n in SLOTS if n > 1 and n_vectors <= FEW_THREADS * n)
    n_slots = min(next(fitting, most_slots), most_slots)
    n_threads = max(64, -(-n_vectors // (32 * n_slots)) * 32)
    return RowPlan(n_slots, None, n_threads)


def reach(n_cols, itemsize):
    """Elements from the last 16-byte boundary before a row to its end, at most."""
    width = VECTOR_BYTES // itemsize
    return n_cols + (width - 1 if n_cols % width else 0)


def stream_plan(n_cols):
    """The `PartPlan` for rows that are read twice."""
    part_bits = min(MOST_STREAM_PART_BITS, (-(-n_cols // STREAM_PART) - 1).bit_length())
    return PartPlan(part_bits, STREAM_THREADS, part_length(n_cols, part_bits))


def part_length(n_cols, part_bits):
    """Elements of each of 2 ** `part_bits` parts, a multiple of 16 bytes of every dtype."""
    return -(-n_cols // (8 << part_bits)) * 8
