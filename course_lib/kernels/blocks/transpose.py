"""Kernels that transpose matrices, such as images from one memory format to the other."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
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
from course_lib.runtime.intrinsics.matrix import load_word, round_tf32
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
MOST_VECTORS = SIDE * SIDE // MAX_WIDTH // BLOCK_SIZE  # of a thread


@cuda.jit(device=True)
def load_rounded(x, i):
    """x[i], a float32, rounded to TF32."""
    word = cuda.local.array(1, np.uint32)
    load_words(word, 0, x, np.int64(i), 1)
    return as_float(x, round_tf32(word[0]), 0)


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


transpose, transpose_kernel, transpose_two_kernel = _transposing(load, False)
transpose_rounded, *_ = _transposing(load_rounded, True)
