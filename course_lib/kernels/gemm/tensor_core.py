"""Products of matrices by tensor cores, a tile of c by each block.

Tiles of `a` and `b` pass through a ring of buffers in shared memory: while one is multiplied, the
next ones are on their way. One barrier for each tile: behind it everybody's copies of this tile
have arrived, and nobody reads the buffer any more that is filled next.

Where c has too few tiles to keep the chip busy, k is dealt out too: `n_splits` blocks for each tile
write partial sums, which `split.finish_kernel` adds up in a fixed order.
"""

import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.gemm import fragments
from course_lib.kernels.gemm.epilogue import VECTORS, finish
from course_lib.kernels.gemm.place import place_of_block
from course_lib.kernels.gemm.tiles import tile
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.shared import dynamic_shared

K_BYTES = 128  # of a tile's row
ZERO = np.float32(0)
SUMS_PADDING = 8  # float32, from one row to the next: so that lanes write to different banks
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
LARGEST = np.float32(3.4028234663852886e38)


class Shape(NamedTuple):
    """How a block works: its tile of c, its warps along m and n, its buffers."""

    m: int
    n: int
    warps_m: int
    warps_n: int
    n_stages: int
    min_blocks: int = 1  # on a multiprocessor: what registers are left for each thread

    @property
    def n_threads(self):
        return 32 * self.warps_m * self.warps_n


class Kernel(NamedTuple):
    kernel: object
    shape: Shape
    shared_bytes: int


def make(shape, sources, itemsize, mode):
    """The `Kernel` for matrices that come as `sources` say (see `tiles`), multiplied in `mode`."""
    sides = shape.m, shape.n
    a_tile, b_tile = (
        tile(side, K_BYTES, itemsize, shape.n_threads, source)
        for side, source in zip(sides, sources, strict=True)
    )
    kernel = _kernel(shape, sources, itemsize, mode, a_tile, b_tile)
    buffers = (a_tile.size + b_tile.size) * itemsize * shape.n_stages
    return Kernel(kernel, shape, max(buffers, shape.m * (shape.n + SUMS_PADDING) * 4))


def _kernel(shape, sources, itemsize, mode, a_tile, b_tile):
    TILE_M, TILE_N, N_STAGES, TILE_K = shape.m, shape.n, shape.n_stages, a_tile.k_size
    WARP_M, WARP_N, WARPS_N = shape.m // shape.warps_m, shape.n // shape.warps_n, shape.warps_n
    A_SIZE, STAGE = a_tile.size, a_tile.size + b_tile.size
    A_ROW = 1 if sources[0] == "by_row" else a_tile.pitch
    B_ROW = 1 if sources[1] == "by_row" else b_tile.pitch
    N_SUMS = WARP_M * WARP_N // 32
    fetch_a, fetch_b = a_tile.fetch, b_tile.fetch
    multiply = fragments.multiply(WARP_M, WARP_N, a_tile, b_tile, sources, itemsize, mode)
    collect, write = _write(
        TILE_M, TILE_N, WARP_M, WARP_N, shape.n_threads, mode == "split"
    )  # fmt: skip

    @cuda.jit(launch_bounds=(shape.n_threads, shape.min_blocks))
    def tensor_core_kernel(
        a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options, n_splits, length
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = dynamic_shared(a)
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        m, n, split = place_of_block(M, N, TILE_M, TILE_N, n_splits)
        k, k_stop = split * length, min((split + 1) * length, K)
        n_tiles = (k_stop - k + TILE_K - 1) // TILE_K
        for ahead in range(N_STAGES - 1):
            if ahead < n_tiles:
                to = ahead * STAGE
                fetch_a(cache, to, a, m, M, a_m, k + ahead * TILE_K, k_stop, a_k)
                fetch_b(cache, to + A_SIZE, b, n, N, b_n, k + ahead * TILE_K, k_stop, b_k)
            end_group()
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        row, col = warp // WARPS_N * WARP_M, warp % WARPS_N * WARP_N
        a_base, b_base, at, to = row * A_ROW, A_SIZE + col * B_ROW, 0, (N_STAGES - 1) * STAGE
        for ahead in range(N_STAGES - 1, n_tiles + N_STAGES - 1):
            wait_for_groups_but(N_STAGES - 2)
            cuda.syncthreads()
            if ahead < n_tiles:
                fetch_a(cache, to, a, m, M, a_m, k + ahead * TILE_K, k_stop, a_k)
                fetch_b(cache, to + A_SIZE, b, n, N, b_n, k + ahead * TILE_K, k_stop, b_k)
            end_group()
            multiply(acc, cache, at + a_base, at + b_base, lane)
            at = at + STAGE if at < (N_STAGES - 1) * STAGE else 0
            to = to + STAGE if to < (N_STAGES - 1) * STAGE else 0
        wait_for_groups_but(0)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc, row, col, lane)
        cuda.syncthreads()
        base = split * M * N
        write(sums, a, b, bias, c, m, n, M, N, k, k_stop, base, a_m, a_k, b_n, b_k, options)

    return tensor_core_kernel


def _write(TILE_M, TILE_N, WARP_M, WARP_N, N_THREADS, REPAIRS):
    """How a block's sums get to c: by way of shared memory, so that rows are written in one go."""
    N_A, N_B = WARP_M // fragments.FRAGMENT_M, WARP_N // fragments.FRAGMENT_N
    PITCH = TILE_N + SUMS_PADDING

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
        width, first = vector_width(c), cuda.threadIdx.x * vector_width(c)
        values = cuda.local.array(MAX_WIDTH, np.float32)
        broken = False
        for i in range(first, TILE_M * TILE_N, N_THREADS * width):
            row, col, place = m + i // TILE_N, n + i % TILE_N, i // TILE_N * PITCH + i % TILE_N
            if row < M and col < N:
                for q in range(width):
                    values[q] = load(sums, place + q)
                    broken = broken or not abs(values[q]) <= LARGEST
                if options & VECTORS:
                    for q in range(width):
                        values[q] = finish(values[q], bias, col + q, options)
                    store_vector(c, base + row * N + col, values)
                else:
                    for q in range(min(width, N - col)):
                        total = finish(load(sums, place + q), bias, col + q, options)
                        store(c, base + row * N + col + q, total)
        if REPAIRS and broken:
            # Of an infinity and a rest of 0 came NaN: these sums are taken again, plainly.
            for i in range(first, TILE_M * TILE_N, N_THREADS * width):
                row, col, place = m + i // TILE_N, n + i % TILE_N, i // TILE_N * PITCH + i % TILE_N
                for q in range(width if row < M else 0):
                    if col + q < N and not abs(load(sums, place + q)) <= LARGEST:
                        total = plain_sum(a, b, row, col + q, k, k_stop, a_m, a_k, b_n, b_k)
                        total = finish(total, bias, col + q, options)
                        store(c, base + row * N + col + q, total)

    return collect, write


@cuda.jit(device=True)
def plain_sum(a, b, m, n, k, k_stop, a_m, a_k, b_n, b_k):
    total = ZERO
    for at in range(k, k_stop):
        total += load(a, m * a_m + at * a_k) * load(b, n * b_n + at * b_k)
    return total


def n_blocks(shape, M, N):
    """Tiles of c."""
    return math.ceil(M / shape.m) * math.ceil(N / shape.n)
