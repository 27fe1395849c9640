"""Contiguous images for the rung `fused`: a part is a stretch of a sample's memory.

Parts are cut at 16-byte boundaries, whether or not a plane ends there; a plane may lie in several.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.activation import ZERO
from course_lib.kernels.squeeze_excite.fused_exchange import (
    lanes_sum,
    quotient,
    sum_of_words,
)
from course_lib.runtime.intrinsics import (
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
)
from course_lib.runtime.mailbox import post
from course_lib.runtime.shared import copy_async

MAX_WIDTH = 8
UNROLL = 4
EXTRA_WORDS = 2  # of a part: the shares of its first and its last channel


@cuda.jit(device=True)
def stretch_of(part, n_parts, size, width):
    """(first element, elements) of a part of a sample of `size` elements."""
    n_vectors = (size + width - 1) // width
    start = quotient(part * n_vectors, n_parts) * width
    return start, min(quotient((part + 1) * n_vectors, n_parts) * width, size) - start


@cuda.jit(device=True)
def fetch_planes(cache, place, x, start, length, vectors):
    """Begin to copy x[start:start + length] to cache[place:], filled up to 16 bytes."""
    tid, n_threads, width = cuda.threadIdx.x, cuda.blockDim.x, vector_width(x)
    if vectors:
        i = tid * width
        while i < length:
            copy_async(cache, place + i, x, start + i)
            i += n_threads * width
    else:
        i = np.int64(tid)
        while i < (length + width - 1) // width * width:
            store(cache, place + i, load(x, start + i) if i < length else ZERO)
            i += n_threads


def planes_sums(products):
    """pool(…): shares of a part's channels, from the sums of x or, `products`, of dy·x."""

    @cuda.jit(device=True)
    def sum_range(cache, place, other, low, high, rank, n_ranks):
        """This lane's share of the sum over the part's elements from `low` to `high`."""
        a = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        b = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        width, total = vector_width(cache), ZERO
        first = min((low + width - 1) // width * width, high)
        n_vectors = (high - first) // width
        vector = rank
        while vector < n_vectors:
            for u in range(UNROLL):
                i = first + (vector + u * n_ranks) * width
                if vector + u * n_ranks < n_vectors:
                    load_vector(a[u], cache, place + i)
                    if products:
                        load_vector(b[u], cache, other + i)
                else:
                    for k in range(width):
                        a[u, k] = ZERO
                        b[u, k] = ZERO
            for u in range(UNROLL):
                for k in range(width):
                    total += a[u, k] * b[u, k] if products else a[u, k]
            vector += UNROLL * n_ranks
        for end in range(2):  # what is left: fewer than 16 bytes at either end
            i = low + rank if end == 0 else first + n_vectors * width + rank
            if i < (first if end == 0 else high):
                value = load(cache, place + i)
                total += value * load(cache, other + i) if products else value
        return total

    @cuda.jit(device=True)
    def pool(cache, place, other, length, phase, n_pixels, n_channels, team, tables, scratch):
        """tables[scratch + j·n + …]: `n` partial sums for each channel; returns n."""
        rank, mine, n_teams = (
            cuda.threadIdx.x & (team - 1), quotient(cuda.threadIdx.x, team),
            quotient(cuda.blockDim.x, team),
        )  # fmt: skip
        n_splits = max(1, quotient(n_teams, n_channels))
        first = 0
        while first < n_channels * n_splits:
            task, total = first + mine, ZERO
            if task < n_channels * n_splits:
                j = quotient(task, n_splits)
                split = task - j * n_splits
                low, high = max(0, j * n_pixels - phase), min(length, (j + 1) * n_pixels - phase)
                step = quotient(high - low + n_splits - 1, n_splits)
                low += split * step
                high = min(high, low + step)
                if low < high:
                    total = sum_range(cache, place, other, low, high, rank, team)
            total = lanes_sum(total, team)
            if rank == 0 and task < n_channels * n_splits:
                tables[scratch + task] = total
            first += n_teams
        cuda.syncthreads()
        return n_splits

    return pool


@cuda.jit(device=True)
def post_ends(box, base, mark, tables, shares, n_channels):
    """Post the shares of the first and the last channel: a neighbour may have the rest of them."""
    if cuda.threadIdx.x < EXTRA_WORDS:
        j = 0 if cuda.threadIdx.x == 0 else n_channels - 1
        post(box, base + cuda.threadIdx.x, tables[shares + j], mark)


@cuda.jit(device=True)
def save_whole(saved, i, tables, shares, first_channel, n_channels, length, phase, n_pixels):
    """Save the shares of those channels that no other part has a share in."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_channels:
        if j * n_pixels >= phase and (j + 1) * n_pixels - phase <= length:
            saved[i + first_channel + j] = tables[shares + j]
        j += cuda.blockDim.x


@cuda.jit(device=True)
def save_cut(
    saved, i, box, base, n_words, R, mark, part, n_parts, first_channel, n_channels,
    length, phase, n_pixels, size, width,
):  # fmt: skip
    """Save the sum of all parts' shares of the last channel, if it begins here and goes on."""
    j = n_channels - 1
    if cuda.threadIdx.x == 0 and j * n_pixels >= phase and (j + 1) * n_pixels - phase > length:
        stop = (first_channel + n_channels) * n_pixels
        following = part + 1
        while following < n_parts and stretch_of(following, n_parts, size, width)[0] < stop:
            following += 1
        total = sum_of_words(box, base + part * n_words + R + 1, 1, 1, mark)
        there = base + (part + 1) * n_words + R
        total += sum_of_words(box, there, n_words, following - part - 1, mark)
        saved[i + first_channel + j] = total


def planes_scaling(shifted):
    """scale(…): y = x times the channel's scale and, `shifted`, plus its shift."""

    @cuda.jit(device=True)
    def scale(
        cache, place, y, start, length, phase, n_pixels, n_channels, tables, scales, shifts, vectors
    ):
        values = cuda.local.array((1, MAX_WIDTH), np.float32)
        width = vector_width(y)
        i = cuda.threadIdx.x * width
        while i < length:
            load_vector(values[0], cache, place + i)
            j = quotient(phase + i, n_pixels)
            if phase + i + width <= (j + 1) * n_pixels:
                factor = tables[scales + j]
                shift = tables[shifts + j] if shifted else ZERO
                for k in range(width):
                    values[0, k] = (
                        values[0, k] * factor + shift if shifted else (values[0, k] * factor)
                    )
            else:
                for k in range(width):
                    j = min(quotient(phase + i + k, n_pixels), n_channels - 1)  # past the end
                    product = values[0, k] * tables[scales + j]
                    values[0, k] = product + tables[shifts + j] if shifted else product
            if vectors:
                store_vector(y, start + i, values[0])
            else:
                for k in range(width):
                    if i + k < length:
                        store(y, start + i + k, values[0, k])
            i += cuda.blockDim.x * width

    return scale
