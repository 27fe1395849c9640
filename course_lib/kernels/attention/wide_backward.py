"""The backward pass of heads beyond 128 by `wgmma`: the way `wide` of `tensor_core`.

dk and dv of 64 keys with 256 elements are half of the registers of a multiprocessor, and a tile of
queries is a quarter of its shared memory. So the two warpgroups of a block share everything:

============ ===================================================== =============================
kernel       a block holds                                         a warpgroup computes
============ ===================================================== =============================
dk, dv       64 keys and values; 64 queries and gradients of       scores of 32 of the queries;
             outputs come by, while the tile before is worked on   then dk, or dv, of all
dq           128 queries and gradients of outputs; 64 keys and     its 64 queries
             values come by
============ ===================================================== =============================

Weights and gradients of scores meet in shared memory, a line of 64 queries for each key. For dq
there is room for two tiles of keys and one of values: these come once everybody has multiplied the
values before them, while the product with the keys goes on.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.multiplying import FRAGMENT, GROUP_THREADS, row_writer
from course_lib.kernels.attention.problem import PACKED
from course_lib.kernels.attention.scores import end_of_keys, first_key, sequence
from course_lib.kernels.attention.weighing import finite, weighing
from course_lib.kernels.attention.wide_queries import queries_kernel_for
from course_lib.kernels.attention.wide_tiles import (
    GROUPS,
    HALVES,
    N_THREADS,
    TILE,
    WIDTH,
    fetching,
)
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.softmax_formulas import LOG2_E
from course_lib.runtime.intrinsics import allow_next_kernel, load
from course_lib.runtime.intrinsics.held import wait_for_products_but
from course_lib.runtime.intrinsics.matrix import copy_one_async
from course_lib.runtime.intrinsics.pairs import as_pair
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.special import fast_exp2
from course_lib.runtime.intrinsics.warpgroup import (
    B_BY_ROW,
    ROWS,
    multiply_tiles,
    show_to_products,
    tiles_in_shared,
    wait_for_products,
)
from course_lib.runtime.intrinsics.words import store_words

MINE = ROWS // GROUPS  # queries of a tile whose scores a warpgroup computes
N_SCORES = MINE // 2


@functools.cache
def keys_kernel_for(depth, by_element):
    """(kernel of dk and dv, bytes of shared memory); D and E up to `depth`, a multiple of 64."""
    SIZE, N_SUMS, PANELS = ROWS * depth, depth // 2, depth // ROWS
    QUERIES, STAGE = 2 * SIZE, 2 * SIZE  # where the first stage begins; numbers of a stage
    GRADIENTS = QUERIES + 2 * STAGE  # a tile of gradients of scores, then one of weights
    ROWS_AT = (GRADIENTS + 2 * TILE) * HALVES // 4  # in numbers of 4 bytes: lse and delta
    fetch, write_row, weigh = fetching(ROWS, depth), row_writer(depth, True), weighing(MINE)
    weigh_each, hide_from_keys = weigh.weigh_each, weigh.hide_from_keys

    @cuda.jit(device=True)
    def fetch_rows(rows, slot, lse, delta, at, n):
        """lse and delta of a tile of queries, of which n are there."""
        thread = cuda.threadIdx.x
        query = thread % ROWS
        there = query < n
        source, base = at + query if there else 0, ROWS_AT + slot * (2 * ROWS) + thread
        if thread < ROWS:
            copy_one_async(rows, base, lse, source, there)
        elif thread < 2 * ROWS:
            copy_one_async(rows, base, delta, source, there)

    @cuda.jit(device=True)
    def multiply(scores, cache, mine, others):
        for r in range(N_SCORES):
            scores[r] = ZERO
        for p in range(PANELS):
            multiply_tiles(scores, cache, mine + p * TILE, others + p * TILE, MINE, 0)

    @cuda.jit(device=True)
    def keep(cache, base, x, like, group, lane, warp):
        """The warpgroup's part of a tile of weights or gradients, to shared memory."""
        pair = cuda.local.array(1, np.uint32)
        place = base + (warp * FRAGMENT + lane // 4) * ROWS + lane % 4 * 2
        for f in range(MINE // 8):
            chunk = (group * (MINE // 8) + f ^ lane // 4) * WIDTH
            for half in range(2):
                pair[0] = as_pair(like, x[4 * f + 2 * half], x[4 * f + 2 * half + 1])
                store_words(cache, place + half * (8 * ROWS) + chunk, pair, 2)

    @cuda.jit(device=True)
    def write(x, at, step, sums, factor, key, n_above, n):
        for half in range(2):
            row = key + half * 8
            if row < n_above:
                write_row(x, at + row * step, sums, 2 * half, factor, n)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def wide_keys_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, shape, do_at,
        q_at, k_at, v_at, dk_at, dv_at, look, drop,
    ):  # fmt: skip
        """dk and dv: a tile of keys a block.

        Parameters as of `tiled_backward`'s: do, q, k, v, bias, allowed, slopes, q_starts, k_starts,
        lse, delta; shape, do_at, q_at, k_at, v_at, dk_at, dv_at, look, drop.
        """
        allow_next_kernel()
        cache, of_rows = tiles_in_shared(q), cuda.shared.array(0, np.float32)  # the same memory
        scores = cuda.local.array(N_SCORES, np.float32)
        g = cuda.local.array(N_SCORES, np.float32)
        sums = cuda.local.array(N_SUMS, np.float32)
        n_blocks, n_groups = (shape.S + ROWS - 1) // ROWS, shape.n_heads // shape.share
        start, rest = cuda.blockIdx.x % n_blocks * ROWS, cuda.blockIdx.x // n_blocks
        head, b = rest % n_groups, rest // n_groups
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = np.int32(cuda.threadIdx.x % 32), np.int32(cuda.threadIdx.x // 32 % 4)
        group = np.int32(cuda.threadIdx.x // GROUP_THREADS)
        at = batch * k_at.batch + head * k_at.head + k_first * k_at.row
        fetch(cache, 0, k, start, n_keys, k_at.row, at, shape.D)
        at = batch * v_at.batch + head * v_at.head + k_first * v_at.row
        fetch(cache, SIZE, v, start, n_keys, v_at.row, at, shape.E)
        for r in range(N_SUMS):
            sums[r] = ZERO
        mine, factor = start + warp * FRAGMENT, look.scale * LOG2_E
        key = mine + lane // 4
        first = max(0, start - beside - look.high) // ROWS * ROWS
        end = min(n_queries, min(start + ROWS, n_keys) - beside - look.low)
        # Tiles of queries of all heads that share these keys, one after another.
        n_tiles = max(0, (end - first + ROWS - 1) // ROWS) * shape.share
        q_base = batch * q_at.batch + head * shape.share * q_at.head + q_first * q_at.row
        do_base = batch * do_at.batch + head * shape.share * do_at.head + q_first * do_at.row
        row = (batch * shape.n_heads + head * shape.share) * shape.rows + q_first
        if n_tiles > 0:
            fetch_rows(of_rows, 0, lse, delta, row + first, n_queries - first)
            fetch(cache, QUERIES, q, first, n_queries, q_at.row, q_base, shape.D)
            fetch(cache, QUERIES + SIZE, do, first, n_queries, do_at.row, do_base, shape.E)
            end_group()
        out = batch * dv_at.batch + head * dv_at.head + k_first * dv_at.row
        if group == 0:
            out = batch * dk_at.batch + head * dk_at.head + k_first * dk_at.row
        h, i, slot = 0, first, np.int32(1)
        for tile in range(n_tiles):
            slot = np.int32(1 - slot)
            stage = QUERIES + slot * STAGE
            wait_for_groups_but(0)
            show_to_products()
            cuda.syncthreads()  # this tile is there, and nobody reads anything of the last one
            multiply(scores, cache, 0, stage + group * (MINE * ROWS))
            multiply(g, cache, SIZE, stage + SIZE + group * (MINE * ROWS))
            next_h, next_i = (h, i + ROWS) if i + ROWS < end else (h + 1, first)
            if tile + 1 < n_tiles:
                other = QUERIES + (1 - slot) * STAGE
                fetch_rows(
                    of_rows, 1 - slot, lse, delta, row + next_h * shape.rows + next_i,
                    n_queries - next_i,
                )  # fmt: skip
                at = q_base + next_h * q_at.head
                fetch(cache, other, q, next_i, n_queries, q_at.row, at, shape.D)
                at = do_base + next_h * do_at.head
                fetch(cache, other + SIZE, do, next_i, n_queries, do_at.row, at, shape.E)
                end_group()
            query = i + group * MINE + lane % 4 * 2
            if by_element:
                wait_for_products(scores, MINE)
                wait_for_products(g, MINE)
                weigh_each(
                    scores, g, False, lse, delta, row + h * shape.rows, shape, look, drop, bias,
                    allowed, slopes, delta, b, head * shape.share + h, query, key, beside,
                    n_queries, n_keys,
                )  # fmt: skip
            else:
                inside = mine + FRAGMENT <= n_keys and i + ROWS <= n_queries
                inside = inside and mine >= first_key(i + ROWS - 1, beside, look)
                inside = inside and mine + FRAGMENT <= end_of_keys(i, beside, n_keys, look)
                wait_for_products_but(PANELS, scores, MINE)
                of_lane = ROWS_AT + slot * (2 * ROWS) + group * MINE + lane % 4 * 2
                for f in range(MINE // 8):
                    for r in range(2):
                        shift = finite(load(of_rows, of_lane + 8 * f + r)) * LOG2_E
                        for half in range(2):
                            place = 4 * f + 2 * half + r
                            scores[place] = fast_exp2(scores[place] * factor - shift)
                if not inside:
                    hide_from_keys(scores, key, query, beside, n_queries, n_keys, look)
                wait_for_products(g, MINE)
                for f in range(MINE // 8):
                    for r in range(2):
                        of_delta = load(of_rows, of_lane + ROWS + 8 * f + r)
                        for half in range(2):
                            place = 4 * f + 2 * half + r
                            g[place] = scores[place] * (g[place] - of_delta)
                if not inside:
                    hide_from_keys(g, key, query, beside, n_queries, n_keys, look)
            keep(cache, GRADIENTS, g, q, group, lane, warp)
            keep(cache, GRADIENTS + TILE, scores, q, group, lane, warp)
            show_to_products()
            cuda.syncthreads()  # weights and gradients of the whole tile are there
            left, right = GRADIENTS + group * TILE, stage + group * SIZE
            multiply_tiles(sums, cache, left, right, depth, B_BY_ROW)
            wait_for_products(sums, depth)
            h, i = next_h, next_i
        n_written = n_keys if look.bits & PACKED else shape.S  # padding gets 0
        if group == 0:
            write(dk, out, dk_at.row, sums, look.scale, key, n_written, shape.D)
        else:
            write(dv, out, dv_at.row, sums, ONE, key, n_written, shape.E)

    return wide_keys_kernel, 4 * (ROWS_AT + 4 * ROWS)


@functools.cache
def kernels_for(depth, by_element):
    """(kernel of dk and dv, kernel of dq, bytes of shared memory of either), as those above."""
    (of_keys, n_bytes), (of_queries, more_bytes) = (
        make(depth, by_element) for make in (keys_kernel_for, queries_kernel_for)
    )
    return of_keys, of_queries, max(n_bytes, more_bytes)
