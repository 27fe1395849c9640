"""Sums of `few_channels_dweight`: over the lanes of a warp, and over the splits of the pixels."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.conv2d.few_channels import MOST_UNROLLED, in_turn
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    allow_next_kernel,
    store,
    wait_for_previous_kernel,
)

FINISH_LANES, FINISH_PARTS = 32, 16  # threads side by side, and threads that share a sum
FINISH_THREADS = FINISH_LANES * FINISH_PARTS


def fold(n, first, lowest):
    """A device function that adds up `n` sums over lanes whose numbers differ in some bits.

    The bits are `first`, its half, and so on to `lowest`. At each a lane keeps half of its sums,
    and gives the others to the lane that differs there: in all fewer than `n` go from lane to lane,
    not `n` at each bit. Returns which sum the lane is left with in sums[0]; others follow it.
    """
    steps = []
    while first >= lowest:
        n //= 2
        # Loops so short that they are unrolled, and the sums stay in registers.
        steps += [_exchange(first, n, start) for start in range(0, n, MOST_UNROLLED)]
        first //= 2
    return in_turn(steps)


def _exchange(bit, half, start):
    stop = min(half, start + MOST_UNROLLED)

    @cuda.jit(device=True)
    def exchange(sums, lane_id):
        upper = lane_id & bit != 0
        for i in range(start, stop):
            given = sums[i] if upper else sums[half + i]
            kept = sums[half + i] if upper else sums[i]
            sums[i] = kept + cuda.shfl_xor_sync(FULL_MASK, given, bit)
        return half if upper and start == 0 else 0

    return exchange


@cuda.jit
def finish_kernel(partial, dweight, dbias, n_splits, n_taps, for_dweight, for_dbias):
    """The sums of all splits: dweight and dbias, or one of them."""
    allow_next_kernel()
    wait_for_previous_kernel()
    totals = cuda.shared.array(FINISH_THREADS, np.float32)
    tid, n = cuda.threadIdx.x, partial.shape[0] // n_splits
    i = np.int64(cuda.blockIdx.x) * FINISH_LANES + tid % FINISH_LANES
    total = ZERO
    if i < n:
        for split in range(tid // FINISH_LANES, n_splits, FINISH_PARTS):
            total += partial[split * n + i]
    totals[tid] = total
    cuda.syncthreads()
    if tid < FINISH_LANES and i < n:
        for part in range(1, FINISH_PARTS):
            total += totals[part * FINISH_LANES + tid]
        k, t = divided(np.int32(i), np.int32(n_taps + 1))
        if t < n_taps:
            if for_dweight:
                store(dweight, k * n_taps + t, total)
        elif for_dbias:
            store(dbias, k, total)
