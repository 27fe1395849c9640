"""The rung `few_channels`: small filters over one to four channels, as first layers have them.

A result is a sum of so few products that memory is the limit: what counts is y, written once, and
dy, read once. x is small beside them. The pixels of y are numbered through all images; a block
takes a stretch of them, a *tile*, and copies what its filters meet into shared memory, padded with
zeros: whole lines of x, one plane for each channel. The lines of all images, padded, are numbered
through as well: `tall` of them to an image.

Forward, a thread has all that the filters meet at some pixels in registers, and goes over the
filters with it. Pixels of a warp lie side by side, and so do its results; where channels do
(`last`), four threads share a pixel and each makes 16 bytes of its channels at a time.

dweight and dbias: a thread keeps the sums of some filters, one for each tap and one for dbias, and
adds up what it finds at its pixels; the sums of a block's threads are added up, and those of all
blocks by `finish_kernel`, in a fixed order.

Taps are counted in the order in which weights lie in memory.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.gather import gather_async
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but

BLOCK_SIZE = 128
N_WARPS = BLOCK_SIZE // 32
FILTERS = 64  # of a block, forward, at most
LANES = 4  # threads that share a pixel where channels lie side by side
MOST_UNROLLED = 32  # turns of a loop, for what it indexes to stay in registers


@cuda.jit(device=True)
def find_pixel(i, P, Q, tall, strides):
    """(image, line of x among all, column) where the filters' first taps meet pixel `i`."""
    image, rest = divided(i, np.int32(P * Q))
    p, q = divided(rest, Q)
    return image, np.int32(image * tall + p * strides[0]), np.int32(q * strides[1])


def parts(C, R, S, last):
    """(copy, tap_place): how x comes into shared memory, and where a tap lies there."""

    @cuda.jit(device=True)
    def copy(cache, at, x, top, n_lines, n_cols, tall, N, H, W, pad_h, pad_w):
        """Lines of x from number `top` on, padded, by all warps; not waited for."""
        lane_id, line = np.int32(cuda.threadIdx.x % 32), np.int32(cuda.threadIdx.x // 32)
        step_c, step_w = (1, C) if last else (H * W, 1)
        while line < n_lines:
            image, h = divided(top + line, tall)
            h = np.int32(h - pad_h)
            start = np.int64(image) * (C * H * W) + np.int64(np.int32(h * W * step_w))
            inside = image < N and h >= 0 and h < H
            for c in range(C):
                col = lane_id
                while col < n_cols:
                    w = np.int32(col - pad_w)
                    valid = inside and w >= 0 and w < W
                    place = at + (c * n_lines + line) * n_cols + col
                    where = start + np.int32(c * step_c + w * step_w)
                    gather_async(cache, np.uint32(place), x, where, valid)
                    col = np.int32(col + 32)
            line = np.int32(line + N_WARPS)

    @cuda.jit(device=True)
    def tap_place(t, plane, row_step, col_step):
        """Where tap `t` lies in shared memory, from the first one on."""
        if last:
            c, r, s = t % C, t // (S * C), t // C % S
        else:
            c, r, s = t // (R * S), t // S % R, t % S
        return np.int32(c * plane + r * row_step + s * col_step)

    return copy, tap_place


def in_turn(functions):
    """A device function that calls these, with the same arguments, and adds up what they return."""

    def both(one, other):
        @cuda.jit(device=True)
        def in_turn(*args):
            return one(*args) + other(*args)

        return in_turn

    return functools.reduce(both, functions)


@functools.cache
def forward_kernel(C, R, S, last, per_thread):
    """y, for filters of R × S over C channels; a thread has `per_thread` pixels."""
    N_TAPS, PER = C * R * S, per_thread
    PITCH = FILTERS if last else (N_TAPS + 3) // 4 * 4
    N_WEIGHTS = (N_TAPS if last else PITCH) * FILTERS
    N_SUMS, N_VALUES = PER * MAX_WIDTH, PER * N_TAPS
    SIDE = BLOCK_SIZE // LANES if last else BLOCK_SIZE  # threads that have different pixels
    TILE, AT_A_TIME = SIDE * PER, max(1, MOST_UNROLLED // (PER * 2))
    copy, tap_place = parts(C, R, S, last)

    @cuda.jit(device=True)
    def copy_weights(weights, biases, weight, bias, biased, first, n):
        """Those of the block's filters, zeros for what is missing: taps, or filters, in rows."""
        for e in range(cuda.threadIdx.x, N_WEIGHTS, BLOCK_SIZE):
            k, t = (e % PITCH, e // PITCH) if last else (e // PITCH, e % PITCH)
            value = ZERO
            if k < n and t < N_TAPS:
                value = load(weight, np.int64(first + k) * N_TAPS + t)
            weights[e] = value
        k = cuda.threadIdx.x
        if k < FILTERS:
            biases[k] = load(bias, first + k) if biased and k < n else ZERO

    @cuda.jit(device=True)
    def results(sums, values, weights, biases, k):
        """The sums of filter `k` at the thread's pixels."""
        row = cuda.local.array(4, np.float32)
        for j in range(PER):
            sums[j] = biases[k]
        for quarter in range(PITCH // 4):
            load_vector(row, weights, k * PITCH + quarter * 4)
            for e in range(4):
                t = quarter * 4 + e
                if t < N_TAPS:
                    for j in range(PER):
                        sums[j] += values[t * PER + j] * row[e]

    @cuda.jit(device=True)
    def planes(y, values, weights, biases, starts, n_pixels, first, n):
        """All filters, where the pixels of a channel lie side by side."""
        sums = cuda.local.array(PER, np.float32)
        for k in range(n):
            results(sums, values, weights, biases, k)
            step = np.int64(np.int32(first + k)) * n_pixels
            for j in range(PER):
                if starts[j] >= 0:
                    store(y, starts[j] + step, sums[j])

    @cuda.jit(device=True)
    def write(y, start, values, whole, n):
        """A vector of channels, of which `n` are there."""
        if whole:
            store_vector(y, start, values)
        else:
            for e in range(vector_width(y)):
                if e < n:
                    store(y, start + e, values[e])

    def adding(start):
        stop = min(N_TAPS, start + AT_A_TIME)

        @cuda.jit(device=True)
        def add_some(sums, values, weights, k, width):
            """The products of some taps, with a vector of filters."""
            row = cuda.local.array(4, np.float32)
            for t in range(start, stop):
                for quarter in range(width // 4):
                    load_vector(row, weights, np.int64(t * PITCH + k + quarter * 4))
                    for j in range(PER):
                        for e in range(4):
                            at = j * width + quarter * 4 + e
                            sums[at] += values[t * PER + j] * row[e]
            return 0

        return add_some

    def reading(start):
        stop = min(N_TAPS, start + MOST_UNROLLED)

        @cuda.jit(device=True)
        def read_some(values, j, cache, at, steps):
            """What some taps meet at the thread's pixel `j`."""
            for t in range(start, stop):
                values[t * PER + j] = cache[np.uint32(at + tap_place(t, *steps))]
            return 0

        return read_some

    add = in_turn(adding(t) for t in range(0, N_TAPS, AT_A_TIME))
    read = in_turn(reading(t) for t in range(0, N_TAPS, MOST_UNROLLED))

    @cuda.jit(device=True)
    def channels(y, values, weights, biases, starts, whole, n):
        """All filters, where the channels of a pixel lie side by side, a vector at a time."""
        sums = cuda.local.array(N_SUMS, np.float32)
        row = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(y)
        k = np.int32(cuda.threadIdx.x % LANES * width)
        while k < n:
            for e in range(width):
                for j in range(PER):
                    sums[j * width + e] = biases[np.uint32(k + e)]
            add(sums, values, weights, k, width)
            for j in range(PER):
                for e in range(width):
                    row[e] = sums[j * width + e]
                if starts[j] >= 0:
                    write(y, starts[j] + k, row, whole, n - k)
            k = np.int32(k + LANES * width)

    @cuda.jit
    def few_channels_kernel(
        x, weight, bias, y, biased, part, n_parts, n_lines, n_cols, tall, whole, N, H, W, K, P, Q,
        stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    ):  # fmt: skip
        # Block `tile * n_parts + which` makes `part` filters, or what is left, at a tile's pixels.
        cache = cuda.shared.array(0, np.float32)
        weights = cuda.shared.array(N_WEIGHTS, np.float32, alignment=16)
        biases = cuda.shared.array(FILTERS, np.float32)
        values = cuda.local.array(N_VALUES, np.float32)
        starts = cuda.local.array(PER, np.int64)
        tile, which = divided(cuda.blockIdx.x, n_parts)
        first = np.int32(which * part)
        n, n_pixels = min(np.int32(K - first), part), np.int32(P * Q)
        strides, i = (stride_h, stride_w), np.int32(tile * TILE)
        _, top, _ = find_pixel(i, P, Q, tall, strides)
        allow_next_kernel()
        wait_for_previous_kernel()
        copy(cache, 0, x, top, n_lines, n_cols, tall, N, H, W, pad_h, pad_w)
        end_group()
        copy_weights(weights, biases, weight, bias, biased, first, n)
        wait_for_groups_but(0)
        cuda.syncthreads()
        for j in range(PER):
            mine = cuda.threadIdx.x // LANES if last else cuda.threadIdx.x
            pixel = np.int32(i + mine + j * SIDE)
            image, line, col = find_pixel(pixel, P, Q, tall, strides)
            at = np.int32((line - top) * n_cols + col)
            if pixel >= N * n_pixels:
                at, starts[j] = np.int32(0), -1
            elif last:
                starts[j] = np.int64(pixel) * K + first
            else:
                starts[j] = np.int64(image) * np.int64(np.int32((K - 1) * n_pixels)) + pixel
            steps = n_lines * n_cols, dilation_h * n_cols, dilation_w
            read(values, j, cache, at, steps)
        if last:
            channels(y, values, weights, biases, starts, whole, n)
        else:
            planes(y, values, weights, biases, starts, n_pixels, first, n)

    return few_channels_kernel
