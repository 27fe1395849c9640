"""Atomics in global and shared memory."""

import numpy as np
from numba import int32, uint32

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case

BINS = 23
FULL_MASK = 0xFFFFFFFF


@cuda.jit
def histogram_per_warp_kernel(x, bins):
    """A row of counters per warp, added up at the end: less contention."""
    counts = cuda.shared.array((4, BINS), uint32)
    tid = cuda.threadIdx.x
    warp_id = tid // 32
    for b in range(cuda.laneid, BINS, 32):
        counts[warp_id, b] = 0
    cuda.syncwarp()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(counts, (warp_id, x[i]), uint32(1))
    cuda.syncthreads()
    if tid < BINS:
        total = uint32(0)
        for warp in range(4):
            total += counts[warp, tid]
        cuda.atomic.add(bins, tid, total)


@case
def histogram_per_warp(rng):
    x = rng.integers(0, BINS, 999).astype(np.uint8)
    bins = np.zeros(BINS, np.uint32)
    plan = Plan([Launch(histogram_per_warp_kernel, 3, 128, (x, bins))])
    return plan.expect(bins, np.bincount(x, minlength=BINS))


@cuda.jit
def match_aggregated_kernel(keys, counts, served):
    """Lanes with equal keys find each other; their lowest lane adds for all of them."""
    i = cuda.grid(1)
    key = keys[i] if i < keys.size else int32(-1)
    peers = cuda.match_any_sync(FULL_MASK, key)
    leader = cuda.ffs(peers) - 1
    if key >= 0 and cuda.laneid == leader:
        cuda.atomic.add(counts, key, int32(cuda.popc(peers)))
        cuda.atomic.add(served, 0, 1)


@case
def match_aggregated_atomics(rng):
    keys = rng.integers(0, BINS, 301).astype(np.int32)
    counts, served = np.zeros(BINS, np.int32), np.zeros(1, np.int32)
    arguments = (keys, counts, served)
    plan = Plan([Launch(match_aggregated_kernel, blocks_for(301, 64), 64, arguments)])
    leaders = sum(len(set(keys[i : i + 32])) for i in range(0, 301, 32))
    return plan.expect(counts, np.bincount(keys, minlength=BINS)).expect(served, [leaders])


@cuda.jit
def ballot_aggregated_kernel(x, kept, count):
    """A filter with one atomic per warp: ballot, count the lanes below, broadcast the base."""
    i = cuda.grid(1)
    keep = False
    if i < x.size:
        keep = x[i] % 3 == 0
    votes = cuda.ballot_sync(FULL_MASK, keep)
    base = int32(0)
    if cuda.laneid == 0:
        base = cuda.atomic.add(count, 0, int32(cuda.popc(votes)))
    base = cuda.shfl_sync(FULL_MASK, base, 0)
    if keep:
        kept[base + cuda.popc(votes & cuda.lanemask_lt())] = x[i]


@case
def ballot_aggregated_atomics(rng):
    x = rng.permutation(500)[:333].astype(np.int32)
    kept, count = np.full(333, -1, np.int32), np.zeros(1, np.int32)
    plan = Plan([Launch(ballot_aggregated_kernel, blocks_for(333, 96), 96, (x, kept, count))])
    wanted = np.sort(np.where(x % 3 == 0, x, -1))
    return plan.expect(kept, wanted, transform=np.sort).expect(count, [(x % 3 == 0).sum()])


@cuda.jit
def cas_product_kernel(x, product):
    """An atomic that the hardware lacks, built from compare-and-swap."""
    i = cuda.grid(1)
    if i < x.size:
        done = False
        seen = cuda.atomic.add(product, 0, 0)
        while not done:
            wanted = (seen * x[i]) % 10007
            before = cuda.atomic.cas(product, 0, seen, wanted)
            done = before == seen
            seen = before


@case
def atomic_product_from_cas(rng):
    x = rng.integers(1, 1000, 77).astype(np.int64)
    product = np.ones(1, np.int64)
    plan = Plan([Launch(cas_product_kernel, 3, 32, (x, product))])
    wanted = 1
    for factor in x:
        wanted = wanted * int(factor) % 10007
    return plan.expect(product, [wanted])
