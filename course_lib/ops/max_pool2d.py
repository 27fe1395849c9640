"""Max pooling as an operator of PyTorch."""

import torch
from torch.compiler import is_exporting

from course_lib.kernels import max_pool2d as kernels
from course_lib.kernels.max_pool2d.window import output_size
from course_lib.ops.checks import pair, require, require_tensor
from course_lib.ops.formats import memory_format
from course_lib.ops.registration import Operator, require_floating_point, simulate_on_cpu
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten
_OPTIONS = "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode"
_INDEX_DTYPES = {"int64": torch.int64, "uint8": torch.uint8}


def _check(x, kernel_size, stride, padding, dilation, ceil_mode, index_dtype, relu):
    if x.dtype is torch.bool or x.is_complex():
        require_floating_point("max_pool2d", x.dtype)
    if x.dim() != 4 or 0 in x.shape[1:]:
        raise RuntimeError(
            "Expected 3D or 4D (batch mode) tensor with optional 0 dim batch size for input, but "
            f"got: {list(x.shape)}"
        )
    _y_shape(x.shape, kernel_size, stride, padding, dilation, ceil_mode)
    if index_dtype not in _INDEX_DTYPES:
        raise ValueError(f"indices must be {' or '.join(_INDEX_DTYPES)}, not {index_dtype!r}")


def _check_backward(grad_output, indices, size, *options):
    if len(size) != 4:
        raise RuntimeError(f"size must be that of the input, N·C·H·W, not {list(size)}")
    require(grad_output, "grad_output", shape=_y_shape(size, *options))
    require(indices, "indices", shape=grad_output.shape, dtypes=_INDEX_DTYPES.values())


def _y_shape(shape, kernel_size, stride, padding, dilation, ceil_mode):
    """(N, C, OH, OW); RuntimeError where there are no such windows."""
    for name, options, least in (
        ("kernel size", kernel_size, 1), ("stride", stride, 1), ("pad", padding, 0),
        ("dilation", dilation, 1),
    ):  # fmt: skip
        if min(options) < least:
            wanted = "greater than zero" if least else "non-negative"
            raise RuntimeError(f"{name} should be {wanted}, but got {list(options)}")
    for pad, size in zip(padding, kernel_size, strict=True):
        if 2 * pad > size:
            raise RuntimeError(
                "pad should be smaller than or equal to half of kernel size, but got "
                f"pad={pad}, kernel_size={size}"
            )
    options = zip(shape[2:], kernel_size, stride, padding, dilation, strict=True)
    found = (*shape[:2], *(output_size(*numbers, ceil_mode) for numbers in options))
    if min(found[2:]) < 1:
        raise RuntimeError(
            f"Given input size: {list(shape[1:])}. Calculated output size: {list(found[1:])}. "
            "Output size is too small"
        )
    return found


def _options(kernel_size, stride, padding, dilation, ceil_mode):
    return dict(
        kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation,
        ceil_mode=ceil_mode,
    )  # fmt: skip


def _kernel(x, *options):
    return _forward(x, *map(_hashable, options))


@cached_launch(1)
def _forward(x, *options):
    require_floating_point("max_pool2d", x.dtype)
    _check(x, *options)  # PyTorch refuses some empty images that kernels take
    *options, index_dtype, relu = options
    return kernels.forward(x, **_options(*options), index_dtype=index_dtype, relu=relu)


def _backward_kernel(grad_output, indices, size, *options):
    return _gradient_of_input(grad_output, indices, tuple(size), *map(_hashable, options))


@cached_launch(2)
def _gradient_of_input(grad_output, indices, size, *options):
    return kernels.backward(grad_output, indices, size, **_options(*options))


def _hashable(option):
    return tuple(option) if isinstance(option, list) else option


def _by_torch(x, *options):
    *options, index_dtype, relu = options
    _require_int64(index_dtype)
    y, indices = _aten.max_pool2d_with_indices(x, *options)
    if relu:
        y, indices = y.relu(), indices.masked_fill(y <= 0, -1)
    return tuple(z.contiguous(memory_format=memory_format(x)) for z in (y, indices))


def _backward_by_torch(grad_output, indices, size, *options):
    _require_int64(str(indices.dtype).removeprefix("torch."))
    (H, W), format = size[2:], memory_format(indices)
    # A window without a pixel has an index beyond the plane, where PyTorch's own would write.
    indices = indices.masked_fill((indices < 0) | (indices >= H * W), -1)
    like = grad_output.new_empty(size).contiguous(memory_format=format)
    dx = _aten.max_pool2d_with_indices_backward(grad_output, like, *options, indices)
    return dx.contiguous(memory_format=format)


def _require_int64(index_dtype):
    if index_dtype != "int64":
        raise ValueError(f"PyTorch's own max_pool2d has indices of int64, not {index_dtype}")


def _fake(x, kernel_size, stride, padding, dilation, ceil_mode, index_dtype, relu):
    shape = _y_shape(x.shape, kernel_size, stride, padding, dilation, ceil_mode)
    format, dtype = memory_format(x), _INDEX_DTYPES[index_dtype]
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=format)
    return y, torch.empty_like(y, dtype=dtype)


def _fake_backward(grad_output, indices, size, *_):
    return torch.empty(
        size, dtype=grad_output.dtype, device=grad_output.device,
        memory_format=memory_format(indices),
    )  # fmt: skip


def _save(ctx, inputs, outputs):
    x, *options, _, _ = inputs
    _, indices = outputs
    ctx.mark_non_differentiable(indices)
    ctx.save_for_backward(indices)
    ctx.size, ctx.options = x.shape, options


def _gradient(ctx, grad_output, _):
    (indices,) = ctx.saved_tensors
    return _backward(grad_output, indices, ctx.size, *ctx.options), *[None] * 7


_backward = Operator(
    "max_pool2d_backward",
    f"(Tensor grad_output, Tensor indices, SymInt[] size, {_OPTIONS}) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="MaxPool2dBackward",
)
_max_pool2d = Operator(
    "max_pool2d",
    f"(Tensor x, {_OPTIONS}, str index_dtype, bool relu) -> (Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="MaxPool2d",
)


def max_pool2d(
    input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False,
    *, relu=False,
):  # fmt: skip
    """The largest element of each window, as `torch.nn.functional.max_pool2d`.

    input  (N, C, H, W) or (C, H, W); float32, float16 or bfloat16, contiguous or channels-last
           (others are copied to contiguous ones)
    relu   max(y, 0) in the same pass, beyond what PyTorch's does; indices are −1 where that is 0

    With `return_indices` the result is a pair: the indices are int64, in the plane, as PyTorch's.
    Without, they are kept for the backward pass in a byte each, where a window has at most 256
    positions, 255 with `relu`. Two runs of the backward pass agree bit for bit. Raises RuntimeError
    for a wrong rank, for options that do not fit and for second gradients, TypeError for options
    that are no ints, NotImplementedError for other dtypes. Notebook 10.
    """
    require_tensor(input, "input")
    kernel_size = pair(kernel_size, "kernel_size")
    empty = stride is None or (isinstance(stride, (tuple, list)) and not stride)
    stride = kernel_size if empty else pair(stride, "stride")
    padding, dilation = pair(padding, "padding"), pair(dilation, "dilation")
    compact = input.is_cuda or (simulate_on_cpu and input.is_cpu)
    compact = compact and not is_exporting()  # programs for others have PyTorch's indices
    compact = compact and not return_indices and kernel_size[0] * kernel_size[1] <= 256 - relu
    x = input.unsqueeze(0) if input.dim() == 3 else input
    y, indices = _max_pool2d(
        x, kernel_size, stride, padding, dilation, ceil_mode, "uint8" if compact else "int64",
        relu,
    )  # fmt: skip
    if input.dim() == 3:
        y, indices = y.squeeze(0), indices.squeeze(0)
    return (y, indices) if return_indices else y
