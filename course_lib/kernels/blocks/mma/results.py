"""How a block's sums get from its warps' registers to c.

By way of shared memory, so that rows of c are written in one go, 16 bytes by each thread. Blocks of
a cluster have sums of different parts of k for one tile; each writes a share of that tile, and
reads what the others have for it.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.mma.epilogue import CLUSTER, VECTORS, finish
from course_lib.kernels.blocks.mma.fragments import FRAGMENT_M, FRAGMENT_N
from course_lib.runtime.intrinsics import load, store, store_vector, vector_width
from course_lib.runtime.intrinsics.cluster import cluster_rank, cluster_size, load_from_cluster

SUMS_PADDING = 8  # float32, from one row to the next: so that lanes write to different banks
LARGEST = np.float32(3.4028234663852886e38)


def results(TILE_M, TILE_N, WARP_M, WARP_N, N_THREADS, REPAIRS, BIAS_BY_ROW=False):
    """(collect, write) for blocks of N_THREADS threads with such tiles.

    collect(sums, acc, row, col, lane): a warp's `acc` (see `fragments`) to the shared array `sums`;
    row, col are where in the tile its part begins. Barriers before and after it are the caller's.

    write(sums, a, b, bias, c, m, n, M, N, k, k_stop, base, a_m, a_k, b_n, b_k, options): the tile
    at row m and column n to c[base:]. With REPAIRS, a sum that is no number is taken again from `a`
    and `b`, over k to k_stop: of an infinity and a rest of 0 comes NaN where float32 has none.
    BIAS_BY_ROW: row m gets a bias instead of column n.
    """
    N_A, N_B, PITCH = WARP_M // FRAGMENT_M, WARP_N // FRAGMENT_N, TILE_N + SUMS_PADDING

    @cuda.jit(device=True)
    def collect(sums, acc, row, col, lane):
        place = (row + lane // 4) * PITCH + col + lane % 4 * 2
        for i in range(N_A):
            for j in range(N_B):
                for r in range(4):
                    at = (16 * i + r // 2 * 8) * PITCH + 8 * j + r % 2
                    sums[place + at] = acc[4 * (i * N_B + j) + r]

    @cuda.jit(device=True)
    def write(sums, a, b, bias, c, m, n, M, N, k, k_stop, base, a_m, a_k, b_n, b_k, options):
        width, rank, n_blocks = vector_width(c), 0, 1
        if options & CLUSTER:
            rank, n_blocks = cluster_rank(), cluster_size()
        first, step = (rank * N_THREADS + cuda.threadIdx.x) * width, n_blocks * N_THREADS * width
        values = cuda.local.array(MAX_WIDTH, np.float32)
        broken = False
        for i in range(first, TILE_M * TILE_N, step):
            row, col, place = m + i // TILE_N, n + i % TILE_N, i // TILE_N * PITCH + i % TILE_N
            if row < M and col < N:
                add_up(values, sums, place, n_blocks, width)
                for q in range(width):
                    broken = broken or not abs(values[q]) <= LARGEST
                    if col + q < N:
                        at = row if BIAS_BY_ROW else col + q
                        values[q] = finish(values[q], bias, at, options)
                if options & VECTORS:
                    store_vector(c, base + row * N + col, values)
                else:
                    for q in range(width):
                        if col + q < N:
                            store(c, base + row * N + col + q, values[q])
        if REPAIRS and broken:
            for i in range(first, TILE_M * TILE_N, step):
                row, col, place = m + i // TILE_N, n + i % TILE_N, i // TILE_N * PITCH + i % TILE_N
                for q in range(width if row < M else 0):
                    if col + q < N and not abs(sum_at(sums, place + q, n_blocks)) <= LARGEST:
                        total = plain_sum(a, b, row, col + q, k, k_stop, a_m, a_k, b_n, b_k)
                        total = finish(total, bias, row if BIAS_BY_ROW else col + q, options)
                        store(c, base + row * N + col + q, total)

    return collect, write


@cuda.jit(device=True)
def add_up(values, sums, place, n_blocks, width):
    """values[q] = sums[place + q], of all blocks of the cluster in the order of their ranks."""
    if n_blocks == 1:
        for q in range(width):
            values[q] = load(sums, place + q)
        return
    for q in range(width):
        values[q] = load_from_cluster(sums, place + q, 0)
    for rank in range(1, n_blocks):
        for q in range(width):
            values[q] += load_from_cluster(sums, place + q, rank)


@cuda.jit(device=True)
def sum_at(sums, place, n_blocks):
    if n_blocks == 1:
        return load(sums, place)
    total = ZERO
    for rank in range(n_blocks):
        total += load_from_cluster(sums, place, rank)
    return total


@cuda.jit(device=True)
def plain_sum(a, b, m, n, k, k_stop, a_m, a_k, b_n, b_k):
    total = ZERO
    for at in range(k, k_stop):
        total += load(a, m * a_m + at * a_k) * load(b, n * b_n + at * b_k)
    return total
