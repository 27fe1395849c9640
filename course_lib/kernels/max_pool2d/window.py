"""Windows of a pooling layer: its options as plain numbers, and the output's size. PyTorch's rules.

A window of KH×KW positions, DH and DW apart, is laid over the image every SH rows and SW columns.
PH rows and PW columns of -inf lie before and behind the image.
"""

import functools
from typing import NamedTuple


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


def pair(value, name, least):
    """`value`, an int or a pair of them, as a pair; ValueError unless both are at least `least`."""
    both = (value, value) if isinstance(value, int) else tuple(value)
    if len(both) == 1:
        both *= 2
    if len(both) != 2 or not all(isinstance(v, int) for v in both) or min(both) < least:
        raise ValueError(f"{name} must be one or two ints of at least {least}, not {value!r}")
    return both


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
    stride = kernel_size if stride is None or stride == () or stride == [] else stride
    options = (_hashable(v) for v in (kernel_size, stride, padding, dilation))
    return _window_of(tuple(size), *options, bool(ceil_mode))


def _hashable(value):
    return value if isinstance(value, int) else tuple(value)


@functools.lru_cache(maxsize=4096)
def _window_of(size, kernel_size, stride, padding, dilation, ceil_mode):
    kernel = pair(kernel_size, "kernel_size", 1)
    stride, dilation = pair(stride, "stride", 1), pair(dilation, "dilation", 1)
    padding = pair(padding, "padding", 0)
    found = []
    for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        if 2 * p > reach:
            raise ValueError(
                f"padding must be at most half of what a window spans, {reach} here, not {p}"
            )
        n_out = output_size(n, k, s, p, d, ceil_mode)
        if n_out < 1:
            raise ValueError(
                f"windows that span {reach} do not fit images of {size[0]}×{size[1]} with padding "
                f"{p}: the output would have the size {n_out}"
            )
        found.append(n_out)
    return Window(*size, *found, *kernel, *stride, *padding, *dilation)
