"""What `sanitize_launches` runs of kernels for large convolutions and products, and for Hopper.

A planner takes them for problems that are larger than compute-sanitizer has time for. So the
planners are given one tile at a time, and other kernels' planners nothing. What was launched is
looked at: a part raises AssertionError where it was another kernel. Parts for chips that the GPU is
not launch nothing.

Of kernels with `wgmma`, racecheck sees what threads read and write, `copy_async` included, but not
what tensor cores read: it says nothing where the barrier between copies and a product is missing.
The simulator's sanitizer does (`test_warpgroup`).
"""

import contextlib
from typing import NamedTuple
from unittest import mock

import torch

LAYOUTS = (torch.contiguous_format, torch.channels_last)


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
BLOCKS = 2  # that such a convolution has: each goes through several tiles
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
    from course_lib.runtime.host.launch import recorded

    with recorded() as launches:
        yield
    found = [kernel for kernel, *_ in launches]
    for kernel in kernels:
        if found.count(kernel) != kernels.count(kernel):
            names = [each.py_func.__name__ for each in found]
            raise AssertionError(f"another kernel than {kernel.py_func.__name__}: {names}")


@contextlib.contextmanager
def changed(module, plan="planned", **constants):
    """In this block the planner has these constants.

    Unlike `sanitize_layers.planned`, it keeps the kernels that were made: they are looked for.
    """
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(module, name, value))
        getattr(module, plan).cache_clear()
        yield
    getattr(module, plan).cache_clear()


def nothing(*modules):
    """Let these planners find nothing."""
    stack = contextlib.ExitStack()
    for module in modules:
        stack.enter_context(mock.patch.object(module, "planned", lambda *_: None))
    return stack


def gathered(case, layout, dtype, kernel, precision, *, backward=False, weights_layout=None):
    """What `kernel` writes, which it must: y, or dx with `backward`.

    weights_layout  of the weights, if another than the images'
    """
    from course_lib.kernels import conv2d

    def random(*shape):
        return torch.randn(shape).to(dtype, memory_format=layout)

    (N, vectors, H, W), way = case.image, dict(variant="tensor_core", precision=precision)
    channels = vectors * 16 // dtype.itemsize
    if backward:
        x, weight = random(N, case.columns, H, W), random(channels, case.columns, *case.filter)
        dy = random(*y_shape(x, weight, case.options))
        with launched(kernel):
            found = conv2d.backward(
                dy, x, weight, needs=(True, False, False), **way, **case.options
            )
        return found[0]
    x, weight = random(N, channels, H, W), random(case.columns, channels, *case.filter)
    weight = weight.to(memory_format=weights_layout or layout)
    with launched(kernel):
        return conv2d.forward(x, weight, torch.randn(len(weight)).to(dtype), **way, **case.options)


def y_shape(x, weight, options):
    from course_lib.kernels.conv2d.problem import problem_of

    sizes = dict(stride=1, padding=0, dilation=1) | options
    return problem_of(x.shape, weight.shape, **sizes, groups=1, channels_last=False).y_shape


# Each generator below yields what a kernel has written.


def convolutions_by_wgmma(dtype):
    from course_lib.kernels.conv2d import halo_plan, halo_small, warpgroup_plan

    if torch.cuda.get_device_capability() != warpgroup_plan.ONLY:
        return
    for shape in warpgroup_plan.SHAPES:
        kernel = warpgroup_plan.kernel_for(shape, dtype.itemsize)
        tiles = changed(warpgroup_plan, SHAPES=(shape,), MULTIPROCESSORS=BLOCKS)
        with tiles, nothing(halo_small, halo_plan):
            yield from _by_wgmma(dtype, kernel, "tf32")


def convolutions_by_split_wgmma():
    """The same of float32 in two parts, which tensor cores multiply without loss."""
    from course_lib.kernels.conv2d import halo_plan, halo_small, warpgroup_mixed_plan

    if torch.cuda.get_device_capability() != warpgroup_mixed_plan.warpgroup_plan.ONLY:
        return
    for shape in warpgroup_mixed_plan.SHAPES:
        kernel = warpgroup_mixed_plan.kernel_for(shape)
        tiles = changed(warpgroup_mixed_plan, SHAPES=(shape,), MULTIPROCESSORS=BLOCKS)
        long = mock.patch.object(halo_plan, "LONG", 0)
        with tiles, long, nothing(halo_small, halo_plan):
            yield from _by_wgmma(torch.float32, kernel, "float32")


def _by_wgmma(dtype, kernel, precision):
    (planar, last), way = LAYOUTS, (dtype, kernel, precision)
    for layout in LAYOUTS:
        for backward in (False, True):
            yield gathered(WHOLE, layout, *way, backward=backward)
    yield gathered(UNEVEN, last, *way)
    yield gathered(UNEVEN, planar, *way, backward=True)
    yield gathered(PADDED, planar, *way)


def convolutions_of_few_channels(dtype):
    """Of all filters that there are kernels for."""
    from course_lib.kernels import conv2d
    from course_lib.kernels.conv2d import few_channels_plan

    for C, R, S in few_channels_plan.FILTER_SIZES:
        for layout in LAYOUTS:
            for stride in (1, 2):
                x, weight = (
                    torch.randn(shape).to(dtype, memory_format=layout)
                    for shape in ((2, C, 13, 9), (18, C, R, S))
                )
                options = dict(stride=stride, padding=(1, R // 2))
                # One channel is of both formats: y tells which is meant.
                y = torch.empty(y_shape(x, weight, options)).to(dtype, memory_format=layout)
                options["variant"] = "few_channels"
                yield conv2d.forward(x, weight, weight[:, 0, 0, 0], **options, out=y)
                needs = (False, True, True)
                yield from conv2d.backward(y, x, weight, needs=needs, **options)[1:]


def products_by_wgmma(dtype):
    from course_lib.kernels import linear, operation
    from course_lib.kernels.gemm import warpgroup, warpgroup_plan

    if torch.cuda.get_device_capability() != warpgroup.ONLY:
        return
    way = dict(variant="tensor_core/wgmma", precision="tf32")
    for shape in warpgroup_plan.SHAPES[dtype.itemsize]:
        y_kernel, *others = (
            warpgroup.kernel_for(shape, sources, dtype.itemsize).kernel
            for sources in warpgroup.SOURCES
        )
        operation._chosen.cache_clear()
        with mock.patch.object(warpgroup_plan, "SHAPES", {dtype.itemsize: (shape,)}):
            for n_rows, n_in, n_out in PRODUCTS:
                x, weight = (torch.randn(n, n_in).to(dtype) for n in (n_rows, n_out))
                with launched(y_kernel):
                    y = linear.forward(x, weight, weight[:, 0], activation="relu", **way)
                yield y
                if n_out % 8 == 0:
                    with launched(*others):
                        gradients = linear.backward(y, x, weight, **way)
                    yield from gradients
    operation._chosen.cache_clear()


def squeezed(dtype):
    """(images, memory for results, weights) of each size in HELD, on a boundary and beside one."""
    for weight_dtype in dict.fromkeys((dtype, torch.float32)):
        for shape, R in HELD:
            C = shape[1]
            weights = [torch.randn(s).to(weight_dtype) for s in ((R, C), (R,), (C, R), (C,))]
            for start in (0, 1):
                size = torch.Size(shape).numel() + start
                x, y = (torch.randn(size).to(dtype)[start:].view(shape) for _ in range(2))
                yield x, y, weights


def holding(dtype):
    """Squeeze and excitation by the rung `resident`, which the other rungs' part leaves out."""
    from course_lib.kernels import squeeze_excite
    from course_lib.kernels.squeeze_excite import resident, resident_plan

    if torch.cuda.get_device_capability() < resident_plan.CAPABILITY:
        return
    for x, y, weights in squeezed(dtype):
        with launched(*resident.FORWARD_KERNELS):
            found = squeeze_excite.forward(x, *weights, variant="resident", out=y)
        yield from found
        _, *saved = found
        with launched(*resident.BACKWARD_KERNELS):
            yield from squeeze_excite.backward(
                y, x, weights[0], weights[2], *saved, variant="resident"
            )


def batching(dtype):
    """The same by the rung `batched`."""
    from course_lib.kernels import squeeze_excite
    from course_lib.kernels.squeeze_excite import batched, resident_plan

    if torch.cuda.get_device_capability() < resident_plan.CAPABILITY:
        return
    for x, y, weights in squeezed(dtype):
        with launched(*batched.FORWARD_KERNELS):
            yield from squeeze_excite.forward(x, *weights, variant="batched", out=y)


#: With each dtype, and with none.
PARTS, OTHER_PARTS = (
    (convolutions_by_wgmma, convolutions_of_few_channels, products_by_wgmma, holding, batching),
    (convolutions_by_split_wgmma,),
)
