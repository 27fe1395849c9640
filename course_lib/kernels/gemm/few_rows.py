"""The product where `a` has few rows: all the work is reading `b` once.

A block takes a column of c. Its threads read a row of `b` together, 16 bytes each and several of
them on their way, and multiply it with all rows of `a`, which stay in the caches. Tensor cores
would have next to nothing to do: a tile of theirs has 16 rows at least.

For both inputs by k, whose rows begin on 16-byte boundaries. Sums are float32, a fixed order.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.mma.epilogue import finish
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    block_sum,
    load_vector,
    store,
    vector_width,
    wait_for_previous_kernel,
)

ROWS = (1, 2, 4, 8)  # of `a`: a kernel for each, whose sums are in registers
N_THREADS = 128
UNROLL = 4  # vectors of `b` in flight per thread


def make(n_rows):
    """The kernel for `n_rows` rows of `a`, or fewer."""

    @cuda.jit(device=True)
    def add_products(sums, a, b_vector, at, M, K, width):
        a_vector = cuda.local.array(MAX_WIDTH, np.float32)
        for m in range(n_rows):
            if m < M:
                load_vector(a_vector, a, m * K + at)
                for e in range(width):
                    sums[m] += a_vector[e] * b_vector[e]

    @cuda.jit
    def few_rows_kernel(a, b, bias, c, M, N, K, options):
        scratch = cuda.shared.array(32, np.float32)
        sums = cuda.local.array(n_rows, np.float32)
        vectors = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        width, step = vector_width(b), N_THREADS * vector_width(b)
        n = np.int64(cuda.blockIdx.x)
        for m in range(n_rows):
            sums[m] = ZERO
        allow_next_kernel()
        wait_for_previous_kernel()
        at = np.int64(cuda.threadIdx.x * width)
        while at < K:
            for u in range(UNROLL):
                if at + u * step < K:
                    load_vector(vectors[u], b, n * K + at + u * step)
            for u in range(UNROLL):
                if at + u * step < K:
                    add_products(sums, a, vectors[u], at + u * step, M, K, width)
            at += UNROLL * step
        for m in range(n_rows):
            total = block_sum(sums[m], scratch)
            if m < M and cuda.threadIdx.x == m:
                store(c, m * N + n, finish(total, bias, n, options))

    return few_rows_kernel


KERNELS = {n_rows: make(n_rows) for n_rows in ROWS}


def plan(problem, chip):
    """The kernel for a `plan.Problem`."""
    if problem.M > ROWS[-1]:
        return Refusal(f"takes an a of at most {ROWS[-1]} rows, not {problem.M:,}")
    if problem.sources != ("by_k", "by_k"):
        return Refusal("takes matrices whose rows lie by k and begin on 16-byte boundaries")
    return KERNELS[next(n for n in ROWS if n >= problem.M)]


def multiply(kernel, operands):
    """c = a·bᵀ, and what the last operand, `options`, says (see `epilogue`)."""
    a, b, bias, c, M, N, K, *_, options = operands
    launch(kernel, N, N_THREADS, a, b, bias, c, M, N, K, options, flat=True, overlap=True)


def specialisations(dtypes):
    """(label, kernel, argument types); arrays as (dtype, 1)."""
    for dtype in dtypes:
        for n_rows, kernel in KERNELS.items():
            yield f"few rows {n_rows} {dtype}", kernel, [(dtype, 1)] * 4 + ["int64"] * 4
