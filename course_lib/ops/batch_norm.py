"""Batch normalisation as operators of PyTorch: one for training, one for inference."""

import math

import torch

from course_lib.kernels import batch_norm as kernels
from course_lib.ops.checks import number, of_sums, require, require_elements, require_tensor
from course_lib.ops.formats import memory_format
from course_lib.ops.registration import Operator, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten


def _check(x, weight, bias, running_mean, running_var, eps):
    require_floating_point("batch_norm", x.dtype, torch.float64)
    require(x, "input", n_dims=4)
    given = dict(running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    for name, tensor in given.items():
        require_elements(tensor, name, x.shape[1])
        require(tensor, name, dtypes=(x.dtype, of_sums(x.dtype)))
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if eps < 0:
        raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")


def check_training(x, weight, bias, running_mean, running_var, momentum, eps, relu):
    _check(x, weight, bias, running_mean, running_var, eps)
    if x.shape[0] * x.shape[2] * x.shape[3] == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}: "
            "give it more images than one, or call eval()"
        )


def _check_inference(x, weight, bias, running_mean, running_var, eps, relu):
    _check(x, weight, bias, running_mean, running_var, eps)


def check_backward(grad_output, x, weight, mean, rstd, y):
    _check_gradients(grad_output, x, weight, y)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        require_elements(statistic, name, x.shape[1])
        require(statistic, name, dtypes=(of_sums(x.dtype),))


def _check_inference_backward(grad_output, x, weight, running_mean, running_var, y, eps):
    _check(x, weight, None, running_mean, running_var, eps)
    _check_gradients(grad_output, x, weight, y)


def _check_gradients(grad_output, x, weight, y):
    require(x, "input", n_dims=4)
    for name, image in (("grad_output", grad_output), ("y", y)):
        require(image, name, shape=x.shape, dtypes=(x.dtype,))
    require_elements(weight, "weight", x.shape[1])
    require(weight, "weight", dtypes=(x.dtype, of_sums(x.dtype)))


def _kernel(x, weight, bias, running_mean, running_var, momentum, eps, relu):
    found = _forward(x, weight, bias, running_mean, running_var, momentum, eps, relu)
    count_writing(running_mean, running_var)
    return found


def count_writing(running_mean, running_var):
    """Tell PyTorch, which doesn't see what a kernel writes, and checks it for gradients."""
    if running_mean is not None:
        torch.autograd.graph.increment_version((running_mean, running_var))


@cached_launch(5)
def _forward(x, weight, bias, running_mean, running_var, momentum, eps, relu):
    require_floating_point("batch_norm", x.dtype)
    return kernels.forward(
        x, weight, bias, running_mean, running_var, momentum=momentum, eps=eps, relu=relu
    )


def by_torch(x, weight, bias, running_mean, running_var, momentum, eps, relu):
    if x.numel() == 0:
        y, *statistics = fake(x)
        return y, *(each.zero_() for each in statistics)
    y, mean, rstd = torch.native_batch_norm(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    y = y.relu() if relu else y
    sums = of_sums(x.dtype)  # PyTorch's are of the dtype of weight
    return y.contiguous(memory_format=memory_format(x)), mean.to(sums), rstd.to(sums)


def fake(x, *_):
    y = torch.empty_like(x, memory_format=memory_format(x))
    return y, *(x.new_empty((x.shape[1],), dtype=of_sums(x.dtype)) for _ in range(2))


def _save(ctx, inputs, outputs):
    x, weight, bias, _, _, _, _, relu = inputs
    y, mean, rstd = outputs
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd, y if relu else None)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradient(ctx, grad_output, *_):
    x, weight, mean, rstd, y = ctx.saved_tensors
    gradients = _backward(grad_output, x, weight, mean, rstd, y)
    return *given(gradients, weight, ctx.bias_dtype), *[None] * 5


def given(gradients, weight, bias_dtype):
    """The gradients of those of weight and bias that there are."""
    dx, dweight, dbias = gradients
    if bias_dtype is None:
        dbias = None
    elif dbias.dtype is not bias_dtype:
        dbias = dbias.to(bias_dtype)
    return dx, None if weight is None else dweight, dbias


@cached_launch(5)
def _kernel_inference(x, weight, bias, running_mean, running_var, eps, relu):
    require_floating_point("batch_norm", x.dtype)
    return kernels.inference(x, weight, bias, running_mean, running_var, eps=eps, relu=relu)


def _inference_by_torch(x, weight, bias, running_mean, running_var, eps, relu):
    y, _, _ = torch.native_batch_norm(x, weight, bias, running_mean, running_var, False, 0.0, eps)
    y = y.relu() if relu else y
    return y.contiguous(memory_format=memory_format(x))


def _save_inference(ctx, inputs, y):
    x, weight, bias, running_mean, running_var, ctx.eps, relu = inputs
    ctx.save_for_backward(x, weight, running_mean, running_var, y if relu else None)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _inference_gradient(ctx, grad_output):
    if any(ctx.needs_input_grad[4:6]):
        raise RuntimeError(
            "course_lib.batch_norm has no gradient for running_mean and running_var: they are "
            "statistics, not parameters; detach them"
        )
    x, weight, mean, variance, y = ctx.saved_tensors
    gradients = _inference_backward(grad_output, x, weight, mean, variance, y, ctx.eps)
    return *given(gradients, weight, ctx.bias_dtype), *[None] * 4


def _backward_kernel(grad_output, x, weight, mean, rstd, y):
    return _gradients(grad_output, x, weight, mean, rstd, y, True)


def _inference_backward_kernel(grad_output, x, weight, running_mean, running_var, y, eps):
    mean, variance = (each.to(of_sums(each.dtype)) for each in (running_mean, running_var))
    rstd = torch.rsqrt(variance + eps)
    return _gradients(grad_output, x, weight, mean, rstd, y, False)


@cached_launch(6)
def _gradients(grad_output, x, weight, mean, rstd, y, training):
    return kernels.backward(
        grad_output, x, weight, mean, rstd, relu=y is not None, y=y, training=training
    )


def backward_by_torch(grad_output, x, weight, mean, rstd, y):
    return _gradients_by_torch(grad_output, x, weight, y, (None, None, mean, rstd, True, 0.0))


def _inference_backward_by_torch(grad_output, x, weight, running_mean, running_var, y, eps):
    running = (each.to(of_sums(x.dtype)) for each in (running_mean, running_var))
    return _gradients_by_torch(grad_output, x, weight, y, (*running, None, None, False, eps))


def _gradients_by_torch(grad_output, x, weight, y, statistics):
    if y is not None:
        grad_output = _aten.threshold_backward(grad_output, y, 0)
    if x.numel() == 0:  # PyTorch's own ends the process
        return tuple(each.zero_() for each in fake_backward(grad_output, x, weight))
    sums, format = of_sums(x.dtype), memory_format(x)
    # PyTorch's takes dy for as x lies, and reads no strides of what each channel has.
    grad_output, x = (each.contiguous(memory_format=format) for each in (grad_output, x))
    given = (each.contiguous() if torch.is_tensor(each) else each for each in statistics)
    scale = None if weight is None else weight.to(sums).contiguous()
    dx, *features = _aten.native_batch_norm_backward(grad_output, x, scale, *given, [True] * 3)
    features = (each.to(sums if weight is None else weight.dtype) for each in features)
    return dx.contiguous(memory_format=format), *features


def fake_backward(grad_output, x, weight, *_):
    dx = torch.empty_like(x, memory_format=memory_format(x))
    dtype = of_sums(x.dtype) if weight is None else weight.dtype
    return dx, *(x.new_empty((x.shape[1],), dtype=dtype) for _ in range(2))


_backward = Operator(
    "batch_norm_backward",
    "(Tensor grad_output, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? y) -> "
    "(Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=backward_by_torch,
    fake=fake_backward,
    check=check_backward,
    title="BatchNormBackward",
)
_inference_backward = Operator(
    "batch_norm_inference_backward",
    "(Tensor grad_output, Tensor x, Tensor? weight, Tensor running_mean, Tensor running_var, "
    "Tensor? y, float eps) -> (Tensor, Tensor, Tensor)",
    kernel=_inference_backward_kernel,
    on_cpu=_inference_backward_by_torch,
    fake=fake_backward,
    check=_check_inference_backward,
    title="BatchNormInferenceBackward",
)
_training = Operator(
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float momentum, float eps, bool relu) -> (Tensor, Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=by_torch,
    fake=fake,
    check=check_training,
    save=_save,
    gradient=_gradient,
    title="BatchNorm",
)
_inference = Operator(
    "batch_norm_inference",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, float eps, "
    "bool relu) -> Tensor",
    kernel=_kernel_inference,
    on_cpu=_inference_by_torch,
    fake=lambda x, *_: torch.empty_like(x, memory_format=memory_format(x)),
    check=_check_inference,
    save=_save_inference,
    gradient=_inference_gradient,
    title="BatchNormInference",
)


def batch_norm(
    input,
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
    *,
    relu=False,
):
    """Batch normalisation over all axes but the second, as `torch.nn.functional.batch_norm`.

    input                      (N, C, …), contiguous or channels-last; float32, float16 or bfloat16
    weight, bias               (C,), float32 or input's dtype, or None
    running_mean, running_var  (C,), likewise; with `training` they may be None, and are moved by
                               `momentum` towards the batch's, in place
    relu                       max(y, 0) in the same pass, beyond what PyTorch's does

    Gradients are of input, weight and bias, in inference too; two runs agree bit for bit. Raises
    RuntimeError for a wrong shape, dtype or device, for second gradients and for gradients of the
    statistics, ValueError for a negative eps and for a batch of one value a channel. Notebook 10.
    """
    require_tensor(input, "input")
    shape, eps = input.shape, number(eps, "eps")
    if input.dim() < 2 and tuple(shape) != (0,):  # which PyTorch takes
        raise RuntimeError(f"input must have at least 2 dimensions, not shape {tuple(shape)}")
    if input.dim() == 1:
        x = input.reshape(0, 0 if running_mean is None else running_mean.numel(), 1, 1)
    else:
        x = input if input.dim() == 4 else input.reshape(*shape[:2], math.prod(shape[2:]), 1)
    if training:
        if eps <= 0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
        if shape[0] * math.prod(shape[2:]) == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {shape}: "
                "give it more images than one, or call eval()"
            )
        momentum = number(momentum, "momentum")
        y, _, _ = _training(x, weight, bias, running_mean, running_var, momentum, eps, relu)
    else:
        if running_mean is None or running_var is None:
            raise RuntimeError("running_mean and running_var must be defined in evaluation mode")
        y = _inference(x, weight, bias, running_mean, running_var, eps, relu)
    return y if input.dim() == 4 else y.reshape(shape)
