"""How tensor cores multiply the tiles of attention: `mma.sync` by warps, `wgmma` by warpgroups.

A block *holds* a tile of `rows` rows, and tiles of `cols` rows come by. Either way a warp has the
products of its own rows, 16 times `fragments`, in fragments (`intrinsics.matrix`): with
``g = lane // 4`` and ``t = lane % 4``, and `n` numbers of a lane for each 16 rows,

    x[n·f + 4·j], x[n·f + 4·j + 1]: row 16·f + g, columns 8·j + 2·t and 8·j + 2·t + 1
    x[n·f + 4·j + 2], x[n·f + 4·j + 3]: row 16·f + g + 8, the same columns

Products never leave registers: two fragments of 8 columns, rounded to pairs, are what the next
product takes as its left side. Float32 is multiplied as `splitting` says.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.fragments import load_a, load_b
from course_lib.kernels.blocks.mma.tiles import tile
from course_lib.runtime.intrinsics import VECTOR_BYTES, store
from course_lib.runtime.intrinsics.held import WORDS, multiply_held, wait_for_products_but
from course_lib.runtime.intrinsics.matrix import copy_part_async, multiply_add
from course_lib.runtime.intrinsics.pairs import as_pair
from course_lib.runtime.intrinsics.shared import dynamic_shared
from course_lib.runtime.intrinsics.warpgroup import (
    CHUNKS,
    ROWS,
    multiply_tiles,
    show_to_products,
    tiles_in_shared,
    wait_for_products,
)
from course_lib.runtime.intrinsics.words import store_words

HALVES = 2  # bytes of a number
FRAGMENT, N_WARPS = 16, 4
WIDEST = 128  # columns of two sums that a warp's registers hold
GROUP_THREADS = 128


class Unit(NamedTuple):
    """What multiplies the tiles of a block, and how they lie in shared memory.

    hold, fetch   (cache, base, x, row, n_rows, stride, start, stop, 1): begin to copy a tile that
                  is held, or one that comes by, as `mma.tiles` does; zeros beyond the edges
    show          all that has been copied may be multiplied; a barrier follows
    multiply      (scores, cache, mine, others, like): begins scores = the warp's rows of the held
                  tile at `mine` times the rows of the one at `others`
    pack          (words, scores, like): scores, rounded, as the left side of a product
    accumulate    (sums, words, cache, others, like): begins sums += words times the tile at
                  `others`
    accumulate_part   the same, of one of `parts` equal ranges of columns: `others` is where the
                  first of them lies
    finish_scores, finish_sums   what was begun is there; until then nobody touches these arrays
    finish_before_sums, finish_before_scores   (scores) what was begun is there, but for the last
                  `accumulate`, or the last `multiply`
    """

    itemsize: int
    rows: int
    n_threads: int
    together: int  # blocks of a multiprocessor, whose registers they share
    n_stages: int  # tiles that come by at a time, while sums may still be on their way
    in_pairs: bool  # rows of results are even, and begin on 4-byte boundaries
    fragments: int
    parts: int  # in which two sums at a time fit into registers
    held_size: int
    passing_size: int
    shared: object
    hold: object
    fetch: object
    show: object
    n_words: int
    multiply: object
    pack: object
    accumulate: object
    accumulate_part: object
    finish_scores: object
    finish_sums: object
    finish_before_sums: object
    finish_before_scores: object
    adding: object = None  # `adding.Adding`, where dq is a sum by atomics


def row_writer(depth, in_pairs):
    """write_row(x, at, sums, first, factor, n): a lane's part of a row of n numbers.

    x[at : at+n] = factor times sums[first], sums[first + 1], sums[first + 4] …; `in_pairs` where
    `at` and n are even, and x begins on a 4-byte boundary.
    """

    @cuda.jit(device=True)
    def write_pairs(x, at, sums, first, factor, n):
        pair, col = cuda.local.array(1, np.uint32), cuda.threadIdx.x % 4 * 2
        for e in range(depth // 8):
            if col + 8 * e < n:
                place = first + 4 * e
                pair[0] = as_pair(x, sums[place] * factor, sums[place + 1] * factor)
                store_words(x, at + col + 8 * e, pair, 2)

    @cuda.jit(device=True)
    def write_each(x, at, sums, first, factor, n):
        for e in range(depth // 8):
            for r in range(2):
                col = 8 * e + cuda.threadIdx.x % 4 * 2 + r
                if col < n:
                    store(x, at + col, sums[first + 4 * e + r] * factor)

    return write_pairs if in_pairs else write_each


@cuda.jit(device=True)
def nothing():
    pass


@cuda.jit(device=True)
def no_wait(x):
    pass


def by_warps(cols, depth, source, fragments):
    """The `Unit` of `mma.sync`: D and E up to `depth`.

    source  "by_k" where rows begin on 16-byte boundaries, else "any" (`mma.tiles`)
    """
    STEPS, N_SCORES, N_LEFT = depth // 16, cols // 2, 4 * fragments
    ALL_SCORES = N_SCORES * fragments
    rows, n_threads = N_WARPS * FRAGMENT * fragments, 32 * N_WARPS
    held, passing = (tile(n, depth * HALVES, HALVES, n_threads, source) for n in (rows, cols))
    load_held, load_passing = load_a(held, source, HALVES), load_b(passing, source, HALVES)
    load_turned = load_b(passing, "by_row", HALVES)  # the elements of a row are the columns

    @cuda.jit(device=True)
    def multiply(scores, cache, mine, others, like):
        left, right = cuda.local.array(N_LEFT, np.uint32), cuda.local.array(4, np.uint32)
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        for r in range(ALL_SCORES):
            scores[r] = ZERO
        for step in range(STEPS):
            for f in range(fragments):
                load_held(left, 4 * f, cache, mine, warp * fragments + f, step, lane)
            for j in range(cols // 16):
                load_passing(right, 0, cache, others, j, step, lane)
                for f in range(fragments):
                    place = N_SCORES * f + 8 * j
                    multiply_add(scores, place, left, 4 * f, right, 0, like)
                    multiply_add(scores, place + 4, left, 4 * f, right, 2, like)

    @cuda.jit(device=True)
    def pack(words, scores, like):
        for f in range(fragments):
            for r in range(cols // 4):
                place = N_SCORES * f + 2 * r
                words[cols // 4 * f + r] = as_pair(like, scores[place], scores[place + 1])

    def accumulating(width):
        STEPS, N_SUMS = width // 16, width // 2

        @cuda.jit(device=True)
        def accumulate(sums, words, cache, others, like):
            right = cuda.local.array(4, np.uint32)
            lane = cuda.threadIdx.x % 32
            for j in range(cols // 16):
                for e in range(STEPS):
                    load_turned(right, 0, cache, others, e, j, lane)
                    for f in range(fragments):
                        place, left = N_SUMS * f + 8 * e, cols // 4 * f + 4 * j
                        multiply_add(sums, place, words, left, right, 0, like)
                        multiply_add(sums, place + 4, words, left, right, 2, like)

        return accumulate

    parts = -(-depth // WIDEST)
    return Unit(
        HALVES, rows, n_threads, 1, 2, source == "by_k", fragments, parts, held.size, passing.size,
        dynamic_shared, held.fetch, passing.fetch, nothing, cols // 4 * fragments, multiply, pack,
        accumulating(depth), accumulating(depth // parts), *[no_wait] * 4,
    )  # fmt: skip


def by_warpgroups(cols, depth, n_groups, together):
    """The `Unit` of `wgmma`, for compute capability 9.0 alone: rows on 16-byte boundaries."""
    PANEL, N_PANELS, N_BLOCKS = ROWS, depth // ROWS, cols // ROWS
    rows, n_threads = ROWS * n_groups, GROUP_THREADS * n_groups
    N_SCORES, N_WORDS = cols // 2, WORDS * N_BLOCKS
    HELD_PANEL, PANEL_SIZE = rows * PANEL, cols * PANEL

    @cuda.jit(device=True)
    def multiply(scores, cache, mine, others, like):
        mine += cuda.threadIdx.x // GROUP_THREADS * (ROWS * PANEL)
        for r in range(N_SCORES):
            scores[r] = ZERO
        for p in range(N_PANELS):
            multiply_tiles(scores, cache, mine + p * HELD_PANEL, others + p * PANEL_SIZE, cols, 0)

    @cuda.jit(device=True)
    def pack(words, scores, like):
        for r in range(N_WORDS):
            words[r] = as_pair(like, scores[2 * r], scores[2 * r + 1])

    @cuda.jit(device=True)
    def accumulate(sums, words, cache, others, like):
        for block in range(N_BLOCKS):
            multiply_held(
                sums, words, WORDS * block, cache, others + block * (ROWS * PANEL), depth, cols
            )

    @cuda.jit(device=True)
    def finish_scores(scores):
        wait_for_products(scores, cols)

    @cuda.jit(device=True)
    def finish_sums(sums):
        wait_for_products(sums, depth)

    @cuda.jit(device=True)
    def finish_before_sums(scores):
        wait_for_products_but(N_BLOCKS, scores, cols)

    @cuda.jit(device=True)
    def finish_before_scores(scores):
        wait_for_products_but(N_PANELS, scores, cols)

    return Unit(
        HALVES, rows, n_threads, together, 3, True, 1, 1, rows * depth, cols * depth,
        tiles_in_shared, _fetch_panels(rows, depth, n_threads),
        _fetch_panels(cols, depth, n_threads), show_to_products, N_WORDS, multiply, pack,
        accumulate, accumulate, finish_scores, finish_sums, finish_before_sums,
        finish_before_scores,
    )  # fmt: skip


def _fetch_panels(rows, depth, n_threads):
    """fetch for tiles of 16-bit numbers in panels of 64 columns, as `intrinsics.warpgroup` says."""
    WIDTH, PANEL = VECTOR_BYTES // HALVES, ROWS
    PER_ROW, STEP = depth // WIDTH, n_threads * WIDTH // depth
    N_VECTORS = rows // STEP
    assert N_VECTORS * STEP == rows and STEP % CHUNKS == 0

    @cuda.jit(device=True)
    def fetch(cache, base, x, row, n_rows, stride, start, stop, _):
        tid = np.uint32(cuda.threadIdx.x)
        line, col = np.int64(tid // np.uint32(PER_ROW)), np.int64(tid % np.uint32(PER_ROW))
        # All lines of a thread are the same number modulo 8, so that its chunk's place is the same.
        place = base + col // CHUNKS * (rows * PANEL) + line * PANEL
        place += (col % CHUNKS ^ line % CHUNKS) * WIDTH
        source = (row + line) * stride + start + col * WIDTH
        if row + rows <= n_rows and stop - start == depth:
            for u in range(N_VECTORS):
                copy_part_async(cache, place + u * (STEP * PANEL), x, source, WIDTH)
                source += STEP * stride
            return
        n_inside = min(max(stop - start - col * WIDTH, 0), WIDTH)
        for u in range(N_VECTORS):
            n = n_inside if row + line + u * STEP < n_rows else 0
            copy_part_async(cache, place + u * (STEP * PANEL), x, source if n > 0 else 0, n)
            source += STEP * stride

    return fetch
