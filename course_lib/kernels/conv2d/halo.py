"""`tensor_core` with a halo: forward and dx where channels lie side by side, in any precision.

The product is that of `implicit_gemm`. There every tap of the filter fetches the block's pixels
anew. Here a block fetches them once, with the halo around them, and all taps read them from shared
memory: what comes from memory is a ninth for 3 × 3, and so is the arithmetic of addresses. What is
summed over goes chunk by chunk of 128 bytes of channels, and in each chunk tap by tap.

Shared memory holds *positions*: lines and columns of the source with its padding, image behind
image, counted row by row. Pixel (p, q) of the result meets tap (r, s) at

    (p·stride + r·dilation)·width of the grid + q·stride + s·dilation,

so a tap is a distance, the same for every pixel, and consecutive pixels need positions that lie
close together. Positions in the padding are filled with zeros as they are copied. A chunk has one
buffer, and while it is worked on the next one fills the other; weights, which `arranging` has laid
out tile by tile, come through a ring of `n_stages` buffers.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.conv2d.places import ZERO, divided
from course_lib.kernels.gemm import fragments
from course_lib.kernels.gemm.fragments import FRAGMENT_M, FRAGMENT_N, STEP_BYTES
from course_lib.kernels.gemm.tiles import PARTS, tile
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.matrix import copy_part_async, load_matrices
from course_lib.runtime.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.shared import dynamic_shared

CHUNK_BYTES = 128  # of channels
COPIES = CHUNK_BYTES // VECTOR_BYTES  # for a position
MOST_POSITIONS = 1024  # of a block
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
#: `options` of the kernel are the sum of these. PLANAR: the result lies as N·C·H·W. VECTORS: its
#: rows of pixels (PLANAR), or of channels, begin on 16-byte boundaries.
ADD_BIAS, PLANAR, VECTORS = 1, 2, 4


def pitch_of(itemsize):
    """Elements from one position in shared memory to the next: ldmatrix meets different banks."""
    return (CHUNK_BYTES + VECTOR_BYTES) // itemsize


def shared_bytes(shape, n_positions, n_chunks):
    """Bytes of dynamic shared memory for a block of this `gemm.tensor_core.Shape`."""
    lines = min(n_chunks, 2) * n_positions + shape.n_stages * shape.n
    sums = max(shape.m * (shape.n + 8), shape.n * (shape.m + 4)) * 4
    return max(lines * (CHUNK_BYTES + VECTOR_BYTES), sums)


def share_of(shape):
    """Positions of the next chunk that are copied with each tap."""
    return -(-(shape.m + 256) // shape.n_threads) * shape.n_threads // COPIES


def make(shape, itemsize, mode):
    """The kernel for blocks of `shape`, of numbers of so many bytes, multiplied in `mode`."""
    TILE_M, TILE_N, N_STAGES, N_THREADS = shape.m, shape.n, shape.n_stages, shape.n_threads
    WARP_M, WARP_N, WARPS_N = shape.m // shape.warps_m, shape.n // shape.warps_n, shape.warps_n
    N_A, N_SUMS = WARP_M // FRAGMENT_M, WARP_M * WARP_N // 32
    PITCH, WIDTH = pitch_of(itemsize), VECTOR_BYTES // itemsize
    K_SIZE, K_STEP = CHUNK_BYTES // itemsize, STEP_BYTES // itemsize
    STAGE, TILE_SIZE = TILE_N * PITCH, TILE_N * K_SIZE
    N_COPIES, LINES = TILE_N * COPIES // N_THREADS, N_THREADS // COPIES
    SHARE, (AHEAD, LAGS) = share_of(shape), fragments.timing(mode, N_STAGES)
    assert N_COPIES * N_THREADS == TILE_N * COPIES
    find_places, copy_position = positions(TILE_M, N_THREADS, PITCH, WIDTH)
    collect, write = results(TILE_M, TILE_N, WARP_M, WARP_N, N_THREADS)

    @cuda.jit(device=True)
    def load_a(words, at, cache, base, i, step, lane):
        bases, distance = base
        load_matrices(words, at, cache, np.int64(bases[i]) + distance + step * K_STEP)

    @cuda.jit(device=True)
    def fetch(part, cache, work):
        """A part of a tile of weights, and of the next chunk's positions."""
        (weights, to, base, n), (source, origins, there, first, stop), channels = work
        for u in range(part, N_COPIES, PARTS):
            copy_part_async(
                cache, to + u * LINES * PITCH, weights, base + u * N_THREADS * WIDTH, n
            )  # fmt: skip
        for u in range(part, SHARE // LINES, PARTS):
            if first + u * LINES < stop:
                copy_position(cache, there, source, origins, first + u * LINES, channels)

    weights_tile = tile(TILE_N, CHUNK_BYTES, itemsize, N_THREADS, "by_k")
    loads = load_a, fragments.load_b(weights_tile, "by_k", itemsize)
    pipeline = fragments.multiply(WARP_M, WARP_N, loads, mode, N_STAGES, fetch)
    begin, advance = pipeline.begin, pipeline.advance
    WORDS_A, WORDS_B, WORDS_C, WORDS_D = pipeline.n_words

    @cuda.jit(device=True)
    def add_products(
        acc, cache, source, base, origins, bases, weights, weight, weight_step, col_base, lane,
        n_channels, n_chunks, n_taps, S, step_h, step_w, n_positions,
    ):  # fmt: skip
        """All chunks, tap by tap; `weight` is where the block's first tile of weights begins."""
        words = (
            cuda.local.array(WORDS_A, np.uint32), cuda.local.array(WORDS_B, np.uint32),
            cuda.local.array(WORDS_C, np.uint32), cuda.local.array(WORDS_D, np.uint32),
        )  # fmt: skip
        tid, size = np.int64(cuda.threadIdx.x), n_positions * PITCH
        mine, col = tid // COPIES, tid % COPIES * WIDTH
        ring, n_tiles, chunk, tap, s, line = min(n_chunks, 2) * size, n_chunks * n_taps, 0, 0, 0, 0
        here, at, to, weight = 0, 0, AHEAD % N_STAGES * STAGE, weight + tid * WIDTH
        put = ring + mine * PITCH + col
        for j in range(mine, n_positions, LINES):
            copy_position(cache, col, source, origins, j, (base + col, n_channels, col))
        for ahead in range(AHEAD):
            n = WIDTH if ahead < n_tiles else 0
            none = (source, origins, 0, 0, 0), (base, n_channels, col)
            for part in range(PARTS):
                fetch(part, cache, ((weights, put + ahead * STAGE, weight, n), *none))
            weight += weight_step
            end_group()
        wait_for_groups_but(AHEAD - 1)
        cuda.syncthreads()
        begin(words, cache, (bases, 0), ring + col_base, lane)
        for number in range(n_tiles):
            turn, there = (tap - 1 if LAGS else tap) * SHARE, (chunk + 1) % 2 * size + col
            stop = n_positions if chunk + 1 < n_chunks and turn >= 0 else -MOST_POSITIONS
            channel, distance = (chunk + 1) * K_SIZE + col, here
            tap, s, here = tap + 1, s + 1, here + step_w
            if s == S:
                line += step_h
                s, here = 0, chunk % 2 * size + line
            if tap == n_taps:
                chunk, tap, s, line = chunk + 1, 0, 0, 0
                here = chunk % 2 * size
            at_next = at + STAGE if at < (N_STAGES - 1) * STAGE else 0
            if number + 1 == n_tiles:
                here, at_next = distance, at  # there is no next one: what it is does not matter
            work = (
                (weights, put + to, weight, WIDTH if number + AHEAD < n_tiles else 0),
                (source, origins, there, turn + mine, stop), (base + channel, n_channels, channel),
            )  # fmt: skip
            advance(
                acc, words, cache, (bases, distance), ring + at + col_base, (bases, here),
                ring + at_next + col_base, lane, work,
            )  # fmt: skip
            weight += weight_step
            at, to = at_next, to + STAGE if to < (N_STAGES - 1) * STAGE else 0

    @cuda.jit(launch_bounds=(N_THREADS, shape.min_blocks))
    def halo_kernel(
        source, weights, bias, result, options, n_rows, N, P, Q, H, W, grid_h, grid_w, stride_h,
        stride_w, pad_h, pad_w, dilation_h, dilation_w, S, n_taps, n_channels, n_columns, n_chunks,
        n_positions,
    ):  # fmt: skip
        cache = dynamic_shared(source)
        places = cuda.shared.array(TILE_M, np.int32)
        origins = cuda.shared.array(MOST_POSITIONS, np.int32)
        acc = cuda.local.array(N_SUMS, np.float32)
        bases = cuda.local.array(N_A, np.int32)
        for i in range(N_SUMS):
            acc[i] = ZERO
        n_parts, block = (n_columns + TILE_N - 1) // TILE_N, np.int64(cuda.blockIdx.x)
        part, row = block % n_parts, block // n_parts * TILE_M
        image = row // (P * Q)
        find_places(
            places, origins, np.int32(row - image * (P * Q)), min(n_rows - row, TILE_M),
            min(N - image, MOST_POSITIONS), (P, Q), (H, W), (grid_h, grid_w),
            (stride_h, stride_w), (pad_h, pad_w), n_positions,
        )  # fmt: skip
        cuda.syncthreads()
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        warp_row, warp_col = warp // WARPS_N * WARP_M, warp % WARPS_N * WARP_N
        for i in range(N_A):
            place = places[warp_row + i * FRAGMENT_M + lane % 16]
            bases[i] = place * PITCH + lane // 16 * WIDTH
        allow_next_kernel()
        wait_for_previous_kernel()
        add_products(
            acc, cache, source, image * H * W * n_channels, origins, bases, weights,
            part * TILE_SIZE, np.int64(n_parts) * TILE_SIZE, warp_col * PITCH, lane, n_channels,
            n_chunks, n_taps, S, np.int64(dilation_h * grid_w) * PITCH,
            np.int64(dilation_w) * PITCH, np.int64(n_positions),
        )  # fmt: skip
        wait_for_groups_but(0)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc, warp_row, warp_col, lane, options)
        cuda.syncthreads()
        write(sums, bias, result, row, part * TILE_N, n_rows, n_columns, P * Q, options)

    return halo_kernel


def positions(TILE_M, N_THREADS, PITCH, WIDTH):
    """(find_places, copy_position) for blocks of N_THREADS threads."""

    @cuda.jit(device=True)
    def find_places(
        places, origins, first, n_rows, n_images, result, source, grid, stride, pad, n_positions
    ):
        """places[m], the m-th pixel's position; origins[j], the j-th position's pixel of the
        source, −1 in the padding. All count from the first pixel's image, and its position.
        """
        (P, Q), (H, W), (grid_h, grid_w) = result, source, grid
        p, q = divided(first, Q)
        start = p * stride[0] * grid_w + q * stride[1]
        for m in range(cuda.threadIdx.x, TILE_M, N_THREADS):
            image, rest = divided(np.int32(first + min(m, n_rows - 1)), P * Q)
            p, q = divided(rest, Q)
            line = image * grid_h + p * stride[0]
            places[m] = np.int32(line * grid_w + q * stride[1] - start)
        for j in range(cuda.threadIdx.x, n_positions, N_THREADS):
            line, w = divided(np.int32(start + j), grid_w)
            image, h = divided(line, grid_h)
            h, w = h - pad[0], w - pad[1]
            inside = h >= 0 and h < H and w >= 0 and w < W and image < n_images
            origins[j] = np.int32((image * H + h) * W + w if inside else -1)

    @cuda.jit(device=True)
    def copy_position(cache, at, source, origins, j, channels):
        """Copy the thread's 16 bytes of position j: zeros in the padding.

        channels  (place of the first channel of the first image, their number, which it takes)
        """
        base, n_channels, channel = channels
        origin = np.int64(origins[np.uint32(j)])
        n = WIDTH if origin >= 0 and channel < n_channels else 0
        copy_part_async(cache, at + j * PITCH, source, base + origin * n_channels, n)

    return find_places, copy_position


def results(TILE_M, TILE_N, WARP_M, WARP_N, N_THREADS):
    """(collect, write): a block's sums from its warps' registers to the result."""
    N_I, N_J = WARP_M // FRAGMENT_M, WARP_N // FRAGMENT_N
    ROW_PITCH, COLUMN_PITCH = TILE_N + 8, TILE_M + 4  # so that lanes write to different banks

    @cuda.jit(device=True)
    def collect(sums, acc, row, col, lane, options):
        row_step, col_step = ROW_PITCH, 1
        if options & PLANAR:
            row_step, col_step = 1, COLUMN_PITCH
        place = (row + lane // 4) * row_step + (col + lane % 4 * 2) * col_step
        for i in range(N_I):
            for j in range(N_J):
                for r in range(4):
                    down, right = 16 * i + r // 2 * 8, 8 * j + r % 2
                    value = acc[4 * (i * N_J + j) + r]
                    sums[place + down * row_step + right * col_step] = value

    @cuda.jit(device=True)
    def write(sums, bias, result, row, column, n_rows, n_columns, plane, options):
        values, width = cuda.local.array(MAX_WIDTH, np.float32), vector_width(result)
        planar = options & PLANAR != 0
        image = row // plane
        first, n_inside = np.int32(row - image * plane), min(n_rows - row, TILE_M)
        for i in range(cuda.threadIdx.x, TILE_M * TILE_N // width, N_THREADS):
            if planar:
                groups = np.uint32(TILE_M // width)
                m, n = np.int64(i % groups) * width, np.int64(i // groups)
                n_left, place = n_inside - m, n * COLUMN_PITCH + m
            else:
                groups = np.uint32(TILE_N // width)
                m, n = np.int64(i // groups), np.int64(i % groups) * width
                n_left, place = n_columns - column - n, m * ROW_PITCH + n
            if m < n_inside and column + n < n_columns:
                for e in range(width):
                    values[e] = load(sums, place + e)
                    there = column + n + (0 if planar else e)
                    if options & ADD_BIAS and there < n_columns:
                        values[e] += load(bias, there)
                _store(
                    result, values, image, first + m, column + n, n_columns, plane, planar,
                    min(n_left, width), width, options & VECTORS != 0,
                )  # fmt: skip

    return collect, write


@cuda.jit(device=True)
def _store(result, values, image, pixel, channel, n_channels, plane, planar, n, width, whole):
    """`n` values, of neighbouring pixels (`planar`) or channels; `whole`: on 16-byte boundaries."""
    if whole:
        if planar:
            ahead, pixel = divided(np.int32(pixel), np.int32(plane))
            image = (image + ahead) * n_channels * plane + channel * plane + pixel
            store_vector(result, image, values)
        else:
            store_vector(result, (image * plane + pixel) * n_channels + channel, values)
        return
    for e in range(width):
        if e < n:
            if planar:
                ahead, rest = divided(np.int32(pixel + e), np.int32(plane))
                place = ((image + ahead) * n_channels + channel) * plane + rest
            else:
                place = (image * plane + pixel) * n_channels + channel + e
            store(result, place, values[e])
