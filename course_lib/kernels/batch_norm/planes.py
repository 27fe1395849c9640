"""Contiguous images: what threads do with a channel's planes, 16 bytes at a time.

A channel's elements are N planes of P pixels, counted through: element e is pixel e % P of image
e // P. A block takes the elements of a *part*; `team` neighbouring threads work on one plane, and
each takes every `team`-th vector. The vectors begin at the plane's first 16-byte boundary; `offset`
counts the elements from the last boundary to array[0], alike in all arrays, or is -1 where they
differ, and then every element goes by itself.

Loops are written with `while`, because a `range` whose step is known at run time alone begins with
a division.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.moments import ONE, ZERO, activated, merged, with_one
from course_lib.runtime.intrinsics import load, load_vector, store, store_vector, vector_width

MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
UNROLL = 4  # vectors in flight per thread, of one array
PAIRS = 2  # the same where two or three arrays are read


@cuda.jit(device=True)
def vectors_of(x, start, stop, offset):
    """(first element of the first vector of x[start:stop], how many vectors)."""
    width = vector_width(x)
    first = stop if offset < 0 else min(start + (-(start + offset) & (width - 1)), stop)
    return first, (stop - first) // width


@cuda.jit(device=True)
def vector_moments(values, n_vectors, width, count, mean, m2):
    """The triple with all elements of some vectors: their own mean first, then one merger.

    Their mean is found by way of the distance from one of them, whose rounding is finer.
    """
    n = np.float32(n_vectors * width)
    base = values[0, 0]
    total = squares = ZERO
    for u in range(n_vectors):
        for k in range(width):
            values[u, k] -= base
            total += values[u, k]
    own = total * (ONE / n)
    for u in range(n_vectors):
        for k in range(width):
            squares += (values[u, k] - own) * (values[u, k] - own)
    return merged(count, mean, m2, n, base + own, squares)


@cuda.jit(device=True)
def plane_moments(x, start, stop, offset, rank, team, count, mean, m2):
    """The triple with this thread's share of x[start:stop]."""
    width = vector_width(x)
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    first, n_vectors = vectors_of(x, start, stop, offset)
    vector = rank
    while vector + (UNROLL - 1) * team < n_vectors:
        for u in range(UNROLL):
            load_vector(values[u], x, first + (vector + u * team) * width)
        count, mean, m2 = vector_moments(values, UNROLL, width, count, mean, m2)
        vector += UNROLL * team
    while vector < n_vectors:
        load_vector(values[0], x, first + vector * width)
        count, mean, m2 = vector_moments(values, 1, width, count, mean, m2)
        vector += team
    i = start + rank
    while i < first:
        count, mean, m2 = with_one(count, mean, m2, load(x, i))
        i += team
    i = first + n_vectors * width + rank
    while i < stop:
        count, mean, m2 = with_one(count, mean, m2, load(x, i))
        i += team
    return count, mean, m2


@cuda.jit(device=True)
def part_moments(x, c, C, P, begin, end, team, offset):
    """The triple of this thread's share of elements begin … end - 1 of channel c."""
    rank, n_teams = cuda.threadIdx.x % team, cuda.blockDim.x // team
    count = mean = m2 = ZERO
    n = begin // P + cuda.threadIdx.x // team
    while n * P < end:
        start = (n * C + c) * P
        count, mean, m2 = plane_moments(
            x, start + max(begin - n * P, 0), start + min(end - n * P, P), offset, rank, team,
            count, mean, m2,
        )  # fmt: skip
        n += n_teams
    return count, mean, m2


@cuda.jit(device=True)
def plane_affine(x, y, start, stop, offset, rank, team, mean, scale, shift, relu):
    """y = (x − mean)·scale + shift, for this thread's share of [start, stop)."""
    width = vector_width(x)
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    first, n_vectors = vectors_of(x, start, stop, offset)
    vector = rank
    while vector < n_vectors:
        for u in range(UNROLL):
            if vector + u * team < n_vectors:
                load_vector(values[u], x, first + (vector + u * team) * width)
        for u in range(UNROLL):
            if vector + u * team < n_vectors:
                for k in range(width):
                    values[u, k] = activated((values[u, k] - mean) * scale + shift, relu)
                store_vector(y, first + (vector + u * team) * width, values[u])
        vector += UNROLL * team
    i = start + rank
    while i < first:
        store(y, i, activated((load(x, i) - mean) * scale + shift, relu))
        i += team
    i = first + n_vectors * width + rank
    while i < stop:
        store(y, i, activated((load(x, i) - mean) * scale + shift, relu))
        i += team


@cuda.jit(device=True)
def part_affine(x, y, c, C, P, begin, end, team, offset, mean, scale, shift, relu):
    rank, n_teams = cuda.threadIdx.x % team, cuda.blockDim.x // team
    n = begin // P + cuda.threadIdx.x // team
    while n * P < end:
        start = (n * C + c) * P
        plane_affine(
            x, y, start + max(begin - n * P, 0), start + min(end - n * P, P), offset, rank, team,
            mean, scale, shift, relu,
        )  # fmt: skip
        n += n_teams


@cuda.jit(device=True)
def without_relu(dy, y, relu):
    """dy, or 0 where ReLU's output y is 0."""
    return ZERO if relu and y <= ZERO else dy


@cuda.jit(device=True)
def plane_sums(dy, x, y, start, stop, offset, rank, team, mean, relu, total, product):
    """Σdy and Σdy·(x − mean) with this thread's share of [start, stop)."""
    width = vector_width(x)
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    first, n_vectors = vectors_of(x, start, stop, offset)
    vector = rank
    while vector < n_vectors:
        for u in range(PAIRS):
            if vector + u * team < n_vectors:
                at = first + (vector + u * team) * width
                load_vector(dys[u], dy, at)
                load_vector(xs[u], x, at)
                if relu:
                    load_vector(ys[u], y, at)
        for u in range(PAIRS):
            if vector + u * team < n_vectors:
                for k in range(width):
                    value = without_relu(dys[u, k], ys[u, k] if relu else ONE, relu)
                    total += value
                    product += value * (xs[u, k] - mean)
        vector += PAIRS * team
    total, product = scalar_sums(dy, x, y, start + rank, first, team, mean, relu, total, product)
    return scalar_sums(
        dy, x, y, first + n_vectors * width + rank, stop, team, mean, relu, total, product
    )


@cuda.jit(device=True)
def scalar_sums(dy, x, y, start, stop, step, mean, relu, total, product):
    i = start
    while i < stop:
        value = without_relu(load(dy, i), load(y, i) if relu else ONE, relu)
        total += value
        product += value * (load(x, i) - mean)
        i += step
    return total, product


@cuda.jit(device=True)
def part_sums(dy, x, y, c, C, P, begin, end, team, offset, mean, relu):
    rank, n_teams = cuda.threadIdx.x % team, cuda.blockDim.x // team
    total = product = ZERO
    n = begin // P + cuda.threadIdx.x // team
    while n * P < end:
        start = (n * C + c) * P
        total, product = plane_sums(
            dy, x, y, start + max(begin - n * P, 0), start + min(end - n * P, P), offset, rank,
            team, mean, relu, total, product,
        )  # fmt: skip
        n += n_teams
    return total, product


@cuda.jit(device=True)
def plane_gradient(
    dy, x, y, dx, start, stop, offset, rank, team, mean, factor, mean_dy, slope, relu
):
    """dx = factor·(dy − mean_dy − (x − mean)·slope) for this thread's share of [start, stop)."""
    width = vector_width(x)
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    first, n_vectors = vectors_of(x, start, stop, offset)
    vector = rank
    while vector < n_vectors:
        for u in range(PAIRS):
            if vector + u * team < n_vectors:
                at = first + (vector + u * team) * width
                load_vector(dys[u], dy, at)
                load_vector(xs[u], x, at)
                if relu:
                    load_vector(ys[u], y, at)
        for u in range(PAIRS):
            if vector + u * team < n_vectors:
                for k in range(width):
                    value = without_relu(dys[u, k], ys[u, k] if relu else ONE, relu)
                    xs[u, k] = factor * (value - mean_dy - (xs[u, k] - mean) * slope)
                store_vector(dx, first + (vector + u * team) * width, xs[u])
        vector += PAIRS * team
    i = start + rank
    while i < first:
        scalar_gradient(dy, x, y, dx, i, mean, factor, mean_dy, slope, relu)
        i += team
    i = first + n_vectors * width + rank
    while i < stop:
        scalar_gradient(dy, x, y, dx, i, mean, factor, mean_dy, slope, relu)
        i += team


@cuda.jit(device=True)
def scalar_gradient(dy, x, y, dx, i, mean, factor, mean_dy, slope, relu):
    value = without_relu(load(dy, i), load(y, i) if relu else ONE, relu)
    store(dx, i, factor * (value - mean_dy - (load(x, i) - mean) * slope))


@cuda.jit(device=True)
def part_gradient(
    dy, x, y, dx, c, C, P, begin, end, team, offset, mean, factor, mean_dy, slope, relu
):
    rank, n_teams = cuda.threadIdx.x % team, cuda.blockDim.x // team
    n = begin // P + cuda.threadIdx.x // team
    while n * P < end:
        start = (n * C + c) * P
        plane_gradient(
            dy, x, y, dx, start + max(begin - n * P, 0), start + min(end - n * P, P), offset, rank,
            team, mean, factor, mean_dy, slope, relu,
        )  # fmt: skip
        n += n_teams
