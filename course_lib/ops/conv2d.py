"""Two-dimensional convolution as an operator of PyTorch."""

import torch
import torch.nn.functional as F

from course_lib.kernels import conv2d as kernels
from course_lib.ops import beside, precision
from course_lib.ops.checks import pair, require, require_tensor, whole
from course_lib.ops.formats import empty, memory_format
from course_lib.ops.registration import Operator, in_autocast, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten
OPTIONS = "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups"


def check(x, weight, bias, stride, padding, dilation, groups):
    y_shape(x, weight, stride, padding, dilation, groups)
    check_types(x, weight, bias, weight.shape[0])


def check_types(x, weight, bias, n_filters):
    """RuntimeError for a bias of another size than `n_filters`, and unless all have x's dtype."""
    if bias is not None and tuple(bias.shape) != (n_filters,):
        raise RuntimeError(
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with "
            f"{n_filters} elements, but got bias of size {list(bias.shape)} instead"
        )
    for tensor, name in ((weight, "weight"), (bias, "bias")):
        if tensor is not None and tensor.dtype != x.dtype:
            raise RuntimeError(
                f"Input type ({x.dtype}) and {name} type ({tensor.dtype}) should be the same"
            )


def check_backward(grad_output, x, weight, stride, padding, dilation, groups, needs):
    check(x, weight, None, stride, padding, dilation, groups)
    shape = y_shape(x, weight, stride, padding, dilation, groups)
    require(grad_output, "grad_output", shape=shape, dtypes=(x.dtype,))
    if len(needs) != 3:
        raise RuntimeError(f"needs must say of three gradients whether they are, not {needs}")


def y_shape(x, weight, stride, padding, dilation, groups):
    """(N, K, P, Q); RuntimeError where there is no such convolution."""
    check_options("conv2d", x, weight, stride, padding, dilation, groups)
    N, C, *size = x.shape
    K, per_group, *taps = weight.shape
    if C != per_group * groups:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight.shape)}, expected input"
            f"{list(x.shape)} to have {per_group * groups} channels, but got {C} channels instead"
        )
    if K % groups or min(taps) < 1:
        raise RuntimeError(
            f"expected weight to have filters of at least 1 × 1, and a multiple of groups={groups} "
            f"of them, but got weight of size {list(weight.shape)}"
        )
    padded = [n + 2 * pad for n, pad in zip(size, padding, strict=True)]
    reach = [step * (n - 1) + 1 for n, step in zip(taps, dilation, strict=True)]
    if padded[0] < reach[0] or padded[1] < reach[1]:
        raise RuntimeError(
            f"Calculated padded input size per channel: ({padded[0]} x {padded[1]}). Kernel size: "
            f"({reach[0]} x {reach[1]}). Kernel size can't be greater than actual input size"
        )
    fits = zip(padded, reach, stride, strict=True)
    return N, K, *((room - span) // step + 1 for room, span, step in fits)


def check_options(name, x, weight, stride, padding, dilation, groups):
    """RuntimeError for another rank than four, and for numbers that are too small."""
    if x.dim() != 4:
        raise RuntimeError(
            f"Expected 3D (unbatched) or 4D (batched) input to {name}, but got input of size: "
            f"{list(x.shape)}"
        )
    require(weight, "weight", n_dims=4)
    for option, values, least in (
        ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1),
        ("groups", (groups,), 1),
    ):  # fmt: skip
        if any(value < least for value in values):
            kind = "non-positive" if least else "negative"
            raise RuntimeError(f"{kind} {option} is not supported: {list(values)}")


def _kernel(x, weight, bias, stride, padding, dilation, groups):
    options = tuple(stride), tuple(padding), tuple(dilation), groups
    return _forward(x, weight, bias, *options, precision.of_convolutions())


@cached_launch(3)
def _forward(x, weight, bias, stride, padding, dilation, groups, exactness):
    require_floating_point("conv2d", x.dtype)
    return kernels.forward(
        x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups,
        precision=exactness,
    )  # fmt: skip


def _backward_kernel(grad_output, x, weight, stride, padding, dilation, groups, needs):
    options = tuple(stride), tuple(padding), tuple(dilation), groups, tuple(needs)
    find = captured_gradients if beside.captured(x) else _gradients
    return find(grad_output, x, weight, *options, precision.of_convolutions())


def captured_gradients(grad_output, x, weight, *rest):
    """(dx, dweight, dbias) in a graph, side by side: what is not needed is empty."""
    *options, needs, exactness = rest

    def of(needs):
        return _gradients(grad_output, x, weight, *options, needs, exactness)

    return beside.gradients(of, needs, x)


@cached_launch(3)
def _gradients(grad_output, x, weight, stride, padding, dilation, groups, needs, exactness):
    found = kernels.backward(
        grad_output, x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
        needs=needs, precision=exactness,
    )  # fmt: skip
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


def by_torch(x, weight, bias, stride, padding, dilation, groups):
    if not x.shape[1]:  # of no channels PyTorch makes none
        y = x.new_zeros(y_shape(x, weight, stride, padding, dilation, groups))
        y = y if bias is None else y + bias[:, None, None]
    else:
        y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return y.contiguous(memory_format=memory_format(x, weight))


def backward_by_torch(grad_output, x, weight, stride, padding, dilation, groups, needs):
    if not x.shape[1]:
        found = torch.zeros_like(x), torch.zeros_like(weight), grad_output.sum((0, 2, 3))
        return tuple(g if need else x.new_empty(0) for g, need in zip(found, needs, strict=True))
    found = _aten.convolution_backward(
        grad_output, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups,
        needs,
    )  # fmt: skip
    return tuple(
        x.new_empty(0) if gradient is None else like_bias_or_image(gradient, x, weight)
        for gradient in found
    )


def like_bias_or_image(gradient, x, weight):
    """A gradient of PyTorch's as ours lie: bias, or of the format of the result."""
    if gradient.dim() == 1:
        return gradient
    return gradient.contiguous(memory_format=memory_format(x, weight))


def fake(x, weight, bias, stride, padding, dilation, groups):
    shape = y_shape(x, weight, stride, padding, dilation, groups)
    return empty(shape, x, weight)


def fake_backward(grad_output, x, weight, stride, padding, dilation, groups, needs):
    return (
        empty(x.shape, x, weight) if needs[0] else x.new_empty(0),
        empty(weight.shape, x, weight) if needs[1] else x.new_empty(0),
        x.new_empty(weight.shape[:1]) if needs[2] else x.new_empty(0),
    )


def _save(ctx, inputs, y):
    x, weight, _, *ctx.options = inputs
    ctx.save_for_backward(x, weight)


def _gradient(ctx, grad_output):
    needs = list(ctx.needs_input_grad[1:4])
    found = _backward(grad_output, *ctx.saved_tensors, *ctx.options, needs)
    gradients = (g if needed else None for g, needed in zip(found, needs, strict=True))
    return *gradients, None, None, None, None


def _vmap(info, in_dims, x, weight, bias, *options):
    """Samples that share their weights are a larger batch; else one after another."""
    if in_dims[1] is None and in_dims[2] is None:
        x = x.movedim(in_dims[0], 0)
        return _conv2d(x.flatten(0, 1), weight, bias, *options).unflatten(0, x.shape[:2]), 0
    inputs = zip((x, weight, bias), in_dims[:3], strict=True)
    samples = [
        [tensor] * info.batch_size if axis is None else tensor.unbind(axis)
        for tensor, axis in inputs
    ]
    return torch.stack([_conv2d(*each, *options) for each in zip(*samples, strict=True)]), 0


_backward = Operator(
    "conv2d_backward",
    f"(Tensor grad_output, Tensor x, Tensor weight, {OPTIONS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=backward_by_torch,
    fake=fake_backward,
    check=check_backward,
    title="Conv2dBackward",
)
_conv2d = Operator(
    "conv2d",
    f"(Tensor x, Tensor weight, Tensor? bias, {OPTIONS}) -> Tensor",
    kernel=_kernel,
    on_cpu=by_torch,
    fake=fake,
    check=check,
    save=_save,
    gradient=_gradient,
    title="Conv2d",
    autocast=in_autocast(3),
    vmap=_vmap,
)


def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolution of images with filters, as `torch.nn.functional.conv2d`.

    input     (N, C, H, W) or (C, H, W); float32, float16 or bfloat16, on a CPU float64 too.
              The result is channels-last if input or weight is, else contiguous; other layouts
              are copied
    weight    (K, C/groups, R, S), of input's dtype
    bias      (K,) or None
    padding   an int, a pair, "valid" or "same"; stride, dilation: an int or a pair

    All three tensors have gradients; second gradients raise RuntimeError. float32 is rounded to
    TF32 where ``torch.backends.cudnn.conv.fp32_precision`` lets PyTorch's own do so. Raises
    RuntimeError for sizes, dtypes and options that do not go together, TypeError for options that
    are no ints, NotImplementedError for other dtypes. Lessons 08 and 09.
    """
    require_tensor(input, "input")
    stride, dilation = pair(stride, "stride"), pair(dilation, "dilation")
    if isinstance(padding, str):
        input, padding = _padded(input, weight, stride, padding, dilation)
    options = stride, pair(padding, "padding"), dilation, whole(groups, "groups")
    if input.dim() == 3:
        return _conv2d(input[None], weight, bias, *options)[0]
    return _conv2d(as_weight_lies(input, weight), weight, bias, *options)


def as_weight_lies(x, weight):
    """`x`, made channels-last if the weight is that: ``.to(memory_format=…)`` moves a network's
    weights, and PyTorch lets these say how what it computes lies. Copied here, not by the kernels'
    launcher, x is copied once for the forward pass and the backward pass."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 4 or x.dim() != 4:
        return x
    if torch._C._are_functorch_transforms_active():  # within which layouts can't be asked for
        return x
    if weight.stride()[1] == 1 and memory_format(weight) is torch.channels_last:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _padded(input, weight, stride, padding, dilation):
    """(input, padding in numbers); where one side needs more than the other, input has the rest."""
    if padding == "valid":
        return input, 0
    if padding != "same":
        raise RuntimeError(f"Invalid padding string: '{padding}'; there are 'valid' and 'same'")
    if any(step != 1 for step in stride):
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    require_tensor(weight, "weight")
    require(weight, "weight", n_dims=4)
    total = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    odd_h, odd_w = (each % 2 for each in total)
    if odd_h or odd_w:
        input = F.pad(input, (0, odd_w, 0, odd_h))
    return input, [each // 2 for each in total]
