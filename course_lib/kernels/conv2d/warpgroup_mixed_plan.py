"""Which convolutions `warpgroup_mixed` takes, with which tiles, and how it is launched."""

import functools
import math

import numpy as np

from course_lib.kernels.conv2d import (
    arranging,
    halo_plan,
    layout,
    warpgroup_mixed,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.warpgroup_plan import KERNEL_TYPES, MULTIPROCESSORS, Plan, Shape
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.warpgroup import CHUNKS

#: Tiles; larger ones' sums outgrow the registers, or their positions shared memory.
SHAPES = tuple(
    Shape(each, n, 128 // n, 3)
    for n, sizes in ((128, (168, 160, 144)), (64, (160, 136, 112)))
    for each in sizes
)
#: How much faster than `halo` a tile of the same size is.
SPEED = 1.6


@functools.lru_cache(maxsize=4096)
def planned(gather, itemsize, mode, chip):
    """The fastest `Plan` on a chip as `chip_of` gives it; None if there is none."""
    if gather is None or mode != "mixed" or chip[0] != warpgroup_plan.ONLY:
        return None
    if gather.stride != (1, 1) or not gather.n_channels or gather.n_channels * 4 % VECTOR_BYTES:
        return None
    plans = [plan_of(gather, shape, chip) for shape in SHAPES]
    plans = [plan for plan in plans if plan is not None]
    best = min(plans, key=functools.partial(cost, gather), default=None)
    other = halo_plan.planned(gather, itemsize, mode, chip)
    if best and other and cost(gather, best) >= halo_plan.cost_of(gather, other, mode):
        return None
    return best


def plan_of(gather, shape, chip):
    """The `Plan` with this shape; None if the pass does not fit."""
    g, (grid_h, grid_w) = gather, warpgroup_plan.grid_of(gather)
    n_chunks = math.ceil(g.n_channels / warpgroup_mixed.K_SIZE)
    n_positions = shape.m + (g.R - 1) * g.dilation[0] * grid_w + (g.S - 1) * g.dilation[1]
    n_positions = max(n_positions, warpgroup_mixed.fewest_positions(shape))
    n_positions = math.ceil(n_positions / warpgroup_mixed.LINE) * warpgroup_mixed.LINE
    lines = shape.n_threads // CHUNKS
    # The next chunk begins to come with the second tap, and what comes with a step is there when
    # the weights are that come with it: of n_stages − 1 steps ahead.
    n_turns = g.R * g.S - (shape.n_stages - 1)
    if n_turns < 1:
        return None
    share = math.ceil(n_positions / lines / n_turns) * lines
    n_bytes = warpgroup_mixed.shared_bytes(shape, n_positions) + warpgroup_plan.RESERVED_BYTES
    whole = (g.N + 1) * grid_h * grid_w + n_positions
    if n_positions > warpgroup_mixed.MOST_POSITIONS or n_bytes > chip[1]:
        return None
    if max(whole, g.N * g.P * g.Q, g.N * g.H * g.W) > warpgroup_plan.MOST:
        return None
    return Plan(shape, n_positions, n_chunks, share)


def cost(gather, plan):
    """How long it takes, in the unit of `halo_plan.cost`."""
    shape = plan.shape
    n_waves = math.ceil(warpgroup_plan.n_tiles_of(gather, shape) / MULTIPROCESSORS)
    return n_waves * (shape.m * shape.n + halo_plan.TILE_COST) / SPEED


def run(gather, plan, problem, source, weight, bias, result):
    """result = source * weight (+ bias)."""
    source, weight = laid_out(gather, plan, problem, source, weight)
    shape = plan.shape
    n_blocks = min(warpgroup_plan.n_tiles_of(gather, shape), MULTIPROCESSORS)
    numbers = warpgroup_plan.numbers_of(gather, plan, problem, bias, result)
    launch(
        kernel_for(shape), n_blocks, shape.n_threads, source, weight,
        weight if bias is None else bias, result, *map(np.int32, numbers),
        shared_bytes=warpgroup_mixed.shared_bytes(shape, plan.n_positions), flat=True, overlap=True,
    )  # fmt: skip


def laid_out(gather, plan, problem, source, weight):
    """(source, weights in two parts) as the kernel reads them: see `layout.laid_out`."""
    n_lines = math.ceil(gather.n_columns / plan.shape.n) * plan.shape.n
    size = plan.n_chunks * gather.R * gather.S * n_lines * 2 * warpgroup_mixed.K_SIZE
    kernel = arranging.arrange_split_kernel
    return layout.laid_out(
        gather, problem, source, weight, kernel, plan.shape.n, n_lines, size, size // 4
    )


def kernel_for(shape):
    """The kernel of this tile, made once."""
    return _made(shape)


_made = functools.cache(warpgroup_mixed.make)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for shape in SHAPES:
        types = [("float32", 1)] * 4 + KERNEL_TYPES
        yield f"conv2d.warpgroup mixed {shape.m}x{shape.n}", kernel_for(shape), types
