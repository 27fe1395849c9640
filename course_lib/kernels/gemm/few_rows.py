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
    load,
    store,
    vector_width,
    wait_for_previous_kernel,
    warp_sum,
)
from course_lib.runtime.intrinsics.predicated import load_vector_if

ROWS = (1, 2, 4, 8)  # of `a`: a kernel for each, whose sums are in registers
N_THREADS, WARP, N_WARPS = 128, 32, 4
#: Vectors of `b` in flight per thread, or twice as many elements: fewer of many rows, as those of
#: `a` that belong to them need registers too.
UNROLL, MOST_LOADS = 4, 16


def _walking(n_rows, TEAM, by_vectors):
    """walk(sums, a, b, n, M, K): add up the part of column n of a thread of a team.

    No load stands behind a branch, where it would wait for those before it to be used.
    """
    N_LOADS = min(UNROLL, MOST_LOADS // n_rows) * (1 if by_vectors else 2)

    @cuda.jit(device=True)
    def fetch(values, x, i, inside):
        if by_vectors:
            load_vector_if(values, x, i, inside)
        else:
            value = load(x, i if inside else np.int64(0))
            values[0] = value if inside else ZERO

    @cuda.jit(device=True)
    def walk(sums, a, b, n, M, K):
        of_a = cuda.local.array((n_rows, MAX_WIDTH), np.float32)
        of_b = cuda.local.array((N_LOADS, MAX_WIDTH), np.float32)
        width = vector_width(b) if by_vectors else 1
        at, step = np.int64(cuda.threadIdx.x % TEAM * width), TEAM * width
        while at < K:
            for u in range(N_LOADS):
                fetch(of_b[u], b, n * K + at + u * step, at + u * step < K)
            for u in range(N_LOADS):
                for m in range(n_rows):
                    fetch(of_a[m], a, m * K + at + u * step, m < M and at + u * step < K)
                for m in range(n_rows):
                    for e in range(width):
                        sums[m] += of_a[m, e] * of_b[u, e]
            at += N_LOADS * step

    return walk


def column(n_rows):
    """column_of(a, b, n, M, K, team, options): column n of a·bᵀ, row m for thread m of a team.

    For `n_rows` rows of `a`, or fewer. team, options: as of `few_rows_kernel`.
    """
    vectors_by_warp, elements_by_warp = (_walking(n_rows, WARP, whole) for whole in (True, False))
    vectors, elements = (_walking(n_rows, N_THREADS, whole) for whole in (True, False))

    @cuda.jit(device=True)
    def column_of(a, b, n, M, K, team, options):
        scratch = cuda.shared.array((N_WARPS, n_rows), np.float32)
        sums, total = cuda.local.array(n_rows, np.float32), ZERO
        tid, lane = cuda.threadIdx.x, cuda.threadIdx.x % WARP
        for m in range(n_rows):
            sums[m] = ZERO
        if options & VECTORS and team == WARP:
            vectors_by_warp(sums, a, b, n, M, K)
        elif options & VECTORS:
            vectors(sums, a, b, n, M, K)
        elif team == WARP:
            elements_by_warp(sums, a, b, n, M, K)
        else:
            elements(sums, a, b, n, M, K)
        for m in range(n_rows):
            of_warp = warp_sum(sums[m])
            if lane == m:
                total = of_warp
        if team > WARP:
            if lane < n_rows:
                scratch[tid // WARP, lane] = total
            cuda.syncthreads()
            total = ZERO
            if tid < n_rows:
                for warp in range(N_WARPS):
                    total += scratch[warp, tid]
        return total

    return column_of


@cuda.jit(device=True)
def place_in_team(team):
    """(number of this thread's team in the grid, of the thread in it)."""
    if team == WARP:
        first = np.int64(cuda.blockIdx.x) * N_WARPS
        return first + cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    return np.int64(cuda.blockIdx.x), cuda.threadIdx.x


def make(n_rows):
    """The kernel for `n_rows` rows of `a`, or fewer."""
    column_of = column(n_rows)

    @cuda.jit
    def few_rows_kernel(a, b, bias, c, M, N, K, team, options):
        """c = a·bᵀ, and what `options` say (see `epilogue`): a team of threads for each column.

        a, b, bias, c, M, N, K  see `gemm.multiply`
        team                    WARP, or all threads of a block
        """
        n, m = place_in_team(team)
        allow_next_kernel()
        wait_for_previous_kernel()
        if n >= N:  # a whole warp, and none of a team that is a block
            return
        total = column_of(a, b, n, M, K, team, options)
        if m < M:
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


def are_whole(a, b, K):
    """Whether all rows, of K elements, begin on 16-byte boundaries."""
    return all(arrays.begins_on(VECTOR_BYTES, array, K) for array in (a, b))


def multiply(kernel, operands):
    """c = a·bᵀ, and what the last operand, `options`, says (see `epilogue`)."""
    a, b, bias, c, M, N, K, *_, options = operands
    whole = are_whole(a, b, K)
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
