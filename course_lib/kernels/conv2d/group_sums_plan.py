"""Which convolutions with groups `group_sums` takes for dweight, and how it is launched."""

import functools

import numpy as np

from course_lib.kernels.blocks.memory_format import empty
from course_lib.kernels.conv2d import (
    gather_pack,
    gather_plan,
    gathering,
    group_sums,
    grouped_plan,
    halo_plan,
    pixel_sums,
    pixel_sums_plan,
)
from course_lib.kernels.conv2d.gather_taps import window_size
from course_lib.kernels.conv2d.implicit_dweight import add_up
from course_lib.kernels.conv2d.pixel_sums_plan import KERNEL_TYPES, SHAPES, n_blocks, numbers_of
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

#: How many times fewer channels than there are a tile must read, for groups not to become one;
#: where `gather` takes that one. As measured at drawn shapes on an H200.
WORTH, WORTH_OF_GATHER = 2, 3


@functools.lru_cache(maxsize=4096)
def windowed(problem, itemsize, shape):
    """The `Problem` with as many channels as a tile of this shape has terms of."""
    p, width = problem, VECTOR_BYTES // itemsize
    whole = pixel_sums_plan.padded(problem, itemsize)
    each = p.K // p.groups, p.C // p.groups
    return whole._replace(C=window_size(p.K, shape.n, *each, whole.C, width))


def dweight(problem, dy, x, dweight, precision):
    """dweight, from dy and x; from one group of all channels where a tile reads most of them."""
    p, itemsize = problem, x.dtype.itemsize
    mode = halo_plan.mode_of(x, precision, p.N * p.P * p.Q)
    of_shape = functools.partial(windowed, problem, itemsize)
    one, chip, takes = p._replace(groups=1), chip_of(x), pixel_sums_plan.takes(p)
    is_few = max(p.C, p.K) <= grouped_plan.MOST_DENSE
    by_gather = is_few and chip.capability == gather_plan.ONLY and p.N > 0
    by_gather = by_gather and not isinstance(gather_plan.DWEIGHT_PLAN(one, chip), Refusal)
    least = min(of_shape(shape).C for shape in SHAPES[mode])
    if takes and (not is_few or least * (WORTH_OF_GATHER if by_gather else WORTH) <= p.C):
        plan = pixel_sums_plan.fastest(of_shape, itemsize, mode, chip)
        _launch(p, plan, of_shape(plan.shape), dy, x, dweight, mode)
        return
    one = one if by_gather or takes else grouped_plan.joined(p)  # of large planes
    whole = empty(one.weight_shape, x, p)
    if by_gather:
        gather_plan.dweight(one, dy, x, whole, precision)
    else:
        gathering.launch_dweight("tensor_core", one, dy, x, whole, precision)
    grouped_plan.launch_spread(problem, one, dweight, whole, True)


def _launch(problem, plan, window, dy, x, dweight, mode):
    (shape, n_splits, length), p, itemsize = plan, problem, x.dtype.itemsize
    x, dy = gather_pack.x_and_dy(problem, x, dy)
    partial = dweight
    if n_splits > 1 or arrays.dtype_name(dweight) != "float32":
        partial = arrays.empty((n_splits, arrays.size_of(dweight)), like=x, dtype="float32")
    groups = p.K, window.C, p.K // p.groups, p.C // p.groups
    launch(
        kernel_for(shape, itemsize, mode), n_blocks(window, shape) * n_splits, shape.n_threads,
        dy, x, partial, p.N * p.P * p.Q, length, n_splits, *map(np.int32, groups),
        *numbers_of(pixel_sums_plan.padded(problem, itemsize)), p.channels_last,
        shared_bytes=pixel_sums.shared_bytes(shape, itemsize), flat=True, overlap=True,
    )  # fmt: skip
    if partial is not dweight:
        add_up(partial, dweight, n_splits)


kernel_for = functools.cache(group_sums.make)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    numbers = [*KERNEL_TYPES[:3], *["int32"] * 4, *KERNEL_TYPES[3:]]
    for dtype in ("float32", "float16", "bfloat16"):
        for mode in ("tf32", "split", "mixed") if dtype == "float32" else ("narrow",):
            for shape in SHAPES[mode]:
                kernel = kernel_for(shape, 4 if dtype == "float32" else 2, mode)
                label = f"conv2d.pixel_sums of groups {mode} {shape.m}x{shape.n} {dtype}"
                yield label, kernel, [(dtype, 1), (dtype, 1), ("float32", 1), *numbers]
