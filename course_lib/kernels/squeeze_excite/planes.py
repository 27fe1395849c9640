"""How a block walks its part of a contiguous image: the planes of some channels, one run of memory.

16 bytes at a time, wherever the planes begin: a vector may belong to the end of one and the start
of the next. `offset` counts the elements from the last 16-byte boundary to an array's first.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import MAX_WIDTH, team_sum
from course_lib.kernels.squeeze_excite.dense import quotient
from course_lib.kernels.squeeze_excite.formulas import ZERO
from course_lib.runtime.intrinsics import (
    load,
    load_vector,
    store,
    vector_width,
    warp_sum,
)
from course_lib.runtime.streaming import load_vector_once, store_vector_once

WHOLE_BLOCK = 0  # as `team`: all threads of the block sum a plane together
UNROLL = 4  # vectors in flight per thread and array
DOT_UNROLL = 2
IN_FLIGHT, DOT_IN_FLIGHT = 8, 4  # where planes are short


@cuda.jit(device=True)
def block_total(value, sums):
    """The sum of `value` over the block, in its first thread."""
    tid = cuda.threadIdx.x
    value = warp_sum(value)
    cuda.syncthreads()  # what was there before may still be read
    if tid % 32 == 0:
        sums[tid // 32] = value
    cuda.syncthreads()
    if tid == 0:
        for other in range(1, cuda.blockDim.x // 32):
            value += sums[other]
    return value


@cuda.jit(device=True)
def place_in_teams(team):
    """(which team of threads this one is in, its rank there, how many teams); a power of two."""
    tid, power = np.int64(cuda.threadIdx.x), np.int64(cuda.popc(team - 1))
    return tid >> power, tid & (team - 1), np.int64(cuda.blockDim.x) >> power


def sums_of_planes(product, unroll, flight):
    """The function that sums planes: of x, or with `product` of dy·x (else `dy` is not read).

    flight  vectors in flight where planes are short; 0 for kernels that meet long ones
    """
    short, flight = flight > 0, max(flight, 1)

    @cuda.jit(device=True)
    def element(dy, x, i):
        return load(dy, i) * load(x, i) if product else load(x, i)

    @cuda.jit(device=True)
    def share(dy, x, start, stop, offset, vectors, rank, n_ranks):
        """This thread's share of the sum over [start, stop): it is `rank` of `n_ranks`, 8 or more.

        With `vectors` False all goes by element.
        """
        width = vector_width(x)
        a = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        b = cuda.local.array((unroll, MAX_WIDTH), np.float32)
        # The first boundary, and the last; fewer than 16 bytes lie before and behind.
        first = min(start + (-(start + offset) & (width - 1)), stop) if vectors else start
        last = first + ((stop - first) & -width) if vectors else start
        total = ZERO
        i, stride = first + rank * width, n_ranks * width
        while i < last:
            if i + (unroll - 1) * stride < last:  # a whole batch of loads: one test for all
                for u in range(unroll):
                    load_vector(a[u], x, i + u * stride)
                    if product:
                        load_vector(b[u], dy, i + u * stride)
            else:
                for u in range(unroll):
                    for k in range(width):
                        a[u, k] = ZERO
                        b[u, k] = ZERO
                    if i + u * stride < last:
                        load_vector(a[u], x, i + u * stride)
                        if product:
                            load_vector(b[u], dy, i + u * stride)
            for k in range(width):
                part = ZERO
                for u in range(unroll):
                    part += a[u, k] * b[u, k] if product else a[u, k]
                total += part
            i += unroll * stride
        if start + rank < first:
            total += element(dy, x, start + rank)
        i = last + rank
        while i < stop:
            total += element(dy, x, i)
            i += n_ranks
        return total

    @cuda.jit(device=True)
    def sum_whole_planes(values, dy, x, plane, n_mine, n_pixels, team):
        """As `sum_planes`, of whole planes that begin and end on 16-byte boundaries.

        A lane's vectors of one plane and those of its next planes are one sequence, of which some
        are always in flight: short planes do not wait for each other.
        """
        width = vector_width(x)
        a = cuda.local.array((flight, MAX_WIDTH), np.float32)
        b = cuda.local.array((flight, MAX_WIDTH), np.float32)
        i, rank, n_teams = place_in_teams(team)
        per_plane = quotient(n_pixels + team * width - 1, team * width)
        first, total = 0, ZERO
        summed, left = i, per_plane  # the plane that is being summed; its vectors still to come
        asked = 0  # vectors that have been asked for of plane i
        while first < n_mine:
            for u in range(flight):
                for k in range(width):
                    a[u, k] = ZERO
                    b[u, k] = ZERO
                pixel = (rank + asked * team) * width
                if i < n_mine and pixel < n_pixels:
                    load_vector(a[u], x, (plane + i) * n_pixels + pixel)
                    if product:
                        load_vector(b[u], dy, (plane + i) * n_pixels + pixel)
                asked += 1
                if asked == per_plane:
                    asked = 0
                    i += n_teams
            for u in range(flight):
                part = ZERO
                for k in range(width):
                    part += a[u, k] * b[u, k] if product else a[u, k]
                total += part
                left -= 1
                if left == 0:
                    total = team_sum(total, team)
                    if summed < n_mine and rank == 0:
                        values[summed] = total
                    first += n_teams
                    summed += n_teams
                    left, total = per_plane, ZERO
        cuda.syncthreads()

    @cuda.jit(device=True)
    def sum_planes(values, dy, x, plane, n_mine, n_pixels, low, high, offset, vectors, team, sums):
        """values[i] = Σ over pixels `low` to `high` of plane `plane` + i, for i < n_mine, shared.

        `team` lanes, 8 to 32, sum a plane, or WHOLE_BLOCK; `sums` is a shared array of 32 float32.
        """
        whole = high - low == n_pixels and n_pixels & (vector_width(x) - 1) == 0
        if short and team != WHOLE_BLOCK and whole and offset == 0 and vectors:
            sum_whole_planes(values, dy, x, plane, n_mine, n_pixels, team)
            return
        n_ranks = np.int64(cuda.blockDim.x) if team == WHOLE_BLOCK else team
        mine, rank, n_teams = place_in_teams(n_ranks)
        base = 0
        while base < n_mine:
            i, total = base + mine, ZERO
            if i < n_mine:
                start = (plane + i) * n_pixels
                total = share(dy, x, start + low, start + high, offset, vectors, rank, n_ranks)
            if team == WHOLE_BLOCK:
                total = block_total(total, sums)
            else:
                total = team_sum(total, team)
            if i < n_mine and rank == 0:
                values[i] = total
            base += n_teams
        cuda.syncthreads()

    return sum_planes


sum_planes = sums_of_planes(False, UNROLL, IN_FLIGHT)
dot_planes = sums_of_planes(True, DOT_UNROLL, DOT_IN_FLIGHT)
sum_long_planes = sums_of_planes(False, UNROLL, 0)
dot_long_planes = sums_of_planes(True, DOT_UNROLL, 0)


@cuda.jit(device=True)
def plane_of(i, n_pixels, multiplier):
    """i // n_pixels; `multiplier` is 2³² / n_pixels rounded up, and i·n_pixels below 2³².

    With a `multiplier` of 0 there is one plane.
    """
    return np.int64((np.uint64(i) * np.uint64(multiplier)) >> np.uint64(32))


def scaling(shifted):
    """The function that scales planes, and with `shifted` adds a number as well."""

    @cuda.jit(device=True)
    def scale_elements(x, y, start, first, last, factors, shifts, n_pixels, multiplier):
        i = first + cuda.threadIdx.x
        while i < last:
            plane = plane_of(i - start, n_pixels, multiplier)
            value = load(x, i) * factors[plane]
            if shifted:
                value += shifts[plane]
            store(y, i, value)

            i += cuda.blockDim.x

    @cuda.jit(device=True)
    def scale_vector(values, width, i, n_pixels, multiplier, factors, shifts):
        """16 bytes, of which the first is element `i` of the run: of one plane or of two."""
        if multiplier == 0:
            for k in range(width):
                values[k] *= factors[0]
                if shifted:
                    values[k] += shifts[0]
            return
        plane = plane_of(i, n_pixels, multiplier)
        left = (plane + 1) * n_pixels - i  # elements of the first plane, from here on
        following = plane + 1 if left < width else plane
        factor, other_factor = factors[plane], factors[following]
        for k in range(width):
            values[k] *= factor if k < left else other_factor
        if shifted:
            shift, other_shift = shifts[plane], shifts[following]
            for k in range(width):
                values[k] += shift if k < left else other_shift

    @cuda.jit(device=True)
    def scale_planes(x, y, start, stop, offset, vectors, factors, shifts, n_pixels, multiplier):
        """y = x · factor (+ shift) over [start, stop), which begins with the first plane.

        With `vectors` False all goes by element: where x and y begin at different offsets, or a
        plane is shorter than 16 bytes.
        """
        width = vector_width(x)
        first = min(start + (-(start + offset) & (width - 1)), stop) if vectors else stop
        last = first + (stop - first) // width * width
        values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        stride = cuda.blockDim.x * width
        i = first + cuda.threadIdx.x * width
        # All loads of a batch come before its stores: memory answers them together.
        while i + (UNROLL - 1) * stride < last:
            for u in range(UNROLL):
                load_vector_once(values[u], x, i + u * stride)
            for u in range(UNROLL):
                here = i + u * stride
                scale_vector(
                    values[u], width, here - start, n_pixels, multiplier, factors, shifts
                )  # fmt: skip
                store_vector_once(y, here, values[u])
            i += UNROLL * stride
        if i < last:
            for u in range(UNROLL - 1):
                if i + u * stride < last:
                    load_vector_once(values[u], x, i + u * stride)
            for u in range(UNROLL - 1):
                here = i + u * stride
                if here < last:
                    scale_vector(
                        values[u], width, here - start, n_pixels, multiplier, factors, shifts
                    )  # fmt: skip
                    store_vector_once(y, here, values[u])
        scale_elements(x, y, start, start, first, factors, shifts, n_pixels, multiplier)
        scale_elements(x, y, start, last, stop, factors, shifts, n_pixels, multiplier)

    return scale_planes


scale_planes = scaling(False)
scale_and_shift_planes = scaling(True)
