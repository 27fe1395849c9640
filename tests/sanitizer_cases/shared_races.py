"""Planted: threads of one block that race. Two of them are mended as well."""

from numba import cuda, float32, int32

from sanitizer_cases.case import floats, ints, planted

N = 64
ATOMICS = "racecheck, as tried on an H200, reports no hazard between an atomic and a plain access"
GLOBAL_ONLY = "racecheck looks at shared memory, and this race is on global memory"


@planted("race", 1, N, floats(N, N), tool="racecheck", mended="reversed_with_barrier")
@cuda.jit
def reversed_without_barrier(x, y, mended):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if mended:
        cuda.syncthreads()
    y[tid] = tile[N - 1 - tid]  # BUG: no barrier before


@planted("race", 2, N, floats(2 * N, 2), tool="racecheck", mended="tree_with_barriers")
@cuda.jit
def tree_without_barrier(x, y, mended):
    sums = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    sums[tid] = x[cuda.grid(1)]
    cuda.syncthreads()
    half = N // 2
    while half > 0:
        if tid < half:
            sums[tid] += sums[tid + half]  # BUG: no barrier in the loop
        if mended:
            cuda.syncthreads()
        half //= 2
    if tid == 0:
        y[cuda.blockIdx.x] = sums[0]


@planted("race", 1, 32, floats((4, 32), (4, 32)), tool="racecheck")
@cuda.jit
def missing_second_barrier(x, y):
    row = cuda.shared.array(32, float32)
    tid = cuda.threadIdx.x
    for k in range(x.shape[0]):
        row[tid] = x[k, tid]
        cuda.syncthreads()
        y[k, tid] = row[31 - tid]  # BUG: the next round writes what this one still reads


@planted("race", 1, N, ints(N, 8, modulus=8), tool="racecheck")
@cuda.jit
def histogram_without_atomics(x, y):
    bins = cuda.shared.array(8, int32)
    tid = cuda.threadIdx.x
    if tid < 8:
        bins[tid] = 0
    cuda.syncthreads()
    bins[x[tid]] += 1  # BUG: two threads may meet in one bin
    cuda.syncthreads()
    if tid < 8:
        y[tid] = bins[tid]


@planted("race", 1, N, ints(N, 8, modulus=8), reason=ATOMICS)
@cuda.jit
def atomics_read_too_early(x, y):
    bins = cuda.shared.array(8, int32)
    tid = cuda.threadIdx.x
    if tid < 8:
        bins[tid] = 0
    cuda.syncthreads()
    cuda.atomic.add(bins, x[tid], 1)
    if tid < 8:
        y[tid] = bins[tid]  # BUG: other threads may still be adding


@planted("race", 1, N, ints(N, 8, modulus=8), reason=ATOMICS)
@cuda.jit
def zeroed_without_barrier(x, y):
    bins = cuda.shared.array(8, int32)
    tid = cuda.threadIdx.x
    if tid < 8:
        bins[tid] = 0
    cuda.atomic.add(bins, x[tid], 1)  # BUG: the bins may not be zeroed yet
    cuda.syncthreads()
    if tid < 8:
        y[tid] = bins[tid]


@planted("race", 2, N, floats(2, 2 * N), tool="racecheck")
@cuda.jit
def broadcast_without_barrier(x, y):
    factor = cuda.shared.array(1, float32)
    if cuda.threadIdx.x == 0:
        factor[0] = x[cuda.blockIdx.x]
    y[cuda.grid(1)] = 2 * factor[0]  # BUG: only thread 0 knows that it was written


@planted("race", 1, 32, floats(32, 1), tool="racecheck")
@cuda.jit
def warp_tree_without_syncwarp(x, y):
    sums = cuda.shared.array(N, float32)
    lane = cuda.threadIdx.x
    sums[lane] = x[lane]
    sums[lane + 32] = 0
    cuda.syncwarp()
    for step in range(5):
        value = sums[lane + (16 >> step)]
        cuda.syncwarp()
        sums[lane] += value  # BUG: the next round's reads need a syncwarp after this
    if lane == 0:
        y[0] = sums[0]


@planted("race", 1, N, floats(N, N), tool="racecheck")
@cuda.jit
def scan_in_place(x, y):
    sums = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    sums[tid] = x[tid]
    cuda.syncthreads()
    offset = 1
    while offset < N:
        if tid >= offset:
            sums[tid] += sums[tid - offset]  # BUG: its neighbour may have added already
        cuda.syncthreads()
        offset *= 2
    y[tid] = sums[tid]


@planted("race", 1, (16, 16), floats((16, 16), (16, 16)), tool="racecheck")
@cuda.jit
def transpose_without_barrier(x, y):
    tile = cuda.shared.array((16, 17), float32)
    col, row = cuda.grid(2)
    tile[row, col] = x[row, col]
    y[row, col] = tile[col, row]  # BUG: no barrier before


@planted("race", 1, N, floats(N, N), shared=4 * N, tool="racecheck")
@cuda.jit
def dynamic_without_barrier(x, y):
    tile = cuda.shared.array(0, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    y[tid] = tile[(tid + 1) % N]  # BUG: no barrier before


@planted("race", 1, N, floats(N, 1), reason=GLOBAL_ONLY)
@cuda.jit
def everyone_writes_the_result(x, y):
    y[0] = x[cuda.threadIdx.x]  # BUG: the last one wins


@planted("race", 1, N, floats(N, 1), reason=GLOBAL_ONLY)
@cuda.jit
def sum_without_atomics(x, y):
    y[0] += x[cuda.threadIdx.x]  # BUG: changes are lost
