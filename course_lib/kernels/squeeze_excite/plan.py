"""How images are shared out among blocks: plain numbers, from plain numbers."""

import functools
from typing import NamedTuple

from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, MOST_CHANNELS
from course_lib.kernels.squeeze_excite.planes import WHOLE_BLOCK
from course_lib.runtime.intrinsics import VECTOR_BYTES

LONG_PLANE = 24 * 32  # vectors, from which on a block's threads sum a plane together
LANES = (8, 32)  # fewest and most lanes that share a plane otherwise
COLUMNS = (8, 32)  # fewest and most columns of 16 bytes of a block, channels-last
PIXELS = 4  # at least, of a thread
PART_VECTORS = BLOCK_SIZE  # at least, of a part of a plane
#: Weights of a layer, up to which a block is not better off with fewer channels: it waits for all
#: that it reads of them, and small images with large layers have more of these than of pixels.
BLOCK_WEIGHTS = 16 << 10


class Cut(NamedTuple):
    """How finely to cut: bytes of a part, and how many parts a sample may have.

    enough_blocks  parts of all samples, beyond which they may grow larger
    least_bytes    of a part, as long as there are not enough of them
    most_bytes     of a part, once there are
    most_slots     parts of a sample: each block that scales reads what all of them found
    """

    enough_blocks: int
    least_bytes: int
    most_bytes: int
    most_slots: int


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


def wanted_slots(N, sample_bytes, n_weights, cut):
    """Into how many blocks a sample is best cut; `n_weights` are those of each of its layers."""
    total, for_weights = N * sample_bytes, n_weights // BLOCK_WEIGHTS
    useful = max(total // cut.least_bytes, N * for_weights)
    n_blocks = max(min(cut.enough_blocks, useful), total // cut.most_bytes)
    most = min(cut.most_slots, max(ceil_div(sample_bytes, cut.least_bytes), for_weights))
    return max(1, min(most, round(n_blocks / N)))


def plan_of(problem, cut):
    """The `Plan` of images with a pixel at least."""
    planned = plan_pixels if problem.channels_last else plan_planes
    return planned(problem.N, problem.C, problem.n_pixels, problem.itemsize, cut, problem.R)


@functools.lru_cache(maxsize=4096)
def plan_planes(N, C, n_pixels, itemsize, cut, R=0):
    """The `Plan` for contiguous images of at least one pixel."""
    width = VECTOR_BYTES // itemsize
    n_vectors = ceil_div(n_pixels, width)
    slots = wanted_slots(N, C * n_pixels * itemsize, C * R, cut)
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
def plan_pixels(N, C, n_pixels, itemsize, cut, R=0):
    """The `Plan` for channels-last images of at least one pixel."""
    width = VECTOR_BYTES // itemsize
    total_columns = ceil_div(C, width)
    slots = wanted_slots(N, C * n_pixels * itemsize, C * R, cut)
    most = min(COLUMNS[1], MOST_CHANNELS // width)
    # What goes element by element wants whole pixels: one stretch of memory.
    fewest = most if C % width else COLUMNS[0]
    n_tiles = max(ceil_div(total_columns, most), min(slots, ceil_div(total_columns, fewest)))
    n_columns = ceil_div(total_columns, n_tiles)
    n_tiles = ceil_div(total_columns, n_columns)
    across = min(C, n_columns * width) if C % width else n_columns
    per_thread = n_pixels // (BLOCK_SIZE // across)
    n_parts = max(1, min(slots // n_tiles, per_thread // PIXELS))
    length = ceil_div(n_pixels, n_parts)
    n_parts = ceil_div(n_pixels, length)
    return Plan(n_tiles * n_parts, n_columns * width, n_parts, length, n_columns)
