"""Wrong answers of lessons 8 and 9 by somebody who knew no more than the lessons."""

import numpy as np

from bank import wrong
from course_lib import cuda
from course_lib.runtime.intrinsics import warp_sum

ZERO = np.float32(0)
TILE, HALO = 8, 10

# ---- im2col --------------------------------------------------------------------------------------


@wrong("im2col", "the right values at the wrong places|wrong values in columns")
@cuda.jit
def im2col_r_runs_fastest(x, columns, R, S, P, Q, stride, padding):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i >= columns.size:
        return
    term = i // columns.shape[1]
    pixel = i - term * columns.shape[1]
    r, rest = term % R, term // R
    s, c = rest % S, rest // S
    q, rest = pixel % Q, pixel // Q
    p, n = rest % P, rest // P
    h, w = r + p * stride - padding, s + q * stride - padding
    value = ZERO
    if 0 <= h < x.shape[2] and 0 <= w < x.shape[3]:
        value = x[n, c, h, w]
    columns[term, pixel] = value


@cuda.jit(device=True)
def seen(x, n, c, h, w):
    if h < 0 or w < 0:
        return ZERO
    if h >= x.shape[2] or w >= x.shape[3]:
        return ZERO
    return x[n, c, h, w]


@wrong("im2col", "without one of its `%`; line .*`window = ")
@cuda.jit
def im2col_counts_on(x, columns, R, S, P, Q, stride, padding):
    i = cuda.grid(1)
    n_pixels = columns.shape[1]
    if i < columns.size:
        term, pixel = i // n_pixels, i % n_pixels
        tap = (term // (R * S), term // S % R, term % S)
        window = (pixel // (P * Q), pixel // Q, pixel % Q)
        h = window[1] * stride - padding + tap[1]
        w = window[2] * stride - padding + tap[2]
        columns[term, pixel] = seen(x, window[0], tap[0], h, w)


@wrong("im2col", "in place of `p . stride - padding`; line .*`h = ")
@cuda.jit
def im2col_padding_first(x, columns, R, S, P, Q, stride, padding):
    for i in range(cuda.grid(1), columns.size, cuda.gridsize(1)):
        term, pixel = i // columns.shape[1], i % columns.shape[1]
        taps, window = term % (R * S), pixel % (P * Q)
        c, n = term // (R * S), pixel // (P * Q)
        r, s = taps // S, taps % S
        p, q = window // Q, window % Q
        h = (p - padding) * stride + r
        w = (q - padding) * stride + s
        outside = h < 0 or w < 0 or h >= x.shape[2] or w >= x.shape[3]
        columns[term, pixel] = ZERO if outside else x[n, c, h, w]


# ---- conv2d_tiled --------------------------------------------------------------------------------


@wrong(
    "conv2d_tiled",
    r"race in line [\s\S]*put cuda.syncthreads\(\) after line .*before the loop goes",
)
@cuda.jit
def tiled_no_second_barrier(x, weight, y):
    tile = cuda.shared.array(100, np.float32)
    H, W = x.shape[2:]
    t = cuda.threadIdx.x
    n = cuda.blockIdx.z // y.shape[1]
    k = cuda.blockIdx.z - n * y.shape[1]
    p, q = TILE * cuda.blockIdx.y + t // TILE, TILE * cuda.blockIdx.x + t % TILE
    row, col = t // TILE, t % TILE
    total = ZERO
    for c in range(x.shape[1]):
        place = t
        while place < HALO * HALO:
            h = TILE * cuda.blockIdx.y + place // HALO - 1
            w = TILE * cuda.blockIdx.x + place % HALO - 1
            tile[place] = ZERO
            if 0 <= h < H and 0 <= w < W:
                tile[place] = x[n, c, h, w]
            place += TILE * TILE
        cuda.syncthreads()
        for tap in range(9):
            total += tile[10 * (row + tap // 3) + col + tap % 3] * weight[k, c, tap // 3, tap % 3]
    if p < y.shape[2] and q < y.shape[3]:
        y[n, k, p, q] = total


@cuda.jit(device=True)
def pixel(x, n, c, h, w):
    if h < 0 or w < 0 or h >= x.shape[2] or w >= x.shape[3]:
        return ZERO
    return x[n, c, h, w]


@wrong("conv2d_tiled", "uninitialised-read in line .*`result [+]= weight")
@cuda.jit
def tiled_a_pixel_each(x, weight, y):
    halo = cuda.shared.array((HALO, HALO), np.float32)
    K, P, Q = y.shape[1:]
    n, k = cuda.blockIdx.z // K, cuda.blockIdx.z % K
    t = cuda.threadIdx.x
    row, col = t // TILE, t % TILE
    top, left = TILE * cuda.blockIdx.y, TILE * cuda.blockIdx.x
    result = ZERO
    for c in range(x.shape[1]):
        if t < HALO * HALO:
            r, s = t // HALO, t % HALO
            halo[r, s] = pixel(x, n, c, top + r - 1, left + s - 1)
        cuda.syncthreads()
        for s in range(3):
            for r in range(3):
                result += weight[k, c, r, s] * halo[row + r, col + s]
        cuda.syncthreads()
    if top + row >= P or left + col >= Q:
        return
    y[n, k, top + row, left + col] = result


@wrong("conv2d_tiled", "uninitialised-read in line .*`total [+]= halo")
@cuda.jit
def tiled_keeps_the_rim(x, weight, y):
    halo = cuda.shared.array((HALO, HALO), np.float32)
    C, H, W = x.shape[1:]
    K = y.shape[1]
    t, picture, k = cuda.threadIdx.x, cuda.blockIdx.z // K, cuda.blockIdx.z % K
    up, across = t // TILE, t % TILE
    first_row, first_col = cuda.blockIdx.y * TILE - 1, cuda.blockIdx.x * TILE - 1
    total = ZERO
    for c in range(C):
        for i in range(up, HALO, TILE):
            for j in range(across, HALO, TILE):
                h, w = first_row + i, first_col + j
                if h >= 0 and h < H and w >= 0 and w < W:
                    halo[i, j] = x[picture, c, h, w]
        cuda.syncthreads()
        for r in range(3):
            for s in range(3):
                total += halo[up + r, across + s] * weight[k, c, r, s]
        cuda.syncthreads()
    p, q = first_row + 1 + up, first_col + 1 + across
    if p < H and q < W:
        y[picture, k, p, q] = total


# ---- conv2d_dweight ------------------------------------------------------------------------------


@wrong("conv2d_dweight", r"reads `x\[0, 0, -1, -?\d\]`|out-of-bounds in line .*`total [+]= x")
@cuda.jit
def dweight_guards_two_sides(dy, x, dweight, stride, padding):
    warp, lane = cuda.grid(1) // 32, cuda.grid(1) % 32
    if warp >= dweight.size:
        return
    C, R, S = dweight.shape[1:]
    s = warp % S
    r = warp // S % R
    c = warp // (R * S) % C
    k = warp // (C * R * S)
    P, Q = dy.shape[2:]
    total = ZERO
    pixel = lane
    while pixel < dy.shape[0] * P * Q:
        n = pixel // (P * Q)
        p = pixel // Q % P
        q = pixel % Q
        h, w = p * stride + r - padding, q * stride + s - padding
        if h < x.shape[2] and w < x.shape[3]:
            total += x[n, c, h, w] * dy[n, k, p, q]
        pixel += 32
    total = warp_sum(total)
    if lane == 0:
        dweight[k, c, r, s] = total


@cuda.jit(device=True)
def product(dy, x, n, k, c, p, q, h, w):
    if h < 0 or w < 0 or h >= x.shape[2] or w >= x.shape[3]:
        return ZERO
    return dy[n, k, p, q] * x[n, c, h, w]


@wrong("conv2d_dweight", r"dy\[1, 0, 0, 0\] to .* have no part in the result")
@cuda.jit
def dweight_first_picture(dy, x, dweight, stride, padding):
    C, R, S = dweight.shape[1:]
    P, Q = dy.shape[2:]
    i, lane = cuda.grid(1) // 32, cuda.threadIdx.x & 31
    if i < dweight.size:
        k, rest = i // (C * R * S), i % (C * R * S)
        c, tap = rest // (R * S), rest % (R * S)
        r, s = tap // S, tap % S
        total = ZERO
        for pixel in range(lane, P * Q, 32):
            n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
            total += product(
                dy, x, n, k, c, p, q, p * stride - padding + r, q * stride - padding + s
            )
        total = warp_sum(total)
        if lane == 0:
            dweight[k, c, r, s] = total


@cuda.jit(device=True)
def over_the_warp(value):
    for k in range(5):
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << k)
    return value


@wrong("conv2d_dweight", "behaves exactly.*; line .*`h = p|in place of line .*`h = p")
@cuda.jit
def dweight_stride_times_tap(dy, x, dweight, stride, padding):
    N, K, P, Q = dy.shape
    H, W = x.shape[2:]
    thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    i, lane = thread // 32, thread % 32
    if i < dweight.size:
        R, S = dweight.shape[2:]
        s, i = i % S, i // S
        r, i = i % R, i // R
        c, k = i % dweight.shape[1], i // dweight.shape[1]
        total = ZERO
        for n in range(N):
            for place in range(lane, P * Q, 32):
                p = place // Q
                q = place - p * Q
                h = p + r * stride - padding
                w = q + s * stride - padding
                if 0 <= h < H and 0 <= w < W:
                    total += dy[n, k, p, q] * x[n, c, h, w]
        total = over_the_warp(total)
        if lane == 0:
            dweight[k, c, r, s] = total


# ---- conv_transpose2d_gather ---------------------------------------------------------------------


@wrong("conv_transpose2d_gather", "wrong values in y")
@cuda.jit
def gather_forgets_padding(x, weight, y, stride, padding):
    me = cuda.blockDim.x * cuda.blockIdx.x + cuda.threadIdx.x
    if me >= y.size:
        return
    K, P, Q = y.shape[1:]
    R, S = weight.shape[2:]
    q, rest = me % Q, me // Q
    p, rest = rest % P, rest // P
    k, n = rest % K, rest // K
    total = ZERO
    r = p % stride
    while r < R:
        h = (p + padding - r) // stride
        s = (q + padding) % stride
        while s < S:
            w = (q + padding - s) // stride
            if 0 <= h < x.shape[2] and 0 <= w < x.shape[3]:
                for c in range(x.shape[1]):
                    total += weight[c, k, r, s] * x[n, c, h, w]
            s += stride
        r += stride
    y[n, k, p, q] = total


@cuda.jit(device=True)
def over_channels(x, weight, n, k, h, w, r, s):
    found = ZERO
    if h < 0 or w < 0 or h >= x.shape[2] or w >= x.shape[3]:
        return found
    for c in range(x.shape[1]):
        found += x[n, c, h, w] * weight[k, c, r, s]
    return found


@wrong("conv_transpose2d_gather", "out-of-bounds in line .*`found [+]= x.n, c, h, w. . weight")
@cuda.jit
def gather_weight_k_first(x, weight, y, stride, padding):
    i = cuda.grid(1)
    if i < y.size:
        K, P, Q = y.shape[1:]
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        down, right = p + padding, q + padding
        total = ZERO
        for r in range(down % stride, weight.shape[2], stride):
            for s in range(right % stride, weight.shape[3], stride):
                total += over_channels(
                    x, weight, n, k, (down - r) // stride, (right - s) // stride, r, s
                )
        y[n, k, p, q] = total


@wrong("conv_transpose2d_gather", "with an `if` too much; line .*`if reached > 0:`")
@cuda.jit
def gather_leaves_the_rest(x, weight, y, stride, padding):
    N, C, H, W = x.shape
    K, P, Q = y.shape[1:]
    i = cuda.grid(1)
    if i >= N * K * P * Q:
        return
    n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
    total, reached = ZERO, 0
    for r in range(weight.shape[2]):
        for s in range(weight.shape[3]):
            down, right = p + padding - r, q + padding - s
            if down % stride or right % stride:
                continue
            h, w = down // stride, right // stride
            if h < 0 or h >= H or w < 0 or w >= W:
                continue
            reached += 1
            for c in range(C):
                total += x[n, c, h, w] * weight[c, k, r, s]
    if reached > 0:
        y[n, k, p, q] = total
