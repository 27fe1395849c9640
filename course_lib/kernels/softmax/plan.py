"""How each way of softmax is launched: which kernel, how many threads, and what they share.

What is measured here, and in `blocks.row_plan`, is what ways and rungs are chosen by.
"""

import math
from typing import NamedTuple

from course_lib.kernels.blocks import columns
from course_lib.kernels.blocks.row_plan import (
    MOST_VALUES,
    block_plan,
    fits_team,
    part_length,
    reach,
    stream_plan,
    team_plan,
)
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

BLOCK_LIMIT = 1024  # threads of a block, on every chip
#: Threads of a block whose registers fit a multiprocessor (a quarter of them each of its four
#: partitions), by the number of arrays held.
MOST_THREADS = {1: 896, 2: 512}
#: Elements of a row that fit the registers of one block, by the number of arrays held.
ROW_LIMIT = {n_arrays: threads * MOST_VALUES for n_arrays, threads in MOST_THREADS.items()}
CLUSTERS = (9, 0)  # compute capability from which on a chip has them
MOST_PART_BITS = 3  # log2 of the blocks of a cluster
#: Threads of a multiprocessor whose registers are left for `split`, by the number of arrays held.
SPLIT_THREADS = {1: 1280, 2: 1024}
SHARED_RESERVE = 2 << 10  # bytes of shared memory that a block needs for itself
SHARED_SHARE = 104 << 10  # bytes of a part when a cluster shares a row: two blocks side by side
LEAST_RAGGED_BITS = 2  # log2 of the lanes that a row with single elements at its ends keeps
#: So many columns for each number of one keep a chip busy; with fewer a copy costs less.
COLUMNS_FOR_EACH = 64


class Problem(NamedTuple):
    """What plans depend on: `n_rows` rows of `n_cols` numbers, along any axis.

    step      elements from one number of a row to the next; 1 along the last axis
    n_arrays  inputs: 1 forward, 2 backward
    aligned   whether all arrays begin on 16-byte boundaries
    """

    n_rows: int
    n_cols: int
    step: int
    itemsize: int
    n_arrays: int
    aligned: bool

    @property
    def reach(self):
        """Elements that the slots of a row in one piece are enough for: `row_plan.reach`."""
        return reach(self.n_cols, self.itemsize)


class Plan(NamedTuple):
    """A launch of one of a way's kernels; `numbers` are its arguments behind the arrays."""

    kernel: object
    n_blocks: int
    n_threads: int
    numbers: tuple
    shared_bytes: int = 0
    cluster: int = 1


# --- `registers`


def team(problem, chip):
    """Neighbouring lanes of a warp take a row."""
    n_rows, n_cols, _, itemsize, n_arrays, _ = problem
    if (found := team_plan(problem.reach, itemsize, n_arrays)) is None:
        return Refusal(f"takes rows that a warp can hold, not of {n_cols:,} elements")
    n_slots, team_bits, n_threads = found
    # What the ends of a row cost, all rows of a warp pay together: more rows, of fewer lanes.
    ragged = problem.reach > n_cols
    while ragged and team_bits > LEAST_RAGGED_BITS and fits_team(2 * n_slots, itemsize, n_arrays):
        n_slots, team_bits = 2 * n_slots, team_bits - 1
    numbers = n_rows, n_cols, team_bits
    return Plan(n_slots, -(-(n_rows << team_bits) // n_threads), n_threads, numbers)


def block(problem, chip):
    """A block takes a row."""
    n_cols = problem.n_cols
    most = ROW_LIMIT[problem.n_arrays] - (problem.reach - n_cols)
    if n_cols > most:
        return Refusal(f"takes rows of at most {most:,} elements, not {n_cols:,}")
    n_slots, _, n_threads = block_plan(problem.reach, problem.itemsize)
    return Plan(n_slots, problem.n_rows, n_threads, (n_cols,))


# --- `split`


def shared(problem, chip):
    """A block holds a row in its shared memory."""
    return part(problem, chip, 0) or _too_long(problem, chip)


def cluster(problem, chip):
    """The blocks of a cluster hold a row together."""
    found = (part(problem, chip, bits) for bits in range(1, MOST_PART_BITS + 1))
    return next(filter(None, found), None) or _too_long(problem, chip)


def _too_long(problem, chip):
    return Refusal(
        f"holds rows in shared memory, and {problem.n_cols:,} elements are too many for blocks of "
        f"{chip.shared_bytes:,} bytes"
    )


def part(problem, chip, part_bits):
    """The `Plan` by which 2 ** `part_bits` blocks share a row; None if it does not fit."""
    n_rows, n_cols, _, itemsize, n_arrays, _ = problem
    available = chip.shared_bytes - SHARED_RESERVE
    share = min(available, SHARED_SHARE) if 0 < part_bits < MOST_PART_BITS else available
    length = part_length(problem.reach, part_bits)
    n_bytes = length * itemsize * n_arrays
    if n_bytes > share:
        return None
    n_threads = SPLIT_THREADS[n_arrays] // (chip.shared_bytes // (n_bytes + SHARED_RESERVE))
    useful = -(-length * itemsize // (VECTOR_BYTES * 32)) * 32
    n_threads = max(32, min(BLOCK_LIMIT, n_threads // 32 * 32, useful))
    numbers = n_cols, length, part_bits
    return Plan(None, n_rows << part_bits, n_threads, numbers, n_bytes, 1 << part_bits)


def streamed(problem, chip):
    """Blocks share a row, and read it twice."""
    part_bits, n_threads, length = stream_plan(problem.reach)
    numbers = problem.n_cols, length, part_bits
    return Plan(None, problem.n_rows << part_bits, n_threads, numbers)


# --- `strided`


def held(problem, chip):
    """A thread holds neighbouring columns in registers."""
    vectors, width = _columns_of_thread(problem)
    values = width * problem.n_arrays
    if (n_slots := columns.slots_for(problem.n_cols, values)) is None:
        most = max(n for n in columns.SLOTS if n * values <= columns.MOST_VALUES)
        return Refusal(f"holds columns of at most {most} numbers, not {problem.n_cols:,}")
    return _by_columns(problem, (vectors, n_slots), width)


def streamed_columns(problem, chip):
    """A thread reads neighbouring columns twice."""
    vectors, width = _columns_of_thread(problem)
    return _by_columns(problem, (vectors, None), width)


def _columns_of_thread(problem):
    """(whether it takes 16 bytes at a time, its columns)."""
    vectors = problem.aligned and not problem.step * problem.itemsize % VECTOR_BYTES
    return vectors, VECTOR_BYTES // problem.itemsize if vectors else 1


def _by_columns(problem, kernel, width):
    n_rows, n_cols, step, *_ = problem
    n_blocks = math.ceil(n_rows / (width * columns.BLOCK_SIZE))
    return Plan(kernel, n_blocks, columns.BLOCK_SIZE, (n_rows, n_cols, step))


# --- which rungs, and the launches of plans


def preferred(problem, chip):
    """The rungs that AUTO tries; those of rows take transposed copies along other axes."""
    n_rows, n_cols, step, *_ = problem
    few = n_cols <= columns.SLOTS[1] or n_rows >= COLUMNS_FOR_EACH * n_cols
    return ("strided",) if step > 1 and few else ("registers", "split")


def on_boundaries(start, kernels, plan, operands):
    """start(kernels, plan, operands), with copies of operands that begin off 16-byte boundaries.

    Rows by vectors need them there, and elements one by one take longer than a copy.
    """
    *inputs, result = operands
    inputs = (x if is_on_boundary(x) else arrays.fill(arrays.empty_like(x), x) for x in inputs)
    target = result if is_on_boundary(result) else arrays.empty_like(result)
    start(kernels, plan, (*inputs, target))
    if target is not result:
        arrays.fill(result, target)


def is_on_boundary(x):
    return not arrays.address_of(x) % VECTOR_BYTES


def launch_one(kernels, plan, operands):
    """Launch a `Plan`; `kernels` are the way's by what plans call them."""
    launch(
        kernels[plan.kernel], plan.n_blocks, plan.n_threads, *operands, *plan.numbers, flat=True,
        overlap=True, shared_bytes=plan.shared_bytes, cluster=plan.cluster,
    )  # fmt: skip


def launch_streamed(kernels, plan, operands):
    """Launch the kernel that finds the statistics of each block's part, and the one that ends."""
    *inputs, result = operands
    # Forward keeps a maximum and a sum of each part, backward a sum.
    size = plan.n_blocks * (3 - len(inputs))
    statistics = arrays.empty((size,), like=result, dtype="float32")
    first, second = kernels
    grid, options = (plan.n_blocks, plan.n_threads), {"flat": True, "overlap": True}
    launch(first, *grid, *inputs, statistics, *plan.numbers, **options)
    launch(second, *grid, *operands, statistics, *plan.numbers, **options)
