"""A block of warpgroups that multiplies one tile of c after another, of 16-bit numbers.

To begin a tile and to store its sums takes as long as several steps along k, if the tensor cores
wait meanwhile. Here a block stays on its multiprocessor. Its copies run ahead of its products over
the end of a tile: while the sums of a tile are stored, the first steps of the next one arrive. So
the sums can't pass through shared memory, as in `warpgroup_sums`: they go to c from registers.

As lanes hold sums, the four lanes of a row hold neighbouring pairs of columns. They exchange pairs
until each has 8 neighbouring columns, which are one 16-byte store.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, RELU, VECTORS, relu
from course_lib.kernels.blocks.mma.warpgroup import GROUP_THREADS
from course_lib.runtime.intrinsics import FULL_MASK, load, store
from course_lib.runtime.intrinsics.pairs import as_pair
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.warpgroup import (
    ROW_BYTES,
    ROWS,
    WARP_ROWS,
    multiply_tiles,
    show_to_products,
    wait_for_earlier_products,
    wait_for_products,
)
from course_lib.runtime.intrinsics.words import store_words

ITEMSIZE = 2


def stream_of(shape, tiles, by_row):
    """(begin, multiply): the ring of buffers in which the tiles of a and b pass by.

    shape   a `warpgroup.Shape`
    tiles   of a and of b, as `swizzled.tile` makes them
    by_row  as `warpgroup.by_row_flags` gives it

    begin(cache, a, b, of_a, of_b): the first copies; `of_a` and `of_b` are what the tiles' `first`
    gave for the block's first tile of c.

    multiply(acc, cache, a, b, this, following, K, is_last, at): acc = this warpgroup's rows of a
    times b. `this` and `following` are (of_a, of_b) of this tile and of the block's next one, which
    is not begun if `is_last`. `at` is where in the ring it begins, and what is returned is where it
    ends: a number of elements.
    """
    TILE_M, TILE_N, N_STAGES = shape.m, shape.n, shape.n_stages
    TILE_K, BY_ROW, N_SUMS = ROW_BYTES // ITEMSIZE, by_row, shape.n // 2
    A_SIZE, STAGE = TILE_M * TILE_K, (TILE_M + TILE_N) * TILE_K
    END, AHEAD, GROUP = N_STAGES * STAGE, N_STAGES - 2, ROWS * TILE_K
    copy_a, copy_b = tiles[0].copy, tiles[1].copy

    @cuda.jit(device=True)
    def copy_tiles(cache, to, a, b, of_a, of_b, k):
        copy_a(cache, to, a, of_a, k)
        copy_b(cache, to + A_SIZE, b, of_b, k)
        end_group()

    @cuda.jit(device=True)
    def begin(cache, a, b, of_a, of_b):
        for ahead in range(AHEAD):
            copy_tiles(cache, ahead * STAGE, a, b, of_a, of_b, ahead * TILE_K)

    @cuda.jit(device=True)
    def multiply(acc, cache, a, b, this, following, K, is_last, at):
        for r in range(N_SUMS):
            acc[r] = ZERO
        mine = np.int64(np.uint32(cuda.threadIdx.x) // np.uint32(GROUP_THREADS)) * GROUP
        # Copies are AHEAD steps ahead, which the next tile's first steps must fill.
        length = max((K + TILE_K - 1) // TILE_K, AHEAD) * TILE_K
        to = at + AHEAD * STAGE
        to = to if to < END else to - END
        for k in range(AHEAD * TILE_K, length + AHEAD * TILE_K, TILE_K):
            wait_for_groups_but(AHEAD - 1)
            show_to_products()
            cuda.syncthreads()
            multiply_tiles(acc, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)
            wait_for_earlier_products()
            within = k < length
            of_a = this[0] if within else following[0]
            of_b = this[1] if within else following[1]
            beyond = K if is_last else k - length  # nothing is read from K on
            copy_tiles(cache, to, a, b, of_a, of_b, k if within else beyond)
            at = at + STAGE if at + STAGE < END else 0
            to = to + STAGE if to + STAGE < END else 0
        wait_for_products(acc, TILE_N)
        return at

    return begin, multiply


def write_of(TILE_N, BIAS_BY_ROW=False):
    """write(acc, bias, c, place, m, n, M, N, options): this thread's sums to its tile of c.

    The tile begins at row m and column n; c[place] is its matrix's first element. BIAS_BY_ROW: row
    m gets a bias instead of column n.
    """
    N_COLUMNS, WORDS, WIDTH = TILE_N // 8, 4, 8  # groups of columns; what a lane stores at once

    @cuda.jit(device=True)
    def add_bias(acc, bias, row, col, M, N):
        for j in range(N_COLUMNS):
            for q in range(4):
                at = row + q // 2 * 8 if BIAS_BY_ROW else col + 8 * j + q % 2
                if at < (M if BIAS_BY_ROW else N):
                    acc[4 * j + q] += load(bias, at)

    @cuda.jit(device=True)
    def exchange(words, lane):
        # As a 4 × 4 matrix is turned: lane t gives word i, and gets word t of lane i.
        for step in range(1, 3):
            high = lane & step
            for i in range(WORDS):
                if not i & step:
                    given = words[i] if high else words[i + step]
                    got = np.uint32(cuda.shfl_xor_sync(FULL_MASK, np.int32(given), step))
                    if high:
                        words[i] = got
                    else:
                        words[i + step] = got

    @cuda.jit(device=True)
    def write(acc, bias, c, place, m, n, M, N, options):
        thread = np.int64(np.uint32(cuda.threadIdx.x))
        lane = np.int32(thread % 4)
        row = m + thread // 32 * WARP_ROWS + thread % 32 // 4
        col = n + 2 * np.int64(lane)
        if options & ADD_BIAS:
            add_bias(acc, bias, row, col, M, N)
        if options & RELU:
            for r in range(TILE_N // 2):
                acc[r] = relu(acc[r])
        if options & VECTORS:
            words = cuda.local.array(WORDS, np.uint32)
            for half in range(2):
                to = row + 8 * half
                for j in range(0, N_COLUMNS, WORDS):
                    for i in range(WORDS):
                        r = 4 * (j + i) + 2 * half
                        words[i] = as_pair(c, acc[r], acc[r + 1])
                    exchange(words, lane)
                    mine = n + 8 * (j + np.int64(lane))
                    if to < M and mine < N:
                        store_words(c, place + to * N + mine, words, WIDTH)
        else:
            for j in range(N_COLUMNS):
                for q in range(4):
                    to, mine = row + q // 2 * 8, col + 8 * j + q % 2
                    if to < M and mine < N:
                        store(c, place + to * N + mine, acc[4 * j + q])

    return write
