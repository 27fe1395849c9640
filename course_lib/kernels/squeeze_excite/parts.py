"""The small layers in `two_pass`, whose blocks have a part of an image each: sum, then scale.

A *part* is some channels of a sample, or of long planes a stretch of one channel's pixels. A block
that sums its part finds the means, or backward the sums of dy·x, and what they add to the hidden
layer (`dense`). A block that scales needs the sums of all of the sample's parts: it finds the
hidden layer, the gates of its own channels, and y or dx.

A kernel is told of the parts by n_slots, group, n_parts, length, team or n_columns, multiplier,
offset and vectors: see `plan`. `aligned` says how its weights lie: see `dense`.

What does not depend on the sums is asked for before them: memory answers both together.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.squeeze_excite.dense import (
    BLOCK_SIZE,
    CHUNK,
    by_columns,
    by_rows,
    quotient,
    slot_size,
    sum_slots,
)
from course_lib.kernels.squeeze_excite.formulas import (
    activate,
    activation_gradient,
    gate_gradient,
    gate_of,
)
from course_lib.runtime.intrinsics import load

PER_THREAD = CHUNK // BLOCK_SIZE


@cuda.jit(device=True)
def place_of_block(block, C, n_slots, group, n_parts):
    """(sample, slot, part, first channel, number of channels) of block `block`."""
    n = quotient(block, n_slots)
    slot = block - n * n_slots
    tile = quotient(slot, n_parts)
    c = tile * group
    return n, slot, slot - tile * n_parts, c, min(group, C - c)


@cuda.jit(device=True)
def write_means(values, sums, slots, weight1, scale, R, C, block, n, part, n_parts, c, n_mine,
                aligned):  # fmt: skip
    """The block's share of the means, from the sums in `values`, and of the hidden layer."""
    tid = cuda.threadIdx.x
    start = block * slot_size(R)
    if tid < n_mine:
        values[tid] *= scale
        sums[(n * n_parts + part) * C + c + tid] = values[tid]
    cuda.syncthreads()
    by_rows(slots, start, weight1, C, 0, R, c, n_mine, values, False, aligned)


@cuda.jit(device=True)
def logit_of(logit, C, n, c, n_mine):
    """The logit of the thread's channel, if it has one."""
    tid = cuda.threadIdx.x
    return logit[n * C + c + tid] if tid < n_mine else ZERO


@cuda.jit(device=True)
def write_dlogits(values, sums, slots, weight2, z, R, C, block, n, part, n_parts, c, n_mine,
                  gate, scratch, aligned):  # fmt: skip
    """The block's share of dlogit, from the sums of dy·x in `values`, and of the hidden layer's.

    `z` is what `logit_of` found.
    """
    tid = cuda.threadIdx.x
    start = block * slot_size(R)
    if tid < n_mine:
        values[tid] = gate_gradient(values[tid], z, gate)
        sums[(n * n_parts + part) * C + c + tid] = values[tid]
    cuda.syncthreads()
    by_columns(slots, start, weight2, R, c, n_mine, 0, R, values, scratch, False, aligned)


@cuda.jit(device=True)
def finish_sums(sums, total, C, n, part, n_parts, c, n_mine):
    """total[n, c] from the sums of the parts, where there are several; by the first one's block."""
    tid = cuda.threadIdx.x
    if n_parts > 1 and part == 0 and tid < n_mine:
        value = ZERO
        for other in range(n_parts):
            value += sums[(n * n_parts + other) * C + c + tid]
        total[n * C + c + tid] = value


@cuda.jit(device=True)
def find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate, aligned):  # fmt: skip
    """factors[i] = the gate of channel c + i; notes hidden and logit. For totals: `sum_slots`."""
    tid = cuda.threadIdx.x
    biases = cuda.local.array(PER_THREAD, np.float32)
    if tid < n_mine:
        factors[tid] = load(bias2, c + tid)
    first = 0
    while first < R:
        count = min(CHUNK, R - first)
        for u in range(PER_THREAD):
            biases[u] = load(bias1, min(first + tid + u * BLOCK_SIZE, R - 1))
        sum_slots(totals, slots, n, n_slots, R, first, count)
        for u in range(PER_THREAD):
            i = tid + u * BLOCK_SIZE
            if i < count:
                h = totals[i] + biases[u]
                if slot == 0:
                    hidden[n * R + first + i] = h
                totals[i] = activate(h, activation)
        cuda.syncthreads()
        by_rows(factors, 0, weight2, R, c, n_mine, first, count, totals, True, aligned)
        first += CHUNK
    cuda.syncthreads()
    if tid < n_mine:
        if part == 0:
            logit[n * C + c + tid] = factors[tid]
        factors[tid] = gate_of(factors[tid], gate)
    cuda.syncthreads()


@cuda.jit(device=True)
def find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate, aligned):  # fmt: skip
    """dx = dy · factors + shifts, for channels c + i; notes dhidden."""
    tid = cuda.threadIdx.x
    saved = cuda.local.array(PER_THREAD, np.float32)
    z = logit_of(logit, C, n, c, n_mine)
    if tid < n_mine:
        shifts[tid] = ZERO
    first = 0
    while first < R:
        count = min(CHUNK, R - first)
        for u in range(PER_THREAD):
            saved[u] = hidden[n * R + min(first + tid + u * BLOCK_SIZE, R - 1)]
        sum_slots(totals, slots, n, n_slots, R, first, count)
        for u in range(PER_THREAD):
            i = tid + u * BLOCK_SIZE
            if i < count:
                d = activation_gradient(totals[i], saved[u], activation)
                if slot == 0:
                    dhidden[n * R + first + i] = d
                totals[i] = d
        cuda.syncthreads()
        by_columns(shifts, 0, weight1, C, first, count, c, n_mine, totals, scratch, True, aligned)
        first += CHUNK
    if tid < n_mine:
        shifts[tid] *= scale
        factors[tid] = gate_of(z, gate)
    cuda.syncthreads()
