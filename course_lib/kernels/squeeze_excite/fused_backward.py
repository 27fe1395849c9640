"""The backward kernels of the rung `fused`: the forward ones with the matrices' roles swapped.

dy is held from the sum over dy·x to dx; x is needed for the sum alone, so that it has stages of its
own, which are free as soon as the sums are taken.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite.formulas import (
    ZERO,
    activation_gradient,
    gate_gradient,
    gate_of,
)
from course_lib.kernels.squeeze_excite.fused_exchange import (
    HEADER,
    LANES,
    TEAMS,
    begin,
    collecting,
    copy_matrices,
    lanes_dot,
    post_hidden,
    quotient,
    sum_of_splits,
)
from course_lib.kernels.squeeze_excite.fused_forward import MOST_REGISTERS
from course_lib.runtime.intrinsics import load, store, vector_width
from course_lib.runtime.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.shared import dynamic_shared


@cuda.jit(device=True)
def finish_backward(total, hidden, activation):
    dhidden = activation_gradient(total, hidden, activation)
    return dhidden, dhidden


collect_backward = collecting(finish_backward)


@cuda.jit(device=True)
def gradient_shares(tables, scratch, scales, n_splits, mine, logit, dlogit, i, cut, gate):
    """From the partial sums of each channel, its share of dlogit: at the start of `tables`.

    `mine` is logit[i + threadIdx.x], loaded long before. The channels' scales come on the way;
    shares of channels that lie in no other part are saved.
    """
    j = np.int64(cuda.threadIdx.x)
    while j < cut[3]:
        total = sum_of_splits(tables, scratch + j * n_splits, n_splits)
        value = mine if j < cuda.blockDim.x else load(logit, i + j)
        share = gate_gradient(total, value, gate)
        store(tables, j, share)
        store(tables, scales + j, gate_of(value, gate))
        if cut[5] <= j and j < cut[6]:
            store(dlogit, i + j, share)
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def shifts_of(tables, matrix, at, shifts, R, n_channels, factor):
    """What the gradient of each channel's mean adds to that of every pixel."""
    j, is_first_lane = np.int64(cuda.threadIdx.x // LANES), cuda.threadIdx.x % LANES == 0
    first = j & -TEAMS  # of this warp
    while first < n_channels:
        value = lanes_dot(tables, matrix + j, n_channels, at, R if j < n_channels else 0)
        if j < n_channels and is_first_lane:
            store(tables, shifts + j, value * factor)
        j += cuda.blockDim.x // LANES
        first += cuda.blockDim.x // LANES
    cuda.syncthreads()


@cuda.jit(device=True)
def groups_left(k, n_stages, n_others, lag):
    """Groups that may still be on their way when step `k` begins.

    Before the first step there are n_stages groups. Each step ends two: x, n_others steps ahead,
    and dy, n_stages − lag ahead.
    """
    needed = k if k < n_stages else n_stages + 2 * (k - n_stages + lag) + 1
    other = k if k < n_others else n_stages + 2 * (k - n_others)
    return n_stages + 2 * k - 1 - max(needed, other)


def backward_kernel(layout):
    """The kernel for images of one layout."""
    fetch, pool, scale = layout.fetch, layout.pool(True), layout.scale(True)
    cut_out, share_out = layout.cut, layout.share_out
    post_shares, save_cut = layout.post_shares, layout.save_cut

    @cuda.jit(max_registers=MOST_REGISTERS)
    def fused_backward_kernel(
        dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden, box,
        N, C, n_pixels, R, n_parts, n_groups, group, n_words, n_stages, n_others, lag, stage,
        n_channels, lanes, word_lanes, tables_bytes, vectors, factor, activation, gate,
    ):  # fmt: skip
        tables, cache = cuda.shared.array(0, np.float32), dynamic_shared(dy)  # one memory
        # Two words, so that what follows keeps its 16-byte boundary.
        shared_mark, width = cuda.shared.array(2, np.int64), vector_width(dy)
        shifts, scales, hidden_at = n_channels, 2 * n_channels, 4 * n_channels
        rows_at = hidden_at + 2 * R
        columns_at = rows_at + R * n_channels
        scratch = columns_at + R * n_channels
        first_stage = tables_bytes * width // 16
        first_other = first_stage + n_stages * stage
        n_teams, team = quotient(cuda.gridDim.x, n_parts), quotient(cuda.blockIdx.x, n_parts)
        part, size = cuda.blockIdx.x - team * n_parts, C * n_pixels
        cut = cut_out(part, n_parts, n_groups, group, C, n_pixels, width)
        n_steps = quotient(N - team + n_teams - 1, n_teams)
        begin(box, shared_mark)
        for k in range(n_stages):
            sample = (team + k * n_teams) * size
            if k < n_steps:
                fetch(cache, first_stage + k * stage, dy, sample, cut, group, C, vectors)
            if k < min(n_others, n_steps):
                fetch(cache, first_other + k * stage, x, sample, cut, group, C, vectors)
            end_group()
        copy_matrices(tables, rows_at, columns_at, weight1, weight2, R, C, cut[2], cut[3])
        shared_out = share_out(cut, n_pixels, lanes, width)
        mail_step, mark = n_parts * n_words, np.int64(0)
        pooled, scaled, other = first_stage, first_stage, first_other
        end = first_other + n_others * stage
        for k in range(n_steps + lag):
            if k < n_steps:
                i = team + k * n_teams
                channels, my_logit = i * C + cut[2], ZERO
                if cuda.threadIdx.x < cut[3]:
                    my_logit = load(logit, channels + cuda.threadIdx.x)
                wait_for_groups_but(groups_left(k, n_stages, n_others, lag))
                cuda.syncthreads()
                mark = shared_mark[0]
                pool(cache, pooled, other, cut, group, n_pixels, lanes, shared_out, tables, scratch)
                if k + n_others < n_steps:
                    sample = (i + n_others * n_teams) * size
                    fetch(cache, other, x, sample, cut, group, C, vectors)
                end_group()
                gradient_shares(
                    tables, scratch, scales + (k & 1) * n_channels, shared_out[0], my_logit, logit,
                    dlogit, channels, cut, gate,
                )  # fmt: skip
                mine = HEADER + i * mail_step + part
                post_hidden(box, mine, n_parts, mark, tables, columns_at, 1, R, R, cut[3])
                post_shares(box, mine + R * n_parts, n_parts, mark, tables, cut)
                pooled = pooled + stage if pooled + stage < first_other else first_stage
                other = other + stage if other + stage < end else first_other
            if k >= lag:
                i = team + (k - lag) * n_teams
                base = HEADER + i * mail_step
                collect_backward(
                    box, base, n_parts, mark, word_lanes, tables, hidden_at, R, hidden, i * R,
                    dhidden, i * R, part == 0, activation,
                )  # fmt: skip
                ends = base + R * n_parts
                save_cut(dlogit, i * C + cut[2], box, ends, part, n_parts, n_groups, cut, mark)
                cuda.syncthreads()
                shifts_of(tables, rows_at, hidden_at, shifts, R, cut[3], factor)
                scale(
                    cache, scaled, dx, i * size, cut, shared_out, group, C, n_pixels, tables,
                    scales + ((k - lag) & 1) * n_channels, shifts, vectors,
                )  # fmt: skip
                cuda.syncthreads()
                if k - lag + n_stages < n_steps:
                    sample = (i + n_stages * n_teams) * size
                    fetch(cache, scaled, dy, sample, cut, group, C, vectors)
                scaled = scaled + stage if scaled + stage < first_other else first_stage
            end_group()

    return fused_backward_kernel
