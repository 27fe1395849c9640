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

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.matrix import copy_one_async, copy_part_async
from course_lib.runtime.intrinsics.words import load_words, store_words

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


def tile(rows, k_bytes, itemsize, n_threads, source, held=0):
    """The `Tile` for elements of `itemsize` bytes, in blocks of `n_threads` threads.

    held  of `any`: elements that a thread has in registers at a time, on their way to shared
          memory; 0 if 8 of 16 bits, and none of float32, whose copies are asynchronous. An
          asynchronous copy of so few bytes holds up those that follow far longer than a load does.
    """
    width, k_size = VECTOR_BYTES // itemsize, k_bytes // itemsize
    n_elements, pitch = size(rows, k_bytes, itemsize, source)
    make = {"by_row": _fetch_by_row, "by_k": _fetch_by_k, "any": _fetching_any(held)}[source]
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


def _fetching_any(held):
    return functools.partial(_fetch_any, held)


def _fetch_any(held, ROWS, K_SIZE, PITCH, WIDTH, N_THREADS):
    # Where k is fastest, a thread has a column, and neighbours read neighbours. Else a warp reads
    # eight rows of four columns: they fill sectors in memory, and banks of shared memory.
    BANDS, N_WARPS = K_SIZE // 4, N_THREADS // 32
    ACROSS, WARPS_ACROSS = min(K_SIZE, N_THREADS), min(BANDS, N_WARPS)
    STEP, BY_ROW_STEP = N_THREADS // ACROSS, N_WARPS // WARPS_ACROSS * 8
    sizes = ROWS, N_THREADS, K_SIZE, N_WARPS, BANDS
    assert not any(np.remainder(sizes, (STEP, ACROSS, ACROSS, WARPS_ACROSS, WARPS_ACROSS)))
    assert ROWS % BY_ROW_STEP == 0
    rest = PITCH, WIDTH, held
    by_k = _copy_elements(ROWS // STEP, STEP, K_SIZE // ACROSS, ACROSS, *rest)
    by_row = _copy_elements(
        ROWS // BY_ROW_STEP, BY_ROW_STEP, BANDS // WARPS_ACROSS, 4 * WARPS_ACROSS, *rest
    )

    @cuda.jit(device=True)
    def place_of(k_stride):
        # The thread's first row and column of the tile.
        tid = np.uint32(cuda.threadIdx.x)
        if k_stride == 1:
            return np.int64(tid // np.uint32(ACROSS)), np.int64(tid % np.uint32(ACROSS))
        lane, warp = tid % np.uint32(32), tid // np.uint32(32)
        down, across = warp // np.uint32(WARPS_ACROSS), warp % np.uint32(WARPS_ACROSS)
        line, col = lane % np.uint32(8), lane // np.uint32(8)
        return np.int64(line + down * np.uint32(8)), np.int64(col + across * np.uint32(4))

    @cuda.jit(device=True)
    def first(row, n_rows, row_stride, k, k_stop, k_stride):
        # Where the thread copies from, strides, how many lines and columns there are from there on.
        line, col = place_of(k_stride)
        source = (row + line) * row_stride + (k + col) * k_stride
        n_lines = np.int32(min(n_rows - row - line, ROWS))
        return source, row_stride, k_stride, n_lines, k_stop - k - col

    @cuda.jit(device=True)
    def copy_part(part, cache, base, x, known):
        line, col = place_of(known[2])
        if known[2] == 1:
            by_k(part, cache, base + line * PITCH + col, x, known)
        else:
            by_row(part, cache, base + line * PITCH + col, x, known)

    @cuda.jit(device=True)
    def fetch_part(part, cache, base, x, known):
        _, col = place_of(known[2])
        # Who reads ahead reads one tile behind the last k: zeros. Those behind it nobody looks at.
        if known[4] + col > -K_SIZE:
            copy_part(part, cache, base, x, known)

    @cuda.jit(device=True)
    def following(known):
        source, row_stride, k_stride, n_lines, n_inside = known
        return source + K_SIZE * k_stride, row_stride, k_stride, n_lines, n_inside - K_SIZE

    @cuda.jit(device=True)
    def fetch(cache, base, x, row, n_rows, row_stride, k, k_stop, k_stride):
        known = first(row, n_rows, row_stride, k, k_stop, k_stride)
        for part in range(PARTS):
            copy_part(part, cache, base, x, known)

    return fetch, first, fetch_part, following


def _copy_elements(N_LINES, STEP, N_COLUMNS, COLUMN_STEP, PITCH, WIDTH, held):
    """copy(part, cache, place, x, known): a thread's elements of a tile, the first to cache[place:]

    They are in N_LINES lines, STEP apart, and in N_COLUMNS columns, COLUMN_STEP apart.
    """
    BATCH, IS_ASYNC = math.gcd(N_LINES, held or 8), WIDTH == 4 and not held
    TOGETHER = N_COLUMNS if N_LINES * N_COLUMNS <= held else 1  # columns in flight

    @cuda.jit(device=True)
    def copy(part, cache, place, x, known):
        source, row_stride, k_stride, n_lines, n_inside = known
        words = cuda.local.array((TOGETHER, BATCH), np.uint32)
        step, column_step = STEP * row_stride, COLUMN_STEP * k_stride
        for q in range(0, N_COLUMNS, TOGETHER):
            for batch in range(part * BATCH, N_LINES, PARTS * BATCH):
                at = source + q * column_step + batch * step
                to = place + q * COLUMN_STEP + batch * STEP * PITCH
                for v in range(TOGETHER):
                    n_there = n_lines if (q + v) * COLUMN_STEP < n_inside else np.int32(0)
                    for u in range(BATCH):
                        inside = np.int32((batch + u) * STEP) < n_there
                        if IS_ASYNC:
                            origin = at + v * column_step + u * step if inside else np.int64(0)
                            copy_one_async(cache, to + u * STEP * PITCH, x, origin, inside)
                        else:
                            words[v, u] = np.uint32(0)
                            if inside:
                                load_words(words[v, u:], 0, x, at + v * column_step + u * step, 1)
                if not IS_ASYNC:
                    for v in range(TOGETHER):
                        for u in range(BATCH):
                            beside = to + v * COLUMN_STEP
                            store_words(cache, beside + u * STEP * PITCH, words[v, u:], 1)

    return copy
