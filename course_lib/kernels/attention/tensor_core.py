"""The rung `tensor_core`: FlashAttention-2 with `mma.sync`, for float16 and bfloat16.

A block has 64 queries, 16 for each of its warps, and walks over tiles of keys and values, which
come to shared memory while the tile before is worked on. A warp holds its queries, its scores and
its sums in registers, in fragments (`intrinsics.matrix`). Weights never leave them: two fragments
of scores, rounded to pairs, are what the next product takes as its left side.

A key that a query may not look at, in a tile with others, is multiplied by a weight of 0.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.problem import ALLOWED, BIAS, DROPOUT, SLOPES, SOFTCAP
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
from course_lib.kernels.blocks.mma.fragments import load_a, load_b
from course_lib.kernels.blocks.mma.tiles import tile
from course_lib.runtime.intrinsics import FULL_MASK, LOWEST, fast_exp, store
from course_lib.runtime.intrinsics.matrix import multiply_add
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared
from course_lib.runtime.intrinsics.words import as_word

ROWS, N_THREADS, ITEMSIZE = 64, 128, 2
FRAGMENT = 16  # rows of a warp
#: Bits of options that need a look at each score by itself.
BY_ELEMENT = SOFTCAP | SLOPES | BIAS | ALLOWED | DROPOUT


@cuda.jit(device=True)
def quad_max(value):
    """The largest of the four lanes that share a row."""
    value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, 1))
    return max(value, cuda.shfl_xor_sync(FULL_MASK, value, 2))


@cuda.jit(device=True)
def quad_sum(value):
    value += cuda.shfl_xor_sync(FULL_MASK, value, 1)
    return value + cuda.shfl_xor_sync(FULL_MASK, value, 2)


@functools.cache
def kernel_for(cols, depth, source, by_element):
    """(kernel for `cols` keys a tile, and D and E up to `depth`; its bytes of shared memory).

    source      "by_k" where rows begin on 16-byte boundaries, else "any" (`mma.tiles`)
    by_element  whether there are options of BY_ELEMENT
    """
    STEPS, N_QUERIES, N_SCORES, N_SUMS = depth // 16, depth // 4, cols // 2, depth // 2
    q_tile = tile(ROWS, depth * ITEMSIZE, ITEMSIZE, N_THREADS, source)
    k_tile = tile(cols, depth * ITEMSIZE, ITEMSIZE, N_THREADS, source)
    QUERIES, STAGE = 0, 2 * k_tile.size
    KEYS, VALUES = q_tile.size, q_tile.size + k_tile.size
    fetch_queries, fetch = q_tile.fetch, k_tile.fetch
    load_queries, load_keys = load_a(q_tile, source, ITEMSIZE), load_b(k_tile, source, ITEMSIZE)
    load_values = load_b(k_tile, "by_row", ITEMSIZE)  # a value's elements are the columns

    @cuda.jit(device=True)
    def multiply_keys(scores, queries, cache, at, lane, like):
        """scores = the warp's queries times the tile's keys."""
        words = cuda.local.array(4, np.uint32)
        for r in range(N_SCORES):
            scores[r] = ZERO
        for step in range(STEPS):
            for j in range(cols // 16):
                load_keys(words, 0, cache, at, j, step, lane)
                multiply_add(scores, 8 * j, queries, 4 * step, words, 0, like)
                multiply_add(scores, 8 * j + 4, queries, 4 * step, words, 2, like)

    @cuda.jit(device=True)
    def add_values(sums, scores, cache, at, lane, like):
        """sums += the weights in `scores` times the tile's values."""
        words, weights = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        for j in range(cols // 16):
            for r in range(4):
                weights[r] = as_word(like, scores, 8 * j + 2 * r)
            for e in range(depth // 16):
                load_values(words, 0, cache, at, e, j, lane)
                multiply_add(sums, 8 * e, weights, 0, words, 0, like)
                multiply_add(sums, 8 * e + 4, weights, 0, words, 2, like)

    @cuda.jit(device=True)
    def score_all(
        scores, shape, look, bias, allowed, slopes, b, h, i, j, beside, n_queries, n_keys
    ):
        """Turn products into scores: of the queries i and i + 8, and pairs of keys from j on."""
        for f in range(cols // 8):
            for r in range(4):
                query, key, score = i + r // 2 * 8, j + 8 * f + r % 2, LOWEST
                if is_seen(query, key, beside, n_queries, n_keys, look):
                    score = scores[4 * f + r] * look.scale
                    if by_element:
                        score, _ = capped(scores[4 * f + r], look)
                        score = masked(score, look, bias, allowed, slopes, b, h, query, key, beside)
                scores[4 * f + r] = score

    @cuda.jit(device=True)
    def scale_all(scores, look):
        for r in range(N_SCORES):
            scores[r] *= look.scale

    @cuda.jit(device=True)
    def weigh(scores, m, total, sums, shape, look, drop, b, h, i, j):
        """Turn scores into weights, and rescale what there is to the new maxima."""
        for half in range(2):
            largest = m[half]
            for f in range(cols // 8):
                place = 4 * f + 2 * half
                largest = max(largest, max(scores[place], scores[place + 1]))
            largest = quad_max(largest)
            correction = fast_exp(m[half] - largest) if m[half] != LOWEST else ZERO
            m[half] = largest
            total[half] *= correction
            for e in range(N_SUMS // 4):
                sums[4 * e + 2 * half] *= correction
                sums[4 * e + 2 * half + 1] *= correction
            for f in range(cols // 8):
                for r in range(2 * half, 2 * half + 2):
                    p = ZERO
                    if scores[4 * f + r] != LOWEST:
                        p = fast_exp(scores[4 * f + r] - largest)
                    total[half] += p
                    if by_element:
                        p *= kept(look, drop, shape, b, h, i + half * 8, j + 8 * f + r % 2)
                    scores[4 * f + r] = p

    @cuda.jit(device=True)
    def write(o, lse, at, step, place, m, total, sums, i, n_queries, n, lane):
        for half in range(2):
            whole, row = quad_sum(total[half]), i + half * 8
            factor = ONE / whole if whole != ZERO else ZERO
            if row < n_queries:
                for e in range(N_SUMS // 4):
                    for r in range(2):
                        col = 8 * e + lane % 4 * 2 + r
                        if col < n:
                            value = sums[4 * e + 2 * half + r] * factor
                            store(o, at + row * step + col, value)
                if lane % 4 == 0:
                    lse[place + row] = m[half] + math.log(whole) if whole != ZERO else LOWEST

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def tensor_core_kernel(
        q, k, v, bias, allowed, slopes, q_starts, k_starts, o, lse, shape, q_at, k_at, v_at, o_at,
        look, drop,
    ):  # fmt: skip
        """A tile of queries a block; the parameters are those of `streaming.streaming_kernel`."""
        cache = dynamic_shared(q)
        queries = cuda.local.array(N_QUERIES, np.uint32)
        scores, sums = cuda.local.array(N_SCORES, np.float32), cuda.local.array(N_SUMS, np.float32)
        m, total = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        tile, h, b = place_of_block((shape.T + ROWS - 1) // ROWS, shape)
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        # From the heaviest tile of a causal sequence on: who has most to do begins first.
        start = ((shape.T + ROWS - 1) // ROWS - 1 - tile) * ROWS
        mine = start + warp * FRAGMENT
        q_base = batch * q_at.batch + h * q_at.head + q_first * q_at.row
        k_base = batch * k_at.batch + h // shape.share * k_at.head + k_first * k_at.row
        v_base = batch * v_at.batch + h // shape.share * v_at.head + k_first * v_at.row
        for half in range(2):
            m[half], total[half] = LOWEST, ZERO
        for r in range(N_SUMS):
            sums[r] = ZERO
        j = first_key(start, beside, look) // cols * cols
        end = end_of_keys(min(start + ROWS, n_queries) - 1, beside, n_keys, look)
        fetch_queries(cache, QUERIES, q, start, n_queries, q_at.row, q_base, q_base + shape.D, 1)
        if j < end:
            fetch(cache, KEYS, k, j, n_keys, k_at.row, k_base, k_base + shape.D, 1)
            fetch(cache, VALUES, v, j, n_keys, v_at.row, v_base, v_base + shape.E, 1)
        end_group()
        wait_for_groups_but(0)
        cuda.syncthreads()
        for step in range(STEPS):
            load_queries(queries, 4 * step, cache, QUERIES, warp, step, lane)
        stage = 0
        while j < end:
            wait_for_groups_but(0)
            cuda.syncthreads()  # this tile is there, and nobody reads the other stage any more
            if j + cols < end:
                other = STAGE - stage
                fetch(
                    cache, KEYS + other, k, j + cols, n_keys, k_at.row, k_base, k_base + shape.D, 1
                )
                fetch(
                    cache, VALUES + other, v, j + cols, n_keys, v_at.row, v_base,
                    v_base + shape.E, 1,
                )  # fmt: skip
            end_group()
            multiply_keys(scores, queries, cache, KEYS + stage, lane, q)
            query, key = mine + lane // 4, j + lane % 4 * 2
            inside = j >= first_key(mine + FRAGMENT - 1, beside, look)
            inside = inside and j + cols <= end_of_keys(mine, beside, n_keys, look)
            if by_element or not inside:
                score_all(
                    scores, shape, look, bias, allowed, slopes, b, h, query, key, beside,
                    n_queries, n_keys,
                )  # fmt: skip
            else:
                scale_all(scores, look)
            weigh(scores, m, total, sums, shape, look, drop, b, h, query, key)
            add_values(sums, scores, cache, VALUES + stage, lane, q)
            stage = STAGE - stage
            j += cols
        place = (batch * shape.n_heads + h) * shape.rows + q_first
        at = batch * o_at.batch + h * o_at.head + q_first * o_at.row
        write(
            o, lse, at, o_at.row, place, m, total, sums, mine + lane // 4, n_queries, shape.E, lane
        )

    return tensor_core_kernel, ITEMSIZE * (q_tile.size + 4 * k_tile.size)
