"""Which products `warpgroup` takes, and with which tiles.

A multiprocessor has one block, since buffers or registers leave no room for two. So a product goes
through rounds of so many tiles as there are multiprocessors, and takes as many times the time of
one tile. That is nearly a line in k: so much for each 128 bytes along k, and so much once, to begin
and to store the sums. k is not dealt out to several blocks here. So where there are few tiles and a
long k, the smaller tiles of `tensor_core` serve better. What those take is a line as well.
"""

import math

from course_lib.kernels.blocks.mma.warpgroup import Shape
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


def choose(M, N, K, itemsize, mode, sources):
    """The `Shape` for a product of this size, or None; `sources` as `mma.tiles` has it."""
    shapes, steps = SHAPES[itemsize], math.ceil(K * itemsize / ROW_BYTES)
    if min(M, N) < LEAST_ROWS or n_blocks(shapes[-1], M, N) < LEAST_TILES:
        return None
    if itemsize == 4:
        steps *= 1 + TURNED * sources.count("by_row")
    best = min(shapes, key=lambda shape: cost(shape, M, N, steps))
    return best if cost(best, M, N, steps) < others_cost(M, N, K, itemsize, mode) else None


def n_blocks(shape, M, N):
    """Tiles of c."""
    return math.ceil(M / shape.m) * math.ceil(N / shape.n)


def cost(shape, M, N, steps):
    """What a product takes with such tiles, in units of 10 ns."""
    rounds = math.ceil(n_blocks(shape, M, N) / plan.ENOUGH_BLOCKS)
    return rounds * (shape.step * steps + shape.once)


def others_cost(M, N, K, itemsize, mode):
    """What it takes `tensor_core` with small tiles; with large ones, always longer than here."""
    found = plan.choose(M, N, K, itemsize, mode, lambda shape: True, clusters=True)
    if found.shape.m not in OTHERS:
        return math.inf
    step, once = OTHERS[found.shape.m]
    rounds = math.ceil(n_blocks(found.shape, M, N) * found.n_splits / plan.ENOUGH_BLOCKS)
    return rounds * step * math.ceil(found.length * itemsize / ROW_BYTES) + once
