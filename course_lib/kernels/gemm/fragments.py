"""What a warp multiplies: fragments of tiles in shared memory, held in registers.

A warp computes `rows`·`cols` of the product, in fragments of 16 rows and 8 columns. `acc`, the sums
of a lane, is a local array of 4 float32 for each fragment (`runtime.matrix` says which); fragment
(i, j) begins at 4·(i·cols/8 + j). Along k a tile is worked on 32 bytes at a time, a *step*.

How float32 numbers are multiplied is a matter of `mode`:

========= ==========================================================================================
`narrow`  16-bit inputs, as they are
`tf32`    each number rounded to TF32: 10 bits of mantissa
`split`   each number the sum of two, its rounding to TF32 and the rest: x·w is big·big + big·small
          + small·big, and small·small is below float32's own rounding. Three products, the small
          ones first. A tensor core cuts sums off where float32 rounds, and in a long sum that adds
          up; so each two steps are summed from 0, and then added as float32
========= ==========================================================================================

Splitting: NVIDIA's CUTLASS example 27 (3xTF32); the sums: Ootomo and Yokota, "Recovering single
precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022).
"""

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.matrix import (
    load_matrices,
    load_matrices_transposed,
    load_word,
    multiply_add,
    round_tf32,
    subtract_words,
)

FRAGMENT_M, FRAGMENT_N = 16, 8
STEP_BYTES = 32
MODES = ("narrow", "tf32", "split")
ZERO = np.float32(0)


def load_a(tile, source, itemsize):
    """load(words, at, cache, base, step, lane): words[at : at+4] of the 16 rows from `base` on.

    `base` is where the tile's first column (or, `by_row`, its first k) of the first row lies.
    """
    PITCH, WIDTH = tile.pitch, VECTOR_BYTES // itemsize
    K_STEP = STEP_BYTES // itemsize

    @cuda.jit(device=True)
    def load_by_k(words, at, cache, base, step, lane):
        place = base + lane % 16 * PITCH + lane // 16 * WIDTH + step * K_STEP
        load_matrices(words, at, cache, place)

    @cuda.jit(device=True)
    def load_by_row(words, at, cache, base, step, lane):
        k = step * K_STEP + lane // 16 * 8 + lane % 8
        load_matrices_transposed(words, at, cache, base + k * PITCH + lane // 8 % 2 * 8)

    @cuda.jit(device=True)
    def load_words_by_row(words, at, cache, base, step, lane):
        place = base + (step * K_STEP + lane % 4) * PITCH + lane // 4
        for r in range(4):
            words[at + r] = load_word(cache, place + r % 2 * 8 + r // 2 * 4 * PITCH)

    return _chosen(source, itemsize, load_by_k, load_by_row, load_words_by_row)


def load_b(tile, source, itemsize):
    """load(words, at, cache, base, step, lane): words[at : at+4] of the 16 columns from `base` on.

    That is two fragments of 8 columns.
    """
    PITCH, WIDTH = tile.pitch, VECTOR_BYTES // itemsize
    K_STEP = STEP_BYTES // itemsize

    @cuda.jit(device=True)
    def load_by_k(words, at, cache, base, step, lane):
        place = base + (lane % 8 + lane // 16 * 8) * PITCH + lane // 8 % 2 * WIDTH + step * K_STEP
        load_matrices(words, at, cache, place)

    @cuda.jit(device=True)
    def load_by_row(words, at, cache, base, step, lane):
        k = step * K_STEP + lane % 16
        load_matrices_transposed(words, at, cache, base + k * PITCH + lane // 16 * 8)

    @cuda.jit(device=True)
    def load_words_by_row(words, at, cache, base, step, lane):
        place = base + (step * K_STEP + lane % 4) * PITCH + lane // 4
        for r in range(4):
            words[at + r] = load_word(cache, place + r // 2 * 8 + r % 2 * 4 * PITCH)

    return _chosen(source, itemsize, load_by_k, load_by_row, load_words_by_row)


def _chosen(source, itemsize, by_k, by_row, words_by_row):
    if source != "by_row":
        return by_k
    return by_row if itemsize == 2 else words_by_row


def multiply(rows, cols, a_tile, b_tile, sources, itemsize, mode):
    """multiply(acc, cache, a_base, b_base, lane): acc += the product of two tiles' parts.

    rows, cols      of the warp
    a_base, b_base  where its part of either tile begins in `cache`
    """
    chosen = load_a(a_tile, sources[0], itemsize), load_b(b_tile, sources[1], itemsize)
    rows_on = 1 if sources[0] == "by_row" else a_tile.pitch
    cols_on = 1 if sources[1] == "by_row" else b_tile.pitch
    distances = FRAGMENT_M * rows_on, 2 * FRAGMENT_N * cols_on
    counts = rows // FRAGMENT_M, cols // FRAGMENT_N
    n_steps = a_tile.k_size * itemsize // STEP_BYTES
    if mode == "split":
        return _multiply_split(*chosen, *distances, *counts, n_steps)
    return _multiply_plain(*chosen, *distances, *counts, n_steps, mode == "tf32")


def _multiply_plain(load_a, load_b, A_NEXT, B_NEXT, N_A, N_B, N_STEPS, rounds):
    A_WORDS, B_WORDS = 4 * N_A, 2 * N_B

    @cuda.jit(device=True)
    def keep(words, n):
        pass

    @cuda.jit(device=True)
    def round_all(words, n):
        for r in range(n):
            words[r] = round_tf32(words[r])

    prepare = round_all if rounds else keep

    @cuda.jit(device=True)
    def load_step(a, b, cache, a_base, b_base, step, lane):
        for i in range(N_A):
            load_a(a, 4 * i, cache, a_base + i * A_NEXT, step, lane)
        for j in range(N_B // 2):
            load_b(b, 4 * j, cache, b_base + j * B_NEXT, step, lane)

    @cuda.jit(device=True)
    def multiply_step(acc, a, b, like):
        prepare(a, A_WORDS)
        prepare(b, B_WORDS)
        for i in range(N_A):
            for j in range(N_B):
                multiply_add(acc, 4 * (i * N_B + j), a, 4 * i, b, 2 * j, like)

    @cuda.jit(device=True)
    def multiply_tiles(acc, cache, a_base, b_base, lane):
        # While one step is multiplied, the next one's registers are on their way.
        a, b = cuda.local.array(A_WORDS, np.uint32), cuda.local.array(B_WORDS, np.uint32)
        next_a, next_b = cuda.local.array(A_WORDS, np.uint32), cuda.local.array(B_WORDS, np.uint32)
        load_step(a, b, cache, a_base, b_base, 0, lane)
        for step in range(0, N_STEPS, 2):
            load_step(next_a, next_b, cache, a_base, b_base, step + 1, lane)
            multiply_step(acc, a, b, cache)
            if step + 2 < N_STEPS:
                load_step(a, b, cache, a_base, b_base, step + 2, lane)
            multiply_step(acc, next_a, next_b, cache)

    return multiply_tiles


def _multiply_split(load_a, load_b, A_NEXT, B_NEXT, N_A, N_B, N_STEPS):
    B_WORDS, PARTS = 2 * N_B, 4 * N_B
    BOTH_STEPS = 2 * B_WORDS

    @cuda.jit(device=True)
    def split(words, small, n):
        for r in range(n):
            big = round_tf32(words[r])
            small[r] = subtract_words(words[r], big)
            words[r] = big

    @cuda.jit(device=True)
    def multiply_two_steps(acc, first, a, a_small, b, b_small, like):
        part = cuda.local.array(PARTS, np.float32)
        for r in range(PARTS):
            part[r] = ZERO
        for step in range(2):
            for j in range(N_B):
                multiply_add(part, 4 * j, a_small, 4 * step, b, step * B_WORDS + 2 * j, like)
            for j in range(N_B):
                multiply_add(part, 4 * j, a, 4 * step, b_small, step * B_WORDS + 2 * j, like)
        for step in range(2):
            for j in range(N_B):
                multiply_add(part, 4 * j, a, 4 * step, b, step * B_WORDS + 2 * j, like)
        for r in range(PARTS):
            acc[first + r] += part[r]

    @cuda.jit(device=True)
    def multiply_tiles(acc, cache, a_base, b_base, lane):
        a, a_small = cuda.local.array(8, np.uint32), cuda.local.array(8, np.uint32)
        b = cuda.local.array(BOTH_STEPS, np.uint32)
        b_small = cuda.local.array(BOTH_STEPS, np.uint32)
        for half in range(N_STEPS // 2):
            for step in range(2):
                for j in range(N_B // 2):
                    place = b_base + j * B_NEXT
                    load_b(b, step * B_WORDS + 4 * j, cache, place, 2 * half + step, lane)
            split(b, b_small, BOTH_STEPS)
            for i in range(N_A):
                for step in range(2):
                    load_a(a, 4 * step, cache, a_base + i * A_NEXT, 2 * half + step, lane)
                split(a, a_small, 8)
                multiply_two_steps(acc, i * PARTS, a, a_small, b, b_small, cache)

    return multiply_tiles
