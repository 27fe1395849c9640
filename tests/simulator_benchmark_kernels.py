"""The kernels of `simulator_benchmark`. Loaded twice: under this simulator, and numba's own."""

import math

from numba import cuda, float32

THREADS = 128
TILE = 16


@cuda.jit
def scale_and_add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = 2 * x[i] + y[i]


@cuda.jit
def softmax(x, out):
    shared = cuda.shared.array(THREADS, float32)
    row = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    largest = -math.inf
    for col in range(tid, x.shape[1], THREADS):
        largest = max(largest, x[row, col])
    shared[tid] = largest
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if tid < width:
            shared[tid] = max(shared[tid], shared[tid + width])
        cuda.syncthreads()
        width //= 2
    largest = shared[0]
    cuda.syncthreads()
    total = float32(0)
    for col in range(tid, x.shape[1], THREADS):
        total += math.exp(x[row, col] - largest)
    shared[tid] = total
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if tid < width:
            shared[tid] += shared[tid + width]
        cuda.syncthreads()
        width //= 2
    for col in range(tid, x.shape[1], THREADS):
        out[row, col] = math.exp(x[row, col] - largest) / shared[0]


@cuda.jit
def matmul(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    col, row = cuda.grid(2)
    total = float32(0)
    for first in range(0, a.shape[1], TILE):
        tile_a[ty, tx] = a[row, first + tx]
        tile_b[ty, tx] = b[first + ty, col]
        cuda.syncthreads()
        for k in range(TILE):
            total += tile_a[ty, k] * tile_b[k, tx]
        cuda.syncthreads()
    c[row, col] = total


@cuda.jit
def warp_sum(x, out):
    value = x[cuda.grid(1)]
    width = 16
    while width > 0:
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, width)
        width //= 2
    if cuda.laneid == 0:
        cuda.atomic.add(out, 0, value)
