"""Rows that begin on 16-byte boundaries: copies of 16-bit operands that have others.

`wgmma` takes tiles that came 16 bytes at a time. Beside the products of a row, its copy is little.
Zeros behind a row change no product.
"""

import math

from course_lib import cuda
from course_lib.kernels.attention.options import place_of, rows_together
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.score_mask import memory
from course_lib.kernels.operation import AUTO
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES, load, store

N_WARPS = 8  # rows of a block
WORTH = 1 << 22  # multiply-adds of a call, from which on copies cost less than they save


@cuda.jit
def copy_rows_kernel(x, y, n_heads, T, n_rows, n, n_all, x_at, y_at):
    """y = x, n elements of each row, and zeros behind them up to n_all; a warp has a row.

    x, y        float16 or bfloat16, flat; x_at, y_at  `problem.Place`
    n_heads, T  heads of a batch, rows of a head; n_rows of all
    """
    row = cuda.blockIdx.x * N_WARPS + cuda.threadIdx.x // 32
    if row < n_rows:
        i, rest = row % T, row // T
        h, b = rest % n_heads, rest // n_heads
        source = b * x_at.batch + h * x_at.head + i * x_at.row
        target = b * y_at.batch + h * y_at.head + i * y_at.row
        for e in range(cuda.threadIdx.x % 32, n_all, 32):
            store(y, target + e, load(x, source + e) if e < n else ZERO)


def copy_rows(x, y):
    """y (B, H, T, …), after rows of x were copied to it, or of the narrower of both."""
    x, (_, H, T, _) = rows_together(x), x.shape
    n_rows, n, n_all = math.prod(x.shape[:-1]), min(x.shape[-1], y.shape[-1]), y.shape[-1]
    launch(
        copy_rows_kernel, math.ceil(n_rows / N_WARPS), 32 * N_WARPS, memory(x), memory(y), H, T,
        n_rows, n, n_all, place_of(x), place_of(y),
    )  # fmt: skip
    return y


def aligned(x):
    """A copy of x with as many zeros behind each row as let rows begin on 16-byte boundaries."""
    width = VECTOR_BYTES // x.dtype.itemsize
    shape = *x.shape[:-1], math.ceil(x.shape[-1] / width) * width
    return copy_rows(x, arrays.empty(shape, like=x))


def are_worth_it(ladder, request, problem, chip):
    """Whether AUTO copies: rows are not aligned, and tensor cores would take them if they were."""
    n = request.n_heads * request.T * request.S * (problem.D + problem.E)
    narrow = problem.itemsize == 2 and not problem.is_aligned
    if not narrow or n < WORTH:
        return False
    return ladder.choose(AUTO, problem._replace(is_aligned=True), chip).rung == "tensor_core"
