"""Answers to lessons 0 to 7 that are right where checks of fixed cases look, and wrong elsewhere.

One thread does everything, or all do; a size or a number is one that happened to suffice; the
technique is left out; inputs are borrowed.
"""

import math

import numpy as np

from bank import wrong
from bank.mistakes import mistakes
from course_lib import cuda

OUTSIDE, UNWRITTEN, VALUES = "out-of-bounds", "never written", "wrong values in"
NAN = "NaN was computed|" + VALUES
SERIAL, TWICE = "writes everything", "more than one thread"
BORROWED = "changes its input x, .* line"

# ---- lesson 0 --------------------------------------------------------------------------------


@wrong("negative", SERIAL)
@cuda.jit
def negative_by_one_thread(x, y):
    if cuda.grid(2) == (0, 0):
        for row in range(x.shape[0]):
            for col in range(x.shape[1]):
                y[row, col] = np.float32(1) - x[row, col]


mistakes("negative",
    ("negative_by_every_thread", TWICE, "col, row = cuda.grid(2)\n",
     "for row in range(x.shape[0]):\n        for col in range(x.shape[1]):\n       "))


LINE = "    y[row, col] = np.float32(1) - x[row, col]"
mistakes("negative",
    ("negative_borrowed", BORROWED, LINE, "    old = x[row, col]\n"
     "    x[row, col] = np.float32(1) - old\n    y[row, col] = x[row, col]\n"
     "    x[row, col] = old"),
    ("negative_of_16_rows", UNWRITTEN, LINE, "    if row < 16:\n    " + LINE),
    ("negative_of_24_columns", UNWRITTEN, LINE, "    if col < 24:\n    " + LINE))

# ---- lesson 1 --------------------------------------------------------------------------------


mistakes("relu",
    ("relu_by_one_thread", SERIAL, "i = cuda.grid(1)\n    if i < x.size:\n",
     "if cuda.grid(1) == 0:\n        for i in range(x.size):\n    "))


@wrong("relu", TWICE)
@cuda.jit
def relu_by_every_thread(x, y):
    for i in range(x.size):
        y[i] = max(x[i], np.float32(0))


@wrong("column_sum", SERIAL)
@cuda.jit
def columns_by_one_thread(x, y):
    if cuda.grid(1) == 0:
        for col in range(x.shape[1]):
            total = np.float32(0)
            for row in range(x.shape[0]):
                total += x[row, col]
            y[col] = total


RELU = "max(x[i], np.float32(0))"
mistakes("relu",
    # 0 times an infinity is no number.
    ("relu_times_a_truth", NAN, RELU, "x[i] * np.float32(x[i] > 0)"),
    ("relu_up_to_a_half", VALUES, RELU, "min(max(x[i], np.float32(0)), np.float32(65504))"),
    ("relu_of_512", UNWRITTEN, "i < x.size", "i < min(x.size, 512)"),
    ("relu_borrowed", BORROWED, "        y[i] = " + RELU, "        old = x[i]\n"
     "        x[i] = " + RELU + "\n        y[i] = x[i]\n        x[i] = old"))
mistakes("relu_grid_stride",
    ("stride_of_two_rounds", UNWRITTEN, "range(cuda.grid(1), x.size,",
     "range(cuda.grid(1), min(x.size, 2 * cuda.gridsize(1)),"))
mistakes("column_sum",
    ("columns_of_64_rows", VALUES, "range(n_rows)", "range(min(n_rows, 64))"),
    ("columns_of_512", UNWRITTEN, "col < n_cols", "col < n_cols and col < 512"))
mistakes("sigmoid", ("sigmoid_of_the_middle", VALUES, "-abs(x[i])",
                     "-min(abs(x[i]), np.float32(9))"))

# ---- lesson 2 --------------------------------------------------------------------------------


@wrong("histogram", SERIAL)
@cuda.jit
def levels_by_one_thread(x, counts):
    if cuda.grid(1) == 0:
        for i in range(x.size):
            counts[x[i]] += 1


@wrong("block_sum", "x is read \\d+ times")
@cuda.jit
def sum_by_every_thread(x, y):
    total = np.float32(0)
    for col in range(x.shape[1]):
        total += x[cuda.blockIdx.x, col]
    y[cuda.blockIdx.x] = total


@wrong("block_sum", SERIAL)
@cuda.jit
def sum_by_one_thread(x, y):
    if cuda.grid(1) == 0:
        for row in range(x.shape[0]):
            total = np.float32(0)
            for col in range(x.shape[1]):
                total += x[row, col]
            y[row] = total


@wrong("block_sum", OUTSIDE)
@cuda.jit
def sum_of_a_copied_row(x, y):
    row = cuda.shared.array(512, np.float32)
    t, n = cuda.threadIdx.x, x.shape[1]
    for col in range(t, n, cuda.blockDim.x):
        row[col] = x[cuda.blockIdx.x, col]
    cuda.syncthreads()
    if t == 0:
        total = np.float32(0)
        for col in range(n):
            total += row[col]
        y[cuda.blockIdx.x] = total


mistakes("block_sum", ("sum_for_128_threads", OUTSIDE, "shared.array(256", "shared.array(128"))
mistakes("warp_sum",
    ("warp_sum_of_four_rows", UNWRITTEN, "row < x.shape[0]", "row < min(x.shape[0], 7)"),
    ("warp_sum_by_reading_all", "made without shuffles", "range(lane, x.shape[1], 32)",
     "range(x.shape[1])", "        step = 16\n", "        step = 0\n"))
mistakes("histogram_shared", ("shared_levels_below_128", VALUES + "|" + OUTSIDE,
                              "mine, x[i], 1", "mine, x[i] & 127, 1"))

# ---- lesson 3 --------------------------------------------------------------------------------


@wrong("softmax_naive", NAN)
@cuda.jit
def naive_maximum_of_the_array(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        largest, total = np.float32(-np.inf), np.float32(0)
        for other in range(x.shape[0]):
            for col in range(x.shape[1]):
                largest = max(largest, x[other, col])
        for col in range(x.shape[1]):
            total += math.exp(x[row, col] - largest)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - largest) / total


mistakes("softmax_naive",
    ("naive_from_minus_30000", NAN, "= MINUS_INF", "= np.float32(-3e4)"),
    ("naive_from_the_lowest_half", NAN, "= MINUS_INF", "= np.float32(-65504)"),
    ("naive_of_256_rows", UNWRITTEN, "row < n_rows", "row < min(n_rows, 256)"))
mistakes("softmax_warp",
    ("warp_from_minus_30000", NAN, "= MINUS_INF", "= np.float32(-3e4)"),
    ("warp_of_eight_rows", UNWRITTEN, "row < x.shape[0]", "row < min(x.shape[0], 8)"))
mistakes("softmax_shared",
    ("shared_for_128_threads", OUTSIDE, "shared.array(256", "shared.array(128"),
    ("shared_from_minus_1e30", NAN, "= MINUS_INF", "= np.float32(-1e30)"))
mistakes("softmax_online", ("online_from_minus_1e30", NAN, "m, s = MINUS_INF, ZERO",
                            "m, s = np.float32(-1e30), ZERO"))

# ---- lesson 4 --------------------------------------------------------------------------------

mistakes("softmax_registers",
    ("registers_from_minus_65504", NAN, "m, s = MINUS_INF,", "m, s = np.float32(-65504),"),
    ("registers_of_eight_rows", UNWRITTEN, "start < x.size", "start < min(x.size, 8 * n_cols)"))
mistakes("softmax_teams",
    ("teams_from_minus_65504", NAN, "m, s = MINUS_INF,", "m, s = np.float32(-65504),"),
    ("teams_of_32_rows", UNWRITTEN, "row < x.shape[0]", "row < min(x.shape[0], 32)"))
mistakes("softmax_backward", ("backward_of_eight_rows", UNWRITTEN, "row < y.shape[0]",
                              "row < min(y.shape[0], 8)"))
mistakes("blocks_per_multiprocessor",
    ("blocks_by_threads", VALUES, "64 // n_warps", "2048 // n_threads"),
    ("blocks_of_odd_registers", VALUES, "math.ceil(n_registers / 8) * 8", "n_registers"))
mistakes("bytes_in_flight", ("flight_of_600_ns", VALUES, "gbps * latency_ns",
                             "gbps * min(latency_ns, 1000)"))


mistakes("softmax_function",
    ("function_first_in_first_out", "the other order|pop from empty list", "    class",
     "    import torch\n\n    kept = []\n\n    class",
     "y = compute_y(x)\n            ctx.save_for_backward(y)\n            return y",
     "kept.append(compute_y(x))\n            return kept[-1].clone()", "*ctx.saved_tensors",
     "kept.pop(0)"))


mistakes("softmax_function",
    ("function_keeps_y_on_ctx", "y was changed in place", "    class",
     "    import torch\n\n    class",
     "y = compute_y(x)\n            ctx.save_for_backward(y)\n            return ",
     "ctx.y = compute_y(x)\n            return ctx.", "*ctx.saved_tensors", "ctx.y"))


# ---- lesson 5 --------------------------------------------------------------------------------

mistakes("cross_entropy",
    ("entropy_of_small_labels", VALUES, "target[row]]) +", "min(target[row], 255)]) +"),
    ("entropy_by_a_probability", VALUES + "|NaN",
     "(largest - logits[row, target[row]]) + math.log(total)",
     "-math.log(math.exp(logits[row, target[row]] - largest) / total)"),
    ("entropy_of_eight_rows", UNWRITTEN, "row < logits.shape[0]", "row < min(logits.shape[0], 8)"))
mistakes("cross_entropy_backward", ("gradient_of_small_labels", VALUES, "col == label",
                                    "col == min(label, 255)"))
mistakes("softmax_dropout_backward",
    ("dropout_seed_of_seven_bits", VALUES, "factor, total = ONE",
     "seed = seed % 128\n        factor, total = ONE"),
    ("dropout_seed_of_16_bits", VALUES, "factor, total = ONE",
     "seed = seed & 0xFFFF\n        factor, total = ONE"),
    ("dropout_of_quarters", VALUES, "factor, total = ONE / (ONE - p)",
     "p = np.float32(round(p * np.float32(4))) / np.float32(4)\n"
     "        factor, total = ONE / (ONE - p)"))
mistakes("bn_relu_softmax", ("layers_of_eight_rows", UNWRITTEN, "row < x.shape[0]",
                             "row < min(x.shape[0], 8)"))

# ---- lesson 6 --------------------------------------------------------------------------------

mistakes("squeeze",
    ("squeeze_of_64_pixels", VALUES, "range(warp, P, n_warps)", "range(warp, min(P, 64), n_warps)"),
    ("squeeze_for_four_warps", OUTSIDE, "shared.array((8, 32)", "shared.array((4, 32)"))
mistakes("excite", ("excite_of_96_hidden", OUTSIDE, "shared.array(MOST", "shared.array(96"))
mistakes("scale_channels",
    ("scale_of_512", UNWRITTEN, "x.size, cuda", "min(x.size, 512), cuda"))
mistakes("squeeze_excite_backward",
    ("backward_of_eight_channels", UNWRITTEN + "|" + VALUES, "_, C, P = x.shape",
     "_, C, P = x.shape\n    C = min(C, 8)"))
mistakes("squeeze_excite_fused", ("fused_of_four_channels", UNWRITTEN + "|" + VALUES,
     "G, lane = partial.shape[0], partial.shape[1],",
     "G, lane = partial.shape[0], min(partial.shape[1], 2),"))

# ---- lesson 7 --------------------------------------------------------------------------------

mistakes("describe_block",
    ("describe_on_meta", "has the device meta", "torch.empty_like(x)",
     'torch.empty_like(x, device="meta")'),
    ("describe_eight_hidden", "has the shape", "weight1.shape[0]", "min(weight1.shape[0], 8)"))
mistakes("hard_gate_backward",
    ("gate_of_64_places", VALUES, "lane, x.shape[1], 32", "lane, min(x.shape[1], 64), 32"),
    ("gate_of_eight_planes", UNWRITTEN, "plane < logit.size", "plane < min(logit.size, 8)"))
mistakes("amdahl", ("amdahl_of_twelve", VALUES, "(shares / speedups).sum()",
                    "(shares / speedups)[:12].sum()"))
mistakes("block_function", ("block_weights_on_ctx", "weight1 was changed in place",
     "ctx.save_for_backward(x, w1, w2, *saved)",
     "ctx.w = w1, w2\n            ctx.save_for_backward(x, *saved)",
     "*ctx.saved_tensors, gate", "ctx.saved_tensors[0], *ctx.w, *ctx.saved_tensors[1:], gate"))
