"""What `halo` reads, laid out as it wants it: weights tile by tile, channels side by side."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.conv2d.places import ZERO, divided
from course_lib.runtime.intrinsics import allow_next_kernel, load, store, wait_for_previous_kernel

BLOCK_SIZE = 256
SIDE = 64  # of the square that a block transposes
ROWS = BLOCK_SIZE // 32  # of it that its warps read at a time
HALVES = 2  # of a row of it, 32 elements each
PITCH = SIDE + 1  # so that lanes meet different banks, whichever way they go


@cuda.jit
def arrange_kernel(
    weight, tiles, k_size, n_lines, n_columns, n_channels, n_taps, column_step, channel_step,
    tap_step, flipped,
):  # fmt: skip
    """tiles[chunk, tap, column, k] = the weight of channel chunk·k_size + k, zeros beyond the last.

    There are n_lines columns, of which the first n_columns are real. With `flipped`, as for dx, the
    last tap comes first. A thread for each element.
    """
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int32(cuda.grid(1))
    if i < tiles.shape[0]:
        line, k = divided(i, k_size)
        line, column = divided(line, n_lines)
        chunk, tap = divided(line, n_taps)
        channel, value = chunk * k_size + k, ZERO
        if column < n_columns and channel < n_channels:
            tap = n_taps - 1 - tap if flipped else tap
            value = load(weight, column * column_step + channel * channel_step + tap * tap_step)
        store(tiles, i, value)


@cuda.jit
def transpose_kernel(x, y, n_rows, n_cols):
    """y[b, j, i] = x[b, i, j], of any number of matrices n_rows × n_cols; a square a block."""
    square = cuda.shared.array((SIDE, PITCH), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    across, down = (n_cols + SIDE - 1) // SIDE, (n_rows + SIDE - 1) // SIDE
    block = np.int64(cuda.blockIdx.x)
    base = block // (across * down) * n_rows * n_cols
    row, col = block // across % down * SIDE, block % across * SIDE
    for u in range(SIDE // ROWS):
        for half in range(HALVES):
            i, j = warp + u * ROWS, lane + half * 32
            if row + i < n_rows and col + j < n_cols:
                square[i, j] = load(x, base + (row + i) * n_cols + col + j)
    cuda.syncthreads()
    for u in range(SIDE // ROWS):
        for half in range(HALVES):
            i, j = lane + half * 32, warp + u * ROWS
            if row + i < n_rows and col + j < n_cols:
                store(y, base + (col + j) * n_rows + row + i, square[i, j])
