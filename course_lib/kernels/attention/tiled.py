"""The rung `tiled`: FlashAttention in float32, with tiles in shared memory (Dao et al., 2022).

A block has a tile of queries and walks over the tiles of keys and values. Its 16 × 16 threads take
the rows ty, ty + 16, … of the tile, and of each row the columns tx, tx + 16, …; so the 16 threads
of one ty find the maximum and the sum of a row by shuffles. Keys and values of a tile use one
buffer, one after the other.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.scores import (
    capped,
    end_of_keys,
    first_key,
    is_seen,
    kept,
    masked,
    place_of_block,
    sequence,
)
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.runtime.intrinsics import FULL_MASK, LOWEST, load, store

SIDE = 16  # threads of a block either way
N_THREADS = SIDE * SIDE
PART = 8  # terms of a product that are added up by themselves
UNSEEN = np.float32(-1)  # stands for a weight: this key takes no part, whatever its value is


@cuda.jit(device=True)
def load_tile(shared, base, pitch, x, at, step, n_rows, n_cols, tile_rows, tile_cols):
    """shared[base + r·pitch + c] = x[at + r·step + c], and 0 beyond n_rows and n_cols."""
    for i in range(cuda.threadIdx.x, tile_rows * tile_cols, N_THREADS):
        r, c = i // tile_cols, i % tile_cols
        inside = r < n_rows and c < n_cols
        shared[base + r * pitch + c] = load(x, at + r * step + c) if inside else ZERO


@cuda.jit(device=True)
def row_max(value):
    """The largest of a row of threads; NaN is passed over, and comes back with the weights."""
    for step in (8, 4, 2, 1):
        value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, step))
    return value


@cuda.jit(device=True)
def row_sum(value):
    for step in (8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL_MASK, value, step)
    return value


@functools.cache
def products(rows, cols, depth):
    """Device functions for tiles of `rows` × `cols`, whose rows are `depth` numbers in pitch."""
    EACH_ROW, EACH_COL, PITCH = rows // SIDE, cols // SIDE, depth + 1

    @cuda.jit(device=True)
    def multiply(sums, shared, a, b, n):
        """sums[u, w] = Σ a[ty + 16·u, d]·b[tx + 16·w, d] over d < n."""
        part = cuda.local.array((EACH_ROW, EACH_COL), np.float32)
        tx, ty = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
        for u in range(EACH_ROW):
            for w in range(EACH_COL):
                sums[u, w] = ZERO
        for start in range(0, n, PART):  # sums of few terms first: fewer digits are lost
            for u in range(EACH_ROW):
                for w in range(EACH_COL):
                    part[u, w] = ZERO
            for d in range(start, min(n, start + PART)):
                for u in range(EACH_ROW):
                    mine = shared[a + (ty + u * SIDE) * PITCH + d]
                    for w in range(EACH_COL):
                        part[u, w] += mine * shared[b + (tx + w * SIDE) * PITCH + d]
            for u in range(EACH_ROW):
                for w in range(EACH_COL):
                    sums[u, w] += part[u, w]

    @cuda.jit(device=True)
    def accumulate(sums, shared, weights, factors, b, n):
        """sums[u, e] += Σ factors[ty + 16·u, j]·b[j, tx + 16·e] over j that `weights` see."""
        tx, ty = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
        for j in range(cols):
            for u in range(EACH_ROW):
                place = (ty + u * SIDE) * (cols + 1) + j
                if not shared[weights + place] < ZERO:
                    factor = shared[factors + place]
                    for e in range(depth // SIDE):
                        if tx + e * SIDE < n:
                            sums[u, e] += factor * shared[b + j * PITCH + tx + e * SIDE]

    return multiply, accumulate


@functools.cache
def kernel_for(rows, cols, depth):
    """(kernel for `rows` queries and `cols` keys a tile, and D and E up to `depth`; its bytes)."""
    EACH_ROW, EACH_COL, PITCH, WIDTH = rows // SIDE, cols // SIDE, depth + 1, depth // SIDE
    KEYS, WEIGHTS = rows * PITCH, (rows + cols) * PITCH
    multiply, accumulate = products(rows, cols, depth)

    @cuda.jit(device=True)
    def score_tile(
        scores, shape, look, bias, allowed, slopes, b, h, i, j, beside, n_queries, n_keys
    ):
        """Turn products into scores of the queries from i and keys from j on."""
        for u in range(EACH_ROW):
            for w in range(EACH_COL):
                query, key = i + u * SIDE, j + w * SIDE
                score = LOWEST
                if is_seen(query, key, beside, n_queries, n_keys, look):
                    score, _ = capped(scores[u, w], look)
                    score = masked(score, look, bias, allowed, slopes, b, h, query, key, beside)
                scores[u, w] = score

    @cuda.jit(device=True)
    def weigh(scores, m, total, sums, shared, shape, look, drop, b, h, i, j):
        """Rescale what there is to the new maxima, and leave the tile's weights in memory."""
        tx, ty = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
        for u in range(EACH_ROW):
            largest = m[u]
            for w in range(EACH_COL):
                largest = max(largest, scores[u, w])
            largest = row_max(largest)
            correction = math.exp(m[u] - largest) if m[u] != LOWEST else ZERO
            m[u] = largest
            total[u] *= correction
            for e in range(WIDTH):
                sums[u, e] *= correction
            for w in range(EACH_COL):
                p, seen = scores[u, w], UNSEEN
                if p != LOWEST:
                    p = math.exp(p - largest)
                    total[u] += p
                    seen = p * kept(look, drop, shape, b, h, i + u * SIDE, j + w * SIDE)
                shared[WEIGHTS + (ty + u * SIDE) * (cols + 1) + tx + w * SIDE] = seen

    @cuda.jit(device=True)
    def write(o, lse, at, step, place, m, total, sums, i, n_queries, n):
        tx = cuda.threadIdx.x % SIDE
        for u in range(EACH_ROW):
            whole = row_sum(total[u])
            factor = ONE / whole if whole != ZERO else ZERO
            if i + u * SIDE < n_queries:
                for e in range(WIDTH):
                    if tx + e * SIDE < n:
                        store(o, at + (i + u * SIDE) * step + tx + e * SIDE, sums[u, e] * factor)
                if tx == 0:
                    found = m[u] + math.log(whole) if whole != ZERO else LOWEST
                    lse[place + i + u * SIDE] = found

    @cuda.jit
    def tiled_kernel(
        q, k, v, bias, allowed, slopes, q_starts, k_starts, o, lse, shape, q_at, k_at, v_at, o_at,
        look, drop,
    ):  # fmt: skip
        """A tile of queries a block; the parameters are those of `streaming.streaming_kernel`."""
        shared = cuda.shared.array(0, np.float32)
        scores = cuda.local.array((EACH_ROW, EACH_COL), np.float32)
        sums = cuda.local.array((EACH_ROW, WIDTH), np.float32)
        m, total = cuda.local.array(EACH_ROW, np.float32), cuda.local.array(EACH_ROW, np.float32)
        tile, h, b = place_of_block((shape.T + rows - 1) // rows, shape)
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        start, tx, ty = tile * rows, cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
        queries = batch * q_at.batch + h * q_at.head + q_first * q_at.row
        keys = batch * k_at.batch + h // shape.share * k_at.head + k_first * k_at.row
        values = batch * v_at.batch + h // shape.share * v_at.head + k_first * v_at.row
        load_tile(
            shared, 0, PITCH, q, queries + start * q_at.row, q_at.row, n_queries - start, shape.D,
            rows, depth,
        )  # fmt: skip
        for u in range(EACH_ROW):
            m[u], total[u] = LOWEST, ZERO
            for e in range(WIDTH):
                sums[u, e] = ZERO
        end = end_of_keys(min(start + rows, n_queries) - 1, beside, n_keys, look)
        for j in range(first_key(start, beside, look) // cols * cols, end, cols):
            load_tile(
                shared, KEYS, PITCH, k, keys + j * k_at.row, k_at.row, n_keys - j, shape.D, cols,
                depth,
            )  # fmt: skip
            cuda.syncthreads()
            multiply(scores, shared, 0, KEYS, shape.D)
            score_tile(
                scores, shape, look, bias, allowed, slopes, b, h, start + ty, j + tx, beside,
                n_queries, n_keys,
            )  # fmt: skip
            weigh(scores, m, total, sums, shared, shape, look, drop, b, h, start + ty, j + tx)
            cuda.syncthreads()  # nobody reads these keys any more
            load_tile(
                shared, KEYS, PITCH, v, values + j * v_at.row, v_at.row, n_keys - j, shape.E, cols,
                depth,
            )  # fmt: skip
            cuda.syncthreads()
            accumulate(sums, shared, WEIGHTS, WEIGHTS, KEYS, shape.E)
            cuda.syncthreads()  # nor these values
        place = (batch * shape.n_heads + h) * shape.rows + q_first
        at = batch * o_at.batch + h * o_at.head + q_first * o_at.row
        write(o, lse, at, o_at.row, place, m, total, sums, start + ty, n_queries, shape.E)

    return tiled_kernel, 4 * ((rows + cols) * PITCH + rows * (cols + 1))
