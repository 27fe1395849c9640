"""The product where `a` has few rows: all the work is reading `b` once.

A warp takes a column of c, or a block where rows are long. Its threads read a row of `b` together,
16 bytes each and several of them on their way, and multiply it with all rows of `a`, which stay in
the caches. Tensor cores would have next to nothing to do: a tile of theirs has 16 rows at least.

For both inputs by k. Rows that don't all begin on 16-byte boundaries are read by elements. Sums are
float32, in a fixed order.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.mma.epilogue import VECTORS, finish
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    block_sum,
    load,
    load_vector,
    store,
    vector_width,
    wait_for_previous_kernel,
    warp_sum,
)

ROWS = (1, 2, 4, 8)  # of `a`: a kernel for each, whose sums are in registers
N_THREADS, WARP = 128, 32
UNROLL = 4  # vectors of `b` in flight per thread, or twice as many elements


def _walking(n_rows, TEAM, by_vectors):
    """walk(sums, a, b, n, M, K): add up the part of column n of a thread of a team."""
    N_LOADS = UNROLL if by_vectors else 2 * UNROLL

    @cuda.jit(device=True)
    def fetch(values, x, i):
        if by_vectors:
            load_vector(values, x, i)
        else:
            values[0] = load(x, i)

    @cuda.jit(device=True)
    def add_products(sums, a, of_b, at, M, K, width):
        of_a = cuda.local.array(MAX_WIDTH, np.float32)
        for m in range(n_rows):
            if m < M:
                fetch(of_a, a, m * K + at)
                for e in range(width):
                    sums[m] += of_a[e] * of_b[e]

    @cuda.jit(device=True)
    def walk(sums, a, b, n, M, K):
        of_b = cuda.local.array((N_LOADS, MAX_WIDTH), np.float32)
        width = vector_width(b) if by_vectors else 1
        at, step = np.int64(cuda.threadIdx.x % TEAM * width), TEAM * width
        while at < K:
            for u in range(N_LOADS):
                if at + u * step < K:
                    fetch(of_b[u], b, n * K + at + u * step)
            for u in range(N_LOADS):
                if at + u * step < K:
                    add_products(sums, a, of_b[u], at + u * step, M, K, width)
            at += N_LOADS * step

    return walk


def make(n_rows):
    """The kernel for `n_rows` rows of `a`, or fewer."""
    vectors_by_warp, elements_by_warp = (_walking(n_rows, WARP, whole) for whole in (True, False))
    vectors, elements = (_walking(n_rows, N_THREADS, whole) for whole in (True, False))

    @cuda.jit
    def few_rows_kernel(a, b, bias, c, M, N, K, team, options):
        """c = a·bᵀ, and what `options` say (see `epilogue`): a team of threads for each column.

        a, b, bias, c, M, N, K  see `gemm.multiply`
        team                    WARP, or all threads of a block
        """
        scratch = cuda.shared.array(32, np.float32)
        sums = cuda.local.array(n_rows, np.float32)
        n, lane = np.int64(cuda.blockIdx.x), cuda.threadIdx.x
        if team == WARP:
            n, lane = n * (N_THREADS // WARP) + cuda.threadIdx.x // WARP, lane % WARP
        for m in range(n_rows):
            sums[m] = ZERO
        allow_next_kernel()
        wait_for_previous_kernel()
        if n >= N:  # a whole warp, and none of a team that is a block
            return
        if options & VECTORS and team == WARP:
            vectors_by_warp(sums, a, b, n, M, K)
        elif options & VECTORS:
            vectors(sums, a, b, n, M, K)
        elif team == WARP:
            elements_by_warp(sums, a, b, n, M, K)
        else:
            elements(sums, a, b, n, M, K)
        for m in range(n_rows):
            total = warp_sum(sums[m]) if team == WARP else block_sum(sums[m], scratch)
            if m < M and lane == m:
                store(c, m * N + n, finish(total, bias, n, options))

    return few_rows_kernel


KERNELS = {n_rows: make(n_rows) for n_rows in ROWS}


def plan(problem, chip):
    """The kernel for a `plan.Problem`."""
    if problem.M > ROWS[-1]:
        return Refusal(f"takes an a of at most {ROWS[-1]} rows, not {problem.M:,}")
    if problem.lies != ("by_k", "by_k"):
        return Refusal("takes matrices whose rows lie by k")
    return KERNELS[next(n for n in ROWS if n >= problem.M)]


def multiply(kernel, operands):
    """c = a·bᵀ, and what the last operand, `options`, says (see `epilogue`)."""
    a, b, bias, c, M, N, K, *_, options = operands
    whole = all(arrays.begins_on(VECTOR_BYTES, array, K) for array in (a, b))
    n_loads = K // (VECTOR_BYTES // b.dtype.itemsize) if whole else K / 2
    team = WARP if n_loads <= WARP * UNROLL else N_THREADS
    launch(
        kernel, math.ceil(N * team / N_THREADS), N_THREADS, a, b, bias, c, M, N, K, team,
        options + whole * VECTORS, flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtypes):
    """(label, kernel, argument types); arrays as (dtype, 1)."""
    for dtype in dtypes:
        for n_rows, kernel in KERNELS.items():
            yield f"few rows {n_rows} {dtype}", kernel, [(dtype, 1)] * 4 + ["int64"] * 5
