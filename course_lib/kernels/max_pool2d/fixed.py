"""What the kernels for a window known at compile time share: `patches` and `pixels`.

A `Fixed` window is square and undilated: `kernel` positions a side, every `stride` places, from
`padding` places before the image on. Its loops unroll, its comparisons are with constants, and all
that a thread holds stays in registers.

The maximum is found first, without its place; then the places are asked, from the last to the
first, whether they are equal to it, so that the first of equals is kept. That takes 2 instructions
a place, and half as many of half-width numbers, which are compared two at a time (`words`). Only a
maximum of -inf or NaN needs more: the padding is -inf too, and a NaN equals nothing.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics import load
from course_lib.runtime.intrinsics.words import lanes, largest, select_bytes, where_equal

NOWHERE = 255  # the index of a maximum that ReLU makes 0; no window here has that many places
BOTH = 0x00010001  # times a position: that position in both lanes of a word


class Fixed(NamedTuple):
    """A window whose options are constants of a kernel."""

    kernel: int
    stride: int
    padding: int

    @property
    def first(self):
        """Of the windows that reach a patch of stride×stride places, the first; 0 has its place."""
        return -((self.kernel - 1 - self.padding) // self.stride)

    @property
    def last(self):
        return (self.stride - 1 + self.padding) // self.stride


WINDOWS = (Fixed(2, 2, 0), Fixed(3, 2, 1), Fixed(3, 2, 0), Fixed(3, 1, 1))
#: Windows that reach further than a patch's neighbours, which `columns` takes, contiguous images.
WIDE_WINDOWS = (Fixed(5, 1, 2),)


@cuda.jit(device=True)
def divided_by(i, multiplier, shift):
    """i // n of an i below 2³¹, by the `plan.divider` of n."""
    product = np.int64(np.uint32(i)) * np.int64(np.uint32(multiplier))
    return np.int32(np.int64(np.uint32(product >> 31)) >> (shift & 31))


@cuda.jit(device=True)
def largest_and_place(x, values, n):
    """(the largest of n words, lane by lane; which of them it is, in every lane)."""
    best = values[0]
    for k in range(1, n):
        best = largest(x, best, values[k])
    at = np.uint32((n - 1) * BOTH)
    for k in range(1, n):
        place = n - 1 - k
        at = where_equal(x, values[place], best, np.uint32(place * BOTH), at)
    return best, at


@cuda.jit(device=True)
def apply_relu(x, best, ats, n):
    """ReLU of n words and, where it makes them 0, of their places nowhere. A NaN is left alone."""
    for k in range(n):
        best[k] = largest(x, best[k], np.uint32(0))
        ats[k] = where_equal(x, best[k], np.uint32(0), np.uint32(NOWHERE * BOTH), ats[k])


@cuda.jit(device=True)
def packed_places(x, ats, k):
    """Four places, of the words from ats[k] on, as the bytes of a word."""
    if lanes(x) == 2:
        return select_bytes(ats[k], ats[k + 1], 0x6420)
    low = select_bytes(ats[k], ats[k + 1], 0x40)
    return select_bytes(low, select_bytes(ats[k + 2], ats[k + 3], 0x40), 0x5410)


@cuda.jit(device=True)
def byte_of(words, k):
    return select_bytes(words[k >> 2], np.uint32(0), 0x4440 | (k & 3))


@cuda.jit(device=True)
def place_in_window(x, base, inner, h, w, H, W, kernel, relu):
    """Where the largest element of the window at (h, w) is, whatever the window holds.

    Only the part inside the image is walked, so that the compiler does not unroll what is rare.
    """
    best, at, row = ZERO, -1, np.int32(max(h, 0))
    while row < min(h + kernel, H):
        col = np.int32(max(w, 0))
        while col < min(w + kernel, W):
            value = load(x, base + np.int64(np.int32(row * W + col)) * inner)
            if at < 0 or value > best or value != value:
                best, at = value, np.int32((row - h) * kernel + col - w)
            col = np.int32(col + 1)
        row = np.int32(row + 1)
    return NOWHERE if relu and best <= ZERO else at
