"""The rung `separate`: scores, weights and their product with the values, one kernel after another.

What attention is, written down: the scores go to memory, T × S of them for each head, float32. The
kernel between the products does all that happens to a score, in one pass over its row of them.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.problem import DSCORES
from course_lib.kernels.attention.scores import (
    capped,
    end_of_keys,
    first_key,
    is_seen,
    kept,
    masked,
    sequence,
    weight,
)
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.runtime.intrinsics import LOWEST, block_online, online_add

BLOCK_SIZE = 128  # threads that share a row of scores, at most


@cuda.jit(device=True)
def place_of_row(shape):
    """(query, head, batch) of the block's row of scores."""
    rest = cuda.blockIdx.x // shape.T
    return cuda.blockIdx.x % shape.T, rest % shape.n_heads, rest // shape.n_heads


@cuda.jit(device=True)
def row_of(scores):
    """Where the block's row begins: rows may be longer than there are keys."""
    return cuda.blockIdx.x * np.int64(scores.shape[0] // cuda.gridDim.x)


@cuda.jit(device=True)
def columns(i, beside, n_keys, shape, look, around):
    """(first, one past the last) of the row of query i: what it looks at, and so many around."""
    first = max(0, first_key(i, beside, look) - around) // 32 * 32
    return first, min(shape.S, max(0, end_of_keys(i, beside, n_keys, look)) + around)


@cuda.jit
def weights_kernel(scores, bias, allowed, slopes, starts, lse, shape, look, drop, around):
    """A row of scores a block: q·k becomes its weight, in place.

    scores         float32 (batches, heads, T, S or more), flat
    bias, allowed, slopes, starts, lse, shape, look, drop  as of `streaming.streaming_kernel`
    around         weights of so many keys before and behind those in sight are made 0
    """
    scratch_m, scratch_s = cuda.shared.array(32, np.float32), cuda.shared.array(32, np.float32)
    i, h, b = place_of_row(shape)
    _, _, n_queries, _, n_keys, beside = sequence(b, shape, look, starts, starts)
    at, m, total = row_of(scores), LOWEST, ZERO
    first, end = columns(i, beside, n_keys, shape, look, around)
    for j in range(first + cuda.threadIdx.x, end, cuda.blockDim.x):
        score = LOWEST
        if is_seen(i, j, beside, n_queries, n_keys, look):
            score, _ = capped(scores[at + j], look)
            score = masked(score, look, bias, allowed, slopes, b, h, i, j, beside)
        scores[at + j] = score
        m, total = online_add(m, total, score)
    m, total = block_online(m, total, scratch_m, scratch_s)
    factor = ONE / total if m != LOWEST else ZERO
    for j in range(first + cuda.threadIdx.x, end, cuda.blockDim.x):
        p = ZERO
        if scores[at + j] != LOWEST:
            p = math.exp(scores[at + j] - m) * factor * kept(look, drop, shape, b, h, i, j)
        scores[at + j] = p
    if cuda.threadIdx.x == 0:
        lse[cuda.blockIdx.x] = m + math.log(total) if m != LOWEST else LOWEST


@cuda.jit
def gradients_kernel(
    scores, dweights, bias, allowed, slopes, starts, lse, delta, dscores, shape, look, drop,
    around,
):  # fmt: skip
    """A row of scores a block: q·k becomes its weight, do·v the gradient of q·k, in place.

    scores, dweights  float32 (batches, heads, T, S or more), flat
    dscores           float32 (batches, heads, T, S), flat, with the bit DSCORES
    delta             of `tiled_backward.delta_kernel`
    bias, allowed, slopes, starts, lse, shape, look, drop, around  as of `weights_kernel`
    """
    i, h, b = place_of_row(shape)
    _, _, n_queries, _, n_keys, beside = sequence(b, shape, look, starts, starts)
    at, row = row_of(scores), np.int64(cuda.blockIdx.x)
    first, end = columns(i, beside, n_keys, shape, look, around)
    for j in range(first + cuda.threadIdx.x, end, cuda.blockDim.x):
        p, gradient, factor, slope = ZERO, ZERO, ONE, ONE
        if is_seen(i, j, beside, n_queries, n_keys, look):
            score, slope = capped(scores[at + j], look)
            score = masked(score, look, bias, allowed, slopes, b, h, i, j, beside)
            p, factor = weight(score, lse[row]), kept(look, drop, shape, b, h, i, j)
            if score != LOWEST:
                gradient = p * (dweights[at + j] * factor - delta[row])
        if look.bits & DSCORES:
            dscores[row * shape.S + j] = gradient
        scores[at + j] = p * factor
        dweights[at + j] = gradient * slope * look.scale


@cuda.jit
def mask_gradient_kernel(dscores, dmask, shape, B, H, T, S, n_elements):
    """An element of the mask a thread: the sum of all scores that it was added to.

    dscores     float32 (batches, heads, T, S), flat
    dmask       float32 (B, H, T, S), flat: extents of 1 where the mask was broadcast
    shape       `problem.Shape`; n_elements  of dmask
    """
    element = cuda.grid(1)
    if element < n_elements:
        j, rest = element % S, element // S
        i, rest = rest % T, rest // T
        h, b = rest % H, rest // H
        n_batches = dscores.shape[0] // (shape.n_heads * shape.T * shape.S)
        total = ZERO
        for bb in range(b, n_batches if B == 1 else b + 1):
            for hh in range(h, shape.n_heads if H == 1 else h + 1):
                for ii in range(i, shape.T if T == 1 else i + 1):
                    at = ((bb * shape.n_heads + hh) * shape.T + ii) * shape.S
                    for jj in range(j, shape.S if S == 1 else j + 1):
                        total += dscores[at + jj]
        dmask[element] = total
