"""The rungs of each pass: how each is launched, and every kernel that it may launch."""

import functools

from course_lib.kernels.blocks import column_sums, memory_format, transpose
from course_lib.kernels.conv2d import (
    depthwise,
    depthwise_plan,
    direct,
    few_channels_plan,
    gathering,
    grouped,
    grouped_plan,
    halo_plan,
    halo_small,
    im2col,
    launching,
    layout,
    matrix_product,
    pixel_sums_plan,
    pixel_sums_small,
    tiled,
    warpgroup_mixed_plan,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.implicit_dweight import total_kernel
from course_lib.kernels.operation import Ladder, Rung, Way

#: Any rung may have to bring weights or dy into the images' memory format first.
FORMAT = memory_format.KERNELS
#: Of dbias: most rungs find it in a launch of its own.
DBIAS = direct.dbias_kernel, column_sums.column_sums_kernel, total_kernel
SCALAR, *TENSOR = gathering.KERNELS.values()
HALO = halo_plan, halo_small, warpgroup_plan, warpgroup_mixed_plan
PIXEL_SUMS = pixel_sums_plan, pixel_sums_small


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


def _rung(name, launch, kernels):
    """A rung of forward or of dx."""
    return Rung(name, launch, (*kernels, *FORMAT))


def _dweight(name, launch, kernels):
    """A rung whose launcher knows nothing of dbias."""
    launcher = functools.partial(launching.with_dbias, launch)
    return Rung(name, launcher, (*kernels, *DBIAS, *FORMAT))


def _preferred(problem, chip):
    """All ways, but for depthwise convolutions, whose infinities stay in their channels."""
    joined = () if problem.groups == problem.C else ("block_diagonal",)
    return "gemm", *joined, "implicit_gemm"


def _preferred_for_dweight(problem, chip):
    """`gemm` for few pixels; of many `pixel_sums` reads each number less often."""
    return ("gemm",) if matrix_product.is_whole(problem) else _preferred(problem, chip)[1:]


def _by_tensor_cores(product, joined, gathered, kernels, prefer=_preferred):
    """The rung `tensor_core`, by the launchers of its ways, and the kernels of the last."""
    since = gathering.TENSOR_CORES_SINCE
    of_gemm = lambda: (*matrix_product.kernels(), *DBIAS)  # noqa: E731 - as late as the other's
    of_joined = lambda: (*grouped.KERNELS, *kernels(), *FORMAT)  # noqa: E731
    ways = (
        Way("gemm", matrix_product.plan, product, of_gemm, since),
        Way("block_diagonal", grouped_plan.plan, joined, of_joined, since),
        Way("implicit_gemm", None, gathered, kernels, since),
    )
    return Rung("tensor_core", needs=since, prefer=prefer, ways=ways)


def _depthwise(by_windows, by_element, window_kernels, *element_kernels):
    """The rung `depthwise`, by the launchers of its ways and their kernels."""
    others = *element_kernels, *FORMAT
    ways = (
        Way("windows", depthwise_plan.plan, by_windows, lambda: (*window_kernels(), *others)),
        Way("by_element", launching.depthwise_plan, by_element, others),
    )
    return Rung("depthwise", ways=ways)


def _default(problem, chip):
    return (default_variant(problem, chip.capability),)


def default_variant(problem, capability):
    """The rung that AUTO takes, on a chip of this compute capability."""
    if problem.groups == problem.C > 1:
        return "depthwise"
    if few_channels_plan.fault(problem, capability) is None:
        return "few_channels"
    has_tensor_cores = capability >= gathering.TENSOR_CORES_SINCE
    if gathering.fault(problem) and not (has_tensor_cores and matrix_product.is_whole(problem)):
        return "direct"
    return "tensor_core" if has_tensor_cores else "implicit_gemm"


def _gathered(launch):
    return (functools.partial(launch, name) for name in ("implicit_gemm", "tensor_core"))


_implicit, _tensor = _gathered(gathering.launch_forward)
FORWARD = Ladder(
    _rung("direct", launching.direct_forward, (direct.direct_kernel,)),
    _rung("tiled", launching.tiled_forward, (tiled.tiled_kernel,)),
    _rung("im2col", launching.im2col_forward, (im2col.im2col_kernel, SCALAR[0])),
    _rung("implicit_gemm", _implicit, SCALAR[:1]),
    _by_tensor_cores(
        matrix_product.forward, grouped_plan.forward, _tensor,
        lambda: _gathered_by_tensor_cores(False)
    ),
    Rung(
        "few_channels", few_channels_plan.launch_forward,
        lambda: (*few_channels_plan.forward_kernels(), *FORMAT),
    ),
    _depthwise(
        depthwise_plan.forward, launching.depthwise_forward, depthwise_plan.forward_kernels,
        depthwise.depthwise_kernel,
    ),
    prefer=_default,
)  # fmt: skip

_implicit, _tensor = _gathered(gathering.launch_dx)
DX = Ladder(
    _rung("direct", launching.direct_dx, (direct.direct_dx_kernel,)),
    _rung("tiled", launching.tiled_dx, (tiled.tiled_kernel,)),
    _rung("im2col", launching.im2col_dx, (im2col.col2im_kernel, SCALAR[0])),
    _rung("implicit_gemm", _implicit, SCALAR[:1]),
    _by_tensor_cores(
        matrix_product.dx, grouped_plan.dx, _tensor, lambda: _gathered_by_tensor_cores(True),
    ),
    Rung(
        "few_channels", few_channels_plan.launch_dx,
        lambda: (*_gathered_by_tensor_cores(True), SCALAR[0]),
    ),
    _depthwise(
        depthwise_plan.dx, launching.depthwise_dx, depthwise_plan.dx_kernels,
        depthwise.depthwise_dx_kernel,
    ),
    prefer=_default,
)  # fmt: skip

_implicit, _tensor = _gathered(launching.gathered_dweight)
#: dweight, and dbias with it.
DWEIGHT = Ladder(
    _dweight("direct", launching.direct_dweight, (direct.direct_dweight_kernel,)),
    _dweight("tiled", launching.tiled_dweight, (tiled.tiled_dweight_kernel, total_kernel)),
    _dweight(
        "im2col", launching.im2col_dweight, (im2col.im2col_kernel, SCALAR[1], total_kernel),
    ),
    Rung("implicit_gemm", _implicit, (SCALAR[1], total_kernel, *DBIAS, *FORMAT)),
    _by_tensor_cores(
        functools.partial(launching.with_dbias, matrix_product.dweight),
        functools.partial(launching.with_dbias, grouped_plan.dweight), _tensor,
        _dweight_by_tensor_cores, prefer=_preferred_for_dweight,
    ),
    Rung(
        "few_channels", few_channels_plan.launch_dweight,
        lambda: (*few_channels_plan.dweight_kernels(), *FORMAT),
    ),
    _depthwise(
        functools.partial(launching.with_dbias, depthwise_plan.dweight),
        functools.partial(launching.with_dbias, launching.depthwise_dweight),
        depthwise_plan.dweight_kernels, depthwise.depthwise_dweight_kernel, total_kernel, *DBIAS,
    ),
)  # fmt: skip
