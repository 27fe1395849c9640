"""What `halo` and `warpgroup` read, as they want it: weights tile by tile, channels side by side.

`warpgroup` copies float32 as it lies to where tensor cores read it, and these would cut off what
TF32 has not: for it, what is laid out is rounded on the way.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.conv2d.places import ZERO, divided
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.halves import pack_halves
from course_lib.runtime.intrinsics.matrix import load_word, round_tf32, subtract_words
from course_lib.runtime.intrinsics.words import as_float, load_words, store_words

BLOCK_SIZE = 256
SIDE = 64  # of the square that a block transposes
PITCH = SIDE + 1  # so that lanes meet different banks, whichever way they go
SQUARE = SIDE * PITCH
AT_ONCE = 8  # elements that a thread has on their way
QUAD = 4  # float32 in 16 bytes
QUADS = SIDE // QUAD  # of a row
PASSES = SIDE * QUADS // BLOCK_SIZE  # in which a block's threads load its quads
N_WORDS = PASSES * QUAD
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
MOST_VECTORS = SIDE * SIDE // MAX_WIDTH // BLOCK_SIZE  # of a thread


@cuda.jit(device=True)
def load_rounded(x, i):
    """x[i], a float32, rounded to TF32."""
    word = cuda.local.array(1, np.uint32)
    load_words(word, 0, x, np.int64(i), 1)
    return as_float(x, round_tf32(word[0]), 0)


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
    @cuda.jit(device=True)
    def arrange(
        i, weight, tiles, k_size, n_lines, n_columns, n_channels, n_taps, column_step,
        channel_step, tap_step, flipped,
    ):  # fmt: skip
        """tiles[chunk, tap, column, k] = the weight of channel chunk·k_size + k; element i of it.

        Zeros beyond the last channel. There are n_lines columns, of which the first n_columns are
        real. With `flipped`, as for dx, the last tap comes first. `warpgroup` has them ordered: of
        sixteen first the even ones, then the odd ones.
        """
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

    return arrange


def _alone(arrange):
    @cuda.jit
    def arrange_kernel(
        weight, tiles, k_size, n_lines, n_columns, n_channels, n_taps, column_step, channel_step,
        tap_step, flipped,
    ):  # fmt: skip
        """`arrange`, a thread for each element."""
        allow_next_kernel()
        wait_for_previous_kernel()
        arrange(
            np.int32(cuda.grid(1)), weight, tiles, k_size, n_lines, n_columns, n_channels, n_taps,
            column_step, channel_step, tap_step, flipped,
        )  # fmt: skip

    return arrange_kernel


@cuda.jit(device=True)
def arrange_split(
    i, weight, tiles, tile_n, n_lines, n_columns, n_channels, n_taps, column_step, channel_step,
    tap_step, flipped,
):  # fmt: skip
    """As `arrange`, ordered, in two parts as `warpgroup_mixed` has them, for float32.

    Of 32 channels, a tap and tile_n columns there are two tiles one behind the other. Each row of
    the one is 32 numbers rounded to TF32; of the other, 32 rests and then the 32 numbers, all
    rounded to bfloat16. i counts pairs of channels.
    """
    words, halves = cuda.local.array(2, np.uint32), cuda.local.array(2, np.uint32)
    rests, big = cuda.local.array(2, np.uint32), cuda.local.array(2, np.uint32)
    if i < tiles.shape[0] // 4:
        line, pair = i // 16, i % 16
        line, column = divided(line, n_lines)
        chunk, tap = divided(line, n_taps)
        row, place = divided(column, tile_n)
        row = np.int64(line * n_lines + row * tile_n) * 2 + place
        channel = chunk * 32 + 2 * pair
        column = column // 16 * 16 + column % 8 * 2 + column % 16 // 8
        tap = n_taps - 1 - tap if flipped else tap
        for e in range(2):
            words[e] = np.uint32(0)
            if column < n_columns and channel + e < n_channels:
                origin = column * column_step + (channel + e) * channel_step + tap * tap_step
                load_words(words, e, weight, np.int64(origin), 1)
        for e in range(2):
            big[e] = round_tf32(words[e])
            rests[e] = subtract_words(words[e], big[e])
        halves[0], rests[0] = pack_halves(words[0], words[1]), pack_halves(rests[0], rests[1])
        store_words(tiles, row * 32 + 2 * pair, big, 2)
        store_words(tiles, (row + tile_n) * 32 + pair, rests, 1)
        store_words(tiles, (row + tile_n) * 32 + 16 + pair, halves, 1)


def _transposing(load_one, ROUNDED):
    @cuda.jit
    def transpose_kernel(x, y, n_rows, n_cols, whole):
        """y[b, j, i] = x[b, i, j], of any number of matrices n_rows × n_cols; a square a block.

        `whole`: rows and columns are so long that each begins on a 16-byte boundary.
        """
        square = cuda.shared.array(SQUARE, np.float32, alignment=VECTOR_BYTES)
        allow_next_kernel()
        wait_for_previous_kernel()
        transpose(square, np.int64(cuda.blockIdx.x), x, y, n_rows, n_cols, whole)

    @cuda.jit
    def transpose_two_kernel(
        x, y, n_rows, n_cols, whole, n_first, other_x, other_y, other_rows, other_cols, other_whole
    ):
        """The same for matrices of two sizes, the first of which have n_first blocks."""
        square = cuda.shared.array(SQUARE, np.float32, alignment=VECTOR_BYTES)
        allow_next_kernel()
        wait_for_previous_kernel()
        block = np.int64(cuda.blockIdx.x)
        if block < n_first:
            transpose(square, block, x, y, n_rows, n_cols, whole)
        else:
            block -= n_first
            transpose(square, block, other_x, other_y, other_rows, other_cols, other_whole)

    @cuda.jit(device=True)
    def transpose(square, block, x, y, n_rows, n_cols, whole):
        # In 32 bits, which divide faster: a block has little else to do before its loads.
        across, down = np.int32((n_cols + SIDE - 1) // SIDE), np.int32((n_rows + SIDE - 1) // SIDE)
        line, col = divided(np.int32(block), across)
        matrix, row = divided(line, down)
        base, row, col = np.int64(matrix) * n_rows * n_cols, row * SIDE, col * SIDE
        size = min(n_rows - row, SIDE), min(n_cols - col, SIDE)
        source, result = base + row * n_cols + col, base + col * n_rows + row
        if whole and vector_width(x) == QUAD:
            transpose_words(square, x, source, n_cols, y, result, n_rows, size)
        elif whole:
            transpose_vectors(square, x, source, n_cols, y, result, n_rows, size)
        else:
            transpose_elements(square, x, source, n_cols, y, result, n_rows, size)

    @cuda.jit(device=True)
    def transpose_elements(square, x, source, n_cols, y, result, n_rows, size):
        values = cuda.local.array(AT_ONCE, np.float32)
        for first in range(cuda.threadIdx.x, SIDE * SIDE, BLOCK_SIZE * AT_ONCE):
            for u in range(AT_ONCE):  # all on their way before the first is needed
                i, j = first // SIDE + u * (BLOCK_SIZE // SIDE), first % SIDE
                values[u] = ZERO
                if i < size[0] and j < size[1]:
                    values[u] = load_one(x, source + i * n_cols + j)
            for u in range(AT_ONCE):
                i, j = first // SIDE + u * (BLOCK_SIZE // SIDE), first % SIDE
                square[i * PITCH + j] = values[u]
        cuda.syncthreads()
        for e in range(cuda.threadIdx.x, SIDE * SIDE, BLOCK_SIZE):
            j, i = e // SIDE, e % SIDE
            if i < size[0] and j < size[1]:
                store(y, result + j * n_rows + i, square[i * PITCH + j])

    @cuda.jit(device=True)
    def transpose_words(square, x, source, n_cols, y, result, n_rows, size):
        """Of float32: all by 16 bytes but what is read from the square.

        Not its rows are padded, as 16 bytes want to lie on their boundaries; quads change places.
        """
        words = cuda.local.array(N_WORDS, np.uint32)
        thread = np.int32(cuda.threadIdx.x)
        height, width = np.int32(size[0]), np.int32(size[1])
        i, quad = np.int32(thread // QUADS), np.int32(thread % QUADS)
        for u in range(PASSES):  # all on their way before the first is needed
            row = np.int32(i + u * (SIDE // PASSES))
            if row < height and quad * QUAD < width:
                place = source + np.int64(row) * n_cols + quad * QUAD
                load_words(words[u * QUAD :], 0, x, place, QUAD)
        for u in range(PASSES):
            row = np.int32(i + u * (SIDE // PASSES))
            if row < height and quad * QUAD < width:
                place = row * SIDE + (quad ^ row // QUAD % 8) * QUAD
                store_words(square, np.int64(place), words[u * QUAD :], QUAD)
        cuda.syncthreads()
        # Of a warp, eight lanes have 32 rows, and each eight another column.
        lane, warp = np.int32(thread % 32), np.int32(thread // 32)
        row = np.int32(warp % 2 * 32 + lane % 8 * QUAD)
        for u in range(PASSES):
            col = np.int32(warp // 2 * QUAD + lane // 8 + u * (SIDE // PASSES))
            if row < height and col < width:
                place = np.int32(row * SIDE + (col // QUAD ^ lane % 8) * QUAD + col % QUAD)
                for q in range(QUAD):
                    words[q] = load_word(square, np.int64(place + q * SIDE))
                    if ROUNDED:
                        words[q] = round_tf32(words[q])
                store_words(y, result + np.int64(col) * n_rows + row, words, QUAD)

    @cuda.jit(device=True)
    def transpose_vectors(square, x, source, n_cols, y, result, n_rows, size):
        """Of 16-bit numbers, in float32."""
        values, width = cuda.local.array((MOST_VECTORS, MAX_WIDTH), np.float32), vector_width(x)
        each = SIDE // width
        for u in range(MOST_VECTORS):  # all on their way before the first is needed
            e = cuda.threadIdx.x + u * BLOCK_SIZE
            i, j = e // each, e % each * width
            if i < size[0] and j < size[1]:
                load_vector(values[u], x, source + i * n_cols + j)
        for u in range(MOST_VECTORS):
            e = cuda.threadIdx.x + u * BLOCK_SIZE
            i, j = e // each, e % each * width
            if i < size[0] and j < size[1]:
                for q in range(width):
                    square[i * PITCH + j + q] = values[u, q]
        cuda.syncthreads()
        for e in range(cuda.threadIdx.x, SIDE * each, BLOCK_SIZE):
            j, i = e // each, e % each * width
            if i < size[0] and j < size[1]:
                for q in range(width):
                    values[0, q] = square[(i + q) * PITCH + j]
                store_vector(y, result + j * n_rows + i, values[0])

    return transpose, transpose_kernel, transpose_two_kernel


def _beside(transpose, arrange):
    @cuda.jit
    def transpose_and_arrange_kernel(
        x, y, n_rows, n_cols, whole, n_first, weight, tiles, k_size, n_lines, n_columns,
        n_channels, n_taps, column_step, channel_step, tap_step, flipped,
    ):  # fmt: skip
        """`transpose` in the first n_first blocks; `arrange` in those that follow, as these end."""
        square = cuda.shared.array(SQUARE, np.float32, alignment=VECTOR_BYTES)
        allow_next_kernel()
        wait_for_previous_kernel()
        block = np.int64(cuda.blockIdx.x)
        if block < n_first:
            transpose(square, block, x, y, n_rows, n_cols, whole)
        else:
            i = np.int32((block - n_first) * BLOCK_SIZE + cuda.threadIdx.x)
            arrange(
                i, weight, tiles, k_size, n_lines, n_columns, n_channels, n_taps, column_step,
                channel_step, tap_step, flipped,
            )  # fmt: skip

    return transpose_and_arrange_kernel


_arrange_ordered, _arrange_rounded = _arranging(load, True), _arranging(load_rounded, True)
arrange_kernel = _alone(_arranging(load, False))
arrange_ordered_kernel = _alone(_arrange_ordered)
arrange_rounded_kernel = _alone(_arrange_rounded)
arrange_split_kernel = _alone(arrange_split)
_transpose, transpose_kernel, transpose_two_kernel = _transposing(load, False)
_transpose_rounded, *_ = _transposing(load_rounded, True)
#: Kernel that arranges -> one that transposes images, too, and rounds them if the first one does.
WITH_IMAGES = {
    arrange_ordered_kernel: _beside(_transpose, _arrange_ordered),
    arrange_rounded_kernel: _beside(_transpose_rounded, _arrange_rounded),
    arrange_split_kernel: _beside(_transpose, arrange_split),
}
