"""How `fused` shares samples out among blocks and shared memory: the choices, measured."""

import functools
from typing import NamedTuple

from course_lib.kernels.squeeze_excite.fused_exchange import LANES
from course_lib.runtime.intrinsics import VECTOR_BYTES

BLOCK_SIZE = 512
SHARED_RESERVE = 2 << 10  # bytes that a block needs beside dynamic shared memory
MOST_STAGES = 4
MOST_LAG = 1  # the backward kernel keeps the scales of so many samples and one more
LEAST_WORD_LANES = 4
ROW_BYTES = 128  # of a channels-last part's rows, at least: whole lines of the cache


class Room(NamedTuple):
    """Blocks that run at once on a chip, each with so much shared memory and so many threads."""

    n_blocks: int
    shared_limit: int
    block_size: int


class Plan(NamedTuple):
    """`n_teams` teams of `n_parts` blocks; team t takes samples t, t + n_teams, …

    n_groups, group  groups of channels, and channels in one, where images are channels-last
    n_words          of the mailbox, for each part and sample
    n_stages         parts of consecutive samples that a block has in shared memory
    n_others         the same of x in the backward pass, where n_stages is that of dy
    lag              samples between pooling and scaling: time for the others' posts to arrive
    stage            elements of a part, at most
    n_channels       channels of a part, at most
    lanes            that sum a plane together
    word_lanes       that collect one hidden number's shares together
    tables_bytes     of shared memory for tables, before the stages
    shared_bytes     of shared memory in all
    """

    n_parts: int
    n_teams: int
    n_groups: int
    group: int
    n_words: int
    n_stages: int
    n_others: int
    lag: int
    stage: int
    n_channels: int
    lanes: int
    word_lanes: int
    tables_bytes: int
    shared_bytes: int


@functools.lru_cache(maxsize=4096)
def plan_of(problem, n_held, room, n_parts=None, lag=None):
    """The `Plan` for a `Problem`; None where no part would fit in shared memory.

    n_held  arrays held: 1 forward, 2 backward
    room    what the chip has
    """
    cuts = _pixel_cuts(problem, room) if problem.channels_last else _plane_cuts(problem, room)
    plans = [
        found
        for cut in cuts
        if n_parts in (None, cut[0]) and (found := _fill(problem, n_held, room, cut, lag))
    ]
    return min(plans, key=lambda found: found[0])[1] if plans else None


def _plane_cuts(problem, room):
    """(parts, groups, channels of a group, words, elements, channels, scratch) for each cut."""
    width = VECTOR_BYTES // problem.itemsize
    n_vectors = -(-problem.C * problem.n_pixels // width)
    for n_parts in range(1, min(room.n_blocks, n_vectors) + 1):
        stage = -(-n_vectors // n_parts) * width
        n_channels = min(problem.C, (stage - 2) // problem.n_pixels + 2)
        scratch = max(room.block_size // LANES, n_channels)
        yield n_parts, 1, 0, problem.R + 2, stage, n_channels, scratch


def _pixel_cuts(problem, room):
    width = VECTOR_BYTES // problem.itemsize
    least, seen = ROW_BYTES // problem.itemsize, set()
    for wanted in range(1, -(-problem.C // least) + 1):
        group = -(-problem.C // (wanted * width)) * width
        n_groups = -(-problem.C // group)
        if group > room.block_size * width or n_groups in seen:
            continue
        seen.add(n_groups)
        for n_runs in range(1, min(room.n_blocks // n_groups, problem.n_pixels) + 1):
            n_words = problem.R + (group if n_runs > 1 else 0)
            stage = -(-problem.n_pixels // n_runs) * group
            scratch = room.block_size * width
            yield n_runs * n_groups, n_groups, group, n_words, stage, group, scratch


def _fill(problem, n_held, room, cut, lag):
    """(estimated microseconds, `Plan`) for parts cut in this way; None where they don't fit."""
    n_parts, n_groups, group, n_words, stage, n_channels, scratch = cut
    R, itemsize = problem.R, problem.itemsize
    n_teams = min(problem.N, room.n_blocks // n_parts)
    n_steps = -(-problem.N // n_teams)
    tables = 4 * (4 * n_channels + 2 * R + 2 * R * n_channels + scratch)
    tables = -(-tables // VECTOR_BYTES) * VECTOR_BYTES
    part_bytes = stage * itemsize
    fitting = (room.shared_limit - SHARED_RESERVE - tables) // part_bytes
    n_others = 0 if n_held == 1 else 2 if fitting >= 6 and n_steps > 1 else 1
    n_stages = min(MOST_STAGES, n_steps, fitting - n_others)
    if n_stages < min(n_steps, 2):
        return None
    lag = min(MOST_LAG if lag is None else lag, max(0, n_stages - 2))
    word_lanes = 32
    while word_lanes > LEAST_WORD_LANES and room.block_size // word_lanes < R:
        word_lanes //= 2
    # Microseconds of a step: what memory takes for it, or what a block takes.
    memory = n_teams * n_parts * part_bytes * (1 + n_held) / 4.2e6
    words = n_parts * R / room.block_size / 8
    block = 3.2 + part_bytes / 26e3 + words + R * n_channels / 4096 + (0 if lag else 1.5)
    cost = n_steps * max(memory, block) if n_steps > 1 else memory + block
    plan = Plan(
        n_parts, n_teams, n_groups, group, n_words, n_stages, n_others, lag, stage, n_channels,
        _lanes_of(problem.n_pixels, VECTOR_BYTES // itemsize), word_lanes, tables,
        tables + (n_stages + n_others) * part_bytes,
    )  # fmt: skip
    return cost, plan


def _lanes_of(n_pixels, width):
    lanes = 32
    while lanes > LANES and lanes * 2 * width > n_pixels:
        lanes //= 2
    return lanes
