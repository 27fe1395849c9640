"""Softmax and cross-entropy in one, as an operator of PyTorch."""

import torch
import torch.nn.functional as F
from torch.nn import _reduction

from course_lib.kernels import cross_entropy as kernels
from course_lib.ops.checks import number, require, require_tensor, whole
from course_lib.ops.registration import (
    Operator,
    as_float32,
    gradient_by_torch,
    require_floating_point,
)
from course_lib.runtime.host.launch_cache import cached_launch

_OPTIONS = "Tensor? weight, int ignore_index, str reduction, float label_smoothing"


def _check_rows(logits, target, weight, ignore_index, reduction, label_smoothing):
    """What the operator takes: rows or images of logits, and targets that need no conversion."""
    if logits.dim() < 2 or target.is_floating_point():
        require(logits, "logits", n_dims=2)
    _check(logits, target, weight, ignore_index, reduction, label_smoothing)
    if not target.is_floating_point():
        require(target, "target", shape=_without_classes(logits), dtypes=(torch.int64,))
    for name, tensor in (("weight", weight), ("target of probabilities", target)):
        wrong = tensor is not None and tensor.is_floating_point() and tensor.dtype != logits.dtype
        if wrong:
            raise RuntimeError(
                f"expected scalar type {logits.dtype} but found {tensor.dtype}: {name} must have "
                "input's dtype"
            )


def _check_backward(grad_output, logits, target, stats, normaliser, *options):
    _check_rows(logits, target, *options)
    _, _, reduction, _ = options
    shape = _without_classes(logits) if reduction == "none" else ()
    require(grad_output, "grad_output", shape=shape, dtypes=(logits.dtype,))
    for name, saved, like in zip(
        ("stats", "normaliser"), (stats, normaliser), _fake_saved(logits), strict=True
    ):
        require(saved, name, shape=like.shape, dtypes=(like.dtype,))


@cached_launch(3)
def _kernel(logits, target, weight, ignore_index, reduction, label_smoothing):
    return kernels.forward(
        logits, target, weight=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


@cached_launch(6)
def _backward_kernel(
    grad_output, logits, target, stats, normaliser, weight, ignore_index, reduction, label_smoothing
):
    return kernels.backward(
        grad_output, logits, target, stats, normaliser, weight=weight, ignore_index=ignore_index,
        reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip


def _by_torch(logits, target, *options):
    # What only our backward kernels read are zeros.
    return _loss_by_torch(logits, target, *options), *map(torch.zeros_like, _fake_saved(logits))


def _loss_by_torch(logits, target, weight, ignore_index, reduction, label_smoothing):
    return F.cross_entropy(
        logits, target, weight=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


def _backward_by_torch(grad_output, logits, target, stats, normaliser, *options):
    found = gradient_by_torch(
        lambda logits: _loss_by_torch(logits, target, *options), logits, grad_output
    )
    if not target.is_floating_point():  # PyTorch's of an ignored row is NaN if its logits are
        _, ignore_index, *_ = options
        found.masked_fill_((target == ignore_index).unsqueeze(1), 0)
    return found.contiguous()


def _without_classes(logits):
    return logits.shape[0], *logits.shape[2:]


def _fake_saved(logits):
    n_rows = logits.shape[0] if logits.dim() == 2 else 0
    return (
        logits.new_empty((n_rows, kernels.N_STATS), dtype=torch.float32),
        logits.new_empty((1,), dtype=torch.float32),
    )


def _fake(logits, target, weight, ignore_index, reduction, label_smoothing):
    shape = _without_classes(logits) if reduction == "none" else ()
    return logits.new_empty(shape), *_fake_saved(logits)


def _fake_backward(grad_output, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx, inputs, outputs):
    logits, target, weight, *ctx.options = inputs
    _, stats, normaliser = outputs
    ctx.mark_non_differentiable(stats, normaliser)
    ctx.save_for_backward(logits, target, stats, normaliser, weight)


def _gradient(ctx, grad_output, *_):
    _, needs_target, needs_weight = ctx.needs_input_grad[1:4]
    if needs_target or needs_weight:
        name = "target" if needs_target else "weight"
        raise RuntimeError(
            f"course_lib.cross_entropy has no gradient for its {name}: detach it, or use "
            "torch.nn.functional.cross_entropy"
        )
    *saved, weight = ctx.saved_tensors
    dlogits = _backward(grad_output, *saved, weight, *ctx.options)
    return dlogits, None, None, None, None, None


def _in_float32(logits, target, weight, *options):
    return as_float32(logits), as_float32(target), as_float32(weight), *options


_backward = Operator(
    "cross_entropy_backward",
    "(Tensor grad_output, Tensor logits, Tensor target, Tensor stats, Tensor normaliser, "
    f"{_OPTIONS}) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="CrossEntropyBackward",
)
_cross_entropy = Operator(
    "cross_entropy",
    f"(Tensor logits, Tensor target, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check_rows,
    save=_save,
    gradient=_gradient,
    title="CrossEntropy",
    autocast={"cuda": _in_float32, "cpu": _in_float32},
)


def cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """Cross-entropy of logits and targets, as `torch.nn.functional.cross_entropy`.

    input   logits (C,), (N, C) or (N, C, d1, …); float32, float16 or bfloat16. Of more than two
            dimensions they are read as they lie, contiguous or channels-last; for probabilities
            as targets they are copied, because those kernels take a row's classes side by side
    target  class indices, int64 or uint8, of input's shape without C; or probabilities of input's
            own shape and dtype
    weight  (C,), of input's dtype: what each class counts

    All other arguments as in PyTorch (`size_average` and `reduce`, with a warning, stand for a
    `reduction`), and so are the errors, but for three: on a GPU an index out of range makes the
    loss NaN (PyTorch stops the GPU), and probabilities of another dtype and a negative smoothing
    are refused. Only `input` has a gradient; second gradients raise RuntimeError.
    Under autocast all is float32, for which the logits are copied. Notebook 05.
    """
    require_tensor(input, "input")
    require_tensor(target, "target")
    if weight is not None:
        require_tensor(weight, "weight")
    require_floating_point("cross_entropy", input.dtype, torch.float64)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    ignore_index = whole(ignore_index, "ignore_index")
    label_smoothing = number(label_smoothing, "label_smoothing")
    n_classes = _check(input, target, weight, ignore_index, reduction, label_smoothing)
    soft = target.is_floating_point()
    shape = input.shape[:-1] if input.dim() < 3 else (input.shape[0], *input.shape[2:])
    if input.dim() < 2 or input.dim() > 2 and (soft or _has_classes_last(input)):
        input, target = _as_rows(input, n_classes), _as_rows(target, n_classes, soft)
    if target.dtype is torch.uint8:
        target = target.long()
    options = weight, ignore_index, reduction, label_smoothing
    loss, _, _ = _cross_entropy(input, target, *options)
    return loss.reshape(shape) if reduction == "none" else loss


def _has_classes_last(x):
    """Whether the classes lie side by side in memory, so that rows need no copy."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _as_rows(x, n_classes, has_classes=True):
    if not has_classes:
        return x.reshape(-1)
    return (x.movedim(1, -1) if x.dim() > 2 else x).reshape(-1, n_classes)


def _check(input, target, weight, ignore_index, reduction, label_smoothing):
    """Raise what PyTorch raises for arguments that do not go together. Returns C."""
    if reduction not in kernels.REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if input.dim() == 0:
        raise RuntimeError("input must have a dimension of classes, but is 0-dimensional")
    n_classes = input.shape[min(1, input.dim() - 1)]
    if weight is not None and tuple(weight.shape) != (n_classes,):
        raise RuntimeError(
            f"weight tensor should be defined either for all {n_classes} classes or no classes but "
            f"got weight tensor of shape: {list(weight.shape)}"
        )
    if target.is_floating_point() and target.shape == input.shape:
        if ignore_index >= 0:
            raise RuntimeError("ignore_index is not supported for floating point target")
        return n_classes
    if target.shape == input.shape:
        raise RuntimeError(
            "Expected floating point type for target with class probabilities, got "
            f"{target.dtype}: class indices have the shape of input without its classes"
        )
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(
            f"expected target dtype to be Long or Byte, but got {target.dtype}; probabilities must "
            f"have the shape of input, {list(input.shape)}, not {list(target.shape)}"
        )
    _check_indices(input, target)
    return n_classes


def _check_indices(input, target):
    if input.dim() > 2:
        wanted = [input.shape[0], *input.shape[2:]]
        if list(target.shape) != wanted:
            raise RuntimeError(f"Expected target size {wanted}, got {list(target.shape)}")
    elif target.dim() > 1:
        raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
    else:
        n_rows = input.shape[0] if input.dim() == 2 else 1
        if (target.dim() or input.dim() == 2) and list(target.shape) != [n_rows]:
            raise ValueError(
                f"Expected input batch_size ({n_rows}) to match target batch_size "
                f"({target.numel()})."
            )
