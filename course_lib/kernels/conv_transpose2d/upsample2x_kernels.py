"""The kernels of `upsample2x`, and how their sums are stored in either memory format."""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma import fragments, mainloop
from course_lib.kernels.blocks.mma.results import SUMS_PADDING, results
from course_lib.kernels.blocks.mma.shape import K_BYTES, Shape
from course_lib.kernels.blocks.mma.tiles import PARTS, tile
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

ADD_BIAS, VECTORS = 1, 2  # options of the kernels are the sum of these
PADDING = 12  # float32 from one row of sums to the next, so that few lanes meet in a bank


class Kernel(NamedTuple):
    kernel: object
    shape: Shape
    shared_bytes: int


def _planar(shape):
    """(collect, write) of contiguous images: sums of one k and r lie pixel by pixel."""
    N_A = shape.m // shape.warps_m // fragments.FRAGMENT_M
    N_B = shape.n // shape.warps_n // fragments.FRAGMENT_N
    PITCH, ROWS, TILE_M, N_THREADS = 2 * shape.m + PADDING, shape.n // 2, shape.m, shape.n_threads

    @cuda.jit(device=True)
    def collect(sums, acc, row, col, lane):
        # A lane's columns 2t and 2t + 1 are both s of one k and r.
        place = (col // 2 + lane % 4) * PITCH + 2 * (row + lane // 4)
        for i in range(N_A):
            for j in range(N_B):
                for r in range(4):
                    at = 4 * j * PITCH + 2 * (16 * i + r // 2 * 8) + r % 2
                    sums[place + at] = acc[4 * (i * N_B + j) + r]

    @cuda.jit(device=True)
    def write(sums, bias, y, m, n, image, n_rows, H, W, K, y_n, y_k, y_p, y_q, options):
        values = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(y)
        PER_ROW = 2 * TILE_M // width
        base = np.int64(image) * y_n
        for i in range(cuda.threadIdx.x, ROWS * PER_ROW, N_THREADS):
            line, first = i // PER_ROW, i % PER_ROW * width
            k, r, pixel = (n // 2 + line) // 2, (n // 2 + line) % 2, m + first // 2
            if k < K and pixel < n_rows:
                add = load(bias, k) if options & ADD_BIAS else ZERO
                for part in range(0, width, 4):
                    load_vector(values[part : part + 4], sums, line * PITCH + first + part)
                for e in range(width):
                    values[e] += add
                h, w = divided(pixel, W)
                at = base + k * y_k + (2 * h + r) * y_p
                if options & VECTORS:
                    store_vector(y, at + 2 * w, values)
                else:
                    for e in range(width):
                        h, w = divided(pixel + e // 2, W)
                        if pixel + e // 2 < n_rows:
                            at = base + k * y_k + (2 * h + r) * y_p
                            store(y, at + (2 * w + e % 2) * y_q, values[e])

    return collect, write, shape.n // 2 * PITCH


def _channels_last(shape):
    """(collect, write) of channels-last images: sums of a pixel lie column by column."""
    warp = shape.m // shape.warps_m, shape.n // shape.warps_n
    collect, _ = results(shape.m, shape.n, *warp, shape.n_threads, False)
    PITCH, TILE_M, TILE_N, N_THREADS = shape.n + SUMS_PADDING, shape.m, shape.n, shape.n_threads

    @cuda.jit(device=True)
    def write(sums, bias, y, m, n, image, n_rows, H, W, K, y_n, y_k, y_p, y_q, options):
        values = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(y)
        PER_ROW = TILE_N // width
        for i in range(cuda.threadIdx.x, TILE_M * PER_ROW, N_THREADS):
            pixel, first = m + i // PER_ROW, i % PER_ROW * width
            tap, k = divided(n + first, K)
            if tap < 4 and pixel < n_rows:
                for part in range(0, width, 4):
                    at = i // PER_ROW * PITCH + first + part
                    load_vector(values[part : part + 4], sums, at)
                if options & ADD_BIAS:
                    for e in range(width):
                        values[e] += load(bias, k + e)
                row, w = divided(pixel, W)
                number, h = divided(row, H)
                at = np.int64(number) * y_n + (2 * h + tap // 2) * y_p + (2 * w + tap % 2) * y_q
                if options & VECTORS:
                    store_vector(y, at + k, values)
                else:
                    for e in range(width):
                        store(y, at + (k + e) * y_k, values[e])

    return collect, write, shape.m * PITCH


@functools.cache
def kernel_for(shape, itemsize, mode, channels_last):
    """The `Kernel` of these choices, made once."""
    TILE_M, TILE_N, N_STAGES = shape.m, shape.n, shape.n_stages
    source = "by_k" if channels_last else "by_row"
    a_tile, b_tile = (
        tile(side, K_BYTES, itemsize, shape.n_threads, how)
        for side, how in ((TILE_M, source), (TILE_N, "by_row"))
    )
    WARP_M, WARP_N, WARPS_N = TILE_M // shape.warps_m, TILE_N // shape.warps_n, shape.warps_n
    A_SIZE, STAGE, TILE_K = a_tile.size, a_tile.size + b_tile.size, a_tile.k_size
    A_ROW = a_tile.pitch if channels_last else 1
    N_SUMS = WARP_M * WARP_N // 32
    part_of_a, part_of_b = a_tile.fetch_part, b_tile.fetch_part
    first_a, first_b, next_a, next_b = (
        a_tile.first, b_tile.first, a_tile.following, b_tile.following,
    )  # fmt: skip
    AHEAD, _ = mainloop.timing(mode, N_STAGES)

    @cuda.jit(device=True)
    def fetch(part, cache, work):
        a, b, of_a, of_b, to = work
        part_of_a(part, cache, to, a, of_a)
        part_of_b(part, cache, to + A_SIZE, b, of_b)

    loads = (
        fragments.load_a(a_tile, source, itemsize), fragments.load_b(b_tile, "by_row", itemsize)
    )  # fmt: skip
    pipeline = mainloop.multiply(WARP_M, WARP_N, loads, mode, N_STAGES, fetch)
    begin, advance = pipeline.begin, pipeline.advance
    WORDS_A, WORDS_B, WORDS_C, WORDS_D = pipeline.n_words
    collect, write, n_results = (_channels_last if channels_last else _planar)(shape)

    @cuda.jit(launch_bounds=(shape.n_threads, shape.min_blocks))
    def upsample2x_kernel(
        x, weight, bias, y, n_rows, C, H, W, K, x_row, x_k, y_n, y_k, y_p, y_q, options
    ):
        # Blocks of the same pixels run at the same time: their columns come first. `n_rows`, of
        # pixels, are those of an image; channels-last, those of all images.
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = dynamic_shared(x)
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        words = (
            cuda.local.array(WORDS_A, np.uint32), cuda.local.array(WORDS_B, np.uint32),
            cuda.local.array(WORDS_C, np.uint32), cuda.local.array(WORDS_D, np.uint32),
        )  # fmt: skip
        tiles_n = (4 * K + TILE_N - 1) // TILE_N
        tiles_m = (n_rows + TILE_M - 1) // TILE_M
        block = np.int64(cuda.blockIdx.x)
        n, block = block % tiles_n * TILE_N, block // tiles_n
        m, image = block % tiles_m * TILE_M, block // tiles_m
        k = image * C  # as if all images had their channels one after another; else it is 0
        of_a = first_a(m, n_rows, x_row, k, k + C, x_k)
        of_b = first_b(n, 4 * K, 1, 0, C, 4 * K)
        for ahead in range(AHEAD):
            for part in range(PARTS):
                fetch(part, cache, (x, weight, of_a, of_b, ahead * STAGE))
            of_a, of_b = next_a(of_a), next_b(of_b)
            end_group()
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        row, col = warp // WARPS_N * WARP_M, warp % WARPS_N * WARP_N
        a_base, b_base, at, to = row * A_ROW, A_SIZE + col, 0, AHEAD % N_STAGES * STAGE
        wait_for_groups_but(AHEAD - 1)
        cuda.syncthreads()
        begin(words, cache, a_base, b_base, lane)
        for _ in range((C + TILE_K - 1) // TILE_K):
            following = at + STAGE if at < (N_STAGES - 1) * STAGE else 0
            advance(
                acc, words, cache, at + a_base, at + b_base, following + a_base,
                following + b_base, lane, (x, weight, of_a, of_b, to),
            )  # fmt: skip
            of_a, of_b = next_a(of_a), next_b(of_b)
            at, to = following, to + STAGE if to < (N_STAGES - 1) * STAGE else 0
        wait_for_groups_but(0)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc, row, col, lane)
        cuda.syncthreads()
        write(sums, bias, y, m, n, image, n_rows, H, W, K, y_n, y_k, y_p, y_q, options)

    shared_bytes = max(STAGE * itemsize * N_STAGES, n_results * 4)
    return Kernel(upsample2x_kernel, shape, shared_bytes)
