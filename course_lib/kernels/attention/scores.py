"""Device functions of every rung: which keys a query looks at, and what its scores become.

A score passes through, in this order: scale, softcap, ALiBi, an additive mask, a boolean mask. One
that a query may not look at is −inf.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.problem import (
    ALLOWED,
    BIAS,
    DROPOUT,
    LENGTHS,
    LOWER_RIGHT,
    PACKED,
    SLOPES,
    SOFTCAP,
)
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.dropout_mask import is_kept
from course_lib.runtime.intrinsics import LOWEST, load


@cuda.jit(device=True)
def sequence(b, shape, look, q_starts, k_starts):
    """(batch in memory, first query, queries, first key, keys, the key beside query 0) of b."""
    batch, q_first, n_queries, k_first, n_keys = b, 0, shape.T, 0, shape.S
    if look.bits & PACKED:
        batch, q_first, k_first = 0, np.int64(q_starts[b]), np.int64(k_starts[b])
        n_queries, n_keys = q_starts[b + 1] - q_first, k_starts[b + 1] - k_first
    elif look.bits & LENGTHS:
        n_keys = min(n_keys, np.int64(k_starts[b]))
    beside = n_keys - n_queries if look.bits & LOWER_RIGHT else 0
    return batch, q_first, n_queries, k_first, n_keys, beside


@cuda.jit(device=True)
def place_of_block(n_tiles, shape):
    """(tile, head, batch) of this block; blocks of one head are neighbours."""
    rest = cuda.blockIdx.x // n_tiles
    return cuda.blockIdx.x % n_tiles, rest % shape.n_heads, rest // shape.n_heads


@cuda.jit(device=True)
def first_key(i, beside, look):
    """The first key that query i looks at."""
    return max(0, i + beside + look.low)


@cuda.jit(device=True)
def end_of_keys(i, beside, n_keys, look):
    """One past the last key that query i looks at."""
    return min(n_keys, i + beside + look.high + 1)


@cuda.jit(device=True)
def is_seen(i, j, beside, n_queries, n_keys, look):
    """Whether query i and key j are there, and no window parts them."""
    distance = j - i - beside
    return i < n_queries and j < n_keys and look.low <= distance and distance <= look.high


@cuda.jit(device=True)
def capped(raw, look):
    """(raw·scale after the softcap, its derivative by raw·scale)."""
    score = raw * look.scale
    if look.bits & SOFTCAP:
        tanh = math.tanh(score / look.softcap)
        return look.softcap * tanh, ONE - tanh * tanh
    return score, ONE


@cuda.jit(device=True)
def masked(score, look, bias, allowed, slopes, b, h, i, j, beside):
    """The score of query i and key j after ALiBi and the mask."""
    if look.bits & SLOPES:
        slope = slopes[b * look.slopes + h * look.slopes_head]
        score -= slope * np.float32(abs(i + beside - j))
    at = b * look.mask + h * look.mask_head + i * look.mask_row + j * look.mask_col
    if look.bits & BIAS:
        score += load(bias, at)
    if look.bits & ALLOWED and allowed[at] == 0:
        score = LOWEST
    return score


@cuda.jit(device=True)
def kept(look, drop, shape, b, h, i, j):
    """What dropout multiplies the weight of query i and key j by."""
    if look.bits & DROPOUT:
        element = ((b * shape.n_heads + h) * shape.T + i) * shape.S + j
        if is_kept(drop.offset + element, drop.threshold, drop.key0, drop.key1):
            return drop.scale
        return ZERO
    return ONE


@cuda.jit(device=True)
def weight(score, lse):
    """exp(score − lse): the softmax, from what the forward pass has kept."""
    return math.exp(score - lse) if score != LOWEST else ZERO
