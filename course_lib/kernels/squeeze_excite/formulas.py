"""The activation and the gate, and their gradients.

A kernel is told which by a number that is the same for all threads, so that the branch costs next
to nothing and one compiled kernel serves all of them.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.activation import (
    relu_gradient,
    relu_value,
    sigmoid_value,
    swish_gradient,
    swish_value,
)
from course_lib.kernels.blocks.constants import ONE, ZERO

SILU, RELU, IDENTITY = 0, 1, 2
SIGMOID, HARD_SIGMOID = 0, 1
ACTIVATIONS = {"silu": SILU, "relu": RELU}
GATES = {"sigmoid": SIGMOID, "hard_sigmoid": HARD_SIGMOID}
THREE, SIX, SIXTH = np.float32(3), np.float32(6), np.float32(1 / 6)


@cuda.jit(device=True)
def activate(hidden, activation):
    if activation == SILU:
        return swish_value(hidden)
    if activation == RELU:
        return relu_value(hidden)
    return hidden


@cuda.jit(device=True)
def activation_gradient(d, hidden, activation):
    """The gradient of `hidden` from that of activate(hidden)."""
    if activation == SILU:
        return swish_gradient(d, hidden)
    if activation == RELU:
        return relu_gradient(d, hidden)
    return d


@cuda.jit(device=True)
def gate_of(logit, gate):
    if gate == SIGMOID:
        return sigmoid_value(logit)
    shifted = logit + THREE
    shifted = ZERO if shifted < ZERO else shifted  # a NaN is not < 0, and passes
    return (SIX if shifted > SIX else shifted) * SIXTH


@cuda.jit(device=True)
def gate_gradient(d, logit, gate):
    """The gradient of `logit` from that of gate_of(logit)."""
    if gate == SIGMOID:
        s = sigmoid_value(logit)
        return d * (ONE - s) * s
    return d * SIXTH if -THREE < logit and logit < THREE else ZERO
