"""Lesson 04: loads in flight, softmax in registers and by teams, its gradient, autograd.

Nearly all wrong kernels are a right one with one mistake in it, and `mistake` says which text
stands in place of which. The messages about shuffles, races and memory outside an array are the
sanitizer's own.
"""

import math

import numpy as np
import torch

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import load_vector, store_vector, warp_max, warp_sum

OUTSIDE = "out-of-bounds"
ALL = 0xFFFFFFFF
MINUS_INF = np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min
ZERO, ONE = np.float32(0), np.float32(1)
WIDTH, VECTORS, SLOTS = 4, 2, 8

# ---- bytes_in_flight(gbps, latency_ns, n_multiprocessors, n_threads) -------------------------


@right("bytes_in_flight")
def flight_in_seconds(gbps, latency_ns, n_multiprocessors, n_threads):
    total = gbps * 1e9 * latency_ns * 1e-9
    return total / n_multiprocessors, total / (n_multiprocessors * n_threads)


@right("bytes_in_flight")
def flight_per_thread_first(gbps, latency_ns, n_multiprocessors, n_threads):
    one = gbps / n_threads * latency_ns / n_multiprocessors
    return one * n_threads, one


@right("bytes_in_flight")
def flight_as_numpy(gbps, latency_ns, n_multiprocessors, n_threads):
    share = np.float64(gbps) * latency_ns / n_multiprocessors
    return share, share / np.float64(n_threads)


mistakes("bytes_in_flight",
    ("flight_divides", "wrong values in per_multiprocessor", "gbps * latency_ns",
     "gbps / latency_ns"),
    ("flight_of_the_chip", "wrong values in per_multiprocessor", "whole_chip / n_multiprocessors",
     "whole_chip"),
    ("flight_thread_of_the_chip", "wrong values in per_thread", "per_multiprocessor / n_threads",
     "whole_chip / n_threads"),
    ("flight_gigabytes_of_bits", "wrong values in per_multiprocessor", "gbps * latency_ns",
     "gbps * latency_ns / 8"),
    ("flight_other_way_round", "wrong values in per_multiprocessor",
     "return per_multiprocessor, per_multiprocessor / n_threads",
     "return per_multiprocessor / n_threads, per_multiprocessor"),
    ("flight_whole_bytes", "wrong values in per_multiprocessor", "whole_chip / n_multiprocessors",
     "whole_chip // n_multiprocessors"),
    ("flight_one_number", "it returned one, of type float", ", per_multiprocessor / n_threads", ""),
    ("flight_no_return", "is the return missing", "return ", ""))


# ---- softmax_registers(x, y, n_cols) ---------------------------------------------------------


@wrong("softmax_registers", r"x is read in \d+ pieces")
@cuda.jit
def registers_element_by_element(x, y, n_cols):
    # The same sharing out, four loads of 4 bytes in place of one of 16.
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row * n_cols < x.size:
        m, s = MINUS_INF, ZERO
        for v in range(VECTORS):
            for k in range(WIDTH):
                col = (32 * v + lane) * WIDTH + k
                values[v, k] = x[row * n_cols + col] if col < n_cols else MINUS_INF
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                s += math.exp(values[v, k] - m)
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                col = (32 * v + lane) * WIDTH + k
                if col < n_cols:
                    y[row * n_cols + col] = math.exp(values[v, k] - m) / s


@wrong("softmax_registers", "x is read three times")
@cuda.jit
def registers_three_passes(x, y, n_cols):
    # Lesson 3's rung: right, and slow.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for col in range(lane, n_cols, 32):
            m = max(m, x[start + col])
        m = warp_max(m)
        for col in range(lane, n_cols, 32):
            s += math.exp(x[start + col] - m)
        s = warp_sum(s)
        for col in range(lane, n_cols, 32):
            y[start + col] = math.exp(x[start + col] - m) / s


@right("softmax_registers")
@cuda.jit
def registers_reciprocal_and_grid_stride(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    lane = cuda.threadIdx.x % 32
    start = cuda.grid(1) // 32 * n_cols
    while start < x.size:
        m, s = LOWEST, ZERO
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = LOWEST
            if (32 * v + lane) * WIDTH < n_cols:
                load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        factor = ONE / warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] *= factor
            if (32 * v + lane) * WIDTH < n_cols:
                store_vector(y, start + (32 * v + lane) * WIDTH, values[v])
        start += cuda.gridsize(1) // 32 * n_cols


LOAD = "col = (32 * v + lane) * WIDTH\n            if col < n_cols:\n                load_vector"
STORE = LOAD.replace("load_vector", "store_vector")
mistakes("softmax_registers",
    ("registers_no_maximum", "NaN was computed|overflow", "math.exp(values[v, k] - m)",
     "math.exp(values[v, k])"),
    ("registers_no_end_of_row", OUTSIDE, LOAD, LOAD.replace("col < n_cols", "True")),
    # What is not there is taken as it lies in the registers.
    ("registers_pieces_never_filled", "uninitialised", "values[v, k] = MINUS_INF", "pass"),
    # exp(0 − m) is not 0, and 0 may be above all numbers of the row.
    ("registers_padded_with_zero", "wrong values in y", "values[v, k] = MINUS_INF",
     "values[v, k] = np.float32(0)"),
    ("registers_steps_of_one", "misaligned", LOAD,
     LOAD.replace("(32 * v + lane) * WIDTH", "32 * v + lane"), STORE,
     STORE.replace("(32 * v + lane) * WIDTH", "32 * v + lane")),
    # Each lane takes a chapter of its own: the same pieces, from twice as many sectors a request.
    ("registers_in_chapters", "touch \\d+ sectors of x", LOAD,
     LOAD.replace("32 * v + lane", "VECTORS * lane + v"), STORE,
     STORE.replace("32 * v + lane", "VECTORS * lane + v")),
    # One piece for each lane, however long the row is.
    ("registers_first_pieces_only", r"never written|read|wrong values", "    values = cuda",
     "    VECTORS = 1\n    values = cuda"),
    # Each lane subtracts its own maximum: their sums do not belong together.
    ("registers_own_maximum_only", "wrong values in y", "m, s = MINUS_INF",
     "m, s = np.float32(-3.4e38)", "        m = warp_max(m)\n", ""),
    ("registers_sum_of_a_lane", "wrong values in y", "        s = warp_sum(s)\n", ""),
    ("registers_no_last_row", OUTSIDE, "if start < x.size:", "if True:"),
    ("registers_in_float64", "float64-promotion", registers_reciprocal_and_grid_stride,
     "m, s = LOWEST, ZERO", "m, s = LOWEST, 0.0"))


@wrong("softmax_registers", "more than one thread")
@cuda.jit
def registers_every_lane_all(x, y, n_cols):
    start = cuda.grid(1) // 32 * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for col in range(n_cols):
            m = max(m, x[start + col])
        for col in range(n_cols):
            s += math.exp(x[start + col] - m)
        for col in range(n_cols):
            y[start + col] = math.exp(x[start + col] - m) / s


# ---- softmax_teams(x, y, team) ---------------------------------------------------------------


@cuda.jit(device=True)
def max_of(value, team):
    step = team // 2
    while step > 0:
        value = max(value, cuda.shfl_xor_sync(ALL, value, step))
        step //= 2
    return value


@cuda.jit(device=True)
def sum_of(value, team):
    step = team // 2
    while step > 0:
        value += cuda.shfl_xor_sync(ALL, value, step)
        step //= 2
    return value


@right("softmax_teams")
@cuda.jit
def teams_two_loops(x, y, team):
    # Nothing is held: the row is read three times.
    thread = cuda.grid(1)
    row, rank = thread // team, thread % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    m, s = LOWEST, ZERO
    for col in range(rank, n_cols, team):
        m = max(m, x[row, col])
    m = max_of(m, team)
    for col in range(rank, n_cols, team):
        s += math.exp(x[row, col] - m)
    s = sum_of(s, team)
    for col in range(rank, n_cols, team):
        y[row, col] = math.exp(x[row, col] - m) / s


@right("softmax_teams")
@cuda.jit
def teams_of_neighbours(x, y, team):
    # A lane takes a run of columns, not every team-th: other sectors, the same result.
    values = cuda.local.array(SLOTS, np.float32)
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    m, s = LOWEST, ZERO
    for k in range(SLOTS):
        col = rank * SLOTS + k
        values[k] = x[row, col] if col < n_cols else MINUS_INF
        m = max(m, values[k])
    m = max_of(m, team)
    for k in range(SLOTS):
        s += math.exp(values[k] - m)
    factor = ONE / sum_of(s, team)
    for k in range(SLOTS):
        if rank * SLOTS + k < n_cols:
            y[row, rank * SLOTS + k] = math.exp(values[k] - m) * factor


@wrong("softmax_teams", "should share the work|threads (read|write);")
@cuda.jit
def teams_first_lane_alone(x, y, team):
    # No shuffles at all: a thread per row, and its team mates look on.
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    if row < x.shape[0] and rank == 0:
        m, s = MINUS_INF, ZERO
        for col in range(x.shape[1]):
            m = max(m, x[row, col])
        for col in range(x.shape[1]):
            s += math.exp(x[row, col] - m)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - m) / s


mistakes("softmax_teams",
    # Not all lanes of a warp take part in its shuffles.
    ("teams_without_a_row_leave", "shuffle|lanes", "    m = team_max",
     "    if row < x.shape[0]:\n        m = team_max", "    s = team_sum",
     "    if row < x.shape[0]:\n        s = team_sum"),
    ("teams_sum_over_the_warp", "wrong values in y", teams_two_loops, "sum_of(s, team)",
     "warp_sum(s)"),
    # The largest of several rows: a row far below it becomes 0 / 0.
    ("teams_maximum_over_the_warp", "NaN was computed", teams_two_loops, "max_of(m, team)",
     "warp_max(m)"),
    ("teams_row_of_a_warp", "more than one thread", teams_two_loops, "thread // team",
     "thread // 32"),
    ("teams_row_within_the_block", "more than one thread|never written|wrong values",
     teams_two_loops, "cuda.grid(1)", "cuda.threadIdx.x"),
    ("teams_no_guard", OUTSIDE, teams_two_loops, "x.shape[1] if row < x.shape[0] else 0",
     "x.shape[1]"),
    ("teams_no_maximum", "NaN was computed|overflow", "math.exp(values[k] - m)",
     "math.exp(values[k])"),
    ("teams_no_end_of_row", OUTSIDE, "x[row, col] if col < n_cols",
     "x[row, col] if row < x.shape[0]"),
    ("teams_half_a_tree", "wrong values in y", teams_two_loops, "sum_of(s, team)",
     "sum_of(s, team // 2)"))


# ---- blocks_per_multiprocessor(n_threads, n_registers) ---------------------------------------


@right("blocks_per_multiprocessor")
def blocks_by_addition(n_threads, n_registers):
    warps = (n_threads + 31) // 32
    for_a_warp = 32 * ((n_registers + 7) // 8 * 8)
    blocks = 0
    while (blocks + 1) * warps <= min(64, 16384 // for_a_warp * 4) and blocks < 32:
        blocks += 1
    return blocks


@right("blocks_per_multiprocessor")
def blocks_in_threads(n_threads, n_registers):
    threads = n_threads + -n_threads % 32
    registers = n_registers + -n_registers % 8
    by_registers = 128 * (512 // registers) // threads
    return int(min(by_registers, 2048 / threads, 32))


mistakes("blocks_per_multiprocessor",
    ("blocks_registers_exact", "wrong values in blocks", "math.ceil(n_registers / 8) * 8",
     "n_registers"),
    ("blocks_threads_exact", "wrong values in blocks", "math.ceil(n_threads / 32)",
     "n_threads / 32"),
    # All 65,536 registers in one heap, not in four parts.
    ("blocks_one_pool", "wrong values in blocks", "4 * (16384 // (32 * per_thread))",
     "65536 // (32 * per_thread)"),
    ("blocks_without_the_third_rule", "wrong values in blocks", "64 // n_warps, 32",
     "64 // n_warps"),
    ("blocks_without_registers", "wrong values in blocks", "room // n_warps, ", ""),
    ("blocks_without_threads", "wrong values in blocks", "64 // n_warps, ", ""),
    ("blocks_as_warps", "wrong values in blocks", "return min", "return n_warps * min"),
    ("blocks_not_whole", "wrong values in blocks", "room // n_warps, 64 // n_warps",
     "room / n_warps, 64 / n_warps"),
    ("blocks_no_return", "is the return missing", "return ", ""))


# ---- softmax_backward(dy, y, dx) -------------------------------------------------------------


@right("softmax_backward")
@cuda.jit
def backward_block_of_shuffles(dy, y, dx):
    # Grid-stride over rows, the five shuffles written out.
    lane = cuda.threadIdx.x % 32
    row = cuda.grid(1) // 32
    while row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            total += dy[row, col] * y[row, col]
        for k in range(5):
            total += cuda.shfl_xor_sync(ALL, total, 1 << k)
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = (dy[row, col] - total) * y[row, col]
        row += cuda.gridsize(1) // 32


@right("softmax_backward")
@cuda.jit
def backward_through_dx(dy, y, dx):
    # dx holds the products until their sum is known.
    lane, n_warps = cuda.laneid, cuda.gridsize(1) // 32
    for row in range(cuda.grid(1) // 32, y.shape[0], n_warps):
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * dy[row, col]
            total += dx[row, col]
        total = warp_sum(total)
        for col in range(lane, y.shape[1], 32):
            dx[row, col] -= y[row, col] * total


@wrong("softmax_backward", "never written")
@cuda.jit
def backward_in_nine_registers(dy, y, dx):
    terms = cuda.local.array(9, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for k in range(9):
            col = 32 * k + lane
            terms[k] = y[row, col] * dy[row, col] if col < y.shape[1] else ZERO
            total += terms[k]
        total = warp_sum(total)
        for k in range(9):
            col = 32 * k + lane
            if col < y.shape[1]:
                dx[row, col] = terms[k] - y[row, col] * total


@wrong("softmax_backward", "should share the work")
@cuda.jit
def backward_thread_per_row(dy, y, dx):
    thread = cuda.grid(1)
    if thread % 32 == 0 and thread // 32 < y.shape[0]:
        row = thread // 32
        total = ZERO
        for col in range(y.shape[1]):
            total += y[row, col] * dy[row, col]
        for col in range(y.shape[1]):
            dx[row, col] = y[row, col] * (dy[row, col] - total)


mistakes("softmax_backward",
    # As if each y depended on its own x alone: the sigmoid's derivative.
    ("backward_diagonal_only", "wrong values in dx", "(dy[row, col] - total)",
     "dy[row, col] * (np.float32(1) - y[row, col])"),
    ("backward_without_the_sum", "wrong values in dx", "(dy[row, col] - total)", "dy[row, col]"),
    # The sum must be weighted by y.
    ("backward_mean_of_dy", "wrong values in dx", "y[row, col] * dy[row, col]", "dy[row, col]",
     "warp_sum(total)", "warp_sum(total) / np.float32(y.shape[1])"),
    ("backward_sum_of_a_lane", "wrong values in dx", "        total = warp_sum(total)\n", ""),
    ("backward_sum_in_lane_0_only", "wrong values in dx", backward_block_of_shuffles,
     "shfl_xor_sync", "shfl_down_sync"),
    ("backward_wrong_sign", "wrong sign|wrong values in dx", "dy[row, col] - total",
     "total - dy[row, col]"),
    ("backward_y_left_out", "wrong values in dx", "y[row, col] * (dy[row, col] - total)",
     "dy[row, col] - y[row, col] * total"),
    ("backward_no_guard", OUTSIDE, "if row < y.shape[0]:", "if True:"),
    ("backward_in_place", "changes its input dy", "total += y[row, col] * dy[row, col]",
     "dy[row, col] *= y[row, col]\n            total += dy[row, col]",
     "y[row, col] * (dy[row, col] - total)", "dy[row, col] - y[row, col] * total"),
    ("backward_sums_inside_the_loop", "shuffle|lanes", "y[row, col] * dy[row, col]",
     "warp_sum(y[row, col] * dy[row, col])", "        total = warp_sum(total)\n", ""))


# ---- softmax_function(compute_y, compute_dx) -------------------------------------------------


@right("softmax_function")
def function_with_setup_context(compute_y, compute_dx):
    # The newer form, in which forward has no ctx.
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return compute_y(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensors
            return compute_dx(dy, y)

    return Softmax.apply


@right("softmax_function")
def function_saves_both(compute_y, compute_dx):
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = compute_y(x)
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, dy):
            _, y = ctx.saved_tensors
            return compute_dx(dy.contiguous(), y)

    return lambda x: Softmax.apply(x)


@right("softmax_function")
def function_passes_launchers(compute_y, compute_dx):
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward, backward):
            y = forward(x)
            ctx.save_for_backward(y)
            ctx.run_back = backward
            return y

        @staticmethod
        def backward(ctx, dy):
            return ctx.run_back(dy, *ctx.saved_tensors), None, None

    return lambda x: Softmax.apply(x, compute_y, compute_dx)


mistakes("softmax_function",
    ("function_saves_x", "wrong values in dx", "save_for_backward(y)", "save_for_backward(x)"),
    ("function_swaps_arguments", "wrong values in dx", "compute_dx(dy, *ctx.saved_tensors)",
     "compute_dx(*ctx.saved_tensors, dy)"),
    # A variable outside ctx holds one y: that of the latest call.
    ("function_keeps_the_last_y", "wrong values in dx", "    class", "    kept = []\n\n    class",
     "ctx.save_for_backward(y)", "kept[:] = [y]", "*ctx.saved_tensors", "*kept"),
    ("function_saves_nothing", "not enough|expected|argument|ValueError|TypeError",
     "            ctx.save_for_backward(y)\n", ""),
    ("function_returns_no_gradient", "compute_dx was called 0 times|no gradient",
     "return compute_dx", "compute_dx"),
    ("function_of_pytorch", "compute_y was called 0 times", "return Softmax.apply",
     "return lambda x: torch.softmax(x, -1)"),
    ("function_without_a_class", "knows no gradient", "return Softmax.apply", "return compute_y"),
    ("function_passes_dy_on", "compute_dx was called 0 times", "compute_dx(dy, *ctx.saved_tensors)",
     "dy"),
    ("function_ignores_dy", "wrong values in dx", "compute_dx(dy,",
     "compute_dx(torch.ones_like(dy),"),
    ("function_computes_again", "compute_y was called 4 times", "save_for_backward(y)",
     "save_for_backward(x)", "*ctx.saved_tensors", "compute_y(*ctx.saved_tensors)"),
    ("function_no_return", "something to call|NoneType", "return Softmax.apply", "Softmax.apply"))
