"""The kernels as PyTorch operators: ``torch.ops.course_lib.*``, and as functions of this module.

Each operator has a schema, a fake implementation (so that torch.compile traces it without a graph
break), a backward pass of our own kernels, and an implementation for each kind of tensor:

* on a GPU, our kernels;
* on the CPU, PyTorch's own operator, so that a network runs on a machine without a GPU;
* on the CPU under ``COURSE_LIB_SIMULATOR=1``, our kernels in the simulator.

Gradients of gradients are refused with an error, not approximated.
"""

import os

import torch

from course_lib.kernels import activation
from course_lib.runtime.device import SIMULATOR_VARIABLE

_library = torch.library.Library("course_lib", "DEF")
_simulate_on_cpu = os.environ.get(SIMULATOR_VARIABLE) == "1"


def _register(name, schema, kernel, on_cpu, fake):
    """Define one operator without a gradient. Returns its overload, the quickest way to call it."""
    _library.define(f"{name}{schema}")
    _library.impl(name, kernel, "CUDA")
    _library.impl(name, kernel if _simulate_on_cpu else on_cpu, "CPU")
    torch.library.register_fake(f"course_lib::{name}", fake, lib=_library)
    return getattr(torch.ops.course_lib, name).default


def _register_activation(operation, on_cpu, backward_on_cpu):
    """y = f(x) with dx = f'(x)·dy, from the kernels of `operation`. Returns the operator."""
    forward = _register(
        operation.name, "(Tensor x) -> Tensor", operation.forward, on_cpu, torch.empty_like
    )
    backward = _register(
        f"{operation.name}_backward",
        "(Tensor grad_output, Tensor saved) -> Tensor",
        operation.backward,
        backward_on_cpu,
        lambda grad_output, saved: torch.empty_like(saved),
    )
    saves_output = operation.saves == "y"
    title = operation.name.title()

    class Backward(torch.autograd.Function):
        """The gradient as a node of the graph: what is built with ``create_graph=True``."""

        @staticmethod
        def forward(ctx, grad_output, saved):
            with torch._C._AutoDispatchBelowAutograd():
                return backward(grad_output, saved)

        @staticmethod
        def backward(ctx, _):
            raise RuntimeError(
                f"course_lib.{operation.name} has no second derivative; torch.nn.functional's has"
            )

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowAutograd():
                y = forward(x)
            ctx.save_for_backward(y if saves_output else x)
            return y

        @staticmethod
        def backward(ctx, grad_output):
            return backward(grad_output, *ctx.saved_tensors)

    for function, name in ((Forward, operation.name), (Backward, f"{operation.name}_backward")):
        function.__name__ = function.__qualname__ = f"{title}{function.__name__}"
        _library.impl(name, function.apply, "Autograd")
    return forward


_aten = torch.ops.aten
_relu = _register_activation(
    activation.relu, torch.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0)
)
_sigmoid = _register_activation(activation.sigmoid, torch.sigmoid, _aten.sigmoid_backward)
_swish = _register_activation(activation.swish, _aten.silu, _aten.silu_backward)


def relu(x):
    """max(x, 0), elementwise; float32, float16 or bfloat16, any shape and memory format."""
    return _relu(x)


def sigmoid(x):
    """1/(1 + e⁻ˣ), elementwise; float32, float16 or bfloat16, any shape and memory format."""
    return _sigmoid(x)


def swish(x):
    """x·sigmoid(x), PyTorch's `silu`; float32, float16 or bfloat16, any shape."""
    return _swish(x)
