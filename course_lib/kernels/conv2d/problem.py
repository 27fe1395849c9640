"""What is convolved with what: sizes and options as plain numbers, and arrays made ready."""

import functools
from typing import NamedTuple

import numpy as np

from course_lib.kernels.blocks.memory_format import formatted
from course_lib.kernels.blocks.options import MOST, check_precision, hashable, pair, whole
from course_lib.runtime.host import arrays

DTYPES = ("float32", "float16", "bfloat16")


class Problem(NamedTuple):
    """A convolution of x (N, C, H, W) with weight (K, C/groups, R, S) to y (N, K, P, Q).

    With `channels_last` all lie in memory as N·H·W·C, else as N·C·H·W. `mode` is "half" for 16-bit
    numbers; for float32 "tf32" where products may be rounded to that, else "float32".
    """

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    P: int
    Q: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    groups: int
    channels_last: bool
    mode: str = "float32"

    @property
    def x_shape(self):
        return self.N, self.C, self.H, self.W

    @property
    def y_shape(self):
        return self.N, self.K, self.P, self.Q

    @property
    def weight_shape(self):
        return self.K, self.C // self.groups, self.R, self.S

    @property
    def numbers(self):
        """All of it as kernels take it, in the order of the fields."""
        return tuple(map(np.int32, self[:16])) + (self.channels_last,)


@functools.lru_cache(maxsize=4096)
def problem_of(
    x_shape, weight_shape, stride, padding, dilation, groups, channels_last, mode="float32"
):
    """The `Problem` of a call; ArrayError or ValueError where the arguments do not go together."""
    stride = pair(stride, "stride", 1)
    padding = pair(padding, "padding", 0)
    dilation = pair(dilation, "dilation", 1)
    groups = whole(groups, "groups", 1)
    N, C, H, W = x_shape
    K, per_group, R, S = weight_shape
    for count, what in ((C, f"x has {C} channels"), (K, f"weight has {K} output channels")):
        if count % groups:
            raise arrays.ArrayError(f"{what}, which groups={groups} does not divide")
    if per_group != C // groups or R < 1 or S < 1:
        raise arrays.ArrayError(
            f"weight must have shape (K, {C // groups}, R, S) with R and S from 1 on, for x of "
            f"shape {x_shape} and groups={groups}; it has {weight_shape}"
        )
    y_size = []
    for size, taps, step, pad, apart in zip((H, W), (R, S), stride, padding, dilation, strict=True):
        reach = apart * (taps - 1) + 1
        if size + 2 * pad < reach:
            raise arrays.ArrayError(
                f"kernel size can't be greater than the padded input: a filter of {(R, S)} with "
                f"dilation {dilation}, x of {(H, W)} with padding {padding}"
            )
        y_size.append((size + 2 * pad - reach) // step + 1)
    numbers = N, C, H, W, K, R, S, *y_size, *stride, *padding, *dilation, groups
    if max(numbers) > MOST or max(H * W, y_size[0] * y_size[1]) > MOST:
        raise arrays.ArrayError(
            f"sizes and options must be below 2**31, and so must the pixels of a plane: {numbers}"
        )
    return Problem(*numbers, channels_last, mode)


def mode_of(x, precision):
    """The `mode` of a `Problem` of arrays like x."""
    return precision if arrays.dtype_name(x) == "float32" else "half"


def checked(x, weight, stride, padding, dilation, groups, precision):
    """(problem, x): checked, and x as kernels take it.

    The memory format is channels-last if x or weight is, as in PyTorch. An x of another format is
    copied. `weight` is checked, too; who reads it calls `formatted` first: kernels would otherwise
    need strides for everything.
    """
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    arrays.require(weight, "weight", dtypes=(arrays.dtype_name(x),), n_dims=4)
    check_precision(precision)
    channels_last = arrays.reads_channels_last(x) or arrays.reads_channels_last(weight)
    options = (hashable(option) for option in (stride, padding, dilation))
    shapes, mode = (tuple(x.shape), tuple(weight.shape)), mode_of(x, precision)
    problem = problem_of(*shapes, *options, groups, channels_last, mode)
    return problem, formatted(x, problem)


def is_as_given(array, problem):
    """Whether `array` is contiguous, and would have to be laid out channels-last."""
    last = problem.channels_last
    return last and arrays.is_contiguous_array(array) and not arrays.is_channels_last(array)
