"""What a block does with its part of an image, in the rungs that need two of them: sum, then scale.

A *part* is some channels of a sample, or of long planes a stretch of one channel's pixels. To sum
it (`sum_planes_part` ...) is to find the means, or backward the sums of dy·x, and what they add to
the hidden layer (`dense`). To scale it needs the sums of all of the sample's parts: it finds the
hidden layer, the gates of its own channels, and y or dx.

`cut` is what a kernel is told of the parts: (n_slots, group, n_parts, length, team or n_columns,
multiplier, offset, vectors); see `plan`. `aligned` says how its weights lie; see `dense`.

What does not depend on the sums is asked for before them: memory answers both together.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.squeeze_excite import pixels, planes
from course_lib.kernels.squeeze_excite.dense import (
    BLOCK_SIZE,
    CHUNK,
    MOST_CHANNELS,
    TOTALS,
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
from course_lib.kernels.squeeze_excite.pixels import SCRATCH
from course_lib.kernels.squeeze_excite.planes import DOT_PARTIALS, PARTIALS
from course_lib.runtime.intrinsics import VECTOR_BYTES, load

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


@cuda.jit(device=True)
def sum_planes_part(block, x, weight1, sums, slots, n_pixels, C, R, scale, aligned, cut):
    """Forward, contiguous: the means of part `block`."""
    values = cuda.shared.array(MOST_CHANNELS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(PARTIALS, np.float32)
    n_slots, group, n_parts, length, team, _, offset, _ = cut
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    planes.sum_planes(
        values, x, x, n * C + c, n_mine, n_pixels, low, high, offset, True, team, scratch
    )
    write_means(values, sums, slots, weight1, scale, R, C, block, n, part, n_parts, c, n_mine,
                aligned)  # fmt: skip


@cuda.jit(device=True)
def sum_pixels_part(block, x, weight1, sums, slots, n_pixels, C, R, scale, aligned, cut):
    """Forward, channels-last: the means of part `block`."""
    values = cuda.shared.array(MOST_CHANNELS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    n_slots, group, n_parts, length, n_columns, _, _, vectors = cut
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.sum_pixels(values, x, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
    write_means(values, sums, slots, weight1, scale, R, C, block, n, part, n_parts, c, n_mine,
                aligned)  # fmt: skip


@cuda.jit(device=True)
def scale_planes_part(
    block, x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit, n_pixels, C, R,
    activation, gate, aligned, cut,
):  # fmt: skip
    """Forward, contiguous: y of part `block`."""
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    n_slots, group, n_parts, length, _, multiplier, offset, vectors = cut
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, mean, C, n, part, n_parts, c, n_mine)
    find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate, aligned)  # fmt: skip
    start = (n * C + c) * n_pixels
    # Several parts are of one plane.
    stop = start + min((part + 1) * length, n_pixels) + (n_mine - 1) * n_pixels
    planes.scale_planes(
        x, y, start + part * length, stop, offset, vectors, factors, factors, n_pixels, multiplier
    )


@cuda.jit(device=True)
def scale_pixels_part(
    block, x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit, n_pixels, C, R,
    activation, gate, aligned, cut,
):  # fmt: skip
    """Forward, channels-last: y of part `block`."""
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    n_slots, group, n_parts, length, n_columns, _, _, vectors = cut
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, mean, C, n, part, n_parts, c, n_mine)
    find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate, aligned)  # fmt: skip
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.scale_pixels(
        x, y, start, low, high, C, n_mine, n_columns, vectors, factors, factors
    )  # fmt: skip


@cuda.jit(device=True)
def dot_planes_part(block, dy, x, weight2, logit, sums, slots, n_pixels, C, R, gate, aligned, cut):
    """Backward, contiguous: dlogit of part `block`."""
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(DOT_PARTIALS, np.float32)
    n_slots, group, n_parts, length, team, _, offset, vectors = cut
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    z = logit_of(logit, C, n, c, n_mine)
    planes.dot_planes(
        values, dy, x, n * C + c, n_mine, n_pixels, low, high, offset, vectors, team, scratch
    )
    write_dlogits(values, sums, slots, weight2, z, R, C, block, n, part, n_parts, c, n_mine,
                  gate, scratch, aligned)  # fmt: skip


@cuda.jit(device=True)
def dot_pixels_part(block, dy, x, weight2, logit, sums, slots, n_pixels, C, R, gate, aligned, cut):
    """Backward, channels-last: dlogit of part `block`."""
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    n_slots, group, n_parts, length, n_columns, _, _, vectors = cut
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    z = logit_of(logit, C, n, c, n_mine)
    start = n * n_pixels * C + c
    pixels.dot_pixels(values, dy, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
    write_dlogits(values, sums, slots, weight2, z, R, C, block, n, part, n_parts, c, n_mine,
                  gate, scratch, aligned)  # fmt: skip


@cuda.jit(device=True)
def dx_planes_part(
    block, dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden, n_pixels, C, R, scale,
    activation, gate, aligned, cut,
):  # fmt: skip
    """Backward, contiguous: dx of part `block`."""
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    n_slots, group, n_parts, length, _, multiplier, offset, vectors = cut
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, dlogit, C, n, part, n_parts, c, n_mine)
    find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate, aligned)  # fmt: skip
    start = (n * C + c) * n_pixels
    # Several parts are of one plane.
    stop = start + min((part + 1) * length, n_pixels) + (n_mine - 1) * n_pixels
    planes.scale_and_shift_planes(
        dy, dx, start + part * length, stop, offset, vectors, factors, shifts, n_pixels, multiplier
    )


@cuda.jit(device=True)
def dx_pixels_part(
    block, dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden, n_pixels, C, R, scale,
    activation, gate, aligned, cut,
):  # fmt: skip
    """Backward, channels-last: dx of part `block`."""
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    n_slots, group, n_parts, length, n_columns, _, _, vectors = cut
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, dlogit, C, n, part, n_parts, c, n_mine)
    find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate, aligned)  # fmt: skip
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.scale_and_shift_pixels(
        dy, dx, start, low, high, C, n_mine, n_columns, vectors, factors, shifts
    )
