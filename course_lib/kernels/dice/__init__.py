"""Soft Dice loss of segmentations, with softmax and cross-entropy in it.

logits are (N, C, d1, …), float32, float16 or bfloat16, computed with in float32; the target has a
class index for each pixel (N, d1, …), or `ignore_index`. With p the softmax over the classes, t the
target as 0 and 1, and sums over the pixels that are not ignored,

    dice of a class = (2·Σ p·t + smooth) / (Σ p + Σ t + smooth)
    loss = dice_weight·(1 − mean of the classes' dice) + cross_entropy_weight·cross-entropy

With `n` logits of `s` bytes forward must move n·s bytes (read the logits) and the target, backward
2·n·s (read them again, write dlogits) and the target; between the two, 2·C + 1 numbers are kept.
Made of softmax, one-hot targets, products and sums in eager PyTorch, it moves about ten times as
much. An exponential for each logit in each direction; memory is the limit.

======== ============================================== =========================================
rung     forward                                        backward
======== ============================================== =========================================
`fused`  a thread takes 16 bytes of neighbouring pixels  the same; softmax is made again from the
         for each class, and goes on to further pixels;  logits, in one pass
         sums in registers, added up for a block or a
         warp, then for all; one pass
======== ============================================== =========================================

Up to 16 classes (8 in 16 bits) are held in registers, and in forward up to 24, a pixel a thread.
More are read twice, by kernels of their own.
Classes that are the last axis in memory (channels-last) are read as they lie, a pixel a thread.

An empty class, which no pixel has, has dice smooth/(Σ p + smooth); without `smooth`, and where no
pixel counts, 1. So where every pixel is ignored the loss is 0, and so is the gradient, in the
cross-entropy too (PyTorch's is NaN there). As in `cross_entropy`, an index out of range makes the
loss NaN, and ignored pixels have gradient 0 whatever their logits. Sums are taken in a fixed order:
two runs agree bit for bit. Milletari, Navab and Ahmadi, V-Net (2016).
"""

import math
import operator

from course_lib.kernels.blocks.columns import (
    STREAM_SLOTS,
    fit_vectors,
    seen_from,
    slots_for,
    width_of,
)
from course_lib.kernels.dice import gradients, sums
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.outputs import require_apart

DTYPES = ("float32", "float16", "bfloat16")
#: Numbers that a thread may hold: its pixels of each class, and in forward the class's three sums.
MOST_FORWARD, MOST_BACKWARD = 112, 64
FORWARD_SLOTS, BACKWARD_SLOTS = (2, 4, 8, 16, 24), (4, 8, 16)  # classes that a thread may hold
PIXELS_OF_A_THREAD = 4  # times its width, and more where there are pixels for more blocks than
MOST_BLOCKS = 1 << 12

#: (whether by vectors, classes held; None: read twice) -> kernel.
FORWARD_KERNELS, BACKWARD_KERNELS = {}, {}
for _vectors, _width in ((True, 4), (False, 1)):  # the fewest pixels side by side
    for _n in FORWARD_SLOTS:
        if slots_for(_n, _width + 3, MOST_FORWARD, FORWARD_SLOTS):
            FORWARD_KERNELS[_vectors, _n] = sums.held_kernel_of(_n, _vectors)
    for _n in BACKWARD_SLOTS:
        if slots_for(_n, _width, MOST_BACKWARD, BACKWARD_SLOTS):
            BACKWARD_KERNELS[_vectors, _n] = gradients.backward_kernels_of(_n, _vectors)[0]
    FORWARD_KERNELS[_vectors, None] = sums.streamed_kernel_of(STREAM_SLOTS, _vectors)
    BACKWARD_KERNELS[_vectors, None] = gradients.backward_kernels_of(STREAM_SLOTS, _vectors)[1]


def forward(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    smooth=1.0,
    dice_weight=1.0,
    cross_entropy_weight=0.0,
    variant=AUTO,
):
    """(loss, factors): the loss, and what `backward` needs to know of the forward pass.

    logits                (N, C, d1, …), at least one class; contiguous, or with the classes last in
                          memory, else they are copied
    target                class indices, int64 (N, d1, …)
    weight                (C,), of logits' dtype: what each class counts in the cross-entropy
    ignore_index          pixels with this index count nothing
    smooth                at least 0; added to numerator and denominator of each class's dice
    dice_weight           what the Dice loss is multiplied by
    cross_entropy_weight  and what the mean cross-entropy is

    The loss has logits' dtype and shape (), factors are float32 (2·C + 1,). Raises ArrayError for a
    wrong dtype, shape or device, ValueError for any other wrong argument.
    """
    rung = FORWARD.rung(variant, logits)
    _check(logits, target, weight, smooth)
    logits, columns = _as_columns(logits)
    n_classes = columns[1]
    targets = _ready(target, weight, logits)
    loss = arrays.empty((), like=logits)
    factors = arrays.empty((2 * n_classes + 1,), like=logits, dtype="float32")
    numbers = float(smooth), float(dice_weight), float(cross_entropy_weight)
    rung.launch(logits, columns, targets, operator.index(ignore_index), numbers, loss, factors)
    return loss, factors


def backward(
    dloss,
    logits,
    target,
    factors,
    *,
    weight=None,
    ignore_index=-100,
    variant=AUTO,
    out=None,
):
    """dlogits, of the shape and dtype of `logits`, and lying in memory as they do.

    `dloss` has the loss's dtype and shape (), `factors` come from `forward`, and the rest is what
    `forward` was given. `out`, if given, receives dlogits. Raises as `forward` does.
    """
    rung = BACKWARD.rung(variant, logits)
    _check(logits, target, weight, 0.0)
    dtype = arrays.dtype_name(logits)
    arrays.require(dloss, "dloss", shape=(), dtypes=(dtype,))
    n_factors = 2 * logits.shape[1] + 1
    arrays.require(factors, "factors", shape=(n_factors,), dtypes=("float32",))
    logits, columns = _as_columns(logits)
    targets = _ready(target, weight, logits)
    dlogits = arrays.empty_like(logits) if out is None else out
    if out is not None:
        arrays.require(out, "out", shape=tuple(logits.shape), dtypes=(dtype,), writable=True)
        if not arrays.same_layout(out, logits):
            raise arrays.ArrayError(
                f"out has strides {arrays.strides_of(out)}, but logits have "
                f"{arrays.strides_of(logits)}"
            )
        target, weights, weighted = targets
        reads = dict(dloss=dloss, logits=logits, target=target, factors=factors)
        require_apart(out, reads | dict(weight=weights if weighted else None))
    if columns[0]:
        ignored = operator.index(ignore_index)
        rung.launch(dloss, logits, columns, targets, ignored, factors, dlogits)
    return dlogits


def _as_columns(logits):
    """(logits, (pixels, classes, step)): as they lie, or copied where they have gaps."""
    shape = tuple(logits.shape)
    if arrays.is_contiguous_array(logits):
        return logits, seen_from(shape, 1)
    strides = arrays.strides_of(logits)
    n, c, *others = range(len(shape))
    last = [n, *others, c]
    if arrays.is_contiguous([shape[a] for a in last], [strides[a] for a in last], 1):
        return logits, (math.prod(shape) // shape[1], shape[1], 1)
    return arrays.contiguous(logits), seen_from(shape, 1)


def _ready(target, weight, logits):
    """(target, weights, whether there are any); a kernel takes an array in any case."""
    weighted = weight is not None
    return arrays.contiguous(target), arrays.contiguous(weight) if weighted else logits, weighted


def _check(logits, target, weight, smooth):
    arrays.require(logits, "logits", dtypes=DTYPES)
    shape = tuple(logits.shape)
    if len(shape) < 2 or shape[1] == 0:
        raise arrays.ArrayError(f"logits must be (N, C, …) with a class at least, not {shape}")
    N, n_classes, *others = shape
    arrays.require(target, "target", shape=(N, *others), dtypes=("int64",))
    if weight is not None:
        dtype = arrays.dtype_name(logits)
        arrays.require(weight, "weight", shape=(n_classes,), dtypes=(dtype,))
    if not 0 <= smooth < math.inf:
        raise ValueError(f"smooth must be a number from 0 on, not {smooth}")


# `targets` are the target, the weights and whether there are any.


def _launch_forward(logits, columns, targets, ignored, numbers, loss, factors):
    n_columns, n_classes, step = columns
    totals = arrays.empty((3 * n_classes + 2,), like=logits, dtype="float32")
    vectors, width, held = forward_way(logits, n_classes, step)
    n_blocks = max(1, min(MOST_BLOCKS, math.ceil(
        n_columns / (sums.BLOCK_SIZE * width * PIXELS_OF_A_THREAD)
    )))  # fmt: skip
    n_parts = 0
    if n_columns:
        n_parts = n_blocks if held else n_blocks * sums.N_WARPS
    partial = arrays.empty((arrays.size_of(totals) * n_parts,), like=logits, dtype="float32")
    if n_columns:
        launch(
            FORWARD_KERNELS[vectors, held], n_blocks, sums.BLOCK_SIZE,
            logits, *targets, partial, *columns, ignored, flat=True, overlap=True,
        )  # fmt: skip
    launch(
        sums.totals_kernel, arrays.size_of(totals), sums.BLOCK_SIZE, partial, totals, n_parts,
        flat=True, overlap=True,
    )  # fmt: skip
    launch(
        sums.loss_kernel, 1, sums.BLOCK_SIZE, totals, loss, factors, n_classes, *numbers,
        flat=True, overlap=True,
    )  # fmt: skip


def forward_way(logits, n_classes, step):
    """(whether by vectors, pixels side by side, classes that are held; None: read twice).

    Reading a pixel at a time costs less than reading all twice.
    """
    ways = [False]
    if fit_vectors(step, (logits,)):
        ways = [True, False]
    for vectors in ways:
        width = width_of(logits, vectors)
        if held := slots_for(n_classes, width + 3, MOST_FORWARD, FORWARD_SLOTS):
            return vectors, width, held
    return ways[0], width_of(logits, ways[0]), None


def _launch_backward(dloss, logits, columns, targets, ignored, factors, dlogits):
    n_columns, n_classes, step = columns
    vectors = fit_vectors(step, (logits, dlogits))
    width = width_of(logits, vectors)
    held = slots_for(n_classes, width, MOST_BACKWARD, BACKWARD_SLOTS)
    launch(
        BACKWARD_KERNELS[vectors, held], math.ceil(n_columns / (sums.BLOCK_SIZE * width)),
        sums.BLOCK_SIZE, dloss, logits, *targets, factors, dlogits, *columns, ignored,
        flat=True, overlap=True,
    )  # fmt: skip


FORWARD = Ladder(
    Rung(
        "fused", _launch_forward,
        (*FORWARD_KERNELS.values(), sums.totals_kernel, sums.loss_kernel),
    ),
    auto="fused",
)  # fmt: skip
BACKWARD = Ladder(
    Rung("fused", _launch_backward, tuple(BACKWARD_KERNELS.values())), auto="fused"
)


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    row = ("float32", 1)
    yield "dice totals", sums.totals_kernel, [row, row, "int64"]
    for dtype in DTYPES:
        array, pixels = (dtype, 1), ["int64"] * 4
        inputs = [array, ("int64", 1), array, "boolean"]
        types = [row, array, row, "int64", *["float32"] * 3]
        yield f"dice loss {dtype}", sums.loss_kernel, types
        tables = (
            ("forward", FORWARD_KERNELS, 3, MOST_FORWARD, FORWARD_SLOTS, [*inputs, row, *pixels]),
            ("backward", BACKWARD_KERNELS, 0, MOST_BACKWARD, BACKWARD_SLOTS,
             [array, *inputs, row, array, *pixels]),
        )  # fmt: skip
        for name, kernels, more, most, slots, types in tables:
            for (vectors, held), kernel in kernels.items():
                width = (4 if dtype == "float32" else 8) if vectors else 1
                if held and slots_for(held, width + more, most, slots) is None:
                    continue
                label = f"{held} held" if held else "streamed"
                how = "vectors" if vectors else "elements"
                yield f"dice {name}, {label}, {how}, {dtype}", kernel, types
