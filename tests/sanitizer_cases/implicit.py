"""Planted and correct: accesses without brackets, by loops, unpacking, `in`, methods, `fill`."""

import numpy as np
from numba import cuda, float32

from sanitizer_cases.case import correct, floats, planted

N = 32
ONE_MORE = N + 1


@planted("race", 1, N, floats(N, N), tool="racecheck", mended="loop_over_the_tile")
@cuda.jit
def loop_over_the_tile_too_early(x, y, mended):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if mended:
        cuda.syncthreads()
    total = float32(0)
    for value in tile:  # BUG: no barrier before
        total += value
    y[tid] = total


@planted("race", 1, N, floats(N, N), tool="racecheck", mended="enumerated")
@cuda.jit
def enumerated_too_early(x, y, mended):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if mended:
        cuda.syncthreads()
    total = float32(0)
    for place, value in enumerate(tile):  # BUG: no barrier before
        total += place * value
    y[tid] = total


@planted("race", 1, N, floats(N, N), tool="racecheck")
@cuda.jit
def zipped_too_early(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    total = float32(0)
    for one, other in zip(x, tile):  # BUG: no barrier before  # noqa: B905
        total += one * other
    y[tid] = total


@correct(1, N, floats(N, N))
@cuda.jit
def zipped_and_enumerated(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    cuda.syncthreads()
    total = float32(0)
    for place, (one, other) in enumerate(zip(x, tile)):  # noqa: B905
        total += place * one * other
    y[tid] = total


@planted("race", 1, N, floats((N, 2), N), tool="racecheck", mended="pair_unpacked")
@cuda.jit
def pair_unpacked_too_early(x, y, mended):
    pairs = cuda.shared.array((N, 2), float32)
    tid = cuda.threadIdx.x
    pairs[tid, 0], pairs[tid, 1] = x[tid]
    if mended:
        cuda.syncthreads()
    first, second = pairs[N - 1 - tid]  # BUG: no barrier before
    y[tid] = first + second


@planted("race", 1, N, floats(N, N), tool="racecheck")
@cuda.jit
def looked_for_too_early(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if float32(0.5) in tile:  # BUG: no barrier before
        y[tid] = 1


@correct(1, N, floats(N, N))
@cuda.jit
def looked_for(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    cuda.syncthreads()
    if float32(0.5) not in tile:
        y[tid] = 1


@planted("race", 1, N, floats(N, N), tool="racecheck", mended="summed")
@cuda.jit
def summed_too_early(x, y, mended):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if mended:
        cuda.syncthreads()
    y[tid] = tile.sum() + np.sum(x)  # BUG: no barrier before


@planted("race", 1, N, floats(N, N), tool="racecheck", mended="averaged")
@cuda.jit
def averaged_too_early(x, y, mended):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if mended:
        cuda.syncthreads()
    y[tid] = np.mean(tile)  # BUG: no barrier before


@planted("race", 1, N, floats(N, N), tool="racecheck")
@cuda.jit
def largest_too_early(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    y[tid] = max(tile)  # BUG: no barrier before


@correct(1, N, floats(N, N))
@cuda.jit
def largest_and_its_place(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    cuda.syncthreads()
    y[tid] = max(tile) + np.argmax(tile)


@planted("race", 1, N, floats(N, N), tool="racecheck")
@cuda.jit
def place_of_the_largest_too_early(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    y[tid] = tile.argmax()  # BUG: no barrier before


@planted("race", 1, N, floats((4, 8), N), tool="racecheck", mended="flat")
@cuda.jit
def flat_too_early(x, y, mended):
    tile = cuda.shared.array((4, 8), float32)
    tid = cuda.threadIdx.x
    tile.flat[tid] = x.flat[tid]
    if mended:
        cuda.syncthreads()
    y[tid] = tile.flat[N - 1 - tid]  # BUG: no barrier before


@planted("race", 1, (8, 4), floats((4, 8), (4, 8)), tool="racecheck",
         mended="ndenumerate_after_a_barrier")
@cuda.jit
def ndenumerate_too_early(x, y, mended):
    tile = cuda.shared.array((4, 8), float32)
    col, row = cuda.grid(2)
    tile[row, col] = x[row, col]
    if mended:
        cuda.syncthreads()
    for (_, column), value in np.ndenumerate(tile):  # BUG: no barrier before
        y[row, col] += column * value


@planted("race", 1, N, floats(N, N), tool="racecheck", also=("uninitialised-read",),
         mended="filled")
@cuda.jit
def filled_without_barrier(x, y, mended):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    if tid == 0:
        tile.fill(0)
    if mended:
        cuda.syncthreads()
    tile[tid] += x[tid]  # BUG: no barrier before
    y[tid] = tile[tid]


@planted("race", 1, N, floats(N), reason="racecheck looks at shared memory only")
@cuda.jit
def everyone_writes_the_slice(y):
    y[:] = cuda.threadIdx.x  # BUG: every thread writes all of it


@correct(1, N, floats((N, N)))
@cuda.jit
def each_writes_its_row(y):
    y[cuda.threadIdx.x] = cuda.threadIdx.x


NOT_SHARED = "initcheck looks at global memory only"


@planted("uninitialised-read", 1, N, floats(N, N), reason=NOT_SHARED)
@cuda.jit
def largest_of_what_nobody_wrote(x, y):
    tile = cuda.shared.array(ONE_MORE, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    cuda.syncthreads()
    y[tid] = max(tile)  # BUG: nobody writes the last element, and a NaN loses


@planted("uninitialised-read", 1, N, floats(N, N), reason=NOT_SHARED)
@cuda.jit
def local_sum_with_a_gap(x, y):
    mine = cuda.local.array(3, float32)
    tid = cuda.threadIdx.x
    mine[0] = x[tid]
    mine[2] = x[tid]
    y[tid] = mine.sum()  # BUG: element 1 is not written


@correct(1, N, floats(N, N))
@cuda.jit
def local_sum_over_a_part(x, y):
    mine = cuda.local.array(3, float32)
    tid = cuda.threadIdx.x
    mine[0] = x[tid]
    mine[1] = x[tid]
    y[tid] = mine[:2].sum()


@planted("uninitialised-read", 1, N, floats(N, N), reason=NOT_SHARED)
@cuda.jit
def unpacked_before_written(x, y):
    mine = cuda.local.array(2, float32)
    tid = cuda.threadIdx.x
    mine[0] = x[tid]
    first, second = mine  # BUG: element 1 is not written
    y[tid] = first + second


@planted("out-of-bounds", 1, N, floats((4, 8), N), tool="memcheck")
@cuda.jit
def flat_past_the_end(x, y):
    tid = cuda.threadIdx.x
    y[tid] = x.flat[tid + 1]  # BUG: the last thread has no neighbour


@correct(1, N, floats(N, N))
@cuda.jit
def length_is_no_read(x, y):
    """The length, the shape and a view touch no element."""
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    half = tile[:N // 2]
    y[tid] = len(tile) + half.size + tile.T.shape[0]
