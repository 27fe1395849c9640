"""Arrays: strided, sliced, and in dynamic shared memory."""

import numpy as np
from numba import float64, int32

from course_lib import cuda
from zoo.plan import Launch, Plan, case


@cuda.jit
def transpose_strided_kernel(x, y):
    row, col = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        y[row, col] = x[row, col]


@case
def strided_arrays(rng):
    x = np.asfortranarray(rng.standard_normal((9, 14)))
    y = np.full((9, 14), np.nan)
    plan = Plan([Launch(transpose_strided_kernel, (3, 2), (4, 8), (x, y))])
    return plan.expect(y, x)


@cuda.jit
def dynamic_shared_kernel(x, sums, counts):
    """One dynamic allocation, seen as two arrays of different types behind one another."""
    tid = cuda.threadIdx.x
    threads = cuda.blockDim.x
    floats = cuda.shared.array(0, float64)
    integers = cuda.shared.array(0, int32)[2 * threads :]
    floats[tid] = x[tid]
    integers[tid] = 1 if x[tid] > 0 else 0
    cuda.syncthreads()
    if tid == 0:
        total = float64(0)
        count = 0
        for i in range(threads):
            total += floats[i]
            count += integers[i]
        sums[0] = total
        counts[0] = count


@case
def dynamic_shared_memory(rng):
    x = rng.standard_normal(45)
    sums, counts = np.full(1, np.nan), np.full(1, -1, np.int32)
    launch = Launch(dynamic_shared_kernel, 1, 45, (x, sums, counts), shared=45 * (8 + 4))
    return Plan([launch]).expect(sums, [x.sum()], 1e-9).expect(counts, [(x > 0).sum()])


@cuda.jit(device=True)
def row_total(row):
    total = 0.0
    for value in row:
        total += value
    return total


@cuda.jit
def slices_kernel(x, totals):
    """A row handed on as an array of its own."""
    row = cuda.grid(1)
    if row < x.shape[0]:
        totals[row, 0] = row_total(x[row])
        totals[row, 1] = row_total(x[row, 1::2])


@case
def array_slices(rng):
    x = rng.standard_normal((35, 9))
    totals = np.full((35, 2), np.nan)
    plan = Plan([Launch(slices_kernel, 2, 32, (x, totals))])
    return plan.expect(totals, np.c_[x.sum(axis=1), x[:, 1::2].sum(axis=1)], 1e-9)
