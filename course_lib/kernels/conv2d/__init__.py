"""Two-dimensional convolution: y[n, k, p, q] = b[k] + Σ x[n, c, h, w]·weight[k, c, r, s] over c, r, s.

x is (N, C, H, W), weight (K, C/groups, R, S) and y (N, K, P, Q), channels-last if x or weight is;
h = p·stride − padding + r·dilation, w likewise, and what lies outside x is 0. float32, float16 or
bfloat16 in and out, summed in float32.

Forward and each of the gradients of x and weight do 2·N·K·P·Q·(C/groups)·R·S FLOPs, and must move
x, weight and y once.

================ ===================================================================================
rung             what it does, and what of the three passes reads from global memory
================ ===================================================================================
`direct`         a thread for each result, every term read from memory; a warp for each of dweight
`tiled`          a block keeps a tile of x with its halo, and weights, in shared memory: x is read
                 once for every 8 filters, the weights once for every 128 pixels
`im2col`         the matrix of all terms, C·R·S numbers for each pixel of y, is written to memory,
                 a few images at a time, and multiplied: R·S times as many bytes as x, both ways
`implicit_gemm`  the same product, the matrix never made: tiles of 64 × 64 results, whose factors
                 are gathered into shared memory by asynchronous copies while others are
                 multiplied, 8 × 8 results a thread in registers. Each factor of a tile is read once
                 for 64 results. dweight: pixels shared among blocks, whose sums are added up
`tensor_core`    the same on tensor cores, in TF32: one product for 16-bit numbers and precision
                 "tf32", several of split numbers for float32 (`mma.mainloop`). Without groups, and
                 with whole vectors of channels, copies take 16 bytes: forward, and dx without
                 strides, read a tile of 256 pixels with its halo once for all taps and 128
                 channels of the result (`halo`), dweight a tile of 192 terms and 128 channels at
                 each pixel (`pixel_sums`); other images than channels-last are transposed first.
                 Large passes without strides go by `wgmma` on compute capability 9.0 (`warpgroup`,
                 for float32 `warpgroup_mixed`). All else: gathered tiles of 64 × 64 or 128 × 128, in 16 bits by 16
                 bytes too. All these are its way `implicit_gemm`. The way `gemm` takes filters of one tap
                 without strides, those that step by their own size, and those as large as the image: one
                 matrix product (`matrix_product`), by default of more than 121 taps.
                 The way `gather` takes any stride, dilation, filter and number of channels, on compute
                 capability 9.0: tiles of 128 pixels are gathered by 16 bytes, channels padded to whole
                 vectors, for `wgmma`; dx is a product for each residue of the stride. float32 has three
                 parts, which are multiplied in TF32; a tile reads the channels of its own groups. It
                 takes what `halo` can't take, groups of half the channels at most, and few filters; of
                 16-bit numbers dweight, too. `pixel_sums` takes the others' dweight, channels padded to
                 whole vectors
                 The way `few_filters` takes up to 8 filters of a group where that is faster than a tile that
                 stays all but empty: a thread for some pixels, on the ordinary cores, images as they lie
                 The way `block_diagonal` joins groups of 2 to 32 channels (`grouped_plan`): their weights are
                 spread among zeros, and the products with these are made, too. For dweight it takes groups
                 of any size; a tile reads its groups' channels alone (`group_sums`), or all if that is most
`few_channels`   for the filters that first layers have: 3 × 3, 5 × 5 or 7 × 7 over one to four
                 channels; memory the limit. What a pixel's filters meet is read once for up to 64
                 of them, and dy once for dweight and dbias together. dx as `tensor_core`
`depthwise`      for groups == C only, memory the limit: a thread makes some results of a line, of 16
                 bytes of channels at a time where these lie side by side, and loads what they share
                 once (`depthwise_windows`); the way `by_element` takes all other filters, strides
                 and dilations, a thread for each result
================ ===================================================================================

By default depthwise convolutions take `depthwise`, those that `few_channels` has kernels for take
that, but forward, of few filters and pixels, `few_filters`; others `tensor_core`, or before compute
capability 8.0 `implicit_gemm`; filters and images too large for these, `direct`, but for filters
that `gather` takes. dbias is a sum for each channel, on all rungs but `few_channels` the same.

`tensor_core` needs compute capability 8.0, and where float32 is split an infinite input gives NaN.
Where groups are joined, NaN and infinities of one group make NaN of results of others, of up to 640
channels; not in dweight.
Sums are taken in a fixed order: two runs agree bit for bit.
"""  # noqa: E501

from course_lib.kernels.blocks.memory_format import empty, formatted
from course_lib.kernels.conv2d import (
    depthwise_plan,
    few_channels_plan,
    few_filters_plan,
    gathering,
    group_sums_plan,
    grouped_plan,
    launching,
    patches,
)
from course_lib.kernels.conv2d.gathering import fault as gathering_fault
from course_lib.kernels.conv2d.ladders import (
    DWEIGHT,
    DX,
    FORWARD,
    default_variant,
    dx_with_bias,
)
from course_lib.kernels.conv2d.launching import dbias as find_dbias
from course_lib.kernels.conv2d.problem import DTYPES, Problem, checked, mode_of
from course_lib.kernels.operation import AUTO
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of
from course_lib.runtime.host.outputs import output

#: `Problem`, `gathering_fault`, `dx_with_bias`, `find_dbias` and `mode_of` are for operations that
#: are made of one.
__all__ = [
    "DWEIGHT", "DX", "FORWARD", "MOST_THREADS", "Problem", "backward", "default_variant",
    "dx_with_bias", "find_dbias", "forward", "gathering_fault", "mode_of", "specialisations",
]  # fmt: skip

MOST_THREADS = 256  # of a block, for any kernel


def forward(
    x,
    weight,
    bias=None,
    *,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    precision="float32",
    variant=AUTO,
    out=None,
):
    """y (N, K, P, Q) of x (N, C, H, W), weight (K, C/groups, R, S) and bias (K,) or None.

    stride, padding, dilation  an int or a pair (height, width)
    groups                     how many parts channels are split into, each convolved on its own
    precision                  "float32", or "tf32" to let rungs on tensor cores round to that
    out                        receives y; of y's memory format and x's dtype

    All arrays have x's dtype. y is channels-last if x or weight is, else contiguous;
    of images of one channel, as `out` is. Raises
    ArrayError for a wrong dtype, shape or device, ValueError for a wrong option.
    """
    problem, x = checked(x, weight, stride, padding, dilation, groups, precision)
    if bias is not None:
        arrays.require(bias, "bias", shape=(problem.K,), dtypes=(arrays.dtype_name(x),))
        bias = arrays.contiguous(bias)
    problem = _format_of(out, problem)
    reads = dict(x=x, weight=weight, bias=bias)
    y = output(out, problem.y_shape, like=x, channels_last=problem.channels_last, reads=reads)
    way = FORWARD.choose(variant, problem, chip_of(x)).way
    if arrays.size_of(y):
        way.launch(problem, x, weight, bias, y, precision)
    return y


def backward(
    dy,
    x,
    weight,
    *,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    with_bias=True,
    needs=(True, True, True),
    precision="float32",
    variant=AUTO,
):
    """(dx, dweight, dbias), from dy of y's shape and what `forward` was given.

    needs      which of the three are wanted; those that are not are None
    with_bias  whether there was a bias; without one dbias is None

    All have x's dtype, dx and dweight y's memory format. Raises as `forward` does.
    """
    problem, x = checked(x, weight, stride, padding, dilation, groups, precision)
    problem = _format_of(dy, problem)
    chosen = DX.choose(variant, problem, chip_of(x))
    arrays.require(dy, "dy", shape=problem.y_shape, dtypes=(arrays.dtype_name(x),))
    dy = formatted(dy, problem)
    dx = dweight = dbias = None
    if needs[0]:
        dx = empty(problem.x_shape, x, problem)
        if arrays.size_of(dx):
            chosen.way.launch(problem, dy, formatted(weight, problem), dx, precision)
    if needs[1]:
        dweight = empty(problem.weight_shape, x, problem)
    if needs[2] and with_bias:
        dbias = arrays.empty((problem.K,), like=x)
    found = [None if r is None or not arrays.size_of(r) else r for r in (dweight, dbias)]
    if any(each is not None for each in found):
        named = variant if variant in DWEIGHT.variants else chosen.rung
        way = DWEIGHT.choose(named, problem, chip_of(x)).way
        way.launch(problem, dy, x, *found, precision)
    return dx, dweight, dbias


def _format_of(array, problem):
    """`problem` in the memory format of y or dy, where x, of one channel, is of both formats."""
    if problem.C != 1 or tuple(getattr(array, "shape", ())) != problem.y_shape:
        return problem  # what is no array, or a wrong one, is refused later
    return problem._replace(channels_last=arrays.reads_channels_last(array))


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    yield from launching.specialisations()
    yield from patches.specialisations(DTYPES)
    yield from gathering.specialisations()
    yield from few_channels_plan.specialisations()
    yield from few_filters_plan.specialisations()
    yield from depthwise_plan.specialisations()
    yield from grouped_plan.specialisations()
    yield from group_sums_plan.specialisations()
