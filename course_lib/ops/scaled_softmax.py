"""Softmax of scaled and masked attention scores as an operator of PyTorch."""

import math

import torch

from course_lib.kernels import scaled_softmax as kernels
from course_lib.ops.checks import number, of_sums, require, require_tensor
from course_lib.ops.registration import Operator, as_float32, require_floating_point


def _check(x, mask, scale, causal):
    require_floating_point("scaled_softmax", x.dtype, torch.float64)
    if not 2 <= x.dim() <= 4:
        raise RuntimeError(f"x must have 2 to 4 dimensions, not shape {tuple(x.shape)}")
    if mask is None:
        return
    require(mask, "mask", dtypes=(torch.bool, x.dtype))
    extents = (1,) * (x.dim() - mask.dim()) + tuple(mask.shape)
    if mask.dim() > x.dim() or any(
        n != 1 and n != m for n, m in zip(extents, x.shape, strict=True)
    ):
        raise RuntimeError(
            f"mask must broadcast to {tuple(x.shape)}, and its shape is {tuple(mask.shape)}"
        )


def _check_backward(grad_output, y, scale, causal):
    _check(y, None, scale, causal)
    require(grad_output, "grad_output", shape=y.shape, dtypes=(y.dtype,))


def _kernel(x, mask, scale, causal):
    require_floating_point("scaled_softmax", x.dtype)
    return kernels.forward(x, mask, scale=scale, causal=causal)


def _by_torch(x, mask, scale, causal):
    scores, seen = x.to(of_sums(x.dtype)) * scale, None
    if mask is not None:
        scores, seen = (scores, mask) if mask.dtype is torch.bool else (scores + mask, None)
    if causal:
        before = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        seen = before if seen is None else seen & before
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(nothing, 0).to(x.dtype).contiguous()


def _fake(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward_kernel(grad_output, y, scale, causal):
    return kernels.backward(grad_output, y, scale=scale, causal=causal)


def _backward_by_torch(grad_output, y, scale, causal):
    dy = grad_output.tril() if causal else grad_output
    dx = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype) * scale
    return dx.contiguous()


def _save(ctx, inputs, y):
    ctx.options = inputs[2:]
    ctx.save_for_backward(y)


def _gradient(ctx, grad_output):
    if ctx.needs_input_grad[2]:
        raise RuntimeError(
            "course_lib.scaled_softmax has no gradient for its mask: detach it; course_lib."
            "attention's has"
        )
    return _backward(grad_output, *ctx.saved_tensors, *ctx.options), None, None, None


def _in_float32(x, mask, scale, causal):
    return as_float32(x), None if mask is None else as_float32(mask), scale, causal


def _vmap(info, in_dims, x, mask, scale, causal):
    """Samples are so many more batches."""
    n, axis = info.batch_size, in_dims[0]
    shape = (x if axis is None else x.select(axis, 0)).shape
    x = _batches(x, axis, n)
    if mask is not None:
        mask = _batches(mask, in_dims[1], n, x.shape[0] // n)
    return _scaled_softmax.overload(x, mask, scale, causal).view(n, *shape), 0


def _vmap_backward(info, in_dims, grad_output, y, scale, causal):
    n, axis = info.batch_size, in_dims[1]
    shape = (y if axis is None else y.select(axis, 0)).shape
    dy, y = (_batches(x, axis, n) for x, axis in zip((grad_output, y), in_dims, strict=False))
    return _backward.overload(dy, y, scale, causal).view(n, *shape), 0


def _batches(x, axis, n, B=-1):
    """(n·B, H, T, S) of n samples, or of one that all of them share."""
    x = x.expand(n, *x.shape) if axis is None else x.movedim(axis, 0)
    x = x[(slice(None), *(None,) * (5 - x.dim()))]
    return x.expand(n, B, *x.shape[2:]).flatten(0, 1)


_backward = Operator(
    "scaled_softmax_backward",
    "(Tensor grad_output, Tensor y, float scale, bool causal) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=lambda grad_output, y, *_: _fake(y),
    check=_check_backward,
    title="ScaledSoftmaxBackward",
    vmap=_vmap_backward,
)
_scaled_softmax = Operator(
    "scaled_softmax",
    "(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="ScaledSoftmax",
    vmap=_vmap,
    # Like torch.softmax, which autocast makes float32 on a GPU.
    autocast={"cuda": _in_float32},
)


def scaled_softmax(x, mask=None, *, scale=1.0, causal=False):
    """softmax(scale·x + mask) over the last axis: what attention does to its scores, in one pass.

    x       (B, H, T, S), or of two or three axes; float32, float16 or bfloat16, on a CPU float64
    mask    broadcast to x: bool, True where a score is seen; or of x's dtype, to be added
    scale   a number; scores are multiplied by it before the mask is added
    causal  row i sees scores 0 … i alone, as PyTorch's `is_causal`

    A row that sees nothing, or −inf alone, is 0. The result is contiguous; an `x` that is not is
    copied first, a mask never. The gradient is x's: a mask that needs one is refused, and
    `attention` gives it. On a GPU, autocast makes all float32. Raises RuntimeError for shapes,
    dtypes or devices that do not go together and for second gradients, TypeError for a scale that
    is no number, NotImplementedError for another dtype. Notebook 18.
    """
    require_tensor(x, "x")
    if mask is not None:
        require_tensor(mask, "mask")
    return _scaled_softmax(x, mask, number(scale, "scale"), bool(causal))
