"""How tensor cores multiply the tiles of attention: `mma.sync` by warps, `wgmma` by warpgroups.

A block *holds* a tile of `rows` rows, and tiles of `cols` rows come by. Either way a warp has the
products of its own rows, 16 times `fragments`, in fragments (`intrinsics.matrix`): with
``g = lane // 4`` and ``t = lane % 4``, and `n` numbers of a lane for each 16 rows,

    x[n·f + 4·j], x[n·f + 4·j + 1]: row 16·f + g, columns 8·j + 2·t and 8·j + 2·t + 1
    x[n·f + 4·j + 2], x[n·f + 4·j + 3]: row 16·f + g + 8, the same columns

Products never leave registers: two fragments of 8 columns, rounded to pairs, are what the next
product takes as its left side.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.fragments import load_a, load_b
from course_lib.kernels.blocks.mma.tiles import tile
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.held import WORDS, multiply_held
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

ITEMSIZE, FRAGMENT, N_WARPS = 2, 16, 4
GROUP_THREADS = 128


class Unit(NamedTuple):
    """What multiplies the tiles of a block, and how they lie in shared memory.

    hold, fetch   (cache, base, x, row, n_rows, stride, start, stop, 1): begin to copy a tile that
                  is held, or one that comes by, as `mma.tiles` does; zeros beyond the edges
    show          all that has been copied may be multiplied; a barrier follows
    multiply      (scores, cache, mine, others, like): begins scores = the warp's rows of the held
                  tile at `mine` times the rows of the one at `others`
    accumulate    (sums, scores, cache, others, like): begins sums += scores, rounded, times the
                  tile at `others`
    finish_scores, finish_sums   what was begun is there; until then nobody touches these arrays
    """

    rows: int
    n_threads: int
    fragments: int
    held_size: int
    passing_size: int
    shared: object
    hold: object
    fetch: object
    show: object
    multiply: object
    accumulate: object
    finish_scores: object
    finish_sums: object


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
    STEPS, N_SCORES, N_SUMS, N_LEFT = depth // 16, cols // 2, depth // 2, 4 * fragments
    ALL_SCORES = N_SCORES * fragments
    rows, n_threads = N_WARPS * FRAGMENT * fragments, 32 * N_WARPS
    held, passing = (tile(n, depth * 2, ITEMSIZE, n_threads, source) for n in (rows, cols))
    load_held, load_passing = load_a(held, source, ITEMSIZE), load_b(passing, source, ITEMSIZE)
    load_turned = load_b(passing, "by_row", ITEMSIZE)  # the elements of a row are the columns

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
    def accumulate(sums, scores, cache, others, like):
        left, right = cuda.local.array(N_LEFT, np.uint32), cuda.local.array(4, np.uint32)
        lane = cuda.threadIdx.x % 32
        for j in range(cols // 16):
            for f in range(fragments):
                for r in range(4):
                    place = N_SCORES * f + 8 * j + 2 * r
                    left[4 * f + r] = as_pair(like, scores[place], scores[place + 1])
            for e in range(depth // 16):
                load_turned(right, 0, cache, others, e, j, lane)
                for f in range(fragments):
                    place = N_SUMS * f + 8 * e
                    multiply_add(sums, place, left, 4 * f, right, 0, like)
                    multiply_add(sums, place + 4, left, 4 * f, right, 2, like)

    return Unit(
        rows, n_threads, fragments, held.size, passing.size, dynamic_shared, held.fetch,
        passing.fetch, nothing, multiply, accumulate, no_wait, no_wait,
    )  # fmt: skip


def by_warpgroups(cols, depth, n_groups):
    """The `Unit` of `wgmma`, for compute capability 9.0 alone: rows on 16-byte boundaries."""
    PANEL, N_PANELS, N_BLOCKS = ROWS, depth // ROWS, cols // ROWS
    rows, n_threads = ROWS * n_groups, GROUP_THREADS * n_groups
    N_SCORES, N_WORDS, HELD_PANEL, PANEL_SIZE = cols // 2, WORDS * N_BLOCKS, rows * PANEL, cols * PANEL

    @cuda.jit(device=True)
    def multiply(scores, cache, mine, others, like):
        mine += cuda.threadIdx.x // GROUP_THREADS * (ROWS * PANEL)
        for r in range(N_SCORES):
            scores[r] = ZERO
        for p in range(N_PANELS):
            multiply_tiles(
                scores, cache, mine + p * HELD_PANEL, others + p * PANEL_SIZE, cols, 0
            )

    @cuda.jit(device=True)
    def accumulate(sums, scores, cache, others, like):
        words = cuda.local.array(N_WORDS, np.uint32)
        for r in range(N_WORDS):
            words[r] = as_pair(like, scores[2 * r], scores[2 * r + 1])
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

    return Unit(
        rows, n_threads, 1, rows * depth, cols * depth, tiles_in_shared,
        _fetch_panels(rows, depth, n_threads), _fetch_panels(cols, depth, n_threads),
        show_to_products, multiply, accumulate, finish_scores, finish_sums,
    )  # fmt: skip


def _fetch_panels(rows, depth, n_threads):
    """fetch for tiles of 16-bit numbers in panels of 64 columns, as `intrinsics.warpgroup` says."""
    WIDTH, PANEL = VECTOR_BYTES // ITEMSIZE, ROWS
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
        n_inside = min(max(stop - start - col * WIDTH, 0), WIDTH)
        source = (row + line) * stride + start + col * WIDTH
        for u in range(N_VECTORS):
            n = n_inside if row + line + u * STEP < n_rows else 0
            copy_part_async(cache, place + u * (STEP * PANEL), x, source if n > 0 else 0, n)
            source += STEP * stride

    return fetch
