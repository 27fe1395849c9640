"""Squeeze and excitation: each channel of an image is scaled by a number found from all channels.

Hu, Shen and Sun (2018). Derivation: notebook 06.
"""

import numpy as np

from .basic import (
    global_avg_pool,
    relu,
    relu_backward,
    sigmoid,
    sigmoid_backward,
    swish,
    swish_backward,
)
from .double import double


def _hard_sigmoid(z):
    return np.clip(z + 3.0, 0.0, 6.0) / 6.0  # NaN passes


def _hard_sigmoid_backward(dy, z):
    return np.where((z > -3.0) & (z < 3.0), dy / 6.0, 0.0)


#: Name -> (the function, its gradient from dy and the function's input).
ACTIVATIONS = {"silu": (swish, swish_backward), "relu": (relu, relu_backward)}
GATES = {
    "sigmoid": (sigmoid, lambda dy, z: sigmoid_backward(dy, sigmoid(z))),
    "hard_sigmoid": (_hard_sigmoid, _hard_sigmoid_backward),
}


def _excite(x, weight1, bias1, weight2, bias2, activation):
    """(mean, hidden, logit): what is found on the way; weights of two or of four dimensions."""
    weight1, bias1, weight2, bias2 = double(weight1, bias1, weight2, bias2)
    R, C = weight1.shape[:2]
    mean = global_avg_pool(x)
    hidden = mean @ weight1.reshape(R, C).T + bias1
    logit = ACTIVATIONS[activation][0](hidden) @ weight2.reshape(C, R).T + bias2
    return mean, hidden, logit


def squeeze_excite(x, weight1, bias1, weight2, bias2, activation="silu", gate="sigmoid"):
    """x · gate(W2 · activation(W1 · mean(x) + b1) + b2); x is N·C·H·W, the mean that of a plane."""
    (x,) = double(x)
    with np.errstate(invalid="ignore", over="ignore"):
        logit = _excite(x, weight1, bias1, weight2, bias2, activation)[2]
        return x * GATES[gate][0](logit)[:, :, None, None]


def squeeze_excite_backward(
    dy, x, weight1, bias1, weight2, bias2, activation="silu", gate="sigmoid"
):
    """(dx, dweight1, dbias1, dweight2, dbias2), the weights' gradients shaped as the weights."""
    dy, x = double(dy, x)
    with np.errstate(invalid="ignore", over="ignore"):
        mean, hidden, logit = _excite(x, weight1, bias1, weight2, bias2, activation)
        act, act_backward = ACTIVATIONS[activation]
        function, gate_backward = GATES[gate]
        first, second = double(weight1, weight2)
        R, C = first.shape[:2]
        dlogit = gate_backward((dy * x).sum(axis=(2, 3)), logit)
        dhidden = act_backward(dlogit @ second.reshape(C, R), hidden)
        dmean = dhidden @ first.reshape(R, C)
        share = dmean / np.float64(max(1, x.shape[2] * x.shape[3]))
        dx = dy * function(logit)[:, :, None, None] + share[:, :, None, None]
        dweight1 = (dhidden.T @ mean).reshape(first.shape)
        dweight2 = (dlogit.T @ act(hidden)).reshape(second.shape)
        return dx, dweight1, dhidden.sum(axis=0), dweight2, dlogit.sum(axis=0)
