"""How the sums of `gather` get from registers to the result, in either memory format."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma.warpgroup_sums import PADDING, sums_of
from course_lib.kernels.conv2d.halo_results import ADD_BIAS, PLANAR, VECTORS
from course_lib.runtime.intrinsics import load, load_vector, store, store_vector, vector_width
from course_lib.runtime.intrinsics.warpgroup import WARP_ROWS

NOWHERE = np.int64(-1)


def pitch_of(size):
    """float32 from one row, or column, of a tile's sums to the next."""
    return size + PADDING


def results(TILE_M, TILE_N, N_THREADS):
    """(find_places, write) for blocks of N_THREADS threads with such tiles of the result.

    find_places(places, row, n_rows, grid, residue, split, z): where column 0 of each row goes
    write(acc, sums, places, bias, result, column, plane, split, z): the tile; `sums` is shared
        memory, and with PLANAR columns lie `plane` apart
    """
    # Lanes write sums by columns to different banks: four columns of eight rows each.
    N_COLUMNS, PITCH, COLUMN_PITCH = TILE_N // 8, pitch_of(TILE_N), TILE_M + 4
    collect, _ = sums_of(TILE_M, TILE_N, N_THREADS)

    @cuda.jit(device=True)
    def find_places(places, row, n_rows, grid, residue, split, z):
        residue_h, residue_w = divided(residue, z.step_w)
        plane = np.int64(z.result_h) * z.result_w
        for i in range(cuda.threadIdx.x, TILE_M, N_THREADS):
            image, rest = divided(np.int32(row + i), np.int32(grid[0] * grid[1]))
            p, q = divided(rest, grid[1])
            h, w = np.int32(p * z.step_h + residue_h), np.int32(q * z.step_w + residue_w)
            pixel, first = np.int64(h) * z.result_w + w, (split * z.n_images + image) * plane
            if z.options & PLANAR:
                place = first * z.n_columns + pixel
            else:
                place = (first + pixel) * z.n_columns
            places[i] = place if row + i < n_rows else NOWHERE

    @cuda.jit(device=True)
    def collect_planes(sums, acc):
        """As `collect`, but column after column."""
        tid = np.int32(cuda.threadIdx.x)
        row, col = tid // 32 * WARP_ROWS + tid % 32 // 4, tid % 4 * 2
        for j in range(N_COLUMNS):
            for e in range(4):
                sums[(col + 8 * j + e % 2) * COLUMN_PITCH + row + e // 2 * 8] = acc[4 * j + e]

    @cuda.jit(device=True)
    def write(acc, sums, places, bias, result, column, plane, split, z):
        biased = z.options & ADD_BIAS != 0 and split == 0
        if z.options & PLANAR:
            collect_planes(sums, acc)
            cuda.syncthreads()
            write_planes(sums, places, bias, biased, result, column, plane, z)
        else:
            collect(sums, acc)
            cuda.syncthreads()
            write_rows(sums, places, bias, biased, result, column, z)

    @cuda.jit(device=True)
    def write_rows(sums, places, bias, biased, result, column, z):
        values, width = cuda.local.array(MAX_WIDTH, np.float32), vector_width(result)
        for i in range(cuda.threadIdx.x * width, TILE_M * TILE_N, N_THREADS * width):
            row, col = i // TILE_N, i % TILE_N
            place, n_left = places[row], np.int32(z.n_columns - column - col)
            if place >= 0 and n_left > 0:
                place += column + col
                for q in range(0, width, 4):
                    load_vector(values[q:], sums, np.int64(row * PITCH + col + q))
                if biased:
                    for q in range(width):
                        values[q] += load(bias, column + col + q) if q < n_left else ZERO
                if z.options & VECTORS:
                    store_vector(result, place, values)
                else:
                    for q in range(width):
                        if q < n_left:
                            store(result, place + q, values[q])

    @cuda.jit(device=True)
    def write_planes(sums, places, bias, biased, result, column, plane, z):
        values, width = cuda.local.array(MAX_WIDTH, np.float32), vector_width(result)
        n_columns = min(np.int32(z.n_columns - column), np.int32(TILE_N))
        if z.options & VECTORS == 0:  # neighbours write pixels side by side
            row = np.int32(cuda.threadIdx.x % TILE_M)
            place = places[row] + np.int64(column) * plane
            if places[row] >= 0:
                for col in range(cuda.threadIdx.x // TILE_M, n_columns, N_THREADS // TILE_M):
                    total = sums[col * COLUMN_PITCH + row]
                    if biased:
                        total += load(bias, column + col)
                    store(result, place + col * plane, total)
            return
        for i in range(cuda.threadIdx.x * width, n_columns * TILE_M, N_THREADS * width):
            col, row = i // TILE_M, i % TILE_M
            for q in range(0, width, 4):
                load_vector(values[q:], sums, np.int64(col * COLUMN_PITCH + row + q))
            if biased:
                add = load(bias, column + col)
                for q in range(width):
                    values[q] += add
            if places[row] >= 0:  # rows of a vector are pixels side by side
                store_vector(result, places[row] + (column + col) * plane, values)

    return find_places, write
