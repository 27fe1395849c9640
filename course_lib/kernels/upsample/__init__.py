"""Images made larger (or smaller): nearest and bilinear, as `torch.nn.functional.interpolate`.

x is (N, C, H, W), contiguous or channels-last, and y (N, C, P, Q) of the same format; float32,
float16 or bfloat16 in and out, float32 in between. Both passes must move x and y once, which for
twice the size is 5/4 of y; with a handful of FLOPs for each element memory is the limit.

============ ======================================================================================
rung         what it does
============ ======================================================================================
`vectorised` forward: a thread for 16 bytes of y: neighbours in a row, whose pixels of x come from
             the cache, or channels-last some channels of a pixel, which x gives by 16 bytes too;
             where rows or channels are no whole vectors, a thread for each element of y
`direct`     backward: a thread for each element of dx, which reads what took of it: no atomics, and
             a fixed order
============ ======================================================================================

A NaN or infinity reaches what PyTorch lets it reach. Two runs agree bit for bit.
"""

import math
import operator

import numpy as np

from course_lib.kernels.blocks.options import MOST
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.kernels.upsample import kernels
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.outputs import output
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")
MODES = ("nearest", "bilinear")
_FORWARD = {mode: kernels.forward_kernels(mode == "bilinear") for mode in MODES}
_BACKWARD = {mode: kernels.backward_kernel(mode == "bilinear") for mode in MODES}


def forward(
    x, size, *, mode="nearest", align_corners=False, scale_factor=None, variant=AUTO, out=None
):
    """y (N, C, P, Q) of x (N, C, H, W), with `size` = (P, Q).

    mode           "nearest" or "bilinear"
    align_corners  of bilinear: whether the corners' centres, not their corners, fall together
    scale_factor   a pair of numbers, if x's pixels are to be 1/scale_factor of y's apart, rather
                   than H/P and W/Q; without effect where corners are aligned
    out            receives y; of x's memory format and dtype

    Raises ArrayError for a wrong dtype, shape or device, ValueError for a wrong option.
    """
    rung = FORWARD.rung(variant, x)
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    x, last = arrays.as_images(x)
    N, C, H, W = x.shape
    size = _size(size, (C, H, W))
    aligned, ratios = _ratios((H, W), size, mode, align_corners, scale_factor)
    y = output(out, (N, C, *size), like=x, channels_last=last, reads=dict(x=x))
    if n := arrays.size_of(y):
        numbers = *map(np.int32, (C, H, W, *size)), *ratios, aligned, last
        rung.launch(mode, x, y, n, numbers)
    return y


def backward(
    dy, shape, *, mode="nearest", align_corners=False, scale_factor=None, variant=AUTO, out=None
):
    """dx of `shape` (N, C, H, W), from dy (N, C, P, Q) and what `forward` was given.

    `out`, if given, receives dx; of dy's memory format and dtype. Raises as `forward` does.
    """
    rung = BACKWARD.rung(variant, dy)
    arrays.require(dy, "dy", dtypes=DTYPES, n_dims=4)
    if len(shape) != 4 or tuple(shape[:2]) != tuple(dy.shape[:2]):
        raise arrays.ArrayError(f"dy of shape {tuple(dy.shape)} is not of an x of {tuple(shape)}")
    N, C, H, W = shape
    size = _size(tuple(dy.shape[2:]), (C, H, W))
    dy, last = arrays.as_images(dy)
    aligned, ratios = _ratios((H, W), size, mode, align_corners, scale_factor)
    dx = output(out, (N, C, H, W), like=dy, channels_last=last, reads=dict(dy=dy))
    if n := arrays.size_of(dx):
        numbers = *map(np.int32, (C, H, W, *size)), *ratios, aligned, last
        rung.launch(mode, dy, dx, n, numbers)
    return dx


def _launch_vectorised(mode, x, y, n, numbers):
    direct, vectorised = _FORWARD[mode]
    last, width = numbers[-1], VECTOR_BYTES // x.dtype.itemsize
    side_by_side = y.shape[1] if last else y.shape[3]
    boundaries = arrays.address_of(y) | (arrays.address_of(x) if last else 0)
    if side_by_side % width or boundaries % VECTOR_BYTES:
        return _launch_elements(direct, n, x, y, numbers)
    _launch_elements(vectorised, n // width, x, y, numbers)


def _launch_direct_backward(mode, dy, dx, n, numbers):
    _launch_elements(_BACKWARD[mode], n, dy, dx, numbers)


def _launch_elements(kernel, n_threads, x, y, numbers):
    n_blocks = math.ceil(n_threads / kernels.BLOCK_SIZE)
    launch(kernel, n_blocks, kernels.BLOCK_SIZE, x, y, *numbers, flat=True, overlap=True)


FORWARD = Ladder(
    Rung("vectorised", _launch_vectorised, tuple(k for pair in _FORWARD.values() for k in pair)),
    auto="vectorised",
)
BACKWARD = Ladder(
    Rung("direct", _launch_direct_backward, tuple(_BACKWARD.values())), auto="direct"
)


def _size(size, x_sizes):
    """(P, Q) as ints; an error where a size is not from 1 on."""
    try:
        P, Q = map(operator.index, size)
    except (TypeError, ValueError):
        raise ValueError(f"size must be a pair of ints, not {size!r}") from None
    if min(P, Q, *x_sizes) < 1:
        raise arrays.ArrayError(
            f"sizes must be from 1 on: x has (C, H, W) = {tuple(x_sizes)}, y is to have {(P, Q)}"
        )
    if max(P * Q, x_sizes[1] * x_sizes[2], x_sizes[0]) > MOST:
        raise arrays.ArrayError(f"planes must have fewer than 2**31 pixels, not {(P, Q)}")
    return P, Q


def _ratios(sizes, new_sizes, mode, align_corners, scale_factor):
    """(whether corners are aligned, x's pixels for one of y's along either axis)."""
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; there are {', '.join(MODES)}")
    if mode == "nearest":
        align_corners = False
    factors = (None, None) if scale_factor is None else tuple(scale_factor)
    if len(factors) != 2 or any(f is not None and not 0 < f < math.inf for f in factors):
        raise ValueError(f"scale_factor must be a pair of numbers above 0, not {scale_factor!r}")
    found = []
    for n, n_new, factor in zip(sizes, new_sizes, factors, strict=True):
        if align_corners:
            ratio = np.float32(n - 1) / np.float32(n_new - 1) if n_new > 1 else 0.0
        else:
            ratio = np.float32(n) / np.float32(n_new) if factor is None else 1 / factor
        found.append(np.float32(ratio))
    return bool(align_corners), found


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    numbers = ["int32"] * 5 + ["float32"] * 2 + ["boolean"] * 2
    for mode in MODES:
        for dtype in DTYPES:
            types = [(dtype, 1)] * 2 + numbers
            for variant, kernel in zip(("direct", "vectorised"), _FORWARD[mode], strict=True):
                yield f"upsample forward {variant}, {mode} {dtype}", kernel, types
            yield f"upsample backward, {mode} {dtype}", _BACKWARD[mode], types
