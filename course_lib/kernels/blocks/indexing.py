"""Where element (n, c, h, w) of an array lies, in either memory format, and the way back."""

import numpy as np

from course_lib import cuda


@cuda.jit(device=True)
def index_of(n, c, h, w, C, H, W, channels_last):
    """The element's place in memory, counted in elements; 64 bits, whatever it is made of."""
    if channels_last:
        return ((np.int64(n) * H + h) * W + w) * C + c
    return ((np.int64(n) * C + c) * H + h) * W + w


@cuda.jit(device=True)
def place_of(i, C, H, W, channels_last):
    """(n, c, h, w) of element `i` in memory."""
    i = np.int64(i)
    if channels_last:
        pixel, c = i // C, i % C
        return pixel // (H * W), c, pixel // W % H, pixel % W
    row = i // W
    plane = row // H
    return plane // C, plane % C, row % H, i % W


@cuda.jit(device=True)
def output_of(position, tap, size, stride, pad, dilation):
    """Which of `size` outputs reads input `position` by its tap `tap`; -1 where none does."""
    reached = np.int64(position) + pad - np.int64(tap) * dilation
    if reached < 0 or reached % stride != 0 or reached // stride >= size:
        return np.int64(-1)
    return reached // stride


@cuda.jit(device=True)
def divided(a, b):
    """(a // b, a % b) in 32 bits, of 0 ≤ a < 2³¹ and b > 0: 64 take five times the instructions."""
    quotient = np.int32(np.uint32(a) // np.uint32(b))
    return quotient, np.int32(a - quotient * b)
