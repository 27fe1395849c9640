"""Two-dimensional transposed convolution as an operator of PyTorch."""

import torch
import torch.nn.functional as F

from course_lib.kernels import conv_transpose2d as kernels
from course_lib.ops import beside, precision
from course_lib.ops.checks import pair, require, require_tensor, whole
from course_lib.ops.conv2d import (
    as_weight_lies,
    check_options,
    check_types,
    like_bias_or_image,
)
from course_lib.ops.formats import empty, memory_format
from course_lib.ops.registration import Operator, in_autocast, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten
_OPTIONS = (
    "SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, SymInt groups, "
    "SymInt[2] dilation"
)


def _check(x, weight, bias, *options):
    _, K, *_ = _y_shape(x, weight, *options)
    check_types(x, weight, bias, K)


def _check_backward(grad_output, x, weight, *options):
    *options, needs = options
    _check(x, weight, None, *options)
    require(grad_output, "grad_output", shape=_y_shape(x, weight, *options), dtypes=(x.dtype,))
    if len(needs) != 3:
        raise RuntimeError(f"needs must say of three gradients whether they are, not {needs}")


def _y_shape(x, weight, stride, padding, output_padding, groups, dilation):
    """(N, K, P, Q); RuntimeError where there is no such convolution."""
    check_options("conv_transpose2d", x, weight, stride, padding, dilation, groups)
    N, C, *size = x.shape
    if weight.shape[0] != C or C % groups or min(weight.shape) < 1:
        raise RuntimeError(
            f"Given transposed=1, groups={groups}, weight of size {list(weight.shape)}, expected "
            f"input{list(x.shape)} to have {weight.shape[0]} channels, a multiple of groups, and "
            "filters of at least 1 × 1"
        )
    for more, step, apart in zip(output_padding, stride, dilation, strict=True):
        if more < 0:
            raise RuntimeError(f"negative output_padding is not supported: {list(output_padding)}")
        if more >= step and more >= apart:
            raise RuntimeError(
                "output padding must be smaller than either stride or dilation, but got "
                f"output_padding {list(output_padding)}, stride {list(stride)} and dilation "
                f"{list(dilation)}"
            )
    options = size, weight.shape[2:], stride, padding, output_padding, dilation
    found = [
        (n - 1) * step - 2 * pad + apart * (taps - 1) + more + 1
        for n, taps, step, pad, more, apart in zip(*options, strict=True)
    ]
    if min(found) < 0:
        raise RuntimeError(
            f"Given input size per channel: {size}. Calculated output size per channel: {found}. "
            "Output size is too small"
        )
    return N, weight.shape[1] * groups, *found


def _kernel(x, weight, bias, stride, padding, output_padding, groups, dilation):
    options = tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation)
    return _forward(x, weight, bias, *options, precision.of_convolutions())


@cached_launch(3)
def _forward(x, weight, bias, stride, padding, output_padding, groups, dilation, exactness):
    require_floating_point("conv_transpose2d", x.dtype)
    return kernels.forward(
        x, weight, bias, stride=stride, padding=padding, output_padding=output_padding,
        dilation=dilation, groups=groups, precision=exactness,
    )  # fmt: skip


def _backward_kernel(
    grad_output, x, weight, stride, padding, output_padding, groups, dilation, needs
):
    options = tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation)
    # Of a concatenation's gradient it is a slice: what copies it can't be repeated, all else can.
    grad_output = grad_output.contiguous(memory_format=memory_format(x, weight))
    needs, exactness = tuple(needs), precision.of_convolutions()
    if not beside.captured(x):
        return _gradients(grad_output, x, weight, *options, needs, exactness)

    def of(needs):
        return _gradients(grad_output, x, weight, *options, needs, exactness)

    return beside.gradients(of, needs, x)


@cached_launch(3)
def _gradients(
    grad_output, x, weight, stride, padding, output_padding, groups, dilation, needs, exactness
):
    found = kernels.backward(
        grad_output, x, weight, stride=stride, padding=padding, output_padding=output_padding,
        dilation=dilation, groups=groups, needs=needs, precision=exactness,
    )  # fmt: skip
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


def _by_torch(x, weight, bias, *options):
    y = F.conv_transpose2d(x, weight, bias, *options)
    return y.contiguous(memory_format=memory_format(x, weight))


def _backward_by_torch(
    grad_output, x, weight, stride, padding, output_padding, groups, dilation, needs
):
    found = _aten.convolution_backward(
        grad_output, x, weight, [weight.shape[1] * groups], stride, padding, dilation, True,
        output_padding, groups, needs,
    )  # fmt: skip
    return tuple(
        x.new_empty(0) if gradient is None else like_bias_or_image(gradient, x, weight)
        for gradient in found
    )


def _fake(x, weight, bias, *options):
    return empty(_y_shape(x, weight, *options), x, weight)


def _fake_backward(
    grad_output, x, weight, stride, padding, output_padding, groups, dilation, needs
):
    return (
        empty(x.shape, x, weight) if needs[0] else x.new_empty(0),
        empty(weight.shape, x, weight) if needs[1] else x.new_empty(0),
        x.new_empty((weight.shape[1] * groups,)) if needs[2] else x.new_empty(0),
    )


def _save(ctx, inputs, y):
    x, weight, _, *ctx.options = inputs
    ctx.save_for_backward(x, weight)


def _gradient(ctx, grad_output):
    needs = list(ctx.needs_input_grad[1:4])
    found = _backward(grad_output, *ctx.saved_tensors, *ctx.options, needs)
    gradients = (g if needed else None for g, needed in zip(found, needs, strict=True))
    return *gradients, None, None, None, None, None


def _vmap(info, in_dims, x, weight, bias, *options):
    """Samples that share their weights are a larger batch; else one after another."""
    if in_dims[1] is None and in_dims[2] is None:
        x = x.movedim(in_dims[0], 0)
        y = _conv_transpose2d(x.flatten(0, 1), weight, bias, *options)
        return y.unflatten(0, x.shape[:2]), 0
    inputs = zip((x, weight, bias), in_dims[:3], strict=True)
    samples = [
        [tensor] * info.batch_size if axis is None else tensor.unbind(axis)
        for tensor, axis in inputs
    ]
    results = [_conv_transpose2d(*each, *options) for each in zip(*samples, strict=True)]
    return torch.stack(results), 0


_backward = Operator(
    "conv_transpose2d_backward",
    f"(Tensor grad_output, Tensor x, Tensor weight, {_OPTIONS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="ConvTranspose2dBackward",
)
_conv_transpose2d = Operator(
    "conv_transpose2d",
    f"(Tensor x, Tensor weight, Tensor? bias, {_OPTIONS}) -> Tensor",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="ConvTranspose2d",
    autocast=in_autocast(3),
    vmap=_vmap,
)


def conv_transpose2d(
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    """Transposed convolution of images, as `torch.nn.functional.conv_transpose2d`.

    input           (N, C, H, W) or (C, H, W); float32, float16 or bfloat16, on a CPU float64 too.
                    The result is channels-last if input or weight is, else contiguous; other
                    layouts are copied
    weight          (C, K/groups, R, S), of input's dtype
    bias            (K,) or None
    output_padding  rows and columns more at the result's far sides; like stride, padding and
                    dilation an int or a pair

    All three tensors have gradients; second gradients raise RuntimeError. float32 is rounded to
    TF32 where ``torch.backends.cudnn.conv.fp32_precision`` lets PyTorch's own do so. Raises
    RuntimeError for sizes, dtypes and options that do not go together, TypeError for options that
    are no ints, NotImplementedError for other dtypes.
    """
    require_tensor(input, "input")
    options = (
        pair(stride, "stride"), pair(padding, "padding"), pair(output_padding, "output_padding"),
        whole(groups, "groups"), pair(dilation, "dilation"),
    )  # fmt: skip
    if input.dim() == 3:
        return _conv_transpose2d(input[None], weight, bias, *options)[0]
    return _conv_transpose2d(as_weight_lies(input, weight), weight, bias, *options)
