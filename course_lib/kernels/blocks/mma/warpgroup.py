"""Products by `wgmma`: how the warpgroups of a block multiply tiles that pass through a ring.

Each four warps, a warpgroup, multiply 64 rows with all columns of the block's tile
(`intrinsics.warpgroup`), and go on to fill buffers while they do. 16-bit numbers are copied there;
float32, rounded to TF32, come through registers, loaded a tile ahead (`swizzled`). To load, round
and store them takes longer than to multiply them. So what has gone from its register to a buffer is
loaded anew at once, before the other input is stored.

One barrier for each tile: behind it everybody's part of this tile is in its buffer. A warpgroup
leaves one product on its way, so behind the barrier of tile t all have done with tile t − 2. Its
buffer is the next that copies go to. What comes through registers is stored before the next
barrier, where some may still be at tile t − 2, and goes to the buffer of the one before.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.warpgroup import (
    A_BY_ROW,
    B_BY_ROW,
    ROW_BYTES,
    ROWS,
    multiply_tiles,
    show_to_products,
    wait_for_earlier_products,
    wait_for_products,
)

ONLY = (9, 0)  # compute capability
GROUP_THREADS = 128
BAND_ROWS = 2048  # of c, whose tiles are gone through together: those that run make a square


class Shape(NamedTuple):
    """A block's tile of c, of 64 rows for each of its warpgroups, and its buffers.

    step, once: what a tile takes for each 128 bytes along k, and beside that: in units of 10 ns, as
    measured on an H200
    n_blocks: of a multiprocessor, at once
    """

    m: int
    n: int
    n_stages: int
    step: int = 0
    once: int = 0
    n_blocks: int = 1

    @property
    def n_threads(self):
        return self.m // ROWS * GROUP_THREADS

    @property
    def label(self):
        return f"{self.m}x{self.n}" + (" by two" if self.n_blocks == 2 else "")


@cuda.jit(device=True)
def tile_at(index, M, N, tile_m, tile_n, rows_of_band):
    """(first row, first column) of tile `index` of c, in bands of so many rows of tiles.

    With no 64-bit divisions. Those are calls, and where a kernel calls anything the compiler lets
    each product wait for the one before it.
    """
    tiles_m, tiles_n = np.uint32((M + tile_m - 1) // tile_m), np.uint32((N + tile_n - 1) // tile_n)
    in_band = np.uint32(rows_of_band * tiles_n)
    band = np.uint32(index // in_band)
    first = np.uint32(band * rows_of_band)
    rows = np.uint32(min(np.uint32(tiles_m - first), np.uint32(rows_of_band)))
    inside = np.uint32(index - band * in_band)
    row, col = np.int64(first + inside % rows), np.int64(inside // rows)
    return row * tile_m, col * tile_n


def by_row_flags(sources, itemsize):
    """Which of the tiles lie by rows, as `multiply_tiles` takes it; float32 are turned on the way.
    """
    if itemsize == 4:
        return 0
    return sum(
        flag for source, flag in zip(sources, (A_BY_ROW, B_BY_ROW), strict=True)
        if source == "by_row"
    )  # fmt: skip


def product_of(shape, tiles, by_row, itemsize, is_rounded=False, every=0):
    """multiply(acc, cache, a, b, of_a, of_b, K, mine): acc += this warpgroup's rows of a times b.

    tiles   of a and of b, as `swizzled.tile` makes them; `of_a` and `of_b` are what their `first`
            gave
    by_row  as `by_row_flags` gives it
    mine    where in a tile of a the warpgroup's rows begin, in elements

    is_rounded  whether float32 are TF32 already, and copied as they are
    every       tiles that are multiplied from 0, and then added to `acc` as float32, since tensor
                cores cut sums off; 0: all of them
    """
    TILE_M, TILE_N, N_STAGES = shape.m, shape.n, shape.n_stages
    TILE_K, BY_ROW = ROW_BYTES // itemsize, by_row
    A_SIZE, STAGE = TILE_M * TILE_K, (TILE_M + TILE_N) * TILE_K
    END, AHEAD, N_SUMS, EVERY = N_STAGES * STAGE, N_STAGES - 2, TILE_N // 2, every
    a_tile, b_tile = tiles
    N_A, N_VECTORS = a_tile.n_vectors, a_tile.n_vectors + b_tile.n_vectors
    _, load_a, store_a, copy_a = a_tile[:4]
    _, load_b, store_b, copy_b = b_tile[:4]

    @cuda.jit(device=True)
    def multiply_rounded(acc, cache, a, b, of_a, of_b, K, mine):
        words = cuda.local.array((N_VECTORS, 4), np.uint32)
        at = 0
        load_a(words, 0, a, of_a, 0)
        load_b(words, N_A, b, of_b, 0)
        for k in range(TILE_K, K + TILE_K, TILE_K):
            store_a(words, 0, cache, at)
            load_a(words, 0, a, of_a, k)
            store_b(words, N_A, cache, at + A_SIZE)
            load_b(words, N_A, b, of_b, k)
            wait_for_earlier_products()
            show_to_products()
            cuda.syncthreads()
            multiply_tiles(acc, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)
            at = at + STAGE if at + STAGE < END else 0

    @cuda.jit(device=True)
    def copy_tiles(cache, to, a, b, of_a, of_b, k):
        copy_a(cache, to, a, of_a, k)
        copy_b(cache, to + A_SIZE, b, of_b, k)
        end_group()

    @cuda.jit(device=True)
    def multiply_copied(acc, cache, a, b, of_a, of_b, K, mine):
        for ahead in range(AHEAD):
            copy_tiles(cache, ahead * STAGE, a, b, of_a, of_b, ahead * TILE_K)
        at, to = 0, AHEAD * STAGE
        for k in range(AHEAD * TILE_K, K + AHEAD * TILE_K, TILE_K):
            wait_for_groups_but(AHEAD - 1)
            show_to_products()
            cuda.syncthreads()
            multiply_tiles(acc, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)
            wait_for_earlier_products()
            copy_tiles(cache, to, a, b, of_a, of_b, k)
            at = at + STAGE if at + STAGE < END else 0
            to = to + STAGE if to + STAGE < END else 0
        wait_for_groups_but(0)

    @cuda.jit(device=True)
    def multiply_few(acc, cache, a, b, of_a, of_b, K, mine):
        fresh = cuda.local.array(N_SUMS, np.float32)
        for i in range(N_SUMS):
            fresh[i] = ZERO
        for ahead in range(AHEAD):
            copy_tiles(cache, ahead * STAGE, a, b, of_a, of_b, ahead * TILE_K)
        at, to, n = 0, AHEAD * STAGE, np.int32(0)
        for k in range(AHEAD * TILE_K, K + AHEAD * TILE_K, TILE_K):
            wait_for_groups_but(AHEAD - 1)
            show_to_products()
            cuda.syncthreads()
            multiply_tiles(fresh, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)
            wait_for_earlier_products()
            copy_tiles(cache, to, a, b, of_a, of_b, k)
            at = at + STAGE if at + STAGE < END else 0
            to = to + STAGE if to + STAGE < END else 0
            n = np.int32(n + 1)
            if n == EVERY:
                n = np.int32(0)
                wait_for_products(fresh, TILE_N)
                for i in range(N_SUMS):
                    acc[i] += fresh[i]
                    fresh[i] = ZERO
        wait_for_products(fresh, TILE_N)
        for i in range(N_SUMS):
            acc[i] += fresh[i]
        wait_for_groups_but(0)

    if every:
        return multiply_few
    return multiply_rounded if itemsize == 4 and not is_rounded else multiply_copied
