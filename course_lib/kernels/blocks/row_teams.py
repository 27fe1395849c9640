"""Which threads work on a row: some neighbouring lanes of a warp, or a whole block.

One kernel serves both. `team_bits` is log2 of the lanes per row, or WHOLE_BLOCK; it is the same for
all threads, so that branches on it cost nothing and barriers below them are allowed.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.row_plan import row_plan
from course_lib.kernels.blocks.rows import block_max_once, block_sum_once, team_max, team_sum
from course_lib.runtime.intrinsics import warp_sum

WHOLE_BLOCK = 31  # as `team_bits`: more than any team of lanes


@cuda.jit(device=True)
def place_of_thread(team_bits):
    """(row, rank, n_ranks): this thread is number `rank` of the `n_ranks` that work on `row`."""
    if team_bits == WHOLE_BLOCK:
        return np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
    n_ranks = np.int64(1) << np.int64(team_bits)
    thread = np.int64(cuda.grid(1))
    return thread >> team_bits, thread & (n_ranks - 1), n_ranks


@cuda.jit(device=True)
def row_max(value, team_bits, scratch):
    """Largest `value` of a row's threads, in each of them; every thread of the block must call.

    `scratch` is a shared array of 32 float32 that nothing else uses. Calls with the same one must
    be a barrier apart, such as that of a `row_sum` with another.
    """
    if team_bits == WHOLE_BLOCK:
        return block_max_once(value, scratch)
    return team_max(value, 1 << team_bits)


@cuda.jit(device=True)
def row_sum(value, team_bits, scratch):
    """Sum of `value` over a row's threads; otherwise as `row_max`."""
    if team_bits == WHOLE_BLOCK:
        return block_sum_once(value, scratch)
    return team_sum(value, 1 << team_bits)


@cuda.jit(device=True)
def row_sums(first, second, team_bits, scratch, place):
    """Two sums at once, at one barrier. `scratch` has 64 float32 from `place` on that nothing else
    uses; otherwise as `row_max`."""
    if team_bits == WHOLE_BLOCK:
        lane_id, warp_id = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        first, second = warp_sum(first), warp_sum(second)
        if lane_id == 0:
            scratch[np.uint64(place + warp_id)] = first
            scratch[np.uint64(place + 32 + warp_id)] = second
        cuda.syncthreads()
        inside = lane_id < cuda.blockDim.x >> 5
        first = scratch[np.uint64(place + lane_id)] if inside else ZERO
        second = scratch[np.uint64(place + 32 + lane_id)] if inside else ZERO
        return warp_sum(first), warp_sum(second)
    return team_sum(first, 1 << team_bits), team_sum(second, 1 << team_bits)


def share_out(n_cols, itemsize, n_arrays):
    """(slots per thread, team_bits, threads per block, rows per block): `row_plan`."""
    n_slots, team_bits, n_threads = row_plan(n_cols, itemsize, n_arrays)
    if team_bits is None:
        return n_slots, WHOLE_BLOCK, n_threads, 1
    return n_slots, team_bits, n_threads, n_threads >> team_bits
