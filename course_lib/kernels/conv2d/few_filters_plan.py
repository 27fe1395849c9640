"""Which passes `few_filters` takes, in which slices, and how it is launched."""

import functools
import math

from course_lib.kernels.conv2d import few_filters, gather_plan, gathering
from course_lib.kernels.conv2d.few_filters import AT_A_TIME, BLOCK_SIZE, MOST_SLICES, Sizes
from course_lib.kernels.conv2d.gather_taps import dx_sizes, forward_sizes
from course_lib.kernels.conv2d.problem import DTYPES
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host.launch import chip_of, launch

SHAPES = (1, 4), (2, 4), (4, 2), (8, 2)  # (filters of a group at most, pixels of a thread)
#: What tells this way which pass it is, by what tells `gather`.
ARGUMENTS = {forward_sizes: gathering.forward_arguments, dx_sizes: gathering.dx_arguments}
WARP = 32
MOST = 2**30  # of what is counted in 32 bits
BLOCKS_EACH = 4  # that a multiprocessor should have
LANES = 8  # that read a pixel's channels together, where these lie side by side
LEAST_CHANNELS = 2  # of a slice


@functools.lru_cache(maxsize=4096)
def planned(arguments_of, problem, chip):
    """((filters, pixels) of the kernel, its `Sizes` but of the weights); or a `Refusal`.

    arguments_of  `gathering.forward_arguments` or `gathering.dx_arguments`, by the pass
    """
    p = problem
    (n_filters, P, Q, n_channels, H, W), down, right, *_ = arguments_of(p)
    if not 1 <= n_filters <= SHAPES[-1][0]:
        return Refusal(f"takes 1 to {SHAPES[-1][0]} filters of a group, not {n_filters}")
    shape = next(shape for shape in SHAPES if n_filters <= shape[0])
    n_pixels, n_weights = p.N * P * Q, p.K * (p.C // p.groups) * p.R * p.S
    counted = (
        n_pixels * p.groups + BLOCK_SIZE, n_channels * p.groups * H * W, n_weights,
        (max(P, Q) + max(p.pad_h, p.pad_w)) * max(p.stride_h, p.stride_w),
        max(p.R * p.dilation_h, p.S * p.dilation_w),
    )  # fmt: skip
    if max(counted) >= MOST:
        return Refusal(f"takes up to {MOST:,} pixels, weights and elements of an image")
    n_places = max(1, math.ceil(n_pixels / shape[1]))
    n_slices = slices_of(n_places * p.groups, n_channels, p.channels_last, chip)
    sizes = n_pixels, n_places, n_slices, p.groups, n_filters, n_channels, P, Q, H, W, p.R, p.S
    return shape, (*sizes, *down, *right)


def slices_of(n_items, n_channels, last, chip):
    """Slices of the channels: enough for all multiprocessors, and for whole lines of memory."""
    n_slices = 1
    while n_slices < MOST_SLICES and n_slices * 2 * LEAST_CHANNELS <= n_channels:
        n_blocks = n_items * n_slices / BLOCK_SIZE
        enough = n_blocks >= BLOCKS_EACH * chip.multiprocessors
        if enough and n_slices >= (LANES if last else 1):
            break
        n_slices *= 2
    return n_slices


@functools.lru_cache(maxsize=4096)
def is_faster(sizes_of, problem, chip):
    """Whether a pass is tried this way first, as far as was measured.

    sizes_of  what tells `gather` which pass it is, `forward_sizes` or `dx_sizes`
    """
    p = problem
    found = planned(ARGUMENTS[sizes_of], p, chip)
    other = gather_plan.planned(sizes_of, False, p, chip)
    if not p.N or isinstance(found, Refusal) or isinstance(other, Refusal):
        return False
    others = microseconds_of_others(p, p.C if sizes_of is forward_sizes else p.K, other, chip)
    return microseconds(*found, p.channels_last, chip) < others


def microseconds(shape, sizes, last, chip):
    """About what this way takes: instructions are issued, or loads waited for."""
    z, (filters, pixels) = Sizes(*sizes, *[0] * 6), shape
    apart = last and filters > 1 and z.n_slices == 1  # results of a warp's store
    strided = z.divisor_h > 1 or z.divisor_w > 1
    channels = math.ceil(z.n_channels / z.n_slices)
    tap = pixels * (17 + 26 * strided) + channels * (pixels * (8 + filters) + 10 * filters)
    n_instructions = 120 + filters * pixels * (150 if apart else 55) + z.R * z.S * tap
    n_warps = z.n_places * z.groups * z.n_slices / WARP
    issued = n_warps * n_instructions / (chip.multiprocessors * 4_000)
    waited = z.R * z.S * (0.06 + 0.86 * math.ceil(channels / AT_A_TIME))
    return 2 + max(issued, waited)


def microseconds_of_others(problem, n_channels, plan, chip):
    """About what other ways take: by the cost of `gather`'s plan, and the copy that it reads.

    n_channels  of a pixel of the source, as it lies
    """
    p, itemsize = problem, gather_plan.ITEMSIZE[problem.mode]
    z, parts = plan.sizes, 3 if p.mode == "float32" else 1
    as_it_lies = p.channels_last and p.mode == "half" and z.pitch == n_channels
    n_bytes = z.n_images * z.source_h * z.source_w * z.pitch * itemsize * (1 + 1 / parts)
    copied = 0 if as_it_lies else n_bytes / 2.5e6
    times = {"half": 2.1, "tf32": 2.4, "float32": 1.0 if p.groups == 1 else 1.7}[p.mode]
    more = 4 if p.groups > 1 and not p.channels_last else 0  # launches
    return times * gather_plan.cost(plan, False, itemsize, chip) / 100 + copied + more


def _run(arguments_of, problem, source, weight, bias, result, swapped):
    (shape, sizes), p = planned(arguments_of, problem, chip_of(source)), problem
    weight, (of_filter, of_channel, of_tap, of_group), _ = gather_plan.weight_of(p, weight)
    if swapped:
        of_filter, of_channel = of_channel, of_filter
    z = Sizes(
        *sizes, of_filter, of_channel, of_tap, of_group, bias is not None, p.channels_last
    )  # fmt: skip
    n_blocks = math.ceil(z.n_places * z.groups / (BLOCK_SIZE // z.n_slices))
    launch(
        few_filters.make(*shape), n_blocks, BLOCK_SIZE,
        source, weight, weight if bias is None else bias, result, z, flat=True, overlap=True,
    )  # fmt: skip


def forward(problem, x, weight, bias, y, precision):
    """y = x * weight + bias."""
    _run(gathering.forward_arguments, problem, x, weight, bias, y, False)


def dx(problem, dy, weight, dx, precision, bias=None):
    """dx, from dy; and `bias` added."""
    _run(gathering.dx_arguments, problem, dy, weight, bias, dx, True)


FORWARD_PLAN = functools.partial(planned, gathering.forward_arguments)
DX_PLAN = functools.partial(planned, gathering.dx_arguments)


def kernels():
    return [few_filters.make(*shape) for shape in SHAPES]


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        for shape in SHAPES:
            label = f"conv2d.few filters {shape[0]} {dtype}"
            yield label, few_filters.make(*shape), [*[(dtype, 1)] * 4, Sizes]
