"""How the rung `two_pass` shares an image out among blocks: plain numbers, from plain numbers."""

import functools
from typing import NamedTuple

from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, MOST_CHANNELS
from course_lib.kernels.squeeze_excite.planes import WHOLE_BLOCK
from course_lib.runtime.intrinsics import VECTOR_BYTES

ENOUGH_BLOCKS = 132 * 3  # all of which the largest chip of today runs at once
MOST_SLOTS = 132 * 2  # of a sample: each block of the second pass reads them all
LEAST_BYTES = 16 << 10  # of a block: 4 vectors for each thread
MOST_BYTES = 128 << 10  # of a block, once there are enough blocks
LONG_PLANE = 24 * 32  # vectors, from which on a block's threads sum a plane together
LANES = (8, 32)  # fewest and most lanes that share a plane otherwise
COLUMNS = (8, 32)  # fewest and most columns of 16 bytes of a block, channels-last
PIXELS = 4  # at least, of a thread
PART_VECTORS = BLOCK_SIZE  # at least, of a part of a plane


class Plan(NamedTuple):
    """Block b of a sample's n_slots takes channels b // n_parts · group and on, part b % n_parts.

    A part is `length` pixels. `team` is how many lanes share a plane (`planes`), or how many
    columns a block has (`pixels`); for `multiplier`, see `planes.plane_of`.
    """

    n_slots: int
    group: int
    n_parts: int
    length: int
    team: int
    multiplier: int = 0


def ceil_div(a, b):
    return -(-a // b)


def wanted_slots(N, sample_bytes):
    """Into how many blocks a sample is best cut."""
    total = N * sample_bytes
    n_blocks = min(ENOUGH_BLOCKS, total // LEAST_BYTES)
    n_blocks = max(n_blocks, total // MOST_BYTES)
    return max(1, min(MOST_SLOTS, round(n_blocks / N), ceil_div(sample_bytes, LEAST_BYTES)))


@functools.lru_cache(maxsize=4096)
def plan_planes(N, C, n_pixels, itemsize):
    """The `Plan` for contiguous images of at least one pixel."""
    width = VECTOR_BYTES // itemsize
    n_vectors = ceil_div(n_pixels, width)
    slots = wanted_slots(N, C * n_pixels * itemsize)
    group = min(MOST_CHANNELS, ceil_div(C, slots))
    # `plane_of` wants elements of a block times pixels of a plane below 2³².
    group = max(1, min(group, (2**32 - 1) // n_pixels**2))
    n_groups = ceil_div(C, group)
    if n_vectors >= LONG_PLANE:
        team = WHOLE_BLOCK
    else:
        team = LANES[0]
        while team < LANES[1] and (team * 6 < n_vectors or team * 2 * group <= BLOCK_SIZE):
            team *= 2
    n_parts = 1
    if group == 1 and team == WHOLE_BLOCK:
        n_parts = max(1, min(slots // n_groups, n_vectors // PART_VECTORS))
    length = ceil_div(n_pixels, n_parts)
    n_parts = ceil_div(n_pixels, length)
    multiplier = ceil_div(2**32, n_pixels) if group > 1 else 0
    return Plan(n_groups * n_parts, group, n_parts, length, team, multiplier)


@functools.lru_cache(maxsize=4096)
def plan_pixels(N, C, n_pixels, itemsize):
    """The `Plan` for channels-last images of at least one pixel."""
    width = VECTOR_BYTES // itemsize
    total_columns = ceil_div(C, width)
    slots = wanted_slots(N, C * n_pixels * itemsize)
    most = min(COLUMNS[1], MOST_CHANNELS // width)
    n_tiles = max(ceil_div(total_columns, most), min(slots, ceil_div(total_columns, COLUMNS[0])))
    n_columns = ceil_div(total_columns, n_tiles)
    n_tiles = ceil_div(total_columns, n_columns)
    per_thread = n_pixels // (BLOCK_SIZE // n_columns)
    n_parts = max(1, min(slots // n_tiles, per_thread // PIXELS))
    length = ceil_div(n_pixels, n_parts)
    n_parts = ceil_div(n_pixels, length)
    return Plan(n_tiles * n_parts, n_columns * width, n_parts, length, n_columns)
