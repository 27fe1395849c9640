"""The backward pass of the rung `tensor_core`, for float16 and bfloat16.

The three kernels of `tiled_backward`, whose delta is the same. A block holds a tile of two
matrices, (k, v) or (q, do), some rows for each warp, and walks over tiles of the other two. With
keys as rows a warp has scores and their gradients transposed, so that in either kernel weights and
gradients leave the registers no more than forwards.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.multiplying import FRAGMENT, ITEMSIZE
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
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.softmax_formulas import LOG2_E
from course_lib.runtime.intrinsics import LOWEST, store
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.special import fast_exp2


@functools.cache
def kernels_for(make, cols, depth, by_element, *how):
    """(kernel of dk and dv, kernel of dq, the `Unit`, bytes of shared memory of either).

    cols  rows of a tile that comes by; the rest as of `tensor_core.kernel_for`
    """
    unit = make(cols, depth, *how)
    ROWS, N_THREADS, WARP_ROWS = unit.rows, unit.n_threads, FRAGMENT * unit.fragments
    N_SCORES, N_SUMS, N_ROWS = cols // 2, depth // 2, 2 * unit.fragments
    ALL_SCORES, ALL_SUMS = N_SCORES * unit.fragments, N_SUMS * unit.fragments
    SECOND, SIZE, STAGE = unit.held_size, unit.passing_size, 2 * unit.passing_size
    PASSING, PASSING_SECOND = 2 * unit.held_size, 2 * unit.held_size + unit.passing_size
    shared, hold, fetch, show = unit.shared, unit.hold, unit.fetch, unit.show
    multiply, finish_scores = unit.multiply, unit.finish_scores
    accumulate, finish_sums = unit.accumulate, unit.finish_sums

    @cuda.jit(device=True)
    def clear(sums):
        for r in range(ALL_SUMS):
            sums[r] = ZERO

    @cuda.jit(device=True)
    def weigh(scores, g, r, lse, delta, factor):
        """scores[r] becomes the weight, g[r] the gradient of the score."""
        weight = fast_exp2(scores[r] * factor - lse * LOG2_E)
        scores[r], g[r] = weight, weight * (g[r] - delta)

    @cuda.jit(device=True)
    def weigh_each(
        scores, g, by_query, lse, delta, row, shape, look, drop, bias, allowed, slopes, dscores, b,
        h, i, j, beside, n_queries, n_keys,
    ):  # fmt: skip
        """As `weigh`, with all options, of the warp's scores. Those move up as in `tensor_core`.

        by_query  queries are the rows: these are i, i + 8 …, and pairs of keys from j on
        """
        four, gradients = cuda.local.array(4, np.float32), cuda.local.array(4, np.float32)
        for n in range(ALL_SCORES // 4):
            rows, columns = n // (cols // 8) * 16, n % (cols // 8) * 8
            for r in range(4):
                a, c = rows + r // 2 * 8, columns + r % 2
                query, key = (i + a, j + c) if by_query else (i + c, j + a)
                weight, gradient = ZERO, ZERO
                if is_seen(query, key, beside, n_queries, n_keys, look):
                    score, slope = capped(scores[r], look)
                    score = masked(score, look, bias, allowed, slopes, b, h, query, key, beside)
                    times = kept(look, drop, shape, b, h, query, key)
                    if score != LOWEST:
                        weight = fast_exp2((score - lse[row + query]) * LOG2_E)
                        gradient = weight * (g[r] * times - delta[row + query])
                        if look.bits & DSCORES:
                            element = ((b * shape.n_heads + h) * shape.T + query) * shape.S + key
                            dscores[element] = gradient
                        weight, gradient = weight * times, gradient * slope
                four[r], gradients[r] = weight, gradient
            for r in range(ALL_SCORES - 4):
                scores[r], g[r] = scores[r + 4], g[r + 4]
            for r in range(4):
                scores[ALL_SCORES - 4 + r], g[ALL_SCORES - 4 + r] = four[r], gradients[r]

    @cuda.jit(device=True)
    def hide(scores, g, half, first, end):
        """Of a row, all but the columns from `first` to `end` are not looked at."""
        first, end = np.int32(min(max(first, -1), cols)), np.int32(min(max(end, 0), cols))
        for f in range(cols // 8):
            for r in range(2):
                if 8 * f + r < first or 8 * f + r >= end:
                    place = N_SCORES * (half // 2) + 4 * f + half % 2 * 2 + r
                    scores[place], g[place] = LOWEST, ZERO

    @cuda.jit(device=True)
    def row_of(x, at, there, otherwise):
        """x[at], where it is there and finite."""
        value = x[at] if there else otherwise
        return value if value != LOWEST else otherwise

    @cuda.jit(device=True)
    def write(x, at, step, sums, factor, row, n_rows, n, lane):
        """The warp's sums: of the rows `row`, `row` + 8 …, pairs of elements."""
        for half in range(N_ROWS):
            place = row + half * 8
            for e in range(depth // 8):
                for r in range(2):
                    col = 8 * e + lane % 4 * 2 + r
                    if place < n_rows and col < n:
                        value = sums[N_SUMS * (half // 2) + half % 2 * 2 + 4 * e + r] * factor
                        store(x, at + place * step + col, value)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def keys_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, shape, do_at,
        q_at, k_at, v_at, dk_at, dv_at, look, drop,
    ):  # fmt: skip
        """dk and dv: a tile of keys a block.

        Parameters as of `tiled_backward`'s: do, q, k, v, bias, allowed, slopes, q_starts, k_starts,
        lse, delta; shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop.
        """
        cache = shared(q)
        scores = cuda.local.array(ALL_SCORES, np.float32)
        g = cuda.local.array(ALL_SCORES, np.float32)
        dkeys = cuda.local.array(ALL_SUMS, np.float32)
        dvalues = cuda.local.array(ALL_SUMS, np.float32)
        n_tiles, n_groups = (shape.S + ROWS - 1) // ROWS, shape.n_heads // shape.share
        start, rest = cuda.blockIdx.x % n_tiles * ROWS, cuda.blockIdx.x // n_tiles
        group, b = rest % n_groups, rest // n_groups
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        at = batch * k_at.batch + group * k_at.head + k_first * k_at.row
        hold(cache, 0, k, start, n_keys, k_at.row, at, at + shape.D, 1)
        at = batch * v_at.batch + group * v_at.head + k_first * v_at.row
        hold(cache, SECOND, v, start, n_keys, v_at.row, at, at + shape.E, 1)
        clear(dkeys)
        clear(dvalues)
        mine, stage, factor = start + warp * WARP_ROWS, 0, look.scale * LOG2_E
        first = max(0, start - beside - look.high) // cols * cols
        end = min(n_queries, min(start + ROWS, n_keys) - beside - look.low)
        # Tiles of queries of all heads that share these keys, one after another.
        n_walks = max(0, (end - first + cols - 1) // cols)
        for walk in range(-1, n_walks * shape.share):
            if walk >= 0:
                wait_for_groups_but(0)
                show()
                cuda.syncthreads()  # this tile is there, and nobody reads the other stage any more
                stage = walk % 2 * STAGE
                multiply(scores, cache, 0, PASSING + stage, q)
                multiply(g, cache, SECOND, PASSING_SECOND + stage, q)
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
                h, i = group * shape.share + walk // n_walks, first + walk % n_walks * cols
                row = (batch * shape.n_heads + h) * shape.rows + q_first
                query, key = i + lane % 4 * 2, mine + lane // 4
                inside = mine + WARP_ROWS <= n_keys and i + cols <= n_queries
                inside = inside and mine >= first_key(i + cols - 1, beside, look)
                inside = inside and mine + WARP_ROWS <= end_of_keys(
                    i, beside, n_keys, look
                )
                finish_scores(scores)
                finish_scores(g)
                if by_element:
                    weigh_each(
                        scores, g, False, lse, delta, row, shape, look, drop, bias, allowed,
                        slopes, delta, b, h, query, key, beside, n_queries, n_keys,
                    )  # fmt: skip
                else:
                    if not inside:
                        for half in range(N_ROWS):
                            # Of this key: the queries that look at it.
                            beside_it = key + half * 8 - beside - query
                            end_seen = min(n_queries - query, beside_it - look.low + 1)
                            is_there = key + half * 8 < n_keys
                            hide(
                                scores, g, half, beside_it - look.high, end_seen if is_there else 0
                            )
                    for f in range(cols // 8):
                        for r in range(2):
                            i = query + 8 * f + r
                            of_lse = row_of(lse, row + i, i < n_queries, ZERO)
                            of_delta = row_of(delta, row + i, i < n_queries, ZERO)
                            for half in range(N_ROWS):
                                place = N_SCORES * (half // 2) + 4 * f + half % 2 * 2 + r
                                weigh(scores, g, place, of_lse, of_delta, factor)
                accumulate(dvalues, scores, cache, PASSING_SECOND + stage, q)
                accumulate(dkeys, g, cache, PASSING + stage, q)
                finish_sums(dvalues)
                finish_sums(dkeys)
        n_written = n_keys if look.bits & PACKED else shape.S  # padding gets 0
        key = mine + lane // 4
        at = batch * dk_at.batch + group * dk_at.head + k_first * dk_at.row
        write(dk, at, dk_at.row, dkeys, look.scale, key, n_written, shape.D, lane)
        at = batch * dv_at.batch + group * dv_at.head + k_first * dv_at.row
        write(dv, at, dv_at.row, dvalues, ONE, key, n_written, shape.E, lane)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def queries_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dq, dscores, shape,
        do_at, q_at, k_at, v_at, dq_at, look, drop,
    ):  # fmt: skip
        """dq: a tile of queries a block.

        Parameters as of `tiled_backward`'s: do, q, k, v, bias, allowed, slopes, q_starts, k_starts,
        lse, delta, dscores; shape, do_at, q_at, k_at, v_at, dq_at, look, drop.
        """
        cache = shared(q)
        scores = cuda.local.array(ALL_SCORES, np.float32)
        g = cuda.local.array(ALL_SCORES, np.float32)
        dqueries = cuda.local.array(ALL_SUMS, np.float32)
        tile, h, b = place_of_block((shape.T + ROWS - 1) // ROWS, shape)
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        # From the heaviest tile of a causal sequence on: who has most to do begins first.
        start = ((shape.T + ROWS - 1) // ROWS - 1 - tile) * ROWS
        at = batch * q_at.batch + h * q_at.head + q_first * q_at.row
        hold(cache, 0, q, start, n_queries, q_at.row, at, at + shape.D, 1)
        at = batch * do_at.batch + h * do_at.head + q_first * do_at.row
        hold(cache, SECOND, do, start, n_queries, do_at.row, at, at + shape.E, 1)
        clear(dqueries)
        row = (batch * shape.n_heads + h) * shape.rows + q_first
        mine, factor = start + warp * WARP_ROWS, look.scale * LOG2_E
        query = mine + lane // 4
        k_base = batch * k_at.batch + h // shape.share * k_at.head + k_first * k_at.row
        v_base = batch * v_at.batch + h // shape.share * v_at.head + k_first * v_at.row
        of_lse, of_delta = (
            cuda.local.array(N_ROWS, np.float32), cuda.local.array(N_ROWS, np.float32)
        )  # fmt: skip
        for half in range(N_ROWS):
            i = query + half * 8
            of_lse[half] = row_of(lse, row + i, i < n_queries, ZERO)
            of_delta[half] = row_of(delta, row + i, i < n_queries, ZERO)
        first = first_key(start, beside, look) // cols * cols
        end = end_of_keys(min(start + ROWS, n_queries) - 1, beside, n_keys, look)
        stage = 0
        for j in range(first - cols, end, cols):
            if j >= first:
                wait_for_groups_but(0)
                show()
                cuda.syncthreads()  # this tile is there, and nobody reads the other stage any more
                stage = j // cols % 2 * STAGE
                multiply(scores, cache, 0, PASSING + stage, q)
                multiply(g, cache, SECOND, PASSING_SECOND + stage, q)
            coming = j + cols
            if coming < end:
                base = PASSING + coming // cols % 2 * STAGE
                fetch(cache, base, k, coming, n_keys, k_at.row, k_base, k_base + shape.D, 1)
                base += SIZE
                fetch(cache, base, v, coming, n_keys, v_at.row, v_base, v_base + shape.E, 1)
            end_group()
            if j >= first:
                inside = mine + WARP_ROWS <= n_queries
                inside = inside and j >= first_key(mine + WARP_ROWS - 1, beside, look)
                inside = inside and j + cols <= end_of_keys(mine, beside, n_keys, look)
                finish_scores(scores)
                finish_scores(g)
                key = j + lane % 4 * 2
                if by_element:
                    weigh_each(
                        scores, g, True, lse, delta, row, shape, look, drop, bias, allowed, slopes,
                        dscores, b, h, query, key, beside, n_queries, n_keys,
                    )  # fmt: skip
                else:
                    for half in range(N_ROWS):
                        if not inside:
                            i = query + half * 8
                            first_seen = first_key(i, beside, look) - key
                            end_seen = end_of_keys(i, beside, n_keys, look) - key
                            hide(scores, g, half, first_seen, end_seen if i < n_queries else 0)
                        for f in range(cols // 8):
                            for r in range(2):
                                place = N_SCORES * (half // 2) + 4 * f + half % 2 * 2 + r
                                weigh(scores, g, place, of_lse[half], of_delta[half], factor)
                accumulate(dqueries, g, cache, PASSING + stage, q)
                finish_sums(dqueries)
        at = batch * dq_at.batch + h * dq_at.head + q_first * dq_at.row
        write(dq, at, dq_at.row, dqueries, look.scale, query, n_queries, shape.D, lane)

    n_elements = 2 * unit.held_size + 4 * unit.passing_size
    return keys_kernel, queries_kernel, unit, ITEMSIZE * n_elements
