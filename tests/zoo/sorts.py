"""Sorting inside one block."""

import numpy as np
from numba import int32

from course_lib import cuda
from zoo.plan import Launch, Plan, case
from zoo.scans import block_inclusive_scan

ODD_EVEN_SIZE = 64
RADIX_SIZE = 96


@cuda.jit
def odd_even_kernel(x, rounds):
    """Ends when a round swapped nothing: the barrier itself tells every thread."""
    keys = cuda.shared.array(ODD_EVEN_SIZE, int32)
    tid = cuda.threadIdx.x
    n = x.size
    if tid < n:
        keys[tid] = x[tid]
    cuda.syncthreads()
    count = 0
    unsorted = 1
    while unsorted:
        swapped = 0
        for parity in range(2):
            left = 2 * tid + parity
            if left + 1 < n:
                if keys[left] > keys[left + 1]:
                    kept = keys[left]
                    keys[left] = keys[left + 1]
                    keys[left + 1] = kept
                    swapped = 1
            cuda.syncthreads()
        unsorted = cuda.syncthreads_or(swapped)
        count += 1
    if tid < n:
        x[tid] = keys[tid]
    if tid == 0:
        rounds[0] = count


@case
def odd_even_sort(rng):
    x = rng.integers(-99, 99, 37).astype(np.int32)
    rounds = np.zeros(1, np.int32)
    plan = Plan([Launch(odd_even_kernel, 1, ODD_EVEN_SIZE, (x, rounds))])
    plan.expect(rounds, True, transform=lambda rounds: 1 <= rounds[0] <= 20)
    return plan.expect(x, np.sort(x))


@cuda.jit(device=True)
def split_by_bit(keys, tid, bit, warp_totals):
    """Stable partition of the block's keys: those with the bit clear come first."""
    key = keys[tid]
    is_set = (key >> bit) & 1
    clear_before = block_inclusive_scan(int32(1 - is_set), warp_totals)
    clear_total = cuda.syncthreads_count(1 - is_set)
    if is_set:
        keys[clear_total + tid - clear_before] = key
    else:
        keys[clear_before - 1] = key
    cuda.syncthreads()


@cuda.jit
def radix_kernel(x):
    """Device functions inside device functions, with barriers in each."""
    keys = cuda.shared.array(RADIX_SIZE, int32)
    warp_totals = cuda.shared.array(32, int32)
    tid = cuda.threadIdx.x
    keys[tid] = x[tid] if tid < x.size else 0x7FFF
    cuda.syncthreads()
    for bit in range(15):
        split_by_bit(keys, tid, bit, warp_totals)
    if tid < x.size:
        x[tid] = keys[tid]


@case
def radix_sort(rng):
    x = rng.integers(0, 0x7FFF, 91).astype(np.int32)
    plan = Plan([Launch(radix_kernel, 1, RADIX_SIZE, (x,))])
    return plan.expect(x, np.sort(x))
