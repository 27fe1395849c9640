"""Images made larger (or smaller): nearest and bilinear, as `torch.nn.functional.interpolate`.

x is (N, C, H, W), contiguous or channels-last, and y (N, C, P, Q) of the same format; float32,
float16 or bfloat16 in and out, float32 in between. Both passes must move x and y once, which for
twice the size is 5/4 of y; with a handful of FLOPs for each element memory is the limit.

============ ======================================================================================
rung         what it does
============ ======================================================================================
`vectorised` forward: a thread for 16 bytes of some rows of y: neighbours in a row, whose pixels of
             x come from the cache, or channels-last some channels of a pixel, which x gives by 16
             bytes too; where rows or channels are no whole vectors, an element of y
`direct`     backward: a thread for an element of some rows of dx, or channels-last for 16 bytes,
             which reads what took of it: no atomics, and a fixed order
============ ======================================================================================

A NaN or infinity reaches what PyTorch lets it reach. Two runs agree bit for bit.
"""

import math
import operator

import numpy as np

from course_lib.kernels.blocks import columns
from course_lib.kernels.blocks.options import MOST
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.kernels.upsample import kernels
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.host.outputs import output
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")
MODES = ("nearest", "bilinear")
MOST_ROWS = 8  # of a thread, which spares what neighbouring rows share …
BUSY_THREADS = 2048  # … if there are so many threads for each multiprocessor
MOST_THREADS = 2**31 - 2**10  # of a launch: kernels count them in 32 bits
_FORWARD = {
    (mode, kind): kernels.forward_kernel(mode == "bilinear", kind)
    for mode in MODES
    for kind in ("element", "columns", "channels")
}
_BACKWARD = {
    (mode, vectors): kernels.backward_kernel(mode == "bilinear", vectors)
    for mode in MODES
    for vectors in (False, True)
}


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
    if arrays.size_of(y):
        rung.launch(mode, x, y, last, (C, H, W, *size, *ratios, aligned))
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
    if arrays.size_of(dx):
        rung.launch(mode, dy, dx, last, (C, H, W, *size, *ratios, aligned))
    return dx


def _launch_vectorised(mode, x, y, last, numbers):
    width = VECTOR_BYTES // y.dtype.itemsize
    C, Q = numbers[0], numbers[4]
    kind = "channels" if last else "columns"
    boundaries = arrays.address_of(y) | (arrays.address_of(x) if last else 0)
    if (C if last else Q) % width or boundaries % VECTOR_BYTES:
        kind, width = "element", 1
    _launch_walks(_FORWARD[mode, kind], x, y, width, last, numbers)


def _launch_direct_backward(mode, dy, dx, last, numbers):
    vectors = last and columns.fit_vectors(numbers[0], (dy, dx))
    width = columns.width_of(dx, vectors)
    _launch_walks(_BACKWARD[mode, vectors], dy, dx, width, last, numbers)


def _launch_walks(kernel, source, result, width, last, numbers):
    """`kernel` on threads for `width` columns of `result`, a row's, and so many rows each."""
    C, H, W, P, Q, *ratios = numbers
    _, _, n_rows, n_cols = result.shape
    n_planes, inner = arrays.size_of(result) // (n_rows * n_cols), 1
    if last:
        n_planes, inner = n_planes // C, C
    across = math.ceil(n_cols * inner / width)
    if max(W, Q) * inner > MOST:
        raise arrays.ArrayError(f"rows must have fewer than 2**31 numbers, not {max(W, Q) * inner}")
    parts, rows = plan(n_planes, n_rows, across, chip_of(result))
    step = MOST_THREADS // (parts * across)  # planes of a launch
    for first in range(0, n_planes, step):
        n_threads = min(step, n_planes - first) * parts * across
        sizes = n_threads, across, max(1, inner // width), parts, rows, inner, H, W, P, Q
        walk = kernels.Walk(first, *map(np.int32, sizes), *ratios)
        n_blocks = math.ceil(n_threads / kernels.BLOCK_SIZE)
        launch(kernel, n_blocks, kernels.BLOCK_SIZE, source, result, walk, flat=True, overlap=True)


def plan(n_planes, n_rows, across, chip):
    """(parts of a plane, rows of a part): more rows, if all threads are busy even so."""
    busy = n_planes * n_rows * across // (chip.multiprocessors * BUSY_THREADS)
    rows = max(min(MOST_ROWS, busy), math.ceil(n_rows * across / (MOST_THREADS - across)), 1)
    parts = math.ceil(n_rows / rows)
    return parts, math.ceil(n_rows / parts)


FORWARD = Ladder(
    Rung("vectorised", _launch_vectorised, tuple(_FORWARD.values())), auto="vectorised"
)
BACKWARD = Ladder(Rung("direct", _launch_direct_backward, tuple(_BACKWARD.values())), auto="direct")


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
    for dtype in DTYPES:
        types = [(dtype, 1), (dtype, 1), kernels.Walk]
        for (mode, kind), kernel in _FORWARD.items():
            yield f"upsample forward {kind}, {mode} {dtype}", kernel, types
        for (mode, vectors), kernel in _BACKWARD.items():
            kind = "channels" if vectors else "element"
            yield f"upsample backward {kind}, {mode} {dtype}", kernel, types
