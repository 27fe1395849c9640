"""The shape of a launch: grid barriers, early exits, strides in one to three dimensions."""

import numpy as np
from numba import float32, int32

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case


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
def reversed_by_grid_kernel(x, scratch, y):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    if i < x.size:
        scratch[i] = x[i]
    grid.sync()
    if i < x.size:
        y[i] = scratch[x.size - 1 - i]


@case
def grid_sync_reverse(rng):
    x = rng.integers(0, 99, 201).astype(np.int16)
    scratch, y = np.full_like(x, -1), np.full_like(x, -1)
    plan = Plan([Launch(reversed_by_grid_kernel, 7, 32, (x, scratch, y))])
    return plan.expect(y, x[::-1])


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


@cuda.jit
def grid_stride_2d_kernel(x, y):
    row_start, col_start = cuda.grid(2)
    row_step, col_step = cuda.gridsize(2)
    for row in range(row_start, x.shape[0], row_step):
        for col in range(col_start, x.shape[1], col_step):
            y[row, col] = 2 * x[row, col] + row - col


@case
def grid_stride_2d(rng):
    x = rng.integers(-99, 99, (29, 43)).astype(np.int32)
    y = np.full_like(x, -1)
    row, col = np.indices(x.shape)
    plan = Plan([Launch(grid_stride_2d_kernel, (2, 3), (4, 8), (x, y))])
    return plan.expect(y, 2 * x + row - col)


@cuda.jit
def linear_index_kernel(y):
    thread = cuda.threadIdx.x + cuda.blockDim.x * (
        cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z
    )
    block = cuda.blockIdx.x + cuda.gridDim.x * (cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z)
    threads = cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z
    x, y_, z = cuda.grid(3)
    y[block * threads + thread] = x + 100 * y_ + 10000 * z


@case
def indices_in_three_dimensions(rng):
    grid, block = (2, 3, 2), (3, 2, 4)
    y = np.full(12 * 24, -1, np.int32)
    bz, by, bx, tz, ty, tx = np.indices((*grid[::-1], *block[::-1]))
    wanted = bx * 3 + tx + 100 * (by * 2 + ty) + 10000 * (bz * 4 + tz)
    return Plan([Launch(linear_index_kernel, grid, block, (y,))]).expect(y, wanted.ravel())


@cuda.jit
def stencil_3d_kernel(x, y):
    """Seven-point stencil: a tile with a halo of one cell on each side, zero outside."""
    tile = cuda.shared.array((6, 6, 6), float32)
    tid = cuda.threadIdx.x + 4 * (cuda.threadIdx.y + 4 * cuda.threadIdx.z)
    depth, height, width = x.shape
    for cell in range(tid, 216, 64):
        k = cuda.blockIdx.z * 4 + cell // 36 - 1
        j = cuda.blockIdx.y * 4 + cell // 6 % 6 - 1
        i = cuda.blockIdx.x * 4 + cell % 6 - 1
        value = float32(0)
        if 0 <= k < depth and 0 <= j < height and 0 <= i < width:
            value = x[k, j, i]
        tile[cell // 36, cell // 6 % 6, cell % 6] = value
    cuda.syncthreads()
    i, j, k = cuda.grid(3)
    if k < depth and j < height and i < width:
        c, b, a = cuda.threadIdx.z + 1, cuda.threadIdx.y + 1, cuda.threadIdx.x + 1
        total = tile[c - 1, b, a] + tile[c + 1, b, a]
        total += tile[c, b - 1, a] + tile[c, b + 1, a]
        total += tile[c, b, a - 1] + tile[c, b, a + 1]
        y[k, j, i] = total - float32(6) * tile[c, b, a]


@case
def stencil_3d_with_halo(rng):
    x = rng.standard_normal((5, 7, 9)).astype(np.float32)
    y = np.full_like(x, np.nan)
    p = np.pad(x.astype(np.float64), 1)
    wanted = p[:-2, 1:-1, 1:-1] + p[2:, 1:-1, 1:-1] + p[1:-1, :-2, 1:-1] + p[1:-1, 2:, 1:-1]
    wanted += p[1:-1, 1:-1, :-2] + p[1:-1, 1:-1, 2:] - 6 * p[1:-1, 1:-1, 1:-1]
    plan = Plan([Launch(stencil_3d_kernel, (3, 2, 2), (4, 4, 4), (x, y))])
    return plan.expect(y, wanted, 1e-5)


@cuda.jit
def shortest_paths_kernel(distance, through):
    """One step of Floyd and Warshall; the host launches it once per node."""
    row, col = cuda.grid(2)
    if row < distance.shape[0] and col < distance.shape[1]:
        if row != through and col != through:
            detour = distance[row, through] + distance[through, col]
            distance[row, col] = min(distance[row, col], detour)


@case
def shortest_paths_many_launches(rng):
    n = 11
    distance = rng.integers(1, 100, (n, n)).astype(np.int32)
    np.fill_diagonal(distance, 0)
    wanted = distance.copy()
    for through in range(n):
        wanted = np.minimum(wanted, wanted[:, through, None] + wanted[through])
    grid = (blocks_for(n, 4), blocks_for(n, 8))
    plan = Plan([Launch(shortest_paths_kernel, grid, (4, 8), (distance, k)) for k in range(n)])
    return plan.expect(distance, wanted)


@cuda.jit
def life_kernel(board, later):
    """Conway's game of life on a torus, in uint8."""
    row, col = cuda.grid(2)
    height, width = board.shape
    if row < height and col < width:
        neighbours = 0
        for down in range(-1, 2):
            for right in range(-1, 2):
                if down != 0 or right != 0:
                    neighbours += board[(row + down) % height, (col + right) % width]
        alive = neighbours == 3 or (neighbours == 2 and board[row, col] == 1)
        later[row, col] = 1 if alive else 0


@case
def game_of_life(rng):
    board = rng.integers(0, 2, (13, 17)).astype(np.uint8)
    later, last = np.full_like(board, 9), np.full_like(board, 9)
    wanted = board
    for _ in range(2):
        shifts = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
        neighbours = sum(np.roll(wanted, shift, (0, 1)) for shift in shifts)
        wanted = ((neighbours == 3) | ((neighbours == 2) & (wanted == 1))).astype(np.uint8)
    launches = [(board, later), (later, last)]
    plan = Plan([Launch(life_kernel, (4, 3), (4, 8), pair) for pair in launches])
    return plan.expect(last, wanted)
