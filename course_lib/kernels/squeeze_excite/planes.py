"""How a block walks its part of a contiguous image: the planes of some channels, one run of memory.

16 bytes at a time, wherever the planes begin: a vector may belong to the end of one and the start
of the next. `offset` counts the elements from the last 16-byte boundary to an array's first.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.rows import team_sum
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, WARP, quotient
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    load,
    load_vector,
    store,
    vector_width,
    warp_sum,
)
from course_lib.runtime.intrinsics.streaming import load_vector_once, store_vector_once

WHOLE_BLOCK = 0  # as `team`: all threads of the block sum a plane together
UNROLL = 4  # vectors in flight per thread and array
DOT_UNROLL = 2
IN_FLIGHT, DOT_IN_FLIGHT = 9, 5  # where planes are short
PARTIALS, DOT_PARTIALS = IN_FLIGHT * BLOCK_SIZE, DOT_IN_FLIGHT * BLOCK_SIZE


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
    """(sum_planes, sum_by_warps): of x, or with `product` of dy·x (else `dy` is not read).

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
    def sums_of_vectors(sums, dy, x, first, n_vectors, lane):
        """sums[u] = that of vector lane + 32·u of those from element `first` on, 0 past the last.

        Past the last one stands for it once more: no load waits for a test.
        """
        width = vector_width(x)
        a = cuda.local.array((flight, MAX_WIDTH), np.float32)
        b = cuda.local.array((flight, MAX_WIDTH), np.float32)
        for u in range(flight):
            i = first + min(lane + u * WARP, n_vectors - 1) * width
            load_vector(a[u], x, i)
            if product:
                load_vector(b[u], dy, i)
        for u in range(flight):
            total = ZERO
            for k in range(width):
                total += a[u, k] * b[u, k] if product else a[u, k]
            sums[u] = total if lane + u * WARP < n_vectors else ZERO

    @cuda.jit(device=True)
    def sum_whole_planes(values, place, dy, x, plane, n_mine, n_pixels, partials, warp, n_warps):
        """As `sum_by_warps`, of whole planes that begin and end on 16-byte boundaries.

        Each warp has a run of planes, and each lane many vectors of it in flight. Sums of vectors
        go to the warp's `partials`, where they are found again by planes.
        """
        width = vector_width(x)
        sums = cuda.local.array(flight, np.float32)
        lane = np.int64(cuda.threadIdx.x) & (WARP - 1)
        n_vectors = quotient(n_pixels, width)
        share = quotient(n_mine + n_warps - 1, n_warps)
        i, stop = warp * share, min((warp + 1) * share, n_mine)
        if 2 * n_vectors > flight * WARP:
            while i < stop:
                first, left, total = (plane + i) * n_pixels, n_vectors, ZERO
                while left > 0:
                    sums_of_vectors(sums, dy, x, first, left, lane)
                    for u in range(flight):
                        total += sums[u]
                    first += flight * WARP * width
                    left -= flight * WARP
                total = team_sum(total, WARP)
                if lane == 0:
                    values[place + i] = total
                i += 1
            return
        at_once = min(quotient(flight * WARP, n_vectors), WARP)
        n_turns = quotient(stop - i + at_once - 1, at_once) if i < stop else 1
        at_once = quotient(stop - i + n_turns - 1, n_turns) if i < stop else 1
        team = 1
        while 2 * team * at_once <= WARP:
            team *= 2
        base = np.int64(cuda.threadIdx.x) // WARP * (flight * WARP)
        mine, rank = quotient(lane, team), lane & (team - 1)
        while i < stop:
            count = min(at_once, stop - i)
            sums_of_vectors(sums, dy, x, (plane + i) * n_pixels, count * n_vectors, lane)
            for u in range(flight):
                partials[base + lane + u * WARP] = sums[u]
            cuda.syncwarp(FULL_MASK)
            total = ZERO
            if mine < count:
                j = rank
                while j < n_vectors:
                    total += partials[base + mine * n_vectors + j]
                    j += team
            total = team_sum(total, team)
            if mine < count and rank == 0:
                values[place + i + mine] = total
            cuda.syncwarp(FULL_MASK)
            i += at_once

    @cuda.jit(device=True)
    def sum_by_warps(values, place, dy, x, plane, n_mine, n_pixels, offset, vectors, team,
                     partials, warp, n_warps):  # fmt: skip
        """values[place + i] = Σ over the pixels of plane `plane` + i, for i < n_mine, shared.

        By warp `warp` of `n_warps` that do this together, where `team` lanes, 8 to 32, may sum a
        plane. `partials` is a shared array, of PARTIALS or DOT_PARTIALS float32 where planes may be
        short. Ends without a barrier.
        """
        whole = n_pixels & (vector_width(x) - 1) == 0
        if short and whole and offset == 0 and vectors:
            sum_whole_planes(values, place, dy, x, plane, n_mine, n_pixels, partials, warp, n_warps)
            return
        lane = np.int64(cuda.threadIdx.x) & (WARP - 1)
        mine, rank = quotient(lane, team), lane & (team - 1)
        per_warp = quotient(WARP, team)
        base = warp * per_warp
        while base < n_mine:
            i, total = base + mine, ZERO
            if i < n_mine:
                start = (plane + i) * n_pixels
                total = share(dy, x, start, start + n_pixels, offset, vectors, rank, team)
            total = team_sum(total, team)
            if i < n_mine and rank == 0:
                values[place + i] = total
            base += n_warps * per_warp

    @cuda.jit(device=True)
    def sum_planes(
        values, dy, x, plane, n_mine, n_pixels, low, high, offset, vectors, team, partials
    ):
        """values[i] = Σ over pixels `low` to `high` of plane `plane` + i, for i < n_mine, shared.

        `team` lanes, 8 to 32, sum a whole plane, or WHOLE_BLOCK what there is of it. `partials` is
        a shared array as in `sum_by_warps`, of 32 float32 at least.
        """
        if short and team != WHOLE_BLOCK:
            warp, n_warps = np.int64(cuda.threadIdx.x) // WARP, np.int64(cuda.blockDim.x) // WARP
            sum_by_warps(values, 0, dy, x, plane, n_mine, n_pixels, offset, vectors, team,
                         partials, warp, n_warps)  # fmt: skip
            cuda.syncthreads()
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
                total = block_total(total, partials)
            else:
                total = team_sum(total, team)
            if i < n_mine and rank == 0:
                values[i] = total
            base += n_teams
        cuda.syncthreads()

    return sum_planes, sum_by_warps


sum_planes, sum_by_warps = sums_of_planes(False, UNROLL, IN_FLIGHT)
dot_planes, _ = sums_of_planes(True, DOT_UNROLL, DOT_IN_FLIGHT)
sum_long_planes, _ = sums_of_planes(False, UNROLL, 0)
dot_long_planes, _ = sums_of_planes(True, DOT_UNROLL, 0)


@cuda.jit(device=True)
def plane_of(i, n_pixels, multiplier):
    """i // n_pixels; `multiplier` is 2³² / n_pixels rounded up, and i·n_pixels below 2³².

    With a `multiplier` of 0 there is one plane.
    """
    return np.int64((np.uint64(i) * np.uint64(multiplier)) >> np.uint64(32))


@cuda.jit(device=True)
def plane_of_vector(i, multiplier):
    """As `plane_of`, of planes of 4 pixels or more: the chip multiplies once."""
    product = np.uint64(np.uint32(i)) * np.uint64(np.uint32(multiplier))
    return np.int64(product >> np.uint64(32))


def scaling(shifted, short):
    """(scale_planes, scale_share): planes scaled, and with `shifted` a number added as well.

    short  whether the kernel meets planes so short that it pays to know that no vector is of two
    """

    @cuda.jit(device=True)
    def scale_elements(x, y, start, first, last, factors, shifts, place, n_pixels, multiplier,
                       rank, n_ranks):  # fmt: skip
        i = first + rank
        while i < last:
            plane = place + plane_of(i - start, n_pixels, multiplier)
            value = load(x, i) * factors[plane]
            if shifted:
                value += shifts[plane]
            store(y, i, value)
            i += n_ranks

    @cuda.jit(device=True)
    def scale_vector(values, width, i, n_pixels, multiplier, whole, factors, shifts, place):
        """16 bytes, of which the first is element `i` of the run: of one plane or of two."""
        if short and whole:
            plane = place + plane_of_vector(i, multiplier)
            factor = factors[plane]
            for k in range(width):
                values[k] *= factor
            if shifted:
                shift = shifts[plane]
                for k in range(width):
                    values[k] += shift
            return
        if not short and multiplier == 0:
            for k in range(width):
                values[k] *= factors[place]
                if shifted:
                    values[k] += shifts[place]
            return
        plane = plane_of(i, n_pixels, multiplier)
        left = (plane + 1) * n_pixels - i  # elements of the first plane, from here on
        following = plane + 1 if left < width else plane
        plane, following = place + plane, place + following
        factor, other_factor = factors[plane], factors[following]
        for k in range(width):
            values[k] *= factor if k < left else other_factor
        if shifted:
            shift, other_shift = shifts[plane], shifts[following]
            for k in range(width):
                values[k] += shift if k < left else other_shift

    @cuda.jit(device=True)
    def scale_share(x, y, start, stop, offset, vectors, factors, shifts, place, n_pixels,
                    multiplier, rank, n_ranks):  # fmt: skip
        """As `scale_planes`, by thread `rank` of `n_ranks`; factors[place] is the first plane's."""
        width = vector_width(x)
        first = min(start + (-(start + offset) & (width - 1)), stop) if vectors else stop
        last = first + (stop - first) // width * width
        whole = multiplier == 0 or (offset == 0 and n_pixels & (width - 1) == 0)
        values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        stride = n_ranks * width
        i = first + rank * width
        # All loads of a batch come before its stores: memory answers them together.
        while i + (UNROLL - 1) * stride < last:
            for u in range(UNROLL):
                load_vector_once(values[u], x, i + u * stride)
            for u in range(UNROLL):
                here = i + u * stride
                scale_vector(values[u], width, here - start, n_pixels, multiplier, whole, factors,
                             shifts, place)  # fmt: skip
                store_vector_once(y, here, values[u])
            i += UNROLL * stride
        if i < last:
            for u in range(UNROLL - 1):
                if i + u * stride < last:
                    load_vector_once(values[u], x, i + u * stride)
            for u in range(UNROLL - 1):
                here = i + u * stride
                if here < last:
                    scale_vector(values[u], width, here - start, n_pixels, multiplier, whole,
                                 factors, shifts, place)  # fmt: skip
                    store_vector_once(y, here, values[u])
        scale_elements(x, y, start, start, first, factors, shifts, place, n_pixels, multiplier,
                       rank, n_ranks)  # fmt: skip
        scale_elements(x, y, start, last, stop, factors, shifts, place, n_pixels, multiplier,
                       rank, n_ranks)  # fmt: skip

    @cuda.jit(device=True)
    def scale_planes(x, y, start, stop, offset, vectors, factors, shifts, n_pixels, multiplier):
        """y = x · factor (+ shift) over [start, stop), which begins with the first plane.

        With `vectors` False all goes by element: where x and y begin at different offsets, or a
        plane is shorter than 16 bytes.
        """
        rank, n_ranks = cuda.threadIdx.x, cuda.blockDim.x
        scale_share(x, y, start, stop, offset, vectors, factors, shifts, 0, n_pixels, multiplier,
                    rank, n_ranks)  # fmt: skip

    return scale_planes, scale_share


scale_planes, scale_share = scaling(False, True)
scale_and_shift_planes, _ = scaling(True, True)
scale_long_planes, _ = scaling(False, False)
scale_and_shift_long_planes, _ = scaling(True, False)
