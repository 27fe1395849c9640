"""The rungs `naive` and `online`, element by element.

All take x and y flat, rows of `n_cols` one after another. `naive` has a thread for each row,
`online` a block of BLOCK_SIZE threads. Both compute a feature's slope again for every element.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.softmax_formulas import SOFTMAX
from course_lib.kernels.blocks.sums import careful_add
from course_lib.kernels.bn_relu_softmax.features import activated, gated, scale_of
from course_lib.runtime.intrinsics import LOWEST, block_online, block_sum, load, online_add, store

BLOCK_SIZE = 256
reciprocal = SOFTMAX.row_factor


@cuda.jit
def naive_kernel(x, y, mean, var, weight, bias, eps, n_cols):
    start = cuda.grid(1) * n_cols
    if start < x.shape[0]:
        m, s, lost = LOWEST, ZERO, ZERO
        for col in range(n_cols):
            m = max(m, activated(x, start + col, col, mean, var, weight, bias, eps))
        for col in range(n_cols):
            h = activated(x, start + col, col, mean, var, weight, bias, eps)
            s, lost = careful_add(s, lost, math.exp(h - m))
        factor = reciprocal(s)
        for col in range(n_cols):
            h = activated(x, start + col, col, mean, var, weight, bias, eps)
            store(y, start + col, math.exp(h - m) * factor)


@cuda.jit
def online_kernel(x, y, mean, var, weight, bias, eps, n_cols):
    scratch_m = cuda.shared.array(32, np.float32)
    scratch_s = cuda.shared.array(32, np.float32)
    start, tid = cuda.blockIdx.x * n_cols, cuda.threadIdx.x
    m, s = LOWEST, ZERO
    for col in range(tid, n_cols, BLOCK_SIZE):
        h = activated(x, start + col, col, mean, var, weight, bias, eps)
        m, s = online_add(m, s, h)
    m, s = block_online(m, s, scratch_m, scratch_s)
    factor = reciprocal(s)
    for col in range(tid, n_cols, BLOCK_SIZE):
        h = activated(x, start + col, col, mean, var, weight, bias, eps)
        store(y, start + col, math.exp(h - m) * factor)


@cuda.jit
def naive_backward_kernel(dy, y, x, mean, var, weight, bias, dx, totals, eps, n_cols):
    row = cuda.grid(1)
    start = row * n_cols
    if start < x.shape[0]:
        total, lost = ZERO, ZERO
        for i in range(start, start + n_cols):
            total, lost = careful_add(total, lost, load(dy, i) * load(y, i))
        totals[row] = total
        for col in range(n_cols):
            i = start + col
            d = load(y, i) * (load(dy, i) - total)
            dz = gated(d, x, i, col, mean, var, weight, bias, eps)
            store(dx, i, dz * scale_of(weight, var, eps, col))


@cuda.jit
def online_backward_kernel(dy, y, x, mean, var, weight, bias, dx, totals, eps, n_cols):
    scratch = cuda.shared.array(32, np.float32)
    row, tid = cuda.blockIdx.x, cuda.threadIdx.x
    start = row * n_cols
    total = ZERO
    for i in range(start + tid, start + n_cols, BLOCK_SIZE):
        total += load(dy, i) * load(y, i)
    total = block_sum(total, scratch)
    if tid == 0:
        totals[row] = total
    for col in range(tid, n_cols, BLOCK_SIZE):
        i = start + col
        d = load(y, i) * (load(dy, i) - total)
        dz = gated(d, x, i, col, mean, var, weight, bias, eps)
        store(dx, i, dz * scale_of(weight, var, eps, col))
