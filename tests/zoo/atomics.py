"""Atomics in global and shared memory."""

import numpy as np
from numba import int32, uint32

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case

BINS = 23
FULL_MASK = 0xFFFFFFFF


@cuda.jit
def histogram_global_kernel(x, bins):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(bins, x[i], 1)


@case
def histogram_global_atomics(rng):
    x = rng.integers(0, BINS, 777).astype(np.int32)
    bins = np.zeros(BINS, np.int32)
    plan = Plan([Launch(histogram_global_kernel, blocks_for(777, 64), 64, (x, bins))])
    return plan.expect(bins, np.bincount(x, minlength=BINS))


@cuda.jit
def histogram_shared_kernel(x, bins):
    counts = cuda.shared.array(BINS, int32)
    for b in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        counts[b] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(counts, x[i], 1)
    cuda.syncthreads()
    for b in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        cuda.atomic.add(bins, b, counts[b])


@case
def histogram_shared_atomics(rng):
    x = rng.integers(0, BINS, 1777).astype(np.int32)
    bins = np.zeros(BINS, np.int32)
    plan = Plan([Launch(histogram_shared_kernel, 5, 16, (x, bins))])
    return plan.expect(bins, np.bincount(x, minlength=BINS))


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
def float_extremes_kernel(x, largest, smallest, first):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.max(largest, 0, x[i])
        cuda.atomic.min(smallest, 0, x[i])
        cuda.atomic.cas(first, 0, -1, i)


@case
def float_atomic_max_min_cas(rng):
    x = (100 * rng.standard_normal(333)).astype(np.float32)
    largest, smallest = np.array([-np.inf], np.float32), np.array([np.inf], np.float32)
    first = np.full(1, -1, np.int64)
    plan = Plan([Launch(float_extremes_kernel, 6, 64, (x, largest, smallest, first))])
    plan.expect(first, True, transform=lambda first: 0 <= first[0] < 333)
    return plan.expect(largest, [x.max()]).expect(smallest, [x.min()])


@cuda.jit
def nan_extremes_kernel(x, largest, smallest):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.nanmax(largest, 0, x[i])
        cuda.atomic.nanmin(smallest, 0, x[i])


@case
def float_atomic_nanmax_nanmin(rng):
    x = rng.standard_normal(129)
    x[rng.integers(0, 129, 40)] = np.nan
    largest, smallest = np.full(1, -np.inf), np.full(1, np.inf)
    plan = Plan([Launch(nan_extremes_kernel, 3, 64, (x, largest, smallest))])
    return plan.expect(largest, [np.nanmax(x)]).expect(smallest, [np.nanmin(x)])


@cuda.jit
def integer_atomics_kernel(x, result, wrapped, table):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.and_(result, 0, x[i])
        cuda.atomic.or_(result, 1, x[i])
        cuda.atomic.xor(result, 2, x[i])
        cuda.atomic.sub(result, 3, x[i])
        cuda.atomic.max(result, 4, x[i])
        cuda.atomic.min(result, 5, x[i])
        cuda.atomic.inc(wrapped, 0, uint32(6))
        cuda.atomic.dec(wrapped, 1, uint32(4))
        cuda.atomic.add(table, (i % 3, i % 5), x[i])
        cuda.atomic.exch(result, 6, x[i])


@case
def integer_atomics(rng):
    x = (rng.integers(0, 1 << 20, 211) | 5).astype(np.int64)
    result = np.array([-1, 0, 0, 0, -(2**62), 2**62, 0], np.int64)
    wrapped, table = np.zeros(2, np.uint32), np.zeros((3, 5), np.int64)
    i = np.arange(211)
    sums = np.zeros((3, 5), np.int64)
    np.add.at(sums, (i % 3, i % 5), x)
    folds = [np.bitwise_and.reduce(x), np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x)]
    plan = Plan([Launch(integer_atomics_kernel, 4, 64, (x, result, wrapped, table))])
    plan.expect(result, [*folds, -x.sum(), x.max(), x.min()], transform=lambda r: r[:6])
    plan.expect(result, True, transform=lambda r: r[6] in x)
    return plan.expect(table, sums).expect(wrapped, [211 % 7, (5 - 211 % 5) % 5])


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
