"""Global average pooling as an operator of PyTorch."""

import torch

from course_lib.kernels import global_avg_pool as kernels
from course_lib.ops.checks import require
from course_lib.ops.registration import Operator, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch


def _check(x):
    require(x, "input", n_dims=4)
    require_floating_point("global_avg_pool", x.dtype, torch.float64)


def _check_backward(grad_output, size, channels_last):
    if len(size) != 4 or min(size) < 0:
        raise RuntimeError(f"size must be that of the input, N·C·H·W, not {list(size)}")
    require(grad_output, "grad_output", shape=(*size[:2], 1, 1))


@cached_launch(1)
def _kernel(x):
    y = x.new_empty((*x.shape[:2], 1, 1))
    kernels.forward(x, out=y.view(x.shape[:2]))
    return y


def _backward_kernel(grad_output, size, channels_last):
    _check_backward(grad_output, size, channels_last)  # whose shape the launcher doesn't see
    return _gradient_of_input(grad_output.flatten(1), tuple(size), channels_last)


@cached_launch(1)
def _gradient_of_input(dy, size, channels_last):
    return kernels.backward(dy, size[2:], channels_last=channels_last)


def _backward_by_torch(grad_output, size, channels_last):
    n_pixels = size[2] * size[3]
    dx = _fake_backward(grad_output, size, channels_last)
    return dx.copy_(grad_output / n_pixels) if n_pixels else dx


def _fake_backward(grad_output, size, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(
        size, dtype=grad_output.dtype, device=grad_output.device, memory_format=layout
    )


def _save(ctx, inputs, y):
    (x,) = inputs
    ctx.size = x.shape
    ctx.channels_last = not x.is_contiguous() and x.is_contiguous(
        memory_format=torch.channels_last
    )


def _gradient(ctx, grad_output):
    return _backward(grad_output, ctx.size, ctx.channels_last)


def _vmap(info, in_dims, x):
    x = x.movedim(in_dims[0], 0)
    return _global_avg_pool(x.flatten(0, 1)).unflatten(0, x.shape[:2]), 0


_backward = Operator(
    "global_avg_pool_backward",
    "(Tensor grad_output, SymInt[] size, bool channels_last) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="GlobalAvgPoolBackward",
)
_global_avg_pool = Operator(
    "global_avg_pool",
    "(Tensor x) -> Tensor",
    kernel=_kernel,
    on_cpu=lambda x: x.mean((2, 3), keepdim=True),
    check=_check,
    fake=lambda x: x.new_empty((*x.shape[:2], 1, 1)),
    save=_save,
    gradient=_gradient,
    title="GlobalAvgPool",
    vmap=_vmap,
)


def global_avg_pool(input):
    """The mean of each plane, as `torch.nn.functional.adaptive_avg_pool2d(input, 1)`.

    input  (N, C, H, W) or (C, H, W); float32, float16 or bfloat16, on a CPU float64 too. Contiguous
           or channels-last, and its gradient the same; in other layouts it is copied

    Returns (N, C, 1, 1) or (C, 1, 1). The mean of an empty plane is NaN. Sums are float32, in a
    fixed order. Raises RuntimeError for another rank and for second gradients, NotImplementedError
    for another dtype. Notebook 02.
    """
    if input.dim() not in (3, 4):
        raise RuntimeError(
            f"global_avg_pool expects (N, C, H, W) or (C, H, W), not shape {tuple(input.shape)}"
        )
    require_floating_point("global_avg_pool", input.dtype, torch.float64)
    if input.dim() == 3:
        return _global_avg_pool(input[None])[0]
    return _global_avg_pool(input)
