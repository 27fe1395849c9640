"""Batch normalisation and ReLU of one element, and their gradients' sums over the rows.

With statistics that are given, batch normalisation is a line per feature: z = (x − mean)·a + bias,
a = weight / sqrt(var + eps). (x − mean is not multiplied out: for large means, x·a + b loses what
x − mean keeps.) The gradients of weight and bias are sums down the columns, taken in two stages so
that their order is fixed: partial sums of some rows each, then `finish_kernel`.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.runtime.intrinsics import allow_next_kernel, load, store, wait_for_previous_kernel

COLUMNS_BLOCK_SIZE = 256
FINISH_BLOCK_SIZE = 1024


@cuda.jit(device=True)
def scale_of(weight, var, eps, col):
    """a, the slope of feature `col`."""
    return load(weight, col) / math.sqrt(load(var, col) + eps)


@cuda.jit(device=True)
def relu_of(z):
    return ZERO if z <= ZERO else z  # a NaN is not <= 0, and passes


@cuda.jit(device=True)
def activated(x, i, col, mean, var, weight, bias, eps):
    """relu(z) of element `i` of x, which is of feature `col`."""
    a = scale_of(weight, var, eps, col)
    return relu_of((load(x, i) - load(mean, col)) * a + load(bias, col))


@cuda.jit(device=True)
def gated(d, x, i, col, mean, var, weight, bias, eps):
    """`d` where ReLU let element `i` pass, else 0: the gradient of z from that of relu(z)."""
    z = (load(x, i) - load(mean, col)) * scale_of(weight, var, eps, col) + load(bias, col)
    return ZERO if z <= ZERO else d


@cuda.jit
def column_sums_kernel(
    dy, y, x, mean, var, weight, bias, totals, partial, eps, n_rows, n_cols, n_parts
):
    # A thread takes one column of one of `n_parts` parts of the rows; totals[row] = Σ y·dy.
    n_column_blocks = (n_cols + COLUMNS_BLOCK_SIZE - 1) // COLUMNS_BLOCK_SIZE
    part = cuda.blockIdx.x // n_column_blocks
    col = cuda.blockIdx.x % n_column_blocks * COLUMNS_BLOCK_SIZE + cuda.threadIdx.x
    if col < n_cols:
        length = (n_rows + n_parts - 1) // n_parts
        weight_sum, bias_sum = ZERO, ZERO
        for row in range(part * length, min((part + 1) * length, n_rows)):
            i = row * n_cols + col
            d = load(y, i) * (load(dy, i) - totals[row])
            dz = gated(d, x, i, col, mean, var, weight, bias, eps)
            weight_sum += dz * (load(x, i) - load(mean, col))
            bias_sum += dz
        partial[(2 * part) * n_cols + col] = weight_sum
        partial[(2 * part + 1) * n_cols + col] = bias_sum


@cuda.jit
def finish_kernel(partial, var, dweight, dbias, eps, n_parts, n_cols):
    # 32 columns of a part's 2·n_cols numbers per block: lane = column, warp = every 32nd part.
    allow_next_kernel()
    wait_for_previous_kernel()
    sums = cuda.shared.array(FINISH_BLOCK_SIZE, np.float32)
    tid = cuda.threadIdx.x
    lane_id, warp_id = tid & 31, tid >> 5
    j = cuda.blockIdx.x * 32 + lane_id
    total = ZERO
    if j < 2 * n_cols:
        for part in range(warp_id, n_parts, FINISH_BLOCK_SIZE // 32):
            total += partial[part * 2 * n_cols + j]
    sums[tid] = total
    cuda.syncthreads()
    if warp_id == 0 and j < 2 * n_cols:
        for other in range(1, FINISH_BLOCK_SIZE // 32):
            total += sums[other * 32 + lane_id]
        if j < n_cols:
            store(dweight, j, total * (ONE / math.sqrt(load(var, j) + eps)))
        else:
            store(dbias, j - n_cols, total)
