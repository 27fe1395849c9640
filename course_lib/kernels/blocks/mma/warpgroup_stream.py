"""A block of warpgroups that multiplies one tile of c after another, of 16-bit numbers.

To begin a tile and to store its sums takes as long as several steps along k, if the tensor cores
wait meanwhile. Here a block stays on its multiprocessor. Its copies run ahead of its products over
the end of a tile: while the sums of a tile are stored, the first steps of the next one arrive. So
the sums can't pass through shared memory, as in `warpgroup_sums`: they go to c from registers.

As lanes hold sums, the four lanes of a row hold neighbouring pairs of columns. They exchange pairs
until each has 8 neighbouring columns, which are one 16-byte store.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, RELU, VECTORS, relu
from course_lib.kernels.blocks.mma.warpgroup import GROUP_THREADS
from course_lib.runtime.intrinsics import FULL_MASK, VECTOR_BYTES, load
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
from course_lib.runtime.intrinsics.words import store_floats, store_words

ITEMSIZE = 2


class Sizes(NamedTuple):
    """Of c and the sums.

    length    of the part of k that a tile sums: a multiple of 128 bytes
    in_image  tiles of c; where there are several of it, of one
    last      tile
    """

    M: np.int64
    N: np.int64
    K: np.int64
    length: np.int64
    in_image: np.uint32
    last: np.uint32


def ahead_of(shape):
    """By how many steps along k a block's copies run ahead of its products."""
    return shape.n_stages - 2


def stream_of(shape, tiles, by_row):
    """(begin, multiply): the ring of buffers in which the tiles of a and b pass by.

    shape   a `warpgroup.Shape`
    tiles   of a and of b, as `swizzled.tile` makes them
    by_row  as `warpgroup.by_row_flags` gives it

    What is summed is told by (of_a, of_b, k): what the tiles' `first` gives, and where in k its
    part begins. The part has sizes.length, of no fewer steps than `ahead_of`.

    begin(cache, a, b, this): the first copies.

    multiply(acc, cache, a, b, sizes, this, following, is_last, at): acc = this warpgroup's rows of
    a times b. `following` is what comes next, which is not begun if `is_last`. `at`, an element, is
    where in the ring it begins; returns where it ends.
    """
    TILE_M, TILE_N, N_STAGES = shape.m, shape.n, shape.n_stages
    TILE_K, BY_ROW, N_SUMS = ROW_BYTES // ITEMSIZE, by_row, shape.n // 2
    A_SIZE, STAGE = TILE_M * TILE_K, (TILE_M + TILE_N) * TILE_K
    END, AHEAD, GROUP = N_STAGES * STAGE, ahead_of(shape), ROWS * TILE_K
    copy_a, copy_b = tiles[0].copy, tiles[1].copy

    @cuda.jit(device=True)
    def copy_tiles(cache, to, a, b, of_a, of_b, k):
        copy_a(cache, to, a, of_a, k)
        copy_b(cache, to + A_SIZE, b, of_b, k)
        end_group()

    @cuda.jit(device=True)
    def begin(cache, a, b, this):
        of_a, of_b, first = this
        for step in range(AHEAD):
            copy_tiles(cache, step * STAGE, a, b, of_a, of_b, first + step * TILE_K)

    @cuda.jit(device=True)
    def multiply(acc, cache, a, b, sizes, this, following, is_last, at):
        for r in range(N_SUMS):
            acc[r] = ZERO
        mine = np.int64(np.uint32(cuda.threadIdx.x) // np.uint32(GROUP_THREADS)) * GROUP
        to = at + AHEAD * STAGE
        to = to if to < END else to - END
        for k in range(AHEAD * TILE_K, sizes.length + AHEAD * TILE_K, TILE_K):
            wait_for_groups_but(AHEAD - 1)
            show_to_products()
            cuda.syncthreads()
            multiply_tiles(acc, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)
            wait_for_earlier_products()
            within = k < sizes.length
            of_a = this[0] if within else following[0]
            of_b = this[1] if within else following[1]
            # Nothing is read from there on: a row's last vector may have zeros behind K.
            end = sizes.K + VECTOR_BYTES // ITEMSIZE
            beyond = end if is_last else following[2] + k - sizes.length
            copy_tiles(cache, to, a, b, of_a, of_b, this[2] + k if within else beyond)
            at = at + STAGE if at + STAGE < END else 0
            to = to + STAGE if to + STAGE < END else 0
        wait_for_products(acc, TILE_N)
        return at

    return begin, multiply


def write_of(TILE_N, bias_by_row=False, of_floats=False):
    """write(acc, bias, c, place, m, n, M, N, options): this thread's sums to its tile of c.

    The tile begins at row m and column n; c[place] is its matrix's first element.

    bias_by_row  row m gets a bias instead of column n
    of_floats    c is float32, of which two neighbours are stored at once
    """
    N_COLUMNS, WORDS, WIDTH = TILE_N // 8, 4, 8  # groups of columns; what a lane stores at once

    @cuda.jit(device=True)
    def add_by_row(acc, bias, row, col, M, N):
        low = load(bias, row) if row < M else ZERO
        high = load(bias, row + 8) if row + 8 < M else ZERO
        for r in range(TILE_N // 2):
            acc[r] += high if r & 2 else low

    @cuda.jit(device=True)
    def add_by_column(acc, bias, row, col, M, N):
        for j in range(N_COLUMNS):
            at = col + 8 * j
            low = load(bias, at) if at < N else ZERO
            high = load(bias, at + 1) if at + 1 < N else ZERO
            for r in range(4):
                acc[4 * j + r] += high if r & 1 else low

    add_bias = add_by_row if bias_by_row else add_by_column

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
    def store_elements(acc, c, line, col, rows_left, N):
        for half in range(2):
            if 8 * half < rows_left:
                for j in range(N_COLUMNS):
                    for q in range(2):
                        mine = col + 8 * j + q
                        if mine < N:
                            to = line + 8 * half * N + mine
                            store_floats(c, to, acc, 4 * j + 2 * half + q, 1)

    @cuda.jit(device=True)
    def store_floats_of(acc, c, place, row, n, M, N, lane):
        for half in range(2):
            to = row + 8 * half
            for j in range(N_COLUMNS):
                mine = n + 8 * j + 2 * np.int64(lane)
                if to < M and mine < N:
                    store_floats(c, place + to * N + mine, acc, 4 * j + 2 * half, 2)

    def storing(HALF):
        @cuda.jit(device=True)
        def store_half(acc, c, place, to, n, M, N, lane):
            words = cuda.local.array(WORDS, np.uint32)
            for j in range(0, N_COLUMNS, WORDS):
                for i in range(WORDS):
                    r = 4 * (j + i) + 2 * HALF
                    words[i] = as_pair(c, acc[r], acc[r + 1])
                exchange(words, lane)
                mine = n + 8 * (j + np.int64(lane))
                if to < M and mine < N:
                    store_words(c, place + to * N + mine, words, WIDTH)

        return store_half

    upper, lower = storing(0), storing(1)

    @cuda.jit(device=True)
    def store_vectors_of(acc, c, place, row, n, M, N, lane):
        upper(acc, c, place, row, n, M, N, lane)
        lower(acc, c, place, row + 8, n, M, N, lane)

    store_all = store_floats_of if of_floats else store_vectors_of

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
            store_all(acc, c, place, row, n, M, N, lane)
        else:
            store_elements(acc, c, place + row * N, col, M - row, N)

    return write
