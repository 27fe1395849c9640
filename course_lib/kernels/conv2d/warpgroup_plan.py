"""Which convolutions `warpgroup` takes, with which tiles, and how it is launched."""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib.kernels.conv2d import arranging, halo_plan, layout, warpgroup
from course_lib.kernels.conv2d.halo_results import ADD_BIAS, PLANAR, VECTORS
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.warpgroup import CHUNKS, ROW_BYTES, ROWS

ONLY = (9, 0)  # compute capability
MODES = ("tf32", "narrow")
MULTIPROCESSORS = 132  # of the largest chip of today
KERNEL_TYPES = ["int32"] * 20  # of the kernel's numbers
RESERVED_BYTES = 1024  # of a block's shared memory, on Hopper: a kernel counts them as its own
MOST = 2**31 - 1  # positions, and pixels of all images: they are counted in 32 bits


class Shape(NamedTuple):
    """A block's tile: `each` · `groups` positions by `n` columns, 64 for each warpgroup."""

    each: int  # positions of a warpgroup
    n: int
    groups: int  # of warpgroups that have positions of their own
    n_stages: int  # buffers for weights

    @property
    def m(self):
        return self.each * self.groups

    @property
    def n_threads(self):
        return self.n // ROWS * self.groups * warpgroup.GROUP_THREADS


#: Tiles; with more than 232 positions the sums outgrow the registers.
SHAPES = tuple(Shape(each, n, 128 // n, 5) for n in (128, 64) for each in (232, 208, 176))
#: How much faster than `halo` a tile of the same size is.
SPEED = 1.3


class Plan(NamedTuple):
    """How a pass is dealt out."""

    shape: Shape
    n_positions: int  # of a block, with its halo
    n_chunks: int  # of channels
    share: int  # positions of the next chunk that are copied with each tap


def grid_of(gather):
    """Lines and columns of an image, with the padding in front alone: behind it stands the next.

    But for as many as the result has, where the padding is wider than the filter reaches.
    """
    g = gather
    return max(g.H + g.pad[0], g.P), max(g.W + g.pad[1], g.Q)


@functools.lru_cache(maxsize=4096)
def planned(gather, itemsize, mode, chip):
    """The fastest `Plan` on a chip as `chip_of` gives it; None if there is none."""
    if gather is None or mode not in MODES or chip[0] != ONLY or gather.stride != (1, 1):
        return None
    if not gather.n_channels or gather.n_channels * itemsize % VECTOR_BYTES:
        return None
    plans = [plan_of(gather, shape, itemsize, chip) for shape in SHAPES]
    plans = [plan for plan in plans if plan is not None]
    best = min(plans, key=functools.partial(cost, gather), default=None)
    other = halo_plan.planned(gather, itemsize, mode, chip)
    if best and other and cost(gather, best) >= halo_plan.cost_of(gather, other, mode):
        return None
    return best


def plan_of(gather, shape, itemsize, chip):
    """The `Plan` with this shape; None if the pass does not fit."""
    g, (grid_h, grid_w) = gather, grid_of(gather)
    n_chunks = math.ceil(g.n_channels * itemsize / ROW_BYTES)
    n_positions = shape.m + (g.R - 1) * g.dilation[0] * grid_w + (g.S - 1) * g.dilation[1]
    lines = shape.n_threads // CHUNKS
    # The next chunk begins to come with the second tap, and what comes with a step is there when
    # the weights are that come with it: of n_stages − 2 steps ahead.
    n_turns = g.R * g.S - (shape.n_stages - 2)
    if n_turns < 1:
        return None
    share = math.ceil(n_positions / lines / n_turns) * lines
    n_bytes = warpgroup.shared_bytes(shape, n_positions) + RESERVED_BYTES
    whole = (g.N + 1) * grid_h * grid_w + n_positions
    if n_positions > warpgroup.MOST_POSITIONS or n_bytes > chip[1]:
        return None
    if max(whole, g.N * g.P * g.Q, g.N * g.H * g.W) > MOST:
        return None
    return Plan(shape, n_positions, n_chunks, share)


def cost(gather, plan):
    """How long it takes, in the unit of `halo_plan.cost`."""
    shape = plan.shape
    n_waves = math.ceil(n_tiles_of(gather, shape) / MULTIPROCESSORS)
    return n_waves * (shape.m * shape.n + halo_plan.TILE_COST) / SPEED


def n_tiles_of(gather, shape):
    """Tiles of the result, those of positions that are no pixels included."""
    grid_h, grid_w = grid_of(gather)
    rows = math.ceil(gather.N * grid_h * grid_w / shape.m)
    return rows * math.ceil(gather.n_columns / shape.n)


def run(gather, plan, problem, source, weight, bias, result):
    """result = source * weight (+ bias)."""
    source, weight = laid_out(gather, plan, problem, source, weight)
    run_laid_out(gather, plan, problem, source, weight, bias, result)


def run_laid_out(gather, plan, problem, source, weight, bias, result, part_channels=0):
    """The same of what is laid out; a tile of columns reads channels `part_channels` further on."""
    g, shape, itemsize = gather, plan.shape, result.dtype.itemsize
    numbers = *numbers_of(g, plan, problem, bias, result), part_channels
    n_blocks = min(n_tiles_of(g, shape), MULTIPROCESSORS)
    launch(
        kernel_for(shape, itemsize), n_blocks, shape.n_threads, source, weight,
        weight if bias is None else bias, result, *map(np.int32, numbers),
        shared_bytes=warpgroup.shared_bytes(shape, plan.n_positions), flat=True, overlap=True,
    )  # fmt: skip


def numbers_of(gather, plan, problem, bias, result):
    """The kernel's numbers."""
    g, shape, itemsize = gather, plan.shape, result.dtype.itemsize
    options = ADD_BIAS if bias is not None else 0
    if not problem.channels_last:
        options += PLANAR
    elif g.n_columns % 2 == 0 and arrays.address_of(result) % (2 * itemsize) == 0:
        options += VECTORS
    (grid_h, grid_w), n_taps, n_tiles = grid_of(g), g.R * g.S, n_tiles_of(g, shape)
    return (
        options, n_tiles, g.N, g.P, g.Q, g.H, g.W, grid_h, grid_w, *g.pad, g.dilation[0] * grid_w,
        g.dilation[1], g.S, n_taps, g.n_channels, g.n_columns, plan.n_chunks, plan.n_positions,
        plan.share,
    )  # fmt: skip


def laid_out(gather, plan, problem, source, weight):
    """(source, weights) as the kernel reads them: see `layout.laid_out`."""
    itemsize, n = weight.dtype.itemsize, plan.shape.n
    kernel = arranging.arrange_rounded_kernel if itemsize == 4 else arranging.arrange_ordered_kernel
    n_lines, k_size = math.ceil(gather.n_columns / n) * n, ROW_BYTES // itemsize
    size = plan.n_chunks * gather.R * gather.S * n_lines * k_size
    return layout.laid_out(gather, problem, source, weight, kernel, k_size, n_lines, size, size)


def kernel_for(shape, itemsize):
    """The kernel of these choices, made once."""
    return _made(shape, itemsize)


_made = functools.cache(warpgroup.make)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in ("float32", "float16", "bfloat16"):
        for shape in SHAPES:
            kernel = kernel_for(shape, 4 if dtype == "float32" else 2)
            types = [(dtype, 1)] * 4 + KERNEL_TYPES + ["int32"]
            yield f"conv2d.warpgroup {shape.m}x{shape.n} {dtype}", kernel, types
