"""How the sums of a block of warpgroups get from registers to c.

As `results` does it, by way of shared memory, so that rows of c are written in one go. Here a block
has the multiprocessor for itself, and nobody multiplies meanwhile: so the sums are stored two at a
time, as lanes have them, and read four at a time, both without bank conflicts.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH
from course_lib.kernels.blocks.mma.epilogue import VECTORS, finish
from course_lib.runtime.intrinsics import load_vector, store, store_vector, vector_width
from course_lib.runtime.intrinsics.warpgroup import WARP_ROWS
from course_lib.runtime.intrinsics.words import store_floats

PADDING = 8  # float32, from one row to the next: so that lanes write to different banks


def sums_of(TILE_M, TILE_N, N_THREADS, BIAS_BY_ROW=False):
    """(collect, write) for blocks of N_THREADS threads with such tiles of c.

    collect(sums, acc): everybody's `acc` (see `intrinsics.warpgroup`) to the shared array `sums`.
    Barriers before and after it are the caller's.

    write(sums, bias, c, m, n, M, N, options): the tile at row m and column n to c. BIAS_BY_ROW: row
    m gets a bias instead of column n.
    """
    PITCH, N_COLUMNS = TILE_N + PADDING, TILE_N // 8

    @cuda.jit(device=True)
    def collect(sums, acc):
        tid = np.int64(np.uint32(cuda.threadIdx.x))
        warp, lane = tid // 32, tid % 32
        place = (warp * WARP_ROWS + lane // 4) * PITCH + lane % 4 * 2
        for j in range(N_COLUMNS):
            store_floats(sums, place + 8 * j, acc, 4 * j, 2)
            store_floats(sums, place + 8 * PITCH + 8 * j, acc, 4 * j + 2, 2)

    @cuda.jit(device=True)
    def write(sums, bias, c, m, n, M, N, options):
        values = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(c)
        i = np.int64(np.uint32(cuda.threadIdx.x)) * width
        while i < TILE_M * TILE_N:
            row, col = m + i // TILE_N, n + i % TILE_N
            if row < M and col < N:
                for q in range(0, width, 4):
                    load_vector(values[q:], sums, i // TILE_N * PITCH + i % TILE_N + q)
                for q in range(width):
                    if col + q < N:
                        at = row if BIAS_BY_ROW else col + q
                        values[q] = finish(values[q], bias, at, options)
                if options & VECTORS:
                    store_vector(c, row * N + col, values)
                else:
                    for q in range(width):
                        if col + q < N:
                            store(c, row * N + col + q, values[q])
            i += N_THREADS * width

    return collect, write
