"""What is convolved with what: sizes and options as plain numbers, checked."""

import functools

from course_lib.kernels.blocks.memory_format import formatted
from course_lib.kernels.blocks.options import MOST, check_precision, hashable, pair, whole
from course_lib.kernels.conv2d import Problem as Convolution
from course_lib.kernels.conv2d import mode_of
from course_lib.runtime.host import arrays

DTYPES = ("float32", "float16", "bfloat16")


class Problem(Convolution):
    """A transposed convolution of x (N, C, H, W) with weight (C, K/groups, R, S) to y (N, K, P, Q).

    The fields are a convolution's. With `channels_last` x and weight lie in memory as N·H·W·C, else
    as N·C·H·W.
    """

    __slots__ = ()

    @property
    def weight_shape(self):
        return self.C, self.K // self.groups, self.R, self.S

    @property
    def convolution(self):
        """The convolution, of the same weight, that takes y's shape to x's: this is its dx."""
        return Convolution(
            self.N, self.K, self.P, self.Q, self.C, self.R, self.S, self.H, self.W, *self[9:]
        )


@functools.lru_cache(maxsize=4096)
def problem_of(
    x_shape, weight_shape, stride, padding, output_padding, dilation, groups, channels_last,
    mode="float32",
):  # fmt: skip
    """The `Problem` of a call; ArrayError or ValueError where the arguments do not go together."""
    stride, dilation = pair(stride, "stride", 1), pair(dilation, "dilation", 1)
    padding = pair(padding, "padding", 0)
    output_padding = pair(output_padding, "output_padding", 0)
    groups = whole(groups, "groups", 1)
    N, C, H, W = x_shape
    _, per_group, R, S = weight_shape
    if C % groups:
        raise arrays.ArrayError(f"x has {C} channels, which groups={groups} does not divide")
    if min(C, H, W) < 1:
        raise arrays.ArrayError(f"x must have a channel and a pixel at least, not shape {x_shape}")
    if weight_shape[0] != C or min(per_group, R, S) < 1:
        raise arrays.ArrayError(
            f"weight must have shape ({C}, K/groups, R, S), the last three from 1 on, for x of "
            f"shape {x_shape}; it has {weight_shape}"
        )
    y_size = []
    for size, taps, step, pad, more, apart in zip(
        (H, W), (R, S), stride, padding, output_padding, dilation, strict=True
    ):
        if more >= max(step, apart):
            raise ValueError(
                f"output_padding must be smaller than stride or dilation; it is {output_padding}, "
                f"with stride {stride} and dilation {dilation}"
            )
        y_size.append((size - 1) * step - 2 * pad + apart * (taps - 1) + more + 1)
    if min(y_size) < 1:
        raise arrays.ArrayError(
            f"x of {(H, W)} pixels with padding {padding} would give y of {tuple(y_size)}, which "
            "is too small"
        )
    K = per_group * groups
    numbers = N, C, H, W, K, R, S, *y_size, *stride, *padding, *dilation, groups
    if max(numbers) > MOST or max(H * W, y_size[0] * y_size[1]) > MOST:
        raise arrays.ArrayError(
            f"sizes and options must be below 2**31, and so must the pixels of a plane: {numbers}"
        )
    return Problem(*numbers, channels_last, mode)


def checked(x, weight, stride, padding, output_padding, dilation, groups, precision):
    """(problem, x): checked, and x as kernels take it.

    The memory format is channels-last if x or weight is, as in PyTorch. An x of another format is
    copied. `weight` is checked, too; the launchers format it.
    """
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    arrays.require(weight, "weight", dtypes=(arrays.dtype_name(x),), n_dims=4)
    check_precision(precision)
    channels_last = arrays.reads_channels_last(x) or arrays.reads_channels_last(weight)
    options = (hashable(option) for option in (stride, padding, output_padding, dilation))
    shapes, mode = (tuple(x.shape), tuple(weight.shape)), mode_of(x, precision)
    problem = problem_of(*shapes, *options, groups, channels_last, mode)
    return problem, formatted(x, problem)
