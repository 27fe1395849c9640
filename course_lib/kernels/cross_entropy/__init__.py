"""Softmax and cross-entropy in one: the loss of classifiers, without a tensor of probabilities.

logits are (n_rows, n_classes), float32, float16 or bfloat16, computed with in float32. With `s`
bytes an element the forward pass must move n_rows·n_classes·s bytes (read the logits), the
backward pass twice as many (read them again, write dlogits); between the two, 16 bytes a row are
kept. That makes three arrays of logits' size in all, five with probabilities as targets. Eager
PyTorch moves at least six for class indices: it writes log-softmax and reads it again, and so it
does with that one's gradient, which is 0 but for one element a row. An exponential for each element
in each direction; memory is the limit.

============ ===================================== ============================================
rung         forward                               backward
============ ===================================== ============================================
`naive`      a thread for each row, which passes   a thread for each row
             over it three times
`online`     a block for each row, an element at   a block for each row, an element at a time
             a time; one pass
`vectorised` some lanes or a block for each row,   the same; several blocks for each row where
             16 bytes at a time, several loads in  there are few
             flight; one pass
`strided`    for logits (N, C, d1, …) alone: a     the same; the maximum and the sum are made
             thread for 16 bytes of neighbouring   again, nothing is kept between the two. Over
             pixels' classes; one pass             16 classes (8 in 16 bits) are read twice
============ ===================================== ============================================

Targets are class indices or probabilities, with class weights, label smoothing, an index to ignore
and the reductions as in `torch.nn.functional.cross_entropy`; `targets` has the formulas. Values
that are not finite behave as in PyTorch: a row with NaN or +inf, or of nothing but -inf, has a NaN
loss and gradient; a class masked by -inf takes no part, unless the target gives it a share (the
loss is +inf) or the probability 0 (NaN, being 0·inf). Two things differ, on purpose:

- A class index outside of 0 … n_classes - 1 that is not `ignore_index` makes the row's loss and
  gradient NaN, and with the mean those of all rows. PyTorch stops the process's use of the GPU.
- An ignored row has gradient 0 whatever its logits, which are not even read; in PyTorch NaN logits
  give it a NaN gradient.

Sums are taken in a fixed order: two runs agree bit for bit. Online pass: Milakov and Gimelshein,
2018. Derivation: notebook 05.
"""

import math
import operator

from course_lib.kernels.cross_entropy import backward_kernels, forward_kernels, strided
from course_lib.kernels.cross_entropy.forward_kernels import (
    BLOCK_SIZE,
    FINISH_BLOCK_SIZE,
    MEAN,
    N_STATS,
    PARTIAL,
    SUM,
    finish_kernel,
    round_kernel,
)
from course_lib.kernels.cross_entropy.targets import KINDS
from course_lib.runtime import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.launch import launch
from course_lib.runtime.outputs import output

DTYPES = ("float32", "float16", "bfloat16")
REDUCTIONS = ("mean", "sum", "none")
DEFAULT = "vectorised"  # of logits (n_rows, n_classes); of others the only rung is STRIDED
STRIDED = "strided"
ENOUGH_THREADS = 132 * 512  # keep the largest chip of today busy
LANES_UP_TO = 512  # vectors of a row that one warp's lanes read at most
PER_LANE, PER_THREAD = 4, 16  # vectors of a row that a lane, a thread of a block, reads about
LEAST_BLOCK, MOST_BLOCK = 128, 512  # threads
FEWER_ROWS_MOST_BLOCK = 1024
MOST_TEAM = 1 << 14  # threads that share a row in the backward pass
ROWS_PER_SUM = 1 << 14  # losses that one block sums

#: Kind of target -> rung -> kernel.
FORWARD_KERNELS = {name: forward_kernels.make_forward_kernels(kind) for name, kind in KINDS.items()}
BACKWARD_KERNELS = {
    name: backward_kernels.make_backward_kernels(kind) for name, kind in KINDS.items()
}
VARIANTS = FORWARD_KERNELS["indices"]
BACKWARD_VARIANTS = BACKWARD_KERNELS["indices"]


def forward(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
    variant=DEFAULT,
):
    """(loss, stats, normaliser): the loss, and what `backward` needs to know of the forward pass.

    logits           (n_rows, n_classes), at least one class; or (N, C, d1, …), whose rows are the
                     N·d1·… pixels: these take the rung `strided`
    target           class indices, int64 (n_rows,) or (N, d1, …); or probabilities of logits' dtype
                     and shape, for logits of two dimensions alone
    weight           (n_classes,), of logits' dtype: what each class counts
    ignore_index     rows with this index count nothing; for indices only
    label_smoothing  from 0 to 1: how much of the target is spread evenly over the classes
    reduction        "mean" (by weight, where rows have class indices), "sum" or "none"

    The loss has logits' dtype, shape () or without a reduction that of class indices. `stats`,
    float32 (n_rows, 4), has a row's largest logit m, Σ exp(x − m), the sum of its target and its
    weight in the mean; an ignored row has zeros. The first two stay apart because their
    log-sum-exp, rounded, would lose the gradient's last digits where logits are large. `strided`
    keeps none: its stats are (0, 4). `normaliser`, float32 (1,), is what the sum of the losses was
    divided by. The mean over nothing is NaN, as in PyTorch.

    Raises ArrayError for a wrong dtype, shape or device, ValueError for any other wrong argument.
    Arrays that are not contiguous are copied first.
    """
    variant = _chosen(variant, logits)
    n_rows, n_classes = _check_logits(logits)
    kind = _check_target(target, logits, ignore_index)
    _check_options(logits, weight, label_smoothing, reduction, variant, VARIANTS)
    kind, numbers = _numbers(kind, n_classes, ignore_index, label_smoothing)
    logits, target, weight = _contiguous(logits, target, weight)
    dtype = arrays.dtype_name(logits)
    shape = _target_shape(logits) if reduction == "none" else ()
    loss = arrays.empty(shape, like=logits)
    n_kept = 0 if variant == STRIDED else n_rows
    stats = arrays.empty((n_kept, N_STATS), like=logits, dtype="float32")
    normaliser = arrays.empty((1,), like=logits, dtype="float32")
    in_place = reduction == "none" and dtype == "float32"
    if variant == STRIDED and reduction != "none":
        n_losses = strided.n_blocks_of(logits)
    else:
        n_losses = n_rows
    losses = loss if in_place else arrays.empty((n_losses,), like=logits, dtype="float32")
    weights, weight_step = stats, N_STATS
    if variant == STRIDED:  # which writes no weights where they are not summed
        weights, weight_step = losses, 1
        if reduction != "none":
            weights = arrays.empty((n_losses,), like=logits, dtype="float32")
    if n_rows and variant == STRIDED:
        strided.launch_forward(
            kind, logits, target, _weights(weight, logits), losses, weights, numbers,
            reduction != "none",
        )  # fmt: skip
    elif n_rows:
        operands = (logits, target, *_weights(weight, logits), stats, losses, *numbers)
        kernel = FORWARD_KERNELS[kind][variant]
        if variant == "vectorised":
            team, block = plan(n_rows, n_classes * logits.dtype.itemsize)
            offset = _offset(logits, *_soft(kind, target))
            launch(
                kernel, math.ceil(n_rows * team / block), block,
                *operands, offset, team.bit_length() - 1, flat=True, overlap=True,
            )  # fmt: skip
        else:
            n_blocks = math.ceil(n_rows / BLOCK_SIZE) if variant == "naive" else n_rows
            launch(kernel, n_blocks, BLOCK_SIZE, *operands, flat=True)
    if reduction == "none":
        _launch_round(losses, loss, normaliser)
    else:
        mode = MEAN if reduction == "mean" else SUM
        _launch_finish(losses, weights, weight_step, loss, normaliser, mode)
    return loss, stats, normaliser


def _launch_round(losses, loss, normaliser):
    n = 0 if loss is losses else arrays.size_of(loss)
    launch(
        round_kernel, max(1, math.ceil(n / BLOCK_SIZE)), BLOCK_SIZE,
        losses, loss, normaliser, n, flat=True, overlap=True,
    )  # fmt: skip


def _launch_finish(losses, weights, step, loss, normaliser, mode):
    n = arrays.size_of(losses)
    while n > ROWS_PER_SUM:
        n_blocks = math.ceil(n / ROWS_PER_SUM)
        sums = [arrays.empty((n_blocks,), like=losses) for _ in range(2)]
        launch(
            finish_kernel, n_blocks, FINISH_BLOCK_SIZE,
            losses, weights, step, *sums, ROWS_PER_SUM, PARTIAL, flat=True, overlap=True,
        )  # fmt: skip
        (losses, weights), step, n = sums, 1, n_blocks
    launch(
        finish_kernel, 1, FINISH_BLOCK_SIZE,
        losses, weights, step, loss, normaliser, n, mode, flat=True, overlap=True,
    )  # fmt: skip


def backward(
    dloss,
    logits,
    target,
    stats,
    normaliser,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
    variant=DEFAULT,
    out=None,
):
    """dlogits, of the shape, dtype and device of `logits`, contiguous.

    `dloss` has the loss's shape and dtype, `stats` and `normaliser` come from `forward`, and the
    rest is what `forward` was given. `out`, if given, receives dlogits.
    Raises as `forward` does.
    """
    variant = _chosen(variant, logits)
    n_rows, n_classes = _check_logits(logits)
    kind = _check_target(target, logits, ignore_index)
    _check_options(logits, weight, label_smoothing, reduction, variant, BACKWARD_VARIANTS)
    shape, dtype = tuple(logits.shape), arrays.dtype_name(logits)
    dloss_shape = _target_shape(logits) if reduction == "none" else ()
    arrays.require(dloss, "dloss", shape=dloss_shape, dtypes=(dtype,))
    n_kept = 0 if variant == STRIDED else n_rows
    arrays.require(stats, "stats", shape=(n_kept, N_STATS), dtypes=("float32",))
    arrays.require(normaliser, "normaliser", shape=(1,), dtypes=("float32",))
    dloss, stats, logits, target, weight = _contiguous(dloss, stats, logits, target, weight)
    reads = dict(
        dloss=dloss, logits=logits, target=target, stats=stats, normaliser=normaliser, weight=weight
    )
    dlogits = output(out, shape, like=logits, reads=reads)
    if n_rows == 0:
        return dlogits
    kind, numbers = _numbers(kind, n_classes, ignore_index, label_smoothing)
    if variant == STRIDED:
        strided.launch_backward(
            kind, dloss, int(reduction == "none"), logits, target, _weights(weight, logits),
            normaliser, dlogits, numbers,
        )  # fmt: skip
        return dlogits
    operands = (
        dloss, int(reduction == "none"), logits, target, *_weights(weight, logits), stats,
        normaliser, dlogits, *numbers,
    )  # fmt: skip
    kernel = BACKWARD_KERNELS[kind][variant]
    if variant == "vectorised":
        team, block = plan(n_rows, n_classes * logits.dtype.itemsize, together=False)
        offset = _offset(logits, dlogits, *_soft(kind, target))
        launch(
            kernel, math.ceil(n_rows * team / block), block,
            *operands, offset, team.bit_length() - 1, flat=True, overlap=True,
        )  # fmt: skip
    else:
        n_blocks = math.ceil(n_rows / BLOCK_SIZE) if variant == "naive" else n_rows
        launch(kernel, n_blocks, BLOCK_SIZE, *operands, flat=True)
    return dlogits


def plan(n_rows, n_bytes, together=True):
    """(threads that share a row, threads of a block) for `n_rows` rows of `n_bytes` each.

    `together` says that the threads of a row add something up, so they must be in one block.
    """
    n_vectors = math.ceil(n_bytes / VECTOR_BYTES)
    if n_vectors <= LANES_UP_TO:
        team = min(32, _power_of_two(n_vectors / PER_LANE))
        while n_rows * team < ENOUGH_THREADS and team < min(32, n_vectors):
            team *= 2
    else:
        team = max(LEAST_BLOCK, min(MOST_BLOCK, _power_of_two(n_vectors / PER_THREAD)))
        most = FEWER_ROWS_MOST_BLOCK if together else MOST_TEAM
        while n_rows * team < ENOUGH_THREADS and team < min(most, n_vectors / 2):
            team *= 2
    return team, team if together and team > 32 else BLOCK_SIZE


def _power_of_two(x):
    return 1 << max(0, math.ceil(math.log2(x)))


def _offset(*operands):
    """Elements from the last 16-byte boundary to each of the arrays; -1 where they disagree."""
    offsets = {arrays.address_of(operand) % VECTOR_BYTES for operand in operands}
    return offsets.pop() // operands[0].dtype.itemsize if len(offsets) == 1 else -1


def _soft(kind, target):
    return (target,) if kind == "probabilities" else ()


def _weights(weight, logits):
    # A kernel takes an array in any case; where there are no weights it doesn't read it.
    return (logits, False) if weight is None else (weight, True)


def _numbers(kind, n_classes, ignore_index, label_smoothing):
    """The kind of target with smoothing in mind, and the numbers that every kernel takes."""
    if kind == "indices" and label_smoothing > 0:
        kind = "smoothed"
    keep, spread = 1.0 - label_smoothing, label_smoothing / n_classes
    return kind, (n_classes, operator.index(ignore_index), float(keep), float(spread))


def _contiguous(*operands):
    return tuple(None if array is None else arrays.contiguous(array) for array in operands)


def _chosen(variant, logits):
    """The rung, where it is the one that logits of more than two dimensions have."""
    n_dims = len(getattr(logits, "shape", ()))
    if n_dims > 2 and variant in (DEFAULT, STRIDED):
        return STRIDED
    if n_dims > 2 and variant in VARIANTS:
        raise ValueError(f"variant {variant!r} takes logits of two dimensions, not {n_dims}")
    return variant


def _target_shape(logits):
    """The shape of class indices."""
    N, _, *others = logits.shape
    return (N, *others)


def _check_logits(logits):
    """(number of rows, of classes)."""
    arrays.require(logits, "logits", dtypes=DTYPES)
    shape = tuple(logits.shape)
    if len(shape) < 2:
        raise arrays.ArrayError(f"logits must have 2 dimensions at least, not shape {shape}")
    if shape[1] == 0:
        raise arrays.ArrayError(f"logits need a class at least, but have shape {shape}")
    return math.prod(_target_shape(logits)), shape[1]


def _check_target(target, logits, ignore_index):
    """The kind of target, "indices" or "probabilities"."""
    dtype = arrays.dtype_name(logits)
    arrays.require(target, "target", dtypes=("int64", dtype))
    if arrays.dtype_name(target) == "int64":
        arrays.require(target, "target of class indices", shape=_target_shape(logits))
        return "indices"
    arrays.require(target, "target of probabilities", shape=logits.shape)
    if len(logits.shape) > 2:
        raise arrays.ArrayError(
            "target of probabilities goes with logits of two dimensions, not shape "
            f"{tuple(logits.shape)}: move the classes to the end, and make it (n_rows, n_classes)"
        )
    if ignore_index >= 0:
        raise ValueError(f"ignore_index={ignore_index} means nothing for class probabilities")
    return "probabilities"


def _check_options(logits, weight, label_smoothing, reduction, variant, variants):
    if weight is not None:
        dtype = arrays.dtype_name(logits)
        arrays.require(weight, "weight", shape=(logits.shape[1],), dtypes=(dtype,))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}; there are {', '.join(REDUCTIONS)}")
    if variant not in variants and (variant != STRIDED or len(logits.shape) == 2):
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(variants)}")


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    yield from strided.specialisations(DTYPES)
    row = ("float32", 1)
    for dtype in DTYPES:
        array = (dtype, 1)
        numbers = ["int64", "int64", "float32", "float32"]
        for kind in KINDS:
            target = array if kind == "probabilities" else ("int64", 1)
            inputs = [array, target, array, "boolean"]
            found_dloss = [array, "int64"]
            for variant in VARIANTS:
                split = ["int64"] * 2 if variant == "vectorised" else []
                label = f"cross_entropy {{}} {variant}, {kind} {dtype}"
                types = [*inputs, row, row, *numbers, *split]
                yield label.format("forward"), FORWARD_KERNELS[kind][variant], types
                types = [*found_dloss, *inputs, row, row, array, *numbers, *split]
                yield label.format("backward"), BACKWARD_KERNELS[kind][variant], types
        types = [row, row, "int64", array, row, "int64", "int64"]
        yield f"cross_entropy sum {dtype}", finish_kernel, types
        yield f"cross_entropy round {dtype}", round_kernel, [row, array, row, "int64"]
