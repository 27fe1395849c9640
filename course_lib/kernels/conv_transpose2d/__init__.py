"""Two-dimensional transposed convolution: a convolution's dx, used to make images larger.

y[n, k, h·stride − padding + r·dilation, …] is the sum of all x[n, c, h, w]·weight[c, k, r, s] that
fall there, and b[k]. x is (N, C, H, W), contiguous or channels-last, and y (N, K, P, Q) of the same
format; weight is (C, K/groups, R, S); P = (H − 1)·stride − 2·padding + dilation·(R − 1) +
output_padding + 1, and Q likewise. float32, float16 or bfloat16 in and out, summed in float32.

Forward and each of the gradients of x and weight do 2·N·C·H·W·(K/groups)·R·S FLOPs, and must move
x, weight and y once.

=============== ================================================================================
rung            what it does
=============== ================================================================================
`scatter`       a thread for each element of x adds its K/groups·R·S products to float32 sums by
                atomics: in no fixed order, so that two runs differ in the last digits
`gather`        a thread for each result finds the elements of x that reach it, (C/groups)·R·S
                divided by the strides, all read from memory
`conv_gradient` y is the dx of the convolution of the same weight that takes y's shape to x's:
                `kernels.conv2d` computes it, on tensor cores, and adds the bias
`upsample2x`    for filters of 2 × 2 with stride 2, as a U-Net has them: each pixel makes a block of
                2 × 2, so y is one product of matrices, stored interleaved by 16 bytes; x is read
                once for 64 or 128 of the 4·K columns. Memory is the limit while C is small
=============== ================================================================================

The gradients are a convolution's, too: dx is that convolution of dy, dweight its dweight with x and
dy in each other's place, dbias a sum for each channel. `scatter` and `gather` take `conv2d`'s rung
`direct` for them, the others its default. `upsample2x` finds dx as a product of matrices instead,
where it can: channels-last 16-bit images by warpgroups on Hopper, contiguous ones from packed dy.

By default what `upsample2x` takes goes there, depthwise ones to `gather`, and all others to
`conv_gradient`, but for filters and images too large for it: these go to `gather`, too.
`upsample2x` needs compute capability 8.0; on tensor cores, where float32 is split, an infinite
input gives NaN. All rungs but `scatter` add up in a fixed order: two runs agree bit for bit.

Dumoulin and Visin, A guide to convolution arithmetic for deep learning (2016).
"""

import functools
import math

import numpy as np

from course_lib.kernels import conv2d
from course_lib.kernels.blocks import memory_format
from course_lib.kernels.blocks.memory_format import empty, formatted
from course_lib.kernels.conv_transpose2d import direct, upsample2x
from course_lib.kernels.conv_transpose2d.problem import DTYPES, checked
from course_lib.kernels.conv_transpose2d.strided import whole_memory
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.host.outputs import require_apart


def forward(
    x,
    weight,
    bias=None,
    *,
    stride=1,
    padding=0,
    output_padding=0,
    dilation=1,
    groups=1,
    precision="float32",
    variant=AUTO,
    out=None,
):
    """y (N, K, P, Q) of x (N, C, H, W), weight (C, K/groups, R, S) and bias (K,) or None.

    stride, padding, dilation  an int or a pair (height, width)
    output_padding             rows and columns more at y's far sides; smaller than stride or
                               dilation
    groups                     how many parts channels are split into, each taken on its own
    precision                  "float32", or "tf32" to let rungs on tensor cores round to that
    out                        receives y; of x's dtype and of any strides, a slice of a larger
                               array too: so y can be written into its part of a concatenation

    All arrays have x's dtype. y is channels-last if x or weight is, else contiguous. Raises
    ArrayError for a wrong dtype, shape or device, ValueError for a wrong option.
    """
    problem, x = checked(x, weight, stride, padding, output_padding, dilation, groups, precision)
    if bias is not None:
        arrays.require(bias, "bias", shape=(problem.K,), dtypes=(arrays.dtype_name(x),))
        bias = arrays.contiguous(bias)
    y = empty(problem.y_shape, x, problem) if out is None else out
    if out is not None:
        dtype = arrays.dtype_name(x)
        arrays.require(out, "out", shape=problem.y_shape, dtypes=(dtype,), writable=True)
        require_apart(out, dict(x=x, weight=weight, bias=bias))
    rung = FORWARD.rung(variant, x, lambda: default_variant(problem, (x, weight), chip_of(x)[0]))
    if arrays.size_of(y):
        rung.launch(problem, x, weight, bias, y, precision)
    return y


def backward(
    dy,
    x,
    weight,
    *,
    stride=1,
    padding=0,
    output_padding=0,
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
    problem, x = checked(x, weight, stride, padding, output_padding, dilation, groups, precision)
    arrays.require(dy, "dy", shape=problem.y_shape, dtypes=(arrays.dtype_name(x),))
    rung = BACKWARD.rung(variant, x, lambda: default_variant(problem, (x, weight), chip_of(x)[0]))
    dx = empty(problem.x_shape, x, problem) if needs[0] else None
    dweight = empty(problem.weight_shape, x, problem) if needs[1] else None
    dbias = arrays.empty((problem.K,), like=x) if needs[2] and with_bias else None
    rung.launch(problem, dy, x, weight, dx, dweight, dbias, precision)
    return dx, dweight, dbias


def default_variant(problem, operands, capability):
    """The rung that AUTO takes for `operands`, x and weight, on a chip of this capability."""
    if upsample2x.fault(problem, operands, capability) is None:
        return "upsample2x"
    depthwise = problem.groups == problem.C == problem.K > 1
    if depthwise or conv2d.gathering_fault(problem.convolution):
        return "gather"
    return "conv_gradient"


# --- launchers -----------------------------------------------------------------------------------


def _run(kernel, n_threads, *args):
    n_blocks = math.ceil(n_threads / direct.BLOCK_SIZE)
    launch(kernel, n_blocks, direct.BLOCK_SIZE, *args, flat=True, overlap=True)


def _optional(bias, weight):
    # A kernel takes an array in any case; where there is no bias it doesn't read it.
    return weight if bias is None else bias


def _scatter(problem, x, weight, bias, y, precision):
    p, weight = problem, formatted(weight, problem)
    sums = empty(p.y_shape, x, p, "float32")
    size, plane = arrays.size_of(sums), np.int64(p.P * p.Q)
    bias_too = _optional(bias, weight), bias is not None
    _run(direct.start_kernel, size, sums, *bias_too, np.int32(p.K), plane, p.channels_last)
    _run(direct.scatter_kernel, arrays.size_of(x), x, weight, sums, *p.numbers)
    memory, strides = whole_memory(y)
    sizes = map(np.int32, (p.K, p.P, p.Q))
    _run(direct.finish_kernel, size, sums, memory, *strides, *sizes, p.channels_last)


def _gather(problem, x, weight, bias, y, precision):
    weight = formatted(weight, problem)
    memory, strides = whole_memory(y)
    _run(
        direct.gather_kernel, arrays.size_of(y),
        x, weight, _optional(bias, weight), memory, bias is not None, *strides, *problem.numbers,
    )  # fmt: skip


def _conv_gradient(problem, x, weight, bias, y, precision):
    convolution = problem.convolution
    if found := conv2d.gathering_fault(convolution):
        raise ValueError(f"variant 'conv_gradient' takes {found}: use 'gather'")
    way = conv2d.dx_with_bias(convolution, chip_of(x))
    weight = formatted(weight, problem)

    def find(convolution, x, y):
        way.launch(convolution, x, weight, y, precision, bias)

    is_laid_out = arrays.is_channels_last if problem.channels_last else arrays.is_contiguous_array
    if is_laid_out(y):
        find(convolution, x, y)
    elif all(is_laid_out(image) for image in (y[:1], x[:1])):
        # Gaps between the images alone, as in a part of a concatenation: one after the other.
        for n in range(problem.N):
            find(convolution._replace(N=1), x[n : n + 1], y[n : n + 1])
    else:  # the convolution's kernels know no other strides
        whole = empty(problem.y_shape, x, problem)
        find(convolution, x, whole)
        y[...] = whole


def _upsample2x(problem, x, weight, bias, y, precision):
    weight = formatted(weight, problem)
    if found := upsample2x.fault(problem, (x, weight), chip_of(x)[0]):
        raise ValueError(f"variant 'upsample2x' takes {found}: use 'conv_gradient'")
    upsample2x.run(problem, x, weight, bias, y, precision)


def _gradients(name, problem, dy, x, weight, dx, dweight, dbias, precision):
    """Fill each gradient that is not None, by the rung `name` of `conv2d`, or its default."""
    convolution = problem.convolution
    dy, weight = formatted(dy, problem), formatted(weight, problem)
    chip = chip_of(x)
    chosen = name or conv2d.default_variant(convolution, chip.capability), convolution, chip
    if dx is not None and arrays.size_of(dx):
        conv2d.FORWARD.choose(*chosen).way.launch(convolution, dy, weight, None, dx, precision)
    if dweight is not None:
        # What the convolution was given is dy here, and its result's gradient x.
        conv2d.DWEIGHT.choose(*chosen).way.launch(convolution, x, dy, dweight, None, precision)
    if dbias is not None:
        conv2d.find_dbias(problem, dy, dbias)


def _upsample2x_gradients(problem, dy, x, weight, dx, dweight, dbias, precision):
    dy, weight = formatted(dy, problem), formatted(weight, problem)
    if dx is not None and (find := upsample2x.finds_dx(problem, dy, weight, dx)):
        find(problem, dy, weight, dx, precision)
        dx = None
    _gradients(None, problem, dy, x, weight, dx, dweight, dbias, precision)


# --- the rungs -----------------------------------------------------------------------------------

#: Rungs of `conv2d` that its default may be.
DEFAULTS = "depthwise", "few_channels", "direct", "tensor_core", "implicit_gemm"


def _backward(name, by=None, launch=None, more=tuple):
    """A rung whose gradients the rung `by` of `conv2d` finds, or without one its default.

    launch  in place of `_gradients`
    more    the kernels that it may launch beside
    """
    names = (by,) if by else DEFAULTS
    rungs = [ladder[each] for ladder in (conv2d.FORWARD, conv2d.DWEIGHT) for each in names]
    return Rung(
        name, launch or functools.partial(_gradients, by),
        lambda: (*(kernel for rung in rungs for kernel in rung.kernels), *more()),
    )  # fmt: skip


FORWARD = Ladder(
    Rung(
        "scatter", _scatter,
        (direct.start_kernel, direct.scatter_kernel, direct.finish_kernel, *memory_format.KERNELS),
    ),
    Rung("gather", _gather, (direct.gather_kernel, *memory_format.KERNELS)),
    Rung(
        "conv_gradient", _conv_gradient,
        lambda: (*conv2d.DX["tensor_core"].kernels, *conv2d.DX["implicit_gemm"].kernels),
    ),
    Rung(
        "upsample2x", _upsample2x, lambda: (*upsample2x.kernels(), *memory_format.KERNELS),
        needs=conv2d.DX["tensor_core"].needs,
    ),
)  # fmt: skip
BACKWARD = Ladder(
    _backward("scatter", "direct"),
    _backward("gather", "direct"),
    _backward("conv_gradient"),
    _backward("upsample2x", launch=_upsample2x_gradients, more=upsample2x.dx_kernels),
)


def specialisations():
    """(label, kernel, argument types) of what the launchers compile beside `conv2d`'s kernels."""
    sums, strides = ("float32", 1), ["int64"] * 4
    numbers = ["int32"] * 16 + ["boolean"]
    for dtype in DTYPES:
        array = (dtype, 1)
        for label, kernel, types in (
            ("start", direct.start_kernel, [sums, array, "boolean", "int32", "int64", "boolean"]),
            ("scatter", direct.scatter_kernel, [array, array, sums, *numbers]),
            (
                "finish", direct.finish_kernel,
                [sums, array, *strides, *["int32"] * 3, "boolean"],
            ),
            ("gather", direct.gather_kernel, [array] * 4 + ["boolean", *strides, *numbers]),
        ):  # fmt: skip
            yield f"conv_transpose2d.{label} {dtype}", kernel, types
    for label, kernel, types in upsample2x.specialisations(DTYPES):
        yield f"conv_transpose2d.{label}", kernel, types
