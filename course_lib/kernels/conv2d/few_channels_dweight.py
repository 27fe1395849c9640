"""dweight and dbias of `few_channels`, in one pass over dy.

A thread keeps the sums of a few filters, which leaves registers for few loads from memory at a
time. So float32 is *staged*, where 16 bytes can be copied at once: the next tile of dy comes into
shared memory while this one is worked on, as x does. All else is read when it is needed.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.few_channels import (
    BLOCK_SIZE,
    LANES,
    MOST_UNROLLED,
    N_WARPS,
    find_pixel,
    in_turn,
    parts,
)
from course_lib.kernels.conv2d.few_channels_sums import fold
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.matrix import copy_part_async
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

WIDTH = 4  # float32 in 16 bytes
MOST_ROUNDS = 4  # pixels of a thread in a tile


def filters_of_block(last, filters):
    """Whose sums a block keeps, of which each thread keeps those of `filters`."""
    return filters * (LANES if last else 1)


def staged_size(filters):
    """Elements of shared memory that a tile of dy takes."""
    return MOST_ROUNDS * BLOCK_SIZE * filters


def dweight_kernel(C, R, S, last, filters, unroll, min_blocks, staged):
    """Sums for dweight and dbias: of `filters` filters a thread, `unroll` pixels at a time."""
    N_TAPS = C * R * S
    EACH = N_TAPS + 1  # sums of a filter
    SIDE = BLOCK_SIZE // LANES if last else BLOCK_SIZE  # threads that have different pixels
    SHARED = 32 // (LANES if last else 1)  # lanes that have the same filters
    KEPT = (filters * EACH + SHARED - 1) // SHARED  # sums that a lane is left with
    N_SUMS, BLOCK_FILTERS = KEPT * SHARED, filters_of_block(last, filters)
    SCRATCH, PER_WARP = N_WARPS * BLOCK_FILTERS * EACH, BLOCK_FILTERS * EACH
    N_VALUES, PER_THREAD = filters * unroll, filters * EACH
    TILE, DY_SIZE = MOST_ROUNDS * SIDE, staged_size(filters) if staged else 0
    VECTORS, SWAPPED = BLOCK_FILTERS // WIDTH, last and BLOCK_FILTERS == 32
    copy, tap_place = parts(C, R, S, last)
    fold_sums = fold(N_SUMS, 16, LANES if last else 1)

    @cuda.jit(device=True)
    def filter_of(f, width):
        """The number, within the block, of the filter of a thread's value `f`."""
        if last:
            return f // width * (LANES * width) + cuda.threadIdx.x % LANES * width + f % width
        return f

    @cuda.jit(device=True)
    def load_dy(values, at, dy, where, unit, n, whole):
        """dy at one pixel, for the thread's filters, of which the block has `n`; zeros for others.

        `whole`: 16 bytes can be read at once; or, where pixels lie side by side, that no filter is
        missing.
        """
        width = vector_width(dy)
        if last and filters >= width and whole:
            row = cuda.local.array(MAX_WIDTH, np.float32)
            for v in range(filters // width):
                k = np.int32(filter_of(v * width, width))
                for e in range(width):
                    row[e] = ZERO
                if k < n:
                    load_vector(row, dy, where + k)
                for e in range(width):
                    values[at + v * width + e] = row[e]
        elif not last and whole:
            for f in range(filters):
                values[at + f] = load(dy, where + f * np.int64(unit))
        else:
            for f in range(filters):
                k = np.int32(filter_of(f, min(width, filters)))
                values[at + f] = load(dy, where + np.int32(k * unit)) if k < n else ZERO

    @cuda.jit(device=True)
    def copy_dy(cache, at, dy, begin, stop, n, first, unit, K, n_pixels, n_vectors):
        """A tile of dy, pixel `begin` and on, 16 bytes at a time; not waited for.

        It lies as dy does: the pixels of a filter side by side, of which there must be `filters`,
        or the filters of a pixel, of which there are `n`.
        """
        v = np.int32(cuda.threadIdx.x)
        while v < n_vectors:
            if last:
                pixel, k = np.int32(begin + v // VECTORS), np.int32(v % VECTORS * WIDTH)
                count = WIDTH if pixel < stop and k < n else 0
                where = np.int64(pixel) * K + first + k if count else 0
                if SWAPPED and v // VECTORS & 1:
                    k = np.int32(k ^ 16)
                place = at + v // VECTORS * BLOCK_FILTERS + k
                copy_part_async(cache, np.int64(place), dy, where, count)
            else:
                pixel = np.int32(begin + v * WIDTH)
                image, _ = divided(pixel, n_pixels)
                where = np.int64(image) * np.int32((K - 1) * n_pixels) + pixel
                count, step = np.int32(0), np.int64(0)
                if pixel < stop:
                    count, step = np.int32(min(WIDTH, stop - pixel)), np.int64(unit)
                    where += np.int64(first) * unit
                else:
                    where = np.int64(0)
                for f in range(filters):
                    place = np.int64(at + v * WIDTH) + f * TILE
                    copy_part_async(cache, place, dy, where + f * step, count)
            v = np.int32(v + BLOCK_SIZE)

    @cuda.jit(device=True)
    def take_dy(values, at, cache, where, number):
        """As `load_dy`, from a tile in shared memory at `where`, of its pixel `number`."""
        if last and filters >= WIDTH:
            row = cuda.local.array(WIDTH, np.float32)
            lane = cuda.threadIdx.x % LANES * WIDTH
            for v in range(filters // WIDTH):
                k = lane + v * LANES * WIDTH
                if SWAPPED:  # so that threads of two pixels meet different banks
                    k = k ^ ((number & 1) * 16)
                load_vector(row, cache, np.int64(where + number * BLOCK_FILTERS + k))
                for e in range(WIDTH):
                    values[at + v * WIDTH + e] = row[e]
        elif last:
            for f in range(filters):
                k = filter_of(f, filters)
                values[at + f] = cache[np.uint32(where + number * BLOCK_FILTERS + k)]
        else:
            for f in range(filters):
                values[at + f] = cache[np.uint64(where + number) + np.uint64(f * TILE)]

    def adding(start):
        stop = min(N_TAPS, start + MOST_UNROLLED // filters)

        @cuda.jit(device=True)
        def add_some(sums, values, at, cache, place, steps):
            """One pixel's products: x where each tap meets it, times dy."""
            for t in range(start, stop):
                value = cache[np.uint64(place) + np.uint64(tap_place(t, *steps))]
                for f in range(filters):
                    sums[f * EACH + t] += value * values[at + f]
            if start == 0:
                for f in range(filters):
                    sums[f * EACH + N_TAPS] += values[at + f]
            return 0

        return add_some

    add = in_turn(adding(start) for start in range(0, N_TAPS, MOST_UNROLLED // filters))

    @cuda.jit(device=True)
    def collect(sums, partial, start, n, width):
        """The block's sums, in a fixed order, to partial[start] and on, for `n` filters."""
        scratch = cuda.shared.array(SCRATCH, np.float32)
        tid = cuda.threadIdx.x
        mine = fold_sums(sums, tid % 32)
        for i in range(KEPT):
            if mine + i < PER_THREAD:
                f, t = (mine + i) // EACH, (mine + i) % EACH
                scratch[tid // 32 * PER_WARP + filter_of(f, width) * EACH + t] = sums[i]
        cuda.syncthreads()
        for e in range(tid, PER_WARP, BLOCK_SIZE):
            if e < n * EACH:
                total = scratch[e]
                for other in range(1, N_WARPS):
                    total += scratch[other * PER_WARP + e]
                partial[start + e] = total

    @cuda.jit(device=True)
    def add_tile(sums, cache, dy, ready, at, pixel, i, stop, walk, lines):
        """The thread's pixels of one tile, from `pixel`, number `i`; returns that of the next.

        ready  (dy is in shared memory, at `at`; else: it can be read as `load_dy` says)
        """
        unit, n, rounds = walk[:3]
        values = cuda.local.array(N_VALUES, np.float32)
        places = cuda.local.array(unroll, np.int32)
        number = np.int32(cuda.threadIdx.x // LANES if last else cuda.threadIdx.x)
        turn = np.int32(0)
        while turn < rounds:
            for u in range(unroll):
                _, _, places[u], where = pixel
                if np.int32(i + u * SIDE) < stop:
                    if staged and ready[0]:
                        take_dy(values, u * filters, cache, at, np.int32(number + u * SIDE))
                    else:
                        load_dy(values, u * filters, dy, where, unit, n, ready[1])
                pixel = advance(pixel, walk[3:])
            for u in range(unroll):
                if np.int32(i + u * SIDE) < stop:
                    add(sums, values, u * filters, cache, places[u], lines)
            i, number = np.int32(i + unroll * SIDE), np.int32(number + unroll * SIDE)
            turn = np.int32(turn + unroll)
        return pixel

    @cuda.jit(launch_bounds=(BLOCK_SIZE, min_blocks))
    def few_channels_dweight_kernel(
        dy, x, partial, length, rounds, n_groups, n_lines, n_cols, tall, whole, N, H, W, K, P, Q,
        stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    ):  # fmt: skip
        # Block `split * n_groups + group` sums `length` pixels; partial is (splits, K, EACH).
        cache = dynamic_shared(partial)
        sums = cuda.local.array(N_SUMS, np.float32)
        for i in range(KEPT):  # in two loops, so short that they are unrolled
            for j in range(SHARED):
                sums[i * SHARED + j] = ZERO
        split, group = divided(cuda.blockIdx.x, n_groups)
        first, width = np.int32(group * BLOCK_FILTERS), min(vector_width(dy), filters)
        n, n_pixels = min(np.int32(K - first), np.int32(BLOCK_FILTERS)), np.int32(P * Q)
        size = np.int32(DY_SIZE + (C * n_lines * n_cols + 3) // 4 * 4)
        begin, strides, tile = np.int32(split * length), (stride_h, stride_w), rounds * SIDE
        stop = min(np.int32(begin + length), np.int32(N * n_pixels))
        unit, image_step, pixel_step = n_pixels, np.int32((K - 1) * n_pixels), np.int32(1)
        full = n == filters
        if last:
            unit, image_step, pixel_step, full = np.int32(1), np.int32(0), K, whole
        ready = staged and whole and full, full
        n_vectors = np.int32(tile * BLOCK_FILTERS // WIDTH if last else tile // WIDTH)
        of_dy = n, first, unit, K, n_pixels, n_vectors
        of_x = n_lines, n_cols, tall, N, H, W, pad_h, pad_w
        # How a pixel's place in the tile, and in dy, goes on SIDE pixels further.
        step, p, q = place_in(np.int32(SIDE), P, Q)
        place = np.int32((step * tall + p * stride_h) * n_cols + q * stride_w)
        next_line = np.int32(stride_h * n_cols - Q * stride_w)
        next_image = np.int32((tall - P * stride_h) * n_cols)
        where = np.int64(step) * image_step + np.int64(SIDE) * pixel_step
        walk = (
            unit, n, rounds, P, Q, p, q, place, next_line, next_image, where, np.int64(image_step)
        )  # fmt: skip
        i = np.int32(begin + (cuda.threadIdx.x // LANES if last else cuda.threadIdx.x))
        image, p, q = place_in(i, P, Q)
        _, top, _ = find_pixel(begin, P, Q, tall, strides)
        place = np.int32((image * tall + p * stride_h - top) * n_cols + q * stride_w + DY_SIZE)
        where = np.int64(image) * image_step + np.int64(i) * pixel_step + np.int64(first) * unit
        pixel, at = (p, q, place, where), np.int32(0)
        lines = n_lines * n_cols, dilation_h * n_cols, dilation_w
        allow_next_kernel()
        wait_for_previous_kernel()
        copy(cache, DY_SIZE, x, top, *of_x)
        if staged and ready[0]:
            copy_dy(cache, at, dy, begin, stop, *of_dy)
        end_group()
        while begin < stop:
            begin, following = np.int32(begin + tile), np.int32(size - at)
            _, next_top, _ = find_pixel(begin, P, Q, tall, strides)
            if begin < stop:
                copy(cache, np.int32(following + DY_SIZE), x, next_top, *of_x)
                if staged and ready[0]:
                    copy_dy(cache, following, dy, begin, stop, *of_dy)
            end_group()
            wait_for_groups_but(1)
            cuda.syncthreads()
            pixel = add_tile(sums, cache, dy, ready, at, pixel, i, stop, walk, lines)
            cuda.syncthreads()
            place = np.int32(pixel[2] + (top - next_top) * n_cols + following - at)
            pixel = pixel[0], pixel[1], place, pixel[3]
            i, at, top = np.int32(i + tile), following, next_top
        collect(sums, partial, (np.int64(split) * K + first) * EACH, n, width)

    return few_channels_dweight_kernel


@cuda.jit(device=True)
def advance(pixel, walk):
    """(line, column, place in the tile, place in dy) of the thread's next pixel."""
    P, Q, step_p, step_q, step, next_line, next_image, further, image_step = walk
    p, q = np.int32(pixel[0] + step_p), np.int32(pixel[1] + step_q)
    place, where = np.int32(pixel[2] + step), pixel[3] + further
    if q >= Q:
        p, q, place = np.int32(p + 1), np.int32(q - Q), np.int32(place + next_line)
    if p >= P:
        p, place, where = np.int32(p - P), np.int32(place + next_image), where + image_step
    return p, q, place, where


@cuda.jit(device=True)
def place_in(i, P, Q):
    """(image, line, column) of pixel `i` of y."""
    image, rest = divided(i, np.int32(P * Q))
    p, q = divided(rest, Q)
    return image, p, q
