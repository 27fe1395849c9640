"""The rung `tensor_core`: FlashAttention-2 on tensor cores.

A block has a tile of queries, of which each warp has its own, and walks over tiles of keys and
values, which come to shared memory while the tile before is worked on. Scores and sums stay in
registers; `multiplying` tells which lane has which, and how they are multiplied.

Scores are compared, and weighed as 2^(factor·score − factor·maximum), with one multiplication and
addition each: `factor` is scale·log₂ e, or log₂ e where scores are more than scaled products. A
key that a query may not look at, in a tile with others, is multiplied by a weight of 0.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.multiplying import FRAGMENT, row_writer
from course_lib.kernels.attention.scores import (
    capped,
    end_of_keys,
    first_key,
    kept,
    masked,
    place_of_block,
    sequence,
)
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.softmax_formulas import LOG2_E
from course_lib.runtime.intrinsics import FULL_MASK, LOWEST
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.special import fast_exp2


@cuda.jit(device=True)
def quad_max(value):
    """The largest of the four lanes that share a row."""
    value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, 1))
    return max(value, cuda.shfl_xor_sync(FULL_MASK, value, 2))


@cuda.jit(device=True)
def quad_sum(value):
    value += cuda.shfl_xor_sync(FULL_MASK, value, 1)
    return value + cuda.shfl_xor_sync(FULL_MASK, value, 2)


@functools.cache
def kernel_for(make, cols, depth, by_element, *how):
    """(kernel, its `Unit`, bytes of shared memory) for `cols` keys a tile, D and E up to `depth`.

    make, how   of `multiplying` or `splitting`, such as `by_warps`, and what it takes besides
    by_element  whether there is more than a positive scale and a window (`options.Problem`)
    """
    unit = make(cols, depth, *how)
    ROWS, N_THREADS, WARP_ROWS = unit.rows, unit.n_threads, FRAGMENT * unit.fragments
    TOGETHER = unit.together
    N_SCORES, N_SUMS, N_ROWS = cols // 2, depth // 2, 2 * unit.fragments
    ALL_SCORES, ALL_SUMS = N_SCORES * unit.fragments, N_SUMS * unit.fragments
    KEYS, VALUES = unit.held_size, unit.held_size + unit.passing_size
    STAGE, FRAGMENTS = 2 * unit.passing_size, unit.fragments
    shared, fetch_queries, fetch, show = unit.shared, unit.hold, unit.fetch, unit.show
    multiply, pack, accumulate = unit.multiply, unit.pack, unit.accumulate
    finish_scores, finish_sums = unit.finish_scores, unit.finish_sums
    finish_before_sums, N_WORDS = unit.finish_before_sums, unit.n_words
    write_row = row_writer(depth, unit.in_pairs)

    @cuda.jit(device=True)
    def hide(scores, look, i, j, beside, n_queries, n_keys):
        """Scores that are not there, or that a window hides, become −inf.

        Of the queries i, i + 8 …, and pairs of keys from j on.
        """
        for half in range(N_ROWS):
            first, end = 0, 0
            if i + half * 8 < n_queries:
                first = first_key(i + half * 8, beside, look) - j
                end = end_of_keys(i + half * 8, beside, n_keys, look) - j
            first, end = np.int32(min(max(first, -1), cols)), np.int32(min(max(end, 0), cols))
            for f in range(cols // 8):
                for r in range(2):
                    key = 8 * f + r
                    if key < first or key >= end:
                        scores[N_SCORES * (half // 2) + 4 * f + half % 2 * 2 + r] = LOWEST

    @cuda.jit(device=True)
    def score_each(scores, look, bias, allowed, slopes, b, h, i, j, beside):
        """All that may be done to a score by itself.

        Four scores at a time, and then those behind them move up: registers have no index that
        a loop could count, and this much would not be written out for all of them.
        """
        four = cuda.local.array(4, np.float32)
        for n in range(ALL_SCORES // 4):
            query, key = i + n // (cols // 8) * 16, j + n % (cols // 8) * 8
            for r in range(4):
                four[r] = scores[r]
                if four[r] != LOWEST:
                    score, _ = capped(four[r], look)
                    four[r] = masked(
                        score, look, bias, allowed, slopes, b, h, query + r // 2 * 8, key + r % 2,
                        beside,
                    )  # fmt: skip
            move_up(scores, four)

    @cuda.jit(device=True)
    def drop_each(weights, shape, look, drop, b, h, i, j):
        """Dropout of the weights, as `score_each`."""
        four = cuda.local.array(4, np.float32)
        for n in range(ALL_SCORES // 4):
            query, key = i + n // (cols // 8) * 16, j + n % (cols // 8) * 8
            for r in range(4):
                times = kept(look, drop, shape, b, h, query + r // 2 * 8, key + r % 2)
                four[r] = weights[r] * times
            move_up(weights, four)

    @cuda.jit(device=True)
    def move_up(x, four):
        for r in range(ALL_SCORES - 4):
            x[r] = x[r + 4]
        for r in range(4):
            x[ALL_SCORES - 4 + r] = four[r]

    @cuda.jit(device=True)
    def weigh(scores, m, total, corrections, factor):
        """Turn scores into weights; corrections[half] is what scales sums to the new maximum."""
        for half in range(N_ROWS):
            first, largest = N_SCORES * (half // 2), m[half]
            for f in range(cols // 8):
                for r in range(2):
                    largest = max(largest, scores[first + 4 * f + half % 2 * 2 + r])
            largest = quad_max(largest)
            shift = largest * factor if largest != LOWEST else ZERO
            correction = fast_exp2(m[half] * factor - shift)
            m[half] = largest
            part = ZERO
            for f in range(cols // 8):
                for r in range(2):
                    place = first + 4 * f + half % 2 * 2 + r
                    scores[place] = fast_exp2(scores[place] * factor - shift)
                    part += scores[place]
            total[half] = total[half] * correction + part
            corrections[half] = correction

    @cuda.jit(device=True)
    def is_larger(corrections):
        """Whether a maximum has grown."""
        found = False
        for half in range(N_ROWS):
            found = found or corrections[half] != ONE
        return found

    @cuda.jit(device=True)
    def rescale(sums, corrections):
        for f in range(FRAGMENTS):
            upper, lower = corrections[2 * f], corrections[2 * f + 1]
            for e in range(depth // 8):
                sums[N_SUMS * f + 4 * e] *= upper
                sums[N_SUMS * f + 4 * e + 1] *= upper
                sums[N_SUMS * f + 4 * e + 2] *= lower
                sums[N_SUMS * f + 4 * e + 3] *= lower

    @cuda.jit(device=True)
    def scores_to_weights(
        scores, m, total, corrections, factor, shape, look, drop, bias, allowed, slopes, b, h, mine,
        j, beside, n_queries, n_keys,
    ):  # fmt: skip
        """Of the warp's queries from `mine` on, and the tile of keys from j on."""
        lane = cuda.threadIdx.x % 32
        query, key = mine + lane // 4, j + lane % 4 * 2
        inside = mine + WARP_ROWS <= n_queries
        inside = inside and j >= first_key(mine + WARP_ROWS - 1, beside, look)
        inside = inside and j + cols <= end_of_keys(mine, beside, n_keys, look)
        if not inside:
            hide(scores, look, query, key, beside, n_queries, n_keys)
        if by_element:
            score_each(scores, look, bias, allowed, slopes, b, h, query, key, beside)
        weigh(scores, m, total, corrections, factor)
        if by_element:
            drop_each(scores, shape, look, drop, b, h, query, key)

    @cuda.jit(device=True)
    def write(o, lse, at, step, place, m, total, sums, look, i, n_queries, n):
        for half in range(N_ROWS):
            whole, row = quad_sum(total[half]), i + half * 8
            inverse = ONE / whole if whole != ZERO else ZERO
            if row < n_queries:
                first = N_SUMS * (half // 2) + half % 2 * 2
                write_row(o, at + row * step, sums, first, inverse, n)
                if cuda.threadIdx.x % 4 == 0:
                    natural = m[half] * (ONE if by_element else look.scale)
                    lse[place + row] = natural + math.log(whole) if whole != ZERO else LOWEST

    @cuda.jit(launch_bounds=(N_THREADS, TOGETHER))
    def tensor_core_kernel(
        q, k, v, bias, allowed, slopes, q_starts, k_starts, o, lse, shape, q_at, k_at, v_at, o_at,
        look, drop,
    ):  # fmt: skip
        """A tile of queries a block: o and lse of q, k and v.

        Parameters as of `streaming.streaming_kernel`: bias, allowed, slopes, q_starts, k_starts;
        shape, q_at, k_at, v_at, o_at, look, drop.
        """
        cache = shared(q)
        scores = cuda.local.array(ALL_SCORES, np.float32)
        sums = cuda.local.array(ALL_SUMS, np.float32)
        m, total = cuda.local.array(N_ROWS, np.float32), cuda.local.array(N_ROWS, np.float32)
        corrections = cuda.local.array(N_ROWS, np.float32)
        words = cuda.local.array(N_WORDS, np.uint32)
        tile, h, b = place_of_block((shape.T + ROWS - 1) // ROWS, shape)
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        # From the heaviest tile of a causal sequence on: who has most to do begins first.
        start = ((shape.T + ROWS - 1) // ROWS - 1 - tile) * ROWS
        mine = start + warp * WARP_ROWS
        q_base = batch * q_at.batch + h * q_at.head + q_first * q_at.row
        k_base = batch * k_at.batch + h // shape.share * k_at.head + k_first * k_at.row
        v_base = batch * v_at.batch + h // shape.share * v_at.head + k_first * v_at.row
        factor = LOG2_E if by_element else look.scale * LOG2_E
        for half in range(N_ROWS):
            m[half], total[half] = LOWEST, ZERO
        for r in range(ALL_SUMS):
            sums[r] = ZERO
        j = first_key(start, beside, look) // cols * cols
        end = end_of_keys(min(start + ROWS, n_queries) - 1, beside, n_keys, look)
        if j < end:
            fetch_queries(cache, 0, q, start, n_queries, q_at.row, q_base, q_base + shape.D, 1)
            fetch(cache, KEYS, k, j, n_keys, k_at.row, k_base, k_base + shape.D, 1)
            end_group()
            fetch(cache, VALUES, v, j, n_keys, v_at.row, v_base, v_base + shape.E, 1)
            if j + cols < end:
                fetch(
                    cache, KEYS + STAGE, k, j + cols, n_keys, k_at.row, k_base, k_base + shape.D, 1
                )
            end_group()
            wait_for_groups_but(1)
            show()
            cuda.syncthreads()
            multiply(scores, cache, 0, KEYS, q)
            finish_scores(scores)
            scores_to_weights(
                scores, m, total, corrections, factor, shape, look, drop, bias, allowed, slopes,
                b, h, mine, j, beside, n_queries, n_keys,
            )  # fmt: skip
            pack(words, scores, q)
            this, other = 0, STAGE
            while j + cols < end:
                wait_for_groups_but(0)
                show()
                # Values of this tile and keys of the next are there. Nobody reads these keys, or
                # the values of the tile before.
                cuda.syncthreads()
                multiply(scores, cache, 0, KEYS + other, q)
                accumulate(sums, words, cache, VALUES + this, q)
                j += cols
                fetch(cache, VALUES + other, v, j, n_keys, v_at.row, v_base, v_base + shape.E, 1)
                if j + cols < end:
                    fetch(
                        cache, KEYS + this, k, j + cols, n_keys, k_at.row, k_base,
                        k_base + shape.D, 1,
                    )  # fmt: skip
                end_group()
                finish_before_sums(scores)
                scores_to_weights(
                    scores, m, total, corrections, factor, shape, look, drop, bias, allowed,
                    slopes, b, h, mine, j, beside, n_queries, n_keys,
                )  # fmt: skip
                if cuda.any_sync(FULL_MASK, is_larger(corrections)):
                    finish_sums(sums)
                    rescale(sums, corrections)
                finish_sums(sums)
                pack(words, scores, q)
                this, other = other, this
            wait_for_groups_but(0)
            show()
            cuda.syncthreads()
            accumulate(sums, words, cache, VALUES + this, q)
            finish_sums(sums)
        place = (batch * shape.n_heads + h) * shape.rows + q_first
        at = batch * o_at.batch + h * o_at.head + q_first * o_at.row
        write(
            o, lse, at, o_at.row, place, m, total, sums, look, mine + lane // 4, n_queries, shape.E
        )

    return tensor_core_kernel, unit, unit.itemsize * (unit.held_size + 4 * unit.passing_size)
