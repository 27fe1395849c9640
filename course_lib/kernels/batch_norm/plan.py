"""How the rung `vectorised` shares images out among blocks: plain numbers, from plain numbers."""

import functools
import math
from typing import NamedTuple

from course_lib.kernels.batch_norm.pixels import BLOCK_SIZE as PIXEL_BLOCK
from course_lib.runtime.intrinsics import VECTOR_BYTES

WAVE = 132 * 6  # blocks that keep the largest chip of today busy
CLUSTER = 8  # most blocks of a cluster, which share a channel; any chip with clusters can do 8
ALONE_BYTES = 128 << 10  # of a channel, for each block of a cluster
ENOUGH_CHANNELS = 132 * 4  # from which on clusters need not be larger for the chip to be busy
LEAST_SHARE = 4 << 10  # bytes of a channel for each block of a cluster
PART_THREADS = 128
MOST_THREADS = 512  # of a block of a cluster
LEAST_PART = 16 << 10  # bytes of a part
STATISTICS_PART = 96 << 10  # the same where there is enough to do; parts are merged
PASS_PART = 32 << 10  # the same where nothing is merged
WALK_PART = 32 << 10  # the same of a walk (`walk`)
WALK_THREADS = 128
MOST_PARTS = 1024  # of a channel, where they are merged
VECTORS_PER_LANE = 8  # about, of a plane
LEAST_TEAM = 8  # threads that share a plane
ALIGNED = 64  # elements: where a plane is cut
COLUMNS = 16  # most vectors side by side in a block, channels-last
PIXEL_ROWS = 4  # at least, of a thread
PASS_ROWS = 8  # of a thread, where there is enough to do and nothing is merged
PIXEL_WAVE = 132 * 6  # blocks, where parts are merged
MOST_GRID = 65535  # blocks in y


class Planes(NamedTuple):
    """n_parts blocks take `length` elements each of a channel. If `cluster`, they are that many,
    a cluster, and do all of the channel."""

    cluster: int
    length: int
    n_parts: int
    team: int
    block: int


class Pixels(NamedTuple):
    """Rows of `wide` numbers, tiles of n_columns vectors, and parts of `length` of n_rows rows."""

    wide: int
    n_rows: int
    n_columns: int
    n_tiles: int
    length: int
    n_parts: int


def ceil_div(a, b):
    return -(-a // b)


@functools.lru_cache(maxsize=4096)
def plan_planes(N, C, P, itemsize, most_cluster=CLUSTER):
    """`Planes` for the statistics of contiguous images."""
    n_bytes, cluster = N * P * itemsize, 1
    while (
        2 * cluster <= most_cluster
        and (C * cluster < ENOUGH_CHANNELS or 2 * n_bytes > cluster * ALONE_BYTES)
        and n_bytes >= 2 * cluster * LEAST_SHARE
    ):
        cluster *= 2
    if n_bytes <= cluster * ALONE_BYTES:
        length = _length(N, P, ceil_div(N * P, cluster))
        lanes = ceil_div(length * itemsize, VECTOR_BYTES * VECTORS_PER_LANE)
        block = 128
        while block < min(MOST_THREADS, lanes):
            block *= 2
        return Planes(cluster, length, cluster, _team(P, length, itemsize, block), block)
    wanted = max(ceil_div(WAVE, C), min(n_bytes // STATISTICS_PART, MOST_PARTS))
    return _in_parts(N, P, itemsize, min(wanted, n_bytes // LEAST_PART), PART_THREADS)


@functools.lru_cache(maxsize=4096)
def plan_pass(N, C, P, itemsize):
    """`Planes` for what is done to each element by itself."""
    n_bytes = N * P * itemsize
    wanted = max(ceil_div(WAVE, C), n_bytes // PASS_PART)
    return _in_parts(N, P, itemsize, min(wanted, n_bytes // LEAST_PART), PART_THREADS)


@functools.lru_cache(maxsize=4096)
def plan_walk(N, C, P, itemsize):
    """`Planes` for a walk over the channels."""
    return _in_parts(N, P, itemsize, N * P * itemsize // WALK_PART, WALK_THREADS)


def _in_parts(N, P, itemsize, n_parts, threads):
    wanted = ceil_div(N * P, max(1, n_parts))
    if wanted < P:
        wanted = ceil_div(P, ceil_div(P, wanted))  # of a plane, equal shares
    length = _length(N, P, wanted)
    team = _team(P, length, itemsize, threads)
    return Planes(0, length, ceil_div(N * P, length), team, threads)


def _length(N, P, wanted):
    """Elements of a part, at least `wanted`: whole planes, or not, if those are far more."""
    whole = ceil_div(wanted, P) * P
    if 4 * whole <= 5 * wanted:
        return whole
    return min(ceil_div(wanted, ALIGNED) * ALIGNED, N * P)


def _team(P, length, itemsize, block):
    lanes = ceil_div(min(P, length) * itemsize, VECTOR_BYTES) / VECTORS_PER_LANE
    team = LEAST_TEAM
    while team < min(block, lanes):
        team *= 2
    return team


@functools.lru_cache(maxsize=4096)
def plan_pixels(n_pixels, C, itemsize, merged=True):
    """`Pixels` for channels-last images; whether parts are merged."""
    wide = math.lcm(C, VECTOR_BYTES // itemsize)
    n_rows, vectors = ceil_div(n_pixels * C, wide), wide * itemsize // VECTOR_BYTES
    n_columns = 1
    while n_columns < min(COLUMNS, vectors):
        n_columns *= 2
    n_tiles = ceil_div(vectors, n_columns)
    height = PIXEL_BLOCK // n_columns
    wanted = ceil_div(PIXEL_WAVE, n_tiles)
    if not merged:
        wanted = max(ceil_div(WAVE, n_tiles), n_rows // (height * PASS_ROWS))
    n_parts = max(1, min(wanted, n_rows // (height * PIXEL_ROWS), MOST_GRID))
    length = ceil_div(n_rows, n_parts)
    return Pixels(wide, n_rows, n_columns, n_tiles, length, ceil_div(n_rows, length))
