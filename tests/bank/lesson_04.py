"""Lesson 04: loads in flight, softmax in registers and by teams, its gradient, autograd.

The messages about shuffles, races and memory outside an array are the sanitizer's own.
"""

import math

import numpy as np
import torch

from bank import right, wrong
from course_lib import cuda
from course_lib.runtime.intrinsics import load_vector, store_vector, warp_max, warp_sum

OUTSIDE = "out-of-bounds"
ALL = 0xFFFFFFFF
MINUS_INF = np.float32(-np.inf)
LOWEST = np.float32(-3.4e38)
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


@wrong("bytes_in_flight", "wrong values in per_multiprocessor")
def flight_divides(gbps, latency_ns, n_multiprocessors, n_threads):
    share = gbps / latency_ns / n_multiprocessors
    return share, share / n_threads


@wrong("bytes_in_flight", "wrong values in per_multiprocessor")
def flight_of_the_chip(gbps, latency_ns, n_multiprocessors, n_threads):
    return gbps * latency_ns, gbps * latency_ns / n_threads


@wrong("bytes_in_flight", "wrong values in per_thread")
def flight_thread_of_the_chip(gbps, latency_ns, n_multiprocessors, n_threads):
    share = gbps * latency_ns / n_multiprocessors
    return share, gbps * latency_ns / n_threads


@wrong("bytes_in_flight", "wrong values in per_multiprocessor")
def flight_gigabytes_of_bits(gbps, latency_ns, n_multiprocessors, n_threads):
    share = gbps * latency_ns / n_multiprocessors / 8
    return share, share / n_threads


@wrong("bytes_in_flight", "wrong values in per_multiprocessor")
def flight_other_way_round(gbps, latency_ns, n_multiprocessors, n_threads):
    share = gbps * latency_ns / n_multiprocessors
    return share / n_threads, share


@wrong("bytes_in_flight", "wrong values in per_multiprocessor")
def flight_whole_bytes(gbps, latency_ns, n_multiprocessors, n_threads):
    share = gbps * latency_ns // n_multiprocessors
    return share, share / n_threads


@wrong("bytes_in_flight", "it returned a float")
def flight_one_number(gbps, latency_ns, n_multiprocessors, n_threads):
    return gbps * latency_ns / n_multiprocessors


@wrong("bytes_in_flight", "is the return missing")
def flight_no_return(gbps, latency_ns, n_multiprocessors, n_threads):
    share = gbps * latency_ns / n_multiprocessors
    share / n_threads


# ---- softmax_registers(x, y, n_cols) ---------------------------------------------------------


@right("softmax_registers")
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


@right("softmax_registers")
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


@wrong("softmax_registers", "NaN was computed|overflow")
@cuda.jit
def registers_no_maximum(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        s = ZERO
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = MINUS_INF
            if (32 * v + lane) * WIDTH < n_cols:
                load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k])
                s += values[v, k]
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            if (32 * v + lane) * WIDTH < n_cols:
                store_vector(y, start + (32 * v + lane) * WIDTH, values[v])


@wrong("softmax_registers", OUTSIDE)
@cuda.jit
def registers_no_end_of_row(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for v in range(VECTORS):
            load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            if (32 * v + lane) * WIDTH < n_cols:
                store_vector(y, start + (32 * v + lane) * WIDTH, values[v])


@wrong("softmax_registers", "uninitialised")
@cuda.jit
def registers_pieces_never_filled(x, y, n_cols):
    # What is not there is taken as it lies in the registers.
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for v in range(VECTORS):
            if (32 * v + lane) * WIDTH < n_cols:
                load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
        for v in range(VECTORS):
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            if (32 * v + lane) * WIDTH < n_cols:
                store_vector(y, start + (32 * v + lane) * WIDTH, values[v])


@wrong("softmax_registers", "wrong values in y")
@cuda.jit
def registers_padded_with_zero(x, y, n_cols):
    # exp(0 − m) is not 0, and 0 may be above all numbers of the row.
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = ZERO
            if (32 * v + lane) * WIDTH < n_cols:
                load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            if (32 * v + lane) * WIDTH < n_cols:
                store_vector(y, start + (32 * v + lane) * WIDTH, values[v])


@wrong("softmax_registers", "misaligned")
@cuda.jit
def registers_steps_of_one(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = MINUS_INF
            if 32 * v + lane < n_cols:
                load_vector(values[v], x, start + 32 * v + lane)
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            if 32 * v + lane < n_cols:
                store_vector(y, start + 32 * v + lane, values[v])


@wrong("softmax_registers", r"never written|read|wrong values")
@cuda.jit
def registers_first_pieces_only(x, y, n_cols):
    values = cuda.local.array(WIDTH, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for k in range(WIDTH):
            values[k] = MINUS_INF
        if lane * WIDTH < n_cols:
            load_vector(values, x, start + lane * WIDTH)
        for k in range(WIDTH):
            m = max(m, values[k])
        m = warp_max(m)
        for k in range(WIDTH):
            values[k] = math.exp(values[k] - m)
            s += values[k]
        s = warp_sum(s)
        for k in range(WIDTH):
            values[k] /= s
        if lane * WIDTH < n_cols:
            store_vector(y, start + lane * WIDTH, values)


@wrong("softmax_registers", "wrong values in y")
@cuda.jit
def registers_own_maximum_only(x, y, n_cols):
    # Each lane subtracts its own maximum: their sums do not belong together.
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = LOWEST, ZERO
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = MINUS_INF
            if (32 * v + lane) * WIDTH < n_cols:
                load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
            for k in range(WIDTH):
                m = max(m, values[v, k])
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            if (32 * v + lane) * WIDTH < n_cols:
                store_vector(y, start + (32 * v + lane) * WIDTH, values[v])


@wrong("softmax_registers", "wrong values in y")
@cuda.jit
def registers_sum_of_a_lane(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, ZERO
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = MINUS_INF
            if (32 * v + lane) * WIDTH < n_cols:
                load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            if (32 * v + lane) * WIDTH < n_cols:
                store_vector(y, start + (32 * v + lane) * WIDTH, values[v])


@wrong("softmax_registers", OUTSIDE)
@cuda.jit
def registers_no_last_row(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    m, s = MINUS_INF, ZERO
    for v in range(VECTORS):
        for k in range(WIDTH):
            values[v, k] = MINUS_INF
        if (32 * v + lane) * WIDTH < n_cols:
            load_vector(values[v], x, start + (32 * v + lane) * WIDTH)
        for k in range(WIDTH):
            m = max(m, values[v, k])
    m = warp_max(m)
    for v in range(VECTORS):
        for k in range(WIDTH):
            values[v, k] = math.exp(values[v, k] - m)
            s += values[v, k]
    s = warp_sum(s)
    for v in range(VECTORS):
        for k in range(WIDTH):
            values[v, k] /= s
        if (32 * v + lane) * WIDTH < n_cols:
            store_vector(y, start + (32 * v + lane) * WIDTH, values[v])


@wrong("softmax_registers", "float64-promotion")
@cuda.jit
def registers_in_float64(x, y, n_cols):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, 0.0
        for col in range(lane, n_cols, 32):
            m = max(m, x[start + col])
        m = warp_max(m)
        for col in range(lane, n_cols, 32):
            s += math.exp(x[start + col] - m)
        s = warp_sum(s)
        for col in range(lane, n_cols, 32):
            y[start + col] = math.exp(x[start + col] - m) / s


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


@right("softmax_teams")
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


@wrong("softmax_teams", "shuffle|lanes")
@cuda.jit
def teams_without_a_row_leave(x, y, team):
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    if row < x.shape[0]:
        m, s = LOWEST, ZERO
        for col in range(rank, x.shape[1], team):
            m = max(m, x[row, col])
        m = max_of(m, team)
        for col in range(rank, x.shape[1], team):
            s += math.exp(x[row, col] - m)
        s = sum_of(s, team)
        for col in range(rank, x.shape[1], team):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_teams", "wrong values in y")
@cuda.jit
def teams_sum_over_the_warp(x, y, team):
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    m, s = LOWEST, ZERO
    for col in range(rank, n_cols, team):
        m = max(m, x[row, col])
    m = max_of(m, team)
    for col in range(rank, n_cols, team):
        s += math.exp(x[row, col] - m)
    s = warp_sum(s)
    for col in range(rank, n_cols, team):
        y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_teams", "NaN was computed")
@cuda.jit
def teams_maximum_over_the_warp(x, y, team):
    # The largest of several rows: a row far below it becomes 0 / 0.
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    m, s = LOWEST, ZERO
    for col in range(rank, n_cols, team):
        m = max(m, x[row, col])
    m = warp_max(m)
    for col in range(rank, n_cols, team):
        s += math.exp(x[row, col] - m)
    s = sum_of(s, team)
    for col in range(rank, n_cols, team):
        y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_teams", "more than one thread")
@cuda.jit
def teams_row_of_a_warp(x, y, team):
    row, rank = cuda.grid(1) // 32, cuda.grid(1) % team
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


@wrong("softmax_teams", "more than one thread|never written|wrong values")
@cuda.jit
def teams_row_within_the_block(x, y, team):
    row, rank = cuda.threadIdx.x // team, cuda.threadIdx.x % team
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


@wrong("softmax_teams", OUTSIDE)
@cuda.jit
def teams_no_guard(x, y, team):
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    m, s = LOWEST, ZERO
    for col in range(rank, x.shape[1], team):
        m = max(m, x[row, col])
    m = max_of(m, team)
    for col in range(rank, x.shape[1], team):
        s += math.exp(x[row, col] - m)
    s = sum_of(s, team)
    for col in range(rank, x.shape[1], team):
        y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_teams", "NaN was computed|overflow")
@cuda.jit
def teams_no_maximum(x, y, team):
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    s = ZERO
    for col in range(rank, n_cols, team):
        s += math.exp(x[row, col])
    s = sum_of(s, team)
    for col in range(rank, n_cols, team):
        y[row, col] = math.exp(x[row, col]) / s


@wrong("softmax_teams", OUTSIDE)
@cuda.jit
def teams_no_end_of_row(x, y, team):
    values = cuda.local.array(SLOTS, np.float32)
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    m, s = LOWEST, ZERO
    for k in range(SLOTS):
        values[k] = x[row, k * team + rank] if row < x.shape[0] else MINUS_INF
        m = max(m, values[k])
    m = max_of(m, team)
    for k in range(SLOTS):
        s += math.exp(values[k] - m)
    s = sum_of(s, team)
    for k in range(SLOTS):
        if row < x.shape[0] and k * team + rank < x.shape[1]:
            y[row, k * team + rank] = math.exp(values[k] - m) / s


@wrong("softmax_teams", "wrong values in y")
@cuda.jit
def teams_half_a_tree(x, y, team):
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    m, s = LOWEST, ZERO
    for col in range(rank, n_cols, team):
        m = max(m, x[row, col])
    m = max_of(m, team)
    for col in range(rank, n_cols, team):
        s += math.exp(x[row, col] - m)
    s = sum_of(s, team // 2)
    for col in range(rank, n_cols, team):
        y[row, col] = math.exp(x[row, col] - m) / s


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


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_registers_exact(n_threads, n_registers):
    warps = math.ceil(n_threads / 32)
    return min(4 * (16384 // (32 * n_registers)) // warps, 64 // warps, 32)


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_threads_exact(n_threads, n_registers):
    per_thread = math.ceil(n_registers / 8) * 8
    return min(65536 // (n_threads * per_thread), 2048 // n_threads, 32)


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_one_pool(n_threads, n_registers):
    # All 65,536 registers in one heap, not in four parts.
    warps = math.ceil(n_threads / 32)
    per_thread = math.ceil(n_registers / 8) * 8
    return min(65536 // (32 * per_thread) // warps, 64 // warps, 32)


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_without_the_third_rule(n_threads, n_registers):
    warps = math.ceil(n_threads / 32)
    per_thread = math.ceil(n_registers / 8) * 8
    return min(4 * (16384 // (32 * per_thread)) // warps, 64 // warps)


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_without_registers(n_threads, n_registers):
    return min(64 // math.ceil(n_threads / 32), 32)


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_without_threads(n_threads, n_registers):
    warps = math.ceil(n_threads / 32)
    per_thread = math.ceil(n_registers / 8) * 8
    return min(4 * (16384 // (32 * per_thread)) // warps, 32)


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_as_warps(n_threads, n_registers):
    warps = math.ceil(n_threads / 32)
    per_thread = math.ceil(n_registers / 8) * 8
    return warps * min(4 * (16384 // (32 * per_thread)) // warps, 64 // warps, 32)


@wrong("blocks_per_multiprocessor", "wrong values in blocks")
def blocks_not_whole(n_threads, n_registers):
    warps = math.ceil(n_threads / 32)
    per_thread = math.ceil(n_registers / 8) * 8
    return min(4 * (16384 // (32 * per_thread)) / warps, 64 / warps, 32)


@wrong("blocks_per_multiprocessor", "is the return missing")
def blocks_no_return(n_threads, n_registers):
    min(64 // math.ceil(n_threads / 32), 32)


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
def backward_in_registers(dy, y, dx):
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


@right("softmax_backward")
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


@wrong("softmax_backward", "wrong values in dx")
@cuda.jit
def backward_diagonal_only(dy, y, dx):
    # As if each y depended on its own x alone: the sigmoid's derivative.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = dy[row, col] * y[row, col] * (ONE - y[row, col])


@wrong("softmax_backward", "wrong values in dx")
@cuda.jit
def backward_without_the_sum(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * dy[row, col]


@wrong("softmax_backward", "wrong values in dx")
@cuda.jit
def backward_mean_of_dy(dy, y, dx):
    # The sum must be weighted by y.
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            total += dy[row, col]
        total = warp_sum(total) / np.float32(y.shape[1])
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * (dy[row, col] - total)


@wrong("softmax_backward", "wrong values in dx")
@cuda.jit
def backward_sum_of_a_lane(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            total += y[row, col] * dy[row, col]
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * (dy[row, col] - total)


@wrong("softmax_backward", "wrong values in dx")
@cuda.jit
def backward_sum_in_lane_0_only(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            total += y[row, col] * dy[row, col]
        for k in range(5):
            total += cuda.shfl_down_sync(ALL, total, 16 >> k)
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * (dy[row, col] - total)


@wrong("softmax_backward", "wrong sign|wrong values in dx")
@cuda.jit
def backward_wrong_sign(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            total += y[row, col] * dy[row, col]
        total = warp_sum(total)
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * (total - dy[row, col])


@wrong("softmax_backward", "wrong values in dx")
@cuda.jit
def backward_y_left_out(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            total += y[row, col] * dy[row, col]
        total = warp_sum(total)
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = dy[row, col] - y[row, col] * total


@wrong("softmax_backward", OUTSIDE)
@cuda.jit
def backward_no_guard(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    total = ZERO
    for col in range(lane, y.shape[1], 32):
        total += y[row, col] * dy[row, col]
    total = warp_sum(total)
    for col in range(lane, y.shape[1], 32):
        dx[row, col] = y[row, col] * (dy[row, col] - total)


@wrong("softmax_backward", "changes its input dy")
@cuda.jit
def backward_in_place(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            dy[row, col] *= y[row, col]
            total += dy[row, col]
        total = warp_sum(total)
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = dy[row, col] - y[row, col] * total


@wrong("softmax_backward", "shuffle|lanes")
@cuda.jit
def backward_sums_inside_the_loop(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = ZERO
        for col in range(lane, y.shape[1], 32):
            total += warp_sum(y[row, col] * dy[row, col])
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * (dy[row, col] - total)


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


def _function(forward, backward):
    """An autograd function made of two plain ones."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Softmax", (torch.autograd.Function,), parts).apply


@wrong("softmax_function", "wrong values in dx")
def function_saves_x(compute_y, compute_dx):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return compute_y(x)

    return _function(forward, lambda ctx, dy: compute_dx(dy, *ctx.saved_tensors))


@wrong("softmax_function", "wrong values in dx")
def function_swaps_arguments(compute_y, compute_dx):
    def forward(ctx, x):
        y = compute_y(x)
        ctx.save_for_backward(y)
        return y

    return _function(forward, lambda ctx, dy: compute_dx(*ctx.saved_tensors, dy))


@wrong("softmax_function", "wrong values in dx")
def function_keeps_the_last_y(compute_y, compute_dx):
    # A variable outside ctx holds one y: that of the latest call.
    kept = []

    def forward(ctx, x):
        kept[:] = [compute_y(x)]
        return kept[0]

    return _function(forward, lambda ctx, dy: compute_dx(dy, kept[0]))


@wrong("softmax_function", "not enough|expected|argument|ValueError|TypeError")
def function_saves_nothing(compute_y, compute_dx):
    return _function(
        lambda ctx, x: compute_y(x), lambda ctx, dy: compute_dx(dy, *ctx.saved_tensors)
    )


@wrong("softmax_function", "compute_dx was called 0 times|no gradient")
def function_returns_no_gradient(compute_y, compute_dx):
    def forward(ctx, x):
        y = compute_y(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        compute_dx(dy, *ctx.saved_tensors)

    return _function(forward, backward)


@wrong("softmax_function", "compute_y was called 0 times")
def function_of_pytorch(compute_y, compute_dx):
    return lambda x: torch.softmax(x, -1)


@wrong("softmax_function", "knows no gradient")
def function_without_a_class(compute_y, compute_dx):
    return compute_y


@wrong("softmax_function", "compute_dx was called 0 times")
def function_passes_dy_on(compute_y, compute_dx):
    return _function(lambda ctx, x: compute_y(x), lambda ctx, dy: dy)


@wrong("softmax_function", "wrong values in dx")
def function_ignores_dy(compute_y, compute_dx):
    def forward(ctx, x):
        y = compute_y(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return compute_dx(torch.ones_like(y), y)

    return _function(forward, backward)


@wrong("softmax_function", "compute_y was called 4 times")
def function_computes_again(compute_y, compute_dx):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return compute_y(x)

    return _function(forward, lambda ctx, dy: compute_dx(dy, compute_y(*ctx.saved_tensors)))


@wrong("softmax_function", "something to call|NoneType")
def function_no_return(compute_y, compute_dx):
    _function(lambda ctx, x: compute_y(x), lambda ctx, dy: dy)
