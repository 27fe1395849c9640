"""How tensor cores multiply tiles of float32: in parts, three products of TF32.

As `blocks.mma.mainloop` has it in its mode `split`, with the same fragments as `multiplying`. A
fragment of a product is the left side of the next one with its columns in another order, in which
that one takes the rows of its right side.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.multiplying import (
    FRAGMENT,
    N_WARPS,
    WIDEST,
    Unit,
    no_wait,
    nothing,
)
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.fragments import load_a, load_b
from course_lib.kernels.blocks.mma.tiles import tile
from course_lib.runtime.intrinsics.bits import as_word
from course_lib.runtime.intrinsics.matrix import (
    load_word,
    multiply_add,
    round_tf32,
    subtract_words,
)
from course_lib.runtime.intrinsics.shared import dynamic_shared

FLOATS = 4  # bytes of a number


@cuda.jit(device=True)
def split(words, at, big, small, n):
    """big[at : at+n], rounded to TF32, and small[at : at+n], the rest, of words[0 : n]."""
    for r in range(n):
        big[at + r] = round_tf32(words[r])
        small[at + r] = subtract_words(words[r], big[at + r])


@cuda.jit(device=True)
def add_products(sums, place, left, small_left, at, right, small_right, like):
    """sums[place : place+8] += the products of one left side and two right ones, each split."""
    part = cuda.local.array(8, np.float32)
    for r in range(8):
        part[r] = ZERO
    for r in range(2):
        multiply_add(part, 4 * r, small_left, at, right, 2 * r, like)
        multiply_add(part, 4 * r, left, at, small_right, 2 * r, like)
        multiply_add(part, 4 * r, left, at, right, 2 * r, like)
    for r in range(8):
        sums[place + r] += part[r]


def by_split_warps(cols, depth, source, fragments):
    """The `Unit` of `mma.sync` for float32; parameters as of `by_warps`."""
    STEPS, N_SCORES, N_LEFT = depth // 8, cols // 2, 4 * fragments
    ALL_SCORES = N_SCORES * fragments
    rows, n_threads = N_WARPS * FRAGMENT * fragments, 32 * N_WARPS
    held, passing = (tile(n, depth * FLOATS, FLOATS, n_threads, source) for n in (rows, cols))
    load_held, load_passing = load_a(held, source, FLOATS), load_b(passing, source, FLOATS)
    PITCH = passing.pitch

    @cuda.jit(device=True)
    def multiply(scores, cache, mine, others, like):
        left, small_left = cuda.local.array(N_LEFT, np.uint32), cuda.local.array(N_LEFT, np.uint32)
        right, small_right = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        words = cuda.local.array(4, np.uint32)
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        for r in range(ALL_SCORES):
            scores[r] = ZERO
        for step in range(STEPS):
            for f in range(fragments):
                load_held(words, 0, cache, mine, warp * fragments + f, step, lane)
                split(words, 4 * f, left, small_left, 4)
            for j in range(cols // 16):
                load_passing(words, 0, cache, others, j, step, lane)
                split(words, 0, right, small_right, 4)
                for f in range(fragments):
                    place = N_SCORES * f + 8 * j
                    add_products(
                        scores, place, left, small_left, 4 * f, right, small_right, like
                    )

    @cuda.jit(device=True)
    def pack(words, scores, like):
        # A left side wants columns t and t + 4 of its 8, where a lane has 2·t and 2·t + 1: those
        # are what it gets. `accumulate` takes the rows of the right side in the same order.
        for r in range(ALL_SCORES // 4):
            words[4 * r] = as_word(scores[4 * r])
            words[4 * r + 1] = as_word(scores[4 * r + 2])
            words[4 * r + 2] = as_word(scores[4 * r + 1])
            words[4 * r + 3] = as_word(scores[4 * r + 3])

    def accumulating(width):
        STEPS, N_SUMS = width // 16, width // 2

        @cuda.jit(device=True)
        def accumulate(sums, words, cache, others, like):
            left, small = cuda.local.array(N_LEFT, np.uint32), cuda.local.array(N_LEFT, np.uint32)
            right, small_right = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
            four = cuda.local.array(4, np.uint32)
            lane = cuda.threadIdx.x % 32
            for j in range(cols // 8):
                for f in range(fragments):
                    for r in range(4):
                        four[r] = words[N_SCORES * f + 4 * j + r]
                    split(four, 4 * f, left, small, 4)
                place = others + (8 * j + lane % 4 * 2) * PITCH + lane // 4
                for e in range(STEPS):
                    for r in range(4):
                        four[r] = load_word(cache, place + r % 2 * PITCH + r // 2 * 8 + 16 * e)
                    split(four, 0, right, small_right, 4)
                    for f in range(fragments):
                        add_products(
                            sums, N_SUMS * f + 8 * e, left, small, 4 * f, right, small_right, like
                        )

        return accumulate

    parts = -(-depth // WIDEST)
    return Unit(
        FLOATS, rows, n_threads, 1, 2, False, fragments, parts, held.size, passing.size,
        dynamic_shared, held.fetch, passing.fetch, nothing, ALL_SCORES, multiply, pack,
        accumulating(depth), accumulating(depth // parts), *[no_wait] * 4,
    )  # fmt: skip
