"""How the rung `vectorised` shares images out among blocks: plain numbers, from plain numbers."""

import functools
from typing import NamedTuple

from course_lib.kernels.batch_norm.pixels import BLOCK_SIZE as PIXEL_BLOCK
from course_lib.runtime.intrinsics import VECTOR_BYTES

WAVE = 132 * 6  # blocks of 256 threads that the largest chip of today runs at once
ALONE_BYTES = 128 << 10  # of a channel that one block does alone, however few channels there are
ENOUGH_CHANNELS = 132 * 4  # from which on every block does a channel alone
LONG_CHANNEL = 64 << 10  # bytes, from which on a block alone has the most threads
MOST_THREADS = 512
PART_THREADS = 256
LEAST_PART = 16 << 10  # bytes of a part
VECTORS_PER_LANE = 4  # about, of a plane
LEAST_TEAM = 8  # threads that share a plane
COLUMNS = 16  # most vectors side by side in a block, channels-last
PIXEL_ROWS = 16  # at least, of a thread


class Planes(NamedTuple):
    """`alone`: a block does a whole channel. Else n_parts blocks take `length` elements each."""

    alone: bool
    length: int
    n_parts: int
    team: int
    block: int


class Pixels(NamedTuple):
    """Tiles of n_columns vectors, and parts of `length` rows."""

    n_columns: int
    n_tiles: int
    length: int
    n_parts: int


def ceil_div(a, b):
    return -(-a // b)


@functools.lru_cache(maxsize=4096)
def plan_planes(N, C, P, itemsize, together=True):
    """`Planes` for contiguous images; `together` says that statistics are to be found, too."""
    total, n_bytes = N * P, N * P * itemsize
    alone = together and (n_bytes <= ALONE_BYTES or C >= ENOUGH_CHANNELS)
    block = PART_THREADS
    if alone:
        block = MOST_THREADS if n_bytes >= LONG_CHANNEL else 256 if n_bytes >= 8192 else 128
    lanes = ceil_div(P * itemsize, VECTOR_BYTES) / VECTORS_PER_LANE
    team = LEAST_TEAM
    while team < min(block, lanes):
        team *= 2
    n_parts = 1 if alone else max(1, min(ceil_div(WAVE, C), n_bytes // LEAST_PART))
    length = ceil_div(total, n_parts)
    if length > P:
        length = ceil_div(length, P) * P  # whole planes
    return Planes(alone, length, ceil_div(total, length), team, block)


@functools.lru_cache(maxsize=4096)
def plan_pixels(n_rows, C, itemsize):
    """`Pixels` for channels-last images of whole vectors of channels."""
    vectors = ceil_div(C * itemsize, VECTOR_BYTES)
    n_columns = 1
    while n_columns < min(COLUMNS, vectors):
        n_columns *= 2
    n_tiles = ceil_div(vectors, n_columns)
    height = PIXEL_BLOCK // n_columns
    n_parts = max(1, min(ceil_div(WAVE, n_tiles), n_rows // (height * PIXEL_ROWS)))
    length = ceil_div(n_rows, n_parts)
    return Pixels(n_columns, n_tiles, length, ceil_div(n_rows, length))
