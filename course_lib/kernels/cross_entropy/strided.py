"""The rung `strided`: logits (N, C, d1, …), whose classes are not side by side, as they lie.

A thread takes the classes of some neighbouring pixels, 16 bytes of each class at a time
(`blocks.columns`). Forward reads each logit once. Backward saves nothing in between: it makes the
maximum and the sum again from the logits that it has to read anyway. What it reads it holds in
registers; more classes than those hold are read twice.
"""

import math

from course_lib.kernels.blocks.columns import (
    SLOTS,
    STREAM_SLOTS,
    fit_vectors,
    seen_from,
    slots_for,
    width_of,
)
from course_lib.kernels.cross_entropy import finishing
from course_lib.kernels.cross_entropy.forward_kernels import N_STATS
from course_lib.kernels.cross_entropy.strided_kernels import backward_kernels_of, forward_kernel_of
from course_lib.kernels.cross_entropy.targets import KINDS
from course_lib.kernels.operation import Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch

BLOCK_SIZE = 128
MOST_VALUES = 64  # logits that a thread of backward may hold
FORWARD_SLOTS = (2, 4, 8)  # classes that are read at a time
HOW = {True: "vectors", False: "elements"}  # how pixels are read


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


FORWARD_RUNG = Rung(
    "strided", launch_forward, (*FORWARD_KERNELS.values(), *finishing.KERNELS)
)
BACKWARD_RUNG = Rung("strided", launch_backward, tuple(BACKWARD_KERNELS.values()))


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
