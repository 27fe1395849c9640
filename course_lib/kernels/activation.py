"""ReLU, sigmoid and swish, forward and backward: y = f(x) for every element.

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

============= ===================== ============================ ==========
operation     y                     dx                           saved
============= ===================== ============================ ==========
`relu`        max(x, 0)             dy where y > 0, else 0       y
`sigmoid`     σ(x) = 1/(1 + e⁻ˣ)    dy·y·(1 − y)                 y
`swish`       x·σ(x)                dy·σ(x)·(1 + x·(1 − σ(x)))   x
============= ===================== ============================ ==========

As in PyTorch, ReLU passes NaN through, and σ(±inf) is exactly 1 or 0. Swish is SiLU (Ramachandran,
Zoph and Le, 2017). Derivations: notebook 01.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.runtime import arrays
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
from course_lib.runtime.launch import launch

BLOCK_SIZE = 256
GRID_STRIDE_BLOCKS = 132 * 8  # fills the largest chip of today
DTYPES = ("float32", "float16", "bfloat16")
DEFAULT = "vectorised"
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
ZERO, ONE = np.float32(0), np.float32(1)


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


def _forward_kernels(function):
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

    return {
        "naive": naive_kernel,
        "grid_stride": grid_stride_kernel,
        "vectorised": vectorised_kernel,
    }


def _backward_kernels(gradient):
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

    return {
        "naive": naive_backward_kernel,
        "grid_stride": grid_stride_backward_kernel,
        "vectorised": vectorised_backward_kernel,
    }


class Activation:
    """One elementwise operation: its kernels and their launchers.

    `saves` says what `backward` needs beside dy: "x", the input of forward, or "y", its output.
    """

    def __init__(self, name, saves, function, gradient):
        self.name, self.saves = name, saves
        self.VARIANTS = _forward_kernels(function)
        self.BACKWARD_VARIANTS = _backward_kernels(gradient)

    def forward(self, x, *, variant=DEFAULT, out=None):
        """y = f(x), of the shape, dtype, device and memory layout of `x`.

        `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device and
        ValueError for an unknown variant. An `x` with gaps in memory is copied first.
        """
        arrays.require(x, "x", dtypes=DTYPES)
        x = arrays.dense(x)
        return _run(self.VARIANTS, variant, (x,), out)

    def backward(self, dy, saved, *, variant=DEFAULT, out=None):
        """dx from `dy` and the `saved` x or y (see `saves`); shapes and dtypes must agree.

        Raises as `forward` does. A `dy` that lies in memory otherwise than `saved` is copied.
        """
        arrays.require(saved, f"saved {self.saves}", dtypes=DTYPES)
        arrays.require(dy, "dy", shape=saved.shape, dtypes=(arrays.dtype_name(saved),))
        saved = arrays.dense(saved)
        return _run(self.BACKWARD_VARIANTS, variant, (arrays.laid_out_like(dy, saved), saved), out)


def _run(variants, variant, inputs, out):
    if variant not in variants:
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(variants)}")
    model = inputs[-1]
    result = arrays.empty_like(model) if out is None else out
    if out is not None:
        dtype = arrays.dtype_name(model)
        arrays.require(out, "out", shape=model.shape, dtypes=(dtype,), writable=True)
        if not arrays.same_layout(out, model):
            raise arrays.ArrayError(
                f"out has strides {arrays.strides_of(out)}, but x has {arrays.strides_of(model)}"
            )
    if n := arrays.size_of(model):
        operands = (*inputs, result)
        if variant == "naive":
            launch(variants[variant], _blocks(n), BLOCK_SIZE, *operands, flat=True)
        elif variant == "grid_stride":
            n_blocks = min(_blocks(n), GRID_STRIDE_BLOCKS)
            launch(variants[variant], n_blocks, BLOCK_SIZE, *operands, flat=True)
        else:
            head, n_vectors = _split(n, operands)
            n_threads = n - n_vectors * (VECTOR_BYTES // model.dtype.itemsize - 1)
            launch(
                variants[variant], _blocks(n_threads), BLOCK_SIZE, *operands, head, n_vectors,
                flat=True, overlap=True,
            )  # fmt: skip
    return result


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
OPERATIONS = {operation.name: operation for operation in (relu, sigmoid, swish)}


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for name, operation in OPERATIONS.items():
        for n_arrays, table in ((2, operation.VARIANTS), (3, operation.BACKWARD_VARIANTS)):
            for variant, kernel in table.items():
                for dtype in DTYPES:
                    direction = "forward" if n_arrays == 2 else "backward"
                    label = f"{name}.{direction} {variant} {dtype}"
                    split = ["int64"] * 2 if variant == "vectorised" else []
                    yield label, kernel, [(dtype, 1)] * n_arrays + split
