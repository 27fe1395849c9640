"""The rung `fused`: one kernel that reads each image once.

A sample is cut into parts, one for each block of a *team*, and each block holds its part in shared
memory from the pooling to the scaling. In between the team exchanges one short vector
(`fused_exchange`). Teams walk the samples: while a block waits for the others' numbers for one
sample, it pools the next, and copies of those after that are on their way.

Blocks that wait for each other must all be running, or the last ones would never get the place that
the first ones hold while they wait. A cooperative launch starts all blocks at once or none.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite.formulas import activate, gate_of
from course_lib.kernels.squeeze_excite.fused_exchange import (
    HEADER,
    LANES,
    begin,
    collect_hidden,
    copy_matrices,
    finish,
    post_hidden,
    quotient,
    row_times_hidden,
)
from course_lib.kernels.squeeze_excite.fused_plan import BLOCK_SIZE, planes_plan
from course_lib.kernels.squeeze_excite.fused_planes import (
    EXTRA_WORDS,
    fetch_planes,
    planes_scaling,
    planes_sums,
    post_ends,
    save_cut,
    save_whole,
    stretch_of,
)
from course_lib.runtime import arrays
from course_lib.runtime.intrinsics import load, vector_width
from course_lib.runtime.launch import chip_of, launch
from course_lib.runtime.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.shared import dynamic_shared

pool_x, scale_x = planes_sums(False), planes_scaling(False)


@cuda.jit(device=True)
def shares_of(tables, scratch, shares, n_splits, n_channels, factor):
    """From the partial sums of each channel, its share of the mean."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_channels:
        total = tables[scratch + j * n_splits]
        for split in range(1, n_splits):
            total += tables[scratch + j * n_splits + split]
        tables[shares + j] = total * factor
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def hidden_layer(tables, at, bias, hidden, i, R, is_first, activation):
    """Add the bias, save, activate: each thread the numbers that it has collected."""
    r = np.int64(cuda.threadIdx.x)
    while r < R:
        value = tables[at + r] + load(bias, r)
        if is_first:
            hidden[i * R + r] = value
        tables[at + r] = activate(value, activation)
        r += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def gates(tables, from_hidden, at, scales, bias, logit, i, C, R, first, n_channels, owns, gate):
    """The scale of each channel of the part."""
    rank, mine, n_teams = (
        cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES, cuda.blockDim.x // LANES
    )  # fmt: skip
    done = 0
    while done < n_channels:
        j = done + mine
        value = row_times_hidden(tables, from_hidden, at, R, j, n_channels)
        if rank == 0 and j < n_channels:
            value += load(bias, first + j)
            tables[scales + j] = gate_of(value, gate)
            if j >= owns:
                logit[i * C + first + j] = value
        done += n_teams
    cuda.syncthreads()


@cuda.jit(max_registers=128)
def planes_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, box,
    N, C, n_pixels, R, n_parts, n_stages, lag, stage, most_channels, lanes, tables_bytes,
    vectors, factor, activation, gate,
):  # fmt: skip
    tables, cache = cuda.shared.array(0, np.float32), dynamic_shared(x)  # one memory
    width = vector_width(x)
    scales, hidden_at = most_channels, 3 * most_channels
    scratch = hidden_at + R
    to_hidden = scratch + max(np.int64(cuda.blockDim.x), most_channels)
    from_hidden = to_hidden + R * most_channels
    first_stage = tables_bytes * width // 16
    n_teams, team = quotient(cuda.gridDim.x, n_parts), quotient(cuda.blockIdx.x, n_parts)
    part, size, n_words = cuda.blockIdx.x - team * n_parts, C * n_pixels, R + EXTRA_WORDS
    start, length = stretch_of(part, n_parts, size, width)
    first_channel = quotient(start, n_pixels)
    phase = start - first_channel * n_pixels
    n_channels = quotient(start + length - 1, n_pixels) - first_channel + 1
    n_steps = quotient(N - team + n_teams - 1, n_teams)
    mark = begin(box)
    for k in range(n_stages):
        if k < n_steps:
            place = first_stage + k * stage
            fetch_planes(cache, place, x, (team + k * n_teams) * size + start, length, vectors)
        end_group()
    copy_matrices(tables, to_hidden, from_hidden, weight1, weight2, R, C, first_channel, n_channels)
    for k in range(n_steps + lag):
        if k < n_steps:
            i = team + k * n_teams
            wait_for_groups_but(n_stages - 1 - min(k, lag))
            cuda.syncthreads()
            place = first_stage + (k - quotient(k, n_stages) * n_stages) * stage
            base = HEADER + i * n_parts * n_words
            n_splits = pool_x(
                cache, place, 0, length, phase, n_pixels, n_channels, lanes, tables, scratch
            )
            shares_of(tables, scratch, 0, n_splits, n_channels, factor)
            mine = base + part * n_words
            post_hidden(box, mine, mark, tables, to_hidden, 0, R, n_channels)
            post_ends(box, mine + R, mark, tables, 0, n_channels)
            save_whole(mean, i * C, tables, 0, first_channel, n_channels, length, phase, n_pixels)
        if k >= lag:
            i = team + (k - lag) * n_teams
            turn = quotient(k - lag, n_stages)
            place = first_stage + (k - lag - turn * n_stages) * stage
            base = HEADER + i * n_parts * n_words
            collect_hidden(box, base, n_words, n_parts, mark, tables, scratch, hidden_at, R)
            hidden_layer(tables, hidden_at, bias1, hidden, i, R, part == 0, activation)
            owns = 1 if phase > 0 else 0
            gates(
                tables, from_hidden, hidden_at, scales, bias2, logit, i, C, R, first_channel,
                n_channels, owns, gate,
            )  # fmt: skip
            save_cut(
                mean, i * C, box, base, n_words, R, mark, part, n_parts, first_channel,
                n_channels, length, phase, n_pixels, size, width,
            )  # fmt: skip
            scale_x(
                cache, place, y, i * size + start, length, phase, n_pixels, n_channels, tables,
                scales, scales, vectors,
            )  # fmt: skip
            cuda.syncthreads()
            if k - lag + n_stages < n_steps:
                following = (i + n_stages * n_teams) * size + start
                fetch_planes(cache, place, x, following, length, vectors)
            end_group()
    finish(box, mark)


def launch_planes(
    problem, box, n_blocks, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, n_parts=None
):
    """Forward, contiguous images."""
    N, C, n_pixels, R = problem.N, problem.C, problem.n_pixels, problem.R
    shared_limit = chip_of(x)[1]
    plan = planes_plan(N, C, n_pixels, R, problem.itemsize, 1, n_blocks, shared_limit, n_parts)
    vectors = arrays.address_of(x) % 16 == 0 and C * n_pixels * problem.itemsize % 16 == 0
    launch(
        planes_kernel, plan.n_parts * plan.n_teams, BLOCK_SIZE,
        x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, box,
        N, C, n_pixels, R, plan.n_parts, plan.n_stages, plan.lag, plan.stage, plan.n_channels,
        plan.lanes, plan.tables_bytes, vectors, np.float32(1 / n_pixels), problem.activation,
        problem.gate, flat=True, cooperative=True, shared_bytes=plan.shared_bytes,
    )  # fmt: skip
    return plan
