"""What the lanes of a warp tell each other."""

import numpy as np
from numba import float32, int32

from course_lib import cuda
from zoo.plan import Launch, Plan, case

FULL_MASK = 0xFFFFFFFF


@cuda.jit
def sub_warp_broadcast_kernel(x, y, width):
    """numba's shuffle has no width; the source lane is computed instead."""
    i = cuda.grid(1)
    lane_id = cuda.laneid
    value = x[i] if i < x.size else float32(0)
    leader = lane_id - lane_id % width
    value = cuda.shfl_sync(FULL_MASK, value, leader)
    if i < y.size:
        y[i] = value


@case
def shuffle_broadcast_in_sub_warps(rng):
    x = rng.standard_normal(93).astype(np.float32)
    y = np.full_like(x, np.nan)
    plan = Plan([Launch(sub_warp_broadcast_kernel, 3, 32, (x, y, 8))])
    return plan.expect(y, x[np.arange(93) // 8 * 8])


@cuda.jit
def half_warp_kernel(x, y):
    """The two halves of a warp run different code, each under a mask of its own."""
    lane_id = cuda.laneid
    value = x[lane_id]
    if lane_id < 16:
        for step in range(4):
            value += cuda.shfl_xor_sync(0x0000FFFF, value, 1 << step)
    else:
        for step in range(4):
            other = cuda.shfl_xor_sync(0xFFFF0000, value, 1 << step)
            value = max(value, other)
    y[lane_id] = value


@case
def shuffle_in_half_warps(rng):
    x = rng.integers(-50, 50, 32).astype(np.int64)
    y = np.full_like(x, -999)
    plan = Plan([Launch(half_warp_kernel, 1, 32, (x, y))])
    return plan.expect(y, np.repeat([x[:16].sum(), x[16:].max()], 16))


@cuda.jit
def warp_matvec_kernel(matrix, x, y):
    """`syncwarp` orders the shared memory of one warp; no block barrier is needed."""
    shared = cuda.shared.array((2, 32), float32)
    warp_id = cuda.threadIdx.x // 32
    lane_id = cuda.laneid
    row = cuda.blockIdx.x * 2 + warp_id
    if row < matrix.shape[0]:
        total = float32(0)
        for col in range(lane_id, matrix.shape[1], 32):
            total += matrix[row, col] * x[col]
        shared[warp_id, lane_id] = total
        cuda.syncwarp()
        half = 16
        while half > 0:
            if lane_id < half:
                shared[warp_id, lane_id] += shared[warp_id, lane_id + half]
            cuda.syncwarp()
            half //= 2
        if lane_id == 0:
            y[row] = shared[warp_id, 0]


@case
def matvec_with_syncwarp(rng):
    matrix = rng.standard_normal((7, 51)).astype(np.float32)
    x = rng.standard_normal(51).astype(np.float32)
    y = np.full(7, np.nan, np.float32)
    plan = Plan([Launch(warp_matvec_kernel, 4, 64, (matrix, x, y))])
    return plan.expect(y, matrix.astype(np.float64) @ x, 1e-4)


@cuda.jit
def tail_mask_kernel(x, y):
    """The last warp is not full: the mask names the lanes that exist."""
    i = cuda.grid(1)
    mask = cuda.ballot_sync(FULL_MASK, i < x.size)
    if i < x.size:
        source = min(cuda.laneid + 1, cuda.popc(mask) - 1)
        above = cuda.shfl_sync(mask, x[i], source)
        last = i == x.size - 1 or cuda.laneid == 31
        y[i] = int32(0) if last else above - x[i]


@case
def shuffle_under_a_tail_mask(rng):
    x = rng.integers(-50, 50, 83).astype(np.int32)
    y = np.full_like(x, -999)
    wanted = np.append(np.diff(x), 0)
    wanted[31::32] = 0
    plan = Plan([Launch(tail_mask_kernel, 3, 32, (x, y))])
    return plan.expect(y, wanted)
