"""Soft Dice loss, with softmax and cross-entropy in it, as an operator of PyTorch."""

import torch
import torch.nn.functional as F

from course_lib.kernels import dice as kernels
from course_lib.ops.checks import of_sums, require, require_tensor, whole
from course_lib.ops.registration import Operator, as_float32, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_OPTIONS = "Tensor? weight, int ignore_index"
_WEIGHTS = "float smooth, float dice_weight, float cross_entropy_weight"


def _check(logits, target, weight, *_):
    """RuntimeError where shapes and dtypes do not go together."""
    if logits.dim() < 2 or logits.shape[1] == 0:
        raise RuntimeError(
            f"input must be (N, C, …) with a class at least, but has shape {list(logits.shape)}"
        )
    wanted = [logits.shape[0], *logits.shape[2:]]
    if list(target.shape) != wanted:
        raise RuntimeError(f"Expected target size {wanted}, got {list(target.shape)}")
    if target.dtype is not torch.int64:
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype}")
    if weight is not None and list(weight.shape) != [logits.shape[1]]:
        raise RuntimeError(
            f"weight tensor should be defined for all {logits.shape[1]} classes, but has shape "
            f"{list(weight.shape)}"
        )
    if weight is not None and weight.dtype is not logits.dtype:
        raise RuntimeError(
            f"expected scalar type {logits.dtype} but found {weight.dtype}: weight must have "
            "input's dtype"
        )


def _check_backward(grad_output, logits, target, factors, weight, ignore_index):
    _check(logits, target, weight)
    require(grad_output, "grad_output", shape=(), dtypes=(logits.dtype,))
    require(factors, "factors", shape=(2 * logits.shape[1] + 1,), dtypes=(of_sums(logits.dtype),))


@cached_launch(3)
def _kernel(logits, target, weight, ignore_index, smooth, dice_weight, cross_entropy_weight):
    return kernels.forward(
        logits, target, weight=weight, ignore_index=ignore_index, smooth=smooth,
        dice_weight=dice_weight, cross_entropy_weight=cross_entropy_weight,
    )  # fmt: skip


def _backward_kernel(grad_output, logits, target, factors, weight, ignore_index):
    return _gradient_of_logits(grad_output, logits, target, factors, weight, ignore_index)


@cached_launch(5)
def _gradient_of_logits(grad_output, logits, target, factors, weight, ignore_index):
    return kernels.backward(
        grad_output, logits, target, factors, weight=weight, ignore_index=ignore_index
    )


def _parts(logits, target, ignore_index):
    """(pixels that count, p, t), with zeros where a pixel does not count, whatever its logits."""
    valid = target != ignore_index
    t = F.one_hot(target.where(valid, 0), logits.shape[1]).movedim(-1, 1).to(logits.dtype)
    here = valid.unsqueeze(1)
    return valid, torch.softmax(logits.where(here, 0), 1).where(here, 0), t.where(here, 0)


def _by_torch(logits, target, weight, ignore_index, smooth, dice_weight, cross_entropy_weight):
    dtype, sums = logits.dtype, of_sums(logits.dtype)
    logits, weight = logits.to(sums), None if weight is None else weight.to(sums)
    valid, p, t = _parts(logits, target, ignore_index)
    axes = [axis for axis in range(logits.dim()) if axis != 1]
    both, size = (p * t).sum(axes), p.sum(axes) + t.sum(axes) + smooth
    empty = size == 0
    size = size.where(~empty, torch.inf)
    dice = ((2 * both + smooth) / size).where(~empty, 1)
    share = dice_weight / (size * logits.shape[1])
    each = torch.zeros((1,), dtype=logits.dtype, device=logits.device)
    loss = dice_weight * (1 - dice.mean())
    if cross_entropy_weight and valid.any():
        options = dict(weight=weight, ignore_index=ignore_index, reduction="sum")
        counts = valid if weight is None else weight[target.where(valid, 0)] * valid
        each = (cross_entropy_weight / counts.sum()).to(sums).reshape(1)
        loss = loss + each[0] * F.cross_entropy(logits, target, **options)
    return loss.to(dtype), torch.cat([2 * share, dice * share, each])


def _backward_by_torch(grad_output, logits, target, factors, weight, ignore_index):
    n_classes, ones, sums = logits.shape[1], [1] * (logits.dim() - 2), of_sums(logits.dtype)
    valid, p, t = _parts(logits.to(sums), target, ignore_index)
    of_t, of_one, each = factors.to(sums).split([n_classes, n_classes, 1])
    by_p = of_one.reshape(-1, *ones) - of_t.reshape(-1, *ones) * t
    found = p * (by_p - (p * by_p).sum(1, keepdim=True))
    counts = valid if weight is None else weight[target.where(valid, 0)] * valid
    found = grad_output * (found + each * counts.unsqueeze(1) * (p - t))
    return _gradient_like(logits).copy_(found.where(valid.unsqueeze(1), 0))


def _gradient_like(logits):
    """An empty gradient as the kernels give it: classes last where `logits` have them there."""
    if logits.is_contiguous() or not logits.movedim(1, -1).is_contiguous():
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    return torch.empty_like(logits)


def _fake(logits, target, weight, *_):
    factors = logits.new_empty((2 * logits.shape[1] + 1,), dtype=of_sums(logits.dtype))
    return logits.new_empty(()), factors


def _fake_backward(grad_output, logits, *_):
    return _gradient_like(logits)


def _save(ctx, inputs, outputs):
    logits, target, weight, ctx.ignore_index, *_ = inputs
    ctx.mark_non_differentiable(outputs[1])
    ctx.save_for_backward(logits, target, outputs[1], weight)


def _gradient(ctx, grad_output, _):
    if ctx.needs_input_grad[3]:
        raise RuntimeError("course_lib.dice_loss has no gradient for its weight: detach it")
    found = _backward(grad_output, *ctx.saved_tensors, ctx.ignore_index)
    return found, None, None, None, None, None, None


def _in_float32(logits, target, weight, *options):
    return as_float32(logits), target, as_float32(weight), *options


_backward = Operator(
    "dice_loss_backward",
    f"(Tensor grad_output, Tensor logits, Tensor target, Tensor factors, {_OPTIONS}) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="DiceLossBackward",
)
_dice_loss = Operator(
    "dice_loss",
    f"(Tensor logits, Tensor target, {_OPTIONS}, {_WEIGHTS}) -> (Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="DiceLoss",
    autocast={"cuda": _in_float32, "cpu": _in_float32},
)


def dice_loss(
    input, target, weight=None, ignore_index=-100, smooth=1.0, dice_weight=1.0,
    cross_entropy_weight=0.0,
):  # fmt: skip
    """dice_weight·(1 − mean dice of the classes) + cross_entropy_weight·cross-entropy: shape ().

    input         logits (N, C, d1, …); float32, float16 or bfloat16, on a CPU float64 too.
                  Contiguous or channels-last; in other layouts they are copied
    target        class indices, int64 or uint8, (N, d1, …)
    weight        (C,), of input's dtype: what each class counts in the cross-entropy
    ignore_index  pixels with this index count nothing; where all have it the loss is 0
    smooth        at least 0; a class's dice is (2·Σ p·t + smooth)/(Σ p + Σ t + smooth)

    On a GPU an index out of range makes the loss NaN; on a CPU it raises RuntimeError. Only `input`
    has a gradient; second gradients raise RuntimeError. Under autocast all is float32, for which
    the logits are copied. Raises RuntimeError for shapes and dtypes that do not go together,
    ValueError for a wrong `smooth`.
    """
    require_tensor(input, "input")
    require_tensor(target, "target")
    if weight is not None:
        require_tensor(weight, "weight")
    require_floating_point("dice_loss", input.dtype, torch.float64)
    if not 0 <= smooth < float("inf"):
        raise ValueError(f"smooth must be a number from 0 on, not {smooth}")
    if target.dtype is torch.uint8:
        target = target.long()
    numbers = float(smooth), float(dice_weight), float(cross_entropy_weight)
    return _dice_loss(input, target, weight, whole(ignore_index, "ignore_index"), *numbers)[0]
