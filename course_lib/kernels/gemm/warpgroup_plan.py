"""Which products `wgmma` is the fastest way for, and with which tiles.

A product goes through rounds of so many tiles as the multiprocessors have blocks, and takes as many
times the time of one tile. That is nearly a line in k: so much for each 128 bytes along k, and so
much once, to begin and to store the sums. Where there are few tiles and a long k, parts of k make
more tiles, if the sums of all parts don't take longer to be added up; or the smaller tiles of
`tensor_core` serve better. What those take is a line as well.
"""

import math
from typing import NamedTuple

from course_lib.kernels.blocks.mma.warpgroup import ONLY, Shape
from course_lib.kernels.blocks.mma.warpgroup_stream import ahead_of
from course_lib.kernels.blocks.mma.warpgroup_sums import PADDING
from course_lib.kernels.gemm import plan
from course_lib.runtime.intrinsics.warpgroup import ROW_BYTES

LEAST_TILES = 16  # with fewer, most of the chip is idle
#: Of a and of b. What lies beyond the last row is read from that one: if nearly all threads do it,
#: they wait for each other.
LEAST_ROWS = 24
LEAST_PADDED = 100_000_000  # multiplications from which on copies for `wgmma_padded` pay


#: By bytes of an element.
SHAPES = {
    4: (Shape(256, 128, 3, 105, 440), Shape(128, 128, 3, 70, 340), Shape(128, 64, 6, 45, 280)),
    2: (
        Shape(128, 256, 4, 82, 210), Shape(128, 192, 5, 67, 160), Shape(128, 128, 3, 113, 120, 2),
        Shape(128, 128, 6, 57, 90), Shape(128, 64, 6, 40, 65),
    ),
}  # fmt: skip
IN_PARTS = SHAPES[2][0], SHAPES[2][3]
MOST_PARTS = 64
#: What a launch takes beside its rounds, by bytes of an element; and one that adds up parts, of so
#: many float32 in 10 ns.
LAUNCH, FINISH, FLOATS = {4: 0, 2: 300}, 220, 6000
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


class Parts(NamedTuple):
    """Tiles, and how k is dealt out."""

    shape: Shape
    n_parts: int
    length: int  # of a part: a multiple of 128 bytes


def choose_parts(problem, chip):
    """The fastest `Parts` of at least two."""
    steps = max(steps_of(problem.K, problem.itemsize), 1)
    found = []
    for shape in IN_PARTS:
        for wanted in range(2, MOST_PARTS + 1):
            of_part = max(math.ceil(steps / wanted), ahead_of(shape))
            n_parts = max(2, math.ceil(steps / of_part))
            found.append(Parts(shape, n_parts, of_part * ROW_BYTES // problem.itemsize))
    return min(found, key=lambda parts: parts_cost(parts, problem, chip))


def preferred(problem, chip):
    """The ways that take less time than the tiles of `tensor_core`, the fastest first."""
    M, N, K, itemsize, mode, sources, lies = problem
    if mode == "split" or chip.capability != ONLY or min(M, N) < LEAST_ROWS:
        return []
    if "any" in sources:
        # float32 are not dealt out to parts of k, so it takes tiles to keep the chip busy.
        enough = n_blocks(SHAPES[itemsize][-1], M, N) >= chip.multiprocessors // 2
        takes = itemsize == 2 or lies == ("by_k", "by_k") and enough
        return ["wgmma_padded"] if takes and M * N * K >= LEAST_PADDED else []
    costs = {}
    if (shape := choose(problem, chip)) and n_blocks(SHAPES[itemsize][-1], M, N) >= LEAST_TILES:
        costs["wgmma"] = cost(shape, problem, chip)
    if shape and itemsize == 2:
        costs["wgmma_split_k"] = parts_cost(choose_parts(problem, chip), problem, chip)
    others = others_cost(problem, chip)
    return sorted((way for way in costs if costs[way] < others), key=costs.get)


def shared_bytes(shape):
    """Bytes of a block's buffers, in which its sums lie at the end."""
    buffers = (shape.m + shape.n) * ROW_BYTES * shape.n_stages
    return max(buffers, shape.m * (shape.n + PADDING) * 4)


def n_blocks(shape, M, N):
    """Tiles of c."""
    return math.ceil(M / shape.m) * math.ceil(N / shape.n)


def cost(shape, problem, chip):
    """What a product takes with such tiles, in units of 10 ns."""
    n_tiles = n_blocks(shape, problem.M, problem.N)
    return _rounds_cost(shape, n_tiles, problem, chip)


def parts_cost(parts, problem, chip):
    """What a product takes in such parts, in the same units."""
    shape, n_parts, length = parts
    n_tiles = n_blocks(shape, problem.M, problem.N) * n_parts
    adding = FINISH + problem.M * problem.N * n_parts / FLOATS
    return _rounds_cost(shape, n_tiles, problem._replace(K=length), chip) + adding


def _rounds_cost(shape, n_tiles, problem, chip):
    rounds = math.ceil(n_tiles / (chip.multiprocessors * shape.n_blocks))
    return LAUNCH[problem.itemsize] + rounds * block_cost(shape, problem)


def steps_of(K, itemsize):
    """Steps of 128 bytes along k."""
    return math.ceil(K * itemsize / ROW_BYTES)


def block_cost(shape, problem):
    """What a tile takes, in the same units."""
    steps = steps_of(problem.K, problem.itemsize)
    if problem.itemsize == 4:
        steps *= 1 + TURNED * problem.sources.count("by_row")
    return shape.step * steps + shape.once


def others_cost(problem, chip):
    """What it takes `tensor_core` with small tiles; large ones for a long k take no longer."""
    found = plan.best(problem, chip, long_parts=False)
    if found.shape.m not in OTHERS:
        return math.inf  # other large tiles always take longer than `wgmma`
    step, once = OTHERS[found.shape.m]
    n_tiles = n_blocks(found.shape, problem.M, problem.N)
    rounds = math.ceil(n_tiles * found.n_splits / chip.multiprocessors)
    return rounds * step * steps_of(found.length, problem.itemsize) + once
