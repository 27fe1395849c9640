"""The forward kernels of the Dice loss: sums over the pixels, and the loss from them.

For every class three numbers are summed, over the pixels that are not ignored: Σ p·t, Σ p and Σ t;
and for the cross-entropy Σ of the losses and of their weights. Number j of a part of the pixels is
partial[j·n_parts + part], with j = which·n_classes + class, or 3·n_classes and the next. Each sum
is taken in a fixed order.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import access, start_of
from course_lib.kernels.blocks.constants import MAX_WIDTH, NAN, ONE, ZERO
from course_lib.kernels.blocks.labels import IGNORED, INVALID, index_label
from course_lib.kernels.blocks.softmax_formulas import SOFTMAX, exponential
from course_lib.kernels.blocks.softmax_steps import add_online
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    block_sum,
    load,
    store,
    vector_width,
    wait_for_previous_kernel,
    warp_sum,
)

BLOCK_SIZE = 128
N_WARPS = BLOCK_SIZE // 32
TWO = np.float32(2)
reciprocal = SOFTMAX.row_factor


@cuda.jit(device=True)
def pixel_loss(x, label, m, total, weight, weighted):
    """(loss, weight) of a pixel in the cross-entropy: x is its logit, total Σ exp(x − m)."""
    pixel_weight = load(weight, label) if weighted else ONE
    return pixel_weight * (m - x + math.log(total)), pixel_weight


def held_kernel_of(n_slots, vectors):
    """The kernel that holds the classes of a thread's pixels: a part is a block's pixels."""
    width_of_thread, load_some, _ = access(vectors)
    N_SUMS = 3 * n_slots + 2
    SCRATCH = N_SUMS * N_WARPS

    @cuda.jit(device=True)
    def leave(scratch, j, value):
        """The warp's sum number j."""
        found = warp_sum(value)
        if cuda.threadIdx.x % 32 == 0:
            scratch[j * N_WARPS + cuda.threadIdx.x // 32] = found

    @cuda.jit
    def held_sums_kernel(
        logits, target, weight, weighted, partial, n_columns, n_classes, step, ignore_index
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(SCRATCH, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        both = cuda.local.array(n_slots, np.float32)
        alone = cuda.local.array(n_slots, np.float32)
        count = cuda.local.array(n_slots, np.float32)
        labels = cuda.local.array(MAX_WIDTH, np.int32)
        loss, pixel_weight = ZERO, ZERO
        width, digits = width_of_thread(logits), vector_width(logits)
        for c in range(n_slots):
            both[c], alone[c], count[c] = ZERO, ZERO, ZERO
        column = np.int64(cuda.grid(1)) * width
        while column < n_columns:
            start = start_of(column, n_classes, step)
            for k in range(width):  # first, so that they are on their way beside the logits
                labels[k] = index_label(target, column + k, n_classes, ignore_index)
            load_some(values, n_slots, logits, start, step, 0, n_classes, LOWEST)
            for k in range(width):
                label = labels[k]
                if label == INVALID:
                    alone[0] = NAN
                if label >= 0:
                    m, total, x = LOWEST, ZERO, ZERO
                    for c in range(n_slots):
                        m = max(m, values[c, k])
                        x = values[c, k] if c == label else x
                    for c in range(n_slots):
                        values[c, k] = exponential(values[c, k] - m, digits)
                        total += values[c, k]
                    factor = reciprocal(total)
                    for c in range(n_slots):
                        p = values[c, k] * factor
                        alone[c] += p
                        both[c] += p if c == label else ZERO
                        count[c] += ONE if c == label else ZERO
                    found, found_weight = pixel_loss(x, label, m, total, weight, weighted)
                    loss += found
                    pixel_weight += found_weight
            column += np.int64(cuda.gridsize(1)) * width
        for c in range(n_slots):
            leave(scratch, c, both[c])
        for c in range(n_slots):
            leave(scratch, n_slots + c, alone[c])
        for c in range(n_slots):
            leave(scratch, 2 * n_slots + c, count[c])
        leave(scratch, 3 * n_slots, loss)
        leave(scratch, 3 * n_slots + 1, pixel_weight)
        cuda.syncthreads()
        j = cuda.threadIdx.x
        which, c = j // n_slots, j % n_slots
        if j < N_SUMS and (which == 3 or c < n_classes):
            found = ZERO
            for w in range(N_WARPS):
                found += scratch[j * N_WARPS + w]
            partial[(which * n_classes + c) * cuda.gridDim.x + cuda.blockIdx.x] = found

    return held_sums_kernel


def streamed_kernel_of(n_slots, vectors):
    """The kernel that reads the classes twice, some at a time: a part is a warp's pixels."""
    width_of_thread, load_some, _ = access(vectors)

    @cuda.jit(device=True)
    def add(partial, j, part, n_parts, value, begins):
        # The warp's own place; its first lane alone reads and writes it.
        value = warp_sum(value)
        if cuda.threadIdx.x % 32 == 0:
            at = j * n_parts + part
            partial[at] = value if begins else partial[at] + value

    @cuda.jit
    def streamed_sums_kernel(
        logits, target, weight, weighted, partial, n_columns, n_classes, step, ignore_index
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        m = cuda.local.array(MAX_WIDTH, np.float32)
        s = cuda.local.array(MAX_WIDTH, np.float32)
        labels = cuda.local.array(MAX_WIDTH, np.int64)
        width, digits = width_of_thread(logits), vector_width(logits)
        part, n_parts = cuda.grid(1) // 32, np.int64(cuda.gridDim.x) * N_WARPS
        first_of_block = np.int64(cuda.blockIdx.x) * BLOCK_SIZE * width
        begins = True
        while first_of_block < n_columns:  # the same for all lanes, who add up together
            column = first_of_block + cuda.threadIdx.x * width
            inside = column < n_columns
            start = start_of(column, n_classes, step)
            length = n_classes if inside else 0
            loss, pixel_weight = ZERO, ZERO
            for k in range(width):
                m[k], s[k], labels[k] = LOWEST, ZERO, IGNORED
                if inside:
                    labels[k] = index_label(target, column + k, n_classes, ignore_index)
            for first in range(0, length, n_slots):
                load_some(values, n_slots, logits, start, step, first, length, LOWEST)
                for k in range(width):
                    m[k], s[k] = add_online(values, n_slots, k, m[k], s[k], digits)
            for k in range(width):
                if labels[k] >= 0:
                    x = load(logits, start + k + labels[k] * step)
                    found, found_weight = pixel_loss(x, labels[k], m[k], s[k], weight, weighted)
                    loss += found
                    pixel_weight += found_weight
            for first in range(0, n_classes, n_slots):
                load_some(values, n_slots, logits, start, step, first, length, LOWEST)
                for c in range(n_slots):
                    if first + c < n_classes:
                        both, alone, count = ZERO, ZERO, ZERO
                        for k in range(width):
                            if labels[k] == INVALID:
                                alone = NAN
                            if labels[k] >= 0:
                                p = exponential(values[c, k] - m[k], digits) / s[k]
                                alone += p
                                if first + c == labels[k]:
                                    both += p
                                    count += ONE
                        add(partial, first + c, part, n_parts, both, begins)
                        add(partial, n_classes + first + c, part, n_parts, alone, begins)
                        add(partial, 2 * n_classes + first + c, part, n_parts, count, begins)
            add(partial, 3 * n_classes, part, n_parts, loss, begins)
            add(partial, 3 * n_classes + 1, part, n_parts, pixel_weight, begins)
            begins = False
            first_of_block += np.int64(cuda.gridDim.x) * BLOCK_SIZE * width

    return streamed_sums_kernel


@cuda.jit
def totals_kernel(partial, totals, n_parts):
    # A block for each number: the sum of its parts.
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(32, np.float32)
    first = np.int64(cuda.blockIdx.x) * n_parts
    total = ZERO
    for part in range(cuda.threadIdx.x, n_parts, BLOCK_SIZE):
        total += partial[first + part]
    total = block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        totals[cuda.blockIdx.x] = total


@cuda.jit
def loss_kernel(totals, loss, factors, n_classes, smooth, dice_weight, cross_entropy_weight):
    # One block. factors: of t and of 1 in the derivative by p, for each class, and what a pixel's
    # cross-entropy is multiplied by; see `gradients`.
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(32, np.float32)
    dice_sum, count_sum = ZERO, ZERO
    for c in range(cuda.threadIdx.x, n_classes, BLOCK_SIZE):
        both, alone, count = totals[c], totals[n_classes + c], totals[2 * n_classes + c]
        size = alone + count + smooth
        dice, share = ONE, ZERO  # of a class that nobody has or predicts, without `smooth`
        if size != ZERO:
            dice = (TWO * both + smooth) / size
            share = dice_weight / (size * np.float32(n_classes))
        factors[c] = TWO * share
        factors[n_classes + c] = dice * share
        dice_sum += dice
        count_sum += count
    dice_sum = block_sum(dice_sum, scratch)
    count_sum = block_sum(count_sum, scratch)
    if cuda.threadIdx.x == 0:
        found = dice_weight * (ONE - dice_sum / np.float32(n_classes))
        each = ZERO
        if count_sum != ZERO:
            each = cross_entropy_weight / totals[3 * n_classes + 1]
        if cross_entropy_weight != ZERO and count_sum != ZERO:
            found += each * totals[3 * n_classes]
        factors[2 * n_classes] = each if cross_entropy_weight != ZERO else ZERO
        store(loss, 0, found)
