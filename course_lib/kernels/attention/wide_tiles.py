"""Tiles of `wide_backward`, as Hopper's tensor cores read them in shared memory."""

import functools

from course_lib import cuda
from course_lib.kernels.attention.multiplying import GROUP_THREADS
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.matrix import copy_part_async
from course_lib.runtime.intrinsics.warpgroup import CHUNKS, ROWS

GROUPS, HALVES = 2, 2  # warpgroups of a block; bytes of a number
N_ROWS = GROUPS * ROWS  # queries of a block, for dq
N_THREADS = GROUPS * GROUP_THREADS
TILE, WIDTH = ROWS * ROWS, VECTOR_BYTES // HALVES  # numbers of 64 lines of 64; of a copy


@functools.cache
def fetching(rows, depth):
    """fetch(cache, base, x, row, n_rows, stride, at, n): begins to copy a tile to cache[base:].

    Rows from `row` on, `depth` columns of each from x[at + row·stride] on, as panels of 64 columns
    (`intrinsics.warpgroup`). Rows from n_rows on are zeros, and columns from n on.
    """
    LINES, PANEL = N_THREADS // CHUNKS, rows * ROWS

    @cuda.jit(device=True)
    def fetch(cache, base, x, row, n_rows, stride, at, n):
        line, chunk = cuda.threadIdx.x // CHUNKS, cuda.threadIdx.x % CHUNKS
        # All lines of a thread are the same number modulo 8, so that its chunk's place is the same.
        place = base + line * ROWS + (chunk ^ line % CHUNKS) * WIDTH
        source = at + (row + line) * stride + chunk * WIDTH
        for u in range(rows // LINES):
            left = n - chunk * WIDTH if row + line + u * LINES < n_rows else 0
            for p in range(depth // ROWS):
                count = min(max(left - p * ROWS, 0), WIDTH)
                to = place + p * PANEL + u * (LINES * ROWS)
                copy_part_async(cache, to, x, source + p * ROWS if count > 0 else 0, count)
            source += LINES * stride

    return fetch
