"""The way `block_diagonal` of `tensor_core`: groups of few channels, multiplied many at a time.

A tile of a product has 64 columns, and a group of 4 filters would fill a sixteenth of it. So the
weights are *spread*: some groups become one, whose weights are zero where filter and channel are of
different groups. It is a convolution like others. The zeros are multiplied too: an infinity or NaN
in x or dy gives NaN to the results of all groups that its own was joined with.

On compute capability 9.0 `warpgroup` takes passes without strides: the columns of a tile read the
channels of their own groups, and the weights are spread straight to where it reads them.
"""

import functools
import math

import numpy as np

from course_lib.kernels.blocks import memory_format
from course_lib.kernels.blocks.memory_format import empty, formatted
from course_lib.kernels.conv2d import gathering, grouped, halo_plan, layout, warpgroup_plan
from course_lib.kernels.conv2d.problem import DTYPES
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.warpgroup import ROW_BYTES

BLOCK_SIZE = 256
MOST_DENSE = 640  # channels and filters that become one group where faster kernels take that
MOST_CHANNELS = 32  # of a group
SHAPES = tuple(shape for shape in warpgroup_plan.SHAPES if shape.n == grouped.COLUMNS)


def joined(problem):
    """The `Problem` with as many groups joined as fill a tile's columns."""
    p, largest = problem, max(problem.C, problem.K) // problem.groups
    fits = range(1, grouped.COLUMNS // largest + 1)
    n = max((n for n in fits if p.groups % n == 0), default=1)
    return p._replace(groups=p.groups // n)


def joined_for(problem, gather_of, source, precision):
    """The same, or with all groups joined where channels are few and `halo` takes that."""
    dense, itemsize = problem._replace(groups=1), source.dtype.itemsize
    gather = gather_of(dense)
    n_terms = gather.n_channels * gather.R * gather.S if gather else 0
    mode = halo_plan.mode_of(source, precision, n_terms)
    taken = max(problem.C, problem.K) <= MOST_DENSE
    taken = taken and halo_plan.planned(gather, itemsize, mode, chip_of(source))
    return dense if taken else joined(problem)


def plan(problem, chip, most=MOST_CHANNELS):
    """The problem itself, or a `Refusal`; `most` channels and filters of a group."""
    p = problem
    if p.groups == 1 or not p.K:
        return Refusal("takes several groups, not 1")
    if max(p.C, p.K) // p.groups > most:
        return Refusal(
            f"takes groups of at most {most} channels and filters, not of "
            f"{p.C // p.groups} and {p.K // p.groups}"
        )
    if found := most == MOST_CHANNELS and gathering.fault(joined(p)) or gathering.fault(p):
        return Refusal(f"takes {found}")
    return problem


def launch_spread(problem, joined, weight, spread, gathers):
    """Launch `spread_kernel`; `problem` is that of `weight`, `joined` that of `spread`."""
    p, size = problem, arrays.size_of(weight if gathers else spread)
    filters, channels = p.K // joined.groups, p.C // joined.groups
    numbers = p.K // p.groups, p.C // p.groups, filters, channels, channels, p.R * p.S
    launch(
        grouped.spread_kernel, math.ceil(size / BLOCK_SIZE), BLOCK_SIZE, weight, spread,
        *map(np.int32, numbers), gathers, joined.channels_last, flat=True, overlap=True,
    )  # fmt: skip


def forward(problem, x, weight, bias, y, precision):
    """y = x * weight + bias."""
    weight = formatted(weight, problem)
    if not _by_warpgroups(problem, x, weight, bias, y, precision, False):
        p = joined_for(problem, halo_plan.forward_of, x, precision)
        _join(gathering.launch_forward, problem, p, x, weight, y, precision, bias)


def turned(p):
    """dx as a forward pass, of dy; None if it isn't one of a `Problem`."""
    pads = (p.R - 1) * p.dilation_h - p.pad_h, (p.S - 1) * p.dilation_w - p.pad_w
    if (p.stride_h, p.stride_w) != (1, 1) or min(pads) < 0:
        return None
    return p._replace(C=p.K, H=p.P, W=p.Q, K=p.C, P=p.H, Q=p.W, pad_h=pads[0], pad_w=pads[1])


def is_read_once(problem, for_dx, chip):
    """Whether `warpgroup` takes the pass, forward or dx, of a problem with groups."""
    p = turned(problem) if for_dx else problem
    if p is None or p.groups == 1:
        return False
    itemsize, mode = (2, "narrow") if p.mode == "half" else (4, p.mode)
    gather = halo_plan.forward_of(p._replace(groups=1))
    return planned(gather, p.C // p.groups, p.K // p.groups, itemsize, mode, chip) is not None


def dx(problem, dy, weight, dx, precision):
    """dx, from dy and weight."""
    as_forward = turned(problem)
    if as_forward and _by_warpgroups(as_forward, dy, weight, None, dx, precision, True):
        return
    p = joined_for(problem, halo_plan.dx_of, dy, precision)
    _join(gathering.launch_dx, problem, p, dy, weight, dx, precision)


def _join(launch_pass, problem, joined, source, weight, result, precision, *bias):
    """A pass of the problem by that whose groups are joined."""
    p = joined
    if not p.channels_last and p.groups > 1 and source.dtype.itemsize < 4:
        p = p._replace(channels_last=True)  # 16-bit groups are then copied faster
        source, weight = map(memory_format.channels_last, (source, weight))
    room = result if p.channels_last == problem.channels_last else empty(result.shape, result, p)
    spread = empty(p.weight_shape, weight, p)
    launch_spread(problem, p, weight, spread, False)
    launch_pass("tensor_core", p, source, spread, *bias, room, precision)
    if room is not result:
        N, C, H, W = result.shape
        memory_format.transpose(room, result, N, H * W, C)


def _by_warpgroups(problem, source, weight, bias, result, precision, swapped):
    """Whether the pass is one for `warpgroup`, which then has been launched."""
    p, itemsize = problem, source.dtype.itemsize
    channels, filters = p.C // p.groups, p.K // p.groups
    mode = halo_plan.mode_of(source, precision, channels * p.R * p.S)
    gather = halo_plan.forward_of(p._replace(groups=1))
    plan = planned(gather, channels, filters, itemsize, mode, chip_of(source))
    if plan is None or p.channels_last and arrays.address_of(source) % VECTOR_BYTES:
        return False
    part, k_size = grouped.COLUMNS // filters * channels, ROW_BYTES // itemsize
    n_lines, n_taps = math.ceil(p.K / grouped.COLUMNS) * grouped.COLUMNS, p.R * p.S
    size = plan.n_chunks * n_taps * n_lines * k_size
    tiles = arrays.empty((size,), like=weight)
    numbers = k_size, n_lines, filters, channels, p.K, part, n_taps, p.channels_last
    numbers = weight, tiles, *map(np.int32, numbers), swapped
    kernels, rounded = grouped.TILES[itemsize], itemsize == 4
    source = layout.launch_both(kernels, p, source, p.C, size, numbers, rounded)
    warpgroup_plan.run_laid_out(gather, plan, p, source, tiles, bias, result, part)
    return True


@functools.lru_cache(maxsize=4096)
def planned(gather, channels, filters, itemsize, mode, chip):
    """The fastest `warpgroup_plan.Plan` for groups of so many; None if it can't take them."""
    g = gather._replace(n_channels=grouped.COLUMNS // filters * channels)
    if mode not in warpgroup_plan.MODES or chip.capability != warpgroup_plan.ONLY:
        return None
    if grouped.COLUMNS % filters or g.stride != (1, 1):
        return None
    if (g.n_channels | gather.n_channels) * itemsize % VECTOR_BYTES:
        return None
    plans = (warpgroup_plan.plan_of(g, shape, itemsize, chip) for shape in SHAPES)
    plans = [plan for plan in plans if plan is not None]
    return min(plans, key=functools.partial(warpgroup_plan.cost, g), default=None)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        array, numbers = (dtype, 1), [*["int32"] * 8, "boolean"]
        types = [array, array, *["int32"] * 6, "boolean", "boolean"]
        yield f"conv2d.spread of groups {dtype}", grouped.spread_kernel, types
        alone, with_images = grouped.TILES[4 if dtype == "float32" else 2]
        yield f"conv2d.spread tiles of groups {dtype}", alone, [array, array, *numbers]
        images = [array, array, "int64", "int64", "boolean", "int64"]
        label = f"conv2d.spread tiles of groups and transpose {dtype}"
        yield label, with_images, [*images, array, array, *numbers]
