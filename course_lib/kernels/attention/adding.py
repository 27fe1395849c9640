"""dq by atomics: what a block of keys adds to the gradients of the queries that come by.

The way `atomic` of `tensor_core`. Who walks over queries for dk and dv has the gradients of their
scores; times the keys that it holds, these are a part of dq. So scores are computed once instead of
twice, 5 products instead of 7. The parts of all blocks meet in memory, in float32, and are added in
the order in which they come: two runs may differ in the last bits.

The gradients go to shared memory as they are, transposed: a line of 64 queries for each key, a tile
by rows (`intrinsics.warpgroup`). Each warpgroup multiplies all of them by a range of the keys'
columns. Sums lie in memory as lanes hold them, four numbers of a lane together: a warp adds 512
bytes that follow one another. `sums_kernel` puts them into their places.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.multiplying import (
    FRAGMENT,
    GROUP_THREADS,
    by_warpgroups,
    row_writer,
)
from course_lib.kernels.attention.scores import place_of_block, sequence
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics import load_vector
from course_lib.runtime.intrinsics.atomics import add_four
from course_lib.runtime.intrinsics.warpgroup import (
    A_BY_ROW,
    B_BY_ROW,
    CHUNKS,
    ROWS,
    multiply_tiles,
    wait_for_products,
)
from course_lib.runtime.intrinsics.words import store_words

BY_ROW, TILE = A_BY_ROW + B_BY_ROW, ROWS * ROWS  # 64 lines of 64 numbers
CHUNK = ROWS // CHUNKS


class Adding(NamedTuple):
    """How a block adds to dq.

    size         numbers of a tile of gradients in shared memory
    keep         (cache, base, words): the warp's rows of such a tile, packed, go to `base`
    add          (sums, at, cache, base): the tile at `base` times the keys held at 0 is added to
                 the sums of a tile of queries, which begin at `at`
    sums_kernel  dq of all sums
    """

    size: int
    keep: object
    add: object
    sums_kernel: object


@functools.cache
def sums_kernel_for(cols, depth, n_groups):
    """The kernel that makes dq of what blocks of `n_groups` warpgroups have added."""
    N_THREADS, WIDTH = GROUP_THREADS * n_groups, depth // n_groups
    N_SUMS, N_FOURS = WIDTH // 2, WIDTH // 8
    write_row = row_writer(WIDTH, True)

    @cuda.jit
    def sums_kernel(sums, q_starts, k_starts, dq, shape, dq_at, look):
        """A tile of queries a block: its sums, scaled, become dq.

        sums  float32, flat; dq  float16 or bfloat16, flat; q_starts, k_starts  int32
        shape, dq_at, look  `problem.Shape`, `Place`, `Look`
        """
        part, four = cuda.local.array(N_SUMS, np.float32), cuda.local.array(4, np.float32)
        tile, h, b = place_of_block((shape.T + cols - 1) // cols, shape)
        batch, q_first, n_queries, _, _, _ = sequence(b, shape, look, q_starts, k_starts)
        at = cuda.blockIdx.x * np.int64(cols * depth)
        for r in range(N_FOURS):
            load_vector(four, sums, at + (r * N_THREADS + cuda.threadIdx.x) * 4)
            for n in range(4):
                part[4 * r + n] = four[n]
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        column = warp // 4 * WIDTH
        query = tile * cols + warp % 4 * FRAGMENT + lane // 4
        first = batch * dq_at.batch + h * dq_at.head + q_first * dq_at.row + column
        for half in range(2):
            i = query + 8 * half
            if i < n_queries:
                write_row(
                    dq, first + i * dq_at.row, part, 2 * half, look.scale, shape.D - column
                )

    return sums_kernel


def by_adding_warpgroups(cols, depth, n_groups, together):
    """`multiplying.by_warpgroups`, with `adding`; cols is 64."""
    unit = by_warpgroups(cols, depth, n_groups, together)
    N_THREADS, N_LINES = unit.n_threads, unit.rows // ROWS
    WIDTH = depth // n_groups  # columns of a warpgroup
    N_SUMS, N_FOURS, PANEL = WIDTH // 2, WIDTH // 8, unit.rows * ROWS
    assert cols == ROWS and WIDTH in (ROWS // 2, ROWS)

    @cuda.jit(device=True)
    def keep(cache, base, words):
        pair = cuda.local.array(1, np.uint32)
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        place = base + (warp * FRAGMENT + lane // 4) * ROWS + lane % 4 * 2
        for chunk in range(CHUNKS):
            for half in range(2):
                pair[0] = words[2 * chunk + half]
                at = place + half * (8 * ROWS) + (chunk ^ lane // 4) * CHUNK
                store_words(cache, at, pair, 2)

    @cuda.jit(device=True)
    def add(sums, at, cache, base):
        part = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            part[r] = ZERO
        column = cuda.threadIdx.x // GROUP_THREADS * WIDTH
        keys = column // ROWS * PANEL + column % ROWS
        for line in range(N_LINES):
            multiply_tiles(part, cache, base + line * TILE, keys + line * TILE, WIDTH, BY_ROW)
        wait_for_products(part, WIDTH)
        for r in range(N_FOURS):
            add_four(sums, at + (r * N_THREADS + cuda.threadIdx.x) * 4, part, 4 * r)

    return unit._replace(adding=Adding(PANEL, keep, add, sums_kernel_for(cols, depth, n_groups)))
