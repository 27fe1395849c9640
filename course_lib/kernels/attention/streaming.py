"""The rung `streaming`: a warp has one query, and takes keys one by one as they come.

The lanes share the D numbers of a query. Nothing of size T × S is stored: when a larger score
comes, what has been summed up so far is scaled down (`online`).
"""

import math

import numpy as np

from course_lib import cuda
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
from course_lib.runtime.intrinsics import LOWEST, load, store, warp_sum

N_WARPS = 4  # queries of a block
SLOTS = 8  # numbers of a lane, so that D and E are 256 at most


@cuda.jit(device=True)
def load_slots(values, x, at, n, lane):
    """values[u] = x[at + lane + 32·u], and 0 from n on."""
    for u in range(SLOTS):
        place = lane + 32 * u
        values[u] = load(x, at + place) if place < n else ZERO


@cuda.jit(device=True)
def dot(values, x, at, n, lane):
    """Σ of the slots times n elements of x, in every lane."""
    total = ZERO
    for u in range(SLOTS):
        place = lane + 32 * u
        if place < n:
            total += values[u] * load(x, at + place)
    return warp_sum(total)


@cuda.jit(device=True)
def add_value(sums, correction, p, v, at, n, lane):
    """sums = sums·correction + p·v."""
    for u in range(SLOTS):
        place = lane + 32 * u
        if place < n:
            sums[u] = sums[u] * correction + p * load(v, at + place)


@cuda.jit
def streaming_kernel(
    q, k, v, bias, allowed, slopes, q_starts, k_starts, o, lse, shape, q_at, k_at, v_at, o_at, look,
    drop,
):  # fmt: skip
    """One query a warp; a block has N_WARPS of them.

    q, k, v, bias  float32, float16 or bfloat16, flat; `bias` is read where there is an additive
                   mask, `allowed` (uint8) where there is a boolean one
    slopes         float32, of ALiBi
    q_starts, k_starts  int32: where packed sequences begin; or of k_starts the numbers of keys
    o, lse         the results; lse is float32 of (batches, heads, rows)
    shape          `problem.Shape`
    q_at, k_at, v_at, o_at, look, drop  `problem.Place`, `Look`, `Dropping`
    """
    tile, h, b = place_of_block((shape.T + N_WARPS - 1) // N_WARPS, shape)
    lane, i = cuda.threadIdx.x % 32, tile * N_WARPS + cuda.threadIdx.x // 32
    batch, q_first, n_queries, k_first, n_keys, beside = sequence(
        b, shape, look, q_starts, k_starts
    )
    if i < n_queries:
        query, sums = cuda.local.array(SLOTS, np.float32), cuda.local.array(SLOTS, np.float32)
        load_slots(
            query, q, batch * q_at.batch + h * q_at.head + (q_first + i) * q_at.row, shape.D, lane
        )
        for u in range(SLOTS):
            sums[u] = ZERO
        keys = batch * k_at.batch + h // shape.share * k_at.head + k_first * k_at.row
        values = batch * v_at.batch + h // shape.share * v_at.head + k_first * v_at.row
        m, total = LOWEST, ZERO
        for j in range(first_key(i, beside, look), end_of_keys(i, beside, n_keys, look)):
            score, _ = capped(dot(query, k, keys + j * k_at.row, shape.D, lane), look)
            score = masked(score, look, bias, allowed, slopes, b, h, i, j, beside)
            if score != LOWEST:
                largest = max(m, score)
                correction, p = math.exp(m - largest), math.exp(score - largest)
                m, total = largest, total * correction + p
                p *= kept(look, drop, shape, b, h, i, j)
                add_value(sums, correction, p, v, values + j * v_at.row, shape.E, lane)
        factor = ONE / total if total != ZERO else ZERO
        row = batch * o_at.batch + h * o_at.head + (q_first + i) * o_at.row
        for u in range(SLOTS):
            if lane + 32 * u < shape.E:
                store(o, row + lane + 32 * u, sums[u] * factor)
        if lane == 0:
            place = (batch * shape.n_heads + h) * shape.rows + q_first + i
            lse[place] = m + math.log(total) if total != ZERO else LOWEST
