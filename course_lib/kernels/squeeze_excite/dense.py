"""The dense layers, computed by each block for as much of them as it needs.

The first layer is linear in the channels' means. So a block that has the means of some channels can
write what they add to each of the R hidden numbers, to a *slot* of its own; whoever needs the
hidden numbers adds up the slots of the sample, always in the same order. Of the second layer a
block computes the outputs of its own channels. Each block thus reads the weights of its own
channels and no others, and nobody reads all of both layers. Backward it is the same in reverse.

A block has little to compute here, but it waits for what it reads, again and again unless it asks
for much at once. So a thread takes UNROLL rows at a time, and 16 bytes of each where the rows begin
on 16-byte boundaries (`aligned`). Rows past the last stand for it once more: a load that does not
depend on a test need not wait for one.

Slots lie as (sample, slot, R), R rounded up to a multiple of 4, so that 16 bytes are read at a
time. All functions are for blocks of a power of two of warps, up to BLOCK_SIZE threads, and every
thread must call them.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.runtime.intrinsics import FULL_MASK, load, load_vector, vector_width

BLOCK_SIZE = 256  # a power of two
CHUNK = 1024  # hidden numbers that are worked on at a time
MOST_CHANNELS = 256  # of a block
QUAD = 4  # float32 numbers in 16 bytes
QUADS = MAX_WIDTH // QUAD
TOTALS = QUAD * BLOCK_SIZE  # float32 of the array that `sum_slots` needs
UNROLL = 4  # rows in flight per thread: more cost registers, and so blocks
SLOTS = 8  # in flight per thread
WARP = 32


@cuda.jit(device=True)
def quotient(a, b):
    """a // b of numbers from 0 to 2³² − 1, for which the chip needs a quarter of the time."""
    return np.int64(np.uint32(a) // np.uint32(b))


@cuda.jit(device=True)
def slot_size(R):
    """Elements from one slot to the next."""
    return (R + QUAD - 1) & -QUAD


@cuda.jit(device=True)
def sum_slots(totals, slots, n, n_slots, R, first, count):
    """totals[i] = the sum of element `first` + i of the slots of sample `n`, for i < `count`.

    `totals` is a shared array of TOTALS float32; `first` is a multiple of QUAD, `count` at
    most CHUNK. Begins and ends with a barrier.
    """
    tid, n_threads = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
    n_vectors = (count + QUAD - 1) // QUAD
    values = cuda.local.array((SLOTS, QUAD), np.float32)
    mine = cuda.local.array(QUAD, np.float32)
    for k in range(QUAD):
        mine[k] = ZERO
    n_groups = 1  # of threads; each takes every n_groups-th slot
    while n_groups * SLOTS < n_slots and 2 * n_groups * n_vectors <= n_threads:
        n_groups *= 2
    slot = quotient(tid, n_vectors)
    size = slot_size(R)
    start = n * n_slots * size + first + (tid - slot * n_vectors) * QUAD
    cuda.syncthreads()
    if slot < n_groups:
        while slot < n_slots:
            for u in range(SLOTS):
                other = min(slot + u * n_groups, n_slots - 1)
                load_vector(values[u], slots, start + other * size)
            for u in range(SLOTS):
                if slot + u * n_groups < n_slots:
                    for k in range(QUAD):
                        mine[k] += values[u, k]
            slot += SLOTS * n_groups
        for k in range(QUAD):
            totals[tid * QUAD + k] = mine[k]
    cuda.syncthreads()
    half = n_groups // 2 * n_vectors * QUAD
    while half >= n_vectors * QUAD:
        i = tid
        while i < half:
            totals[i] += totals[i + half]
            i += n_threads
        cuda.syncthreads()
        half //= 2


@cuda.jit(device=True)
def in_vectors(weight, col, n_cols, aligned):
    """Whether a part of the rows, `n_cols` from `col` on, can be read 16 bytes at a time."""
    return aligned and (col | n_cols) & (vector_width(weight) - 1) == 0


@cuda.jit(device=True)
def by_rows(out, place, weight, length, row, n_rows, col, n_cols, vector, added, aligned=False):
    """out[place + i] = Σ weight[row + i, col + j] · vector[j], over j < n_cols, for i < n_rows.

    Rows of `weight` are `length` long; neighbouring threads read neighbours in a row. With `added`
    the sums are added to what `out` holds. `vector` is shared, and complete. With `aligned` all
    rows begin on 16-byte boundaries, and so does `vector`. Ends without a barrier.
    """
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    factors = cuda.local.array((QUADS, QUAD), np.float32)
    totals = cuda.local.array(UNROLL, np.float32)
    tid = np.int64(cuda.threadIdx.x)
    vectors = in_vectors(weight, col, n_cols, aligned)
    width = vector_width(weight) if vectors else 1
    bits = 0  # 2^bits threads share a row
    while bits < 5 and width << bits < n_cols:
        bits += 1
    rank, team = tid & ((1 << bits) - 1), tid >> bits
    n_teams = np.int64(cuda.blockDim.x) >> bits
    i = team
    while i - team < n_rows:  # all threads of a warp go on for as long as one of them must
        for u in range(UNROLL):
            totals[u] = ZERO
        j = rank * width
        while j < n_cols:
            if vectors:
                for u in range(UNROLL):
                    here = row + min(i + u * n_teams, n_rows - 1)
                    load_vector(values[u], weight, here * length + col + j)
                for q in range(vector_width(weight) // QUAD):
                    load_vector(factors[q], vector, j + q * QUAD)
                for k in range(vector_width(weight)):
                    for u in range(UNROLL):
                        totals[u] += values[u, k] * factors[k // QUAD, k % QUAD]
            else:
                for u in range(UNROLL):
                    here = row + min(i + u * n_teams, n_rows - 1)
                    values[u, 0] = load(weight, here * length + col + j)
                for u in range(UNROLL):
                    totals[u] += values[u, 0] * vector[j]
            j += width << bits
        step = 1 << bits >> 1
        while step > 0:
            for u in range(UNROLL):
                totals[u] += cuda.shfl_xor_sync(FULL_MASK, totals[u], step)
            step >>= 1
        if rank == 0:
            for u in range(UNROLL):
                here = i + u * n_teams
                if here < n_rows:
                    out[place + here] = out[place + here] + totals[u] if added else totals[u]
        i += UNROLL * n_teams


@cuda.jit(device=True)
def by_columns(
    out, place, weight, length, row, n_rows, col, n_cols, vector, scratch, added, aligned=False
):
    """out[place + j] = Σ weight[row + i, col + j] · vector[i], over i < n_rows, for j < n_cols.

    As `by_rows`; `scratch` is a shared array of BLOCK_SIZE float32. Ends with a barrier.

    A warp takes 32 columns: by lane 1 of every row, or 16 bytes of every `width`-th. The warps
    stand side by side, and those that are left take other rows.
    """
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    totals = cuda.local.array(MAX_WIDTH, np.float32)
    tid, n_threads = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
    vectors = in_vectors(weight, col, n_cols, aligned)
    width = vector_width(weight) if vectors else 1
    n_lanes = WARP // vector_width(weight) if vectors else WARP  # that stand side by side
    tile = WARP  # columns that all warps take at a time
    while tile < n_threads and tile < n_cols:
        tile *= 2
    lane = tid & (n_lanes - 1)
    column = (tid & (tile - WARP)) + lane * width
    rank = quotient(tid, tile) * width + quotient(tid & (WARP - 1), n_lanes)
    n_ranks = quotient(n_threads, tile) * width
    base = 0
    while base < n_cols:
        for k in range(MAX_WIDTH):
            totals[k] = ZERO
        i, start = rank, row * length + col + base + column
        while i < n_rows and base + column < n_cols:
            if vectors:
                for u in range(UNROLL):
                    here = min(i + u * n_ranks, n_rows - 1)
                    load_vector(values[u], weight, start + here * length)
            else:
                for u in range(UNROLL):
                    here = min(i + u * n_ranks, n_rows - 1)
                    values[u, 0] = load(weight, start + here * length)
                    for k in range(1, vector_width(weight)):
                        values[u, k] = ZERO
            for u in range(UNROLL):
                # Chosen, not branched around: so the registers of all rows are not needed at once.
                here = i + u * n_ranks
                factor = vector[min(here, n_rows - 1)]
                for k in range(vector_width(weight)):
                    product = values[u, k] * factor
                    totals[k] += product if here < n_rows else ZERO
            i += UNROLL * n_ranks
        step = WARP // 2
        while step >= n_lanes:
            for k in range(vector_width(weight)):
                totals[k] += cuda.shfl_xor_sync(FULL_MASK, totals[k], step)
            step //= 2
        if tid & (WARP - 1) < n_lanes:
            for k in range(vector_width(weight)):
                if k < width:
                    scratch[(tid & -WARP) + lane * width + k] = totals[k]
        cuda.syncthreads()
        if tid < tile and base + tid < n_cols:
            total = scratch[tid]
            other = tid + tile
            while other < n_threads:
                total += scratch[other]
                other += tile
            here = place + base + tid
            out[here] = out[here] + total if added else total
        cuda.syncthreads()
        base += tile
