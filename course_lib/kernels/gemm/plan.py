"""How `mma` and both ways of `split_k` deal a product out to blocks: tiles, and parts of k."""

import functools
import math
from typing import NamedTuple

from course_lib.kernels.blocks.mma.shape import K_BYTES, Shape
from course_lib.kernels.gemm.tensor_core import shared_bytes
from course_lib.runtime.intrinsics import VECTOR_BYTES

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
GOOD_BLOCKS = 8, 11  # blocks for as many multiprocessors: with more, smaller tiles cost too much
FULL = 0.8  # share of the multiprocessors' rounds that tiles of 256 × 128 must fill
#: Parts of k that are tried before smaller tiles; or, of one product for each, as many parts of so
#: many tiles as a cluster has blocks.
PARTS_FIRST, LONG_PARTS = 2, 16
#: That a block works on, if k is split; and of inputs that come by elements, which take longer.
LEAST_TILES_OF_K, LEAST_BY_ELEMENTS = 4, 2
MOST_SPLITS = 64
CLUSTERS = (9, 0)  # compute capability from which on a chip has them
#: Blocks of a cluster at most, as many as every chip with clusters can do; and parts up to which a
#: cluster is taken although it makes fewer of them, because it saves a launch.
MOST_IN_CLUSTER, CLUSTER_INSTEAD_OF = 8, 16


class Problem(NamedTuple):
    """What the plan for a product depends on.

    mode     how its numbers are multiplied (`fragments`)
    sources  how `a` and `b` get to shared memory (`tiles`)
    lies     the same of copies whose rows begin on 16-byte boundaries
    """

    M: int
    N: int
    K: int
    itemsize: int
    mode: str
    sources: tuple
    lies: tuple = ("by_k", "by_k")


class Plan(NamedTuple):
    problem: Problem
    shape: Shape
    n_splits: int
    length: int  # of a part of k
    in_cluster: bool = False  # whether the blocks that have parts of k are a cluster


def mma(problem, chip):
    """The `Plan` in which a block goes through all of k."""
    found = best(problem, chip)
    return found if found.n_splits == 1 else best(problem, chip, may_split=False)


def split_k_cluster(problem, chip):
    """The `Plan` in which the blocks of a cluster share k."""
    found = best(problem, chip)
    n_splits = min(max(found.n_splits, 2), MOST_IN_CLUSTER)
    return found if found.in_cluster else _in_parts(found, n_splits, in_cluster=True)


def split_k(problem, chip):
    """The `Plan` in which blocks share k, and a second launch adds up their sums."""
    found = best(problem, chip)
    if found.n_splits > 1 and not found.in_cluster:
        return found
    return _in_parts(found, max(found.n_splits, 2), in_cluster=False)


def _in_parts(plan, n_splits, in_cluster):
    """`plan`, but k is dealt out to about so many blocks, the last of which may find it too short.
    """
    K, itemsize = plan.problem.K, plan.problem.itemsize
    step = K_BYTES // itemsize
    if K <= step:  # which nobody does who has the choice: parts begin on boundaries of vectors
        step = VECTOR_BYTES // itemsize
    length = max(1, math.ceil(math.ceil(K / step) / n_splits)) * step
    n_splits = max(2, math.ceil(K / length))
    return plan._replace(n_splits=n_splits, length=length, in_cluster=in_cluster)


@functools.lru_cache(maxsize=4096)
def best(problem, chip, may_split=True, long_parts=True):
    """The fastest `Plan`, which `may_split` k, and may have large tiles for `long_parts` of it."""
    M, N, K, itemsize, mode, sources, _ = problem
    k_size, clusters = K_BYTES // itemsize, chip.capability >= CLUSTERS
    least = LEAST_BY_ELEMENTS if "any" in sources else LEAST_TILES_OF_K
    found, most = None, 0
    for shape in SHAPES[mode]:
        is_last = shape is SHAPES[mode][-1]
        if not is_last and not (
            2 * M > shape.m and 2 * N > shape.n
            and shared_bytes(shape, sources, itemsize) <= chip.shared_bytes
        ):  # fmt: skip
            continue
        n_tiles = math.ceil(M / shape.m) * math.ceil(N / shape.n)
        rounds = n_tiles / chip.multiprocessors
        if shape.m > 128 and rounds < FULL * math.ceil(rounds):
            continue
        most_parts = PARTS_FIRST
        if clusters and long_parts and mode != "split":
            most_parts = max(PARTS_FIRST, min(MOST_IN_CLUSTER, math.ceil(K / k_size) // LONG_PARTS))
        most_parts = (MOST_SPLITS if is_last else most_parts) if may_split else 1
        # Who waits for elements had better not be alone on a multiprocessor.
        at_once = shape.min_blocks if is_last and "any" in sources else 1
        most_parts = min(most_parts, chip.multiprocessors * at_once // n_tiles)
        n_splits, length, in_cluster = split(K, k_size, clusters, most_parts, least)
        if n_tiles * n_splits > most:
            found, most = Plan(problem, shape, n_splits, length, in_cluster), n_tiles * n_splits
        if most * GOOD_BLOCKS[1] >= chip.multiprocessors * GOOD_BLOCKS[0]:
            break
    return found


def split(K, k_size, clusters, most_parts, least):
    """(parts of k, length of each, whether in a cluster): each part of `least` tiles at least."""
    k_tiles = math.ceil(K / k_size)
    wanted = min(k_tiles // least, most_parts)
    if wanted <= 1:
        return 1, max(K, 1), False
    in_cluster = clusters and wanted <= CLUSTER_INSTEAD_OF
    if in_cluster:
        wanted = min(wanted, MOST_IN_CLUSTER)
    length = math.ceil(k_tiles / wanted) * k_size
    return math.ceil(K / length), length, in_cluster
