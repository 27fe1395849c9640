"""Every operation of the course: its ladders, how it is called, PyTorch's own, and the truth."""

import functools

import numpy as np

from course_lib import reference
from course_lib.kernels import activation, softmax
from course_lib.operations import fused, images, layers, training
from course_lib.operations.attention import attention_operation
from course_lib.operations.numbers import gradient, saved, torch
from course_lib.operations.passes import DIRECTIONS, Operation, Pass, largest

__all__ = ["DIRECTIONS", "OPERATIONS", "Operation", "Pass"]

_aten = torch.ops.aten


def _elementwise(operation, peer, peer_backward, **forward_scale):
    truth = getattr(reference, operation.name)

    def backward_inputs(x):
        kept = x if operation.saves == "x" else saved(peer, truth, x)
        return {"dy": gradient(x), operation.saves: kept}

    return Operation(
        activation,
        forward=Pass(
            operation.FORWARD,
            inputs=lambda x: {"x": x},
            ours=operation.forward,
            peer=peer,
            truth=truth,
            out=True,
            in_place=("x",),
            **forward_scale,
        ),
        backward=Pass(
            operation.BACKWARD,
            inputs=backward_inputs,
            ours=operation.backward,
            peer=peer_backward,
            truth=getattr(reference, f"{operation.name}_backward"),
            scale=lambda truth, dy, saved: largest(dy),
            scale_in_words="the row's largest |dy|",
            out=True,
            in_place=("dy", operation.saves),
        ),
    )


def _tail(power):
    """Scale of x·Φ(x): below 0, Φ's relative error is x's times |x|^power, and Φ underflows."""

    def scale(truth, x):
        steep = 1 + np.abs(np.minimum(x, 0)) ** power
        return largest(np.abs(truth) * steep + np.abs(x) * 2.0**-106)

    words = f"the row's largest |y| · (1 + |x|^{power} where x < 0), and 2⁻¹⁰⁶ · |x|"
    return dict(scale=scale, scale_in_words=words)


def _softmax(operation, images=False):
    """Along the last axis; of `images`, along their channels, by the rung for other axes."""
    axis = 1 if images else -1
    peer = getattr(torch, operation.name)
    peer_backward = getattr(_aten, f"_{operation.name}_backward_data")
    row = "pixel" if images else "row"

    def size(x):
        return np.abs(x).max(axis=axis, keepdims=True, initial=0.0)

    def truth(name):
        function = getattr(reference, name)
        return lambda *inputs: np.moveaxis(
            function(*(np.moveaxis(x, axis, -1) for x in inputs)), -1, axis
        )

    def peer_forward(x):
        return peer(x, axis)

    forward = truth(operation.name)

    def backward_scale(truth, dy, y):
        if operation is softmax.softmax:
            return size(y) * size(dy)
        return np.maximum(size(truth), size(dy))

    def alike(ladder, launcher):
        return dict(
            ours=functools.partial(launcher, axis=axis) if images else launcher,
            chosen=lambda *inputs: softmax.default_choice(ladder, inputs, axis).rung,
            rungs=tuple(
                name for name in ladder.variants if name.startswith("strided") == images
            ),
            out=True,
        )

    return Operation(
        softmax,
        forward=Pass(
            operation.FORWARD,
            inputs=lambda x: {"x": x},
            peer=peer_forward,
            truth=forward,
            scale=lambda truth, x: size(truth),
            scale_in_words=f"the {row}'s largest |y|",
            in_place=("x",),
            **alike(operation.FORWARD, operation.forward),
        ),
        backward=Pass(
            operation.BACKWARD,
            inputs=lambda x: {"dy": gradient(x), "y": saved(peer_forward, forward, x)},
            peer=lambda dy, y: peer_backward(dy, y, axis, y.dtype),
            truth=truth(f"{operation.name}_backward"),
            scale=backward_scale,
            scale_in_words=(
                f"the {row}'s largest |y| · largest |dy|" if operation is softmax.softmax
                else f"the {row}'s largest |dx| or |dy|"
            ),
            in_place=("dy", "y"),
            **alike(operation.BACKWARD, operation.backward),
        ),
        n_dims=4 if images else None,
        layout=layers.IMAGES if images else "any shape, and works along its last axis",
        example=(2, 5, 6, 8) if images else (8, 50),
    )  # fmt: skip


OPERATIONS = {
    "softmax": _softmax(softmax.softmax),
    "log_softmax": _softmax(softmax.log_softmax),
    "pixel_softmax": _softmax(softmax.softmax, images=True),
    "pixel_log_softmax": _softmax(softmax.log_softmax, images=True),
    "relu": _elementwise(
        activation.relu, torch.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0)
    ),
    "sigmoid": _elementwise(activation.sigmoid, torch.sigmoid, _aten.sigmoid_backward),
    "swish": _elementwise(activation.swish, _aten.silu, _aten.silu_backward),
    "relu6": _elementwise(
        activation.relu6, lambda x: _aten.hardtanh(x, 0, 6),
        lambda dy, y: _aten.hardtanh_backward(dy, y, 0, 6),
    ),
    "leaky_relu": _elementwise(
        activation.leaky_relu, _aten.leaky_relu,
        lambda dy, x: _aten.leaky_relu_backward(dy, x, 0.01, False),
    ),
    "hard_sigmoid": _elementwise(
        activation.hard_sigmoid, _aten.hardsigmoid, _aten.hardsigmoid_backward
    ),
    "hard_swish": _elementwise(activation.hard_swish, _aten.hardswish, _aten.hardswish_backward),
    "gelu": _elementwise(activation.gelu, _aten.gelu, _aten.gelu_backward, **_tail(2)),
    "gelu_tanh": _elementwise(
        activation.gelu_tanh, lambda x: _aten.gelu(x, approximate="tanh"),
        lambda dy, x: _aten.gelu_backward(dy, x, approximate="tanh"), **_tail(3),
    ),
    "cross_entropy": fused.cross_entropy_operation(images=False),
    "pixel_cross_entropy": fused.cross_entropy_operation(images=True),
    "softmax_dropout": fused.softmax_dropout_operation(),
    "scaled_softmax": fused.scaled_softmax_operation(),
    "bn_relu_softmax": fused.bn_relu_softmax_operation(),
    "dice_loss": fused.dice_loss_operation(),
    "global_avg_pool": images.global_avg_pool_operation(),
    "squeeze_excite": images.squeeze_excite_operation(),
    "linear": layers.linear_operation(),
    "conv2d": layers.conv2d_operation(),
    "depthwise_conv2d": layers.conv2d_operation(depthwise=True),
    "pointwise_conv2d": layers.conv2d_operation(pointwise=True),
    "conv_transpose2d": layers.conv_transpose2d_operation(),
    "max_pool2d": layers.max_pool2d_operation(),
    "batch_norm": layers.batch_norm_operation(),
    "layer_norm": layers.layer_norm_operation(),
    "upsample": layers.upsample_operation(),
    "attention": attention_operation(),
    "dropout": training.dropout_operation(),
    "sgd": training.sgd_operation(),
    "adam": training.adam_operation(),
}
