"""Which taps of a filter meet which pixels, forward and for dx with any stride: `gather`'s sizes.

Forward, result line p meets source line p·stride − pad + r·dilation by tap r. For dx, line h meets
line (h + pad − r·dilation) / stride of dy, where that is whole. So all lines h of one *residue*
modulo the stride meet the same taps, every `apart`-th from a first one on, and each residue is a
product of its own that multiplies no zeros between dy's pixels. Forward there is one residue.
"""

import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.indexing import divided
from course_lib.runtime.intrinsics import VECTOR_BYTES

ITEMSIZE = {"half": 2, "tf32": 4, "float32": 4}  # by mode
PARTS = 3  # that float32 are packed to (`gather_pack`)


class Sizes(NamedTuple):
    """The numbers of `gather_kernel`, down and right: all lines, columns and taps, none bytes.

    source_h, result_h  lines of the source and of the result
    n_images, n_columns, n_channels  images; channels of the result, and of the source as packed,
                        those of all its parts that a tile of columns reads
    pitch, window       channels of a pixel of the source, of all parts; those of a part that a tile
                        of columns reads
    group_columns, group_channels, tile  columns and channels of a group; columns of such a tile
    taps_h              of the filter
    scale_h             source lines from one result line of a residue to the next
    step_h              residues, which is the stride for dx
    pad_h               source line that tap 0 meets from result line 0, times `step_h`
    far_h               source lines from one tap of a residue to the next
    apart_h             filter taps from one tap of a residue to the next
    common_h, inverse_h, dilation_h   of the stride and the dilation: their common divisor, and the
                        dilation's inverse modulo `apart_h`; the dilation. For dx with a stride
    most_terms          taps times channels, of the residue with most
    n_splits, length    parts of the terms, and terms of each
    options             see `halo_results`
    """

    source_h: np.int32
    source_w: np.int32
    result_h: np.int32
    result_w: np.int32
    n_images: np.int32
    n_columns: np.int32
    n_channels: np.int32
    taps_h: np.int32
    taps_w: np.int32
    scale_h: np.int32
    scale_w: np.int32
    step_h: np.int32
    step_w: np.int32
    pad_h: np.int32
    pad_w: np.int32
    far_h: np.int32
    far_w: np.int32
    apart_h: np.int32
    apart_w: np.int32
    common_h: np.int32
    common_w: np.int32
    inverse_h: np.int32
    inverse_w: np.int32
    dilation_h: np.int32
    dilation_w: np.int32
    most_terms: np.int32
    pitch: np.int32
    window: np.int32
    group_columns: np.int32
    group_channels: np.int32
    tile: np.int32 = 1
    n_splits: np.int32 = 1
    length: np.int32 = 0
    options: np.int32 = 0

    @property
    def n_residues(self):
        return self.step_h * self.step_w


def packed_channels(n, mode):
    """How many numbers `n` channels are packed to: whole vectors, of each part of float32."""
    width = VECTOR_BYTES // ITEMSIZE[mode]
    return -(-n // width) * width * (PARTS if mode == "float32" else 1)


def forward_sizes(p):
    """The `Sizes` of the forward pass of a `Problem`."""
    n_channels = packed_channels(p.C, p.mode)
    return Sizes(
        p.H, p.W, p.P, p.Q, p.N, p.K, n_channels, p.R, p.S, p.stride_h, p.stride_w, 1, 1,
        -p.pad_h, -p.pad_w, p.dilation_h, p.dilation_w, 1, 1, 1, 1, 0, 0, 1, 1,
        p.R * p.S * n_channels, n_channels, _of_part(n_channels, p.mode), p.K // p.groups,
        p.C // p.groups,
    )  # fmt: skip


def dx_sizes(p):
    """The same for dx."""
    n_channels = packed_channels(p.K, p.mode)
    found = [
        (stride // g, g, pow(dilation // g, -1, stride // g), -(dilation // g))
        for stride, dilation in ((p.stride_h, p.dilation_h), (p.stride_w, p.dilation_w))
        for g in (math.gcd(stride, dilation),)
    ]
    apart, common, inverse, far = zip(*found, strict=True)
    n_taps = math.ceil(p.R / apart[0]) * math.ceil(p.S / apart[1])
    return Sizes(
        p.P, p.Q, p.H, p.W, p.N, p.C, n_channels, p.R, p.S, 1, 1, p.stride_h, p.stride_w,
        p.pad_h, p.pad_w, *far, *apart, *common, *inverse, p.dilation_h, p.dilation_w,
        n_taps * n_channels, n_channels, _of_part(n_channels, p.mode), p.C // p.groups,
        p.K // p.groups,
    )  # fmt: skip


def windowed(z, tile, mode):
    """The `Sizes` of tiles of so many columns, which read the channels of their own groups alone.

    All have windows of the same size, that begin with whole vectors.
    """
    if not z.n_columns:
        return z
    width, whole = VECTOR_BYTES // ITEMSIZE[mode], _of_part(z.pitch, mode)
    window = window_size(z.n_columns, tile, z.group_columns, z.group_channels, whole, width)
    n_channels = window * z.pitch // whole if whole else z.n_channels
    most_terms = z.most_terms // max(1, z.n_channels) * n_channels
    return z._replace(n_channels=n_channels, most_terms=most_terms, window=window, tile=tile)


def window_size(n_columns, tile, group_columns, group_channels, n_channels, width):
    """How many of `n_channels` a tile of so many columns reads, by whole vectors of `width`."""
    largest = 0
    for column in range(0, n_columns, tile):
        last = (min(column + tile, n_columns) - 1) // group_columns
        first = column // group_columns * group_channels // width * width
        largest = max(largest, (last + 1) * group_channels - first)
    return min(-(-largest // width) * width, n_channels)


def _of_part(n_channels, mode):
    return n_channels // (PARTS if mode == "float32" else 1)


@cuda.jit(device=True)
def window_of(column, n_parts, width, z):
    """The first vector, of a part of a pixel, that the tile with this column reads."""
    group = divided(np.int32(column // z.tile * z.tile), z.group_columns)[0]
    last = np.int32((divided(z.pitch, np.int32(n_parts))[0] - z.window) // width)
    return min(np.int32(group * z.group_channels // width), last)


@cuda.jit(device=True)
def axis_of(residue, size, n_taps, step, pad, apart, common, inverse, dilation):
    """(result lines of a residue, first tap, taps, source line where line 0 meets that tap)."""
    if step == 1:
        return size, np.int32(0), n_taps, pad
    n_lines, reached = divided(np.int32(size - residue + step - 1), step)[0], residue + pad
    quotient, rest = divided(np.int32(reached), common)
    first = divided(np.int32(quotient * inverse), apart)[1]
    if rest > 0 or first >= n_taps:
        return n_lines, np.int32(0), np.int32(0), np.int32(0)
    taps = divided(np.int32(n_taps - first + apart - 1), apart)[0]
    # The difference may be negative, but divides by the step: dilation·step is added meanwhile.
    start = divided(np.int32(reached + dilation * step - first * dilation), step)[0]
    return n_lines, first, taps, np.int32(start - dilation)


@cuda.jit(device=True)
def axes_of(residue, z):
    """`axis_of` down and right, for a residue of both; `z` are the `Sizes`."""
    residue_h, residue_w = divided(residue, z.step_w)
    down = axis_of(
        residue_h, z.result_h, z.taps_h, z.step_h, z.pad_h, z.apart_h, z.common_h, z.inverse_h,
        z.dilation_h,
    )  # fmt: skip
    right = axis_of(
        residue_w, z.result_w, z.taps_w, z.step_w, z.pad_w, z.apart_w, z.common_w, z.inverse_w,
        z.dilation_w,
    )  # fmt: skip
    return down, right
