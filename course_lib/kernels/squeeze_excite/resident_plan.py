"""Which images fit into all multiprocessors' shared memory, and how `resident` deals them out.

Plain numbers, from plain numbers.
"""

import functools
from typing import NamedTuple

from course_lib.kernels.blocks.constants import MAX_WIDTH
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, CHUNK, MOST_CHANNELS, TOTALS
from course_lib.kernels.squeeze_excite.plan import LANES, ceil_div
from course_lib.runtime.host import launch as launching
from course_lib.runtime.intrinsics import VECTOR_BYTES

KEPT = 1024  # weights of a block that it keeps in shared memory, where it has no more
LEAST_BYTES = 2 << 10  # of a run: fewer are not worth a block
LINE_BYTES = 128
WASTE = 1.25  # times its fair share that a block may have for the sake of whole planes
BLOCKS = 2  # on a multiprocessor: one computes while the other one waits
#: `auto` takes this rung from SMALL bytes of images on, where a sample has ENOUGH_BLOCKS or more
#: for elements of so many bytes, and the small layers are no larger than SMALL_LAYERS, which counts
#: N·C·R forward and C·R backward: the blocks of each sample read each other's slots, and the
#: weights. Measured on an H200, against the better of `two_pass` and `fused`.
SMALL, SMALL_LAYERS = 256 << 10, {"forward": 1_250_000, "backward": 120_000}
ENOUGH_BLOCKS = {"forward": {4: 24, 2: 28}, "backward": {4: 8, 2: 28}}
#: Of shared memory for a block, on the chips that were measured: `auto` takes it nowhere else.
MEASURED_BYTES = 227 << 10
#: Older chips have fewer instructions for what the kernel does, and it needs more registers there
#: than BLOCKS blocks may have.
CAPABILITY = 9, 0
#: Bytes of shared memory of a block beside its run: the arrays of the kernel, and what the chip
#: takes for itself of each block's.
STATIC_BYTES = 4 * (MOST_CHANNELS + TOTALS + KEPT)
RESERVED_BYTES = 1 << 10


class Plan(NamedTuple):
    """`at_once` samples at a time, `n_blocks` blocks for each, `share` elements for each of those.

    For `team` and `n_pieces` see `held.sum_held`, for `multiplier` `held.scale_held`.
    """

    at_once: int
    n_blocks: int
    share: int
    team: int
    n_pieces: int
    multiplier: int

    def shared_bytes(self, itemsize):
        """Of the run, which may begin behind a 16-byte boundary."""
        return ceil_div(self.share * itemsize, VECTOR_BYTES) * VECTOR_BYTES + VECTOR_BYTES


def room_of(x):
    """(multiprocessors, bytes of shared memory that a block may have) where `x` is.

    0 bytes where the chip is too old.
    """
    chip = launching.chip_of(x)
    return (chip.multiprocessors, chip.shared_bytes) if chip.capability >= CAPABILITY else (1, 0)


@functools.lru_cache(maxsize=4096)
def plan_of(problem, n_multiprocessors, shared_bytes):
    """The `Plan`, or None where it can't be.

    That is for channels-last images, for more than CHUNK hidden channels, and where a sample
    outgrows all multiprocessors' shared memory together.
    """
    if problem.channels_last or not 0 < problem.R <= CHUNK or problem.n_pixels == 0:
        return None
    budget = (shared_bytes + RESERVED_BYTES) // BLOCKS - RESERVED_BYTES - STATIC_BYTES
    n_rounds = 0
    while n_rounds < problem.N:  # the fewer rounds, the less often blocks wait for each other
        n_rounds += 1
        at_once = ceil_div(problem.N, n_rounds)
        counts = [BLOCKS * n_multiprocessors // at_once]
        if at_once == 1:
            counts.insert(0, n_multiprocessors)
        for n_blocks in counts:
            if n_blocks and (plan := _cut(problem, at_once, n_blocks, budget)):
                return plan
    return None


def _cut(problem, at_once, n_blocks, budget):
    """The `Plan` with no more than `n_blocks` blocks for a sample, or None."""
    _, C, n_pixels, *_, itemsize = problem
    line = LINE_BYTES // itemsize
    share = max(ceil_div(C * n_pixels, n_blocks), LEAST_BYTES // itemsize)
    # Best are whole planes, so many that the rows of their weights begin on 16-byte boundaries.
    whole = ceil_div(share, MAX_WIDTH * n_pixels) * MAX_WIDTH * n_pixels
    if whole <= WASTE * share and whole * itemsize + VECTOR_BYTES <= budget:
        share = whole
    else:
        share = ceil_div(share, line) * line
    share = min(share, C * n_pixels)
    most_planes = min(C, (share - 1) // n_pixels + 2)
    width = VECTOR_BYTES // itemsize
    n_vectors, team = ceil_div(n_pixels, width), LANES[0]
    while team < LANES[1] and team * 6 < n_vectors:
        team *= 2
    n_pieces, longest = 1, min(n_vectors, share // width)
    while most_planes * n_pieces * team < BLOCK_SIZE and 2 * n_pieces * team <= longest:
        n_pieces *= 2
    few = (share + n_pixels) * n_pixels < 2**32
    plan = Plan(
        at_once, ceil_div(C * n_pixels, share), share, team, n_pieces,
        ceil_div(2**32, n_pixels) if few else 0,
    )  # fmt: skip
    fits = plan.shared_bytes(itemsize) <= budget and most_planes <= MOST_CHANNELS
    return plan if fits else None


def blocks_that_lead(problem, plan, n_multiprocessors):
    """How many blocks wait for no other one before they begin: one on each multiprocessor, or all.

    All, where samples take no turns, and where one sample has both blocks of a multiprocessor:
    those wait for each other in every turn, so that it is no use to begin one after the other.
    """
    turns = plan.at_once < problem.N and plan.n_blocks <= n_multiprocessors
    return n_multiprocessors if turns else plan.at_once * plan.n_blocks


def bytes_of(problem):
    """Of the images."""
    return problem.N * problem.C * problem.n_pixels * problem.itemsize


def worthwhile(problem, direction, room):
    """Whether `auto` takes this rung "forward" or "backward", on a device of this `room_of`."""
    if bytes_of(problem) < SMALL or room[1] < MEASURED_BYTES:
        return False
    layers = problem.C * problem.R * (problem.N if direction == "forward" else 1)
    plan = plan_of(problem, *room)
    if plan is None or layers > SMALL_LAYERS[direction]:
        return False
    return plan.n_blocks >= ENOUGH_BLOCKS[direction][problem.itemsize]
