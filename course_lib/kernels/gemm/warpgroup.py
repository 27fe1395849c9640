"""Products by Hopper's tensor cores, which read tiles from shared memory by themselves.

As in `tensor_core`, tiles of `a` and `b` pass through a ring of buffers. Here each four warps, a
warpgroup, multiply 64 rows with all columns of the block's tile (`intrinsics.warpgroup`), and go on
to fill buffers while they do. 16-bit numbers are copied there; float32 come through registers,
loaded a tile ahead (`swizzled`). To load, round and store them takes longer than to multiply them.
So what has gone from its register to a buffer is loaded anew at once, before the other input is
stored.

One barrier for each tile: behind it everybody's part of this tile is in its buffer. A warpgroup
leaves one product on its way, so behind the barrier of tile t all have done with tile t − 2. Its
buffer is the next that copies go to. What comes through registers is stored before the next
barrier, where some may still be at tile t − 2, and goes to the buffer of the one before.

float32 is rounded to TF32 (`fragments`). Compute capability 9.0 alone: 10.0 and 12.0 have no
`wgmma`, and there as on 8.0 `tensor_core` takes these products. `warpgroup_plan` tells which
products, and which tiles.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.gemm.swizzled import tile
from course_lib.kernels.gemm.warpgroup_plan import GROUP_THREADS, SHAPES, Shape, choose, n_blocks
from course_lib.kernels.gemm.warpgroup_sums import PADDING, sums_of
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.warpgroup import (
    A_BY_ROW,
    B_BY_ROW,
    ROW_BYTES,
    ROWS,
    multiply_tiles,
    show_to_products,
    tiles_in_shared,
    wait_for_earlier_products,
    wait_for_products,
)

ONLY = (9, 0)  # compute capability
#: How the inputs of the three products of a linear layer come.
SOURCES = (("by_k", "by_k"), ("by_k", "by_row"), ("by_row", "by_row"))
BAND_ROWS = 2048  # of c, whose tiles are gone through together: those that run make a square
ZERO = np.float32(0)


class Kernel(NamedTuple):
    kernel: object
    shape: Shape
    shared_bytes: int


def make(shape, sources, itemsize):
    """The `Kernel` for matrices that come as `sources` say (see `swizzled`).

    Of float32 (itemsize 4), rounded to TF32, or of 16-bit numbers.
    """
    kernel = _kernel(shape, sources, itemsize)
    buffers = (shape.m + shape.n) * ROW_BYTES * shape.n_stages
    return Kernel(kernel, shape, max(buffers, shape.m * (shape.n + PADDING) * 4))


@cuda.jit(device=True)
def place_of_block(M, N, tile_m, tile_n, rows_of_band):
    """As `place.place_of_block`, in bands of so many rows of tiles, without divisions of 64 bits.

    Those are calls, and where a kernel calls anything the compiler lets each product wait for the
    one before it.
    """
    tiles_m, tiles_n = np.uint32((M + tile_m - 1) // tile_m), np.uint32((N + tile_n - 1) // tile_n)
    index, in_band = np.uint32(cuda.blockIdx.x), np.uint32(rows_of_band * tiles_n)
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


def product_of(shape, tiles, by_row, itemsize):
    """multiply(acc, cache, a, b, of_a, of_b, K, mine): acc += this warpgroup's rows of a times b.

    tiles   of a and of b, as `swizzled.tile` makes them; `of_a` and `of_b` are what their `first`
            gave
    by_row  as `by_row_flags` gives it
    mine    where in a tile of a the warpgroup's rows begin, in elements
    """
    TILE_M, TILE_N, N_STAGES = shape.m, shape.n, shape.n_stages
    TILE_K, BY_ROW = ROW_BYTES // itemsize, by_row
    A_SIZE, STAGE = TILE_M * TILE_K, (TILE_M + TILE_N) * TILE_K
    END, AHEAD = N_STAGES * STAGE, N_STAGES - 2
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

    return multiply_rounded if itemsize == 4 else multiply_copied


def _kernel(shape, sources, itemsize):
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    N_SUMS, GROUP, BAND = TILE_N // 2, ROWS * (ROW_BYTES // itemsize), BAND_ROWS // TILE_M
    tiles = [
        tile(rows, itemsize, N_THREADS, source)
        for rows, source in zip((TILE_M, TILE_N), sources, strict=True)
    ]
    first_a, first_b = (each.first for each in tiles)
    multiply = product_of(shape, tiles, by_row_flags(sources, itemsize), itemsize)
    collect, write = sums_of(TILE_M, TILE_N, N_THREADS)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def warpgroup_kernel(a, b, bias, c, M, N, K, options):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = tiles_in_shared(a)
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        m, n = place_of_block(M, N, TILE_M, TILE_N, BAND)
        group = cuda.threadIdx.x // GROUP_THREADS
        multiply(acc, cache, a, b, first_a(m, M, K), first_b(n, N, K), K, group * GROUP)
        wait_for_products(acc, TILE_N)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc)
        cuda.syncthreads()
        write(sums, bias, c, m, n, M, N, options)

    return warpgroup_kernel


@functools.cache
def kernel_for(shape, sources, itemsize):
    """The `Kernel` of these choices, made once."""
    return make(shape, sources, itemsize)


@functools.lru_cache(maxsize=4096)
def chosen(M, N, K, itemsize, mode, sources, chip):
    """The `Kernel` for a product of this size on `chip`, or None: others serve better, or have to.

    mode     as `fragments` has it
    sources  how the inputs come, as `tiles` has it
    chip     as `launch.chip_of` gives it
    """
    capability, most_bytes = chip
    if capability != ONLY or mode == "split" or "any" in sources:
        return None
    shape = choose(M, N, K, itemsize, mode, sources)
    found = kernel_for(shape, sources, itemsize) if shape else None
    return found if found and found.shared_bytes <= most_bytes else None


def multiply(found, a, b, bias, c, M, N, K, options):
    """c[m, n] = Σ a[m, k]·b[n, k] over k by a `Kernel` that was `chosen`; `options` as ever."""
    kernel, shape, shared_bytes = found
    launch(
        kernel, n_blocks(shape, M, N), shape.n_threads, a, b, bias, c, M, N, K, options,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def kernels():
    """(mode, sources, `Kernel`) of all that there are, by how linear layers' inputs come."""
    for mode, itemsize in (("narrow", 2), ("tf32", 4)):
        for shape in SHAPES[itemsize]:
            for sources in SOURCES:
                yield mode, sources, kernel_for(shape, sources, itemsize)


def specialisations(dtypes):
    """(label, kernel, argument types) of all that `multiply` compiles; arrays as (dtype, 1)."""
    for mode, sources, (kernel, shape, _) in kernels():
        for dtype in dtypes:
            if (dtype == "float32") == (mode == "tf32"):
                name = f"tensor_core warpgroup {shape.m}x{shape.n} {'-'.join(sources)} {dtype}"
                yield name, kernel, [(dtype, 1)] * 4 + ["int64"] * 4
