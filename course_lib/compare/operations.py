"""What can be compared: each operation with a ladder, what PyTorch calls it, and its truth."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from course_lib import reference
from course_lib.kernels import activation, cross_entropy, global_avg_pool, softmax

_aten = torch.ops.aten


def _largest(x):
    """The largest magnitude of each row, for broadcasting."""
    return np.abs(x).max(axis=-1, keepdims=True, initial=0.0)


@dataclass(frozen=True)
class Pass:
    """One direction of one operation. Works on PyTorch tensors; `truth` and `scale` on float64.

    variants  the rungs, in teaching order
    default   function(shape): the rung that runs when none is named
    inputs    function(x), x random numbers of the shape asked for: {name: what `ours` takes}
    ours      function(*inputs, variant=…); allocates its result
    peer      function(*inputs): PyTorch's result
    truth     function(*inputs): the right result
    scale     function(truth, *inputs): what the error of each element is measured against
    """

    variants: tuple
    default: Callable
    inputs: Callable
    ours: Callable
    peer: Callable
    truth: Callable
    scale: Callable = lambda truth, *inputs: _largest(truth)
    scale_in_words: str = "the row's largest |y|"


@dataclass(frozen=True)
class Operation:
    """Both passes, the dtypes taken, and what the dimensions of the input mean."""

    forward: Pass
    backward: Pass
    dtypes: tuple
    n_dims: int | None = None  # None: any number
    layout: str = "any shape"


def _gradient(x):
    """A dy for x: as random, of the same shape and dtype, and not correlated with it."""
    generator = torch.Generator().manual_seed(x.numel() + 1)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


def _elementwise(operation, peer, peer_backward):
    def backward_inputs(x):
        return {"dy": _gradient(x), operation.saves: x if operation.saves == "x" else peer(x)}

    return Operation(
        forward=Pass(
            tuple(operation.VARIANTS),
            lambda shape: activation.DEFAULT,
            inputs=lambda x: {"x": x},
            ours=operation.forward,
            peer=peer,
            truth=getattr(reference, operation.name),
        ),
        backward=Pass(
            tuple(operation.BACKWARD_VARIANTS),
            lambda shape: activation.DEFAULT,
            inputs=backward_inputs,
            ours=operation.backward,
            peer=peer_backward,
            truth=getattr(reference, f"{operation.name}_backward"),
            scale=lambda truth, dy, saved: _largest(dy),
            scale_in_words="the row's largest |dy|",
        ),
        dtypes=activation.DTYPES,
    )


def _softmax(operation, peer, peer_backward, scale, scale_in_words):
    return Operation(
        forward=Pass(
            tuple(operation.VARIANTS),
            lambda shape: softmax.default_variant(shape[-1], 1),
            inputs=lambda x: {"x": x},
            ours=operation.forward,
            peer=lambda x: peer(x, -1),
            truth=getattr(reference, operation.name),
        ),
        backward=Pass(
            tuple(operation.BACKWARD_VARIANTS),
            lambda shape: softmax.default_variant(shape[-1], 2),
            inputs=lambda x: {"dy": _gradient(x), "y": peer(x, -1)},
            ours=operation.backward,
            peer=lambda dy, y: peer_backward(dy, y, -1, y.dtype),
            truth=getattr(reference, f"{operation.name}_backward"),
            scale=scale,
            scale_in_words=scale_in_words,
        ),
        dtypes=softmax.DTYPES,
        layout="any shape, and works along its last axis",
    )


def _pool():
    pool = global_avg_pool

    def share(dy, size):
        return torch.div(dy[:, :, None, None].expand(*dy.shape, *size), math.prod(size))

    def mean_magnitude(truth, x):
        return np.abs(x).sum(axis=(2, 3)) / max(1, x.shape[2] * x.shape[3])

    return Operation(
        forward=Pass(
            tuple(pool.VARIANTS),
            lambda shape: pool.DEFAULT,
            inputs=lambda x: {"x": x},
            ours=pool.forward,
            peer=lambda x: torch.mean(x, (2, 3)),
            truth=reference.global_avg_pool,
            scale=mean_magnitude,
            scale_in_words="the plane's mean |x|",
        ),
        backward=Pass(
            tuple(pool.BACKWARD_VARIANTS),
            lambda shape: pool.DEFAULT,
            inputs=lambda x: {"dy": _gradient(x.new_empty(x.shape[:2])), "size": x.shape[2:]},
            ours=pool.backward,
            peer=share,
            truth=reference.global_avg_pool_backward,
            scale_in_words="the row's largest |dx|",
        ),
        dtypes=pool.DTYPES,
        n_dims=4,
        layout="images, N x C x H x W",
    )


def _cross_entropy():
    """With class indices, and a loss for each row: no sum hides an error."""
    options = {"reduction": "none"}

    def forward_inputs(x):
        generator = torch.Generator().manual_seed(x.numel() + 2)
        target = torch.randint(max(1, x.shape[1]), x.shape[:1], generator=generator)
        return {"logits": x, "target": target.to(x.device)}

    def backward_inputs(x):
        inputs = forward_inputs(x)
        return {"dloss": _gradient(x.new_empty(x.shape[0]))} | inputs

    def ours_backward(dloss, logits, target, *, variant):
        _, stats, normaliser = cross_entropy.forward(logits, target, variant=variant, **options)
        return cross_entropy.backward(
            dloss, logits, target, stats, normaliser, variant=variant, **options
        )

    def peer_backward(dloss, logits, target):
        logits = logits.detach().requires_grad_()
        loss = F.cross_entropy(logits, target, **options)
        return torch.autograd.grad(loss, logits, dloss)[0]

    def truth_backward(dloss, logits, target):
        return reference.cross_entropy_backward(dloss, logits, target.astype(int), **options)

    return Operation(
        forward=Pass(
            tuple(cross_entropy.VARIANTS),
            lambda shape: cross_entropy.DEFAULT,
            inputs=forward_inputs,
            ours=lambda *inputs, variant: cross_entropy.forward(
                *inputs, variant=variant, **options
            )[0],
            peer=lambda logits, target: F.cross_entropy(logits, target, **options),
            truth=lambda logits, target: reference.cross_entropy(
                logits, target.astype(int), **options
            ),
            scale=lambda truth, logits, target: _largest(logits)[:, 0],
            scale_in_words="the row's largest |logit|",
        ),
        backward=Pass(
            tuple(cross_entropy.BACKWARD_VARIANTS),
            lambda shape: cross_entropy.DEFAULT,
            inputs=backward_inputs,
            ours=ours_backward,
            peer=peer_backward,
            truth=truth_backward,
            scale=lambda truth, dloss, logits, target: np.abs(dloss)[:, None],
            scale_in_words="the row's |dloss|",
        ),
        dtypes=cross_entropy.DTYPES,
        n_dims=2,
        layout="logits, rows x classes",
    )


OPERATIONS = {
    "softmax": _softmax(
        softmax.softmax,
        torch.softmax,
        _aten._softmax_backward_data,
        scale=lambda truth, dy, y: _largest(y) * _largest(dy),
        scale_in_words="the row's largest |y| · largest |dy|",
    ),
    "log_softmax": _softmax(
        softmax.log_softmax,
        torch.log_softmax,
        _aten._log_softmax_backward_data,
        scale=lambda truth, dy, y: np.maximum(_largest(truth), _largest(dy)),
        scale_in_words="the row's largest |dx| or |dy|",
    ),
    "relu": _elementwise(
        activation.relu, torch.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0)
    ),
    "sigmoid": _elementwise(activation.sigmoid, torch.sigmoid, _aten.sigmoid_backward),
    "swish": _elementwise(activation.swish, _aten.silu, _aten.silu_backward),
    "cross_entropy": _cross_entropy(),
    "global_avg_pool": _pool(),
}
