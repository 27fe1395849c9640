"""Which convolutions `halo` takes, with which tiles, and how it is launched."""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib.kernels.conv2d import arranging, halo
from course_lib.kernels.gemm.fragments import timing
from course_lib.kernels.gemm.tensor_core import Shape
from course_lib.runtime import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.launch import launch

#: Tiles by mode (`gemm.fragments`), with how fast they are, as a share of the fastest.
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
LONG = 256  # terms of a sum, from which on its products are "mixed" (`gemm.fragments`)
MULTIPROCESSORS = 132  # of the largest chip of today
TILE_COST = 4096  # of a block whatever its tile, in elements of that
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
    shape: Shape
    n_positions: int  # of a block
    n_chunks: int  # of channels


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


def plan_of(gather, shape, itemsize, mode, chip):
    """The `Plan` with this shape; None if the pass does not fit it."""
    n_chunks = math.ceil(gather.n_channels * itemsize / halo.CHUNK_BYTES)
    n_positions = most_positions(gather, shape.m)
    n_bytes = halo.shared_bytes(shape, n_positions, n_chunks) + STATIC_BYTES
    # A chunk's positions are copied, a share with each tap, while its predecessor is worked on.
    ahead, lags = timing(mode, shape.n_stages)
    n_turns = gather.R * gather.S - ahead + (0 if lags else 1)
    in_time = n_chunks == 1 or n_positions <= n_turns * halo.share_of(shape)
    if n_positions > halo.MOST_POSITIONS or n_bytes > chip[1] or not in_time:
        return None
    return Plan(shape, n_positions, n_chunks)


def cost(gather, shape, speed):
    """How long it takes, in no unit in particular."""
    n_blocks = math.ceil(gather.N * gather.P * gather.Q / shape.m)
    n_blocks *= math.ceil(gather.n_columns / shape.n)
    together = min(shape.min_blocks, math.ceil(n_blocks / MULTIPROCESSORS))
    n_waves = math.ceil(n_blocks / (MULTIPROCESSORS * together))
    return n_waves * together * (shape.m * shape.n / speed + TILE_COST)


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
    return int((position(last) - position(first)).max()) + reach + 1


@functools.cache
def kernel_for(shape, itemsize, mode):
    """The kernel of these choices, made once."""
    return halo.make(shape, itemsize, mode)


def mode_of(array, precision, n_terms):
    """How numbers of this array are multiplied (`gemm.fragments`), for sums of so many terms."""
    if arrays.dtype_name(array) != "float32":
        return "narrow"
    if precision == "tf32":
        return "tf32"
    return "mixed" if n_terms >= LONG else "split"


def run(gather, plan, problem, source, weight, bias, result, mode):
    """result = source * weight (+ bias), by the halo kernel."""
    g, shape = gather, plan.shape
    source = beside(source, g.n_channels, g.H * g.W, problem)
    weights, itemsize = arranged(g, plan, problem, weight), result.dtype.itemsize
    width, plane = VECTOR_BYTES // itemsize, g.P * g.Q
    options = halo.ADD_BIAS if bias is not None else 0
    options += 0 if problem.channels_last else halo.PLANAR
    whole = (g.n_columns if problem.channels_last else plane) % width == 0
    if whole and arrays.address_of(result) % VECTOR_BYTES == 0:
        options += halo.VECTORS
    n_rows = g.N * plane
    n_blocks = math.ceil(n_rows / shape.m) * math.ceil(g.n_columns / shape.n)
    numbers = (
        g.N, g.P, g.Q, g.H, g.W, *g.grid, *g.stride, *g.pad, *g.dilation, g.S, g.R * g.S,
        g.n_channels, g.n_columns, plan.n_chunks, plan.n_positions,
    )  # fmt: skip
    launch(
        kernel_for(shape, itemsize, mode), n_blocks, shape.n_threads, source, weights,
        weights if bias is None else bias, result, np.int32(options), n_rows,
        *map(np.int32, numbers),
        shared_bytes=halo.shared_bytes(shape, plan.n_positions, plan.n_chunks),
        flat=True, overlap=True,
    )  # fmt: skip


def beside(array, n_channels, plane, problem):
    """`array` itself if its channels lie side by side, else a copy in which they do."""
    if problem.channels_last:
        return array
    copy = arrays.empty((arrays.size_of(array),), like=array)
    side = arranging.SIDE
    n_images = arrays.size_of(array) // (n_channels * plane)
    n_blocks = n_images * math.ceil(n_channels / side) * math.ceil(plane / side)
    itemsize = array.dtype.itemsize
    whole = not (plane * itemsize | arrays.address_of(array)) % VECTOR_BYTES
    launch(
        arranging.transpose_kernel, n_blocks, arranging.BLOCK_SIZE, array, copy, n_channels,
        plane, whole, flat=True, overlap=True,
    )  # fmt: skip
    return copy


def arranged(gather, plan, problem, weight):
    """The weights as `halo` reads them."""
    p, n_taps = problem, gather.R * gather.S
    k_size = halo.CHUNK_BYTES // weight.dtype.itemsize
    n_lines = math.ceil(gather.n_columns / plan.shape.n) * plan.shape.n
    tiles = arrays.empty((plan.n_chunks * n_taps * n_lines * k_size,), like=weight)
    filter_step, channel_step, tap_step = p.C * n_taps, n_taps, 1
    if p.channels_last:
        channel_step, tap_step = 1, p.C
    steps = filter_step, channel_step, tap_step
    if gather.flipped:
        steps = channel_step, filter_step, tap_step
    numbers = k_size, n_lines, gather.n_columns, gather.n_channels, n_taps, *steps
    launch(
        arranging.arrange_kernel, math.ceil(arrays.size_of(tiles) / arranging.BLOCK_SIZE),
        arranging.BLOCK_SIZE, weight, tiles, *map(np.int32, numbers), gather.flipped, flat=True,
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
        yield f"conv2d.transpose {dtype}", arranging.transpose_kernel, types
        for mode in ("tf32", "split", "mixed") if dtype == "float32" else ("narrow",):
            for shape in SHAPES[mode]:
                kernel = kernel_for(shape, 4 if dtype == "float32" else 2, mode)
                types = [array] * 4 + ["int32", "int64", *["int32"] * 19]
                yield f"conv2d.halo {mode} {shape.m}x{shape.n} {dtype}", kernel, types
