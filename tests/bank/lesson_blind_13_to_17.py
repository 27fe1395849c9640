"""Wrong answers of lessons 13 to 17 by somebody who knew no more than the lessons."""

import math

import numpy as np

from bank import wrong
from course_lib import cuda

ZERO = np.float32(0)
TEN = np.float32(10)
INF = np.float32(np.inf)
EXPONENT = 0x7F800000
NO_DATA = -1

# ---- prepare -------------------------------------------------------------------------------------


@wrong("prepare", "exited-before-barrier in line .*`return`")
@cuda.jit
def prepare_leaves_early(power, label, low, high, mean, spread, x, y, missing):
    i = cuda.grid(1)
    if i >= label.size:
        return
    lost = 0
    for band in range(power.shape[0]):
        value = power[band, i]
        known = value > ZERO and value < INF
        if not known:
            lost = 1
    if lost == 1:
        y[i] = NO_DATA
        for band in range(power.shape[0]):
            x[band, i] = ZERO
    else:
        y[i] = label[i]
        for band in range(power.shape[0]):
            decibels = min(max(TEN * math.log10(power[band, i]), low), high)
            x[band, i] = (decibels - mean) / spread
    count = cuda.syncthreads_count(lost)
    if cuda.threadIdx.x == 0:
        missing[cuda.blockIdx.x] = count


@cuda.jit(device=True)
def is_lost(power, i):
    for band in range(power.shape[0]):
        value = power[band, i]
        if value <= ZERO or value == INF:
            return 1
    return 0


@wrong("prepare", "every wrong element is that of label|wrong values in y")
@cuda.jit
def prepare_lets_nan_through(power, label, low, high, mean, spread, x, y, missing):
    i, gone = cuda.grid(1), 0
    if i < label.size:
        gone = is_lost(power, i)
        y[i] = NO_DATA if gone else label[i]
        for band in range(power.shape[0]):
            if gone:
                x[band, i] = ZERO
                continue
            db = TEN * math.log10(power[band, i])
            if db < low:
                db = low
            if db > high:
                db = high
            x[band, i] = (db - mean) / spread
    count = cuda.syncthreads_count(gone)
    if cuda.threadIdx.x == 0:
        missing[cuda.blockIdx.x] = count


@wrong("prepare", "wrong values in x")
@cuda.jit
def prepare_scales_the_rest(power, label, low, high, mean, spread, x, y, missing):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    n_lost = 0
    if i < label.size:
        for band in range(power.shape[0]):
            p = power[band, i]
            here = p > ZERO and p < INF
            if not here:
                n_lost += 1
                x[band, i] = ZERO
            else:
                x[band, i] = (max(low, min(high, TEN * math.log10(p))) - mean) / spread
        y[i] = label[i]
        if n_lost > 0:
            y[i] = NO_DATA
    count = cuda.syncthreads_count(n_lost)
    if cuda.threadIdx.x == 0:
        missing[cuda.blockIdx.x] = count


# ---- augment -------------------------------------------------------------------------------------


@wrong("augment", "wrong values in x")
@cuda.jit
def augment_mirrors_first(images, draws, padding, factor, shift, x):
    N, H, W, C = images.shape
    i = cuda.grid(1)
    while i < x.size:
        w, rest = i % W, i // W
        h, rest = rest % H, rest // H
        c, n = rest % C, rest // C
        row, col = h + draws[n, 0] - padding, w + draws[n, 1] - padding
        if draws[n, 2] == 1:
            col = W - 1 - col
        byte = ZERO
        if row >= 0 and row < H and col >= 0 and col < W:
            byte = np.float32(images[n, row, col, c])
        x[n, c, h, w] = byte * factor[c] + shift[c]
        i += cuda.gridsize(1)


@cuda.jit(device=True)
def place_of(i, C, H, W):
    return i // (C * H * W), i // (H * W) % C, i // W % H, i % W


@wrong("augment", r"shift\[0\].* no part in the result")
@cuda.jit
def augment_black_unscaled(images, draws, padding, factor, shift, x):
    H, W, C = images.shape[1:]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n, c, h, w = place_of(i, C, H, W)
        across = w
        if draws[n, 2]:
            across = W - 1 - w
        row = draws[n, 0] + h - padding
        col = draws[n, 1] + across - padding
        if row < 0 or col < 0 or row >= H or col >= W:
            x[n, c, h, w] = ZERO
            continue
        x[n, c, h, w] = np.float32(images[n, row, col, c]) * factor[c] + shift[c]


@wrong("augment", "wrong values in x")
@cuda.jit
def augment_draws_swapped(images, draws, padding, factor, shift, x):
    _, C, H, W = x.shape
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, x.size, cuda.gridsize(1)):
        n, inside = i // (C * H * W), i % (C * H * W)
        c, pixel = inside // (H * W), inside % (H * W)
        h, w = pixel // W, pixel % W
        to_right, down = draws[n, 0] - padding, draws[n, 1] - padding
        row = h + down
        col = (W - 1 - w if draws[n, 2] > 0 else w) + to_right
        value = ZERO
        if 0 <= row < H and 0 <= col < W:
            value = np.float32(images[n, row, col, c])
        x[n, c, h, w] = shift[c] + factor[c] * value


# ---- round_bits ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def nearest(bits, drop):
    half = 1 << (drop - 1)
    return (bits + half) >> drop << drop


@wrong("round_bits", r"`bits = nearest\(bits, 23 - kept\)`, or another `nearest`, makes")
@cuda.jit
def bits_ties_go_up(x, kept, y):
    i = cuda.grid(1)
    while i < x.size:
        bits = np.int64(x[i])
        finite = (bits & EXPONENT) < EXPONENT
        if finite:
            bits = nearest(bits, 23 - kept)
        y[i] = bits
        i += cuda.gridsize(1)


@wrong("round_bits", r"wrong values in y[\s\S]*where .*the bits of (nan|-nan)")
@cuda.jit
def bits_round_nan(x, kept, y):
    whole = np.int64(1) << (23 - kept)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        bits = np.int64(x[i])
        low = bits & (whole - 1)
        bits -= low
        odd = bits & whole
        if 2 * low > whole or (2 * low == whole and odd != 0):
            bits += whole
        y[i] = bits


@wrong("round_bits", "without one part of a formula; line .*`if bits >= EXPONENT:`")
@cuda.jit
def bits_negative_is_nan(x, kept, y):
    drop = 23 - kept
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        bits = np.int64(x[i])
        if bits >= EXPONENT:
            y[i] = bits
            continue
        last = (bits >> drop) & 1
        raised = bits + last + (1 << (drop - 1)) - 1
        y[i] = raised - (raised & ((1 << drop) - 1))


# ---- integrate -----------------------------------------------------------------------------------


@wrong("integrate", r"scalars is read \d+ times; the lesson's way reads it")
@cuda.jit
def integrate_everybody_reads(scalars, colour, brightness, integrated, y):
    a, b, c = scalars[0], scalars[1], scalars[2]
    top = max(max(a, b), c)
    a = math.exp(a - top)
    b = math.exp(b - top)
    c = math.exp(c - top)
    whole = a + b + c
    first, second, third = a / whole, b / whole, c / whole
    i = cuda.grid(1)
    while i < y.size:
        y[i] = first * colour[i] + second * brightness[i] + third * integrated[i]
        i += cuda.gridsize(1)


@wrong("integrate", "an intermediate result overflows to infinity")
@cuda.jit
def integrate_no_largest(scalars, colour, brightness, integrated, y):
    share = cuda.shared.array(3, np.float32)
    if cuda.threadIdx.x == 0:
        whole = ZERO
        for k in range(3):
            share[k] = math.exp(scalars[k])
            whole += share[k]
        for k in range(3):
            share[k] /= whole
    cuda.syncthreads()
    first, second, third = share[0], share[1], share[2]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = third * integrated[i] + second * brightness[i] + first * colour[i]


@cuda.jit(device=True)
def leave_weights(scalars, weight):
    a, b, c = scalars[0], scalars[1], scalars[2]
    top = max(a, max(b, c))
    ea, eb, ec = math.exp(a - top), math.exp(b - top), math.exp(c - top)
    whole = ea + eb + ec
    weight[0], weight[1], weight[2] = ea / whole, eb / whole, ec / whole


@wrong("integrate", r"race in line .*`mixed = weight[\s\S]*put cuda.syncthreads\(\) between")
@cuda.jit
def integrate_no_barrier(scalars, colour, brightness, integrated, y):
    weight = cuda.shared.array(3, np.float32)
    if cuda.threadIdx.x == 0:
        leave_weights(scalars, weight)
    start, step = cuda.grid(1), cuda.gridsize(1)
    for i in range(start, y.size, step):
        mixed = weight[0] * colour[i]
        mixed += weight[1] * brightness[i]
        mixed += weight[2] * integrated[i]
        y[i] = mixed
