"""What batch norm makes of a channel's moments: statistics to keep, and their part in dx."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.moments import reciprocal_deviation
from course_lib.runtime.intrinsics import load, store


@cuda.jit(device=True)
def keep_statistics(
    c, count, mean, m2, means, rstds, running_mean, running_var, tracked, momentum, eps
):
    """Write a channel's statistics, and move the running ones. Returns 1/σ."""
    rstd = reciprocal_deviation(m2 / count, eps)
    means[c], rstds[c] = mean, rstd
    if tracked:
        old_mean, old_var = load(running_mean, c), load(running_var, c)
        store(running_mean, c, old_mean + momentum * (mean - old_mean))
        store(running_var, c, old_var + momentum * (m2 / (count - ONE) - old_var))
    return rstd


@cuda.jit(device=True)
def shares_of_gradient(total, product, rstd, count, training):
    """(mean of dy, mean of dy·(x − mean) over the variance); zeros for constant statistics."""
    if not training:  # not by a factor of 0: the sums may be infinite or NaN
        return ZERO, ZERO
    share = ONE / np.float32(count)
    return total * share, product * rstd * rstd * share


@cuda.jit(device=True)
def through_statistics(x, mean, slope):
    """(x − mean)·slope, and 0 for a slope of 0 whatever x is."""
    return (x - mean) * slope if slope != ZERO else ZERO


@cuda.jit(device=True)
def activated(value, relu):
    """max(value, 0) if `relu`, NaN passed through."""
    return ZERO if relu and value <= ZERO else value
