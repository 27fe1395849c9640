"""How the weights of groups are spread, so that many groups are multiplied as one (`grouped_plan`).

A spread weight is 0 where filter and channel are of different groups.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.transpose import load_rounded, transpose, transpose_rounded
from course_lib.kernels.conv2d.arranging import alone, beside
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
)

COLUMNS = 64  # of a tile


def _place_in(load_weight):
    @cuda.jit(device=True)
    def weight_of(weight, column, channel, tap, counts, n_taps, swapped, last):
        """The weight that joins a column with a channel, or 0 where their groups are not the same.

        counts   columns and channels of a group
        swapped  whether columns are the weights' channels, and taps are turned, as for dx
        """
        of_column, column_in = divided(column, counts[0])
        of_channel, channel_in = divided(channel, counts[1])
        k, c, n_channels = column, channel_in, counts[1]
        if swapped:
            k, c, n_channels, tap = channel, column_in, counts[0], n_taps - 1 - tap
        place = np.int64(k) * (n_channels * n_taps)
        place += tap * n_channels + c if last else c * n_taps + tap
        return load_weight(weight, place) if of_column == of_channel else ZERO

    return weight_of


_weight_of, _rounded_of = _place_in(load), _place_in(load_rounded)


@cuda.jit
def spread_kernel(
    weight, spread, n_columns, n_channels, per_part, part_channels, n_joined, n_taps, gathers, last
):
    """spread (filters, n_joined, taps) = weight (filters, n_channels, taps) among zeros.

    n_columns, n_channels    of a group
    per_part, part_channels  filters of the groups that are joined, and their channels
    gathers                  the reverse: `spread` is read, and its blocks become `weight`
    last                     whether channels lie behind taps
    """
    allow_next_kernel()
    wait_for_previous_kernel()
    i, width = np.int32(cuda.grid(1)), n_channels if gathers else n_joined
    if i < (weight.shape[0] if gathers else spread.shape[0]):
        line, inner = divided(i, np.int32(width * n_taps))
        (tap, c) = divided(inner, width) if last else divided(inner, n_taps)
        if not last:
            tap, c = c, tap
        part, _ = divided(line, per_part)
        if gathers:
            channel = divided(line, n_columns)[0] * n_channels + c - part * part_channels
            place = np.int64(line) * (n_joined * n_taps)
            place += tap * n_joined + channel if last else channel * n_taps + tap
            store(weight, i, load(spread, place))
        else:
            channel = np.int32(part * part_channels + c)
            counts = n_columns, n_channels
            store(spread, i, _weight_of(weight, line, channel, tap, counts, n_taps, False, last))


def _tiling(weight_of):
    @cuda.jit(device=True)
    def spread_tiles(
        i, weight, tiles, k_size, n_lines, n_columns, n_channels, all_columns, part_channels,
        n_taps, last, swapped,
    ):  # fmt: skip
        """tiles[chunk, tap, column, k], ordered as `arrange` does it for `warpgroup`; element i.

        k_size, n_lines        channels of a chunk; columns, those that fill the last tile included
        n_columns, n_channels  of a group; there are all_columns
        part_channels          channels that each COLUMNS columns read
        last, swapped          as `weight_of` has them
        """
        if i < tiles.shape[0]:
            line, k = divided(i, k_size)
            line, column = divided(line, n_lines)
            chunk, tap = divided(line, n_taps)
            column = np.int32(column // 16 * 16 + column % 8 * 2 + column % 16 // 8)
            c, value = np.int32(chunk * k_size + k), ZERO
            if column < all_columns and c < part_channels:
                channel = np.int32(column // COLUMNS * part_channels + c)
                counts = n_columns, n_channels
                value = weight_of(weight, column, channel, tap, counts, n_taps, swapped, last)
            store(tiles, i, value)

    return spread_tiles


_tiles, _rounded_tiles = _tiling(_weight_of), _tiling(_rounded_of)
#: Bytes of a number -> (kernel that spreads weights for `warpgroup`, and with images, transposed).
TILES = {
    2: (alone(_tiles), beside(transpose, _tiles)),
    4: (alone(_rounded_tiles), beside(transpose_rounded, _rounded_tiles)),
}
KERNELS = spread_kernel, *TILES[2], *TILES[4]
