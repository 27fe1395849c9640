"""`upsample2x` of channels-last 16-bit images on Hopper: y and dx as products by `wgmma`.

With filters of 2 × 2 and stride 2, a pixel of x and the 2 × 2 pixels of y that it makes are a row
of matrices whose columns are channels: x is (pixels, C), the weights (C, 4·K) and y (pixels, 4·K),
with columns (2·r + s)·K + k. So y = x · weights and dx = dy · weightsᵀ, products as those of
`gemm.warpgroup`. y and dy stay where they lie: for one r, a row's 2·K columns are neighbours in
memory, and so are the rows of the pixels in a line of x. A multiprocessor has two blocks: one
multiplies while the other stores its sums.

Each must move x, y and the weights once; what is multiplied is read once more, mostly from L2, for
each further 128 columns of the result.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma.swizzled import Tile, no_load, no_move, thread, tile
from course_lib.kernels.blocks.mma.warpgroup import (
    BAND_ROWS,
    GROUP_THREADS,
    ONLY,
    Shape,
    by_row_flags,
    product_of,
    tile_at,
)
from course_lib.kernels.blocks.mma.warpgroup_sums import PADDING, sums_of
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store_vector,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.matrix import copy_part_async
from course_lib.runtime.intrinsics.warpgroup import (
    CHUNKS,
    ROW_BYTES,
    ROWS,
    tiles_in_shared,
    wait_for_products,
)

ITEMSIZE = 2  # bytes of an element
WIDTH = VECTOR_BYTES // ITEMSIZE  # elements of 16 bytes
TILE_K = ROW_BYTES // ITEMSIZE
MIN_BLOCKS = 2  # of a multiprocessor
#: Tiles of pixels × columns of the result, for many columns and for few.
SHAPES = Shape(128, 128, 3), Shape(128, 64, 4)
ADD_BIAS, VECTORS = 1, 4  # options of the kernels; the second as in `mma.epilogue`


class Kernel(NamedTuple):
    kernel: object
    shape: Shape
    shared_bytes: int


def fault(problem, operands, capability):
    """Why these kernels can't take a `problem` that `upsample2x` takes; or None.

    operands  the image that is read, the weights, and the one that is written
    """
    p = problem
    if capability != ONLY:
        return "compute capability 9.0"
    if not p.channels_last or operands[0].dtype.itemsize != ITEMSIZE:
        return "channels-last images of 16-bit numbers"
    if p.C % WIDTH or p.K % WIDTH or p.N * p.H * p.W == 0:
        return f"channels that are multiples of {WIDTH}, and images"
    if any(arrays.address_of(array) % VECTOR_BYTES for array in operands):
        return f"arrays that begin on boundaries of {VECTOR_BYTES} bytes"
    return None


def _shared_bytes(shape):
    buffers = (shape.m + shape.n) * ROW_BYTES * shape.n_stages
    return max(buffers, shape.m * (shape.n + PADDING) * 4)


@functools.cache
def forward_kernel(shape):
    """The `Kernel` that finds y."""
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    N_SUMS, GROUP, BAND = TILE_N // 2, ROWS * TILE_K, BAND_ROWS // TILE_M
    PITCH, PER_ROW = TILE_N + PADDING, TILE_N // WIDTH
    ROWS_AT_A_TIME = N_THREADS // PER_ROW
    sources = "by_k", "by_row"
    tiles = [
        tile(rows, ITEMSIZE, N_THREADS, source)
        for rows, source in zip((TILE_M, TILE_N), sources, strict=True)
    ]
    first_a, first_b = (each.first for each in tiles)
    multiply = product_of(shape, tiles, by_row_flags(sources, ITEMSIZE), ITEMSIZE)
    collect, _ = sums_of(TILE_M, TILE_N, N_THREADS)

    @cuda.jit(device=True)
    def write(sums, bias, y, m, n, M, H, W, K, y_n, y_p, y_q, options):
        # A thread keeps its columns, so its tap, and goes from pixel to pixel.
        values, add = cuda.local.array(WIDTH, np.float32), cuda.local.array(WIDTH, np.float32)
        row, col = divided(np.int32(cuda.threadIdx.x), np.int32(PER_ROW))
        tap, k = divided(np.int32(n) + col * np.int32(WIDTH), K)
        if tap >= 4:
            return
        for e in range(WIDTH):
            add[e] = load(bias, k + e) if options & ADD_BIAS else ZERO
        at_tap = (tap // 2) * y_p + (tap % 2) * y_q + k
        for line in range(row, TILE_M, ROWS_AT_A_TIME):
            pixel = np.int32(m + line)
            if pixel >= M:
                return
            for part in range(0, WIDTH, 4):
                load_vector(values[part:], sums, line * PITCH + col * WIDTH + part)
            for e in range(WIDTH):
                values[e] += add[e]
            image_line, w = divided(pixel, W)
            image, h = divided(image_line, H)
            store_vector(y, np.int64(image) * y_n + 2 * h * y_p + 2 * w * y_q + at_tap, values)

    @cuda.jit(launch_bounds=(N_THREADS, MIN_BLOCKS))
    def upsample2x_warpgroup_kernel(
        x, weight, bias, y, M, C, H, W, K, y_n, y_p, y_q, options
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = tiles_in_shared(x)
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        m, n = tile_at(np.uint32(cuda.blockIdx.x), M, 4 * np.int64(K), TILE_M, TILE_N, BAND)
        group = cuda.threadIdx.x // GROUP_THREADS
        of_a, of_b = first_a(m, M, C), first_b(n, 4 * np.int64(K), C)
        multiply(acc, cache, x, weight, of_a, of_b, C, group * GROUP)
        wait_for_products(acc, TILE_N)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc)
        cuda.syncthreads()
        write(sums, bias, y, m, n, M, H, W, K, y_n, y_p, y_q, options)

    return Kernel(upsample2x_warpgroup_kernel, shape, _shared_bytes(shape))


def _blocks_of_dy(rows, n_threads):
    """The `Tile` of dy as rows: eight threads read 128 bytes of one, where they lie in the image.

    first(row, n_rows, K, W) has K and the width W of x beside what others take.
    """
    N_VECTORS, STEP = rows * CHUNKS // n_threads, n_threads // CHUNKS

    @cuda.jit(device=True)
    def first(row, n_rows, K, W):
        return np.int32(row + thread() // CHUNKS), np.int32(n_rows - 1), K, W

    @cuda.jit(device=True)
    def copy(cache, base, x, known, k):
        line, last, K, W = known
        chunk, mine = np.int32(thread() % CHUNKS), np.int32(thread() // CHUNKS)
        col = np.int32(k) + chunk * np.int32(WIDTH)
        inside = col < 4 * K
        # The second half of a row's columns is a line of y further down.
        shift = np.int64(col) + (np.int64(2 * W - 2) * K if col >= 2 * K else np.int64(0))
        to = base + mine * TILE_K + (chunk ^ mine % np.int32(8)) * WIDTH
        for u in range(N_VECTORS):
            image_line, w = divided(min(np.int32(line + u * STEP), last), W)
            at = (np.int64(image_line) * 4 * W + 2 * w) * K + shift
            copy_part_async(
                cache, to + u * STEP * TILE_K, x, at if inside else 0, WIDTH if inside else 0
            )

    return Tile(first, no_load, no_move, copy, N_VECTORS)


@functools.cache
def dx_kernel(shape):
    """The `Kernel` that finds dx."""
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    N_SUMS, GROUP, BAND = TILE_N // 2, ROWS * TILE_K, BAND_ROWS // TILE_M
    tiles = _blocks_of_dy(TILE_M, N_THREADS), tile(TILE_N, ITEMSIZE, N_THREADS, "by_k")
    first_a, first_b = (each.first for each in tiles)
    multiply = product_of(shape, tiles, 0, ITEMSIZE)
    collect, write = sums_of(TILE_M, TILE_N, N_THREADS)

    @cuda.jit(launch_bounds=(N_THREADS, MIN_BLOCKS))
    def upsample2x_dx_kernel(dy, weight, dx, M, C, W, K):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = tiles_in_shared(dy)
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        m, n = tile_at(np.uint32(cuda.blockIdx.x), M, C, TILE_M, TILE_N, BAND)
        group, n_columns = cuda.threadIdx.x // GROUP_THREADS, 4 * np.int64(K)
        of_a, of_b = first_a(m, M, K, W), first_b(n, C, n_columns)
        multiply(acc, cache, dy, weight, of_a, of_b, n_columns, group * GROUP)
        wait_for_products(acc, TILE_N)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc)
        cuda.syncthreads()
        write(sums, weight, dx, m, n, M, C, VECTORS)

    return Kernel(upsample2x_dx_kernel, shape, _shared_bytes(shape))


def _shape_for(n_columns):
    large, small = SHAPES
    return large if n_columns > small.n else small


def _launch(found, M, N, *args):
    shape = found.shape
    launch(
        found.kernel, math.ceil(M / shape.m) * math.ceil(N / shape.n), shape.n_threads, *args,
        shared_bytes=found.shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def forward(problem, x, weight, bias, memory, strides):
    """y of x and weight, to `memory` with `strides`, whose channels are neighbours."""
    p, (y_n, _, y_p, y_q) = problem, strides
    M, options = p.N * p.H * p.W, ADD_BIAS if bias is not None else 0
    found = forward_kernel(_shape_for(4 * p.K))
    _launch(
        found, M, 4 * p.K, x, weight, weight if bias is None else bias, memory, M, p.C,
        np.int32(p.H), np.int32(p.W), np.int32(p.K), y_n, y_p, y_q, options,
    )  # fmt: skip


def backward(problem, dy, weight, dx, precision):
    """dx of dy, dense, and weight; `precision` is of float32 alone."""
    p = problem
    M = p.N * p.H * p.W
    found = dx_kernel(_shape_for(p.C))
    _launch(found, M, p.C, dy, weight, dx, M, p.C, np.int32(p.W), np.int32(p.K))


def forward_kernels():
    """All that find y."""
    return [forward_kernel(shape).kernel for shape in SHAPES]


def dx_kernels():
    """All that find dx."""
    return [dx_kernel(shape).kernel for shape in SHAPES]


def specialisations(dtypes):
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in dtypes[1:]:
        for shape in SHAPES:
            for name, kernel, types in (
                ("", forward_kernel(shape).kernel,
                 [(dtype, 1)] * 4 + ["int64"] * 2 + ["int32"] * 3 + ["int64"] * 4),
                (" dx", dx_kernel(shape).kernel,
                 [(dtype, 1)] * 3 + ["int64"] * 2 + ["int32"] * 2),
            ):  # fmt: skip
                yield f"upsample2x{name} warpgroup {shape.m}x{shape.n} {dtype}", kernel, types
