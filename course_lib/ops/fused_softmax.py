"""Softmax fused with what surrounds it, as operators: dropout after it; batch-norm, ReLU before."""

import math

import torch

from course_lib.kernels import bn_relu_softmax as bn_kernels
from course_lib.kernels import softmax_dropout as dropout_kernels
from course_lib.ops.checks import of_sums, require
from course_lib.ops.dropout import draw_outside_graphs, require_drawn, require_probability
from course_lib.ops.registration import Operator, as_float32, require_floating_point
from course_lib.ops.softmax import softmax, wrapped

_aten = torch.ops.aten

# ── dropout ──────────────────────────────────────────────────────────────────────────────────────
# What fixes the mask is drawn inside of the operator, when it runs: drawn outside, torch.compile
# would keep the numbers of its first call for ever. They go to the backward pass as a tensor on the
# CPU, `drawn`, which is read without waiting for the GPU.


def _draw(x):
    return draw_outside_graphs(x, x.numel(), "softmax_dropout")


def _check_dropout(x, p):
    require_probability(p)


def _check_dropout_backward(grad_output, x, stats, drawn, p):
    require_probability(p)
    require(grad_output, "grad_output", shape=x.shape, dtypes=(x.dtype,))
    require(stats, "stats", shape=(math.prod(x.shape[:-1]), 2), dtypes=(torch.float32,))
    require_drawn(drawn)


def _dropout_kernel(x, p):
    require_floating_point("softmax_dropout", x.dtype)
    seed, offset = _draw(x)
    return *dropout_kernels.forward(x, p, seed, offset), torch.tensor((seed, offset))


def _dropout_backward_kernel(grad_output, x, stats, drawn, p):
    return dropout_kernels.backward(grad_output, x, stats, p, *drawn.tolist())


def _dropout_by_torch(x, p):
    seed, offset = _draw(x)
    _, stats, drawn = _fake_dropout(x, p)  # stats: what only our backward kernels read
    drawn.copy_(torch.tensor((seed, offset)))
    return torch.softmax(x, -1) * _mask_by_torch(x, p, seed), stats.zero_(), drawn


def _dropout_backward_by_torch(grad_output, x, stats, drawn, p):
    dy = grad_output * _mask_by_torch(x, p, int(drawn[0]))
    y = torch.softmax(x, -1)
    return _aten._softmax_backward_data(dy, y, -1, y.dtype)


def _mask_by_torch(x, p, seed):
    """1/(1 − p) where an element is kept, 0 where it is dropped."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    return kept / (1 - p) if p < 1 else kept


def _fake_dropout(x, p):
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((math.prod(x.shape[:-1]), 2), dtype=torch.float32),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )


def _save_dropout(ctx, inputs, outputs):
    x, ctx.p = inputs
    _, stats, drawn = outputs
    ctx.mark_non_differentiable(stats, drawn)
    ctx.save_for_backward(x, stats, drawn)


def _refuse_vmap(info, in_dims, *inputs):
    # One by one, which is what vmap would resort to, it would pass over vmap's own `randomness`.
    raise RuntimeError(
        "course_lib.softmax_dropout can't be mapped by torch.vmap: give it the whole batch, or use "
        "torch.nn.functional.dropout"
    )


def _dropout_gradient(ctx, grad_output, *_):
    return _dropout_backward(grad_output, *ctx.saved_tensors, ctx.p), None


_dropout_backward = Operator(
    "softmax_dropout_backward",
    "(Tensor grad_output, Tensor x, Tensor stats, Tensor drawn, float p) -> Tensor",
    kernel=_dropout_backward_kernel,
    on_cpu=_dropout_backward_by_torch,
    fake=lambda grad_output, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    check=_check_dropout_backward,
    on_host=("drawn",),
    title="SoftmaxDropoutBackward",
)
_dropout = Operator(
    "softmax_dropout",
    "(Tensor x, float p) -> (Tensor, Tensor, Tensor)",
    kernel=_dropout_kernel,
    on_cpu=_dropout_by_torch,
    fake=_fake_dropout,
    check=_check_dropout,
    save=_save_dropout,
    gradient=_dropout_gradient,
    title="SoftmaxDropout",
    autocast={"cuda": lambda x, p: (as_float32(x), p)},
    vmap=_refuse_vmap,
    tags=(torch.Tag.nondeterministic_seeded,),
)


def softmax_dropout(x, p=0.5, training=True, dim=-1):
    """dropout(softmax(x)) in one pass: elements are 0 with probability `p`, others times 1/(1 − p).

    x         float32, float16 or bfloat16, any shape
    p         from 0 to 1
    training  False: the softmax alone
    dim       the axis of the softmax. The last costs one launch; another, copies too

    The mask is fixed by the state of PyTorch's generator of x's device, so `torch.manual_seed` and
    `torch.utils.checkpoint` hold it fast; it is another one than `torch.nn.functional.dropout`
    would draw. Neither mask nor softmax is stored. Raises ValueError for a `p` out of range,
    IndexError and NotImplementedError as `softmax` does, and RuntimeError for second gradients and
    while a CUDA graph is being captured, whose replays would all drop the same. Notebook 05.
    """
    require_probability(p)
    if not training:
        return softmax(x, dim)
    n_dims, p = x.dim(), float(p)
    dim = wrapped(dim, n_dims)
    if dim >= n_dims - 1:
        return _dropout(x, p)[0]
    result = _dropout(x.movedim(dim, -1), p)[0]  # which takes a copy, and so does the result
    return result.new_empty(x.shape).copy_(result.movedim(-1, dim))


# ── batch normalisation and ReLU ─────────────────────────────────────────────────────────────────

_PARAMETERS = "Tensor running_mean, Tensor running_var, Tensor weight, Tensor bias, float eps"


def _check_bn(x, running_mean, running_var, weight, bias, eps):
    if x.dim() != 2:
        raise TypeError(f"x must have 2 dimensions, not shape {tuple(x.shape)}")
    allowed = (x.dtype, of_sums(x.dtype))
    given = dict(running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    for name, tensor in given.items():
        if tuple(tensor.shape) != tuple(x.shape[1:]):
            raise TypeError(
                f"{name} must have shape {tuple(x.shape[1:])}, not {tuple(tensor.shape)}"
            )
        if tensor.dtype not in allowed:
            wanted = " or ".join(dict.fromkeys(map(str, allowed)))
            raise TypeError(f"{name} must be {wanted}, not {tensor.dtype}")
        allowed = (tensor.dtype,)
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, not {eps!r}")


def _check_bn_backward(grad_output, y, x, *parameters):
    _check_bn(x, *parameters)
    for name, image in (("grad_output", grad_output), ("y", y)):
        require(image, name, shape=x.shape, dtypes=(x.dtype,))


def _bn_kernel(x, running_mean, running_var, weight, bias, eps):
    require_floating_point("bn_relu_softmax", x.dtype)
    return bn_kernels.forward(x, running_mean, running_var, weight, bias, eps=eps)


def _bn_backward_kernel(grad_output, y, x, running_mean, running_var, weight, bias, eps):
    return bn_kernels.backward(grad_output, y, x, running_mean, running_var, weight, bias, eps=eps)


def _normalised_by_torch(x, running_mean, running_var, weight, bias, eps):
    """What goes into ReLU; float32 at least."""
    given = map(as_float32, (x, weight, bias, running_mean, running_var))
    return torch.native_batch_norm(*given, False, 0.0, eps)[0]


def _bn_by_torch(x, *parameters):
    z = _normalised_by_torch(x, *parameters)
    return torch.softmax(torch.relu(z), -1).to(x.dtype)


def _bn_backward_by_torch(grad_output, y, x, running_mean, running_var, weight, bias, eps):
    if x.numel() == 0:  # PyTorch's own ends the process
        return tuple(map(torch.zeros_like, (x, weight, bias)))
    z = _normalised_by_torch(x, running_mean, running_var, weight, bias, eps)
    dy, y, x_exact, *features = map(
        as_float32, (grad_output, y, x, weight, running_mean, running_var)
    )
    dz = _aten.threshold_backward(_aten._softmax_backward_data(dy, y, -1, y.dtype), z, 0)
    dx, *sums = _aten.native_batch_norm_backward(
        dz, x_exact, *map(torch.Tensor.contiguous, features), None, None, False, eps, [True] * 3
    )  # PyTorch's reads no strides of what each feature has
    return dx.to(x.dtype), *(total.to(weight.dtype) for total in sums)


def _fake_bn_backward(grad_output, y, x, running_mean, running_var, weight, bias, eps):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, *(weight.new_empty(weight.shape) for _ in range(2))


def _save_bn(ctx, inputs, y):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(y, *tensors)


def _bn_gradient(ctx, grad_output):
    if any(ctx.needs_input_grad[2:4]):
        raise RuntimeError(
            "course_lib.bn_relu_softmax has no gradient for running_mean and running_var: they are "
            "statistics, not parameters; detach them"
        )
    dx, dweight, dbias = _bn_backward(grad_output, *ctx.saved_tensors, ctx.eps)
    return dx, None, None, dweight, dbias, None


_bn_backward = Operator(
    "bn_relu_softmax_backward",
    f"(Tensor grad_output, Tensor y, Tensor x, {_PARAMETERS}) -> (Tensor, Tensor, Tensor)",
    kernel=_bn_backward_kernel,
    on_cpu=_bn_backward_by_torch,
    fake=_fake_bn_backward,
    check=_check_bn_backward,
    title="BnReluSoftmaxBackward",
)
_bn_relu_softmax = Operator(
    "bn_relu_softmax",
    f"(Tensor x, {_PARAMETERS}) -> Tensor",
    kernel=_bn_kernel,
    on_cpu=_bn_by_torch,
    fake=lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    check=_check_bn,
    save=_save_bn,
    gradient=_bn_gradient,
    title="BnReluSoftmax",
    autocast={"cuda": lambda *inputs: (*map(as_float32, inputs[:-1]), inputs[-1])},
)


def bn_relu_softmax(x, running_mean, running_var, weight, bias, eps=1e-5):
    """softmax(relu(batch_norm(x))) over the features, in one pass; statistics as in inference.

    x                                        (N, C); float32, float16 or bfloat16
    running_mean, running_var, weight, bias  (C,), all float32 or all of x's dtype
    eps                                      added to the variance

    Gradients are of x, weight and bias. On a GPU, autocast makes all of it float32. Raises
    TypeError for a wrong shape or dtype, NotImplementedError for integers, and RuntimeError for
    second gradients and for gradients of the statistics. Notebook 05.
    """
    return _bn_relu_softmax(x, running_mean, running_var, weight, bias, float(eps))
