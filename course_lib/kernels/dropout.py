"""Dropout: every element is 0 with probability p, or else times 1/(1 − p).

x is of any shape, dense in memory; float32, float16 or bfloat16. With `s` bytes an element it must
move 2·n·s bytes (read x, write y), and a random number of 16 bits is drawn for each element. The
backward pass is the same on dy: no mask is stored, because the generator gives the numbers of any
position again. Memory is the limit, where a call of the generator serves eight elements.

============ =====================================================================================
rung         a thread does
============ =====================================================================================
`vectorised` eight elements: one call, 16 bytes at a time; where memory or `offset` do not lie on
             a multiple of eight elements, an element, with a call of the generator for it alone
============ =====================================================================================

Element i, in the order of memory, takes number offset + i of the generator: see
`blocks.dropout_mask`. The seed may lie in the GPU's memory, where a captured CUDA graph finds
another one at each replay. Source: N. Srivastava and others (2014).
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.dropout_mask import dropped, generator_arguments, keep_pair
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.outputs import elementwise_output
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.philox import philox_four

DTYPES = ("float32", "float16", "bfloat16")
BLOCK_SIZE = 256
GROUP = 8  # elements that a call of the generator serves
ZERO = np.float32(0)


@cuda.jit
def naive_kernel(x, y, scale, threshold, offset, key0, key1):
    i = cuda.grid(1)
    if i < x.shape[0]:
        store(y, i, dropped(load(x, i), offset + i, scale, threshold, key0, key1))


@cuda.jit
def vectorised_kernel(x, y, scale, threshold, offset, key0, key1):
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.local.array(GROUP, np.float32)
    first, n, width = cuda.grid(1) * GROUP, x.shape[0], vector_width(x)
    if first + GROUP <= n:
        load_vector(values, x, first)
        if width < GROUP:
            load_vector(values[4:], x, first + width)
        n0, n1, n2, n3 = philox_four((offset + first) >> 3, key0, key1)
        kept = keep_pair(n0, threshold) | keep_pair(n1, threshold) << 2
        kept |= keep_pair(n2, threshold) << 4 | keep_pair(n3, threshold) << 6
        for k in range(GROUP):
            # Multiplied, not selected: a NaN stays NaN, as in PyTorch.
            values[k] *= scale if kept >> k & 1 else ZERO
        store_vector(y, first, values)
        if width < GROUP:
            store_vector(y, first + width, values[4:])
    elif first < n:
        for i in range(first, n):
            store(y, i, dropped(load(x, i), offset + i, scale, threshold, key0, key1))


naive_step = cuda.jit(device=True)(naive_kernel.py_func)
vectorised_step = cuda.jit(device=True)(vectorised_kernel.py_func)


@cuda.jit(device=True)
def words_of(seed):
    """The two words of the key that a seed gives, int64; as `philox.key_of`."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)


@cuda.jit
def naive_seeded_kernel(x, y, scale, threshold, offset, seed):
    key0, key1 = words_of(seed[0])
    naive_step(x, y, scale, threshold, offset, key0, key1)


@cuda.jit
def vectorised_seeded_kernel(x, y, scale, threshold, offset, seed):
    allow_next_kernel()
    wait_for_previous_kernel()
    key0, key1 = words_of(seed[0])
    vectorised_step(x, y, scale, threshold, offset, key0, key1)


#: Each kernel's twin that reads the seed itself.
SEEDED = {naive_kernel: naive_seeded_kernel, vectorised_kernel: vectorised_seeded_kernel}


def _launch(n, x, y, numbers, seed):
    together, offset = arrays.address_of(x) | arrays.address_of(y), numbers[2]
    vectors = together % VECTOR_BYTES == offset % GROUP == 0
    kernel, n_threads = (vectorised_kernel, -(-n // GROUP)) if vectors else (naive_kernel, n)
    if seed is not None:
        kernel, numbers = SEEDED[kernel], (*numbers[:3], seed)
    launch(
        kernel, -(-n_threads // BLOCK_SIZE), BLOCK_SIZE, x, y, *numbers,
        flat=True, overlap=vectors,
    )  # fmt: skip


FORWARD = BACKWARD = Ladder(
    Rung("vectorised", _launch, (*SEEDED, *SEEDED.values())), auto="vectorised"
)


def forward(x, p, seed, offset, *, variant=AUTO, out=None):
    """y = dropout(x), of the shape, dtype, device and memory layout of `x`.

    p             probability of dropping an element, in [0, 1]
    seed, offset  Python ints that fix the mask: `seed` modulo 2⁶⁴, or an int64 array of one
                  element on x's device, read when the kernel runs; `offset` at least 0, and less
                  than 2⁶³ together with the number of elements

    `out`, if given, receives y; it may be `x`. An `x` with gaps in memory is copied first. Raises
    ArrayError for a wrong dtype, shape or device, TypeError or ValueError for a wrong p, seed or
    offset, ValueError for an unknown variant.
    """
    arrays.require(x, "x", dtypes=DTYPES)
    rung = FORWARD.rung(variant, x)
    x = arrays.dense(x)
    on_device = seed if hasattr(seed, "shape") else None
    if on_device is not None:
        arrays.require(seed, "seed", shape=(1,), dtypes=("int64",))
        seed = 0
    numbers = generator_arguments(p, seed, offset, arrays.size_of(x))
    y = elementwise_output(out, x, dict(x=x))
    if n := arrays.size_of(x):
        rung.launch(n, x, y, numbers, on_device)
    return y


def backward(dy, p, seed, offset, *, variant=AUTO, out=None):
    """dx from `dy`, which must lie in memory as forward's x did; the rest as in `forward`."""
    return forward(dy, p, seed, offset, variant=variant, out=out)


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    numbers = ["float32", "uint32", "int64", "uint32", "uint32"]
    for name, kernel in (("naive", naive_kernel), ("vectorised", vectorised_kernel)):
        for dtype in DTYPES:
            x = dtype, 1
            yield f"dropout {name} {dtype}", kernel, [x, x, *numbers]
            types = [x, x, *numbers[:3], ("int64", 1)]
            yield f"dropout {name} seeded {dtype}", SEEDED[kernel], types
