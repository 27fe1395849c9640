"""The products of a linear layer of few outputs, whose work is to read or to write one matrix once.

Rows may begin anywhere: neighbouring threads read neighbouring elements. Sums are float32, in
registers, in a fixed order:

`rows`     c = a·bᵀ with few rows of b: a warp takes a row of `a`, and each lane all columns of c
`outer`    few k: a thread keeps all k of its columns of `b` while it goes through rows of c
`columns`  few rows of c: a thread takes a column of `b`, and k is dealt out to blocks, whose sums a
           second launch adds up
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import finish
from course_lib.kernels.gemm.split import BLOCK_SIZE, finish_kernel
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
    warp_sum,
)

FEW = (2, 4, 8, 16)  # a kernel for each
N_THREADS = 128
UNROLL = 8  # loads in flight per thread
COLUMNS, ROWS = 4, 16  # of a thread of `outer`
ENOUGH_BLOCKS, LEAST_LENGTH = 8, 64  # of `columns`: for each multiprocessor; k of a part
MOST_K = 4096  # that a warp of `rows` should go through


def make(few):
    """(rows, outer, columns): the kernels for `few` outputs at most."""

    @cuda.jit
    def thin_rows_kernel(a, b, bias, c, M, N, K, options):
        """A warp for each row of c.

        a, b, bias, c, M, N, K, options  see `gemm.multiply`: (M, K), (N, K), and `epilogue`
        """
        sums, values = cuda.local.array(few, np.float32), cuda.local.array(UNROLL, np.float32)
        lane = cuda.threadIdx.x % 32
        m = np.int64(cuda.blockIdx.x) * (N_THREADS // 32) + cuda.threadIdx.x // 32
        for n in range(few):
            sums[n] = ZERO
        allow_next_kernel()
        wait_for_previous_kernel()
        if m >= M:
            return
        for k in range(lane, K, 32 * UNROLL):
            for u in range(UNROLL):
                if k + 32 * u < K:
                    values[u] = load(a, m * K + k + 32 * u)
            for u in range(UNROLL):
                if k + 32 * u < K:
                    for n in range(few):
                        if n < N:
                            sums[n] += values[u] * load(b, n * K + k + 32 * u)
        for n in range(few):
            total = warp_sum(sums[n])
            if n < N and lane == n:
                store(c, m * N + n, finish(total, bias, n, options))

    @cuda.jit
    def thin_outer_kernel(a, b, bias, c, M, N, K, options):
        """A block for each ROWS rows of N_THREADS · COLUMNS columns of c.

        a, b, bias, c, M, N, K, options  see `gemm.multiply`: (M, K), (K, N), and `epilogue`
        """
        mine = cuda.local.array((COLUMNS, few), np.float32)
        sums = cuda.local.array(COLUMNS, np.float32)
        n_tiles = (N + N_THREADS * COLUMNS - 1) // (N_THREADS * COLUMNS)
        block = np.int64(cuda.blockIdx.x)
        first = block // n_tiles * ROWS
        col = block % n_tiles * (N_THREADS * COLUMNS) + cuda.threadIdx.x
        allow_next_kernel()
        wait_for_previous_kernel()
        for v in range(COLUMNS):
            for k in range(few):
                mine[v, k] = ZERO
                if k < K and col + v * N_THREADS < N:
                    mine[v, k] = load(b, k * N + col + v * N_THREADS)
        for m in range(first, min(first + ROWS, M)):
            for v in range(COLUMNS):
                sums[v] = ZERO
            for k in range(few):
                if k < K:
                    other = load(a, m * K + k)
                    for v in range(COLUMNS):
                        sums[v] += other * mine[v, k]
            for v in range(COLUMNS):
                n = col + v * N_THREADS
                if n < N:
                    store(c, m * N + n, finish(sums[v], bias, n, options))

    @cuda.jit
    def thin_columns_kernel(a, b, partial, M, N, K, length):
        """partial[part] (M, N) = the product of a part of k.

        a, b, M, N, K    see `gemm.multiply`: (K, M), (K, N)
        partial, length  float32 (parts, M, N), and k of a part
        """
        sums, values = cuda.local.array(few, np.float32), cuda.local.array(UNROLL, np.float32)
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
        for k in range(part * length, stop, UNROLL):
            for u in range(UNROLL):
                if k + u < stop:
                    values[u] = load(b, (k + u) * N + n)
            for u in range(UNROLL):
                if k + u < stop:
                    for m in range(few):
                        if m < M:
                            sums[m] += values[u] * load(a, (k + u) * M + m)
        for m in range(few):
            if m < M:
                partial[(part * M + m) * N + n] = sums[m]

    return thin_rows_kernel, thin_outer_kernel, thin_columns_kernel


KERNELS = {few: make(few) for few in FEW}
#: How the inputs of a product lie -> which of M, N and K is few, and which kernel takes it.
KINDS = {("by_k", "by_k"): (1, 0), ("by_k", "by_row"): (2, 1), ("by_row", "by_row"): (0, 2)}


def plan(problem, chip):
    """(the kernel, its number) for a `plan.Problem`."""
    few, number = KINDS.get(problem.lies, (None, None))
    if few is None or problem[few] > FEW[-1]:
        return Refusal(f"takes the products of a linear layer of at most {FEW[-1]} outputs")
    return KERNELS[next(n for n in FEW if n >= problem[few])][number], number


def multiply(plan, operands):
    """c = a·bᵀ, and what the last operand, `options`, says (see `epilogue`)."""
    M, N, options = operands[4], operands[5], operands[-1]
    kernel, number = plan
    if number == 2:
        return _multiply_columns(kernel, operands)
    n_blocks = math.ceil(M / (N_THREADS // 32))
    if number == 1:
        n_blocks = math.ceil(M / ROWS) * math.ceil(N / (N_THREADS * COLUMNS))
    launch(kernel, n_blocks, N_THREADS, *operands[:7], options, flat=True, overlap=True)


def _multiply_columns(kernel, operands):
    a, b, bias, c, M, N, K, *_, options = operands
    n_tiles = math.ceil(N / N_THREADS)
    wanted = min(ENOUGH_BLOCKS * chip_of(c).multiprocessors // n_tiles, K // LEAST_LENGTH)
    length = max(1, math.ceil(K / max(1, wanted)))
    n_parts = max(1, math.ceil(K / length))
    partial = arrays.empty((n_parts, M, N), like=c, dtype="float32")
    launch(
        kernel, n_tiles * n_parts, N_THREADS, a, b, partial, M, N, K, length, flat=True,
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
        for few, (*whole, columns) in KERNELS.items():
            for name, kernel in zip(("rows", "outer"), whole, strict=True):
                yield f"thin {name} {few} {dtype}", kernel, [(dtype, 1)] * 4 + ["int64"] * 4
            types = [(dtype, 1), (dtype, 1), ("float32", 1)] + ["int64"] * 4
            yield f"thin columns {few} {dtype}", columns, types
