"""Tiles of a matrix in shared memory, and how they get there.

A tile is `rows` rows of the matrix, of `k_bytes` bytes along k each. Copies are asynchronous
(cp.async), 16 bytes at a time where the matrix allows it, and what lies beyond its edge arrives as
zeros, so that nobody who multiplies has to look where the edge is. A matrix comes in one of three
ways:

============ ========================== ======================= =================================
`source`     in memory                  in shared memory        copied
============ ========================== ======================= =================================
`by_k`       k fastest, rows begin on   (row, k)                16 bytes
             16-byte boundaries
`by_row`     row number fastest, and    (k, row)                16 bytes
             each k begins on such a
             boundary
`any`        any strides                (row, k)                one element
============ ========================== ======================= =================================

Rows of either kind are padded by 16 or 32 bytes, so that the eight rows which are read at a time
lie in different banks: `ldmatrix` takes 16 bytes of each of eight rows, a load of words of a
`by_row` tile takes eight neighbours of each of four.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.matrix import copy_one_async, copy_part_async

SOURCES = ("by_k", "by_row", "any")
ROW_PADDING = 8  # elements, of (k, row) tiles
PARTS = 3  # that a tile is fetched in, where that is done bit by bit


class Tile(NamedTuple):
    """A kind of tile: `fetch` copies one, to `size` elements of shared memory.

    fetch(cache, base, x, row, n_rows, row_stride, k, k_stop, k_stride) begins to copy rows `row`
    on and columns `k` on to cache[base:]; rows from n_rows and columns from k_stop on are zeros.
    All threads of the block call it.

    Who fetches one tile after another along k, bit by bit, says first(row, n_rows, row_stride, k,
    k_stop, k_stride), which gives what is known of the first one, fetch_part(part, cache, base, x,
    known) for each part from 0 to PARTS − 1, and following(known) for the next one.
    """

    fetch: object
    first: object
    fetch_part: object
    following: object
    size: int  # elements
    pitch: int  # elements from one row in shared memory to the next
    k_size: int  # columns of the matrix


def size(rows, k_bytes, itemsize, source):
    """(elements of a tile, elements from one of its rows in shared memory to the next)."""
    k_size = k_bytes // itemsize
    if source == "by_row":
        return k_size * (rows + ROW_PADDING), rows + ROW_PADDING
    pitch = k_size + VECTOR_BYTES // itemsize
    return rows * pitch, pitch


def tile(rows, k_bytes, itemsize, n_threads, source):
    """The `Tile` for elements of `itemsize` bytes, in blocks of `n_threads` threads."""
    width, k_size = VECTOR_BYTES // itemsize, k_bytes // itemsize
    n_elements, pitch = size(rows, k_bytes, itemsize, source)
    make = {"by_row": _fetch_by_row, "by_k": _fetch_by_k, "any": _fetch_any}[source]
    return Tile(*make(rows, k_size, pitch, width, n_threads), n_elements, pitch, k_size)


def _fetch_by_k(ROWS, K_SIZE, PITCH, WIDTH, N_THREADS):
    PER_ROW = K_SIZE // WIDTH  # vectors
    N_VECTORS, STEP = ROWS * PER_ROW // N_THREADS, N_THREADS // PER_ROW
    assert N_VECTORS * STEP == ROWS and STEP * PER_ROW == N_THREADS

    @cuda.jit(device=True)
    def fetch(cache, base, x, row, n_rows, row_stride, k, k_stop, k_stride):
        tid = np.uint32(cuda.threadIdx.x)
        first, col = np.int64(tid // np.uint32(PER_ROW)), np.int64(tid % np.uint32(PER_ROW)) * WIDTH
        n_inside = min(max(k_stop - k - col, 0), WIDTH)
        source = (row + first) * row_stride + k + col
        place = base + first * PITCH + col
        if row + ROWS <= n_rows and k + K_SIZE <= k_stop:
            for u in range(N_VECTORS):
                copy_part_async(cache, place + u * STEP * PITCH, x, source, WIDTH)
                source += STEP * row_stride
            return
        for u in range(N_VECTORS):
            n = n_inside if row + first + u * STEP < n_rows else 0
            copy_part_async(cache, place + u * STEP * PITCH, x, source if n > 0 else 0, n)
            source += STEP * row_stride

    @cuda.jit(device=True)
    def first(row, n_rows, row_stride, k, k_stop, k_stride):
        # Where the thread copies from, how far apart, how many lines, how much of each.
        tid = np.uint32(cuda.threadIdx.x)
        line, col = np.int64(tid // np.uint32(PER_ROW)), np.int64(tid % np.uint32(PER_ROW)) * WIDTH
        source = (row + line) * row_stride + k + col
        n_lines = np.int32(min(n_rows - row - line, ROWS))
        return source, STEP * row_stride, n_lines, k_stop - k - col

    @cuda.jit(device=True)
    def fetch_part(part, cache, base, x, known):
        source, step, n_lines, n_inside = known
        tid = np.uint32(cuda.threadIdx.x)
        line, col = np.int64(tid // np.uint32(PER_ROW)), np.int64(tid % np.uint32(PER_ROW)) * WIDTH
        n_inside, place = np.int32(min(max(n_inside, 0), WIDTH)), base + line * PITCH + col
        for u in range(part, N_VECTORS, PARTS):
            n = n_inside if np.int32(u * STEP) < n_lines else np.int32(0)
            copy_part_async(cache, place + u * STEP * PITCH, x, source + u * step, n)

    @cuda.jit(device=True)
    def following(known):
        source, step, n_lines, n_inside = known
        return source + K_SIZE, step, n_lines, n_inside - K_SIZE

    return fetch, first, fetch_part, following


def _fetch_by_row(ROWS, K_SIZE, PITCH, WIDTH, N_THREADS):
    PER_K = ROWS // WIDTH  # vectors
    N_VECTORS, STEP = K_SIZE * PER_K // N_THREADS, N_THREADS // PER_K
    assert N_VECTORS * STEP == K_SIZE and STEP * PER_K == N_THREADS

    @cuda.jit(device=True)
    def fetch(cache, base, x, row, n_rows, row_stride, k, k_stop, k_stride):
        tid = np.uint32(cuda.threadIdx.x)
        first, col = np.int64(tid // np.uint32(PER_K)), np.int64(tid % np.uint32(PER_K)) * WIDTH
        n_inside = min(max(n_rows - row - col, 0), WIDTH)
        source = (k + first) * k_stride + row + col
        place = base + first * PITCH + col
        if row + ROWS <= n_rows and k + K_SIZE <= k_stop:
            for u in range(N_VECTORS):
                copy_part_async(cache, place + u * STEP * PITCH, x, source, WIDTH)
                source += STEP * k_stride
            return
        for u in range(N_VECTORS):
            n = n_inside if k + first + u * STEP < k_stop else 0
            copy_part_async(cache, place + u * STEP * PITCH, x, source if n > 0 else 0, n)
            source += STEP * k_stride

    @cuda.jit(device=True)
    def first(row, n_rows, row_stride, k, k_stop, k_stride):
        # Where the thread copies from, how far apart, how many lines, how much of each.
        tid = np.uint32(cuda.threadIdx.x)
        line, col = np.int64(tid // np.uint32(PER_K)), np.int64(tid % np.uint32(PER_K)) * WIDTH
        source = (k + line) * k_stride + row + col
        n_inside = np.int32(min(max(n_rows - row - col, 0), WIDTH))
        return source, STEP * k_stride, k_stop - k - line, n_inside

    @cuda.jit(device=True)
    def fetch_part(part, cache, base, x, known):
        source, step, n_lines, n_inside = known
        tid = np.uint32(cuda.threadIdx.x)
        line, col = np.int64(tid // np.uint32(PER_K)), np.int64(tid % np.uint32(PER_K)) * WIDTH
        place, n_lines = base + line * PITCH + col, np.int32(min(n_lines, K_SIZE))
        for u in range(part, N_VECTORS, PARTS):
            n = n_inside if np.int32(u * STEP) < n_lines else np.int32(0)
            copy_part_async(cache, place + u * STEP * PITCH, x, source + u * step, n)

    @cuda.jit(device=True)
    def following(known):
        source, step, n_lines, n_inside = known
        return source + N_VECTORS * step, step, n_lines - K_SIZE, n_inside

    return fetch, first, fetch_part, following


def _fetch_any(ROWS, K_SIZE, PITCH, WIDTH, N_THREADS):
    # Eight rows of four columns, where the row number is fastest: they fill sectors in memory, and
    # banks of shared memory.
    BANDS = K_SIZE // 4

    @cuda.jit(device=True)
    def fetch(cache, base, x, row, n_rows, row_stride, k, k_stop, k_stride):
        for element in range(cuda.threadIdx.x, ROWS * K_SIZE, N_THREADS):
            e = np.uint32(element)
            if k_stride == 1:
                r, col = e // np.uint32(K_SIZE), e % np.uint32(K_SIZE)
            else:
                inner, outer = e % np.uint32(32), e // np.uint32(32)
                r = inner % np.uint32(8) + outer // np.uint32(BANDS) * np.uint32(8)
                col = inner // np.uint32(8) + outer % np.uint32(BANDS) * np.uint32(4)
            i, j = row + np.int64(r), k + np.int64(col)
            present = i < n_rows and j < k_stop
            source = i * row_stride + j * k_stride if present else 0
            place = base + np.int64(r) * PITCH + np.int64(col)
            copy_one_async(cache, place, x, source, present)

    @cuda.jit(device=True)
    def first(row, n_rows, row_stride, k, k_stop, k_stride):
        return row, n_rows, row_stride, k, k_stop, k_stride

    @cuda.jit(device=True)
    def fetch_part(part, cache, base, x, known):
        if part == 0:
            row, n_rows, row_stride, k, k_stop, k_stride = known
            fetch(cache, base, x, row, n_rows, row_stride, k, k_stop, k_stride)

    @cuda.jit(device=True)
    def following(known):
        row, n_rows, row_stride, k, k_stop, k_stride = known
        return row, n_rows, row_stride, k + K_SIZE, k_stop, k_stride

    return fetch, first, fetch_part, following
