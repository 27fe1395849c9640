"""The backward pass of the rung `tiled`: the weights are computed again, from the log-sum-exp.

With p the weights, g = do·vᵀ, and delta = Σ do·o of each query, the gradient of a score is
p·(g − delta). There are three kernels: delta; dk and dv, where a block has a tile of keys and walks
over tiles of queries; dq, where a block has a tile of queries and walks over tiles of keys. The
last two compute the same weights, each for itself. That makes 7 products instead of 5, but every
sum has one owner and one order, so two runs agree bit for bit.

A block holds two tiles, (k, v) or (q, do), and walks over tiles of the other two.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.attention.problem import DSCORES, PACKED
from course_lib.kernels.attention.scores import (
    capped,
    end_of_keys,
    first_key,
    is_seen,
    kept,
    masked,
    place_of_block,
    sequence,
    weight,
)
from course_lib.kernels.attention.tiled import SIDE, UNSEEN, load_tile, products
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics import LOWEST, load, store, warp_sum

N_WARPS = 4  # rows of a block of `delta_kernel`


@cuda.jit
def delta_kernel(do, o, dlse, delta, shape, do_at, o_at, n_rows, with_dlse):
    """delta = Σ do·o − dlse of each row, a warp each; `n_rows` of all batches and heads.

    do, o        float32, float16 or bfloat16, flat; dlse and delta float32 (batches, heads, rows)
    shape, do_at, o_at  `problem.Shape`, `Place`; with_dlse  whether there is a dlse
    """
    row = cuda.blockIdx.x * N_WARPS + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    if row < n_rows:
        i, rest = row % shape.rows, row // shape.rows
        h, batch = rest % shape.n_heads, rest // shape.n_heads
        mine = batch * do_at.batch + h * do_at.head + i * do_at.row
        other = batch * o_at.batch + h * o_at.head + i * o_at.row
        total = ZERO
        for e in range(lane, shape.E, 32):
            total += load(do, mine + e) * load(o, other + e)
        total = warp_sum(total)
        if lane == 0:
            delta[row] = total - dlse[row] if with_dlse else total


@functools.cache
def kernels_for(rows, cols, depth):
    """(kernel of dk and dv, kernel of dq, bytes of shared memory of either)."""
    EACH_ROW, EACH_COL, PITCH, WIDTH = rows // SIDE, cols // SIDE, depth + 1, depth // SIDE
    SECOND, PASSING, PASSING_SECOND = rows * PITCH, 2 * rows * PITCH, (2 * rows + cols) * PITCH
    WEIGHTS = (2 * rows + 2 * cols) * PITCH
    GRADIENTS = WEIGHTS + rows * (cols + 1)
    multiply, accumulate = products(rows, cols, depth)

    @cuda.jit(device=True)
    def clear(sums):
        for u in range(EACH_ROW):
            for e in range(WIDTH):
                sums[u, e] = ZERO

    @cuda.jit(device=True)
    def write(x, at, step, sums, i, n_rows, n):
        tx = cuda.threadIdx.x % SIDE
        for u in range(EACH_ROW):
            for e in range(WIDTH):
                if i + u * SIDE < n_rows and tx + e * SIDE < n:
                    store(x, at + (i + u * SIDE) * step + tx + e * SIDE, sums[u, e])

    @cuda.jit(device=True)
    def weigh(
        shared, place, raw, g, lse, delta, row, shape, look, drop, bias, allowed, slopes, dscores,
        b, h, i, j, beside, n_queries, n_keys,
    ):  # fmt: skip
        """Leave the weight of query i and key j, and the gradient of raw, in memory."""
        seen, gradient = UNSEEN, ZERO
        if is_seen(i, j, beside, n_queries, n_keys, look):
            score, slope = capped(raw, look)
            score = masked(score, look, bias, allowed, slopes, b, h, i, j, beside)
            if score != LOWEST:
                p, factor = weight(score, lse[row + i]), kept(look, drop, shape, b, h, i, j)
                seen, gradient = p * factor, p * (g * factor - delta[row + i])
                if look.bits & DSCORES:
                    at = ((b * shape.n_heads + h) * shape.T + i) * shape.S + j
                    dscores[at] = gradient
                gradient *= slope * look.scale
        shared[WEIGHTS + place] = seen
        shared[GRADIENTS + place] = gradient

    @cuda.jit
    def keys_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dk, dv, shape, do_at,
        q_at, k_at, v_at, dk_at, dv_at, look, drop,
    ):  # fmt: skip
        """dk and dv: a tile of keys a block. Parameters as of `streaming.streaming_kernel`, and
        delta, as `delta_kernel` leaves it. Here the heads of a block's place are those of k."""
        shared = cuda.shared.array(0, np.float32)
        raw = cuda.local.array((EACH_ROW, EACH_COL), np.float32)
        g = cuda.local.array((EACH_ROW, EACH_COL), np.float32)
        dkeys = cuda.local.array((EACH_ROW, WIDTH), np.float32)
        dvalues = cuda.local.array((EACH_ROW, WIDTH), np.float32)
        n_tiles, n_groups = (shape.S + rows - 1) // rows, shape.n_heads // shape.share
        start, rest = cuda.blockIdx.x % n_tiles * rows, cuda.blockIdx.x // n_tiles
        group, b = rest % n_groups, rest // n_groups
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        tx, ty = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
        at = batch * k_at.batch + group * k_at.head + (k_first + start) * k_at.row
        load_tile(shared, 0, PITCH, k, at, k_at.row, n_keys - start, shape.D, rows, depth)
        at = batch * v_at.batch + group * v_at.head + (k_first + start) * v_at.row
        load_tile(shared, SECOND, PITCH, v, at, v_at.row, n_keys - start, shape.E, rows, depth)
        clear(dkeys)
        clear(dvalues)
        first = max(0, start - beside - look.high) // cols * cols
        end = min(n_queries, min(start + rows, n_keys) - beside - look.low)
        for h in range(group * shape.share, (group + 1) * shape.share):
            row = (batch * shape.n_heads + h) * shape.rows + q_first
            for i in range(first, end, cols):
                at = batch * q_at.batch + h * q_at.head + (q_first + i) * q_at.row
                load_tile(
                    shared, PASSING, PITCH, q, at, q_at.row, n_queries - i, shape.D, cols, depth
                )
                at = batch * do_at.batch + h * do_at.head + (q_first + i) * do_at.row
                load_tile(
                    shared, PASSING_SECOND, PITCH, do, at, do_at.row, n_queries - i, shape.E, cols,
                    depth,
                )  # fmt: skip
                cuda.syncthreads()
                multiply(raw, shared, 0, PASSING, shape.D)
                multiply(g, shared, SECOND, PASSING_SECOND, shape.E)
                for u in range(EACH_ROW):
                    for w in range(EACH_COL):
                        place = (ty + u * SIDE) * (cols + 1) + tx + w * SIDE
                        weigh(
                            shared, place, raw[u, w], g[u, w], lse, delta, row, shape, look, drop,
                            bias, allowed, slopes, delta, b, h, i + tx + w * SIDE,
                            start + ty + u * SIDE, beside, n_queries, n_keys,
                        )  # fmt: skip
                cuda.syncwarp()
                accumulate(dvalues, shared, WEIGHTS, WEIGHTS, PASSING_SECOND, shape.E)
                accumulate(dkeys, shared, WEIGHTS, GRADIENTS, PASSING, shape.D)
                cuda.syncthreads()  # nobody reads these queries any more
        n_written = n_keys if look.bits & PACKED else shape.S  # padding gets 0
        at = batch * dk_at.batch + group * dk_at.head + k_first * dk_at.row
        write(dk, at, dk_at.row, dkeys, start + ty, n_written, shape.D)
        at = batch * dv_at.batch + group * dv_at.head + k_first * dv_at.row
        write(dv, at, dv_at.row, dvalues, start + ty, n_written, shape.E)

    @cuda.jit
    def queries_kernel(
        do, q, k, v, bias, allowed, slopes, q_starts, k_starts, lse, delta, dq, dscores, shape,
        do_at, q_at, k_at, v_at, dq_at, look, drop,
    ):  # fmt: skip
        """dq: a tile of queries a block. Parameters as of `keys_kernel`; with the bit DSCORES the
        gradients of all scores go to dscores, float32 of (batches, heads, T, S)."""
        shared = cuda.shared.array(0, np.float32)
        raw = cuda.local.array((EACH_ROW, EACH_COL), np.float32)
        g = cuda.local.array((EACH_ROW, EACH_COL), np.float32)
        dqueries = cuda.local.array((EACH_ROW, WIDTH), np.float32)
        tile, h, b = place_of_block((shape.T + rows - 1) // rows, shape)
        batch, q_first, n_queries, k_first, n_keys, beside = sequence(
            b, shape, look, q_starts, k_starts
        )
        start, tx, ty = tile * rows, cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
        row = (batch * shape.n_heads + h) * shape.rows + q_first
        at = batch * q_at.batch + h * q_at.head + (q_first + start) * q_at.row
        load_tile(shared, 0, PITCH, q, at, q_at.row, n_queries - start, shape.D, rows, depth)
        at = batch * do_at.batch + h * do_at.head + (q_first + start) * do_at.row
        load_tile(shared, SECOND, PITCH, do, at, do_at.row, n_queries - start, shape.E, rows, depth)
        clear(dqueries)
        end = end_of_keys(min(start + rows, n_queries) - 1, beside, n_keys, look)
        for j in range(first_key(start, beside, look) // cols * cols, end, cols):
            at = batch * k_at.batch + h // shape.share * k_at.head + (k_first + j) * k_at.row
            load_tile(shared, PASSING, PITCH, k, at, k_at.row, n_keys - j, shape.D, cols, depth)
            at = batch * v_at.batch + h // shape.share * v_at.head + (k_first + j) * v_at.row
            load_tile(
                shared, PASSING_SECOND, PITCH, v, at, v_at.row, n_keys - j, shape.E, cols, depth
            )
            cuda.syncthreads()
            multiply(raw, shared, 0, PASSING, shape.D)
            multiply(g, shared, SECOND, PASSING_SECOND, shape.E)
            for u in range(EACH_ROW):
                for w in range(EACH_COL):
                    place = (ty + u * SIDE) * (cols + 1) + tx + w * SIDE
                    weigh(
                        shared, place, raw[u, w], g[u, w], lse, delta, row, shape, look, drop,
                        bias, allowed, slopes, dscores, b, h, start + ty + u * SIDE,
                        j + tx + w * SIDE, beside, n_queries, n_keys,
                    )  # fmt: skip
            cuda.syncwarp()
            accumulate(dqueries, shared, WEIGHTS, GRADIENTS, PASSING, shape.D)
            cuda.syncthreads()  # nobody reads these keys any more
        at = batch * dq_at.batch + h * dq_at.head + q_first * dq_at.row
        write(dq, at, dq_at.row, dqueries, start + ty, n_queries, shape.D)

    return keys_kernel, queries_kernel, 4 * (GRADIENTS + rows * (cols + 1))
