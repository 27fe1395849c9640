"""Batch normalisation over N, H and W of each channel, forward and backward."""

import numpy as np

from .double import double

_AXES = (0, 2, 3)


def batch_norm(x, weight=None, bias=None, *, eps=1e-5, relu=False, mean=None, var=None):
    """(y, mean, 1/σ); with `mean` and `var`, as in inference, with these statistics."""
    (x,) = double(x)
    if mean is None:
        mean = x.mean(axis=_AXES)
        var = ((x - _per_channel(mean)) ** 2).mean(axis=_AXES)
    mean, var = double(mean, var)
    rstd = 1 / np.sqrt(var + eps)
    y = (x - _per_channel(mean)) * _per_channel(rstd)
    y = y if weight is None else y * _per_channel(double(weight)[0])
    y = y if bias is None else y + _per_channel(double(bias)[0])
    return (np.where(y <= 0, 0.0, y) if relu else y), mean, rstd


def batch_norm_running(x, running_mean, running_var, momentum):
    """The running statistics after a batch; the variance is the unbiased one."""
    x, running_mean, running_var = double(x, running_mean, running_var)
    mean, var = x.mean(axis=_AXES), x.var(axis=_AXES, ddof=1)
    keep = 1 - momentum
    return keep * running_mean + momentum * mean, keep * running_var + momentum * var


def batch_norm_backward(dy, x, weight, mean, rstd, *, y=None, training=True):
    """(dx, dweight, dbias); `y`, if given, is the output of a ReLU behind the normalisation.

    Without `training`, mean and 1/σ are constants: they do not depend on x.
    """
    dy, x, mean, rstd = double(dy, x, mean, rstd)
    if y is not None:
        dy = np.where(double(y)[0] <= 0, 0.0, dy)
    x_hat = (x - _per_channel(mean)) * _per_channel(rstd)
    dweight, dbias = (dy * x_hat).sum(axis=_AXES), dy.sum(axis=_AXES)
    factor = rstd if weight is None else rstd * double(weight)[0]
    if training:
        n = x.size // x.shape[1]
        dy = dy - _per_channel(dbias / n) - x_hat * _per_channel(dweight / n)
    return dy * _per_channel(factor), dweight, dbias


def _per_channel(values):
    return values[:, None, None]
