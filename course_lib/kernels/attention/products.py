"""Many products at once: c[b, h] = Σ a[b, h]·b[b, h]ᵀ, each of a batch and of its heads.

Every matrix lies anywhere in memory (`Matrix`), so that transposed ones need no copies. The tiles
are those of the matrix product's `register_tiled`, smaller: 64 threads, each with 4×4 elements
of a 32×32 tile.
"""

import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import load, store

TILE, DEPTH, EACH = 32, 16, 4
PADDED = TILE + 1
SIDE = TILE // EACH
N_THREADS = SIDE * SIDE


class Matrix(NamedTuple):
    """Elements from one batch, head, row and column of an operand to the next."""

    batch: int
    head: int
    row: int
    col: int


class Products(NamedTuple):
    """What is multiplied: c[b, h] (M, N) = Σ over K, and over `n_terms` heads of a and b.

    Term g of head h takes head (h·n_terms + g) // a_share of a, and // b_share of b.
    """

    M: int
    N: int
    K: int
    n_heads: int
    n_terms: int
    a_share: int
    b_share: int


@cuda.jit(device=True)
def fetch(tile, x, at, first, n_rows, place, k, K):
    """tile[q, r] = x[first + r, k + q], and 0 beyond the edge: TILE rows, DEPTH columns."""
    for i in range(cuda.threadIdx.x, TILE * DEPTH, N_THREADS):
        r, q = (i // DEPTH, i % DEPTH) if place.col == 1 else (i % TILE, i // TILE)
        inside = first + r < n_rows and k + q < K
        x_at = at + (first + r) * place.row + (k + q) * place.col
        tile[q, r] = load(x, x_at) if inside else ZERO


@cuda.jit(device=True)
def multiply_tiles(part, a_tile, b_tile, i, j):
    """part = the product of both tiles: a sum of few terms, in which few digits are lost."""
    mine = cuda.local.array(EACH, np.float32)
    for u in range(EACH):
        for v in range(EACH):
            part[u, v] = ZERO
    for q in range(DEPTH):
        for u in range(EACH):
            mine[u] = a_tile[q, i + u * SIDE]
        for v in range(EACH):
            other = b_tile[q, j + v * SIDE]
            for u in range(EACH):
                part[u, v] += mine[u] * other


@cuda.jit
def batched_kernel(a, b, c, of, a_at, b_at, c_at):
    """A tile of one of the products a block.

    a, b, c           float32, float16 or bfloat16, flat; summed in float32
    of                `Products`
    a_at, b_at, c_at  `Matrix`; of b the rows are c's columns
    """
    a_tile = cuda.shared.array((DEPTH, PADDED), np.float32)
    b_tile = cuda.shared.array((DEPTH, PADDED), np.float32)
    sums = cuda.local.array((EACH, EACH), np.float32)
    part = cuda.local.array((EACH, EACH), np.float32)
    i, j = cuda.threadIdx.x // SIDE, cuda.threadIdx.x % SIDE
    across, down = (of.N + TILE - 1) // TILE, (of.M + TILE - 1) // TILE
    n, rest = cuda.blockIdx.x % across * TILE, cuda.blockIdx.x // across
    m, rest = rest % down * TILE, rest // down
    h, batch = rest % of.n_heads, rest // of.n_heads
    for u in range(EACH):
        for v in range(EACH):
            sums[u, v] = ZERO
    for term in range(h * of.n_terms, (h + 1) * of.n_terms):
        a_first = batch * a_at.batch + term // of.a_share * a_at.head
        b_first = batch * b_at.batch + term // of.b_share * b_at.head
        for k in range(0, of.K, DEPTH):
            fetch(a_tile, a, a_first, m, of.M, a_at, k, of.K)
            fetch(b_tile, b, b_first, n, of.N, b_at, k, of.K)
            cuda.syncthreads()
            multiply_tiles(part, a_tile, b_tile, i, j)
            for u in range(EACH):
                for v in range(EACH):
                    sums[u, v] += part[u, v]
            cuda.syncthreads()
    first = batch * c_at.batch + h * c_at.head
    for u in range(EACH):
        for v in range(EACH):
            row, col = m + i + u * SIDE, n + j + v * SIDE
            if row < of.M and col < of.N:
                store(c, first + row * c_at.row + col * c_at.col, sums[u, v])


def multiply(a, b, c, n_batches, of, a_at, b_at, c_at):
    """c[m, n] = Σ a[m, k]·b[n, k] for each of `n_batches` and heads. Returns `c`.

    a, b, c           the stretches of memory, one-dimensional, that the matrices lie in
    of                `Products`, with at least one element of c
    a_at, b_at, c_at  `Matrix`
    """
    n_blocks = n_batches * of.n_heads * math.ceil(of.M / TILE) * math.ceil(of.N / TILE)
    launch(batched_kernel, n_blocks, N_THREADS, a, b, c, of, a_at, b_at, c_at)
    return c


def specialisations(dtypes):
    """As an operation's: into float32 from each dtype, and from it and float32 into each."""
    numbers = [Products, Matrix, Matrix, Matrix]
    for dtype in dtypes:
        array, wide = (dtype, 1), ("float32", 1)
        yield f"batched {dtype}", batched_kernel, [array, array, wide, *numbers]
        if dtype != "float32":
            yield f"batched weights and {dtype}", batched_kernel, [wide, array, array, *numbers]
