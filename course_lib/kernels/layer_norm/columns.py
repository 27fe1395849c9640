"""The second half of the backward pass by `streamed`: dx, and the columns' partial sums.

`terms` holds the two sums of each row, Σ g/n and Σ g·x̂/n. A thread walks down a column, or down
some neighbouring ones (`streamed.vector_columns_kernel`), through one part of the rows.
"""

import math

from course_lib import cuda
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.layer_norm.features import feature
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import load, store

BLOCK_SIZE = 256
ROWS_PER_PART = 32  # at least
COLUMN_THREADS = 132 * 1024  # keep the largest chip of today busy


@cuda.jit
def columns_kernel(
    dy, x, weight, has_weight, means, rstds, terms, dx, partial, sums, n_rows, n_cols, n_parts
):
    # A thread takes one column of one of `n_parts` parts of the rows.
    n_column_blocks = (n_cols + cuda.blockDim.x - 1) // cuda.blockDim.x
    part = cuda.blockIdx.x // n_column_blocks
    col = cuda.blockIdx.x % n_column_blocks * cuda.blockDim.x + cuda.threadIdx.x
    if col < n_cols:
        length = (n_rows + n_parts - 1) // n_parts
        scale = feature(weight, has_weight, ONE, col)
        weight_sum, bias_sum = ZERO, ZERO
        for row in range(part * length, min((part + 1) * length, n_rows)):
            i, rstd = row * n_cols + col, rstds[row]
            upstream, x_hat = load(dy, i), (load(x, i) - means[row]) * rstd
            weight_sum += upstream * x_hat
            bias_sum += upstream
            rest = upstream * scale - terms[2 * row] - x_hat * terms[2 * row + 1]
            store(dx, i, rstd * rest)
        if sums:
            partial[2 * part * n_cols + col] = weight_sum
            partial[(2 * part + 1) * n_cols + col] = bias_sum


def plan_columns(n_rows, n_threads):
    """Where a thread walks down a column, or 16 bytes of some: (threads of a block, blocks that
    share the columns, parts that the rows are cut into), for `n_threads` across."""
    block = min(BLOCK_SIZE, 32 * math.ceil(n_threads / 32))
    n_column_blocks = math.ceil(n_threads / block)
    enough = max(1, COLUMN_THREADS // (n_column_blocks * block))
    length = math.ceil(n_rows / min(enough, math.ceil(n_rows / ROWS_PER_PART)))
    return block, n_column_blocks, math.ceil(n_rows / length)


def partial_sums(model, n_parts, n_cols, sums):
    """Where partial sums go; with nothing to sum, an array that nobody touches."""
    return arrays.empty((n_parts * sums, 2, n_cols), like=model, dtype="float32")


def launch_columns(n_rows, n_cols, given, dx, sums, kernel=columns_kernel, width=1):
    """dx, and (partial sums, how many parts) of the columns, once the `terms` are there.

    width  columns of a thread of `kernel`
    """
    block, n_column_blocks, n_parts = plan_columns(n_rows, math.ceil(n_cols / width))
    partial = partial_sums(dx, n_parts, n_cols, sums)
    launch(
        kernel, n_parts * n_column_blocks, block, *given, dx, partial, sums, n_rows, n_cols,
        n_parts, flat=True, overlap=kernel is not columns_kernel,
    )  # fmt: skip
    return partial, n_parts
