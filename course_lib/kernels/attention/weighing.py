"""Weights and their gradients backwards, of the scores that a warp has in registers.

Scores lie as `multiplying` says, `cols` of a row; rows are keys or queries.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.problem import DSCORES
from course_lib.kernels.attention.scores import capped, is_seen, kept, masked
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.softmax_formulas import LOG2_E
from course_lib.runtime.intrinsics import LOWEST
from course_lib.runtime.intrinsics.special import fast_exp2


class Weighing(NamedTuple):
    """Device functions; queries and keys are counted from the first of their sequence.

    weigh_each      (scores, g, by_query, lse, delta, row, shape, look, drop, bias, allowed, slopes,
                    dscores, b, h, i, j, beside, n_queries, n_keys): products of q and k become
                    weights, and those of do and v gradients of scores, with all options. Queries
                    are the rows where `by_query`: these are i, i + 8, and pairs of keys from j on
    hide            (x, half, first, end): of a row, all columns but those from `first` to `end`
                    become 0, whatever they were
    hide_from_keys  (x, key, query, beside, n_queries, n_keys, look): as `hide`, of the keys `key`,
                    `key` + 8: queries from `query` on that do not look
    """

    weigh_each: object
    hide: object
    hide_from_keys: object


@cuda.jit(device=True)
def finite(value):
    return value if value != LOWEST else ZERO


@cuda.jit(device=True)
def of_row(x, at, there):
    """x[at], or 0 where it is not there, or where a query sees nothing."""
    return finite(x[at]) if there else ZERO


@functools.cache
def weighing(cols):
    """The `Weighing` of 16 rows of a warp."""
    ALL_SCORES = cols // 2

    @cuda.jit(device=True)
    def weigh_each(
        scores, g, by_query, lse, delta, row, shape, look, drop, bias, allowed, slopes, dscores, b,
        h, i, j, beside, n_queries, n_keys,
    ):  # fmt: skip
        four, gradients = cuda.local.array(4, np.float32), cuda.local.array(4, np.float32)
        for n in range(ALL_SCORES // 4):
            for r in range(4):
                a, c = r // 2 * 8, n * 8 + r % 2
                query, key = (i + a, j + c) if by_query else (i + c, j + a)
                weight, gradient = ZERO, ZERO
                if is_seen(query, key, beside, n_queries, n_keys, look):
                    score, slope = capped(scores[r], look)
                    score = masked(score, look, bias, allowed, slopes, b, h, query, key, beside)
                    times = kept(look, drop, shape, b, h, query, key)
                    if score != LOWEST:
                        weight = fast_exp2((score - lse[row + query]) * LOG2_E)
                        gradient = weight * (g[r] * times - delta[row + query])
                        if look.bits & DSCORES:
                            element = ((b * shape.n_heads + h) * shape.T + query) * shape.S + key
                            dscores[element] = gradient
                        weight, gradient = weight * times, gradient * slope
                four[r], gradients[r] = weight, gradient
            for r in range(ALL_SCORES - 4):
                scores[r], g[r] = scores[r + 4], g[r + 4]
            for r in range(4):
                scores[ALL_SCORES - 4 + r], g[ALL_SCORES - 4 + r] = four[r], gradients[r]

    @cuda.jit(device=True)
    def hide(x, half, first, end):
        first, end = np.int32(min(max(first, -1), cols)), np.int32(min(max(end, 0), cols))
        for f in range(cols // 8):
            for r in range(2):
                if 8 * f + r < first or 8 * f + r >= end:
                    x[4 * f + half * 2 + r] = ZERO

    @cuda.jit(device=True)
    def hide_from_keys(x, key, query, beside, n_queries, n_keys, look):
        for half in range(2):
            low = key + half * 8 - beside - query - look.high
            high = min(n_queries - query, low + look.high - look.low + 1)
            hide(x, half, low, high if key + half * 8 < n_keys else 0)

    return Weighing(weigh_each, hide, hide_from_keys)
