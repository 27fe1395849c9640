"""Which convolutions `few_channels` takes, with which kernels, and how they are launched."""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib.kernels.blocks.column_sums import column_sums_kernel
from course_lib.kernels.blocks.memory_format import formatted
from course_lib.kernels.conv2d import direct, gather_plan, launching
from course_lib.kernels.conv2d.few_channels import BLOCK_SIZE, FILTERS, LANES, forward_kernel
from course_lib.kernels.conv2d.few_channels_dweight import (
    MOST_ROUNDS,
    dweight_kernel,
    filters_of_block,
    staged_size,
)
from course_lib.kernels.conv2d.few_channels_sums import FINISH_LANES, FINISH_THREADS, finish_kernel
from course_lib.kernels.conv2d.implicit_dweight import total_kernel
from course_lib.kernels.conv2d.problem import DTYPES
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

#: (C, R, S) of the filters that there are kernels for: so few taps that sums fit in registers.
FILTER_SIZES = (
    (1, 3, 3), (2, 3, 3), (3, 3, 3), (4, 3, 3), (1, 5, 5), (3, 5, 5), (1, 7, 7),
)  # fmt: skip
MULTIPROCESSORS = 132  # of the largest chip of today
BLOCKS_EACH = 2  # of forward, that a multiprocessor should have to do
LEAST_FILTERS = 8  # of a block, forward, where there are several blocks for the same pixels
#: Of dweight, for each multiprocessor, which takes about three cycles for 128 of them. Every group
#: of filters copies x again; beyond so many, tensor cores are worth the copy that they need.
MOST_PRODUCTS = 2**22
MOST_BYTES = 56 << 10  # of shared memory for dweight, unless a smaller tile takes more
MOST = 2**30  # of what is counted in 32 bits


class Shape(NamedTuple):
    """What a thread does."""

    per_thread: int  # pixels, forward
    filters: int  # dweight: whose sums it keeps
    unroll: int  # pixels whose dy it reads at a time
    min_blocks: int  # per multiprocessor
    staged: bool  # whether dy comes through shared memory


def shape_of(n_taps, last, itemsize):
    """The fastest, as far as was measured."""
    filters = max(f for f in (8, 4, 2, 1) if f * (n_taps + 1) <= 112)
    per_thread = max(n for n in (4, 2, 1) if n * n_taps <= 112)
    if itemsize == 2:
        return Shape(per_thread, filters, 2 if n_taps <= 36 else 1, 3, False)
    few = n_taps <= 9
    return Shape(2 if few and not last else per_thread, filters, 1, 4 if few else 3, True)


class Tile(NamedTuple):
    """Of x: what a block's pixels of y meet."""

    n_lines: int
    n_cols: int
    tall: int  # lines of an image, padded
    n_bytes: int


def tile_of(problem, n_pixels):
    """The `Tile` of any `n_pixels` pixels side by side."""
    p = problem
    reach_h, reach_w = p.dilation_h * (p.R - 1) + 1, p.dilation_w * (p.S - 1) + 1
    tall = (p.P - 1) * p.stride_h + reach_h
    N = max(p.N, 1)
    n_pixels = min(n_pixels, N * p.P * p.Q)
    lines = min((n_pixels + p.Q - 2) // p.Q + 1, N * p.P)  # of y
    images = min((n_pixels + p.P * p.Q - 2) // (p.P * p.Q) + 1, N)
    between = max(0, tall - p.P * p.stride_h)  # lines of x more, from an image to the next
    n_lines = min((lines - 1) * p.stride_h + (images - 1) * between + reach_h, N * tall)
    n_cols = (p.Q - 1) * p.stride_w + reach_w
    return Tile(n_lines, n_cols, tall, 4 * p.C * n_lines * n_cols)


@functools.lru_cache(maxsize=4096)
def fault(problem, capability):
    """Why these kernels can't take the problem, on a chip of this compute capability; or None."""
    p = problem
    if p.groups != 1 or (p.C, p.R, p.S) not in FILTER_SIZES:
        known = ", ".join(f"{r} × {s} over {c}" for c, r, s in FILTER_SIZES)
        return f"filters, without groups, of these sizes and channels: {known}"
    tile = tile_of(problem, side_of(problem))
    counted = max(p.N, 1) * tile.tall, p.N * p.P * p.Q, p.K * p.P * p.Q, p.C * p.H * p.W
    reach = max(tile.n_cols, tile.tall) + p.pad_h + p.pad_w
    if max(*counted, reach, p.K * (p.C * p.R * p.S + 1)) >= MOST:
        return f"{MOST:,} pixels at most, and as many elements in an image"
    shapes = [shape_for(problem, itemsize) for itemsize in (2, 4)]
    n_bytes = max(
        *(tile_of(problem, side_of(problem) * shape.per_thread).n_bytes for shape in shapes),
        *(dweight_bytes(problem, shape, shape.unroll) for shape in shapes),
    )
    # The least that chips have, less what is not dynamic.
    most = (76 if capability >= (8, 0) else 43) << 10
    if n_bytes > most:
        return f"lines of x that fit {most:,} bytes of shared memory, not {n_bytes:,}"
    return None


def shape_for(problem, itemsize):
    """The `Shape` for a problem with numbers of so many bytes."""
    return shape_of(problem.C * problem.R * problem.S, problem.channels_last, itemsize)


def side_of(problem):
    """Threads of a block that have different pixels."""
    return BLOCK_SIZE // (LANES if problem.channels_last else 1)


def n_tiles_of(problem):
    """Tiles of the pixels, forward, of float32."""
    p = problem
    return math.ceil(p.N * p.P * p.Q / (side_of(p) * shape_for(p, 4).per_thread))


def check(problem, array):
    """ValueError where the rung can't take the problem."""
    if found := fault(problem, chip_of(array)[0]):
        raise ValueError(f"variant 'few_channels' takes {found}: use 'implicit_gemm'")


def _whole(problem, array):
    """Whether each pixel's channels, or each channel's pixels, begin on a 16-byte boundary."""
    p, size = problem, array.dtype.itemsize
    whole = (p.K if p.channels_last else p.P * p.Q) * size % VECTOR_BYTES == 0
    return whole and arrays.address_of(array) % VECTOR_BYTES == 0


def _numbers(problem):
    """What both kernels end with: sizes and options."""
    p = problem
    sizes = p.N, p.H, p.W, p.K, p.P, p.Q, p.stride_h, p.stride_w, p.pad_h, p.pad_w
    return map(np.int32, (*sizes, p.dilation_h, p.dilation_w))


# --- forward -------------------------------------------------------------------------------------


def launch_forward(problem, x, weight, bias, y, precision):
    """y = x * weight + bias."""
    p, weight = problem, formatted(weight, problem)
    check(p, x)
    shape = shape_for(p, x.dtype.itemsize)
    n_pixels = side_of(p) * shape.per_thread
    tile, n_tiles = tile_of(p, n_pixels), math.ceil(p.N * p.P * p.Q / n_pixels)
    part = filters_each(p.K, n_tiles, LANES * 8 if p.channels_last else LEAST_FILTERS)
    n_parts = math.ceil(p.K / part)
    kernel = forward_kernel(p.C, p.R, p.S, p.channels_last, shape.per_thread)
    numbers = map(np.int32, (part, n_parts, tile.n_lines, tile.n_cols, tile.tall))
    launch(
        kernel, n_tiles * n_parts, BLOCK_SIZE, x, weight, weight if bias is None else bias, y,
        bias is not None, *numbers, _whole(p, y), *_numbers(p), shared_bytes=tile.n_bytes,
        flat=True, overlap=True,
    )  # fmt: skip


def filters_each(K, n_tiles, least):
    """How many of K filters a block computes, so that there are enough blocks."""
    wanted = math.ceil(MULTIPROCESSORS * BLOCKS_EACH / n_tiles)
    part = math.ceil(K / max(1, min(wanted, K // least)))
    return min(FILTERS, math.ceil(part / least) * least)


# --- dweight and dbias ---------------------------------------------------------------------------


@functools.cache
def dweight_kernel_for(C, R, S, last, shape):
    return dweight_kernel(C, R, S, last, *shape[1:])


def is_for_gather(problem, chip):
    """Whether the way `gather` finds dweight: it can, and there are too many products for this."""
    p = problem
    n_products = p.N * p.P * p.Q * p.K * p.C * p.R * p.S
    if chip.capability != gather_plan.ONLY or n_products <= MOST_PRODUCTS * chip.multiprocessors:
        return False
    return not isinstance(gather_plan.DWEIGHT_PLAN(p, chip), Refusal)


def launch_dweight(problem, dy, x, dweight, dbias, precision):
    """dweight and dbias, each where it is not None."""
    p = problem
    check(p, x)
    if dweight is not None and is_for_gather(p, chip_of(x)):
        launching.with_dbias(gather_plan.dweight, p, dy, x, dweight, dbias, precision)
        return
    n_taps, last = p.C * p.R * p.S, p.channels_last
    shape, side = shape_for(p, x.dtype.itemsize), side_of(p)
    n_groups = math.ceil(p.K / filters_of_block(last, shape.filters))
    rounds = rounds_of(p, shape)
    n_splits, length, rounds = split_plan(p.N * p.P * p.Q, side, n_groups, shape, rounds)
    tile = tile_of(p, rounds * side)
    partial = arrays.empty((n_splits, p.K, n_taps + 1), like=x, dtype="float32")
    kernel = dweight_kernel_for(p.C, p.R, p.S, last, shape)
    numbers = map(np.int32, (length, rounds, n_groups, tile.n_lines, tile.n_cols, tile.tall))
    launch(
        kernel, n_splits * n_groups, BLOCK_SIZE,
        dy, x, partial, *numbers, _whole(p, dy), *_numbers(p),
        shared_bytes=dweight_bytes(p, shape, rounds), flat=True, overlap=True,
    )  # fmt: skip
    some = dweight if dbias is None else dbias
    launch(
        finish_kernel, math.ceil(p.K * (n_taps + 1) / FINISH_LANES), FINISH_THREADS,
        partial, some if dweight is None else dweight, some, n_splits, np.int32(n_taps),
        dweight is not None, dbias is not None, flat=True, overlap=True,
    )  # fmt: skip


def dweight_bytes(problem, shape, rounds):
    """Of dynamic shared memory, for tiles of so many pixels a thread."""
    x_bytes = -(-tile_of(problem, rounds * side_of(problem)).n_bytes // VECTOR_BYTES) * VECTOR_BYTES
    return 2 * (x_bytes + (4 * staged_size(shape.filters) if shape.staged else 0))


def rounds_of(problem, shape):
    """Pixels of a thread in a tile, if there are many."""
    rounds = MOST_ROUNDS
    while rounds > shape.unroll and dweight_bytes(problem, shape, rounds) > MOST_BYTES:
        rounds -= shape.unroll
    return rounds


def split_plan(n_pixels, side, n_groups, shape, most_rounds):
    """(parts that pixels are shared among, pixels of a part, rounds of a tile)."""
    wanted = max(1, MULTIPROCESSORS * shape.min_blocks // n_groups)
    n_turns = max(1, math.ceil(n_pixels / (side * shape.unroll)))
    rounds = min(most_rounds // shape.unroll, math.ceil(n_turns / wanted)) * shape.unroll
    n_tiles = math.ceil(n_turns * shape.unroll / rounds)
    tiles = math.ceil(n_tiles / min(n_tiles, wanted))
    return math.ceil(n_tiles / tiles), tiles * rounds * side, rounds


def _kinds():
    """(C, R, S), whether channels-last, and `Shape` of all that there are kernels for."""
    for C, R, S in FILTER_SIZES:
        for last in (False, True):
            for itemsize in (4, 2):
                yield C, R, S, last, shape_of(C * R * S, last, itemsize)


def forward_kernels():
    return [forward_kernel(*kind, shape.per_thread) for *kind, shape in _kinds()]


def dweight_kernels():
    of_gather = *gather_plan.dweight_kernels(), direct.dbias_kernel, column_sums_kernel
    own = (dweight_kernel_for(*kind) for kind in _kinds())
    return [*own, finish_kernel, *of_gather, total_kernel]


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    numbers = ["int32"] * 12
    for dtype in DTYPES:
        array, sums = (dtype, 1), ("float32", 1)
        for C, R, S in FILTER_SIZES:
            for last in (False, True):
                shape = shape_of(C * R * S, last, 4 if dtype == "float32" else 2)
                name = f"few {R}x{S}x{C} {'channels-last ' if last else ''}{dtype}"
                types = [array] * 4 + ["boolean", *["int32"] * 5, "boolean", *numbers]
                kernel = forward_kernel(C, R, S, last, shape.per_thread)
                yield f"conv2d.forward {name}", kernel, types
                types = [array, array, sums, *["int32"] * 6, "boolean", *numbers]
                kernel = dweight_kernel_for(C, R, S, last, shape)
                yield f"conv2d.dweight {name}", kernel, types
        types = [sums, array, array, "int64", "int32", "boolean", "boolean"]
        yield f"conv2d.finish {dtype}", finish_kernel, types
