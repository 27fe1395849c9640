"""The rung `strided`: logits (N, C, d1, …), whose classes are not side by side, as they lie.

A thread takes the classes of some neighbouring pixels, 16 bytes of each class at a time
(`blocks.columns`). Forward reads each logit once. Backward saves nothing in between: it makes the
maximum and the sum again from the logits that it has to read anyway. What it reads it holds in
registers; more classes than those hold are read twice.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import (
    SLOTS,
    STREAM_SLOTS,
    access,
    fit_vectors,
    seen_from,
    slots_for,
    start_of,
    width_of,
)
from course_lib.kernels.blocks.constants import MAX_WIDTH, NAN, ONE, ZERO
from course_lib.kernels.blocks.labels import IGNORED, INVALID
from course_lib.kernels.blocks.softmax_formulas import exponential
from course_lib.kernels.blocks.softmax_steps import shift_for
from course_lib.kernels.cross_entropy import finishing
from course_lib.kernels.cross_entropy.forward_kernels import N_STATS
from course_lib.kernels.cross_entropy.targets import KINDS
from course_lib.kernels.operation import Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    block_sum,
    load,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 128
MOST_VALUES = 64  # logits that a thread of backward may hold
FORWARD_SLOTS = (2, 4, 8)  # classes that are read at a time
HOW = {True: "vectors", False: "elements"}  # how pixels are read


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


#: (kind of target, whether by vectors, classes at a time or held; None: read twice) -> kernel.
FORWARD_KERNELS, BACKWARD_KERNELS = {}, {}
for _name in ("indices", "smoothed"):
    _kind = KINDS[_name]
    for _vectors in HOW:
        for _n in FORWARD_SLOTS:
            FORWARD_KERNELS[_name, _vectors, _n] = forward_kernel_of(_kind, _n, _vectors)
        for _n in SLOTS:
            BACKWARD_KERNELS[_name, _vectors, _n] = backward_kernels_of(_kind, _n, _vectors)[0]
        _, _streamed = backward_kernels_of(_kind, STREAM_SLOTS, _vectors)
        BACKWARD_KERNELS[_name, _vectors, None] = _streamed


def launch_forward(kind, logits, target, weights, numbers, loss, normaliser, reduction):
    """Fill `loss` and `normaliser`; stats of no row. `weights` and `numbers` as in other rungs."""
    n_columns, n_classes, step = seen_from(tuple(logits.shape), 1)
    vectors = fit_vectors(step, (logits,))
    n_blocks = math.ceil(n_columns / (width_of(logits, vectors) * BLOCK_SIZE))
    summed = reduction != "none"
    losses = finishing.place_for(n_blocks if summed else n_columns, loss, reduction)
    # Where losses are not summed, the kernel writes no weights.
    pixel_weights = arrays.empty((n_blocks,), like=losses) if summed else losses
    if n_columns:
        launch(
            FORWARD_KERNELS[kind, vectors, forward_slots(n_classes)], n_blocks, BLOCK_SIZE,
            logits, target, *weights, losses, pixel_weights, n_columns, n_classes, step,
            *numbers[1:], summed, flat=True, overlap=True,
        )  # fmt: skip
    finishing.finish(losses, pixel_weights, 1, loss, normaliser, reduction)
    return arrays.empty((0, N_STATS), like=losses)


def forward_slots(n_classes):
    """How many classes are read at a time."""
    return next((n for n in FORWARD_SLOTS if n_classes <= n), FORWARD_SLOTS[-1])


def launch_backward(
    kind, dloss, dloss_step, logits, target, weights, stats, normaliser, dlogits, numbers
):
    """Fill dlogits. There is a pixel at least."""
    n_columns, n_classes, step = seen_from(tuple(logits.shape), 1)
    vectors = fit_vectors(step, (logits, dlogits))
    width = width_of(logits, vectors)
    launch(
        BACKWARD_KERNELS[kind, vectors, slots_for(n_classes, width, MOST_VALUES)],
        math.ceil(n_columns / (width * BLOCK_SIZE)), BLOCK_SIZE,
        dloss, dloss_step, logits, target, *weights, normaliser, dlogits, n_columns, n_classes,
        step, *numbers[1:], flat=True, overlap=True,
    )  # fmt: skip


_DECIDES = seen_from, fit_vectors, width_of
FORWARD_RUNG = Rung(
    "strided", launch_forward, (*FORWARD_KERNELS.values(), *finishing.KERNELS),
    (*_DECIDES, forward_slots),
)  # fmt: skip
BACKWARD_RUNG = Rung(
    "strided", launch_backward, tuple(BACKWARD_KERNELS.values()), (*_DECIDES, slots_for)
)


def specialisations(dtypes):
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    row, numbers = ("float32", 1), ["int64"] * 4 + ["float32"] * 2
    for dtype in dtypes:
        array = (dtype, 1)
        inputs = [array, ("int64", 1), array, "boolean"]
        for (kind, vectors, n_slots), kernel in FORWARD_KERNELS.items():
            label = f"cross_entropy forward strided, {n_slots} at a time"
            types = [*inputs, row, row, *numbers, "boolean"]
            yield f"{label}, {HOW[vectors]}, {kind} {dtype}", kernel, types
        width = 4 if dtype == "float32" else 8
        for (kind, vectors, n_slots), kernel in BACKWARD_KERNELS.items():
            each = width if vectors else 1
            if n_slots and slots_for(n_slots, each, MOST_VALUES) is None:
                continue
            label = f"{n_slots} held" if n_slots else "streamed"
            label = f"cross_entropy backward strided, {label}, {HOW[vectors]}, {kind} {dtype}"
            yield label, kernel, [array, "int64", *inputs, row, array, *numbers]
