"""Lesson 10: matrix products, a tensor core, moments, max pooling and Adam.

Most wrong kernels are the solution with one mistake in it, and `mistake` says which text stands in
place of which. The right ones are written out. The messages about barriers, races and memory
outside an array are the sanitizer's own.
"""

import math

import numpy as np

from bank import right, wrong
from bank.equivalent import EQUIVALENT
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics.matrix import load_word, multiply_add

OUTSIDE, VALUES, RACE = "out-of-bounds|negative", "wrong values", "race|uninitialised"
ZERO, ONE = np.float32(0), np.float32(1)

# ---- matmul_registers(a, b, c) ---------------------------------------------------------------


@right("matmul_registers")
@cuda.jit
def matmul_without_tiles(a, b, c):
    # Four sums a thread as well, straight from memory.
    top = 8 * cuda.blockIdx.y + 2 * cuda.threadIdx.y
    left = 8 * cuda.blockIdx.x + 2 * cuda.threadIdx.x
    for row in range(top, min(top + 2, c.shape[0])):
        for col in range(left, min(left + 2, c.shape[1])):
            total = ZERO
            for k in range(a.shape[1]):
                total += a[row, k] * b[col, k]
            c[row, col] = total


@right("matmul_registers")
@cuda.jit
def matmul_with_an_array_of_sums(a, b, c):
    sa = cuda.shared.array((8, 5), np.float32)
    sb = cuda.shared.array((8, 5), np.float32)
    sums = cuda.local.array((2, 2), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    top, left = 8 * cuda.blockIdx.y, 8 * cuda.blockIdx.x
    for i in range(4):
        sums[i // 2, i % 2] = ZERO
    for first in range(0, a.shape[1], 4):
        for i in range(4 * ty + tx, 32, 16):
            row, k = i // 4, first + i % 4
            sa[row, i % 4] = ZERO
            sb[row, i % 4] = ZERO
            if k < a.shape[1] and top + row < a.shape[0]:
                sa[row, i % 4] = a[top + row, k]
            if k < a.shape[1] and left + row < b.shape[0]:
                sb[row, i % 4] = b[left + row, k]
        cuda.syncthreads()
        for k in range(4):
            for i in range(4):
                sums[i // 2, i % 2] += sa[ty + 4 * (i // 2), k] * sb[tx + 4 * (i % 2), k]
        cuda.syncthreads()
    for i in range(4):
        row, col = top + ty + 4 * (i // 2), left + tx + 4 * (i % 2)
        if row < c.shape[0] and col < c.shape[1]:
            c[row, col] = sums[i // 2, i % 2]


FIRST = "        cuda.syncthreads()\n        for k in range(DEPTH):\n"
LAST = "            s11 += a1 * b1\n        cuda.syncthreads()\n"
mistakes("matmul_registers",
    ("matmul_no_first_barrier", RACE, FIRST, "        for k in range(DEPTH):\n"),
    ("matmul_no_last_barrier", RACE, LAST, "            s11 += a1 * b1\n"),
    ("matmul_no_end_of_k", OUTSIDE, "row + i < M and k < K", "row + i < M"),
    ("matmul_no_end_of_a", OUTSIDE, "row + i < M and k < K", "k < K"),
    ("matmul_no_end_of_b", OUTSIDE, "line + i < N and k < K", "k < K"),
    ("matmul_b_by_the_wrong_row", VALUES + "|never|out-of-bounds", "cuda.blockIdx.x + ty  #",
     "cuda.blockIdx.x + tx  #"),
    ("matmul_sums_swapped", VALUES, "s01 += a0 * b1", "s01 += a1 * b0"),
    ("matmul_one_sum_forgotten", VALUES, "            s10 += a1 * b0\n", ""),
    ("matmul_first_slice_only", VALUES, "range(0, K, DEPTH)", "range(0, 1)"),
    ("matmul_a_quarter", "never written", "    store(c, row + SIDE, col + SIDE, s11)\n", ""),
    ("matmul_half_of_the_tile", "uninitialised|wrong", "range(0, TILE, SIDE)",
     "range(0, SIDE, SIDE)"),
    ("matmul_of_a_and_b_untransposed", VALUES + "|out-of-bounds", "sb[ty + i, tx] = b",
     "sb[tx + i, ty] = b"),
    ("matmul_in_float64", "float64-promotion", "s00 = s01 = s10 = s11 = ZERO",
     "s00 = s01 = s10 = s11 = 0.0"))


# ---- mma_tile(a, b, K, c) --------------------------------------------------------------------


@right("mma_tile")
@cuda.jit
def mma_in_a_loop(a, b, K, c):
    # The four registers of a counted: an odd one has row g + 8, the upper two column t + 4.
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    words, acc = cuda.local.array(6, np.uint32), cuda.local.array(4, np.float32)
    for i in range(4):
        acc[i] = ZERO
    for k in range(0, K, 8):
        for r in range(4):
            words[r] = load_word(a, (g + 8 * (r % 2)) * K + k + t + 4 * (r // 2))
        for r in range(2):
            words[4 + r] = load_word(b, g * K + k + t + 4 * r)
        multiply_add(acc, 0, words, 0, words, 4, a)
    for r in range(4):
        c[g + 8 * (r // 2), 2 * t + r % 2] = acc[r]


@wrong("mma_tile", "made without the tensor core")
@cuda.jit
def mma_without_a_tensor_core(a, b, K, c):
    for i in range(cuda.threadIdx.x, 128, 32):
        total = ZERO
        for k in range(K):
            total += a[i // 8 * K + k] * b[i % 8 * K + k]
        c[i // 8, i % 8] = total


mistakes("mma_tile",
    ("mma_groups_of_eight", VALUES + "|out-of-bounds",
     "cuda.threadIdx.x // 4, cuda.threadIdx.x % 4", "cuda.threadIdx.x // 8, cuda.threadIdx.x % 8"),
    ("mma_rows_and_columns_swapped", VALUES, "ra[1] = load_word(a, (g + 8) * K + k + t)",
     "ra[1] = load_word(a, g * K + k + t + 4)", "ra[2] = load_word(a, g * K + k + t + 4)",
     "ra[2] = load_word(a, (g + 8) * K + k + t)"),
    ("mma_first_slice_again_and_again", VALUES, "ra[0] = load_word(a, g * K + k + t)",
     "ra[0] = load_word(a, g * K + t)"),
    ("mma_b_as_rows_of_four", VALUES, "rb[1] = load_word(b, g * K + k + t + 4)",
     "rb[1] = load_word(b, g * K + k + t)"),
    ("mma_sums_not_started", "uninitialised", "        acc[i] = ZERO\n", "        pass\n"),
    ("mma_result_by_lanes", VALUES + "|race|out-of-bounds|never", "c[g, 2 * t + 1]", "c[g, t + 4]",
     "c[g, 2 * t]", "c[g, t]"),
    ("mma_lower_half_forgotten", "never written", "    c[g + 8, 2 * t] = acc[2]\n", ""),
    ("mma_result_turned", VALUES + "|out-of-bounds", "c[g + 8, 2 * t + 1] = acc[3]",
     "c[g + 8, 2 * t + 1] = acc[2]"),
    ("mma_steps_of_four", VALUES + "|out-of-bounds", "range(0, K, 8)", "range(0, K, 4)"),
    ("mma_a_for_b", VALUES + "|out-of-bounds", "rb[0] = load_word(b,", "rb[0] = load_word(a,"))


# ---- channel_moments(x, mean, variance) ------------------------------------------------------


@wrong("channel_moments", "should share the work")
@cuda.jit
def moments_in_two_passes(x, mean, variance):
    # The mean first, then the squares of what is left: one thread, two readings.
    if cuda.threadIdx.x == 0:
        c, P = cuda.blockIdx.x, x.shape[2]
        n = x.shape[0] * P
        first, total = x[0, c, 0], ZERO
        for i in range(n):
            total += x[i // P, c, i % P] - first
        m, total = first + total / np.float32(n), ZERO
        for i in range(n):
            total += (x[i // P, c, i % P] - m) ** 2
        mean[c], variance[c] = m, total / np.float32(n)


@right("channel_moments")
@cuda.jit
def moments_seen_from_the_first_value(x, mean, variance):
    # Sums and sums of squares do well, if something near the mean is taken off before.
    sums = cuda.shared.array(256, np.float32)
    squares = cuda.shared.array(256, np.float32)
    c, t, P = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[2]
    first, s, q = x[0, c, 0], ZERO, ZERO
    for i in range(t, x.shape[0] * P, cuda.blockDim.x):
        value = x[i // P, c, i % P] - first
        s += value
        q += value * value
    sums[t], squares[t] = s, q
    cuda.syncthreads()
    if t == 0:
        for i in range(1, cuda.blockDim.x):
            s += sums[i]
            q += squares[i]
        n = np.float32(x.shape[0] * P)
        mean[c], variance[c] = first + s / n, (q - s * s / n) / n


@wrong("channel_moments", "wrong values in variance")
@cuda.jit
def moments_in_one_pass(x, mean, variance):
    # E[x²] − E[x]², which has no digits left where the mean is large.
    if cuda.threadIdx.x == 0:
        c, P, s, q = cuda.blockIdx.x, x.shape[2], ZERO, ZERO
        n = np.float32(x.shape[0] * P)
        for i in range(x.shape[0] * P):
            value = x[i // P, c, i % P]
            s += value
            q += value * value
        mean[c], variance[c] = s / n, q / n - (s / n) * (s / n)


mistakes("channel_moments",
    ("moments_old_mean_twice", VALUES, "m2 += delta * (value - m)", "m2 += delta * delta"),
    ("moments_new_mean_twice", VALUES, "m2 += delta * (value - m)",
     "m2 += (value - m) * (value - m)"),
    ("moments_no_distance_between_parts", "wrong values in variance",
     " + delta * delta * n * other / (n + other)", ""),
    ("moments_plain_mean_of_means", VALUES, "means[t] += delta * other / (n + other)",
     "means[t] += delta / np.float32(2)"),
    ("moments_no_barrier", "race|uninitialised|no part",
     "    counts[t], means[t], squares[t] = n, m, m2\n    cuda.syncthreads()\n",
     "    counts[t], means[t], squares[t] = n, m, m2\n"),
    ("moments_no_barrier_in_the_tree", "race|no part",
     "        cuda.syncthreads()\n        step //= 2\n", "        step //= 2\n"),
    ("moments_of_empty_threads", "wrong values|NaN|division", " and counts[t + step] > ZERO", ""),
    ("moments_unbiased", "wrong values|NaN", "squares[0] / counts[0]",
     "squares[0] / (counts[0] - ONE)"),
    ("moments_counts_not_merged", VALUES + "|no part|times", "            counts[t] = n + other\n",
     ""),
    ("moments_of_the_first_picture", VALUES + "|no part", "x.shape[0] * P", "P"),
    ("moments_pictures_and_channels_swapped", OUTSIDE + "|wrong", "x[i // P, c, i % P]",
     "x[c, i // P, i % P]"),
    ("moments_of_the_lower_half", VALUES + "|no part", "step = cuda.blockDim.x // 2",
     "step = cuda.blockDim.x // 4"))


# ---- max_pool(x, k, stride, y, at) -----------------------------------------------------------


@right("max_pool")
@cuda.jit
def pool_from_the_end(x, k, stride, y, at):
    # Backwards, the last one that is not smaller counts: the first of equals again.
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        W, OH, OW = x.shape[2], y.shape[1], y.shape[2]
        plane, rest = divmod(i, OH * OW)
        oh, ow = divmod(rest, OW)
        best, where = -np.float32(math.inf), 0
        for j in range(k * k - 1, -1, -1):
            h, w = oh * stride + j // k, ow * stride + j % k
            if x[plane, h, w] >= best:
                best, where = x[plane, h, w], h * W + w
        y[plane, oh, ow], at[plane, oh, ow] = best, where


@right("max_pool")
@cuda.jit
def pool_by_place(x, k, stride, y, at):
    i = cuda.grid(1)
    if i < y.size:
        W, OH, OW = x.shape[2], y.shape[1], y.shape[2]
        plane, oh, ow = i // (OH * OW), i // OW % OH, i % OW
        where = oh * stride * W + ow * stride
        for h in range(oh * stride, oh * stride + k):
            for w in range(ow * stride, ow * stride + k):
                if x[plane, h, w] > x[plane, where // W, where % W]:
                    where = h * W + w
        y[plane, oh, ow] = x[plane, where // W, where % W]
        at[plane, oh, ow] = where


mistakes("max_pool",
    ("pool_no_guard", OUTSIDE, "if i < y.size:", "if i >= 0:"),
    ("pool_one_too_many", OUTSIDE, "i < y.size", "i <= y.size"),
    ("pool_starts_at_zero", VALUES, "best, where = x[plane, oh * stride, ow * stride],",
     "best, where = ZERO,"),
    ("pool_starts_at_minus_infinity", "wrong values in at",
     "best, where = x[plane, oh * stride, ow * stride], oh * stride * W + ow * stride",
     "best, where = -np.float32(math.inf), 0"),
    ("pool_last_of_equals", "wrong values in at", "> best", ">= best"),
    ("pool_smallest", VALUES, "> best", "< best"),
    ("pool_stride_is_the_window", OUTSIDE + "|wrong", "range(oh * stride, oh * stride + k)",
     "range(oh * k, oh * k + k)"),
    ("pool_place_by_columns", "wrong values in at", "h * W + w\n", "w * H + h\n"),
    ("pool_place_in_the_window", "wrong values in at", "h * W + w\n",
     "(h - oh * stride) * k + w - ow * stride\n"),
    ("pool_place_never_moves", "wrong values in at", "best, where = x[plane, h, w], h * W + w",
     "best = x[plane, h, w]"),
    ("pool_first_plane_only", VALUES, "if x[plane, h, w] > best", "if x[0, h, w] > best"),
    ("pool_window_too_small", VALUES + "|no part", "ow * stride + k)", "ow * stride + k - 1)"),
    ("pool_forgets_the_places", "never written", "        at[plane, oh, ow] = where\n", ""))


# ---- max_pool_backward(dy, at, k, stride, dx) ------------------------------------------------


@wrong("max_pool_backward", "the result is right, but at is read")
@cuda.jit
def pool_backward_looks_everywhere(dy, at, k, stride, dx):
    # All windows of the plane, most of which do not cover the element.
    i = cuda.grid(1)
    if i < dx.size:
        H, W = dx.shape[1:]
        plane, place, total = i // (H * W), i % (H * W), ZERO
        for oh in range(dy.shape[1]):
            for ow in range(dy.shape[2]):
                if at[plane, oh, ow] == place:
                    total += dy[plane, oh, ow]
        dx[plane, place // W, place % W] = total


@right("max_pool_backward")
@cuda.jit
def pool_backward_by_places_in_windows(dy, at, k, stride, dx):
    # The element may be any of the k × k places of a window: which one begins where that says?
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        plane, place = divmod(i, dx.shape[1] * dx.shape[2])
        total = ZERO
        for j in range(k * k):
            oh, down = divmod(place // dx.shape[2] - j // k, stride)
            ow, right_ = divmod(place % dx.shape[2] - j % k, stride)
            if down == 0 and right_ == 0 and 0 <= oh < dy.shape[1] and 0 <= ow < dy.shape[2]:
                if at[plane, oh, ow] == place:
                    total += dy[plane, oh, ow]
        dx[plane, place // dx.shape[2], place % dx.shape[2]] = total


@right("max_pool_backward")
@cuda.jit
def pool_backward_from_the_last_window(dy, at, k, stride, dx):
    i = cuda.grid(1)
    if i < dx.size:
        H, W = dx.shape[1:]
        plane, h, w = i // (H * W), i // W % H, i % W
        total, oh = ZERO, h // stride
        while oh >= 0 and oh * stride + k > h:
            ow = w // stride
            while ow >= 0 and ow * stride + k > w:
                if oh < dy.shape[1] and ow < dy.shape[2] and at[plane, oh, ow] == h * W + w:
                    total += dy[plane, oh, ow]
                ow -= 1
            oh -= 1
        dx[plane, h, w] = total


@wrong("max_pool_backward", "never written|race|uninitialised|depends on what")
@cuda.jit
def pool_backward_scatters(dy, at, k, stride, dx):
    # From the windows' side: overlapping windows meet, and the rest is never set to 0.
    i = cuda.grid(1)
    if i < dy.size:
        OH, OW, W = dy.shape[1], dy.shape[2], dx.shape[2]
        plane, oh, ow = i // (OH * OW), i // OW % OH, i % OW
        where = at[plane, oh, ow]
        dx[plane, where // W, where % W] += dy[plane, oh, ow]


mistakes("max_pool_backward",
    ("pool_backward_no_guard", OUTSIDE, "if i < dx.size:", "if i >= 0:"),
    ("pool_backward_one_window_only", VALUES + "|no part",
     "                    total += dy[plane, oh, ow]\n",
     "                    total = dy[plane, oh, ow]\n"),
    ("pool_backward_all_windows_that_cover", VALUES, "if at[plane, oh, ow] == h * W + w:",
     "if at[plane, oh, ow] >= 0:"),
    ("pool_backward_place_by_columns", VALUES, "== h * W + w", "== w * H + h"),
    ("pool_backward_no_last_window", OUTSIDE, "min(OH, h // stride + 1)", "h // stride + 1"),
    ("pool_backward_first_window_below_zero", OUTSIDE, "max(0, (w - k) // stride + 1)",
     "(w - k) // stride + 1"),
    ("pool_backward_misses_the_first_window", VALUES + "|no part",
     "range(max(0, (h - k) // stride + 1)", "range(max(0, (h - k) // stride + 2)"),
    ("pool_backward_misses_the_last_window", VALUES + "|no part", "min(OW, w // stride + 1)",
     "min(OW, w // stride)"),
    ("pool_backward_shares_the_gradient", VALUES, "total += dy[plane, oh, ow]",
     "total += dy[plane, oh, ow] / np.float32(k * k)"),
    ("pool_backward_of_the_first_plane", VALUES, "total += dy[plane, oh, ow]",
     "total += dy[0, oh, ow]"),
    ("pool_backward_in_float64", "float64-promotion", "total = ZERO", "total = 0.0"))


# ---- adam_step(p, g, m, v, step, rate, new_p, new_m, new_v) ----------------------------------


@right("adam_step")
@cuda.jit
def adam_by_moving_towards(p, g, m, v, step, rate, new_p, new_m, new_v):
    # m + (1 − beta)·(g − m) is the same mean.
    correction1 = ONE - np.float32(0.9) ** np.float32(step)
    correction2 = ONE - np.float32(0.999) ** np.float32(step)
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        mean = m[i] + np.float32(0.1) * (g[i] - m[i])
        square = v[i] + np.float32(0.001) * (g[i] * g[i] - v[i])
        new_m[i], new_v[i] = mean, square
        root = math.sqrt(square) / math.sqrt(correction2)
        new_p[i] = p[i] - rate / correction1 * mean / (root + np.float32(1e-8))


@right("adam_step")
@cuda.jit
def adam_one_thread_at_a_time(p, g, m, v, step, rate, new_p, new_m, new_v):
    shrunk1, shrunk2 = ONE, ONE
    for _ in range(step):
        shrunk1 *= np.float32(0.9)
        shrunk2 *= np.float32(0.999)
    i = cuda.grid(1)
    while i < p.size:
        new_m[i] = np.float32(0.9) * m[i] + np.float32(0.1) * g[i]
        new_v[i] = np.float32(0.999) * v[i] + np.float32(0.001) * g[i] ** 2
        root = math.sqrt(new_v[i] / (ONE - shrunk2))
        new_p[i] = p[i] - rate * new_m[i] / (ONE - shrunk1) / (root + np.float32(1e-8))
        i += cuda.gridsize(1)


mistakes("adam_step",
    ("adam_uphill", "wrong values in new_p", "p[i] - rate", "p[i] + rate"),
    ("adam_no_first_correction", "wrong values in new_p", "(new_m[i] / correction1)", "new_m[i]"),
    ("adam_no_second_correction", "wrong values in new_p", "new_v[i] / correction2", "new_v[i]"),
    ("adam_no_corrections", "wrong values in new_p", adam_by_moving_towards,
     "rate / correction1", "rate", " / math.sqrt(correction2)", ""),
    ("adam_divides_by_nothing", "wrong values in new_p", adam_by_moving_towards,
     " / (root + np.float32(1e-8))", " / root"),
    ("adam_no_root", "wrong values in new_p", "math.sqrt(new_v[i] / correction2)",
     "new_v[i] / correction2"),
    ("adam_old_mean", "wrong values in new_p", "(new_m[i] / ", "(m[i] / "),
    ("adam_old_square", "wrong values in new_p|NaN|inf", "math.sqrt(new_v[i]", "math.sqrt(v[i]"),
    ("adam_gradient_not_squared", VALUES, "(ONE - beta2) * g[i] * g[i]", "(ONE - beta2) * g[i]"),
    ("adam_weights_swapped", VALUES, "beta1 * m[i] + (ONE - beta1) * g[i]",
     "(ONE - beta1) * m[i] + beta1 * g[i]"),
    ("adam_betas_swapped", VALUES, "beta1, beta2 = np.float32(0.9), np.float32(0.999)",
     "beta2, beta1 = np.float32(0.9), np.float32(0.999)"),
    ("adam_sums_up", VALUES, "beta1 * m[i] + (ONE - beta1) * g[i]", "beta1 * m[i] + g[i]"),
    ("adam_first_block_only", "never written|same|race",
     "range(cuda.grid(1), p.size, cuda.gridsize(1))",
     "range(cuda.threadIdx.x, min(32, p.size), 32)"),
    ("adam_no_loop", "never written", "range(cuda.grid(1), p.size, cuda.gridsize(1))",
     "range(cuda.grid(1), min(cuda.grid(1) + 1, p.size))"),
    ("adam_in_float64", "float64-promotion", "np.float32(1e-8)", "1e-8"),
    ("adam_step_not_counted", "wrong values in new_p", "ONE - math.pow(beta1, np.float32(step))",
     "ONE - beta1"))


# ---- mutants that are right as well ----------------------------------------------------------

_ONE_BLOCK = "there is one block"
_MORE_ROOM = "registers or shared memory that nobody uses do no harm"
_SAME_SUM = "after the last barrier any thread may write the result: harmless"
_MORE_WINDOWS = "windows that do not cover the element are asked too, and none of them names it"
_FALLING = "threads further on have fewer values, so that this one has some if that one has"
_ROWS, _COLS = (
    f"range(max(0, ({h} - k) // stride + 1), min({size}, {h} // stride + 1))"
    for h, size in (("h", "OH"), ("w", "OW"))
)
EQUIVALENT.update({
    ("mma_tile", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _ONE_BLOCK,
    ("mma_tile", "assume launch: cuda.threadIdx.x → cuda.grid(1), again"): _ONE_BLOCK,
    ("mma_tile", "change constant: 4 → 5, again, again"): _MORE_ROOM,
    ("mma_tile", "change constant: 2 → 3"): _MORE_ROOM,
    ("mma_tile", "change constant: 4 → 5, again, again, again"): _MORE_ROOM,
    ("mma_tile", "change range: range(0, K, 8) → range(0, K - 1, 8)"): "K is a multiple of 8",
    ("channel_moments", "change constant: 256 → 257"): _MORE_ROOM,
    ("channel_moments", "change constant: 256 → 257, again"): _MORE_ROOM,
    ("channel_moments", "change constant: 256 → 257, again, again"): _MORE_ROOM,
    ("channel_moments", "swap dimension: x.shape[2] → x.shape[-1]"): "the last of three",
    ("channel_moments", "drop operand: t + step → t"): _FALLING,
    ("channel_moments", "drop operand: t + step → step"): _FALLING,
    ("channel_moments", "drop guard: if t == 0"): _SAME_SUM,
    ("channel_moments", "negate: if t == 0"): _SAME_SUM,
    ("channel_moments", "change constant: 0 → 1, again"): _SAME_SUM,
    ("matmul_registers", "swap indices: tx, ty = (cuda.threadIdx.x, cuda.threadIdx.y) → "
     "ty, tx = (cuda.threadIdx.x, cuda.threadIdx.y)"): "the tile is square: threads change places",
    ("matmul_registers", "change range: range(0, K, DEPTH) → range(0, K + 1, DEPTH)"): (
        "at most one more piece, of zeros"
    ),
    ("matmul_registers", "change range: range(0, TILE, SIDE) → range(0, TILE - 1, SIDE)"): (
        "the same two numbers"
    ),
    **{("max_pool_backward", name): _MORE_WINDOWS for name in (
        f"change range: {_ROWS} → range(0, min(OH, h // stride + 1), 1)",
        "drop operand: max(0, (h - k) // stride + 1) → 0",
        "drop operand: (h - k) // stride + 1 → (h - k) // stride",
        "change operator: (h - k) // stride + 1 → (h - k) // stride - 1",
        "change constant: 1 → 0" + 3 * ", again",
        "drop operand: min(OH, h // stride + 1) → OH",
        "drop operand: h // stride → h",
        "change constant: 1 → 2" + 4 * ", again",
        f"change range: {_COLS} → range(0, min(OW, w // stride + 1), 1)",
        "drop operand: max(0, (w - k) // stride + 1) → 0",
        "drop operand: (w - k) // stride + 1 → (w - k) // stride",
        "change operator: (w - k) // stride + 1 → (w - k) // stride - 1",
        "change constant: 1 → 0" + 5 * ", again",
        "drop operand: min(OW, w // stride + 1) → OW",
        "drop operand: w // stride → w",
        "change constant: 1 → 2" + 6 * ", again",
    )},
})  # fmt: skip
