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
not wait for it.

The next kernel may get ready when this one ends (`allow_next_kernel`), or at once, forward, where
images are small. After a large image, `fused` backward took a sixth longer if it was allowed at
once: probably because its blocks then came while multiprocessors had nearly all of their first
cache as shared memory, and kept it so.

Two blocks share a multiprocessor. If both read at the same time, memory would rest while both
compute, and the multiprocessor while both read. So where samples take turns, the second block
begins when the first one's run has come (`follow`). From then on one reads or writes while the
other one computes: a tenth of the time, for the large images of a batch of 32.

Backward it holds dy instead, multiplies it with x as that comes by, and takes the layers in
reverse. The gradients of the logits are linear in the sums of dy·x, so parts will do there too.

Contiguous images alone, on sm_90 or later, and only where a sample fits: see `resident_plan`.
Elsewhere "auto" takes `two_pass` or `fused`, as on chips whose blocks have less shared memory.
Where samples take turns, their blocks meet once in each turn; so a few large samples gain most. An
H200 needs 9 to 13 µs for one sample of any block of EfficientNet-B4, where `two_pass` needs 9 to
14.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.squeeze_excite.dense import (
    BLOCK_SIZE,
    CHUNK,
    MOST_CHANNELS,
    TOTALS,
    by_columns,
    by_rows,
    quotient,
    slot_size,
    sum_slots,
)
from course_lib.kernels.squeeze_excite.formulas import (
    activate,
    activation_gradient,
    gate_gradient,
    gate_of,
)
from course_lib.kernels.squeeze_excite.held import (
    dot_held,
    fetch,
    scale_and_shift_held,
    scale_held,
    sum_held,
)
from course_lib.kernels.squeeze_excite.operands import QUAD, boundaries, scale_of, workspace
from course_lib.kernels.squeeze_excite.plan import ceil_div
from course_lib.kernels.squeeze_excite.resident_plan import (
    KEPT,
    LINE_BYTES,
    blocks_that_lead,
    bytes_of,
    plan_of,
    room_of,
)
from course_lib.kernels.squeeze_excite.turns import (
    finish_sums,
    follow,
    keep_weights,
    lead,
    leave,
    meet,
    note_sums,
)
from course_lib.kernels.squeeze_excite.two_pass import aligned
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime.host.counters import counters
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

PER_THREAD = CHUNK // BLOCK_SIZE
#: Backward: the kernel has two more arrays, in the same shared memory.
KEPT_BACKWARD = KEPT - MOST_CHANNELS - BLOCK_SIZE
EARLY = 16 << 20  # bytes of images, below which the next kernel may get ready at once
LINE = LINE_BYTES // 4  # counters: those of the samples, and those of the blocks, have their own


@cuda.jit(device=True)
def place_of(block, n_blocks, share, C, n_pixels):
    """(first sample, rank in it, step to the next; first element, end; first plane, last)."""
    first_n = quotient(block, n_blocks)
    rank, step = block - first_n * n_blocks, quotient(cuda.gridDim.x, n_blocks)
    low, high = rank * share, min((rank + 1) * share, C * n_pixels)
    return first_n, rank, step, low, high, quotient(low, n_pixels), quotient(high - 1, n_pixels)


@cuda.jit
def resident_planes_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, slots, edges, counters,
    N, n_pixels, C, R, scale, activation, gate, aligned1, aligned2,
    early, n_leading, n_blocks, share, team, n_pieces, multiplier, offset, vectors,
):  # fmt: skip
    if early:
        allow_next_kernel()
    if vector_width(x) == 0:  # never; but that it is written makes the launch a cooperative one
        cuda.cg.this_grid()
    values = cuda.shared.array(MOST_CHANNELS, np.float32, alignment=VECTOR_BYTES)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    kept = cuda.shared.array(KEPT, np.float32, alignment=VECTOR_BYTES)
    biases = cuda.local.array(PER_THREAD, np.float32)
    held = dynamic_shared(x)
    tid, block = np.int64(cuda.threadIdx.x), np.int64(cuda.blockIdx.x)
    first_n, rank, step, low, high, c, last = place_of(block, n_blocks, share, C, n_pixels)
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
        sum_held(values, totals, held, place, x, start, True, low, high, c, n_mine, n_pixels,
                 team, n_pieces)  # fmt: skip
        if tid < n_mine:
            values[tid] *= scale
        note_sums(values, edges, mean, slot, n, C, c, n_mine, n_pixels, low, high)
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
                   values, n_pixels, multiplier, vectors)  # fmt: skip
        leave(counters, n, n_blocks, counted)
        cuda.syncthreads()  # before the next run takes its place
        n += step
    allow_next_kernel()
    if last * n_pixels >= low and (last + 1) * n_pixels > high:
        finish_sums(edges, mean, first_n, step, N, n_blocks, rank, share, C, last, n_pixels)


@cuda.jit(max_registers=128)
def resident_planes_backward_kernel(
    dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden, slots, edges, counters,
    N, n_pixels, C, R, scale, activation, gate, aligned1, aligned2,
    early, n_leading, n_blocks, share, team, n_pieces, multiplier, offset, vectors,
):  # fmt: skip
    if early:
        allow_next_kernel()
    if vector_width(dy) == 0:  # as above
        cuda.cg.this_grid()
    values = cuda.shared.array(MOST_CHANNELS, np.float32, alignment=VECTOR_BYTES)
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    kept = cuda.shared.array(KEPT_BACKWARD, np.float32, alignment=VECTOR_BYTES)
    saved = cuda.local.array(PER_THREAD, np.float32)
    held = dynamic_shared(dy)
    tid, block = np.int64(cuda.threadIdx.x), np.int64(cuda.blockIdx.x)
    first_n, rank, step, low, high, c, last = place_of(block, n_blocks, share, C, n_pixels)
    n_mine = last + 1 - c
    keeps = 2 * R * n_mine <= KEPT_BACKWARD
    wait_for_previous_kernel()
    flags = (N + LINE - 1) & -LINE
    if block >= n_leading:
        follow(counters, flags + block, n_leading)
    n = first_n
    while n < N:
        start, slot = n * C * n_pixels, n * n_blocks + rank
        place = fetch(held, dy, start + low, start + high, offset)
        end_group()
        if n == first_n and keeps:  # while the copies are on their way
            keep_weights(kept, weight1, weight2, R, C, c, n_mine)
        z = logit[n * C + c + tid] if tid < n_mine else ZERO
        wait_for_groups_but(0)
        cuda.syncthreads()
        if n == first_n and block + n_leading < cuda.gridDim.x:
            lead(counters, flags + block)
        dot_held(values, totals, held, place, x, start, vectors, low, high, c, n_mine, n_pixels,
                 team, n_pieces)  # fmt: skip
        if tid < n_mine:
            values[tid] = gate_gradient(values[tid], z, gate)
        note_sums(values, edges, dlogit, slot, n, C, c, n_mine, n_pixels, low, high)
        cuda.syncthreads()
        if keeps:
            by_columns(slots, slot * slot_size(R), kept, R, n_mine, n_mine, 0, R, values, scratch,
                       False, True)  # fmt: skip
        else:
            by_columns(slots, slot * slot_size(R), weight2, R, c, n_mine, 0, R, values, scratch,
                       False, aligned2)  # fmt: skip
        counted = meet(counters, n, n_blocks)
        for u in range(PER_THREAD):  # memory answers together with the slots
            saved[u] = hidden[n * R + min(tid + u * BLOCK_SIZE, R - 1)]
        sum_slots(totals, slots, n, n_blocks, R, 0, R)
        for u in range(PER_THREAD):
            i = tid + u * BLOCK_SIZE
            if i < R:
                d = activation_gradient(totals[i], saved[u], activation)
                if rank == 0:
                    dhidden[n * R + i] = d
                totals[i] = d
        cuda.syncthreads()
        if keeps:
            by_columns(values, 0, kept, n_mine, 0, R, 0, n_mine, totals, scratch, False, True)
        else:
            by_columns(values, 0, weight1, C, 0, R, c, n_mine, totals, scratch, False, aligned1)
        if tid < n_mine:
            values[tid] *= scale
            factors[tid] = gate_of(z, gate)
        cuda.syncthreads()
        scale_and_shift_held(held, place, dx, start + low, start + high, offset, low - c * n_pixels,
                             factors, values, n_pixels, multiplier, vectors)  # fmt: skip
        leave(counters, n, n_blocks, counted)
        cuda.syncthreads()  # before the next run takes its place
        n += step
    allow_next_kernel()
    if last * n_pixels >= low and (last + 1) * n_pixels > high:
        finish_sums(edges, dlogit, first_n, step, N, n_blocks, rank, share, C, last, n_pixels)


FORWARD_KERNELS = (resident_planes_kernel,)
BACKWARD_KERNELS = (resident_planes_backward_kernel,)


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit. Raises ValueError where there is no `Plan`."""
    arrays = x, weight1, bias1, weight2, bias2, y, mean, hidden, logit
    _launch(resident_planes_kernel, problem, (x, y), (weight1, weight2), *arrays)


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2. Raises as `forward` does."""
    dlogit = workspace((problem.N, problem.C), mean)
    dhidden = workspace((problem.N, problem.R), mean)
    arrays = dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden
    _launch(resident_planes_backward_kernel, problem, (dy, x, dx), (weight1, weight2), *arrays)
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)


def _launch(kernel, problem, images, weights, *arrays):
    room = room_of(images[0])
    plan = plan_of(problem, *room)
    if plan is None:
        raise ValueError(
            "resident takes contiguous images of which a sample fits into the shared memory of all "
            f"multiprocessors together, and 1 to {CHUNK} hidden channels; use variant='auto'"
        )
    like = arrays[-1]
    grid, n_slots = plan.at_once * plan.n_blocks, problem.N * plan.n_blocks
    slots = workspace((n_slots, ceil_div(problem.R, QUAD) * QUAD), like)
    edges = workspace((n_slots, 2), like)
    n_leading = blocks_that_lead(problem, plan, room[0])
    n_counters = problem.N if n_leading == grid else problem.N + LINE + grid
    launch(
        kernel, grid, BLOCK_SIZE,
        *arrays, slots, edges, counters(n_counters, like),
        problem.N, problem.n_pixels, problem.C, problem.R, scale_of(problem),
        problem.activation, problem.gate,
        aligned(weights[0], problem.C), aligned(weights[1], problem.R),
        kernel in FORWARD_KERNELS and bytes_of(problem) < EARLY, n_leading, *plan[1:],
        *boundaries(problem, *images),
        shared_bytes=plan.shared_bytes(problem.itemsize), flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    rest = [sums, sums, ("int32", 1), *["int64"] * 4, "float32"]
    rest += ["int64", "int64", "boolean", "boolean", "boolean", *["int64"] * 7, "boolean"]
    first = [image, *[weight] * 4, image, *[sums] * 3]
    second = [image, image, weight, weight, sums, sums, image, sums, sums]
    suffix = f"resident, planes, {dtype} with {weight_dtype} weights"
    yield f"squeeze_excite.forward {suffix}", resident_planes_kernel, [*first, *rest]
    yield f"squeeze_excite.backward {suffix}", resident_planes_backward_kernel, [*second, *rest]
