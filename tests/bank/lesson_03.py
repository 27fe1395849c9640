"""Lesson 03: softmax, by a thread, a block and a warp per row, and online.

The messages about races, barriers and memory that nobody set are the sanitizer's own.
"""

import math

import numpy as np

from bank import right, wrong
from course_lib import cuda
from course_lib.runtime import intrinsics
from course_lib.runtime.intrinsics import block_max, block_online, block_sum, warp_max, warp_sum

OUTSIDE = "out-of-bounds"
RACE = "race"
NAN = "NaN was computed"
VALUES = "wrong values in y"
ALL = 0xFFFFFFFF
ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INF = np.float32(-np.inf)
LOWEST = np.float32(-3.4e38)

# ---- softmax_naive(x, y) ---------------------------------------------------------------------


@right("softmax_naive")
@cuda.jit
def naive_keeps_the_exponentials(x, y):
    # y holds exp(x - max) until the sum is known: a pass less over x, one more over y.
    row = cuda.grid(1)
    if row >= x.shape[0]:
        return
    largest, total = MINUS_INF, ZERO
    for col in range(x.shape[1]):
        largest = max(largest, x[row, col])
    for col in range(x.shape[1]):
        y[row, col] = math.exp(x[row, col] - largest)
        total += y[row, col]
    for col in range(x.shape[1]):
        y[row, col] /= total


@right("softmax_naive")
@cuda.jit
def naive_grid_stride_reciprocal(x, y):
    for row in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        largest, total = LOWEST, ZERO
        for col in range(x.shape[1]):
            if x[row, col] > largest:
                largest = x[row, col]
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        factor = ONE / total if total > ZERO else ZERO
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - largest) * factor


@right("softmax_naive")
@cuda.jit
def naive_online(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(x.shape[1]):
            m, s = intrinsics.online_add(m, s, x[row, col])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_naive")
@cuda.jit
def naive_through_the_logarithm(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(x.shape[1]):
            largest = max(largest, x[row, col])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        for col in range(x.shape[1]):
            y[row, col] = math.exp((x[row, col] - largest) - math.log(total))


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_no_maximum(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        total = ZERO
        for col in range(x.shape[1]):
            total += math.exp(x[row, col])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col]) / total


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_maximum_from_zero(x, y):
    # Right unless a whole row is far below 0.
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = ZERO, ZERO
        for col in range(x.shape[1]):
            largest = max(largest, x[row, col])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_subtracts_the_first(x, y):
    row = cuda.grid(1)
    if row < x.shape[0] and x.shape[1] > 0:
        total = ZERO
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - x[row, 0])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - x[row, 0]) / total


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_subtracts_the_mean(x, y):
    row = cuda.grid(1)
    if row < x.shape[0] and x.shape[1] > 0:
        mean, total = ZERO, ZERO
        for col in range(x.shape[1]):
            mean += x[row, col] / np.float32(x.shape[1])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - mean)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - mean) / total


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_maximum_without_the_last(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = x[row, 0] if x.shape[1] > 0 else ZERO, ZERO
        for col in range(x.shape[1] - 1):
            largest = max(largest, x[row, col])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_maximum_in_half_precision(x, y):
    # 1e4 is a multiple of 8 in half precision, and the largest element is not.
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(x.shape[1]):
            largest = max(largest, x[row, col])
        shift = np.float32(np.float16(largest * np.float32(4)))  # ends at 65,504
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - shift)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - shift) / total


@wrong("softmax_naive", "times what it should be|" + VALUES)
@cuda.jit
def naive_never_divides(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest = MINUS_INF
        for col in range(x.shape[1]):
            largest = max(largest, x[row, col])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - largest)


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_shifts_only_above(x, y):
    # The maximum is subtracted in the sum, and forgotten where the result is written.
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(x.shape[1]):
            largest = max(largest, x[row, col])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col]) / (total * math.exp(largest))


@wrong("softmax_naive", OUTSIDE)
@cuda.jit
def naive_no_guard(x, y):
    row = cuda.grid(1)
    largest, total = MINUS_INF, ZERO
    for col in range(x.shape[1]):
        largest = max(largest, x[row, col])
    for col in range(x.shape[1]):
        total += math.exp(x[row, col] - largest)
    for col in range(x.shape[1]):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_naive", OUTSIDE + "|never written")
@cuda.jit
def naive_by_columns(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        largest, total = MINUS_INF, ZERO
        for row in range(x.shape[0]):
            largest = max(largest, x[row, col])
        for row in range(x.shape[0]):
            total += math.exp(x[row, col] - largest)
        for row in range(x.shape[0]):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_naive", "float64")
@cuda.jit
def naive_in_float64(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = MINUS_INF, 0.0
        for col in range(x.shape[1]):
            largest = max(largest, x[row, col])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - largest) / total


# ---- softmax_shared(x, y) --------------------------------------------------------------------


@right("softmax_shared")
@cuda.jit
def shared_two_arrays(x, y):
    # With a memory for each tree, nobody overwrites what another one has still to read.
    a = cuda.shared.array(256, np.float32)
    b = cuda.shared.array(256, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    a[t] = MINUS_INF
    for col in range(t, x.shape[1], n):
        a[t] = max(a[t], x[row, col])
    step = n
    while step > 1:
        step //= 2
        cuda.syncthreads()
        if t < step:
            a[t] = max(a[t], a[t + step])
    cuda.syncthreads()
    b[t] = ZERO
    for col in range(t, x.shape[1], n):
        b[t] += math.exp(x[row, col] - a[0])
    step = n
    while step > 1:
        step //= 2
        cuda.syncthreads()
        if t < step:
            b[t] += b[t + step]
    cuda.syncthreads()
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - a[0]) / b[0]


@right("softmax_shared")
@cuda.jit
def shared_by_shuffles(x, y):
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = LOWEST, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    largest = block_max(largest, scratch)
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@right("softmax_shared")
@cuda.jit
def shared_online(x, y):
    a = cuda.shared.array(32, np.float32)
    b = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    m, s = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        m, s = intrinsics.online_add(m, s, x[row, col])
    m, s = block_online(m, s, a, b)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_shared")
@cuda.jit
def shared_one_thread_reduces(x, y):
    s = cuda.shared.array(256, np.float32)
    found = cuda.shared.array(2, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    s[t] = MINUS_INF
    for col in range(t, x.shape[1], n):
        s[t] = max(s[t], x[row, col])
    cuda.syncthreads()
    if t == 0:
        found[0] = s[0]
        for k in range(1, n):
            found[0] = max(found[0], s[k])
    cuda.syncthreads()
    s[t] = ZERO
    for col in range(t, x.shape[1], n):
        s[t] += math.exp(x[row, col] - found[0])
    cuda.syncthreads()
    if t == 0:
        found[1] = ZERO
        for k in range(n):
            found[1] += s[k]
    cuda.syncthreads()
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - found[0]) / found[1]


@wrong("softmax_shared", RACE)
@cuda.jit
def shared_no_barrier_between_the_trees(x, y):
    s = cuda.shared.array(256, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    s[t] = largest
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            s[t] = max(s[t], s[t + step])
        cuda.syncthreads()
        step //= 2
    largest = s[0]
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    s[t] = total
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            s[t] += s[t + step]
        cuda.syncthreads()
        step //= 2
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / s[0]


@wrong("softmax_shared", RACE)
@cuda.jit
def shared_no_first_barrier(x, y):
    s = cuda.shared.array(256, np.float32)
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    s[t] = largest
    step = n // 2
    while step > 0:
        if t < step:
            s[t] = max(s[t], s[t + step])
        cuda.syncthreads()
        step //= 2
    largest = s[0]
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", RACE)
@cuda.jit
def shared_no_barrier_between_rounds(x, y):
    s = cuda.shared.array(256, np.float32)
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    largest = MINUS_INF
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    largest = block_max(largest, scratch)
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    s[t] = total
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            s[t] += s[t + step]
        step //= 2
    cuda.syncthreads()
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / s[0]


@wrong("softmax_shared", RACE)
@cuda.jit
def shared_no_barrier_after_the_sum(x, y):
    # The last round's barrier is what the division has to wait for.
    s = cuda.shared.array(256, np.float32)
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    largest = block_max(largest, scratch)
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    s[t] = total
    step = n // 2
    while step > 0:
        cuda.syncthreads()
        if t < step:
            s[t] += s[t + step]
        step //= 2
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / s[0]


@wrong("softmax_shared", "barrier-(mismatch|divergence)|exited-before-barrier|race")
@cuda.jit
def shared_barrier_inside_if(x, y):
    s = cuda.shared.array(256, np.float32)
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    s[t] = largest
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            s[t] = max(s[t], s[t + step])
            cuda.syncthreads()
        step //= 2
    largest = s[0]
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", "barrier-(mismatch|divergence)|exited-before-barrier|inactive-lane")
@cuda.jit
def shared_leaves_early(x, y):
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    if t >= x.shape[1]:
        return
    largest, total = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    largest = block_max(largest, scratch)
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", "uninitialised-read")
@cuda.jit
def shared_unset_tail(x, y):
    s = cuda.shared.array(256, np.float32)
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    if t < x.shape[1]:
        s[t] = x[row, t]
        for col in range(t, x.shape[1], n):
            s[t] = max(s[t], x[row, col])
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            s[t] = max(s[t], s[t + step])
        cuda.syncthreads()
        step //= 2
    largest, total = s[0], ZERO
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", VALUES)
@cuda.jit
def shared_own_sum_only(x, y):
    # Each thread divides by the sum of its own share.
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = MINUS_INF, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    largest = block_max(largest, scratch)
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", VALUES)
@cuda.jit
def shared_own_maximum(x, y):
    # Sums of different maxima must not be added as they are.
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    own, total = LOWEST, ZERO
    for col in range(t, x.shape[1], n):
        own = max(own, x[row, col])
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - own)
    largest = block_max(own, scratch)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", NAN)
@cuda.jit
def shared_no_maximum(x, y):
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col])
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col]) / total


@wrong("softmax_shared", NAN + "|never written|" + VALUES)
@cuda.jit
def shared_maximum_of_the_first_warp(x, y):
    scratch = cuda.shared.array(32, np.float32)
    row, t, n = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    largest, total = LOWEST, ZERO
    for col in range(t, x.shape[1], n):
        largest = max(largest, x[row, col])
    largest = warp_max(largest)
    for col in range(t, x.shape[1], n):
        total += math.exp(x[row, col] - largest)
    total = block_sum(total, scratch)
    for col in range(t, x.shape[1], n):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", "never written")
@cuda.jit
def shared_first_round_only(x, y):
    scratch = cuda.shared.array(32, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    mine = x[row, t] if t < x.shape[1] else MINUS_INF
    largest = block_max(mine, scratch)
    e = math.exp(mine - largest) if t < x.shape[1] else ZERO
    total = block_sum(e, scratch)
    if t < x.shape[1]:
        y[row, t] = e / total


# ---- softmax_warp(x, y) ----------------------------------------------------------------------


@right("softmax_warp")
@cuda.jit
def warp_down_then_broadcast(x, y):
    row, lane = cuda.grid(1) // 32, cuda.laneid
    if row >= x.shape[0]:
        return
    largest, total, step = MINUS_INF, ZERO, 16
    for col in range(lane, x.shape[1], 32):
        largest = max(largest, x[row, col])
    while step > 0:
        largest = max(largest, cuda.shfl_down_sync(ALL, largest, step))
        step //= 2
    largest = cuda.shfl_sync(ALL, largest, 0)
    for col in range(lane, x.shape[1], 32):
        total += math.exp(x[row, col] - largest)
    step = 16
    while step > 0:
        total += cuda.shfl_down_sync(ALL, total, step)
        step //= 2
    total = cuda.shfl_sync(ALL, total, 0)
    for col in range(lane, x.shape[1], 32):
        y[row, col] = math.exp(x[row, col] - largest) / total


@right("softmax_warp")
@cuda.jit
def warp_by_the_course(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        factor = ONE / warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) * factor


@right("softmax_warp")
@cuda.jit
def warp_online_of_the_course(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_warp")
@cuda.jit
def warp_in_shared(x, y):
    s = cuda.shared.array(128, np.float32)
    t, row, lane = cuda.threadIdx.x, cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total, first = MINUS_INF, ZERO, t - lane
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        s[t] = largest
        cuda.syncwarp()
        for k in range(32):
            largest = max(largest, s[first + k])
        cuda.syncwarp()
        s[t] = ZERO
        for col in range(lane, x.shape[1], 32):
            s[t] += math.exp(x[row, col] - largest)
        cuda.syncwarp()
        for k in range(32):
            total += s[first + k]
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", VALUES)
@cuda.jit
def warp_maximum_in_lane_0_only(x, y):
    # Down, as for a sum that one lane writes: the other lanes subtract another number.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total, step = MINUS_INF, ZERO, 16
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        while step > 0:
            largest = max(largest, cuda.shfl_down_sync(ALL, largest, step))
            step //= 2
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", VALUES)
@cuda.jit
def warp_sum_in_lane_0_only(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total, step = LOWEST, ZERO, 16
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        while step > 0:
            total += cuda.shfl_down_sync(ALL, total, step)
            step //= 2
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", "shuffle-inactive-lane")
@cuda.jit
def warp_shuffle_in_the_guard(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0] and lane < x.shape[1]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", "shuffle-inactive-lane")
@cuda.jit
def warp_shuffle_in_the_loop(x, y):
    # In the last round of the loop some lanes have no column, and are asked all the same.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, warp_max(x[row, col]))
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", NAN)
@cuda.jit
def warp_maximum_from_zero(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total = ZERO, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", NAN)
@cuda.jit
def warp_no_maximum(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col])
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col]) / total


@wrong("softmax_warp", OUTSIDE)
@cuda.jit
def warp_no_guard(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    largest, total = LOWEST, ZERO
    for col in range(lane, x.shape[1], 32):
        largest = max(largest, x[row, col])
    largest = warp_max(largest)
    for col in range(lane, x.shape[1], 32):
        total += math.exp(x[row, col] - largest)
    total = warp_sum(total)
    for col in range(lane, x.shape[1], 32):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", "never written")
@cuda.jit
def warp_row_per_block(x, y):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    if row < x.shape[0] and lane < 32:
        largest, total = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_warp", OUTSIDE)
@cuda.jit
def warp_reads_past_the_row(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest = warp_max(x[row, lane])
        e = math.exp(x[row, lane] - largest)
        y[row, lane] = e / warp_sum(e)


@wrong("softmax_warp", "times what it should be|" + VALUES)
@cuda.jit
def warp_sums_twice(x, y):
    # Six rounds: the last one adds the lane's own sum once more.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        for k in range(6):
            total += cuda.shfl_xor_sync(ALL, total, (1 << k) % 32)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


# ---- online_merge(m1, s1, m2, s2, m, s) ------------------------------------------------------


@right("online_merge")
@cuda.jit
def merge_by_the_course(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = intrinsics.online_merge(m1[i], s1[i], m2[i], s2[i])


@right("online_merge")
@cuda.jit
def merge_scales_the_smaller(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        a, b = m1[i], m2[i]
        if a == b:
            m[i], s[i] = a, s1[i] + s2[i]
        elif a > b:
            m[i], s[i] = a, s1[i] + s2[i] * math.exp(b - a)
        else:
            m[i], s[i] = b, s2[i] + s1[i] * math.exp(a - b)


@right("online_merge")
@cuda.jit
def merge_from_the_lowest_number(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        largest = max(m1[i], m2[i])
        base = max(largest, LOWEST)  # finite, so that no difference is -inf - -inf
        m[i] = largest
        s[i] = s1[i] * math.exp(m1[i] - base) + s2[i] * math.exp(m2[i] - base)


@wrong("online_merge", "wrong values in s")
@cuda.jit
def merge_adds_as_they_are(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i] = max(m1[i], m2[i])
        s[i] = s1[i] + s2[i]


@wrong("online_merge", "wrong values in s")
@cuda.jit
def merge_of_nothing_is_nan(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i] = max(m1[i], m2[i])
        s[i] = s1[i] * math.exp(m1[i] - m[i]) + s2[i] * math.exp(m2[i] - m[i])


@wrong("online_merge", "wrong values in s")
@cuda.jit
def merge_scales_the_wrong_way(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = max(m1[i], m2[i]), ZERO
        if m[i] > MINUS_INF:
            s[i] = s1[i] * math.exp(m[i] - m1[i]) + s2[i] * math.exp(m[i] - m2[i])


@wrong("online_merge", "wrong values in s")
@cuda.jit
def merge_scales_the_sum(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = max(m1[i], m2[i]), ZERO
        if m[i] > MINUS_INF:
            s[i] = (s1[i] + s2[i]) * math.exp(min(m1[i], m2[i]) - m[i])


@wrong("online_merge", "wrong values in s")
@cuda.jit
def merge_swaps_the_factors(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = max(m1[i], m2[i]), ZERO
        if m[i] > MINUS_INF:
            s[i] = s1[i] * math.exp(m2[i] - m[i]) + s2[i] * math.exp(m1[i] - m[i])


@wrong("online_merge", "wrong values in s")
@cuda.jit
def merge_without_shift(m1, s1, m2, s2, m, s):
    # On paper the same: the sum of both without a maximum, brought to the new one. It overflows.
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = max(m1[i], m2[i]), ZERO
        if m[i] > MINUS_INF:
            s[i] = (s1[i] * math.exp(m1[i]) + s2[i] * math.exp(m2[i])) * math.exp(-m[i])


@wrong("online_merge", "wrong values in m")
@cuda.jit
def merge_takes_the_smaller(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = min(m1[i], m2[i]), ZERO
        if m[i] > MINUS_INF:
            s[i] = s1[i] * math.exp(m1[i] - m[i]) + s2[i] * math.exp(m2[i] - m[i])


@wrong("online_merge", "wrong values in m|wrong values in s|never written")
@cuda.jit
def merge_skips_empty_parts(m1, s1, m2, s2, m, s):
    # A part without a number is merged by doing nothing, and then nothing is written.
    i = cuda.grid(1)
    if i < m1.size and m1[i] > MINUS_INF and m2[i] > MINUS_INF:
        m[i] = max(m1[i], m2[i])
        s[i] = s1[i] * math.exp(m1[i] - m[i]) + s2[i] * math.exp(m2[i] - m[i])


@wrong("online_merge", "input|m1")
@cuda.jit
def merge_in_place(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        m[i], s[i] = max(m1[i], m2[i]), ZERO
        if m[i] > MINUS_INF:
            s1[i] *= math.exp(m1[i] - m[i])
            s[i] = s1[i] + s2[i] * math.exp(m2[i] - m[i])


@wrong("online_merge", OUTSIDE)
@cuda.jit
def merge_no_guard(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    m[i], s[i] = intrinsics.online_merge(m1[i], s1[i], m2[i], s2[i])


# ---- softmax_online(x, y) --------------------------------------------------------------------


@right("softmax_online")
@cuda.jit
def online_by_the_course(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_online")
@cuda.jit
def online_every_number_is_a_pair(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_merge(m, s, x[row, col], ONE)
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_online")
@cuda.jit
def online_without_branches(x, y):
    # Starts at the lowest finite number, so that no difference is -inf - -inf.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            new = max(m, x[row, col])
            s = s * math.exp(m - new) + math.exp(x[row, col] - new)
            m = new
        largest = warp_max(m)
        factor = ONE / warp_sum(s * math.exp(m - largest))
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) * factor


@right("softmax_online")
@cuda.jit
def online_in_three_passes(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest, total = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        largest = warp_max(largest)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        total = warp_sum(total)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_online", VALUES)
@cuda.jit
def online_forgets_to_rescale(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            m = max(m, x[row, col])
            s += math.exp(x[row, col] - m)
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", VALUES)
@cuda.jit
def online_rescales_too_late(x, y):
    # m is already the new one when the sum is brought to it: the factor is always 1.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            new = max(m, x[row, col])
            m = new
            s = s * math.exp(m - new) + math.exp(x[row, col] - new)
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", NAN + "|" + VALUES)
@cuda.jit
def online_rescales_the_wrong_way(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            value = x[row, col]
            if value > m:
                s = (s * math.exp(value - m) if m > MINUS_INF else ZERO) + ONE
                m = value
            elif value != MINUS_INF:
                s += math.exp(value - m)
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", NAN)
@cuda.jit
def online_masked_numbers_are_nan(x, y):
    # -inf - -inf: wrong only where a lane's first number is masked.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            new = max(m, x[row, col])
            s = s * math.exp(m - new) + math.exp(x[row, col] - new)
            m = new
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", NAN)
@cuda.jit
def online_idle_lanes_are_nan(x, y):
    # Lanes without a number merge (-inf, 0) with (-inf, 0) by the plain formula.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        for k in range(5):
            m2 = cuda.shfl_xor_sync(ALL, m, 1 << k)
            s2 = cuda.shfl_xor_sync(ALL, s, 1 << k)
            new = max(m, m2)
            s = s * math.exp(m - new) + s2 * math.exp(m2 - new)
            m = new
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", VALUES)
@cuda.jit
def online_merges_lanes_by_adding(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        m, s = warp_max(m), warp_sum(s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", NAN + "|" + VALUES)
@cuda.jit
def online_shuffles_the_merged_maximum(x, y):
    # The other lane's sum is merged with the maximum that has just been changed.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        for k in range(5):
            m = max(m, cuda.shfl_xor_sync(ALL, m, 1 << k))
            s2 = cuda.shfl_xor_sync(ALL, s, 1 << k)
            m, s = intrinsics.online_merge(m, s, m, s2)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", VALUES)
@cuda.jit
def online_own_pair_only(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", NAN)
@cuda.jit
def online_starts_at_zero(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = ZERO, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
        m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", "shuffle-inactive-lane")
@cuda.jit
def online_merges_in_the_loop(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(lane, x.shape[1], 32):
            m, s = intrinsics.online_add(m, s, x[row, col])
            if col + 32 >= x.shape[1]:
                m, s = intrinsics.warp_online(m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s
