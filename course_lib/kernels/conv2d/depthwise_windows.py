"""The way `windows` of the rung `depthwise`: a thread makes a tile of results from what it loads.

Filters have S columns. A thread keeps ROWS · COLUMNS results in registers; it loads the *window*
that a line of its tile reads once, and adds up the products of all taps that meet it. There are two
kinds of kernels. `wide` ones take images whose channels lie side by side, 16 bytes of them at a
time, and the block's weights wait in shared memory. The others take one channel at a time, and
images of both formats; neighbours in memory are threads side by side.

Threads of a block: `lanes` for channels (1 where pixels lie side by side), then `across` for tiles
of a line, then lines of tiles. Lines are counted through all images, or through all planes. With a
dilation of d strides the results of a thread are d places *apart*: so what they read of the source,
pixels as far from each other as the taps, they share, and the kernel is that of a stride of 1.

dx: with a stride of 1 it is forward with the filters turned (`flipped`), and so it is where the
taps are whole strides apart: of each *spread*, stride_h × stride_w pixels, one meets all taps, and
the others none. With a stride of 2 and no dilation a line of dx meets every second line of the
filter, and so do columns: `for_dx` says which.

dweight is in `depthwise_sums`.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.few_channels import in_turn
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.predicated import load_if, load_vector_if
from course_lib.runtime.intrinsics.words import store_floats

BLOCK_SIZE = 256  # threads at most


def columns_of(stride, for_dx=False):
    """Results side by side that a thread makes."""
    return 2 if stride == 2 and not for_dx else 4


def rows_of(wide):
    """Results of a thread below each other."""
    return 1 if wide else 4


def phase_of(S, stride):
    """The tap, modulo the stride, that meets the first column of a thread's tile of dx."""
    return S // 2 % stride


def before(S, stride):
    """Columns of dy in a window of dx before the one that is met at `phase_of`."""
    return (S - 1 - phase_of(S, stride)) // stride


def window_of(S, stride, for_dx):
    """Columns that a line of a thread's tile reads."""
    n = columns_of(stride, for_dx)
    if for_dx:
        return before(S, stride) + (n - 1 + phase_of(S, stride)) // stride + 1
    return (n - 1) * stride + S


def reading_line(window, wide):
    """The device function that loads one line of a window, which exists."""

    def reading(i):
        @cuda.jit(device=True)
        def read(values, source, line, w, W, step, pixel_step):
            """values[i] = the source at column w + i·step of the line at `line`, or zeros."""
            col = np.int32(w + i * step)
            exists = np.uint32(col) < np.uint32(W)  # and so not before the line
            at = np.int64(np.int32(line + col * pixel_step))
            if wide:
                load_vector_if(values[i], source, at, exists)
            else:
                values[i, 0] = load_if(source, at, exists)
            return 0

        return read

    return in_turn([reading(i) for i in range(window)])


@functools.cache
def window_kernel(S, STRIDE, for_dx, wide):
    """The kernel of forward, or with `for_dx` that of dx with strides."""
    COLUMNS, ROWS, WINDOW = columns_of(STRIDE, for_dx), rows_of(wide), window_of(S, STRIDE, for_dx)
    N_SUMS, PHASE = ROWS * COLUMNS, phase_of(S, STRIDE)
    read_line = reading_line(WINDOW, wide)

    def adding(u, s):
        """Adds the products of tap `s` of a line to row `u` of the results."""
        FIRST, STEP, AT, BY = 0, 1, s, STRIDE  # results first, first + step … of window at, at + by
        if for_dx:
            FIRST, STEP, BY = (s - PHASE) % STRIDE, STRIDE, 1
            AT = (FIRST + PHASE - s) // STRIDE + before(S, STRIDE)
        N = len(range(FIRST, COLUMNS, STEP))

        @cuda.jit(device=True)
        def add_vectors(sums, values, weights, tap, tap_step, width):
            row = cuda.local.array(4, np.float32)
            for quarter in range(width // 4):
                load_vector(row, weights, np.int64(np.int32(tap + s * tap_step + quarter * 4)))
                for i in range(N):
                    for e in range(4):
                        at = quarter * 4 + e
                        sums[u * COLUMNS + FIRST + i * STEP, at] += values[AT + i * BY, at] * row[e]
            return 0

        @cuda.jit(device=True)
        def add_numbers(sums, values, weights, tap, tap_step, width):
            number = load(weights, np.int32(tap + s * tap_step))
            for i in range(N):
                sums[u * COLUMNS + FIRST + i * STEP, 0] += values[AT + i * BY, 0] * number
            return 0

        return add_vectors if wide else add_numbers

    def adding_line(u):
        add = in_turn([adding(u, s) for s in range(S)])

        @cuda.jit(device=True)
        def add_line(sums, values, weights, first, tap_step, width, r, line_step, R):
            """The products of line r − u·line_step of the filter, if there is such a line."""
            r = np.int32(r - u * line_step)
            if r >= 0 and r < R:
                tap = np.int32(first + r * S * tap_step)
                add(sums, values, weights, tap, tap_step, width)
            return 0

        return add_line

    add_lines = in_turn([adding_line(u) for u in range(ROWS)])

    @cuda.jit(device=True)
    def gather(sums, values, source, weights, first, p, w, taps, sizes, steps):
        """All products of a tile whose first line is `p`; `source` begins with its image."""
        tap_step, R, width = taps
        H, W, pixel_step = sizes
        offset_h, stride_h, dilation_h, dilation_w = steps
        if for_dx:  # dy's line h meets result p + u with tap p + u + padding − h · stride
            reach = np.int32(p + ROWS - 1 + offset_h)
            h = np.int32(reach // STRIDE)
            r = np.int32(offset_h + p - h * STRIDE)
            n_lines, h_step, r_step, line_step = (ROWS + R - 2) // STRIDE + 1, -1, STRIDE, -1
        else:
            h, r = np.int32(p * stride_h + offset_h), np.int32(0)
            n_lines = (ROWS - 1) * STRIDE + R
            h_step, r_step, line_step = dilation_h, 1, STRIDE
        for _ in range(n_lines):
            if h >= 0 and h < H:
                line = np.int32(h * W * pixel_step)
                read_line(values, source, line, w, W, dilation_w, pixel_step)
                add_lines(sums, values, weights, first, tap_step, width, r, line_step, R)
            h, r = np.int32(h + h_step), np.int32(r + r_step)

    @cuda.jit(device=True)
    def clear(sums, width):
        for i in range(N_SUMS):
            for e in range(width):
                sums[i, e] = ZERO

    @cuda.jit(device=True)
    def write(y, sums, base, p, q, P, Q, pixel_step, steps, together):
        """The thread's results, `together` of them at a time."""
        step_h, step_w = steps
        for u in range(ROWS):
            line = np.int32(p + u * step_h)
            for t in range(COLUMNS):
                col = np.int32(q + t * step_w)
                at = base + np.int32((line * Q + col) * pixel_step)
                if line >= 0 and line < P and col >= 0 and col < Q:
                    if wide:
                        store_vector(y, at, sums[u * COLUMNS + t])
                    elif together == 1:
                        store(y, at, sums[u * COLUMNS + t, 0])
                    elif t == 0:
                        write_together(y, at, sums, u)

    @cuda.jit(device=True)
    def write_together(y, at, sums, u):
        row = cuda.local.array(COLUMNS, np.float32)
        for t in range(COLUMNS):
            row[t] = sums[u * COLUMNS + t, 0]
        store_floats(y, at, row, 0, COLUMNS)

    @cuda.jit(launch_bounds=(BLOCK_SIZE, 2))
    def depthwise_window_kernel(
        source, weight, bias, result, biased, flipped, last, lanes, across, down, n_turns, n_groups,
        n_across, runs_h, runs_w, n_outer, fan_in, fan_out, together, channels, filters, R, H, W,
        P, Q, offset_h, offset_w, lead_h, lead_w, stride_h, stride_w, dilation_h, dilation_w,
        apart_h, apart_w, spread_h, spread_w,
    ):  # fmt: skip
        """result (N, filters, P, Q) = source (N, channels, H, W) * weight, and bias if `biased`.

        flipped            whether the last tap comes first
        lanes, across      threads side by side: for channels, for tiles of a line
        down, n_turns      lines of tiles of a block at a time, and how often
        n_groups, n_across  blocks for the channels, and for a line
        runs_h, runs_w     tiles of an image; n_outer images, or planes
        fan_in, fan_out    filters for each result, and results for each channel of the source
        together           results of a line that are written at once: 1, or all of a thread's
        offset_h, offset_w  where the first tile reads; its first pixel is (−lead_h, −lead_w)
        stride, dilation   pixels of the source from a result to the next, and from tap to tap
        apart_h, apart_w   results from one of a thread to its next
        spread_h, spread_w  pixels for each result: the first gets it, and the others zeros
        """
        staged = cuda.shared.array(0, np.float32)
        sums = cuda.local.array((N_SUMS, MAX_WIDTH), np.float32)
        values = cuda.local.array((WINDOW, MAX_WIDTH), np.float32)
        width = vector_width(source) if wide else 1
        tid = np.int32(cuda.threadIdx.x)
        worker, lane = divided(tid, lanes)
        row, col = divided(worker, across)
        rest, group = divided(np.int32(cuda.blockIdx.x), n_groups)
        tile, part = divided(rest, n_across)
        channel = np.int32((group * lanes + lane) * width)
        run_w = np.int32(part * across + col)
        pitch, n_taps = np.int32(lanes * width), np.int32(R * S)
        allow_next_kernel()
        wait_for_previous_kernel()
        if wide:
            first = np.int32(group * pitch)
            i = tid
            while i < n_taps * pitch:
                tap, k = divided(i, pitch)
                if first + k < filters:
                    from_tap = n_taps - 1 - tap if flipped else tap
                    staged[i] = load(weight, np.int64(first + k) * n_taps + from_tap)
                i = np.int32(i + cuda.blockDim.x)
            cuda.syncthreads()
        chunk, rest = (run_w, np.int32(0)) if apart_w == 1 else divided(run_w, apart_w)
        q = np.int32(chunk * COLUMNS * apart_w + rest)
        if for_dx:
            w = np.int32(run_w * (COLUMNS // STRIDE) + offset_w)
        else:
            w = np.int32(q * stride_w + offset_w)
        left, n_spread = np.int32(q * spread_w - lead_w), np.int32(spread_h * spread_w)
        steps = np.int32(apart_h * spread_h), np.int32(apart_w * spread_w)
        active = row < down and run_w < runs_w and channel < filters
        for turn in range(n_turns):
            run = np.int64(tile * np.int64(n_turns) + turn) * down + row
            outer, run_h = divided(np.int32(run), runs_h)
            if active and run < np.int64(n_outer) * runs_h:
                n, k = (outer, channel) if last else divided(outer, filters)
                chunk, rest = divided(run_h, apart_h)
                p = np.int32(chunk * ROWS * apart_h + rest)
                for i in range(N_SUMS):
                    for e in range(width):
                        sums[i, e] = load(bias, k + e) if biased else ZERO
                c = np.int32(divided(k, fan_out)[0] * fan_in)
                image = np.int64(n) * np.int32(channels * H * W)
                for j in range(fan_in):
                    base = image + np.int32((c + j) * (1 if last else H * W))
                    if wide:
                        weights, first, tap_step = staged, np.int32(lane * width), pitch
                    else:
                        weights = weight[np.int64(k * fan_in + j) * n_taps :]
                        first = np.int32(n_taps - 1 if flipped else 0)
                        tap_step = np.int32(-1 if flipped else 1)
                    gather(
                        sums, values, source[base:], weights, first, p, w,
                        (tap_step, R, width), (H, W, channels if last else np.int32(1)),
                        (offset_h, stride_h, dilation_h, dilation_w),
                    )  # fmt: skip
                base = np.int64(n) * np.int32(filters * P * Q)
                base += np.int32(k * (1 if last else P * Q))
                step = filters if last else np.int32(1)
                i, top = np.int32(0), np.int32(p * spread_h - lead_h)
                while i < n_spread:
                    down_by, right_by = divided(i, spread_w)
                    line, column = np.int32(top + down_by), np.int32(left + right_by)
                    write(result, sums, base, line, column, P, Q, step, steps, together)
                    clear(sums, width)  # for the pixels that no tap meets
                    i = np.int32(i + 1)

    return depthwise_window_kernel
