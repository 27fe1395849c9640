"""The linear layer as an operator of PyTorch."""

import math

import torch
import torch.nn.functional as F

from course_lib.kernels import activation
from course_lib.kernels import linear as kernels
from course_lib.ops import beside, precision
from course_lib.ops.checks import require
from course_lib.ops.registration import Operator, in_autocast, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch


def _check(input, weight, bias, relu=False):
    require(weight, "weight", n_dims=2)
    n_out, n_in = weight.shape
    if input.dim() == 0 or input.shape[-1] != n_in:
        raise RuntimeError(
            f"input must have {n_in} features in its last dimension, as weight has, not shape "
            f"{tuple(input.shape)}"
        )
    require(bias, "bias", shape=(n_out,))
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != input.dtype:
            raise RuntimeError(f"{name} must be {input.dtype}, as input is, not {tensor.dtype}")


def _check_backward(grad_output, input, weight, y, needs):
    _check(input, weight, None)
    shape = (*input.shape[:-1], weight.shape[0])
    for name, tensor in (("grad_output", grad_output), ("y", y)):
        require(tensor, name, shape=shape, dtypes=(input.dtype,))


def _kernel(input, weight, bias, relu):
    return _forward(input, weight, bias, relu, precision.of_products())


@cached_launch(3)
def _forward(input, weight, bias, relu, exactness):
    require_floating_point("linear", input.dtype)
    return kernels.forward(
        input, weight, bias, activation="relu" if relu else "none", precision=exactness
    )


def _by_torch(input, weight, bias, relu):
    y = F.linear(input, weight, bias)
    return y.relu() if relu else y


def _backward_kernel(grad_output, input, weight, y, needs):
    needs, exactness = tuple(needs), precision.of_products()
    if not beside.captured(input):
        return _gradients(grad_output, input, weight, y, needs, exactness)
    if y is not None:  # both kinds of gradients wait for it
        grad_output = activation.relu.backward(grad_output, y)

    def of(needs):
        return _gradients(grad_output, input, weight, None, needs, exactness)

    return beside.gradients(of, needs, input)


@cached_launch(4)
def _gradients(grad_output, input, weight, y, needs, exactness):
    if y is not None:
        grad_output = activation.relu.backward(grad_output, y)
    found = kernels.backward(grad_output, input, weight, needs=needs, precision=exactness)
    return tuple(input.new_empty(0) if gradient is None else gradient for gradient in found)


def _backward_by_torch(grad_output, input, weight, y, needs):
    if y is not None:
        grad_output = torch.ops.aten.threshold_backward(grad_output, y, 0)
    n_out, n_in = weight.shape
    n_rows = math.prod(input.shape[:-1])
    rows = grad_output.reshape(n_rows, n_out)
    return (
        grad_output.matmul(weight) if needs[0] else input.new_empty(0),
        rows.t().mm(input.reshape(n_rows, n_in)) if needs[1] else input.new_empty(0),
        rows.sum(0) if needs[2] else input.new_empty(0),
    )


def _fake(input, weight, bias, relu):
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _fake_backward(grad_output, input, weight, y, needs):
    shapes = input.shape, weight.shape, weight.shape[:1]
    return tuple(
        input.new_empty(shape if needed else (0,))
        for shape, needed in zip(shapes, needs, strict=True)
    )


def _save(ctx, inputs, output):
    input, weight, _, relu = inputs
    _, of_input, of_weight, *_ = ctx.needs_input_grad
    saved = input if of_weight else _shape_of(input), weight if of_input else _shape_of(weight)
    ctx.save_for_backward(*saved, output if relu else None)


def _shape_of(x):
    """A tensor like `x` that takes no memory, where the backward pass reads no element of it."""
    return x.new_empty(()).expand(x.shape)


def _gradient(ctx, grad_output):
    needs = list(ctx.needs_input_grad[1:4])
    found = _backward(grad_output, *ctx.saved_tensors, needs)
    gradients = (g if needed else None for g, needed in zip(found, needs, strict=True))
    return *gradients, None


def _vmap(info, in_dims, input, weight, bias, relu):
    """Samples that share their weights are so many more rows; else one after another."""
    if in_dims[1] is None and in_dims[2] is None:
        return _linear(input.movedim(in_dims[0], 0), weight, bias, relu), 0
    inputs = zip((input, weight, bias), in_dims[:3], strict=True)
    samples = [[x] * info.batch_size if axis is None else x.unbind(axis) for x, axis in inputs]
    return torch.stack([_linear(*sample, relu) for sample in zip(*samples, strict=True)]), 0


_backward = Operator(
    "linear_backward",
    "(Tensor grad_output, Tensor input, Tensor weight, Tensor? y, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="LinearBackward",
)
_linear = Operator(
    "linear",
    "(Tensor input, Tensor weight, Tensor? bias, bool relu) -> Tensor",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="Linear",
    vmap=_vmap,
    autocast=in_autocast(3),
)


def linear(input, weight, bias=None, *, relu=False):
    """y = input·weightᵀ + bias, as `torch.nn.functional.linear`.

    input   (..., I); float32, float16 or bfloat16, on a CPU float64 too
    weight  (O, I), of input's dtype
    bias    (O,), of input's dtype, or None; nothing is broadcast
    relu    max(y, 0) in the same pass, beyond what PyTorch's does

    float32 is computed as such unless ``torch.backends.cuda.matmul`` allows TF32. Autocast converts
    all three to its dtype. What is not contiguous is copied first. Raises RuntimeError for shapes
    or dtypes that do not go together and for second gradients, NotImplementedError for other
    dtypes. Notebook 10.
    """
    return _linear(input, weight, bias, relu)
