"""The rung `implicit_gemm`, forward and dx: a matrix product, of which one factor is never made.

Each row is a pixel of the result, each column one of its channels, and what is summed over are the
channels and filter taps behind it, t = (channel, tap), or (tap, channel) where channels are last in
memory. The row's factors are gathered from `source` (x, or for dx dy) where the taps meet it; the
column's are the weights.

A block makes a tile of pixels and channels. Where a tap meets the source in its plane is the same
for every channel, so the block finds it once for each of its pixels and taps: `places`. It counts
in elements from the first of the block's images, and is −1 where the tap meets nothing.

dx of a pixel gathers from dy: input h is tap r of output (h + padding − r·dilation) / stride, if
that is whole. Forward's own is p·stride − padding + r·dilation. So both directions are
(line·scale + shift + tap·step) / divisor, each with numbers of its own.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.product import BATCH, SLOTS, STAGES, TERMS, batches
from course_lib.runtime.intrinsics import allow_next_kernel, load, store, wait_for_previous_kernel
from course_lib.runtime.intrinsics.gather import gather_async
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but


@cuda.jit(device=True)
def line_met(line, tap, size, direction):
    """The line (row or column) of the source that `tap` meets, or −1."""
    scale, shift, step, divisor = direction
    met = np.int32(line * scale + shift + tap * step)
    if divisor > 1 and met > 0:
        met, rest = divided(met, divisor)
        if rest != 0:
            return np.int32(-1)
    return met if met >= 0 and met < size else np.int32(-1)


def gather_parts(engine):
    """The steps of the kernels below that a tile's size decides, as device functions."""
    rows, n_threads = engine.rows, engine.n_threads
    pitch, n_rows_of_threads = (
        rows + engine.pad,
        n_threads // rows,
    )  # which share the taps of a pixel

    @cuda.jit(device=True)
    def find_places(places, pixel, valid, result, source, taps, steps, down, right):
        """places[tap·rows + m] of the thread's pixel m; of one tap more too, which meets nothing.

        `result`, `source` and `taps` are sizes: (rows, columns). `pixel` counts from the first
        pixel of the first image; `steps` are those of an image and a pixel of the source.
        """
        (P, Q), (H, W), (R, S) = result, source, taps
        image, rest = divided(pixel, P * Q)
        p, q = divided(rest, Q)
        tap = cuda.threadIdx.x // rows
        while tap <= R * S:
            place = np.int32(-1)
            if valid and tap < R * S:
                r, s = divided(tap, S)
                h, w = line_met(p, r, H, down), line_met(q, s, W, right)
                if h >= 0 and w >= 0:
                    place = np.int32(image * steps[0] + (h * W + w) * steps[1])
            places[tap * rows + cuda.threadIdx.x % rows] = place
            tap += n_rows_of_threads

    @cuda.jit(device=True)
    def find_terms(terms, tile, n_terms, sizes, channel_step, weight_steps, channels_last):
        """Where the terms of a tile are; each thread below TERMS finds one.

        terms  (row of `places`, place of the channel in the source, of the weight in its column)
        sizes  (channels, taps)
        """
        tap_rows, channel_places, weight_places = terms
        tid = cuda.threadIdx.x
        if tid < TERMS:
            t, i = np.int32(tile * TERMS + tid), tile % 2 * TERMS + tid
            tap, channel, place = sizes[1], np.int32(0), np.int32(-1)
            if t < n_terms:
                if channels_last:
                    tap, channel = divided(t, sizes[0])
                else:
                    channel, tap = divided(t, sizes[1])
                place = np.int32(channel * weight_steps[0] + tap * weight_steps[1])
            tap_rows[i], weight_places[i] = tap * rows, place
            channel_places[i] = np.int32(channel * channel_step)

    @cuda.jit(device=True)
    def fetch_pixels(tiles, at, source, base, places, terms, first, by_pixel):
        """Fetch a tile of the block's pixels; neighbours take neighbouring pixels, or terms."""
        tap_rows, channel_places, _ = terms
        tid = cuda.threadIdx.x
        for batch in range(batches(rows)):
            for u in range(BATCH):
                i = batch * BATCH + u
                m, t = tid % rows, tid // rows + i * n_rows_of_threads
                if not by_pixel:
                    m, t = tid // TERMS + i * (n_threads // TERMS), tid % TERMS
                place = places[np.uint32(tap_rows[np.uint32(first + t)] + m)]
                where = base + (place + channel_places[np.uint32(first + t)])
                gather_async(tiles, at + t * pitch + m, source, where, place >= 0)

    @cuda.jit(device=True)
    def find_row(row_starts, row, n_rows, sizes, channels_last):
        """Where the thread's pixel, `row` of all, begins in the result; −1 if there is none."""
        PQ, n_channels = sizes
        start = np.int64(-1)
        if row < n_rows:
            image = row // PQ
            start = image * n_channels * PQ + (row - image * PQ)
            if channels_last:
                start = row * n_channels
        if cuda.threadIdx.x < rows:
            row_starts[cuda.threadIdx.x] = start

    return find_places, find_terms, fetch_pixels, find_row


def line_fetcher(engine, lines):
    """The device function that fetches a tile of `lines` rows or columns from an array."""
    n_threads, pitch = engine.n_threads, lines + engine.pad

    @cuda.jit(device=True)
    def fetch_lines(tiles, at, source, base, step, n_lines, term_places, first, by_line):
        """Number t of line m lies at base + m·step + term_places[first + t].

        A place of −1, and a line from `n_lines` on, stands for zeros.
        """
        tid = cuda.threadIdx.x
        for batch in range(batches(lines)):
            for u in range(BATCH):
                i = batch * BATCH + u
                m, t = tid % lines, tid // lines + i * (n_threads // lines)
                if not by_line:
                    m, t = tid // TERMS + i * (n_threads // TERMS), tid % TERMS
                place = term_places[np.uint32(first + t)]
                where, valid = base + m * step + place, place >= 0 and m < n_lines
                gather_async(tiles, at + t * pitch + m, source, where, valid)

    return fetch_lines


def writer(engine):
    """The device function that brings a block's sums to the result, by way of shared memory.

    There they lie so that neighbouring threads can write what lies side by side in the result. The
    tiles of a pair are smaller than all the sums, which therefore come in `n_parts` parts.
    """
    columns, n_threads, n_parts = engine.columns, engine.n_threads, engine.n_parts
    (n_mine, n_others), row_of, column_of = engine.per_thread, engine.row_of, engine.column_of
    sum_of = engine.sum_of
    n_rows = engine.rows // n_parts  # of a part
    together = engine.rows_together // n_parts  # rows of a part that lie together in the tile

    @cuda.jit(device=True)
    def write(sums, tiles, result, row_starts, step, bias, biased, channel, n_left, last):
        tid = cuda.threadIdx.x
        for part in range(n_parts):
            cuda.syncthreads()
            for i in range(n_mine):
                for j in range(n_others):
                    if i // (n_mine // n_parts) == part:
                        row = row_of(i)
                        row = row // (together * n_parts) * together + row % together
                        store(tiles, column_of(j) * (n_rows + 1) + row, sums[sum_of(i, j)])
            cuda.syncthreads()
            for i in range(tid, n_rows * columns, n_threads):
                row, column = i % n_rows, i // n_rows
                if last:
                    row, column = i // columns, i % columns
                whole = (row // together * n_parts + part) * together + row % together
                start = row_starts[np.uint32(whole)]
                if start >= 0 and column < n_left:
                    value = load(tiles, column * (n_rows + 1) + row)
                    if biased:
                        value += load(bias, channel + column)
                    store(result, start + (channel + column) * step, value)

    return write


def gather_kernel(engine):
    """The kernel of forward and dx."""
    rows, columns, multiply = engine.rows, engine.columns, engine.multiply
    row_size, column_size = (TERMS * (lines + engine.pad) for lines in (rows, columns))
    pair_size, n_sums = row_size + column_size, engine.per_thread[0] * engine.per_thread[1]
    shared_size = STAGES * pair_size
    find_places, find_terms, fetch_pixels, find_row = gather_parts(engine)
    fetch_lines, write = line_fetcher(engine, columns), writer(engine)

    @cuda.jit(device=True)
    def add_products(
        sums, tiles, source, base, places, weight, weight_base, n_left, terms, sizes, steps,
        by_column, last, exact,
    ):  # fmt: skip
        """All tiles one after another, each fetched while the one before it is worked on."""
        channel_step, column_step, weight_steps = steps
        n_terms = sizes[0] * sizes[1]
        n_tiles = (n_terms + TERMS - 1) // TERMS
        for tile in range(2):
            find_terms(terms, tile, n_terms, sizes, channel_step, weight_steps, last)
        cuda.syncthreads()
        for tile in range(-1, n_tiles):
            if tile >= 0:
                wait_for_groups_but(0)
                cuda.syncthreads()
            if tile + 1 < n_tiles:
                at, first = (tile + 1) % STAGES * pair_size, (tile + 1) % 2 * TERMS
                fetch_pixels(tiles, at, source, base, places, terms, first, not last)
                fetch_lines(
                    tiles, at + row_size, weight, weight_base, column_step, n_left, terms[2],
                    first, by_column,
                )  # fmt: skip
                end_group()
            if tile >= 0:
                find_terms(terms, tile + 2, n_terms, sizes, channel_step, weight_steps, last)
                at = tile % STAGES * pair_size
                multiply(sums, tiles, at, at + row_size, exact)

    @cuda.jit
    def gathered_product_kernel(
        source, weight, bias, result, biased, exact, N, groups, n_columns, P, Q, n_channels, H, W,
        R, S, scale_h, shift_h, step_h, divisor_h, scale_w, shift_w, step_w, divisor_w,
        column_step, weight_channel_step, weight_tap_step, by_column, last,
    ):  # fmt: skip
        # A group has n_columns channels of the result (P × Q), n_channels of the source (H × W).
        tiles = cuda.shared.array(shared_size, np.float32, alignment=16)
        tap_rows = cuda.shared.array(SLOTS, np.int32)
        channel_places = cuda.shared.array(SLOTS, np.int32)
        weight_places = cuda.shared.array(SLOTS, np.int32)
        row_starts = cuda.shared.array(rows, np.int64)
        places = cuda.shared.array(0, np.int32)
        sums = cuda.local.array(n_sums, np.float32)
        for i in range(n_sums):
            sums[i] = ZERO
        n_rows, n_parts = np.int64(N) * P * Q, (n_columns + columns - 1) // columns
        part, m = cuda.blockIdx.x % (n_parts * groups), cuda.threadIdx.x % rows
        row = np.int64(cuda.blockIdx.x // (n_parts * groups)) * rows
        group, column, image = part // n_parts, part % n_parts * columns, row // (P * Q)
        channel_step, pixel_step = (1, n_channels * groups) if last else (H * W, 1)
        image_step = n_channels * groups * H * W
        find_places(
            places, np.int32(row - image * P * Q + m), row + m < n_rows, (P, Q), (H, W), (R, S),
            (image_step, pixel_step), (scale_h, shift_h, step_h, divisor_h),
            (scale_w, shift_w, step_w, divisor_w),
        )  # fmt: skip
        find_row(row_starts, row + m, n_rows, (P * Q, n_columns * groups), last)
        base = image * image_step + np.int64(group) * n_channels * channel_step
        weight_base = np.int64(group) * n_columns * n_channels * R * S + column * column_step
        sizes = n_channels, np.int32(R * S)
        steps = channel_step, column_step, (weight_channel_step, weight_tap_step)
        terms = tap_rows, channel_places, weight_places
        allow_next_kernel()
        wait_for_previous_kernel()
        add_products(
            sums, tiles, source, base, places, weight, weight_base, n_columns - column, terms,
            sizes, steps, by_column, last, exact,
        )  # fmt: skip
        step, channel = np.int64(1 if last else P * Q), group * n_columns + column
        n_left = n_columns - column
        write(sums, tiles, result, row_starts, step, bias, biased, channel, n_left, last)

    return gathered_product_kernel
