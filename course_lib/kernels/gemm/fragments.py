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
          up; so each step or two are summed from 0, and then added as float32
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
    """load(words, at, cache, base, i, step, lane): words[at : at+4] of the i-th 16 rows.

    `base` is where the tile's first column (or, `by_row`, its first k) of the first row lies.
    """
    PITCH, WIDTH = tile.pitch, VECTOR_BYTES // itemsize
    K_STEP = STEP_BYTES // itemsize

    @cuda.jit(device=True)
    def load_by_k(words, at, cache, base, i, step, lane):
        place = base + (i * FRAGMENT_M + lane % 16) * PITCH + lane // 16 * WIDTH + step * K_STEP
        load_matrices(words, at, cache, place)

    @cuda.jit(device=True)
    def load_by_row(words, at, cache, base, i, step, lane):
        k = step * K_STEP + lane // 16 * 8 + lane % 8
        place = base + k * PITCH + lane // 8 % 2 * 8 + i * FRAGMENT_M
        load_matrices_transposed(words, at, cache, place)

    @cuda.jit(device=True)
    def load_words_by_row(words, at, cache, base, i, step, lane):
        place = base + (step * K_STEP + lane % 4) * PITCH + lane // 4 + i * FRAGMENT_M
        for r in range(4):
            words[at + r] = load_word(cache, place + r % 2 * 8 + r // 2 * 4 * PITCH)

    return _chosen(source, itemsize, load_by_k, load_by_row, load_words_by_row)


def load_b(tile, source, itemsize):
    """load(words, at, cache, base, j, step, lane): words[at : at+4] of the j-th 16 columns.

    That is two fragments of 8 columns.
    """
    PITCH, WIDTH = tile.pitch, VECTOR_BYTES // itemsize
    K_STEP, PAIR_N = STEP_BYTES // itemsize, 2 * FRAGMENT_N

    @cuda.jit(device=True)
    def load_by_k(words, at, cache, base, j, step, lane):
        place = base + (j * PAIR_N + lane % 8 + lane // 16 * 8) * PITCH
        load_matrices(words, at, cache, place + lane // 8 % 2 * WIDTH + step * K_STEP)

    @cuda.jit(device=True)
    def load_by_row(words, at, cache, base, j, step, lane):
        k = step * K_STEP + lane % 16
        place = base + k * PITCH + lane // 16 * 8 + j * PAIR_N
        load_matrices_transposed(words, at, cache, place)

    @cuda.jit(device=True)
    def load_words_by_row(words, at, cache, base, j, step, lane):
        place = base + (step * K_STEP + lane % 4) * PITCH + lane // 4 + j * PAIR_N
        for r in range(4):
            words[at + r] = load_word(cache, place + r // 2 * 8 + r % 2 * 4 * PITCH)

    return _chosen(source, itemsize, load_by_k, load_by_row, load_words_by_row)


def _chosen(source, itemsize, by_k, by_row, words_by_row):
    if source != "by_row":
        return by_k
    return by_row if itemsize == 2 else words_by_row


def multiply(rows, cols, loads, n_steps, mode):
    """multiply(acc, cache, a_base, b_base, lane): acc += the product of two tiles' parts.

    rows, cols      of the warp
    loads           for either tile, what `load_a` and `load_b` return or does as that says
    n_steps         along k, even
    a_base, b_base  where the warp's part of either tile begins in `cache`, as the loads take it
    """
    counts = rows // FRAGMENT_M, cols // FRAGMENT_N
    if mode == "split":
        # Sums of two steps take as many registers as the warp has to spare.
        return _multiply_split(*loads, *counts, n_steps, 2 if cols <= 32 else 1)
    return _multiply_plain(*loads, *counts, n_steps, mode == "tf32")


def _multiply_plain(load_a, load_b, N_A, N_B, N_STEPS, rounds):
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
            load_a(a, 4 * i, cache, a_base, i, step, lane)
        for j in range(N_B // 2):
            load_b(b, 4 * j, cache, b_base, j, step, lane)

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
        load_step(next_a, next_b, cache, a_base, b_base, 1, lane)
        multiply_step(acc, a, b, cache)
        if N_STEPS == 4:  # written out, because a compiler leaves the loop a loop
            load_step(a, b, cache, a_base, b_base, 2, lane)
            multiply_step(acc, next_a, next_b, cache)
            load_step(next_a, next_b, cache, a_base, b_base, 3, lane)
            multiply_step(acc, a, b, cache)
        multiply_step(acc, next_a, next_b, cache)

    return multiply_tiles


def _multiply_split(load_a, load_b, N_A, N_B, N_STEPS, TOGETHER):
    B_WORDS, PARTS = 2 * N_B, 4 * N_B
    A_ALL, B_ALL = TOGETHER * 4, TOGETHER * B_WORDS

    @cuda.jit(device=True)
    def split(words, small, n):
        for r in range(n):
            big = round_tf32(words[r])
            small[r] = subtract_words(words[r], big)
            words[r] = big

    @cuda.jit(device=True)
    def multiply_steps(acc, first, a, a_small, b, b_small, like):
        part = cuda.local.array(PARTS, np.float32)
        for r in range(PARTS):
            part[r] = ZERO
        for step in range(TOGETHER):
            for j in range(N_B):
                multiply_add(part, 4 * j, a_small, 4 * step, b, step * B_WORDS + 2 * j, like)
            for j in range(N_B):
                multiply_add(part, 4 * j, a, 4 * step, b_small, step * B_WORDS + 2 * j, like)
        for step in range(TOGETHER):
            for j in range(N_B):
                multiply_add(part, 4 * j, a, 4 * step, b, step * B_WORDS + 2 * j, like)
        for r in range(PARTS):
            acc[first + r] += part[r]

    @cuda.jit(device=True)
    def multiply_tiles(acc, cache, a_base, b_base, lane):
        a, a_small = cuda.local.array(A_ALL, np.uint32), cuda.local.array(A_ALL, np.uint32)
        b, b_small = cuda.local.array(B_ALL, np.uint32), cuda.local.array(B_ALL, np.uint32)
        for first in range(0, N_STEPS, TOGETHER):
            for step in range(TOGETHER):
                for j in range(N_B // 2):
                    load_b(b, step * B_WORDS + 4 * j, cache, b_base, j, first + step, lane)
            split(b, b_small, B_ALL)
            for i in range(N_A):
                for step in range(TOGETHER):
                    load_a(a, 4 * step, cache, a_base, i, first + step, lane)
                split(a, a_small, A_ALL)
                multiply_steps(acc, i * PARTS, a, a_small, b, b_small, cache)

    return multiply_tiles
