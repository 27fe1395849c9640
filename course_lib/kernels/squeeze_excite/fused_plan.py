"""How `fused` shares samples out among blocks and shared memory: the choices, measured."""

import functools
from typing import NamedTuple

from course_lib.kernels.squeeze_excite.fused_exchange import LANES
from course_lib.runtime.intrinsics import VECTOR_BYTES

BLOCK_SIZE = 512
SHARED_RESERVE = 1 << 10  # bytes that a block needs beside dynamic shared memory
MOST_STAGES = 4
LEAST_PART = 4 << 10  # bytes below which a part is not worth a block
CACHED_SHARE = 0.5  # of shared memory that the matrices may take


class Plan(NamedTuple):
    """`n_teams` teams of `n_parts` blocks; team t takes samples t, t + n_teams, …

    n_stages        parts of consecutive samples that a block has in shared memory
    lag             samples between pooling and scaling: time for the others' posts to arrive
    stage           elements of a part, at most
    n_channels      channels of a part, at most
    lanes           that sum a channel together
    cached          whether the parts of both matrices are kept in shared memory
    tables_bytes    of shared memory for tables, before the stages
    """

    n_parts: int
    n_teams: int
    n_stages: int
    lag: int
    stage: int
    n_channels: int
    lanes: int
    cached: bool
    tables_bytes: int
    shared_bytes: int


@functools.lru_cache(maxsize=4096)
def planes_plan(N, C, n_pixels, R, itemsize, n_held, n_blocks, shared_limit, n_parts=None):
    """The `Plan` for contiguous images; None where parts would not fit.

    n_held    arrays held: 1 forward, 2 backward
    n_blocks  that run at once on the chip
    """
    width = VECTOR_BYTES // itemsize
    n_vectors = -(-C * n_pixels // width)
    best = None
    candidates = range(1, n_blocks + 1) if n_parts is None else (n_parts,)
    for n_parts in candidates:
        if n_parts > n_vectors:
            break
        stage = -(-n_vectors // n_parts) * width
        n_channels = min(C, (stage - 1) // n_pixels + 2)
        found = _fill(N, R, n_parts, stage, n_channels, itemsize, n_held, n_blocks, shared_limit)
        if found is not None:
            cost, fields = found
            if best is None or cost < best[0]:
                best = cost, fields, stage, n_channels
    if best is None:
        return None
    lanes = 32
    while lanes > LANES and lanes * 2 * width > n_pixels:
        lanes //= 2
    _, (n_parts, n_teams, n_stages, lag, cached, tables, shared), stage, n_channels = best
    return Plan(n_parts, n_teams, n_stages, lag, stage, n_channels, lanes, cached, tables, shared)


def _fill(N, R, n_parts, stage, n_channels, itemsize, n_held, n_blocks, shared_limit):
    n_teams = min(N, n_blocks // n_parts)
    n_steps = -(-N // n_teams)
    matrices = 4 * 2 * R * n_channels
    available = shared_limit - SHARED_RESERVE
    cached = True
    tables = 4 * (3 * n_channels + R + max(BLOCK_SIZE, n_channels)) + cached * matrices
    tables = -(-tables // VECTOR_BYTES) * VECTOR_BYTES
    n_stages = min(MOST_STAGES, n_steps, (available - tables) // (stage * itemsize))
    if n_stages < min(n_steps, 2):
        return None
    lag = 1 if n_stages > 2 else 0
    # Microseconds of a step: what memory takes for it, or what a block takes.
    part_bytes = stage * itemsize
    memory = n_teams * n_parts * part_bytes * 2 / 4.2e6
    block = 1.2 + part_bytes / 30e3 + n_parts * R * 8 / 60e3 + (0 if lag else 1.5)
    cost = n_steps * max(memory, block) if n_steps > 1 else memory + block
    cost += part_bytes * 1e-9
    shared = tables + n_stages * part_bytes
    return cost, (n_parts, n_teams, n_stages, lag, cached, tables, shared)
