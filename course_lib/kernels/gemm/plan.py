"""How a product is dealt out to blocks: shapes of tiles, and parts of k."""

import math
from typing import NamedTuple

from course_lib.kernels.blocks.mma.shape import K_BYTES, Shape

#: Tiles from large to small, by mode (`mma.mainloop`). Large ones read each number less often: a
#: block reads m + n numbers for 2·m·n FLOPs of each k. The largest leave one block to a
#: multiprocessor.
SHAPES = {
    "narrow": (
        Shape(256, 128, 4, 2, 3, 1), Shape(128, 128, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2),
        Shape(32, 32, 2, 2, 4, 4),
    ),
    "tf32": (
        Shape(256, 128, 4, 2, 3, 1), Shape(128, 128, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2),
        Shape(32, 32, 2, 2, 4, 4),
    ),
    "split": (Shape(128, 128, 2, 4, 3, 1), Shape(64, 64, 2, 2, 4, 2), Shape(32, 32, 2, 2, 4, 4)),
}  # fmt: skip
ENOUGH_BLOCKS = 132  # one for each multiprocessor of the largest chip of today
GOOD_BLOCKS = 96  # with so many, smaller tiles cost more than they gain
FULL = 0.8  # share of the multiprocessors' rounds that tiles of 256 × 128 must fill
PARTS_FIRST = 2  # parts of k that are tried before smaller tiles
LEAST_TILES_OF_K = 4  # that a block works on, if k is split
MOST_SPLITS = 64
#: Blocks of a cluster at most, as many as every chip with clusters can do; and parts up to which a
#: cluster is taken although it makes fewer of them, because it saves a launch.
MOST_IN_CLUSTER, CLUSTER_INSTEAD_OF = 8, 16


class Plan(NamedTuple):
    shape: Shape
    n_splits: int
    length: int  # of a part of k
    in_cluster: bool = False  # whether the blocks that have parts of k are a cluster


def choose(M, N, K, itemsize, mode, fits, clusters=False):
    """The `Plan` for a product of this size.

    fits(shape)  whether a block's buffers fit the chip's shared memory
    clusters     whether the chip has clusters
    """
    k_size = K_BYTES // itemsize
    best, most = None, 0
    for shape in SHAPES[mode]:
        is_last = shape is SHAPES[mode][-1]
        if not is_last and not (fits(shape) and 2 * M > shape.m and 2 * N > shape.n):
            continue
        n_tiles = math.ceil(M / shape.m) * math.ceil(N / shape.n)
        rounds = n_tiles / ENOUGH_BLOCKS
        if shape.m > 128 and rounds < FULL * math.ceil(rounds):
            continue
        most_parts = MOST_SPLITS if is_last else PARTS_FIRST
        n_splits, length, in_cluster = split(K, k_size, n_tiles, clusters, most_parts)
        if n_tiles * n_splits > most:
            best, most = Plan(shape, n_splits, length, in_cluster), n_tiles * n_splits
        if most >= GOOD_BLOCKS:
            break
    return best


def split(K, k_size, n_tiles, clusters, most_parts):
    """(parts of k, length of each, whether in a cluster).

    Parts enough for all multiprocessors, if each is worth its while, and `most_parts` at most.
    """
    k_tiles = math.ceil(K / k_size)
    wanted = min(ENOUGH_BLOCKS // n_tiles, k_tiles // LEAST_TILES_OF_K, most_parts)
    if wanted <= 1:
        return 1, max(K, 1), False
    in_cluster = clusters and wanted <= CLUSTER_INSTEAD_OF
    if in_cluster:
        wanted = min(wanted, MOST_IN_CLUSTER)
    length = math.ceil(k_tiles / wanted) * k_size
    return math.ceil(K / length), length, in_cluster
