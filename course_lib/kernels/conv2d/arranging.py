"""What `halo` and `warpgroup` read, as they want it: weights tile by tile, channels side by side.

`warpgroup` copies float32 as it lies to where tensor cores read it, and these would cut off what
TF32 has not: for it, what is laid out is rounded on the way.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.transpose import (
    BLOCK_SIZE,
    SQUARE,
    load_rounded,
    transpose,
    transpose_rounded,
)
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.halves import pack_halves
from course_lib.runtime.intrinsics.matrix import round_tf32, subtract_words
from course_lib.runtime.intrinsics.words import load_words, store_words


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


def alone(arrange):
    """The kernel of a device function like `arrange`."""

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


def beside(transpose, arrange):
    """The kernel that transposes images, too."""

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
arrange_kernel = alone(_arranging(load, False))
arrange_ordered_kernel = alone(_arrange_ordered)
arrange_rounded_kernel = alone(_arrange_rounded)
arrange_split_kernel = alone(arrange_split)
#: Kernel that arranges -> one that transposes images, too, and rounds them if the first one does.
WITH_IMAGES = {
    arrange_ordered_kernel: beside(transpose, _arrange_ordered),
    arrange_rounded_kernel: beside(transpose_rounded, _arrange_rounded),
    arrange_split_kernel: beside(transpose, arrange_split),
}
