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

from course_lib.kernels.cross_entropy import finishing, rows, strided
from course_lib.kernels.cross_entropy.forward_kernels import N_STATS
from course_lib.kernels.operation import AUTO, Ladder
from course_lib.runtime.host import arrays
from course_lib.runtime.host.outputs import output

DTYPES = ("float32", "float16", "bfloat16")
REDUCTIONS = ("mean", "sum", "none")
FORWARD = Ladder(*rows.FORWARD_RUNGS, strided.FORWARD_RUNG)
BACKWARD = Ladder(*rows.BACKWARD_RUNGS, strided.BACKWARD_RUNG)


def forward(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
    variant=AUTO,
):
    """(loss, stats, normaliser): the loss, and what `backward` needs to know of the forward pass.

    logits           (n_rows, n_classes), a class at least where there are rows; or (N, C, d1, …),
                     whose rows are the N·d1·… pixels: these take the rung `strided`
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
    n_rows, n_classes = _check_logits(logits)
    rung = _rung(FORWARD, variant, logits)
    kind = _check_target(target, logits, ignore_index)
    _check_options(logits, weight, label_smoothing, reduction)
    kind, numbers = _numbers(kind, n_classes, ignore_index, label_smoothing)
    logits, target, weight = _contiguous(logits, target, weight)
    loss = arrays.empty(_target_shape(logits) if reduction == "none" else (), like=logits)
    normaliser = arrays.empty((1,), like=logits, dtype="float32")
    stats = rung.launch(
        kind, logits, target, _weights(weight, logits), numbers, loss, normaliser, reduction
    )
    return loss, stats, normaliser


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
    variant=AUTO,
    out=None,
):
    """dlogits, of the shape, dtype and device of `logits`, contiguous.

    `dloss` has the loss's shape and dtype, `stats` and `normaliser` come from `forward`, and the
    rest is what `forward` was given. `out`, if given, receives dlogits.
    Raises as `forward` does.
    """
    n_rows, n_classes = _check_logits(logits)
    rung = _rung(BACKWARD, variant, logits)
    kind = _check_target(target, logits, ignore_index)
    _check_options(logits, weight, label_smoothing, reduction)
    shape, dtype = tuple(logits.shape), arrays.dtype_name(logits)
    dloss_shape = _target_shape(logits) if reduction == "none" else ()
    arrays.require(dloss, "dloss", shape=dloss_shape, dtypes=(dtype,))
    n_kept = n_rows if len(shape) == 2 else 0
    arrays.require(stats, "stats", shape=(n_kept, N_STATS), dtypes=("float32",))
    arrays.require(normaliser, "normaliser", shape=(1,), dtypes=("float32",))
    dloss, stats, logits, target, weight = _contiguous(dloss, stats, logits, target, weight)
    reads = dict(
        dloss=dloss, logits=logits, target=target, stats=stats, normaliser=normaliser, weight=weight
    )
    dlogits = output(out, shape, like=logits, reads=reads)
    if n_rows:
        kind, numbers = _numbers(kind, n_classes, ignore_index, label_smoothing)
        rung.launch(
            kind, dloss, int(reduction == "none"), logits, target, _weights(weight, logits), stats,
            normaliser, dlogits, numbers,
        )  # fmt: skip
    return dlogits


def _rung(ladder, variant, logits):
    """The rung to run; ValueError for one that does not take logits of so many dimensions."""
    n_dims = len(logits.shape)
    rung = ladder.rung(variant, logits, lambda: default_variant(n_dims))
    if (rung.name == "strided") != (n_dims > 2):
        takes = "more than two dimensions" if rung.name == "strided" else "two dimensions"
        raise ValueError(f"variant {variant!r} takes logits of {takes}, not {n_dims}")
    return rung


def default_variant(n_dims):
    """The rung that AUTO takes for logits of so many dimensions."""
    return "strided" if n_dims > 2 else "vectorised"


def _weights(weight, logits):
    # A kernel takes an array in any case; where there are no weights it doesn't read it.
    return (logits, False) if weight is None else (weight, True)


def _numbers(kind, n_classes, ignore_index, label_smoothing):
    """The kind of target with smoothing in mind, and the numbers that every kernel takes."""
    if kind == "indices" and label_smoothing > 0:
        kind = "smoothed"
    keep, spread = 1.0 - label_smoothing, label_smoothing / max(1, n_classes)
    return kind, (n_classes, operator.index(ignore_index), float(keep), float(spread))


def _contiguous(*operands):
    return tuple(None if array is None else arrays.contiguous(array) for array in operands)


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
    n_rows = math.prod(_target_shape(logits))
    if n_rows and shape[1] == 0:
        raise arrays.ArrayError(f"logits need a class at least, but have shape {shape}")
    return n_rows, shape[1]


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


def _check_options(logits, weight, label_smoothing, reduction):
    if weight is not None:
        dtype = arrays.dtype_name(logits)
        arrays.require(weight, "weight", shape=(logits.shape[1],), dtypes=(dtype,))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}; there are {', '.join(REDUCTIONS)}")


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    yield from strided.specialisations(DTYPES)
    for dtype in DTYPES:
        yield from rows.specialisations(dtype)
        yield from finishing.specialisations(dtype)
