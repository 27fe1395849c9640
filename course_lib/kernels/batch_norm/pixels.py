"""The kernels of the rung `vectorised` for channels-last images: rows of neighbouring channels.

A thread takes 16 bytes of a row, the same in every row that it reads: `n_columns` threads lie side
by side, 256 / n_columns below one another. Images and rows begin on 16-byte boundaries: where C
channels are no whole vectors, a row is several pixels, `wide` numbers, the least common multiple of
C and a vector. The last row may then end early, and the elements behind its last whole vector, of
which there are fewer than make one, go one by one.

Block (tile, part) takes the rows from part·length on; `merging` puts the parts together, wide / C
parts of each channel in a row, and one of the elements that go one by one. The second pass goes
through the parts backwards, because what the first one read last is still in the L2.

As in `planes`, all loads of a turn are issued before the first is used.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.planes import ahead, load_pairs, without_relu
from course_lib.kernels.batch_norm.statistics import activated, through_statistics
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE, ZERO
from course_lib.kernels.blocks.moments import (
    affine_of,
    merged,
    recentred,
    reciprocal_deviation,
    triple_of,
    with_one,
)
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.predicated import load_vector_if

BLOCK_SIZE = 256
ROWS = 8  # in flight per thread, for the statistics
PAIRS = 4  # the same of each array, where two or three are read or written
FEW = np.float32(16)  # rows of a thread, until which the base of its sums moves to their mean


class Share(NamedTuple):
    """Images of `size` elements and C channels, and who takes what: n_rows rows of `wide` numbers,
    `length` of them a part, n_columns vectors of a row a block."""

    C: int
    size: int
    wide: int
    n_rows: int
    length: int
    n_columns: int


@cuda.jit(device=True)
def position(share, width, part):
    """(row of the block, its height, first number of a row that is this thread's, that element's
    place in the part's first row, rows of the part), in 32 bits all but the place. No rows, where
    that number is beyond a row; one less, where the last row ends before the thread's vector."""
    row, col = cuda.threadIdx.x // share.n_columns, cuda.threadIdx.x % share.n_columns
    c = (cuda.blockIdx.x * share.n_columns + col) * width
    begin = part * share.length
    n = min(share.length, share.n_rows - begin) if c < share.wide else 0
    first = begin * share.wide + c
    if n > 0 and first + (n - 1) * share.wide + width > share.size:
        n -= 1
    return np.int32(row), np.int32(BLOCK_SIZE // share.n_columns), c, first, np.int32(n)


@cuda.jit(device=True)
def place(first, row, wide):
    """Where this thread's numbers lie in this row of the part."""
    return first + np.int64(row) * np.int64(np.int32(wide))


@cuda.jit(device=True)
def channel_of(c, C):
    """The channel of number c of a row."""
    return np.int32(np.uint32(c) % np.uint32(C))


@cuda.jit(device=True)
def after(channel, C):
    """The channel of the next number."""
    return np.int32(channel + 1) if channel + 1 < C else np.int32(0)


@cuda.jit(device=True)
def rest(share, width, part):
    """(first, number) of the elements that go one by one, in block (0, 0); none in another."""
    n = share.size & (width - 1) if part == 0 and cuda.blockIdx.x == 0 else np.int64(0)
    return share.size - n, n


@cuda.jit(device=True)
def stride_of(share, width):
    """Numbers in `partial` from one of a triple to the next."""
    return cuda.gridDim.y * share.wide + (share.C if share.size & (width - 1) else 0)


@cuda.jit
def pixel_statistics_kernel(x, partial, share):
    """The triples of each part's channels.

    x        images, flat
    partial  (3, parts of a channel, C) float32: see `merging`
    share    `Share`
    """
    counts = cuda.shared.array(BLOCK_SIZE, np.float32)
    shared = cuda.shared.array((2, MAX_WIDTH, BLOCK_SIZE), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part = vector_width(x), cuda.blockIdx.y
    sums = cuda.local.array((2, MAX_WIDTH), np.float32)
    base = cuda.local.array(MAX_WIDTH, np.float32)
    for k in range(width):
        sums[0, k] = sums[1, k] = base[k] = ZERO
    row, height, c, first, n = position(share, width, part)
    if row < n:
        load_vector(base, x, place(first, row, share.wide))
    count = row_moments(x, first, row, height, n, share.wide, base, sums)
    for k in range(width):
        _, shared[0, k, cuda.threadIdx.x], shared[1, k, cuda.threadIdx.x] = triple_of(
            count, base[k], sums[0, k], sums[1, k]
        )
    counts[cuda.threadIdx.x] = count
    merge_rows(counts, shared, row, height, share.n_columns, width)
    stride = stride_of(share, width)
    if row == 0 and c < share.wide:
        for k in range(width):
            at = part * share.wide + c + k
            partial[at] = counts[cuda.threadIdx.x]
            partial[at + stride] = shared[0, k, cuda.threadIdx.x]
            partial[at + 2 * stride] = shared[1, k, cuda.threadIdx.x]
    first, n = rest(share, width, part)
    c = np.int64(cuda.threadIdx.x)
    while n > 0 and c < share.C:
        count = mean = m2 = ZERO
        for i in range(first, share.size):
            if i % share.C == c:
                count, mean, m2 = with_one(count, mean, m2, load(x, i))
        at = cuda.gridDim.y * share.wide + c
        partial[at], partial[at + stride], partial[at + 2 * stride] = count, mean, m2
        c += BLOCK_SIZE


@cuda.jit(device=True)
def row_moments(x, first, row, height, n, wide, base, sums):
    """How many rows this thread has; the sums of x − base and of its square, into `sums`."""
    width, count = vector_width(x), ZERO
    values = cuda.local.array((ROWS, MAX_WIDTH), np.float32)
    while row < n:
        for u in range(ROWS):
            mine = ahead(row, u, height)
            load_vector_if(values[u], x, place(first, mine, wide), mine < n)
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
    x, y, share, weight, bias, has_weight, has_bias, relu, means, spreads, is_variance, eps
):
    """y of x, its channels' means, and their deviations' reciprocals or their variances."""
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part = vector_width(x), cuda.gridDim.y - 1 - cuda.blockIdx.y
    values = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    # Of each channel: mean, scale, shift.
    of = cuda.local.array((3, MAX_WIDTH), np.float32)
    row, height, c, first, n = position(share, width, part)
    if row < n:
        channel = channel_of(c, share.C)
        for k in range(width):
            of[0, k], of[1, k], of[2, k] = channel_affine(
                channel, weight, bias, has_weight, has_bias, means, spreads, is_variance, eps
            )
            channel = after(channel, share.C)
    while row < n:
        for u in range(PAIRS):
            mine = ahead(row, u, height)
            load_vector_if(values[u], x, place(first, mine, share.wide), mine < n)
        for u in range(PAIRS):
            if ahead(row, u, height) < n:
                for k in range(width):
                    values[u, k] = (values[u, k] - of[0, k]) * of[1, k] + of[2, k]
                if relu:
                    for k in range(width):
                        values[u, k] = activated(values[u, k], True)
                store_vector(y, place(first, ahead(row, u, height), share.wide), values[u])
        row = ahead(row, PAIRS, height)
    first, n = rest(share, width, part)
    if cuda.threadIdx.x < n:
        i = first + cuda.threadIdx.x
        mean, scale, shift = channel_affine(
            i % share.C, weight, bias, has_weight, has_bias, means, spreads, is_variance, eps
        )
        store(y, i, activated((load(x, i) - mean) * scale + shift, relu))


@cuda.jit(device=True)
def channel_affine(c, weight, bias, has_weight, has_bias, means, spreads, is_variance, eps):
    """(mean, scale, shift) of a channel: y = (x − mean)·scale + shift."""
    rstd = load(spreads, c)
    if is_variance:
        rstd = reciprocal_deviation(rstd, eps)
    scale, shift = affine_of(c, weight, bias, has_weight, has_bias)
    return load(means, c), scale * rstd, shift


@cuda.jit
def pixel_sums_kernel(dy, x, y, partial, share, relu, means):
    """Σdy and Σdy·(x − mean) of each part's channels; arguments as of `pixel_statistics_kernel`."""
    shared = cuda.shared.array((2, MAX_WIDTH, BLOCK_SIZE), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part, tid = vector_width(x), cuda.blockIdx.y, cuda.threadIdx.x
    mean = cuda.local.array(MAX_WIDTH, np.float32)
    sums = cuda.local.array((2, MAX_WIDTH), np.float32)
    row, height, c, first, n = position(share, width, part)
    channel = channel_of(c, share.C)
    for k in range(width):
        sums[0, k] = sums[1, k] = ZERO
        mean[k] = load(means, channel)
        channel = after(channel, share.C)
    row_sums(dy, x, y, first, row, height, n, share.wide, relu, mean, sums)
    for k in range(width):
        shared[0, k, tid], shared[1, k, tid] = sums[0, k], sums[1, k]
    add_rows(shared, row, height, share.n_columns, width)
    stride = stride_of(share, width)
    if row == 0 and c < share.wide:
        for k in range(width):
            at = part * share.wide + c + k
            partial[at], partial[at + stride] = shared[0, k, tid], shared[1, k, tid]
    first, n = rest(share, width, part)
    c = np.int64(tid)
    while n > 0 and c < share.C:
        total = product = ZERO
        for i in range(first, share.size):
            if i % share.C == c:
                g = without_relu(load(dy, i), load(y, i), relu)
                total += g
                product += g * (load(x, i) - load(means, c))
        at = cuda.gridDim.y * share.wide + c
        partial[at], partial[at + stride] = total, product
        c += BLOCK_SIZE


@cuda.jit(device=True)
def row_sums(dy, x, y, first, row, height, n, wide, relu, mean, sums):
    """Σdy and Σdy·(x − mean) of this thread's rows, into `sums`."""
    width = vector_width(x)
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    while row < n:
        pitch = np.int64(np.int32(wide))
        load_pairs(dys, xs, ys, dy, x, y, first, row, height, n, pitch, relu)
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
    dy, x, y, dx, share, weight, has_weight, relu, means, rstds, terms
):
    """dx of dy, x, with ReLU y, and the `terms` of `merging.sums_merge_kernel`."""
    allow_next_kernel()
    wait_for_previous_kernel()
    width, part = vector_width(x), cuda.gridDim.y - 1 - cuda.blockIdx.y
    # Of each channel: mean, factor, slope, shift, with dx = factor·dy + (x − mean)·slope + shift.
    of = cuda.local.array((4, MAX_WIDTH), np.float32)
    row, height, c, first, n = position(share, width, part)
    if row < n:
        channel = channel_of(c, share.C)
        for k in range(width):
            of[0, k], of[1, k], of[2, k], of[3, k] = channel_factors(
                channel, share.C, weight, has_weight, means, rstds, terms
            )
            channel = after(channel, share.C)
    row_gradient(dy, x, y, dx, first, row, height, n, share.wide, relu, of)
    first, n = rest(share, width, part)
    if cuda.threadIdx.x < n:
        i = first + cuda.threadIdx.x
        mean, factor, slope, shift = channel_factors(
            i % share.C, share.C, weight, has_weight, means, rstds, terms
        )
        g = without_relu(load(dy, i), load(y, i), relu)
        store(dx, i, g * factor + (through_statistics(load(x, i), mean, slope) + shift))


@cuda.jit(device=True)
def channel_factors(c, C, weight, has_weight, means, rstds, terms):
    """(mean, factor, slope, shift) of a channel."""
    factor = load(rstds, c) * (load(weight, c) if has_weight else ONE)
    return load(means, c), factor, -factor * load(terms, C + c), -factor * load(terms, c)


@cuda.jit(device=True)
def row_gradient(dy, x, y, dx, first, row, height, n, wide, relu, of):
    width = vector_width(x)
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    while row < n:
        pitch = np.int64(np.int32(wide))
        load_pairs(dys, xs, ys, dy, x, y, first, row, height, n, pitch, relu)
        for u in range(PAIRS):
            if ahead(row, u, height) < n:
                if relu:
                    for k in range(width):
                        dys[u, k] = without_relu(dys[u, k], ys[u, k], True)
                for k in range(width):
                    found = through_statistics(xs[u, k], of[0, k], of[2, k])
                    xs[u, k] = dys[u, k] * of[1, k] + (found + of[3, k])
                store_vector(dx, place(first, ahead(row, u, height), wide), xs[u])
        row = ahead(row, PAIRS, height)
