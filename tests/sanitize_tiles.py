"""What `sanitize_launches` runs of kernels with tiles: convolutions and products on tensor cores.

Planners take most of these for problems that are larger than compute-sanitizer has time for. So
they are given one tile at a time, and other kernels' planners nothing. What was launched is looked
at: a part raises AssertionError where it was another kernel. Parts for chips that the GPU is not
launch nothing.

Of kernels with `wgmma`, racecheck sees what threads read and write, `copy_async` included, but not
what tensor cores read: it says nothing where the barrier between copies and a product is missing.
The simulator's sanitizer does (`test_warpgroup`).
"""

import contextlib
import functools
import itertools
import math
from typing import NamedTuple
from unittest import mock

import torch
from sanitize_launches import LAYOUTS, changed, launched, tensor

PLANAR, LAST = LAYOUTS
#: Images, filters and options: by element and by vectors, one tile and several.
CONVOLUTIONS = (
    ((3, 1, 9, 11), (18, 1, 3, 3), {}), ((2, 3, 8, 7), (9, 3, 3, 3), dict(stride=2, padding=1)),
    ((1, 1, 1, 1), (1, 1, 1, 1), {}), ((2, 3, 7, 9), (70, 3, 3, 2), dict(stride=(2, 1), padding=1)),
    ((2, 16, 11, 9), (80, 8, 3, 3), dict(padding=1, groups=2)),
    ((1, 5, 9, 8), (10, 1, 2, 5), dict(dilation=(2, 1), padding=2, groups=5)),
    # In groups, for the larger tile of 16-bit numbers, both ways.
    ((1, 144, 6, 5), (144, 72, 3, 3), dict(padding=1, groups=2)),
)  # fmt: skip
#: Rows, inputs and outputs of linear layers: a fragment, tiles cut off, and k in parts; then a k in
#: parts for each of the three products; then few rows; and for warpgroups, where rows of 33
#: numbers do not begin on 16-byte boundaries and are for forward alone.
PRODUCTS = ((1, 1, 1), (3, 37, 5), (70, 136, 264), (33, 1288, 40), (257, 72, 130))
IN_PARTS = ((33, 1288, 40), (33, 40, 1288), (1288, 40, 24))
FEW_ROWS = ((1, 136, 24), (2, 1032, 5), (3, 40, 9), (7, 2056, 3))
OF_WARPGROUPS = ((301, 264, 136), (130, 24, 40), (70, 136, 264), (97, 40, 33))
#: Ways of multiplication (`gemm.fragments`), the dtypes that they are for, and the number of terms
#: from which on float32 is "mixed", that is: always, or never.
MODES = (
    ("narrow", torch.float16, 0), ("narrow", torch.bfloat16, 0), ("tf32", torch.float32, 0),
    ("split", torch.float32, 1 << 30), ("mixed", torch.float32, 0),
)  # fmt: skip


class Case(NamedTuple):
    """What a pass gathers from an image: channels of the result from channels of the source."""

    image: tuple  # N, the source's channels in vectors of 16 bytes, and H, W of x
    columns: int  # channels of the result
    filter: tuple
    options: dict


# Chunks of channels that are not full, tiles across images, filters in several parts; rows that do
# not begin on 16-byte boundaries; and padding wider than the filters reach, for forward alone.
WHOLE = Case((2, 9, 12, 18), 136, (3, 3), dict(padding=1))
UNEVEN = Case((1, 5, 15, 33), 21, (2, 3), dict(padding=1, dilation=(2, 1)))
PADDED = Case((3, 2, 12, 13), 70, (2, 2), dict(padding=2))
STRIDED = Case((3, 2, 9, 11), 40, (3, 2), dict(stride=(2, 1), padding=(1, 0)))
# For clusters: channels of the result in whole vectors, several blocks side by side; few of all.
CLUSTERED = Case((2, 9, 9, 8), 72, (3, 3), dict(padding=1))
DILATED = Case((3, 3, 5, 7), 8, (2, 3), dict(padding=(1, 0), dilation=(1, 2)))
LEAST = Case((1, 1, 1, 1), 8, (1, 1), {})
# Images and filters, and options, for dweight: several tiles each way, and one that is not full.
SUMMED = (
    ((2, 72, 9, 8), (136, 72, 3, 3), dict(padding=1)),
    ((3, 8, 9, 11), (40, 8, 3, 2), dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
)
BLOCKS = 2  # of a convolution by warpgroups: each goes through several tiles


def parts():
    """{name: part} of those that have modes of multiplication, not dtypes."""
    found = {"convolutions_by_split_wgmma": convolutions_by_split_wgmma}
    for part, mode in itertools.product((halos, clusters_with_halo, sums_over_pixels), MODES):
        dtype = str(mode[1]).removeprefix("torch.")
        found[f"{part.__name__}_{mode[0]}_{dtype}"] = functools.partial(in_mode, part, *mode)
    return found


def in_mode(part, mode, dtype, long):
    from course_lib.kernels.conv2d import halo_plan

    with mock.patch.object(halo_plan, "LONG", long):
        yield from part(mode, dtype)


def nothing(*modules):
    """Let these planners find nothing."""
    stack = contextlib.ExitStack()
    for module in modules:
        stack.enter_context(mock.patch.object(module, "planned", lambda *_: None))
    return stack


def has_wgmma():
    from course_lib.kernels.gemm import warpgroup

    return torch.cuda.get_device_capability() == warpgroup.ONLY


def precision_of(mode):
    return "tf32" if mode == "tf32" else "float32"


def y_shape(x, weight, options):
    from course_lib.kernels.conv2d.problem import problem_of

    sizes = dict(stride=1, padding=0, dilation=1) | options
    return problem_of(x.shape, weight.shape, **sizes, groups=1, channels_last=False).y_shape


def gathered(case, layout, dtype, kernel, precision, *, backward=False, weights_layout=None):
    """What `kernel` writes, which it must: y, or dx with `backward`.

    weights_layout  of the weights, if another than the images'
    """
    from course_lib.kernels import conv2d

    (N, vectors, H, W), options = case.image, case.options
    channels, K = vectors * 16 // dtype.itemsize, case.columns
    C, K = (K, channels) if backward else (channels, K)
    x = tensor((N, C, H, W), dtype, layout=layout)
    weight = tensor((K, C, *case.filter), dtype, layout=weights_layout or layout)
    way = dict(variant="tensor_core", precision=precision, **options)
    if not backward:
        with launched(kernel):
            return conv2d.forward(x, weight, torch.randn(K).to(dtype), **way)
    dy = tensor(y_shape(x, weight, options), dtype, layout=layout)
    with launched(kernel):
        return conv2d.backward(dy, x, weight, needs=(True, False, False), **way)[0]


# Each generator below yields what a kernel has written.


def convolutions(dtype):
    """With every option, by every rung that takes them, and in the larger of gathering's tiles."""
    from course_lib.kernels import conv2d
    from course_lib.kernels.conv2d import gathering

    for layout, (x_shape, weight_shape, options) in itertools.product(LAYOUTS, CONVOLUTIONS):
        x, weight = (tensor(shape, dtype, layout=layout) for shape in (x_shape, weight_shape))
        for variant in (*conv2d.FORWARD, "large"):
            large = mock.patch.object(gathering, "LARGE_FROM", 0)
            for precision in precisions(dtype, variant):
                way = dict(variant="tensor_core" if variant == "large" else variant,
                           precision=precision, **options)  # fmt: skip
                with large if variant == "large" else contextlib.nullcontext():
                    try:
                        y = conv2d.forward(x, weight, weight[:, 0, 0, 0], **way)
                    except ValueError:  # `depthwise` and `few_channels` take few
                        continue
                    found = conv2d.backward(y, x, weight, **way)
                yield from (y, *found)


def precisions(dtype, variant):
    """What `precision` may be, where it makes a difference."""
    both = dtype is torch.float32 and variant in ("tensor_core", "large")
    return ("float32", "tf32") if both else ("float32",)


def few_channels(dtype):
    """Of all filters that there are kernels for."""
    from course_lib.kernels import conv2d
    from course_lib.kernels.conv2d import few_channels_plan

    cases = itertools.product(few_channels_plan.FILTER_SIZES, LAYOUTS, (1, 2))
    for (C, R, S), layout, stride in cases:
        shapes = (2, C, 13, 9), (18, C, R, S)
        x, weight = (tensor(shape, dtype, layout=layout) for shape in shapes)
        options = dict(stride=stride, padding=(1, R // 2))
        # One channel is of both formats: y tells which is meant.
        y = torch.empty(y_shape(x, weight, options)).to(dtype, memory_format=layout)
        options["variant"] = "few_channels"
        yield conv2d.forward(x, weight, weight[:, 0, 0, 0], **options, out=y)
        yield from conv2d.backward(y, x, weight, needs=(False, True, True), **options)[1:]


def linears(dtype):
    """Each tile, whatever the plan would take; k in a cluster, or in parts."""
    from course_lib.kernels import gemm, linear

    def passes(products, variant="tensor_core"):
        for precision in precisions(dtype, variant):
            for (n_rows, n_in, n_out), start in itertools.product(products, (0, 1)):
                x, weight = tensor((n_rows, n_in), dtype), tensor((n_out, n_in), dtype, start)
                way = dict(variant=variant, precision=precision)
                y = linear.forward(x, weight, weight[:, 0], activation="relu", **way)
                yield from (y, *linear.backward(y, x, weight, **way))

    for variant in linear.FORWARD:
        yield from passes(FEW_ROWS if variant == "tensor_core" else PRODUCTS, variant)
    shapes = gemm.plan.SHAPES
    others = mock.patch.object(gemm.warpgroup_plan, "preferred", lambda *_: [])
    for i in range(max(map(len, shapes.values()))):
        tiles = {mode: (found[min(i, len(found) - 1)],) for mode, found in shapes.items()}
        for products, most in ((PRODUCTS, 16), (IN_PARTS, 0)):
            constants = dict(SHAPES=tiles, FULL=0.0, CLUSTER_INSTEAD_OF=most)
            gemm.plan.best.cache_clear()
            with others, mock.patch.multiple(gemm.plan, **constants):
                yield from passes(products)
    gemm.plan.best.cache_clear()


def products_by_wgmma(dtype):
    from course_lib.kernels import linear
    from course_lib.kernels.gemm import warpgroup, warpgroup_plan

    if not has_wgmma():
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
        with mock.patch.multiple(warpgroup_plan, **choice):
            for n_rows, n_in, n_out in OF_WARPGROUPS:
                x, weight = (tensor((n, n_in), dtype) for n in (n_rows, n_out))
                with launched(y_kernel):
                    y = linear.forward(x, weight, weight[:, 0], activation="relu", **way)
                yield y
                if n_out % 8 == 0:
                    with launched(*others):
                        gradients = linear.backward(y, x, weight, **way)
                    yield from gradients


def convolutions_by_wgmma(dtype):
    from course_lib.kernels.conv2d import warpgroup_plan

    for shape in warpgroup_plan.SHAPES if has_wgmma() else ():
        kernel = warpgroup_plan.kernel_for(shape, dtype.itemsize)
        yield from _by_wgmma(warpgroup_plan, shape, (dtype, kernel, "tf32"))


def convolutions_by_split_wgmma():
    """The same of float32 in two parts, which tensor cores multiply without loss."""
    from course_lib.kernels.conv2d import halo_plan, warpgroup_mixed_plan

    for shape in warpgroup_mixed_plan.SHAPES if has_wgmma() else ():
        kernel = warpgroup_mixed_plan.kernel_for(shape)
        with mock.patch.object(halo_plan, "LONG", 0):
            yield from _by_wgmma(warpgroup_mixed_plan, shape, (torch.float32, kernel, "float32"))


def _by_wgmma(plans, shape, way):
    from course_lib.kernels.conv2d import halo_plan, halo_small

    tiles = changed(plans, "planned", SHAPES=(shape,), MULTIPROCESSORS=BLOCKS)
    with tiles, nothing(halo_small, halo_plan):
        for layout, backward in itertools.product(LAYOUTS, (False, True)):
            yield gathered(WHOLE, layout, *way, backward=backward)
        yield gathered(UNEVEN, LAST, *way)
        yield gathered(UNEVEN, PLANAR, *way, backward=True)
        yield gathered(PADDED, PLANAR, *way)


def _without_clusters():
    from course_lib.kernels.conv2d import (
        halo_small,
        pixel_sums_small,
        warpgroup_mixed_plan,
        warpgroup_plan,
    )

    return nothing(halo_small, pixel_sums_small, warpgroup_mixed_plan, warpgroup_plan)


def halos(mode, dtype):
    """`halo`, for forward and dx: large convolutions get it with large tiles."""
    from course_lib.kernels.conv2d import halo_plan

    for tile in halo_plan.SHAPES[mode]:
        way = dtype, halo_plan.kernel_for(tile, dtype.itemsize, mode), precision_of(mode)
        tiles = changed(halo_plan, "planned", SHAPES={mode: {tile: 1.0}})
        with _without_clusters(), tiles:
            for layout, backward in itertools.product(LAYOUTS, (False, True)):
                yield gathered(WHOLE, layout, *way, backward=backward)
            yield gathered(UNEVEN, LAST, *way)
            yield gathered(UNEVEN, PLANAR, *way, backward=True)
            yield gathered(STRIDED, LAST, *way)


def clusters_with_halo(mode, dtype):
    """The same, shared by the blocks of clusters: small convolutions. Also by weights as given."""
    from course_lib.kernels.conv2d import halo_plan, halo_small

    precision = precision_of(mode)
    for tile, choice in itertools.product(halo_small.SHAPES[mode], (max, min)):

        def fastest(gather, mode, plans, source=None, choice=choice):
            plans = [plan for plan in plans if source in (None, plan.source)]
            return choice(plans, key=lambda plan: plan.n_blocks(gather.R * gather.S))

        def kernel(source, tile=tile):
            return halo_plan.kernel_for(tile, dtype.itemsize, mode, source)

        cases = {
            max: ((CLUSTERED, LAST), (CLUSTERED, PLANAR), (DILATED, PLANAR)),
            min: ((CLUSTERED, PLANAR), (DILATED, LAST), (LEAST, LAST)),
        }[choice]
        tiles = dict(SHAPES={mode: (tile,)})
        with changed(halo_small, "planned", fastest=fastest, **tiles):
            for case, layout in cases:
                yield gathered(case, layout, dtype, kernel("by_k"), precision)
                yield gathered(case, layout, dtype, kernel("by_row"), precision, backward=True)
        if dtype.itemsize != halo_small.ELEMENT_BYTES:
            continue
        as_given = functools.partial(fastest, source="by_element")
        with changed(halo_small, "planned", fastest=as_given, **tiles):
            for case in (CLUSTERED, DILATED):
                way = dtype, kernel("by_element"), precision
                yield gathered(case, LAST, *way, weights_layout=PLANAR)


def sums_over_pixels(mode, dtype):
    """`pixel_sums`, for dweight, in large tiles and by clusters."""
    from course_lib.kernels.conv2d import pixel_sums, pixel_sums_plan, pixel_sums_small

    def fastest(problem, mode, plans, choice=max):
        return choice(plans, key=lambda plan: plan.n_splits)

    for tile in pixel_sums_plan.SHAPES[mode]:
        kernel = pixel_sums_plan.kernel_for(tile, dtype.itemsize, mode)
        tiles = dict(SHAPES={mode: {tile: 1.0}}, LEAST_TILES=1)
        with _without_clusters(), changed(pixel_sums_plan, "planned", **tiles):
            yield from _summed(mode, dtype, kernel, pixel_sums.sum_kernel)
    for tile, choice in itertools.product(pixel_sums_small.SHAPES[mode], (max, min)):
        kernel = pixel_sums_plan.kernel_for(tile, dtype.itemsize, mode, True)
        tiles = dict(SHAPES={mode: (tile,)}, fastest=functools.partial(fastest, choice=choice))
        with changed(pixel_sums_small, "planned", **tiles):
            yield from _summed(mode, dtype, kernel)


def _summed(mode, dtype, *kernels):
    from course_lib.kernels import conv2d

    for (x_shape, weight_shape, options), layout in itertools.product(SUMMED, LAYOUTS):
        x, weight = (tensor(shape, dtype, layout=layout) for shape in (x_shape, weight_shape))
        dy = tensor(y_shape(x, weight, options), dtype, layout=layout)
        way = dict(variant="tensor_core", precision=precision_of(mode), **options)
        with launched(*kernels):
            _, *found = conv2d.backward(dy, x, weight, needs=(False, True, True), **way)
        yield from found


PARTS_BY_DTYPE = (
    convolutions, linears, convolutions_by_wgmma, few_channels, products_by_wgmma,
)  # fmt: skip
