"""How the sums of a block of `halo` get from its warps' registers to the result.

By way of shared memory, so that what lies side by side in the result is written 16 bytes at a time.
Blocks of a cluster have sums of different channels and taps for one tile: each writes a share of
it, and reads what the others have for that from their shared memory.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma.fragments import FRAGMENT_M, FRAGMENT_N
from course_lib.runtime.intrinsics import load, store, store_vector, vector_width
from course_lib.runtime.intrinsics.cluster_vectors import WIDTH, load_vector_from_cluster

RANKS_AT_ONCE = 4  # blocks of which a thread reads what they have, before it adds that up
PARTS_AT_ONCE = RANKS_AT_ONCE * WIDTH
#: `options` of the kernel are the sum of these. PLANAR: the result lies as N·C·H·W. VECTORS: its
#: rows of pixels (PLANAR), or of channels, begin on 16-byte boundaries.
ADD_BIAS, PLANAR, VECTORS = 1, 2, 4


def results(TILE_M, TILE_N, WARP_M, WARP_N, N_THREADS, together=False):
    """(collect, write): a block's sums from its warps' registers to the result.

    `together`: the blocks of a cluster have parts of one tile's sums; `write` adds them up.
    """
    N_I, N_J = WARP_M // FRAGMENT_M, WARP_N // FRAGMENT_N
    ROW_PITCH, COLUMN_PITCH = TILE_N + 8, TILE_M + 4  # so that lanes write to different banks
    take = add_up if together else take_own

    @cuda.jit(device=True)
    def collect(sums, acc, row, col, lane, options):
        row_step, col_step = ROW_PITCH, 1
        if options & PLANAR:
            row_step, col_step = 1, COLUMN_PITCH
        place = (row + lane // 4) * row_step + (col + lane % 4 * 2) * col_step
        for i in range(N_I):
            for j in range(N_J):
                for r in range(4):
                    down, right = 16 * i + r // 2 * 8, 8 * j + r % 2
                    value = acc[4 * (i * N_J + j) + r]
                    sums[place + down * row_step + right * col_step] = value

    @cuda.jit(device=True)
    def write(
        sums, bias, result, row, image, column, n_rows, n_columns, plane, options, rank, n_blocks
    ):
        values, width = cuda.local.array(MAX_WIDTH, np.float32), vector_width(result)
        planar = options & PLANAR != 0
        first, n_inside = np.int32(row - image * plane), min(n_rows - row, TILE_M)
        i, step = np.int64(cuda.threadIdx.x), N_THREADS
        if together:  # each block writes a share of the tile
            i, step = rank * N_THREADS + i, n_blocks * N_THREADS
        while i < TILE_M * TILE_N // width:
            if planar:
                groups = np.uint32(TILE_M // width)
                m, n = np.int64(np.uint32(i) % groups) * width, np.int64(np.uint32(i) // groups)
                n_left, place = n_inside - m, n * COLUMN_PITCH + m
            else:
                groups = np.uint32(TILE_N // width)
                m, n = np.int64(np.uint32(i) // groups), np.int64(np.uint32(i) % groups) * width
                n_left, place = n_columns - column - n, m * ROW_PITCH + n
            if m < n_inside and column + n < n_columns:
                take(values, sums, place, width, n_blocks)
                for e in range(width):
                    there = column + n + (0 if planar else e)
                    if options & ADD_BIAS and there < n_columns:
                        values[e] += load(bias, there)
                _store(
                    result, values, image, first + m, column + n, n_columns, plane, planar,
                    min(n_left, width), width, options & VECTORS != 0,
                )  # fmt: skip
            i += step

    return collect, write


@cuda.jit(device=True)
def take_own(values, sums, place, width, n_blocks):
    """values[e] = sums[place + e]."""
    for e in range(width):
        values[e] = load(sums, place + e)


@cuda.jit(device=True)
def add_up(values, sums, place, width, n_blocks):
    """values[e] = Σ sums[place + e], of all blocks of the cluster in the order of their ranks."""
    parts = cuda.local.array(PARTS_AT_ONCE, np.float32)
    for e in range(0, width, WIDTH):
        for q in range(WIDTH):
            values[e + q] = ZERO
        for first in range(0, n_blocks, RANKS_AT_ONCE):
            for u in range(RANKS_AT_ONCE):  # all on their way before the first is needed
                there = min(first + u, n_blocks - 1)
                load_vector_from_cluster(parts, u * WIDTH, sums, place + e, there)
            for u in range(RANKS_AT_ONCE):
                if first + u < n_blocks:
                    for q in range(WIDTH):
                        values[e + q] += parts[u * WIDTH + q]


@cuda.jit(device=True)
def _store(result, values, image, pixel, channel, n_channels, plane, planar, n, width, whole):
    """`n` values, of neighbouring pixels (`planar`) or channels; `whole`: on 16-byte boundaries."""
    if whole:
        if planar:
            ahead, pixel = divided(np.int32(pixel), np.int32(plane))
            image = (image + ahead) * n_channels * plane + channel * plane + pixel
            store_vector(result, image, values)
        else:
            store_vector(result, (image * plane + pixel) * n_channels + channel, values)
        return
    for e in range(width):
        if e < n:
            if planar:
                ahead, rest = divided(np.int32(pixel + e), np.int32(plane))
                place = ((image + ahead) * n_channels + channel) * plane + rest
            else:
                place = (image * plane + pixel) * n_channels + channel + e
            store(result, place, values[e])
