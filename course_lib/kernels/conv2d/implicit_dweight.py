"""The rung `implicit_gemm`, dweight: a product in which both factors are gathered.

Each row is a term t of a filter (channel and tap, in the order in which weights lie in memory),
each column a channel of y, and what is summed over are the pixels of y in all images: x where the
tap meets it, times dy. There are few rows and columns and many pixels, so blocks share the pixels
of a tile: each writes its sums, and `total_kernel` adds them up, in a fixed order.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.implicit_gemm import line_fetcher, writer
from course_lib.kernels.conv2d.product import BATCH, SLOTS, STAGES, TERMS, batches
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load_vector,
    store,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.gather import gather_async
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but

NOWHERE = np.int32(-(2**30))  # no line of an image, whatever is added to it
TOTAL_LANES, TOTAL_PARTS = 32, 8  # threads side by side, and threads that share the sums of one
TOTAL_THREADS = TOTAL_LANES * TOTAL_PARTS
WIDTH = 4  # sums that a thread adds up at a time


def dweight_parts(engine):
    """The steps of the kernel below that a tile's size decides, as device functions."""
    rows, n_threads = engine.rows, engine.n_threads

    @cuda.jit(device=True)
    def find_row(lines, row_starts, row, n_terms, start, sizes, dilation, steps, channels_last):
        """Where the thread's term meets x, relative to where a pixel does, and its place in sums.

        sizes  (channels, rows of taps, columns of taps, columns of x)
        """
        line_h, line_w, line_place = lines
        n_channels, R, S, W = sizes
        m = cuda.threadIdx.x % rows
        h, w, place, mine = NOWHERE, np.int32(0), np.int32(0), np.int64(-1)
        if row < n_terms:
            if channels_last:
                tap, channel = divided(row, n_channels)
            else:
                channel, tap = divided(row, R * S)
            r, s = divided(tap, S)
            h, w = np.int32(r * dilation[0]), np.int32(s * dilation[1])
            place = np.int32(channel * steps[0] + (h * W + w) * steps[1])
            mine = start + row
        if cuda.threadIdx.x < rows:
            line_h[m], line_w[m], line_place[m], row_starts[m] = h, w, place, mine

    @cuda.jit(device=True)
    def find_pixels(pixels, tile, first, stop, y_size, x_size, stride, pad, steps):
        """Where the pixels of a tile lie in x and dy; each thread below TERMS finds one.

        steps  (of a pixel of x, an image of x, a pixel of dy, an image of dy)
        """
        pixel_h, pixel_w, x_starts, dy_starts = pixels
        tid = cuda.threadIdx.x
        if tid < TERMS:
            pixel, i = first + tile * TERMS + tid, tile % 2 * TERMS + tid
            h, w, start, dy_start = NOWHERE, np.int32(0), np.int64(0), np.int64(-1)
            if pixel < stop:
                image = pixel // (y_size[0] * y_size[1])
                rest = np.int32(pixel - image * (y_size[0] * y_size[1]))
                p, q = divided(rest, y_size[1])
                h, w = np.int32(p * stride[0] - pad[0]), np.int32(q * stride[1] - pad[1])
                start = image * steps[1] + (np.int64(h) * x_size[1] + w) * steps[0]
                dy_start = image * steps[3] + np.int64(rest) * steps[2]
            pixel_h[i], pixel_w[i], x_starts[i], dy_starts[i] = h, w, start, dy_start

    @cuda.jit(device=True)
    def fetch_terms(tiles, at, x, base, lines, pixels, first, x_size, by_line):
        """Fetch a tile of x: number u of line m is where the line's tap meets pixel u."""
        line_h, line_w, line_place = lines
        pixel_h, pixel_w, x_starts, _ = pixels
        tid = cuda.threadIdx.x
        for batch in range(batches(rows)):
            for i in range(batch * BATCH, (batch + 1) * BATCH):
                m, u = tid % rows, tid // rows + i * (n_threads // rows)
                if not by_line:
                    m, u = tid // TERMS + i * (n_threads // TERMS), tid % TERMS
                line, pixel = np.uint32(m), np.uint32(first + u)
                h = np.int32(pixel_h[pixel] + line_h[line])
                w = np.int32(pixel_w[pixel] + line_w[line])
                valid = h >= 0 and h < x_size[0] and w >= 0 and w < x_size[1]
                where = base + x_starts[pixel] + line_place[line]
                gather_async(tiles, at + u * (rows + engine.pad) + m, x, where, valid)

    return find_row, find_pixels, fetch_terms


def dweight_kernel(engine):
    """The kernel of dweight, up to the sums over the blocks that share a tile."""
    rows, columns, multiply = engine.rows, engine.columns, engine.multiply
    row_size, column_size = (TERMS * (lines + engine.pad) for lines in (rows, columns))
    pair_size, n_sums = row_size + column_size, engine.per_thread[0] * engine.per_thread[1]
    shared_size = STAGES * pair_size
    find_row, find_pixels, fetch_terms = dweight_parts(engine)
    fetch_lines, write = line_fetcher(engine, columns), writer(engine)

    @cuda.jit(device=True)
    def add_products(
        sums, tiles, x, base, dy, dy_base, channel_step, n_left, lines, pixels, first, stop, y_size,
        x_size, stride, pad, steps, last, exact,
    ):  # fmt: skip
        """All tiles one after another, each fetched while the one before it is worked on."""
        n_tiles = np.int32((stop - first + TERMS - 1) // TERMS)
        for tile in range(2):
            find_pixels(pixels, tile, first, stop, y_size, x_size, stride, pad, steps)
        cuda.syncthreads()
        for tile in range(-1, n_tiles):
            if tile >= 0:
                wait_for_groups_but(0)
                cuda.syncthreads()
            if tile + 1 < n_tiles:
                at, slot = (tile + 1) % STAGES * pair_size, (tile + 1) % 2 * TERMS
                fetch_terms(tiles, at, x, base, lines, pixels, slot, x_size, last)
                fetch_lines(
                    tiles, at + row_size, dy, dy_base, channel_step, n_left, pixels[3], slot, last
                )
                end_group()
            if tile >= 0:
                find_pixels(pixels, tile + 2, first, stop, y_size, x_size, stride, pad, steps)
                at = tile % STAGES * pair_size
                multiply(sums, tiles, at, at + row_size, exact)

    @cuda.jit
    def dweight_product_kernel(
        dy, x, partial, exact, length, n_splits, N, C, H, W, K, R, S, P, Q, stride_h, stride_w,
        pad_h, pad_w, dilation_h, dilation_w, groups, last,
    ):  # fmt: skip
        # Each split sums `length` pixels, a multiple of TERMS; partial is (splits, K, terms).
        tiles = cuda.shared.array(shared_size, np.float32, alignment=16)
        line_h = cuda.shared.array(rows, np.int32)
        line_w = cuda.shared.array(rows, np.int32)
        line_place = cuda.shared.array(rows, np.int32)
        row_starts = cuda.shared.array(rows, np.int64)
        pixel_h = cuda.shared.array(SLOTS, np.int32)
        pixel_w = cuda.shared.array(SLOTS, np.int32)
        x_starts = cuda.shared.array(SLOTS, np.int64)
        dy_starts = cuda.shared.array(SLOTS, np.int64)
        sums = cuda.local.array(n_sums, np.float32)
        for i in range(n_sums):
            sums[i] = ZERO
        n_channels, n_columns, block = C // groups, K // groups, cuda.blockIdx.x
        n_terms, n_parts = n_channels * R * S, (n_columns + columns - 1) // columns
        split, block = block % n_splits, block // n_splits
        part, row = block % (n_parts * groups), block // (n_parts * groups) * rows
        group, column = part // n_parts, part % n_parts * columns
        x_step, dy_step, x_channel, dy_channel = (C, K, 1, 1) if last else (1, 1, H * W, P * Q)
        lines, pixels = (line_h, line_w, line_place), (pixel_h, pixel_w, x_starts, dy_starts)
        first, start = split * np.int64(length), split * np.int64(K) * n_terms
        find_row(
            lines, row_starts, row + cuda.threadIdx.x % rows, n_terms, start,
            (n_channels, R, S, W), (dilation_h, dilation_w), (x_channel, x_step), last,
        )  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        add_products(
            sums, tiles, x, np.int64(group) * n_channels * x_channel, dy,
            np.int64(group * n_columns + column) * dy_channel, dy_channel, n_columns - column,
            lines, pixels, first, min(first + length, np.int64(N) * P * Q), (P, Q), (H, W),
            (stride_h, stride_w), (pad_h, pad_w), (x_step, C * H * W, dy_step, K * P * Q), last,
            exact,
        )  # fmt: skip
        write(
            sums, tiles, partial, row_starts, np.int64(n_terms), partial, False,
            group * n_columns + column, n_columns - column, False,
        )  # fmt: skip

    return dweight_product_kernel


@cuda.jit
def total_kernel(partial, result, n_splits):
    """result[i] = Σ partial[split, i]: threads side by side, TOTAL_PARTS of them for each i."""
    allow_next_kernel()
    wait_for_previous_kernel()
    totals = cuda.shared.array(TOTAL_THREADS, np.float32)
    tid, n = cuda.threadIdx.x, result.shape[0]
    i = np.int64(cuda.blockIdx.x) * TOTAL_LANES + tid % TOTAL_LANES
    total = ZERO
    if i < n:
        for split in range(tid // TOTAL_LANES, n_splits, TOTAL_PARTS):
            total += partial[split * n + i]
    totals[tid] = total
    cuda.syncthreads()
    if tid < TOTAL_LANES and i < n:
        for part in range(1, TOTAL_PARTS):
            total += totals[part * TOTAL_LANES + tid]
        store(result, i, total)


@cuda.jit
def sum_kernel(partial, dweight, n_splits, size, n_channels, C, n_taps, side_by_side):
    """dweight = Σ partial[split], `n_splits` of `size` numbers (filters, n_taps, n_channels) each.

    dweight takes K filters of C channels: (K, n_taps, C) `side_by_side`, else (K, C, n_taps).
    """
    totals = cuda.shared.array((TOTAL_PARTS, TOTAL_LANES, WIDTH), np.float32)
    values, total = cuda.local.array(WIDTH, np.float32), cuda.local.array(WIDTH, np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    lane, part = cuda.threadIdx.x % TOTAL_LANES, cuda.threadIdx.x // TOTAL_LANES  # of WIDTH sums
    n = dweight.shape[0] // C * n_channels
    i = (np.int64(cuda.blockIdx.x) * TOTAL_LANES + lane) * WIDTH
    for e in range(WIDTH):
        total[e] = ZERO
    if i < n:
        for split in range(part, n_splits, TOTAL_PARTS):
            load_vector(values, partial, split * size + i)
            for e in range(WIDTH):
                total[e] += values[e]
    for e in range(WIDTH):
        totals[part, lane, e] = total[e]
    cuda.syncthreads()
    if part == 0 and i < n:
        line, c = i // n_channels, i % n_channels
        for e in range(WIDTH):
            for other in range(1, TOTAL_PARTS):
                total[e] += totals[other, lane, e]
            place = line * C + c + e
            if not side_by_side:
                place = (line // n_taps * C + c + e) * n_taps + line % n_taps
            if c + e < C:
                store(dweight, place, total[e])


def add_up(partial, result, n_splits):
    """result = Σ partial[split], in a fixed order."""
    launch(
        total_kernel, math.ceil(arrays.size_of(result) / TOTAL_LANES), TOTAL_THREADS,
        partial, result, n_splits, flat=True, overlap=True,
    )  # fmt: skip
