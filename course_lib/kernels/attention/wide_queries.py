"""dq of `wide_backward`: a block has 128 queries, and a tile of keys and values comes by."""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.multiplying import FRAGMENT, row_writer
from course_lib.kernels.attention.scores import (
    end_of_keys,
    first_key,
    place_of_block,
    sequence,
)
from course_lib.kernels.attention.weighing import of_row, weighing
from course_lib.kernels.attention.wide_tiles import HALVES, N_ROWS, N_THREADS, TILE, fetching
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.softmax_formulas import LOG2_E
from course_lib.runtime.intrinsics import wait_for_previous_kernel
from course_lib.runtime.intrinsics.held import WORDS, multiply_held, wait_for_products_but
from course_lib.runtime.intrinsics.pairs import as_pair
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.special import fast_exp2
from course_lib.runtime.intrinsics.warpgroup import (
    ROWS,
    multiply_tiles,
    show_to_products,
    tiles_in_shared,
    wait_for_products,
)


@functools.cache
def queries_kernel_for(depth, by_element):
    """(kernel of dq, bytes of shared memory); D and E up to `depth`, a multiple of 64."""
    SIZE, N_SUMS, ALL_SCORES = ROWS * depth, depth // 2, ROWS // 2
    HELD, PANELS = N_ROWS * depth, depth // ROWS
    VALUES, KEYS = 2 * HELD, 2 * HELD + SIZE  # the tile of values, and two of keys
    hold, fetch = fetching(N_ROWS, depth), fetching(ROWS, depth)
    write_row, weigh = row_writer(depth, True), weighing(ROWS)
    weigh_each, hide = weigh.weigh_each, weigh.hide

    @cuda.jit(device=True)
    def multiply(scores, cache, mine, others):
        for r in range(ALL_SCORES):
            scores[r] = ZERO
        for p in range(PANELS):
            multiply_tiles(scores, cache, mine + p * (N_ROWS * ROWS), others + p * TILE, ROWS, 0)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def wide_queries_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dq, dscores, shape,
        do_at, q_at, k_at, v_at, dq_at, look, drop,
    ):  # fmt: skip
        """dq: 128 queries a block, 64 a warpgroup.

        Blocks may begin while those of dk and dv run: they read nothing that these write, and what
        came before has ended by then.

        Parameters as of `tiled_backward`'s: do, q, k, v, bias, allowed, slopes, q_starts, k_starts,
        lse, delta, dscores; shape, do_at, q_at, k_at, v_at, dq_at, look, drop.
        """
        cache = tiles_in_shared(q)
        scores = cuda.local.array(ALL_SCORES, np.float32)
        g = cuda.local.array(ALL_SCORES, np.float32)
        sums = cuda.local.array(N_SUMS, np.float32)
        words = cuda.local.array(WORDS, np.uint32)
        of_lse, of_delta = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        tile, h, b = place_of_block((shape.T + N_ROWS - 1) // N_ROWS, shape)
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = np.int32(cuda.threadIdx.x % 32), np.int32(cuda.threadIdx.x // 32)
        # From the heaviest tile of a causal sequence on: who has most to do begins first.
        start = ((shape.T + N_ROWS - 1) // N_ROWS - 1 - tile) * N_ROWS
        at = batch * q_at.batch + h * q_at.head + q_first * q_at.row
        hold(cache, 0, q, start, n_queries, q_at.row, at, shape.D)
        at = batch * do_at.batch + h * do_at.head + q_first * do_at.row
        hold(cache, HELD, do, start, n_queries, do_at.row, at, shape.E)
        for r in range(N_SUMS):
            sums[r] = ZERO
        row = (batch * shape.n_heads + h) * shape.rows + q_first
        mine, factor = start + warp * FRAGMENT, look.scale * LOG2_E
        query, held = mine + lane // 4, warp // 4 * TILE
        k_base = batch * k_at.batch + h // shape.share * k_at.head + k_first * k_at.row
        v_base = batch * v_at.batch + h // shape.share * v_at.head + k_first * v_at.row
        for half in range(2):
            i = query + half * 8
            of_lse[half] = of_row(lse, row + i, i < n_queries) * LOG2_E
            of_delta[half] = of_row(delta, row + i, i < n_queries)
        j = first_key(start, beside, look) // ROWS * ROWS
        end = end_of_keys(min(start + N_ROWS, n_queries) - 1, beside, n_keys, look)
        out, keys = batch * dq_at.batch + h * dq_at.head + q_first * dq_at.row, np.int32(KEYS)
        if j < end:
            fetch(cache, keys, k, j, n_keys, k_at.row, k_base, shape.D)
            fetch(cache, VALUES, v, j, n_keys, v_at.row, v_base, shape.E)
            end_group()
        while j < end:
            wait_for_groups_but(0)
            show_to_products()
            cuda.syncthreads()  # these keys and values are there; nobody reads the keys before them
            multiply(scores, cache, held, keys)
            multiply(g, cache, HELD + held, VALUES)
            others = np.int32(2 * KEYS + SIZE - keys)
            if j + ROWS < end:
                fetch(cache, others, k, j + ROWS, n_keys, k_at.row, k_base, shape.D)
            if not by_element:
                wait_for_products_but(PANELS, scores, ROWS)
                for r in range(ALL_SCORES):
                    scores[r] = fast_exp2(scores[r] * factor - of_lse[r // 2 % 2])
            wait_for_products(scores, ROWS)
            wait_for_products(g, ROWS)
            cuda.syncthreads()  # nobody reads these values any more
            if j + ROWS < end:
                fetch(cache, VALUES, v, j + ROWS, n_keys, v_at.row, v_base, shape.E)
                end_group()
            key = j + lane % 4 * 2
            if by_element:
                weigh_each(
                    scores, g, True, lse, delta, row, shape, look, drop, bias, allowed, slopes,
                    dscores, b, h, query, key, beside, n_queries, n_keys,
                )  # fmt: skip
            else:
                inside = mine + FRAGMENT <= n_queries
                inside = inside and j >= first_key(mine + FRAGMENT - 1, beside, look)
                inside = inside and j + ROWS <= end_of_keys(mine, beside, n_keys, look)
                for r in range(ALL_SCORES):
                    g[r] = scores[r] * (g[r] - of_delta[r // 2 % 2])
                if not inside:
                    for half in range(2):
                        i = query + half * 8
                        high = end_of_keys(i, beside, n_keys, look) - key if i < n_queries else 0
                        hide(g, half, first_key(i, beside, look) - key, high)
            for r in range(WORDS):
                words[r] = as_pair(q, g[2 * r], g[2 * r + 1])
            multiply_held(sums, words, 0, cache, keys, depth, ROWS)
            wait_for_products(sums, depth)
            keys = others
            j += ROWS
        for half in range(2):
            i = query + half * 8
            if i < n_queries:
                write_row(dq, out + i * dq_at.row, sums, 2 * half, look.scale, shape.D)
        wait_for_previous_kernel()  # whoever waits for this one gets dk and dv too

    return wide_queries_kernel, HALVES * (KEYS + 2 * SIZE)
