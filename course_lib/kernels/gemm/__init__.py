"""The product of two matrices, c[m, n] = Σ a[m, k]·b[n, k] over k: what layers are made of.

float32, float16 or bfloat16 in and out, summed in float32. `a` is (M, K), `b` (N, K), `c` (M, N);
each of `a` and `b` lies in memory either with k fastest or with its rows' number fastest, so that
all three products of a linear layer are this one. Column n may get a bias, and the result pass
through ReLU, before it is stored.

2·M·N·K FLOPs, and at least (M·K + N·K + M·N)·s bytes of `s` bytes an element. What a rung reads
beyond that, and from where, decides its speed:

============ ============================================================ ==================
rung         what a thread does                                           reads of each input
============ ============================================================ ==================
`naive`      one element of c, from global memory                         N of a, M of b
============ ============================================================ ==================

Sums are taken in a fixed order: two runs agree bit for bit.
"""

import math

from course_lib.kernels.gemm import columns, ladder
from course_lib.kernels.gemm.epilogue import ADD_BIAS, RELU
from course_lib.runtime.launch import launch

DTYPES = ("float32", "float16", "bfloat16")
PRECISIONS = ("float32", "tf32")
DEFAULT = "naive"
VARIANTS = {"naive": ladder.naive_kernel}


def multiply(
    a, b, c, M, N, K, *, a_by_k=True, b_by_k=True, bias=None, relu=False, precision="float32",
    variant=DEFAULT,
):  # fmt: skip
    """c[m, n] = Σ a[m, k]·b[n, k] over k (+ bias[n], then ReLU). Returns `c`.

    a, b       M·K and N·K elements, contiguous, of c's dtype
    c          M·N elements, contiguous
    a_by_k     whether `a` lies as (M, K), k fastest; else as (K, M). `b_by_k`: so for `b`
    precision  of float32 inputs: "float32", or "tf32", which allows a tensor core to round them
               to 10 bits; other rungs take no notice

    For layers, which have checked their arguments; it allocates what it needs beside them.
    """
    if M * N == 0:
        return c
    a_strides, b_strides = (K, 1) if a_by_k else (1, M), (K, 1) if b_by_k else (1, N)
    options = (ADD_BIAS if bias is not None else 0) + (RELU if relu else 0)
    operands = (a, b, c if bias is None else bias, c, M, N, K, *a_strides, *b_strides, options)
    n_blocks = math.ceil(M / ladder.NAIVE_M) * math.ceil(N / ladder.NAIVE_N)
    launch(ladder.naive_kernel, n_blocks, (ladder.NAIVE_N, ladder.NAIVE_M), *operands, flat=True)
    return c


def check_options(variant, precision):
    """ValueError for a rung or a precision that there is not."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(VARIANTS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; there are {', '.join(PRECISIONS)}")


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        array = (dtype, 1)
        yield f"gemm naive {dtype}", ladder.naive_kernel, [array] * 4 + ["int64"] * 8
    for label, kernel, types in columns.specialisations(DTYPES):
        yield f"gemm {label}", kernel, types
