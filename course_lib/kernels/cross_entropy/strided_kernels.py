"""The kernels of the rung `strided`, for each kind of target."""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import access, start_of
from course_lib.kernels.blocks.constants import MAX_WIDTH, NAN, ONE, ZERO
from course_lib.kernels.blocks.labels import IGNORED, INVALID
from course_lib.kernels.blocks.softmax_formulas import exponential
from course_lib.kernels.blocks.softmax_steps import shift_for
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    block_sum,
    load,
    vector_width,
    wait_for_previous_kernel,
)


def forward_kernel_of(kind, n_slots, vectors):
    """The forward kernel for one kind of target, reading `n_slots` classes at a time."""
    _, HAS_SHARES, label_of, share_of, *_ = kind
    width_of_thread, load_some, _ = access(vectors)

    @cuda.jit(device=True)
    def add_classes(values, k, m, s, mass, moment, first, n_classes, digits, weight, weighted,
                    target, keep, spread):  # fmt: skip
        """m, s, mass and moment (see `forward_kernels`) with some classes of pixel k added."""
        top = m
        for c in range(n_slots):
            top = max(top, values[c, k])
        shift = shift_for(top)
        s *= exponential(m - shift, digits)
        if HAS_SHARES:
            moment += mass * (shift_for(m) - shift)
        for c in range(n_slots):
            s += exponential(values[c, k] - shift, digits)
            if HAS_SHARES and first + c < n_classes:
                share = share_of(target, weight, weighted, 0, first + c, keep, spread)
                mass += share
                moment += share * (values[c, k] - shift)
        return top, s, mass, moment

    @cuda.jit
    def strided_kernel(
        logits, target, weight, weighted, losses, weights, n_columns, n_classes, step,
        ignore_index, keep, spread, summed,
    ):  # fmt: skip
        # `summed`: a block leaves the sums of its losses and of its weights; else a loss a pixel.
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch = cuda.shared.array(32, np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        m = cuda.local.array(MAX_WIDTH, np.float32)
        s = cuda.local.array(MAX_WIDTH, np.float32)
        mass = cuda.local.array(MAX_WIDTH, np.float32)
        moment = cuda.local.array(MAX_WIDTH, np.float32)
        width, digits = width_of_thread(logits), vector_width(logits)
        column = np.int64(cuda.grid(1)) * width
        total, total_weight = ZERO, ZERO
        if column < n_columns:
            start = start_of(column, n_classes, step)
            for k in range(width):
                m[k], s[k], mass[k], moment[k] = LOWEST, ZERO, ZERO, ZERO
            for first in range(0, n_classes, n_slots):
                load_some(values, n_slots, logits, start, step, first, n_classes, LOWEST)
                for k in range(width):
                    m[k], s[k], mass[k], moment[k] = add_classes(
                        values, k, m[k], s[k], mass[k], moment[k], first, n_classes, digits,
                        weight, weighted, target, keep, spread,
                    )  # fmt: skip
            for k in range(width):
                label = label_of(target, column + k, n_classes, ignore_index)
                loss, pixel_weight = NAN, NAN
                if label == IGNORED:
                    loss, pixel_weight = ZERO, ZERO
                if label >= 0:
                    log_sum = math.log(s[k])
                    pixel_weight = load(weight, label) if weighted else ONE
                    x = load(logits, start + k + label * step)
                    loss = keep * pixel_weight * (m[k] - x + log_sum)
                    if HAS_SHARES:
                        loss += mass[k] * log_sum - moment[k]
                if not summed:
                    losses[column + k] = loss
                total += loss
                total_weight += pixel_weight
        if summed:
            total = block_sum(total, scratch)
            total_weight = block_sum(total_weight, scratch)
            if cuda.threadIdx.x == 0:
                losses[cuda.blockIdx.x] = total
                weights[cuda.blockIdx.x] = total_weight

    return strided_kernel


def backward_kernels_of(kind, n_slots, vectors):
    """(kernel that holds a pixel's classes, kernel that reads them twice)."""
    _, HAS_SHARES, label_of, share_of, *_ = kind
    width_of_thread, load_some, store_one = access(vectors)

    @cuda.jit(device=True)
    def share_sum(n_classes, target, weight, weighted, keep, spread):
        """The sum of all shares, which every pixel has."""
        total = ZERO
        if HAS_SHARES:
            for c in range(n_classes):
                total += share_of(target, weight, weighted, 0, c, keep, spread)
        return total

    @cuda.jit(device=True)
    def factors(label, scale, total, weight, weighted, shares, keep):
        """(of exp(x − m), of a share, of the label) for a pixel: see `backward_kernels`."""
        if label == IGNORED:
            return ZERO, ZERO, ZERO
        if label == INVALID:
            return NAN, NAN, NAN
        of_label = keep * (load(weight, label) if weighted else ONE)
        return scale * (of_label + shares) / total, scale, scale * of_label

    @cuda.jit(device=True)
    def gradient(x, m, share, is_label, label, found, digits):
        of_exp, of_share, of_label = found
        dx = of_exp * exponential(x - m, digits)
        if HAS_SHARES:
            dx -= of_share * share
        if is_label:
            dx -= of_label
        return ZERO if label == IGNORED else dx  # of those whatever the logits

    @cuda.jit
    def held_kernel(
        dloss, dloss_step, logits, target, weight, weighted, normaliser, dlogits, n_columns,
        n_classes, step, ignore_index, keep, spread,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        labels = cuda.local.array(MAX_WIDTH, np.int32)
        m = cuda.local.array(MAX_WIDTH, np.float32)
        of_exp = cuda.local.array(MAX_WIDTH, np.float32)
        of_share = cuda.local.array(MAX_WIDTH, np.float32)
        of_label = cuda.local.array(MAX_WIDTH, np.float32)
        width, digits = width_of_thread(logits), vector_width(logits)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            start = start_of(column, n_classes, step)
            shares = share_sum(n_classes, target, weight, weighted, keep, spread)
            load_some(values, n_slots, logits, start, step, 0, n_classes, LOWEST)
            for k in range(width):
                label = label_of(target, column + k, n_classes, ignore_index)
                scale = load(dloss, (column + k) * dloss_step) / normaliser[0]
                labels[k], m[k], total = label, LOWEST, ZERO
                for c in range(n_slots):
                    m[k] = max(m[k], values[c, k])
                for c in range(n_slots):
                    total += exponential(values[c, k] - m[k], digits)
                of_exp[k], of_share[k], of_label[k] = factors(
                    label, scale, total, weight, weighted, shares, keep
                )
            for c in range(n_slots):
                if c < n_classes:
                    share = share_of(target, weight, weighted, 0, c, keep, spread)
                    for k in range(width):
                        found = of_exp[k], of_share[k], of_label[k]
                        values[c, k] = gradient(
                            values[c, k], m[k], share, c == labels[k], labels[k], found, digits
                        )
                    store_one(dlogits, start + c * step, values[c])

    @cuda.jit
    def streamed_kernel(
        dloss, dloss_step, logits, target, weight, weighted, normaliser, dlogits, n_columns,
        n_classes, step, ignore_index, keep, spread,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        m = cuda.local.array(MAX_WIDTH, np.float32)
        s = cuda.local.array(MAX_WIDTH, np.float32)
        width, digits = width_of_thread(logits), vector_width(logits)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            start = start_of(column, n_classes, step)
            shares = share_sum(n_classes, target, weight, weighted, keep, spread)
            for k in range(width):
                m[k], s[k] = LOWEST, ZERO
            for first in range(0, n_classes, n_slots):
                load_some(values, n_slots, logits, start, step, first, n_classes, LOWEST)
                for k in range(width):
                    top = m[k]
                    for c in range(n_slots):
                        top = max(top, values[c, k])
                    shift = shift_for(top)
                    s[k] *= exponential(m[k] - shift, digits)
                    for c in range(n_slots):
                        s[k] += exponential(values[c, k] - shift, digits)
                    m[k] = top
            for first in range(0, n_classes, n_slots):
                load_some(values, n_slots, logits, start, step, first, n_classes, LOWEST)
                for k in range(width):
                    label = label_of(target, column + k, n_classes, ignore_index)
                    scale = load(dloss, (column + k) * dloss_step) / normaliser[0]
                    found = factors(label, scale, s[k], weight, weighted, shares, keep)
                    for c in range(n_slots):
                        if first + c < n_classes:
                            share = share_of(
                                target, weight, weighted, 0, first + c, keep, spread
                            )
                            values[c, k] = gradient(
                                values[c, k], m[k], share, first + c == label, label, found, digits
                            )
                for c in range(n_slots):
                    if first + c < n_classes:
                        store_one(dlogits, start + (first + c) * step, values[c])

    return held_kernel, streamed_kernel
