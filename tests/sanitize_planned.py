"""What `sanitize_launches` runs of kernels for aligned channels, for large products, for one chip.

A planner takes them for problems that are larger than compute-sanitizer has time for. So the
planners are given one tile at a time, and other kernels' planners nothing. What was launched is
looked at: a part raises AssertionError where it was another kernel. Parts for chips that the GPU is
not launch nothing.
"""

import contextlib
import math
from unittest import mock

import torch

LAYOUTS = (torch.contiguous_format, torch.channels_last)
# Images, filters and options: chunks of channels that are not full, tiles across images, filters in
# several parts; and padding wider than the filters reach, for which there is no such dx.
GATHERED = (
    ((2, 72, 20, 19), (136, 72, 3, 3), dict(padding=1)),
    ((1, 40, 15, 33), (24, 40, 2, 3), dict(padding=(1, 0), dilation=(1, 2))),
    ((3, 16, 12, 13), (70, 16, 2, 2), dict(padding=2)),
)
BLOCKS = 3  # that such a convolution has: each goes through several tiles
SMALL = (
    ((2, 72, 9, 8), (40, 72, 3, 3), dict(padding=1)),
    ((3, 8, 5, 6), (8, 8, 2, 2), dict(padding=(0, 1), dilation=(1, 2))),
)
# Rows, inputs and outputs of linear layers: several tiles, and a step of k that is not full. Rows
# of 33 numbers do not begin on 16-byte boundaries, and are for forward alone.
PRODUCTS = ((301, 264, 136), (130, 24, 40), (70, 136, 264), (97, 40, 33))
# Images and a hidden layer: whole planes and parts of them, and samples that take turns.
HELD = (
    ((1, 1, 1, 1), 1), ((2, 3, 5, 7), 2), ((3, 40, 9, 9), 6), ((2, 300, 2, 3), 9),
    ((1, 2, 95, 95), 3), ((1, 4, 150, 90), 1), ((300, 8, 3, 3), 2), ((20, 48, 24, 24), 200),
)  # fmt: skip


@contextlib.contextmanager
def launched(*kernels):
    """In this block each of the kernels must be launched, as often as it is named."""
    from course_lib.runtime.launch import recorded

    with recorded() as launches:
        yield
    found = [kernel for kernel, *_ in launches]
    for kernel in kernels:
        if found.count(kernel) != kernels.count(kernel):
            names = [each.py_func.__name__ for each in found]
            raise AssertionError(f"another kernel than {kernel.py_func.__name__}: {names}")


@contextlib.contextmanager
def changed(*modules, **constants):
    """In this block planners have these constants, each the module that knows it."""
    caches = [f for module in modules for f in vars(module).values() if hasattr(f, "cache_clear")]
    plans = [f for f in caches if f.__name__ in ("planned", "chosen")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            known = {name: value for name, value in constants.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **known))
        for plan in plans:
            plan.cache_clear()
        yield
    for plan in plans:
        plan.cache_clear()


def nothing(*modules):
    """Let these planners find nothing."""
    stack = contextlib.ExitStack()
    for module in modules:
        stack.enter_context(mock.patch.object(module, "planned", lambda *_: None))
    return stack


def convolution(dtype, layout, x_shape, weight_shape):
    """(x, weight, bias)."""
    x, weight = (
        torch.randn(shape).to(dtype, memory_format=layout) for shape in (x_shape, weight_shape)
    )
    return x, weight, torch.randn(weight_shape[0]).to(dtype)


# Each generator below yields what a kernel has written.


def convolutions_by_wgmma(dtype):
    from course_lib.kernels import conv2d
    from course_lib.kernels.conv2d import halo_plan, halo_small, warpgroup_plan

    way, needs = dict(variant="tensor_core", precision="tf32"), (True, False, False)
    if torch.cuda.get_device_capability() != warpgroup_plan.ONLY:
        return
    for shape in warpgroup_plan.SHAPES:
        kernel = warpgroup_plan.kernel_for(shape, dtype.itemsize)
        tiles = changed(warpgroup_plan, SHAPES=(shape,), MULTIPROCESSORS=BLOCKS)
        with tiles, nothing(halo_small, halo_plan):
            for x_shape, weight_shape, options in GATHERED:
                for layout in LAYOUTS:
                    x, weight, bias = convolution(dtype, layout, x_shape, weight_shape)
                    with launched(kernel):
                        y = conv2d.forward(x, weight, bias, **way, **options)
                    yield y
                    if options["padding"] != 2:
                        with launched(kernel):
                            dx, *_ = conv2d.backward(y, x, weight, needs=needs, **way, **options)
                        yield dx


def convolutions_by_vectors(dtype):
    """With tiles of each kind, as for large images, and dealt out to clusters as for small ones."""
    from course_lib.kernels.conv2d import (
        halo_plan,
        halo_small,
        pixel_sums_plan,
        pixel_sums_small,
        warpgroup_plan,
    )

    small = halo_small, pixel_sums_small
    modes = dict(narrow=0) if dtype.itemsize == 2 else dict(tf32=0, split=math.inf, mixed=0)
    for mode, long in modes.items():
        options = dict(dtype=dtype, precision="tf32" if mode == "tf32" else "float32")
        with mock.patch.object(halo_plan, "LONG", long):
            for tiles in zip_longest(halo_plan.SHAPES[mode], pixel_sums_plan.SHAPES[mode]):
                kernels = [
                    plan.kernel_for(tile, dtype.itemsize, mode)
                    for plan, tile in zip((halo_plan, pixel_sums_plan), tiles, strict=True)
                ]
                with nothing(*small, warpgroup_plan), contextlib.ExitStack() as stack:
                    for plan, tile in zip((halo_plan, pixel_sums_plan), tiles, strict=True):
                        stack.enter_context(changed(plan, SHAPES={mode: {tile: 1.0}}))
                    yield from passes((kernels[0], *kernels), **options)
            for tiles in zip_longest(halo_small.SHAPES[mode], pixel_sums_small.SHAPES[mode]):
                sources = (
                    halo_plan.kernel_for(tiles[0], dtype.itemsize, mode, source)
                    for source in ("by_k", "by_row")
                )
                sums = pixel_sums_plan.kernel_for(tiles[1], dtype.itemsize, mode, True)
                with contextlib.ExitStack() as stack:
                    for plan, tile in zip(small, tiles, strict=True):
                        choice = dict(SHAPES={mode: (tile,)}, fastest=most_blocks)
                        stack.enter_context(changed(plan, **choice))
                    yield from passes((*sources, sums), **options)


def zip_longest(first, second):
    """Pairs of both, as many as the longer one has: the last of the other one again."""
    first, second = list(first), list(second)
    for i in range(max(len(first), len(second))):
        yield first[min(i, len(first) - 1)], second[min(i, len(second) - 1)]


def most_blocks(_, mode, plans):
    """The last of all plans that there are: the largest cluster, or nearly so."""
    return list(plans)[-1]


def passes(kernels, *, dtype, precision):
    from course_lib.kernels import conv2d

    way = dict(variant="tensor_core", precision=precision)
    for x_shape, weight_shape, options in SMALL:
        for layout in LAYOUTS:
            x, weight, bias = convolution(dtype, layout, x_shape, weight_shape)
            with launched(*kernels):
                y = conv2d.forward(x, weight, bias, **way, **options)
                gradients = conv2d.backward(y, x, weight, **way, **options)
            yield y
            yield from gradients


def products_by_wgmma(dtype):
    from course_lib.kernels import linear
    from course_lib.kernels.gemm import warpgroup, warpgroup_plan

    if torch.cuda.get_device_capability() != warpgroup.ONLY:
        return
    way = dict(variant="tensor_core", precision="tf32")
    for shape in warpgroup_plan.SHAPES[dtype.itemsize]:
        y_kernel, *others = (
            warpgroup.kernel_for(shape, sources, dtype.itemsize).kernel
            for sources in warpgroup.SOURCES
        )
        choice = dict(
            SHAPES={dtype.itemsize: (shape,)}, LEAST_TILES=1, others_cost=lambda *_: math.inf
        )
        with changed(warpgroup_plan, **choice), changed(warpgroup):
            for n_rows, n_in, n_out in PRODUCTS:
                x, weight = (torch.randn(n, n_in).to(dtype) for n in (n_rows, n_out))
                with launched(y_kernel):
                    y = linear.forward(x, weight, weight[:, 0], activation="relu", **way)
                yield y
                if n_out % 8 == 0:
                    with launched(*others):
                        gradients = linear.backward(y, x, weight, **way)
                    yield from gradients


def holding(dtype):
    """Squeeze and excitation by the rung `resident`, which the other rungs' part leaves out."""
    from course_lib.kernels import squeeze_excite
    from course_lib.kernels.squeeze_excite import resident

    if torch.cuda.get_device_capability() < resident.CAPABILITY:
        return
    for weight_dtype in dict.fromkeys((dtype, torch.float32)):
        for shape, R in HELD:
            C = shape[1]
            weights = [torch.randn(s).to(weight_dtype) for s in ((R, C), (R,), (C, R), (C,))]
            for start in (0, 1):
                size = torch.Size(shape).numel() + start
                x, y = (torch.randn(size).to(dtype)[start:].view(shape) for _ in range(2))
                with launched(*resident.FORWARD):
                    found = squeeze_excite.forward(x, *weights, variant="resident", out=y)
                yield from found


PARTS = (
    convolutions_by_wgmma, convolutions_by_vectors, products_by_wgmma, holding,
)  # fmt: skip
