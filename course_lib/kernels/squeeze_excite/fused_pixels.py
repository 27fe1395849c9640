"""Channels-last images for the rung `fused`: a part is a run of pixels × a group of channels.

In shared memory it has a row of `group` elements for each pixel, whose last ones stay unused where
a group is not full. The tuple `cut` (`fused_planes`) is here

    start, n_rows               the first of its elements in the sample, and its pixels
    first_channel, n_channels   of the group
    run                         which of the runs of pixels it is
    whole_first, whole_stop     0 and n_channels where there is but one run; else no channels
    owns                        0 in the first run, else n_channels
    n_runs
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.activation import ZERO
from course_lib.kernels.squeeze_excite.fused_exchange import lanes_sum, quotient, sum_of_words
from course_lib.kernels.squeeze_excite.fused_planes import MAX_WIDTH, SCALE_UNROLL
from course_lib.runtime.intrinsics import load, load_vector, store, store_vector, vector_width
from course_lib.runtime.mailbox import post
from course_lib.runtime.shared import copy_async

UNROLL = 2  # vectors in flight per thread where it sums


@cuda.jit(device=True)
def cut_pixels(part, n_parts, n_groups, group, C, n_pixels, width):
    """The tuple `cut`, as told above."""
    run, n_runs = quotient(part, n_groups), quotient(n_parts, n_groups)
    first_channel = (part - run * n_groups) * group
    first_row = quotient(run * n_pixels, n_runs)
    n_rows = quotient((run + 1) * n_pixels, n_runs) - first_row
    n_channels = min(group, C - first_channel)
    return (
        first_row * C + first_channel, n_rows, first_channel, n_channels, run,
        0, n_channels if n_runs == 1 else 0, 0 if run == 0 else n_channels, n_runs,
    )  # fmt: skip


@cuda.jit(device=True)
def place_in_tile(n_channels, width):
    """(column, row, rows at once) of this thread, 16 bytes to a column; no such row: no place."""
    n_columns = quotient(n_channels + width - 1, width)
    n_rows, row = quotient(cuda.blockDim.x, n_columns), quotient(cuda.threadIdx.x, n_columns)
    return (cuda.threadIdx.x - row * n_columns) * width, row, n_rows


@cuda.jit(device=True)
def fetch_pixels(cache, place, x, sample, cut, group, C, vectors):
    """Begin to copy the part to cache[place:]; the sample is at x[sample]."""
    width, n_channels = vector_width(x), cut[3]
    column, row, n_at_once = place_in_tile(n_channels, width)
    if row < n_at_once:
        start = sample + cut[0] + column
        while row < cut[1]:
            if vectors:
                copy_async(cache, place + row * group + column, x, start + row * C)
            else:
                for k in range(width):
                    inside = column + k < n_channels
                    value = load(x, start + row * C + k) if inside else ZERO
                    store(cache, place + row * group + column + k, value)
            row += n_at_once


@cuda.jit(device=True)
def share_out_pixels(cut, n_pixels, lanes, width):
    """What stays the same for all samples: sums per channel, and this thread's place."""
    column, row, n_at_once = place_in_tile(cut[3], width)
    return n_at_once, column, row


def pool_pixels(products):
    """pool(…): n_splits partial sums of x or, `products`, of dy·x for each channel of a part."""

    @cuda.jit(device=True)
    def pool(cache, place, other, cut, group, n_pixels, lanes, shared_out, tables, scratch):
        """tables[scratch + j·n_splits + …]; `shared_out` is what `share_out_pixels` returned."""
        n_splits, column, row = shared_out
        a = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        b = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
        totals = cuda.local.array((1, MAX_WIDTH), np.float32)
        width, n_rows, mine = vector_width(cache), cut[1], row
        for k in range(width):
            totals[0, k] = ZERO
        while row < n_rows and mine < n_splits:
            for u in range(UNROLL):
                if row + u * n_splits < n_rows:
                    i = (row + u * n_splits) * group + column
                    load_vector(a[u], cache, place + i)
                    if products:
                        load_vector(b[u], cache, other + i)
            for u in range(UNROLL):
                if row + u * n_splits < n_rows:
                    for k in range(width):
                        totals[0, k] += a[u, k] * b[u, k] if products else a[u, k]
            row += UNROLL * n_splits
        if mine < n_splits:
            for k in range(width):
                if column + k < cut[3]:
                    store(tables, scratch + (column + k) * n_splits + mine, totals[0, k])
        cuda.syncthreads()

    return pool


@cuda.jit(device=True)
def post_shares(box, base, n_parts, mark, tables, cut):
    """Post the shares of all channels, where other runs have shares of them."""
    j = np.int64(cuda.threadIdx.x)
    while j < cut[3] and cut[8] > 1:
        post(box, base + j * n_parts, load(tables, j), mark)
        j += cuda.blockDim.x


@cuda.jit(device=True)
def save_cut_pixels(saved, i, box, base, part, n_parts, n_groups, cut, mark):
    """Save the sum of all runs' shares of every n_runs-th channel: a warp for each."""
    n_warps, rank = cuda.blockDim.x >> 5, cuda.threadIdx.x & 31
    n_channels, run, n_runs = cut[3], cut[4], cut[8]
    j = run + (n_warps - 1 - (cuda.threadIdx.x >> 5)) * n_runs
    while n_runs > 1 and j < n_channels:
        total = ZERO
        if rank < n_runs:
            first = base + j * n_parts + part - run * n_groups + rank * n_groups
            n_mine = quotient(n_runs - rank - 1, 32) + 1
            total = sum_of_words(box, first, 32 * n_groups, n_mine, mark)
        total = lanes_sum(total, 32)
        if rank == 0:
            store(saved, i + j, total)
        j += n_warps * n_runs


def scale_pixels(shifted):
    """scale(…): y = x times the channel's scale and, `shifted`, plus its shift."""

    @cuda.jit(device=True)
    def scale(
        cache, place, y, sample, cut, shared_out, group, C, n_pixels, tables, scales, shifts,
        vectors,
    ):  # fmt: skip
        values = cuda.local.array((SCALE_UNROLL, MAX_WIDTH), np.float32)
        factors = cuda.local.array((1, MAX_WIDTH), np.float32)
        added = cuda.local.array((1, MAX_WIDTH), np.float32)
        width, n_rows, n_channels = vector_width(y), cut[1], cut[3]
        column, row, n_at_once = shared_out[1], shared_out[2], shared_out[0]
        for k in range(width):
            j = min(column + k, n_channels - 1)  # past the row's end nobody looks
            factors[0, k] = load(tables, scales + j)
            if shifted:
                added[0, k] = load(tables, shifts + j)
        start, mine = sample + cut[0] + column, row
        while row < n_rows and mine < n_at_once:
            for u in range(SCALE_UNROLL):
                if row + u * n_at_once < n_rows:
                    i = place + (row + u * n_at_once) * group + column
                    load_vector(values[u], cache, i)
            for u in range(SCALE_UNROLL):
                if row < n_rows:
                    for k in range(width):
                        product = values[u, k] * factors[0, k]
                        values[u, k] = product + added[0, k] if shifted else product
                    if vectors:
                        store_vector(y, start + row * C, values[u])
                    else:
                        for k in range(width):
                            if column + k < n_channels:
                                store(y, start + row * C + k, values[u, k])
                row += n_at_once

    return scale
