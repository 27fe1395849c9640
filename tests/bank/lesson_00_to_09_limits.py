"""Answers to lessons 0 to 9 that are right for small sizes, or for values of one kind, alone.

They have a limit that is a round number, mistake a value for a mark, or leave the work to a few
threads. Nearly all are right answers of another make, with the limit in them.
"""

import math

import numpy as np

from bank import (
    lesson_00,
    lesson_01,
    lesson_02,
    lesson_03,
    lesson_04,
    lesson_05,
    lesson_06,
    lesson_07,
    lesson_08,
    lesson_09,
    wrong,
)
from bank.mistakes import mistakes
from course_lib import cuda
from course_lib.runtime.intrinsics import online_add, warp_max, warp_sum

OUTSIDE, UNWRITTEN, VALUES = "out-of-bounds", "never written", "wrong values in"
PLACES = f"{OUTSIDE}|{UNWRITTEN}|{VALUES}|no part in"
NAN = "NaN was computed|" + VALUES
FEW = "should share the work|threads (read|write);"
MINUS_INF, ZERO, ONE = np.float32(-np.inf), np.float32(0), np.float32(1)

# ---- lesson 0 --------------------------------------------------------------------------------

INSIDE = "row < x.shape[0] and col < x.shape[1]"
mistakes("negative",
    ("negative_of_lit_pixels", UNWRITTEN, lesson_00.guarded, INSIDE, INSIDE + " and x[row, col]"),
    ("negative_of_1024_rows", UNWRITTEN, lesson_00.guarded, "x.shape[0]", "min(x.shape[0], 1024)"),
    ("negative_of_1024_columns", UNWRITTEN, lesson_00.guarded, "x.shape[1]",
     "min(x.shape[1], 1024)"))

# ---- lesson 1 --------------------------------------------------------------------------------

mistakes("relu",
    ("relu_of_1024", UNWRITTEN, lesson_01.relu_two_branches, "len(x)", "min(len(x), 1024)"),
    ("relu_of_what_can_be_seen", VALUES, lesson_01.relu_returns_early, "x[i] > ZERO",
     "x[i] > np.float32(1e-30)"))
mistakes("relu_grid_stride",
    ("stride_of_4096", UNWRITTEN, lesson_01.stride_while, "i < x.size", "i < min(x.size, 4096)"))


@wrong("relu_grid_stride", FEW)
@cuda.jit
def stride_of_first_lanes(x, y):
    each = math.ceil(cuda.blockDim.x / 32)
    if cuda.threadIdx.x % 32 == 0:
        warp = cuda.blockIdx.x * each + cuda.threadIdx.x // 32
        for i in range(warp, x.size, cuda.gridDim.x * each):
            y[i] = max(x[i], ZERO)


mistakes("nchw_index",
    ("nchw_brighter_alone", VALUES, lesson_01.nchw_digits, "bias[c]", "max(bias[c], ZERO)"),
    ("nchw_of_eight_channels", PLACES + "|more than one", lesson_01.nchw_digits,
     "n, c = rest // C, rest % C", "n, c = rest // C, rest % min(C, 8)"),
    ("nchw_of_256_pictures", PLACES, lesson_01.nchw_from_the_left, "n = i // (C * H * W)",
     "n = min(i // (C * H * W), 255)"),
    ("nchw_of_1024", UNWRITTEN, lesson_01.nchw_from_the_left, "i < x.size",
     "i < min(x.size, 1024)"))
mistakes("column_sum",
    ("columns_of_1024_rows", PLACES, lesson_01.columns_from_the_bottom, "range(x.shape[0] - 1",
     "range(min(x.shape[0], 1024) - 1"),
    ("columns_up_to_1024", UNWRITTEN, lesson_01.columns_in_place_of_a_total, "x.shape[1], cuda",
     "min(x.shape[1], 1024), cuda"))
mistakes("sigmoid", ("sigmoid_of_1024", UNWRITTEN, lesson_01.sigmoid_textbook, "i < x.size",
                     "i < min(x.size, 1024)"))
mistakes("swish_backward",
    ("swish_of_1024", UNWRITTEN, lesson_01.swish_with_a_function, "i < x.size",
     "i < min(x.size, 1024)"),
    ("swish_without_a_gradient", UNWRITTEN, lesson_01.swish_with_a_function, "i < x.size",
     "i < x.size and dy[i] != 0"))

# ---- lesson 2 --------------------------------------------------------------------------------

mistakes("histogram", ("hist_of_1024", PLACES, lesson_02.hist_returns_early, "i >= x.shape[0]",
                       "i >= min(x.shape[0], 1024)"))
mistakes("histogram_shared", ("shared_of_1024", PLACES, lesson_02.shared_first_thread_zeroes,
                              "i < x.size", "i < min(x.size, 1024)"))


@wrong("histogram_shared", FEW)
@cuda.jit
def shared_counted_by_one_thread(x, counts):
    mine = cuda.shared.array(256, np.int32)
    if cuda.threadIdx.x == 0:
        for level in range(256):
            mine[level] = 0
        for i in range(cuda.blockIdx.x, x.size, cuda.gridDim.x):
            mine[x[i]] += 1
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


mistakes("block_sum",
    ("tree_of_1024", PLACES, lesson_02.tree_with_for, "range(t, x.shape[1], n)",
     "range(t, min(x.shape[1], 1024), n)"),
    ("tree_of_eight_rows", UNWRITTEN, lesson_02.tree_neighbours, "    if t == 0:",
     "    if t == 0 and cuda.blockIdx.x < 8:"))


@wrong("block_sum", FEW)
@cuda.jit
def sum_by_the_first_warp(x, y):
    total = ZERO
    if cuda.threadIdx.x < 32:
        for col in range(cuda.threadIdx.x, x.shape[1], 32):
            total += x[cuda.blockIdx.x, col]
        total = warp_sum(total)
    if cuda.threadIdx.x == 0:
        y[cuda.blockIdx.x] = total


@wrong("block_sum", OUTSIDE)
@cuda.jit
def sum_of_a_row_kept_in_shared_memory(x, y):
    row = cuda.shared.array(1024, np.float32)
    t, n, total = cuda.threadIdx.x, x.shape[1], ZERO
    for col in range(t, n, cuda.blockDim.x):
        row[col] = x[cuda.blockIdx.x, col]
    cuda.syncthreads()
    if t == 0:
        for col in range(n):
            total += row[col]
        y[cuda.blockIdx.x] = total


@wrong("warp_sum", FEW)
@cuda.jit
def warp_sum_with_a_shuffle_for_show(x, y):
    row, lane, total = cuda.grid(1) // 32, cuda.laneid, ZERO
    if row < x.shape[0]:
        if lane == 0:
            for col in range(x.shape[1]):
                total += x[row, col]
        total = warp_sum(total)
        if lane == 0:
            y[row] = total


mistakes("warp_sum",
    ("warp_sum_of_1024", PLACES, "range(lane, x.shape[1], 32)",
     "range(lane, min(x.shape[1], 1024), 32)"),
    ("warp_sum_of_32_rows", UNWRITTEN, "row < x.shape[0]", "row < min(x.shape[0], 32)"))
mistakes("global_avg_pool",
    ("pool_of_1024", PLACES, lesson_02.pool_with_warps, "H * W, cuda.blockDim.x)",
     "min(H * W, 1024), cuda.blockDim.x)"),
    ("pool_of_256_rows", PLACES, lesson_02.pool_divides_first, "range(H)", "range(min(H, 256))"),
    ("pool_of_eight_channels", PLACES, lesson_02.pool_divides_first,
     "cuda.blockIdx.x // C, cuda.blockIdx.x % C", "cuda.blockIdx.x // C, cuda.blockIdx.x % C % 8"),
    ("pool_of_four_pictures", UNWRITTEN, lesson_02.pool_divides_first, "if t == 0:",
     "if t == 0 and n < 4:"))
mistakes("global_avg_pool_backward",
    ("unpool_of_256_columns", UNWRITTEN, lesson_02.unpool_row_by_row, "cuda.threadIdx.x, W,",
     "cuda.threadIdx.x, min(W, 256),"),
    ("unpool_of_1024", UNWRITTEN, lesson_02.unpool_through_shared, "x, H * W, cuda",
     "x, min(H * W, 1024), cuda"),
    ("unpool_without_a_gradient", UNWRITTEN, lesson_02.unpool_through_shared,
     "        dx[n, c, i // W, i % W] = share[0]",
     "        if share[0] != 0:\n            dx[n, c, i // W, i % W] = share[0]"))

# ---- lesson 3 --------------------------------------------------------------------------------

mistakes("softmax_naive",
    ("naive_of_1024_columns", PLACES + "|NaN", lesson_03.naive_online,
     "range(x.shape[1]):\n            m, s", "range(min(x.shape[1], 1024)):\n            m, s",
     "range(x.shape[1]):\n            y", "range(min(x.shape[1], 1024)):\n            y"),
    ("naive_of_1024_rows", UNWRITTEN, lesson_03.naive_online, "row < x.shape[0]",
     "row < min(x.shape[0], 1024)"),
    ("naive_from_minus_3e38", NAN, lesson_03.naive_grid_stride_reciprocal, "LOWEST, ZERO",
     "np.float32(-3e38), ZERO"))
mistakes("softmax_shared",
    ("shared_of_1024", PLACES + "|NaN", lesson_03.shared_online,
     "range(t, x.shape[1], n):\n        y", "range(t, min(x.shape[1], 1024), n):\n        y"),
    ("shared_of_eight_rows", UNWRITTEN, lesson_03.shared_by_shuffles,
     "    for col in range(t, x.shape[1], n):\n        y",
     "    for col in range(t, x.shape[1] if row < 8 else 0, n):\n        y"))


@wrong("softmax_shared", FEW)
@cuda.jit
def shared_by_the_first_warp(x, y):
    row, lane, m, s = cuda.blockIdx.x, cuda.threadIdx.x, MINUS_INF, ZERO
    if lane < 32:
        for col in range(lane, x.shape[1], 32):
            m = max(m, x[row, col])
        m = warp_max(m)
        for col in range(lane, x.shape[1], 32):
            s += math.exp(x[row, col] - m)
        s = warp_sum(s)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


@wrong("softmax_warp", FEW + "|without shuffles")
@wrong("softmax_online", FEW)
@cuda.jit
def softmax_by_the_first_lane(x, y):
    row, m, s = cuda.grid(1) // 32, MINUS_INF, ZERO
    if row < x.shape[0] and cuda.laneid == 0:
        for col in range(x.shape[1]):
            m, s = online_add(m, s, x[row, col])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - m) / s


DOWN = lesson_03.warp_down_then_broadcast
mistakes("softmax_warp",
    ("warp_of_1024", PLACES + "|NaN", DOWN, "range(lane, x.shape[1], 32):\n        y",
     "range(lane, min(x.shape[1], 1024), 32):\n        y"),
    ("warp_of_32_rows", UNWRITTEN, DOWN, "row >= x.shape[0]", "row >= min(x.shape[0], 32)"))
mistakes("online_merge",
    ("merge_of_1024", UNWRITTEN, "i < m1.size", "i < min(m1.size, 1024)"),
    ("merge_takes_the_lowest_for_nothing", VALUES, "largest == MINUS_INF",
     "largest < np.float32(-3.35e38)"))

# ---- lesson 4 --------------------------------------------------------------------------------

mistakes("bytes_in_flight",
    ("flight_of_whole_nanoseconds", VALUES, lesson_04.flight_in_seconds, "* latency_ns",
     "* int(latency_ns)"),
    ("flight_up_to_65536", VALUES, lesson_04.flight_per_thread_first, "gbps /",
     "min(gbps, 65536) /"))
mistakes("softmax_registers",
    ("registers_of_16_rows", UNWRITTEN, lesson_04.registers_reciprocal_and_grid_stride,
     "while start < x.size:", "while start < min(x.size, 16 * n_cols):"))
mistakes("softmax_teams",
    ("teams_of_256_rows", UNWRITTEN, lesson_04.teams_of_neighbours, "row < x.shape[0]",
     "row < min(x.shape[0], 256)"))
mistakes("softmax_backward",
    ("backward_of_1024", PLACES, "range(lane, y.shape[1], 32):\n            dx",
     "range(lane, min(y.shape[1], 1024), 32):\n            dx"),
    ("backward_of_32_rows", UNWRITTEN, "row < y.shape[0]", "row < min(y.shape[0], 32)"))

# ---- lesson 5 --------------------------------------------------------------------------------


@wrong("predict_fusion", "unexpected keyword argument 'gbps'")
def fusion_by_other_names(n, n_operations, flops, bandwidth, rate, overhead):
    memory, arithmetic = 8 * n / (1e3 * bandwidth), flops * n / (1e6 * rate)
    fused = overhead + max(memory, n_operations * arithmetic)
    return n_operations * (overhead + max(memory, arithmetic)), fused


@wrong("cross_entropy", FEW)
@cuda.jit
def entropy_by_the_first_lane(logits, target, loss, m, s):
    row, largest, total = cuda.grid(1) // 32, MINUS_INF, ZERO
    if row < logits.shape[0] and cuda.laneid == 0:
        for col in range(logits.shape[1]):
            largest, total = online_add(largest, total, logits[row, col])
        m[row], s[row], loss[row] = largest, total, ZERO
        if target[row] >= 0:
            loss[row] = (largest - logits[row, target[row]]) + math.log(total)


@wrong("cross_entropy_backward", FEW)
@cuda.jit
def gradient_by_the_first_lane(dloss, logits, target, m, s, dlogits):
    row = cuda.grid(1) // 32
    if row < logits.shape[0] and cuda.laneid == 0:
        scale = dloss[row] if target[row] >= 0 else ZERO
        for col in range(logits.shape[1]):
            hot = ONE if col == target[row] else ZERO
            y = math.exp(logits[row, col] - m[row]) / s[row]
            dlogits[row, col] = scale * (y - hot)


mistakes("cross_entropy",
    ("entropy_of_1023_classes", VALUES, "target[row]]) +", "min(target[row], 1023)]) +"),
    ("entropy_of_32_rows", UNWRITTEN, "row < logits.shape[0]", "row < min(logits.shape[0], 32)"))
RECIPROCAL = lesson_05.gradient_by_reciprocal
mistakes("cross_entropy_backward",
    ("gradient_of_1024_classes", UNWRITTEN, RECIPROCAL, "col < logits.shape[1]",
     "col < min(logits.shape[1], 1024)"),
    ("gradient_of_32_rows", UNWRITTEN, RECIPROCAL, "row < logits.shape[0]",
     "row < min(logits.shape[0], 32)"),
    ("gradient_of_no_loss_is_not_written", UNWRITTEN, RECIPROCAL, "row < logits.shape[0]",
     "row < logits.shape[0] and dloss[row] != 0"))
mistakes("bn_relu_softmax",
    ("layers_of_16_rows", UNWRITTEN, lesson_05.layers_online, "row < x.shape[0]",
     "row < min(x.shape[0], 16)"),
    ("layers_of_features_that_vary", PLACES, lesson_05.layers_divide_by_the_root,
     "if col < x.shape[1]:", "if col < x.shape[1] and var[col] > 0:"))


@wrong("bn_relu_softmax", FEW)
@cuda.jit
def layers_by_the_first_lane(x, mean, var, weight, bias, y):
    row, m, s = cuda.grid(1) // 32, ZERO, ZERO
    if row < x.shape[0] and cuda.laneid == 0:
        for col in range(x.shape[1]):
            scale = weight[col] / math.sqrt(var[col] + lesson_05.EPS)
            y[row, col] = max((x[row, col] - mean[col]) * scale + bias[col], ZERO)
            m = max(m, y[row, col])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(y[row, col] - m)
            s += y[row, col]
        for col in range(x.shape[1]):
            y[row, col] /= s


mistakes("softmax_dropout_backward",
    ("dropout_of_256_columns", PLACES, lesson_05.dropout_grid_stride, "32):\n            dy",
     "32):\n            if col >= 256:\n                break\n            dy"),
    ("dropout_of_16_rows", UNWRITTEN, lesson_05.dropout_mask_in_bits, "row < x.shape[0]",
     "row < min(x.shape[0], 16)"))

# ---- lesson 6 --------------------------------------------------------------------------------

mistakes("squeeze",
    ("squeeze_of_1024_pixels", PLACES, lesson_06.squeeze_by_halves, "t // 32, P, cuda",
     "t // 32, min(P, 1024), cuda"),
    ("squeeze_of_256_channels", UNWRITTEN, lesson_06.squeeze_by_halves, "t < 32 and c < C",
     "t < 32 and c < min(C, 256)"),
    ("squeeze_of_four_pictures", UNWRITTEN, lesson_06.squeeze_by_halves, "t < 32 and c < C",
     "t < 32 and c < C and n < 4"))
mistakes("excite",
    ("excite_of_256_channels", PLACES, lesson_06.excite_warp_per_number, "range(lane, bias2.size,",
     "range(lane, min(bias2.size, 256),"),
    ("excite_by_a_sigmoid_that_overflows", NAN, lesson_06.excite_warp_per_number, "sigmoid(total)",
     "math.exp(total) / (ONE + math.exp(total))"))
mistakes("scale_channels",
    ("scale_of_1024", UNWRITTEN, lesson_06.scale_with_remainders, "i < y.size",
     "i < min(y.size, 1024)"),
    ("scale_of_eight_pictures", UNWRITTEN, lesson_06.scale_plane_by_plane, "N * C, cuda",
     "min(N, 8) * C, cuda"))
mistakes("squeeze_excite_fused",
    ("fused_of_32_items", UNWRITTEN, lesson_06.fused_all_pools_first, "2 * N * G, cuda",
     "min(2 * N * G, 32), cuda"))
mistakes("squeeze_excite_backward",
    ("backward_of_32_channels", PLACES, lesson_06.backward_thread_per_pixel,
     "C, P, R = x.shape[1], x.shape[2],", "C, P, R = min(x.shape[1], 32), x.shape[2],"),
    ("backward_of_256_pixels", PLACES, lesson_06.backward_thread_per_channel,
     "C, P, R = x.shape[1], x.shape[2],", "C, P, R = x.shape[1], min(x.shape[2], 256),"),
    ("backward_of_four_pictures", UNWRITTEN, lesson_06.backward_thread_per_pixel,
     "C, P, R = x.shape[1],", "C, P, R = 0 if cuda.blockIdx.x > 3 else x.shape[1],"))

# ---- lesson 7 --------------------------------------------------------------------------------

mistakes("amdahl", ("amdahl_of_1024", VALUES, lesson_07.amdahl_part_by_part,
                    "zip(shares, speedups, strict=True)", "zip(shares[:1024], speedups)"))
mistakes("describe_block",
    ("describe_the_input_itself", "one tensor is used twice", lesson_07.describe_by_torch,
     "torch.empty_like(x)", "x.detach()"))
mistakes("hard_gate_backward",
    ("gate_of_1024_places", VALUES, lesson_07.hard_gate_each_lane_scales, "range(lane, x.shape[1],",
     "range(lane, min(x.shape[1], 1024),"),
    ("gate_of_32_planes", UNWRITTEN, lesson_07.hard_gate_each_lane_scales, "plane < logit.size",
     "plane < min(logit.size, 32)"))

# ---- lesson 8 --------------------------------------------------------------------------------

mistakes("output_size", ("size_up_to_65536", VALUES, lesson_08.size_by_the_last_place, "= size +",
                         "= min(size, 65536) +"))
TAPS_FIRST, ENDS = lesson_08.direct_over_the_taps_first, lesson_08.direct_from_end_to_end
mistakes("conv2d_direct",
    ("direct_strides_of_four", PLACES, TAPS_FIRST, "p * stride", "p * min(stride, 4)"),
    ("direct_paddings_of_four", PLACES, TAPS_FIRST, "r - padding", "r - min(padding, 4)"),
    ("direct_of_five_taps", VALUES, TAPS_FIRST, "range(weight.shape[3])",
     "range(min(weight.shape[3], 5))"),
    ("direct_of_eight_channels", VALUES, ENDS, "range(C)", "range(min(C, 8))"),
    ("direct_of_twelve_filters", VALUES, ENDS, "bias[k] +", "bias[min(k, 11)] +"),
    ("direct_of_four_pictures", UNWRITTEN, TAPS_FIRST, "n < y.shape[0]", "n < min(y.shape[0], 4)"),
    ("direct_of_1024", UNWRITTEN, ENDS, "y.size, cuda", "min(y.size, 1024), cuda"))
mistakes("convolution_work",
    ("work_of_1024_rows", VALUES, lesson_08.work_filter_by_filter, "K * N * H**2",
     "K * N * min(H, 1024) ** 2"),
    ("work_of_1024_channels", VALUES, lesson_08.work_filter_by_filter, "C // groups",
     "min(C, 1024) // groups"))
mistakes("conv2d_tiled",
    ("tiled_of_four_channels", VALUES, lesson_08.tiled_two_halos, "range(C)", "range(min(C, 4))"),
    ("tiled_of_eight_filters", UNWRITTEN, "left + col < W", "left + col < W and k < 8"),
    ("tiled_of_four_pictures", UNWRITTEN, "left + col < W", "left + col < W and n < 4"),
    ("tiled_of_64_columns", UNWRITTEN, "left + col < W", "left + col < min(W, 64)"))
REMAINDERS = lesson_08.im2col_with_remainders
mistakes("im2col",
    ("columns_strides_of_four", PLACES, REMAINDERS, "place % Q * stride",
     "place % Q * min(stride, 4)"),
    ("columns_paddings_of_four", PLACES, REMAINDERS, "// Q * stride - padding",
     "// Q * stride - min(padding, 4)"),
    ("columns_of_four_pictures", PLACES, REMAINDERS, "divmod(pixel, P * Q)",
     "pixel // (P * Q) % 4, pixel % (P * Q)"),
    ("columns_of_eight_channels", PLACES, REMAINDERS, "x[n, c, h, w]", "x[n, c % 8, h, w]"),
    ("columns_of_five_taps", PLACES, REMAINDERS, "+ tap % S", "+ min(tap % S, 4)"),
    ("columns_of_1024", UNWRITTEN, REMAINDERS, "columns.size, cuda",
     "min(columns.size, 1024), cuda"))
TWO_TILES = lesson_08.implicit_two_tiles
mistakes("implicit_gemm",
    ("implicit_strides_of_four", PLACES, TWO_TILES, "place % Q * stride",
     "place % Q * min(stride, 4)"),
    ("implicit_paddings_of_four", PLACES, TWO_TILES, "// Q * stride - padding",
     "// Q * stride - min(padding, 4)"),
    ("implicit_of_32_channels", VALUES, TWO_TILES, "c < x.shape[1]", "c < min(x.shape[1], 32)"),
    ("implicit_of_five_taps", VALUES, TWO_TILES, "+ tap % S", "+ min(tap % S, 4)"),
    ("implicit_of_16_filters", UNWRITTEN, "if k < K and n < N:", "if k < min(K, 16) and n < N:"),
    ("implicit_of_64_pixels", PLACES, TWO_TILES, "if n < x.shape[0] and c",
     "if pixel < 64 and n < x.shape[0] and c"))

# ---- lesson 9 --------------------------------------------------------------------------------

BY_INDICES, OVER = lesson_09.spread_by_indices, lesson_09.dx_over_the_results
mistakes("dx_as_convolution",
    ("spread_strides_of_four", VALUES, BY_INDICES, "stride * np.arange(dy.shape[2])",
     "min(stride, 4) * np.arange(dy.shape[2])"),
    ("spread_of_512", VALUES + "|shape", lesson_09.spread_number_by_number, "range(dy.shape[3])",
     "range(min(dy.shape[3], 512))"))
mistakes("conv2d_dx",
    ("dx_strides_of_four", PLACES, OVER, "p * stride", "p * min(stride, 4)"),
    ("dx_paddings_of_four", PLACES, OVER, "h + padding", "h + min(padding, 4)"),
    ("dx_of_five_taps", VALUES, OVER, "s < S", "s < min(S, 5)"),
    ("dx_of_eight_channels", PLACES + "|more than one", OVER, "i // (W * H) % C",
     "i // (W * H) % min(C, 8)"),
    ("dx_of_twelve_filters", VALUES, OVER, "range(dy.shape[1])", "range(min(dy.shape[1], 12))"),
    ("dx_of_four_pictures", PLACES + "|more than one", OVER, "i // (W * H * C)",
     "i // (W * H * C) % 4"),
    ("dx_of_1024", UNWRITTEN, OVER, "dx.size, cuda", "min(dx.size, 1024), cuda"))
BUTTERFLY = lesson_09.dweight_by_a_butterfly
mistakes("conv2d_dweight",
    ("dweight_strides_of_four", PLACES, BUTTERFLY, "p * stride", "p * min(stride, 4)"),
    ("dweight_of_four_pictures", VALUES, BUTTERFLY, "range(lane, dy.shape[0]",
     "range(lane, min(dy.shape[0], 4)"),
    ("dweight_of_five_taps", PLACES, BUTTERFLY, "if lane == 31:", "if lane == 31 and s < 5:"),
    ("dweight_of_eight_channels", UNWRITTEN, BUTTERFLY, "if lane == 31:",
     "if lane == 31 and c < 8:"),
    ("dweight_of_eight_filters", UNWRITTEN, BUTTERFLY, "k < dweight.shape[0]",
     "k < min(dweight.shape[0], 8)"),
    ("dweight_of_256", VALUES, "range(lane, N * P * Q, 32)",
     "range(lane, min(N * P * Q, 256), 32)"))
mistakes("conv2d_dbias",
    ("dbias_of_1024", VALUES + "|no part", lesson_09.dbias_by_a_tree,
     "range(t, dy.shape[2] * dy.shape[3], left)",
     "range(t, min(dy.shape[2] * dy.shape[3], 1024), left)"),
    ("dbias_of_four_pictures", VALUES + "|no part", lesson_09.dbias_by_a_tree, "range(dy.shape[0])",
     "range(min(dy.shape[0], 4))"),
    ("dbias_of_eight_channels", UNWRITTEN, lesson_09.dbias_by_a_tree, "    if t == 0:",
     "    if t == 0 and cuda.blockIdx.x < 8:"))
