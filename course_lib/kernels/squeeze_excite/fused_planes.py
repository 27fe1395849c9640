"""Contiguous images for the rung `fused`: a part is a stretch of a sample's memory.

Parts are cut at 16-byte boundaries, whether or not a plane ends there; a plane may lie in several.
What the kernels need to know of a part is a tuple, `cut`:

    start, length               the stretch, in elements from the sample's first
    first_channel, n_channels   that have elements in it
    phase                       elements of the first channel that lie before it
    whole_first, whole_stop     numbers of those channels, of n_channels, that lie in no other part
    owns                        number of the first channel that does not begin in an earlier part
    n_after                     how many later parts have elements of the last channel
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.activation import ZERO
from course_lib.kernels.squeeze_excite.fused_exchange import lanes_sum, quotient, sum_of_words
from course_lib.runtime.intrinsics import load, load_vector, store, store_vector, vector_width
from course_lib.runtime.mailbox import post
from course_lib.runtime.shared import copy_async

MAX_WIDTH = 8
UNROLL = 4  # vectors in flight per thread where it sums
SCALE_UNROLL = 2


@cuda.jit(device=True)
def stretch_of(part, n_parts, size, width):
    """(first element, elements) of a part of a sample of `size` elements."""
    n_vectors = (size + width - 1) // width
    start = quotient(part * n_vectors, n_parts) * width
    return start, min(quotient((part + 1) * n_vectors, n_parts) * width, size) - start


@cuda.jit(device=True)
def cut_planes(part, n_parts, n_groups, group, C, n_pixels, width):
    """The tuple `cut`, as told above. `n_groups` and `group` are for `fused_pixels` alone."""
    size = C * n_pixels
    start, length = stretch_of(part, n_parts, size, width)
    first_channel, last = quotient(start, n_pixels), quotient(start + length - 1, n_pixels)
    phase, n_channels = start - first_channel * n_pixels, last - first_channel + 1
    whole_first, n_after = (1 if phase > 0 else 0), 0
    goes_on = (last + 1) * n_pixels > start + length
    if last * n_pixels >= start and goes_on:
        while part + n_after + 1 < n_parts and (
            stretch_of(part + n_after + 1, n_parts, size, width)[0] < (last + 1) * n_pixels
        ):
            n_after += 1
    whole_stop = n_channels - (1 if goes_on else 0)
    return (
        start, length, first_channel, n_channels, phase, whole_first, whole_stop, whole_first,
        n_after,
    )  # fmt: skip


@cuda.jit(device=True)
def fetch_planes(cache, place, x, sample, cut, group, C, vectors):
    """Begin to copy the part to cache[place:], filled up to 16 bytes; x[sample] is its first."""
    tid, n_threads, width = cuda.threadIdx.x, cuda.blockDim.x, vector_width(x)
    start, length = sample + cut[0], cut[1]
    if vectors:
        i = tid * width
        while i < length:
            copy_async(cache, place + i, x, start + i)
            i += n_threads * width
    else:
        i = np.int64(tid)
        while i < ((length + width - 1) & -width):
            store(cache, place + i, load(x, start + i) if i < length else ZERO)
            i += n_threads


@cuda.jit(device=True)
def task_of(task, n_tasks, n_splits, cut, n_pixels):
    """(first, stop) within the part of the elements that a task sums; equal beyond the last task.

    A channel's elements are cut into `n_splits` tasks.
    """
    if task >= n_tasks:
        return np.int64(0), np.int64(0)
    length, phase, j = cut[1], cut[4], quotient(task, n_splits)
    low, high = max(0, j * n_pixels - phase), min(length, (j + 1) * n_pixels - phase)
    step = quotient(high - low + n_splits - 1, n_splits)
    low += (task - j * n_splits) * step
    return low, min(high, low + step)


@cuda.jit(device=True)
def share_out_planes(cut, n_pixels, lanes, width):
    """What stays the same for all samples: sums per channel, and this thread's first task."""
    n_teams, task = quotient(cuda.blockDim.x, lanes), quotient(cuda.threadIdx.x, lanes)
    n_splits = max(1, quotient(n_teams, cut[3]))
    low, high = task_of(task, cut[3] * n_splits, n_splits, cut, n_pixels)
    return n_splits, low, high


def pool_planes(products):
    """pool(…): n_splits partial sums of x or, `products`, of dy·x for each channel of a part."""

    @cuda.jit(device=True)
    def sum_range(cache, place, other, low, high, rank, n_ranks):
        """This lane's share of the sum over the part's elements from `low` to `high`."""
        a = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        b = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        width, total = vector_width(cache), ZERO
        first = min((low + width - 1) & -width, high)
        n_vectors = quotient(high - first, width)
        i, step, vector = place + first + rank * width, n_ranks * width, rank
        apart = other - place
        while vector + (UNROLL - 1) * n_ranks < n_vectors:
            for u in range(UNROLL):
                load_vector(a[u], cache, i + u * step)
                if products:
                    load_vector(b[u], cache, i + u * step + apart)
            for u in range(UNROLL):
                part = ZERO
                for k in range(width):
                    part += a[u, k] * b[u, k] if products else a[u, k]
                total += part
            vector += UNROLL * n_ranks
            i += UNROLL * step
        while vector < n_vectors:
            load_vector(a[0], cache, i)
            if products:
                load_vector(b[0], cache, i + apart)
            for k in range(width):
                total += a[0, k] * b[0, k] if products else a[0, k]
            vector += n_ranks
            i += step
        # What is left: fewer than 16 bytes at either end.
        if low + rank < first:
            value = load(cache, place + low + rank)
            total += value * load(cache, other + low + rank) if products else value
        i = first + n_vectors * width + rank
        if i < high:
            value = load(cache, place + i)
            total += value * load(cache, other + i) if products else value
        return total

    @cuda.jit(device=True)
    def pool(cache, place, other, cut, group, n_pixels, lanes, shared_out, tables, scratch):
        """tables[scratch + j·n_splits + …]; `shared_out` is what `share_out_planes` returned."""
        n_splits, low, high = shared_out
        n_tasks, n_teams = cut[3] * n_splits, quotient(cuda.blockDim.x, lanes)
        rank, task = cuda.threadIdx.x & (lanes - 1), quotient(cuda.threadIdx.x, lanes)
        first = task - quotient(cuda.threadIdx.x & 31, lanes)  # of this warp
        while first < n_tasks:
            total = ZERO
            if low < high:
                total = sum_range(cache, place, other, low, high, rank, lanes)
            total = lanes_sum(total, lanes)
            if rank == 0 and task < n_tasks:
                store(tables, scratch + task, total)
            task += n_teams
            first += n_teams
            if first < n_tasks:
                low, high = task_of(task, n_tasks, n_splits, cut, n_pixels)
        cuda.syncthreads()

    return pool


@cuda.jit(device=True)
def post_ends(box, base, n_parts, mark, tables, cut):
    """Post the shares of the first and the last channel: a neighbour may have the rest of them."""
    tid = cuda.threadIdx.x
    if tid < 2:
        post(box, base + tid * n_parts, load(tables, 0 if tid == 0 else cut[3] - 1), mark)


@cuda.jit(device=True)
def save_cut_plane(saved, i, box, base, part, n_parts, n_groups, cut, mark):
    """Save the sum of all parts' shares of a channel that begins here and goes on: a warp does."""
    rank, n_after = cuda.threadIdx.x & 31, cut[8]
    if n_after > 0 and cuda.threadIdx.x >= cuda.blockDim.x - 32:
        total = ZERO
        if rank == 0:
            total = sum_of_words(box, base + n_parts + part, 1, 1, mark)
        elif rank <= n_after:
            n_mine = quotient(n_after - rank, 31) + 1
            total = sum_of_words(box, base + part + rank, 31, n_mine, mark)
        total = lanes_sum(total, 32)
        if rank == 0:
            store(saved, i + cut[3] - 1, total)


def scale_planes(shifted):
    """scale(…): y = x times the channel's scale and, `shifted`, plus its shift."""

    @cuda.jit(device=True)
    def scale_vector(values, offset, j, n_pixels, n_channels, tables, scales, shifts, width):
        """`offset` counts from the start of the first of its channels, `j`."""
        if offset + width <= n_pixels:
            factor, shift = load(tables, scales + j), ZERO
            if shifted:
                shift = load(tables, shifts + j)
            for k in range(width):
                values[k] = values[k] * factor + shift if shifted else values[k] * factor
        else:
            for k in range(width):
                while offset >= n_pixels:
                    offset -= n_pixels
                    j = min(j + 1, n_channels - 1)  # past the part's end nobody looks
                product = values[k] * load(tables, scales + j)
                values[k] = product + load(tables, shifts + j) if shifted else product
                offset += 1

    @cuda.jit(device=True)
    def scale(
        cache, place, y, sample, cut, shared_out, group, C, n_pixels, tables, scales, shifts,
        vectors,
    ):  # fmt: skip
        values = cuda.local.array((SCALE_UNROLL, MAX_WIDTH), np.float32)
        start, length, width = sample + cut[0], cut[1], vector_width(y)
        step = cuda.blockDim.x * width
        channels_on = quotient(step, n_pixels)
        pixels_on = step - channels_on * n_pixels
        i = np.int64(cuda.threadIdx.x * width)
        j = quotient(cut[4] + i, n_pixels)
        offset = cut[4] + i - j * n_pixels
        while i < length:
            for u in range(SCALE_UNROLL):
                if i + u * step < length:
                    load_vector(values[u], cache, place + i + u * step)
            for u in range(SCALE_UNROLL):
                if i < length:
                    scale_vector(
                        values[u], offset, j, n_pixels, cut[3], tables, scales, shifts, width
                    )
                    if vectors:
                        store_vector(y, start + i, values[u])
                    else:
                        for k in range(width):
                            if i + k < length:
                                store(y, start + i + k, values[u, k])
                i += step
                j += channels_on
                offset += pixels_on
                if offset >= n_pixels:
                    offset -= n_pixels
                    j += 1

    return scale
