"""How the sums of `warpgroup` get from registers to the result, in either memory format."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.conv2d.halo_results import ADD_BIAS, PLANAR, VECTORS
from course_lib.runtime.intrinsics import load, store
from course_lib.runtime.intrinsics.warpgroup import WARP_ROWS
from course_lib.runtime.intrinsics.words import store_floats

SLICE, PITCH = 32, 36  # positions of which a warp's sums pass through shared memory at a time
OUTSIDE = np.int32(-1)


def staged_size(shape):
    """Sums that warps have in shared memory, on their way to the result."""
    return shape.n_threads // 32 * WARP_ROWS * PITCH


def writing(EACH):
    # Of eight positions a thread has the sums of two, for two filters that follow each other.
    N_SLICES, N_SUMS, IN_SLICE = -(-EACH // SLICE), EACH // 2, SLICE // 2

    @cuda.jit(device=True)
    def move_up(acc):
        """The next slice's sums to the first places: registers have no index that could count."""
        for i in range(N_SUMS - IN_SLICE):
            acc[i] = acc[i + IN_SLICE]

    @cuda.jit(device=True)
    def write(acc, staged, places, bias, result, first, column, plane, n_columns, options):
        """The warp's sums to the result, of positions from `first` on that are pixels of it."""
        column = np.int32(column + cuda.threadIdx.x // 32 % 4 * WARP_ROWS)
        if options & PLANAR:
            write_planes(
                acc, staged, places, bias, result, first, column, plane, n_columns, options
            )
        else:
            write_channels(acc, places, bias, result, first, column, n_columns, options)

    @cuda.jit(device=True)
    def write_channels(acc, places, bias, result, first, column, n_columns, options):
        lane = np.int32(cuda.threadIdx.x % 32)
        column, first = np.int32(column + lane // 4 * 2), np.int32(first + lane % 4 * 2)
        if column >= n_columns:
            return
        add, pair = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        to = cuda.local.array(IN_SLICE, np.int64)
        for e in range(2):
            there = options & ADD_BIAS and column + e < n_columns
            add[e] = load(bias, np.int64(column + e)) if there else ZERO
        for n in range(N_SLICES):
            for i in range(0, IN_SLICE, 2):
                j = np.int32(n * SLICE + i // 4 * 8 + i % 4 // 2)
                to[i] = places[first + j] if j < EACH else np.int64(OUTSIDE)
            for i in range(0, IN_SLICE, 2):
                at = i // 4 * 4 + i % 4 // 2
                pair[0], pair[1] = acc[at] + add[0], acc[at + 2] + add[1]
                if to[i] >= 0:
                    if options & VECTORS:
                        store_floats(result, to[i] + column, pair, 0, 2)
                    else:
                        store(result, to[i] + column, pair[0])
                        if column + 1 < n_columns:
                            store(result, to[i] + column + 1, pair[1])
            move_up(acc)

    @cuda.jit(device=True)
    def write_planes(acc, staged, places, bias, result, first, column, plane, n_columns, options):
        """By way of shared memory, so that the lanes of a warp have pixels side by side."""
        lane = np.int32(cuda.threadIdx.x % 32)
        base = np.int32(cuda.threadIdx.x // 32 * (WARP_ROWS * PITCH))
        from_here = base + lane // 4 * 2 * PITCH + lane % 4 * 2
        n_filters = min(n_columns - column, WARP_ROWS)
        values = cuda.local.array(WARP_ROWS, np.float32)
        for n in range(N_SLICES):
            cuda.syncwarp()  # all have read the slice before
            for i in range(IN_SLICE):
                if i < N_SUMS:
                    staged[from_here + i % 4 // 2 * PITCH + i // 4 * 8 + i % 2] = acc[i]
            move_up(acc)
            cuda.syncwarp()
            j = np.int32(n * SLICE + lane)
            to = places[first + j] if j < EACH else np.int64(OUTSIDE)
            for c in range(WARP_ROWS):
                values[c] = staged[base + c * PITCH + lane]
            if options & ADD_BIAS:
                for c in range(WARP_ROWS):
                    values[c] += load(bias, np.int64(column + c)) if c < n_filters else ZERO
            if to >= 0:
                to += np.int64(column) * plane
                for c in range(WARP_ROWS):
                    if c < n_filters:
                        store(result, to + c * np.int64(plane), values[c])

    return write
