"""`tensor_core` with a halo on Hopper: as `halo`, by tensor cores that read shared memory.

`wgmma` (`intrinsics.warpgroup`) multiplies 64 rows of one tile with up to 256 rows of another, and
the rows of each follow one another in shared memory. The 64 are filters. The others are no pixels,
but *positions*: lines and columns of the source with its padding, image behind image. What tap (r,
s) meets lies r·dilation·(columns of the grid) + s·dilation rows further on, for every position
alike, and the same positions in shared memory serve all taps. Sums of positions that are no pixel
of the result are found in vain: these are few, with the padding behind each line and image left
out, since the next one's stands there. How many positions a tile has is free: so many that the
tiles are nearly as many as the chip works on, or a multiple of that.

Positions, with their halo, are copied in chunks of 128 bytes of channels, the next one while this
one is worked on; weights come step by step, a tap of a chunk each, through a ring of `n_stages`
buffers. Both are copied as they are: float32 has been rounded to TF32 before (`arranging`). Blocks
go through tiles of the result one after another, and the copies run ahead of the products into the
next tile, so that nothing waits for a tile's first bytes.

One barrier for each step. A warpgroup leaves one product on its way, so behind the barrier of step
t all have done with step t − 2: its weights' buffer is the next that copies go to. Strides of 1
alone; compute capability 9.0 alone: earlier chips, and later ones, which have no `wgmma`, take
`halo`.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.halo_results import PLANAR
from course_lib.kernels.conv2d.warpgroup_results import OUTSIDE, staged_size, writing
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.matrix import copy_part_async
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.warpgroup import (
    BOUNDARY,
    CHUNKS,
    ROW_BYTES,
    ROWS,
    multiply_tiles,
    show_to_products,
    tiles_in_shared,
    wait_for_earlier_products,
    wait_for_products,
)

GROUP_THREADS = 128
MOST_POSITIONS = 1024  # of a block


def shared_bytes(shape, n_positions):
    """Bytes of dynamic shared memory for a block of this `warpgroup_plan.Shape`."""
    return front_bytes(shape) + (2 * n_positions + shape.n_stages * shape.n) * ROW_BYTES


def front_bytes(shape):
    """Bytes in front of the tiles: places, origins, and sums on their way; whole boundaries."""
    n_bytes = 8 * shape.m + 4 * MOST_POSITIONS + 4 * staged_size(shape)
    return -(-n_bytes // BOUNDARY) * BOUNDARY


def make(shape, itemsize):
    """The kernel for blocks of `shape`: of float32 that are TF32, or of 16-bit numbers."""
    TILE_M, TILE_N, N_STAGES, N_THREADS = shape.m, shape.n, shape.n_stages, shape.n_threads
    EACH, SIDE = shape.each, shape.n // ROWS  # positions of a warpgroup; warpgroups side by side
    WIDTH, K_SIZE = VECTOR_BYTES // itemsize, ROW_BYTES // itemsize
    N_SUMS, STAGE, AHEAD = EACH // 2, TILE_N * K_SIZE, N_STAGES - 2
    # Shared memory in bytes: places, origins, staged sums, weights, positions.
    ORIGINS, STAGED = 8 * TILE_M, 8 * TILE_M + 4 * MOST_POSITIONS
    FRONT = front_bytes(shape) // ROW_BYTES * K_SIZE
    FIRST_ROW = front_bytes(shape) // ROW_BYTES + N_STAGES * TILE_N
    following, write = stepping(STAGE, WIDTH), writing(EACH)
    copy_weights, find_origins, find_places, copy_positions = copying(
        TILE_N, N_THREADS, TILE_M, itemsize
    )

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def warpgroup_kernel(
        source, weights, bias, result, options, n_tiles, N, P, Q, H, W, grid_h, grid_w, pad_h,
        pad_w, step_h, step_w, S, n_taps, n_channels, n_columns, n_chunks, n_positions, share,
        part_channels,
    ):  # fmt: skip
        # Columns from part · TILE_N on are sums over channels from part · part_channels on.
        cache = tiles_in_shared(source)
        places = cuda.shared.array(0, np.int64)  # the same memory, as are the others
        origins = cuda.shared.array(0, np.int32)[ORIGINS // 4 :]
        staged = cuda.shared.array(0, np.float32)[STAGED // 4 :]
        acc = cuda.local.array(N_SUMS, np.float32)
        n_parts, n_steps = np.int32((n_columns + TILE_N - 1) // TILE_N), np.int32(n_chunks * n_taps)
        group = np.int32(cuda.threadIdx.x // GROUP_THREADS)
        mine, of_mine = np.int32(group // SIDE * EACH), np.int64(group % SIDE * ROWS * K_SIZE)
        planar = options & PLANAR != 0
        sizes, grid, pad, none = (N, H, W), (grid_h, grid_w), (pad_h, pad_w), np.int32(0)
        tile, n_blocks = np.int32(cuda.blockIdx.x), np.int32(cuda.gridDim.x)
        block, part = divided(tile, n_parts)
        next_step = np.int64(n_parts) * STAGE
        where = np.int64(part) * STAGE + np.int64(cuda.threadIdx.x) * WIDTH  # weights to copy next
        ahead, ahead_of = none, tile  # of which step they are, of which tile
        at, to, buffer = none, none, none
        find_origins(origins, np.int32(block * TILE_M), n_positions, sizes, grid, pad)
        cuda.syncthreads()
        allow_next_kernel()
        wait_for_previous_kernel()
        row = np.int32(FIRST_ROW)
        k = np.int32(part * part_channels)
        copy_positions(cache, row, source, origins, none, n_positions, n_channels, k)
        for _ in range(AHEAD):
            copy_weights(cache, FRONT + to, weights, where, ahead_of < n_tiles)
            where, ahead, ahead_of = following(
                where, ahead, ahead_of, next_step, n_steps, n_blocks, n_parts
            )
            to = np.int32(to + STAGE)
            end_group()
        while tile < n_tiles:
            for i in range(N_SUMS):
                acc[i] = ZERO
            for chunk in range(n_chunks):
                # While this chunk is worked on, the next one is copied: of this tile, or the next.
                last = chunk + 1 == n_chunks
                k = none if last else np.int32((chunk + 1) * K_SIZE)
                soon = np.int32(tile + n_blocks) if last else tile
                k = np.int32(k + divided(soon, n_parts)[1] * part_channels)
                stop = n_positions if soon < n_tiles else none
                there = np.int32(FIRST_ROW + (n_positions - buffer))
                line, s = np.int32(FIRST_ROW + buffer + mine), none
                for tap in range(n_taps):
                    wait_for_groups_but(AHEAD - 1)
                    show_to_products()
                    cuda.syncthreads()
                    row = np.int64(line + s * step_w)
                    multiply_tiles(acc, cache, FRONT + at + of_mine, row * K_SIZE, EACH, 0)
                    wait_for_earlier_products()
                    copy_weights(cache, FRONT + to, weights, where, ahead_of < n_tiles)
                    where, ahead, ahead_of = following(
                        where, ahead, ahead_of, next_step, n_steps, n_blocks, n_parts
                    )
                    if tap > 0:
                        until = min(np.int32(tap * share), stop)
                        copy_positions(
                            cache, there, source, origins, np.int32((tap - 1) * share), until,
                            n_channels, k,
                        )  # fmt: skip
                    else:  # a product may still read there
                        if chunk == 0:
                            first = np.int32(divided(tile, n_parts)[0] * TILE_M)
                            find_places(places, first, N, P, Q, grid, n_columns, planar)
                        if last:
                            first = np.int32(divided(soon, n_parts)[0] * TILE_M)
                            find_origins(origins, first, stop, sizes, grid, pad)
                    end_group()
                    at = np.int32(at + STAGE if at < (N_STAGES - 1) * STAGE else 0)
                    to = np.int32(to + STAGE if to < (N_STAGES - 1) * STAGE else 0)
                    s = np.int32(s + 1)
                    if s == S:
                        s, line = none, np.int32(line + step_h)
                buffer = np.int32(n_positions - buffer)
            wait_for_products(acc, EACH)
            column = np.int32(divided(tile, n_parts)[1] * TILE_N + group % SIDE * ROWS)
            write(acc, staged, places, bias, result, mine, column, P * Q, n_columns, options)
            tile = np.int32(tile + n_blocks)
        wait_for_groups_but(0)

    return warpgroup_kernel


def copying(n_lines, n_threads, n_positions, itemsize):
    """(copy_weights, find_origins, find_places, copy_positions) of a block of so many threads.

    n_lines      of 128 bytes that a step's weights have
    n_positions  of a tile
    """
    N_THREADS, TILE_M = n_threads, n_positions
    WIDTH, K_SIZE = VECTOR_BYTES // itemsize, ROW_BYTES // itemsize
    LINES, SPAN = N_THREADS // CHUNKS, N_THREADS * WIDTH
    N_COPIES = n_lines // LINES

    @cuda.jit(device=True)
    def copy_weights(cache, to, weights, where, exists):
        """Begin to copy a tile, which lies as one piece: eight threads take a line."""
        line, chunk = cuda.threadIdx.x // CHUNKS, cuda.threadIdx.x % CHUNKS
        to = np.int64(to + line * K_SIZE + (chunk ^ line % 8) * WIDTH)
        n = WIDTH if exists else 0
        for u in range(N_COPIES):
            copy_part_async(cache, to + u * LINES * K_SIZE, weights, where + u * SPAN, n)

    @cuda.jit(device=True)
    def find_origins(origins, position, n_positions, sizes, grid, pad):
        """origins[j], the pixel of the source at position `position` + j, or OUTSIDE."""
        for j in range(cuda.threadIdx.x, n_positions, N_THREADS):
            image, h, w = pixel_of(np.int32(position + j), grid)
            h, w = np.int32(h - pad[0]), np.int32(w - pad[1])
            inside = h >= 0 and h < sizes[1] and w >= 0 and w < sizes[2] and image < sizes[0]
            origins[j] = np.int32((image * sizes[1] + h) * sizes[2] + w) if inside else OUTSIDE

    @cuda.jit(device=True)
    def find_places(places, position, N, P, Q, grid, n_columns, planar):
        """Where the first column's result of each position of the tile goes, or OUTSIDE."""
        for j in range(cuda.threadIdx.x, TILE_M, N_THREADS):
            image, p, q = pixel_of(np.int32(position + j), grid)
            place, plane = np.int64(p) * Q + q, np.int64(P) * Q
            if planar:
                place += image * plane * n_columns
            else:
                place = (place + image * plane) * n_columns
            places[j] = place if image < N and p < P and q < Q else np.int64(OUTSIDE)

    @cuda.jit(device=True)
    def copy_positions(cache, row, source, origins, first, stop, n_channels, k):
        """Begin to copy channels k on of positions first … stop − 1.

        The block's first position goes to row `row` of shared memory.
        """
        line, chunk = np.int32(cuda.threadIdx.x // CHUNKS), np.int32(cuda.threadIdx.x % CHUNKS)
        channel = np.int32(k + chunk * WIDTH)
        to = np.int32(row + line + first)
        to = np.int32(to * K_SIZE + (chunk ^ to % 8) * WIDTH)
        for j in range(np.int32(first + line), stop, LINES):
            origin = origins[np.uint32(j)]
            n = WIDTH if origin >= 0 and channel < n_channels else 0
            place = np.int64(max(origin, np.int32(0))) * n_channels + channel
            copy_part_async(cache, np.int64(to), source, place if n > 0 else np.int64(0), n)
            to = np.int32(to + LINES * K_SIZE)

    return copy_weights, find_origins, find_places, copy_positions


def stepping(STAGE, WIDTH):
    @cuda.jit(device=True)
    def following(where, step, tile, next_step, n_steps, n_blocks, n_parts):
        """(where, step, tile) of the weights after these."""
        step = np.int32(step + 1)
        if step < n_steps:
            return where + next_step, step, tile
        tile = np.int32(tile + n_blocks)
        part = np.int64(divided(tile, n_parts)[1])
        return part * STAGE + np.int64(cuda.threadIdx.x) * WIDTH, np.int32(0), tile

    return following


@cuda.jit(device=True)
def pixel_of(position, grid):
    """(image, line, column) of a position."""
    image, rest = divided(position, np.int32(grid[0] * grid[1]))
    p, q = divided(rest, grid[1])
    return image, p, q
