"""What the optimisers do to one element, in float32; the same in every rung. PyTorch's rules."""

import math

from course_lib import cuda
from course_lib.kernels.blocks.constants import ONE, ZERO


@cuda.jit(device=True)
def sgd_rule(p, g, buffer, lr, momentum, keep, weight_decay, nesterov, maximize, first_step):
    """(new parameter, new buffer) of one element; `keep` is 1 - dampening."""
    if maximize:
        g = -g
    if weight_decay != ZERO:
        g += weight_decay * p
    if momentum != ZERO:
        buffer = g if first_step else momentum * buffer + keep * g
        g = g + momentum * buffer if nesterov else buffer
    return p - lr * g, buffer


@cuda.jit(device=True)
def adam_corrections(step, log_beta1, log_beta2):
    """(1 - beta1^step, 1/√(1 - beta2^step)), the averages' corrections for their beginning at 0.

    By way of expm1, because 1 - beta^step would lose most of its digits while it is small.
    """
    first = -math.expm1(step * log_beta1)
    return first, ONE / math.sqrt(-math.expm1(step * log_beta2))


@cuda.jit(device=True)
def adam_gradient(p, g, lr, weight_decay, decoupled, maximize):
    """(parameter, gradient) with the weight decay in one or the other."""
    if maximize:
        g = -g
    if weight_decay != ZERO:
        if decoupled:
            p *= ONE - lr * weight_decay
        else:
            g += weight_decay * p
    return p, g


@cuda.jit(device=True)
def larger(a, b):
    """The larger of two, NaN if one of them is."""
    return a if a > b or a != a else b
