"""Sums that keep their digits, of many numbers in one thread."""

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO


@cuda.jit(device=True)
def careful_add(total, lost, number):
    """(total, lost) with `number` added; `lost` is what rounding took so far (Kahan, 1965).

    A thread that adds up thousands of numbers would lose a digit or two without.
    """
    number -= lost
    after = total + number
    lost = (after - total) - number
    return after, lost if lost == lost else ZERO  # NaN, where the total has become infinite
