"""dweight of `tensor_core` where channels lie side by side, in any precision.

The product is that of `implicit_dweight`. A row of it is a *term*, a tap and a channel of x, with
channels side by side; a column a channel of dy; what is summed over are the pixels of y. So tiles
of either factor lie as (pixel, row number), and arrive 16 bytes at a time. A thread copies the
same few terms of some pixels of each tile. Where its taps lie is found once; where its pixels lie
goes on from tile to tile without a division. Which taps meet the image at a pixel is known for each
line and each column of y.

There are few terms and many pixels. Blocks share the pixels of a tile; `sum_kernel` adds up what
they found, in a fixed order, and puts it where the weights lie. Or they are a cluster and add it up
themselves, which saves a launch and the way through memory: then each writes a share of the tile,
and dbias comes along, from clusters of its own behind the others.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma import fragments, mainloop
from course_lib.kernels.blocks.mma.tiles import PARTS, ROW_PADDING, tile
from course_lib.kernels.conv2d.halo_results import PLANAR, add_up, results
from course_lib.kernels.conv2d.pixel_sums_copies import (
    BAND,
    BOTH_LINES,
    K_BYTES,
    copies,
    find_lines,
    rounds,
)
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load_vector,
    store,
    store_vector,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.cluster import (
    cluster_rank,
    cluster_size,
    cluster_sync,
    load_from_cluster,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

WIDTH = 4  # sums that a thread hands over at a time
AT_ONCE = 8  # loads of dy that a thread has on their way, for dbias


def tile_size(shape, itemsize):
    """Elements of shared memory for a pair of tiles; PITCH is that of `mma.tiles`."""
    return K_BYTES // itemsize * (shape.m + shape.n + 2 * 8)


def shared_bytes(shape, itemsize):
    """Bytes of dynamic shared memory for a block of this `mma.shape.Shape`."""
    buffers = shape.n_stages * tile_size(shape, itemsize) * itemsize
    return max(buffers, shape.n * (shape.m + 4) * 4)


def loop(shape, itemsize, mode):
    """(find_terms, find_pixels, add_products, collect), for the blocks that `make` is told."""
    TILE_M, TILE_N, N_STAGES = shape.m, shape.n, shape.n_stages
    WARP_M, WARP_N = shape.m // shape.warps_m, shape.n // shape.warps_n
    K_SIZE = K_BYTES // itemsize
    sides = [tile(n, K_BYTES, itemsize, 2 * n, "by_row") for n in (TILE_M, TILE_N)]
    A_SIZE, STAGE = sides[0].size, sides[0].size + sides[1].size
    loads = (
        fragments.load_a(sides[0], "by_row", itemsize),
        fragments.load_b(sides[1], "by_row", itemsize),
    )
    find_terms, find_pixels, go_on, fetch_x, fetch_dy = copies(shape, itemsize)
    collect, _ = results(TILE_M, TILE_N, WARP_M, WARP_N, shape.n_threads)
    AHEAD, _ = mainloop.timing(mode, N_STAGES)

    @cuda.jit(device=True)
    def fetch(part, cache, work):
        to, first, of_x, of_dy, n_pixels = work
        if part < PARTS - 1:
            fetch_x(part, cache, to, first, n_pixels, of_x)
        else:
            fetch_dy(cache, np.int32(to + A_SIZE), first, n_pixels, of_dy)

    pipeline = mainloop.multiply(WARP_M, WARP_N, loads, mode, N_STAGES, fetch)
    begin, advance = pipeline.begin, pipeline.advance
    WORDS_A, WORDS_B, WORDS_C, WORDS_D = pipeline.n_words

    @cuda.jit(device=True)
    def add_products(acc, cache, of_x, of_dy, step, n_pixels, a_base, b_base, lane):
        """All tiles of the block's pixels, each copied while those before it are worked on."""
        words = (
            cuda.local.array(WORDS_A, np.uint32), cuda.local.array(WORDS_B, np.uint32),
            cuda.local.array(WORDS_C, np.uint32), cuda.local.array(WORDS_D, np.uint32),
        )  # fmt: skip
        n_tiles, at = np.int32((n_pixels + K_SIZE - 1) // K_SIZE), np.int32(0)
        number, to = np.int32(0), np.int32(AHEAD % N_STAGES * STAGE)
        for ahead in range(AHEAD):
            for part in range(PARTS):
                work = np.int32(ahead * STAGE), np.int32(ahead * K_SIZE), of_x, of_dy, n_pixels
                fetch(part, cache, work)
            go_on(of_x[4], step, of_x[6])
            end_group()
        wait_for_groups_but(AHEAD - 1)
        cuda.syncthreads()
        begin(words, cache, a_base, b_base, lane)
        while number < n_tiles:
            following = np.int32(at + STAGE if at < (N_STAGES - 1) * STAGE else 0)
            work = to, np.int32((number + AHEAD) * K_SIZE), of_x, of_dy, n_pixels
            advance(
                acc, words, cache, np.int64(at + a_base), np.int64(at + b_base),
                np.int64(following + a_base), np.int64(following + b_base), lane, work,
            )  # fmt: skip
            go_on(of_x[4], step, of_x[6])
            at, to = following, np.int32(to + STAGE if to < (N_STAGES - 1) * STAGE else 0)
            number = np.int32(number + 1)

    return find_terms, find_pixels, add_products, collect


def make(shape, itemsize, mode, together=False):
    """The kernel for blocks of `shape`, of numbers of so many bytes, multiplied in `mode`.

    together  whether the blocks that share the pixels of a tile are a cluster
    """
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    WARP_M, WARP_N, WARPS_N = shape.m // shape.warps_m, shape.n // shape.warps_n, shape.warps_n
    N_SUMS, ROUNDS = WARP_M * WARP_N // 32, rounds(shape, itemsize)
    K_SIZE, BANDS = K_BYTES // itemsize, TILE_M // BAND
    A_SIZE = K_SIZE * (TILE_M + ROW_PADDING)
    find_terms, find_pixels, add_products, collect = loop(shape, itemsize, mode)
    hand_over = _handing_over(shape, itemsize, together)
    sum_dy = sums_of_dy(shape, itemsize)

    @cuda.jit(launch_bounds=(N_THREADS, shape.min_blocks))
    def pixel_sums_kernel(
        dy, x, partial, dbias, n_all, length, n_splits, C, K, H, W, P, Q, R, S, stride_h, stride_w,
        pad_h, pad_w, dilation_h, dilation_w, last,
    ):  # fmt: skip
        # `together`, partial is dweight, whose channels are `last` in memory, or its taps.
        cache = dynamic_shared(x)
        lines = cuda.shared.array(BOTH_LINES, np.int32)
        acc = cuda.local.array(N_SUMS, np.float32)
        bases, taps = cuda.local.array(BANDS, np.int64), cuda.local.array(BANDS, np.int32)
        pixels = cuda.local.array((3, ROUNDS), np.int32)
        for i in range(N_SUMS):
            acc[i] = ZERO
        n_terms, n_parts = np.int64(C) * R * S, np.int32((K + TILE_N - 1) // TILE_N)
        block, part = divided(np.int32(cuda.blockIdx.x), np.int32(n_splits))
        split, (down, right) = np.int64(part), divided(block, n_parts)
        row, column = np.int32(down * TILE_M), np.int32(right * TILE_N)
        first = split * length
        if together and row >= n_terms:
            sum_dy(dy, dbias, first, min(length, n_all - first), np.int64(K), column)
            return
        plane = np.int32(P * Q)
        image, pixel = divided(np.int32(first), plane)
        find_terms(bases, taps, row, n_terms, C, S, W, dilation_h, dilation_w)
        find_pixels(pixels, pixel, P, Q)
        find_lines(
            lines, P, Q, H, W, R, S, (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
        )
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
        hand_over(sums, partial, split, n_splits, column, row, K, n_terms, C, R * S, last)

    return pixel_sums_kernel


def _handing_over(shape, itemsize, together):
    """The device function that brings a block's sums, term by term, to memory."""
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads

    @cuda.jit(device=True)
    def write_own(sums, partial, split, n_splits, column, row, K, n_terms, C, n_taps, last):
        """To partial (splits, K, terms)."""
        values = cuda.local.array(WIDTH, np.float32)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, TILE_M * TILE_N // WIDTH, N_THREADS):
            m, n = i % (TILE_M // WIDTH) * WIDTH, i // (TILE_M // WIDTH)
            if row + m < n_terms and column + n < K:
                load_vector(values, sums, n * (TILE_M + 4) + m)
                store_vector(partial, (split * K + column + n) * n_terms + row + m, values)

    @cuda.jit(device=True)
    def write_share(sums, dweight, split, n_splits, column, row, K, n_terms, C, n_taps, last):
        """A share of what the cluster has found, to where the weights lie."""
        values = cuda.local.array(WIDTH, np.float32)
        cluster_sync()
        i = split * N_THREADS + cuda.threadIdx.x
        while i < TILE_M * TILE_N // WIDTH:
            n, m = divided(np.int32(i), TILE_M // WIDTH)
            m *= WIDTH
            if row + m < n_terms and column + n < K:
                add_up(values, sums, n * (TILE_M + 4) + m, WIDTH, n_splits)
                tap, c = divided(np.int32(row + m), C)
                place = (column + n) * n_terms
                if last and itemsize == 4:
                    store_vector(dweight, place + row + m, values)
                else:
                    place += row + m if last else c * n_taps + tap
                    for e in range(WIDTH):
                        store(dweight, place + (e if last else e * n_taps), values[e])
            i += n_splits * N_THREADS
        cluster_sync()  # nobody reads this block's sums any more

    return write_share if together else write_own


def sums_of_dy(shape, itemsize):
    """The device function that makes a tile's share of dbias, in a cluster."""
    TILE_N, N_THREADS, WIDE = shape.n, shape.n_threads, VECTOR_BYTES // itemsize
    SIDE, LINES = shape.n // WIDE, shape.n_threads * WIDE // shape.n
    STEP = LINES * AT_ONCE
    assert TILE_N <= N_THREADS and SIDE * LINES == N_THREADS

    @cuda.jit(device=True)
    def sum_dy(dy, dbias, first, n_pixels, K, column):
        """dbias from `column` on: the block sums n_pixels from `first` on."""
        sums = cuda.shared.array(0, np.float32)
        values = cuda.local.array((AT_ONCE, WIDE), np.float32)
        totals = cuda.local.array(WIDE, np.float32)
        tid = np.int64(cuda.threadIdx.x)
        line, n = tid // SIDE, tid % SIDE * WIDE
        for e in range(WIDE):
            totals[e] = ZERO
        allow_next_kernel()
        wait_for_previous_kernel()
        for pixel in range(line, n_pixels, STEP):
            for u in range(AT_ONCE):
                for e in range(WIDE):
                    values[u, e] = ZERO
                if pixel + u * LINES < n_pixels and column + n < K:
                    place = (first + pixel + u * LINES) * K + column + n
                    load_vector(values[u], dy, place)
            for u in range(AT_ONCE):
                for e in range(WIDE):
                    totals[e] += values[u, e]
        for e in range(WIDE):
            sums[line * TILE_N + n + e] = totals[e]
        cuda.syncthreads()
        total = ZERO
        if tid < TILE_N:
            for i in range(LINES):
                total += sums[i * TILE_N + tid]
        cuda.syncthreads()
        if tid < TILE_N:
            sums[tid] = total
        cluster_sync()
        if cluster_rank() == 0 and tid < TILE_N and column + tid < K:
            total = ZERO
            for rank in range(cluster_size()):
                total += load_from_cluster(sums, tid, rank)
            store(dbias, column + tid, total)
        cluster_sync()

    return sum_dy
