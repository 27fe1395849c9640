"""Answers to lessons 8 to 14 that are right where checks of fixed cases look, and wrong elsewhere.

See lesson_00_to_07_evasions.py.
"""

import numpy as np

from bank import wrong
from bank.mistakes import mistakes
from course_lib import cuda

OUTSIDE, UNWRITTEN, VALUES = "out-of-bounds", "never written", "wrong values in"
PLACES = f"{OUTSIDE}|{UNWRITTEN}|{VALUES}"
SERIAL = "writes everything"

# ---- lesson 8 --------------------------------------------------------------------------------

mistakes("output_size",
    ("size_of_small_strides", VALUES, "// stride", "// min(stride, 5)"),
    ("size_of_small_paddings", VALUES, "2 * padding", "2 * min(padding, 4)"),
    ("size_of_small_dilations", VALUES, "dilation *", "min(dilation, 3) *"))
mistakes("conv2d_direct",
    ("direct_paddings_of_two", PLACES, "p * stride - padding", "p * stride - min(padding, 2)"),
    ("direct_strides_of_three", PLACES, "p * stride - padding", "p * min(stride, 3) - padding"),
    ("direct_of_512", UNWRITTEN, "i < y.size", "i < min(y.size, 512)"))


@wrong("conv2d_tiled", "made without shared memory")
@cuda.jit
def tiled_without_a_halo(x, weight, y):
    C, H, W = x.shape[1:]
    K, t = y.shape[1], cuda.threadIdx.x
    n, k = cuda.blockIdx.z // K, cuda.blockIdx.z % K
    row, col = 8 * cuda.blockIdx.y + t // 8, 8 * cuda.blockIdx.x + t % 8
    if row < H and col < W:
        total = np.float32(0)
        for c in range(C):
            for r in range(3):
                for s in range(3):
                    h, w = row - 1 + r, col - 1 + s
                    if h >= 0 and h < H and w >= 0 and w < W:
                        total += x[n, c, h, w] * weight[k, c, r, s]
        y[n, k, row, col] = total


mistakes("conv2d_tiled", ("tiled_two_by_two_tiles", UNWRITTEN, "top + row < H",
                          "top + row < min(H, 16)"))
mistakes("im2col", ("columns_paddings_of_two", PLACES, "p * stride - padding + r",
                    "p * stride - min(padding, 2) + r"))
mistakes("implicit_gemm", ("implicit_of_eight_filters", UNWRITTEN, "if k < K and n < N:",
                           "if k < min(K, 8) and n < N:"))
mistakes("convolution_work", ("work_of_small_batches", VALUES, "2 * N * K", "2 * min(N, 32) * K"))

# ---- lesson 9 --------------------------------------------------------------------------------


@wrong("conv2d_dbias", "last bits depend on the order")
@cuda.jit
def dbias_by_float_atomics(dy, dbias):
    total = cuda.shared.array(1, np.float32)
    N, _, P, Q = dy.shape
    k, t = cuda.blockIdx.x, cuda.threadIdx.x
    if t == 0:
        total[0] = 0
    cuda.syncthreads()
    for pixel in range(t, N * P * Q, cuda.blockDim.x):
        cuda.atomic.add(total, 0, dy[pixel // (P * Q), k, pixel // Q % P, pixel % Q])
    cuda.syncthreads()
    if t == 0:
        dbias[k] = total[0]


@wrong("conv2d_dx", SERIAL)
@cuda.jit
def dx_by_one_thread(dy, weight, dx, stride, padding):
    if cuda.grid(1) == 0:
        N, C, H, W = dx.shape
        for n in range(N):
            for c in range(C):
                for h in range(H):
                    for w in range(W):
                        dx[n, c, h, w] = 0
        K, R, S = weight.shape[0], weight.shape[2], weight.shape[3]
        for n in range(N):
            for k in range(K):
                for p in range(dy.shape[2]):
                    for q in range(dy.shape[3]):
                        for c in range(C):
                            for r in range(R):
                                for s in range(S):
                                    h, w = p * stride - padding + r, q * stride - padding + s
                                    if h >= 0 and h < H and w >= 0 and w < W:
                                        dx[n, c, h, w] += dy[n, k, p, q] * weight[k, c, r, s]


mistakes("conv2d_dx",
    ("dx_strides_of_three", PLACES, "down // stride, right", "down // min(stride, 3), right"),
    ("dx_of_512", UNWRITTEN, "i < dx.size", "i < min(dx.size, 448)"))
mistakes("conv2d_dweight",
    ("dweight_of_96_pixels", VALUES, "range(lane, N * P * Q, 32)",
     "range(lane, min(N * P * Q, 96), 32)"),
    ("dweight_of_paddings_to_two", PLACES, "p * stride - padding + r",
     "p * stride - min(padding, 2) + r"))
mistakes("conv2d_dbias", ("dbias_for_four_warps", OUTSIDE, "shared.array(8,", "shared.array(4,"))

# ---- lesson 10 -------------------------------------------------------------------------------

mistakes("adam_step",
    ("adam_at_a_hundredth", VALUES, "rate * (new_m", "np.float32(0.01) * (new_m"),
    ("adam_of_512", UNWRITTEN, "p.size, cuda", "min(p.size, 512), cuda"))
mistakes("max_pool",
    ("pool_from_minus_1e30", VALUES, "best, where = x[plane, oh * stride, ow * stride],",
     "best, where = np.float32(-1e30),"),
    ("pool_strides_of_three", PLACES, "range(oh * stride, oh * stride + k)",
     "range(oh * min(stride, 2), oh * min(stride, 2) + k)"),
    ("pool_windows_of_three", VALUES, "range(ow * stride, ow * stride + k)",
     "range(ow * stride, ow * stride + min(k, 3))"))
mistakes("channel_moments", ("moments_for_128_threads", OUTSIDE, "counts = cuda.shared.array(256",
                             "counts = cuda.shared.array(128"))
mistakes("mma_tile", ("mma_of_72", VALUES, "range(0, K, 8)", "range(0, min(K, 72), 8)"))
mistakes("matmul_registers", ("matmul_of_16_products", VALUES, "range(0, K, DEPTH)",
                              "range(0, min(K, 16), DEPTH)"))

# ---- lesson 11 -------------------------------------------------------------------------------

mistakes("sgd_nesterov",
    ("sgd_at_a_twentieth", VALUES, "- rate *", "- np.float32(0.05) *"),
    ("sgd_momentum_of_nine_tenths", VALUES, "momentum * v[i]", "np.float32(0.9) * v[i]"),
    ("sgd_decay_of_a_fiftieth", VALUES, "decay * p[i]", "np.float32(0.02) * p[i]"))
mistakes("pick_batch",
    ("pick_labels_of_seven_bits", VALUES, "= labels[row]", "= labels[row] & 127"),
    ("pick_of_256_pixels", UNWRITTEN, "images.shape[1], cuda.blockDim.x)",
     "min(images.shape[1], 256), cuda.blockDim.x)"))
mistakes("linear_relu", ("linear_of_128", VALUES, "range(lane, x.shape[1], 32)",
                         "range(lane, min(x.shape[1], 128), 32)"))
mistakes("confusion",
    ("confusion_of_64_classes", VALUES, "range(1, logits.shape[1])",
     "range(1, min(logits.shape[1], 64))"))
mistakes("pool_relu", ("pool_relu_of_512", UNWRITTEN, "range(cuda.grid(1), y.size,",
                       "range(cuda.grid(1), min(y.size, 512),"))

# ---- lesson 12 -------------------------------------------------------------------------------

mistakes("weighted_error", ("error_of_eight_classes", VALUES + "|Error", "np.arange(n_classes)",
                            "np.arange(n_classes) % 12"))
mistakes("matmul_backward", ("product_of_twenty", VALUES, "dy @ b.T", "dy[:, :20] @ b.T[:20]"))
mistakes("predict_transfers",
    ("transfers_of_a_thousand", VALUES, "by_one = n_batches", "by_one = min(n_batches, 1875)"),
    ("transfers_at_25", VALUES, "gbps * 1e6", "min(gbps, 50) * 1e6"))


mistakes("on_the_tape",
    ("tape_last_in_first_out", "the order they came|another call", "    class",
     "    from course_lib.autograd import Function\n\n    kept = []\n\n    class",
     "self.y = launch_forward(x)\n            return self.y",
     "kept.append(launch_forward(x))\n            return kept[-1]",
     "return launch_backward(dy, self.", "for y in kept[:2]:\n"
     "                if y.shape == dy.shape:\n"
     "                    return launch_backward(dy, "))


@wrong("walk_back", "recursion|RecursionError|asked|missing|order|gradient|dy")
def walk_by_recursion(order, dy):
    found = {}

    def visit(x, part):
        found[id(x)] = found[id(x)] + part if id(x) in found else part
        if x.made_by is not None:
            gradients = x.made_by.backward(part)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            for y, dx in zip(x.made_from, gradients, strict=True):
                if y.requires_grad:
                    visit(y, dx)

    visit(order[0], dy)
    return found


# ---- lesson 13 -------------------------------------------------------------------------------

mistakes("transposed_size",
    ("transposed_strides_of_eight", VALUES, "* stride", "* min(stride, 8)"),
    ("transposed_paddings_of_two", VALUES, "2 * padding", "2 * min(padding, 2)"))
mistakes("conv_transpose2d_gather",
    ("gather_of_512", UNWRITTEN, "i < y.size", "i < min(y.size, 512)"),
    ("gather_paddings_of_one", PLACES, "(p + padding - r) // stride, (q",
     "(p + min(padding, 1) - r) // stride, (q"))
mistakes("conv_transpose2d_scatter", ("scatter_of_128", VALUES, "i < x.size",
                                      "i < min(x.size, 128)"))
mistakes("upsample_into", ("into_of_512", UNWRITTEN + "|" + VALUES, "i < N * K * P * Q",
                           "i < min(N * K * P * Q, 350)"))


@wrong("transposed_by_dx", "no kernel was launched")
def by_numpy(x, weight, stride, padding, output_padding):
    from course_lib import reference

    return reference.conv_transpose2d(
        x, weight, stride=stride, padding=padding, output_padding=output_padding
    ).astype(np.float32)


# ---- lesson 14 -------------------------------------------------------------------------------

mistakes("multilook", ("multilook_of_128", UNWRITTEN, "range(cuda.grid(1), y.size,",
                       "range(cuda.grid(1), min(y.size, 128) if n > 1 else y.size,"))
mistakes("prepare",
    ("prepare_of_512", UNWRITTEN, "i < label.size", "i < min(label.size, 512)"),
    ("prepare_two_bands", UNWRITTEN + "|" + VALUES,
     "        for band in range(power.shape[0]):\n            x",
     "        for band in range(min(power.shape[0], 2)):\n            x"))
mistakes("iou", ("iou_of_1024", VALUES, "range(t, target.size, cuda.blockDim.x)",
                 "range(t, min(target.size, 1200), cuda.blockDim.x)"))
mistakes("dice_sums", ("sums_of_512", VALUES, "range(t, N * P, cuda.blockDim.x)",
                       "range(t, min(N * P, 512), cuda.blockDim.x)"))
mistakes("dice_gradient", ("dice_of_300", UNWRITTEN, "i < N * P:", "i < min(N * P, 300):"))
