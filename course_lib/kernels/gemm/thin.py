"""The products of a linear layer whose work is to read or to write one matrix once.

Of few outputs, inputs or rows. Rows may begin anywhere: neighbouring threads read neighbouring
elements, or vectors where they can. Sums are float32, in registers, in a fixed order:

`rows`     c = a·bᵀ with few rows of b: a warp or a block takes a row of `a`, as `few_rows` does
`outer`    few k: a thread keeps all k of its columns of `b` while it goes through rows of c
`columns`  few rows of c: a thread takes a column of `b`, and k is dealt out to blocks, whose sums a
           second launch adds up
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import VECTORS, finish
from course_lib.kernels.gemm import few_rows
from course_lib.kernels.gemm.split import BLOCK_SIZE, finish_kernel
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
)

FEW = (2, 4, 8, 16)  # a kernel for each
N_THREADS = 128
UNROLL, MOST_LOADS = 8, 32  # loads in flight per thread: of the large matrix, of the other
#: Of a thread of `outer`; blocks for each multiprocessor; columns that keep enough threads busy.
COLUMNS, ROWS, MOST_ROWS, ENOUGH_OUTER, LEAST_WIDTH = 4, 16, 16, 2, 256
#: Of `columns`: blocks for each multiprocessor; k of a part; parts at most, which are added up; and
#: columns, of rows by k, from which on there are enough blocks.
ENOUGH_BLOCKS, LEAST_LENGTH, MOST_PARTS, LEAST_COLUMNS = 8, 16, 64, 1024
#: Of `rows`: k that is worth a block's while, k at most of rows that are read by elements, and rows
#: for each multiprocessor from which on a warp takes one.
LONG, MOST_K, WARPS = 256, 4096, 32
#: What is few, where rows begin on 16-byte boundaries: of `rows`, and of the others.
FEW_ENOUGH, FEW_OF_WHOLE = 4, 8


def make(few):
    """(rows, outer, columns): the kernels for so many outputs, inputs or rows at most."""
    N_LOADS = min(UNROLL, MOST_LOADS // few)
    N_OTHERS, AT_A_TIME = few * N_LOADS, max(1, min(4, MOST_ROWS // few))
    N_OF_ROWS = few * AT_A_TIME

    row_of = few_rows.column(few)

    @cuda.jit
    def thin_rows_kernel(a, b, bias, c, M, N, K, team, options):
        """A team of threads for each row of c, which is a column of b·aᵀ.

        a, b, bias, c, M, N, K, options  see `gemm.multiply`: (M, K), (N, K), and `epilogue`
        team                             as of `few_rows_kernel`
        """
        m, n = few_rows.place_in_team(team)
        allow_next_kernel()
        wait_for_previous_kernel()
        if m >= M:  # a whole warp, and none of a team that is a block
            return
        total = row_of(b, a, m, N, K, team, options)
        if n < N:
            store(c, m * N + n, finish(total, bias, n, options))

    @cuda.jit
    def thin_outer_kernel(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, n_rows, options):
        """A block for each `n_rows` rows of N_THREADS · COLUMNS columns of c.

        a, b, bias, c, M, N, K, options  see `gemm.multiply`, and `epilogue`
        a_m, a_k, b_n, b_k               elements from one row, or k, of a and of b to the next
        """
        mine = cuda.local.array((COLUMNS, few), np.float32)
        sums, other = cuda.local.array(COLUMNS, np.float32), cuda.local.array(N_OF_ROWS, np.float32)
        n_tiles = (N + N_THREADS * COLUMNS - 1) // (N_THREADS * COLUMNS)
        block = np.int64(cuda.blockIdx.x)
        first = block // n_tiles * n_rows
        col = block % n_tiles * (N_THREADS * COLUMNS) + cuda.threadIdx.x
        allow_next_kernel()
        wait_for_previous_kernel()
        for v in range(COLUMNS):
            for k in range(few):
                mine[v, k] = ZERO
                if k < K and col + v * N_THREADS < N:
                    mine[v, k] = load(b, (col + v * N_THREADS) * b_n + k * b_k)
        stop = min(first + n_rows, M)
        for m in range(first, stop, AT_A_TIME):
            for u in range(AT_A_TIME):
                for k in range(few):
                    at = min(m + u, stop - 1) * a_m + min(k, K - 1) * a_k
                    other[u * few + k] = load(a, at)
            for u in range(AT_A_TIME):
                for v in range(COLUMNS):
                    sums[v] = ZERO
                for k in range(few):
                    for v in range(COLUMNS):
                        sums[v] += (other[u * few + k] if k < K else ZERO) * mine[v, k]
                for v in range(COLUMNS):
                    n = col + v * N_THREADS
                    if n < N and m + u < stop:
                        store(c, (m + u) * N + n, finish(sums[v], bias, n, options))

    @cuda.jit
    def thin_columns_kernel(a, b, partial, M, N, K, a_m, a_k, length):
        """partial[part] (M, N) = the product of a part of k.

        a, b, M, N, K, a_m, a_k  see `thin_outer_kernel`; b is (K, N)
        partial, length          float32 (parts, M, N), and k of a part
        """
        sums, other = cuda.local.array(few, np.float32), cuda.local.array(N_OTHERS, np.float32)
        values = cuda.local.array(N_LOADS, np.float32)
        n_tiles = (N + N_THREADS - 1) // N_THREADS
        part = np.int64(cuda.blockIdx.x) // n_tiles
        n = np.int64(cuda.blockIdx.x) % n_tiles * N_THREADS + cuda.threadIdx.x
        stop = min((part + 1) * length, K)
        for m in range(few):
            sums[m] = ZERO
        allow_next_kernel()
        wait_for_previous_kernel()
        if n >= N:
            return
        for k in range(part * length, stop, N_LOADS):
            for u in range(N_LOADS):  # no load behind a branch, nor behind a sum that waits
                inside, at = k + u < stop, min(k + u, stop - 1)
                value = load(b, at * N + n)
                values[u] = value if inside else ZERO
                for m in range(few):
                    other[u * few + m] = load(a, min(m, M - 1) * a_m + at * a_k)
            for u in range(N_LOADS):
                for m in range(few):
                    sums[m] += values[u] * (other[u * few + m] if k + u < stop else ZERO)
        for m in range(few):
            if m < M:
                partial[(part * M + m) * N + n] = sums[m]

    return thin_rows_kernel, thin_outer_kernel, thin_columns_kernel


KERNELS = {few: make(few) for few in FEW}
RUN_ROWS, RUN_OUTER, RUN_COLUMNS = range(3)


def _kind(problem):
    """(which of the kernels takes a product, what is few of it), or None."""
    if problem.lies == ("by_k", "by_k") and problem.N <= FEW[-1]:
        return RUN_ROWS, problem.N
    if 0 < problem.K <= FEW[-1]:  # of none the others add up nothing, where this one would read
        return RUN_OUTER, problem.K
    if problem.lies[1] == "by_row" and problem.M <= FEW[-1]:
        return RUN_COLUMNS, problem.M
    return None


def is_fastest(problem, chip):
    """Whether to try this way before tensor cores, for a `plan.Problem`."""
    if not (kind := _kind(problem)):
        return False
    number, few = kind
    whole = "any" not in problem.sources  # which tensor cores load fast
    if number == RUN_ROWS:
        long = problem.M >= chip.multiprocessors and problem.K >= LONG
        return few <= FEW_ENOUGH and long or not whole and problem.K <= MOST_K
    # Three products for each, and tiles that are nearly empty, cost more than rows twice as wide.
    exact = problem.itemsize == 4 and few <= FEW_OF_WHOLE
    if number == RUN_OUTER:
        wide = problem.lies == ("by_k", "by_row") or problem.N >= LEAST_WIDTH
        return wide and (not whole or exact and problem.mode == "split")
    if problem.lies[0] == "by_k":
        return exact and problem.N >= LEAST_COLUMNS
    return not whole


def plan(problem, chip):
    """(the kernel, its number, threads of a team) for a `plan.Problem`."""
    if not (kind := _kind(problem)):
        return Refusal(f"takes products of at most {FEW[-1]} outputs, or inputs, or rows")
    number, few = kind
    # A warp for each row, unless they are too few for that.
    team = few_rows.WARP
    if problem.M < WARPS * chip.multiprocessors and problem.K > LONG:
        team = few_rows.N_THREADS
    return KERNELS[next(n for n in FEW if n >= few)][number], number, team


def multiply(plan, operands):
    """c = a·bᵀ, and what the last operand, `options`, says (see `epilogue`)."""
    a, b, _, c, M, N, K, *strides, options = operands
    kernel, number, team = plan
    if number == RUN_COLUMNS:
        return _multiply_columns(kernel, operands)
    if number == RUN_ROWS:
        n_blocks, numbers = math.ceil(M * team / N_THREADS), (team,)
        options += few_rows.are_whole(a, b, K) * VECTORS
    else:
        n_tiles, most = math.ceil(N / (N_THREADS * COLUMNS)), chip_of(c).multiprocessors
        n_rows = max(1, min(ROWS, M * n_tiles // (ENOUGH_OUTER * most)))
        n_blocks, numbers = math.ceil(M / n_rows) * n_tiles, (*strides, n_rows)
    launch(kernel, n_blocks, N_THREADS, *operands[:7], *numbers, options, flat=True, overlap=True)


def _multiply_columns(kernel, operands):
    a, b, bias, c, M, N, K, a_m, a_k, *_, options = operands
    n_tiles = math.ceil(N / N_THREADS)
    enough = ENOUGH_BLOCKS * chip_of(c).multiprocessors // n_tiles
    wanted = min(enough, K // LEAST_LENGTH, MOST_PARTS)
    length = max(1, math.ceil(K / max(1, wanted)))
    n_parts = max(1, math.ceil(K / length))
    partial = arrays.empty((n_parts, M, N), like=c, dtype="float32")
    launch(
        kernel, n_tiles * n_parts, N_THREADS, a, b, partial, M, N, K, a_m, a_k, length, flat=True,
        overlap=True,
    )  # fmt: skip
    launch(
        finish_kernel, math.ceil(M * N / BLOCK_SIZE), BLOCK_SIZE, partial, bias, c, N, n_parts,
        options, flat=True, overlap=True,
    )  # fmt: skip


def all_kernels():
    """Every kernel that `multiply` may launch."""
    return *(kernel for found in KERNELS.values() for kernel in found), finish_kernel


def specialisations(dtypes):
    """(label, kernel, argument types) of all that `multiply` compiles; arrays as (dtype, 1)."""
    for dtype in dtypes:
        for few, (rows, outer, columns) in KERNELS.items():
            yield f"thin rows {few} {dtype}", rows, [(dtype, 1)] * 4 + ["int64"] * 5
            yield f"thin outer {few} {dtype}", outer, [(dtype, 1)] * 4 + ["int64"] * 9
            types = [(dtype, 1), (dtype, 1), ("float32", 1)] + ["int64"] * 6
            yield f"thin columns {few} {dtype}", columns, types
