"""The kernels of `global_avg_pool` for channels-last images, stored as N·H·W·C.

A plane's elements lie C apart, but those of neighbouring channels lie side by side. So a warp reads
neighbouring channels of a pixel, and the threads that share a channel add up at the end. With
P = H·W pixels, x is N·P·C here, and all kernels take it as one dimension.

The vectorised rungs need every pixel to start on a 16-byte boundary. Where C or the address does
not allow that, one element is the widest access there is, and the rung below does the work.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 256
PADDED_SIZE = BLOCK_SIZE + 1
CHANNELS = 32  # of a block of `per_plane_backward_kernel`
ROWS = BLOCK_SIZE // CHANNELS  # threads that share a channel there
SECTOR = 8  # channels that a warp of the warp rung covers: one 32-byte sector of float32
MAX_WIDTH = 8
COLUMNS = 16  # of 16 bytes, of a block of the vectorised rung …
MOST_COLUMNS = 64  # … or more, up to this, so that all blocks run at once:
WAVE = 132 * 4  # blocks of 256 threads on the largest chip of today
SOME_BLOCKS = 132  # one for each multiprocessor of the largest chip of today
UNROLL = 4  # vectors in flight per thread
ENOUGH_BLOCKS = 132 * 6  # what the pixels are cut into parts for
ZERO = np.float32(0)


@cuda.jit
def warp_kernel(x, y, n_pixels, C, scale):
    # A warp covers 8 channels of 4 pixels at a time; lanes 8 apart share a channel.
    n, lane_id = cuda.blockIdx.y, cuda.threadIdx.x % 32
    warp_id = cuda.blockIdx.x * (BLOCK_SIZE // 32) + cuda.threadIdx.x // 32
    c, row = warp_id * SECTOR + lane_id % SECTOR, lane_id // SECTOR
    total = ZERO
    if c < C:
        for pixel in range(row, n_pixels, 32 // SECTOR):
            total += load(x, (n * n_pixels + pixel) * C + c)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 16)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 8)
    if row == 0 and c < C:
        store(y, n * C + c, total * scale)


@cuda.jit
def vectorised_kernel(x, y, n_pixels, C, scale, n_columns, length):
    # blockIdx: (part of the pixels, tile of `n_columns` columns, image). y is N·parts·C.
    allow_next_kernel()
    wait_for_previous_kernel()
    # Padded by one, so that neither writing nor reading meets a bank twice.
    shared = cuda.shared.array((MAX_WIDTH, PADDED_SIZE), np.float32)
    width = vector_width(x)
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    totals = cuda.local.array(MAX_WIDTH, np.float32)
    for k in range(MAX_WIDTH):
        totals[k] = ZERO
    part, tile, n = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    n_rows = BLOCK_SIZE // n_columns
    row, col = cuda.threadIdx.x // n_columns, cuda.threadIdx.x % n_columns
    c = (tile * n_columns + col) * width
    stop = min((part + 1) * length, n_pixels)
    if row < n_rows and c < C:
        pixel = part * length + row
        start = (n * n_pixels + pixel) * C + c
        # All loads of a batch come before its additions: memory answers them together.
        while pixel + (UNROLL - 1) * n_rows < stop:
            for u in range(UNROLL):
                load_vector(values[u], x, start + u * n_rows * C)
            for u in range(UNROLL):
                for k in range(width):
                    totals[k] += values[u, k]
            pixel += UNROLL * n_rows
            start += UNROLL * n_rows * C
        for u in range(UNROLL):
            for k in range(width):
                values[u, k] = ZERO
            if pixel + u * n_rows < stop:
                load_vector(values[u], x, start + u * n_rows * C)
        for u in range(UNROLL):
            for k in range(width):
                totals[k] += values[u, k]
    for k in range(width):
        shared[k, cuda.threadIdx.x] = totals[k]
    cuda.syncthreads()
    # One thread for each channel of the tile adds up the rows.
    i = cuda.threadIdx.x
    while i < n_columns * width:
        channel = tile * n_columns * width + i
        if channel < C:
            total = ZERO
            for other in range(n_rows):
                total += shared[i % width, other * n_columns + i // width]
            store(y, (n * cuda.gridDim.x + part) * C + channel, total * scale)
        i += BLOCK_SIZE


@cuda.jit
def per_plane_backward_kernel(dy, dx, n_pixels, C, scale):
    n = cuda.blockIdx.y
    col, row = cuda.threadIdx.x % CHANNELS, cuda.threadIdx.x // CHANNELS
    c = cuda.blockIdx.x * CHANNELS + col
    if c < C:
        share = load(dy, n * C + c) * scale
        for pixel in range(row, n_pixels, ROWS):
            store(dx, (n * n_pixels + pixel) * C + c, share)


@cuda.jit
def vectorised_backward_kernel(dy, dx, n_pixels, C, scale, n_columns, length):
    allow_next_kernel()
    wait_for_previous_kernel()
    width = vector_width(dx)
    values = cuda.local.array(MAX_WIDTH, np.float32)
    part, tile, n = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    n_rows = BLOCK_SIZE // n_columns
    row, col = cuda.threadIdx.x // n_columns, cuda.threadIdx.x % n_columns
    c = (tile * n_columns + col) * width
    stop = min((part + 1) * length, n_pixels)
    if row < n_rows and c < C:
        load_vector(values, dy, n * C + c)
        for k in range(width):
            values[k] *= scale
        pixel = part * length + row
        while pixel < stop:
            store_vector(dx, (n * n_pixels + pixel) * C + c, values)
            pixel += n_rows


def launch_warp(x, y, n_pixels, scale):
    N, C = x.shape[:2]
    grid = (math.ceil(C / (BLOCK_SIZE // 32 * SECTOR)), N)
    launch(warp_kernel, grid, BLOCK_SIZE, x, y, n_pixels, C, scale, flat=True)


def aligned(array, C):
    """Whether every pixel begins on a 16-byte boundary."""
    whole = C * array.dtype.itemsize % VECTOR_BYTES == 0
    return whole and arrays.address_of(array) % VECTOR_BYTES == 0


def plan(total_columns, N, n_pixels, least=8):
    """(grid, columns of 16 bytes per block, pixels per part).

    Pixels are cut into parts only as long as a thread keeps `least` of them, or many more where
    there are enough blocks already: partial sums cost a second kernel.
    """
    n_tiles = math.ceil(total_columns / COLUMNS)
    if N * n_tiles > WAVE:
        n_tiles = max(WAVE // N, math.ceil(total_columns / MOST_COLUMNS))
    n_columns = math.ceil(total_columns / n_tiles)
    per_thread = n_pixels // (BLOCK_SIZE // n_columns)
    keep = least if N * n_tiles < SOME_BLOCKS else 8 * least
    n_parts = max(1, min(ENOUGH_BLOCKS // (N * n_tiles), per_thread // keep))
    length = math.ceil(n_pixels / n_parts)
    return (math.ceil(n_pixels / length), n_tiles, N), n_columns, length


def launch_vectorised(x, y, n_pixels, scale, finish_kernel):
    """By `warp` where pixels aren't aligned; `finish_kernel` adds up partial sums."""
    N, C = x.shape[:2]
    if not aligned(x, C):
        return launch_warp(x, y, n_pixels, scale)
    grid, n_columns, length = plan(C * x.dtype.itemsize // VECTOR_BYTES, N, n_pixels)
    n_parts = grid[0]
    partial, factor = y, scale
    if n_parts > 1:
        partial = arrays.empty((N, n_parts, C), like=x, dtype="float32")
        factor = np.float32(1)
    launch(
        vectorised_kernel, grid, BLOCK_SIZE,
        x, partial, n_pixels, C, factor, n_columns, length, flat=True, overlap=True,
    )  # fmt: skip
    if n_parts > 1:
        launch(
            finish_kernel, math.ceil(N * C * 32 / BLOCK_SIZE), BLOCK_SIZE,
            partial, y, n_parts, C, scale, flat=True, overlap=True,
        )  # fmt: skip


def launch_per_plane_backward(dy, dx, n_pixels, scale):
    N, C = dx.shape[:2]
    grid = (math.ceil(C / CHANNELS), N)
    launch(per_plane_backward_kernel, grid, BLOCK_SIZE, dy, dx, n_pixels, C, scale, flat=True)


def launch_vectorised_backward(dy, dx, n_pixels, scale):
    """By `per_plane` where pixels aren't aligned."""
    N, C = dx.shape[:2]
    if not (aligned(dx, C) and aligned(dy, C)):
        return launch_per_plane_backward(dy, dx, n_pixels, scale)
    grid, n_columns, length = plan(C * dx.dtype.itemsize // VECTOR_BYTES, N, n_pixels, least=2)
    launch(
        vectorised_backward_kernel, grid, BLOCK_SIZE,
        dy, dx, n_pixels, C, scale, n_columns, length, flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype):
    """(name, kernel, argument types) of all that is compiled for images of `dtype`."""
    image, sums = (dtype, 1), ("float32", 1)
    common, plan = ["int64", "int64", "float32"], ["int64", "int64"]
    yield "forward warp", warp_kernel, [image, image, *common]
    yield "forward vectorised", vectorised_kernel, [image, image, *common, *plan]
    yield "forward vectorised, in parts", vectorised_kernel, [image, sums, *common, *plan]
    yield "backward per_plane", per_plane_backward_kernel, [image, image, *common]
    yield "backward vectorised", vectorised_backward_kernel, [image, image, *common, *plan]
