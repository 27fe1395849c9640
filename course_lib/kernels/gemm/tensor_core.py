"""Products of matrices by tensor cores, a tile of c by each block.

Tiles of `a` and `b` pass through a ring of buffers in shared memory: while one is multiplied, the
next ones are on their way. One barrier for each tile: behind it everybody's copies of this tile
have arrived, and nobody reads the buffer any more that is filled next.

Where c has too few tiles to keep the chip busy, k is dealt out too, to `n_splits` blocks for each
tile. If they are a cluster they add up their sums themselves, from each other's shared memory; else
they write them to global memory, and `split.finish_kernel` adds them up. The order is fixed.
"""

import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma import fragments, mainloop
from course_lib.kernels.blocks.mma.epilogue import CLUSTER
from course_lib.kernels.blocks.mma.results import SUMS_PADDING, results
from course_lib.kernels.blocks.mma.shape import K_BYTES, Shape
from course_lib.kernels.blocks.mma.tiles import PARTS, size, tile
from course_lib.kernels.gemm.place import place_of_block
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.cluster import cluster_sync
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

#: Elements of an input by elements that a thread has on their way, and rows of the largest tiles
#: that have so many: blocks with larger ones have no registers left.
HELD, MOST_HELD = 32, {2: 64, 4: 32}


class Kernel(NamedTuple):
    kernel: object
    shape: Shape
    shared_bytes: int


def make(shape, sources, itemsize, mode, in_planes=False):
    """The `Kernel` for matrices that come as `sources` say (`mma.tiles`), multiplied in `mode`.

    `in_planes`: see `planes`.
    """
    sides = shape.m, shape.n
    held = min(HELD, max(sides) // 2) if max(sides) <= MOST_HELD[itemsize] else 0
    a_tile, b_tile = (
        tile(side, K_BYTES, itemsize, shape.n_threads, source, held)
        for side, source in zip(sides, sources, strict=True)
    )
    kernel = _kernel(shape, sources, itemsize, mode, a_tile, b_tile, in_planes)
    return Kernel(kernel, shape, shared_bytes(shape, sources, itemsize))


def shared_bytes(shape, sources, itemsize):
    """Bytes of a block's buffers, in which its sums lie at the end."""
    sides = zip((shape.m, shape.n), sources, strict=True)
    stage = sum(size(side, K_BYTES, itemsize, source)[0] for side, source in sides) * itemsize
    return max(stage * shape.n_stages, shape.m * (shape.n + SUMS_PADDING) * 4)


def _kernel(shape, sources, itemsize, mode, a_tile, b_tile, IN_PLANES):
    TILE_M, TILE_N, N_STAGES, TILE_K = shape.m, shape.n, shape.n_stages, a_tile.k_size
    WARP_M, WARP_N, WARPS_N = shape.m // shape.warps_m, shape.n // shape.warps_n, shape.warps_n
    A_SIZE, STAGE = a_tile.size, a_tile.size + b_tile.size
    A_ROW = 1 if sources[0] == "by_row" else a_tile.pitch
    B_ROW = 1 if sources[1] == "by_row" else b_tile.pitch
    N_SUMS = WARP_M * WARP_N // 32
    part_of_a, part_of_b = a_tile.fetch_part, b_tile.fetch_part
    first_a, first_b, next_a, next_b = (
        a_tile.first, b_tile.first, a_tile.following, b_tile.following,
    )  # fmt: skip
    AHEAD, _ = mainloop.timing(mode, N_STAGES)

    @cuda.jit(device=True)
    def fetch(part, cache, work):
        a, b, of_a, of_b, to = work
        part_of_a(part, cache, to, a, of_a)
        part_of_b(part, cache, to + A_SIZE, b, of_b)

    loads = (
        fragments.load_a(a_tile, sources[0], itemsize),
        fragments.load_b(b_tile, sources[1], itemsize),
    )
    pipeline = mainloop.multiply(WARP_M, WARP_N, loads, mode, N_STAGES, fetch)
    begin, advance = pipeline.begin, pipeline.advance
    WORDS_A, WORDS_B, WORDS_C, WORDS_D = pipeline.n_words
    collect, write = results(
        TILE_M, TILE_N, WARP_M, WARP_N, shape.n_threads, mode == "split", IN_PLANES
    )

    @cuda.jit(launch_bounds=(shape.n_threads, shape.min_blocks))
    def tensor_core_kernel(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options, n_splits, length):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = dynamic_shared(a)
        if IN_PLANES:
            image = np.int64(cuda.blockIdx.y)
            b, c = b[image * K * N :], c[image * M * N :]
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        words = (
            cuda.local.array(WORDS_A, np.uint32), cuda.local.array(WORDS_B, np.uint32),
            cuda.local.array(WORDS_C, np.uint32), cuda.local.array(WORDS_D, np.uint32),
        )  # fmt: skip
        m, n, split = place_of_block(M, N, TILE_M, TILE_N, n_splits)
        k, k_stop = split * length, min((split + 1) * length, K)
        n_tiles = (k_stop - k + TILE_K - 1) // TILE_K
        of_a, of_b = first_a(m, M, a_m, k, k_stop, a_k), first_b(n, N, b_n, k, k_stop, b_k)
        for ahead in range(AHEAD):
            for part in range(PARTS):
                fetch(part, cache, (a, b, of_a, of_b, ahead * STAGE))
            of_a, of_b = next_a(of_a), next_b(of_b)
            end_group()
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        row, col = warp // WARPS_N * WARP_M, warp % WARPS_N * WARP_N
        a_base, b_base, at, to = row * A_ROW, A_SIZE + col * B_ROW, 0, AHEAD % N_STAGES * STAGE
        wait_for_groups_but(AHEAD - 1)
        cuda.syncthreads()
        begin(words, cache, a_base, b_base, lane)
        for _ in range(n_tiles):
            following = at + STAGE if at < (N_STAGES - 1) * STAGE else 0
            advance(
                acc, words, cache, at + a_base, at + b_base, following + a_base,
                following + b_base, lane, (a, b, of_a, of_b, to),
            )  # fmt: skip
            of_a, of_b = next_a(of_a), next_b(of_b)
            at, to = following, to + STAGE if to < (N_STAGES - 1) * STAGE else 0
        wait_for_groups_but(0)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc, row, col, lane)
        base = split * M * N
        if options & CLUSTER:  # whose blocks have the other parts of k
            base, k, k_stop = 0, 0, K
            cluster_sync()
        else:
            cuda.syncthreads()
        write(sums, a, b, bias, c, m, n, M, N, k, k_stop, base, a_m, a_k, b_n, b_k, options)
        if options & CLUSTER:
            cluster_sync()  # nobody reads this block's sums any more

    return tensor_core_kernel


def n_blocks(shape, M, N):
    """Tiles of c."""
    return math.ceil(M / shape.m) * math.ceil(N / shape.n)
