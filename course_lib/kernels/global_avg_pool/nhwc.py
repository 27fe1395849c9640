"""The kernels of `global_avg_pool` for channels-last images, stored as N·H·W·C.

A plane's elements lie C apart, but those of neighbouring channels lie side by side. So a warp reads
neighbouring channels of a pixel, and the threads that share a channel add up at the end. With
P = H·W pixels, x is N·P·C here, and all kernels take it as one dimension.

The vectorised rungs take an image as rows of `wide` numbers, the least that is whole pixels and
whole vectors of 16 bytes: a vector of a row has the same channels in each row, whatever C is. Rows
begin at the image's first 16-byte boundary; up to 15 bytes at its either end go one by one.
"""

import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.indexing import divided
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


@cuda.jit(device=True)
def place_of(size, wide, offset, n_columns, length, width):
    """(the image's elements before its first boundary, first number of a row that is this thread's,
    its first row, the rows at which it stops, rows of the block)."""
    part, tile, n = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    n_rows, _ = divided(BLOCK_SIZE, n_columns)
    row, col = divided(cuda.threadIdx.x, n_columns)
    number = np.int64(tile * n_columns + col) * width
    head = min(-(np.int64(n) * size + offset) & (width - 1), size)
    begin = np.int64(part) * length
    stop = begin + length
    while stop > begin and head + (stop - 1) * wide + number + width > size:
        stop -= 1
    if row >= n_rows or number >= wide:
        stop = begin
    return head, number, begin + row, stop, n_rows


@cuda.jit(device=True)
def channel_of(number, C):
    """The channel of an element, by its number from the image's begin; both below 2³¹."""
    return divided(number, C)[1]


@cuda.jit
def vectorised_kernel(x, y, size, C, wide, scale, n_columns, length, offset, n_sums):
    """Sums of parts of channels: y[n, k, c], number k of `n_sums` of the image's channel.

    x, y       flat; images of `size` elements
    n_columns  vectors of a row that a block has; blockIdx: (part of the rows, tile of a row, image)
    length     rows of a part
    offset     elements from the last 16-byte boundary to x[0]
    """
    allow_next_kernel()
    wait_for_previous_kernel()
    # Padded by one, so that neither writing nor reading meets a bank twice.
    shared = cuda.shared.array((MAX_WIDTH, PADDED_SIZE), np.float32)
    width = vector_width(x)
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    totals = cuda.local.array(MAX_WIDTH, np.float32)
    for k in range(MAX_WIDTH):
        totals[k] = ZERO
    part, tile, n = cuda.blockIdx.x, cuda.blockIdx.y, np.int64(cuda.blockIdx.z)
    head, number, row, stop, n_rows = place_of(size, wide, offset, n_columns, length, width)
    start = n * size + head + row * wide + number
    # All loads of a batch come before its additions: memory answers them together.
    while row + (UNROLL - 1) * n_rows < stop:
        for u in range(UNROLL):
            load_vector(values[u], x, start + u * n_rows * wide)
        for u in range(UNROLL):
            for k in range(width):
                totals[k] += values[u, k]
        row += UNROLL * n_rows
        start += UNROLL * n_rows * wide
    if row < stop:
        for u in range(UNROLL):
            for k in range(width):
                values[u, k] = ZERO
            if row + u * n_rows < stop:
                load_vector(values[u], x, start + u * n_rows * wide)
        for u in range(UNROLL):
            for k in range(width):
                totals[k] += values[u, k]
    for k in range(width):
        shared[k, cuda.threadIdx.x] = totals[k]
    cuda.syncthreads()
    # One thread for each number of the tile's rows adds up the rows.
    first, i = tile * n_columns * width, cuda.threadIdx.x
    turns, _ = divided(wide, C)
    while i < min(n_columns * width, wide - first):
        total = ZERO
        for other in range(n_rows):
            total += shared[i % width, other * n_columns + i // width]
        turn, _ = divided(first + i, C)
        k = part * turns + turn
        store(y, (n * n_sums + k) * C + channel_of(head + first + i, C), total * scale)
        i += BLOCK_SIZE
    # What is left at either end of the image is one more sum.
    c = cuda.threadIdx.x
    while c < C and part == 0 and tile == 0 and n_sums > cuda.gridDim.x * turns:
        total = ZERO
        for i in range(head):
            if channel_of(i, C) == c:
                total += load(x, n * size + i)
        for back in range((size - head) & (width - 1), 0, -1):
            if channel_of(C * MAX_WIDTH - back, C) == c:
                total += load(x, (n + 1) * size - back)
        store(y, (n * n_sums + n_sums - 1) * C + c, total * scale)
        c += BLOCK_SIZE


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
def vectorised_backward_kernel(dy, dx, size, C, wide, scale, n_columns, length, offset):
    """dx of dy; arguments as of `vectorised_kernel`, `offset` that of dx."""
    allow_next_kernel()
    wait_for_previous_kernel()
    width = vector_width(dx)
    values = cuda.local.array(MAX_WIDTH, np.float32)
    n = np.int64(cuda.blockIdx.z)
    head, number, row, stop, n_rows = place_of(size, wide, offset, n_columns, length, width)
    if row < stop:
        c = channel_of(head + number, C)
        for k in range(width):
            values[k] = load(dy, n * C + c) * scale
            c = np.int32(c + 1) if c + 1 < C else np.int32(0)
    i = n * size + head + row * wide + number
    while row < stop:
        store_vector(dx, i, values)
        row += n_rows
        i += n_rows * wide
    if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0:
        i, tail = np.int64(cuda.threadIdx.x), (size - head) & (width - 1)
        if i < head:
            store(dx, n * size + i, load(dy, n * C + channel_of(i, C)) * scale)
        if 0 < i <= tail:
            c = channel_of(C * MAX_WIDTH - i, C)
            store(dx, (n + 1) * size - i, load(dy, n * C + c) * scale)


def launch_warp(x, y, n_pixels, scale):
    N, C = x.shape[:2]
    grid = (math.ceil(C / (BLOCK_SIZE // 32 * SECTOR)), N)
    launch(warp_kernel, grid, BLOCK_SIZE, x, y, n_pixels, C, scale, flat=True)


class Rows(NamedTuple):
    """How images are shared out: the grid, and what kernels are told of it."""

    grid: tuple
    wide: int
    n_columns: int
    length: int
    offset: int
    n_sums: int


def plan(image, least=8):
    """The `Rows` of a channels-last image.

    Its rows are cut into parts only as long as a thread keeps `least` of them, or many more where
    there are enough blocks already: partial sums cost a second kernel, where it isn't there anyway.
    """
    N, C, H, W = image.shape
    width = VECTOR_BYTES // image.dtype.itemsize
    wide, offset = math.lcm(C, width), arrays.address_of(image) % VECTOR_BYTES // (16 // width)
    n_rows, total_columns = math.ceil(H * W * C / wide), wide // width
    left = offset > 0 or H * W * C % width > 0
    n_tiles = math.ceil(total_columns / COLUMNS)
    if N * n_tiles > WAVE:
        n_tiles = max(WAVE // N, math.ceil(total_columns / MOST_COLUMNS))
    n_columns = math.ceil(total_columns / n_tiles)
    n_tiles = math.ceil(total_columns / n_columns)
    per_thread = n_rows // (BLOCK_SIZE // n_columns)
    if left or wide > C:
        least = min(least, UNROLL)
    keep = least if N * n_tiles < SOME_BLOCKS else 8 * least
    n_parts = max(1, min(ENOUGH_BLOCKS // (N * n_tiles), per_thread // keep))
    length = math.ceil(n_rows / n_parts)
    n_parts = math.ceil(n_rows / length)
    return Rows(
        (n_parts, n_tiles, N), wide, n_columns, length, offset, n_parts * (wide // C) + left
    )


def launch_vectorised(x, y, n_pixels, scale, finish_kernel):
    """The sums of parts and, where there are several, `finish_kernel`, which adds them up."""
    N, C = x.shape[:2]
    grid, wide, n_columns, length, offset, n_sums = plan(x)
    partial, factor = y, scale
    if n_sums > 1:
        partial = arrays.empty((N, n_sums, C), like=x, dtype="float32")
        factor = np.float32(1)
    launch(
        vectorised_kernel, grid, BLOCK_SIZE,
        x, partial, n_pixels * C, C, wide, factor, n_columns, length, offset, n_sums,
        flat=True, overlap=True,
    )  # fmt: skip
    if n_sums > 1:
        launch(
            finish_kernel, math.ceil(N * C * 32 / BLOCK_SIZE), BLOCK_SIZE,
            partial, y, n_sums, C, scale, flat=True, overlap=True,
        )  # fmt: skip


def launch_per_plane_backward(dy, dx, n_pixels, scale):
    N, C = dx.shape[:2]
    grid = (math.ceil(C / CHANNELS), N)
    launch(per_plane_backward_kernel, grid, BLOCK_SIZE, dy, dx, n_pixels, C, scale, flat=True)


def launch_vectorised_backward(dy, dx, n_pixels, scale):
    C = dx.shape[1]
    grid, wide, n_columns, length, offset, _ = plan(dx, least=2)
    launch(
        vectorised_backward_kernel, grid, BLOCK_SIZE,
        dy, dx, n_pixels * C, C, wide, scale, n_columns, length, offset, flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype):
    """(name, kernel, argument types) of all that is compiled for images of `dtype`."""
    image, sums = (dtype, 1), ("float32", 1)
    common = ["int64", "int64", "float32"]
    whole = [*["int64"] * 3, "float32", *["int64"] * 3]
    yield "forward warp", warp_kernel, [image, image, *common]
    yield "forward vectorised", vectorised_kernel, [image, image, *whole, "int64"]
    yield "forward vectorised, in parts", vectorised_kernel, [image, sums, *whole, "int64"]
    yield "backward per_plane", per_plane_backward_kernel, [image, image, *common]
    yield "backward vectorised", vectorised_backward_kernel, [image, image, *whole]
