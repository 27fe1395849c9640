"""What the parts of a channel found, put together: 8 rows of threads for 32 channels a block.

`partial` holds number k of channel c in part p at (k·n_parts + p)·C + c. Parts are taken in a fixed
order, so two runs agree bit for bit.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.moments import ONE, ZERO, keep_statistics, merged
from course_lib.runtime.intrinsics import allow_next_kernel, store, wait_for_previous_kernel

CHANNELS, ROWS = 32, 8
BLOCK_SIZE = CHANNELS * ROWS


@cuda.jit
def statistics_merge_kernel(
    partial, C, n_parts, means, rstds, running_mean, running_var, tracked, momentum, eps
):
    shared = cuda.shared.array((3, ROWS, CHANNELS), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    row, col = cuda.threadIdx.x // CHANNELS, cuda.threadIdx.x % CHANNELS
    c = cuda.blockIdx.x * CHANNELS + col
    count = mean = m2 = ZERO
    if c < C:
        for part in range(row, n_parts, ROWS):
            count, mean, m2 = merged(
                count, mean, m2, partial[part * C + c], partial[(n_parts + part) * C + c],
                partial[(2 * n_parts + part) * C + c],
            )  # fmt: skip
    shared[0, row, col], shared[1, row, col], shared[2, row, col] = count, mean, m2
    cuda.syncthreads()
    if row == 0 and c < C:
        for other in range(1, ROWS):
            count, mean, m2 = merged(
                count, mean, m2, shared[0, other, col], shared[1, other, col],
                shared[2, other, col],
            )  # fmt: skip
        keep_statistics(
            c, count, mean, m2, means, rstds, running_mean, running_var, tracked, momentum, eps
        )


@cuda.jit
def sums_merge_kernel(partial, C, n_parts, count, rstds, dweight, dbias, terms, training):
    # terms[c] is the mean of dy, terms[C + c] that of dy·(x − mean) over the variance.
    shared = cuda.shared.array((2, ROWS, CHANNELS), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    row, col = cuda.threadIdx.x // CHANNELS, cuda.threadIdx.x % CHANNELS
    c = cuda.blockIdx.x * CHANNELS + col
    total = product = ZERO
    if c < C:
        for part in range(row, n_parts, ROWS):
            total += partial[part * C + c]
            product += partial[(n_parts + part) * C + c]
    shared[0, row, col], shared[1, row, col] = total, product
    cuda.syncthreads()
    if row == 0 and c < C:
        for other in range(1, ROWS):
            total += shared[0, other, col]
            product += shared[1, other, col]
        rstd = rstds[c]
        store(dweight, c, product * rstd)
        store(dbias, c, total)
        share = ONE / np.float32(count) if training else ZERO
        terms[c], terms[C + c] = total * share, product * rstd * rstd * share
