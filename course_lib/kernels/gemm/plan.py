"""How a product is dealt out to blocks: shapes of tiles, and parts of k."""

import math
from typing import NamedTuple

from course_lib.kernels.gemm.tensor_core import K_BYTES, Shape

#: Tiles from large to small, by mode (`fragments`). Large ones read each number less often: a block
#: reads m + n numbers for 2·m·n FLOPs of each k. `split` needs registers for two sums, so that its
#: warps have half the tile.
SHAPES = {
    "narrow": (Shape(128, 128, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2), Shape(32, 32, 2, 2, 4, 4)),
    "tf32": (Shape(128, 128, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2), Shape(32, 32, 2, 2, 4, 4)),
    "split": (Shape(128, 128, 2, 4, 3, 1), Shape(64, 64, 2, 2, 4, 2), Shape(32, 32, 2, 2, 4, 4)),
}
ENOUGH_BLOCKS = 132  # one for each multiprocessor of the largest chip of today
LEAST_TILES_OF_K = 4  # that a block works on, if k is split
MOST_SPLITS = 64


class Plan(NamedTuple):
    shape: Shape
    n_splits: int
    length: int  # of a part of k


def choose(M, N, K, itemsize, mode, fits):
    """The `Plan` for a product of this size; `fits(shape)` says whether a block's buffers do."""
    k_size = K_BYTES // itemsize
    best, most = None, 0
    for shape in SHAPES[mode]:
        is_last = shape is SHAPES[mode][-1]
        if not is_last and not (fits(shape) and 2 * M > shape.m and 2 * N > shape.n):
            continue
        n_tiles = math.ceil(M / shape.m) * math.ceil(N / shape.n)
        n_splits, length = split(K, k_size, n_tiles)
        if n_tiles * n_splits > most:
            best, most = Plan(shape, n_splits, length), n_tiles * n_splits
        if most >= ENOUGH_BLOCKS:
            break
    return best


def split(K, k_size, n_tiles):
    """(parts of k, length of each): enough for all multiprocessors, each worth its while."""
    k_tiles = math.ceil(K / k_size)
    wanted = min(ENOUGH_BLOCKS // n_tiles, k_tiles // LEAST_TILES_OF_K, MOST_SPLITS)
    if wanted <= 1:
        return 1, max(K, 1)
    length = math.ceil(k_tiles / wanted) * k_size
    return math.ceil(K / length), length
