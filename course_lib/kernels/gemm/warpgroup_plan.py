"""Which products `wgmma` is the fastest way for, and with which tiles.

A multiprocessor has one block, since buffers or registers leave no room for two. So a product goes
through rounds of so many tiles as there are multiprocessors, and takes as many times the time of
one tile. That is nearly a line in k: so much for each 128 bytes along k, and so much once, to begin
and to store the sums. k is not dealt out to several blocks here. So where there are few tiles and a
long k, the smaller tiles of `tensor_core` serve better. What those take is a line as well.
"""

import math

from course_lib.kernels.blocks.mma.warpgroup import ONLY, Shape
from course_lib.kernels.blocks.mma.warpgroup_sums import PADDING
from course_lib.kernels.gemm import plan
from course_lib.runtime.intrinsics.warpgroup import ROW_BYTES

LEAST_TILES = 16  # with fewer, most of the chip is idle
#: Of a and of b. What lies beyond the last row is read from that one: if nearly all threads do it,
#: they wait for each other.
LEAST_ROWS = 24


#: By bytes of an element.
SHAPES = {
    4: (Shape(256, 128, 3, 105, 440), Shape(128, 128, 3, 70, 340), Shape(128, 64, 6, 45, 280)),
    2: (Shape(128, 256, 4, 72, 480), Shape(128, 128, 6, 47, 400), Shape(128, 64, 6, 32, 285)),
}
#: float32 that come by rows are turned on the way: so much longer takes a step, for each input.
TURNED = 0.2
#: The rows of `tensor_core`'s tiles for small products -> their (step, once).
OTHERS = {64: (60, 1000), 32: (25, 540)}


def choose(problem, chip):
    """The fastest `Shape` for a `plan.Problem`; None if none fits shared memory."""
    best, least = None, math.inf
    for shape in SHAPES[problem.itemsize]:
        takes = cost(shape, problem, chip)
        if takes < least and shared_bytes(shape) <= chip.shared_bytes:
            best, least = shape, takes
    return best


def is_fastest(problem, chip):
    """Whether a product takes less time than with the tiles of `tensor_core`, if there is a plan.
    """
    M, N, _, itemsize, mode, _ = problem
    if mode == "split" or chip.capability != ONLY or min(M, N) < LEAST_ROWS:
        return False
    if n_blocks(SHAPES[itemsize][-1], M, N) < LEAST_TILES:
        return False
    shape = choose(problem, chip)
    return bool(shape) and cost(shape, problem, chip) < others_cost(problem, chip)


def shared_bytes(shape):
    """Bytes of a block's buffers, in which its sums lie at the end."""
    buffers = (shape.m + shape.n) * ROW_BYTES * shape.n_stages
    return max(buffers, shape.m * (shape.n + PADDING) * 4)


def n_blocks(shape, M, N):
    """Tiles of c."""
    return math.ceil(M / shape.m) * math.ceil(N / shape.n)


def cost(shape, problem, chip):
    """What a product takes with such tiles, in units of 10 ns."""
    rounds = math.ceil(n_blocks(shape, problem.M, problem.N) / chip.multiprocessors)
    return rounds * block_cost(shape, problem)


def block_cost(shape, problem):
    """What a tile takes, in the same units."""
    steps = math.ceil(problem.K * problem.itemsize / ROW_BYTES)
    if problem.itemsize == 4:
        steps *= 1 + TURNED * problem.sources.count("by_row")
    return shape.step * steps + shape.once


def others_cost(problem, chip):
    """What it takes `tensor_core` with small tiles; with large ones, always longer than here."""
    found = plan.best(problem, chip)
    if found.shape.m not in OTHERS:
        return math.inf
    step, once = OTHERS[found.shape.m]
    n_tiles = n_blocks(found.shape, problem.M, problem.N)
    rounds = math.ceil(n_tiles * found.n_splits / chip.multiprocessors)
    return rounds * step * math.ceil(found.length * problem.itemsize / ROW_BYTES) + once
