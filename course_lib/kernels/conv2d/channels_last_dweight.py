"""dweight of `tensor_core` where channels lie side by side: 16-bit numbers, 16 bytes at a time.

The product is that of `implicit_dweight`. A row of it is a channel of x and a tap, a column a
channel of dy, and WIDTH of either lie side by side at each pixel. So tiles hold the rows, and the
columns, of each pixel side by side, and are transposed on the way to the registers.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.channels_last import STAGES, TERMS, WIDTH
from course_lib.kernels.conv2d.implicit_dweight import NOWHERE
from course_lib.kernels.conv2d.implicit_gemm import writer
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
    load_matrices_transposed,
    multiply_add,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

SLOTS = 4 * TERMS  # pixels of which it is known in advance where they lie: four tiles


def dweight_kernel_of(rows, columns):
    """(kernel, engine, numbers of dynamic shared memory)."""
    n_parts = 2 * rows // 64
    engine = tensor_engine(rows, columns)._replace(n_parts=n_parts)
    n_threads, n_warps_across = engine.n_threads, columns // WARP_COLUMNS
    row_pitch, column_pitch = rows + 8, columns + 8  # no two of eight pixels in the same banks
    row_chunks, column_chunks = rows // WIDTH, columns // WIDTH
    n_row_copies, n_column_copies = (TERMS * n // n_threads for n in (row_chunks, column_chunks))
    row_size = TERMS * row_pitch
    pair_size = row_size + TERMS * column_pitch
    out_size, n_sums = columns * (rows // n_parts + 1), 4 * N_ROWS * N_COLUMNS
    write = writer(engine)

    @cuda.jit(device=True)
    def find_pixels(pixels, tile, first, stop, y_size, stride, pad, image_steps, K):
        """Where the pixels of a tile lie; each thread below TERMS finds one."""
        pixel_h, pixel_w, images, dy_starts = pixels
        tid = cuda.threadIdx.x
        if tid < TERMS:
            pixel, i = first + tile * TERMS + tid, tile % 4 * TERMS + tid
            h, w, image, dy_start = NOWHERE, np.int32(0), np.int64(0), np.int64(-1)
            if pixel < stop:
                image = pixel // (y_size[0] * y_size[1])
                p, q = divided(pixel - image * (y_size[0] * y_size[1]), y_size[1])
                h, w = np.int32(p * stride[0] - pad[0]), np.int32(q * stride[1] - pad[1])
                image, dy_start = image * image_steps, pixel * K
            pixel_h[i], pixel_w[i], images[i], dy_starts[i] = h, w, image, dy_start

    @cuda.jit(device=True)
    def fetch_terms(tiles, at, x, base, pixels, slot, line, size, C):
        """A tile of x: WIDTH channels where the thread's tap meets each pixel."""
        pixel_h, pixel_w, images, _ = pixels
        line_h, line_w, inside = line
        tid = cuda.threadIdx.x
        for i in range(n_row_copies):
            u = tid // row_chunks + i * (n_threads // row_chunks)
            pixel = np.uint32(slot + u)
            h, w = np.int32(pixel_h[pixel] + line_h), np.int32(pixel_w[pixel] + line_w)
            present = inside and h >= 0 and h < size[0] and w >= 0 and w < size[1]
            where = base + images[pixel] + np.int64(h * size[1] + w) * C if present else 0
            place = at + u * row_pitch + tid % row_chunks * WIDTH
            copy_part_async(tiles, place, x, where, WIDTH if present else 0)

    @cuda.jit(device=True)
    def fetch_upstream(tiles, at, dy, base, dy_starts, slot, n_left):
        """A tile of dy: WIDTH channels of each pixel."""
        tid = cuda.threadIdx.x
        for i in range(n_column_copies):
            u = tid // column_chunks + i * (n_threads // column_chunks)
            j, start = tid % column_chunks * WIDTH, dy_starts[np.uint32(slot + u)]
            present = start >= 0 and j < n_left
            where = base + start + j if present else 0
            copy_part_async(tiles, at + u * column_pitch + j, dy, where, WIDTH if present else 0)

    @cuda.jit(device=True)
    def multiply(sums, tiles, row_tile, column_tile):
        a = cuda.local.array(4, np.uint32)
        b = cuda.local.array(N_WORDS, np.uint32)
        warp_id, lane_id = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        eighth, quarter = lane_id % 8, lane_id // 8
        row = row_tile + warp_id // n_warps_across * WARP_ROWS + quarter % 2 * 8
        row += (eighth + quarter // 2 * 8) * row_pitch
        column = column_tile + warp_id % n_warps_across * WARP_COLUMNS + quarter // 2 * 8
        column += (eighth + quarter % 2 * 8) * column_pitch
        for step in range(TERMS // 16):
            for j in range(N_COLUMNS // 2):
                at = column + step * 16 * column_pitch + j * 16
                load_matrices_transposed(b, 4 * j, tiles, at)
            for i in range(N_ROWS):
                load_matrices_transposed(a, 0, tiles, row + step * 16 * row_pitch + i * 16)
                for j in range(N_COLUMNS):
                    multiply_add(sums, (i * N_COLUMNS + j) * 4, a, 0, b, 2 * j, tiles)

    @cuda.jit(device=True)
    def add_products(
        sums, tiles, x, x_base, line, size, C, dy, dy_base, n_left, pixels, first, stop, y_size,
        stride, pad, image_steps, K,
    ):  # fmt: skip
        """All tiles one after another, each fetched while those before it are worked on."""
        n_tiles = np.int32((stop - first + TERMS - 1) // TERMS)
        for tile in range(3):
            find_pixels(pixels, tile, first, stop, y_size, stride, pad, image_steps, K)
        cuda.syncthreads()
        for tile in range(1 - STAGES, n_tiles):
            following = tile + STAGES - 1
            if tile >= 0:
                wait_for_groups_but(STAGES - 2)
                cuda.syncthreads()
            if following < n_tiles:
                at, slot = following % STAGES * pair_size, following % 4 * TERMS
                fetch_terms(tiles, at, x, x_base, pixels, slot, line, size, C)
                fetch_upstream(tiles, at + row_size, dy, dy_base, pixels[3], slot, n_left)
            end_group()
            if tile >= 0:
                find_pixels(pixels, tile + 3, first, stop, y_size, stride, pad, image_steps, K)
                at = tile % STAGES * pair_size
                multiply(sums, tiles, at, at + row_size)

    @cuda.jit
    def channels_last_dweight_kernel(
        dy, x, partial, length, n_splits, N, C, H, W, K, R, S, P, Q, stride_h, stride_w,
        pad_h, pad_w, dilation_h, dilation_w, groups, last,
    ):  # fmt: skip
        # Each split sums `length` pixels, a multiple of TERMS; partial is (splits, K, terms).
        tiles = dynamic_shared(x)
        out = cuda.shared.array(out_size, np.float32)
        row_starts = cuda.shared.array(rows, np.int64)
        pixel_h = cuda.shared.array(SLOTS, np.int32)
        pixel_w = cuda.shared.array(SLOTS, np.int32)
        images = cuda.shared.array(SLOTS, np.int64)
        dy_starts = cuda.shared.array(SLOTS, np.int64)
        sums = cuda.local.array(n_sums, np.float32)
        for i in range(n_sums):
            sums[i] = ZERO
        n_channels, n_columns, tid = C // groups, K // groups, cuda.threadIdx.x
        n_terms, n_parts = n_channels * R * S, (n_columns + columns - 1) // columns
        split, block = cuda.blockIdx.x % n_splits, cuda.blockIdx.x // n_splits
        part, row = block % (n_parts * groups), block // (n_parts * groups) * rows
        group, column = part // n_parts, part % n_parts * columns
        if tid < rows:
            start = split * np.int64(K) * n_terms + row + tid
            row_starts[tid] = start if row + tid < n_terms else np.int64(-1)
        mine = row + tid % row_chunks * WIDTH
        tap, channel = divided(mine, n_channels)
        r, s = divided(tap, S)
        line = r * dilation_h, s * dilation_w, mine < n_terms
        first, n_left = split * np.int64(length), n_columns - column
        allow_next_kernel()
        wait_for_previous_kernel()
        add_products(
            sums, tiles, x, np.int64(group) * n_channels + channel, line, (H, W), C, dy,
            np.int64(group) * n_columns + column, n_left, (pixel_h, pixel_w, images, dy_starts),
            first, min(first + length, np.int64(N) * P * Q), (P, Q), (stride_h, stride_w),
            (pad_h, pad_w), np.int64(H) * W * C, K,
        )  # fmt: skip
        write(
            sums, out, partial, row_starts, np.int64(n_terms), partial, False,
            group * n_columns + column, n_left, False,
        )  # fmt: skip

    return channels_last_dweight_kernel, engine, STAGES * pair_size
