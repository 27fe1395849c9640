"""Contiguous images: what threads do with a channel's planes, 16 bytes at a time.

A channel's elements are N planes of P pixels, counted through: element e is pixel e % P of image
e // P. A block takes the elements of a *part*; `team` neighbouring threads work on one plane, and
each takes every `team`-th vector. The vectors begin at the plane's first 16-byte boundary; `offset`
counts the elements from the last boundary to array[0], alike in all arrays, or is -1 where they
differ, and then every element goes by itself.

All loads of a turn are issued before the first is used, also by a thread that has fewer vectors
left than that (`intrinsics.predicated`).

Loops are written with `while`, because a `range` whose step is known at run time alone begins with
a division.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.statistics import activated, through_statistics
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE, ZERO
from course_lib.kernels.blocks.moments import recentred, triple_of
from course_lib.runtime.intrinsics import load, store, store_vector, vector_width
from course_lib.runtime.intrinsics.predicated import load_vector_if, load_vector_once_if
from course_lib.runtime.intrinsics.streaming import store_vector_once

UNROLL = 8  # vectors in flight per thread, for the statistics
PAIRS = 4  # the same of each array, where two or three are read or written
FEW = np.float32(64)  # elements of a thread, until which the base of its sums moves to their mean


@cuda.jit(device=True)
def vectors_of(x, start, stop, offset):
    """(first element of the first vector of x[start:stop], how many vectors)."""
    width = vector_width(x)
    first = stop if offset < 0 else min(start + (-(start + offset) & (width - 1)), stop)
    return first, np.int32((stop - first) // width)


@cuda.jit(device=True)
def ahead(i, u, step):
    """i + u·step in 32 bits, of which the chip makes one instruction."""
    return np.int32(i + u * step)


@cuda.jit(device=True)
def place(first, vector, width):
    """Where this vector begins."""
    return first + np.int64(vector) * width


@cuda.jit(device=True)
def load_pairs(dys, xs, ys, dy, x, y, first, i, step, n, width, relu):
    """PAIRS vectors of dy, of x and, for ReLU, of y: number i, i + step … of the n from `first`."""
    for u in range(PAIRS):
        mine = ahead(i, u, step)
        load_vector_if(dys[u], dy, place(first, mine, width), mine < n)
        load_vector_if(xs[u], x, place(first, mine, width), mine < n)
    if relu:
        for u in range(PAIRS):
            mine = ahead(i, u, step)
            load_vector_if(ys[u], y, place(first, mine, width), mine < n)


@cuda.jit(device=True)
def plane_moments(x, start, stop, offset, rank, team, count, base, total, squares):
    """The sums of x − base and of its square with this thread's share of x[start:stop]."""
    width = vector_width(x)
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    first, n_vectors = vectors_of(x, start, stop, offset)
    vector = rank
    while vector < n_vectors:
        for u in range(UNROLL):
            mine = ahead(vector, u, team)
            load_vector_if(values[u], x, place(first, mine, width), mine < n_vectors)
        for u in range(UNROLL):
            if ahead(vector, u, team) < n_vectors:
                for k in range(width):
                    apart = values[u, k] - base
                    total += apart
                    squares += apart * apart
                count += np.float32(width)
        vector = ahead(vector, UNROLL, team)
    count, total, squares = scalar_moments(
        x, start + rank, first, team, count, base, total, squares
    )
    return scalar_moments(
        x, first + n_vectors * width + rank, stop, team, count, base, total, squares
    )


@cuda.jit(device=True)
def scalar_moments(x, start, stop, step, count, base, total, squares):
    i = start
    while i < stop:
        apart = load(x, i) - base
        total += apart
        squares += apart * apart
        count += ONE
        i += step
    return count, total, squares


@cuda.jit(device=True)
def part_moments(x, c, C, P, begin, end, team, offset):
    """The triple of this thread's share of elements begin … end - 1 of channel c."""
    rank, n_teams = np.int32(cuda.threadIdx.x % team), cuda.blockDim.x // team
    count = base = total = squares = ZERO
    n = begin // P
    if begin < end:
        base = load(x, (n * C + c) * P + begin - n * P)
    n += cuda.threadIdx.x // team
    while n * P < end:
        start = (n * C + c) * P
        count, total, squares = plane_moments(
            x, start + max(begin - n * P, 0), start + min(end - n * P, P), offset, rank, team,
            count, base, total, squares,
        )  # fmt: skip
        if count <= FEW:
            base, total, squares = recentred(count, base, total, squares)
        n += n_teams
    return triple_of(count, base, total, squares)


@cuda.jit(device=True)
def plane_affine(x, y, start, stop, offset, rank, team, mean, scale, shift, relu, once):
    """y = (x − mean)·scale + shift, for this thread's share of [start, stop).

    once  whether the L2 may forget x and y first: so that something else stays there
    """
    width = vector_width(x)
    values = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    first, n_vectors = vectors_of(x, start, stop, offset)
    vector = rank
    while vector < n_vectors:
        for u in range(PAIRS):
            mine = ahead(vector, u, team)
            if once:
                load_vector_once_if(values[u], x, place(first, mine, width), mine < n_vectors)
            else:
                load_vector_if(values[u], x, place(first, mine, width), mine < n_vectors)
        for u in range(PAIRS):
            if ahead(vector, u, team) < n_vectors:
                for k in range(width):
                    values[u, k] = (values[u, k] - mean) * scale + shift
                if relu:
                    for k in range(width):
                        values[u, k] = activated(values[u, k], True)
                at = place(first, ahead(vector, u, team), width)
                if once:
                    store_vector_once(y, at, values[u])
                else:
                    store_vector(y, at, values[u])
        vector = ahead(vector, PAIRS, team)
    scalar_affine(x, y, start + rank, first, team, mean, scale, shift, relu)
    scalar_affine(x, y, first + n_vectors * width + rank, stop, team, mean, scale, shift, relu)


@cuda.jit(device=True)
def scalar_affine(x, y, start, stop, step, mean, scale, shift, relu):
    i = start
    while i < stop:
        store(y, i, activated((load(x, i) - mean) * scale + shift, relu))
        i += step


@cuda.jit(device=True)
def part_affine(x, y, c, C, P, begin, end, team, offset, mean, scale, shift, relu, once):
    rank, n_teams = np.int32(cuda.threadIdx.x % team), cuda.blockDim.x // team
    n = begin // P + cuda.threadIdx.x // team
    while n * P < end:
        start = (n * C + c) * P
        plane_affine(
            x, y, start + max(begin - n * P, 0), start + min(end - n * P, P), offset, rank, team,
            mean, scale, shift, relu, once,
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
        load_pairs(dys, xs, ys, dy, x, y, first, vector, team, n_vectors, width, relu)
        for u in range(PAIRS):
            if ahead(vector, u, team) < n_vectors:
                if relu:
                    for k in range(width):
                        dys[u, k] = without_relu(dys[u, k], ys[u, k], True)
                for k in range(width):
                    total += dys[u, k]
                    product += dys[u, k] * (xs[u, k] - mean)
        vector = ahead(vector, PAIRS, team)
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
    rank, n_teams = np.int32(cuda.threadIdx.x % team), cuda.blockDim.x // team
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
def plane_gradient(dy, x, y, dx, start, stop, offset, rank, team, mean, factor, slope, shift, relu):
    """dx = factor·dy + (x − mean)·slope + shift for this thread's share of [start, stop)."""
    width = vector_width(x)
    dys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    xs = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    ys = cuda.local.array((PAIRS, MAX_WIDTH), np.float32)
    first, n_vectors = vectors_of(x, start, stop, offset)
    vector = rank
    while vector < n_vectors:
        load_pairs(dys, xs, ys, dy, x, y, first, vector, team, n_vectors, width, relu)
        for u in range(PAIRS):
            if ahead(vector, u, team) < n_vectors:
                if relu:
                    for k in range(width):
                        dys[u, k] = without_relu(dys[u, k], ys[u, k], True)
                for k in range(width):
                    found = through_statistics(xs[u, k], mean, slope)
                    xs[u, k] = dys[u, k] * factor + (found + shift)
                at = place(first, ahead(vector, u, team), width)
                store_vector(dx, at, xs[u])
        vector = ahead(vector, PAIRS, team)
    scalar_gradient(dy, x, y, dx, start + rank, first, team, mean, factor, slope, shift, relu)
    scalar_gradient(
        dy, x, y, dx, first + n_vectors * width + rank, stop, team, mean, factor, slope, shift,
        relu,
    )  # fmt: skip


@cuda.jit(device=True)
def scalar_gradient(dy, x, y, dx, start, stop, step, mean, factor, slope, shift, relu):
    i = start
    while i < stop:
        value = without_relu(load(dy, i), load(y, i) if relu else ONE, relu)
        found = through_statistics(load(x, i), mean, slope)
        store(dx, i, value * factor + (found + shift))
        i += step


@cuda.jit(device=True)
def part_gradient(
    dy, x, y, dx, c, C, P, begin, end, team, offset, mean, factor, mean_dy, slope, relu
):
    """dx = factor·(dy − mean_dy − (x − mean)·slope) for this thread's share of a part."""
    rank, n_teams = np.int32(cuda.threadIdx.x % team), cuda.blockDim.x // team
    n = begin // P + cuda.threadIdx.x // team
    while n * P < end:
        start = (n * C + c) * P
        plane_gradient(
            dy, x, y, dx, start + max(begin - n * P, 0), start + min(end - n * P, P), offset, rank,
            team, mean, factor, -factor * slope, -factor * mean_dy, relu,
        )  # fmt: skip
        n += n_teams
