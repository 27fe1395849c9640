"""One row per block or per warp: layer norm, softmax, argmax."""

import math

import numpy as np
from numba import float32, int32

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case

BLOCK_SIZE = 64
FULL_MASK = 0xFFFFFFFF


def softmax(x):
    """The float64 truth, row by row."""
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@cuda.jit(device=True)
def tree_sum(shared, tid):
    cuda.syncthreads()
    half = BLOCK_SIZE // 2
    while half > 0:
        if tid < half:
            shared[tid] += shared[tid + half]
        cuda.syncthreads()
        half //= 2
    return shared[0]


@cuda.jit(device=True)
def tree_max(shared, tid):
    cuda.syncthreads()
    half = BLOCK_SIZE // 2
    while half > 0:
        if tid < half:
            shared[tid] = max(shared[tid], shared[tid + half])
        cuda.syncthreads()
        half //= 2
    return shared[0]


@cuda.jit
def layer_norm_kernel(x, weight, bias, epsilon, y):
    shared = cuda.shared.array(BLOCK_SIZE, float32)
    row = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    n_cols = x.shape[1]
    total = float32(0)
    for col in range(tid, n_cols, BLOCK_SIZE):
        total += x[row, col]
    shared[tid] = total
    mean = tree_sum(shared, tid) / float32(n_cols)
    cuda.syncthreads()
    total = float32(0)
    for col in range(tid, n_cols, BLOCK_SIZE):
        centred = x[row, col] - mean
        total += centred * centred
    shared[tid] = total
    variance = tree_sum(shared, tid) / float32(n_cols)
    rstd = float32(1) / math.sqrt(variance + epsilon)
    for col in range(tid, n_cols, BLOCK_SIZE):
        y[row, col] = (x[row, col] - mean) * rstd * weight[col] + bias[col]


@case
def layer_norm(rng):
    x = (5 + 3 * rng.standard_normal((5, 133))).astype(np.float32)
    weight, bias = rng.standard_normal((2, 133)).astype(np.float32)
    y = np.full_like(x, np.nan)
    arguments = (x, weight, bias, np.float32(1e-5), y)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(wide.var(axis=1, keepdims=True) + 1e-5)
    plan = Plan([Launch(layer_norm_kernel, 5, BLOCK_SIZE, arguments)])
    return plan.expect(y, centred * rstd * weight + bias, 1e-4)


@cuda.jit
def softmax_tree_kernel(x, y):
    shared = cuda.shared.array(BLOCK_SIZE, float32)
    row = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    largest = float32(-math.inf)
    for col in range(tid, x.shape[1], BLOCK_SIZE):
        largest = max(largest, x[row, col])
    shared[tid] = largest
    largest = tree_max(shared, tid)
    cuda.syncthreads()
    total = float32(0)
    for col in range(tid, x.shape[1], BLOCK_SIZE):
        total += math.exp(x[row, col] - largest)
    shared[tid] = total
    total = tree_sum(shared, tid)
    for col in range(tid, x.shape[1], BLOCK_SIZE):
        y[row, col] = math.exp(x[row, col] - largest) / total


@case
def softmax_shared_tree(rng):
    x = (30 * rng.standard_normal((4, 101)) - 200).astype(np.float32)
    y = np.full_like(x, np.nan)
    plan = Plan([Launch(softmax_tree_kernel, 4, BLOCK_SIZE, (x, y))])
    return plan.expect(y, softmax(x), 1e-4)


@cuda.jit
def softmax_online_kernel(x, y):
    """A warp per row, one pass for maximum and sum; lanes merge their pairs by shuffles."""
    row = cuda.blockIdx.x * (cuda.blockDim.x // 32) + cuda.threadIdx.x // 32
    if row >= x.shape[0]:
        return
    lane_id = cuda.laneid
    largest = float32(-math.inf)
    total = float32(0)
    for col in range(lane_id, x.shape[1], 32):
        value = x[row, col]
        if value > largest:
            total *= math.exp(largest - value)
            largest = value
        total += math.exp(value - largest)
    offset = 16
    while offset > 0:
        other_largest = cuda.shfl_xor_sync(FULL_MASK, largest, offset)
        other_total = cuda.shfl_xor_sync(FULL_MASK, total, offset)
        merged = max(largest, other_largest)
        if merged > float32(-math.inf):
            total = total * math.exp(largest - merged)
            total += other_total * math.exp(other_largest - merged)
        largest = merged
        offset //= 2
    for col in range(lane_id, x.shape[1], 32):
        y[row, col] = math.exp(x[row, col] - largest) / total


@case
def softmax_online_shuffles(rng):
    x = (30 * rng.standard_normal((7, 77)) + 100).astype(np.float32)
    y = np.full_like(x, np.nan)
    plan = Plan([Launch(softmax_online_kernel, blocks_for(7, 2), 64, (x, y))])
    return plan.expect(y, softmax(x), 1e-4)


@cuda.jit
def argmax_kernel(x, best):
    """Value and place travel together; equal values keep the smaller place."""
    row = cuda.blockIdx.x
    lane_id = cuda.laneid
    largest = float32(-math.inf)
    place = int32(x.shape[1])
    for col in range(lane_id, x.shape[1], 32):
        if x[row, col] > largest:
            largest = x[row, col]
            place = int32(col)
    for step in range(5):
        offset = 16 >> step
        other = cuda.shfl_down_sync(FULL_MASK, largest, offset)
        other_place = cuda.shfl_down_sync(FULL_MASK, place, offset)
        if other > largest or (other == largest and other_place < place):
            largest = other
            place = other_place
    if lane_id == 0:
        best[row] = place


@case
def argmax_shuffles(rng):
    x = rng.integers(-9, 9, (6, 45)).astype(np.float32)
    best = np.full(6, -1, np.int32)
    plan = Plan([Launch(argmax_kernel, 6, 32, (x, best))])
    return plan.expect(best, x.argmax(axis=1))


@cuda.jit
def dot_kernel(x, y, total):
    """Warp sums by shuffles, one value per warp through shared memory, one atomic per block."""
    warp_sums = cuda.shared.array(32, float32)
    partial = float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        partial += x[i] * y[i]
    for step in range(5):
        partial += cuda.shfl_down_sync(FULL_MASK, partial, 16 >> step)
    tid = cuda.threadIdx.x
    if tid % 32 == 0:
        warp_sums[tid // 32] = partial
    cuda.syncthreads()
    if tid < 32:
        partial = warp_sums[tid] if tid < cuda.blockDim.x // 32 else float32(0)
        for step in range(5):
            partial += cuda.shfl_down_sync(FULL_MASK, partial, 16 >> step)
        if tid == 0:
            cuda.atomic.add(total, 0, partial)


@case
def dot_product(rng):
    x, y = rng.random((2, 1003)).astype(np.float32)
    total = np.zeros(1, np.float32)
    plan = Plan([Launch(dot_kernel, 3, 96, (x, y, total))])
    return plan.expect(total, [np.dot(x.astype(np.float64), y)], 1e-5)
