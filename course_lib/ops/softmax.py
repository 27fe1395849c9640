"""Softmax and log-softmax as operators of PyTorch."""

import operator
import warnings

import torch
from torch.compiler import is_dynamo_compiling

from course_lib.kernels import softmax as kernels
from course_lib.ops.checks import require, whole
from course_lib.ops.registration import Operator, require_floating_point

_aten = torch.ops.aten


def _register(operation, on_cpu, backward_on_cpu):
    """y = operation(x) along an axis, as torch.softmax(x, dim, dtype) computes it."""
    title = operation.name.title().replace("_", "")
    name = operation.name

    def kernel(x, dim, dtype):
        if dtype is not None:
            x = x.to(dtype)
        require_floating_point(name, x.dtype)
        if dim == -1:
            return operation.forward(x)
        return operation.forward(x, axis=wrapped(dim, x.dim()))

    def check(x, dim, dtype):
        require_floating_point(name, dtype or x.dtype, torch.float64)
        wrapped(dim, x.dim())

    def check_backward(grad_output, y, dim, input_dtype):
        wrapped(dim, y.dim())
        require(grad_output, "grad_output", shape=y.shape, dtypes=(y.dtype,))

    def fake(x, dim, dtype):
        dtype = dtype or x.dtype
        if x.device.type == "cuda":
            require_floating_point(name, dtype)
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    def save(ctx, inputs, y):
        x, ctx.dim, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(y)

    def gradient(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return backward(grad_output, y, ctx.dim, ctx.dtype), None, None

    def backward_kernel(grad_output, y, dim, input_dtype):
        if dim == -1:
            dx = operation.backward(grad_output, y)
        else:
            dx = operation.backward(grad_output, y, axis=wrapped(dim, y.dim()))
        return dx if dx.dtype is input_dtype else dx.to(input_dtype)

    def by_torch(grad_output, y, dim, input_dtype):
        return backward_on_cpu(grad_output, y, dim, y.dtype).to(input_dtype)

    def fake_backward(grad_output, y, dim, input_dtype):
        return torch.empty_like(y, dtype=input_dtype, memory_format=torch.contiguous_format)

    backward = Operator(
        f"{name}_backward",
        "(Tensor grad_output, Tensor y, int dim, ScalarType input_dtype) -> Tensor",
        kernel=backward_kernel,
        on_cpu=by_torch,
        fake=fake_backward,
        check=check_backward,
        title=f"{title}Backward",
        vmap=lambda info, in_dims, *inputs: _vmapped(backward.overload, 2, info, in_dims, inputs),
    )
    forward = Operator(
        name,
        "(Tensor x, int dim, ScalarType? dtype) -> Tensor",
        kernel=kernel,
        on_cpu=on_cpu,
        fake=fake,
        check=check,
        save=save,
        gradient=gradient,
        title=title,
        vmap=lambda info, in_dims, *inputs: _vmapped(forward.overload, 1, info, in_dims, inputs),
        # Like torch.softmax, which autocast makes float32 on a GPU, unless a dtype is asked for.
        autocast={"cuda": lambda x, dim, dtype: (x, dim, dtype or _autocast_dtype(x))},
    )
    return forward


def _autocast_dtype(x):
    return torch.float32 if x.is_floating_point() and x.dtype is not torch.float64 else None


def wrapped(dim, n_dims):
    """`dim` counted from the front; IndexError as PyTorch's where there is no such dimension."""
    n = max(n_dims, 1)  # a 0-d tensor takes dim 0 and -1
    if not -n <= operator.index(dim) < n:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})"
        )
    return dim % n


def _vmapped(overload, n_tensors, info, in_dims, inputs):
    """The operator on a batch: one more axis in front."""
    *tensors, dim, last = inputs
    batched = [
        tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        for tensor, axis in zip(tensors, in_dims, strict=False)
    ]
    n_dims = batched[0].dim() - 1
    if n_dims == 0:  # scalars: each is a row by itself
        wrapped(dim, 0)
        y = overload(*(tensor.unsqueeze(-1) for tensor in batched), -1, last).squeeze(-1)
    else:
        y = overload(*batched, wrapped(dim, n_dims) + 1, last)
    return y, 0


_softmax = _register(
    kernels.softmax,
    lambda x, dim, dtype: torch.softmax(x, dim, dtype=dtype),
    _aten._softmax_backward_data,
)
_log_softmax = _register(
    kernels.log_softmax,
    lambda x, dim, dtype: torch.log_softmax(x, dim, dtype=dtype),
    _aten._log_softmax_backward_data,
)


def _dim(name, x, dim):
    """`dim` as an int; for None the axis that torch.nn.functional takes, with its warning."""
    if dim is not None:
        return whole(dim, "dim")
    if not is_dynamo_compiling():
        warnings.warn(
            f"Implicit dimension choice for {name} has been deprecated. Change the call to include "
            "dim=X as an argument.",
            stacklevel=4,  # the line that calls softmax
        )
    return 0 if x.dim() in (0, 1, 3) else 1


def _dtype(dtype):
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be torch.dtype, not {type(dtype).__name__}")
    return dtype


def softmax(x, dim=-1, dtype=None):
    """exp(x) / Σ exp(x), the sum along `dim`, as `torch.softmax`; the result is contiguous.

    x      float32, float16 or bfloat16, any shape, 0-d and empty included
    dim    the axis of the sum, from either end. It costs one launch; an axis that is long beside
           all others, and not the last, copies too. None is 0 for 0, 1 or 3 dimensions, else 1,
           with a warning, as in torch.nn.functional
    dtype  what to convert `x` to first (another launch); the result's dtype

    On a GPU, autocast makes it float32. Raises IndexError where there is no axis `dim`, TypeError
    where it is no int, and NotImplementedError for another dtype. Second gradients raise
    RuntimeError. Notebooks 03, 04.
    """
    dim = dim if type(dim) is int else _dim("softmax", x, dim)
    return _softmax(x, dim, dtype if dtype is None else _dtype(dtype))


def log_softmax(x, dim=-1, dtype=None):
    """x − log Σ exp(x), the sum along `dim`, as `torch.log_softmax`. All else as in `softmax`."""
    dim = dim if type(dim) is int else _dim("log_softmax", x, dim)
    return _log_softmax(x, dim, dtype if dtype is None else _dtype(dtype))
