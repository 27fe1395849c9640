"""dweight of the way `windows` of the rung `depthwise`: sums over the pixels of y.

A thread keeps the sums of one line of the filter, and a block has as many lines of threads as the
filter; these read the same of dy, and of x what their neighbours read. A thread takes a few results
of y side by side at a time, and loads the window of x that they share once. Blocks share the
pixels; `total_kernel` adds up what they found.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.depthwise_windows import columns_of, reading_line, window_of
from course_lib.kernels.conv2d.few_channels import in_turn
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    vector_width,
    wait_for_previous_kernel,
)

LINE_THREADS = 64  # for each line of the filter
MOST_LINES = 7  # of a filter


@functools.cache
def window_sums_kernel(S, STRIDE, wide):
    """The kernel of dweight."""
    COLUMNS, WINDOW = columns_of(STRIDE), window_of(S, STRIDE, False)
    read_line = reading_line(WINDOW, wide)

    def adding(t):
        @cuda.jit(device=True)
        def add(sums, upstream, values, dy, line, q, Q, dilation, pixel_step, width):
            """The products of a line of the filter with result `t` of the thread, if it exists."""
            col = np.int32(q + t * dilation)
            if col < Q:
                if wide:
                    load_vector(upstream, dy, np.int64(np.int32(line + col * pixel_step)))
                else:
                    upstream[0] = load(dy, np.int32(line + col * pixel_step))
                for s in range(S):
                    for e in range(width):
                        sums[s, e] += upstream[e] * values[t * STRIDE + s, e]
            return 0

        return add

    add_products = in_turn([adding(t) for t in range(COLUMNS)])

    @cuda.jit(launch_bounds=(LINE_THREADS * MOST_LINES, 1))
    def depthwise_sums_kernel(
        dy, x, partial, last, lanes, length, n_splits, n_groups, runs_w, n_runs, fan_out, C, K, R,
        H, W, P, Q, stride_h, pad_h, pad_w, dilation_h, dilation_w,
    ):  # fmt: skip
        """partial (splits, K, R, S): a split sums `length` of the n_runs tiles of y.

        Block `split * n_groups + group` has threads (LINE_THREADS, R); `lanes` are for channels.
        A tile is COLUMNS results of a line; runs_w of them make a line. fan_out is K // C.
        """
        totals = cuda.shared.array((MOST_LINES, LINE_THREADS, MAX_WIDTH), np.float32)
        sums = cuda.local.array((S, MAX_WIDTH), np.float32)
        values = cuda.local.array((WINDOW, MAX_WIDTH), np.float32)
        upstream = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(x) if wide else 1
        tid, r = np.int32(cuda.threadIdx.x), np.int32(cuda.threadIdx.y)
        worker, lane = divided(tid, lanes)
        n_workers, _ = divided(np.int32(LINE_THREADS), lanes)
        split, group = divided(np.int32(cuda.blockIdx.x), n_groups)
        k = np.int32((group * lanes + lane) * width)
        c, _ = divided(k, fan_out)
        x_step, dy_step = (C, K) if last else (np.int32(1), np.int32(1))
        for s in range(S):
            for e in range(width):
                sums[s, e] = ZERO
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
                chunk, rest = divided(run_w, dilation_w)
                q = np.int32(chunk * COLUMNS * dilation_w + rest)
                base = np.int64(n) * np.int32(C * H * W) + np.int32(c * (1 if last else H * W))
                line, w = np.int32(h * W * x_step), np.int32(q * STRIDE - pad_w)
                read_line(values, x[base:], line, w, W, dilation_w, x_step)
                base = np.int64(n) * np.int32(K * P * Q) + np.int32(k * (1 if last else P * Q))
                line = np.int32(p * Q * dy_step)
                image = dy[base:]
                add_products(sums, upstream, values, image, line, q, Q, dilation_w, dy_step, width)
            run = np.int32(run + n_workers)
        for s in range(S):
            cuda.syncthreads()
            for e in range(width):
                totals[r, tid, e] = sums[s, e]
            cuda.syncthreads()
            if worker == 0 and k < K:
                for e in range(width):
                    total = ZERO
                    for other in range(n_workers):
                        total += totals[r, np.int32(other * lanes + lane), e]
                    place = (np.int64(split) * K + k + e) * R + r
                    partial[place * S + s] = total

    return depthwise_sums_kernel
