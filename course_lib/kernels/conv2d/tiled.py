"""The rung `tiled`: a block keeps a part of the source and some weights in shared memory.

Forward and dx: a block makes a tile of TILE_H × TILE_W pixels of some channels of the result, each
thread one pixel of FILTERS channels. The pixels of the source that they all read, the tile and its
halo, are read once into shared memory, CHANNELS channels at a time, and so are the weights. Both
directions are the gather that `implicit_gemm` describes.

dweight: a block passes over tiles of x, with their halo, of one channel, and of dy, of FILTERS
channels; each thread sums some of the weights. Blocks share the tiles; `total_kernel` adds up.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided, index_of
from course_lib.kernels.conv2d.implicit_gemm import line_met
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    wait_for_previous_kernel,
)

TILE_H, TILE_W = 8, 16
BLOCK_SIZE = TILE_H * TILE_W  # a thread for each pixel of the tile
FILTERS, CHANNELS = 8, 4
MOST_TAPS = 121  # of a filter
WEIGHTS_SIZE = MOST_TAPS * FILTERS * CHANNELS
SUMS_SIZE = MOST_TAPS * FILTERS
UPSTREAM_SIZE = FILTERS * BLOCK_SIZE


@cuda.jit(device=True)
def first_met(line, taps, direction):
    """The first line of the source that a tap of `line`, or of any line behind it, may meet."""
    scale, shift, step, divisor = direction
    first = line * scale + shift + min(0, (taps - 1) * step)
    return np.int32(first // divisor)  # downwards, below 0 too


@cuda.jit(device=True)
def read_halo(halo, source, n, channel, n_channels, corner, span, size, all_channels, last):
    """halo[c, h, w] of the source from `corner` on, and 0 outside of it and of its channels."""
    i = np.int32(cuda.threadIdx.x)
    while i < n_channels[0] * span[0] * span[1]:
        line, w = divided(i, span[1])
        c, h = divided(line, span[0])
        h, w = np.int32(h + corner[0]), np.int32(w + corner[1])
        value = ZERO
        if c < n_channels[1] and h >= 0 and h < size[0] and w >= 0 and w < size[1]:
            at = index_of(n, channel + c, h, w, all_channels, size[0], size[1], last)
            value = load(source, at)
        halo[np.uint32(i)] = value
        i += BLOCK_SIZE


@cuda.jit(device=True)
def read_weights(weights, weight, base, n_taps, n_channels, n_filters, steps):
    """weights[(c·taps + tap)·FILTERS + k], and 0 beyond the group's channels and filters."""
    i = np.int32(cuda.threadIdx.x)
    while i < CHANNELS * n_taps * FILTERS:
        rest, k = divided(i, FILTERS)
        c, tap = divided(rest, n_taps)
        value = ZERO
        if c < n_channels and k < n_filters:
            value = load(weight, base + k * steps[0] + c * steps[1] + tap * steps[2])
        weights[np.uint32(i)] = value
        i += BLOCK_SIZE


@cuda.jit(device=True)
def add_products(sums, halo, weights, pixel, corner, span, size, taps, down, right):
    """Every tap of the thread's pixel, in CHANNELS channels, for FILTERS results."""
    some = cuda.local.array((2, 4), np.float32)
    for r in range(taps[0]):
        h = line_met(pixel[0], r, size[0], down)
        for s in range(taps[1]):
            w = line_met(pixel[1], s, size[1], right)
            if h >= 0 and w >= 0:
                at = (h - corner[0]) * span[1] + w - corner[1]
                place = (r * taps[1] + s) * FILTERS
                for c in range(CHANNELS):
                    value = halo[np.uint32(at + c * span[0] * span[1])]
                    mine = np.int64(place + c * taps[0] * taps[1] * FILTERS)
                    load_vector(some[0], weights, mine)
                    load_vector(some[1], weights, mine + 4)
                    for k in range(FILTERS):
                        sums[k] += value * some[k >> 2, k & 3]


@cuda.jit(device=True)
def write_pixel(sums, result, bias, biased, n, channel, n_left, pixel, n_channels, size, last):
    if pixel[0] < size[0] and pixel[1] < size[1]:
        for k in range(FILTERS):
            if k < n_left:
                value = sums[k]
                if biased:
                    value += load(bias, channel + k)
                at = index_of(
                    n, channel + k, pixel[0], pixel[1], n_channels, size[0], size[1], last
                )
                store(result, at, value)


@cuda.jit
def tiled_kernel(
    source, weight, bias, result, biased, N, groups, n_filters, P, Q, n_channels, H, W, R, S,
    scale_h, shift_h, step_h, divisor_h, scale_w, shift_w, step_w, divisor_w,
    filter_step, weight_channel_step, weight_tap_step, span_h, span_w, last,
):  # fmt: skip
    # A group has n_filters channels of the result (P × Q), n_channels of the source (H × W).
    allow_next_kernel()
    wait_for_previous_kernel()
    weights = cuda.shared.array(WEIGHTS_SIZE, np.float32, alignment=16)
    halo = cuda.shared.array(0, np.float32)
    sums = cuda.local.array(FILTERS, np.float32)
    for k in range(FILTERS):
        sums[k] = ZERO
    n_down, n_right = (P + TILE_H - 1) // TILE_H, (Q + TILE_W - 1) // TILE_W
    n_parts = (n_filters + FILTERS - 1) // FILTERS
    tile, part = cuda.blockIdx.x // (n_parts * groups), cuda.blockIdx.x % (n_parts * groups)
    group, first, n = part // n_parts, part % n_parts * FILTERS, tile // (n_down * n_right)
    top, left = tile // n_right % n_down * TILE_H, tile % n_right * TILE_W
    p, q = top + cuda.threadIdx.x // TILE_W, left + cuda.threadIdx.x % TILE_W
    down, right = (scale_h, shift_h, step_h, divisor_h), (scale_w, shift_w, step_w, divisor_w)
    span, size, taps = (span_h, span_w), (H, W), (R, S)
    corner = first_met(top, R, down), first_met(left, S, right)
    base = np.int64(group) * n_filters * n_channels * R * S + np.int64(first) * filter_step
    for c in range(0, n_channels, CHANNELS):
        cuda.syncthreads()
        read_halo(
            halo, source, n, group * n_channels + c, (CHANNELS, n_channels - c), corner, span, size,
            n_channels * groups, last,
        )  # fmt: skip
        steps = filter_step, weight_channel_step, weight_tap_step
        at = base + np.int64(c) * weight_channel_step
        read_weights(weights, weight, at, R * S, n_channels - c, n_filters - first, steps)
        cuda.syncthreads()
        if p < P and q < Q:
            add_products(sums, halo, weights, (p, q), corner, span, size, taps, down, right)
    write_pixel(
        sums, result, bias, biased, n, group * n_filters + first, n_filters - first, (p, q),
        groups * n_filters, (P, Q), last,
    )  # fmt: skip


@cuda.jit(device=True)
def read_upstream(upstream, dy, n, k, n_left, top, left, K, size, last):
    """upstream[k, pixel] of the tile, 0 beyond the end of dy and of the group's channels."""
    p, q = top + cuda.threadIdx.x // TILE_W, left + cuda.threadIdx.x % TILE_W
    for i in range(FILTERS):
        value = ZERO
        if i < n_left and p < size[0] and q < size[1]:
            value = load(dy, index_of(n, k + i, p, q, K, size[0], size[1], last))
        upstream[i * BLOCK_SIZE + cuda.threadIdx.x] = value


@cuda.jit(device=True)
def add_tile(sums, halo, upstream, n_taps, S, span_w, stride, dilation):
    """sums[tap·FILTERS + k] += what the tile has for it; each thread sees to some of them."""
    for i in range(cuda.threadIdx.x, n_taps * FILTERS, BLOCK_SIZE):
        tap, k = i // FILTERS, i % FILTERS
        at = tap // S * dilation[0] * span_w + tap % S * dilation[1]
        total = ZERO
        for p in range(TILE_H):
            for q in range(TILE_W):
                place = at + p * stride[0] * span_w + q * stride[1]
                value = halo[np.uint32(place)]
                total += value * upstream[np.uint32(k * BLOCK_SIZE + p * TILE_W + q)]
        sums[i] += total


@cuda.jit
def tiled_dweight_kernel(
    dy, x, partial, n_tiles, n_splits, span_h, span_w, N, C, H, W, K, R, S, P, Q,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, last,
):  # fmt: skip
    # Block `(part · channels + channel) · splits + split`; partial is (splits, K, C/groups, R, S).
    allow_next_kernel()
    wait_for_previous_kernel()
    upstream = cuda.shared.array(UPSTREAM_SIZE, np.float32)
    sums = cuda.shared.array(SUMS_SIZE, np.float32)
    halo = cuda.shared.array(0, np.float32)
    split, block = cuda.blockIdx.x % n_splits, cuda.blockIdx.x // n_splits
    n_channels, n_filters = C // groups, K // groups
    n_parts, n_down = (n_filters + FILTERS - 1) // FILTERS, (P + TILE_H - 1) // TILE_H
    n_right, c, part = (Q + TILE_W - 1) // TILE_W, block % n_channels, block // n_channels
    group, first = part // n_parts, part % n_parts * FILTERS
    k, n_left = group * n_filters + first, n_filters - first
    for i in range(cuda.threadIdx.x, R * S * FILTERS, BLOCK_SIZE):
        sums[i] = ZERO
    for tile in range(split * n_tiles, min((split + 1) * n_tiles, N * n_down * n_right)):
        n, top = tile // (n_down * n_right), tile // n_right % n_down * TILE_H
        left = tile % n_right * TILE_W
        corner = np.int32(top * stride_h - pad_h), np.int32(left * stride_w - pad_w)
        cuda.syncthreads()
        read_upstream(upstream, dy, n, k, n_left, top, left, K, (P, Q), last)
        channel = group * n_channels + c
        read_halo(halo, x, n, channel, (1, 1), corner, (span_h, span_w), (H, W), C, last)
        cuda.syncthreads()
        strides, dilations = (stride_h, stride_w), (dilation_h, dilation_w)
        add_tile(sums, halo, upstream, R * S, S, span_w, strides, dilations)
    for i in range(cuda.threadIdx.x, R * S * FILTERS, BLOCK_SIZE):
        tap, own = i // FILTERS, i % FILTERS
        if own < n_left:
            at = index_of(k + own, c, tap // S, tap % S, n_channels, R, S, last)
            partial[np.int64(split) * K * n_channels * R * S + at] = sums[i]
