"""One kernel that walks the channels of large contiguous images: x comes from L2 the second time.

Each block does one task: it takes a part of a channel for the statistics, or it takes one to write
the result. Blocks draw their tasks by a ticket, in an order that runs through all parts twice; the
second time follows the first by a channel and `LEAD` parts, so that x still lies in the L2. How
that works, and why no block waits in vain, `blocks.work_queue` tells.

The backward pass does not gain: it has two arrays to keep there, and more to do for each element.

The block that takes the last part of a channel puts the parts together, in a fixed order: two runs
agree bit for bit.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.planes import part_affine, part_moments
from course_lib.kernels.batch_norm.statistics import keep_statistics
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.moments import affine_of, block_moments, merged
from course_lib.kernels.blocks.work_queue import (
    READY,
    draw,
    is_last,
    leave,
    task_of,
    tell_ready,
    wait_until_ready,
)
from course_lib.runtime.host import arrays, counters
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import allow_next_kernel, load, wait_for_previous_kernel

LEAD = 500  # parts, beside those of a channel: fewer, and blocks wait for each other
MOST_BYTES = 12 << 20  # of a channel: more would not stay in the L2
ENOUGH = 8  # times LEAD: parts worth a walk


@cuda.jit
def walk_kernel(
    x, y, partial, counted, C, P, total, length, n_parts, team, lead, offset, weight, bias,
    has_weight, has_bias, relu, means, rstds, running_mean, running_var, tracked, momentum, eps,
):  # fmt: skip
    scratch = cuda.shared.array((3, 32), np.float32)
    drawn = cuda.shared.array(1, np.int32)
    allow_next_kernel()
    wait_for_previous_kernel()
    summing, task = task_of(draw(drawn, counted), np.int64(cuda.gridDim.x), lead)
    c, begin = task // n_parts, task % n_parts * length
    end = min(begin + length, total)
    if summing:
        count, mean, m2 = part_moments(x, c, C, P, begin, end, team, offset)
        count, mean, m2 = block_moments(count, mean, m2, scratch)
        if cuda.threadIdx.x == 0:
            partial[3 * task], partial[3 * task + 1], partial[3 * task + 2] = count, mean, m2
        if is_last(counted, c, n_parts, drawn):
            count, mean, m2 = channel_moments(partial, c, n_parts, scratch)
            if cuda.threadIdx.x == 0:
                keep_statistics(
                    c, count, mean, m2, means, rstds, running_mean, running_var, tracked,
                    momentum, eps,
                )  # fmt: skip
            tell_ready(counted, c)
    else:
        waited = wait_until_ready(counted, c, n_parts)
        scale, shift = affine_of(c, weight, bias, has_weight, has_bias)
        part_affine(
            x, y, c, C, P, begin, end, team, offset, load(means, c), scale * load(rstds, c), shift,
            relu, True,
        )  # fmt: skip
        leave(counted, c, n_parts, waited)


@cuda.jit(device=True)
def channel_moments(partial, c, n_parts, scratch):
    """The triples of a channel's parts as one."""
    count = mean = m2 = ZERO
    part = cuda.threadIdx.x
    while part < n_parts:
        at = 3 * (c * n_parts + part)
        count, mean, m2 = merged(
            count, mean, m2, load(partial, at), load(partial, at + 1), load(partial, at + 2)
        )
        part += cuda.blockDim.x
    return block_moments(count, mean, m2, scratch)


def is_worth_it(plan, C, n_bytes):
    """Whether to walk over channels of `n_bytes`."""
    return n_bytes <= MOST_BYTES and C * plan.n_parts >= ENOUGH * LEAD


def forward(x, y, C, P, plan, start, affine, mean, rstd, running, numbers):
    n_tasks = C * plan.n_parts
    partial = arrays.empty((n_tasks, 3), like=mean)
    share = plan.length, plan.n_parts, plan.team, min(n_tasks, plan.n_parts + LEAD)
    launch(
        walk_kernel, 2 * n_tasks, plan.block,
        x, y, partial, counters.counters(READY + C, mean), C, P, arrays.size_of(x) // C, *share,
        start, *affine, mean, rstd, *running, *numbers, flat=True, overlap=True,
    )  # fmt: skip
