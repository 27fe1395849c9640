"""Activations as operators of PyTorch, each in two forms: one makes y, one writes it over x."""

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling, is_exporting

from course_lib.kernels import activation
from course_lib.ops.checks import require, require_tensor
from course_lib.ops.registration import Operator
from course_lib.runtime.host.arrays import is_dense, laid_out_like
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten


class _InPlace(Operator):
    """y = f(x) written over x, which the node of autograd's graph then stands for.

    Its implementations write and return nothing, as its schema says. Where the gradient needs x
    itself, recording costs a copy of it, as PyTorch's own in-place forms do.
    """

    def __init__(self, *arguments, out_of_place, needs_x, **options):
        super().__init__(*arguments, **options)
        self._out_of_place = out_of_place
        gradient = options["gradient"]

        def forward(ctx, implementation, x, *options):
            saved = x.clone() if needs_x(*options) else x
            implementation(x, *options)
            ctx.mark_dirty(x)
            ctx.save_for_backward(saved)
            ctx.options = options
            return x

        def backward(ctx, grad_output):
            return None, *gradient(ctx, grad_output)

        methods = dict(forward=forward, backward=backward, jvp=self.no_jvp)
        methods = {name: staticmethod(method) for name, method in methods.items()}
        kind = type(torch.autograd.Function)
        self._function = kind(options["title"], (torch.autograd.Function,), methods)
        self._record = super(torch.autograd.Function, self._function).apply

    def __call__(self, x, *options):
        if not is_dynamo_compiling():
            if is_exporting():  # programs for others have no operators that write
                return x.copy_(self._out_of_place(x, *options))
            _require_writable(x)
        super().__call__(x, *options)
        return x

    def _below_autograd(self, x, *options):
        require_tensor(x, "input")
        if torch.is_grad_enabled() and x.requires_grad or forward_ad._current_level >= 0:
            super()._below_autograd(x, *options)
        else:
            self._dispatched(x, *options)


def _require_writable(x):
    """Raise what PyTorch raises where autograd lets nobody write: it would see it too late."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed: clone it"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        leaf, what = (x._base, "a view of a leaf") if x._is_view() else (x, "a leaf")
        if leaf.is_leaf and leaf.requires_grad:
            raise RuntimeError(
                f"{what} Variable that requires grad is being used in an in-place operation."
            )


def _check_backward(grad_output, saved, *options):
    require(grad_output, "grad_output", shape=saved.shape, dtypes=(saved.dtype,))


def _register(
    name, kernels_of, on_cpu, backward_on_cpu, in_place_on_cpu=None, *, out_of_y=False, option="",
    needs_x=None,
):  # fmt: skip
    """(y = f(x), the same in place), with dx = f'(x)·dy.

    kernels_of       the `Activation` for the option, if there is one
    in_place_on_cpu  PyTorch's; without it there is no such form
    out_of_y         whether the gradient is computed from y, and not from x
    option           its type and its name, as in a schema
    needs_x          of the option: whether the in-place form's gradient is computed from x
    """
    typed = option and f", {option}"
    title = name.title().replace("_", "")

    def kernel_in_place(x, *options):
        kernels = kernels_of(*options)
        torch.autograd.graph.increment_version(x)  # PyTorch doesn't see what a kernel writes
        if is_dense(x):
            kernels.forward(x, out=x)
        else:  # the kernels walk through memory without gaps
            x.copy_(kernels.forward(x))

    def by_torch_in_place(x, *options):
        in_place_on_cpu(x, *options)  # and, as the schema says, nothing is returned

    def backward_by_torch(dy, saved, *options):
        return laid_out_like(backward_on_cpu(dy, saved, *options), torch.empty_like(saved))

    def mapped(info, in_dims, x, *options):  # elementwise: all samples at once
        return out_of_place(x, *options), in_dims[0]

    def mapped_in_place(info, in_dims, x, *options):
        in_place(x, *options)
        return None, None

    def save(ctx, inputs, y):
        x, *ctx.options = inputs
        ctx.save_for_backward(y if out_of_y else x)

    def gradient(ctx, grad_output):
        dx = backward(grad_output, *ctx.saved_tensors, *ctx.options)
        return dx, *[None] * len(ctx.options)

    backward = Operator(
        f"{name}_backward",
        f"(Tensor grad_output, Tensor saved{typed}) -> Tensor",
        kernel=cached_launch(2)(
            lambda dy, saved, *options: kernels_of(*options).backward(dy, saved)
        ),
        on_cpu=backward_by_torch,
        fake=lambda grad_output, saved, *options: torch.empty_like(saved),
        check=_check_backward,
        title=f"{title}Backward",
    )
    out_of_place = Operator(
        name,
        f"(Tensor x{typed}) -> Tensor",
        kernel=cached_launch(1)(lambda x, *options: kernels_of(*options).forward(x)),
        on_cpu=on_cpu,
        fake=lambda x, *options: torch.empty_like(x),
        save=save,
        gradient=gradient,
        title=title,
        vmap=mapped,
    )
    in_place = in_place_on_cpu and _InPlace(
        f"{name}_",
        f"(Tensor(a!) x{typed}) -> ()",
        kernel=kernel_in_place,
        on_cpu=by_torch_in_place,
        fake=lambda x, *options: None,
        gradient=gradient,
        title=title,
        vmap=mapped_in_place,
        out_of_place=out_of_place,
        needs_x=needs_x or (lambda: not out_of_y),
    )
    return out_of_place, in_place


_relu, _relu_ = _register(
    "relu", lambda: activation.relu, torch.relu,
    lambda dy, y: _aten.threshold_backward(dy, y, 0), torch.relu_, out_of_y=True,
)  # fmt: skip
_relu6, _relu6_ = _register(
    "relu6", lambda: activation.relu6, lambda x: _aten.hardtanh(x, 0, 6),
    lambda dy, y: _aten.hardtanh_backward(dy, y, 0, 6), lambda x: _aten.hardtanh_(x, 0, 6),
    out_of_y=True,
)  # fmt: skip
_leaky_relu, _leaky_relu_ = _register(
    "leaky_relu", activation.leaky_relu_of, _aten.leaky_relu,
    lambda dy, x, slope: _aten.leaky_relu_backward(dy, x, slope, False), _aten.leaky_relu_,
    option="float negative_slope", needs_x=lambda slope: slope < 0,
)  # fmt: skip
_sigmoid, _ = _register(
    "sigmoid", lambda: activation.sigmoid, torch.sigmoid, _aten.sigmoid_backward, out_of_y=True
)
_silu, _silu_ = _register(
    "silu", lambda: activation.swish, _aten.silu, _aten.silu_backward, _aten.silu_
)
_hardsigmoid, _hardsigmoid_ = _register(
    "hardsigmoid", lambda: activation.hard_sigmoid, _aten.hardsigmoid, _aten.hardsigmoid_backward,
    _aten.hardsigmoid_,
)  # fmt: skip
_hardswish, _hardswish_ = _register(
    "hardswish", lambda: activation.hard_swish, _aten.hardswish, _aten.hardswish_backward,
    _aten.hardswish_,
)  # fmt: skip
_gelu, _ = _register("gelu", lambda: activation.gelu, _aten.gelu, _aten.gelu_backward)
_gelu_tanh, _ = _register(
    "gelu_tanh", lambda: activation.gelu_tanh, lambda x: _aten.gelu(x, approximate="tanh"),
    lambda dy, x: _aten.gelu_backward(dy, x, approximate="tanh"),
)  # fmt: skip
_GELUS = {"none": _gelu, "tanh": _gelu_tanh}

# All take float32, float16 or bfloat16, on a CPU float64 too, of any shape and memory format, and
# raise TypeError for another dtype, RuntimeError for second gradients and for what autograd does
# not let be written over. With `inplace`, y is written over `input`, which is also the result.


def relu(input, inplace=False):
    """max(x, 0), elementwise, as `torch.nn.functional.relu`. Notebook 01."""
    return _relu_(input) if inplace else _relu(input)


def relu6(input, inplace=False):
    """min(max(x, 0), 6), elementwise, as `torch.nn.functional.relu6`."""
    return _relu6_(input) if inplace else _relu6(input)


def leaky_relu(input, negative_slope=0.01, inplace=False):
    """x where x > 0, else negative_slope·x, as `torch.nn.functional.leaky_relu`.

    Kernels are compiled for each slope. In place, a slope below 0 costs a copy of x for the
    gradient, where PyTorch has none.
    """
    if inplace:
        return _leaky_relu_(input, float(negative_slope))
    return _leaky_relu(input, float(negative_slope))


def sigmoid(input):
    """1/(1 + e⁻ˣ), elementwise, as `torch.sigmoid`. Notebook 01."""
    return _sigmoid(input)


def silu(input, inplace=False):
    """x·sigmoid(x), elementwise, as `torch.nn.functional.silu`; the kernels call it swish."""
    return _silu_(input) if inplace else _silu(input)


def hardsigmoid(input, inplace=False):
    """min(max(x + 3, 0), 6)/6, elementwise, as `torch.nn.functional.hardsigmoid`."""
    return _hardsigmoid_(input) if inplace else _hardsigmoid(input)


def hardswish(input, inplace=False):
    """x·hardsigmoid(x), elementwise, as `torch.nn.functional.hardswish`."""
    return _hardswish_(input) if inplace else _hardswish(input)


def gelu(input, *, approximate="none"):
    """x·Φ(x) with the normal distribution Φ, elementwise, as `torch.nn.functional.gelu`.

    approximate  "none", or "tanh" for x·(1 + tanh(√(2/π)(x + 0.044715x³)))/2. ValueError for others
    """
    if approximate not in _GELUS:
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return _GELUS[approximate](input)
