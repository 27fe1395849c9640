"""Wrong answers of lessons 5 to 7 by somebody who knew no more than the lessons."""

import math

import numpy as np

from bank import wrong
from course_lib import cuda
from course_lib.runtime.intrinsics import online_add, warp_online, warp_sum
from course_lib.teach.exercises.lesson_05 import kept

ZERO = np.float32(0)
ONE = np.float32(1)
THREE = np.float32(3)
SIX = np.float32(6)
MINUS_INF = np.float32(-np.inf)
IGNORED = -100

# ---- cross_entropy -------------------------------------------------------------------------------


@wrong("cross_entropy", r"m\[0\] and m\[2\] were never written")
@cuda.jit
def entropy_ignored_leave(logits, target, loss, m, s):
    thread = cuda.grid(1)
    row, lane = thread // 32, thread % 32
    if row >= logits.shape[0]:
        return
    label = target[row]
    if label == IGNORED:
        return
    top, mass = MINUS_INF, ZERO
    col = lane
    while col < logits.shape[1]:
        top, mass = online_add(top, mass, logits[row, col])
        col += 32
    top, mass = warp_online(top, mass)
    if lane == 0:
        m[row] = top
        s[row] = mass
        loss[row] = (top - logits[row, label]) + math.log(mass)


@wrong("cross_entropy", "wrong values in loss")
@cuda.jit
def entropy_rounds_first(logits, target, loss, m, s):
    row = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // 32
    lane = cuda.threadIdx.x & 31
    if row < logits.shape[0]:
        top, mass = MINUS_INF, ZERO
        for col in range(lane, logits.shape[1], 32):
            top, mass = online_add(top, mass, logits[row, col])
        top, mass = warp_online(top, mass)
        if lane > 0:
            return
        m[row], s[row] = top, mass
        label = target[row]
        if label == IGNORED:
            loss[row] = ZERO
        else:
            lse = top + math.log(mass)
            loss[row] = lse - logits[row, label]


@cuda.jit(device=True)
def share_of(logits, row, lane):
    largest, total = MINUS_INF, ZERO
    for col in range(lane, logits.shape[1], 32):
        largest, total = online_add(largest, total, logits[row, col])
    return largest, total


@wrong("cross_entropy", "shuffle-inactive-lane in line .*warp_online")
@cuda.jit
def entropy_butterfly_of_one(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.grid(1) % 32
    if row >= target.size:
        return
    largest, total = share_of(logits, row, lane)
    if lane == 0:
        largest, total = warp_online(largest, total)
        m[row], s[row] = largest, total
        if target[row] != IGNORED:
            loss[row] = math.log(total) + (largest - logits[row, target[row]])
        else:
            loss[row] = ZERO


# ---- softmax_dropout_backward --------------------------------------------------------------------


@cuda.jit(device=True)
def through_dropout(dz, row, col, seed, p, factor):
    return dz[row, col] * factor if kept(col, seed, p) else ZERO


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_mask_by_column(dz, x, m, s, p, seed, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row >= x.shape[0]:
        return
    factor = ONE / (ONE - p)
    top, mass, total = m[row], s[row], ZERO
    for col in range(lane, x.shape[1], 32):
        total += math.exp(x[row, col] - top) / mass * through_dropout(dz, row, col, seed, p, factor)
    total = warp_sum(total)
    for col in range(lane, x.shape[1], 32):
        y = math.exp(x[row, col] - top) / mass
        dx[row, col] = y * (through_dropout(dz, row, col, seed, p, factor) - total)


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_dropped_get_none(dz, x, m, s, p, seed, dx):
    thread = cuda.grid(1)
    row, lane, n_cols = thread // 32, thread % 32, x.shape[1]
    if row < x.shape[0]:
        scale = ONE / (ONE - p)
        total = ZERO
        col = lane
        while col < n_cols:
            if kept(row * n_cols + col, seed, p):
                total += math.exp(x[row, col] - m[row]) / s[row] * (dz[row, col] * scale)
            col += 32
        total = warp_sum(total)
        col = lane
        while col < n_cols:
            if kept(row * n_cols + col, seed, p):
                y = math.exp(x[row, col] - m[row]) / s[row]
                dx[row, col] = y * (dz[row, col] * scale - total)
            else:
                dx[row, col] = ZERO
            col += 32


@cuda.jit(device=True)
def probability(score, top, mass):
    return math.exp(score - top) / mass


@wrong("softmax_dropout_backward", "wrong values in dx")
@cuda.jit
def dropout_lost_factor(dz, x, m, s, p, seed, dx):
    n_rows, n_cols = x.shape
    row = cuda.grid(1) // 32
    if row >= n_rows:
        return
    lane = cuda.threadIdx.x % 32
    begin, total = row * n_cols, ZERO
    for col in range(lane, n_cols, 32):
        if not kept(begin + col, seed, p):
            continue
        y = probability(x[row, col], m[row], s[row])
        total += y * dz[row, col]
    total = warp_sum(total)
    factor = ONE / (ONE - p)
    for col in range(lane, n_cols, 32):
        dy = ZERO
        if kept(begin + col, seed, p):
            dy = factor * dz[row, col]
        dx[row, col] = probability(x[row, col], m[row], s[row]) * (dy - total)


# ---- squeeze -------------------------------------------------------------------------------------


@wrong("squeeze", "exited-before-barrier in line .*`return`")
@cuda.jit
def squeeze_lanes_leave(x, mean):
    partial = cuda.shared.array((8, 32), np.float32)
    warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    picture, channel = cuda.blockIdx.x, cuda.blockIdx.y * 32 + lane
    if channel >= x.shape[2]:
        return
    n_warps, pixels = cuda.blockDim.x // 32, x.shape[1]
    mine = ZERO
    pixel = warp
    while pixel < pixels:
        mine += x[picture, pixel, channel]
        pixel += n_warps
    partial[warp, lane] = mine
    cuda.syncthreads()
    if warp == 0:
        for other in range(1, n_warps):
            mine += partial[other, lane]
        mean[picture, channel] = mine / np.float32(pixels)


@cuda.jit(device=True)
def share(x, n, c, first, step):
    found = ZERO
    if c < x.shape[2]:
        for p in range(first, x.shape[1], step):
            found += x[n, p, c]
    return found


@wrong("squeeze", "uninitialised-read in line .*`total [+]= board.32 . k [+] lane.`")
@cuda.jit
def squeeze_eight_warps(x, mean):
    board = cuda.shared.array(256, np.float32)
    t = cuda.threadIdx.x
    lane = t & 31
    n, c = cuda.blockIdx.x, lane + 32 * cuda.blockIdx.y
    board[t] = share(x, n, c, t // 32, cuda.blockDim.x // 32)
    cuda.syncthreads()
    if t < 32 and c < x.shape[2]:
        total = ZERO
        for k in range(8):
            total += board[32 * k + lane]
        mean[n, c] = total / np.float32(x.shape[1])


@wrong("squeeze", "wrong values in mean")
@cuda.jit
def squeeze_mean_of_means(x, mean):
    partial = cuda.shared.array((8, 32), np.float32)
    P, C = x.shape[1:]
    warp, lane, n_warps = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32, cuda.blockDim.x // 32
    n, c = cuda.blockIdx.x, 32 * cuda.blockIdx.y + lane
    total, count = ZERO, ZERO
    if c < C:
        for p in range(warp, P, n_warps):
            total += x[n, p, c]
            count += ONE
    if count > ZERO:
        partial[warp, lane] = total / count
    else:
        partial[warp, lane] = ZERO
    cuda.syncthreads()
    if warp > 0 or c >= C:
        return
    whole = ZERO
    for k in range(n_warps):
        whole += partial[k, lane]
    mean[n, c] = whole / np.float32(min(n_warps, P))


# ---- hard_gate_backward --------------------------------------------------------------------------


@cuda.jit(device=True)
def through_gate(z, about_gate):
    if z < -THREE or z > THREE:
        return ZERO
    return about_gate / SIX


@wrong("hard_gate_backward", r"wrong values in dlogit[\s\S]*where +logit\[.*= -?3.0")
@cuda.jit
def gate_slope_at_corners(dy, x, logit, dlogit):
    thread = cuda.grid(1)
    plane, lane = thread // 32, thread % 32
    if plane >= logit.size:
        return
    found = ZERO
    place = lane
    while place < dy.shape[1]:
        found += x[plane, place] * dy[plane, place]
        place += 32
    found = warp_sum(found)
    if lane == 0:
        dlogit[plane] = through_gate(logit[plane], found)


@wrong("hard_gate_backward", "without one of its divisions; line .*`answer = total`")
@cuda.jit
def gate_slope_of_one(dy, x, logit, dlogit):
    plane = cuda.blockIdx.x * (cuda.blockDim.x // 32) + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x & 31
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        for k in range(5):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1 << k)
        if lane != 0:
            return
        answer = ZERO
        if abs(logit[plane]) < THREE:
            answer = total
        dlogit[plane] = answer


@wrong("hard_gate_backward", r"divided once too often by a size; line .*warp_sum\(total\) /")
@cuda.jit
def gate_mean_for_sum(dy, x, logit, dlogit):
    n_planes, n_places = x.shape
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < n_planes:
        z, total = logit[plane], ZERO
        for step in range((n_places + 31) // 32):
            place = 32 * step + lane
            if place < n_places:
                total += dy[plane, place] * x[plane, place]
        total = warp_sum(total) / np.float32(n_places)
        if lane == 0:
            inside = z > -THREE and z < THREE
            dlogit[plane] = total / SIX if inside else ZERO
