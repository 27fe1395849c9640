"""The rung `streamed`: rows of any length, 16 bytes at a time, which no thread has to hold.

Several blocks share a row. Forward, the first kernel finds count, mean and Σ(x − mean)² of each
block's part; the second merges those of its row, reads the part again and finishes it. Backward,
the first kernel adds up each part's share of the row's two sums and a small one merges them; the
last has a thread for each 16 bytes of the columns, which walks down some of the rows, writes dx and
keeps the columns' sums.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE, ZERO
from course_lib.kernels.blocks.moments import block_moments, merged, reciprocal_deviation
from course_lib.kernels.blocks.row_plan import stream_plan
from course_lib.kernels.blocks.row_teams import WHOLE_BLOCK, row_sums
from course_lib.kernels.blocks.rows import load_row, my_part, store_row
from course_lib.kernels.layer_norm.columns import BLOCK_SIZE, launch_columns
from course_lib.kernels.layer_norm.features import column_of, finish, load_features
from course_lib.kernels.layer_norm.plan import on_boundaries
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load_vector,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

SLOTS = 4  # of 16 bytes in flight per thread
SLOTS_OF_BOTH = 2  # the same of each of two arrays


@cuda.jit(device=True)
def add_chunk(values, count, mean, m2, n_left, width, rank, n_ranks, vectors):
    """The triple with what `values` hold of the `n_left` elements that are left of a part."""
    total = found = ZERO
    for u in range(SLOTS):
        for k in range(width):
            if column_of(u, k, width, rank, n_ranks, vectors) < n_left:
                total += values[u, k]
                found += ONE
    if found == ZERO:
        return count, mean, m2
    chunk_mean, squares = total / found, ZERO
    for u in range(SLOTS):
        for k in range(width):
            if column_of(u, k, width, rank, n_ranks, vectors) < n_left:
                apart = values[u, k] - chunk_mean
                squares += apart * apart
    return merged(count, mean, m2, found, chunk_mean, squares)


@cuda.jit
def moments_kernel(x, moments, n_cols, length, part_bits, vectors):
    # moments[3·b:] are count, mean and Σ(x − mean)² of block b's part
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array((3, 32), np.float32)
    values = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
    tid, n_threads, width = cuda.threadIdx.x, cuda.blockDim.x, vector_width(x)
    start, n_mine = my_part(n_cols, length, part_bits)
    count = mean = m2 = ZERO
    done = 0
    while done < n_mine:
        here, left = start + done, n_mine - done
        load_row(values, SLOTS, x, here, left, tid, n_threads, vectors, ZERO)
        count, mean, m2 = add_chunk(values, count, mean, m2, left, width, tid, n_threads, vectors)
        done += SLOTS * width * n_threads
    count, mean, m2 = block_moments(count, mean, m2, scratch)
    if tid == 0:
        place = 3 * np.int64(cuda.blockIdx.x)
        moments[place], moments[place + 1], moments[place + 2] = count, mean, m2


@cuda.jit
def normalise_kernel(
    x, y, weight, bias, has_weight, has_bias, means, rstds, eps, moments,
    n_cols, length, part_bits, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.local.array((1, MAX_WIDTH), np.float32)
    features = cuda.local.array((2, MAX_WIDTH), np.float32)
    tid, n_threads, width = cuda.threadIdx.x, cuda.blockDim.x, vector_width(x)
    row = np.int64(cuda.blockIdx.x) >> part_bits
    start, n_mine = my_part(n_cols, length, part_bits)
    first_col = start - row * n_cols
    count = mean = m2 = ZERO
    for part in range(row << part_bits, (row + 1) << part_bits):
        count, mean, m2 = merged(
            count, mean, m2, moments[3 * part], moments[3 * part + 1], moments[3 * part + 2]
        )
    rstd = reciprocal_deviation(m2 / np.float32(n_cols), eps)
    if tid == 0 and first_col == 0:
        means[row], rstds[row] = mean, rstd
    done = 0
    while done < n_mine:
        here, left = start + done, n_mine - done
        load_row(values, 1, x, here, left, tid, n_threads, vectors, ZERO)
        col = first_col + done
        load_features(
            features, 0, weight, has_weight, ONE, col, left, 0, width, tid, n_threads, vectors
        )
        load_features(
            features, 1, bias, has_bias, ZERO, col, left, 0, width, tid, n_threads, vectors
        )
        for k in range(width):
            values[0, k] = (values[0, k] - mean) * rstd * features[0, k] + features[1, k]
        store_row(values, 1, y, here, left, tid, n_threads, vectors)
        done += width * n_threads


@cuda.jit
def shares_kernel(
    dy, x, weight, has_weight, means, rstds, shares, n_cols, length, part_bits, vectors
):
    # shares[2·b:] are Σ g and Σ g·x̂ of block b's part
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(64, np.float32)
    d = cuda.local.array((SLOTS_OF_BOTH, MAX_WIDTH), np.float32)
    h = cuda.local.array((SLOTS_OF_BOTH, MAX_WIDTH), np.float32)
    scale = cuda.local.array((1, MAX_WIDTH), np.float32)
    tid, n_threads, width = cuda.threadIdx.x, cuda.blockDim.x, vector_width(x)
    row = np.int64(cuda.blockIdx.x) >> part_bits
    start, n_mine = my_part(n_cols, length, part_bits)
    first_col = start - row * n_cols
    mean, rstd = means[row], rstds[row]
    total = product = ZERO
    done = 0
    while done < n_mine:
        here, left, col = start + done, n_mine - done, first_col + done
        load_row(d, SLOTS_OF_BOTH, dy, here, left, tid, n_threads, vectors, ZERO)
        load_row(h, SLOTS_OF_BOTH, x, here, left, tid, n_threads, vectors, mean)
        for u in range(SLOTS_OF_BOTH):
            load_features(
                scale, 0, weight, has_weight, ONE, col, left, u, width, tid, n_threads, vectors
            )
            for k in range(width):
                g = d[u, k] * scale[0, k]
                total += g
                product += g * ((h[u, k] - mean) * rstd)
        done += SLOTS_OF_BOTH * width * n_threads
    total, product = row_sums(total, product, WHOLE_BLOCK, scratch, 0)
    if tid == 0:
        place = 2 * np.int64(cuda.blockIdx.x)
        shares[place], shares[place + 1] = total, product


@cuda.jit
def merge_kernel(shares, terms, n_rows, n_cols, part_bits):
    # A thread for each row.
    allow_next_kernel()
    wait_for_previous_kernel()
    row = np.int64(cuda.grid(1))
    if row < n_rows:
        total = product = ZERO
        for part in range(row << part_bits, (row + 1) << part_bits):
            total += shares[2 * part]
            product += shares[2 * part + 1]
        n = np.float32(n_cols)
        terms[2 * row], terms[2 * row + 1] = total / n, product / n


@cuda.jit
def vector_columns_kernel(
    dy, x, weight, has_weight, means, rstds, terms, dx, partial, sums, n_rows, n_cols, n_parts
):
    # As `columns.columns_kernel`, 16 bytes of neighbouring columns a thread.
    allow_next_kernel()
    wait_for_previous_kernel()
    d = cuda.local.array(MAX_WIDTH, np.float32)
    h = cuda.local.array(MAX_WIDTH, np.float32)
    scale = cuda.local.array((1, MAX_WIDTH), np.float32)
    weight_sum = cuda.local.array(MAX_WIDTH, np.float32)
    bias_sum = cuda.local.array(MAX_WIDTH, np.float32)
    width, n_threads = vector_width(x), cuda.blockDim.x
    n_column_blocks = (n_cols + n_threads * width - 1) // (n_threads * width)
    part = cuda.blockIdx.x // n_column_blocks
    vector = cuda.blockIdx.x % n_column_blocks * n_threads + cuda.threadIdx.x
    col = vector * width
    if col < n_cols:
        load_features(
            scale, 0, weight, has_weight, ONE, col, n_cols - col, 0, width, 0, 1, True
        )
        for k in range(width):
            weight_sum[k], bias_sum[k] = ZERO, ZERO
        length = (n_rows + n_parts - 1) // n_parts
        for row in range(part * length, min((part + 1) * length, n_rows)):
            i, mean, rstd = row * n_cols + col, means[row], rstds[row]
            total, product = terms[2 * row], terms[2 * row + 1]
            load_vector(d, dy, i)
            load_vector(h, x, i)
            for k in range(width):
                x_hat = (h[k] - mean) * rstd
                weight_sum[k] += d[k] * x_hat
                bias_sum[k] += d[k]
                d[k] = rstd * (d[k] * scale[0, k] - total - x_hat * product)
            store_vector(dx, i, d)
        if sums:
            for k in range(width):
                partial[2 * part * n_cols + col + k] = weight_sum[k]
                partial[(2 * part + 1) * n_cols + col + k] = bias_sum[k]


def plan_parts(n_cols, itemsize):
    """The `PartPlan` of rows of `n_cols`: no more threads than the row has vectors."""
    found = stream_plan(n_cols)
    useful = 32 * math.ceil(n_cols * itemsize / (32 * VECTOR_BYTES))
    return found._replace(n_threads=min(found.n_threads, useful))


def launch_forward(n_rows, n_cols, x, y, affine, statistics, eps):
    part_bits, n_threads, length = plan_parts(n_cols, y.dtype.itemsize)
    n_blocks = n_rows << part_bits
    moments = arrays.empty((n_blocks, 3), like=y, dtype="float32")
    numbers = n_cols, length, part_bits, on_boundaries(n_cols, x, y, *affine[:2])
    options = dict(flat=True, overlap=True)
    launch(moments_kernel, n_blocks, n_threads, x, moments, *numbers, **options)
    launch(
        normalise_kernel, n_blocks, n_threads, x, y, *affine, *statistics, eps, moments, *numbers,
        **options,
    )  # fmt: skip


def launch_backward(n_rows, n_cols, inputs, scale, statistics, dx, gradients):
    part_bits, n_threads, length = plan_parts(n_cols, dx.dtype.itemsize)
    n_blocks = n_rows << part_bits
    vectors = on_boundaries(n_cols, *inputs, dx, scale[0])
    shares, terms = (
        arrays.empty((n, 2), like=dx, dtype="float32") for n in (n_blocks, n_rows)
    )
    given, options = (*inputs, *scale, *statistics), dict(flat=True, overlap=True)
    launch(
        shares_kernel, n_blocks, n_threads, *given, shares, n_cols, length, part_bits, vectors,
        **options,
    )  # fmt: skip
    launch(
        merge_kernel, math.ceil(n_rows / BLOCK_SIZE), BLOCK_SIZE, shares, terms, n_rows, n_cols,
        part_bits, **options,
    )  # fmt: skip
    how = (vector_columns_kernel, VECTOR_BYTES // dx.dtype.itemsize) if vectors else ()
    sums = gradients is not None
    partial, n_parts = launch_columns(n_rows, n_cols, (*given, terms), dx, sums, *how)
    if sums:
        finish(partial, n_parts, n_cols, *gradients)
