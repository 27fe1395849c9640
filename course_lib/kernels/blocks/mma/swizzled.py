"""Tiles as Hopper's tensor cores read them in shared memory, and how they get there.

A tile is `rows` rows of a matrix, of 128 bytes along k each, in the order that
`intrinsics.warpgroup` tells. float32 must be rounded to TF32 on the way, since the instruction
would cut it off: it comes through registers, 16 bytes at a time, to be loaded early and stored
late. 16-bit numbers are copied (cp.async). A matrix comes in one of two ways:

========== ========================= ===========================================================
`source`   in memory                 in shared memory
========== ========================= ===========================================================
`by_k`     k fastest                 row after row
`by_row`   row number fastest        16-bit: as it is, which the instruction can read too.
                                     float32: row after row as well. A thread loads four rows at
                                     one k, and stores four numbers; which one first differs
                                     between threads, so that a warp's lie in different banks
========== ========================= ===========================================================

Rows, or ks, begin on 16-byte boundaries. What lies beyond the edge along k arrives as zeros; what
lies beyond the last row, as anything: that makes sums which nobody stores.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.matrix import copy_part_async, round_tf32
from course_lib.runtime.intrinsics.warpgroup import CHUNKS, ROW_BYTES
from course_lib.runtime.intrinsics.words import load_words, store_words

MOST_VECTORS = 64  # of a thread
NOTHING = np.uint32(0)


class Tile(NamedTuple):
    """A kind of tile. All threads of the block call these:

    first(row, n_rows, K): what is known of the tiles from row `row` on, of a matrix of n_rows by K
    load(words, at, x, known, k): of a float32 tile, columns k on to words[at : at+n_vectors]
    store(words, at, cache, base): these, rounded, to cache[base:]
    copy(cache, base, x, known, k): begins to copy a tile's columns k on to cache[base:], of
        `by_k` or 16-bit numbers; float32 as they are
    """

    first: object
    load: object
    store: object
    copy: object
    n_vectors: int  # of 16 bytes, of a thread


def tile(rows, itemsize, n_threads, source):
    """The `Tile` for elements of `itemsize` bytes, in blocks of `n_threads` threads."""
    n_vectors = rows * CHUNKS // n_threads
    least = 256 if (source, itemsize) == ("by_row", 4) else 128  # that a step takes
    assert n_vectors * n_threads == rows * CHUNKS and n_threads % least == 0
    if source == "by_k":
        return Tile(*_by_k(n_vectors, n_threads // CHUNKS, VECTOR_BYTES // itemsize), n_vectors)
    make = _turned if itemsize == 4 else _by_row
    return Tile(*make(n_vectors, n_threads), n_vectors)


@cuda.jit(device=True)
def thread():
    return np.int64(np.uint32(cuda.threadIdx.x))


@cuda.jit(device=True)
def no_load(words, at, x, known, k):
    pass


@cuda.jit(device=True)
def no_move(words, at, cache, base):
    pass


@cuda.jit(device=True)
def no_copy(cache, base, x, known, k):
    pass


def _by_k(N_VECTORS, STEP, WIDTH):
    # Eight threads read a row of the tile, the others the next ones, and again STEP rows further
    # on. All rows of a thread are the same number modulo 8, so that its chunk's place is the same.
    ROW = CHUNKS * WIDTH

    @cuda.jit(device=True)
    def first(row, n_rows, K):
        # Where to begin, how far apart, how often before the rows end, and what k is left.
        line, col = thread() // CHUNKS, thread() % CHUNKS * WIDTH
        line = min(row + line, n_rows - 1)
        last = np.int32(min((n_rows - 1 - line) // STEP, MOST_VECTORS))
        return line * K + col, STEP * K, last, K - col

    @cuda.jit(device=True)
    def place():
        row, chunk = thread() // CHUNKS, thread() % CHUNKS
        return row * ROW + (chunk ^ row % 8) * WIDTH

    @cuda.jit(device=True)
    def load(words, at, x, known, k):
        source, step, last, k_left = known
        if k >= k_left:
            for u in range(N_VECTORS):
                for q in range(4):
                    words[at + u, q] = NOTHING
            return
        source += k
        for u in range(N_VECTORS):
            load_words(words[at + u], 0, x, source, 4)
            source += step if np.int32(u) < last else 0

    @cuda.jit(device=True)
    def store(words, at, cache, base):
        to = base + place()
        for u in range(N_VECTORS):
            for q in range(4):
                words[at + u, q] = round_tf32(words[at + u, q])
            store_words(cache, to + u * STEP * ROW, words[at + u], 4)

    @cuda.jit(device=True)
    def copy(cache, base, x, known, k):
        source, step, last, k_left = known
        inside, to = k < k_left, base + place()
        source, n = (source + k, WIDTH) if inside else (0, 0)
        for u in range(N_VECTORS):
            copy_part_async(cache, to + u * STEP * ROW, x, source, n)
            source += step if inside and np.int32(u) < last else 0

    if WIDTH == 4:
        return first, load, store, copy
    return first, no_load, no_move, copy


def _turned(N_VECTORS, N_THREADS):
    # Eight threads read 32 rows at one k, the next eight at the next k; 256 threads all 32 k.
    SIDE, ROW, STEP = 32, ROW_BYTES // 4, N_THREADS // 256 * 32

    @cuda.jit(device=True)
    def first(row, n_rows, K):
        k, line = thread() // CHUNKS % SIDE, thread() % CHUNKS * 4 + thread() // 256 * SIDE
        line = min(row + line, n_rows - 4)
        last = np.int32(min((n_rows - 4 - line) // STEP, MOST_VECTORS))
        return k * n_rows + line, n_rows, last, K - k

    @cuda.jit(device=True)
    def load(words, at, x, known, k):
        source, n_rows, last, k_left = known
        if k >= k_left:
            for u in range(N_VECTORS):
                for q in range(4):
                    words[at + u, q] = NOTHING
            return
        source += k * n_rows
        for u in range(N_VECTORS):
            load_words(words[at + u], 0, x, source, 4)
            source += STEP if np.int32(u) < last else 0

    @cuda.jit(device=True)
    def store(words, at, cache, base):
        # Threads of a warp have four k, and chunks of four rows: of its rows 0 to 3 a thread
        # stores row q ^ turn as the q-th, so that eight chunks' rows differ modulo 8.
        one = cuda.local.array(1, np.uint32)
        k, line = thread() // CHUNKS % SIDE, thread() % CHUNKS * 4 + thread() // 256 * SIDE
        turn = thread() % CHUNKS // 2
        for q in range(4):
            row = line + (q ^ turn)
            to = base + row * ROW + (k // 4 ^ row % 8) * 4 + k % 4
            for u in range(N_VECTORS):
                low = words[at + u, q ^ 1] if turn & 1 else words[at + u, q]
                high = words[at + u, q ^ 3] if turn & 1 else words[at + u, q ^ 2]
                one[0] = round_tf32(high if turn & 2 else low)
                store_words(cache, to + u * STEP * ROW, one, 1)

    return first, load, store, no_copy


def _by_row(N_VECTORS, N_THREADS):
    # A panel is 64 rows, which are 128 bytes at one k; eight threads read those, the others the
    # next ks. 64 ks make a tile's panel; then comes the next panel.
    SIDE, WIDTH = 64, 8
    KS = N_THREADS // CHUNKS  # at a time
    TIMES = SIDE // KS

    @cuda.jit(device=True)
    def first(row, n_rows, K):
        k, line = thread() // CHUNKS, row + thread() % CHUNKS * WIDTH
        return k * n_rows + line, n_rows, n_rows - line, K - k

    @cuda.jit(device=True)
    def copy(cache, base, x, known, k):
        source, n_rows, rows_left, k_left = known
        mine, chunk = thread() // CHUNKS, thread() % CHUNKS
        to = base + mine * SIDE + (chunk ^ mine % 8) * WIDTH
        source += k * n_rows
        for u in range(N_VECTORS):
            further, panel = u % TIMES * KS, u // TIMES * SIDE
            inside = k + further < k_left and panel < rows_left
            at = source + further * n_rows + panel if inside else 0
            place = to + panel * SIDE + further * SIDE
            copy_part_async(cache, place, x, at, WIDTH if inside else 0)

    return first, no_load, no_move, copy
