"""`gather`, dweight: an implicit product by `wgmma` that sums over the pixels of dy.

Its rows are terms of a filter (tap, channel), its columns filters, and what is summed over are
pixels. Both operands lie by rows: at each pixel terms of x side by side, and channels of dy. A
thread copies vectors of the same terms for each pixel of its own. It keeps how far each of its
terms' taps is from a pixel, and steps from pixel to pixel. Blocks share the pixels of a tile, and
`sum_kernel` adds up their sums, which are laid out (filters, terms).
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma.swizzled import Tile, no_load, no_move, tile
from course_lib.kernels.blocks.mma.warpgroup import GROUP_THREADS, product_of
from course_lib.kernels.conv2d.gather import OUTSIDE
from course_lib.kernels.conv2d.gather_results import NOWHERE, results
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.matrix import copy_part_async
from course_lib.runtime.intrinsics.warpgroup import (
    A_BY_ROW,
    B_BY_ROW,
    CHUNKS,
    ROWS,
    tiles_in_shared,
    wait_for_products,
)


def terms_tile(rows, n_threads):
    """(find_terms, find_pixels, `swizzled.Tile`) for `rows` terms, of 16-bit numbers.

    find_terms(down, right, further, row, z)  how far each of a thread's terms is from a pixel
    find_pixels(at, pixel, z)                 (image, line, column) of each of its pixels
    """
    WIDTH, PIXELS = VECTOR_BYTES // 2, n_threads // CHUNKS
    N_PANELS, TIMES, PANEL = rows // ROWS, ROWS // PIXELS, ROWS * ROWS

    @cuda.jit(device=True)
    def find_terms(down, right, further, row, z):
        per_pixel = np.int32(z.n_channels // WIDTH)
        for j in range(N_PANELS):
            vector = np.int32(row // WIDTH + j * CHUNKS + cuda.threadIdx.x % CHUNKS)
            tap, v = divided(vector, per_pixel)
            r, s = divided(tap, z.taps_w)
            h, w = np.int32(r * z.far_h), np.int32(s * z.far_w)
            further[j] = np.int32((h * z.source_w + w) * per_pixel + v)
            down[j], right[j] = h if r < z.taps_h else OUTSIDE, w

    @cuda.jit(device=True)
    def find_pixels(at, pixel, z):
        for u in range(TIMES):
            m = np.int32(pixel + cuda.threadIdx.x // CHUNKS + u * PIXELS)
            at[3 * u], rest = divided(m, np.int32(z.result_h * z.result_w))
            at[3 * u + 1], at[3 * u + 2] = divided(rest, z.result_w)

    @cuda.jit(device=True)
    def copy(cache, base, x, known, k):
        """The tile of the pixels `at`, and `at` a tile further: calls go in order."""
        at, down, right, further, digits, z = known
        per_pixel = np.int32(z.n_channels // WIDTH)
        mine, chunk = np.int32(cuda.threadIdx.x // CHUNKS), np.int32(cuda.threadIdx.x % CHUNKS)
        to = base + mine * ROWS + (chunk ^ mine % 8) * WIDTH
        for u in range(TIMES):
            image, p, q = at[3 * u], at[3 * u + 1], at[3 * u + 2]
            h, w = np.int32(p * z.scale_h + z.pad_h), np.int32(q * z.scale_w + z.pad_w)
            vector = np.int32(((image * z.source_h + h) * z.source_w + w) * per_pixel)
            for j in range(N_PANELS):
                inside = np.uint32(np.int32(h + down[j])) < np.uint32(z.source_h)
                inside = inside and np.uint32(np.int32(w + right[j])) < np.uint32(z.source_w)
                inside = inside and image < z.n_images
                found = np.int32(vector + further[j]) if inside else np.int32(0)
                n = WIDTH if inside else 0
                place = to + j * PANEL + u * PIXELS * ROWS
                copy_part_async(cache, place, x, np.int64(found) * WIDTH, n)
            # (image, p, q) as digits of a number, to which a tile's pixels are added.
            q, p = np.int32(q + digits[2]), np.int32(p + digits[1])
            if q >= z.result_w:
                q, p = np.int32(q - z.result_w), np.int32(p + 1)
            image = np.int32(image + digits[0])
            if p >= z.result_h:
                p, image = np.int32(p - z.result_h), np.int32(image + 1)
            at[3 * u], at[3 * u + 1], at[3 * u + 2] = image, p, q

    n_vectors = N_PANELS * TIMES
    return find_terms, find_pixels, Tile(None, no_load, no_move, copy, n_vectors)


@functools.cache
def make(shape, itemsize):
    """The kernel for tiles of `shape`: terms by filters, of 16-bit numbers."""
    TILE_M, TILE_N, N_THREADS, PLACES = shape.m, shape.n, shape.n_threads, shape.places_at // 8
    N_SUMS, GROUP, WIDTH = TILE_N // 2, ROWS * ROWS, VECTOR_BYTES // itemsize
    N_PANELS, N_AT = TILE_M // ROWS, 3 * (ROWS * CHUNKS // N_THREADS)
    find_terms, find_pixels, a_tile = terms_tile(TILE_M, N_THREADS)
    b_tile = tile(TILE_N, itemsize, N_THREADS, "by_row")
    first_b = b_tile.first
    multiply = product_of(shape, (a_tile, b_tile), A_BY_ROW + B_BY_ROW, itemsize)
    _, write = results(TILE_M, TILE_N, N_THREADS)

    @cuda.jit(launch_bounds=(N_THREADS, shape.n_blocks))
    def gather_dweight_kernel(x, dy, partial, z):
        """partial[split, filter, term] = Σ x · dy over the pixels of a part.

        x, dy    (images, lines, columns, channels), whole vectors of channels
        partial  (z.n_splits, z.n_columns, z.most_terms), float32
        z        the `Sizes` of the forward pass; parts are of z.length pixels
        """
        allow_next_kernel()
        cache = tiles_in_shared(x)
        places = cuda.shared.array(0, np.int64)[PLACES:]
        # Tiles of the same pixels come one after another.
        rest, part = divided(
            np.int32(cuda.blockIdx.x), np.int32((z.n_columns + TILE_N - 1) // TILE_N)
        )
        split, block = divided(rest, np.int32((z.most_terms + TILE_M - 1) // TILE_M))
        row, column = np.int32(block * TILE_M), np.int32(part * TILE_N)
        k = np.int32(split * z.length)
        n_pixels = np.int32(z.n_images * z.result_h * z.result_w)
        acc = cuda.local.array(N_SUMS, np.float32)
        for i in range(N_SUMS):
            acc[i] = ZERO
        at, down = cuda.local.array(N_AT, np.int32), cuda.local.array(N_PANELS, np.int32)
        right = cuda.local.array(N_PANELS, np.int32)
        further = cuda.local.array(N_PANELS, np.int32)
        find_terms(down, right, further, row, z)
        find_pixels(at, k, z)
        images, rest = divided(np.int32(ROWS), np.int32(z.result_h * z.result_w))
        of_x = at, down, right, further, (images, *divided(rest, z.result_w)), z
        n_filters = np.int64((z.n_columns + WIDTH - 1) // WIDTH * WIDTH)
        first, step, filters_left, n_left = first_b(np.int64(column), n_filters, np.int64(n_pixels))
        of_dy = first + k * n_filters, step, filters_left, n_left - k
        for i in range(cuda.threadIdx.x, TILE_M, N_THREADS):
            place = np.int64(split) * z.n_columns * z.most_terms + row + i
            places[i] = place if row + i < z.most_terms else NOWHERE
        mine = np.int64(np.uint32(cuda.threadIdx.x // GROUP_THREADS)) * GROUP
        n_pixels = min(np.int32(n_pixels - k), z.length)
        wait_for_previous_kernel()
        multiply(acc, cache, x, dy, of_x, of_dy, np.int64(n_pixels), mine)
        wait_for_products(acc, TILE_N)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        write(acc, sums, places, partial, partial, column, np.int64(z.most_terms), split, z)

    return gather_dweight_kernel
