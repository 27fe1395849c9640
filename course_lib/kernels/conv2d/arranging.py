"""What `halo` and `warpgroup` read, as they want it: weights tile by tile, channels side by side.

`warpgroup` copies float32 as it lies to where tensor cores read it, and these would cut off what
TF32 has not: for it, what is laid out is rounded on the way.
"""

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
from course_lib.runtime.matrix import round_tf32
from course_lib.runtime.words import as_float, load_words, store_words

BLOCK_SIZE = 256
SIDE = 64  # of the square that a block transposes
PITCH = SIDE + 1  # so that lanes meet different banks, whichever way they go
AT_ONCE = 8  # elements that a thread has on their way
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
MOST_VECTORS = 4  # of a thread, of the widest dtype


@cuda.jit(device=True)
def load_rounded(x, i):
    """x[i], a float32, rounded to TF32."""
    word = cuda.local.array(1, np.uint32)
    load_words(word, 0, x, np.int64(i), 1)
    return as_float(x, round_tf32(word[0]), 0)


@cuda.jit(device=True)
def load_vector_rounded(values, x, i):
    """values[q] = x[i + q], four float32, rounded to TF32."""
    words = cuda.local.array(4, np.uint32)
    load_words(words, 0, x, i, 4)
    for q in range(4):
        values[q] = as_float(x, round_tf32(words[q]), 0)


@cuda.jit
def round_kernel(x, y):
    """y[i] = x[i], float32, rounded to TF32; 16 bytes a thread, and x begins on such a boundary."""
    allow_next_kernel()
    wait_for_previous_kernel()
    words = cuda.local.array(4, np.uint32)
    i = np.int64(cuda.grid(1)) * 4
    if i + 4 <= x.shape[0]:
        load_words(words, 0, x, i, 4)
        for q in range(4):
            words[q] = round_tf32(words[q])
        store_words(y, i, words, 4)
    elif i < x.shape[0]:
        for j in range(i, x.shape[0]):
            store(y, j, load_rounded(x, j))


def _arranging(load_weight, ORDERED):
    @cuda.jit
    def arrange_kernel(
        weight, tiles, k_size, n_lines, n_columns, n_channels, n_taps, column_step, channel_step,
        tap_step, flipped,
    ):  # fmt: skip
        """tiles[chunk, tap, column, k] = the weight of channel chunk·k_size + k.

        Zeros beyond the last channel. There are n_lines columns, of which the first n_columns are
        real. With `flipped`, as for dx, the last tap comes first. A thread for each element.
        `warpgroup` has them ordered: of sixteen first the even ones, then the odd ones.
        """
        allow_next_kernel()
        wait_for_previous_kernel()
        i = np.int32(cuda.grid(1))
        if i < tiles.shape[0]:
            line, k = divided(i, k_size)
            line, column = divided(line, n_lines)
            chunk, tap = divided(line, n_taps)
            channel, value = chunk * k_size + k, ZERO
            if ORDERED:
                column = column // 16 * 16 + column % 8 * 2 + column % 16 // 8
            if column < n_columns and channel < n_channels:
                tap = n_taps - 1 - tap if flipped else tap
                value = load_weight(
                    weight, column * column_step + channel * channel_step + tap * tap_step
                )
            store(tiles, i, value)

    return arrange_kernel


def _transposing(load_one, load_some):
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
        # In 32 bits, which divide faster: a block has little else to do before its loads.
        across, down = np.int32((n_cols + SIDE - 1) // SIDE), np.int32((n_rows + SIDE - 1) // SIDE)
        line, col = divided(np.int32(block), across)
        matrix, row = divided(line, down)
        base, row, col = np.int64(matrix) * n_rows * n_cols, row * SIDE, col * SIDE
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
                    values[u] = load_one(x, source + i * n_cols + j)
            for u in range(AT_ONCE):
                square[first // SIDE + u * (BLOCK_SIZE // SIDE), first % SIDE] = values[u]
        cuda.syncthreads()
        for e in range(cuda.threadIdx.x, SIDE * SIDE, BLOCK_SIZE):
            j, i = e // SIDE, e % SIDE
            if i < size[0] and j < size[1]:
                store(y, result + j * n_rows + i, square[i, j])

    @cuda.jit(device=True)
    def _transpose_vectors(square, x, source, n_cols, y, result, n_rows, size):
        values, width = cuda.local.array((MOST_VECTORS, MAX_WIDTH), np.float32), vector_width(x)
        each = SIDE // width
        for u in range(MOST_VECTORS):  # all on their way before the first is needed
            e = cuda.threadIdx.x + u * BLOCK_SIZE
            i, j = e // each, e % each * width
            if i < size[0] and j < size[1]:
                load_some(values[u], x, source + i * n_cols + j)
        for u in range(MOST_VECTORS):
            e = cuda.threadIdx.x + u * BLOCK_SIZE
            i, j = e // each, e % each * width
            if i < size[0] and j < size[1]:
                for q in range(width):
                    square[i, j + q] = values[u, q]
        cuda.syncthreads()
        for e in range(cuda.threadIdx.x, SIDE * each, BLOCK_SIZE):
            j, i = e // each, e % each * width
            if i < size[0] and j < size[1]:
                for q in range(width):
                    values[0, q] = square[i + q, j]
                store_vector(y, result + j * n_rows + i, values[0])

    return transpose_kernel, transpose_two_kernel


arrange_kernel = _arranging(load, False)
arrange_ordered_kernel = _arranging(load, True)
arrange_rounded_kernel = _arranging(load_rounded, True)
transpose_kernel, transpose_two_kernel = _transposing(load, load_vector)
transpose_rounded_kernel, _ = _transposing(load_rounded, load_vector_rounded)
