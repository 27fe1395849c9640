"""Max pooling as an operator of PyTorch."""

import torch

from course_lib.kernels import max_pool2d as kernels
from course_lib.kernels.max_pool2d.window import output_size
from course_lib.ops.registration import Operator, require_floating_point, simulate_on_cpu
from course_lib.runtime.repeat import repeated

_aten = torch.ops.aten
_OPTIONS = "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode"
_INDEX_DTYPES = {"int64": torch.int64, "uint8": torch.uint8}


def _options(kernel_size, stride, padding, dilation, ceil_mode):
    return dict(
        kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation,
        ceil_mode=ceil_mode,
    )  # fmt: skip


def _kernel(x, *options):
    return _forward(x, *map(_hashable, options))


@repeated(1)
def _forward(x, *options):
    *options, index_dtype = options
    require_floating_point("max_pool2d", x.dtype)
    return kernels.forward(x, **_options(*options), index_dtype=index_dtype)


def _backward_kernel(grad_output, indices, size, *options):
    return _gradient_of_input(grad_output, indices, tuple(size), *map(_hashable, options))


@repeated(2)
def _gradient_of_input(grad_output, indices, size, *options):
    return kernels.backward(grad_output, indices, size, **_options(*options))


def _hashable(option):
    return tuple(option) if isinstance(option, list) else option


def _by_torch(x, *options):
    *options, index_dtype = options
    _require_int64(index_dtype)
    y, indices = _aten.max_pool2d_with_indices(x, *options)
    return tuple(z.contiguous(memory_format=_memory_format(x)) for z in (y, indices))


def _backward_by_torch(grad_output, indices, size, *options):
    _require_int64(str(indices.dtype).removeprefix("torch."))
    like = grad_output.new_empty(size).contiguous(memory_format=_memory_format(indices))
    return _aten.max_pool2d_with_indices_backward(grad_output, like, *options, indices)


def _require_int64(index_dtype):
    if index_dtype != "int64":
        raise ValueError(f"PyTorch's own max_pool2d has indices of int64, not {index_dtype}")


def _memory_format(x):
    """Channels-last where `x` is that and nothing else, contiguous for all others."""
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _fake(x, kernel_size, stride, padding, dilation, ceil_mode, index_dtype):
    options = zip(x.shape[2:], kernel_size, stride, padding, dilation, strict=True)
    shape = (*x.shape[:2], *(output_size(*numbers, ceil_mode) for numbers in options))
    format, dtype = _memory_format(x), _INDEX_DTYPES[index_dtype]
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=format)
    return y, torch.empty_like(y, dtype=dtype)


def _fake_backward(grad_output, indices, size, *_):
    return torch.empty(
        size, dtype=grad_output.dtype, device=grad_output.device,
        memory_format=_memory_format(indices),
    )  # fmt: skip


def _save(ctx, inputs, outputs):
    x, *options, _ = inputs
    _, indices = outputs
    ctx.mark_non_differentiable(indices)
    ctx.save_for_backward(indices)
    ctx.size, ctx.options = x.shape, options


def _gradient(ctx, grad_output, _):
    (indices,) = ctx.saved_tensors
    return _backward(grad_output, indices, ctx.size, *ctx.options), *[None] * 6


_backward = Operator(
    "max_pool2d_backward",
    f"(Tensor grad_output, Tensor indices, SymInt[] size, {_OPTIONS}) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    title="MaxPool2dBackward",
)
_max_pool2d = Operator(
    "max_pool2d",
    f"(Tensor x, {_OPTIONS}, str index_dtype) -> (Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    save=_save,
    gradient=_gradient,
    title="MaxPool2d",
)


def max_pool2d(
    input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
):
    """The largest element of each window, as `torch.nn.functional.max_pool2d`.

    input  (N, C, H, W) or (C, H, W); float32, float16 or bfloat16, contiguous or channels-last
           (others are copied to contiguous ones)

    With `return_indices` the result is a pair: the indices are int64, in the plane, as PyTorch's.
    Without, they are kept for the backward pass in a byte each, where a window has at most 256
    positions. Two runs of the backward pass agree bit for bit. Raises TypeError for a wrong rank,
    ValueError for options that do not fit, and RuntimeError for second gradients. Notebook 10.
    """
    kernel_size = _pair(kernel_size, "kernel_size")
    stride = kernel_size if stride is None or stride == [] else _pair(stride, "stride")
    padding, dilation = _pair(padding, "padding"), _pair(dilation, "dilation")
    compact = input.is_cuda or (simulate_on_cpu and input.is_cpu)
    compact = compact and not return_indices and kernel_size[0] * kernel_size[1] <= 256
    x = input.unsqueeze(0) if input.dim() == 3 else input
    y, indices = _max_pool2d(
        x, kernel_size, stride, padding, dilation, ceil_mode, "uint8" if compact else "int64"
    )
    if input.dim() == 3:
        y, indices = y.squeeze(0), indices.squeeze(0)
    return (y, indices) if return_indices else y


def _pair(value, name):
    if isinstance(value, int):
        return value, value
    both = tuple(value)
    if len(both) not in (1, 2):
        raise ValueError(f"{name} must be one or two ints, not {value!r}")
    return both if len(both) == 2 else both * 2
