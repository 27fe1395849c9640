"""Two-dimensional tiles in shared memory."""

import numpy as np
from numba import float32, float64, int32

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case

TILE = 8


@cuda.jit
def matmul_kernel(a, b, c):
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    col, row = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for start in range(0, a.shape[1], TILE):
        inside = row < a.shape[0] and start + tx < a.shape[1]
        a_tile[ty, tx] = a[row, start + tx] if inside else float32(0)
        inside = start + ty < b.shape[0] and col < b.shape[1]
        b_tile[ty, tx] = b[start + ty, col] if inside else float32(0)
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[ty, k] * b_tile[k, tx]
        cuda.syncthreads()
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = total


@case
def matmul_tiled(rng):
    a = rng.standard_normal((19, 13)).astype(np.float32)
    b = rng.standard_normal((13, 11)).astype(np.float32)
    c = np.full((19, 11), np.nan, np.float32)
    grid = (blocks_for(11, TILE), blocks_for(19, TILE))
    plan = Plan([Launch(matmul_kernel, grid, (TILE, TILE), (a, b, c))])
    return plan.expect(c, a.astype(np.float64) @ b, 1e-4)


@cuda.jit
def transpose_kernel(x, y):
    """The extra column keeps the threads of a warp in different banks."""
    tile = cuda.shared.array((16, 17), float64)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row, col = cuda.blockIdx.y * 16, cuda.blockIdx.x * 16
    for down in range(ty, 16, 4):
        if row + down < x.shape[0] and col + tx < x.shape[1]:
            tile[down, tx] = x[row + down, col + tx]
    cuda.syncthreads()
    for down in range(ty, 16, 4):
        if col + down < y.shape[0] and row + tx < y.shape[1]:
            y[col + down, row + tx] = tile[tx, down]


@case
def transpose_padded(rng):
    x = rng.standard_normal((37, 21))
    y = np.full((21, 37), np.nan)
    plan = Plan([Launch(transpose_kernel, (2, 3), (16, 4), (x, y))])
    return plan.expect(y, x.T)


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


@cuda.jit
def convolution_kernel(x, weight, y):
    """Valid 2-D convolution: the tile with its border is loaded by a strided loop."""
    tile = cuda.shared.array((10, 10), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row, col = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    for down in range(ty, TILE + 2, TILE):
        for right in range(tx, TILE + 2, TILE):
            if row + down < x.shape[0] and col + right < x.shape[1]:
                tile[down, right] = x[row + down, col + right]
    cuda.syncthreads()
    if row + ty < y.shape[0] and col + tx < y.shape[1]:
        total = float32(0)
        for i in range(3):
            for j in range(3):
                total += tile[ty + i, tx + j] * weight[i, j]
        y[row + ty, col + tx] = total


@case
def convolution_2d(rng):
    x = rng.standard_normal((15, 20)).astype(np.float32)
    weight = rng.standard_normal((3, 3)).astype(np.float32)
    y = np.full((13, 18), np.nan, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3))
    plan = Plan([Launch(convolution_kernel, (3, 2), (TILE, TILE), (x, weight, y))])
    return plan.expect(y, (windows * weight).sum(axis=(2, 3)), 1e-4)


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
