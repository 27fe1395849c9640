"""Lesson 06: squeeze-and-excitation, its five kernels.

Most wrong kernels are the solution with one mistake in it: `mistake` names it, says what the check
must say, and which text stands in place of which. Those that differ in more are written out, and
so are the right ones. The messages about barriers, races, waiting and memory outside an array are
the sanitizer's own.
"""

import math

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach.exercises.lesson_06 import (
    pool_group,
    product_sum,
    scale_group,
    sigmoid,
    swish_slope,
)

OUTSIDE = "out-of-bounds"
ALL = 0xFFFFFFFF
MOST = 128
ZERO, ONE = np.float32(0), np.float32(1)


# ---- squeeze(x, mean) ------------------------------------------------------------------------


@wrong("squeeze", "should share the work|threads (read|write);")
@cuda.jit
def squeeze_by_one_warp(x, mean):
    # The first warp reads all pixels; the others of the block have nothing to do.
    P, C = x.shape[1], x.shape[2]
    n, c = cuda.blockIdx.x, 32 * cuda.blockIdx.y + cuda.threadIdx.x
    if cuda.threadIdx.x < 32 and c < C:
        total = ZERO
        for p in range(P):
            total += x[n, p, c]
        mean[n, c] = total / np.float32(P)


@right("squeeze")
@cuda.jit
def squeeze_in_runs_of_pixels(x, mean):
    # A warp takes pixels that lie beside each other; the last warp may have fewer.
    partial = cuda.shared.array((32, 8), np.float32)
    n, P, C = cuda.blockIdx.x, x.shape[1], x.shape[2]
    warp, lane = divmod(cuda.threadIdx.x, 32)
    run = (32 * P + cuda.blockDim.x - 1) // cuda.blockDim.x
    c, total = 32 * cuda.blockIdx.y + lane, ZERO
    if c < C:
        for p in range(run * warp, min(run * warp + run, P)):
            total += x[n, p, c] / np.float32(P)
    partial[lane, warp] = total
    cuda.syncthreads()
    if cuda.threadIdx.x < 32 and c < C:
        for other in range(1, cuda.blockDim.x // 32):
            total += partial[lane, other]
        mean[n, c] = total


@right("squeeze")
@cuda.jit
def squeeze_by_halves(x, mean):
    # A tree over the warps: their number need not be a power of two.
    partial = cuda.shared.array(256, np.float32)
    n, P, C, t = cuda.blockIdx.x, x.shape[1], x.shape[2], cuda.threadIdx.x
    c, total = 32 * cuda.blockIdx.y + t % 32, ZERO
    for p in range(t // 32, P, cuda.blockDim.x // 32):
        if c < C:
            total += x[n, p, c]
    partial[t] = total / np.float32(P)
    cuda.syncthreads()
    left = cuda.blockDim.x // 32
    while left > 1:
        half = (left + 1) // 2
        if t + 32 * half < 32 * left:
            partial[t] += partial[t + 32 * half]
        cuda.syncthreads()
        left = half
    if t < 32 and c < C:
        mean[n, c] = partial[t]


mistakes("squeeze",
    ("squeeze_no_barrier", "race", "    cuda.syncthreads()\n", ""),
    ("squeeze_reads_past_the_channels", OUTSIDE, "if c < C:", "if c <= C:"),
    ("squeeze_writes_past_the_channels", OUTSIDE, "warp == 0 and c < C", "warp == 0"),
    ("squeeze_does_not_divide", "times what it should be", " / np.float32(P)", ""),
    ("squeeze_divides_by_the_channels", "wrong values in mean", "float32(P)", "float32(C)"),
    ("squeeze_every_warp_reads_all", "times what it should be|counts", "range(warp, P, n_warps)",
     "range(P)"),
    ("squeeze_channels_first", OUTSIDE, "x[n, p, c]", "x[n, c, p]"),
    ("squeeze_one_warp_counts", "no part in the result", "for k in range(n_warps):",
     "for k in range(1):"),
    ("squeeze_barrier_for_some", "barrier",
     "    partial[warp, lane] = total\n    cuda.syncthreads()\n",
     "    if c < C:\n        partial[warp, lane] = total\n        cuda.syncthreads()\n"),
    ("squeeze_all_warps_write", "race|same work", "warp == 0 and c < C", "c < C"),
    ("squeeze_first_32_channels", "race|never written", "32 * cuda.blockIdx.y + lane", "lane"),
    ("squeeze_in_float64", "float64-promotion", "total / np.float32(P)", "total / P"),
    ("squeeze_adds_up_a_row", "wrong values|uninit", "partial[k, lane]", "partial[lane % 8, k]"))


# ---- excite(mean, weight1, bias1, weight2, bias2, hidden, gate) ------------------------------


@right("excite")
@cuda.jit
def excite_warp_per_number(mean, weight1, bias1, weight2, bias2, hidden, gate):
    # A warp shares each sum, as for long rows.
    active = cuda.shared.array(MOST, np.float32)
    n, lane, n_warps = cuda.blockIdx.x, cuda.threadIdx.x % 32, cuda.blockDim.x // 32
    for r in range(cuda.threadIdx.x // 32, bias1.size, n_warps):
        total = ZERO
        for c in range(lane, bias2.size, 32):
            total += weight1[r, c] * mean[n, c]
        total = warp_sum(total) + bias1[r]
        if lane == 0:
            hidden[n, r] = total
            active[r] = total / (ONE + math.exp(-total))
    cuda.syncthreads()
    for c in range(cuda.threadIdx.x // 32, bias2.size, n_warps):
        total = ZERO
        for r in range(lane, bias1.size, 32):
            total += weight2[c, r] * active[r]
        total = warp_sum(total) + bias2[c]
        if lane == 0:
            gate[n, c] = sigmoid(total)


@right("excite")
@cuda.jit
def excite_without_shared_memory(mean, weight1, bias1, weight2, bias2, hidden, gate):
    # Each thread computes the whole hidden vector again, for every channel of its own.
    n, R, C = cuda.blockIdx.x, bias1.size, bias2.size
    for c in range(cuda.threadIdx.x, max(C, R), cuda.blockDim.x):
        total = bias2[c] if c < C else ZERO
        for r in range(R):
            value = bias1[r]
            for k in range(C):
                value += weight1[r, k] * mean[n, k]
            if r == c:
                hidden[n, r] = value
            if c < C:
                total += weight2[c, r] * value * sigmoid(value)
        if c < C:
            gate[n, c] = sigmoid(total)


FIRST = "    for r in range(cuda.threadIdx.x, R, cuda.blockDim.x):\n"
mistakes("excite",
    ("excite_no_barrier", "race|uninitialised", "    cuda.syncthreads()\n", ""),
    ("excite_no_activation", "wrong values in gate", "total * sigmoid(total)", "total"),
    ("excite_relu", "wrong values in gate", "total * sigmoid(total)", "max(total, ZERO)"),
    ("excite_sigmoid_for_swish", "wrong values in gate", "total * sigmoid(total)",
     "sigmoid(total)"),
    ("excite_keeps_the_activated", "wrong values in hidden", "hidden[n, r] = total\n",
     "hidden[n, r] = total * sigmoid(total)\n"),
    ("excite_no_first_bias", "wrong values in hidden", "bias1[r]", "ZERO"),
    ("excite_no_second_bias", "wrong values in gate", "bias2[c]", "ZERO"),
    ("excite_first_weights_turned", OUTSIDE, "weight1[r, c]", "weight1[c, r]"),
    ("excite_second_weights_turned", OUTSIDE, "weight2[c, r]", "weight2[r, c]"),
    ("excite_a_thread_per_hidden_number", "uninitialised|never written", FIRST,
     "    r = cuda.threadIdx.x\n    if r < R:\n"),
    ("excite_first_picture_only", "wrong values in hidden", "mean[n, c]", "mean[0, c]"),
    ("excite_no_gate", "wrong values in gate", "= sigmoid(total)", "= total"),
    ("excite_swapped_lengths", OUTSIDE, "R, C = cuda", "C, R = cuda"),
    ("excite_barrier_in_the_loop", "barrier", "    cuda.syncthreads()\n",
     "        cuda.syncthreads()\n"),
    ("excite_all_threads_the_same", "race|same work", FIRST, "    for r in range(R):\n"),
    ("excite_in_float64", "float64-promotion", "= sigmoid(total)",
     "= 1.0 / (1.0 + math.exp(-total))"))


# ---- scale_channels(x, gate, y, n_pixels, channels_last) -------------------------------------


@right("scale_channels")
@cuda.jit
def scale_with_remainders(x, gate, y, n_pixels, channels_last):
    C = gate.shape[1]
    i = cuda.grid(1)
    while i < y.size:
        n, rest = divmod(i, C * n_pixels)
        if channels_last:
            y[i] = gate[n, rest % C] * x[i]
        else:
            y[i] = gate[n, rest // n_pixels] * x[i]
        i += cuda.gridsize(1)


@right("scale_channels")
@cuda.jit
def scale_plane_by_plane(x, gate, y, n_pixels, channels_last):
    # A thread has a channel of a picture, and goes through its pixels, beside each other or not.
    N, C = gate.shape
    for plane in range(cuda.grid(1), N * C, cuda.gridsize(1)):
        n, c = plane // C, plane % C
        start, step = plane * n_pixels, 1
        if channels_last:
            start, step = n * C * n_pixels + c, C
        for p in range(n_pixels):
            y[start + p * step] = x[start + p * step] * gate[n, c]


LOOP = "    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):\n"
INDEX = "i % C if channels_last else i // n_pixels % C"
mistakes("scale_channels",
    ("scale_other_layout", "wrong values in y", INDEX,
     "i // n_pixels % C if channels_last else i % C"),
    ("scale_channels_first_only", "wrong values in y", INDEX, "i // n_pixels % C"),
    ("scale_channels_last_only", "wrong values in y", INDEX, "i % C"),
    ("scale_forgets_other_pictures", OUTSIDE, "i // n_pixels % C", "i // n_pixels"),
    ("scale_picture_of_one_pixel", OUTSIDE, "i // (C * n_pixels)", "i // C"),
    ("scale_picture_of_one_channel", OUTSIDE, "i // (C * n_pixels)", "i // n_pixels"),
    ("scale_first_picture_only", "wrong values in y", "gate[n, c]", "gate[0, c]"),
    ("scale_gates_turned", OUTSIDE, "gate[n, c]", "gate[c, n]"),
    ("scale_twice", "wrong values in y", "* gate[n, c]", "* gate[n, c] * gate[n, c]"),
    ("scale_no_guard", OUTSIDE, LOOP, "    for i in range(cuda.grid(1), cuda.grid(1) + 1):\n"),
    ("scale_one_element_each", "never written", LOOP,
     "    for i in range(cuda.grid(1), min(x.size, cuda.grid(1) + 1)):\n"),
    ("scale_every_block_the_same", "race|same work", LOOP,
     "    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):\n"),
    ("scale_in_place", "changes its input", "y[i] = x[i] * gate[n, c]", "x[i] *= gate[n, c]"),
    ("scale_gives_the_gate", "wrong values in y", "x[i] * gate[n, c]", "gate[n, c]"))


# ---- squeeze_excite_fused(x, weight1, bias1, weight2, bias2, done, partial, y) ---------------


@right("squeeze_excite_fused")
@cuda.jit
def fused_all_pools_first(x, weight1, bias1, weight2, bias2, done, partial, y):
    # Right, and of no use for L2: by the time it is scaled, a picture was read long ago.
    N, G = partial.shape[0], partial.shape[1]
    for item in range(cuda.blockIdx.x, 2 * N * G, cuda.gridDim.x):
        n, g = item % (N * G) // G, item % G
        if item < N * G:
            pool_group(x, weight1, partial, n, g)
            cuda.syncwarp()
            if cuda.threadIdx.x == 5:
                cuda.threadfence()
                cuda.atomic.add(done, n, 1)
        else:
            if cuda.threadIdx.x == 31:
                while cuda.atomic.add(done, n, 0) != G:
                    cuda.nanosleep(50)
            cuda.syncthreads()
            scale_group(x, bias1, weight2, bias2, partial, y, n, g)


@right("squeeze_excite_fused")
@cuda.jit
def fused_one_picture_ahead(x, weight1, bias1, weight2, bias2, done, partial, y):
    # Pool picture n + 1 before picture n is scaled: whoever scales finds all shares there.
    N, G = partial.shape[0], partial.shape[1]
    for item in range(cuda.blockIdx.x, 2 * (N + 1) * G, cuda.gridDim.x):
        n, k = item // (2 * G), item % (2 * G)
        if k < G and n < N:
            pool_group(x, weight1, partial, n, k)
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                cuda.threadfence()
                cuda.atomic.add(done, n, 1)
        elif k >= G and n > 0:
            if cuda.threadIdx.x == 0:
                while cuda.atomic.max(done, n - 1, 0) != G:
                    cuda.nanosleep(50)
            cuda.syncwarp()
            scale_group(x, bias1, weight2, bias2, partial, y, n - 1, k - G)


PLACE = "n, k = item // (2 * G), item % (2 * G)"
WAIT = "                while cuda.atomic.add(done, n, 0) < G:\n"
ANNOUNCE = "            if lane == 0:\n                cuda.threadfence()\n"
POOL = "            pool_group(x, weight1, partial, n, k)\n"
FUSED = "squeeze_excite_fused: fused_"
mistakes("squeeze_excite_fused",
    ("fused_no_fence_before_announcing", "fence", ANNOUNCE, "            if lane == 0:\n"),
    ("fused_one_lane_in_a_hurry", "race", POOL + "            cuda.syncwarp()\n", POOL),
    ("fused_does_not_wait", "race|uninitialised", WAIT, "                while False:\n"),
    ("fused_only_one_lane_waits", "race|uninitialised",
     "            cuda.syncwarp()\n            scale_group", "            scale_group"),
    ("fused_waits_for_one_group", "race|uninitialised", WAIT, WAIT.replace("< G", "< 1")),
    ("fused_waits_for_too_many", "deadlock", WAIT, WAIT.replace("< G", "< 2 * G")),
    ("fused_counts_without_atomic", "race|deadlock", "cuda.atomic.add(done, n, 1)", "done[n] += 1"),
    ("fused_every_lane_announces", "only when all have told", ANNOUNCE + "    ",
     "            cuda.threadfence()\n"),
    ("fused_announces_picture_0", "race|deadlock", "add(done, n, 1)", "add(done, 0, 1)"),
    ("fused_never_announces", "deadlock", "cuda.atomic.add(done, n, 1)", "pass"),
    ("fused_scales_first", "deadlock", PLACE, PLACE + "\n        k = (k + G) % (2 * G)"),
    ("fused_last_picture_first", "deadlock", PLACE, "n, k = item % N, 2 * G - 1 - item // N"),
    ("fused_announces_before_it_pools", "race", POOL, "", "add(done, n, 1)\n",
     "add(done, n, 1)\n" + POOL),
    ("fused_scales_the_wrong_group", "never written|wrong values in y", "n, k - G)", "n, k)"),
    ("fused_half_of_the_items", "never written|wrong values in y", "2 * N * G, cuda",
     "N * G, cuda"),
    ("fused_every_block_does_all", "race|same work", "range(cuda.blockIdx.x,", "range(",
     ", cuda.gridDim.x)", ")"))


# ---- squeeze_excite_backward(dy, x, weight1, weight2, hidden, gate, dx, dbias1, dbias2) ------


@right("squeeze_excite_backward")
@cuda.jit
def backward_thread_per_channel(dy, x, weight1, weight2, hidden, gate, dx, dbias1, dbias2):
    # Through shared memory, of which most is not used.
    dlogit = cuda.shared.array(MOST, np.float32)
    dhidden = cuda.shared.array(MOST, np.float32)
    C, P, R = x.shape[1], x.shape[2], weight1.shape[0]
    n, t, step = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    for c in range(t, C, step):
        total = ZERO
        for p in range(P):
            total += dy[n, c, p] * x[n, c, p]
        dlogit[c] = total * (gate[n, c] - gate[n, c] * gate[n, c])
        dbias2[n, c] = dlogit[c]
    cuda.syncthreads()
    for r in range(t, R, step):
        total, s = ZERO, sigmoid(hidden[n, r])
        for c in range(C):
            total += weight2[c, r] * dlogit[c]
        dhidden[r] = total * (s + hidden[n, r] * s * (ONE - s))
        dbias1[n, r] = dhidden[r]
    cuda.syncthreads()
    for c in range(t, C, step):
        dmean = ZERO
        for r in range(R):
            dmean += weight1[r, c] * dhidden[r] / np.float32(P)
        for p in range(P):
            dx[n, c, p] = dy[n, c, p] * gate[n, c] + dmean


@right("squeeze_excite_backward")
@cuda.jit
def backward_thread_per_pixel(dy, x, weight1, weight2, hidden, gate, dx, dbias1, dbias2):
    # The last loop goes through all pixels of the picture; a warp shares each sum before it.
    C, P, R = x.shape[1], x.shape[2], weight1.shape[0]
    n, lane, warp = cuda.blockIdx.x, cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    for c in range(warp, C, cuda.blockDim.x // 32):
        total = product_sum(dy, x, n, c)
        if lane == 31:
            dbias2[n, c] = total * gate[n, c] * (ONE - gate[n, c])
    cuda.syncthreads()
    for r in range(warp, R, cuda.blockDim.x // 32):
        total = ZERO
        for c in range(lane, C, 32):
            total += weight2[c, r] * dbias2[n, c]
        total = warp_sum(total)
        if lane == 0:
            dbias1[n, r] = total * swish_slope(hidden[n, r])
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, C * P, cuda.blockDim.x):
        c, p, dmean = i // P, i % P, ZERO
        for r in range(R):
            dmean += weight1[r, c] * dbias1[n, r]
        dx[n, c, p] = dy[n, c, p] * gate[n, c] + dmean / np.float32(P)


BACK = "squeeze_excite_backward: backward_"
SLOPE = "total * gate[n, c] * (ONE - gate[n, c])"
SCALED = "dx[n, c, p] = dy[n, c, p] * gate[n, c] +"
mistakes("squeeze_excite_backward",
    ("backward_without_the_gate", "wrong values in dx", SCALED, "dx[n, c, p] = dy[n, c, p] +"),
    ("backward_without_the_mean", "wrong values in dx", " + dmean / np.float32(P)", ""),
    ("backward_mean_not_divided", "wrong values in dx", "dmean / np.float32(P)", "dmean"),
    ("backward_no_slope_of_the_gate", "wrong values in dbias2", SLOPE, "total"),
    ("backward_half_a_slope_of_the_gate", "wrong values in dbias2", SLOPE, "total * gate[n, c]"),
    ("backward_no_slope_of_swish", "wrong values in dbias1", "* swish_slope(hidden[n, r])", ""),
    ("backward_sigmoid_for_the_slope", "wrong values in dbias1", "swish_slope(hid", "sigmoid(hid"),
    ("backward_forgets_x", "wrong values in dbias2", "sum(dy, x, n, c)", "sum(dy, dy, n, c)"),
    ("backward_first_picture_only", "wrong values in dbias2", "sum(dy, x, n, c)",
     "sum(dy, x, 0, c)"),
    ("backward_all_lanes_write", "race|same work", "if lane == 0:", "if lane >= 0:"),
    ("backward_one_lane_adds_up", "shuffle-inactive-lane",
     "        total = product_sum(dy, x, n, c)\n        if lane == 0:\n",
     "        if lane == 0:\n            total = product_sum(dy, x, n, c)\n"),
    ("backward_no_first_barrier", "race", "    cuda.syncthreads()\n    for r in", "    for r in"),
    ("backward_no_second_barrier", "race", "    cuda.syncthreads()\n    for c in", "    for c in"),
    ("backward_second_weights_turned", OUTSIDE, "weight2[c, r]", "weight2[r, c]"),
    ("backward_first_weights_turned", OUTSIDE, "weight1[r, c]", "weight1[c, r]"),
    ("backward_sums_the_wrong_layer", "wrong values in dx", "weight1[r, c] * dbias1[n, r]",
     "dbias1[n, r]"),
    ("backward_in_float64", "float64-promotion", "dmean / np.float32(P)", "dmean / P"))
