"""The rung `vectorised`: 16 bytes at a time, copies in flight, 64 sums in each thread's registers.

As in `tensor_core`, tiles pass through a ring of buffers in shared memory (`mma.tiles`); here
threads multiply them with ordinary instructions. A thread reads 16 bytes of its rows at a time. Of
a tile that lies as (row, k) that is several k of one row; its rows then lie apart by the number of
threads that share them, and threads which read together read different banks. Of one that lies as
(k, row) it is some neighbouring rows, at one k.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, RELU, relu
from course_lib.kernels.blocks.mma.tiles import tile
from course_lib.kernels.gemm.place import place_of_block
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

TILE, K_BYTES, N_STAGES = 128, 64, 2
EACH = 8  # rows, and columns, of a thread
N_GROUPS = TILE // EACH  # threads along either side of the tile
N_THREADS = N_GROUPS * N_GROUPS


def make(sources, itemsize):
    """(kernel, bytes of shared memory) for matrices that come as `sources` say (`mma.tiles`)."""
    a_tile, b_tile = (tile(TILE, K_BYTES, itemsize, N_THREADS, source) for source in sources)
    width = VECTOR_BYTES // itemsize
    gather, row_of = _a_side(a_tile.pitch, width, sources[0])
    multiply, column_of = _b_side(b_tile.pitch, width, sources[1])
    kernel = _kernel(a_tile, b_tile, width, gather, row_of, multiply, column_of)
    return kernel, (a_tile.size + b_tile.size) * itemsize * N_STAGES


def _place(width, source):
    """place(rank, i): where in the tile the i-th row of the thread of this rank lies."""

    @cuda.jit(device=True)
    def apart(rank, i):
        return rank + i * N_GROUPS

    @cuda.jit(device=True)
    def neighbours(rank, i):
        return i // width * (N_GROUPS * width) + rank * width + i % width

    return neighbours if source == "by_row" else apart


def _a_side(PITCH, WIDTH, source):
    """gather(values, cache, base, rank, k): values[i, q] is row i of the thread at k + q."""
    place = _place(WIDTH, source)

    @cuda.jit(device=True)
    def gather_by_k(values, cache, base, rank, k):
        for i in range(EACH):
            load_vector(values[i], cache, base + place(rank, i) * PITCH + k)

    @cuda.jit(device=True)
    def gather_by_row(values, cache, base, rank, k):
        some = cuda.local.array(WIDTH, np.float32)
        for q in range(WIDTH):
            for i in range(0, EACH, WIDTH):
                load_vector(some, cache, base + (k + q) * PITCH + place(rank, i))
                for r in range(WIDTH):
                    values[i + r, q] = some[r]

    return gather_by_row if source == "by_row" else gather_by_k, place


def _b_side(PITCH, WIDTH, source):
    """multiply(sums, a, cache, base, rank, k): sums[i, j] += Σ a[i, q]·column j at k + q."""
    place = _place(WIDTH, source)

    @cuda.jit(device=True)
    def multiply_by_k(sums, a, cache, base, rank, k):
        some = cuda.local.array(WIDTH, np.float32)
        for j in range(EACH):
            load_vector(some, cache, base + place(rank, j) * PITCH + k)
            for i in range(EACH):
                for q in range(WIDTH):
                    sums[i, j] += a[i, q] * some[q]

    @cuda.jit(device=True)
    def multiply_by_row(sums, a, cache, base, rank, k):
        some = cuda.local.array(WIDTH, np.float32)
        for q in range(WIDTH):
            for j in range(0, EACH, WIDTH):
                load_vector(some, cache, base + (k + q) * PITCH + place(rank, j))
                for i in range(EACH):
                    for r in range(WIDTH):
                        sums[i, j + r] += a[i, q] * some[r]

    return multiply_by_row if source == "by_row" else multiply_by_k, place


def _kernel(a_tile, b_tile, WIDTH, gather, row_of, multiply, column_of):
    A_SIZE, STAGE, TILE_K = a_tile.size, a_tile.size + b_tile.size, a_tile.k_size
    fetch_a, fetch_b = a_tile.fetch, b_tile.fetch

    @cuda.jit(device=True)
    def multiply_tiles(sums, cache, at, row_rank, column_rank):
        values = cuda.local.array((EACH, WIDTH), np.float32)
        for k in range(0, TILE_K, WIDTH):
            gather(values, cache, at, row_rank, k)
            multiply(sums, values, cache, at + A_SIZE, column_rank, k)

    @cuda.jit(device=True)
    def write_column(sums, j, bias, c, m, col, M, N, row_rank, options):
        added = load(bias, col) if options & ADD_BIAS else ZERO
        for i in range(EACH):
            row, total = m + row_of(row_rank, i), sums[i, j] + added
            if row < M:
                store(c, row * N + col, relu(total) if options & RELU else total)

    @cuda.jit(device=True)
    def write(sums, bias, c, m, n, M, N, row_rank, column_rank, options):
        for j in range(EACH):
            col = n + column_of(column_rank, j)
            if col < N:
                write_column(sums, j, bias, c, m, col, M, N, row_rank, options)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def vectorised_kernel(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = dynamic_shared(a)
        sums = cuda.local.array((EACH, EACH), np.float32)
        for i in range(EACH):
            for j in range(EACH):
                sums[i, j] = ZERO
        m, n, _ = place_of_block(M, N, TILE, TILE, 1)
        fetch_a(cache, 0, a, m, M, a_m, 0, K, a_k)
        fetch_b(cache, A_SIZE, b, n, N, b_n, 0, K, b_k)
        end_group()
        row_rank, column_rank = cuda.threadIdx.x // N_GROUPS, cuda.threadIdx.x % N_GROUPS
        at = 0
        for k in range(TILE_K, K + TILE_K, TILE_K):
            wait_for_groups_but(0)
            cuda.syncthreads()  # this tile is there, and nobody reads the other buffer any more
            if k < K:
                fetch_a(cache, STAGE - at, a, m, M, a_m, k, K, a_k)
                fetch_b(cache, STAGE - at + A_SIZE, b, n, N, b_n, k, K, b_k)
            end_group()
            multiply_tiles(sums, cache, at, row_rank, column_rank)
            at = STAGE - at
        write(sums, bias, c, m, n, M, N, row_rank, column_rank, options)

    return vectorised_kernel
