"""The backward kernels of the Dice loss: dlogits in one pass over the logits.

With a and b the factors that `sums.loss_kernel` leaves for each class, the loss's derivative by p
is b − a·t, so by a pixel's logits it is p·(b − a·t − Σ p·(b − a·t)); and the cross-entropy adds
its weight·(p − t).
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import access, start_of
from course_lib.kernels.blocks.constants import MAX_WIDTH, NAN, ONE, ZERO
from course_lib.kernels.blocks.labels import INVALID, index_label
from course_lib.kernels.blocks.softmax_formulas import exponential
from course_lib.kernels.blocks.softmax_steps import shift_for
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    load,
    vector_width,
    wait_for_previous_kernel,
)


@cuda.jit(device=True)
def logit_gradient(p, factor_t, factor_one, is_label, dot, scale, of_entropy):
    """dlogit of a class: `dot` is Σ p·(b − a·t), `of_entropy` the pixel's weight, both scaled."""
    by_p = factor_one - factor_t if is_label else factor_one
    found = p * (scale * (by_p - dot) + of_entropy)
    return found - of_entropy if is_label else found


@cuda.jit(device=True)
def uncounted(label):
    """dlogit of a pixel that has no label: whatever the logits."""
    return NAN if label == INVALID else ZERO


@cuda.jit(device=True)
def entropy_factor(scale, label, factors, n_classes, weight, weighted):
    if label < 0:
        return ZERO
    each = scale * factors[2 * n_classes]
    return each * load(weight, label) if weighted else each


def backward_kernels_of(n_slots, vectors):
    """(kernel that holds a pixel's classes, kernel that reads them twice)."""
    width_of_thread, load_some, store_one = access(vectors)

    @cuda.jit
    def held_gradient_kernel(
        dloss, logits, target, weight, weighted, factors, dlogits, n_columns, n_classes, step,
        ignore_index,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        labels = cuda.local.array(MAX_WIDTH, np.int32)
        m = cuda.local.array(MAX_WIDTH, np.float32)
        s = cuda.local.array(MAX_WIDTH, np.float32)
        dots = cuda.local.array(MAX_WIDTH, np.float32)
        of_entropy = cuda.local.array(MAX_WIDTH, np.float32)
        width, digits = width_of_thread(logits), vector_width(logits)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            scale = load(dloss, 0)
            start = start_of(column, n_classes, step)
            load_some(values, n_slots, logits, start, step, 0, n_classes, LOWEST)
            for k in range(width):
                label = index_label(target, column + k, n_classes, ignore_index)
                of_entropy[k] = entropy_factor(scale, label, factors, n_classes, weight, weighted)
                labels[k], m[k], s[k], dots[k] = label, LOWEST, ZERO, ZERO
                for c in range(n_slots):
                    m[k] = max(m[k], values[c, k])
            for c in range(n_slots):
                if c < n_classes:
                    factor_t, factor_one = factors[c], factors[n_classes + c]
                    for k in range(width):
                        values[c, k] = exponential(values[c, k] - m[k], digits)
                        s[k] += values[c, k]
                        by_p = factor_one - factor_t if c == labels[k] else factor_one
                        dots[k] += values[c, k] * by_p
            for k in range(width):
                s[k] = ONE / s[k]
                dots[k] *= s[k]
            for c in range(n_slots):
                if c < n_classes:
                    factor_t, factor_one = factors[c], factors[n_classes + c]
                    for k in range(width):
                        found = logit_gradient(
                            values[c, k] * s[k], factor_t, factor_one, c == labels[k], dots[k],
                            scale, of_entropy[k],
                        )  # fmt: skip
                        values[c, k] = found if labels[k] >= 0 else uncounted(labels[k])
                    store_one(dlogits, start + c * step, values[c])

    @cuda.jit
    def streamed_gradient_kernel(
        dloss, logits, target, weight, weighted, factors, dlogits, n_columns, n_classes, step,
        ignore_index,
    ):  # fmt: skip
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        m = cuda.local.array(MAX_WIDTH, np.float32)
        s = cuda.local.array(MAX_WIDTH, np.float32)
        dots = cuda.local.array(MAX_WIDTH, np.float32)
        width, digits = width_of_thread(logits), vector_width(logits)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            scale = load(dloss, 0)
            start = start_of(column, n_classes, step)
            for k in range(width):
                m[k], s[k], dots[k] = LOWEST, ZERO, ZERO
            for first in range(0, n_classes, n_slots):
                load_some(values, n_slots, logits, start, step, first, n_classes, LOWEST)
                for k in range(width):
                    label = index_label(target, column + k, n_classes, ignore_index)
                    top = m[k]
                    for c in range(n_slots):
                        top = max(top, values[c, k])
                    shift = shift_for(top)
                    correction = exponential(m[k] - shift, digits)
                    s[k] *= correction
                    dots[k] *= correction
                    for c in range(n_slots):
                        if first + c < n_classes:
                            e = exponential(values[c, k] - shift, digits)
                            by_p = factors[n_classes + first + c]
                            if first + c == label:
                                by_p -= factors[first + c]
                            s[k] += e
                            dots[k] += e * by_p
                    m[k] = top
            for first in range(0, n_classes, n_slots):
                load_some(values, n_slots, logits, start, step, first, n_classes, LOWEST)
                for k in range(width):
                    label = index_label(target, column + k, n_classes, ignore_index)
                    of_entropy = entropy_factor(
                        scale, label, factors, n_classes, weight, weighted
                    )
                    factor = ONE / s[k]
                    for c in range(n_slots):
                        if first + c < n_classes:
                            p = exponential(values[c, k] - m[k], digits) * factor
                            found = logit_gradient(
                                p, factors[first + c], factors[n_classes + first + c],
                                first + c == label, dots[k] * factor, scale, of_entropy,
                            )  # fmt: skip
                            values[c, k] = found if label >= 0 else uncounted(label)
                for c in range(n_slots):
                    if first + c < n_classes:
                        store_one(dlogits, start + (first + c) * step, values[c])

    return held_gradient_kernel, streamed_gradient_kernel
