"""The rungs of layer normalisation that move one element at a time.

All take their arrays flat, rows of `n_cols` one after another. `naive` has a thread for each row,
`welford` and `block` a block. Backward, these find a row's two sums alone: `terms` holds Σ g/n and
Σ g·x̂/n of each row, and `columns_kernel` makes dx and the columns' partial sums of them.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.moments import (
    affine_of,
    block_moments,
    reciprocal_deviation,
    with_one,
)
from course_lib.kernels.blocks.sums import careful_add
from course_lib.kernels.layer_norm.features import feature
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import block_sum, load, store

BLOCK_SIZE = 256
ROWS_PER_PART = 32  # at least, of the kernels that sum columns
COLUMN_THREADS = 132 * 1024  # of them, keep the largest chip of today busy


@cuda.jit
def naive_kernel(x, y, weight, bias, has_weight, has_bias, means, rstds, eps, n_cols):
    row = cuda.grid(1)
    start = row * n_cols
    if start < x.shape[0]:
        n = np.float32(n_cols)
        total, lost = ZERO, ZERO
        for i in range(start, start + n_cols):
            total, lost = careful_add(total, lost, load(x, i))
        mean = total / n
        squares, lost = ZERO, ZERO
        for i in range(start, start + n_cols):
            apart = load(x, i) - mean
            squares, lost = careful_add(squares, lost, apart * apart)
        rstd = reciprocal_deviation(squares / n, eps)
        means[row], rstds[row] = mean, rstd
        for col in range(n_cols):
            scale, shift = affine_of(col, weight, bias, has_weight, has_bias)
            store(y, start + col, (load(x, start + col) - mean) * rstd * scale + shift)


@cuda.jit
def welford_kernel(x, y, weight, bias, has_weight, has_bias, means, rstds, eps, n_cols):
    scratch = cuda.shared.array((3, 32), np.float32)
    row, tid = cuda.blockIdx.x, cuda.threadIdx.x
    start = row * n_cols
    n = mean = m2 = ZERO
    for col in range(tid, n_cols, cuda.blockDim.x):
        n, mean, m2 = with_one(n, mean, m2, load(x, start + col))
    n, mean, m2 = block_moments(n, mean, m2, scratch)
    rstd = reciprocal_deviation(m2 / n, eps)
    if tid == 0:
        means[row], rstds[row] = mean, rstd
    for col in range(tid, n_cols, cuda.blockDim.x):
        scale, shift = affine_of(col, weight, bias, has_weight, has_bias)
        store(y, start + col, (load(x, start + col) - mean) * rstd * scale + shift)


@cuda.jit
def naive_sums_kernel(dy, x, weight, has_weight, means, rstds, terms, n_cols):
    row = cuda.grid(1)
    start = row * n_cols
    if start < x.shape[0]:
        mean, rstd, n = means[row], rstds[row], np.float32(n_cols)
        total = lost = product = product_lost = ZERO
        for col in range(n_cols):
            g = load(dy, start + col) * feature(weight, has_weight, ONE, col)
            x_hat = (load(x, start + col) - mean) * rstd
            total, lost = careful_add(total, lost, g)
            product, product_lost = careful_add(product, product_lost, g * x_hat)
        terms[2 * row], terms[2 * row + 1] = total / n, product / n


@cuda.jit
def block_sums_kernel(dy, x, weight, has_weight, means, rstds, terms, n_cols):
    scratch = cuda.shared.array(32, np.float32)
    row, tid = cuda.blockIdx.x, cuda.threadIdx.x
    start, n = row * n_cols, np.float32(n_cols)
    mean, rstd = means[row], rstds[row]
    total = product = ZERO
    for col in range(tid, n_cols, cuda.blockDim.x):
        g = load(dy, start + col) * feature(weight, has_weight, ONE, col)
        total += g
        product += g * (load(x, start + col) - mean) * rstd
    total, product = block_sum(total, scratch), block_sum(product, scratch)
    if tid == 0:
        terms[2 * np.int64(row)], terms[2 * np.int64(row) + 1] = total / n, product / n


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


def row_a_thread(n_rows, n_cols):
    """Blocks, and threads of a block, where a thread takes a row."""
    return math.ceil(n_rows / BLOCK_SIZE), BLOCK_SIZE


def row_a_block(n_rows, n_cols):
    """The same where a block takes one."""
    return n_rows, min(BLOCK_SIZE, 32 * math.ceil(n_cols / 32))


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


def _launch_forward(kernel, blocks_of, n_rows, n_cols, x, y, affine, statistics, eps):
    blocks = blocks_of(n_rows, n_cols)
    launch(kernel, *blocks, x, y, *affine, *statistics, eps, n_cols, flat=True)


def _launch_backward(kernel, blocks_of, n_rows, n_cols, inputs, scale, statistics, dx, sums):
    terms = arrays.empty((n_rows, 2), like=dx, dtype="float32")
    given = *inputs, *scale, *statistics, terms
    launch(kernel, *blocks_of(n_rows, n_cols), *given, n_cols, flat=True)
    return launch_columns(n_rows, n_cols, given, dx, sums)


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


launch_naive = functools.partial(_launch_forward, naive_kernel, row_a_thread)
launch_welford = functools.partial(_launch_forward, welford_kernel, row_a_block)
launch_naive_backward = functools.partial(_launch_backward, naive_sums_kernel, row_a_thread)
launch_block_backward = functools.partial(_launch_backward, block_sums_kernel, row_a_block)
