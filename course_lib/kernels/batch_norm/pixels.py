"""The kernels of the rung `vectorised` for channels-last images: rows of C neighbouring channels.

A thread takes 16 bytes of channels, the same in every row that it reads: `n_columns` threads lie
side by side, 256 / n_columns below one another. Every row must begin on a 16-byte boundary. Block
(tile, part) takes the rows from part·length on; `merging` puts the parts together, and the second
pass goes through them backwards, because what the first one read last is still in the L2.

As in `planes`, all loads of a turn are issued before the first is used.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.planes import ahead, without_relu
from course_lib.kernels.batch_norm.statistics import activated, through_statistics
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE, ZERO
from course_lib.kernels.blocks.moments import (
    affine_of,
    merged,
    recentred,
    reciprocal_deviation,
    triple_of,
)
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.predicated import load_vector_if

BLOCK_SIZE = 256
ROWS = 8  # in flight per thread, for the statistics
PAIRS = 4  # the same of each array, where two or three are read or written
FEW = np.float32(16)  # rows of a thread, until which the base of its sums moves to their mean


@cuda.jit(device=True)
def position(n_columns, width, C, length, n_rows, part):
    """(row of the block, its height, first channel, that element's place in the part's first row,
    rows of the part), in 32 bits all but the place; no rows, where the channels are beyond C."""
    row, col = cuda.threadIdx.x // n_columns, cuda.threadIdx.x % n_columns
    c = (cuda.blockIdx.x * n_columns + col) * width
    begin = part * length
    n = min(length, n_rows - begin) if c < C else 0
    return np.int32(row), np.int32(BLOCK_SIZE // n_columns), c, begin * C + c, np.int32(n)


@cuda.jit(device=True)
def place(first, row, C):
    """Where this thread's channels lie in this row of the part."""
    return first + np.int64(row) * np.int64(np.int32(C))


@cuda.jit
def pixel_statistics_kernel(x, partial, C, n_rows, length, n_columns):
    counts = cuda.shared.array(BLOCK_SIZE, np.float32)
    shared = cuda.shared.array((2, MAX_WIDTH, BLOCK_SIZE), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part = vector_width(x), cuda.blockIdx.y
    sums = cuda.local.array((2, MAX_WIDTH), np.float32)
    base = cuda.local.array(MAX_WIDTH, np.float32)
    for k in range(width):
        sums[0, k] = sums[1, k] = base[k] = ZERO
    row, height, c, first, n = position(n_columns, width, C, length, n_rows, part)
    if row < n:
        load_vector(base, x, place(first, row, C))
    count = row_moments(x, first, row, height, n, C, base, sums)
    for k in range(width):
        _, shared[0, k, cuda.threadIdx.x], shared[1, k, cuda.threadIdx.x] = triple_of(
            count, base[k], sums[0, k], sums[1, k]
        )
    counts[cuda.threadIdx.x] = count
    merge_rows(counts, shared, row, height, n_columns, width)
    if row == 0 and c < C:
        for k in range(width):
            at = part * C + c + k
            partial[at] = counts[cuda.threadIdx.x]
            partial[at + cuda.gridDim.y * C] = shared[0, k, cuda.threadIdx.x]
            partial[at + 2 * cuda.gridDim.y * C] = shared[1, k, cuda.threadIdx.x]


@cuda.jit(device=True)
def row_moments(x, first, row, height, n, C, base, sums):
    """How many rows this thread has; the sums of x − base and of its square, into `sums`."""
    width, count = vector_width(x), ZERO
    values = cuda.local.array((ROWS, MAX_WIDTH), np.float32)
    while row < n:
        for u in range(ROWS):
            mine = ahead(row, u, height)
            load_vector_if(values[u], x, place(first, mine, C), mine < n)
        for u in range(ROWS):
            if ahead(row, u, height) < n:
                for k in range(width):
                    apart = values[u, k] - base[k]
                    sums[0, k] += apart
                    sums[1, k] += apart * apart
                count += ONE
        if count <= FEW:
            for k in range(width):
                base[k], sums[0, k], sums[1, k] = recentred(count, base[k], sums[0, k], sums[1, k])
        row = ahead(row, ROWS, height)
    return count


@cuda.jit(device=True)
def merge_rows(counts, shared, row, height, n_columns, width):
    """The triples of a column's threads as one, in shared memory, at the thread of row 0."""
    tid = cuda.threadIdx.x
    cuda.syncthreads()
    step = height // 2
    while step > 0:
        total = ZERO
        if row < step:
            other = tid + step * n_columns
            for k in range(width):
                total, shared[0, k, tid], shared[1, k, tid] = merged(
                    counts[tid], shared[0, k, tid], shared[1, k, tid], counts[other],
                    shared[0, k, other], shared[1, k, other],
                )  # fmt: skip
            counts[tid] = total
        cuda.syncthreads()
        step //= 2


@cuda.jit
def pixel_normalise_kernel(
    x, y, C, n_rows, length, n_columns, weight, bias, has_weight, has_bias, relu, means, spreads,
    is_variance, eps,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part = vector_width(x), cuda.gridDim.y - 1 - cuda.blockIdx.y
    values = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    # Of each channel: mean, scale, shift.
    of = cuda.local.array((3, MAX_WIDTH), np.float32)
    row, height, c, first, n = position(n_columns, width, C, length, n_rows, part)
    if row < n:
        for k in range(width):
            of[0, k], rstd = load(means, c + k), load(spreads, c + k)
            if is_variance:
                rstd = reciprocal_deviation(rstd, eps)
            of[1, k], of[2, k] = affine_of(c + k, weight, bias, has_weight, has_bias)
            of[1, k] *= rstd
    while row < n:
        for u in range(PAIRS):
            mine = ahead(row, u, height)
            load_vector_if(values[u], x, place(first, mine, C), mine < n)
        for u in range(PAIRS):
            if ahead(row, u, height) < n:
                for k in range(width):
                    values[u, k] = (values[u, k] - of[0, k]) * of[1, k] + of[2, k]
                if relu:
                    for k in range(width):
                        values[u, k] = activated(values[u, k], True)
                store_vector(y, place(first, ahead(row, u, height), C), values[u])
        row = ahead(row, PAIRS, height)


@cuda.jit
def pixel_sums_kernel(dy, x, y, partial, C, n_rows, length, n_columns, relu, means):
    shared = cuda.shared.array((2, MAX_WIDTH, BLOCK_SIZE), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part, tid = vector_width(x), cuda.blockIdx.y, cuda.threadIdx.x
    mean = cuda.local.array(MAX_WIDTH, np.float32)
    sums = cuda.local.array((2, MAX_WIDTH), np.float32)
    row, height, c, first, n = position(n_columns, width, C, length, n_rows, part)
    for k in range(width):
        sums[0, k] = sums[1, k] = ZERO
        mean[k] = load(means, c + k) if c < C else ZERO
    row_sums(dy, x, y, first, row, height, n, C, relu, mean, sums)
    for k in range(width):
        shared[0, k, tid], shared[1, k, tid] = sums[0, k], sums[1, k]
    add_rows(shared, row, height, n_columns, width)
    if row == 0 and c < C:
        for k in range(width):
            partial[part * C + c + k] = shared[0, k, tid]
            partial[(cuda.gridDim.y + part) * C + c + k] = shared[1, k, tid]


@cuda.jit(device=True)
def row_sums(dy, x, y, first, row, height, n, C, relu, mean, sums):
    """Σdy and Σdy·(x − mean) of this thread's rows, into `sums`."""
    width = vector_width(x)
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    while row < n:
        for u in range(PAIRS):
            mine = ahead(row, u, height)
            load_vector_if(dys[u], dy, place(first, mine, C), mine < n)
            load_vector_if(xs[u], x, place(first, mine, C), mine < n)
        if relu:
            for u in range(PAIRS):
                mine = ahead(row, u, height)
                load_vector_if(ys[u], y, place(first, mine, C), mine < n)
        for u in range(PAIRS):
            if ahead(row, u, height) < n:
                if relu:
                    for k in range(width):
                        dys[u, k] = without_relu(dys[u, k], ys[u, k], True)
                for k in range(width):
                    sums[0, k] += dys[u, k]
                    sums[1, k] += dys[u, k] * (xs[u, k] - mean[k])
        row = ahead(row, PAIRS, height)


@cuda.jit(device=True)
def add_rows(shared, row, height, n_columns, width):
    """The sums of a column's threads, at the thread of row 0."""
    tid = cuda.threadIdx.x
    cuda.syncthreads()
    step = height // 2
    while step > 0:
        if row < step:
            for k in range(width):
                shared[0, k, tid] += shared[0, k, tid + step * n_columns]
                shared[1, k, tid] += shared[1, k, tid + step * n_columns]
        cuda.syncthreads()
        step //= 2


@cuda.jit
def pixel_gradient_kernel(
    dy, x, y, dx, C, n_rows, length, n_columns, weight, has_weight, relu, means, rstds, terms
):
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part = vector_width(x), cuda.gridDim.y - 1 - cuda.blockIdx.y
    # Of each channel: mean, factor, slope, shift, with dx = factor·dy + (x − mean)·slope + shift.
    of = cuda.local.array((4, MAX_WIDTH), np.float32)
    row, height, c, first, n = position(n_columns, width, C, length, n_rows, part)
    if row < n:
        for k in range(width):
            of[0, k] = load(means, c + k)
            of[1, k] = load(rstds, c + k) * (load(weight, c + k) if has_weight else ONE)
            of[2, k] = -of[1, k] * load(terms, C + c + k)
            of[3, k] = -of[1, k] * load(terms, c + k)
    row_gradient(dy, x, y, dx, first, row, height, n, C, relu, of)


@cuda.jit(device=True)
def row_gradient(dy, x, y, dx, first, row, height, n, C, relu, of):
    width = vector_width(x)
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    while row < n:
        for u in range(PAIRS):
            mine = ahead(row, u, height)
            load_vector_if(dys[u], dy, place(first, mine, C), mine < n)
            load_vector_if(xs[u], x, place(first, mine, C), mine < n)
        if relu:
            for u in range(PAIRS):
                mine = ahead(row, u, height)
                load_vector_if(ys[u], y, place(first, mine, C), mine < n)
        for u in range(PAIRS):
            if ahead(row, u, height) < n:
                if relu:
                    for k in range(width):
                        dys[u, k] = without_relu(dys[u, k], ys[u, k], True)
                for k in range(width):
                    found = through_statistics(xs[u, k], of[0, k], of[2, k])
                    xs[u, k] = dys[u, k] * of[1, k] + (found + of[3, k])
                store_vector(dx, place(first, ahead(row, u, height), C), xs[u])
        row = ahead(row, PAIRS, height)
