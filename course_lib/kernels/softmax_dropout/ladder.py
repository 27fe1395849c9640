"""The rungs `naive` and `online`, element by element.

All take their arrays flat, rows of `n_cols` one after another. `naive` has a thread for each row,
`online` a block of BLOCK_SIZE threads.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.dropout_mask import dropped
from course_lib.kernels.blocks.softmax_formulas import SOFTMAX
from course_lib.kernels.blocks.sums import careful_add
from course_lib.runtime.intrinsics import LOWEST, block_online, block_sum, load, online_add, store

BLOCK_SIZE = 256
reciprocal = SOFTMAX.row_factor


@cuda.jit
def naive_kernel(x, z, stats, n_cols, scale, threshold, offset, key0, key1):
    row = cuda.grid(1)
    start = row * n_cols
    if start < x.shape[0]:
        m, s, lost = LOWEST, ZERO, ZERO
        for i in range(start, start + n_cols):
            m = max(m, load(x, i))
        for i in range(start, start + n_cols):
            s, lost = careful_add(s, lost, math.exp(load(x, i) - m))
        factor = reciprocal(s)
        for i in range(start, start + n_cols):
            y = math.exp(load(x, i) - m) * factor
            store(z, i, dropped(y, offset + i, scale, threshold, key0, key1))
        stats[2 * row] = m
        stats[2 * row + 1] = s


@cuda.jit
def online_kernel(x, z, stats, n_cols, scale, threshold, offset, key0, key1):
    scratch_m = cuda.shared.array(32, np.float32)
    scratch_s = cuda.shared.array(32, np.float32)
    row, tid = cuda.blockIdx.x, cuda.threadIdx.x
    start = row * n_cols
    m, s = LOWEST, ZERO
    for i in range(start + tid, start + n_cols, BLOCK_SIZE):
        m, s = online_add(m, s, load(x, i))
    m, s = block_online(m, s, scratch_m, scratch_s)
    factor = reciprocal(s)
    for i in range(start + tid, start + n_cols, BLOCK_SIZE):
        y = math.exp(load(x, i) - m) * factor
        store(z, i, dropped(y, offset + i, scale, threshold, key0, key1))
    if tid == 0:
        stats[2 * row] = m
        stats[2 * row + 1] = s


@cuda.jit
def naive_backward_kernel(dz, x, stats, dx, n_cols, scale, threshold, offset, key0, key1):
    row = cuda.grid(1)
    start = row * n_cols
    if start < x.shape[0]:
        m, factor = stats[2 * row], reciprocal(stats[2 * row + 1])
        total, lost = ZERO, ZERO
        for i in range(start, start + n_cols):
            g = dropped(load(dz, i), offset + i, scale, threshold, key0, key1)
            total, lost = careful_add(total, lost, math.exp(load(x, i) - m) * factor * g)
        for i in range(start, start + n_cols):
            g = dropped(load(dz, i), offset + i, scale, threshold, key0, key1)
            store(dx, i, math.exp(load(x, i) - m) * factor * (g - total))


@cuda.jit
def online_backward_kernel(dz, x, stats, dx, n_cols, scale, threshold, offset, key0, key1):
    scratch = cuda.shared.array(32, np.float32)
    row, tid = cuda.blockIdx.x, cuda.threadIdx.x
    start = row * n_cols
    m, factor = stats[2 * row], reciprocal(stats[2 * row + 1])
    total = ZERO
    for i in range(start + tid, start + n_cols, BLOCK_SIZE):
        g = dropped(load(dz, i), offset + i, scale, threshold, key0, key1)
        total += math.exp(load(x, i) - m) * factor * g
    total = block_sum(total, scratch)
    for i in range(start + tid, start + n_cols, BLOCK_SIZE):
        g = dropped(load(dz, i), offset + i, scale, threshold, key0, key1)
        store(dx, i, math.exp(load(x, i) - m) * factor * (g - total))
