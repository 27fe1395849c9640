"""The forward kernels of the rung `fused`."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite.formulas import activate, gate_of
from course_lib.kernels.squeeze_excite.fused_exchange import (
    HEADER,
    LANES,
    TEAMS,
    begin,
    collecting,
    copy_matrices,
    copy_vector,
    lanes_dot,
    post_hidden,
    quotient,
    sum_of_splits,
)
from course_lib.runtime.intrinsics import load, store, vector_width
from course_lib.runtime.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.shared import dynamic_shared

MOST_REGISTERS = 128  # for blocks of 512 threads


@cuda.jit(device=True)
def finish_forward(total, bias, activation):
    hidden = total + bias
    return hidden, activate(hidden, activation)


collect_forward = collecting(finish_forward)


@cuda.jit(device=True)
def shares_of(tables, scratch, n_splits, factor, mean, i, cut):
    """From the partial sums of each channel, its share of the mean: at the start of `tables`.

    Shares of channels that lie in no other part are saved.
    """
    j = np.int64(cuda.threadIdx.x)
    while j < cut[3]:
        share = sum_of_splits(tables, scratch + j * n_splits, n_splits) * factor
        store(tables, j, share)
        if cut[5] <= j and j < cut[6]:
            store(mean, i + j, share)
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def gates(tables, matrix, at, scales, biases, logit, i, R, cut, gate):
    """The scale of each channel of the part."""
    j, is_first_lane = np.int64(cuda.threadIdx.x // LANES), cuda.threadIdx.x % LANES == 0
    first, n_channels = j & -TEAMS, cut[3]  # of this warp
    while first < n_channels:
        value = lanes_dot(tables, matrix + j * R, 1, at, R if j < n_channels else 0)
        if j < n_channels and is_first_lane:
            value += load(tables, biases + j)
            store(tables, scales + j, gate_of(value, gate))
            if j >= cut[7]:
                store(logit, i + j, value)
        j += cuda.blockDim.x // LANES
        first += cuda.blockDim.x // LANES
    cuda.syncthreads()


def forward_kernel(layout):
    """The kernel for images of one layout."""
    fetch, pool, scale = layout.fetch, layout.pool(False), layout.scale(False)
    cut_out, share_out = layout.cut, layout.share_out
    post_shares, save_cut = layout.post_shares, layout.save_cut

    @cuda.jit(max_registers=MOST_REGISTERS)
    def fused_kernel(
        x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, box,
        N, C, n_pixels, R, n_parts, n_groups, group, n_words, n_stages, lag, stage, n_channels,
        lanes, word_lanes, tables_bytes, vectors, factor, activation, gate,
    ):  # fmt: skip
        tables, cache = cuda.shared.array(0, np.float32), dynamic_shared(x)  # one memory
        # Two words, so that what follows keeps its 16-byte boundary.
        shared_mark, width = cuda.shared.array(2, np.int64), vector_width(x)
        scales, biases, hidden_at = n_channels, 2 * n_channels, 4 * n_channels
        rows_at = hidden_at + 2 * R
        columns_at = rows_at + R * n_channels
        scratch = columns_at + R * n_channels
        first_stage = tables_bytes * width // 16
        n_teams, team = quotient(cuda.gridDim.x, n_parts), quotient(cuda.blockIdx.x, n_parts)
        part, size = cuda.blockIdx.x - team * n_parts, C * n_pixels
        cut = cut_out(part, n_parts, n_groups, group, C, n_pixels, width)
        n_steps = quotient(N - team + n_teams - 1, n_teams)
        begin(box, shared_mark)
        for k in range(n_stages):
            if k < n_steps:
                sample = (team + k * n_teams) * size
                fetch(cache, first_stage + k * stage, x, sample, cut, group, C, vectors)
            end_group()
        copy_vector(tables, biases, bias2, cut[2], cut[3])
        copy_vector(tables, hidden_at + R, bias1, 0, R)
        copy_matrices(tables, rows_at, columns_at, weight1, weight2, R, C, cut[2], cut[3])
        shared_out = share_out(cut, n_pixels, lanes, width)
        mail_step, mark = n_parts * n_words, np.int64(0)
        pooled, scaled, end = first_stage, first_stage, first_stage + n_stages * stage
        for k in range(n_steps + lag):
            if k < n_steps:
                i = team + k * n_teams
                wait_for_groups_but(n_stages - 1 - min(k, lag))
                cuda.syncthreads()
                mark = shared_mark[0]
                pool(cache, pooled, 0, cut, group, n_pixels, lanes, shared_out, tables, scratch)
                shares_of(tables, scratch, shared_out[0], factor, mean, i * C + cut[2], cut)
                mine = HEADER + i * mail_step + part
                post_hidden(box, mine, n_parts, mark, tables, rows_at, cut[3], 1, R, cut[3])
                post_shares(box, mine + R * n_parts, n_parts, mark, tables, cut)
                pooled = pooled + stage if pooled + stage < end else first_stage
            if k >= lag:
                i = team + (k - lag) * n_teams
                base, channels = HEADER + i * mail_step, i * C + cut[2]
                collect_forward(
                    box, base, n_parts, mark, word_lanes, tables, hidden_at, R, tables,
                    hidden_at + R, hidden, i * R, part == 0, activation,
                )  # fmt: skip
                ends = base + R * n_parts
                save_cut(mean, channels, box, ends, part, n_parts, n_groups, cut, mark)
                cuda.syncthreads()
                gates(tables, columns_at, hidden_at, scales, biases, logit, channels, R, cut, gate)
                scale(
                    cache, scaled, y, i * size, cut, shared_out, group, C, n_pixels, tables,
                    scales, scales, vectors,
                )  # fmt: skip
                cuda.syncthreads()
                if k - lag + n_stages < n_steps:
                    sample = (i + n_stages * n_teams) * size
                    fetch(cache, scaled, x, sample, cut, group, C, vectors)
                end_group()
                scaled = scaled + stage if scaled + stage < end else first_stage

    return fused_kernel
