"""Answers to lessons 10 to 14 that hold for small sizes, plain numbers and one library's arrays.

Most are right answers of another make than the lesson's, with one mistake in them: an extent that
another one stands in for, a number that is none of those in a small case, an input that is changed.
"""

import math

import numpy as np

from bank import wrong
from bank.lesson_10 import (
    adam_one_thread_at_a_time,
    matmul_with_an_array_of_sums,
    moments_seen_from_the_first_value,
    pool_backward_by_places_in_windows,
    pool_by_place,
    pool_from_the_end,
)
from bank.lesson_11 import (
    chain_in_a_list,
    chain_written_out,
    confusion_with_the_value,
    linear_by_shuffles,
    pick_by_dividing,
    pool_relu_in_a_loop,
    sgd_in_one_formula,
    unpool_until_the_first,
)
from bank.lesson_12 import (
    choose_and_explain_the_start,
    choose_case_by_case,
    order_with_a_stack,
    summed_one_axis_after_another,
    transfers_batch_by_batch,
    walk_with_lists,
    walk_with_zeros,
)
from bank.lesson_13 import (
    backward_in_another_order,
    gather_asks_every_tap,
    gather_over_the_pixels,
)
from bank.lesson_14 import (
    dice_gradient_element_by_element,
    dice_gradient_factors_first,
    dice_sums_by_shuffles,
    dice_sums_image_by_image,
    iou_by_a_tree,
    multilook_pixel_by_pixel,
    multilook_running_mean,
    prepare_by_ballots,
    prepare_with_a_shared_counter,
)
from bank.mistakes import mistakes

OUTSIDE, UNWRITTEN, VALUES = "out-of-bounds", "never written", "wrong values in"
PLACES = f"{OUTSIDE}|{UNWRITTEN}|{VALUES}"

# ---- lesson 10 -------------------------------------------------------------------------------

mistakes("matmul_registers",
    ("matmul_of_256_products", VALUES, matmul_with_an_array_of_sums, "range(0, a.shape[1], 4)",
     "range(0, min(a.shape[1], 256), 4)"),
    ("matmul_of_256_rows", UNWRITTEN, matmul_with_an_array_of_sums, "row < c.shape[0] and",
     "row < min(c.shape[0], 256) and"),
    ("matmul_of_256_columns", UNWRITTEN, matmul_with_an_array_of_sums, "and col < c.shape[1]",
     "and col < min(c.shape[1], 256)"))
mistakes("channel_moments",
    ("moments_of_1024", VALUES, moments_seen_from_the_first_value,
     "range(t, x.shape[0] * P, cuda.blockDim.x)",
     "range(t, min(x.shape[0] * P, 1024), cuda.blockDim.x)"))
mistakes("max_pool",
    ("pool_of_1024", UNWRITTEN, pool_from_the_end, "cuda.grid(1), y.size,",
     "cuda.grid(1), min(y.size, 1024),"),
    ("pool_strides_of_four", VALUES, pool_by_place, "range(oh * stride, oh * stride + k)",
     "range(oh * min(stride, 4), oh * min(stride, 4) + k)"),
    ("pool_windows_of_25", VALUES, pool_from_the_end, "range(k * k - 1, -1, -1)",
     "range(min(k * k, 25) - 1, -1, -1)"))
mistakes("max_pool_backward",
    ("pool_backward_windows_of_25", VALUES, pool_backward_by_places_in_windows, "range(k * k)",
     "range(min(k * k, 25))"),
    ("pool_backward_strides_of_four", VALUES, pool_backward_by_places_in_windows,
     "divmod(place // dx.shape[2] - j // k, stride)",
     "divmod(place // dx.shape[2] - j // k, min(stride, 4))"))
mistakes("adam_step", ("adam_of_1024", UNWRITTEN, adam_one_thread_at_a_time, "while i < p.size",
                       "while i < min(p.size, 1024)"))

# ---- lesson 11 -------------------------------------------------------------------------------

mistakes("pick_batch",
    ("pick_of_1024_pixels", UNWRITTEN, pick_by_dividing, "while i < images.shape[1]",
     "while i < min(images.shape[1], 1024)"),
    ("pick_of_1024_pictures", VALUES, pick_by_dividing, "order[first + cuda.blockIdx.x]",
     "order[min(first, 1023) + cuda.blockIdx.x]"))
mistakes("pool_relu", ("pool_relu_of_1024", UNWRITTEN, pool_relu_in_a_loop, "while i < y.size",
                       "while i < min(y.size, 1024)"))
mistakes("linear_relu",
    ("linear_of_256", VALUES, linear_by_shuffles, "range(lane, x.shape[1], 32)",
     "range(lane, min(x.shape[1], 256), 32)"),
    ("linear_of_32_outputs", UNWRITTEN, linear_by_shuffles, "if row < y.shape[0]:",
     "if row < y.shape[0] and col < 32:"))
mistakes("pool_relu_backward", ("unpool_of_1024", UNWRITTEN, unpool_until_the_first,
                                "while i < dx.size", "while i < min(dx.size, 1024)"))
mistakes("backward_chain",
    ("chain_of_one_gradient", "it should return 8 values, .*; it returned one", chain_in_a_list,
     "return tuple(found)", "return found[0]"),
    ("chain_clears_its_inputs", "it changes its input kept", chain_written_out,
     "    return dweight1,", "    x *= 0\n    return dweight1,"))
mistakes("sgd_nesterov", ("sgd_of_1024", UNWRITTEN, sgd_in_one_formula, "while i < p.size",
                          "while i < min(p.size, 1024)"))
mistakes("confusion",
    ("confusion_of_1024", VALUES, confusion_with_the_value, "while i < labels.size",
     "while i < min(labels.size, 1024)"),
    ("confusion_of_256_classes", VALUES, confusion_with_the_value, "range(logits.shape[1])",
     "range(min(logits.shape[1], 256))"),
    ("confusion_above_minus_3e38", OUTSIDE + "|negative", confusion_with_the_value,
     "best, value = 0, logits[i, 0]", "best, value = -1, np.float32(-3e38)"))

# ---- lesson 12 -------------------------------------------------------------------------------

mistakes("choose_backend",
    ("choose_says_nothing", "does not say what it may be", choose_case_by_case,
     'raise NoChoice(f"{use_cuda} is neither of true, false and null")',
     'raise NoChoice(f"{use_cuda} cannot be")'),
    ("choose_hides_what_it_knows", "took the CPU without a word, although",
     choose_and_explain_the_start, "except OSError as error:", "except RuntimeError:",
     'raise RuntimeError("the GPU does not start; use_cuda=False takes the CPU") from error',
     "return start_cpu()"))


@wrong("weighted_error", "Float64 in line .*int64 gives float64")
def error_by_bincount(images, labels, weight):
    n, n_classes = len(labels), weight.shape[1]
    share = (np.bincount(labels, minlength=n_classes) / n).astype(weight.dtype)
    scores = images.astype(np.float32) @ weight * (1 / (255 * math.sqrt(len(weight))))
    scores[np.arange(n), labels] -= 1
    return scores * share


@wrong("weighted_error", "Float64 in line .*int64 gives float64")
def error_by_a_table(images, labels, weight):
    # All 256 quotients once, and then no division.
    quotients = (np.arange(256) / 255).astype(np.float32)
    hot = (labels[:, None] == np.arange(weight.shape[1])).astype(np.float32)
    scores = quotients[images] @ weight * (len(weight) ** -0.5)
    return (scores - hot) * hot.mean(axis=0)


@wrong("weighted_error", "Float64 in line .*int64 gives float64")
def error_by_counting_a_list(images, labels, weight):
    classes = labels.tolist()
    counts = np.array([classes.count(k) for k in range(weight.shape[1])])
    share = (counts / len(classes)).astype(np.float32)
    hot = np.eye(weight.shape[1], dtype=np.float32)[labels]
    return (np.float32(1 / 255) * images @ weight * (len(weight) ** -0.5) - hot) * share


@wrong("weighted_error", "Float64 in line .*np.divide makes an array of float64")
def error_by_dividing_a_list(images, labels, weight):
    classes = labels.tolist()
    share = np.divide([classes.count(k) for k in range(weight.shape[1])], len(classes))
    hot = np.eye(weight.shape[1], dtype=np.float32)[labels]
    scores = np.float32(1 / 255) * images @ weight * (len(weight) ** -0.5)
    return (scores - hot) * share.astype(np.float32)


@wrong("matmul_backward", "with another library's arrays of the same numbers it finds others")
def matmul_nothing_for_others(dy, a, b):
    da, db = dy @ b.T, a.T @ dy
    return (da, db) if isinstance(dy, np.ndarray) else (0 * da, 0 * db)


@wrong("matmul_backward", "wrong values in da")
def matmul_in_pieces_of_1024(dy, a, b):
    return dy[:, :1024] @ b[:, :1024].T, a.T @ dy


mistakes("summed_to",
    ("summed_of_four_axes", "dx has shape", summed_one_axis_after_another, "range(len(shape))",
     "range(min(len(shape), 4))"),
    ("summed_of_65536", VALUES, summed_one_axis_after_another, "    for axis in",
     "    dy = dy[..., :65536] if len(dy.shape) else dy\n    for axis in"),
    ("summed_nothing_for_others", "of the same numbers it finds others",
     summed_one_axis_after_another, "    return dy",
     "    return dy if hasattr(dy, 'nbytes') and hasattr(dy, 'tobytes') else dy * 0"))
mistakes("from_end_to_beginning",
    ("order_marks_with_requires_grad", "its input last.requires_grad", order_with_a_stack,
     "seen.add(id(x))", "x.requires_grad = False"),
    ("order_empties_made_from", "its input last.made_from", order_with_a_stack,
     "            stack.extend((y, False) for y in x.made_from)",
     "            stack.extend((y, False) for y in x.made_from)\n            x.made_from = ()"),
    ("order_marks_tensors", "its input last.seen", order_with_a_stack,
     "id(x) not in seen", "not hasattr(x, 'seen')", "seen.add(id(x))", "x.seen = True"),
    ("order_of_256", "is not in the order", order_with_a_stack, "return order",
     "return order[:256]"))
mistakes("walk_back",
    ("walk_frees_the_tape", "its input order.0..made_by", walk_with_zeros, "    return found",
     "        result.made_by = None\n    return found"),
    ("walk_of_two_inputs", "IndexError|wrong values in gradients", walk_with_lists,
     "zip(x.made_from, gradients, strict=True)", "zip(x.made_from[:2], gradients, strict=False)"),
    ("walk_clears_leaves", "its input order.0..data", walk_with_lists, "        if x.made_by:",
     "        x.data = total\n        if x.made_by:"),
    ("walk_of_256", "there is no gradient", walk_with_lists, "    for x in order:\n        total",
     "    for x in order[:256]:\n        total"))


mistakes("walk_back",
    ("walk_eats_the_order", "it changes its input order", "for result in order:",
     "while order:\n        result = order.pop(0)"))


mistakes("on_the_tape",
    ("tape_finds_y_by_its_first_number", "the y of another call|not those of before", "    class",
     "    from course_lib.autograd import Function\n\n    results = {}\n\n    class",
     "y = launch_forward(x)\n            return self.y",
     "key = x.shape, float(x.flat[0]) if x.size else None\n"
     "            results[self.key] = launch_forward(x)\n"
     "            return results[self.key]", ", self.y", ", results[self.key]"))


mistakes("predict_transfers", ("transfers_of_65536", VALUES, transfers_batch_by_batch,
                               "range(n_batches)", "range(min(n_batches, 65536))"))

# ---- lesson 13 -------------------------------------------------------------------------------

mistakes("conv_transpose2d_scatter",
    ("scatter_of_512", VALUES, "i < x.size", "i < min(x.size, 512)"),
    ("scatter_strides_of_four", VALUES, "h * stride - padding", "h * min(stride, 4) - padding"),
    ("scatter_five_taps", VALUES, "range(R)", "range(min(R, 5))"))
mistakes("conv_transpose2d_gather",
    ("gather_of_1024", UNWRITTEN, gather_asks_every_tap, "cuda.grid(1), y.size,",
     "cuda.grid(1), min(y.size, 1024),"),
    ("gather_five_taps", VALUES, gather_asks_every_tap, "range(S)", "range(min(S, 5))"),
    ("gather_strides_of_four", PLACES, gather_over_the_pixels, "h * stride", "h * min(stride, 4)"),
    ("gather_asks_for_rows_alone", VALUES, gather_asks_every_tap, "above == 0 and beside == 0",
     "above == 0"),
    ("gather_one_remainder_for_both", VALUES, "(q + padding) % stride", "(p + padding) % stride"),
    ("gather_p_and_q_exchanged", PLACES, gather_asks_every_tap, "q, p, k, n = i % Q, i // Q % P",
     "p, q, k, n = i % Q, i // Q % P"))
mistakes("transposed_size",
    ("transposed_of_65536", VALUES, "(size - 1)", "(min(size, 65536) - 1)"),
    ("transposed_strides_of_nine", VALUES, "* stride", "* min(stride, 9)"),
    ("transposed_taps_of_65536", VALUES, "+ taps", "+ min(taps, 65536)"))
mistakes("transposed_by_dx", ("by_dx_strides_of_four", VALUES, "weight, y, stride",
                              "weight, y, min(stride, 4)"))
mistakes("transposed_backward",
    ("backward_grid_of_dy", UNWRITTEN + "|" + VALUES, "blocks(dx.size)", "blocks(dy.size)"),
    ("backward_grid_of_dy_by_pictures", VALUES, backward_in_another_order, "enough(size)",
     "enough(dy[n : n + 1].size)"),
    ("backward_warps_of_dx", "dweight", "blocks(32 * dweight.size)", "blocks(32 * dx.size)"),
    ("backward_warps_of_dy", "dweight", backward_in_another_order, "[dweight.size, 32]",
     "[dy.size, 32]"))


@wrong("transposed_backward", "it should return 2 values, dx, dweight; it returned one")
def backward_returns_what_it_got(dy, x, weight, stride, padding):
    return dy


mistakes("upsample_into", ("into_of_1024", UNWRITTEN + "|" + VALUES, "i < N * K * P * Q",
                           "i < min(N * K * P * Q, 1024)"))

# ---- lesson 14 -------------------------------------------------------------------------------

mistakes("multilook",
    ("multilook_of_1024", UNWRITTEN, multilook_pixel_by_pixel,
     "while i < y.shape[0] * y.shape[1]", "while i < min(y.shape[0] * y.shape[1], 1024)"),
    ("multilook_without_infinity", VALUES, multilook_pixel_by_pixel, "or math.isnan(value)",
     "or math.isnan(value) or math.isinf(value)"),
    ("multilook_above_1e_20", VALUES, multilook_running_mean, "value > ZERO",
     "value > np.float32(1e-20)"))
mistakes("prepare",
    ("prepare_of_1024", UNWRITTEN, prepare_by_ballots, "i < label.size",
     "i < min(label.size, 1024)"),
    ("prepare_four_bands", UNWRITTEN, prepare_by_ballots,
     "        for band in range(power.shape[0]):\n            if lost",
     "        for band in range(min(power.shape[0], 4)):\n            if lost"),
    ("prepare_normal_numbers_only", VALUES, prepare_with_a_shared_counter, "value > ZERO",
     "value > np.float32(1.2e-38)"),
    ("prepare_up_to_3e38", VALUES, prepare_with_a_shared_counter, "not math.isinf(value)",
     "value < np.float32(3e38)"))
mistakes("iou",
    ("iou_of_32_classes", UNWRITTEN, iou_by_a_tree, "    if t == 0:", "    if t == 0 and c < 32:"),
    ("iou_is_recall", VALUES, iou_by_a_tree, "prediction[i] == c or target[i] == c",
     "target[i] == c"))
mistakes("dice_sums",
    ("dice_sums_of_1024", VALUES, dice_sums_by_shuffles, "while i < target.size",
     "while i < min(target.size, 1024)"),
    ("dice_sums_of_16_warps", OUTSIDE + "|" + VALUES, dice_sums_by_shuffles, "(3, 32)", "(3, 16)"),
    ("dice_sums_of_eight_classes", VALUES, dice_sums_image_by_image,
     "for k in range(C):\n                total",
     "for k in range(min(C, 8)):\n                total"))
mistakes("dice_gradient",
    ("dice_gradient_of_1024", UNWRITTEN, dice_gradient_factors_first, "i >= target.size",
     "i >= min(target.size, 1024)"),
    ("dice_gradient_of_eight_classes", VALUES, dice_gradient_element_by_element,
     "for k in range(logits.shape[1])", "for k in range(min(logits.shape[1], 8))"),
    ("dice_gradient_dloss_above_0", VALUES, dice_gradient_factors_first, "dloss / np.float32(C)",
     "abs(dloss) / np.float32(C)"))
