"""Lesson 02: histograms, sums by tree and by shuffle, global average pooling.

The messages about races, barriers and memory that nobody set are the sanitizer's own.
"""

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
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


mistakes("histogram",
    ("hist_plain", RACE, "cuda.atomic.add(counts, x[i], 1)", "counts[x[i]] += 1"),
    ("hist_atomic_after_plain_read", RACE, "cuda.atomic.add(counts, x[i], 1)",
     "cuda.atomic.exch(counts, x[i], counts[x[i]] + 1)"),
    ("hist_read_by_an_atomic", "depends on what other threads do between two steps",
     "cuda.atomic.add(counts, x[i], 1)",
     "old = cuda.atomic.add(counts, x[i], 0)\n        cuda.atomic.exch(counts, x[i], old + 1)"),
    ("hist_no_guard", OUTSIDE, "i < x.size", "i >= 0"),
    ("hist_one_too_many", OUTSIDE, "i < x.size", "i <= x.size"),
    ("hist_guard_of_counts", r"x\[64\] has no part", "i < x.size", "i < x.size and i < 64"),
    ("hist_counts_places", "wrong values in counts", "x[i]", "i % 256"),
    ("hist_adds_levels", r"counts \d+ times", "x[i], 1)", "x[i], x[i])"),
    ("hist_first_block", "no part", "cuda.grid(1)", "cuda.threadIdx.x"),
    # The barrier is one for the block's own threads: other blocks may have counted already.
    ("hist_sets_to_zero_first", RACE, "    if i < x.size:\n",
     "    if i < 256:\n        counts[i] = 0\n    cuda.syncthreads()\n    if i < x.size:\n"))


# ---- histogram_shared(x, counts) -------------------------------------------------------------


@wrong("histogram_shared", "made without shared memory")
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


mistakes("histogram_shared",
    ("shared_no_barrier_after_zero", RACE, "= 0\n    cuda.syncthreads()\n", "= 0\n"),
    ("shared_no_barrier_before_merge", RACE, "x[i], 1)\n    cuda.syncthreads()\n", "x[i], 1)\n"),
    ("shared_never_zeroed", "uninitialised-read", "mine[level] = 0", "pass"),
    # Right for blocks of 256 threads, and the smaller ones leave levels unset.
    ("shared_zeroed_by_threads_only", "uninitialised-read",
     "for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):\n        mine[level] = 0",
     "if cuda.threadIdx.x < 256:\n        mine[cuda.threadIdx.x] = 0"),
    ("shared_plain_count", RACE, "cuda.atomic.add(mine, x[i], 1)", "mine[x[i]] += 1"),
    ("shared_plain_merge", RACE, "cuda.atomic.add(counts, level, mine[level])",
     "counts[level] += mine[level]"),
    ("shared_everyone_merges_everything", "counts 32 times what it should",
     "range(cuda.threadIdx.x, 256, cuda.blockDim.x):\n        cuda", "range(256):\n        cuda"),
    ("shared_255_counters", OUTSIDE, shared_first_thread_zeroes, "array(256,", "array(255,",
     "range(256)", "range(255)", "threadIdx.x, 256,", "threadIdx.x, 255,"),
    ("shared_barrier_in_the_loop", "barrier-(mismatch|divergence)|race",
     "x[i], 1)\n    cuda.syncthreads()", "x[i], 1)\n        cuda.syncthreads()"))


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


@wrong("block_sum", "should share the work")
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


@wrong("block_sum", "should share the work")
@cuda.jit
def tree_one_thread_does_all(x, y):
    if cuda.threadIdx.x == 0:
        total = ZERO
        for col in range(x.shape[1]):
            total += x[cuda.blockIdx.x, col]
        y[cuda.blockIdx.x] = total


mistakes("block_sum",
    ("tree_no_first_barrier", RACE, "= total\n    cuda.syncthreads()\n", "= total\n"),
    ("tree_no_barrier_between_rounds", RACE, "        cuda.syncthreads()\n", ""),
    # One thread too many adds: a barrier may cure what both should do, and they should not.
    ("tree_one_thread_too_many", "if both should run it", "if t < step", "if t <= step"),
    ("tree_barrier_inside_if", "barrier-(mismatch|divergence)|exited-before-barrier",
     "        cuda.syncthreads()\n", "            cuda.syncthreads()\n"),
    ("tree_leaves_early", "barrier-(mismatch|divergence)|exited-before-barrier",
     tree_first_thread_adds, "cuda.blockDim.x\n",
     "cuda.blockDim.x\n    if t >= x.shape[1]:\n        return\n", "range(n)",
     "range(min(n, x.shape[1]))"),
    # Each thread begins with a number of the row, whether there is one for it or not.
    ("tree_reads_past_the_row", OUTSIDE, "total = np.float32(0)", "total = x[row, t]", "range(t,",
     "range(t + cuda.blockDim.x,"),
    ("tree_unset_tail", "uninitialised-read", "    partial[t] = total",
     "    if t < x.shape[1]:\n        partial[t] = total"),
    ("tree_for_128_threads", "uninitialised-read", "cuda.blockDim.x // 2", "64"),
    ("tree_first_warp_only", r"x\[0, 32\] to x\[0, 63\] have no part", tree_of_warps,
     "block_sum(total, scratch)", "warp_sum(total)"),
    ("tree_one_round_short", "no part", "step > 0", "step > 1"),
    ("tree_whole_rounds_of_the_row", "no part", "x.shape[1],",
     "x.shape[1] // cuda.blockDim.x * cuda.blockDim.x,"))


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


@wrong("warp_sum", "made without shuffles")
@cuda.jit
def warp_tree_in_shared(x, y):
    partial = cuda.shared.array(1024, np.float32)
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


mistakes("warp_sum",
    ("warp_up", "counts 32 times", "shfl_down_sync", "shfl_up_sync"),
    ("warp_from_eight", "no part", "step = 16", "step = 8"),
    # Lanes without a column leave, and the others still ask them.
    ("warp_shuffle_in_the_guard", "shuffle-inactive-lane", "row < x.shape[0]",
     "row < x.shape[0] and lane < x.shape[1]"),
    # A tree needs `if lane < step` in shared memory; with shuffles it silences the givers.
    ("warp_tree_of_lanes", "shuffle-inactive-lane", "total += cuda",
     "if lane < step:\n                total += cuda"),
    ("warp_no_guard", OUTSIDE, "row < x.shape[0]", "row >= 0"),
    ("warp_reads_past_the_row", OUTSIDE, "total = np.float32(0)", "total = x[row, lane]",
     "range(lane,", "range(lane + 32,"),
    ("warp_row_per_block", "never written", "cuda.grid(1) // 32", "cuda.blockIdx.x", "lane == 0",
     "cuda.threadIdx.x == 0"),
    ("warp_every_lane_writes_its_own", RACE, "        if lane == 0:\n            y", "        y"),
    ("warp_tree_without_syncwarp", RACE, warp_tree_in_shared, "        cuda.syncwarp()\n", ""),
    ("warp_tree_for_256_threads", OUTSIDE, warp_tree_in_shared, "1024", "256"))


# ---- global_avg_pool(x, y) -------------------------------------------------------------------


@wrong("global_avg_pool", "should share the work")
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


mistakes("global_avg_pool",
    ("pool_sum", "without one of its divisions", " / np.float32(H * W)", ""),
    ("pool_divides_by_threads", "wrong values in y", "np.float32(H * W)",
     "np.float32(cuda.blockDim.x)"),
    ("pool_batch_and_channel_swapped", OUTSIDE + "|never written", "n, c, t =", "c, n, t ="),
    ("pool_rows_by_height", OUTSIDE, "i // W, i % W", "i // H, i % H"))


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


mistakes("global_avg_pool",
    ("pool_first_round_only", "no part", "range(t, H * W,",
     "range(t, min(H * W, cuda.blockDim.x),"))


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


mistakes("global_avg_pool_backward",
    ("unpool_no_weight", "times what it should be", " / np.float32(H * W)", ""),
    ("unpool_weight_of_all", "is 1/2 of what it should be", "np.float32(H * W)",
     "np.float32(dx.size)"),
    ("unpool_swapped", OUTSIDE + "|never written", "n, c =", "c, n ="),
    ("unpool_first_round_only", "never written", "x, H * W,", "x, min(H * W, cuda.blockDim.x),"),
    ("unpool_no_guard", OUTSIDE,
     "for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):\n        dx",
     "i = cuda.threadIdx.x\n    dx"),
    ("unpool_first_pixel", "never written", "x, H * W,", "x, 1,"),
    ("unpool_added", "depends on what dx held before", "= share", "+= share"),
    ("unpool_shared_without_barrier", RACE, unpool_through_shared, "    cuda.syncthreads()\n", ""))
