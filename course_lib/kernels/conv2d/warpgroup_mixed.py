"""`warpgroup` with float32's accuracy: products of numbers in two parts, "mixed".

As `mma.mainloop` says of that mode: a number is its rounding to TF32 and the rest, and x·w is
big·big, by TF32, + half·rest + rest·half, by bfloat16, of which an instruction takes twice as many
terms. A tensor core cuts sums off where float32 rounds; so what a step adds, a tap of 32 channels,
is summed from 0, and then added as float32, while the other warpgroup's product goes on.

Tiles of 128 bytes a row hold the big parts, 32 float32, and as many again the halves and rests of
the same 32 numbers: of positions first the halves, of weights first the rests, so that one product
of rows of 64 bfloat16 is both small ones. Weights come in two such tiles a step, one behind the
other (`arranging`). Positions come as they are. While a chunk of channels is worked on, the next
one arrives in a third place; once all have done with the chunk, it is split into the first two.

One barrier for each step, and one more for each chunk. At the barrier of step t all have done with
step t − 1: its weights' buffer is the next that copies go to.

The sums take most registers, and a compiler keeps in the others every address that does not change,
until they are too few. So the parts outside of the loop over taps find theirs from a 0 that it does
not know: it lies in shared memory, behind the origins.

Compute capability 9.0 alone, as `warpgroup`: `halo` takes these passes elsewhere.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.halo_results import PLANAR
from course_lib.kernels.conv2d.warpgroup import GROUP_THREADS, copying, stepping
from course_lib.kernels.conv2d.warpgroup_results import staged_size, writing
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.halves import pack_halves
from course_lib.runtime.intrinsics.matrix import round_tf32, subtract_words
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.warpgroup import (
    BOUNDARY,
    ROW_BYTES,
    ROWS,
    multiply_halves,
    multiply_tiles,
    show_to_products,
    tiles_in_shared,
    wait_for_products,
)
from course_lib.runtime.intrinsics.words import load_words, store_words

MOST_POSITIONS = 511  # of a block
NOTHING = MOST_POSITIONS  # where behind the origins there is a 0
K_SIZE, WIDTH = ROW_BYTES // 4, VECTOR_BYTES // 4
LINE = 8  # rows that a warp splits at a time, and numbers of a lane
COPIES = 3  # of a chunk's positions: big parts, halves and rests, and the next chunk's


def shared_bytes(shape, n_positions):
    """Bytes of dynamic shared memory for a block of this `warpgroup_plan.Shape`."""
    n_rows = COPIES * n_positions + shape.n_stages * 2 * shape.n
    return front_bytes(shape) + n_rows * ROW_BYTES


def front_bytes(shape):
    """Bytes in front of the tiles: places and origins; whole boundaries."""
    n_bytes = 8 * shape.m + 4 * (MOST_POSITIONS + 1)
    return -(-n_bytes // BOUNDARY) * BOUNDARY


def fewest_positions(shape):
    """So many of a block have room for the sums that take their place on the way to the result."""
    return -(-4 * staged_size(shape) // (2 * ROW_BYTES))


def make(shape):
    """The kernel for blocks of `shape`."""
    TILE_M, TILE_N, N_STAGES, N_THREADS = shape.m, shape.n, shape.n_stages, shape.n_threads
    EACH, SIDE = shape.each, shape.n // ROWS  # positions of a warpgroup; warpgroups side by side
    N_SUMS = EACH // 2
    SMALL, STAGE, AHEAD = TILE_N * K_SIZE, 2 * TILE_N * K_SIZE, N_STAGES - 1
    # Shared memory in bytes: places, origins, weights, positions.
    ORIGINS, FRONT = 8 * TILE_M, front_bytes(shape) // ROW_BYTES * K_SIZE
    FIRST_ROW = front_bytes(shape) // ROW_BYTES + N_STAGES * 2 * TILE_N
    following, write = stepping(STAGE, WIDTH), writing(EACH)
    copy_weights, find_origins, find_places, copy_positions = copying(
        2 * TILE_N, N_THREADS, TILE_M, 4
    )

    @cuda.jit(device=True)
    def split(cache, nothing, n_positions):
        """The positions that have arrived, in two parts, to where they are multiplied.

        Four lanes take a row, and eight that work at the same time two rows of which neither the
        float32 nor the bfloat16 lie in the same banks.
        """
        words, big = cuda.local.array(8, np.uint32), cuda.local.array(8, np.uint32)
        halves, rests = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        tid = np.int32(cuda.threadIdx.x + nothing)
        lane, c = np.int32(tid % 32), np.int32(tid % 4)
        row = np.int32(lane // LINE ^ (5 if lane & 4 else 0))
        low, high = np.int32((2 * c ^ row) * WIDTH), np.int32((2 * c + 1 ^ row) * WIDTH)
        half, rest = np.int32((c ^ row) * WIDTH), np.int32((c + 4 ^ row) * WIDTH)
        row = np.int32(row + tid // 32 * LINE)
        further = np.int32(n_positions * K_SIZE)
        for j in range(row, n_positions, N_THREADS // 4):
            to = np.int32((FIRST_ROW + j) * K_SIZE)
            origin = np.int32(to + 2 * further)
            load_words(words, 0, cache, np.int64(origin + low), 4)
            load_words(words, 4, cache, np.int64(origin + high), 4)
            for q in range(8):
                big[q] = round_tf32(words[q])
            for q in range(4):
                halves[q] = pack_halves(words[2 * q], words[2 * q + 1])
                rests[q] = pack_halves(
                    subtract_words(words[2 * q], big[2 * q]),
                    subtract_words(words[2 * q + 1], big[2 * q + 1]),
                )
            store_words(cache, np.int64(to + further + half), halves, 4)
            store_words(cache, np.int64(to + further + rest), rests, 4)
            store_words(cache, np.int64(to + low), big, 4)
            for q in range(4):
                halves[q] = big[4 + q]
            store_words(cache, np.int64(to + high), halves, 4)

    @cuda.jit(device=True)
    def share_of(tid):
        """(first position, first column) of the tile that a thread's warpgroup works on."""
        group = np.int32(tid // GROUP_THREADS)
        return np.int32(group // SIDE * EACH), np.int32(group % SIDE * ROWS)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def warpgroup_mixed_kernel(
        source, weights, bias, result, options, n_tiles, N, P, Q, H, W, grid_h, grid_w, pad_h,
        pad_w, step_h, step_w, S, n_taps, n_channels, n_columns, n_chunks, n_positions, share,
    ):  # fmt: skip
        cache = tiles_in_shared(source)
        places = cuda.shared.array(0, np.int64)  # the same memory, as are the others
        origins = cuda.shared.array(0, np.int32)[ORIGINS // 4 :]
        shared = cuda.shared.array(0, np.float32)
        acc = cuda.local.array(N_SUMS, np.float32)
        fresh = cuda.local.array(N_SUMS, np.float32)
        n_parts, n_steps = np.int32((n_columns + TILE_N - 1) // TILE_N), np.int32(n_chunks * n_taps)
        planar = options & PLANAR != 0
        sizes, grid, pad, none = (N, H, W), (grid_h, grid_w), (pad_h, pad_w), np.int32(0)
        tile, n_blocks = np.int32(cuda.blockIdx.x), np.int32(cuda.gridDim.x)
        block, part = divided(tile, n_parts)
        next_step = np.int64(n_parts) * STAGE
        where = np.int64(part) * STAGE + np.int64(cuda.threadIdx.x) * WIDTH  # weights to copy next
        ahead, ahead_of = none, tile  # of which step they are, of which tile
        at, to = none, none
        to_small, arriving = np.int32(n_positions * K_SIZE), np.int32(FIRST_ROW + 2 * n_positions)
        origins[NOTHING] = none
        find_origins(origins, np.int32(block * TILE_M), n_positions, sizes, grid, pad)
        cuda.syncthreads()
        allow_next_kernel()
        wait_for_previous_kernel()
        copy_positions(cache, arriving, source, origins, none, n_positions, n_channels, none)
        for _ in range(AHEAD):
            copy_weights(cache, FRONT + to, weights, where, ahead_of < n_tiles)
            where, ahead, ahead_of = following(
                where, ahead, ahead_of, next_step, n_steps, n_blocks, n_parts
            )
            to = np.int32(to + STAGE)
            end_group()
        while tile < n_tiles:
            for i in range(N_SUMS):
                acc[i] = ZERO
            for chunk in range(n_chunks):
                # While this chunk is worked on, the next one is copied: of this tile, or the next.
                last = chunk + 1 == n_chunks
                k = none if last else np.int32((chunk + 1) * K_SIZE)
                soon = np.int32(tile + n_blocks) if last else tile
                stop = n_positions if soon < n_tiles else none
                wait_for_groups_but(AHEAD - 1)
                cuda.syncthreads()  # all positions are there, and nobody needs the last chunk's
                split(cache, origins[NOTHING], n_positions)
                mine, column = share_of(np.int32(cuda.threadIdx.x + origins[NOTHING]))
                line, s = np.int32(FIRST_ROW + mine), none
                for tap in range(n_taps):
                    wait_for_groups_but(AHEAD - 1)
                    show_to_products()
                    cuda.syncthreads()
                    a = np.int32(FRONT + at + column * K_SIZE)
                    b = np.int32((line + s * step_w) * K_SIZE)
                    multiply_halves(fresh, cache, np.int64(a + SMALL), np.int64(b + to_small), EACH)
                    multiply_tiles(fresh, cache, np.int64(a), np.int64(b), EACH, 0)
                    copy_weights(cache, FRONT + to, weights, where, ahead_of < n_tiles)
                    where, ahead, ahead_of = following(
                        where, ahead, ahead_of, next_step, n_steps, n_blocks, n_parts
                    )
                    if tap > 0:
                        until = min(np.int32(tap * share), stop)
                        copy_positions(
                            cache, arriving, source, origins, np.int32((tap - 1) * share), until,
                            n_channels, k,
                        )  # fmt: skip
                    else:
                        if chunk == 0:
                            position = np.int32(divided(tile, n_parts)[0] * TILE_M)
                            find_places(places, position, N, P, Q, grid, n_columns, planar)
                        if last:
                            position = np.int32(divided(soon, n_parts)[0] * TILE_M)
                            find_origins(origins, position, stop, sizes, grid, pad)
                    end_group()
                    wait_for_products(fresh, EACH)
                    for i in range(N_SUMS):
                        acc[i] += fresh[i]
                    at = np.int32(at + STAGE if at < (N_STAGES - 1) * STAGE else 0)
                    to = np.int32(to + STAGE if to < (N_STAGES - 1) * STAGE else 0)
                    s = np.int32(s + 1)
                    if s == S:
                        s, line = none, np.int32(line + step_h)
            if planar:
                cuda.syncthreads()  # the sums go where others may still read the positions
            mine, column = share_of(np.int32(cuda.threadIdx.x + origins[NOTHING]))
            column = np.int32(column + divided(tile, n_parts)[1] * TILE_N)
            staged = shared[np.int32(FIRST_ROW * K_SIZE + origins[NOTHING]) :]
            write(acc, staged, places, bias, result, mine, column, P * Q, n_columns, options)
            tile = np.int32(tile + n_blocks)
        wait_for_groups_but(0)

    return warpgroup_mixed_kernel
