"""Products with matrices of scores by tensor cores, float32, of all heads in one launch.

The pipeline is that of the matrix product (`gemm.tensor_core`): tiles pass through a ring of
buffers, and each product is three of TF32 (`mma.mainloop`). Matrices lie anywhere in memory, as
those of `products`, and what no query of a tile looks at is passed by: tiles of scores are not
computed, and sums over keys or queries begin and end where a window does.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.problem import Look, Shape
from course_lib.kernels.attention.products import Matrix, Products
from course_lib.kernels.attention.scores import end_of_keys, first_key, sequence
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma import fragments, mainloop
from course_lib.kernels.blocks.mma.shape import K_BYTES
from course_lib.kernels.blocks.mma.shape import Shape as Tiles
from course_lib.kernels.blocks.mma.tiles import PARTS, size, tile
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

FLOATS = 4  # bytes of a number
RESERVED = 1024  # bytes of shared memory that a kernel has of its own, from 9.0 on
#: What c is: scores; a sum over keys, of each query; a sum over queries, of each key.
SCORES, OF_QUERIES, OF_KEYS = range(3)
#: How a and b come (`mma.tiles`), by what c is; and of rows that begin anywhere.
SOURCES = ("by_k", "by_k"), ("by_k", "by_row"), ("by_row", "by_row")
ANYWHERE = "any", "any"
#: Tiles from large to small.
TILES = Tiles(64, 64, 2, 2, 4, 2), Tiles(32, 32, 2, 2, 4, 3)

#: Weights of so many keys beside those that a query looks at are multiplied, because others of its
#: tile look at them: a tile's rows, and what lies before the boundary that a sum begins on.
AROUND = TILES[0].m + K_BYTES // FLOATS


class Kernel(NamedTuple):
    kernel: object
    tiles: Tiles
    shared_bytes: int

    def n_blocks(self, M, N):
        """Tiles of c."""
        return math.ceil(M / self.tiles.m) * math.ceil(N / self.tiles.n)


def shared_bytes(tiles, sources):
    sides = zip((tiles.m, tiles.n), sources, strict=True)
    return tiles.n_stages * sum(size(m, K_BYTES, FLOATS, source)[0] for m, source in sides) * FLOATS


@functools.cache
def kernel_for(tiles, sources):
    """The `Kernel` of such tiles, of matrices that come as `sources` say."""
    a_tile, b_tile = (
        tile(side, K_BYTES, FLOATS, tiles.n_threads, source)
        for side, source in zip((tiles.m, tiles.n), sources, strict=True)
    )
    TILE_M, TILE_N, N_STAGES, TILE_K = tiles.m, tiles.n, tiles.n_stages, a_tile.k_size
    WARP_M, WARP_N, WARPS_N = tiles.m // tiles.warps_m, tiles.n // tiles.warps_n, tiles.warps_n
    A_SIZE, STAGE = a_tile.size, a_tile.size + b_tile.size
    A_ROW = 1 if sources[0] == "by_row" else a_tile.pitch
    B_ROW = 1 if sources[1] == "by_row" else b_tile.pitch
    N_A, N_B = WARP_M // fragments.FRAGMENT_M, WARP_N // fragments.FRAGMENT_N
    N_SUMS = 4 * N_A * N_B
    part_of_a, part_of_b = a_tile.fetch_part, b_tile.fetch_part
    first_a, first_b, next_a, next_b = (
        a_tile.first, b_tile.first, a_tile.following, b_tile.following,
    )  # fmt: skip
    AHEAD, _ = mainloop.timing("split", N_STAGES)

    @cuda.jit(device=True)
    def fetch(part, cache, work):
        a, b, of_a, of_b, to = work
        part_of_a(part, cache, to, a, of_a)
        part_of_b(part, cache, to + A_SIZE, b, of_b)

    loads = (
        fragments.load_a(a_tile, sources[0], FLOATS), fragments.load_b(b_tile, sources[1], FLOATS)
    )  # fmt: skip
    pipeline = mainloop.multiply(WARP_M, WARP_N, loads, "split", N_STAGES, fetch)
    begin, advance = pipeline.begin, pipeline.advance
    WORDS_A, WORDS_B, WORDS_C, WORDS_D = pipeline.n_words

    @cuda.jit(device=True)
    def walk(m, n, kind, of, shape, look, n_keys, beside):
        """(first k, one past the last, rows of b that are there) of what the tile's sums take.

        One past the last is -1 for scores at which nobody looks: they need not be written.
        """
        if kind == OF_KEYS:
            last = min(m + TILE_M, n_keys) - 1
            first = max(0, m - beside - look.high)
            end = min(of.K, last + 1 - beside - look.low) if last >= m else 0
        else:
            last = min(m + TILE_M, of.M) - 1
            first, end = first_key(m, beside, look), end_of_keys(last, beside, n_keys, look)
        if kind == SCORES:
            seen = n < end and n + TILE_N > first
            return 0, of.K if seen else -1, min(n_keys, of.N)
        return first // TILE_K * TILE_K, max(0, end), of.N  # from a boundary of vectors on

    @cuda.jit(launch_bounds=(tiles.n_threads, tiles.min_blocks))
    def score_products_kernel(a, b, c, lengths, kind, of, a_at, b_at, c_at, shape, look):
        """A tile of c[b, h] = Σ a[b, h]·b[b, h]ᵀ a block.

        a, b, c           float32, flat
        lengths           int32 (batches,): keys that are there, with the bit LENGTHS
        kind              SCORES, OF_QUERIES or OF_KEYS
        of                `Products`; a_at, b_at, c_at  `Matrix`; rows of c are next to one another
        shape, look       `problem.Shape`, `problem.Look`
        """
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = dynamic_shared(a)
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        words = (
            cuda.local.array(WORDS_A, np.uint32), cuda.local.array(WORDS_B, np.uint32),
            cuda.local.array(WORDS_C, np.uint32), cuda.local.array(WORDS_D, np.uint32),
        )  # fmt: skip
        across, down = (of.N + TILE_N - 1) // TILE_N, (of.M + TILE_M - 1) // TILE_M
        n, rest = cuda.blockIdx.x % across * TILE_N, cuda.blockIdx.x // across
        m, rest = rest % down * TILE_M, rest // down
        h, batch = rest % of.n_heads, rest // of.n_heads
        _, _, _, _, n_keys, beside = sequence(batch, shape, look, lengths, lengths)
        k_first, k_stop, n_rows = walk(m, n, kind, of, shape, look, n_keys, beside)
        if k_stop < 0:
            return
        n_tiles = (k_stop - k_first + TILE_K - 1) // TILE_K
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        row, col = warp // WARPS_N * WARP_M, warp % WARPS_N * WARP_N
        a_base, b_base = row * A_ROW, A_SIZE + col * B_ROW
        for term in range(h * of.n_terms, (h + 1) * of.n_terms if n_tiles > 0 else 0):
            a_h = a[batch * a_at.batch + term // of.a_share * a_at.head :]
            b_h = b[batch * b_at.batch + term // of.b_share * b_at.head :]
            of_a = first_a(m, of.M, a_at.row, k_first, k_stop, a_at.col)
            of_b = first_b(n, n_rows, b_at.row, k_first, k_stop, b_at.col)
            cuda.syncthreads()  # nobody reads the tiles of the term before any more
            for ahead in range(AHEAD):
                for part in range(PARTS):
                    fetch(part, cache, (a_h, b_h, of_a, of_b, ahead * STAGE))
                of_a, of_b = next_a(of_a), next_b(of_b)
                end_group()
            at, to = 0, AHEAD % N_STAGES * STAGE
            wait_for_groups_but(AHEAD - 1)
            cuda.syncthreads()
            begin(words, cache, a_base, b_base, lane)
            for _ in range(n_tiles):
                following = at + STAGE if at < (N_STAGES - 1) * STAGE else 0
                advance(
                    acc, words, cache, at + a_base, at + b_base, following + a_base,
                    following + b_base, lane, (a_h, b_h, of_a, of_b, to),
                )  # fmt: skip
                of_a, of_b = next_a(of_a), next_b(of_b)
                at, to = following, to + STAGE if to < (N_STAGES - 1) * STAGE else 0
            wait_for_groups_but(0)
        m, n = m + row + lane // 4, n + col + lane % 4 * 2
        place = batch * c_at.batch + h * c_at.head + m * c_at.row + n
        for i in range(N_A):
            for half in range(2):
                if m + 16 * i + 8 * half < of.M:
                    to = place + (16 * i + 8 * half) * c_at.row
                    for j in range(N_B):
                        for r in range(2):
                            if n + 8 * j + r < of.N:
                                c[to + 8 * j + r] = acc[4 * (i * N_B + j) + 2 * half + r]

    return Kernel(score_products_kernel, tiles, shared_bytes(tiles, sources))


class Plan(NamedTuple):
    """The `Kernel` of each kind of product: `scores`, `of_queries` and `of_keys`."""

    scores: Kernel
    of_queries: Kernel
    of_keys: Kernel


def plan(problem, chip):
    """The `Plan` for a `problem.Problem`: the largest tiles that leave no multiprocessor idle."""
    n_heads, n_groups, T, S = problem.n_heads, problem.n_groups, problem.T, problem.S
    width = max(problem.D, problem.E)

    def chosen(kind, n_heads, M, N):
        sources = SOURCES[kind] if problem.is_aligned else ANYWHERE
        kernels = [kernel_for(tiles, sources) for tiles in TILES]
        kernels = [k for k in kernels if k.shared_bytes + RESERVED <= chip.shared_bytes]
        busy = (k for k in kernels if n_heads * k.n_blocks(M, N) >= chip.multiprocessors)
        return next(busy, kernels[-1] if kernels else None)

    found = Plan(
        chosen(SCORES, n_heads, T, S), chosen(OF_QUERIES, n_heads, T, width),
        chosen(OF_KEYS, n_groups, S, width),
    )  # fmt: skip
    if None in found:
        return Refusal("needs more shared memory for its smallest tiles than this GPU has")
    return found


def pitch(n_keys):
    """Elements from one row of scores to the next: rows begin on 16-byte boundaries."""
    width = VECTOR_BYTES // FLOATS
    return math.ceil(n_keys / width) * width


def multiply(plan, request, kind, a, b, c, of, a_at, b_at, c_at):
    """c[m, n] = Σ a[m, k]·b[n, k] of each head, where somebody looks. Returns `c`.

    plan, kind  `Plan`, and what c is
    a, b, c, of, a_at, b_at, c_at  as of `products.multiply`
    """
    kernel, _, n_bytes = plan[kind]
    n_blocks = request.B * of.n_heads * plan[kind].n_blocks(of.M, of.N)
    launch(
        kernel, n_blocks, plan[kind].tiles.n_threads, a, b, c, request.read()[-1], kind, of, a_at,
        b_at, c_at, request.shape, request.look(), shared_bytes=n_bytes, overlap=True,
    )  # fmt: skip
    return c


def kernels():
    """(label, kernel) of all that `multiply` may launch."""
    for tiles in TILES:
        for sources in (*SOURCES, ANYWHERE):
            label = f"score products {tiles.m}x{tiles.n} {'-'.join(sources)} float32"
            yield label, kernel_for(tiles, sources).kernel


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    floats = ("float32", 1)
    types = [floats, floats, floats, ("int32", 1), "int64", Products, *[Matrix] * 3, Shape, Look]
    for label, kernel in kernels():
        yield f"tensor_core {label}", kernel, types
