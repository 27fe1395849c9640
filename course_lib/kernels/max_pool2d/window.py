"""Windows of a pooling layer: its options as plain numbers, and the output's size. PyTorch's rules.

A window of KH×KW positions, DH and DW apart, is laid over the image every SH rows and SW columns.
PH rows and PW columns of -inf lie before and behind the image.
"""

import functools
from typing import NamedTuple

from course_lib.kernels.blocks.options import hashable, pair


class Window(NamedTuple):
    """A layer's options, and with them the sizes of the image (H, W) and of the output (OH, OW)."""

    H: int
    W: int
    OH: int
    OW: int
    KH: int
    KW: int
    SH: int
    SW: int
    PH: int
    PW: int
    DH: int
    DW: int


def output_size(n, kernel, stride, padding, dilation, ceil_mode):
    """How many windows fit n rows or columns; the numbers may be torch's symbolic ones."""
    room = n + 2 * padding - dilation * (kernel - 1) - 1
    found = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (found - 1) * stride >= n + padding:
        found -= 1  # the last window would begin behind the image
    return found


def window_of(size, kernel_size, stride, padding, dilation, ceil_mode):
    """The `Window` for images of `size`, the pair (H, W); ValueError for options that do not fit.

    `stride` None or empty is kernel_size, as in PyTorch.
    """
    empty = stride is None or (isinstance(stride, (tuple, list)) and not stride)
    stride = kernel_size if empty else stride
    options = (hashable(v) for v in (kernel_size, stride, padding, dilation))
    return _window_of(tuple(size), *options, bool(ceil_mode))


@functools.lru_cache(maxsize=4096)
def _window_of(size, kernel_size, stride, padding, dilation, ceil_mode):
    kernel = pair(kernel_size, "kernel_size", 1)
    stride, dilation = pair(stride, "stride", 1), pair(dilation, "dilation", 1)
    padding = pair(padding, "padding", 0)
    found = []
    for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        if 2 * p > k:
            raise ValueError(f"padding must be at most half of kernel_size, {k} here, not {p}")
        n_out = output_size(n, k, s, p, d, ceil_mode)
        if n_out < 1:
            raise ValueError(
                f"windows that span {reach} do not fit images of {size[0]}×{size[1]} with padding "
                f"{p}: the output would have the size {n_out}"
            )
        found.append(n_out)
    return Window(*size, *found, *kernel, *stride, *padding, *dilation)
