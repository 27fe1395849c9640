"""What `halo` reads, laid out as it wants it: weights tile by tile, channels side by side."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.conv2d.places import ZERO, divided
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 256
SIDE = 64  # of the square that a block transposes
PITCH = SIDE + 1  # so that lanes meet different banks, whichever way they go
AT_ONCE = 8  # elements that a thread has on their way
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes


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
def transpose_kernel(x, y, n_rows, n_cols, whole):
    """y[b, j, i] = x[b, i, j], of any number of matrices n_rows × n_cols; a square a block.

    `whole`: rows and columns are so long that each begins on a 16-byte boundary.
    """
    square = cuda.shared.array((SIDE, PITCH), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    _transpose(square, np.int64(cuda.blockIdx.x), x, y, n_rows, n_cols, whole)


@cuda.jit
def transpose_two_kernel(
    x, y, n_rows, n_cols, whole, n_first, other_x, other_y, other_rows, other_cols, other_whole
):
    """The same for matrices of two sizes, the first of which have n_first blocks."""
    square = cuda.shared.array((SIDE, PITCH), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.blockIdx.x)
    if block < n_first:
        _transpose(square, block, x, y, n_rows, n_cols, whole)
    else:
        block -= n_first
        _transpose(square, block, other_x, other_y, other_rows, other_cols, other_whole)


@cuda.jit(device=True)
def _transpose(square, block, x, y, n_rows, n_cols, whole):
    across, down = (n_cols + SIDE - 1) // SIDE, (n_rows + SIDE - 1) // SIDE
    row, col = block // across % down * SIDE, block % across * SIDE
    base = block // (across * down) * n_rows * n_cols
    size = min(n_rows - row, SIDE), min(n_cols - col, SIDE)
    source, result = base + row * n_cols + col, base + col * n_rows + row
    if whole:
        _transpose_vectors(square, x, source, n_cols, y, result, n_rows, size)
    else:
        _transpose_elements(square, x, source, n_cols, y, result, n_rows, size)


@cuda.jit(device=True)
def _transpose_elements(square, x, source, n_cols, y, result, n_rows, size):
    values = cuda.local.array(AT_ONCE, np.float32)
    for first in range(cuda.threadIdx.x, SIDE * SIDE, BLOCK_SIZE * AT_ONCE):
        for u in range(AT_ONCE):  # all on their way before the first is needed
            i, j = first // SIDE + u * (BLOCK_SIZE // SIDE), first % SIDE
            values[u] = ZERO
            if i < size[0] and j < size[1]:
                values[u] = load(x, source + i * n_cols + j)
        for u in range(AT_ONCE):
            square[first // SIDE + u * (BLOCK_SIZE // SIDE), first % SIDE] = values[u]
    cuda.syncthreads()
    for e in range(cuda.threadIdx.x, SIDE * SIDE, BLOCK_SIZE):
        j, i = e // SIDE, e % SIDE
        if i < size[0] and j < size[1]:
            store(y, result + j * n_rows + i, square[i, j])


@cuda.jit(device=True)
def _transpose_vectors(square, x, source, n_cols, y, result, n_rows, size):
    values, width = cuda.local.array(MAX_WIDTH, np.float32), vector_width(x)
    each = SIDE // width
    for e in range(cuda.threadIdx.x, SIDE * each, BLOCK_SIZE):
        i, j = e // each, e % each * width
        if i < size[0] and j < size[1]:
            load_vector(values, x, source + i * n_cols + j)
            for q in range(width):
                square[i, j + q] = values[q]
    cuda.syncthreads()
    for e in range(cuda.threadIdx.x, SIDE * each, BLOCK_SIZE):
        j, i = e // each, e % each * width
        if i < size[0] and j < size[1]:
            for q in range(width):
                values[q] = square[i + q, j]
            store_vector(y, result + j * n_rows + i, values)
