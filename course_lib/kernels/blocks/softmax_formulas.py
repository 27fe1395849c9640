"""What sets softmax and log-softmax apart: a line each. Every kernel is made from these.

With m the largest number of a row and s = Σ exp(x − m):

    softmax      y = exp(x − m) / s          dx = y·(dy − Σ y·dy)
    log-softmax  y = (x − m) − log s         dx = dy − exp(y)·Σ dy
"""

import math
from collections import namedtuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ONE
from course_lib.runtime.intrinsics import fast_exp, fast_reciprocal
from course_lib.runtime.intrinsics.special import fast_exp2

#: Device functions of one operation. `keep` chooses what of (x − m, exp(x − m)) the forward pass
#: goes on with; `row_factor` is computed from s once per row, and `finish` applies it. `term` is
#: what the backward pass sums over a row, and `gradient` makes dx from the sum.
Formulas = namedtuple("Formulas", "name keep row_factor finish term gradient")

LOG2_E = np.float32(math.log2(math.e))
LOG2_E_REST = np.float32(math.log2(math.e) - float(LOG2_E))


@cuda.jit(device=True)
def exponential(x, width):
    """exp(x) = 2^(x·log₂ e), as exactly as elements that `width` of go into 16 bytes can show it.

    A float32 log₂ e is too small by 1.3e-8 of it. In a sum of exponentials such errors add up, so
    float32 rows take what it lacks into account.
    """
    return fast_exp2(x * LOG2_E + x * LOG2_E_REST) if width == 4 else fast_exp(x)


@cuda.jit(device=True)
def _keep_exponential(difference, exponential):
    return exponential


@cuda.jit(device=True)
def _keep_difference(difference, exponential):
    return difference


@cuda.jit(device=True)
def _reciprocal(total):
    quotient = fast_reciprocal(total)
    return quotient + quotient * (ONE - total * quotient)  # a Newton step, for the last digit


@cuda.jit(device=True)
def _logarithm(total):
    return math.log(total)


@cuda.jit(device=True)
def _multiply(kept, factor):
    return kept * factor


@cuda.jit(device=True)
def _subtract(kept, factor):
    return kept - factor


@cuda.jit(device=True)
def _softmax_term(dy, y):
    return dy * y


@cuda.jit(device=True)
def _softmax_gradient(dy, y, total):
    return y * (dy - total)


@cuda.jit(device=True)
def _log_softmax_term(dy, y):
    return dy


@cuda.jit(device=True)
def _log_softmax_gradient(dy, y, total):
    return dy - math.exp(y) * total


SOFTMAX = Formulas(
    "softmax", _keep_exponential, _reciprocal, _multiply, _softmax_term, _softmax_gradient
)
LOG_SOFTMAX = Formulas(
    "log_softmax", _keep_difference, _logarithm, _subtract, _log_softmax_term,
    _log_softmax_gradient,
)  # fmt: skip
