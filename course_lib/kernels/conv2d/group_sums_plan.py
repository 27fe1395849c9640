"""Which convolutions with groups `group_sums` takes for dweight, and how it is launched."""

import functools

import numpy as np

from course_lib.kernels.conv2d import (
    gather_pack,
    gathering,
    group_sums,
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


def plan(problem, chip):
    """The problem itself, or a `Refusal`."""
    p = problem
    if p.groups == 1 or not p.K:
        return Refusal("takes several groups, not 1")
    if found := gathering.fault(p):
        return Refusal(f"takes {found}")
    if not pixel_sums_plan.takes(p):
        return Refusal("takes planes of at most 512 × 512 pixels, and filters of 31 × 31")
    return problem


@functools.lru_cache(maxsize=4096)
def windowed(problem, itemsize, shape):
    """The `Problem` with as many channels as a tile of this shape has terms of."""
    p, width = problem, VECTOR_BYTES // itemsize
    whole = pixel_sums_plan.padded(problem, itemsize)
    each = p.K // p.groups, p.C // p.groups
    return whole._replace(C=window_size(p.K, shape.n, *each, whole.C, width))


def dweight(problem, dy, x, dweight, precision):
    """dweight, from dy and x."""
    p, itemsize = problem, x.dtype.itemsize
    n_pixels, size = p.N * p.P * p.Q, arrays.size_of(dweight)
    mode = halo_plan.mode_of(x, precision, n_pixels)
    of_shape = functools.partial(windowed, problem, itemsize)
    shape, n_splits, length = pixel_sums_plan.fastest(of_shape, itemsize, mode, chip_of(x))
    x, dy = gather_pack.x_and_dy(problem, x, dy)
    partial = dweight
    if n_splits > 1 or arrays.dtype_name(dweight) != "float32":
        partial = arrays.empty((n_splits, size), like=x, dtype="float32")
    window = of_shape(shape)
    groups = p.K, window.C, p.K // p.groups, p.C // p.groups
    launch(
        kernel_for(shape, itemsize, mode), n_blocks(window, shape) * n_splits, shape.n_threads,
        dy, x, partial, n_pixels, length, n_splits, *map(np.int32, groups),
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
