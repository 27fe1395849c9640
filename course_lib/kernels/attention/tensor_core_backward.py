"""The backward pass of the rung `tensor_core`.

The three kernels of `tiled_backward`, whose delta is the same. A block holds a tile of two
matrices, (k, v) or (q, do), some rows for each warp, and walks over tiles of the other two. With
keys as rows a warp has scores and their gradients transposed, so that in either kernel weights and
gradients leave the registers no more than forwards.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.multiplying import FRAGMENT, row_writer
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
from course_lib.runtime.intrinsics import LOWEST, load
from course_lib.runtime.intrinsics.matrix import copy_one_async
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.special import fast_exp2


@functools.cache
def kernels_for(make, cols, depth, by_element, *how):
    """(kernel of dk and dv, kernel of dq, the `Unit`, bytes of shared memory of either).

    Where the unit is `adding`, the first adds up dq too, and the second reads these sums.

    cols  rows of a tile that comes by; the rest as of `tensor_core.kernel_for`
    """
    unit = make(cols, depth, *how)
    ROWS, N_THREADS, WARP_ROWS = unit.rows, unit.n_threads, FRAGMENT * unit.fragments
    TOGETHER = unit.together
    #: Where, in numbers of 4 bytes, lse and delta of the tiles lie that come by.
    ROWS_AT = (2 * unit.held_size + 2 * unit.n_stages * unit.passing_size) * unit.itemsize // 4
    PARTS, WIDTH = unit.parts, depth // unit.parts
    N_SCORES, N_ROWS = cols // 2, 2 * unit.fragments
    ALL_SCORES, ALL_SUMS = N_SCORES * unit.fragments, depth // 2 * unit.fragments
    PART_SUMS = ALL_SUMS // PARTS
    SECOND, SIZE, STAGE = unit.held_size, unit.passing_size, 2 * unit.passing_size
    PASSING, N_STAGES, N_WORDS = 2 * unit.held_size, unit.n_stages, unit.n_words
    shared, hold, fetch, show = unit.shared, unit.hold, unit.fetch, unit.show
    multiply, pack = unit.multiply, unit.pack
    accumulate, accumulate_part = unit.accumulate, unit.accumulate_part
    finish_scores, finish_sums = unit.finish_scores, unit.finish_sums
    finish_before_scores = unit.finish_before_scores
    ADDING, GRADIENTS = unit.adding is not None, PASSING + 2 * N_STAGES * SIZE
    GRADIENTS_SIZE, keep, add = unit.adding[:3] if ADDING else (0, None, None)
    ROWS_AT += 2 * GRADIENTS_SIZE * unit.itemsize // 4
    write, write_part = (_writer(width, N_ROWS, unit.in_pairs) for width in (depth, WIDTH))

    @cuda.jit(device=True)
    def fetch_two(cache, base, x, y, row, n_rows, x_row, y_row, x_at, y_at, shape):
        """A tile of queries or keys, D wide, and one of what belongs to them, E wide."""
        fetch(cache, base, x, row, n_rows, x_row, x_at, x_at + shape.D, 1)
        fetch(cache, base + SIZE, y, row, n_rows, y_row, y_at, y_at + shape.E, 1)
        end_group()

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
    def fetch_rows(rows, base, lse, delta, at, n):
        """lse and delta of a tile of queries, of which n are there: `cols` numbers each."""
        for n_before in range(0, 2 * cols, N_THREADS):
            place = n_before + cuda.threadIdx.x
            query = place if place < cols else place - cols
            there = query < n
            source = at + query if there else 0
            if place < cols:
                copy_one_async(rows, base + place, lse, source, there)
            elif place < 2 * cols:
                copy_one_async(rows, base + place, delta, source, there)

    @cuda.jit(device=True)
    def hide(x, half, first, end):
        """Of a row, all columns but those from `first` to `end` become 0, whatever they were."""
        first, end = np.int32(min(max(first, -1), cols)), np.int32(min(max(end, 0), cols))
        for f in range(cols // 8):
            for r in range(2):
                if 8 * f + r < first or 8 * f + r >= end:
                    x[N_SCORES * (half // 2) + 4 * f + half % 2 * 2 + r] = ZERO

    @cuda.jit(device=True)
    def hide_from_keys(x, key, query, beside, n_queries, n_keys, look):
        """As `hide`, of the keys `key`, `key` + 8 …: queries from `query` on that do not look."""
        for half in range(N_ROWS):
            low = key + half * 8 - beside - query - look.high
            high = min(n_queries - query, low + look.high - look.low + 1)
            hide(x, half, low, high if key + half * 8 < n_keys else 0)

    @cuda.jit(device=True)
    def finite(value):
        return value if value != LOWEST else ZERO

    @cuda.jit(device=True)
    def of_row(x, at, there):
        """x[at], or 0 where it is not there, or where a query sees nothing."""
        return finite(x[at]) if there else ZERO

    @cuda.jit(device=True)
    def walk_over_queries(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, sums, dscores,
        shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop,
    ):  # fmt: skip
        """What a block has to do for dk and dv, and with `unit.adding` for dq, in sums."""
        cache, of_rows = shared(q), cuda.shared.array(0, np.float32)  # the same memory
        scores = cuda.local.array(ALL_SCORES, np.float32)
        g = cuda.local.array(ALL_SCORES, np.float32)
        dkeys = cuda.local.array(PART_SUMS, np.float32)
        dvalues = cuda.local.array(PART_SUMS, np.float32)
        words = cuda.local.array(N_WORDS, np.uint32)
        more_words = cuda.local.array(N_WORDS, np.uint32)
        n_blocks, n_groups = (shape.S + ROWS - 1) // ROWS, shape.n_heads // shape.share
        column, rest = cuda.blockIdx.x % PARTS * WIDTH, cuda.blockIdx.x // PARTS
        start, rest = rest % n_blocks * ROWS, rest // n_blocks
        group, b = rest % n_groups, rest // n_groups
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        at = batch * k_at.batch + group * k_at.head + k_first * k_at.row
        hold(cache, 0, k, start, n_keys, k_at.row, at, at + shape.D, 1)
        at = batch * v_at.batch + group * v_at.head + k_first * v_at.row
        hold(cache, SECOND, v, start, n_keys, v_at.row, at, at + shape.E, 1)
        for r in range(PART_SUMS):
            dkeys[r] = dvalues[r] = ZERO
        mine, factor = start + warp * WARP_ROWS, look.scale * LOG2_E
        key = mine + lane // 4
        first = max(0, start - beside - look.high) // cols * cols
        end = min(n_queries, min(start + ROWS, n_keys) - beside - look.low)
        # Tiles of queries of all heads that share these keys, one after another.
        n_walks = max(0, (end - first + cols - 1) // cols)
        n_tiles = n_walks * shape.share
        q_base = batch * q_at.batch + group * shape.share * q_at.head + q_first * q_at.row
        do_base = batch * do_at.batch + group * shape.share * do_at.head + q_first * do_at.row
        if n_tiles > 0:
            row = (batch * shape.n_heads + group * shape.share) * shape.rows + q_first + first
            fetch_rows(of_rows, ROWS_AT, lse, delta, row, n_queries - first)
            fetch_two(
                cache, PASSING, q, do, first, n_queries, q_at.row, do_at.row, q_base, do_base, shape
            )
        stage, slot, h, i = PASSING, 0, 0, first  # of the tile at hand, in shared memory and in q
        n_passing, before = (shape.T + cols - 1) // cols, np.int64(0)
        for tile in range(n_tiles):
            wait_for_groups_but(0)
            show()
            cuda.syncthreads()  # this tile is there, and nobody reads the next stage any more
            multiply(scores, cache, 0, stage, q)
            multiply(g, cache, SECOND, stage + SIZE, q)
            row = (batch * shape.n_heads + group * shape.share + h) * shape.rows + q_first
            next_h, next_i = (h, i + cols) if i + cols < end else (h + 1, first)
            next_slot = slot + 1 if slot + 1 < N_STAGES else 0
            next_stage = PASSING + next_slot * STAGE
            if tile + 1 < n_tiles:
                fetch_rows(
                    of_rows, ROWS_AT + next_slot * (2 * cols), lse, delta,
                    row + (next_h - h) * shape.rows + next_i, n_queries - next_i,
                )  # fmt: skip
                fetch_two(
                    cache, next_stage, q, do, next_i, n_queries, q_at.row, do_at.row,
                    q_base + next_h * q_at.head, do_base + next_h * do_at.head, shape,
                )  # fmt: skip
            query = i + lane % 4 * 2
            if by_element:
                finish_scores(scores)
                finish_scores(g)
                weigh_each(
                    scores, g, False, lse, delta, row, shape, look, drop, bias, allowed, slopes,
                    dscores, b, group * shape.share + h, query, key, beside, n_queries, n_keys,
                )  # fmt: skip
            else:
                inside = mine + WARP_ROWS <= n_keys and i + cols <= n_queries
                inside = inside and mine >= first_key(i + cols - 1, beside, look)
                inside = inside and mine + WARP_ROWS <= end_of_keys(i, beside, n_keys, look)
                finish_before_scores(scores)
                of_lane = ROWS_AT + slot * (2 * cols) + lane % 4 * 2
                for f in range(cols // 8):
                    for r in range(2):
                        shift = finite(load(of_rows, of_lane + 8 * f + r)) * LOG2_E
                        for half in range(N_ROWS):
                            place = N_SCORES * (half // 2) + half % 2 * 2 + 4 * f + r
                            scores[place] = fast_exp2(scores[place] * factor - shift)
                if not inside:
                    hide_from_keys(scores, key, query, beside, n_queries, n_keys, look)
                finish_scores(g)
                for f in range(cols // 8):
                    for r in range(2):
                        of_delta = load(of_rows, of_lane + cols + 8 * f + r)
                        for half in range(N_ROWS):
                            place = N_SCORES * (half // 2) + half % 2 * 2 + 4 * f + r
                            g[place] = scores[place] * (g[place] - of_delta)
                if not inside:
                    hide_from_keys(g, key, query, beside, n_queries, n_keys, look)
            # The left side of a product is made while none is on its way: the compiler would let
            # each wait for the one before.
            pack(words, scores, q)
            pack(more_words, g, q)
            accumulate_part(dvalues, words, cache, stage + SIZE + column, q)
            accumulate_part(dkeys, more_words, cache, stage + column, q)
            if ADDING:
                place = (b * shape.n_heads + group * shape.share + h) * n_passing + i // cols
                keep(cache, GRADIENTS + tile % 2 * GRADIENTS_SIZE, more_words)
                if tile > 0:  # the others' of the last tile have been there since the barrier
                    add(sums, before, cache, GRADIENTS + (tile + 1) % 2 * GRADIENTS_SIZE)
                before = place * (cols * depth)
            stage, slot, h, i = next_stage, next_slot, next_h, next_i
        if ADDING and n_tiles > 0:
            show()
            cuda.syncthreads()
            add(sums, before, cache, GRADIENTS + (n_tiles + 1) % 2 * GRADIENTS_SIZE)
        finish_sums(dvalues)
        finish_sums(dkeys)
        n_written = n_keys if look.bits & PACKED else shape.S  # padding gets 0
        at = batch * dk_at.batch + group * dk_at.head + k_first * dk_at.row
        write_part(
            dk, at + column, dk_at.row, dkeys, look.scale, key, n_written, shape.D - column
        )
        at = batch * dv_at.batch + group * dv_at.head + k_first * dv_at.row
        write_part(dv, at + column, dv_at.row, dvalues, ONE, key, n_written, shape.E - column)

    @cuda.jit(launch_bounds=(N_THREADS, TOGETHER))
    def keys_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, shape, do_at,
        q_at, k_at, v_at, dk_at, dv_at, look, drop,
    ):  # fmt: skip
        """dk and dv: a tile of keys a block, and one of the parts of their columns.

        Parameters as of `tiled_backward`'s: do, q, k, v, bias, allowed, slopes, q_starts, k_starts,
        lse, delta; shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop.
        """
        walk_over_queries(
            do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, delta,
            delta, shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop,
        )  # fmt: skip

    @cuda.jit(launch_bounds=(N_THREADS, TOGETHER))
    def adding_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, sums, dscores,
        shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop,
    ):  # fmt: skip
        """As `keys_kernel`, and what each of its keys adds to dq, by atomics.

        sums  float32, flat, zeros before: what `adding` makes dq of. The others as of the kernels
        of `tiled_backward`: do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk,
        dv, dscores; shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop.
        """
        walk_over_queries(
            do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, sums,
            dscores, shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop,
        )  # fmt: skip

    @cuda.jit(launch_bounds=(N_THREADS, TOGETHER))
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
        words = cuda.local.array(N_WORDS, np.uint32)
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
        for r in range(ALL_SUMS):
            dqueries[r] = ZERO
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
            of_lse[half] = of_row(lse, row + i, i < n_queries) * LOG2_E
            of_delta[half] = of_row(delta, row + i, i < n_queries)
        first = first_key(start, beside, look) // cols * cols
        end = end_of_keys(min(start + ROWS, n_queries) - 1, beside, n_keys, look)
        if first < end:
            fetch_two(
                cache, PASSING, k, v, first, n_keys, k_at.row, v_at.row, k_base, v_base, shape
            )
        stage, slot, n_tiles = PASSING, 0, (end - first + cols - 1) // cols
        for tile in range(n_tiles):
            wait_for_groups_but(0)
            show()
            cuda.syncthreads()  # this tile is there, and nobody reads the next stage any more
            multiply(scores, cache, 0, stage, q)
            multiply(g, cache, SECOND, stage + SIZE, q)
            j = first + tile * cols
            slot = slot + 1 if slot + 1 < N_STAGES else 0
            next_stage = PASSING + slot * STAGE
            if tile + 1 < n_tiles:
                fetch_two(
                    cache, next_stage, k, v, j + cols, n_keys, k_at.row, v_at.row, k_base, v_base,
                    shape,
                )  # fmt: skip
            key = j + lane % 4 * 2
            if by_element:
                finish_scores(scores)
                finish_scores(g)
                weigh_each(
                    scores, g, True, lse, delta, row, shape, look, drop, bias, allowed, slopes,
                    dscores, b, h, query, key, beside, n_queries, n_keys,
                )  # fmt: skip
            else:
                inside = mine + WARP_ROWS <= n_queries
                inside = inside and j >= first_key(mine + WARP_ROWS - 1, beside, look)
                inside = inside and j + cols <= end_of_keys(mine, beside, n_keys, look)
                finish_before_scores(scores)
                for r in range(ALL_SCORES):
                    shift = of_lse[r // N_SCORES * 2 + r // 2 % 2]
                    scores[r] = fast_exp2(scores[r] * factor - shift)
                finish_scores(g)
                for r in range(ALL_SCORES):
                    g[r] = scores[r] * (g[r] - of_delta[r // N_SCORES * 2 + r // 2 % 2])
                if not inside:
                    for half in range(N_ROWS):
                        i = query + half * 8
                        high = end_of_keys(i, beside, n_keys, look) - key if i < n_queries else 0
                        hide(g, half, first_key(i, beside, look) - key, high)
            pack(words, g, q)
            accumulate(dqueries, words, cache, stage, q)
            stage = next_stage
        finish_sums(dqueries)
        at = batch * dq_at.batch + h * dq_at.head + q_first * dq_at.row
        write(dq, at, dq_at.row, dqueries, look.scale, query, n_queries, shape.D)

    if ADDING:
        keys_kernel, queries_kernel = adding_kernel, unit.adding.sums_kernel
    return keys_kernel, queries_kernel, unit, 4 * (ROWS_AT + N_STAGES * 2 * cols)


def _writer(width, n_rows, in_pairs):
    """write(x, at, step, sums, factor, row, n_above, n): a warp's sums, of `n_rows` rows a lane."""
    write_row, N_SUMS = row_writer(width, in_pairs), width // 2

    @cuda.jit(device=True)
    def write(x, at, step, sums, factor, row, n_above, n):
        """Of the rows `row`, `row` + 8 … below `n_above`, n numbers each."""
        for half in range(n_rows):
            place, first = row + half * 8, N_SUMS * (half // 2) + half % 2 * 2
            if place < n_above:
                write_row(x, at + place * step, sums, first, factor, n)

    return write
