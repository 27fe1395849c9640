"""How `pixel_sums` takes a small convolution: dweight, and dbias with it, in one launch.

The blocks that share the pixels of a tile are a cluster, and add up what they have found. Chips
before 9.0 have none: there `pixel_sums` takes small convolutions as it takes others.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib.kernels.blocks.mma.shape import Shape
from course_lib.kernels.conv2d import halo_plan, pixel_sums, pixel_sums_copies, pixel_sums_plan
from course_lib.kernels.conv2d.halo_small import CLUSTERS_SINCE, MOST_IN_CLUSTER, places_for
from course_lib.kernels.conv2d.pixel_sums_plan import MULTIPROCESSORS, STATIC_BYTES, n_blocks
from course_lib.runtime.host.launch import launch

#: Tiles by mode (`mma.mainloop`).
SHAPES = {
    "narrow": (Shape(64, 128, 2, 4, 3, 1), Shape(64, 64, 2, 2, 4, 2)),
    "tf32": (Shape(64, 128, 2, 4, 3, 1), Shape(64, 64, 2, 2, 4, 2)),
    "split": (Shape(64, 64, 2, 2, 4, 2),),  # of few pixels, that is
    "mixed": (Shape(64, 128, 2, 4, 4, 1), Shape(64, 64, 2, 2, 4, 2)),
}
SMALL = 8192  # pixels at most
#: What things take on an H200, in ns: a block whatever it does, each block of its cluster, and each
#: block, for what all of them share.
START, CLUSTER, BLOCK = 3400, 60, 10
#: By mode, for each tile of pixels: at least, for each 1024 elements of the result if a block is
#: alone on its multiprocessor, and if there are many.
TILES = {"narrow": (520, 18, 85), "tf32": (520, 18, 85)}
TILES |= dict.fromkeys(("split", "mixed"), (600, 53, 85))


class Plan(NamedTuple):
    shape: Shape
    n_splits: int  # blocks of a cluster, which share the pixels
    length: int  # pixels of a block


@functools.lru_cache(maxsize=4096)
def planned(problem, itemsize, mode, chip):
    """The fastest `Plan` on a chip as `chip_of` gives it; None if there is none."""
    p = problem
    if chip[0] < CLUSTERS_SINCE or p.N * p.P * p.Q > SMALL:
        return None
    if pixel_sums_plan.padded(p, itemsize) != p:  # images are read as they are
        return None
    if pixel_sums_plan.planned(problem, itemsize, mode, chip) is None:  # what no kernel takes
        return None
    return fastest(problem, mode, candidates(problem, itemsize, mode, chip))


def fastest(problem, mode, plans):
    """The one of them that costs least; None of none."""
    return min(plans, key=lambda plan: cost(problem, mode, plan), default=None)


def candidates(problem, itemsize, mode, chip):
    """All `Plan`s that there are."""
    k_size, p = pixel_sums_copies.K_BYTES // itemsize, problem
    n_tiles = math.ceil(p.N * p.P * p.Q / k_size)
    for shape in SHAPES[mode]:
        if pixel_sums.shared_bytes(shape, itemsize) + STATIC_BYTES <= chip[1]:
            lengths = {math.ceil(n_tiles / n) for n in range(1, MOST_IN_CLUSTER + 1)}
            for tiles in sorted(lengths):
                yield Plan(shape, math.ceil(n_tiles / tiles), tiles * k_size)


def cost(problem, mode, plan):
    """How long it takes, in ns or so."""
    shape, blocks = plan.shape, n_blocks(problem, plan.shape) * plan.n_splits
    elements, (least, alone, shared) = shape.m * shape.n / 1024, TILES[mode]
    k_size = pixel_sums_copies.K_BYTES // (2 if mode == "narrow" else 4)
    n_waves = math.ceil(blocks / (places_for(plan.n_splits) * shape.min_blocks))
    together = min(math.ceil(blocks / MULTIPROCESSORS), shape.min_blocks)
    tile = max(least + alone * elements, together * shared * elements)
    block = START + CLUSTER * plan.n_splits + plan.length // k_size * tile
    return n_waves * block + BLOCK * blocks


def run(plan, problem, dy, x, dweight, dbias, mode):
    """dweight, and dbias unless it is None, in one launch."""
    p, shape, itemsize = problem, plan.shape, x.dtype.itemsize
    dy, x = halo_plan.side_by_side(problem, (dy, p.K), (x, p.C))
    blocks = n_blocks(problem, shape)
    if dbias is not None:
        blocks += math.ceil(p.K / shape.n)
    launch(
        pixel_sums_plan.kernel_for(shape, itemsize, mode, True), blocks * plan.n_splits,
        shape.n_threads, dy, x, dweight, dweight if dbias is None else dbias, p.N * p.P * p.Q,
        plan.length, plan.n_splits, *pixel_sums_plan.numbers_of(problem),
        np.bool_(p.channels_last), shared_bytes=pixel_sums.shared_bytes(shape, itemsize),
        flat=True, overlap=True, cluster=plan.n_splits,
    )  # fmt: skip


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for mode, shapes in SHAPES.items():
        for dtype in ("float16", "bfloat16") if mode == "narrow" else ("float32",):
            for shape in shapes:
                itemsize = 2 if mode == "narrow" else 4
                kernel = pixel_sums_plan.kernel_for(shape, itemsize, mode, True)
                types = [(dtype, 1)] * 4 + pixel_sums_plan.KERNEL_TYPES
                label = f"conv2d.pixel_sums {mode} {shape.m}x{shape.n} together {dtype}"
                yield label, kernel, types
