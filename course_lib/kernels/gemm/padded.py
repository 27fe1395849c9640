"""Products by `wgmma` of matrices whose rows don't begin on 16-byte boundaries.

One launch copies each such matrix to rows of whole vectors, which end in zeros. `wgmma` reads the
copies by their longer rows; c stays as it is. float32 lie by k: longer rows are a longer k. A copy
costs as much memory traffic as two reads of the matrix, which a large product repays: without it
every element is loaded by itself.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.gemm import warpgroup
from course_lib.kernels.gemm.warpgroup_plan import choose_parts, cost, parts_cost
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 256
MOST = 2**31  # elements of a matrix: vectors are counted in 32 bits


@cuda.jit(device=True)
def pad(i, x, padded, length):
    """The i-th vector of `padded`: of a row of `length` elements of x, and zeros behind it."""
    width = np.int64(vector_width(x))
    row, vector = divided(np.int32(i), np.int32((length + width - 1) // width))
    values = cuda.local.array(MAX_WIDTH, np.float32)
    for q in range(width):
        col = vector * width + q
        values[q] = load(x, row * length + col) if col < length else ZERO
    store_vector(padded, i * width, values)


@cuda.jit
def pad_rows_kernel(a, a_padded, a_length, a_vectors, b, b_padded, b_length, b_vectors):
    """`pad` both matrices: a thread for each vector.

    a, a_padded, a_length, a_vectors  see `pad`, and the number of its vectors; as of
    b, b_padded, b_length, b_vectors
    """
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.blockIdx.x) * BLOCK_SIZE + cuda.threadIdx.x
    if i < a_vectors:
        pad(i, a, a_padded, a_length)
    elif i - a_vectors < b_vectors:
        pad(i - a_vectors, b, b_padded, b_length)


def plan(problem, chip):
    """(how the inputs come, function that multiplies, its plan) for a `plan.Problem`."""
    problem = problem._replace(sources=problem.lies)
    if problem.itemsize != 2 and (problem.mode != "tf32" or problem.lies != ("by_k", "by_k")):
        return Refusal("takes 16-bit numbers, or float32 by k that may be rounded to TF32")
    if max(problem.M, problem.N) * problem.K >= MOST:
        return Refusal(f"takes matrices of fewer than {MOST:,} elements")
    whole = warpgroup.plan(problem, chip)
    if isinstance(whole, Refusal) or problem.itemsize != 2:
        return whole if isinstance(whole, Refusal) else (problem.sources, warpgroup.multiply, whole)
    parts = choose_parts(problem, chip)
    if parts_cost(parts, problem, chip) < cost(whole.shape, problem, chip):
        return problem.sources, warpgroup.multiply_in_parts, warpgroup.plan_in_parts(problem, chip)
    return problem.sources, warpgroup.multiply, whole


def multiply(plan, operands):
    """c = a·bᵀ, and what the last operand, `options`, says (see `epilogue`)."""
    a, b, bias, c, M, N, K, *_, options = operands
    sources, product, found = plan
    (a, *of_a), strides_of_a = _padded(a, sources[0], M, K)
    (b, *of_b), strides_of_b = _padded(b, sources[1], N, K)
    if n_vectors := of_a[-1] + of_b[-1]:
        launch(
            pad_rows_kernel, math.ceil(n_vectors / BLOCK_SIZE), BLOCK_SIZE, a, *of_a, b, *of_b,
            flat=True, overlap=True,
        )  # fmt: skip
    strides = *strides_of_a, *strides_of_b
    if a.dtype.itemsize != 2:
        K = strides[0]
    product(found, (of_a[0], of_b[0], bias, c, M, N, K, *strides, options))


def _padded(array, source, n_rows, K):
    """(what `pad_rows_kernel` takes, strides of the copy); no vectors of a matrix that is whole."""
    n_lines, length = (n_rows, K) if source == "by_k" else (K, n_rows)
    copy, pitch, n_vectors = array, length, 0
    if not arrays.begins_on(VECTOR_BYTES, array, length):
        width = VECTOR_BYTES // array.dtype.itemsize
        n_vectors = math.ceil(length / width)
        pitch, n_vectors = n_vectors * width, n_lines * n_vectors
        copy = arrays.empty((n_vectors * width,), like=array)
    return (array, copy, length, n_vectors), (pitch, 1) if source == "by_k" else (1, pitch)


def specialisations(dtypes):
    """(label, kernel, argument types) of what pads; arrays as (dtype, 1)."""
    for dtype in dtypes:
        types = [(dtype, 1), (dtype, 1), "int64", "int64"] * 2
        yield f"pad rows {dtype}", pad_rows_kernel, types
