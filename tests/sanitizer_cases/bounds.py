"""Planted: indices outside, and reads of what nobody has written."""

import numpy as np
from numba import cuda, float32, int32

from sanitizer_cases.case import floats, ints, planted

N = 64
WITH_HALO = N + 2
WRAPS = "numba takes a negative index from the array's end, so the access is in bounds"
NOT_SHARED = "initcheck looks at global memory only"


@planted("out-of-bounds", 2, N, floats(100, 100), tool="memcheck")
@cuda.jit
def missing_guard(x, y):
    i = cuda.grid(1)
    y[i] = 2 * x[min(i, x.size - 1)]  # BUG: the last block has more threads than elements


@planted("out-of-bounds", 1, N, floats(N, N), tool="memcheck")
@cuda.jit
def neighbour_past_the_end(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] + x[i + 1]  # BUG: the last element has no neighbour


@planted("out-of-bounds", 1, N, floats(N, N), reason=WRAPS)
@cuda.jit
def neighbour_before_the_start(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] - x[i - 1]  # BUG: the first element has no neighbour


@planted("out-of-bounds", 1, N, floats(N + 1, N), tool="memcheck")
@cuda.jit
def tile_without_halo(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    cuda.syncthreads()
    y[tid] = tile[tid] + tile[tid + 1]  # BUG: the tile has no element N


@planted("out-of-bounds", (2, 2), (8, 8), floats((10, 14), (10, 14)),
         reason="with guards swapped as well, most wrong indices fall inside the allocation")
@cuda.jit
def rows_and_columns_swapped(x, y):
    row, col = cuda.grid(2)
    if col < x.shape[1] and row < x.shape[1]:
        y[row, col] = x[min(row, 9), col]  # BUG: rows are guarded by the number of columns


@planted("out-of-bounds", 1, 32, floats(32 * 4, 32),
         reason="memcheck does not see a thread's local array overflow within its stack")
@cuda.jit
def local_array_too_short(x, y):
    mine = cuda.local.array(4, float32)
    i = cuda.grid(1)
    for k in range(5):
        mine[k] = k  # BUG: one iteration too many
    y[i] = mine[0] + x[i]


@planted("out-of-bounds", 1, N, ints(N, 8, modulus=9), tool="memcheck")
@cuda.jit
def histogram_past_the_end(x, y):
    cuda.atomic.add(y, x[cuda.grid(1)], 1)  # BUG: value 8 has no bin


@planted("uninitialised-read", 1, N, floats(N, N), reason=NOT_SHARED)
@cuda.jit
def halo_never_filled(x, y):
    tile = cuda.shared.array(WITH_HALO, float32)
    tid = cuda.threadIdx.x
    tile[tid + 1] = x[tid]
    cuda.syncthreads()
    y[tid] = tile[tid] + tile[tid + 1] + tile[tid + 2]  # BUG: nobody fills the two ends


@planted("uninitialised-read", 1, 32, floats(32 * 4, 32), reason=NOT_SHARED)
@cuda.jit
def accumulator_not_zeroed(x, y):
    sums = cuda.local.array(2, float32)
    i = cuda.grid(1)
    for k in range(4):
        sums[k % 2] += x[4 * i + k]  # BUG: the sums start with garbage
    y[i] = sums[0] - sums[1]


@planted("uninitialised-read", 1, N, ints(N, 8, modulus=8), reason=NOT_SHARED)
@cuda.jit
def histogram_not_zeroed(x, y):
    bins = cuda.shared.array(8, int32)
    tid = cuda.threadIdx.x
    cuda.atomic.add(bins, x[tid], 1)  # BUG: the bins start with garbage
    cuda.syncthreads()
    if tid < 8:
        y[tid] = bins[tid]


@planted("shared-aliasing", 1, N, floats(N, N), shared=8 * N,
         reason="every access is in bounds and in order; only the values are wrong")
@cuda.jit
def dynamic_arrays_overlap(x, y):
    one = cuda.shared.array(0, float32)
    two = cuda.shared.array(0, int32)  # BUG: starts at the same byte as `one`
    tid = cuda.threadIdx.x
    one[tid] = x[tid]
    two[tid] = 7
    y[tid] = one[tid] + two[tid]


def bins_of_bytes():
    """Bytes to count, as image pixels are."""
    return np.arange(N, dtype=np.uint8), np.zeros(32, np.int32)


@planted("out-of-bounds", 1, N, bins_of_bytes, tool="memcheck")
@cuda.jit
def index_from_bytes(x, y):
    i = cuda.grid(1)
    cuda.atomic.max(y, x[i], i)  # BUG: x goes up to 63, y has 32 elements
