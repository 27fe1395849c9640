"""Prefix sums: within a warp, a block and a grid; and what is built on them."""

import numpy as np
from numba import int32

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case

BLOCK_SIZE = 128
ELEMENTS = 2 * BLOCK_SIZE  # of one block of the Blelloch scan
FULL_MASK = 0xFFFFFFFF


@cuda.jit
def blelloch_kernel(x, y, totals):
    """Exclusive scan of each block: a sum tree up, then down. Two elements per thread."""
    tree = cuda.shared.array(ELEMENTS, int32)
    tid = cuda.threadIdx.x
    start = cuda.blockIdx.x * ELEMENTS
    for part in range(2):
        i = part * BLOCK_SIZE + tid
        tree[i] = x[start + i] if start + i < x.size else 0
    offset = 1
    active = BLOCK_SIZE
    while active > 0:
        cuda.syncthreads()
        if tid < active:
            left = offset * (2 * tid + 1) - 1
            tree[left + offset] += tree[left]
        offset *= 2
        active //= 2
    cuda.syncthreads()
    if tid == 0:
        totals[cuda.blockIdx.x] = tree[ELEMENTS - 1]
        tree[ELEMENTS - 1] = 0
    active = 1
    while active <= BLOCK_SIZE:
        offset //= 2
        cuda.syncthreads()
        if tid < active:
            left = offset * (2 * tid + 1) - 1
            right = left + offset
            kept = tree[left]
            tree[left] = tree[right]
            tree[right] += kept
        active *= 2
    cuda.syncthreads()
    for part in range(2):
        i = part * BLOCK_SIZE + tid
        if start + i < x.size:
            y[start + i] = tree[i]


@cuda.jit
def add_offsets_kernel(y, offsets):
    start = cuda.blockIdx.x * ELEMENTS
    for i in range(start + cuda.threadIdx.x, min(start + ELEMENTS, y.size), BLOCK_SIZE):
        y[i] += offsets[cuda.blockIdx.x]


@case
def exclusive_scan_three_phases(rng):
    x = rng.integers(-50, 50, 1501).astype(np.int32)
    y = np.full_like(x, -1)
    blocks = blocks_for(x.size, ELEMENTS)
    totals, offsets = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    total = np.zeros(1, np.int32)
    plan = Plan(
        [
            Launch(blelloch_kernel, blocks, BLOCK_SIZE, (x, y, totals)),
            Launch(blelloch_kernel, 1, BLOCK_SIZE, (totals, offsets, total)),
            Launch(add_offsets_kernel, blocks, BLOCK_SIZE, (y, offsets)),
        ]
    )
    return plan.expect(y, np.cumsum(x) - x).expect(total, [x.sum()])


@cuda.jit(device=True)
def warp_inclusive_scan(value):
    lane_id = cuda.laneid
    offset = 1
    while offset < 32:
        other = cuda.shfl_up_sync(FULL_MASK, value, offset)
        if lane_id >= offset:
            value += other
        offset *= 2
    return value


@cuda.jit(device=True)
def block_inclusive_scan(value, warp_totals):
    """All threads of the block must call it: it holds two barriers."""
    warp_id = cuda.threadIdx.x // 32
    lane_id = cuda.laneid
    value = warp_inclusive_scan(value)
    if lane_id == 31:
        warp_totals[warp_id] = value
    cuda.syncthreads()
    if warp_id == 0:
        total = warp_totals[lane_id] if lane_id < cuda.blockDim.x // 32 else int32(0)
        total = warp_inclusive_scan(total)
        if lane_id < cuda.blockDim.x // 32:
            warp_totals[lane_id] = total
    cuda.syncthreads()
    if warp_id > 0:
        value += warp_totals[warp_id - 1]
    return value


NOT_READY, HAS_TOTAL, HAS_PREFIX = 0, 1, 2


@cuda.jit
def look_back_kernel(x, y, ticket, state, totals, prefixes):
    """One pass over the grid: a block adds up its predecessors' totals while they still run.

    Blocks number themselves as they start, so a block only ever waits for blocks that run.
    """
    warp_totals = cuda.shared.array(32, int32)
    shared_block = cuda.shared.array(1, int32)
    shared_prefix = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    if tid == 0:
        shared_block[0] = cuda.atomic.add(ticket, 0, 1)
    cuda.syncthreads()
    block = shared_block[0]
    i = block * BLOCK_SIZE + tid
    value = x[i] if i < x.size else int32(0)
    value = block_inclusive_scan(value, warp_totals)
    if tid == BLOCK_SIZE - 1:
        total = value
        prefix = int32(0)
        if block > 0:
            cuda.atomic.exch(totals, block, total)
            cuda.threadfence()
            cuda.atomic.exch(state, block, HAS_TOTAL)
        before = block - 1
        while before >= 0:
            ready = cuda.atomic.add(state, before, 0)
            cuda.threadfence()
            if ready == HAS_PREFIX:
                prefix += cuda.atomic.add(prefixes, before, 0)
                before = -1
            elif ready == HAS_TOTAL:
                prefix += cuda.atomic.add(totals, before, 0)
                before -= 1
        cuda.atomic.exch(prefixes, block, prefix + total)
        cuda.threadfence()
        cuda.atomic.exch(state, block, HAS_PREFIX)
        shared_prefix[0] = prefix
    cuda.syncthreads()
    if i < y.size:
        y[i] = value + shared_prefix[0]


@case
def inclusive_scan_look_back(rng):
    x = rng.integers(-50, 50, 1111).astype(np.int32)
    y = np.full_like(x, -1)
    blocks = blocks_for(x.size, BLOCK_SIZE)
    ticket = np.zeros(1, np.int32)
    state, totals, prefixes = (np.zeros(blocks, np.int32) for _ in range(3))
    arguments = (x, y, ticket, state, totals, prefixes)
    plan = Plan([Launch(look_back_kernel, blocks, BLOCK_SIZE, arguments)])
    return plan.expect(y, np.cumsum(x)).expect(prefixes, x.sum(), transform=lambda p: p[-1])
