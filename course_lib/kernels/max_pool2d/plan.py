"""How the rung `vectorised` shares images out among blocks: plain numbers, from plain numbers."""

import functools
from typing import NamedTuple

from course_lib.kernels.max_pool2d.bands import SHIFT

BAND_BYTES = 20 << 10  # of shared memory, about, so that many blocks share a multiprocessor …
MOST_BYTES = 48 << 10  # … and at most: what every chip gives a block
ENOUGH_BLOCKS = 132 * 4  # below which small planes are not put together
BAND_THREADS = 128
PIXEL_THREADS = 256
SPARE = 16  # elements that a band may begin after a 16-byte boundary, and end before one


class Bands(NamedTuple):
    """A block takes `planes` planes, or one of `bands` bands of `rows` rows of a plane."""

    planes: int
    rows: int
    bands: int
    n_blocks: int
    elements: int  # that it holds in shared memory
    bits: int  # 2^bits threads side by side in a row


def ceil_div(a, b):
    return -(-a // b)


def _bands(n_planes, n_rows, needs, plane_elements, element_bytes, width):
    """`needs(r)`: elements in shared memory for a band of r of the n_rows rows."""
    bits = max(0, min(BAND_THREADS, width) - 1).bit_length()
    most = BAND_BYTES // element_bytes - SPARE
    planes = min(most // plane_elements, n_planes // ENOUGH_BLOCKS) if plane_elements else 1
    planes = min(planes, 2**SHIFT // max(1, n_rows * n_rows))
    if planes > 1:
        elements = planes * plane_elements + SPARE
        return Bands(planes, n_rows, 1, ceil_div(n_planes, planes), elements, bits)
    rows = n_rows
    while rows > 1 and needs(rows) > most:
        rows = ceil_div(rows, 2)
    if needs(rows) + SPARE > MOST_BYTES // element_bytes:
        return None
    rows = ceil_div(n_rows, ceil_div(n_rows, rows))
    bands = ceil_div(n_rows, rows)
    return Bands(1, rows, bands, n_planes * bands, needs(rows) + SPARE, bits)


@functools.lru_cache(maxsize=4096)
def plan_forward(n_planes, window, itemsize):
    """`Bands` of the output; None where a row's windows don't fit shared memory."""
    reach = (window.KH - 1) * window.DH + 1

    def needs(rows):
        return min((rows - 1) * window.SH + reach, window.H) * window.W

    size = window.H * window.W
    return _bands(n_planes, window.OH, needs, size, itemsize, window.OW)


@functools.lru_cache(maxsize=4096)
def plan_backward(n_planes, window):
    """(`Bands` of dx or None, a, b): the windows that overlap none differ by a rows or b columns.

    Sums are float32, whatever dx is.
    """
    a = ceil_div((window.KH - 1) * window.DH + 1, window.SH)
    b = ceil_div((window.KW - 1) * window.DW + 1, window.SW)
    size = window.H * window.W
    width = ceil_div(window.OW, b)
    found = _bands(n_planes, window.H, lambda rows: rows * window.W, size, 4, width)
    return found, a, b
