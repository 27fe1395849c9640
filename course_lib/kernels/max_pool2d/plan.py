"""How the rung `vectorised` shares images out among blocks: plain numbers, from plain numbers."""

import functools
from typing import NamedTuple

from course_lib.kernels.max_pool2d.bands import SHIFT
from course_lib.kernels.max_pool2d.fixed import Fixed

BAND_BYTES = 20 << 10  # of shared memory, about, so that many blocks share a multiprocessor …
MOST_BYTES = 48 << 10  # … and at most: what every chip gives a block
ENOUGH_BLOCKS = 4  # of a multiprocessor, below which small planes are not put together …
FEW_BLOCKS = 2  # … and below which bands have fewer rows, if their windows need no rounds
FEW_ROUNDS = 8  # of a block, for which a multiprocessor should have one band
BAND_THREADS = 128
RELU_THREADS = 256
PIXEL_PATCH_THREADS = 128
PATCH_THREADS = 256, 128  # of patches as wide as 16 bytes of x or less, and of wider ones
MOST_THREADS = 2**31 - 1024  # that a kernel counts in 32 bits
ENOUGH_PATCHES = 132 * 1024  # below which a patch has fewer windows
FORWARD_BYTES, BACKWARD_BYTES = 32, 16  # of a row of x or of dx that a patch has at most
#: Rows of windows that a patch has at most, by stride: of `patches`, and element by element. Rows
#: that windows share are read once; yet on an H200 one row is faster than two where windows are two
#: rows apart, backward.
FORWARD_ROWS, FORWARD_COLUMN_ROWS = {1: 2, 2: 1}, {1: 4, 2: 4}
BACKWARD_ROWS, BACKWARD_COLUMN_ROWS = {1: 2, 2: 1}, {1: 2, 2: 2}  # where windows overlap
COLUMN_ROWS = 2  # of a column of windows that reach far
#: The same of `pixel_patches`: forward by stride, backward, where windows overlap, by bytes of an
#: element. There two rows are faster for 16-bit numbers, and no faster for float32.
FORWARD_TALL, BACKWARD_TALL = {1: 2, 2: 1}, {2: 2, 4: 1}
SPARE = 16  # elements that a band may begin after a 16-byte boundary, and end before one


class Bands(NamedTuple):
    """A block takes `planes` planes, or one of `bands` bands of `rows` rows of a plane."""

    planes: int
    rows: int
    bands: int
    n_blocks: int
    elements: int  # that it holds in shared memory
    bits: int  # 2^bits threads side by side in a row


class Patches(NamedTuple):
    """`columns` patches in each of `groups` groups of rows of each plane; see `patches`."""

    across: int
    rows: int
    aligned: bool
    columns: int
    groups: int
    n_patches: int


def ceil_div(a, b):
    return -(-a // b)


@functools.lru_cache(maxsize=4096)
def divider(n):
    """(multiplier, shift) with i // n == i · multiplier >> 31 + shift for all i below 2³¹."""
    shift = (n - 1).bit_length()
    return ceil_div(2 ** (31 + shift), n), shift


def _bands(n_planes, n_rows, least, few, needs, plane_elements, element_bytes, width, chip):
    """`needs(r)`: elements in shared memory for a band of r of the n_rows rows.

    Fewer blocks than `few` have fewer rows, but no fewer than `least`.
    """
    bits = max(0, min(BAND_THREADS, width) - 1).bit_length()
    most = BAND_BYTES // element_bytes - SPARE
    enough = ENOUGH_BLOCKS * chip.multiprocessors
    planes = min(most // plane_elements, n_planes // enough) if plane_elements else 1
    planes = min(planes, 2**SHIFT // max(1, n_rows * n_rows))
    if planes > 1:
        elements = planes * plane_elements + SPARE
        return Bands(planes, n_rows, 1, ceil_div(n_planes, planes), elements, bits)
    rows = n_rows
    while (rows > 1 and needs(rows) > most) or (
        rows >= 2 * least and n_planes * ceil_div(n_rows, rows) < few
    ):
        rows = ceil_div(rows, 2)
    if needs(rows) + SPARE > MOST_BYTES // element_bytes:
        return None
    rows = ceil_div(n_rows, ceil_div(n_rows, rows))
    bands = ceil_div(n_rows, rows)
    return Bands(1, rows, bands, n_planes * bands, needs(rows) + SPARE, bits)


@functools.lru_cache(maxsize=4096)
def plan_forward(n_planes, window, itemsize, chip):
    """`Bands` of the output; None where a row's windows don't fit shared memory."""
    reach = (window.KH - 1) * window.DH + 1

    def needs(rows):
        return min((rows - 1) * window.SH + reach, window.H) * window.W

    size, few = window.H * window.W, FEW_BLOCKS * chip.multiprocessors
    return _bands(n_planes, window.OH, 1, few, needs, size, itemsize, window.OW, chip)


@functools.lru_cache(maxsize=4096)
def plan_backward(n_planes, window, chip):
    """(`Bands` of dx or None, a, b): the windows that overlap none differ by a rows or b columns.

    Sums are float32, whatever dx is. None where a row doesn't fit shared memory, and where windows
    overlap and multiprocessors would have no band, or few of many rounds: a block's rounds wait for
    one another, and they take longer than all of a thread that gathers an element.
    """
    reach = (window.KH - 1) * window.DH + 1
    a = ceil_div(reach, window.SH)
    b = ceil_div((window.KW - 1) * window.DW + 1, window.SW)
    size = window.H * window.W
    width = ceil_div(window.OW, b)
    least, few = 1, FEW_BLOCKS * chip.multiprocessors
    if a * b > 1:  # lower bands would read more windows of others than of their own
        least, few = reach, chip.multiprocessors * max(1, a * b // FEW_ROUNDS)
    found = _bands(
        n_planes, window.H, least, few, lambda rows: rows * window.W, size, 4, width, chip
    )
    return (None if found and a * b > 1 and found.n_blocks < few else found), a, b


@functools.lru_cache(maxsize=4096)
def plan_forward_patches(n_planes, window, itemsize, x, y, indices):
    """`Patches` of the output; None where a kernel can't count them.

    `x`, `y`, `indices`: the bytes from the last 16-byte boundary to each.
    """
    shapes = forward_shapes(window.SW, itemsize)
    return _patches(n_planes, window, shapes, itemsize, x, y, indices, window.OW, window.OH)


@functools.lru_cache(maxsize=4096)
def plan_backward_patches(n_planes, window, itemsize, dy, indices, dx):
    """`Patches` of dx, as `plan_forward_patches`."""
    shapes = backward_shapes(Fixed(window.KH, window.SH, window.PH), itemsize)
    width, height = ceil_div(window.W, window.SW), ceil_div(window.H, window.SH)
    return _patches(n_planes, window, shapes, itemsize, dx, dy, indices, width, height)


def plan_columns(n_planes, height, width):
    """`Patches` of COLUMN_ROWS rows and a column of images of height×width; None as there."""
    groups = ceil_div(height, COLUMN_ROWS)
    n_patches = n_planes * groups * width
    found = Patches(1, COLUMN_ROWS, False, width, groups, n_patches)
    return found if max(n_patches, height * width) <= MOST_THREADS else None


def forward_shapes(stride, itemsize):
    """(across, rows, aligned) of every kind of patch, the largest first."""
    # A patch reads whole words, and its columns are those of 8 windows at most.
    widest = min(FORWARD_BYTES // (stride * itemsize), 8 if itemsize == 2 else 4)
    across = [n for n in _halved(widest) if n * stride * itemsize >= 4]
    rows = FORWARD_ROWS[stride] if itemsize == 4 else 1  # no gain where patches are 8 wide
    return _shapes(across, rows, FORWARD_COLUMN_ROWS[stride], stride)


def backward_shapes(fixed, itemsize):
    """As `forward_shapes`."""
    stride, overlap = fixed.stride, fixed.kernel > fixed.stride
    across = _halved(BACKWARD_BYTES // (stride * itemsize))
    rows = BACKWARD_ROWS[stride] if overlap else 1
    return _shapes(across, rows, BACKWARD_COLUMN_ROWS[stride], stride)


def forward_tall(fixed, itemsize):
    """Windows one below the other that a patch of channels-last images has at most."""
    return FORWARD_TALL[fixed.stride]


def backward_tall(fixed, itemsize):
    """As `forward_tall`: where windows overlap, patches share them."""
    return BACKWARD_TALL[itemsize] if fixed.kernel > fixed.stride else 1


def _halved(n):
    """n, n / 2, … 1, of a power of two."""
    return [n >> k for k in range(n.bit_length())]


def _shapes(across, rows, column_rows, stride):
    shapes = [(n, rows, True) for n in across] + [(across[-1], 1, True)] * (rows > 1)
    if across[-1] * stride == 1:  # columns of an element, which begin wherever one may
        return shapes
    return shapes + [(1, n, False) for n in _halved(column_rows)]


def _patches(n_planes, window, shapes, itemsize, image, pooled, indices, width, height):
    """The largest of `shapes` that fits and leaves enough patches, else the smallest that fits.

    `width` and `height`: columns and rows of windows.
    """
    found = None
    for across, rows, aligned in shapes:
        if aligned and not _fits(across, window, itemsize, image, pooled, indices):
            continue
        if found and found.aligned and not aligned:
            break
        columns, groups = width // across, ceil_div(height, rows)
        found = Patches(across, rows, aligned, columns, groups, n_planes * groups * columns)
        if found.n_patches >= ENOUGH_PATCHES:
            break
    return found if max(found.n_patches, window.H * window.W) <= MOST_THREADS else None


def _fits(across, window, itemsize, image, pooled, indices):
    """Whether patches `across` windows wide begin on the boundaries of their vectors."""
    fits = window.OW * window.SW == window.W and window.OW % across == 0
    fits = fits and image % min(16, across * window.SW * itemsize) == 0
    return fits and pooled % min(16, across * itemsize) == indices % across == 0
