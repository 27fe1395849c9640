"""Lesson 02: histograms, sums by tree and by shuffle, global average pooling.

The messages about races, barriers and memory that nobody set are the sanitizer's own.
"""

import numpy as np

from bank import right, wrong
from course_lib import cuda
from course_lib.runtime import intrinsics

OUTSIDE = "out-of-bounds"
RACE = "race"
ALL = 0xFFFFFFFF
ZERO, ONE = np.float32(0), np.float32(1)

# ---- histogram(x, counts) --------------------------------------------------------------------


@right("histogram")
@cuda.jit
def hist_returns_early(x, counts):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i >= x.shape[0]:
        return
    cuda.atomic.add(counts, x[i], 1)


@right("histogram")
@cuda.jit
def hist_grid_stride(x, counts):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(counts, x[i], np.int32(1))


@right("histogram")
@cuda.jit
def hist_block_in_shared(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        if mine[level] > 0:
            cuda.atomic.add(counts, level, mine[level])


@right("histogram")
@cuda.jit
def hist_thread_per_level(x, counts):
    for level in range(cuda.grid(1), 256, cuda.gridsize(1)):
        count = 0
        for i in range(x.size):
            if x[i] == level:
                count += 1
        counts[level] = count


@wrong("histogram", RACE)
@cuda.jit
def hist_plain(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        counts[x[i]] += 1


@wrong("histogram", RACE)
@cuda.jit
def hist_atomic_after_plain_read(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        before = counts[x[i]]
        cuda.atomic.exch(counts, x[i], before + 1)


@wrong("histogram", OUTSIDE)
@cuda.jit
def hist_no_guard(x, counts):
    cuda.atomic.add(counts, x[cuda.grid(1)], 1)


@wrong("histogram", OUTSIDE)
@cuda.jit
def hist_one_too_many(x, counts):
    i = cuda.grid(1)
    if i <= x.size:
        cuda.atomic.add(counts, x[i], 1)


@wrong("histogram", r"x\[64\] has no part")
@cuda.jit
def hist_guard_of_counts(x, counts):
    i = cuda.grid(1)
    if i < x.size and i < 64:
        cuda.atomic.add(counts, x[i], 1)


@wrong("histogram", "wrong values in counts")
@cuda.jit
def hist_counts_places(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(counts, i % 256, 1)


@wrong("histogram", r"counts \d+ times")
@cuda.jit
def hist_adds_levels(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(counts, x[i], x[i])


@wrong("histogram", "no part")
@cuda.jit
def hist_first_block(x, counts):
    i = cuda.threadIdx.x
    if i < x.size:
        cuda.atomic.add(counts, x[i], 1)


@wrong("histogram", RACE)
@cuda.jit
def hist_sets_to_zero_first(x, counts):
    i = cuda.grid(1)
    if i < 256:
        counts[i] = 0
    cuda.syncthreads()
    if i < x.size:
        cuda.atomic.add(counts, x[i], 1)


# ---- histogram_shared(x, counts) -------------------------------------------------------------


@right("histogram_shared")
@cuda.jit
def shared_straight_to_global(x, counts):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(counts, x[i], 1)


@right("histogram_shared")
@cuda.jit
def shared_two_copies(x, counts):
    # Even and odd threads count apart, so that fewer meet.
    mine = cuda.shared.array((2, 256), np.int32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    for level in range(t, 256, n):
        mine[0, level] = 0
        mine[1, level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, (t % 2, x[i]), 1)
    cuda.syncthreads()
    for level in range(t, 256, n):
        cuda.atomic.add(counts, level, mine[0, level] + mine[1, level])


@right("histogram_shared")
@cuda.jit
def shared_first_thread_zeroes(x, counts):
    mine = cuda.shared.array(256, np.int32)
    if cuda.threadIdx.x == 0:
        for level in range(256):
            mine[level] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    while i < x.size:
        cuda.atomic.add(mine, x[i], 1)
        i += cuda.gridsize(1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        if mine[level] != 0:
            cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", RACE)
@cuda.jit
def shared_no_barrier_after_zero(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", RACE)
@cuda.jit
def shared_no_barrier_before_merge(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", "uninitialised-read")
@cuda.jit
def shared_never_zeroed(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", "uninitialised-read")
@cuda.jit
def shared_zeroed_by_threads_only(x, counts):
    # Right for blocks of 256 threads, and the smaller ones leave levels unset.
    mine = cuda.shared.array(256, np.int32)
    if cuda.threadIdx.x < 256:
        mine[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", RACE)
@cuda.jit
def shared_plain_count(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        mine[x[i]] += 1
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", RACE)
@cuda.jit
def shared_plain_merge(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        counts[level] += mine[level]


@wrong("histogram_shared", "times what it should be")
@cuda.jit
def shared_everyone_merges_everything(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(256):
        cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", OUTSIDE)
@cuda.jit
def shared_255_counters(x, counts):
    mine = cuda.shared.array(255, np.int32)
    for level in range(cuda.threadIdx.x, 255, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 255, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


@wrong("histogram_shared", "barrier-(mismatch|divergence)|race")
@cuda.jit
def shared_barrier_in_the_loop(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
        cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


# ---- block_sum(x, y) -------------------------------------------------------------------------


@right("block_sum")
@cuda.jit
def tree_with_for(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    partial[t] = 0
    for col in range(t, x.shape[1], n):
        partial[t] += x[cuda.blockIdx.x, col]
    step = n
    while step > 1:
        step //= 2
        cuda.syncthreads()
        if t < step:
            partial[t] += partial[t + step]
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@right("block_sum")
@cuda.jit
def tree_neighbours(x, y):
    # Steps 1, 2, 4: right, and slower, since warps are half idle from the start.
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    cuda.syncthreads()
    step = 1
    while step < n:
        if t % (2 * step) == 0:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step *= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@right("block_sum")
@cuda.jit
def tree_first_thread_adds(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    cuda.syncthreads()
    if t == 0:
        total = ZERO
        for k in range(n):
            total += partial[k]
        y[cuda.blockIdx.x] = total


@right("block_sum")
@cuda.jit
def tree_of_warps(x, y):
    scratch = cuda.shared.array(32, np.float32)
    total = ZERO
    for col in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        total += x[cuda.blockIdx.x, col]
    total = intrinsics.block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        y[cuda.blockIdx.x] = total


@right("block_sum")
@cuda.jit
def tree_one_thread_does_all(x, y):
    if cuda.threadIdx.x == 0:
        total = ZERO
        for col in range(x.shape[1]):
            total += x[cuda.blockIdx.x, col]
        y[cuda.blockIdx.x] = total


@wrong("block_sum", RACE)
@cuda.jit
def tree_no_first_barrier(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    step = n // 2
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", RACE)
@cuda.jit
def tree_no_barrier_between_rounds(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
        step //= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", "barrier-(mismatch|divergence)|exited-before-barrier")
@cuda.jit
def tree_barrier_inside_if(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
            cuda.syncthreads()
        step //= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", "barrier-(mismatch|divergence)|exited-before-barrier")
@cuda.jit
def tree_leaves_early(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    if t >= x.shape[1]:
        return
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    cuda.syncthreads()
    if t == 0:
        total = ZERO
        for k in range(min(n, x.shape[1])):
            total += partial[k]
        y[cuda.blockIdx.x] = total


@wrong("block_sum", OUTSIDE)
@cuda.jit
def tree_reads_past_the_row(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    partial[t] = x[cuda.blockIdx.x, t]
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", "uninitialised-read")
@cuda.jit
def tree_unset_tail(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    if t < x.shape[1]:
        total = ZERO
        for col in range(t, x.shape[1], n):
            total += x[cuda.blockIdx.x, col]
        partial[t] = total
    cuda.syncthreads()
    step = n // 2
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", "uninitialised-read")
@cuda.jit
def tree_for_128_threads(x, y):
    partial = cuda.shared.array(256, np.float32)
    t = cuda.threadIdx.x
    total = ZERO
    for col in range(t, x.shape[1], cuda.blockDim.x):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    cuda.syncthreads()
    step = 64
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", r"x\[0, 32\] to x\[0, 63\] have no part")
@cuda.jit
def tree_first_warp_only(x, y):
    total = ZERO
    for col in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        total += x[cuda.blockIdx.x, col]
    total = intrinsics.warp_sum(total)
    if cuda.threadIdx.x == 0:
        y[cuda.blockIdx.x] = total


@wrong("block_sum", "no part")
@cuda.jit
def tree_one_round_short(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for col in range(t, x.shape[1], n):
        total += x[cuda.blockIdx.x, col]
    partial[t] = total
    cuda.syncthreads()
    step = n // 2
    while step > 1:
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", "no part")
@cuda.jit
def tree_whole_rounds_of_the_row(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    total = ZERO
    for k in range(x.shape[1] // n):
        total += x[cuda.blockIdx.x, k * n + t]
    partial[t] = total
    cuda.syncthreads()
    if t == 0:
        total = ZERO
        for k in range(n):
            total += partial[k]
        y[cuda.blockIdx.x] = total


@wrong("block_sum", RACE)
@cuda.jit
def tree_adds_into_y(x, y):
    t = cuda.threadIdx.x
    if t == 0:
        y[cuda.blockIdx.x] = 0
    cuda.syncthreads()
    for col in range(t, x.shape[1], cuda.blockDim.x):
        y[cuda.blockIdx.x] += x[cuda.blockIdx.x, col]


# ---- warp_sum(x, y) --------------------------------------------------------------------------


@right("warp_sum")
@cuda.jit
def warp_butterfly(x, y):
    row, lane = cuda.grid(1) // 32, cuda.laneid
    if row >= x.shape[0]:
        return
    total = ZERO
    for col in range(lane, x.shape[1], 32):
        total += x[row, col]
    for k in range(5):
        total += cuda.shfl_xor_sync(ALL, total, 1 << k)
    if lane == 31:
        y[row] = total


@right("warp_sum")
@cuda.jit
def warp_by_the_course(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        total = intrinsics.warp_sum(total)
        if lane == 0:
            y[row] = total


@right("warp_sum")
@cuda.jit
def warp_tree_in_shared(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, row, lane = cuda.threadIdx.x, cuda.grid(1) // 32, cuda.threadIdx.x % 32
    total = ZERO
    if row < x.shape[0]:
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
    partial[t] = total
    step = 16
    while step > 0:
        cuda.syncwarp()
        if lane < step:
            partial[t] += partial[t + step]
        step //= 2
    if lane == 0 and row < x.shape[0]:
        y[row] = partial[t]


@wrong("warp_sum", "counts 32 times")
@cuda.jit
def warp_up(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        step = 16
        while step > 0:
            total += cuda.shfl_up_sync(ALL, total, step)
            step //= 2
        if lane == 0:
            y[row] = total


@wrong("warp_sum", "no part")
@cuda.jit
def warp_from_eight(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        step = 8
        while step > 0:
            total += cuda.shfl_down_sync(ALL, total, step)
            step //= 2
        if lane == 0:
            y[row] = total


@wrong("warp_sum", "shuffle-inactive-lane")
@cuda.jit
def warp_shuffle_in_the_guard(x, y):
    # Lanes without a column leave, and the others still ask them.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0] and lane < x.shape[1]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        step = 16
        while step > 0:
            total += cuda.shfl_down_sync(ALL, total, step)
            step //= 2
        if lane == 0:
            y[row] = total


@wrong("warp_sum", "shuffle-inactive-lane")
@cuda.jit
def warp_tree_of_lanes(x, y):
    # A tree needs `if lane < step` in shared memory; with shuffles it silences the givers.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        step = 16
        while step > 0:
            if lane < step:
                total += cuda.shfl_down_sync(ALL, total, step)
            step //= 2
        if lane == 0:
            y[row] = total


@wrong("warp_sum", OUTSIDE)
@cuda.jit
def warp_no_guard(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    total = ZERO
    for col in range(lane, x.shape[1], 32):
        total += x[row, col]
    total = intrinsics.warp_sum(total)
    if lane == 0:
        y[row] = total


@wrong("warp_sum", OUTSIDE)
@cuda.jit
def warp_reads_past_the_row(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = intrinsics.warp_sum(x[row, lane])
        if lane == 0:
            y[row] = total


@wrong("warp_sum", "never written")
@cuda.jit
def warp_row_per_block(x, y):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        total = intrinsics.warp_sum(total)
        if cuda.threadIdx.x == 0:
            y[row] = total


@wrong("warp_sum", RACE)
@cuda.jit
def warp_every_lane_writes_its_own(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = ZERO
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        step = 16
        while step > 0:
            total += cuda.shfl_down_sync(ALL, total, step)
            step //= 2
        y[row] = total


@wrong("warp_sum", RACE)
@cuda.jit
def warp_tree_without_syncwarp(x, y):
    partial = cuda.shared.array(256, np.float32)
    t, row, lane = cuda.threadIdx.x, cuda.grid(1) // 32, cuda.threadIdx.x % 32
    total = ZERO
    if row < x.shape[0]:
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
    partial[t] = total
    step = 16
    while step > 0:
        if lane < step:
            partial[t] += partial[t + step]
        step //= 2
    if lane == 0 and row < x.shape[0]:
        y[row] = partial[t]


# ---- global_avg_pool(x, y) -------------------------------------------------------------------


@right("global_avg_pool")
@cuda.jit
def pool_one_thread(x, y):
    N, C, H, W = x.shape
    if cuda.threadIdx.x == 0:
        n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
        total = ZERO
        for h in range(H):
            for w in range(W):
                total += x[n, c, h, w]
        y[n, c] = total / np.float32(H * W)


@right("global_avg_pool")
@cuda.jit
def pool_with_warps(x, y):
    N, C, H, W = x.shape
    scratch = cuda.shared.array(32, np.float32)
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    total = ZERO
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        total += x[n, c, i // W, i % W]
    total = intrinsics.block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        y[n, c] = total / np.float32(H * W)


@right("global_avg_pool")
@cuda.jit
def pool_divides_first(x, y):
    N, C, H, W = x.shape
    partial = cuda.shared.array(256, np.float32)
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    t, step = cuda.threadIdx.x, cuda.blockDim.x
    share = ONE / np.float32(H * W)
    partial[t] = 0
    for h in range(H):
        for w in range(t, W, cuda.blockDim.x):
            partial[t] += x[n, c, h, w] * share
    while step > 1:
        cuda.syncthreads()
        step //= 2
        if t < step:
            partial[t] += partial[t + step]
    if t == 0:
        y[n, c] = partial[0]


@wrong("global_avg_pool", "times what it should be")
@cuda.jit
def pool_sum(x, y):
    N, C, H, W = x.shape
    scratch = cuda.shared.array(32, np.float32)
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    total = ZERO
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        total += x[n, c, i // W, i % W]
    total = intrinsics.block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        y[n, c] = total


@wrong("global_avg_pool", "counts .* times as much")
@cuda.jit
def pool_divides_by_threads(x, y):
    N, C, H, W = x.shape
    scratch = cuda.shared.array(32, np.float32)
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    total = ZERO
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        total += x[n, c, i // W, i % W]
    total = intrinsics.block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        y[n, c] = total / np.float32(cuda.blockDim.x)


@wrong("global_avg_pool", OUTSIDE + "|never written")
@cuda.jit
def pool_batch_and_channel_swapped(x, y):
    N, C, H, W = x.shape
    scratch = cuda.shared.array(32, np.float32)
    n, c = cuda.blockIdx.x % C, cuda.blockIdx.x // C
    total = ZERO
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        total += x[n, c, i // W, i % W]
    total = intrinsics.block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        y[n, c] = total / np.float32(H * W)


@wrong("global_avg_pool", OUTSIDE)
@cuda.jit
def pool_rows_by_height(x, y):
    N, C, H, W = x.shape
    scratch = cuda.shared.array(32, np.float32)
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    total = ZERO
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        total += x[n, c, i // H, i % H]
    total = intrinsics.block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        y[n, c] = total / np.float32(H * W)


@wrong("global_avg_pool", RACE)
@cuda.jit
def pool_no_barrier_before_result(x, y):
    N, C, H, W = x.shape
    partial = cuda.shared.array(256, np.float32)
    n, c, t = cuda.blockIdx.x // C, cuda.blockIdx.x % C, cuda.threadIdx.x
    total = ZERO
    for i in range(t, H * W, cuda.blockDim.x):
        total += x[n, c, i // W, i % W]
    partial[t] = total
    if t == 0:
        total = ZERO
        for k in range(cuda.blockDim.x):
            total += partial[k]
        y[n, c] = total / np.float32(H * W)


@wrong("global_avg_pool", RACE)
@cuda.jit
def pool_one_shared_total(x, y):
    N, C, H, W = x.shape
    total = cuda.shared.array(1, np.float32)
    n, c, t = cuda.blockIdx.x // C, cuda.blockIdx.x % C, cuda.threadIdx.x
    if t == 0:
        total[0] = 0
    cuda.syncthreads()
    for i in range(t, H * W, cuda.blockDim.x):
        total[0] += x[n, c, i // W, i % W]
    cuda.syncthreads()
    if t == 0:
        y[n, c] = total[0] / np.float32(H * W)


@wrong("global_avg_pool", "no part")
@cuda.jit
def pool_first_round_only(x, y):
    N, C, H, W = x.shape
    scratch = cuda.shared.array(32, np.float32)
    n, c, i = cuda.blockIdx.x // C, cuda.blockIdx.x % C, cuda.threadIdx.x
    value = x[n, c, i // W, i % W] if i < H * W else ZERO
    value = intrinsics.block_sum(value, scratch)
    if i == 0:
        y[n, c] = value / np.float32(H * W)


@wrong("global_avg_pool", "depends on what y held before|race")
@cuda.jit
def pool_adds_to_y(x, y):
    N, C, H, W = x.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        cuda.atomic.add(y, (n, c), x[n, c, i // W, i % W] / np.float32(H * W))


# ---- global_avg_pool_backward(dy, dx) --------------------------------------------------------


@right("global_avg_pool_backward")
@cuda.jit
def unpool_grid_stride(dy, dx):
    N, C, H, W = dx.shape
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        plane = i // (H * W)
        n, c = plane // C, plane % C
        dx[n, c, i // W % H, i % W] = dy[n, c] / np.float32(H * W)


@right("global_avg_pool_backward")
@cuda.jit
def unpool_row_by_row(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    weight = ONE / np.float32(H * W)
    for h in range(H):
        for w in range(cuda.threadIdx.x, W, cuda.blockDim.x):
            dx[n, c, h, w] = dy[n, c] * weight


@right("global_avg_pool_backward")
@cuda.jit
def unpool_through_shared(dy, dx):
    N, C, H, W = dx.shape
    share = cuda.shared.array(1, np.float32)
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    if cuda.threadIdx.x == 0:
        share[0] = dy[n, c] / np.float32(H * W)
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] = share[0]


@wrong("global_avg_pool_backward", "times what it should be")
@cuda.jit
def unpool_no_weight(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] = dy[n, c]


@wrong("global_avg_pool_backward", "times what it should be")
@cuda.jit
def unpool_weight_of_all(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] = dy[n, c] / np.float32(dx.size)


@wrong("global_avg_pool_backward", OUTSIDE + "|never written")
@cuda.jit
def unpool_swapped(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x % C, cuda.blockIdx.x // C
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] = dy[n, c] / np.float32(H * W)


@wrong("global_avg_pool_backward", "never written")
@cuda.jit
def unpool_first_round_only(dy, dx):
    N, C, H, W = dx.shape
    n, c, i = cuda.blockIdx.x // C, cuda.blockIdx.x % C, cuda.threadIdx.x
    if i < H * W:
        dx[n, c, i // W, i % W] = dy[n, c] / np.float32(H * W)


@wrong("global_avg_pool_backward", OUTSIDE)
@cuda.jit
def unpool_no_guard(dy, dx):
    N, C, H, W = dx.shape
    n, c, i = cuda.blockIdx.x // C, cuda.blockIdx.x % C, cuda.threadIdx.x
    dx[n, c, i // W, i % W] = dy[n, c] / np.float32(H * W)


@wrong("global_avg_pool_backward", "never written")
@cuda.jit
def unpool_first_pixel(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    if cuda.threadIdx.x == 0:
        dx[n, c, 0, 0] = dy[n, c] / np.float32(H * W)


@wrong("global_avg_pool_backward", "depends on what dx held before")
@cuda.jit
def unpool_added(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] += dy[n, c] / np.float32(H * W)


@wrong("global_avg_pool_backward", RACE)
@cuda.jit
def unpool_shared_without_barrier(dy, dx):
    N, C, H, W = dx.shape
    share = cuda.shared.array(1, np.float32)
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    if cuda.threadIdx.x == 0:
        share[0] = dy[n, c] / np.float32(H * W)
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] = share[0]
