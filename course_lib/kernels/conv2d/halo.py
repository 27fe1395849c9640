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
buffer, and while it is worked on the next one fills the other; weights come through a ring of
`n_stages` buffers (`halo_weights`).

A small result has few tiles. There the chunks and taps of a tile are dealt out to the blocks of a
cluster, which add up their sums at the end (`halo_results`).
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma import fragments, mainloop
from course_lib.kernels.blocks.mma.fragments import FRAGMENT_M, STEP_BYTES
from course_lib.kernels.blocks.mma.tiles import PARTS, tile
from course_lib.kernels.conv2d.halo_results import ADD_BIAS, PLANAR, VECTORS, results
from course_lib.kernels.conv2d.halo_weights import CHUNK_BYTES, COPIES, size_of, weights
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.cluster import cluster_rank, cluster_size, cluster_sync
from course_lib.runtime.intrinsics.matrix import copy_part_async, load_matrices
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

__all__ = [
    "ADD_BIAS", "CHUNK_BYTES", "MOST_POSITIONS", "PLANAR", "VECTORS", "make", "pitch_of",
    "share_of", "shared_bytes",
]  # fmt: skip
MOST_POSITIONS = 1024  # of a block
NEVER = np.int32(-MOST_POSITIONS)


def pitch_of(itemsize):
    """Elements from one position in shared memory to the next: ldmatrix meets different banks."""
    return (CHUNK_BYTES + VECTOR_BYTES) // itemsize


def shared_bytes(shape, n_positions, n_chunks, itemsize, source):
    """Bytes of dynamic shared memory for a block of this `mma.shape.Shape`."""
    tiles = shape.n_stages * size_of(shape, itemsize, source) * itemsize
    sums = max(shape.m * (shape.n + 8), shape.n * (shape.m + 4)) * 4
    return max(min(n_chunks, 2) * n_positions * (CHUNK_BYTES + VECTOR_BYTES) + tiles, sums)


def share_of(shape):
    """Positions of the next chunk that are copied with each tap."""
    return -(-(shape.m + 256) // shape.n_threads) * shape.n_threads // COPIES


def make(shape, itemsize, mode, source):
    """The kernel for blocks of `shape`, of numbers of so many bytes, multiplied in `mode`.

    source  where the weights come from (`halo_weights`); clusters are for others than "arranged"
    """
    TILE_M, TILE_N, N_STAGES, N_THREADS = shape.m, shape.n, shape.n_stages, shape.n_threads
    WARP_M, WARP_N, WARPS_N = shape.m // shape.warps_m, shape.n // shape.warps_n, shape.warps_n
    N_A, N_SUMS = WARP_M // FRAGMENT_M, WARP_M * WARP_N // 32
    PITCH, WIDTH = pitch_of(itemsize), VECTOR_BYTES // itemsize
    K_SIZE, K_STEP = CHUNK_BYTES // itemsize, STEP_BYTES // itemsize
    LINES, TOGETHER = N_THREADS // COPIES, source != "arranged"
    of_weights = weights(shape, itemsize, source)
    STAGE, COLUMN = of_weights.size, of_weights.column_pitch
    first_weights, fetch_weights = of_weights.first, of_weights.fetch
    next_weights = of_weights.following
    SHARE, (AHEAD, LAGS) = share_of(shape), mainloop.timing(mode, N_STAGES)
    find_places, copy_position = positions(TILE_M, N_THREADS, PITCH, WIDTH)
    collect, write = results(TILE_M, TILE_N, WARP_M, WARP_N, N_THREADS, TOGETHER)

    image_of = _image_of_few if TOGETHER else _image_of
    meet, leave = (cluster_sync, cluster_sync) if TOGETHER else (_syncthreads, _nothing)

    @cuda.jit(device=True)
    def load_a(words, at, cache, base, i, step, lane):
        bases, distance = base
        load_matrices(words, at, cache, np.int64(bases[i] + distance) + step * K_STEP)

    @cuda.jit(device=True)
    def fetch(part, cache, work):
        """A part of a tile of weights, and of the next chunk's positions."""
        (weights, to, state, fixed, exists), (source, origins, there, first, stop), channels = work
        fetch_weights(part, cache, to, weights, state, fixed, exists)
        if TOGETHER and stop <= 0:  # no chunk follows, as is often so in a cluster
            return
        for u in range(part, SHARE // LINES, PARTS):
            if first + u * LINES < stop:
                copy_position(cache, there, source, origins, first + u * LINES, channels)

    weights_tile = tile(TILE_N, CHUNK_BYTES, itemsize, N_THREADS, of_weights.source)
    loads = load_a, fragments.load_b(weights_tile, of_weights.source, itemsize)
    pipeline = mainloop.multiply(WARP_M, WARP_N, loads, mode, N_STAGES, fetch)
    begin, advance = pipeline.begin, pipeline.advance
    WORDS_A, WORDS_B, WORDS_C, WORDS_D = pipeline.n_words

    @cuda.jit(device=True)
    def add_products(
        acc, cache, source, base, origins, bases, weights, known, col_base, lane, n_channels,
        chunk_of, n_chunks, n_taps, begin_at, S, step_h, step_w, n_positions,
    ):  # fmt: skip
        """The block's chunks, from `chunk_of` on, tap by tap, from the place `begin_at` on."""
        words = (
            cuda.local.array(WORDS_A, np.uint32), cuda.local.array(WORDS_B, np.uint32),
            cuda.local.array(WORDS_C, np.uint32), cuda.local.array(WORDS_D, np.uint32),
        )  # fmt: skip
        (first_s, first_line), (state, fixed) = begin_at, known
        mine = np.int32(cuda.threadIdx.x // COPIES)
        col = np.int32(cuda.threadIdx.x % COPIES * WIDTH)
        size, n_tiles = np.int32(n_positions * PITCH), np.int32(n_chunks * n_taps)
        ring, chunk, tap = np.int32(min(n_chunks, 2) * size), np.int32(0), np.int32(0)
        at, to = np.int32(0), np.int32(AHEAD % N_STAGES * STAGE)
        start = np.int32(first_line + first_s * step_w)
        s, line, here = first_s, first_line, start
        channel = np.int32(chunk_of * K_SIZE + col)
        for j in range(mine, n_positions, LINES):
            copy_position(cache, col, source, origins, j, (base + channel, n_channels, channel))
        for ahead in range(AHEAD):
            none = (source, origins, col, col, np.int32(0)), (base, n_channels, col)
            for part in range(PARTS):
                tile = weights, np.int32(ring + ahead * STAGE), state, fixed, ahead < n_tiles
                fetch(part, cache, (tile, *none))
            state = next_weights(state, fixed)
            end_group()
        wait_for_groups_but(AHEAD - 1)
        cuda.syncthreads()
        begin(words, cache, (bases, here), np.int64(ring + col_base), lane)
        number = np.int32(0)
        while number < n_tiles:
            turn, distance = np.int32((tap - 1 if LAGS else tap) * SHARE), here
            there = np.int32((chunk + 1 & 1) * size + col)
            stop = n_positions if chunk + 1 < n_chunks and turn >= 0 else NEVER
            channel = np.int32((chunk_of + chunk + 1) * K_SIZE + col)
            tap, s, here = np.int32(tap + 1), np.int32(s + 1), np.int32(here + step_w)
            if s == S:
                line = np.int32(line + step_h)
                s, here = np.int32(0), np.int32((chunk & 1) * size + line)
            if tap == n_taps:
                chunk, tap, s, line = np.int32(chunk + 1), np.int32(0), first_s, first_line
                here = np.int32((chunk & 1) * size + start)
            at_next = np.int32(at + STAGE if at < (N_STAGES - 1) * STAGE else 0)
            if number + 1 == n_tiles:
                here, at_next = distance, at  # there is no next one: what it is does not matter
            work = (
                (weights, np.int32(ring + to), state, fixed, number + AHEAD < n_tiles),
                (source, origins, there, np.int32(turn + mine), stop),
                (base + channel, n_channels, channel),
            )
            advance(
                acc, words, cache, (bases, distance), np.int64(ring + at + col_base), (bases, here),
                np.int64(ring + at_next + col_base), lane, work,
            )  # fmt: skip
            state = next_weights(state, fixed)
            at, to = at_next, np.int32(to + STAGE if to < (N_STAGES - 1) * STAGE else 0)
            number = np.int32(number + 1)

    @cuda.jit(launch_bounds=(N_THREADS, shape.min_blocks))
    def halo_kernel(
        source, weights, bias, result, options, n_rows, N, P, Q, H, W, grid_h, grid_w, stride_h,
        stride_w, pad_h, pad_w, dilation_h, dilation_w, S, all_taps, n_channels, n_columns,
        all_chunks, n_positions, chunks_each, taps_each,
    ):  # fmt: skip
        cache = dynamic_shared(source)
        places = cuda.shared.array(TILE_M, np.int32)
        origins = cuda.shared.array(MOST_POSITIONS, np.int32)
        acc = cuda.local.array(N_SUMS, np.float32)
        bases = cuda.local.array(N_A, np.int32)
        for i in range(N_SUMS):
            acc[i] = ZERO
        n_parts, block = np.int32((n_columns + TILE_N - 1) // TILE_N), np.int32(cuda.blockIdx.x)
        rank, n_blocks, chunk, tap = 0, 1, np.int32(0), np.int32(0)
        n_chunks, n_taps = all_chunks, all_taps
        if TOGETHER:  # each of a cluster's blocks has chunks and taps of its own
            rank, n_blocks = cluster_rank(), cluster_size()
            block, _ = divided(block, np.int32(n_blocks))
            across, _ = divided(np.int32(all_taps + taps_each - 1), taps_each)
            down, right = divided(np.int32(rank), across)
            chunk, tap = np.int32(down * chunks_each), np.int32(right * taps_each)
            n_chunks = np.int32(min(all_chunks - chunk, chunks_each))
            n_taps = np.int32(min(all_taps - tap, taps_each))
        block, part = divided(block, n_parts)
        row, column = np.int64(block) * TILE_M, np.int32(part * TILE_N)
        image = image_of(row, P * Q)
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
        step_h, step_w = np.int32(dilation_h * grid_w * PITCH), np.int32(dilation_w * PITCH)
        r, s = divided(tap, S)
        known = first_weights(column, n_columns, n_channels, all_taps, chunk, tap, n_taps)
        allow_next_kernel()
        wait_for_previous_kernel()
        add_products(
            acc, cache, source, image * H * W * n_channels, origins, bases, weights, known,
            warp_col * COLUMN, lane, n_channels, chunk, n_chunks, n_taps,
            (s, np.int32(r * step_h)), S, step_h, step_w, n_positions,
        )  # fmt: skip
        wait_for_groups_but(0)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc, warp_row, warp_col, lane, options)
        meet()
        write(
            sums, bias, result, row, image_of(row, P * Q), column, n_rows, n_columns, P * Q,
            options, rank, n_blocks,
        )  # fmt: skip
        leave()

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
        copy_part_async(cache, np.int64(at + j * PITCH), source, base + origin * n_channels, n)

    return find_places, copy_position


@cuda.jit(device=True)
def _syncthreads():
    cuda.syncthreads()


@cuda.jit(device=True)
def _nothing():
    pass


@cuda.jit(device=True)
def _image_of(row, plane):
    return row // plane


@cuda.jit(device=True)
def _image_of_few(row, plane):
    """In 32 bits, which divide faster."""
    return np.int64(divided(np.int32(row), np.int32(plane))[0])
