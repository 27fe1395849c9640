"""The way `few_filters` of `tensor_core`: so few filters that a tile of tensor cores stays empty.

A tile of a product has 32 columns and more. Where a group has a filter or two, copying images into
the tile's format takes longer than the products themselves. So a thread makes all filters of a
group at a few pixels, on the ordinary cores, and reads images of either format as they are. Threads
of a *slice* share the channels: every `n_slices`-th is theirs. A block adds up what its slices have
found, in a fixed order.

The pixels of all images are numbered through. An *item* is one of `n_places` numbers and a group;
its pixels are that number and every `n_places`-th behind it, so that neighbours stay neighbours.
Both directions are the gather that `implicit_gemm` describes.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.implicit_gemm import line_met
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 128
MOST_SLICES = 32
AT_A_TIME = 4  # channels of a thread whose loads are in flight together


class Sizes(NamedTuple):
    """The numbers of `few_filters_kernel`.

    n_pixels, n_places  of the result, of all images; and how many a thread's pixels lie apart
    groups, n_filters, n_channels  the last two of a group
    P, Q, H, W          lines and columns of the result, and of the source
    scale_h … divisor_w what `line_met` takes
    of_filter, of_channel, of_tap, of_group  elements of the weights from one to the next
    biased, last        whether there is a bias; whether images lie channels-last
    """

    n_pixels: np.int32
    n_places: np.int32
    n_slices: np.int32
    groups: np.int32
    n_filters: np.int32
    n_channels: np.int32
    P: np.int32
    Q: np.int32
    H: np.int32
    W: np.int32
    R: np.int32
    S: np.int32
    scale_h: np.int32
    shift_h: np.int32
    step_h: np.int32
    divisor_h: np.int32
    scale_w: np.int32
    shift_w: np.int32
    step_w: np.int32
    divisor_w: np.int32
    of_filter: np.int32
    of_channel: np.int32
    of_tap: np.int32
    of_group: np.int32
    biased: np.int32
    last: np.int32


@cuda.jit(device=True)
def item_at(item, z):
    """(first pixel, group): neighbours in memory have neighbouring numbers."""
    if z.last:
        return divided(item, z.groups)
    group, place = divided(item, z.n_places)
    return place, group


@cuda.jit(device=True)
def pixel_at(pixel, z):
    """(image, line, column) of a pixel of the result."""
    image, rest = divided(pixel, np.int32(z.P * z.Q))
    p, q = divided(rest, z.Q)
    return image, p, q


@cuda.jit(device=True)
def result_at(pixel, group, z):
    """Where the group's first filter of a pixel lies in the result."""
    n_channels, first = np.int32(z.n_filters * z.groups), np.int32(group * z.n_filters)
    if z.last:
        return np.int64(pixel) * n_channels + first
    image, rest = divided(pixel, np.int32(z.P * z.Q))
    return (np.int64(image) * n_channels + first) * np.int32(z.P * z.Q) + rest


@functools.cache
def make(n_filters, per_thread):
    """The kernel for up to `n_filters` of a group; a thread has `per_thread` pixels."""
    FILTERS, PER = n_filters, per_thread
    N_SUMS = FILTERS * PER
    SIZE = BLOCK_SIZE * N_SUMS + MOST_SLICES

    @cuda.jit(device=True)
    def find_pixels(starts, lines, columns, place, group, z):
        """Of the thread's pixels: where their image and group begin, their line and column."""
        for j in range(PER):
            pixel = min(np.int32(place + j * z.n_places), np.int32(z.n_pixels - 1))
            image, lines[j], columns[j] = pixel_at(pixel, z)
            plane = np.int64(np.int32(z.H * z.W)) * z.n_channels
            starts[j] = plane * z.groups * image
            starts[j] += np.int64(group) * (z.n_channels if z.last else plane)

    def adding(n):
        N_MET, N_FACTORS = n * PER, n * FILTERS

        @cuda.jit(device=True)
        def add_some(sums, source, weight, places, inside, at, c, z):
            """The products of a tap, over `n` channels of the slice, all of them loaded first."""
            met = cuda.local.array(N_MET, np.float32)
            factors = cuda.local.array(N_FACTORS, np.float32)
            step = np.int32(1 if z.last else z.H * z.W)
            for u in range(n):
                mine = np.int32(c + u * z.n_slices)
                for j in range(PER):  # what is not inside is read, too: a branch would wait
                    met[u * PER + j] = load(source, places[j] + np.int32(mine * step))
                for k in range(FILTERS):
                    own_k = min(np.int32(k), np.int32(z.n_filters - 1))
                    place = np.int32(at + mine * z.of_channel + own_k * z.of_filter)
                    factors[u * FILTERS + k] = load(weight, np.int64(place))
            for u in range(n):
                for j in range(PER):
                    value = met[u * PER + j] if inside[j] else ZERO
                    for k in range(FILTERS):
                        sums[j * FILTERS + k] += value * factors[u * FILTERS + k]

        return add_some

    add_many, add_one = adding(AT_A_TIME), adding(1)

    @cuda.jit(device=True)
    def add_channels(sums, source, weight, places, inside, at, own, z):
        """The products of a tap, over the slice's channels."""
        c = own
        while c + (AT_A_TIME - 1) * z.n_slices < z.n_channels:
            add_many(sums, source, weight, places, inside, at, c, z)
            c = np.int32(c + AT_A_TIME * z.n_slices)
        while c < z.n_channels:
            add_one(sums, source, weight, places, inside, at, c, z)
            c = np.int32(c + z.n_slices)

    @cuda.jit(device=True)
    def add_taps(sums, source, weight, place, group, own, z):
        """All products of the thread's pixels, over the slice's channels."""
        starts, places = cuda.local.array(PER, np.int64), cuda.local.array(PER, np.int64)
        lines, columns = cuda.local.array(PER, np.int32), cuda.local.array(PER, np.int32)
        met, inside = cuda.local.array(PER, np.int32), cuda.local.array(PER, np.bool_)
        down = z.scale_h, z.shift_h, z.step_h, z.divisor_h
        right = z.scale_w, z.shift_w, z.step_w, z.divisor_w
        step = np.int32(z.n_channels * z.groups if z.last else 1)
        find_pixels(starts, lines, columns, place, group, z)
        for r in range(z.R):
            for j in range(PER):
                met[j] = line_met(lines[j], r, z.H, down)
            for s in range(z.S):
                for j in range(PER):
                    w = line_met(columns[j], s, z.W, right)
                    inside[j] = met[j] >= 0 and w >= 0
                    where = np.int32((met[j] * z.W + w) * step)
                    places[j] = starts[j] + (where if inside[j] else np.int32(0))
                at = np.int32(group * z.of_group + (r * z.S + s) * z.of_tap)
                add_channels(sums, source, weight, places, inside, at, own, z)

    @cuda.jit(device=True)
    def write(result, bias, total, pixel, group, k, z):
        if pixel < z.n_pixels and k < z.n_filters:
            if z.biased:
                total += load(bias, np.int32(group * z.n_filters + k))
            step = np.int32(1 if z.last else z.P * z.Q)
            store(result, result_at(pixel, group, z) + np.int64(step) * k, total)

    @cuda.jit(device=True)
    def add_slices(result, bias, sums, cache, own, part, first, side, z):
        """Add up the slices of the block's items; neighbouring threads write neighbours."""
        n = np.int32(side * N_SUMS)
        for i in range(N_SUMS):
            cache[np.uint32(part * (n + 1) + i * side + own)] = sums[i]
        cuda.syncthreads()
        e = np.int32(cuda.threadIdx.x)
        while e < n:
            if z.last:
                rest, k = divided(e, FILTERS)
                j, own = divided(rest, side)
            else:
                rest, own = divided(e, side)
                k, j = divided(rest, PER)
            total = ZERO
            for i in range(z.n_slices):
                total += cache[np.uint32(i * (n + 1) + (j * FILTERS + k) * side + own)]
            if first + own < z.n_places * z.groups:
                place, group = item_at(np.int32(first + own), z)
                write(result, bias, total, np.int32(place + j * z.n_places), group, k, z)
            e = np.int32(e + BLOCK_SIZE)

    @cuda.jit
    def few_filters_kernel(source, weight, bias, result, z):
        """A block for each BLOCK_SIZE // n_slices items.

        source, result  images, of any size, in the format that `Sizes` says; x and y forward, dy
                        and dx backward
        weight, bias    of any order; bias is read where there is one
        z               `Sizes`
        """
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = cuda.shared.array(SIZE, np.float32)
        sums = cuda.local.array(N_SUMS, np.float32)
        for i in range(N_SUMS):
            sums[i] = ZERO
        side, thread = np.int32(BLOCK_SIZE // z.n_slices), np.int32(cuda.threadIdx.x)
        if z.last:  # channels lie side by side, so do slices
            own, part = divided(thread, z.n_slices)
        else:
            part, own = divided(thread, side)
        first = np.int32(cuda.blockIdx.x * side)
        place, group = item_at(np.int32(first + own), z)
        if first + own < z.n_places * z.groups:
            add_taps(sums, source, weight, place, group, part, z)
        if z.n_slices > 1:
            add_slices(result, bias, sums, cache, own, part, first, side, z)
        elif first + own < z.n_places * z.groups:
            for j in range(PER):
                pixel = np.int32(place + j * z.n_places)
                for k in range(FILTERS):
                    write(result, bias, sums[j * FILTERS + k], pixel, group, k, z)

    return few_filters_kernel
