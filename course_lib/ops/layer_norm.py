"""Layer normalisation as an operator of PyTorch."""

import math

import torch

from course_lib.kernels import layer_norm as kernels
from course_lib.ops.checks import number, of_sums, require, require_tensor, whole
from course_lib.ops.registration import Operator, as_float32, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten


def _check(x, weight, bias, eps):
    require_floating_point("layer_norm", x.dtype, torch.float64)
    if x.dim() == 0:
        raise RuntimeError("input must have at least 1 dimension, and it is a single number")
    _check_features(x, weight, bias)


def _check_features(x, weight, bias):
    allowed = (x.dtype, of_sums(x.dtype))
    for name, tensor in (("weight", weight), ("bias", bias)):
        require(tensor, name, shape=x.shape[-1:], dtypes=allowed)
        allowed = allowed if tensor is None else (tensor.dtype,)


def _check_backward(grad_output, x, weight, mean, rstd, sums):
    require_floating_point("layer_norm", x.dtype, torch.float64)
    require(grad_output, "grad_output", shape=x.shape, dtypes=(x.dtype,))
    _check_features(x, weight, None)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        require(statistic, name, shape=x.shape[:-1], dtypes=(of_sums(x.dtype),))


@cached_launch(3)
def _kernel(x, weight, bias, eps):
    require_floating_point("layer_norm", x.dtype)
    return kernels.forward(x, weight, bias, eps=eps)


def _by_torch(x, weight, bias, eps):
    exact = of_sums(x.dtype)
    inputs = (None if each is None else each.to(exact) for each in (x, weight, bias))
    x_exact, weight, bias = inputs
    y, mean, rstd = torch.native_layer_norm(x_exact, list(x.shape[-1:]), weight, bias, eps)
    return y.to(x.dtype).contiguous(), mean[..., 0], rstd[..., 0]


def _fake(x, *_):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, *(x.new_empty(x.shape[:-1], dtype=of_sums(x.dtype)) for _ in range(2))


def _save(ctx, inputs, outputs):
    x, weight, bias, _ = inputs
    _, mean, rstd = outputs
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradient(ctx, grad_output, *_):
    of_x, *of_features = ctx.needs_input_grad[1:4]
    dx, dweight, dbias = _backward(grad_output, *ctx.saved_tensors, any(of_features))
    return (
        dx if of_x else None,
        dweight if of_features[0] else None,
        dbias.to(ctx.bias_dtype) if of_features[1] else None,
        None,
    )


@cached_launch(5)
def _backward_kernel(grad_output, x, weight, mean, rstd, sums):
    dx, *found = kernels.backward(grad_output, x, weight, mean, rstd, sums=sums)
    return dx, *(x.new_empty(0) if each is None else each for each in found)


def _backward_by_torch(grad_output, x, weight, mean, rstd, sums):
    exact, shape = of_sums(x.dtype), x.shape[-1:]
    ones = mean.new_ones(shape)
    # Of the bias no more than its type is read: any tensor of its shape stands for it.
    found = _aten.native_layer_norm_backward(
        grad_output.to(exact), x.to(exact), list(shape), mean[..., None], rstd[..., None],
        ones if weight is None else weight.to(exact), ones, [True, sums, sums],
    )  # fmt: skip
    dx, *features = found
    of_weight = exact if weight is None else weight.dtype
    features = (each.to(of_weight) if sums else x.new_empty(0) for each in features)
    return dx.to(x.dtype).contiguous(), *features


def _fake_backward(grad_output, x, weight, mean, rstd, sums):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    shape, dtype = x.shape[-1:] if sums else (0,), mean.dtype if weight is None else weight.dtype
    return dx, *(x.new_empty(shape, dtype=dtype if sums else x.dtype) for _ in range(2))


def _in_float32(x, weight, bias, eps):
    return *map(as_float32, (x, weight, bias)), eps


def _vmap(info, in_dims, x, weight, bias, eps):
    """Samples that share weight and bias are so many more rows; else one after another."""
    if in_dims[1] is None and in_dims[2] is None:
        return _layer_norm(x.movedim(in_dims[0], 0), weight, bias, eps), (0, 0, 0)
    inputs = zip((x, weight, bias), in_dims, strict=False)
    samples = [
        [each] * info.batch_size if axis is None else each.unbind(axis) for each, axis in inputs
    ]
    found = [_layer_norm(*sample, eps) for sample in zip(*samples, strict=True)]
    return tuple(map(torch.stack, zip(*found, strict=True))), (0, 0, 0)


_backward = Operator(
    "layer_norm_backward",
    "(Tensor grad_output, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool sums) -> "
    "(Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="LayerNormBackward",
)
_layer_norm = Operator(
    "layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="LayerNorm",
    vmap=_vmap,
    autocast={"cuda": _in_float32},
)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Layer normalisation over the last axes, as `torch.nn.functional.layer_norm`.

    input             (…, *normalized_shape); float32, float16 or bfloat16, on a CPU float64 too
    normalized_shape  the sizes of the last axes
    weight, bias      of that shape, both float32 or both of input's dtype; either may be None

    The result is contiguous; an input that is not is copied first. Gradients are of input, weight
    and bias; two runs agree bit for bit. On a GPU, autocast makes all float32. Raises RuntimeError
    for shapes, dtypes or devices that do not go together and for second gradients, TypeError for a
    `normalized_shape` that is no tuple or list of ints, NotImplementedError for another dtype.
    """
    require_tensor(input, "input")
    if not isinstance(normalized_shape, (tuple, list)):
        kind = type(normalized_shape).__name__
        raise TypeError(f"normalized_shape must be tuple of ints, not {kind}")
    shape = tuple(whole(size, "normalized_shape") for size in normalized_shape)
    if not shape:
        raise RuntimeError("normalized_shape must have at least 1 dimension, but it is ()")
    if tuple(input.shape[-len(shape) :]) != shape:
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape "
            f"[*, {', '.join(map(str, shape))}], but got input of size {list(input.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            require_tensor(tensor, name)
            require(tensor, name, shape=shape)
    eps = number(eps, "eps")
    if len(shape) == 1:
        return _layer_norm(input, weight, bias, eps)[0]
    n = math.prod(shape)
    rows = input.reshape(*input.shape[: -len(shape)], n)
    flat = (None if each is None else each.reshape(n) for each in (weight, bias))
    return _layer_norm(rows, *flat, eps)[0].reshape(input.shape)
