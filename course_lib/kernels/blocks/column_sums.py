"""Sums of the columns of a matrix: the gradient of a bias.

Rows are dealt out to parts, each summed by a block in a fixed order, so that many blocks have
work and two runs agree bit for bit. Partial sums are float32.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import allow_next_kernel, load, store, wait_for_previous_kernel

COLUMNS = 32  # of a block: neighbouring threads read neighbours in a row
RANKS = 8  # threads for each column
UNROLL = 4  # loads in flight per thread
ENOUGH_BLOCKS = 4  # for each multiprocessor
ROWS_PER_PART = RANKS * UNROLL * 4  # at least, if there are several parts


@cuda.jit
def column_sums_kernel(x, sums, n_rows, n_cols, n_parts):
    """sums[part, col] = the sum of the rows of a part; block `tile * n_parts + part`."""
    allow_next_kernel()
    wait_for_previous_kernel()
    partial = cuda.shared.array((RANKS, COLUMNS), np.float32)
    values = cuda.local.array(UNROLL, np.float32)
    rank, part = cuda.threadIdx.y, cuda.blockIdx.x % n_parts
    col = cuda.blockIdx.x // n_parts * COLUMNS + cuda.threadIdx.x
    length = (n_rows + n_parts - 1) // n_parts
    row, stop = part * length + rank, min((part + 1) * length, n_rows)
    total = ZERO
    while row < stop and col < n_cols:
        for u in range(UNROLL):
            values[u] = ZERO
            if row + u * RANKS < stop:
                values[u] = load(x, (row + u * RANKS) * n_cols + col)
        for u in range(UNROLL):
            total += values[u]
        row += UNROLL * RANKS
    partial[rank, cuda.threadIdx.x] = total
    cuda.syncthreads()
    if rank == 0 and col < n_cols:
        for other in range(1, RANKS):
            total += partial[other, cuda.threadIdx.x]
        store(sums, part * n_cols + col, total)


def sum_columns(x, sums, n_rows, n_cols):
    """sums[j] = Σ x[i, j] over i; contiguous `x` with n_rows·n_cols elements, any shape."""
    n_tiles = math.ceil(n_cols / COLUMNS)
    n_parts = plan(n_rows, n_tiles, chip_of(sums))
    partial = sums
    if n_parts > 1:
        partial = arrays.empty((n_parts, n_cols), like=sums, dtype="float32")
    threads = COLUMNS, RANKS
    launch(
        column_sums_kernel, n_tiles * n_parts, threads, x, partial, n_rows, n_cols, n_parts,
        flat=True, overlap=True,
    )  # fmt: skip
    if n_parts > 1:
        launch(
            column_sums_kernel, n_tiles, threads, partial, sums, n_parts, n_cols, 1,
            flat=True, overlap=True,
        )  # fmt: skip


def plan(n_rows, n_tiles, chip):
    """Parts into which rows are dealt out."""
    return max(1, min(ENOUGH_BLOCKS * chip.multiprocessors // n_tiles, n_rows // ROWS_PER_PART))


def specialisations(dtypes):
    """(label, kernel, argument types); arrays as (dtype, 1)."""
    numbers = ["int64"] * 3
    for dtype in dtypes:
        for into in dict.fromkeys(("float32", dtype)):
            label = f"column sums {dtype} to {into}"
            yield label, column_sums_kernel, [(dtype, 1), (into, 1), *numbers]
        if dtype != "float32":
            label = f"column sums float32 to {dtype}"
            yield label, column_sums_kernel, [("float32", 1), (dtype, 1), *numbers]
