"""How warps multiply the tiles of a ring of buffers, one after another: a loop for each mode.

How float32 numbers are multiplied is a matter of `mode`:

========= ==========================================================================================
`narrow`  16-bit inputs, as they are
`tf32`    each number rounded to TF32: 10 bits of mantissa
`split`   each number the sum of two, its rounding to TF32 and the rest: x·w is big·big + big·small
          + small·big, and small·small is below float32's own rounding. Three products, the small
          ones first. A tensor core cuts sums off where float32 rounds, and in a long sum that adds
          up; so each step is summed from 0, and then added as float32
`mixed`   the same, with the two small products in bfloat16, of which one instruction takes twice
          as many: four products for two steps instead of six. A number keeps 19 to 20 digits, and
          a product is off by 2⁻¹⁹ at most, by 2⁻²² as a rule: of a sum of hundreds, which float32
          rounds as often, not more than that. For long sums only
========= ==========================================================================================

Splitting: NVIDIA's CUTLASS example 27 (3xTF32); the sums: Ootomo and Yokota, "Recovering single
precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022).
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.fragments import FRAGMENT_M, FRAGMENT_N
from course_lib.runtime.intrinsics.halves import multiply_add_halves, pack_halves
from course_lib.runtime.intrinsics.matrix import multiply_add, round_tf32, subtract_words
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but

MODES = ("narrow", "tf32", "split", "mixed")
MOST_TOGETHER = 4  # fragments whose products are summed from 0 at a time: registers are few


def multiply(rows, cols, loads, mode, n_stages, fetch):
    """What multiplies the tiles of a ring of buffers, one after another, as a `Pipeline`.

    rows, cols  of the warp
    loads       for either tile, what `load_a` and `load_b` return or does as that says
    n_stages    buffers of the ring
    fetch       fetch(part, cache, work): begins to copy a part of a tile to come; the parts are 0
                to `tiles.PARTS` − 1
    """
    counts = rows // FRAGMENT_M, cols // FRAGMENT_N
    if mode == "split":
        return _multiply_split(*loads, *counts, n_stages, fetch)
    if mode == "mixed":
        return _multiply_mixed(*loads, *counts, n_stages, fetch)
    return _multiply_plain(*loads, *counts, n_stages, fetch, mode == "tf32")


def timing(mode, n_stages):
    """(ahead, lags) of a `Pipeline`."""
    return (n_stages - 2, True) if mode in ("split", "mixed") else (n_stages - 1, False)


class Pipeline(NamedTuple):
    """Loops through tiles: `begin` before the first one, `advance` for each.

    begin(words, cache, a_base, b_base, lane): the first tile has arrived; brings its first words
    advance(acc, words, cache, a_base, b_base, a_next, b_next, lane, work): acc += the product of
    two tiles' parts, whose first words are there; calls fetch(part, cache, work) with every part,
    and ends with the first words of the next tile

    `words` are local arrays of uint32 of the sizes N_WORDS; a_base, b_base are where the warp's
    part of either tile begins in `cache`, as the loads take it, and a_next, b_next of the next.
    While one step is multiplied, the words of the next one are on their way, and copies are begun
    in between: the tensor cores never wait for a whole tile.

    Of `timing`, `ahead` says how many tiles ahead of the one that is multiplied copies are begun,
    and how many have been before `begin`, each a group of its own. Where it `lags`, a warp may
    still read a tile when others have gone on to the next one.
    """

    begin: object
    advance: object
    n_words: tuple


def _multiply_plain(load_a, load_b, N_A, N_B, N_STAGES, fetch, rounds):
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
    def begin(words, cache, a_base, b_base, lane):
        load_step(words[0], words[1], cache, a_base, b_base, 0, lane)

    @cuda.jit(device=True)
    def advance(acc, words, cache, a_base, b_base, a_next, b_next, lane, work):
        a, b, other_a, other_b = words
        load_step(other_a, other_b, cache, a_base, b_base, 1, lane)
        fetch(0, cache, work)
        multiply_step(acc, a, b, cache)
        load_step(a, b, cache, a_base, b_base, 2, lane)
        fetch(1, cache, work)
        multiply_step(acc, other_a, other_b, cache)
        load_step(other_a, other_b, cache, a_base, b_base, 3, lane)
        fetch(2, cache, work)
        end_group()
        multiply_step(acc, a, b, cache)
        wait_for_groups_but(N_STAGES - 2)
        cuda.syncthreads()  # the next tile has arrived, and nobody reads this one any more
        load_step(a, b, cache, a_next, b_next, 0, lane)
        multiply_step(acc, other_a, other_b, cache)

    n_words = A_WORDS, B_WORDS, A_WORDS, B_WORDS
    return Pipeline(begin, advance, n_words)


def _multiply_split(load_a, load_b, N_A, N_B, N_STAGES, fetch):
    B_WORDS, TOGETHER = 2 * N_B, min(N_B, MOST_TOGETHER)
    PARTIAL = 4 * TOGETHER
    assert N_STAGES > 2

    @cuda.jit(device=True)
    def split(words, big, small, n):
        for r in range(n):
            big[r] = round_tf32(words[r])
            small[r] = subtract_words(words[r], big[r])

    @cuda.jit(device=True)
    def multiply_row(acc, first, a, a_small, b, b_small, like):
        part = cuda.local.array(PARTIAL, np.float32)
        for group in range(N_B // TOGETHER):
            at = 2 * TOGETHER * group
            for r in range(PARTIAL):
                part[r] = ZERO
            for j in range(TOGETHER):
                multiply_add(part, 4 * j, a_small, 0, b, at + 2 * j, like)
            for j in range(TOGETHER):
                multiply_add(part, 4 * j, a, 0, b_small, at + 2 * j, like)
            for j in range(TOGETHER):
                multiply_add(part, 4 * j, a, 0, b, at + 2 * j, like)
            for r in range(PARTIAL):
                acc[first + PARTIAL * group + r] += part[r]

    @cuda.jit(device=True)
    def multiply_step(acc, words, cache, a_base, step, a_next, b_next, next_step, lane):
        """One step, whose first words are there; brings the first words of the next one."""
        a, a_small = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        b, b_small = cuda.local.array(B_WORDS, np.uint32), cuda.local.array(B_WORDS, np.uint32)
        split(words[1], b, b_small, B_WORDS)
        for j in range(N_B // 2):
            load_b(words[1], 4 * j, cache, b_next, j, next_step, lane)
        for i in range(N_A):
            split(words[0], a, a_small, 4)
            if i + 1 < N_A:
                load_a(words[0], 0, cache, a_base, i + 1, step, lane)
            else:
                load_a(words[0], 0, cache, a_next, 0, next_step, lane)
            multiply_row(acc, 4 * i * N_B, a, a_small, b, b_small, cache)

    @cuda.jit(device=True)
    def begin(words, cache, a_base, b_base, lane):
        load_a(words[0], 0, cache, a_base, 0, 0, lane)
        for j in range(N_B // 2):
            load_b(words[1], 4 * j, cache, b_base, j, 0, lane)

    @cuda.jit(device=True)
    def advance(acc, words, cache, a_base, b_base, a_next, b_next, lane, work):
        fetch(0, cache, work)
        multiply_step(acc, words, cache, a_base, 0, a_base, b_base, 1, lane)
        fetch(1, cache, work)
        multiply_step(acc, words, cache, a_base, 1, a_base, b_base, 2, lane)
        fetch(2, cache, work)
        end_group()
        multiply_step(acc, words, cache, a_base, 2, a_base, b_base, 3, lane)
        wait_for_groups_but(N_STAGES - 3)
        cuda.syncthreads()  # the next tile has arrived
        multiply_step(acc, words, cache, a_base, 3, a_next, b_next, 0, lane)

    return Pipeline(begin, advance, (4, B_WORDS, 1, 1))


def _multiply_mixed(load_a, load_b, N_A, N_B, N_STAGES, fetch):
    B_STEP, TOGETHER = 2 * N_B, min(N_B, MOST_TOGETHER)
    B_WORDS, PARTIAL = 2 * B_STEP, 4 * TOGETHER
    assert N_STAGES > 2

    @cuda.jit(device=True)
    def split(words, at, apart, big, halves, rests, to):
        """Words `at` and at + apart: their big parts, and what is left, as halves of a word."""
        first, second = words[at], words[at + apart]
        big[at], big[at + apart] = round_tf32(first), round_tf32(second)
        halves[to] = pack_halves(first, second)
        rest = subtract_words(first, big[at])
        rests[to] = pack_halves(rest, subtract_words(second, big[at + apart]))

    @cuda.jit(device=True)
    def multiply_row(acc, first, a, a_half, a_rest, b, b_half, b_rest, like):
        part = cuda.local.array(PARTIAL, np.float32)
        for group in range(N_B // TOGETHER):
            at = 2 * TOGETHER * group
            for r in range(PARTIAL):
                part[r] = ZERO
            for j in range(TOGETHER):
                multiply_add_halves(part, 4 * j, a_rest, 0, b_half, at + 2 * j)
            for j in range(TOGETHER):
                multiply_add_halves(part, 4 * j, a_half, 0, b_rest, at + 2 * j)
            for step in range(2):
                for j in range(TOGETHER):
                    multiply_add(part, 4 * j, a, 4 * step, b, B_STEP * step + at + 2 * j, like)
            for r in range(PARTIAL):
                acc[first + PARTIAL * group + r] += part[r]

    @cuda.jit(device=True)
    def multiply_pair(acc, words, cache, a_base, step, a_next, b_next, next_step, lane):
        """Two steps, whose first words are there; brings the first words of the next two."""
        a, a_half = cuda.local.array(8, np.uint32), cuda.local.array(4, np.uint32)
        a_rest = cuda.local.array(4, np.uint32)
        b, b_half = cuda.local.array(B_WORDS, np.uint32), cuda.local.array(B_STEP, np.uint32)
        b_rest = cuda.local.array(B_STEP, np.uint32)
        for j in range(N_B):
            for half in range(2):  # of the terms of two steps, as bfloat16 has them together
                split(words[1], B_STEP * half + 2 * j, 1, b, b_half, b_rest, 2 * j + half)
        load_columns(words[1], cache, b_next, next_step, lane)
        for i in range(N_A):
            for r in range(4):
                split(words[0], r // 2 * 4 + r % 2, 2, a, a_half, a_rest, r)
            if i + 1 < N_A:
                load_row(words[0], cache, a_base, i + 1, step, lane)
            else:
                load_row(words[0], cache, a_next, 0, next_step, lane)
            multiply_row(acc, 4 * i * N_B, a, a_half, a_rest, b, b_half, b_rest, cache)

    @cuda.jit(device=True)
    def load_row(words, cache, base, i, step, lane):
        for half in range(2):
            load_a(words, 4 * half, cache, base, i, step + half, lane)

    @cuda.jit(device=True)
    def load_columns(words, cache, base, step, lane):
        for half in range(2):
            for j in range(N_B // 2):
                load_b(words, B_STEP * half + 4 * j, cache, base, j, step + half, lane)

    @cuda.jit(device=True)
    def begin(words, cache, a_base, b_base, lane):
        load_row(words[0], cache, a_base, 0, 0, lane)
        load_columns(words[1], cache, b_base, 0, lane)

    @cuda.jit(device=True)
    def advance(acc, words, cache, a_base, b_base, a_next, b_next, lane, work):
        fetch(0, cache, work)
        fetch(1, cache, work)
        fetch(2, cache, work)
        end_group()
        multiply_pair(acc, words, cache, a_base, 0, a_base, b_base, 2, lane)
        wait_for_groups_but(N_STAGES - 3)
        cuda.syncthreads()  # the next tile has arrived
        multiply_pair(acc, words, cache, a_base, 2, a_next, b_next, 0, lane)

    return Pipeline(begin, advance, (8, B_WORDS, 1, 1))
