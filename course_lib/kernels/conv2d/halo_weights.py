"""How the weights of a tap and a chunk of channels get to the shared memory of `halo`.

============ ====================================== ================= ==============================
`source`     in memory                              in shared memory  for
============ ====================================== ================= ==============================
`arranged`   tile behind tile, as `arranging` has   (column, k)       everything
             laid them out
`by_k`       (column, tap, k): as channels-last     (column, k)       forward, channels in whole
             weights lie                                              vectors
`by_row`     (k, tap, column), the last tap first:  (k, column)       dx, the same
             the same weights
`by_element` (column, k, tap): as contiguous        (column, k)       forward, float32
             weights lie
============ ====================================== ================= ==============================

k are the channels that are summed over. All but the first one need no launch beforehand; what that
one reads lies closer together, which pays where many blocks read it. `by_element` copies 4 bytes
at a time, all others 16.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.mma.tiles import PARTS, ROW_PADDING
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.matrix import copy_one_async, copy_part_async

SOURCES = ("arranged", "by_k", "by_row", "by_element")
CHUNK_BYTES = 128  # of channels
COPIES = CHUNK_BYTES // VECTOR_BYTES  # for a column, or a position
NONE, ALL = np.int32(-(1 << 30)), np.int32(1 << 30)  # lines


class Weights(NamedTuple):
    """Tiles of weights, one after another: all taps of a chunk, then those of the next.

    first(column, n_columns, n_channels, all_taps, chunk, tap, n_taps): (state, fixed) of the
    thread: the first tile's, and what is the same for all. Taps go from `tap` on, `n_taps` each
    fetch(part, cache, to, weights, state, fixed, exists): begins to copy a part of the tile
    following(state, fixed): the next tile's state
    """

    size: int  # elements of a tile in shared memory
    source: str  # of `fragments.load_b`
    column_pitch: int  # elements of shared memory from a column to the next one
    first: object
    fetch: object
    following: object


def size_of(shape, itemsize, source):
    """Elements of shared memory for a tile of weights."""
    k_size, width = CHUNK_BYTES // itemsize, VECTOR_BYTES // itemsize
    return k_size * (shape.n + ROW_PADDING) if source == "by_row" else shape.n * (k_size + width)


def weights(shape, itemsize, source):
    """The `Weights` for blocks of this shape."""
    made = {"arranged": _arranged, "by_k": _by_k, "by_row": _by_row, "by_element": _by_element}
    return made[source](shape, CHUNK_BYTES // itemsize, VECTOR_BYTES // itemsize)


def _copier(SIDE, JUMP, LINES, N_COPIES, WIDTH):
    """fetch of the ways that copy lines, SIDE threads each, LINES at a time.

    A thread copies WIDTH elements at a time: 16 bytes, or one element.
    """
    copy_some = _copy_one if WIDTH == 1 else copy_part_async

    @cuda.jit(device=True)
    def copy(part, cache, to, weights, where, jump, n_lines):
        tid = np.int64(cuda.threadIdx.x)
        to += tid // SIDE * (JUMP // LINES) + tid % SIDE * WIDTH
        for u in range(part, N_COPIES, PARTS):
            n = WIDTH if np.int32(u * LINES) < n_lines else 0
            copy_some(cache, to + u * JUMP, weights, where + u * jump, n)

    return copy


@cuda.jit(device=True)
def _copy_one(target, i, source, j, n):
    copy_one_async(target, i, source, j, n > 0)


def _arranged(shape, K_SIZE, WIDTH):
    PITCH, LINES, TILE_N = K_SIZE + WIDTH, shape.n_threads // COPIES, shape.n
    N_COPIES, SPAN = shape.n * COPIES // shape.n_threads, shape.n_threads * WIDTH
    TILE_SIZE = shape.n * K_SIZE
    assert N_COPIES * LINES == shape.n
    copy = _copier(COPIES, LINES * PITCH, LINES, N_COPIES, WIDTH)

    @cuda.jit(device=True)
    def first(column, n_columns, n_channels, all_taps, chunk, tap, n_taps):
        step = np.int64((n_columns + TILE_N - 1) // TILE_N) * TILE_SIZE
        where = column // TILE_N * TILE_SIZE + np.int64(cuda.threadIdx.x) * WIDTH
        return where + (chunk * all_taps + tap) * step, step

    @cuda.jit(device=True)
    def fetch(part, cache, to, weights, state, fixed, exists):
        copy(part, cache, to, weights, state, SPAN, ALL if exists else NONE)

    @cuda.jit(device=True)
    def following(state, fixed):
        return state + fixed

    return Weights(shape.n * PITCH, "by_k", PITCH, first, fetch, following)


def _by_k(shape, K_SIZE, WIDTH):
    @cuda.jit(device=True)
    def steps(n_channels, all_taps):
        return np.int64(1), np.int64(n_channels)

    return _by_column(shape, K_SIZE, WIDTH, WIDTH, steps)


def _by_element(shape, K_SIZE, WIDTH):
    @cuda.jit(device=True)
    def steps(n_channels, all_taps):
        return np.int64(all_taps), np.int64(1)

    return _by_column(shape, K_SIZE, WIDTH, 1, steps)


def _by_column(shape, K_SIZE, PADDING, WIDTH, steps):
    """WIDTH neighbours along k copied at a time; steps: from a k, and from a tap, to the next."""
    PITCH, SIDE = K_SIZE + PADDING, K_SIZE // WIDTH
    LINES = shape.n_threads // SIDE
    N_COPIES = shape.n // LINES
    assert N_COPIES * LINES == shape.n and LINES * SIDE == shape.n_threads
    copy = _copier(SIDE, LINES * PITCH, LINES, N_COPIES, WIDTH)

    @cuda.jit(device=True)
    def first(column, n_columns, n_channels, all_taps, chunk, tap, n_taps):
        line, k = cuda.threadIdx.x // SIDE, cuda.threadIdx.x % SIDE * WIDTH + chunk * K_SIZE
        step = np.int64(all_taps) * n_channels  # from a column to the next one
        k_step, tap_step = steps(n_channels, all_taps)
        where = (column + line) * step + tap * tap_step + k * k_step
        back = K_SIZE * k_step - (n_taps - 1) * tap_step
        lines, left = np.int32(n_columns - column - line), np.int32(n_channels - k)
        state = where, np.int32(0), left
        return state, (LINES * step, tap_step, back, np.int32(n_taps), lines)

    @cuda.jit(device=True)
    def fetch(part, cache, to, weights, state, fixed, exists):
        n_lines = fixed[4] if exists and state[2] > 0 else NONE
        copy(part, cache, to, weights, state[0], fixed[0], n_lines)

    @cuda.jit(device=True)
    def following(state, fixed):
        (where, tap, left), (_, step, back, n_taps, _) = state, fixed
        if tap + 1 < n_taps:
            return where + step, np.int32(tap + 1), left
        return where + back, np.int32(0), np.int32(left - K_SIZE)

    return Weights(shape.n * PITCH, "by_k", PITCH, first, fetch, following)


def _by_row(shape, K_SIZE, WIDTH):
    PITCH, SIDE = shape.n + ROW_PADDING, shape.n // WIDTH
    LINES = shape.n_threads // SIDE
    N_COPIES = K_SIZE // LINES
    assert N_COPIES * LINES == K_SIZE and LINES * SIDE == shape.n_threads
    copy = _copier(SIDE, LINES * PITCH, LINES, N_COPIES, WIDTH)

    @cuda.jit(device=True)
    def first(column, n_columns, n_channels, all_taps, chunk, tap, n_taps):
        k, col = cuda.threadIdx.x // SIDE + chunk * K_SIZE, cuda.threadIdx.x % SIDE * WIDTH + column
        step = np.int64(all_taps) * n_columns  # from a k to the next one
        where = k * step + (all_taps - 1 - tap) * np.int64(n_columns) + col
        back = K_SIZE * step + (n_taps - 1) * np.int64(n_columns)
        left = np.int32(n_channels - k) if col < n_columns else NONE
        state = where, np.int32(0), left
        return state, (LINES * step, -np.int64(n_columns), back, np.int32(n_taps))

    @cuda.jit(device=True)
    def fetch(part, cache, to, weights, state, fixed, exists):
        copy(part, cache, to, weights, state[0], fixed[0], state[2] if exists else NONE)

    @cuda.jit(device=True)
    def following(state, fixed):
        (where, tap, left), (_, step, back, n_taps) = state, fixed
        if tap + 1 < n_taps:
            return where + step, np.int32(tap + 1), left
        return where + back, np.int32(0), np.int32(left - K_SIZE)

    return Weights(K_SIZE * PITCH, "by_row", 1, first, fetch, following)
