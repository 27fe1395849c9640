"""Right answers of another make: other loops, default arguments, lists where tuples are shown.

And wrong ones of kinds that any exercise can have: what they change beside their result, what they
keep from call to call, who does the work.
"""

import math

import numpy as np

from bank import right, wrong
from bank.mistakes import changed, mistakes
from course_lib import cuda, reference
from course_lib.runtime.intrinsics import load_vector, store_vector, warp_max, warp_sum
from course_lib.runtime.intrinsics.matrix import load_word, multiply_add
from course_lib.teach.exercise import exercises
from course_lib.teach.exercises.lesson_04 import VECTORS, WIDTH

ZERO, MINUS_INF = np.float32(0), np.float32(-np.inf)


@right("relu")
@cuda.jit
def relu_with_a_default(x, y, zero=ZERO):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], zero)


@cuda.jit(device=True)
def clamped(value, least=ZERO):
    return max(value, least)


@right("relu")
@cuda.jit
def relu_by_a_function_with_a_default(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = clamped(x[i])


@right("bytes_in_flight")
def flight_as_a_list(gbps, latency_ns, n_multiprocessors, n_threads):
    each = gbps * latency_ns / n_multiprocessors
    return [each, each / n_threads]


@right("amdahl")
def amdahl_as_a_list(shares, speedups):
    rest = 1 - shares.sum()
    return [1 / (rest + (shares / speedups).sum()), 1 / rest]


@right("convolution_work")
def work_as_a_list(N, C, K, H, R, groups):
    weights = K * (C // groups) * R * R
    return [2 * N * H * H * weights, 4 * (N * (C + K) * H * H + weights)]


@right("softmax_registers")
@cuda.jit
def registers_last_piece_first(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    start, lane = cuda.grid(1) // 32 * n_cols, cuda.laneid
    if start >= x.size:
        return
    m, s = MINUS_INF, ZERO
    for v in range(VECTORS - 1, -1, -1):
        for k in range(WIDTH):
            values[v, k] = MINUS_INF
        col = (32 * v + lane) * WIDTH
        if col < n_cols:
            load_vector(values[v], x, start + col)
        for k in range(WIDTH):
            m = max(m, values[v, k])
    m = warp_max(m)
    for v in range(VECTORS):
        for k in range(WIDTH):
            values[v, k] = math.exp(values[v, k] - m)
            s += values[v, k]
    s = warp_sum(s)
    for v in range(VECTORS):
        col = (32 * v + lane) * WIDTH
        if col < n_cols:
            for k in range(WIDTH):
                values[v, k] /= s
            store_vector(y, start + col, values[v])


@right("mma_tile")
@cuda.jit
def mma_in_loops(a, b, K, c):
    g, t, k = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4, 0
    ra, rb = cuda.local.array(4, np.uint32), cuda.local.array(2, np.uint32)
    acc = cuda.local.array(4, np.float32)
    for i in range(4):
        acc[i] = ZERO
    while k < K:
        for i in range(4):
            ra[i] = load_word(a, (g + 8 * (i % 2)) * K + k + t + 4 * (i // 2))
        for i in range(2):
            rb[i] = load_word(b, g * K + k + t + 4 * i)
        multiply_add(acc, 0, ra, 0, rb, 0, a)
        k += 8
    for i in range(4):
        c[g + 8 * (i // 2), 2 * t + i % 2] = acc[i]


@right("pick_batch")
@cuda.jit
def pick_with_whole_numbers(images, labels, order, first, x, y):
    b, i = cuda.blockIdx.x, cuda.threadIdx.x
    row = order[first + b]
    if i == cuda.blockDim.x - 1:
        y[b] = labels[row]
    while i < images.shape[1]:
        x[b, i] = np.float32(2 * images[row, i] - 255) / np.float32(255)
        i += cuda.blockDim.x


@right("warp_sum")
@cuda.jit
def warp_sum_by_a_butterfly(x, y):
    row, lane, step, total = cuda.grid(1) // 32, cuda.threadIdx.x % 32, 1, ZERO
    if row >= x.shape[0]:
        return
    for col in range(lane, x.shape[1], 32):
        total += x[row, col]
    while step < 32:
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        step *= 2
    if lane == 5:
        y[row] = total


def from_the_end(exercise, *changes):
    """Enter the solution with its threads, or its lanes, going through the numbers backwards."""
    made = changed(exercise, f"{exercise}_from_the_end", exercises()[exercise].solution, changes)
    right(exercise)(made)


def backwards(n, first="cuda.grid(1)", step="cuda.gridsize(1)"):
    """The loop that goes up to n in steps, and the one that comes down."""
    return f"range({first}, {n}, {step})", f"range({n} - 1 - {first}, -1, -{step})"


LANES = "lane", "32"
LAST_LANE = "lane == 0", "lane == 31"
from_the_end("scale_channels", *backwards("x.size"))
from_the_end("conv2d_dweight", *backwards("N * P * Q", *LANES), *LAST_LANE)
from_the_end("channel_moments", *backwards("x.shape[0] * P", "t", "cuda.blockDim.x"))
from_the_end("linear_relu", *backwards("x.shape[1]", *LANES), *LAST_LANE)
from_the_end("top_k", *backwards("logits.shape[1]", *LANES), *LAST_LANE)
from_the_end("mixup", *backwards("y.size"), *backwards("target.size"))
from_the_end("smooth_cross_entropy", "(largest, total, logits[row, col])",
             "(largest, total, logits[row, C - 1 - col])", *LAST_LANE)


# ---- what a function changes beside its result -----------------------------------------------

OWN = "a call with other inputs has changed what the call before it had returned, "


mistakes("from_end_to_beginning",
    ("order_by_marks", r"it changes its input last\.requires_grad", ", seen = [], set()", " = []",
     " and x not in seen:\n            seen.add(x)", ":\n            x.requires_grad = False"))


mistakes("from_end_to_beginning",
    ("order_that_frees_the_tape", r"it changes its input last\.made_from", "    return",
     "    for x in order:\n        x.made_from = ()\n    return"))


def _walked(order, dy, add):
    found = {id(order[0]): dy}
    for result in order:
        if result.made_by is not None:
            gradients = result.made_by.backward(found[id(result)])
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            for x, dx in zip(result.made_from, gradients, strict=True):
                if x.requires_grad:
                    found[id(x)] = add(x, found[id(x)], dx) if id(x) in found else dx
    return found


@wrong("walk_back", "it changes its input order, which")
def walk_that_empties_the_order(order, dy):
    found = _walked(order, dy, lambda x, one, other: one + other)
    while order:
        order.pop()
    return found


@wrong("walk_back", r"it changes its input order\[.*\.data")
def walk_that_sums_in_the_data(order, dy):
    def add(x, one, other):
        if isinstance(x.data, np.ndarray):
            x.data[...] = one + other
        return one + other

    return _walked(order, dy, add)


@wrong("matmul_backward", OWN + "d[ab]")
def product_into_kept_arrays(dy, a, b, kept={}):  # noqa: B006
    if not isinstance(dy, np.ndarray):
        return dy @ b.T, a.T @ dy
    da = kept.setdefault(a.shape, np.empty(a.shape, a.dtype))
    db = kept.setdefault(("b", b.shape), np.empty(b.shape, b.dtype))
    da[...], db[...] = dy @ b.T, a.T @ dy
    return da, db


@wrong("self_times", "wrong values in times|" + OWN)
def times_that_remember(begin, end, kind, n_kinds, kept={}):  # noqa: B006
    if (len(begin), n_kinds) not in kept:
        solution = exercises()["self_times"].solution
        kept[len(begin), n_kinds] = solution(begin, end, kind, n_kinds)
    return kept[len(begin), n_kinds]


_FOUND = {}


@wrong("walk_back", OWN + "|there is an entry|key of the dict")
def walk_into_one_dict(order, dy):
    _FOUND.update(_walked(order, dy, lambda x, one, other: one + other))
    return _FOUND


@wrong("transposed_by_dx", OWN + "y")
def by_dx_into_kept_arrays(x, weight, stride, padding, output_padding, kept={}):  # noqa: B006
    y = exercises()["transposed_by_dx"].solution(x, weight, stride, padding, output_padding)
    same = kept.setdefault(y.shape, y)
    same[...] = y
    return same


mistakes("upsample_into",
    ("upsample_that_writes_foreign_channels_back",
     r"writes joined\[.*\], which belongs to somebody else, in line \d+, `joined\[n, c",
     "        joined[n, first + k, p, q] = total",
     "        joined[n, first + k, p, q] = total\n"
     "        for c in range(k, joined.shape[1], K):\n"
     "            if c < first or c >= first + K:\n"
     "                joined[n, c, p, q] = joined[n, c, p, q]"),
    ("upsample_that_adds_0_to_foreign_channels", r"writes joined\[.*\], which belongs to somebody",
     "        joined[n, first + k, p, q] = total",
     "        joined[n, first + k, p, q] = total\n"
     "        for c in range(first):\n"
     "            cuda.atomic.add(joined, (n, c, p, q), ZERO)"))


# ---- who makes the result --------------------------------------------------------------------


@cuda.jit
def copied(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i]


def _by_numpy(x, weight, stride, padding, output_padding):
    y = reference.conv_transpose2d(
        x, weight, stride=stride, padding=padding, output_padding=output_padding
    )
    return y.astype(np.float32)


@wrong("transposed_by_dx", "y is the same without what its kernels write")
def by_numpy_with_a_launch_for_show(x, weight, stride, padding, output_padding):
    y = _by_numpy(x, weight, stride, padding, output_padding)
    copied[1, 32](x.ravel(), np.empty(x.size, x.dtype))
    return y


@wrong("transposed_by_dx", "y is there before any kernel has made it")
def by_numpy_and_copied_by_a_kernel(x, weight, stride, padding, output_padding):
    found = _by_numpy(x, weight, stride, padding, output_padding)
    y = np.empty(found.shape, np.float32)
    copied[max(1, -(-y.size // 64)), 64](found.ravel(), y.reshape(-1))
    return y


mistakes("softmax_function",
    ("softmax_by_torch", "y is there before any kernel has made it", "    class",
     "    import torch\n\n    class", "y = compute_y(x",
     "compute_y(x)\n            y = torch.softmax(x, dim=1"))


# ---- float64, which no kernel may compute in from lesson 3 on --------------------------------

mistakes("top_k",
    ("top_k_by_a_quotient", "float64-promotion", "before < k", "before < (k + k) / 2"))
mistakes("confusion", ("confusion_by_a_quotient", "float64-promotion", "range(1, logits.shape[1])",
                       "range(1, int(2 * logits.shape[1] / 2))"))
