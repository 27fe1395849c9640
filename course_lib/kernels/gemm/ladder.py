"""The first rungs of the matrix product: what a thread reads, and how often.

Threads of `naive` read each number from global memory whenever they need it. `tiled` reads a number
once for each tile that needs it, and from there on in shared memory; but each multiplication still
reads two numbers. In `register_tiled` a thread has several rows and several columns, so that each
number which it reads is used several times.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import finish
from course_lib.runtime.intrinsics import load, store

#: Threads of a block of `naive`: along n, where neighbours write neighbours, and along m.
NAIVE_N, NAIVE_M = 32, 8
TILE = 16  # of `tiled`: rows, columns and depth of its tiles, and threads either way
PADDED = TILE + 1  # so that the elements of a column lie in different banks
#: `register_tiled`: the tile of a block, its depth, and the part of a thread either way.
WIDE, DEPTH, EACH = 64, 16, 4
WIDE_PADDED = WIDE + 1
WIDE_THREADS = WIDE // EACH * (WIDE // EACH)


@cuda.jit
def naive_kernel(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options):
    n_tiles = (N + NAIVE_N - 1) // NAIVE_N
    m = cuda.blockIdx.x // n_tiles * NAIVE_M + cuda.threadIdx.y
    n = cuda.blockIdx.x % n_tiles * NAIVE_N + cuda.threadIdx.x
    if m < M and n < N:
        total = ZERO
        for k in range(K):
            total += load(a, m * a_m + k * a_k) * load(b, n * b_n + k * b_k)
        store(c, m * N + n, finish(total, bias, n, options))


@cuda.jit(device=True)
def load_or_zero(x, row, n_rows, row_stride, k, K, k_stride):
    """x[row, k], and 0 beyond the edge."""
    if row < n_rows and k < K:
        return load(x, row * row_stride + k * k_stride)
    return ZERO


@cuda.jit
def tiled_kernel(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options):
    a_tile = cuda.shared.array((TILE, PADDED), np.float32)
    b_tile = cuda.shared.array((TILE, PADDED), np.float32)
    i, j = cuda.threadIdx.y, cuda.threadIdx.x
    n_tiles = (N + TILE - 1) // TILE
    m, n = cuda.blockIdx.x // n_tiles * TILE, cuda.blockIdx.x % n_tiles * TILE
    total = ZERO
    for k in range(0, K, TILE):
        # Neighbouring threads read neighbours in memory, whichever way a matrix lies there.
        r, q = (i, j) if a_k == 1 else (j, i)
        a_tile[r, q] = load_or_zero(a, m + r, M, a_m, k + q, K, a_k)
        r, q = (i, j) if b_k == 1 else (j, i)
        b_tile[r, q] = load_or_zero(b, n + r, N, b_n, k + q, K, b_k)
        cuda.syncthreads()
        for q in range(TILE):
            total += a_tile[i, q] * b_tile[j, q]
        cuda.syncthreads()
    if m + i < M and n + j < N:
        store(c, (m + i) * N + n + j, finish(total, bias, n + j, options))


@cuda.jit(device=True)
def fetch_wide(tile, x, row, n_rows, row_stride, k, K, k_stride):
    """tile[q, r] = x[row + r, k + q]: WIDE rows, DEPTH columns."""
    for i in range(cuda.threadIdx.x, WIDE * DEPTH, WIDE_THREADS):
        r, q = (i // DEPTH, i % DEPTH) if k_stride == 1 else (i % WIDE, i // WIDE)
        tile[q, r] = load_or_zero(x, row + r, n_rows, row_stride, k + q, K, k_stride)


@cuda.jit
def register_tiled_kernel(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options):
    a_tile = cuda.shared.array((DEPTH, WIDE_PADDED), np.float32)
    b_tile = cuda.shared.array((DEPTH, WIDE_PADDED), np.float32)
    sums = cuda.local.array((EACH, EACH), np.float32)
    mine = cuda.local.array(EACH, np.float32)
    step = WIDE // EACH  # a thread's rows, and its columns, lie so far apart
    i, j = cuda.threadIdx.x // step, cuda.threadIdx.x % step
    n_tiles = (N + WIDE - 1) // WIDE
    m, n = cuda.blockIdx.x // n_tiles * WIDE, cuda.blockIdx.x % n_tiles * WIDE
    for u in range(EACH):
        for v in range(EACH):
            sums[u, v] = ZERO
    for k in range(0, K, DEPTH):
        fetch_wide(a_tile, a, m, M, a_m, k, K, a_k)
        fetch_wide(b_tile, b, n, N, b_n, k, K, b_k)
        cuda.syncthreads()
        for q in range(DEPTH):
            for u in range(EACH):
                mine[u] = a_tile[q, i + u * step]
            for v in range(EACH):
                other = b_tile[q, j + v * step]
                for u in range(EACH):
                    sums[u, v] += mine[u] * other
        cuda.syncthreads()
    for u in range(EACH):
        for v in range(EACH):
            row, col = m + i + u * step, n + j + v * step
            if row < M and col < N:
                store(c, row * N + col, finish(sums[u, v], bias, col, options))
