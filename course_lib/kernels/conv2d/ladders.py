"""The rungs of each pass: how each is launched, and every kernel that it may launch."""

import functools
import math

from course_lib.kernels.blocks import column_sums, memory_format, transpose
from course_lib.kernels.conv2d import (
    depthwise,
    depthwise_plan,
    direct,
    few_channels_plan,
    few_filters_plan,
    gather_pack,
    gather_plan,
    gathering,
    group_sums_plan,
    grouped,
    grouped_plan,
    halo_plan,
    halo_small,
    im2col,
    launching,
    layout,
    matrix_product,
    patches,
    pixel_sums_plan,
    pixel_sums_small,
    tiled,
    warpgroup_mixed_plan,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.gather_taps import dx_sizes, forward_sizes
from course_lib.kernels.conv2d.implicit_dweight import total_kernel
from course_lib.kernels.operation import Ladder, Refusal, Rung, Way
from course_lib.runtime.host.launch import chip_of

#: Any rung may have to bring weights or dy into the images' memory format first.
FORMAT = memory_format.KERNELS
#: Of dbias: most rungs find it in a launch of its own.
DBIAS = direct.dbias_kernel, column_sums.column_sums_kernel, total_kernel
SCALAR, *TENSOR = gathering.KERNELS.values()
HALO = halo_plan, halo_small, warpgroup_plan, warpgroup_mixed_plan
PIXEL_SUMS = pixel_sums_plan, pixel_sums_small


FEW_TAPS = 9  # that `few_filters`, which waits for each, takes before `few_channels`
LEAST_CHANNELS = 8  # of x and y, for `gemm`, whose tiles have 64 and more


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
    gathered = [of_dweight for _, of_dweight in TENSOR]
    laid_out = (
        gather_pack.pack_two_kernel, transpose.transpose_kernel, transpose.transpose_two_kernel,
    )  # fmt: skip
    return [*_compiled_by(*PIXEL_SUMS), *laid_out, *gathered, *DBIAS]


def _rung(name, launch, kernels):
    """A rung of forward or of dx."""
    return Rung(name, launch, (*kernels, *FORMAT))


def _dweight(name, launch, kernels):
    """A rung whose launcher knows nothing of dbias."""
    launcher = functools.partial(launching.with_dbias, launch)
    return Rung(name, launcher, (*kernels, *DBIAS, *FORMAT))


def _by_tensor_cores(product, joined, gathered, kernels, prefer, gather, *of_groups, few=None):
    """The rung `tensor_core`, by the launchers of its ways, and the kernels of the last.

    joined     (plan, launcher) of `block_diagonal`; `of_groups` compile kernels for it alone
    gather     (plan, launcher, function that gives the kernels) of the way of that name
    few        (plan, launcher) of `few_filters`, for passes that have it
    """
    since = gathering.TENSOR_CORES_SINCE
    of_gemm = lambda: (*matrix_product.kernels(), *DBIAS)  # noqa: E731 - as late as the other's
    of_joined = lambda: (  # noqa: E731
        *_compiled_by(*of_groups), *grouped.KERNELS, *gather[2](), *kernels(), *FORMAT,
    )  # fmt: skip
    of_few = lambda: (*few_filters_plan.kernels(), *FORMAT)  # noqa: E731
    ways = (
        *([Way("few_filters", *few, of_few, since)] if few else []),
        Way("gemm", matrix_product.plan, product, of_gemm, since),
        Way("block_diagonal", *joined, of_joined, since),
        Way("gather", *gather, gather_plan.ONLY),
        Way("implicit_gemm", None, gathered, kernels, since),
    )
    return Rung("tensor_core", needs=since, prefer=prefer, ways=ways)


def _of_gather():
    return *gather_plan.kernels(), total_kernel, *FORMAT


def _preferred(sizes_of, problem, chip):
    """`gemm` of whole vectors; `few_filters` where tiles would be all but empty; `gather` where
    `halo`, which reads less, can't take the pass.

    sizes_of  what tells `gather` which pass it is

    Depthwise convolutions are not joined: their infinities stay in their channels.
    """
    p = problem
    fills_tiles = p.R * p.S == p.groups == 1 and min(p.C, p.K) >= LEAST_CHANNELS
    gemm = _is_product_alone(p) or fills_tiles and matrix_product.has_whole_vectors(p)
    depthwise = p.groups == p.C > 1
    if not gemm and not depthwise and few_filters_plan.is_faster(sizes_of, p, chip):
        return ("few_filters",)
    gathers = not depthwise and gather_plan.is_faster(sizes_of, p, chip)
    gathers = gathers and not grouped_plan.is_read_once(p, sizes_of is dx_sizes, chip)
    joined = ("block_diagonal",) if p.groups != p.C else ()
    return *("gemm",) * gemm, *("gather",) * gathers, *joined, "implicit_gemm"


def _preferred_for_dweight(problem, chip):
    """`gemm` for few pixels; of many, ways that read each number less often."""
    if _is_product_alone(problem):
        return ("gemm",)
    joined = ("block_diagonal",) if problem.groups != problem.C else ()
    return "gather", *joined, "implicit_gemm"


def _is_product_alone(problem):
    """Whether `gemm` takes the problem, and of few taps no other way that reads less."""
    has_many_taps = gathering.fault(problem) is not None
    return matrix_product.is_whole(problem) or has_many_taps and patches.fits(problem)


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


def _default_forward(problem, chip):
    """Of few filters, taps and pixels, `few_channels` would keep few multiprocessors busy."""
    found = default_variant(problem, chip.capability)
    if found != "few_channels" or problem.R * problem.S > FEW_TAPS:
        return (found,)
    is_small = few_channels_plan.n_tiles_of(problem) < chip.multiprocessors
    few = FORWARD.plan("tensor_core/few_filters", problem, chip)
    if is_small and not isinstance(few, Refusal):
        return ("tensor_core/few_filters",)
    return (found,)


def default_variant(problem, capability):
    """The rung that AUTO takes, on a chip of this compute capability."""
    if problem.groups == problem.C > 1:
        return "depthwise"
    if few_channels_plan.fault(problem, capability) is None:
        return "few_channels"
    has_tensor_cores = capability >= gathering.TENSOR_CORES_SINCE
    if gathering.fault(problem) and not (
        has_tensor_cores and _is_product_alone(problem)
        or capability == gather_plan.ONLY and gather_plan.takes(problem)
    ):
        return "direct"
    return "tensor_core" if has_tensor_cores else "implicit_gemm"


def _few_channels_dx(problem, dy, weight, dx, precision):
    """dx, by the rung that others take."""
    few_channels_plan.check(problem, dy)
    chip = chip_of(dy)
    rung = "tensor_core" if chip.capability >= gathering.TENSOR_CORES_SINCE else "implicit_gemm"
    DX.choose(rung, problem, chip).way.launch(problem, dy, weight, dx, precision)


def _gathered(launch):
    return (functools.partial(launch, name) for name in ("implicit_gemm", "tensor_core"))


_implicit, _tensor = _gathered(gathering.launch_forward)
FORWARD = Ladder(
    _rung("direct", launching.direct_forward, (direct.direct_kernel,)),
    _rung("tiled", launching.tiled_forward, (tiled.tiled_kernel,)),
    _rung("im2col", launching.im2col_forward, (im2col.im2col_kernel, SCALAR[0])),
    _rung("implicit_gemm", _implicit, SCALAR[:1]),
    _by_tensor_cores(
        matrix_product.forward, (grouped_plan.plan, grouped_plan.forward), _tensor,
        lambda: _gathered_by_tensor_cores(False),
        functools.partial(_preferred, forward_sizes),
        (gather_plan.FORWARD_PLAN, gather_plan.forward, _of_gather),
        few=(few_filters_plan.FORWARD_PLAN, few_filters_plan.forward),
    ),
    Rung(
        "few_channels", few_channels_plan.launch_forward,
        lambda: (*few_channels_plan.forward_kernels(), *FORMAT),
    ),
    _depthwise(
        depthwise_plan.forward, launching.depthwise_forward, depthwise_plan.forward_kernels,
        depthwise.depthwise_kernel,
    ),
    prefer=_default_forward,
)  # fmt: skip

_implicit, _tensor = _gathered(gathering.launch_dx)
DX = Ladder(
    _rung("direct", launching.direct_dx, (direct.direct_dx_kernel,)),
    _rung("tiled", launching.tiled_dx, (tiled.tiled_kernel,)),
    _rung("im2col", launching.im2col_dx, (im2col.col2im_kernel, SCALAR[0])),
    _rung("implicit_gemm", _implicit, SCALAR[:1]),
    _by_tensor_cores(
        matrix_product.dx, (grouped_plan.plan, grouped_plan.dx), _tensor,
        lambda: _gathered_by_tensor_cores(True),
        functools.partial(_preferred, dx_sizes),
        (gather_plan.DX_PLAN, gather_plan.dx, _of_gather),
        few=(few_filters_plan.DX_PLAN, few_filters_plan.dx),
    ),
    Rung(
        "few_channels", _few_channels_dx,
        lambda: (*DX["tensor_core"].kernels, *DX["implicit_gemm"].kernels),
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
        (
            functools.partial(grouped_plan.plan, most=math.inf),
            functools.partial(launching.with_dbias, group_sums_plan.dweight),
        ),
        _tensor, _dweight_by_tensor_cores, _preferred_for_dweight,
        (
            gather_plan.DWEIGHT_PLAN, functools.partial(launching.with_dbias, gather_plan.dweight),
            lambda: (*gather_plan.dweight_kernels(), *DBIAS, *FORMAT),
        ), group_sums_plan,
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


def dx_with_bias(problem, chip):
    """The way of dx for a convolution that also adds a bias: its launcher takes one more argument.

    A transposed convolution may have one.
    """
    if chip.capability < gathering.TENSOR_CORES_SINCE:
        return DX["implicit_gemm"]
    if few_filters_plan.is_faster(dx_sizes, problem, chip):
        return DX.named("tensor_core/few_filters")
    gathers = gather_plan.is_faster(dx_sizes, problem, chip)
    return DX.named("tensor_core/gather" if gathers else "tensor_core/implicit_gemm")
