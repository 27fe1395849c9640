"""A convolution and the batch norm behind it, in training, as one operator of PyTorch.

It launches what the two launch, and its results have their bits. But the host has one operator to
look after, one node of autograd's graph and one run to repeat, and where images are small the host
is what a step takes its time for.
"""

import torch

from course_lib.kernels import batch_norm as normalisation
from course_lib.kernels import conv2d as convolution
from course_lib.ops import beside, precision
from course_lib.ops.batch_norm import (
    backward_by_torch as norm_backward_by_torch,
)
from course_lib.ops.batch_norm import (
    by_torch as norm_by_torch,
)
from course_lib.ops.batch_norm import (
    check_backward as norm_check_backward,
)
from course_lib.ops.batch_norm import (
    check_training as norm_check_training,
)
from course_lib.ops.batch_norm import (
    count_writing,
    given,
)
from course_lib.ops.batch_norm import (
    fake as norm_fake,
)
from course_lib.ops.batch_norm import (
    fake_backward as norm_fake_backward,
)
from course_lib.ops.checks import number, pair, require_tensor, whole
from course_lib.ops.conv2d import (
    OPTIONS,
    as_weight_lies,
)
from course_lib.ops.conv2d import (
    backward_by_torch as conv_backward_by_torch,
)
from course_lib.ops.conv2d import (
    by_torch as conv_by_torch,
)
from course_lib.ops.conv2d import (
    captured_gradients as conv_gradients,
)
from course_lib.ops.conv2d import (
    check as conv_check,
)
from course_lib.ops.conv2d import (
    check_backward as conv_check_backward,
)
from course_lib.ops.conv2d import (
    fake as conv_fake,
)
from course_lib.ops.conv2d import (
    fake_backward as conv_fake_backward,
)
from course_lib.ops.conv2d import (
    y_shape as conv_y_shape,
)
from course_lib.ops.registration import Operator, in_autocast, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_ARRAYS = "Tensor x, Tensor weight, Tensor? scale, Tensor? shift"
_STATISTICS = "Tensor(a!)? running_mean, Tensor(b!)? running_var"


def _check(x, weight, scale, shift, running_mean, running_var, *rest):
    *options, momentum, eps, relu = rest
    conv_check(x, weight, None, *options)
    images = torch.empty(conv_y_shape(x, weight, *options), dtype=x.dtype, device="meta")
    norm_check_training(images, scale, shift, running_mean, running_var, momentum, eps, relu)


def _check_backward(grad_output, x, weight, images, scale, mean, rstd, y, *rest):
    *options, needs = rest
    conv_check_backward(images, x, weight, *options, [*needs, False])
    norm_check_backward(grad_output, images, scale, mean, rstd, y)


def _kernel(x, weight, scale, shift, running_mean, running_var, *rest):
    stride, padding, dilation, *others = rest
    found = _forward(
        x, weight, scale, shift, running_mean, running_var, tuple(stride), tuple(padding),
        tuple(dilation), *others, precision.of_convolutions(),
    )  # fmt: skip
    count_writing(running_mean, running_var)
    return found


@cached_launch(6)
def _forward(
    x, weight, scale, shift, running_mean, running_var, stride, padding, dilation, groups, momentum,
    eps, relu, exactness,
):  # fmt: skip
    require_floating_point("conv2d_batch_norm", x.dtype)
    images = convolution.forward(
        x, weight, None, stride=stride, padding=padding, dilation=dilation, groups=groups,
        precision=exactness,
    )  # fmt: skip
    y, mean, rstd = normalisation.forward(
        images, scale, shift, running_mean, running_var, momentum=momentum, eps=eps, relu=relu
    )
    return y, images, mean, rstd


def _backward_kernel(grad_output, x, weight, images, scale, mean, rstd, y, *rest):
    stride, padding, dilation, groups, needs = rest
    options = tuple(stride), tuple(padding), tuple(dilation), groups, tuple(needs)
    exactness = precision.of_convolutions()
    if not beside.captured(x):
        return _gradients(
            grad_output, x, weight, images, scale, mean, rstd, y, *options, exactness
        )
    of_images, *of_norm = normalisation.backward(
        grad_output, images, scale, mean, rstd, relu=y is not None, y=y
    )
    *options, needs = options
    found = conv_gradients(of_images, x, weight, *options, (*needs, False), exactness)
    return *found[:2], *of_norm


@cached_launch(8)
def _gradients(
    grad_output, x, weight, images, scale, mean, rstd, y, stride, padding, dilation, groups, needs,
    exactness,
):  # fmt: skip
    of_images, of_scale, of_shift = normalisation.backward(
        grad_output, images, scale, mean, rstd, relu=y is not None, y=y
    )
    found = convolution.backward(
        of_images, x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
        needs=(*needs, False), precision=exactness,
    )  # fmt: skip
    dx, dweight = (x.new_empty(0) if gradient is None else gradient for gradient in found[:2])
    return dx, dweight, of_scale, of_shift


def _by_torch(x, weight, scale, shift, running_mean, running_var, *rest):
    *options, momentum, eps, relu = rest
    images = conv_by_torch(x, weight, None, *options)
    y, *statistics = norm_by_torch(
        images, scale, shift, running_mean, running_var, momentum, eps, relu
    )
    return y, images, *statistics


def _backward_by_torch(grad_output, x, weight, images, scale, mean, rstd, y, *rest):
    *options, needs = rest
    of_images, *others = norm_backward_by_torch(grad_output, images, scale, mean, rstd, y)
    dx, dweight, _ = conv_backward_by_torch(of_images, x, weight, *options, [*needs, False])
    return dx, dweight, *others


def _fake(x, weight, scale, shift, running_mean, running_var, *rest):
    images = conv_fake(x, weight, None, *rest[:4])
    y, *statistics = norm_fake(images)
    return y, images, *statistics


def _fake_backward(grad_output, x, weight, images, scale, mean, rstd, y, *rest):
    *options, needs = rest
    _, *others = norm_fake_backward(grad_output, images, scale)
    dx, dweight, _ = conv_fake_backward(images, x, weight, *options, [*needs, False])
    return dx, dweight, *others


def _save(ctx, inputs, outputs):
    x, weight, scale, shift, _, _, *ctx.options, _, _, relu = inputs
    y, images, mean, rstd = outputs
    ctx.mark_non_differentiable(images, mean, rstd)
    ctx.save_for_backward(x, weight, images, scale, mean, rstd, y if relu else None)
    ctx.shift_dtype = None if shift is None else shift.dtype


def _gradient(ctx, grad_output, *_):
    x, weight, images, scale, mean, rstd, y = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[1:3])
    dx, dweight, *of_norm = _backward(
        grad_output, x, weight, images, scale, mean, rstd, y, *ctx.options, needs
    )
    _, dscale, dshift = given((None, *of_norm), scale, ctx.shift_dtype)
    return dx if needs[0] else None, dweight if needs[1] else None, dscale, dshift, *[None] * 9


_backward = Operator(
    "conv2d_batch_norm_backward",
    "(Tensor grad_output, Tensor x, Tensor weight, Tensor images, Tensor? scale, Tensor mean, "
    f"Tensor rstd, Tensor? y, {OPTIONS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="Conv2dBatchNormBackward",
)
_training = Operator(
    "conv2d_batch_norm",
    f"({_ARRAYS}, {_STATISTICS}, {OPTIONS}, float momentum, float eps, bool relu) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="Conv2dBatchNorm",
    autocast=in_autocast(2),
)


def conv2d_batch_norm(
    input, weight, scale, shift, running_mean, running_var, stride=1, padding=0, dilation=1,
    groups=1, momentum=0.1, eps=1e-5, *, relu=False,
):  # fmt: skip
    """`batch_norm` of `conv2d`'s result in training: the same kernels, and the same bits.

    input, weight, stride, padding, dilation, groups  as `conv2d` takes them, but for padding by
                  name; input (N, C, H, W). There is no bias: the mean takes it away again
    scale, shift  what `batch_norm` calls weight and bias: (K,), or None
    running_mean, running_var, momentum, eps, relu    as `batch_norm` takes them

    Gradients are of input, weight, scale and shift. Raises what the two raise. Notebooks 08 to 10.
    """
    for x, name in ((input, "input"), (weight, "weight")):
        require_tensor(x, name)
    if not (eps := number(eps, "eps")) > 0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    y, *_ = _training(
        as_weight_lies(input, weight), weight, scale, shift, running_mean, running_var,
        pair(stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation"),
        whole(groups, "groups"), number(momentum, "momentum"), eps, bool(relu),
    )  # fmt: skip
    return y
