"""How a block works on a run of a contiguous image that it holds in shared memory: `resident`.

The run may begin and end anywhere: in the middle of a plane, and beside a 16-byte boundary. In
shared memory it lies as far behind such a boundary as in the image, so that 16 bytes of the one are
16 bytes of the other. `offset` counts the elements from the last boundary to the image's first.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.rows import team_sum
from course_lib.kernels.squeeze_excite.dense import quotient
from course_lib.runtime.intrinsics import load, load_vector, store, vector_width
from course_lib.runtime.intrinsics.matrix import copy_one_async
from course_lib.runtime.intrinsics.shared import copy_async
from course_lib.runtime.intrinsics.streaming import load_vector_once, store_vector_once

UNROLL = 2  # vectors in flight per thread: shared memory answers soon
DOT_UNROLL = 4  # of x, which comes from memory


@cuda.jit(device=True)
def whole_vectors(start, stop, offset, width):
    """The first 16-byte boundary of a run, and the last: fewer than 16 bytes lie on either side."""
    first = min(start + (-(start + offset) & (width - 1)), stop)
    return first, first + ((stop - first) & -width)


@cuda.jit(device=True)
def fetch(held, x, start, stop, offset):
    """Begin to copy x[start:stop] to `held`. Returns where there the first element will be."""
    width = vector_width(x)
    tid, n_threads = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
    first, last = whole_vectors(start, stop, offset, width)
    place = (start + offset) & (width - 1)
    shift = place - start
    i = first + tid * width
    while i < last:
        copy_async(held, i + shift, x, i)
        i += n_threads * width
    if tid < first - start:
        copy_one_async(held, start + tid + shift, x, start + tid, True)
    if tid < stop - last:
        copy_one_async(held, last + tid + shift, x, last + tid, True)
    return place


@cuda.jit(device=True)
def share_of_sum(held, start, stop, rank, n_ranks):
    """This thread's share of the sum of held[start:stop]: it is `rank` of `n_ranks`, 8 or more."""
    width = vector_width(held)
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    first, last = whole_vectors(start, stop, 0, width)
    total = ZERO
    i, stride = first + rank * width, n_ranks * width
    while i + (UNROLL - 1) * stride < last:
        for u in range(UNROLL):
            load_vector(values[u], held, i + u * stride)
        for k in range(width):
            part = ZERO
            for u in range(UNROLL):
                part += values[u, k]
            total += part
        i += UNROLL * stride
    while i < last:
        load_vector(values[0], held, i)
        for k in range(width):
            total += values[0, k]
        i += stride
    if start + rank < first:
        total += load(held, start + rank)
    if last + rank < stop:
        total += load(held, last + rank)
    return total


@cuda.jit(device=True)
def share_of_product(held, start, stop, x, ahead, vectors, rank, n_ranks):
    """The same of held[i] · x[ahead + i]. `vectors`: whether both have the same boundaries."""
    width = vector_width(held)
    values = cuda.local.array((DOT_UNROLL, MAX_WIDTH), np.float32)
    factors = cuda.local.array(MAX_WIDTH, np.float32)
    first, last = stop, stop
    if vectors:
        first, last = whole_vectors(start, stop, 0, width)
    total = ZERO
    i, stride = first + rank * width, n_ranks * width
    while i + (DOT_UNROLL - 1) * stride < last:
        for u in range(DOT_UNROLL):
            load_vector_once(values[u], x, i + u * stride + ahead)
        for u in range(DOT_UNROLL):
            load_vector(factors, held, i + u * stride)
            for k in range(width):
                total += values[u, k] * factors[k]
        i += DOT_UNROLL * stride
    while i < last:
        load_vector_once(values[0], x, i + ahead)
        load_vector(factors, held, i)
        for k in range(width):
            total += values[0, k] * factors[k]
        i += stride
    i = start + rank
    while i < first:
        total += load(held, i) * load(x, i + ahead)
        i += n_ranks
    if last + rank < stop:
        total += load(held, last + rank) * load(x, last + rank + ahead)
    return total


def sums(product):
    """The function that sums planes: of what is held, or with `product` of its product with x."""

    @cuda.jit(device=True)
    def sum_held(values, partials, held, place, x, begin, vectors, low, high, c, n_mine, n_pixels,
                 team, n_pieces):  # fmt: skip
        """values[i] = Σ of what the block holds of plane c + i, for i < n_mine.

        It holds elements `low` to `high` of a sample, from held[place] on; x[begin] is the sample's
        first. Each plane is cut into `n_pieces`, which `team` lanes, 8 to 32, sum; their sums take
        n_mine · n_pieces of `partials`. Ends without a barrier: a thread finds its own number,
        values[tid].
        """
        tid, power = np.int64(cuda.threadIdx.x), np.int64(cuda.popc(team - 1))
        rank, n_teams = tid & (team - 1), np.int64(cuda.blockDim.x) >> power
        width, shift = vector_width(held), place - low
        n_tasks = n_mine * n_pieces
        base = 0
        while base < n_tasks:
            task, total = base + (tid >> power), ZERO
            if task < n_tasks:
                i = quotient(task, n_pieces)
                start, stop = max(low, (c + i) * n_pixels), min(high, (c + i + 1) * n_pixels)
                length = (quotient(stop - start + n_pieces - 1, n_pieces) + width - 1) & -width
                start = min(start + (task - i * n_pieces) * length, stop)
                stop = min(start + length, stop)
                if product:
                    total = share_of_product(
                        held, start + shift, stop + shift, x, begin - shift, vectors, rank, team
                    )
                else:
                    total = share_of_sum(held, start + shift, stop + shift, rank, team)
            total = team_sum(total, team)
            if task < n_tasks and rank == 0:
                partials[task] = total
            base += n_teams
        cuda.syncthreads()
        if tid < n_mine:
            total = ZERO
            for piece in range(n_pieces):
                total += partials[tid * n_pieces + piece]
            values[tid] = total

    return sum_held


sum_held = sums(False)
dot_held = sums(True)


def scaling(shifted):
    """The function that scales what is held, and with `shifted` adds a number of each plane."""

    @cuda.jit(device=True)
    def scale_held(held, place, y, start, stop, offset, before, factors, shifts, n_pixels,
                   multiplier, vectors):  # fmt: skip
        """y[start:stop] = what is held, from held[place] on, times the factors of its planes.

        `before` elements of the first plane come before. 2³² / n_pixels rounded up is the
        `multiplier` where the elements from the first plane's start on, times n_pixels, are fewer
        than 2³²; or 0. With `vectors` False all goes by element: as `planes.scale_planes` says.
        """
        width = vector_width(y)
        tid, n_threads = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
        first, last = stop, stop
        if vectors:
            first, last = whole_vectors(start, stop, offset, width)
        values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        shift, ahead = place - start, before - start
        i, stride = first + tid * width, n_threads * width
        while i < last:
            for u in range(UNROLL):
                here = i + u * stride
                if here < last:
                    load_vector(values[u], held, here + shift)
                    element = here + ahead
                    if multiplier == 0:
                        plane = quotient(element, n_pixels)
                    else:
                        product = np.uint64(element) * np.uint64(multiplier)
                        plane = np.int64(product >> np.uint64(32))
                    left = (plane + 1) * n_pixels - element  # elements of the plane, from here on
                    following = plane + 1 if left < width else plane
                    factor, other = factors[plane], factors[following]
                    for k in range(width):
                        values[u, k] *= factor if k < left else other
                    if shifted:
                        added, other = shifts[plane], shifts[following]
                        for k in range(width):
                            values[u, k] += added if k < left else other
                    store_vector_once(y, here, values[u])
            i += UNROLL * stride
        i = start + tid
        while i < first:
            scale_one(held, i + shift, y, i, factors, shifts, quotient(i + ahead, n_pixels))
            i += n_threads
        i = last + tid
        while i < stop:
            scale_one(held, i + shift, y, i, factors, shifts, quotient(i + ahead, n_pixels))
            i += n_threads

    @cuda.jit(device=True)
    def scale_one(held, at, y, i, factors, shifts, plane):
        value = load(held, at) * factors[plane]
        if shifted:
            value += shifts[plane]
        store(y, i, value)

    return scale_held


scale_held = scaling(False)
scale_and_shift_held = scaling(True)
