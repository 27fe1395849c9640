"""How a row is shared out among threads: the choices, measured, of `registers` and `split`."""


from course_lib.kernels.blocks.row_plan import MOST_VALUES, PartPlan, part_length
from course_lib.runtime.intrinsics import VECTOR_BYTES

BLOCK_LIMIT = 1024  # threads of a block, on every chip
#: Threads of a block whose registers fit a multiprocessor (a quarter of them each of its four
#: partitions), by the number of arrays held.
MOST_THREADS = {1: 896, 2: 512}
#: Elements of a row that fit the registers of one block, by the number of arrays held.
ROW_LIMIT = {n_arrays: threads * MOST_VALUES for n_arrays, threads in MOST_THREADS.items()}
MOST_PART_BITS = 3  # log2 of the blocks of a cluster
#: Threads of a multiprocessor whose registers are left for `split`, by the number of arrays held.
SPLIT_THREADS = {1: 1280, 2: 1024}
SHARED_RESERVE = 2 << 10  # bytes of shared memory that a block needs for itself
SHARED_SHARE = 104 << 10  # bytes of a part when a cluster shares a row: two blocks side by side


def split_plan(n_cols, itemsize, n_arrays, shared_bytes, clusters):
    """The `PartPlan` that holds rows of `n_cols` in shared memory; None where that can't be.

    A block may have `shared_bytes`; `clusters` says whether the chip has them.
    """
    available = shared_bytes - SHARED_RESERVE
    for part_bits in range(1 + clusters * MOST_PART_BITS):
        length = part_length(n_cols, part_bits)
        n_bytes = length * itemsize * n_arrays
        share = min(available, SHARED_SHARE) if 0 < part_bits < MOST_PART_BITS else available
        if n_bytes <= share:
            n_blocks = shared_bytes // (n_bytes + SHARED_RESERVE)
            n_threads = SPLIT_THREADS[n_arrays] // n_blocks // 32 * 32
            useful = -(-length * itemsize // (VECTOR_BYTES * 32)) * 32
            return PartPlan(part_bits, max(32, min(BLOCK_LIMIT, n_threads, useful)), length)
    return None
