"""ReLU, sigmoid and swish as operators of PyTorch."""

import torch

from course_lib.kernels import activation
from course_lib.ops.registration import Operator
from course_lib.runtime.repeat import repeated

_aten = torch.ops.aten


def _register(operation, on_cpu, backward_on_cpu):
    """y = f(x) with dx = f'(x)·dy, from the kernels of `operation`."""
    saves_output = operation.saves == "y"
    title = operation.name.title()

    def save(ctx, inputs, y):
        ctx.save_for_backward(y if saves_output else inputs[0])

    def gradient(ctx, grad_output):
        return backward(grad_output, *ctx.saved_tensors)

    backward = Operator(
        f"{operation.name}_backward",
        "(Tensor grad_output, Tensor saved) -> Tensor",
        kernel=repeated(2)(operation.backward),
        on_cpu=backward_on_cpu,
        fake=lambda grad_output, saved: torch.empty_like(saved),
        title=f"{title}Backward",
    )
    return Operator(
        operation.name,
        "(Tensor x) -> Tensor",
        kernel=repeated(1)(operation.forward),
        on_cpu=on_cpu,
        fake=torch.empty_like,
        save=save,
        gradient=gradient,
        title=title,
    )


_relu = _register(activation.relu, torch.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0))
_sigmoid = _register(activation.sigmoid, torch.sigmoid, _aten.sigmoid_backward)
_swish = _register(activation.swish, _aten.silu, _aten.silu_backward)


def relu(x):
    """max(x, 0), elementwise; float32, float16 or bfloat16, any shape and memory format."""
    return _relu(x)


def sigmoid(x):
    """1/(1 + e⁻ˣ), elementwise; float32, float16 or bfloat16, any shape and memory format."""
    return _sigmoid(x)


def swish(x):
    """x·sigmoid(x), PyTorch's `silu`; float32, float16 or bfloat16, any shape."""
    return _swish(x)
