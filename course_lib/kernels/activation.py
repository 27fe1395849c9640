"""Activations, forward and backward: y = f(x) for every element.

Any shape; float32, float16 or bfloat16 in and out, float32 in between. With `n` elements of `s`
bytes the forward pass must move 2·n·s bytes (read x, write y), the backward pass 3·n·s (read dy and
x or y, write dx); both do a handful of FLOPs per element, so memory is the limit.

=============== ======================================================= ===========================
rung            what a thread does                                      launch
=============== ======================================================= ===========================
`naive`         one element                                             a thread per element
`grid_stride`   every `gridsize`-th element, one at a time              a few blocks per
                                                                        multiprocessor
`vectorised`    16 bytes at a time (4 float32 or 8 half-width elements) a thread per 16 bytes
=============== ======================================================= ===========================

`vectorised` has a second kernel for arrays that no common vectors fit: inputs that are slices, rows
with gaps between them, and those that begin off the result's 16-byte boundaries. It writes vectors
and reads elements, so that nothing is copied first.

============== ============================ ================================================ =====
operation      y                            dx                                               saved
============== ============================ ================================================ =====
`relu`         max(x, 0)                    dy where y > 0, else 0                           y
`relu6`        min(max(x, 0), 6)            dy where 0 < y < 6, else 0                       y
`leaky_relu`   x where x > 0, else slope·x  dy where x > 0, else slope·dy                    x
`sigmoid`      σ(x) = 1/(1 + e⁻ˣ)           dy·y·(1 − y)                                     y
`swish`        x·σ(x)                       dy·σ(x)·(1 + x·(1 − σ(x)))                       x
`hard_sigmoid` min(max(x + 3, 0), 6)/6      dy/6 where −3 < x < 3, else 0                    x
`hard_swish`   x·hard_sigmoid(x)            dy·(x/3 + ½) where −3 < x < 3; dy above, 0 below x
`gelu`         x·Φ(x)                       dy·(Φ(x) + x·φ(x))                               x
`gelu_tanh`    x·σ(2u)                      dy·σ(2u)·(1 + 2x·u'·(1 − σ(2u)))                 x
============== ============================ ================================================ =====

Φ and φ are the normal distribution and its density; u = √(2/π)·(x + 0.044715·x³), and σ(2u) is
(1 + tanh u)/2. As in PyTorch, what is piecewise linear passes NaN through, and σ(±inf) is exactly 1
or 0. Φ(x) keeps its digits below zero, where 1 + erf loses them (`blocks.normal`).
Of leaky ReLU, whose y tells the sign of x as well unless its slope is negative, either may be
saved. Swish is SiLU (Ramachandran, Zoph and Le, 2017); GELU: Hendrycks and Gimpel (2016); the hard
forms: Howard et al., MobileNetV3 (2019). Derivations: notebook 01.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.gapped_rows import in_rows, load_across, store_whole
from course_lib.kernels.blocks.normal import normal_of
from course_lib.kernels.blocks.score_mask import memory
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.outputs import elementwise_output
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    fast_reciprocal,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.special import fast_exp2

BLOCK_SIZE = 256
GRID_STRIDE_BLOCKS = 132 * 8  # fills the largest chip of today
DTYPES = ("float32", "float16", "bfloat16")
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
ZERO, ONE = np.float32(0), np.float32(1)
HALF, THREE, SIX = np.float32(0.5), np.float32(3), np.float32(6)
THIRD, SIXTH = np.float32(1 / 3), np.float32(1 / 6)
DENSITY = np.float32(1 / math.sqrt(2 * math.pi))  # of the normal distribution, at 0
# GELU by tanh: 2u = x·(LINEAR + CUBIC·x²); BITS of it is 2u·log₂ e, for e^(2u) = 2^BITS.
LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
CUBIC = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715)
LINEAR_BITS = np.float32(2 * math.sqrt(2 / math.pi) * math.log2(math.e))
CUBIC_BITS = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715 * math.log2(math.e))


@cuda.jit(device=True)
def relu_value(x):
    return ZERO if x <= ZERO else x  # a NaN is not <= 0, and passes


@cuda.jit(device=True)
def relu_gradient(dy, y):
    return ZERO if y <= ZERO else dy


@cuda.jit(device=True)
def sigmoid_value(x):
    return fast_reciprocal(ONE + math.exp(-x))


@cuda.jit(device=True)
def sigmoid_gradient(dy, y):
    return dy * (ONE - y) * y


@cuda.jit(device=True)
def swish_value(x):
    return x * fast_reciprocal(ONE + math.exp(-x))


@cuda.jit(device=True)
def swish_gradient(dy, x):
    s = sigmoid_value(x)
    return dy * s * (ONE + x * (ONE - s))


@cuda.jit(device=True)
def relu6_value(x):
    y = ZERO if x <= ZERO else x
    return SIX if y >= SIX else y


@cuda.jit(device=True)
def relu6_gradient(dy, y):
    return ZERO if y <= ZERO or y >= SIX else dy


@cuda.jit(device=True)
def hard_sigmoid_value(x):
    return relu6_value(x + THREE) * SIXTH


@cuda.jit(device=True)
def hard_sigmoid_gradient(dy, x):
    return dy * SIXTH if -THREE < x and x < THREE else ZERO


@cuda.jit(device=True)
def hard_swish_value(x):
    return x * hard_sigmoid_value(x)


@cuda.jit(device=True)
def hard_swish_gradient(dy, x):
    if x <= -THREE:
        return ZERO
    return dy * (x * THIRD + HALF) if x < THREE else dy


@cuda.jit(device=True)
def gelu_value(x):
    return x * normal_of(x)[0]


@cuda.jit(device=True)
def gelu_gradient(dy, x):
    below, bell = normal_of(x)
    return dy * (below + x * DENSITY * bell)


@cuda.jit(device=True)
def sigmoid_of_bits(bits):
    """σ(z) of z·log₂ e."""
    return fast_reciprocal(ONE + fast_exp2(-bits))


@cuda.jit(device=True)
def gelu_tanh_value(x):
    return x * sigmoid_of_bits(x * (LINEAR_BITS + CUBIC_BITS * x * x))


@cuda.jit(device=True)
def gelu_tanh_gradient(dy, x):
    bits = x * (LINEAR_BITS + CUBIC_BITS * x * x)
    # 1 − σ(2u) as σ(−2u): the difference has few digits left where x is large.
    slope = (LINEAR + THREE * CUBIC * x * x) * sigmoid_of_bits(-bits)
    return dy * sigmoid_of_bits(bits) * (ONE + x * slope)


def _forward_ladder(function):
    """The rungs of y = function(x), simple to fast. `x` and `y` are one-dimensional."""

    @cuda.jit
    def naive_kernel(x, y):
        i = cuda.grid(1)
        if i < x.shape[0]:
            store(y, i, function(load(x, i)))

    @cuda.jit
    def grid_stride_kernel(x, y):
        for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
            store(y, i, function(load(x, i)))

    @cuda.jit
    def vectorised_kernel(x, y, head, n_vectors):
        # x[:head] comes before the first 16-byte boundary. Then come the vectors, a thread for
        # each; threads beyond those take the head and the tail, an element each.
        thread = cuda.grid(1)
        width = vector_width(x)
        allow_next_kernel()
        wait_for_previous_kernel()
        if thread < n_vectors:
            values = cuda.local.array(MAX_WIDTH, np.float32)
            i = head + thread * width
            load_vector(values, x, i)
            for k in range(width):
                values[k] = function(values[k])
            store_vector(y, i, values)
        else:
            i = thread - n_vectors
            if i >= head:
                i += n_vectors * width
            if i < x.shape[0]:
                store(y, i, function(load(x, i)))

    @cuda.jit
    def rows_kernel(x, y, n_cols, step, vectors):
        """y = function(x), a thread for each vector of y.

        x        the memory of x's rows, flat
        y        flat, without gaps
        n_cols, step, vectors  as of `gapped_rows.load_across`
        """
        i, n = cuda.grid(1) * vector_width(y), np.int64(y.shape[0])
        allow_next_kernel()
        wait_for_previous_kernel()
        if i < n:
            values = cuda.local.array(MAX_WIDTH, np.float32)
            load_across(values, x, i, n, n_cols, step, vectors)
            for k in range(vector_width(y)):
                values[k] = function(values[k])
            store_whole(y, i, n, values)

    return _ladder(naive_kernel, grid_stride_kernel, vectorised_kernel, rows_kernel)


def _backward_ladder(gradient):
    """The rungs of dx = gradient(dy, saved); all one-dimensional."""

    @cuda.jit
    def naive_backward_kernel(dy, saved, dx):
        i = cuda.grid(1)
        if i < dy.shape[0]:
            store(dx, i, gradient(load(dy, i), load(saved, i)))

    @cuda.jit
    def grid_stride_backward_kernel(dy, saved, dx):
        for i in range(cuda.grid(1), dy.shape[0], cuda.gridsize(1)):
            store(dx, i, gradient(load(dy, i), load(saved, i)))

    @cuda.jit
    def vectorised_backward_kernel(dy, saved, dx, head, n_vectors):
        thread = cuda.grid(1)
        width = vector_width(dy)
        allow_next_kernel()
        wait_for_previous_kernel()
        if thread < n_vectors:
            upstream = cuda.local.array(MAX_WIDTH, np.float32)
            values = cuda.local.array(MAX_WIDTH, np.float32)
            i = head + thread * width
            load_vector(upstream, dy, i)
            load_vector(values, saved, i)
            for k in range(width):
                values[k] = gradient(upstream[k], values[k])
            store_vector(dx, i, values)
        else:
            i = thread - n_vectors
            if i >= head:
                i += n_vectors * width
            if i < dy.shape[0]:
                store(dx, i, gradient(load(dy, i), load(saved, i)))

    @cuda.jit
    def rows_backward_kernel(dy, saved, dx, n_cols, dy_step, dy_vectors, step, vectors):
        """dx = gradient(dy, saved), a thread for each vector of dx.

        dy, saved             the memory of their rows, flat
        dx                    flat, without gaps
        n_cols                as of `gapped_rows.load_across`
        dy_step, dy_vectors   the same, of dy
        step, vectors         the same, of saved
        """
        i, n = cuda.grid(1) * vector_width(dx), np.int64(dx.shape[0])
        allow_next_kernel()
        wait_for_previous_kernel()
        if i < n:
            upstream = cuda.local.array(MAX_WIDTH, np.float32)
            values = cuda.local.array(MAX_WIDTH, np.float32)
            load_across(upstream, dy, i, n, n_cols, dy_step, dy_vectors)
            load_across(values, saved, i, n, n_cols, step, vectors)
            for k in range(vector_width(dx)):
                values[k] = gradient(upstream[k], values[k])
            store_whole(dx, i, n, values)

    return _ladder(
        naive_backward_kernel, grid_stride_backward_kernel, vectorised_backward_kernel,
        rows_backward_kernel,
    )  # fmt: skip


def _ladder(naive_kernel, grid_stride_kernel, vectorised_kernel, rows_kernel):
    rungs = {
        "naive": (_launch_naive, naive_kernel),
        "grid_stride": (_launch_grid_stride, grid_stride_kernel),
        "vectorised": (_launch_vectorised, vectorised_kernel, rows_kernel),
    }
    return Ladder(
        *(
            Rung(name, functools.partial(launcher, *kernels), kernels)
            for name, (launcher, *kernels) in rungs.items()
        ),
        auto="vectorised",
    )


def _launch_naive(kernel, n, operands):
    launch(kernel, _blocks(n), BLOCK_SIZE, *operands, flat=True)


def _launch_grid_stride(kernel, n, operands):
    launch(kernel, min(_blocks(n), GRID_STRIDE_BLOCKS), BLOCK_SIZE, *operands, flat=True)


def _launch_vectorised(kernel, rows_kernel, n, operands):
    *inputs, result = operands
    head, n_vectors = _split(n, operands) if _are_dense(inputs) else (n, 0)
    if not n_vectors and (rows := in_rows(n, operands)):
        n_threads = math.ceil(n * result.dtype.itemsize / VECTOR_BYTES)
        launch(
            rows_kernel, _blocks(n_threads), BLOCK_SIZE,
            *(x if arrays.is_dense(x) else memory(x) for x in inputs), result, *rows,
            flat=True, overlap=True,
        )  # fmt: skip
        return
    n_threads = n - n_vectors * (VECTOR_BYTES // operands[0].dtype.itemsize - 1)
    launch(
        kernel, _blocks(n_threads), BLOCK_SIZE, *operands, head, n_vectors, flat=True, overlap=True
    )


class Activation:
    """One elementwise operation: its kernels and their launchers.

    `saves` says what `backward` needs beside dy: "x", the input of forward, or "y", its output.
    """

    def __init__(self, name, saves, function, gradient):
        self.name, self.saves = name, saves
        self.FORWARD = _forward_ladder(function)
        self.BACKWARD = _backward_ladder(gradient)

    def forward(self, x, *, variant=AUTO, out=None):
        """y = f(x), of the shape, dtype, device and memory layout of `x`.

        `out`, if given, receives y; it may be `x`. Raises ArrayError for a wrong dtype, shape or
        device and ValueError for an unknown variant. An `x` with gaps in memory is copied first,
        but for rows one after another, which `vectorised` reads where they lie.
        """
        arrays.require(x, "x", dtypes=DTYPES)
        return _run(self.FORWARD, variant, (x,), out)

    def backward(self, dy, saved, *, variant=AUTO, out=None):
        """dx from `dy` and the `saved` x or y (see `saves`); shapes and dtypes must agree.

        Raises and copies as `forward` does. A `dy` that lies in memory in another order than
        `saved` is copied.
        """
        arrays.require(saved, f"saved {self.saves}", dtypes=DTYPES)
        arrays.require(dy, "dy", shape=saved.shape, dtypes=(arrays.dtype_name(saved),))
        return _run(self.BACKWARD, variant, (dy, saved), out)


def _run(ladder, variant, inputs, out):
    *others, model = inputs
    rung, n = ladder.rung(variant, model), arrays.size_of(model)
    if out is None and rung.name == "vectorised" and not _are_dense(inputs):
        result = arrays.empty_like(model)
        if n and in_rows(n, (*inputs, result)):
            rung.launch(n, (*inputs, result))
            return result
    model = arrays.dense(model)
    inputs = (*(arrays.laid_out_like(x, model) for x in others), model)
    names = ("x",) if len(inputs) == 1 else ("dy", "saved")
    result = elementwise_output(out, model, dict(zip(names, inputs, strict=True)))
    if n:
        rung.launch(n, (*inputs, result))
    return result


def _are_dense(inputs):
    return all(map(arrays.is_contiguous_array, inputs)) or all(map(arrays.is_dense, inputs))


def _blocks(n_threads):
    return math.ceil(n_threads / BLOCK_SIZE)


def _split(n, operands):
    """(elements before the first 16-byte boundary, vectors from there on) of `n` elements.

    A vector access needs its boundary in every operand at once. Where their boundaries never
    fall together, there are no vectors, and each element goes by itself.
    """
    offset = arrays.address_of(operands[0]) % VECTOR_BYTES
    if any(arrays.address_of(operand) % VECTOR_BYTES != offset for operand in operands[1:]):
        return n, 0
    itemsize = operands[0].dtype.itemsize
    head = min(n, -offset % VECTOR_BYTES // itemsize)
    return head, (n - head) * itemsize // VECTOR_BYTES


relu = Activation("relu", "y", relu_value, relu_gradient)
sigmoid = Activation("sigmoid", "y", sigmoid_value, sigmoid_gradient)
swish = Activation("swish", "x", swish_value, swish_gradient)
relu6 = Activation("relu6", "y", relu6_value, relu6_gradient)
hard_sigmoid = Activation("hard_sigmoid", "x", hard_sigmoid_value, hard_sigmoid_gradient)
hard_swish = Activation("hard_swish", "x", hard_swish_value, hard_swish_gradient)
gelu = Activation("gelu", "x", gelu_value, gelu_gradient)
gelu_tanh = Activation("gelu_tanh", "x", gelu_tanh_value, gelu_tanh_gradient)


@functools.cache
def leaky_relu_of(negative_slope):
    """Leaky ReLU of this slope. It is a constant of the network, and so of the kernels."""
    slope = np.float32(negative_slope)

    @cuda.jit(device=True)
    def leaky_relu_value(x):
        return x if x > ZERO else x * slope

    @cuda.jit(device=True)
    def leaky_relu_gradient(dy, x):
        return dy if x > ZERO else dy * slope

    return Activation("leaky_relu", "x", leaky_relu_value, leaky_relu_gradient)


leaky_relu = leaky_relu_of(0.01)
OPERATIONS = {
    operation.name: operation
    for operation in (
        relu, sigmoid, swish, relu6, leaky_relu, hard_sigmoid, hard_swish, gelu, gelu_tanh,
    )
}  # fmt: skip


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for name, operation in OPERATIONS.items():
        for direction, n_arrays, ladder in (
            ("forward", 2, operation.FORWARD), ("backward", 3, operation.BACKWARD),
        ):  # fmt: skip
            for variant, rung in ladder.items():
                kernel, *of_rows = rung.kernels
                for dtype in DTYPES:
                    images = [(dtype, 1)] * n_arrays
                    split = ["int64"] * 2 if of_rows else []
                    yield f"{name}.{direction} {variant} {dtype}", kernel, images + split
                    for rows_kernel in of_rows:
                        types = [*images, "int64", *["int64", "boolean"] * (n_arrays - 1)]
                        yield f"{name}.{direction} rows {dtype}", rows_kernel, types
