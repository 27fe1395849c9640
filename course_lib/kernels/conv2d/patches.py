"""Patches of images as rows of a matrix, and back: of filters that step by their own size.

Such a filter meets each element of x once at most, so that a row for each pixel of y is no more
memory than x. Elements of a row lie as those of a filter: (C, R, S) of contiguous images, (R, S, C)
of channels-last ones. Of both, runs stay together: S elements of a line, or S·C.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import allow_next_kernel, load, store, wait_for_previous_kernel

BLOCK_SIZE = 256
MOST = 2**31  # elements, which are counted in 32 bits


@cuda.jit
def patches_kernel(x, rows, n_elements, n_channels, H, width, P, Q, R, run, to_rows):
    """Copy x to rows (N, P, Q, n_channels, R, run), or back; a thread for each element of x.

    x         (N, n_channels, H, width): channels are 1 where they are part of a line
    Q, run    runs of a line that belong to patches, and their elements
    to_rows   whether rows are written; else x is, with zeros where it belongs to no patch
    """
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.blockIdx.x) * BLOCK_SIZE + cuda.threadIdx.x
    if i >= n_elements:
        return
    line, col = divided(np.int32(i), width)
    plane, h = divided(line, H)
    n, c = divided(plane, n_channels)
    p, r = divided(h, R)
    q, e = divided(col, run)
    inside = p < P and q < Q
    place = ((((np.int64(n) * P + p) * Q + q) * n_channels + c) * R + r) * run + e
    if to_rows and inside:
        store(rows, place, load(x, i))
    elif not to_rows:
        store(x, i, load(rows, place) if inside else ZERO)


def fits(problem):
    """Whether the filters of a `Problem` step by their own size, and the kernel counts so far."""
    p = problem
    steps = (p.R, p.S) == (p.stride_h, p.stride_w) and p.groups == 1
    return (
        steps
        and not p.pad_h
        and not p.pad_w
        and p.dilation_h == p.dilation_w == 1
        and (p.N * p.C * p.H * p.W < MOST)
    )


def rows_of(problem, x):
    """A new array (N, P, Q, C·R·S): of each pixel of y, the elements of x that it depends on."""
    p = problem
    rows = arrays.empty((p.N, p.P, p.Q, p.C * p.R * p.S), like=x)
    return _launch(p, x, rows, True)[1]


def from_rows(problem, rows, x):
    """Fill x from such rows, and with zeros where none comes from."""
    return _launch(problem, x, rows, False)[0]


def _launch(p, x, rows, to_rows):
    n_elements, per_pixel = p.N * p.C * p.H * p.W, p.C if p.channels_last else 1
    numbers = p.C // per_pixel, p.H, p.W * per_pixel, p.P, p.Q, p.R, p.S * per_pixel
    if n_elements:
        launch(
            patches_kernel, math.ceil(n_elements / BLOCK_SIZE), BLOCK_SIZE, x, rows, n_elements,
            *map(np.int32, numbers), to_rows, flat=True, overlap=True,
        )  # fmt: skip
    return x, rows


def specialisations(dtypes):
    """(label, kernel, argument types); arrays as (dtype, 1)."""
    for dtype in dtypes:
        types = [(dtype, 1), (dtype, 1), "int64", *["int32"] * 7, "boolean"]
        yield f"conv2d.patches {dtype}", patches_kernel, types
