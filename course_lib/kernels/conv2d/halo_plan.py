"""Which convolutions `halo` takes, with which tiles, and how it is launched."""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib.kernels.blocks import transpose
from course_lib.kernels.blocks.mma.mainloop import timing
from course_lib.kernels.blocks.mma.shape import Shape
from course_lib.kernels.conv2d import arranging, halo, layout
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

#: Tiles by mode (`mma.mainloop`), with how fast they are, as a share of the fastest.
SHAPES = {
    "narrow": {
        Shape(256, 128, 4, 2, 3, 1): 1.0, Shape(512, 64, 8, 1, 3, 1): 0.92,
        Shape(256, 64, 4, 2, 3, 1): 0.75, Shape(64, 64, 2, 2, 5, 2): 0.5,
    },
    "tf32": {
        Shape(256, 128, 4, 2, 3, 1): 1.0, Shape(512, 64, 8, 1, 3, 1): 0.92,
        Shape(256, 64, 4, 2, 3, 1): 0.75, Shape(64, 64, 2, 2, 5, 2): 0.5,
    },
    "split": {Shape(256, 64, 4, 2, 3, 1): 1.0, Shape(64, 64, 2, 2, 3, 2): 0.6},
    "mixed": {
        Shape(256, 128, 4, 2, 3, 1): 1.0, Shape(256, 64, 4, 2, 3, 1): 0.88,
        Shape(64, 64, 2, 2, 4, 2): 0.6,
    },
}  # fmt: skip
LONG = 256  # terms of a sum, from which on its products are "mixed" (`mma.mainloop`)
MULTIPROCESSORS = 132  # of the largest chip of today
TILE_COST = 4096  # of a block whatever its tile, in elements of that
KERNEL_TYPES = ["int32", "int64", *["int32"] * 21]  # of the kernel's numbers
STATIC_BYTES = 2048 + 4 * halo.MOST_POSITIONS + 1024  # of shared memory that are not dynamic


class Gather(NamedTuple):
    """A pass: a result (N, columns, P, Q) gathered from a source (N, channels, H, W)."""

    N: int
    n_columns: int
    P: int
    Q: int
    n_channels: int
    H: int
    W: int
    R: int
    S: int
    stride: tuple
    pad: tuple
    dilation: tuple
    flipped: bool

    @property
    def grid(self):
        """Lines and columns of an image with its padding."""
        return self.H + 2 * self.pad[0], self.W + 2 * self.pad[1]


class Plan(NamedTuple):
    """How a pass is dealt out. Of the chunks and taps of a tile, each block of a cluster has some.

    The blocks that have the same chunks come one after another.
    """

    shape: Shape
    n_positions: int  # of a block
    n_chunks: int  # of channels
    source: str = "arranged"  # of the weights (`halo_weights`)
    chunks_each: int = 0  # that a block works on, 0 for all
    taps_each: int = 0
    n_copies: int = 0  # of source and weights: those that have to be laid out before

    def n_blocks(self, n_taps):
        """Blocks of the cluster."""
        chunks, taps = self.chunks_each or self.n_chunks, self.taps_each or n_taps
        return math.ceil(self.n_chunks / chunks) * math.ceil(n_taps / taps)

    def shared_bytes(self, itemsize):
        n_chunks = self.chunks_each or self.n_chunks
        return halo.shared_bytes(self.shape, self.n_positions, n_chunks, itemsize, self.source)


def forward_of(p):
    """The `Gather` of the forward pass of a `Problem`; None if its kernel can't take it."""
    found = Gather(
        p.N, p.K, p.P, p.Q, p.C, p.H, p.W, p.R, p.S, (p.stride_h, p.stride_w), (p.pad_h, p.pad_w),
        (p.dilation_h, p.dilation_w), False,
    )  # fmt: skip
    return found if p.groups == 1 else None


def dx_of(p):
    """The same for dx: with a stride of 1, it is a convolution of dy with the filters turned."""
    pad = (p.R - 1) * p.dilation_h - p.pad_h, (p.S - 1) * p.dilation_w - p.pad_w
    if p.groups != 1 or (p.stride_h, p.stride_w) != (1, 1) or min(pad) < 0:
        return None
    dilation = p.dilation_h, p.dilation_w
    return Gather(p.N, p.C, p.H, p.W, p.K, p.P, p.Q, p.R, p.S, (1, 1), pad, dilation, True)


@functools.lru_cache(maxsize=4096)
def planned(gather, itemsize, mode, chip):
    """The fastest `Plan` on a chip as `chip_of` gives it; None if there is none."""
    if gather is None or not gather.n_channels or gather.n_channels * itemsize % VECTOR_BYTES:
        return None
    found = [
        (cost(gather, shape, speed), plan)
        for shape, speed in SHAPES[mode].items()
        if (plan := plan_of(gather, shape, itemsize, mode, chip)) is not None
    ]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def plan_of(gather, shape, itemsize, mode, chip, source="arranged", parts=(0, 0)):
    """The `Plan` with this shape and (chunks, taps) of each block; None if the pass does not fit.

    A chunk's positions are copied, a share with each tap, while its predecessor is worked on.
    """
    n_chunks = math.ceil(gather.n_channels * itemsize / halo.CHUNK_BYTES)
    n_positions = most_positions(gather, shape.m)
    plan = Plan(shape, n_positions, n_chunks, source, *parts)
    ahead, lags = timing(mode, shape.n_stages)
    n_turns = (plan.taps_each or gather.R * gather.S) - ahead + (0 if lags else 1)
    alone = (plan.chunks_each or n_chunks) == 1
    in_time = alone or n_positions <= n_turns * halo.share_of(shape)
    n_bytes = plan.shared_bytes(itemsize) + STATIC_BYTES
    if n_positions > halo.MOST_POSITIONS or n_bytes > chip[1] or not in_time:
        return None
    return plan


def cost(gather, shape, speed):
    """How long it takes, in no unit in particular."""
    n_blocks = math.ceil(gather.N * gather.P * gather.Q / shape.m)
    n_blocks *= math.ceil(gather.n_columns / shape.n)
    together = min(shape.min_blocks, math.ceil(n_blocks / MULTIPROCESSORS))
    n_waves = math.ceil(n_blocks / (MULTIPROCESSORS * together))
    return n_waves * together * (shape.m * shape.n / speed + TILE_COST)


def cost_of(gather, plan, mode):
    """`cost` of a plan that `planned` has found."""
    return cost(gather, plan.shape, SHAPES[mode][plan.shape])


def most_positions(gather, n_rows):
    """Positions that the largest of all blocks of so many pixels needs."""
    plane, (grid_h, grid_w) = gather.P * gather.Q, gather.grid

    def position(pixel):
        image, rest = pixel // plane, pixel % plane
        line = image * grid_h + rest // gather.Q * gather.stride[0]
        return line * grid_w + rest % gather.Q * gather.stride[1]

    n_pixels = gather.N * plane
    # Blocks begin at the same places of images again after `plane` of them.
    first = np.arange(min(math.ceil(n_pixels / n_rows), plane), dtype=np.int64) * n_rows
    last = np.minimum(first + n_rows, n_pixels) - 1
    reach = (gather.R - 1) * gather.dilation[0] * grid_w + (gather.S - 1) * gather.dilation[1]
    begin, end = position(np.stack((first, last)))
    return int((end - begin).max()) + reach + 1


def kernel_for(shape, itemsize, mode, source="arranged"):
    """The kernel of these choices, made once."""
    return _made(shape, itemsize, mode, source)


_made = functools.cache(halo.make)


def mode_of(array, precision, n_terms):
    """How numbers of this array are multiplied (`mma.mainloop`), for sums of so many terms."""
    if arrays.dtype_name(array) != "float32":
        return "narrow"
    if precision == "tf32":
        return "tf32"
    return "mixed" if n_terms >= LONG else "split"


def run(gather, plan, problem, source, weight, bias, result, mode):
    """result = source * weight (+ bias), by the halo kernel."""
    g, shape, p = gather, plan.shape, problem
    itemsize, n_taps = result.dtype.itemsize, g.R * g.S
    if plan.source in ("by_k", "by_row"):
        source, weight = side_by_side(problem, (source, g.n_channels), (weight, p.C))
    else:
        (source,) = side_by_side(problem, (source, g.n_channels))
    if plan.source == "arranged":
        weight = arranged(g, plan, problem, weight)
    width, plane = VECTOR_BYTES // itemsize, g.P * g.Q
    options = halo.ADD_BIAS if bias is not None else 0
    options += 0 if problem.channels_last else halo.PLANAR
    whole = (g.n_columns if problem.channels_last else plane) % width == 0
    if whole and arrays.address_of(result) % VECTOR_BYTES == 0:
        options += halo.VECTORS
    n_rows, cluster = g.N * plane, plan.n_blocks(n_taps)
    n_blocks = math.ceil(n_rows / shape.m) * math.ceil(g.n_columns / shape.n) * cluster
    numbers = (
        g.N, g.P, g.Q, g.H, g.W, *g.grid, *g.stride, *g.pad, *g.dilation, g.S, n_taps,
        g.n_channels, g.n_columns, plan.n_chunks, plan.n_positions,
        plan.chunks_each or plan.n_chunks, plan.taps_each or n_taps,
    )  # fmt: skip
    launch(
        kernel_for(shape, itemsize, mode, plan.source), n_blocks, shape.n_threads, source, weight,
        weight if bias is None else bias, result, np.int32(options), n_rows,
        *map(np.int32, numbers), shared_bytes=plan.shared_bytes(itemsize), flat=True,
        overlap=True, cluster=cluster,
    )  # fmt: skip


def side_by_side(problem, *operands):
    """The arrays of (array, channels) with channels side by side: themselves, or copies.

    One launch copies two arrays.
    """
    if problem.channels_last:
        return [array for array, _ in operands]
    found = [layout.transposition(*operand) for operand in operands]
    numbers, blocks = zip(*found, strict=True)
    kernel, arguments = transpose.transpose_kernel, numbers[0]
    if len(numbers) == 2:
        kernel, arguments = transpose.transpose_two_kernel, (*numbers[0], blocks[0], *numbers[1])
    launch(kernel, sum(blocks), transpose.BLOCK_SIZE, *arguments, flat=True, overlap=True)
    return [copy for _, copy, *_ in numbers]


def arranged(gather, plan, problem, weight):
    """The weights as `halo` reads them."""
    n_taps, k_size = gather.R * gather.S, halo.CHUNK_BYTES // weight.dtype.itemsize
    n_lines = math.ceil(gather.n_columns / plan.shape.n) * plan.shape.n
    tiles = arrays.empty((plan.n_chunks * n_taps * n_lines * k_size,), like=weight)
    steps = layout.steps_of(gather, problem)
    numbers = k_size, n_lines, gather.n_columns, gather.n_channels, n_taps, *steps
    launch(
        arranging.arrange_kernel, math.ceil(arrays.size_of(tiles) / transpose.BLOCK_SIZE),
        transpose.BLOCK_SIZE, weight, tiles, *map(np.int32, numbers), gather.flipped, flat=True,
        overlap=True,
    )  # fmt: skip
    return tiles


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in ("float32", "float16", "bfloat16"):
        array = (dtype, 1)
        types = [array, array, *["int32"] * 8, "boolean"]
        yield f"conv2d.arrange {dtype}", arranging.arrange_kernel, types
        types = [array, array, "int64", "int64", "boolean"]
        yield f"conv2d.transpose {dtype}", transpose.transpose_kernel, types
        types = [*types, "int64", *types]
        yield f"conv2d.transpose two {dtype}", transpose.transpose_two_kernel, types
        for mode in ("tf32", "split", "mixed") if dtype == "float32" else ("narrow",):
            for shape in SHAPES[mode]:
                kernel = kernel_for(shape, 4 if dtype == "float32" else 2, mode)
                types = [array] * 4 + KERNEL_TYPES
                yield f"conv2d.halo {mode} {shape.m}x{shape.n} {dtype}", kernel, types
