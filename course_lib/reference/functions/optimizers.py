"""One step of an optimiser, for one parameter. PyTorch's rules."""

import numpy as np

from .double import double


def sgd(
    p, g, buffer, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
    maximize=False,
):  # fmt: skip
    """(new parameter, new momentum buffer); a `buffer` of None begins as the gradient."""
    p, g = double(p, g)
    g = (-g if maximize else g) + weight_decay * p
    if momentum:
        buffer = g if buffer is None else momentum * double(buffer)[0] + (1 - dampening) * g
        g = g + momentum * buffer if nesterov else buffer
    return p - lr * g, buffer


def adam(
    p, g, exp_avg, exp_avg_sq, step, *, max_exp_avg_sq=None, lr, betas=(0.9, 0.999), eps=1e-8,
    weight_decay=0.0, decoupled_weight_decay=False, maximize=False,
):  # fmt: skip
    """(new parameter, averages of the gradient, of its square, and the square's largest or None).

    `step` is how many steps were made before this one.
    """
    p, g, m, v = double(p, g, exp_avg, exp_avg_sq)
    g = -g if maximize else g
    if decoupled_weight_decay:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    peak = None if max_exp_avg_sq is None else np.maximum(double(max_exp_avg_sq)[0], v)
    n = step + 1
    size = np.sqrt((v if peak is None else peak) / (1 - betas[1] ** n)) + eps
    return p - lr / (1 - betas[0] ** n) * m / size, m, v, peak
