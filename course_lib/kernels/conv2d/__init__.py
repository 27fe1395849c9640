"""Two-dimensional convolution: y[n, k, p, q] = b[k] + Σ x[n, c, h, w]·weight[k, c, r, s] over c, r, s.

x is (N, C, H, W), contiguous or channels-last, and y (N, K, P, Q) of the same format; weight is
(K, C/groups, R, S); h = p·stride − padding + r·dilation, w likewise, and what lies outside x is 0.
float32, float16 or bfloat16 in and out, summed in float32.

Forward and each of the gradients of x and weight do 2·N·K·P·Q·(C/groups)·R·S FLOPs, and must move
x, weight and y once.

============ =======================================================================================
rung         what it does
============ =======================================================================================
`direct`     a thread for each result, every term read from memory; dweight: a warp for each weight
`implicit_   a matrix product of pixels × (channels · taps) by weights: tiles of 64 × 64 results, its
gemm`        factors gathered into shared memory by asynchronous copies while others are multiplied,
             8 × 8 results a thread in registers; dweight: shared among blocks, then added up
`tensor_     the same, with tiles of 64 × 64 or 128 × 128 multiplied on tensor cores, in TF32: one
core`        product for 16-bit numbers and precision "tf32", three of split numbers for float32
============ =======================================================================================

`tensor_core` needs compute capability 8.0, and where float32 is split an infinite input gives NaN.
Sums are taken in a fixed order: two runs agree bit for bit.
"""  # noqa: E501

import functools
import math

from course_lib.kernels.conv2d import direct, gathering
from course_lib.kernels.conv2d.problem import DTYPES, checked, empty, formatted, result
from course_lib.runtime import arrays
from course_lib.runtime.launch import launch

DEFAULT = "direct"
MOST_THREADS = 256  # of a block, for any kernel

#: Rung -> (forward, dx, dweight): launchers of one signature each.
VARIANTS = {}


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
    variant=DEFAULT,
    out=None,
):
    """y (N, K, P, Q) of x (N, C, H, W), weight (K, C/groups, R, S) and bias (K,) or None.

    stride, padding, dilation  an int or a pair (height, width)
    groups                     how many parts channels are split into, each convolved on its own
    precision                  "float32", or "tf32" to let rungs on tensor cores round to that
    out                        receives y; of x's memory format and dtype

    All arrays have x's dtype; y has x's memory format. Raises ArrayError for a wrong dtype, shape
    or device, ValueError for a wrong option.
    """
    _check_variant(variant)
    problem, x, weight = checked(x, weight, stride, padding, dilation, groups, precision)
    if bias is not None:
        arrays.require(bias, "bias", shape=(problem.K,), dtypes=(arrays.dtype_name(x),))
        bias = arrays.contiguous(bias)
    y = result(out, problem.y_shape, x, problem)
    if arrays.size_of(y):
        VARIANTS[variant][0](problem, x, weight, bias, y, precision)
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
    variant=DEFAULT,
):
    """(dx, dweight, dbias), from dy of y's shape and what `forward` was given.

    needs      which of the three are wanted; those that are not are None
    with_bias  whether there was a bias; without one dbias is None

    All have x's dtype, dx and dweight x's memory format. Raises as `forward` does.
    """
    _check_variant(variant)
    problem, x, weight = checked(x, weight, stride, padding, dilation, groups, precision)
    arrays.require(dy, "dy", shape=problem.y_shape, dtypes=(arrays.dtype_name(x),))
    dy = formatted(dy, problem)
    _, find_dx, find_dweight = VARIANTS[variant]
    dx = dweight = dbias = None
    if needs[0]:
        dx = empty(problem.x_shape, x, problem)
        if arrays.size_of(dx):
            find_dx(problem, dy, weight, dx, precision)
    if needs[1]:
        dweight = empty(problem.weight_shape, x, problem)
        if arrays.size_of(dweight):
            find_dweight(problem, dy, x, dweight, precision)
    if needs[2] and with_bias:
        dbias = arrays.empty((problem.K,), like=x)
        if problem.K:
            _launch_dbias(problem, dy, dbias)
    return dx, dweight, dbias


def _check_variant(variant):
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(VARIANTS)}")


def _launch_direct(problem, x, weight, bias, y, precision):
    # A kernel takes an array in any case; where there is no bias it doesn't read it.
    operands = x, weight, weight if bias is None else bias, y, bias is not None
    n_blocks = math.ceil(arrays.size_of(y) / direct.BLOCK_SIZE)
    launch(
        direct.direct_kernel, n_blocks, direct.BLOCK_SIZE,
        *operands, *problem.numbers, flat=True, overlap=True,
    )  # fmt: skip


def _launch_direct_dx(problem, dy, weight, dx, precision):
    n_blocks = math.ceil(arrays.size_of(dx) / direct.BLOCK_SIZE)
    launch(
        direct.direct_dx_kernel, n_blocks, direct.BLOCK_SIZE,
        dy, weight, dx, *problem.numbers, flat=True, overlap=True,
    )  # fmt: skip


def _launch_direct_dweight(problem, dy, x, dweight, precision):
    n_blocks = math.ceil(arrays.size_of(dweight) * 32 / direct.BLOCK_SIZE)
    launch(
        direct.direct_dweight_kernel, n_blocks, direct.BLOCK_SIZE,
        dy, x, dweight, *problem.numbers, flat=True, overlap=True,
    )  # fmt: skip


def _launch_dbias(problem, dy, dbias):
    launch(
        direct.direct_dbias_kernel, problem.K, direct.BIAS_BLOCK_SIZE,
        dy, dbias, problem.N, problem.K, problem.P * problem.Q, problem.channels_last,
        flat=True, overlap=True,
    )  # fmt: skip


def _gathered(variant):
    """The launchers of a rung that gathers factors of a matrix product."""
    passes = gathering.launch_forward, gathering.launch_dx, gathering.launch_dweight
    return tuple(functools.partial(run, variant) for run in passes)


VARIANTS["direct"] = _launch_direct, _launch_direct_dx, _launch_direct_dweight
VARIANTS["implicit_gemm"] = _gathered("implicit_gemm")
VARIANTS["tensor_core"] = _gathered("tensor_core")


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    numbers = ["int32"] * 16 + ["boolean"]
    for dtype in DTYPES:
        array = (dtype, 1)
        label = f"conv2d.{{}} direct {dtype}"
        types = [array] * 4 + ["boolean", *numbers]
        yield label.format("forward"), direct.direct_kernel, types
        yield label.format("dx"), direct.direct_dx_kernel, [array] * 3 + numbers
        yield label.format("dweight"), direct.direct_dweight_kernel, [array] * 3 + numbers
        yield label.format("dbias"), direct.direct_dbias_kernel, [
            array, array, "int64", "int64", "int64", "boolean",
        ]  # fmt: skip
    yield from gathering.specialisations()
