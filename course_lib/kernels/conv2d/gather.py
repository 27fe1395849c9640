"""`tensor_core` for any convolution on Hopper: an implicit product by `wgmma`.

The product's rows are pixels of the result, its columns filters, and its terms (tap, channel), the
channel fastest. Channels of the source lie side by side, in whole vectors of 16 bytes
(`gather_pack`), so that each vector of a row of the tile belongs to one pixel of the source. A
thread copies the same chunk of a few rows of each tile. It keeps where the pixel lies that each row
meets with its first tap, and a tap adds the same offset to all of them. Vectors outside the source
are filled with zeros. The main loop is that of `blocks.mma.warpgroup`.

Of float32 the source and the weights have three parts for each channel, and a tensor core, which
cuts sums off where float32 rounds, adds up few products at a time (`product_of`).

With groups, a tile of columns reads a window of the channels, those of its own groups; its weights
of a filter and a channel of different groups are 0.

Each residue of a stride is a product of its own (`gather_taps`). Where there are few tiles, blocks
share the terms of one, and their float32 sums are added up by a second launch.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma.swizzled import Tile, no_load, no_move, tile
from course_lib.kernels.blocks.mma.warpgroup import GROUP_THREADS, product_of
from course_lib.kernels.conv2d.gather_results import pitch_of, results
from course_lib.kernels.conv2d.gather_taps import ITEMSIZE, PARTS, axes_of, window_of
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.matrix import copy_part_async
from course_lib.runtime.intrinsics.warpgroup import (
    CHUNKS,
    ROW_BYTES,
    ROWS,
    tiles_in_shared,
    wait_for_products,
)

OUTSIDE = np.int32(-(2**30))  # a source line that no tap brings inside


class Shape(NamedTuple):
    """A block's tile of the result, `m` pixels by `n` columns, and its buffers.

    n_blocks    of a multiprocessor at once
    step, once  what such blocks take together for each 128 bytes of terms, and beside that, in
                units of 10 ns
    """

    m: int
    n: int
    n_stages: int
    n_blocks: int
    step: int = 0
    once: int = 0

    @property
    def n_threads(self):
        return self.m // ROWS * GROUP_THREADS

    @property
    def places_at(self):
        """Bytes of buffers, or of the sums that lie in them at the end."""
        buffers = (self.m + self.n) * ROW_BYTES * self.n_stages
        return max(buffers, 4 * self.m * pitch_of(self.n), 4 * self.n * pitch_of(self.m))

    @property
    def shared_bytes(self):
        return self.places_at + 8 * self.m


def gathering_tile(rows, itemsize, n_threads, N_PARTS):
    """(find_rows, `swizzled.Tile`) for `rows` pixels of a source, whose channels have N_PARTS.

    find_rows(known, row, n_rows, grid, scale, start): the thread's pixels, from row `row` on
    """
    WIDTH, STEP = VECTOR_BYTES // itemsize, n_threads // CHUNKS
    N_VECTORS, ROW = rows // STEP, CHUNKS * WIDTH

    @cuda.jit(device=True)
    def find_rows(known, row, n_rows, grid, scale, start):
        vectors, lines, columns, size = known[0], known[1], known[2], known[4]
        H, W, pitch, window = size[0], size[1], size[3], size[5]
        for u in range(N_VECTORS):
            m = np.int32(row + cuda.threadIdx.x // CHUNKS + u * STEP)
            image, rest = divided(m, np.int32(grid[0] * grid[1]))
            p, q = divided(rest, grid[1])
            h, w = np.int32(p * scale[0] + start[0]), np.int32(q * scale[1] + start[1])
            vectors[u] = np.int32(((image * H + h) * W + w) * pitch + window)
            lines[u], columns[u] = h if m < n_rows else OUTSIDE, w

    @cuda.jit(device=True)
    def copy(cache, base, x, known, k):
        """The tile of the terms that `at` stands at, and `at` a tile further: calls go in order."""
        vectors, lines, columns, at, size, taps, far, digits = known
        H, W, per_pixel, pitch, between, _ = size
        r, s, v = at[0], at[1], at[2]
        down, right = np.int32(r * far[0]), np.int32(s * far[1])
        further, exists = np.int32((down * W + right) * pitch + v), r < taps[0]
        if N_PARTS > 1 and between > 0:  # of windows, whose parts are apart
            part = divided(v, divided(per_pixel, np.int32(N_PARTS))[0])[0]
            further = np.int32(further + part * between)
        row, chunk = np.int32(cuda.threadIdx.x // CHUNKS), np.int32(cuda.threadIdx.x % CHUNKS)
        to = base + row * ROW + (chunk ^ row % 8) * WIDTH
        for u in range(N_VECTORS):
            h, w = np.int32(lines[u] + down), np.int32(columns[u] + right)
            inside = exists and np.uint32(h) < np.uint32(H) and np.uint32(w) < np.uint32(W)
            vector = np.int32(vectors[u] + further) if inside else np.int32(0)
            n = WIDTH if inside else 0
            copy_part_async(cache, to + u * STEP * ROW, x, np.int64(vector) * WIDTH, n)
        # (r, s, v) as digits of a number, to which a tile's vectors are added.
        v, s, r = np.int32(v + digits[2]), np.int32(s + digits[1]), np.int32(r + digits[0])
        if v >= per_pixel:
            v, s = np.int32(v - per_pixel), np.int32(s + 1)
        if s >= taps[1]:
            s, r = np.int32(s - taps[1]), np.int32(r + 1)
        at[0], at[1], at[2] = r, s, v

    return find_rows, Tile(None, no_load, no_move, copy, N_VECTORS)


@functools.cache
def make(shape, mode):
    """The kernel for tiles of `shape`, of numbers of this `mode` of a `Problem`."""
    itemsize, EVERY, N_PARTS = ITEMSIZE[mode], 0, 1
    if mode == "float32":
        EVERY, N_PARTS = 4, PARTS
    TILE_M, TILE_N, N_THREADS, PLACES = shape.m, shape.n, shape.n_threads, shape.places_at // 8
    WIDTH, TILE_K = VECTOR_BYTES // itemsize, ROW_BYTES // itemsize
    N_SUMS, GROUP = TILE_N // 2, ROWS * TILE_K
    find_rows, a_tile = gathering_tile(TILE_M, itemsize, N_THREADS, N_PARTS)
    N_ROWS, b_tile = a_tile.n_vectors, tile(TILE_N, itemsize, N_THREADS, "by_k")
    first_b, multiply = b_tile.first, product_of(
        shape, (a_tile, b_tile), 0, itemsize, True, EVERY
    )  # fmt: skip
    find_places, write = results(TILE_M, TILE_N, N_THREADS)

    @cuda.jit(launch_bounds=(N_THREADS, shape.n_blocks))
    def gather_kernel(source, weights, bias, result, z):
        """result = source * weight (+ bias), or a part of its terms in float32.

        source   (images, lines, columns, channels), whole vectors of channels
        weights  of each residue (columns, terms), as `gather_pack` packs them
        bias     (columns,), read where `z.options` say so
        result   in either memory format; one for each of `z.n_splits`
        z        the `Sizes`
        """
        allow_next_kernel()
        cache = tiles_in_shared(source)
        places = cuda.shared.array(0, np.int64)[PLACES:]
        # Tiles of the same pixels come one after another, then residues of the same, then parts.
        rest, part = divided(
            np.int32(cuda.blockIdx.x), np.int32((z.n_columns + TILE_N - 1) // TILE_N)
        )
        rest, residue = divided(rest, np.int32(z.step_h * z.step_w))
        block, split = divided(rest, z.n_splits)
        down, right = axes_of(residue, z)
        grid, taps, start = (down[0], right[0]), (down[2], right[2]), (down[3], right[3])
        n_rows, row = np.int32(z.n_images * grid[0] * grid[1]), np.int32(block * TILE_M)
        if row >= n_rows:
            return
        n_terms = np.int32(taps[0] * taps[1] * z.n_channels)
        k = np.int32(split * z.length)
        acc = cuda.local.array(N_SUMS, np.float32)
        for i in range(N_SUMS):
            acc[i] = ZERO
        at = cuda.local.array(3, np.int32)
        vectors, lines = cuda.local.array(N_ROWS, np.int32), cuda.local.array(N_ROWS, np.int32)
        columns = cuda.local.array(N_ROWS, np.int32)
        across, per_pixel = max(taps[1], np.int32(1)), np.int32(z.n_channels // WIDTH)
        tap, at[2] = divided(np.int32(k // WIDTH + cuda.threadIdx.x % CHUNKS), per_pixel)
        at[0], at[1] = divided(tap, across)
        tap, left = divided(np.int32(CHUNKS), per_pixel)
        digits = (*divided(tap, across), left)
        column, pitch = np.int32(part * TILE_N), np.int32(z.pitch // WIDTH)
        between = np.int32((pitch - per_pixel) // N_PARTS)
        window = window_of(column, N_PARTS, WIDTH, z)
        size = z.source_h, z.source_w, per_pixel, pitch, between, window
        far = z.far_h, z.far_w
        of_a = vectors, lines, columns, at, size, taps, far, digits
        find_rows(of_a, row, n_rows, grid, (z.scale_h, z.scale_w), start)
        find_places(places, row, n_rows, grid, residue, split, z)
        first, step, last, n_left = first_b(
            np.int64(column), np.int64(z.n_columns), np.int64(n_terms)
        )
        first += np.int64(residue) * z.n_columns * z.most_terms + k
        of_b = first, step, last, n_left - k
        mine = np.int64(np.uint32(cuda.threadIdx.x // GROUP_THREADS)) * GROUP
        n_terms = min(np.int32(n_terms - k), z.length)
        wait_for_previous_kernel()
        multiply(acc, cache, source, weights, of_a, of_b, np.int64(n_terms), mine)
        wait_for_products(acc, TILE_N)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        plane = np.int64(z.result_h) * z.result_w
        write(acc, sums, places, bias, result, column, plane, split, z)

    return gather_kernel
