"""Right answers of another make: other loops, default arguments, lists where tuples are shown."""

import math

import numpy as np

from bank import right
from course_lib import cuda
from course_lib.runtime.intrinsics import load_vector, store_vector, warp_max, warp_sum
from course_lib.runtime.matrix import load_word, multiply_add
from course_lib.teach.exercises.lesson_04 import VECTORS, WIDTH

ZERO, MINUS_INF = np.float32(0), np.float32(-np.inf)


@right("relu")
@cuda.jit
def relu_with_a_default(x, y, zero=ZERO):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], zero)


@cuda.jit(device=True)
def clamped(value, least=ZERO):
    return max(value, least)


@right("relu")
@cuda.jit
def relu_by_a_function_with_a_default(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = clamped(x[i])


@right("bytes_in_flight")
def flight_as_a_list(gbps, latency_ns, n_multiprocessors, n_threads):
    each = gbps * latency_ns / n_multiprocessors
    return [each, each / n_threads]


@right("amdahl")
def amdahl_as_a_list(shares, speedups):
    rest = 1 - shares.sum()
    return [1 / (rest + (shares / speedups).sum()), 1 / rest]


@right("convolution_work")
def work_as_a_list(N, C, K, H, R, groups):
    weights = K * (C // groups) * R * R
    return [2 * N * H * H * weights, 4 * (N * (C + K) * H * H + weights)]


@right("softmax_registers")
@cuda.jit
def registers_last_piece_first(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    start, lane = cuda.grid(1) // 32 * n_cols, cuda.laneid
    if start >= x.size:
        return
    m, s = MINUS_INF, ZERO
    for v in range(VECTORS - 1, -1, -1):
        for k in range(WIDTH):
            values[v, k] = MINUS_INF
        col = (32 * v + lane) * WIDTH
        if col < n_cols:
            load_vector(values[v], x, start + col)
        for k in range(WIDTH):
            m = max(m, values[v, k])
    m = warp_max(m)
    for v in range(VECTORS):
        for k in range(WIDTH):
            values[v, k] = math.exp(values[v, k] - m)
            s += values[v, k]
    s = warp_sum(s)
    for v in range(VECTORS):
        col = (32 * v + lane) * WIDTH
        if col < n_cols:
            for k in range(WIDTH):
                values[v, k] /= s
            store_vector(y, start + col, values[v])


@right("mma_tile")
@cuda.jit
def mma_in_loops(a, b, K, c):
    g, t, k = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4, 0
    ra, rb = cuda.local.array(4, np.uint32), cuda.local.array(2, np.uint32)
    acc = cuda.local.array(4, np.float32)
    for i in range(4):
        acc[i] = ZERO
    while k < K:
        for i in range(4):
            ra[i] = load_word(a, (g + 8 * (i % 2)) * K + k + t + 4 * (i // 2))
        for i in range(2):
            rb[i] = load_word(b, g * K + k + t + 4 * i)
        multiply_add(acc, 0, ra, 0, rb, 0, a)
        k += 8
    for i in range(4):
        c[g + 8 * (i // 2), 2 * t + i % 2] = acc[i]


@right("pick_batch")
@cuda.jit
def pick_with_whole_numbers(images, labels, order, first, x, y):
    b, i = cuda.blockIdx.x, cuda.threadIdx.x
    row = order[first + b]
    if i == cuda.blockDim.x - 1:
        y[b] = labels[row]
    while i < images.shape[1]:
        x[b, i] = np.float32(2 * images[row, i] - 255) / np.float32(255)
        i += cuda.blockDim.x


@right("warp_sum")
@cuda.jit
def warp_sum_by_a_butterfly(x, y):
    row, lane, step, total = cuda.grid(1) // 32, cuda.threadIdx.x % 32, 1, ZERO
    if row >= x.shape[0]:
        return
    for col in range(lane, x.shape[1], 32):
        total += x[row, col]
    while step < 32:
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        step *= 2
    if lane == 5:
        y[row] = total
