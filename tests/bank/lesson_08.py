"""Lesson 08: convolution, its four kernels and two functions.

Most wrong kernels are the solution with one mistake in it, and `mistake` says which text stands in
place of which. The right ones are written out. The messages about barriers, races and memory
outside an array are the sanitizer's own.
"""

import numpy as np

from bank import right, wrong
from bank.mistakes import mistakes
from course_lib import cuda

OUTSIDE = "out-of-bounds|negative"
VALUES = "wrong values"
ZERO = np.float32(0)

# ---- output_size(size, taps, stride, padding, dilation) ---------------------------------------


@right("output_size")
def size_by_the_last_place(size, taps, stride, padding, dilation):
    last = size + 2 * padding - dilation * (taps - 1) - 1  # where the window may begin at most
    return last // stride + 1


@right("output_size")
def size_by_walking(size, taps, stride, padding, dilation):
    count, at = 0, 0
    while at + dilation * (taps - 1) < size + 2 * padding:
        count, at = count + 1, at + stride
    return count


mistakes("output_size",
    ("size_without_the_first", VALUES, " // stride + 1", " // stride"),
    ("size_pads_one_side", VALUES, "2 * padding", "padding"),
    ("size_no_dilation", VALUES, "dilation * (taps - 1) + 1", "taps"),
    ("size_dilates_all_taps", VALUES, "(taps - 1) + 1", "taps"),
    ("size_adds_before_it_divides", VALUES, " // stride + 1", " + 1) // stride", "return (",
     "return (("),
    ("size_is_no_whole_number", "should be int64|float", "//", "/"),
    ("size_no_stride", VALUES, " // stride", ""),
    ("size_rounds_up", VALUES, "// stride + 1", "+ stride - 1) // stride + 1", "return (",
     "return (("))


# ---- conv2d_direct(x, weight, bias, y, stride, padding) ---------------------------------------


@right("conv2d_direct")
@cuda.jit
def direct_over_the_taps_first(x, weight, bias, y, stride, padding):
    # The taps outside, the channels inside: a tap that meets no pixel is left at once.
    i = cuda.grid(1)
    n, rest = divmod(i, y.shape[1] * y.shape[2] * y.shape[3])
    k, rest = divmod(rest, y.shape[2] * y.shape[3])
    p, q = divmod(rest, y.shape[3])
    if n < y.shape[0]:
        total = ZERO
        for r in range(weight.shape[2]):
            h = p * stride + r - padding
            if h < 0 or h >= x.shape[2]:
                continue
            for s in range(weight.shape[3]):
                w = q * stride + s - padding
                if w >= 0 and w < x.shape[3]:
                    for c in range(x.shape[1]):
                        total += weight[k, c, r, s] * x[n, c, h, w]
        y[n, k, p, q] = total + bias[k]


@right("conv2d_direct")
@cuda.jit
def direct_from_end_to_end(x, weight, bias, y, stride, padding):
    # From the first pixel that is inside to the last one: no question in the inner loops.
    _, C, H, W = x.shape
    K, P, Q = y.shape[1:]
    R, S = weight.shape[2:]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        q, p, k, n = i % Q, i // Q % P, i // (Q * P) % K, i // (Q * P * K)
        top, left, total = p * stride - padding, q * stride - padding, ZERO
        for c in range(C):
            for h in range(max(0, top), min(H, top + R)):
                for w in range(max(0, left), min(W, left + S)):
                    total += x[n, c, h, w] * weight[k, c, h - top, w - left]
        y[n, k, p, q] = bias[k] + total


mistakes("conv2d_direct",
    ("direct_no_guard", OUTSIDE, "i < y.size", "i >= 0"),
    ("direct_no_padding", VALUES + "|" + OUTSIDE, "p * stride - padding + r", "p * stride + r"),
    ("direct_no_stride", VALUES, "p * stride - padding + r", "p - padding + r"),
    ("direct_reads_above", OUTSIDE, "h >= 0 and ", ""),
    ("direct_reads_to_the_left", OUTSIDE, " and w >= 0", ""),
    ("direct_reads_below", OUTSIDE, "h < H", "h <= H"),
    ("direct_reads_to_the_right", OUTSIDE, " and w < W", ""),
    ("direct_turned_filter", VALUES, "weight[k, c, r, s]", "weight[k, c, R - 1 - r, S - 1 - s]"),
    ("direct_filter_on_its_side", OUTSIDE, "weight[k, c, r, s]", "weight[k, c, s, r]"),
    ("direct_channels_for_filters", OUTSIDE, "weight[k, c, r, s]", "weight[c, k, r, s]"),
    ("direct_no_bias", VALUES, "total = bias[k]", "total = ZERO"),
    ("direct_bias_for_each_tap", VALUES, "total += x[", "total += bias[k] + x["),
    ("direct_first_channel_only", VALUES, "range(C)", "range(1)"),
    ("direct_first_picture_only", VALUES, "x[n, c, h, w]", "x[0, c, h, w]"),
    ("direct_last_tap_only", VALUES, "total += x[", "total = x["),
    ("direct_rows_of_P", VALUES + "|" + OUTSIDE + "|never written", "i // Q % P, i % Q",
     "i // P % Q, i % P"),
    ("direct_forgets_the_channels", OUTSIDE, "i // (P * Q) % K", "i // (P * Q)"),
    ("direct_in_float64", "float64-promotion", "total = bias[k]", "total = bias[k] + 0.0"))


# ---- convolution_work(N, C, K, H, R, groups) --------------------------------------------------


@right("convolution_work")
def work_filter_by_filter(N, C, K, H, R, groups):
    one = C // groups * R**2
    return 2 * one * K * N * H**2, 4 * (one * K + (C + K) * N * H**2)


@right("convolution_work")
def work_as_a_matrix_product(N, C, K, H, R, groups):
    rows, terms, columns = K / groups, C / groups * R * R, N * H * H
    flops = 2 * rows * terms * columns * groups
    return flops, 4 * (N * C * H * H + groups * rows * terms + K * columns)


mistakes("convolution_work",
    ("work_products_only", "wrong values in flops", "2 * N", "N"),
    ("work_one_tap", "wrong values in flops", "* R * R\n", "\n"),
    ("work_all_channels", "wrong values in flops", "H * H * (C // groups)", "H * H * C"),
    ("work_no_weights", "wrong values in n_bytes", " + K * (C // groups) * R * R", ""),
    ("work_numbers_for_bytes", "wrong values in n_bytes", "4 * n", "n"),
    ("work_large_weights", "wrong values in n_bytes", "+ K * (C // groups)", "+ K * C"),
    ("work_result_like_x", "wrong values in n_bytes", "N * K * H * H\n", "N * C * H * H\n"),
    ("work_other_way_round", "wrong values in flops", "return flops, 4 * n_numbers",
     "return 4 * n_numbers, flops"),
    ("work_no_return", "is the return missing", "return flops", "flops"))


# ---- conv2d_tiled(x, weight, y) ---------------------------------------------------------------


@right("conv2d_tiled")
@cuda.jit
def tiled_two_halos(x, weight, y):
    # Two halos take turns, so that one barrier for each channel is enough.
    halo = cuda.shared.array((2, 100), np.float32)
    _, C, H, W = x.shape
    n, k = cuda.blockIdx.z // y.shape[1], cuda.blockIdx.z % y.shape[1]
    t, total = cuda.threadIdx.x, ZERO
    for c in range(C):
        i = t
        while i < 100:
            h, w = 8 * cuda.blockIdx.y + i // 10 - 1, 8 * cuda.blockIdx.x + i % 10 - 1
            halo[c % 2, i] = ZERO
            if h >= 0 and h < H and w >= 0 and w < W:
                halo[c % 2, i] = x[n, c, h, w]
            i += 64
        cuda.syncthreads()
        for tap in range(9):
            place = (t // 8 + tap // 3) * 10 + t % 8 + tap % 3
            total += halo[c % 2, place] * weight[k, c, tap // 3, tap % 3]
    h, w = 8 * cuda.blockIdx.y + t // 8, 8 * cuda.blockIdx.x + t % 8
    if h < H and w < W:
        y[n, k, h, w] = total


@right("conv2d_tiled")
@cuda.jit
def tiled_keeps_its_weights(x, weight, y):
    # The nine weights of a channel go through shared memory as well.
    halo = cuda.shared.array((10, 10), np.float32)
    taps = cuda.shared.array(9, np.float32)
    _, C, H, W = x.shape
    n, k = divmod(cuda.blockIdx.z, y.shape[1])
    t, total = cuda.threadIdx.x, ZERO
    top, left = 8 * cuda.blockIdx.y - 1, 8 * cuda.blockIdx.x - 1
    for c in range(C):
        cuda.syncthreads()
        for row in range(t // 10, 10, 6):
            if t < 60:
                h, w = top + row, left + t % 10
                known = h >= 0 and h < H and w >= 0 and w < W
                halo[row, t % 10] = x[n, c, h, w] if known else ZERO
        if t < 9:
            taps[t] = weight[k, c, t // 3, t % 3]
        cuda.syncthreads()
        for r in range(3):
            for s in range(3):
                total += taps[3 * r + s] * halo[t // 8 + r, t % 8 + s]
    if top + 1 + t // 8 < H and left + 1 + t % 8 < W:
        y[n, k, top + 1 + t // 8, left + 1 + t % 8] = total


PIXELS = "range(t, HALO * HALO, TILE * TILE)"
BARRIER = "        cuda.syncthreads()\n"
mistakes("conv2d_tiled",
    ("tiled_no_first_barrier", "race|uninitialised", BARRIER + "        for r", "        for r"),
    ("tiled_no_second_barrier", "race", BARRIER + "    if top", "    if top"),
    ("tiled_no_halo_above", VALUES, "top - 1 + i", "top + i"),
    ("tiled_no_halo_to_the_left", VALUES, "left - 1 + i", "left + i"),
    ("tiled_one_pixel_each", "uninitialised", PIXELS, "range(t, TILE * TILE, TILE * TILE)"),
    ("tiled_rows_of_eight", OUTSIDE + "|uninitialised|race", "halo[i // HALO, i % HALO]",
     "halo[i // TILE, i % TILE]"),
    ("tiled_reads_outside", OUTSIDE, "x[n, c, h, w] if inside else ZERO", "x[n, c, h, w]"),
    ("tiled_leaves_the_edge", "uninitialised",
     "            halo[i // HALO, i % HALO] = x[n, c, h, w] if inside else ZERO\n",
     "            if inside:\n                halo[i // HALO, i % HALO] = x[n, c, h, w]\n"),
    ("tiled_writes_outside", OUTSIDE, "top + row < H and left + col < W", "top + row < H"),
    ("tiled_barrier_for_some", "barrier", BARRIER + "        for r",
     "        if left + col < W:\n            cuda.syncthreads()\n        for r"),
    ("tiled_leaves_early", "barrier|exit", "    for c in range(C):\n",
     "    if top + row >= H:\n        return\n    for c in range(C):\n"),
    ("tiled_last_channel_only", VALUES, "total += halo", "total = halo"),
    ("tiled_middle_of_the_halo", VALUES, "halo[row + r, col + s]", "halo[row + 1, col + 1]"),
    ("tiled_turned_filter", VALUES, "weight[k, c, r, s]", "weight[k, c, 2 - r, 2 - s]"),
    ("tiled_one_tile_for_all", VALUES + "|race|never written", "TILE * cuda.blockIdx.x", "0"),
    ("tiled_pictures_for_filters", OUTSIDE, "cuda.blockIdx.z // K, cuda.blockIdx.z % K",
     "cuda.blockIdx.z % K, cuda.blockIdx.z // K"))


# ---- im2col(x, columns, R, S, P, Q, stride, padding) ------------------------------------------


@right("im2col")
@cuda.jit
def im2col_with_remainders(x, columns, R, S, P, Q, stride, padding):
    for i in range(cuda.grid(1), columns.size, cuda.gridsize(1)):
        term, pixel = divmod(i, columns.shape[1])
        c, tap = divmod(term, R * S)
        n, place = divmod(pixel, P * Q)
        h = place // Q * stride - padding + tap // S
        w = place % Q * stride - padding + tap % S
        value = ZERO
        if h >= 0 and h < x.shape[2] and w >= 0 and w < x.shape[3]:
            value = x[n, c, h, w]
        columns[term, pixel] = value


@right("im2col")
@cuda.jit
def im2col_down_the_columns(x, columns, R, S, P, Q, stride, padding):
    # Neighbouring threads have neighbouring terms: right, and with worse access.
    i, n_terms = cuda.grid(1), columns.shape[0]
    if i < columns.size:
        pixel, term = i // n_terms, i % n_terms
        c, r, s = term // S // R, term // S % R, term % S
        n, p, q = pixel // Q // P, pixel // Q % P, pixel % Q
        h, w = p * stride + r - padding, q * stride + s - padding
        outside = h < 0 or h >= x.shape[2] or w < 0 or w >= x.shape[3]
        columns[term, pixel] = ZERO if outside else x[n, c, h, w]


mistakes("im2col",
    ("im2col_no_guard", OUTSIDE, "i < columns.size", "i >= 0"),
    ("im2col_reads_outside", OUTSIDE, " if inside else ZERO", ""),
    ("im2col_leaves_the_edge", "never written",
     "        columns[term, pixel] = x[n, c, h, w] if inside else ZERO\n",
     "        if inside:\n            columns[term, pixel] = x[n, c, h, w]\n"),
    ("im2col_taps_on_their_side", VALUES, "term // S % R, term % S", "term % R, term // R % S"),
    ("im2col_no_padding", VALUES, "p * stride - padding + r", "p * stride + r"),
    ("im2col_no_stride", VALUES, "q * stride - padding + s", "q - padding + s"),
    ("im2col_pixels_of_one_picture", OUTSIDE + "|" + VALUES, "pixel // Q % P", "pixel // Q"),
    ("im2col_first_picture_only", VALUES, "x[n, c, h, w]", "x[0, c, h, w]"),
    ("im2col_first_channel_only", VALUES, "x[n, c, h, w]", "x[n, 0, h, w]"),
    ("im2col_channels_of_R", VALUES + "|" + OUTSIDE, "term // (R * S)", "term // R"),
    ("im2col_turned_filter", VALUES, "- padding + r", "- padding + R - 1 - r"),
    ("im2col_transposed", OUTSIDE, "columns[term, pixel] =", "columns[pixel, term] ="),
    ("im2col_width_for_height", OUTSIDE + "|" + VALUES, "h < H", "h < W"))


# ---- implicit_gemm(x, weight, y, R, S, stride, padding) ---------------------------------------


@right("implicit_gemm")
@cuda.jit
def implicit_two_tiles(x, weight, y, R, S, stride, padding):
    # Two pairs of tiles take turns, so that one barrier for each eight terms is enough.
    a = cuda.shared.array((2, 8, 8), np.float32)
    b = cuda.shared.array((2, 8, 8), np.float32)
    _, P, Q = y.shape[1:]
    row, col, turn, total = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8, 0, ZERO
    k, pixel = 8 * cuda.blockIdx.y + row, 8 * cuda.blockIdx.x + col
    n, place = pixel // (P * Q), pixel % (P * Q)
    for first in range(0, weight.shape[1], 8):
        a[turn, row, col], b[turn, row, col] = ZERO, ZERO
        if k < y.shape[1] and first + col < weight.shape[1]:
            a[turn, row, col] = weight[k, first + col]
        c, tap = (first + row) // (R * S), (first + row) % (R * S)
        h = place // Q * stride - padding + tap // S
        w = place % Q * stride - padding + tap % S
        if n < x.shape[0] and c < x.shape[1] and h >= 0 and w >= 0:
            if h < x.shape[2] and w < x.shape[3]:
                b[turn, row, col] = x[n, c, h, w]
        cuda.syncthreads()
        for j in range(8):
            total += a[turn, row, j] * b[turn, j, col]
        turn = 1 - turn
    if k < y.shape[1] and n < y.shape[0]:
        y[n, k, place // Q, place % Q] = total


@right("implicit_gemm")
@cuda.jit
def implicit_without_tiles(x, weight, y, R, S, stride, padding):
    # The same matrix, element by element: no shared memory at all.
    K, P, Q = y.shape[1:]
    k = 8 * cuda.blockIdx.y + cuda.threadIdx.x // 8
    pixel, total = 8 * cuda.blockIdx.x + cuda.threadIdx.x % 8, ZERO
    n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
    if k < K and n < x.shape[0]:
        for term in range(weight.shape[1]):
            h, w = p * stride - padding + term // S % R, q * stride - padding + term % S
            if h >= 0 and h < x.shape[2] and w >= 0 and w < x.shape[3]:
                total += weight[k, term] * x[n, term // (R * S), h, w]
        y[n, k, p, q] = total


mistakes("implicit_gemm",
    ("implicit_no_first_barrier", "race|uninitialised", BARRIER + "        for j", "        for j"),
    ("implicit_no_second_barrier", "race", BARRIER + "    if k", "    if k"),
    ("implicit_reads_behind_the_last_term", OUTSIDE, " and term < n_terms", ""),
    ("implicit_reads_behind_the_last_picture", OUTSIDE, "if n < N and term", "if term"),
    ("implicit_reads_behind_the_last_filter", OUTSIDE, "known = k < K and first", "known = first"),
    ("implicit_reads_beside_the_picture", OUTSIDE, " and inside else", " else"),
    ("implicit_term_of_the_column", VALUES + "|race|" + OUTSIDE, "term = first + row",
     "term = first + col"),
    ("implicit_first_terms_only", VALUES + "|" + OUTSIDE, "term = first + row", "term = row"),
    ("implicit_tile_transposed", VALUES, "b[j, col]", "b[col, j]"),
    ("implicit_last_eight_only", VALUES, "total += a", "total = a"),
    ("implicit_writes_behind_the_filters", OUTSIDE, "if k < K and n < N", "if n < N"),
    ("implicit_writes_behind_the_pictures", OUTSIDE, "if k < K and n < N", "if k < K"),
    ("implicit_leaves_early", "barrier|exit", "    for first",
     "    if n >= N:\n        return\n    for first"),
    ("implicit_no_padding", VALUES, "p * stride - padding + r", "p * stride + r"),
    ("implicit_taps_on_their_side", VALUES + "|" + OUTSIDE, "term // S % R, term % S",
     "term % R, term // R % S"))


@wrong("implicit_gemm", OUTSIDE)
@cuda.jit
def implicit_nothing_is_missing(x, weight, y, R, S, stride, padding):
    # As if every size were a multiple of eight, and nothing were padded.
    P, Q = y.shape[2:]
    k = 8 * cuda.blockIdx.y + cuda.threadIdx.x // 8
    pixel, total = 8 * cuda.blockIdx.x + cuda.threadIdx.x % 8, ZERO
    n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
    for term in range(weight.shape[1]):
        h, w = p * stride - padding + term // S % R, q * stride - padding + term % S
        total += weight[k, term] * x[n, term // (R * S), h, w]
    y[n, k, p, q] = total
