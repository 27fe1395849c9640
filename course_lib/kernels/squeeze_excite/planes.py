"""How a block walks its part of a contiguous image: the planes of some channels, one run of memory.

16 bytes at a time, wherever the planes begin: a vector may belong to the end of one and the start
of the next. `offset` counts the elements from the last 16-byte boundary to an array's first.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.global_avg_pool import vector_sum
from course_lib.kernels.softmax.rows import MAX_WIDTH, team_sum
from course_lib.kernels.squeeze_excite.formulas import ZERO
from course_lib.runtime.intrinsics import (
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    warp_sum,
)

WHOLE_BLOCK = 0  # as `team`: all threads of the block sum a plane together
UNROLL = 4  # vectors in flight per thread and array
DOT_UNROLL = 2


@cuda.jit(device=True)
def vector_dot(dy, x, start, stop, offset, vectors, rank, n_ranks):
    """This thread's share of Σ dy·x over [start, stop), as `vector_sum` of one array.

    Both arrays begin at the same `offset`, or `vectors` is False: then all go by element.
    """
    width = vector_width(x)
    a = cuda.local.array((DOT_UNROLL, MAX_WIDTH), np.float32)
    b = cuda.local.array((DOT_UNROLL, MAX_WIDTH), np.float32)
    first = min(start + (-(start + offset) & (width - 1)), stop)  # the first boundary
    n_vectors = (stop - first) // width if vectors else 0
    total = ZERO
    vector = rank
    while vector < n_vectors:
        for u in range(DOT_UNROLL):
            for k in range(width):
                a[u, k] = ZERO
                b[u, k] = ZERO
            if vector + u * n_ranks < n_vectors:
                i = first + (vector + u * n_ranks) * width
                load_vector(a[u], dy, i)
                load_vector(b[u], x, i)
        for u in range(DOT_UNROLL):
            for k in range(width):
                total += a[u, k] * b[u, k]
        vector += DOT_UNROLL * n_ranks
    for i in range(start + rank, first, n_ranks):
        total += load(dy, i) * load(x, i)
    for i in range(first + n_vectors * width + rank, stop, n_ranks):
        total += load(dy, i) * load(x, i)
    return total


def sums_of_planes(product):
    """The function that sums planes: of x, or with `product` of dy·x (else `dy` is not read)."""

    @cuda.jit(device=True)
    def share(dy, x, start, stop, offset, vectors, rank, n_ranks):
        if product:
            return vector_dot(dy, x, start, stop, offset, vectors, rank, n_ranks)
        return vector_sum(x, start, stop, offset, rank, n_ranks)

    @cuda.jit(device=True)
    def sum_planes(values, dy, x, plane, n_mine, n_pixels, low, high, offset, vectors, team, sums):
        """values[i] = Σ over pixels `low` to `high` of plane `plane` + i, for i < n_mine, shared.

        `team` lanes, 8 to 32, sum a plane, or WHOLE_BLOCK; `sums` is a shared array of 32 float32.
        """
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        if team == WHOLE_BLOCK:
            for i in range(n_mine):
                start = (plane + i) * n_pixels
                total = share(
                    dy, x, start + low, start + high, offset, vectors, tid, n_threads
                )  # fmt: skip
                total = warp_sum(total)
                cuda.syncthreads()  # the plane before may still be read
                if tid % 32 == 0:
                    sums[tid // 32] = total
                cuda.syncthreads()
                if tid == 0:
                    for other in range(1, n_threads // 32):
                        total += sums[other]
                    values[i] = total
        else:
            for base in range(0, n_mine, n_threads // team):
                i = base + tid // team
                total = ZERO
                if i < n_mine:
                    start = (plane + i) * n_pixels
                    total = share(
                        dy, x, start, start + n_pixels, offset, vectors, tid % team, team
                    )  # fmt: skip
                total = team_sum(total, team)
                if i < n_mine and tid % team == 0:
                    values[i] = total
        cuda.syncthreads()

    return sum_planes


sum_planes = sums_of_planes(False)
dot_planes = sums_of_planes(True)


@cuda.jit(device=True)
def scaled(value, i, factors, shifts, shifted):
    if shifted:
        return value * factors[i] + shifts[i]
    return value * factors[i]


@cuda.jit(device=True)
def plane_of(i, n_pixels, multiplier):
    """i // n_pixels; `multiplier` is 2³² / n_pixels rounded up, and i·n_pixels below 2³².

    With a `multiplier` of 0 there is one plane.
    """
    return np.int64((np.uint64(i) * np.uint64(multiplier)) >> np.uint64(32))


def scaling(shifted):
    """The function that scales planes, and with `shifted` adds a number as well."""

    @cuda.jit(device=True)
    def scale_elements(x, y, start, stop, factors, shifts, n_pixels, multiplier):
        for i in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
            plane = (i - start) // n_pixels if multiplier > 0 else 0
            store(y, i, scaled(load(x, i), plane, factors, shifts, shifted))

    @cuda.jit(device=True)
    def scale_vector(values, x, y, i, start, stop, factors, shifts, n_pixels, multiplier):
        """16 bytes from element `i` on, of which some may lie before `start` or from `stop` on."""
        width = vector_width(x)
        first, last = max(i, start), min(i + width, stop)
        if first < last:
            plane = plane_of(first - start, n_pixels, multiplier)
            boundary = start + (plane + 1) * n_pixels if multiplier > 0 else stop
            following = plane + 1 if boundary < last else plane
            for k in range(width):
                at = plane if i + k < boundary else following
                values[k] = scaled(values[k], at, factors, shifts, shifted)
            if last - first == width:
                store_vector(y, i, values)
            else:
                for j in range(first, last):
                    at = plane if j < boundary else following
                    store(y, j, scaled(load(x, j), at, factors, shifts, shifted))

    @cuda.jit(device=True)
    def scale_planes(x, y, start, stop, offset, vectors, factors, shifts, n_pixels, multiplier):
        """y = x · factor (+ shift) over [start, stop), which begins with the first plane.

        With `vectors` False all goes by element: where x and y begin at different offsets, or a
        plane is shorter than 16 bytes.
        """
        if not vectors:
            scale_elements(x, y, start, stop, factors, shifts, n_pixels, multiplier)
            return
        width = vector_width(x)
        values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        stride = cuda.blockDim.x * width
        i = start - ((start + offset) & (width - 1)) + cuda.threadIdx.x * width
        while i < stop:
            # All loads of a batch come before its stores: memory answers them together.
            for u in range(UNROLL):
                for k in range(width):
                    values[u, k] = ZERO
                here = i + u * stride
                if here >= start and here + width <= stop:
                    load_vector(values[u], x, here)
            for u in range(UNROLL):
                scale_vector(
                    values[u], x, y, i + u * stride, start, stop,
                    factors, shifts, n_pixels, multiplier,
                )  # fmt: skip
            i += UNROLL * stride

    return scale_planes


scale_planes = scaling(False)
scale_and_shift_planes = scaling(True)
