"""The shape of a launch: grid barriers, early exits, strides in one to three dimensions."""

import numpy as np
from numba import float32, int32

from course_lib import cuda
from zoo.plan import Launch, Plan, case


@cuda.jit
def heat_kernel(x, other, steps):
    """A cooperative launch: every step needs the whole grid to have finished the one before."""
    grid = cuda.cg.this_grid()
    first = cuda.grid(1)
    for _ in range(steps):
        for i in range(first, x.size, cuda.gridsize(1)):
            left = x[max(i - 1, 0)]
            right = x[min(i + 1, x.size - 1)]
            other[i] = float32(0.25) * left + float32(0.5) * x[i] + float32(0.25) * right
        grid.sync()
        for i in range(first, x.size, cuda.gridsize(1)):
            x[i] = other[i]
        grid.sync()


@case
def grid_sync_heat(rng):
    x = rng.standard_normal(155).astype(np.float32)
    other = np.full_like(x, np.nan)
    wanted = x.astype(np.float64)
    for _ in range(4):
        padded = np.pad(wanted, 1, mode="edge")
        wanted = 0.25 * padded[:-2] + 0.5 * wanted + 0.25 * padded[2:]
    plan = Plan([Launch(heat_kernel, 4, 32, (x, other, 4))])
    return plan.expect(x, wanted, 1e-5)


@cuda.jit
def early_return_kernel(x, y):
    """Whole blocks leave at once; the tail threads leave after the last barrier only."""
    shared = cuda.shared.array(32, int32)
    tid = cuda.threadIdx.x
    start = cuda.blockIdx.x * 32
    if start >= x.size:
        return
    shared[tid] = x[start + tid] if start + tid < x.size else 0
    cuda.syncthreads()
    mirrored = shared[31 - tid]
    cuda.syncthreads()
    shared[tid] += mirrored
    cuda.syncthreads()
    if start + tid >= x.size:
        return
    y[start + tid] = shared[tid]


@case
def early_return_of_whole_blocks(rng):
    x = rng.integers(0, 99, 75).astype(np.int32)
    y = np.full_like(x, -1)
    padded = np.pad(x, (0, 21)).reshape(3, 32)
    plan = Plan([Launch(early_return_kernel, 5, 32, (x, y))])
    return plan.expect(y, (padded + padded[:, ::-1]).ravel()[:75])


@cuda.jit
def early_exit_kernel(x, y):
    """Threads without work leave; the hardware counts only the others at later barriers."""
    shared = cuda.shared.array(64, int32)
    tid = cuda.threadIdx.x
    if tid >= 32:
        return
    shared[tid] = x[tid]
    cuda.syncthreads()
    y[tid] = shared[(tid + 1) % 32]


@case
def early_return_of_a_warp(rng):
    x = rng.integers(0, 99, 32).astype(np.int32)
    y = np.full_like(x, -1)
    return Plan([Launch(early_exit_kernel, 1, 64, (x, y))]).expect(y, np.roll(x, -1))
