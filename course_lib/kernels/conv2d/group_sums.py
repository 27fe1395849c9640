"""dweight of a convolution with groups, by the loop of `pixel_sums`.

The filters of a tile belong to a few groups, so its terms are those of a *window* of channels: it
holds the channels of these groups, and begins with a whole vector. All tiles have windows of one
size. What a filter has of other groups' channels is left out, so an infinity stays in its group.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma.tiles import ROW_PADDING
from course_lib.kernels.conv2d.halo_results import PLANAR
from course_lib.kernels.conv2d.pixel_sums import loop
from course_lib.kernels.conv2d.pixel_sums_copies import (
    BAND,
    BOTH_LINES,
    K_BYTES,
    NO_TAP,
    TAP_BITS,
    find_lines,
    rounds,
)
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    store,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.pipeline import wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared


def make(shape, itemsize, mode):
    """The kernel for blocks of `shape`, of numbers of so many bytes, multiplied in `mode`."""
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    WARP_M, WARP_N, WARPS_N = shape.m // shape.warps_m, shape.n // shape.warps_n, shape.warps_n
    WIDE, K_SIZE = VECTOR_BYTES // itemsize, K_BYTES // itemsize
    N_SUMS, BANDS, ROUNDS = WARP_M * WARP_N // 32, TILE_M // BAND, rounds(shape, itemsize)
    A_SIZE = K_SIZE * (TILE_M + ROW_PADDING)
    _, find_pixels, add_products, collect = loop(shape, itemsize, mode)

    @cuda.jit(device=True)
    def find_terms(bases, taps, row, n_terms, pitch, first_channel, window, S, W, dilation):
        """The thread's term of each band: its tap, and its place in x as seen from the pixel."""
        for j in range(BANDS):
            term = np.int32(row + j * BAND + cuda.threadIdx.x % (BAND // WIDE) * WIDE)
            tap, channel = divided(term, window)
            r, s = divided(tap, S)
            taps[j] = np.int32(s << TAP_BITS | r) if term < n_terms else np.int32(NO_TAP)
            place = np.int64(r * dilation[0] * W + s * dilation[1])
            bases[j] = place * pitch + first_channel + channel

    @cuda.jit(device=True)
    def write_own(sums, partial, start, column, row, n_terms, first_channel, groups, n_taps, last):
        """What the tile's filters have of their own groups, to partial[start:], a dweight."""
        n_filters, window, columns, channels = groups
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, TILE_M * TILE_N, N_THREADS):
            n, m = i // TILE_M, i % TILE_M
            k = np.int32(column + n)
            tap, c = divided(np.int32(row + m), window)
            own = np.int32(first_channel + c - divided(k, columns)[0] * channels)
            if row + m < n_terms and k < n_filters and own >= 0 and own < channels:
                place = start + np.int64(k) * channels * n_taps
                place += tap * channels + own if last else own * n_taps + tap
                store(partial, place, sums[n * (TILE_M + 4) + m])

    @cuda.jit(launch_bounds=(N_THREADS, shape.min_blocks))
    def group_sums_kernel(
        dy, x, partial, n_all, length, n_splits, n_filters, window, columns, channels, C, K, H, W,
        P, Q, R, S, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, last,
    ):  # fmt: skip
        """partial[split] = the sums of dweight over `length` pixels.

        n_filters          of all groups; K and C are the channels of a pixel of dy and of x, which
                           are whole vectors
        window             channels that a tile's terms are of
        columns, channels  filters and channels of a group
        last               whether channels are last in partial, or taps
        """
        cache = dynamic_shared(x)
        lines = cuda.shared.array(BOTH_LINES, np.int32)
        acc = cuda.local.array(N_SUMS, np.float32)
        bases, taps = cuda.local.array(BANDS, np.int64), cuda.local.array(BANDS, np.int32)
        pixels = cuda.local.array((3, ROUNDS), np.int32)
        for i in range(N_SUMS):
            acc[i] = ZERO
        n_terms = np.int32(window * R * S)
        block, part = divided(np.int32(cuda.blockIdx.x), np.int32(n_splits))
        down, right = divided(block, np.int32((K + TILE_N - 1) // TILE_N))
        row, column = np.int32(down * TILE_M), np.int32(right * TILE_N)
        first_channel = np.int32(divided(column, columns)[0] * channels // WIDE * WIDE)
        first_channel = min(first_channel, np.int32(C - window))
        first, plane, dilation = np.int64(part) * length, np.int32(P * Q), (dilation_h, dilation_w)
        image, pixel = divided(np.int32(first), plane)
        find_terms(bases, taps, row, n_terms, C, first_channel, window, S, W, dilation)
        find_pixels(pixels, pixel, P, Q)
        find_lines(lines, P, Q, H, W, R, S, (stride_h, stride_w), (pad_h, pad_w), dilation)
        cuda.syncthreads()
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        warp_row, warp_col = warp // WARPS_N * WARP_M, warp % WARPS_N * WARP_N
        images, rest = divided(np.int32(K_SIZE), plane)
        step = images, *divided(rest, Q)
        sizes, base = (P, Q, H, W, stride_h, stride_w, pad_h, pad_w), np.int64(image) * H * W * C
        allow_next_kernel()
        wait_for_previous_kernel()
        add_products(
            acc, cache, (x, base, bases, taps, pixels, lines, sizes, np.int64(C)),
            (dy, first * K + column, np.int64(K), np.int32(K - column)), step,
            np.int32(min(length, n_all - first)),
            warp_row, A_SIZE + warp_col, lane,
        )  # fmt: skip
        wait_for_groups_but(0)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc, warp_row, warp_col, lane, PLANAR)
        groups = n_filters, window, columns, channels
        start = np.int64(part) * n_filters * channels * R * S
        write_own(sums, partial, start, column, row, n_terms, first_channel, groups, R * S, last)

    return group_sums_kernel
