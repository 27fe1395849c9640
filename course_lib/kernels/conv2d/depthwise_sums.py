"""dweight of the way `windows` of the rung `depthwise`: sums over the pixels of y.

A thread keeps the sums of one line of the filter, and a block has as many lines of threads as the
filter; these read the same of dy, and of x what their neighbours read. A thread takes a few results
of y side by side at a time, and loads the window of x that they share once. Blocks share the
pixels; `total_kernel` adds up what they found, where there are several for a filter.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.depthwise_windows import reading_line
from course_lib.kernels.conv2d.few_channels import in_turn
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    store,
    vector_width,
    wait_for_previous_kernel,
    warp_sum,
)

LINE_THREADS = 64  # for each line of the filter
MOST_LINES = 7  # of a filter
PITCH = LINE_THREADS + 8  # so that threads that add up different sums meet different banks


def columns_of(stride, wide):
    """Results side by side that a thread takes: more where they are numbers, not vectors.

    What comes before the loads of a tile is the same for any number of them.
    """
    return (4 if wide else 8) // stride


@functools.cache
def window_sums_kernel(S, STRIDE, wide):
    """The kernel of dweight."""
    COLUMNS = columns_of(STRIDE, wide)
    WINDOW, ROUNDS = (COLUMNS - 1) * STRIDE + S, S if wide else 1
    read_window, read_upstream = reading_line(WINDOW, wide), reading_line(COLUMNS, wide)

    def adding(t):
        @cuda.jit(device=True)
        def add(sums, upstream, values, q, Q, apart, width):
            """The products of a line of the filter with result `t` of the thread, if it exists."""
            if np.int32(q + t * apart) < Q:  # else zeros, which times infinity would be NaN
                for s in range(S):
                    if wide:
                        for e in range(width):
                            sums[s, e] += upstream[t, e] * values[t * STRIDE + s, e]
                    else:
                        sums[0, s] += upstream[t, 0] * values[t * STRIDE + s, 0]
            return 0

        return add

    add_products = in_turn([adding(t) for t in range(COLUMNS)])

    @cuda.jit(launch_bounds=(LINE_THREADS * MOST_LINES, 1 if wide else 2))
    def depthwise_sums_kernel(
        dy, x, partial, last, lanes, length, n_splits, n_groups, runs_w, n_runs, fan_out, C, K, R,
        H, W, P, Q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, apart_w,
    ):  # fmt: skip
        """partial (splits, K, R, S), or dweight: a split sums `length` of the n_runs tiles of y.

        Block `split * n_groups + group` has threads (LINE_THREADS, R); `lanes` are for channels.
        A tile is COLUMNS results of a line, `apart_w` from each other; runs_w of them make a line.
        fan_out is K // C.
        """
        totals = cuda.shared.array((MOST_LINES, MAX_WIDTH, PITCH), np.float32)
        sums = cuda.local.array((ROUNDS, MAX_WIDTH), np.float32)
        values = cuda.local.array((WINDOW, MAX_WIDTH), np.float32)
        upstream = cuda.local.array((COLUMNS, MAX_WIDTH), np.float32)
        width = vector_width(x) if wide else 1
        tid, r = np.int32(cuda.threadIdx.x), np.int32(cuda.threadIdx.y)
        worker, lane = divided(tid, lanes)
        n_workers, _ = divided(np.int32(LINE_THREADS), lanes)
        split, group = divided(np.int32(cuda.blockIdx.x), n_groups)
        k = np.int32((group * lanes + lane) * width)
        c, _ = divided(k, fan_out)
        x_step, dy_step = (C, K) if last else (np.int32(1), np.int32(1))
        n_sums = width if wide else np.int32(S)  # of a round, in which they are added up
        for i in range(ROUNDS):
            for e in range(n_sums):
                sums[i, e] = ZERO
        allow_next_kernel()
        wait_for_previous_kernel()
        run = np.int32(split * length + worker)
        stop = np.int32(min(split * length + length, n_runs))
        if worker >= n_workers or k >= K:
            run = stop
        while run < stop:
            rest, run_w = divided(run, runs_w)
            n, p = divided(rest, P)
            h = np.int32(p * stride_h - pad_h + r * dilation_h)
            if h >= 0 and h < H:
                chunk, rest = (run_w, np.int32(0)) if apart_w == 1 else divided(run_w, apart_w)
                q = np.int32(chunk * COLUMNS * apart_w + rest)
                base = np.int64(n) * np.int32(C * H * W) + np.int32(c * (1 if last else H * W))
                line, w = np.int32(h * W * x_step), np.int32(q * stride_w - pad_w)
                read_window(values, x[base:], line, w, W, dilation_w, x_step)
                base = np.int64(n) * np.int32(K * P * Q) + np.int32(k * (1 if last else P * Q))
                line = np.int32(p * Q * dy_step)
                read_upstream(upstream, dy[base:], line, q, Q, apart_w, dy_step)
                add_products(sums, upstream, values, q, Q, apart_w, width)
            run = np.int32(run + n_workers)
        n_parts, step = n_workers, lanes
        if not wide and lanes == 1:  # all lanes of a warp sum for one filter
            n_parts, step = np.int32(LINE_THREADS // 32), np.int32(32)
            for e in range(S):
                sums[0, e] = warp_sum(sums[0, e])
        for i in range(ROUNDS):
            cuda.syncthreads()
            for e in range(n_sums):
                totals[r, e, tid] = sums[i, e]
            cuda.syncthreads()
            mine = worker if worker < n_workers and k < K else n_sums
            while mine < n_sums:
                total = ZERO
                for part in range(n_parts):
                    total += totals[r, mine, np.int32(part * step + lane)]
                filter, s = (np.int32(k + mine), i) if wide else (k, mine)
                store(partial, ((np.int64(split) * K + filter) * R + r) * S + s, total)
                mine = np.int32(mine + n_workers)

    return depthwise_sums_kernel
