"""What the parts of a channel found, put together: 64 rows of threads for 8 channels a block.

`partial` holds number k of channel c in part p at (k·n_parts + p)·C + c. Parts are taken in a fixed
order, so two runs agree bit for bit. A row of threads reads every 64th part, several at once, and
a warp then puts the rows of one channel together.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.statistics import keep_statistics, shares_of_gradient
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.moments import merged, warp_moments
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
    warp_sum,
)

CHANNELS, ROWS = 8, 64
PADDED = CHANNELS + 1  # so that neither rows nor columns meet in a bank
BLOCK_SIZE = CHANNELS * ROWS
AT_ONCE = 8  # parts that a thread loads before it uses the first


@cuda.jit
def statistics_merge_kernel(
    partial, C, n_parts, means, rstds, running_mean, running_var, tracked, momentum, eps
):
    shared = cuda.shared.array((3, ROWS, PADDED), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    row, col = cuda.threadIdx.x // CHANNELS, cuda.threadIdx.x % CHANNELS
    c = cuda.blockIdx.x * CHANNELS + col
    count = mean = m2 = ZERO
    if c < C:
        count, mean, m2 = parts_moments(partial, c, C, n_parts, row)
    shared[0, row, col], shared[1, row, col], shared[2, row, col] = count, mean, m2
    cuda.syncthreads()
    warp_id, lane_id = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    c = cuda.blockIdx.x * CHANNELS + warp_id
    if warp_id >= CHANNELS or c >= C:
        return
    count = mean = m2 = ZERO
    for row in range(lane_id, ROWS, 32):
        count, mean, m2 = merged(
            count, mean, m2, shared[0, row, warp_id], shared[1, row, warp_id],
            shared[2, row, warp_id],
        )  # fmt: skip
    count, mean, m2 = warp_moments(count, mean, m2)
    if lane_id == 0:
        keep_statistics(
            c, count, mean, m2, means, rstds, running_mean, running_var, tracked, momentum, eps
        )


@cuda.jit(device=True)
def parts_moments(partial, c, C, n_parts, part):
    """The triple of every 64th part, from `part` on."""
    found = cuda.local.array((3, AT_ONCE), np.float32)
    count = mean = m2 = ZERO
    while part < n_parts:
        for u in range(AT_ONCE):
            at = min(part + u * ROWS, n_parts - 1) * C + c
            for k in range(3):
                found[k, u] = load(partial, at + k * n_parts * C)
        for u in range(AT_ONCE):
            if part + u * ROWS < n_parts:
                count, mean, m2 = merged(count, mean, m2, found[0, u], found[1, u], found[2, u])
        part += AT_ONCE * ROWS
    return count, mean, m2


@cuda.jit
def sums_merge_kernel(partial, C, n_parts, count, rstds, dweight, dbias, terms, training):
    # terms[c] is the mean of dy, terms[C + c] that of dy·(x − mean) over the variance.
    shared = cuda.shared.array((2, ROWS, PADDED), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    row, col = cuda.threadIdx.x // CHANNELS, cuda.threadIdx.x % CHANNELS
    c = cuda.blockIdx.x * CHANNELS + col
    total = product = ZERO
    if c < C:
        total, product = parts_sums(partial, c, C, n_parts, row)
    shared[0, row, col], shared[1, row, col] = total, product
    cuda.syncthreads()
    warp_id, lane_id = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    c = cuda.blockIdx.x * CHANNELS + warp_id
    if warp_id >= CHANNELS or c >= C:
        return
    total = product = ZERO
    for row in range(lane_id, ROWS, 32):
        total += shared[0, row, warp_id]
        product += shared[1, row, warp_id]
    total, product = warp_sum(total), warp_sum(product)
    if lane_id == 0:
        rstd = load(rstds, c)
        store(dweight, c, product * rstd)
        store(dbias, c, total)
        terms[c], terms[C + c] = shares_of_gradient(total, product, rstd, count, training)


@cuda.jit(device=True)
def parts_sums(partial, c, C, n_parts, part):
    """Both sums over every 64th part, from `part` on."""
    found = cuda.local.array((2, AT_ONCE), np.float32)
    total = product = ZERO
    while part < n_parts:
        for u in range(AT_ONCE):
            at = min(part + u * ROWS, n_parts - 1) * C + c
            found[0, u], found[1, u] = load(partial, at), load(partial, at + n_parts * C)
        for u in range(AT_ONCE):
            if part + u * ROWS < n_parts:
                total += found[0, u]
                product += found[1, u]
        part += AT_ONCE * ROWS
    return total, product
