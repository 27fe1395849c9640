"""The kernels of the rung `vectorised` for channels-last images: rows of C neighbouring channels.

A thread takes 16 bytes of channels, the same in every row that it reads: `n_columns` threads lie
side by side, 256 / n_columns below one another. Every row must begin on a 16-byte boundary. Block
(part, tile) takes the rows from part·length on; `merging` puts the parts together, and the second
pass goes through them backwards, because what the first one read last is still in the L2.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.moments import (
    ONE,
    ZERO,
    activated,
    affine_of,
    merged,
    reciprocal_deviation,
)
from course_lib.kernels.batch_norm.planes import MAX_WIDTH, PAIRS, UNROLL, without_relu
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 256


@cuda.jit(device=True)
def position(n_columns, width, C, length, n_rows, part):
    """(row of the block, its height, first channel, first row, end) of this thread; or an empty
    range of rows, where its channels are beyond the last."""
    height = BLOCK_SIZE // n_columns
    row, col = cuda.threadIdx.x // n_columns, cuda.threadIdx.x % n_columns
    c = (cuda.blockIdx.y * n_columns + col) * width
    begin = part * length + row
    end = min((part + 1) * length, n_rows) if c < C else begin
    return row, height, c, begin, end


@cuda.jit(device=True)
def batch_moments(values, n_values, width, count, means, m2s):
    """The triples of `width` channels with `n_values` more rows each. Returns the new count."""
    n = np.float32(n_values)
    for k in range(width):
        base = values[0, k]
        total = squares = ZERO
        for u in range(n_values):
            values[u, k] -= base
            total += values[u, k]
        own = total * (ONE / n)
        for u in range(n_values):
            squares += (values[u, k] - own) * (values[u, k] - own)
        _, means[k], m2s[k] = merged(count, means[k], m2s[k], n, base + own, squares)
    return count + n


@cuda.jit
def pixel_statistics_kernel(x, partial, C, n_rows, length, n_columns):
    counts = cuda.shared.array(BLOCK_SIZE, np.float32)
    shared = cuda.shared.array((2, MAX_WIDTH, BLOCK_SIZE), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part = vector_width(x), cuda.blockIdx.x
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    means = cuda.local.array(MAX_WIDTH, np.float32)
    m2s = cuda.local.array(MAX_WIDTH, np.float32)
    for k in range(width):
        means[k] = m2s[k] = ZERO
    row, height, c, i, end = position(n_columns, width, C, length, n_rows, part)
    count = ZERO
    while i + (UNROLL - 1) * height < end:
        for u in range(UNROLL):
            load_vector(values[u], x, (i + u * height) * C + c)
        count = batch_moments(values, UNROLL, width, count, means, m2s)
        i += UNROLL * height
    while i < end:
        load_vector(values[0], x, i * C + c)
        count = batch_moments(values, 1, width, count, means, m2s)
        i += height
    merge_rows(counts, shared, row, height, n_columns, width, count, means, m2s)
    if row == 0 and c < C:
        for k in range(width):
            at = part * C + c + k
            partial[at] = counts[cuda.threadIdx.x]
            partial[at + cuda.gridDim.x * C] = shared[0, k, cuda.threadIdx.x]
            partial[at + 2 * cuda.gridDim.x * C] = shared[1, k, cuda.threadIdx.x]


@cuda.jit(device=True)
def merge_rows(counts, shared, row, height, n_columns, width, count, means, m2s):
    """The triples of a column's threads as one, in shared memory, at the thread of row 0."""
    tid = cuda.threadIdx.x
    counts[tid] = count
    for k in range(width):
        shared[0, k, tid], shared[1, k, tid] = means[k], m2s[k]
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
    width, part = vector_width(x), cuda.gridDim.x - 1 - cuda.blockIdx.x
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    mean = cuda.local.array(MAX_WIDTH, np.float32)
    scale = cuda.local.array(MAX_WIDTH, np.float32)
    shift = cuda.local.array(MAX_WIDTH, np.float32)
    row, height, c, begin, end = position(n_columns, width, C, length, n_rows, part)
    if c < C:
        for k in range(width):
            mean[k], rstd = load(means, c + k), load(spreads, c + k)
            if is_variance:
                rstd = reciprocal_deviation(rstd, eps)
            scale[k], shift[k] = affine_of(c + k, weight, bias, has_weight, has_bias)
            scale[k] *= rstd
    i = begin
    while i < end:
        for u in range(UNROLL):
            if i + u * height < end:
                load_vector(values[u], x, (i + u * height) * C + c)
        for u in range(UNROLL):
            if i + u * height < end:
                for k in range(width):
                    value = (values[u, k] - mean[k]) * scale[k] + shift[k]
                    values[u, k] = activated(value, relu)
                store_vector(y, (i + u * height) * C + c, values[u])
        i += UNROLL * height


@cuda.jit(device=True)
def load_pair(dys, xs, ys, dy, x, y, at, relu):
    load_vector(dys, dy, at)
    load_vector(xs, x, at)
    if relu:
        load_vector(ys, y, at)


@cuda.jit
def pixel_sums_kernel(dy, x, y, partial, C, n_rows, length, n_columns, relu, means):
    shared = cuda.shared.array((2, MAX_WIDTH, BLOCK_SIZE), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part, tid = vector_width(x), cuda.blockIdx.x, cuda.threadIdx.x
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    mean = cuda.local.array(MAX_WIDTH, np.float32)
    totals = cuda.local.array((2, MAX_WIDTH), np.float32)
    row, height, c, begin, end = position(n_columns, width, C, length, n_rows, part)
    for k in range(width):
        totals[0, k] = totals[1, k] = ZERO
        mean[k] = means[c + k] if c < C else ZERO
    i = begin
    while i < end:
        for u in range(PAIRS):
            if i + u * height < end:
                load_pair(dys[u], xs[u], ys[u], dy, x, y, (i + u * height) * C + c, relu)
        for u in range(PAIRS):
            if i + u * height < end:
                for k in range(width):
                    value = without_relu(dys[u, k], ys[u, k] if relu else ONE, relu)
                    totals[0, k] += value
                    totals[1, k] += value * (xs[u, k] - mean[k])
        i += PAIRS * height
    for k in range(width):
        shared[0, k, tid], shared[1, k, tid] = totals[0, k], totals[1, k]
    add_rows(shared, row, height, n_columns, width)
    if row == 0 and c < C:
        for k in range(width):
            partial[part * C + c + k] = shared[0, k, tid]
            partial[(cuda.gridDim.x + part) * C + c + k] = shared[1, k, tid]


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
    width, part = vector_width(x), cuda.gridDim.x - 1 - cuda.blockIdx.x
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    # Of each channel: mean, factor, mean of dy, slope.
    of = cuda.local.array((4, MAX_WIDTH), np.float32)
    row, height, c, begin, end = position(n_columns, width, C, length, n_rows, part)
    if c < C:
        for k in range(width):
            of[0, k] = means[c + k]
            of[1, k] = rstds[c + k] * (load(weight, c + k) if has_weight else ONE)
            of[2, k], of[3, k] = terms[c + k], terms[C + c + k]
    i = begin
    while i < end:
        for u in range(PAIRS):
            if i + u * height < end:
                load_pair(dys[u], xs[u], ys[u], dy, x, y, (i + u * height) * C + c, relu)
        for u in range(PAIRS):
            if i + u * height < end:
                for k in range(width):
                    value = without_relu(dys[u, k], ys[u, k] if relu else ONE, relu)
                    value -= of[2, k] + (xs[u, k] - of[0, k]) * of[3, k]
                    xs[u, k] = of[1, k] * value
                store_vector(dx, (i + u * height) * C + c, xs[u])
        i += PAIRS * height
