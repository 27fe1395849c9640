"""Rows that begin on 16-byte boundaries: copies of operands that have others.

`wgmma` takes tiles that came 16 bytes at a time. Beside the products of a row, its copy is little.
"""

from course_lib import cuda
from course_lib.runtime.intrinsics import load, store

N_WARPS = 8  # rows of a block


@cuda.jit
def copy_rows_kernel(x, y, n_heads, T, n_rows, n, x_at, y_at):
    """y = x, n elements of each row; a warp has one.

    x, y        float16 or bfloat16, flat; x_at, y_at  `problem.Place`
    n_heads, T  heads of a batch, rows of a head; n_rows of all
    """
    row = cuda.blockIdx.x * N_WARPS + cuda.threadIdx.x // 32
    if row < n_rows:
        i, rest = row % T, row // T
        h, b = rest % n_heads, rest // n_heads
        source = b * x_at.batch + h * x_at.head + i * x_at.row
        target = b * y_at.batch + h * y_at.head + i * y_at.row
        for e in range(cuda.threadIdx.x % 32, n, 32):
            store(y, target + e, load(x, source + e))
