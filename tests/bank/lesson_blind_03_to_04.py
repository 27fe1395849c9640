"""Wrong answers of lessons 3 and 4 by somebody who knew no more than the lessons."""

import math

import numpy as np

from bank import wrong
from course_lib import cuda
from course_lib.runtime import intrinsics
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach.exercises.lesson_04 import team_max, team_sum

ZERO = np.float32(0)
ONE = np.float32(1)
MINUS_INF = np.float32(-np.inf)
SLOTS = 8

# ---- softmax_shared ------------------------------------------------------------------------------


@wrong("softmax_shared", r"race in line .*`s.me. = mine`[\s\S]*put cuda.syncthreads\(\) between")
@cuda.jit
def shared_no_barrier_after_top(x, y):
    s = cuda.shared.array(256, np.float32)
    me, width = cuda.threadIdx.x, cuda.blockDim.x
    row, n_cols = cuda.blockIdx.x, x.shape[1]
    s[me] = MINUS_INF
    for col in range(me, n_cols, width):
        s[me] = max(s[me], x[row, col])
    cuda.syncthreads()
    half = width >> 1
    while half > 0:
        if me < half:
            s[me] = max(s[me], s[me + half])
        cuda.syncthreads()
        half >>= 1
    top = s[0]
    mine = ZERO
    for col in range(me, n_cols, width):
        mine += math.exp(x[row, col] - top)
    s[me] = mine
    cuda.syncthreads()
    half = width >> 1
    while half > 0:
        if me < half:
            s[me] += s[me + half]
        cuda.syncthreads()
        half >>= 1
    whole = s[0]
    for col in range(me, n_cols, width):
        y[row, col] = math.exp(x[row, col] - top) / whole


@cuda.jit(device=True)
def tree_max(s, t):
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            s[t] = max(s[t], s[t + step])
        cuda.syncthreads()
        step //= 2


@cuda.jit(device=True)
def tree_add(s, t):
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            s[t] += s[t + step]
        cuda.syncthreads()
        step //= 2


@wrong("softmax_shared", r"with `total` in place of `s\[0\]`; line .*/ total`")
@cuda.jit
def shared_divides_by_its_share(x, y):
    s = cuda.shared.array(256, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    largest = MINUS_INF
    for col in range(t, x.shape[1], cuda.blockDim.x):
        largest = max(x[row, col], largest)
    s[t] = largest
    cuda.syncthreads()
    tree_max(s, t)
    largest = s[0]
    cuda.syncthreads()
    total = ZERO
    for col in range(t, x.shape[1], cuda.blockDim.x):
        total += math.exp(x[row, col] - largest)
    s[t] = total
    cuda.syncthreads()
    tree_add(s, t)
    for col in range(t, x.shape[1], cuda.blockDim.x):
        y[row, col] = math.exp(x[row, col] - largest) / total


@wrong("softmax_shared", "one constant in place of another; line .*`best = ZERO`")
@cuda.jit
def shared_best_from_zero(x, y):
    tops = cuda.shared.array(256, np.float32)
    sums = cuda.shared.array(256, np.float32)
    row, t, n_cols, n_threads = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1], cuda.blockDim.x
    best = ZERO
    col = t
    while col < n_cols:
        if x[row, col] > best:
            best = x[row, col]
        col += n_threads
    tops[t] = best
    alive = n_threads
    while alive > 1:
        cuda.syncthreads()
        alive //= 2
        if t < alive and tops[t + alive] > tops[t]:
            tops[t] = tops[t + alive]
    cuda.syncthreads()
    best = tops[0]
    mine = ZERO
    for col in range(t, n_cols, n_threads):
        mine += math.exp(x[row, col] - best)
    sums[t] = mine
    alive = n_threads
    while alive > 1:
        cuda.syncthreads()
        alive //= 2
        if t < alive:
            sums[t] += sums[t + alive]
    cuda.syncthreads()
    for col in range(t, n_cols, n_threads):
        y[row, col] = math.exp(x[row, col] - best) / sums[0]


# ---- softmax_online ------------------------------------------------------------------------------


@cuda.jit(device=True)
def take(m, s, value):
    if value > m:
        return value, s * math.exp(m - value) + ONE
    return m, s + math.exp(value - m)


@wrong("softmax_online", "NaN was computed, and no input is NaN: one infinite number minus another")
@cuda.jit
def online_masked_first(x, y):
    n_rows, n_cols = x.shape
    thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    row, lane = thread // 32, thread % 32
    if row >= n_rows:
        return
    m, s = MINUS_INF, ZERO
    for col in range(lane, n_cols, 32):
        m, s = take(m, s, x[row, col])
    far = 1
    while far < 32:
        m2 = cuda.shfl_xor_sync(0xFFFFFFFF, m, far)
        s2 = cuda.shfl_xor_sync(0xFFFFFFFF, s, far)
        m, s = intrinsics.online_merge(m, s, m2, s2)
        far *= 2
    for col in range(lane, n_cols, 32):
        y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_online", "another line in place of line .*cuda.shfl_down_sync")
@cuda.jit
def online_shuffles_down(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        col = lane
        while col < x.shape[1]:
            value = x[row, col]
            if value != MINUS_INF:
                top = max(m, value)
                s = s * math.exp(m - top) + math.exp(value - top)
                m = top
            col += 32
        step = 16
        while step > 0:
            other = (
                cuda.shfl_down_sync(0xFFFFFFFF, m, step),
                cuda.shfl_down_sync(0xFFFFFFFF, s, step),
            )
            m, s = intrinsics.online_merge(m, s, other[0], other[1])
            step >>= 1
        col = lane
        while col < x.shape[1]:
            y[row, col] = math.exp(x[row, col] - m) / s
            col += 32


@wrong("softmax_online", "without one of its factors; line .*`s = s [+] ONE`")
@cuda.jit
def online_keeps_the_old_scale(x, y):
    warps = cuda.blockDim.x // 32
    row = cuda.blockIdx.x * warps + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x & 31
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            value = x[row, col]
            if value == MINUS_INF:
                continue
            if value <= m:
                s += math.exp(value - m)
            else:
                s = s + ONE
                m = value
        for k in range(4, -1, -1):
            m2, s2 = (
                cuda.shfl_xor_sync(0xFFFFFFFF, m, 1 << k),
                cuda.shfl_xor_sync(0xFFFFFFFF, s, 1 << k),
            )
            m, s = intrinsics.online_merge(m2, s2, m, s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


# ---- softmax_teams -------------------------------------------------------------------------------


@wrong("softmax_teams", "wrong values in y")
@cuda.jit
def teams_zeros_behind_the_row(x, y, team):
    held = cuda.local.array(SLOTS, np.float32)
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = 0
    if row < x.shape[0]:
        n_cols = x.shape[1]
    top = MINUS_INF
    slot, col = 0, rank
    while slot < SLOTS:
        held[slot] = np.float32(0)
        if col < n_cols:
            held[slot] = x[row, col]
        top = max(top, held[slot])
        slot, col = slot + 1, col + team
    top = team_max(top, team)
    whole = np.float32(0)
    for slot in range(SLOTS):
        held[slot] = math.exp(held[slot] - top)
        whole += held[slot]
    whole = team_sum(whole, team)
    slot = 0
    for col in range(rank, n_cols, team):
        y[row, col] = held[slot] / whole
        slot += 1


@cuda.jit(device=True)
def number_or_nothing(x, row, col, n_cols):
    if col < n_cols:
        return x[row, col]
    return MINUS_INF


@wrong("softmax_teams", r"with `32` in place of `team`; line .*team_sum\(mine, 32\)`")
@cuda.jit
def teams_sum_of_the_warp(x, y, team):
    values = cuda.local.array(SLOTS, np.float32)
    g = cuda.grid(1)
    row = g // team
    rank = g % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    largest = MINUS_INF
    for k in range(SLOTS):
        values[k] = number_or_nothing(x, row, k * team + rank, n_cols)
        largest = max(largest, values[k])
    largest = team_max(largest, team)
    mine = np.float32(0)
    for k in range(SLOTS):
        if k * team + rank < n_cols:
            values[k] = math.exp(values[k] - largest)
            mine += values[k]
    whole = team_sum(mine, 32)
    for k in range(SLOTS):
        if k * team + rank < n_cols:
            y[row, k * team + rank] = values[k] / whole


# ---- softmax_backward ----------------------------------------------------------------------------


@wrong("softmax_backward", "without one of its factors; line .*`mean [+]= dy.row, col.`")
@cuda.jit
def backward_mean_without_y(dy, y, dx):
    thread = cuda.threadIdx.x + cuda.blockDim.x * cuda.blockIdx.x
    row, lane = thread // 32, thread % 32
    if row >= dx.shape[0]:
        return
    mean = np.float32(0)
    col = lane
    while col < dx.shape[1]:
        mean += dy[row, col]
        col += 32
    mean = warp_sum(mean)
    col = lane
    while col < dx.shape[1]:
        dx[row, col] = y[row, col] * (dy[row, col] - mean)
        col += 32


@cuda.jit(device=True)
def butterfly(value):
    far = 16
    while far > 0:
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, far)
        far >>= 1
    return value


@wrong(
    "softmax_backward",
    "; line .*`dx.row, col. = product - mean`|in place of line .*`dx.row, col. = product",
)
@cuda.jit
def backward_lost_brackets(dy, y, dx):
    warps = cuda.blockDim.x // 32
    row = cuda.blockIdx.x * warps + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    if row < y.shape[0]:
        mean = np.float32(0)
        for col in range(lane, y.shape[1], 32):
            mean += dy[row, col] * y[row, col]
        mean = butterfly(mean)
        for col in range(lane, y.shape[1], 32):
            product = y[row, col] * dy[row, col]
            dx[row, col] = product - mean


@wrong("softmax_backward", "never written, in a launch of")
@cuda.jit
def backward_whole_pieces(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.grid(1) % 32
    pieces = y.shape[1] // 32
    if row < y.shape[0]:
        weighted = np.float32(0)
        for k in range(pieces):
            weighted += y[row, 32 * k + lane] * dy[row, 32 * k + lane]
        weighted = warp_sum(weighted)
        for k in range(pieces):
            better = dy[row, 32 * k + lane] - weighted
            dx[row, 32 * k + lane] = better * y[row, 32 * k + lane]
