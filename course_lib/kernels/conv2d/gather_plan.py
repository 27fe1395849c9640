"""Which convolutions `gather` takes, with which tiles, and how it is launched."""

import functools
import math
from typing import NamedTuple

from course_lib.kernels.blocks.mma.warpgroup import ONLY
from course_lib.kernels.conv2d import (
    gather,
    gather_dweight,
    gather_pack,
    halo_plan,
    pixel_sums_plan,
)
from course_lib.kernels.conv2d.gather import Shape
from course_lib.kernels.conv2d.gather_pack import Steps
from course_lib.kernels.conv2d.gather_taps import ITEMSIZE, Sizes, dx_sizes, forward_sizes, windowed
from course_lib.kernels.conv2d.halo_results import ADD_BIAS, PLANAR, VECTORS
from course_lib.kernels.conv2d.implicit_dweight import add_up, sum_kernel
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.warpgroup import ROW_BYTES

STEP = ROW_BYTES // 2  # pixels of dweight that are multiplied at a time
SHAPES = (
    Shape(128, 256, 4, 1, 72, 480), Shape(128, 128, 3, 2, 72, 480), Shape(128, 64, 4, 2, 50, 400),
    Shape(128, 32, 4, 2, 40, 350),
)  # fmt: skip
#: Of float32, whose sums take twice as many registers.
SPLIT_SHAPES = (
    Shape(128, 128, 4, 1, 50, 400), Shape(128, 64, 4, 2, 55, 400), Shape(128, 32, 4, 2, 44, 350),
)  # fmt: skip
DWEIGHT_SHAPES = SHAPES[:3]
#: How many times fewer channels than there are a tile of so many columns must read, for groups not
#: to be joined.
WORTH, WIDE = 2, 128
FEW_COLUMNS, FEW_TERMS = 32, 512  # of a result, and of sums of float32, where `halo` is slower
MOST = 2**30  # of what is counted in 32 bits
MOST_WORKSPACE = 256 << 20  # bytes of partial sums, and of packed weights
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LEAST_STEPS = 4  # of 128 bytes of terms, that a part has
#: To add up parts: a launch, and bytes of partial sums in 10 ns, as a cost of `Shape`.
LAUNCH_COST, BYTES = 250, 25_000


class Plan(NamedTuple):
    """How a pass is dealt out; `sizes` have all numbers but the options."""

    shape: Shape
    sizes: Sizes
    n_blocks: int


@functools.lru_cache(maxsize=4096)
def planned(sizes_of, over_pixels, problem, chip):
    """The `Plan` of a pass, `sizes_of` its `forward_sizes` or `dx_sizes`; or a `Refusal`.

    over_pixels  whether it sums over pixels, for dweight, in place of terms
    """
    p = problem
    if chip.capability > ONLY:
        return Refusal("needs wgmma, an instruction of compute capability 9.0 alone")
    if reason := fault(p, sizes_of, over_pixels):
        return Refusal(reason)
    sizes = sizes_of(p)
    shapes, plan = shapes_for(p.mode), plan_of
    if over_pixels:
        shapes, plan = DWEIGHT_SHAPES, dweight_plan_of
    found = []
    for shape in shapes:
        if shape.shared_bytes <= chip.shared_bytes:
            of_tile = sizes if over_pixels else windowed(sizes, shape.n, p.mode)
            found += [plan(of_tile, shape, n_splits, ITEMSIZE[p.mode]) for n_splits in SPLITS]
    found = [each for each in found if each]
    if not found:
        return Refusal(f"has no tiles that fit {chip.shared_bytes:,} bytes of shared memory")
    return min(found, key=lambda each: cost(each, over_pixels, ITEMSIZE[p.mode], chip))


def fault(p, sizes_of, over_pixels=False):
    """Why the kernels can't take a pass of a `Problem`; or None."""
    if p.groups != 1 and over_pixels:
        return "takes dweight without groups"
    if over_pixels and p.mode != "half":
        return "takes 16-bit numbers, which wgmma reads by rows"
    width = VECTOR_BYTES // ITEMSIZE[p.mode]
    z = sizes_of(p)
    if not z.n_channels:
        return "takes one channel at least"
    if not over_pixels:
        z = windowed(z, WIDE, p.mode)
    reach_h = p.pad_h + p.dilation_h * (p.R + p.stride_h)  # beyond an image
    reach_w = p.pad_w + p.dilation_w * (p.S + p.stride_w)
    lines = z.n_images * z.source_h + reach_h
    counted = (
        (lines * z.source_w + reach_w) * (z.pitch // width),
        z.n_images * z.result_h * z.result_w,
        z.n_residues * z.n_columns * z.most_terms, p.H + reach_h, p.W + reach_w,
        p.stride_h * (p.stride_h + p.pad_h), p.stride_w * (p.stride_w + p.pad_w),
    )  # fmt: skip
    n_bytes = z.n_residues * z.n_columns * z.most_terms * ITEMSIZE[p.mode]
    if max(counted) >= MOST or n_bytes > MOST_WORKSPACE:
        return f"takes up to {MOST:,} pixels and weights, and {MOST_WORKSPACE:,} bytes of these"
    return None


def is_faster(sizes_of, problem, chip):
    """Whether it is tried before `halo`: that can't take the pass, or has too wide a tile."""
    p, itemsize = problem._replace(groups=1), ITEMSIZE[problem.mode]
    if chip.capability != ONLY or not p.N or fault(problem, sizes_of):
        return False
    z = sizes_of(problem)
    if windowed(z, WIDE, p.mode).n_channels * WORTH <= z.n_channels:
        return True
    is_forward = sizes_of is forward_sizes
    n_columns, n_terms = (p.K, p.C) if is_forward else (p.C, p.K)
    if n_columns <= FEW_COLUMNS and (p.mode != "float32" or n_terms * p.R * p.S <= FEW_TERMS):
        return True
    gather = halo_plan.forward_of(p) if is_forward else halo_plan.dx_of(p)
    mode = {"half": "narrow", "tf32": "tf32", "float32": "mixed"}[p.mode]
    return halo_plan.planned(gather, itemsize, mode, chip) is None


def shapes_for(mode):
    """The tiles of forward and dx."""
    return SPLIT_SHAPES if mode == "float32" else SHAPES


def takes(problem):
    """Whether there are plans for all passes."""
    passes = (forward_sizes,), (dx_sizes,), (forward_sizes, True)
    return not any(fault(problem, *each) for each in passes)


def plan_of(sizes, shape, n_splits, itemsize):
    """The `Plan` with these choices; None where parts are too short, or take too much memory."""
    z, k_size = sizes, ROW_BYTES // itemsize
    n_steps = max(1, math.ceil(z.most_terms / k_size))
    if n_splits > 1 and n_steps < n_splits * LEAST_STEPS:
        return None
    if n_splits > 1 and n_splits * 4 * size_of_result(z) > MOST_WORKSPACE:
        return None
    length = math.ceil(n_steps / n_splits) * k_size
    rows = z.n_images * math.ceil(z.result_h / z.step_h) * math.ceil(z.result_w / z.step_w)
    n_tiles = math.ceil(rows / shape.m) * math.ceil(z.n_columns / shape.n) * z.n_residues
    sizes = z._replace(n_splits=n_splits, length=length)
    return Plan(shape, sizes, n_tiles * n_splits)


def dweight_plan_of(sizes, shape, n_splits, itemsize):
    """The same for dweight: parts are of the pixels, its rows terms."""
    z, n_steps = sizes, math.ceil(sizes.n_images * sizes.result_h * sizes.result_w / STEP)
    if n_splits > 1 and n_steps < n_splits * LEAST_STEPS:
        return None
    if n_splits > 1 and n_splits * 4 * z.n_columns * z.most_terms > MOST_WORKSPACE:
        return None
    n_tiles = math.ceil(z.most_terms / shape.m) * math.ceil(z.n_columns / shape.n)
    length = math.ceil(n_steps / n_splits) * STEP
    sizes = z._replace(n_splits=n_splits, length=length, options=PLANAR + VECTORS)
    return Plan(shape, sizes, n_tiles * n_splits)


def size_of_result(z):
    return z.n_images * z.n_columns * z.result_h * z.result_w


def cost(plan, over_pixels, itemsize, chip):
    """What a plan takes, in the unit of `Shape`."""
    shape, z = plan.shape, plan.sizes
    rounds = math.ceil(plan.n_blocks / (chip.multiprocessors * shape.n_blocks))
    steps, size = z.length / STEP, z.n_columns * z.most_terms
    if not over_pixels:
        terms = z.taps_h * z.taps_w * z.n_channels / z.n_residues  # in the mean
        steps, size = terms / z.n_splits * itemsize / ROW_BYTES, size_of_result(z)
    found = rounds * (shape.step * steps + shape.once)
    if z.n_splits > 1:
        found += LAUNCH_COST + 8 * z.n_splits * size / BYTES
    return found


def run(plan, steps, problem, source, weight, bias, result):
    """result = source * weight (+ bias); `steps` are the `Steps` of `weight`."""
    shape, z, n_splits = plan.shape, plan.sizes, plan.sizes.n_splits
    packed, tiles = gather_pack.source_and_weights(problem, z, steps, source, weight)
    partial = result
    if n_splits > 1:
        partial = arrays.empty((n_splits * size_of_result(z),), like=result, dtype="float32")
    width = VECTOR_BYTES // partial.dtype.itemsize
    options = (bias is not None) * ADD_BIAS + (not problem.channels_last) * PLANAR
    whole = z.n_columns % width == 0
    if not problem.channels_last:
        whole = z.n_residues == 1 and z.result_h * z.result_w % width == 0
    options += VECTORS * (whole and not arrays.address_of(partial) % VECTOR_BYTES)
    launch(
        gather.make(shape, problem.mode), plan.n_blocks, shape.n_threads, packed, tiles,
        tiles if bias is None else bias, partial, Sizes(*z[:-1], options),
        shared_bytes=shape.shared_bytes, flat=True, overlap=True,
    )  # fmt: skip
    if n_splits > 1:
        add_up(partial, result, n_splits)


def forward(problem, x, weight, bias, y, precision):
    """y = x * weight + bias."""
    plan = FORWARD_PLAN(problem, chip_of(y))
    weight, (of_filter, of_channel, *others), each = weight_of(problem, weight)
    run(plan, Steps(of_filter, of_channel, *others, *each), problem, x, weight, bias, y)


def dx(problem, dy, weight, dx, precision, bias=None):
    """dx, from dy; and `bias` added."""
    plan = DX_PLAN(problem, chip_of(dx))
    weight, (of_filter, of_channel, *others), each = weight_of(problem, weight)
    run(plan, Steps(of_channel, of_filter, *others, *each[::-1]), problem, dy, weight, bias, dx)


def dweight(problem, dy, x, dweight, precision):
    """dweight, from dy and x, by a sum of parts of the pixels."""
    shape, z, n_blocks = DWEIGHT_PLAN(problem, chip_of(dweight))
    x, dy = gather_pack.x_and_dy(problem, x, dy)
    size = z.n_columns * z.most_terms
    partial = arrays.empty((z.n_splits * size,), like=x, dtype="float32")
    launch(
        gather_dweight.make(shape, 2), n_blocks, shape.n_threads, x, dy, partial, z,
        shared_bytes=shape.shared_bytes, flat=True, overlap=True,
    )  # fmt: skip
    pixel_sums_plan.add_up(partial, dweight, z.n_splits, size, z.n_channels, problem)


def weight_of(p, weight):
    """(the weight, dense; from a filter, channel, tap, group to the next; filters, channels of it).
    """
    n_taps, each = p.R * p.S, (p.K // p.groups, p.C // p.groups)
    of_filter = each[1] * n_taps
    steps, of_group = (of_filter, n_taps, 1), each[0] * of_filter
    if arrays.is_channels_last(weight):
        return weight, (of_filter, 1, each[1], of_group), each
    return arrays.contiguous(weight), (*steps, of_group), each


FORWARD_PLAN = functools.partial(planned, forward_sizes, False)
DX_PLAN = functools.partial(planned, dx_sizes, False)
DWEIGHT_PLAN = functools.partial(planned, forward_sizes, True)


def kernels():
    """Every kernel that a pass may launch, but that which adds up parts."""
    made = (gather.make(shape, mode) for mode in ITEMSIZE for shape in shapes_for(mode))
    return *gather_pack.KERNELS.values(), *made


def dweight_kernels():
    """Every kernel that dweight may launch."""
    made = (gather_dweight.make(shape, 2) for shape in DWEIGHT_SHAPES)
    return gather_pack.pack_two_kernel, sum_kernel, *made


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in ("float32", "float16", "bfloat16"):
        array, sums = (dtype, 1), ("float32", 1)
        images = [array, array, *["int32"] * 4, "boolean"]
        types = [*images, "int64", array, array, Steps, Sizes]
        modes = ("tf32", "float32") if dtype == "float32" else ("half",)
        for mode in modes:
            yield f"conv2d.pack for warpgroup {dtype} {mode}", gather_pack.KERNELS[mode], types
            for shape in shapes_for(mode):
                for result in dict.fromkeys((dtype, "float32")):
                    tile = f"{shape.m}x{shape.n}"
                    label = f"conv2d.gather warpgroup {tile} {dtype} {mode} to {result}"
                    numbers = [array, array, array, (result, 1), Sizes]
                    yield label, gather.make(shape, mode), numbers
        types = [*images, "int64", *images[:4], *images[5:]]
        yield f"conv2d.pack two {dtype}", gather_pack.pack_two_kernel, types
        for shape in DWEIGHT_SHAPES if dtype != "float32" else ():
            label = f"conv2d.gather_dweight warpgroup {shape.m}x{shape.n} {dtype}"
            yield label, gather_dweight.make(shape, 2), [array, array, sums, Sizes]
