"""`tensor_core` where channels lie side by side: 16-bit numbers, 16 bytes at a time.

The product is that of `implicit_gemm`, forward and dx, but each term's number of channels is a
multiple of WIDTH, so that WIDTH neighbouring terms are neighbouring channels of one pixel, or of
one tap of a filter. Tiles are copied by 16 bytes, and go to the tensor cores as they are.

Tiles of rows hold a row's terms side by side, and so do those of forward's columns. The columns of
dx are channels of x, which lie side by side in the weights: its tiles hold the columns of each term
side by side, and are transposed on the way to the registers.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.implicit_gemm import line_met, writer
from course_lib.kernels.conv2d.product import (
    N_COLUMNS,
    N_ROWS,
    N_WORDS,
    WARP_COLUMNS,
    WARP_ROWS,
    tensor_engine,
)
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.matrix import (
    copy_part_async,
    load_matrices,
    load_matrices_transposed,
    multiply_add,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

WIDTH = 8  # numbers in 16 bytes
TERMS, STAGES = 32, 3
CHUNKS = TERMS // WIDTH  # copies for a row's terms
PITCH = TERMS + 8  # of tiles of lines; no two of eight rows begin in the same banks


def kernel_of(rows, columns, transposed):
    """(kernel, engine, numbers of dynamic shared memory); `transposed` as for dx."""
    n_parts = 2 * rows // 64
    engine = tensor_engine(rows, columns)._replace(n_parts=n_parts)
    n_threads, n_warps_across = engine.n_threads, columns // WARP_COLUMNS
    n_row_copies = rows * CHUNKS // n_threads
    n_column_copies = columns * CHUNKS // n_threads
    column_pitch, column_chunks = columns + 8, columns // WIDTH  # of tiles of terms
    row_size = rows * PITCH
    column_size = TERMS * column_pitch if transposed else columns * PITCH
    pair_size = row_size + column_size
    out_size, n_sums = columns * (rows // n_parts + 1), 16 * N_ROWS * N_COLUMNS // 4
    write = writer(engine)

    @cuda.jit(device=True)
    def fetch_pixels(tiles, at, source, starts, lines, tile, sizes, size, S, steps, down, right):
        """A tile of rows: WIDTH channels of the source at a time, or zeros outside of it."""
        n_channels, n_terms = sizes
        tid = cuda.threadIdx.x
        chunk = tid % CHUNKS
        tap, channel = divided(tile * TERMS + chunk * WIDTH, n_channels)
        r, s = divided(tap, S)
        inside = tile * TERMS + chunk * WIDTH < n_terms
        for i in range(n_row_copies):
            m = tid // CHUNKS + i * (n_threads // CHUNKS)
            h, w = line_met(lines[0][m], r, size[0], down), line_met(lines[1][m], s, size[1], right)
            present = inside and h >= 0 and w >= 0 and starts[m] >= 0
            where = starts[m] + np.int64(h * size[1] + w) * steps + channel if present else 0
            count = WIDTH if present else 0
            copy_part_async(tiles, at + m * PITCH + chunk * WIDTH, source, where, count)

    @cuda.jit(device=True)
    def fetch_filters(tiles, at, weight, base, tile, sizes, n_left, tap_steps):
        """A tile of columns: WIDTH terms of a column, or with `transposed` columns of a term."""
        n_channels, n_terms = sizes
        tid = cuda.threadIdx.x
        for i in range(n_column_copies):
            if transposed:
                t = tid // column_chunks + i * (n_threads // column_chunks)
                j = tid % column_chunks * WIDTH
                tap, channel = divided(tile * TERMS + t, n_channels)
                where = base + np.int64(channel) * tap_steps[0] + tap * tap_steps[1] + j
                place, present = at + t * column_pitch + j, tile * TERMS + t < n_terms
            else:
                j, t = tid // CHUNKS + i * (n_threads // CHUNKS), tid % CHUNKS * WIDTH
                where = base + np.int64(j) * n_terms + tile * TERMS + t
                place, present = at + j * PITCH + t, tile * TERMS + t < n_terms
            present = present and j < n_left
            count = WIDTH if present else 0
            copy_part_async(tiles, place, weight, where if present else 0, count)

    @cuda.jit(device=True)
    def multiply(sums, tiles, row_tile, column_tile):
        a = cuda.local.array(4, np.uint32)
        b = cuda.local.array(N_WORDS, np.uint32)
        warp_id, lane_id = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        eighth, quarter = lane_id % 8, lane_id // 8
        row = warp_id // n_warps_across * WARP_ROWS + eighth + quarter % 2 * 8
        column = warp_id % n_warps_across * WARP_COLUMNS
        for step in range(TERMS // 16):
            for j in range(N_COLUMNS // 2):
                if transposed:
                    t = step * 16 + eighth + quarter % 2 * 8
                    at = t * column_pitch + column + j * 16 + quarter // 2 * 8
                    load_matrices_transposed(b, 4 * j, tiles, column_tile + at)
                else:
                    at = (column + j * 16 + eighth + quarter // 2 * 8) * PITCH + step * 16
                    load_matrices(b, 4 * j, tiles, column_tile + at + quarter % 2 * 8)
            for i in range(N_ROWS):
                at = (row + i * 16) * PITCH + step * 16 + quarter // 2 * 8
                load_matrices(a, 0, tiles, row_tile + at)
                for j in range(N_COLUMNS):
                    multiply_add(sums, (i * N_COLUMNS + j) * 4, a, 0, b, 2 * j, tiles)

    @cuda.jit(device=True)
    def add_products(
        sums, tiles, source, starts, lines, sizes, size, S, pixel_step, down, right, weight, base,
        n_left, tap_steps,
    ):  # fmt: skip
        """All tiles one after another, each fetched while those before it are worked on."""
        n_tiles = (sizes[1] + TERMS - 1) // TERMS
        for tile in range(1 - STAGES, n_tiles):
            following = tile + STAGES - 1
            if tile >= 0:
                wait_for_groups_but(STAGES - 2)
                cuda.syncthreads()
            if following < n_tiles:
                at = following % STAGES * pair_size
                fetch_pixels(
                    tiles, at, source, starts, lines, following, sizes, size, S, pixel_step, down,
                    right,
                )  # fmt: skip
                fetch_filters(
                    tiles, at + row_size, weight, base, following, sizes, n_left, tap_steps
                )
            end_group()
            if tile >= 0:
                at = tile % STAGES * pair_size
                multiply(sums, tiles, at, at + row_size)

    @cuda.jit(device=True)
    def find_row(row_starts, starts, lines, row, n_rows, P, Q, image_step, channel, n_channels):
        """The thread's pixel: its place in the result, its image's in the source, and its lines."""
        m = cuda.threadIdx.x
        if m < rows:
            row_starts[m], starts[m], lines[0][m], lines[1][m] = -1, -1, 0, 0
            if row + m < n_rows:
                image = (row + m) // (P * Q)
                p, q = divided(row + m - image * (P * Q), Q)
                row_starts[m], starts[m] = (row + m) * n_channels, image * image_step + channel
                lines[0][m], lines[1][m] = p, q

    @cuda.jit
    def channels_last_kernel(
        source, weight, bias, result, biased, N, groups, n_columns, P, Q, n_channels, H, W, R, S,
        scale_h, shift_h, step_h, divisor_h, scale_w, shift_w, step_w, divisor_w,
        column_step, weight_channel_step, weight_tap_step,
    ):  # fmt: skip
        # A group has n_columns channels of the result (P × Q), n_channels of the source (H × W).
        tiles = dynamic_shared(source)
        out = cuda.shared.array(out_size, np.float32)
        row_starts = cuda.shared.array(rows, np.int64)
        starts = cuda.shared.array(rows, np.int64)
        line_h = cuda.shared.array(rows, np.int32)
        line_w = cuda.shared.array(rows, np.int32)
        sums = cuda.local.array(n_sums, np.float32)
        for i in range(n_sums):
            sums[i] = ZERO
        n_parts = (n_columns + columns - 1) // columns
        part = cuda.blockIdx.x % (n_parts * groups)
        row = np.int64(cuda.blockIdx.x // (n_parts * groups)) * rows
        group, column = part // n_parts, part % n_parts * columns
        lines, sizes = (line_h, line_w), (n_channels, n_channels * R * S)
        pixel_step, n_left = n_channels * groups, n_columns - column
        find_row(
            row_starts, starts, lines, row, np.int64(N) * P * Q, P, Q,
            np.int64(H) * W * pixel_step, group * n_channels, n_columns * groups,
        )  # fmt: skip
        base = np.int64(group) * n_columns * sizes[1] + np.int64(column) * column_step
        if transposed:
            base = np.int64(group * n_channels) * weight_channel_step + column
        down, right = (scale_h, shift_h, step_h, divisor_h), (scale_w, shift_w, step_w, divisor_w)
        allow_next_kernel()
        wait_for_previous_kernel()
        cuda.syncthreads()
        add_products(
            sums, tiles, source, starts, lines, sizes, (H, W), S, pixel_step, down, right, weight,
            base, n_left, (weight_channel_step, weight_tap_step),
        )  # fmt: skip
        channel = group * n_columns + column
        write(sums, out, result, row_starts, np.int64(1), bias, biased, channel, n_left, True)

    return channels_last_kernel, engine, STAGES * pair_size
