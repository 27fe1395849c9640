"""The backward pass of the rung `tensor_core`: `mma.sync`, for float16 and bfloat16.

The three kernels of `tiled_backward`, whose delta is the same. A block holds a tile of 64 rows of
two matrices, (k, v) or (q, do), 16 rows for each warp, and walks over tiles of the other two. With
keys as rows a warp has scores and their gradients transposed, so that in either kernel weights and
gradients leave the registers no more than forwards: rounded to pairs, they are the left side of
the next product.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.problem import DSCORES, PACKED
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
from course_lib.kernels.attention.tensor_core import FRAGMENT, ITEMSIZE, N_THREADS, ROWS
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.mma.fragments import load_a, load_b
from course_lib.kernels.blocks.mma.tiles import tile
from course_lib.runtime.intrinsics import LOWEST, fast_exp, store
from course_lib.runtime.intrinsics.matrix import multiply_add
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared
from course_lib.runtime.intrinsics.words import as_word


@functools.cache
def kernels_for(cols, depth, source, by_element):
    """(kernel of dk and dv, kernel of dq, bytes of shared memory of either).

    cols  rows of a tile that comes by; `depth`, `source`, `by_element` as of `tensor_core`
    """
    STEPS, N_SCORES, N_SUMS = depth // 16, cols // 2, depth // 2
    held, passing = (tile(n, depth * 2, ITEMSIZE, N_THREADS, source) for n in (ROWS, cols))
    FIRST, SECOND, SIZE, STAGE = 0, held.size, passing.size, 2 * passing.size
    PASSING, PASSING_SECOND = 2 * held.size, 2 * held.size + passing.size
    hold, fetch = held.fetch, passing.fetch
    load_held, load_passing = load_a(held, source, ITEMSIZE), load_b(passing, source, ITEMSIZE)
    load_turned = load_b(passing, "by_row", ITEMSIZE)  # the elements of a row are the columns

    @cuda.jit(device=True)
    def clear(sums):
        for r in range(N_SUMS):
            sums[r] = ZERO

    @cuda.jit(device=True)
    def multiply(scores, cache, mine, others, warp, lane, like):
        """scores = the warp's rows of the tile at `mine` times the rows of the one at `others`."""
        left, right = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        for r in range(N_SCORES):
            scores[r] = ZERO
        for step in range(STEPS):
            load_held(left, 0, cache, mine, warp, step, lane)
            for j in range(cols // 16):
                load_passing(right, 0, cache, others, j, step, lane)
                multiply_add(scores, 8 * j, left, 0, right, 0, like)
                multiply_add(scores, 8 * j + 4, left, 0, right, 2, like)

    @cuda.jit(device=True)
    def accumulate(sums, scores, cache, others, lane, like):
        """sums += `scores` times the tile at `others`."""
        left, right = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        for j in range(cols // 16):
            for r in range(4):
                left[r] = as_word(like, scores, 8 * j + 2 * r)
            for e in range(depth // 16):
                load_turned(right, 0, cache, others, e, j, lane)
                multiply_add(sums, 8 * e, left, 0, right, 0, like)
                multiply_add(sums, 8 * e + 4, left, 0, right, 2, like)

    @cuda.jit(device=True)
    def weigh(
        scores, g, r, lse, delta, row, shape, look, drop, bias, allowed, slopes, dscores, b, h, i,
        j, beside, n_queries, n_keys,
    ):  # fmt: skip
        """Of query i and key j: scores[r] becomes the weight, g[r] the gradient of the score."""
        weight, gradient = ZERO, ZERO
        if is_seen(i, j, beside, n_queries, n_keys, look):
            score, slope, factor = scores[r] * look.scale, ONE, ONE
            if by_element:
                score, slope = capped(scores[r], look)
                score = masked(score, look, bias, allowed, slopes, b, h, i, j, beside)
                factor = kept(look, drop, shape, b, h, i, j)
            if score != LOWEST:
                weight = fast_exp(score - lse[row + i])
                gradient = weight * (g[r] * factor - delta[row + i])
                if look.bits & DSCORES:
                    dscores[((b * shape.n_heads + h) * shape.T + i) * shape.S + j] = gradient
                weight, gradient = weight * factor, gradient * slope
        scores[r], g[r] = weight, gradient

    @cuda.jit(device=True)
    def write(x, at, step, sums, factor, row, n_rows, n, lane):
        """The warp's sums: of the rows `row` and `row` + 8, pairs of elements."""
        for e in range(N_SUMS // 4):
            for r in range(4):
                place, col = row + r // 2 * 8, 8 * e + lane % 4 * 2 + r % 2
                if place < n_rows and col < n:
                    store(x, at + place * step + col, sums[4 * e + r] * factor)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def keys_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, shape, do_at,
        q_at, k_at, v_at, dk_at, dv_at, look, drop,
    ):  # fmt: skip
        """dk and dv: a tile of keys a block; parameters as of `tiled_backward`'s `keys_kernel`."""
        cache = dynamic_shared(q)
        scores, g = cuda.local.array(N_SCORES, np.float32), cuda.local.array(N_SCORES, np.float32)
        dkeys, dvalues = cuda.local.array(N_SUMS, np.float32), cuda.local.array(N_SUMS, np.float32)
        n_tiles, n_groups = (shape.S + ROWS - 1) // ROWS, shape.n_heads // shape.share
        start, rest = cuda.blockIdx.x % n_tiles * ROWS, cuda.blockIdx.x // n_tiles
        group, b = rest % n_groups, rest // n_groups
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        at = batch * k_at.batch + group * k_at.head + k_first * k_at.row
        hold(cache, FIRST, k, start, n_keys, k_at.row, at, at + shape.D, 1)
        at = batch * v_at.batch + group * v_at.head + k_first * v_at.row
        hold(cache, SECOND, v, start, n_keys, v_at.row, at, at + shape.E, 1)
        clear(dkeys)
        clear(dvalues)
        key, stage = start + warp * FRAGMENT + lane // 4, 0
        first = max(0, start - beside - look.high) // cols * cols
        end = min(n_queries, min(start + ROWS, n_keys) - beside - look.low)
        # Tiles of queries of all heads that share these keys, one after another.
        n_walks = max(0, (end - first + cols - 1) // cols)
        for walk in range(-1, n_walks * shape.share):
            if walk >= 0:
                wait_for_groups_but(0)
                cuda.syncthreads()  # this tile is there, and nobody reads the other stage any more
            coming = walk + 1
            if coming < n_walks * shape.share:
                h, i = group * shape.share + coming // n_walks, first + coming % n_walks * cols
                base = PASSING + coming % 2 * STAGE
                at = batch * q_at.batch + h * q_at.head + q_first * q_at.row
                fetch(cache, base, q, i, n_queries, q_at.row, at, at + shape.D, 1)
                at, base = batch * do_at.batch + h * do_at.head, base + SIZE
                at += q_first * do_at.row
                fetch(cache, base, do, i, n_queries, do_at.row, at, at + shape.E, 1)
            end_group()
            if walk >= 0:
                stage, h = walk % 2 * STAGE, group * shape.share + walk // n_walks
                row = (batch * shape.n_heads + h) * shape.rows + q_first
                query = first + walk % n_walks * cols + lane % 4 * 2
                multiply(scores, cache, FIRST, PASSING + stage, warp, lane, q)
                multiply(g, cache, SECOND, PASSING_SECOND + stage, warp, lane, q)
                for r in range(N_SCORES):
                    weigh(
                        scores, g, r, lse, delta, row, shape, look, drop, bias, allowed, slopes,
                        delta, b, h, query + r // 4 * 8 + r % 2, key + r // 2 % 2 * 8, beside,
                        n_queries, n_keys,
                    )  # fmt: skip
                accumulate(dvalues, scores, cache, PASSING_SECOND + stage, lane, q)
                accumulate(dkeys, g, cache, PASSING + stage, lane, q)
        n_written = n_keys if look.bits & PACKED else shape.S  # padding gets 0
        at = batch * dk_at.batch + group * dk_at.head + k_first * dk_at.row
        write(dk, at, dk_at.row, dkeys, look.scale, key, n_written, shape.D, lane)
        at = batch * dv_at.batch + group * dv_at.head + k_first * dv_at.row
        write(dv, at, dv_at.row, dvalues, ONE, key, n_written, shape.E, lane)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def queries_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dq, dscores, shape,
        do_at, q_at, k_at, v_at, dq_at, look, drop,
    ):  # fmt: skip
        """dq: a tile of queries a block; parameters as of `tiled_backward`'s `queries_kernel`."""
        cache = dynamic_shared(q)
        scores, g = cuda.local.array(N_SCORES, np.float32), cuda.local.array(N_SCORES, np.float32)
        dqueries = cuda.local.array(N_SUMS, np.float32)
        tile, h, b = place_of_block((shape.T + ROWS - 1) // ROWS, shape)
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp, start = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32, tile * ROWS
        at = batch * q_at.batch + h * q_at.head + q_first * q_at.row
        hold(cache, FIRST, q, start, n_queries, q_at.row, at, at + shape.D, 1)
        at = batch * do_at.batch + h * do_at.head + q_first * do_at.row
        hold(cache, SECOND, do, start, n_queries, do_at.row, at, at + shape.E, 1)
        clear(dqueries)
        row = (batch * shape.n_heads + h) * shape.rows + q_first
        query = start + warp * FRAGMENT + lane // 4
        k_base = batch * k_at.batch + h // shape.share * k_at.head + k_first * k_at.row
        v_base = batch * v_at.batch + h // shape.share * v_at.head + k_first * v_at.row
        first = first_key(start, beside, look) // cols * cols
        end = end_of_keys(min(start + ROWS, n_queries) - 1, beside, n_keys, look)
        for j in range(first - cols, end, cols):
            if j >= first:
                wait_for_groups_but(0)
                cuda.syncthreads()  # this tile is there, and nobody reads the other stage any more
            coming = j + cols
            if coming < end:
                base = PASSING + coming // cols % 2 * STAGE
                fetch(cache, base, k, coming, n_keys, k_at.row, k_base, k_base + shape.D, 1)
                base += SIZE
                fetch(cache, base, v, coming, n_keys, v_at.row, v_base, v_base + shape.E, 1)
            end_group()
            if j >= first:
                stage = j // cols % 2 * STAGE
                multiply(scores, cache, FIRST, PASSING + stage, warp, lane, q)
                multiply(g, cache, SECOND, PASSING_SECOND + stage, warp, lane, q)
                for r in range(N_SCORES):
                    weigh(
                        scores, g, r, lse, delta, row, shape, look, drop, bias, allowed, slopes,
                        dscores, b, h, query + r // 2 % 2 * 8,
                        j + lane % 4 * 2 + r // 4 * 8 + r % 2, beside, n_queries, n_keys,
                    )  # fmt: skip
                accumulate(dqueries, g, cache, PASSING + stage, lane, q)
        at = batch * dq_at.batch + h * dq_at.head + q_first * dq_at.row
        write(dq, at, dq_at.row, dqueries, look.scale, query, n_queries, shape.D, lane)

    n_elements = 2 * held.size + 4 * passing.size
    return keys_kernel, queries_kernel, ITEMSIZE * n_elements
