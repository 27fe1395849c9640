"""How `fused` shares samples out among blocks and shared memory: the choices, in one place."""

import functools
from typing import NamedTuple

from course_lib.runtime.intrinsics import VECTOR_BYTES

SHARED_RESERVE = 1 << 10  # bytes of a multiprocessor's shared memory that each block costs beside
HELD_WEIGHTS = 40 << 10  # bytes of a slice of both matrices, up to which both are kept at once
LEAST_LANES = 8
TASKS_PER_TEAM = 4  # at least: then the last ones to finish cost little
SMALL_PART = 72 << 10  # bytes: three such blocks on a multiprocessor
LARGE_PART = 100 << 10  # from here on a block has LARGE_BLOCK threads
SMALL_BLOCK, LARGE_BLOCK = 256, 512


class Room(NamedTuple):
    """A chip: its multiprocessors, blocks in a cluster, shared memory and threads of a block."""

    multiprocessors: int
    most_cluster: int
    shared_limit: int
    block_sizes: tuple = (SMALL_BLOCK, LARGE_BLOCK)


class Plan(NamedTuple):
    """A cluster of blocks works on a sample.

    cluster       blocks of it
    block_size    threads of each
    n_most        channels of a block's slice, at most
    n_pieces      tasks that a plane is cut into (contiguous images)
    lanes         threads that work on one task (contiguous images)
    held          elements (contiguous images) or pixels of a part that are kept in shared memory
    other         where in shared memory, in elements of x, all of a part of x is kept in the
                  backward pass beside dy; 0 if it is not
    first         where in shared memory, in elements of the weights, a slice of the first matrix is
                  kept, and
    second        where one of the second: one after the other, if both are the same place
    place         where in shared memory, in elements of x, the part is kept
    shared_bytes  of shared memory in all
    """

    cluster: int
    block_size: int
    n_most: int
    n_pieces: int
    lanes: int
    held: int
    other: int
    first: int
    second: int
    place: int
    shared_bytes: int


@functools.lru_cache(maxsize=4096)
def plan_of(problem, weight_size, n_arrays, room, cluster=None, block_size=None):
    """The `Plan` for a `Problem`; None where not even the tables fit in shared memory.

    weight_size  bytes of a weight
    n_arrays     that are read: 1 forward, 2 backward
    """
    cluster = cluster or _cluster_of(problem, n_arrays, room)
    part = part_bytes(problem, cluster)
    block_size = block_size or room.block_sizes[part * n_arrays > LARGE_PART]
    C, R, itemsize, P = problem.C, problem.R, problem.itemsize, problem.n_pixels
    width, n_most = VECTOR_BYTES // itemsize, -(-C // cluster)
    lanes, n_pieces = _tasks(problem, n_most, block_size, width)
    scratch = max(block_size, n_most * n_pieces)
    if problem.channels_last:
        rows = max(1, block_size // -(-C // width))
        scratch = C * n_arrays + max(block_size, rows * C)
    tables = 3 * n_most + 3 * R + scratch
    tables_bytes = _whole(4 * tables)
    first = second = tables_bytes // weight_size
    matrix_bytes = _whole(R * n_most * weight_size)
    tables_bytes += matrix_bytes
    if 2 * matrix_bytes <= HELD_WEIGHTS:
        second = tables_bytes // weight_size
        tables_bytes += matrix_bytes
    left = (room.shared_limit - SHARED_RESERVE - tables_bytes) // itemsize
    if left < 0:
        return None
    if problem.channels_last:
        n_rows = -(-P // cluster)
        whole = -(-n_rows * C // width) * width
        held = min(n_rows, left // width * width // C)
        kept = -(-held * C // width) * width
    else:
        whole = -(-(n_most * P + width - 1) // width) * width
        held = kept = min(whole, left // width * width)
    place, other = tables_bytes // itemsize, 0
    if n_arrays == 2 and kept == whole and 2 * whole <= left:
        other = place + whole
        kept += whole
    return Plan(
        cluster, block_size, n_most, n_pieces, lanes, held, other, first, second, place,
        tables_bytes + kept * itemsize,
    )  # fmt: skip


def _whole(n_bytes):
    return -(-n_bytes // VECTOR_BYTES) * VECTOR_BYTES


def part_bytes(problem, cluster):
    """Bytes of a block's part of a sample, at most."""
    if problem.channels_last:
        return -(-problem.n_pixels // cluster) * problem.C * problem.itemsize
    return -(-problem.C // cluster) * problem.n_pixels * problem.itemsize


def _cluster_of(problem, n_arrays, room):
    """As many blocks as there are multiprocessors for; more, where parts would be too large."""
    most = 1
    for_all = problem.n_pixels if problem.channels_last else problem.C
    while most * 2 <= min(room.most_cluster, for_all):
        most *= 2
    cluster = 1
    while cluster < most and (
        problem.N * cluster * 2 <= room.multiprocessors
        or part_bytes(problem, cluster) * n_arrays > SMALL_PART
    ):
        cluster *= 2
    return cluster


def _tasks(problem, n_most, block_size, width):
    """(lanes of a team, pieces of a plane): teams as large as planes allow, and tasks for all."""
    lanes = 32
    while lanes > LEAST_LANES and lanes * 2 * width > problem.n_pixels:
        lanes //= 2
    n_teams = block_size // lanes
    n_pieces = -(-TASKS_PER_TEAM * n_teams // n_most)
    most = max(1, problem.n_pixels // (4 * lanes * width))  # pieces that fill a team's loads
    return lanes, min(n_pieces, most)
