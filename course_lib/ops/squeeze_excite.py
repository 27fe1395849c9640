"""Squeeze and excitation as an operator of PyTorch: pooling, two dense layers, gate and scaling."""

import torch

from course_lib.kernels import squeeze_excite as kernels
from course_lib.ops.checks import of_sums, require
from course_lib.ops.formats import memory_format
from course_lib.ops.registration import Operator, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten

#: Name -> (the function, its gradient from (dy, x)): what PyTorch computes with on a CPU.
_ACTIVATIONS = {
    "silu": (_aten.silu, _aten.silu_backward),
    "relu": (torch.relu, lambda dy, x: _aten.threshold_backward(dy, x, 0)),
}
_GATES = {
    "sigmoid": (torch.sigmoid, lambda dy, x: _aten.sigmoid_backward(dy, torch.sigmoid(x))),
    "hard_sigmoid": (_aten.hardsigmoid, _aten.hardsigmoid_backward),
}
ACTIVATIONS, GATES = tuple(_ACTIVATIONS), tuple(_GATES)


class _Unconverted(Operator):
    """An operator that sums in float32 whatever it is given: autocast has nothing to convert.

    Direct calls that autograd does not record take the kernel `without_gradient`, which gives less.
    """

    def __init__(self, name, schema, *, kernel, without_gradient=None, **options):
        same = dict.fromkeys(("cuda", "cpu", "mps"), lambda *inputs: inputs)
        super().__init__(name, schema, kernel=kernel, autocast=same, **options)
        record, full = self._record, self.kernel
        self._record = lambda _, *inputs: record(full, *inputs)
        if without_gradient is not None:
            self.kernel = self._explained(without_gradient)


@cached_launch(5)
def _kernel(x, weight1, bias1, weight2, bias2, activation, gate):
    require_floating_point("squeeze_excite", x.dtype)
    return kernels.forward(x, weight1, bias1, weight2, bias2, activation=activation, gate=gate)


@cached_launch(5)
def _kernel_of_y(*inputs):
    """The first result alone: the others are then workspace, of which a repetition makes one."""
    return _kernel.__wrapped__(*inputs)[:1]


@cached_launch(7)
def _backward_kernel(grad_output, x, weight1, weight2, mean, hidden, logit, activation, gate):
    return kernels.backward(
        grad_output, x, weight1, weight2, mean, hidden, logit, activation=activation, gate=gate
    )


def _by_torch(x, weight1, bias1, weight2, bias2, activation, gate):
    dtype = of_sums(x.dtype)
    weight1, bias1, weight2, bias2 = (
        tensor.to(dtype) for tensor in (weight1.flatten(1), bias1, weight2.flatten(1), bias2)
    )
    mean = x.mean((2, 3), dtype=dtype)
    hidden = torch.addmm(bias1, mean, weight1.t())
    logit = torch.addmm(bias2, _ACTIVATIONS[activation][0](hidden), weight2.t())
    y = x * _GATES[gate][0](logit)[:, :, None, None]
    return y.to(x.dtype).contiguous(memory_format=memory_format(x)), mean, hidden, logit


def _backward_by_torch(grad_output, x, weight1, weight2, mean, hidden, logit, activation, gate):
    """The steps of the formula in reverse; notebook 06 derives them."""
    dtype = mean.dtype
    activate, activation_gradient = _ACTIVATIONS[activation]
    scale, gate_gradient = _GATES[gate]
    first, second = (weight.flatten(1).to(dtype) for weight in (weight1, weight2))
    dy = grad_output.to(dtype)
    dlogit = gate_gradient((dy * x).sum((2, 3)), logit)
    dhidden = activation_gradient(dlogit @ second, hidden)
    share = dhidden @ first / max(1, x.shape[2] * x.shape[3])  # of each pixel in its mean
    dx = dy * scale(logit)[:, :, None, None] + share[:, :, None, None]
    gradients = (
        (dhidden.t() @ mean).to(weight1.dtype).reshape(weight1.shape),
        dhidden.sum(0).to(weight1.dtype),
        (dlogit.t() @ activate(hidden)).to(weight2.dtype).reshape(weight2.shape),
        dlogit.sum(0).to(weight2.dtype),
    )
    return dx.to(x.dtype).contiguous(memory_format=memory_format(x)), *gradients


def _fake(x, weight1, bias1, weight2, bias2, activation, gate):
    N, C, R = *x.shape[:2], weight1.shape[0]
    sums = (x.new_empty((N, size), dtype=of_sums(x.dtype)) for size in (C, R, C))
    return torch.empty_like(x, memory_format=memory_format(x)), *sums


def _fake_backward(grad_output, x, weight1, weight2, *_):
    R, C = weight1.shape[:2]
    return (
        torch.empty_like(x, memory_format=memory_format(x)),
        weight1.new_empty(weight1.shape),
        weight1.new_empty((R,)),
        weight2.new_empty(weight2.shape),
        weight2.new_empty((C,)),
    )


def _check(x, weight1, bias1, weight2, bias2, activation, gate):
    """Raise what the kernels' launcher raises for arguments that do not go together."""
    for kind, name, names in (("activation", activation, ACTIVATIONS), ("gate", gate, GATES)):
        if name not in names:
            raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(names)}")
    require_floating_point("squeeze_excite", x.dtype, torch.float64)
    if x.dim() != 4:
        raise TypeError(f"x must have 4 dimensions, not shape {tuple(x.shape)}")
    C, R = x.shape[1], weight1.shape[0] if weight1.dim() else 0
    for name, tensor, shape in (
        ("weight1", weight1, (R, C)),
        ("bias1", bias1, (R,)),
        ("weight2", weight2, (C, R)),
        ("bias2", bias2, (C,)),
    ):
        if tensor is None:  # the backward pass needs no bias
            continue
        found = tuple(tensor.shape)
        if found != shape and (len(shape) == 1 or found != (*shape, 1, 1)):
            raise TypeError(f"{name} must have shape {shape}, not {found}")
        dtypes = (weight1.dtype,) if tensor is not weight1 else (x.dtype, torch.float32)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
            raise TypeError(f"{name} must be {wanted}, not {tensor.dtype}")


def _check_backward(grad_output, x, weight1, weight2, mean, hidden, logit, activation, gate):
    R = weight1.shape[0] if weight1.dim() else 0
    _check(x, weight1, None, weight2, None, activation, gate)
    require(grad_output, "grad_output", shape=x.shape, dtypes=(x.dtype,))
    for name, saved, n in (("mean", mean, x.shape[1]), ("hidden", hidden, R),
                           ("logit", logit, x.shape[1])):  # fmt: skip
        require(saved, name, shape=(x.shape[0], n), dtypes=(of_sums(x.dtype),))


def _save(ctx, inputs, outputs):
    x, weight1, _, weight2, _, *ctx.options = inputs
    _, mean, hidden, logit = outputs
    ctx.mark_non_differentiable(mean, hidden, logit)
    ctx.save_for_backward(x, weight1, weight2, mean, hidden, logit)


def _gradient(ctx, grad_output, *_):
    gradients = _backward(grad_output, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None


_backward = _Unconverted(
    "squeeze_excite_backward",
    "(Tensor grad_output, Tensor x, Tensor weight1, Tensor weight2, Tensor mean, Tensor hidden, "
    "Tensor logit, str activation, str gate) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="SqueezeExciteBackward",
)
_squeeze_excite = _Unconverted(
    "squeeze_excite",
    "(Tensor x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2, str activation, "
    "str gate) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_kernel,
    without_gradient=_kernel_of_y,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    title="SqueezeExcite",
)


def squeeze_excite(x, weight1, bias1, weight2, bias2, activation="silu", gate="sigmoid"):
    """x · gate(W2 · activation(W1 · mean(x) + b1) + b2), a number for each channel of each image.

    x                (N, C, H, W), or (C, H, W); float32, float16 or bfloat16, on a CPU float64 too.
                     Contiguous or channels-last, and y the same; in other layouts it is copied
    weight1, weight2 (R, C) and (C, R), or those of 1×1 convolutions, (R, C, 1, 1) and (C, R, 1, 1)
    bias1, bias2     (R,) and (C,). The weights and biases are all of x's dtype, or all float32
    activation       "silu" or "relu"
    gate             "sigmoid" or "hard_sigmoid"

    All but x and y is float32 inside; so autocast converts nothing, and y has x's dtype, as it has
    where autocast runs PyTorch's layers. All five tensors have gradients; for them x itself and
    N·(2C + R) numbers are kept. Raises TypeError for a wrong shape or dtype, ValueError for another
    activation or gate, NotImplementedError for integers, RuntimeError for second gradients.

    Hu, Shen and Sun, "Squeeze-and-Excitation Networks" (2018). Notebook 06.
    """
    if x.dim() == 3:
        y, *_ = _squeeze_excite(x[None], weight1, bias1, weight2, bias2, activation, gate)
        return y[0]
    return _squeeze_excite(x, weight1, bias1, weight2, bias2, activation, gate)[0]
