"""The online softmax in numba.cuda: a warp for each row, and every thread is written down."""

import math

import numpy as np

from course_lib import cuda

ZERO, ONE, MINUS_INF = np.float32(0), np.float32(1), np.float32(-np.inf)
WARPS = 4  # rows that a block works on


@cuda.jit(device=True)
def merge(m1, s1, m2, s2):
    """Return the maximum and the sum of both parts."""
    m = max(m1, m2)
    first = s1 if m1 == m else s1 * math.exp(m1 - m)
    second = s2 if m2 == m else s2 * math.exp(m2 - m)
    return m, first + second


@cuda.jit
def softmax_online(x, y):
    """Write the softmax of each row of x to y; both float32 of (rows, columns), row-major."""
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            value = x[row, col]
            if value > m:
                s = s * math.exp(m - value) + ONE
                m = value
            elif value != MINUS_INF:
                s += math.exp(value - m)
        for k in range(5):
            m2 = cuda.shfl_xor_sync(0xFFFFFFFF, m, 1 << k)
            s2 = cuda.shfl_xor_sync(0xFFFFFFFF, s, 1 << k)
            m, s = merge(m, s, m2, s2)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


def softmax(x):
    """Return the softmax of each row of x, a NumPy array of float32 (rows, columns), as another."""
    y = np.empty_like(x)
    softmax_online[-(-len(x) // WARPS), 32 * WARPS](x, y)
    return y


def ptx(cc):
    """Return what the kernel becomes for a compute capability such as (9, 0), as text."""
    from numba import types

    from course_lib.runtime.compile import compiler

    return compiler.ptx(softmax_online, (types.float32[:, ::1], types.float32[:, ::1]), cc)
