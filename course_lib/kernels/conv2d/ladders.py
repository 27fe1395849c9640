"""The rungs of each pass: how each is launched, and every kernel that it may launch."""

import functools

from course_lib.kernels.blocks import column_sums, memory_format, transpose
from course_lib.kernels.conv2d import (
    depthwise,
    direct,
    few_channels_plan,
    gathering,
    halo_plan,
    halo_small,
    im2col,
    launching,
    layout,
    pixel_sums_plan,
    pixel_sums_small,
    tiled,
    warpgroup_mixed_plan,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.few_channels_dweight import filters_of_block
from course_lib.kernels.conv2d.implicit_dweight import total_kernel
from course_lib.kernels.operation import Ladder, Rung

#: Any rung may have to bring weights or dy into the images' memory format first.
FORMAT = memory_format.KERNELS
#: Of dbias: most rungs find it in a launch of its own.
DBIAS = direct.dbias_kernel, column_sums.column_sums_kernel, total_kernel
DBIAS_DECIDES = launching.split_plan, column_sums.plan
SCALAR, *TENSOR = gathering.KERNELS.values()
HALO = halo_plan, halo_small, warpgroup_plan, warpgroup_mixed_plan
HALO_DECIDES = (
    halo_plan.mode_of, halo_small.takes, *(module.planned for module in HALO),
    gathering.engine_for, gathering.takes_channels,
)  # fmt: skip
PIXEL_SUMS = pixel_sums_plan, pixel_sums_small
PIXEL_SUMS_DECIDES = (
    halo_plan.mode_of, *(module.planned for module in PIXEL_SUMS), gathering.engine_for,
    gathering.takes_channels, gathering.split_plan,
)  # fmt: skip


def _compiled_by(*modules):
    return [kernel for module in modules for _, kernel, _ in module.specialisations()]


def _gathered_by_tensor_cores(for_dx):
    """Of `tensor_core`, forward or for dx."""
    by_channels = [
        kernel for (_, dx), (kernel, *_) in gathering.CHANNELS_LAST.items() if dx == for_dx
    ]
    gathered = [of_pass for of_pass, _ in TENSOR]
    return [*_compiled_by(*HALO, layout), *by_channels, *gathered]


def _dweight_by_tensor_cores():
    by_channels = [kernel for kernel, *_ in gathering.CHANNELS_LAST_DWEIGHT.values()]
    gathered = [of_dweight for _, of_dweight in TENSOR]
    laid_out = transpose.transpose_kernel, transpose.transpose_two_kernel
    return [*_compiled_by(*PIXEL_SUMS), *laid_out, *by_channels, *gathered, *DBIAS]


def _rung(name, launch, kernels, decides=()):
    """A rung of forward or of dx."""
    return Rung(name, launch, (*kernels, *FORMAT), decides)


def _dweight(name, launch, kernels, decides=()):
    """A rung whose launcher knows nothing of dbias."""
    return Rung(
        name, functools.partial(launching.with_dbias, launch), (*kernels, *DBIAS, *FORMAT),
        (*decides, *DBIAS_DECIDES),
    )  # fmt: skip


def _gathered(launch):
    return (functools.partial(launch, name) for name in ("implicit_gemm", "tensor_core"))


_implicit, _tensor = _gathered(gathering.launch_forward)
FORWARD = Ladder(
    _rung("direct", launching.direct_forward, (direct.direct_kernel,)),
    _rung("tiled", launching.tiled_forward, (tiled.tiled_kernel,), (launching.halo_spans,)),
    _rung(
        "im2col", launching.im2col_forward, (im2col.im2col_kernel, SCALAR[0]),
        (launching.chunks,),
    ),
    _rung("implicit_gemm", _implicit, SCALAR[:1]),
    Rung(
        "tensor_core", _tensor, lambda: _gathered_by_tensor_cores(False),
        (halo_plan.forward_of, *HALO_DECIDES), gathering.TENSOR_CORES_SINCE,
    ),
    Rung(
        "few_channels", few_channels_plan.launch_forward,
        lambda: (*few_channels_plan.forward_kernels(), *FORMAT),
        (
            few_channels_plan.fault, few_channels_plan.shape_for, few_channels_plan.side_of,
            few_channels_plan.tile_of, few_channels_plan.filters_each,
        ),
    ),
    _rung("depthwise", launching.depthwise_forward, (depthwise.depthwise_kernel,)),
)  # fmt: skip

_implicit, _tensor = _gathered(gathering.launch_dx)
DX = Ladder(
    _rung("direct", launching.direct_dx, (direct.direct_dx_kernel,)),
    _rung("tiled", launching.tiled_dx, (tiled.tiled_kernel,), (launching.halo_spans,)),
    _rung(
        "im2col", launching.im2col_dx, (im2col.col2im_kernel, SCALAR[0]), (launching.chunks,)
    ),
    _rung("implicit_gemm", _implicit, SCALAR[:1]),
    Rung(
        "tensor_core", _tensor, lambda: _gathered_by_tensor_cores(True),
        (halo_plan.dx_of, *HALO_DECIDES), gathering.TENSOR_CORES_SINCE,
    ),
    Rung(
        "few_channels", few_channels_plan.launch_dx,
        lambda: (*_gathered_by_tensor_cores(True), SCALAR[0]),
        (few_channels_plan.fault, halo_plan.dx_of, *HALO_DECIDES),
    ),
    _rung("depthwise", launching.depthwise_dx, (depthwise.depthwise_dx_kernel,)),
)  # fmt: skip

_implicit, _tensor = _gathered(launching.gathered_dweight)
#: dweight, and dbias with it.
DWEIGHT = Ladder(
    _dweight("direct", launching.direct_dweight, (direct.direct_dweight_kernel,)),
    _dweight(
        "tiled", launching.tiled_dweight, (tiled.tiled_dweight_kernel, total_kernel),
        (launching.halo_spans, launching.split_plan),
    ),
    _dweight(
        "im2col", launching.im2col_dweight, (im2col.im2col_kernel, SCALAR[1], total_kernel),
        (launching.chunks, gathering.split_plan),
    ),
    Rung(
        "implicit_gemm", _implicit, (SCALAR[1], total_kernel, *DBIAS, *FORMAT),
        (gathering.split_plan, *DBIAS_DECIDES),
    ),
    Rung(
        "tensor_core", _tensor, _dweight_by_tensor_cores, (*PIXEL_SUMS_DECIDES, *DBIAS_DECIDES),
        gathering.TENSOR_CORES_SINCE,
    ),
    Rung(
        "few_channels", few_channels_plan.launch_dweight,
        lambda: (*few_channels_plan.dweight_kernels(), *FORMAT),
        (
            few_channels_plan.fault, few_channels_plan.shape_for, few_channels_plan.side_of,
            few_channels_plan.tile_of, filters_of_block, few_channels_plan.rounds_of,
            few_channels_plan.split_plan, few_channels_plan.dweight_bytes,
        ),
    ),
    _dweight(
        "depthwise", launching.depthwise_dweight,
        (depthwise.depthwise_dweight_kernel, total_kernel), (launching.split_plan,),
    ),
)  # fmt: skip
