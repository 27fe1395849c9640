"""The rung `resident`: one kernel that reads a contiguous image once, and keeps it on the chip.

The shared memory of all multiprocessors together holds some 28 MB on an H200. So a sample is dealt
out to `n_blocks` blocks that run at the same time, each with a run of its elements (`held`), and as
many samples at once as there are blocks for. Each block

1. copies its run to shared memory, and waits for it;
2. sums its planes, or what it has of them, and writes what they add to the hidden layer to a *slot*
   (`dense`): the layer is linear, so parts of a mean are as good as means;
3. counts itself, and waits until all blocks of the sample have done so;
4. adds the slots up, finds the gates of its own channels, and writes y from shared memory.

Blocks that wait for each other must all run. So there are no more of them than fit on the
multiprocessors, and the launch is cooperative: the driver starts all of them or none, and refuses
what could never fit. While other kernels hold multiprocessors it waits for those to end, which do
not wait for it. The next kernel may get ready at once (`allow_next_kernel`): its blocks come when
all blocks of this one run.

Two blocks share a multiprocessor. If both read at the same time, memory would rest while both
compute, and the multiprocessor while both read. So where samples take turns, the second block
begins when the first one's run has come (`follow`). From then on one reads or writes while the
other one computes: a tenth of the time, for the large images of a batch of 32.

Forward alone, contiguous images alone, on sm_90 or later, and only where a sample fits: see
`plan_of`. Where samples take turns, their blocks meet once in each turn; so a few large samples
gain most. An H200 needs 9 to 13 µs for one sample of any block of EfficientNet-B4, where `two_pass`
needs 9 to 17.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import MAX_WIDTH
from course_lib.kernels.squeeze_excite.dense import (
    BLOCK_SIZE,
    CHUNK,
    MOST_CHANNELS,
    TOTALS,
    by_rows,
    quotient,
    slot_size,
    sum_slots,
)
from course_lib.kernels.squeeze_excite.formulas import ZERO, activate, gate_of
from course_lib.kernels.squeeze_excite.held import fetch, scale_held, sum_held
from course_lib.kernels.squeeze_excite.operands import QUAD, boundaries, scale_of, workspace
from course_lib.kernels.squeeze_excite.plan import LANES, ceil_div
from course_lib.kernels.squeeze_excite.two_pass import aligned
from course_lib.runtime import arrays, device
from course_lib.runtime import launch as launching
from course_lib.runtime.counters import counters
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.launch import launch
from course_lib.runtime.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.shared import dynamic_shared
from course_lib.runtime.signals import count, look

PER_THREAD = CHUNK // BLOCK_SIZE
KEPT = 1024  # weights of a block that it keeps in shared memory, where it has no more
LEAST_BYTES = 2 << 10  # of a run: fewer are not worth a block
LINE_BYTES = 128
LINE = LINE_BYTES // 4  # counters: those of the samples, and those of the blocks, have their own
WASTE = 1.25  # times its fair share that a block may have for the sake of whole planes
BLOCKS = 2  # on a multiprocessor: one computes while the other one waits
#: `auto` takes this rung from SMALL bytes of images on, where a sample has ENOUGH_BLOCKS or more
#: for elements of so many bytes, and C·R is no more than SMALL_LAYERS: blocks read each other's
#: slots, and the weights. Measured on an H200, against the better of `two_pass` and `fused`.
SMALL, SMALL_LAYERS = 256 << 10, 120_000
ENOUGH_BLOCKS = {4: 24, 2: 28}
#: Of shared memory for a block, on the chips that were measured: `auto` takes it nowhere else.
MEASURED_BYTES = 227 << 10
#: Older chips have fewer instructions for what the kernel does, and it needs more registers there
#: than BLOCKS blocks may have.
CAPABILITY = 9, 0
SIMULATED_MULTIPROCESSORS = 8  # there, every block more takes time
#: Bytes of shared memory of a block beside its run: the arrays of the kernel, and what the chip
#: takes for itself of each block's.
STATIC_BYTES = 4 * (MOST_CHANNELS + TOTALS + KEPT)
RESERVED_BYTES = 1 << 10


@cuda.jit(device=True)
def keep_weights(kept, weight1, weight2, R, C, c, n_mine):
    """The weights of the block's channels: R rows of weight1's, then n_mine rows of weight2's."""
    i = np.int64(cuda.threadIdx.x)
    while i < R * n_mine:
        row = quotient(i, n_mine)
        kept[i] = load(weight1, row * C + c + i - row * n_mine)
        kept[R * n_mine + i] = load(weight2, c * R + i)
        i += cuda.blockDim.x


@cuda.jit(device=True)
def note_sums(values, edges, mean, slot, n, C, c, n_mine, n_pixels, low, high, scale):
    """The means of the block's planes; of those that it shares with others, its share.

    edges[slot] is that of a plane which began in another block, then of one which ends in another.
    """
    tid = np.int64(cuda.threadIdx.x)
    if tid < n_mine:
        values[tid] *= scale
        if (c + tid) * n_pixels < low:
            edges[2 * slot] = values[tid]
        elif (c + tid + 1) * n_pixels > high:
            edges[2 * slot + 1] = values[tid]
        else:
            mean[n * C + c + tid] = values[tid]


@cuda.jit(device=True)
def finish_means(edges, mean, first_n, step, N, n_blocks, rank, share, C, last, n_pixels):
    """The mean of plane `last`, which begins in this block and ends in another, in its samples."""
    n = first_n + np.int64(cuda.threadIdx.x) * step
    while n < N:
        total = edges[2 * (n * n_blocks + rank) + 1]
        other = rank + 1
        while other < n_blocks and other * share < (last + 1) * n_pixels:
            total += edges[2 * (n * n_blocks + other)]
            other += 1
        mean[n * C + last] = total
        n += cuda.blockDim.x * step


@cuda.jit(device=True)
def meet(counters, n, n_blocks):
    """Wait until all blocks of sample `n` have come here: what they wrote before can be read.

    Returns what `leave` wants to know.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        count(counters, n, 1)
        while look(counters, n) < n_blocks:
            pass
    cuda.syncthreads()
    return cuda.atomic.add(counters, n, 1) if cuda.threadIdx.x == 0 else 0


@cuda.jit(device=True)
def leave(counters, n, n_blocks, counted):
    """The last block that saw all others come sets the counter back to 0.

    Not at once: by now `counted` has arrived, and nobody waits for it.
    """
    if cuda.threadIdx.x == 0 and counted == 2 * n_blocks - 1:
        cuda.atomic.exch(counters, n, 0)


@cuda.jit(device=True)
def follow(counters, place, n_leading):
    """Wait until the block that is `n_leading` before this one says `lead`."""
    if cuda.threadIdx.x == 0:
        while look(counters, place - n_leading) == 0:
            pass
        cuda.atomic.exch(counters, place - n_leading, 0)
    cuda.syncthreads()


@cuda.jit(device=True)
def lead(counters, place):
    """This block's run has come: the one that shares its multiprocessor may begin."""
    if cuda.threadIdx.x == 0:
        cuda.atomic.exch(counters, place, 1)


@cuda.jit
def resident_planes_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, slots, edges, counters,
    N, n_pixels, C, R, scale, activation, gate, aligned1, aligned2,
    n_leading, n_blocks, share, team, n_pieces, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    if vector_width(x) == 0:  # never; but that it is written makes the launch a cooperative one
        cuda.cg.this_grid()
    values = cuda.shared.array(MOST_CHANNELS, np.float32, alignment=VECTOR_BYTES)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    kept = cuda.shared.array(KEPT, np.float32, alignment=VECTOR_BYTES)
    biases = cuda.local.array(PER_THREAD, np.float32)
    held = dynamic_shared(x)
    tid, block = np.int64(cuda.threadIdx.x), np.int64(cuda.blockIdx.x)
    first_n = quotient(block, n_blocks)
    rank, step = block - first_n * n_blocks, quotient(cuda.gridDim.x, n_blocks)
    low, high = rank * share, min((rank + 1) * share, C * n_pixels)
    c, last = quotient(low, n_pixels), quotient(high - 1, n_pixels)
    n_mine = last + 1 - c
    keeps = 2 * R * n_mine <= KEPT
    wait_for_previous_kernel()
    flags = (N + LINE - 1) & -LINE
    if block >= n_leading:
        follow(counters, flags + block, n_leading)
    n = first_n
    while n < N:
        start, slot = n * C * n_pixels, n * n_blocks + rank
        place = fetch(held, x, start + low, start + high, offset)
        end_group()
        if n == first_n and keeps:  # while the copies are on their way
            keep_weights(kept, weight1, weight2, R, C, c, n_mine)
        wait_for_groups_but(0)
        cuda.syncthreads()
        if n == first_n and block + n_leading < cuda.gridDim.x:
            lead(counters, flags + block)
        sum_held(values, totals, held, place, low, high, c, n_mine, n_pixels, team, n_pieces)
        note_sums(values, edges, mean, slot, n, C, c, n_mine, n_pixels, low, high, scale)
        cuda.syncthreads()
        if keeps:
            by_rows(slots, slot * slot_size(R), kept, n_mine, 0, R, 0, n_mine, values, False, True)
        else:
            by_rows(slots, slot * slot_size(R), weight1, C, 0, R, c, n_mine, values, False,
                    aligned1)  # fmt: skip
        counted = meet(counters, n, n_blocks)
        for u in range(PER_THREAD):  # memory answers together with the slots
            biases[u] = load(bias1, min(tid + u * BLOCK_SIZE, R - 1))
        bias = load(bias2, c + tid) if tid < n_mine else ZERO
        sum_slots(totals, slots, n, n_blocks, R, 0, R)
        for u in range(PER_THREAD):
            i = tid + u * BLOCK_SIZE
            if i < R:
                h = totals[i] + biases[u]
                if rank == 0:
                    hidden[n * R + i] = h
                totals[i] = activate(h, activation)
        cuda.syncthreads()
        if keeps:
            by_rows(values, 0, kept, R, 0, n_mine, R * n_mine, R, totals, False, True)
        else:
            by_rows(values, 0, weight2, R, c, n_mine, 0, R, totals, False, aligned2)
        cuda.syncthreads()
        if tid < n_mine:
            z = values[tid] + bias
            if (c + tid) * n_pixels >= low:
                logit[n * C + c + tid] = z
            values[tid] = gate_of(z, gate)
        cuda.syncthreads()
        scale_held(held, place, y, start + low, start + high, offset, low - c * n_pixels, values,
                   n_pixels, multiplier, vectors)  # fmt: skip
        leave(counters, n, n_blocks, counted)
        cuda.syncthreads()  # before the next run takes its place
        n += step
    if last * n_pixels >= low and (last + 1) * n_pixels > high:
        finish_means(edges, mean, first_n, step, N, n_blocks, rank, share, C, last, n_pixels)


FORWARD = (resident_planes_kernel,)


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
    capability, shared_bytes = launching.chip_of(x)
    if tuple(capability) < CAPABILITY:
        return 1, 0
    if isinstance(x, np.ndarray) or (arrays.is_tensor(x) and not x.is_cuda):
        return SIMULATED_MULTIPROCESSORS, shared_bytes
    return device.properties(arrays.describe(x).device).multiprocessors, shared_bytes


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


def worthwhile(problem, room):
    """Whether `auto` takes this rung, on a device with the room that `room_of` tells."""
    n_bytes = problem.N * problem.C * problem.n_pixels * problem.itemsize
    if n_bytes < SMALL or room[1] < MEASURED_BYTES:
        return False
    plan = plan_of(problem, *room)
    if plan is None or problem.C * problem.R > SMALL_LAYERS:
        return False
    return plan.n_blocks >= ENOUGH_BLOCKS[problem.itemsize]


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit. Raises ValueError where there is no `Plan`."""
    room = room_of(x)
    plan = plan_of(problem, *room)
    if plan is None:
        raise ValueError(
            "resident takes contiguous images of which a sample fits into the shared memory of all "
            f"multiprocessors together, 1 to {CHUNK} hidden channels, and a GPU of compute "
            "capability 9.0 or more; use variant='auto'"
        )
    grid, n_slots = plan.at_once * plan.n_blocks, problem.N * plan.n_blocks
    slots = workspace((n_slots, ceil_div(problem.R, QUAD) * QUAD), mean)
    edges = workspace((n_slots, 2), mean)
    n_leading = blocks_that_lead(problem, plan, room[0])
    n_counters = problem.N if n_leading == grid else problem.N + LINE + grid
    launch(
        resident_planes_kernel, grid, BLOCK_SIZE,
        x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, slots, edges,
        counters(n_counters, mean), problem.N, problem.n_pixels, problem.C, problem.R,
        scale_of(problem), problem.activation, problem.gate,
        aligned(weight1, problem.C), aligned(weight2, problem.R),
        n_leading, *plan[1:], *boundaries(problem, x, y),
        shared_bytes=plan.shared_bytes(problem.itemsize), flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    types = [image, *[weight] * 4, image, *[sums] * 5, ("int32", 1), *["int64"] * 4, "float32"]
    types += ["int64", "int64", "boolean", "boolean", *["int64"] * 7, "boolean"]
    label = f"squeeze_excite.forward resident, planes, {dtype} with {weight_dtype} weights"
    yield label, resident_planes_kernel, types
