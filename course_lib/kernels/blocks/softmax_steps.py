"""What one thread does with its part of a row: the steps that the kernels are put together from.

`values` is the array in registers that `rows.load_row` has filled. A device function exists for
each operation and each number of slots, so that its loops are unrolled and every index is constant.
"""

from collections import namedtuple

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.softmax_formulas import exponential
from course_lib.runtime.intrinsics import LOWEST

#: largest(values, width) -> m; exponentials(values, width, m) -> their sum, leaving what
#: finish(values, width, factor) makes y of.
ForwardSteps = namedtuple("ForwardSteps", "largest exponentials finish")
#: total(upstream, values, width) -> Σ terms; gradients(upstream, values, width, total) leaves dx in
#: `upstream`.
BackwardSteps = namedtuple("BackwardSteps", "total gradients")


def forward_steps(formulas, n_slots):
    """The `ForwardSteps` of one operation for `n_slots` slots per thread."""
    keep, finish = formulas.keep, formulas.finish

    @cuda.jit(device=True)
    def largest(values, width):
        m = values[0, 0]
        for u in range(n_slots):
            for k in range(width):
                m = max(m, values[u, k])
        return m

    @cuda.jit(device=True)
    def exponentials(values, width, m):
        total = ZERO
        for u in range(n_slots):
            for k in range(width):
                difference = values[u, k] - m
                e = exponential(difference, width)
                total += e
                values[u, k] = keep(difference, e)
        return total

    @cuda.jit(device=True)
    def finish_all(values, width, factor):
        for u in range(n_slots):
            for k in range(width):
                values[u, k] = finish(values[u, k], factor)

    return ForwardSteps(largest, exponentials, finish_all)


def online_step(n_slots):
    """add_online(values, width, m, s) -> the pair (m, s) with all of `values` added to it.

    The maximum first, then the sum: one correction of s for all of them.
    """

    @cuda.jit(device=True)
    def add_online(values, width, m, s):
        largest = m
        for u in range(n_slots):
            for k in range(width):
                largest = max(largest, values[u, k])
        pivot = largest if largest > LOWEST else ZERO  # -inf - -inf would be NaN
        added = ZERO  # by itself, so that the long sum rounds but once for all of them
        for u in range(n_slots):
            for k in range(width):
                added += exponential(values[u, k] - pivot, width)
        return largest, s * exponential(m - pivot, width) + added

    return add_online


def backward_steps(formulas, n_slots):
    """The `BackwardSteps` of one operation for `n_slots` slots per thread and array."""
    term, gradient = formulas.term, formulas.gradient

    @cuda.jit(device=True)
    def total_of(upstream, values, width):
        total = ZERO
        for u in range(n_slots):
            for k in range(width):
                total += term(upstream[u, k], values[u, k])
        return total

    @cuda.jit(device=True)
    def gradients(upstream, values, width, total):
        for u in range(n_slots):
            for k in range(width):
                upstream[u, k] = gradient(upstream[u, k], values[u, k], total)

    return BackwardSteps(total_of, gradients)


@cuda.jit(device=True)
def shift_for(m):
    """What to subtract from numbers whose largest is `m`: -inf - -inf would be NaN."""
    return m if m != LOWEST else ZERO


@cuda.jit(device=True)
def add_online(values, n_slots, k, m, s, digits):
    """The pair (m, s) with n_slots numbers of column k added to it: one correction for all."""
    largest = m
    for c in range(n_slots):
        largest = max(largest, values[c, k])
    pivot = largest if largest > LOWEST else ZERO  # -inf - -inf would be NaN
    added = ZERO
    for c in range(n_slots):
        added += exponential(values[c, k] - pivot, digits)
    return largest, s * exponential(m - pivot, digits) + added
