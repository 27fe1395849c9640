"""The rung `batched`: one kernel whose blocks have the same channels of several samples.

Where the small layers are large, their weights weigh as much as a sample's image, and a block that
has one sample (`two_pass`, `resident`) reads them for that one alone. Here a block has `group`
channels of SAMPLES samples, a *batch*, and reads their weights once. All blocks run at the same
time, and hold what they can of the images in shared memory, as in `resident`; what is left they
read twice, the second time from the L2 cache, where the images are not much larger than that.

Each block

1. begins to copy its first `n_held` planes to shared memory, and sums the others meanwhile;
2. sums what has come, and writes what the means add to the hidden layers of its samples: a *slot*
   (`dense`);
3. counts itself, and waits until all blocks of the batch have done so (`turns`);
4. adds the slots up, finds the gates of its channels, and writes y.

As for `resident`, the launch is cooperative, and the next kernel gets ready when this one ends.

Forward alone, contiguous images alone, on sm_90 or later; elsewhere "auto" takes `two_pass` or
`fused`. For 32 samples of the last block of
EfficientNet-B4 an H200 needs 48 µs where `two_pass` needs 58, and 30 rather than 34 in bfloat16.
Few samples are better off elsewhere: a batch then has so many blocks that their slots take long to
add up.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.squeeze_excite import planes
from course_lib.kernels.squeeze_excite.dense import (
    BLOCK_SIZE,
    CHUNK,
    QUAD,
    WARP,
    in_vectors,
    quotient,
    sum_slots,
)
from course_lib.kernels.squeeze_excite.formulas import activate, gate_of
from course_lib.kernels.squeeze_excite.operands import boundaries, scale_of, workspace
from course_lib.kernels.squeeze_excite.plan import LANES, ceil_div
from course_lib.kernels.squeeze_excite.planes import PARTIALS
from course_lib.kernels.squeeze_excite.resident_plan import (
    BLOCKS,
    MEASURED_BYTES,
    RESERVED_BYTES,
    room_of,
)
from course_lib.kernels.squeeze_excite.turns import leave, meet
from course_lib.kernels.squeeze_excite.two_pass import aligned
from course_lib.runtime.host.counters import counters
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.shared import copy_async, dynamic_shared, wait_for_copies
from course_lib.runtime.intrinsics.streaming import store_vector_once

SAMPLES = 4  # of a block
TEAM = 8  # lanes that share a row of weights: two for each sample
MOST_CHANNELS = 256  # of a block
MOST_HIDDEN = CHUNK // SAMPLES  # channels of the hidden layer
MOST_VALUES = SAMPLES * MOST_CHANNELS
PER_THREAD = max(MOST_VALUES, CHUNK) // BLOCK_SIZE
WARPS = BLOCK_SIZE // WARP
HELD_UNROLL = 2  # vectors in flight per thread: shared memory answers soon
#: Bytes of shared memory of a block beside the planes that it holds.
STATIC_BYTES = 4 * (MOST_VALUES + PARTIALS)
#: `auto` takes this rung where N, and N·C·R, times the bytes of an element are so large, and planes
#: have no more than PIXELS·R pixels: there the weights that `two_pass` reads for each sample count.
#: Measured on an H200 at 8 to 64 samples of the last blocks of EfficientNet-B4.
MANY_SAMPLES, LARGE_LAYERS, PIXELS = 64, 4_800_000, 20


@cuda.jit(device=True)
def sum_of_pair(one, other, rank, step):
    """The sum of `one` over two lanes for the first of them, that of `other` for the second.

    Their ranks differ in the bit `step`.
    """
    second = rank & step != 0
    kept, sent = (other, one) if second else (one, other)
    return kept + cuda.shfl_xor_sync(FULL_MASK, sent, step)


def layer_of_samples(n_rows_at_once, n_cols_at_once):
    """The function that multiplies a part of the weights with a vector of each sample.

    A thread asks for so many rows, and of each so many vectors of 16 bytes, at a time.
    """
    n_at_once = n_rows_at_once * n_cols_at_once

    @cuda.jit(device=True)
    def layer(out, place, step, weight, length, row, n_rows, col, n_cols, vectors, stride, aligned):
        """out[place + s·step + i] = Σ weight[row + i, col + j] · vectors[s·stride + j].

        For s < SAMPLES, over j < n_cols, for i < n_rows; `vectors` is shared. Otherwise as
        `dense.by_rows`.
        """
        values = cuda.local.array((n_at_once, MAX_WIDTH), np.float32)
        factors = cuda.local.array(QUAD, np.float32)
        totals = cuda.local.array((n_rows_at_once, SAMPLES), np.float32)
        tid = np.int64(cuda.threadIdx.x)
        rank, team, n_teams = tid & (TEAM - 1), tid // TEAM, BLOCK_SIZE // TEAM
        whole = in_vectors(weight, col, n_cols, aligned)
        width = vector_width(weight) if whole else 1
        i = team
        while i - team < n_rows:  # all threads of a warp go on for as long as one of them must
            for r in range(n_rows_at_once):
                for s in range(SAMPLES):
                    totals[r, s] = ZERO
            j = rank * width
            while j < n_cols:
                # What lies past the last row or column stands for it once more, and is left out.
                for q in range(n_cols_at_once):
                    there = col + min(j + q * TEAM * width, n_cols - width)
                    for r in range(n_rows_at_once):
                        here = (row + min(i + r * n_teams, n_rows - 1)) * length + there
                        if whole:
                            load_vector(values[r * n_cols_at_once + q], weight, here)
                        else:
                            values[r * n_cols_at_once + q, 0] = load(weight, here)
                for q in range(n_cols_at_once):
                    there = j + q * TEAM * width
                    if there < n_cols:
                        for s in range(SAMPLES):
                            if whole:
                                for part in range(vector_width(weight) // QUAD):
                                    load_vector(factors, vectors, s * stride + there + part * QUAD)
                                    for k in range(QUAD):
                                        for r in range(n_rows_at_once):
                                            value = values[r * n_cols_at_once + q, part * QUAD + k]
                                            totals[r, s] += value * factors[k]
                            else:
                                for r in range(n_rows_at_once):
                                    value = values[r * n_cols_at_once + q, 0]
                                    totals[r, s] += value * vectors[s * stride + there]
                j += n_cols_at_once * TEAM * width
            # Of a pair of lanes, each gives away half of its sums: in the end it has one sample's.
            for r in range(n_rows_at_once):
                for s in range(2):
                    one, other = totals[r, s], totals[r, s + 2]
                    totals[r, s] = sum_of_pair(one, other, rank, 4)
                total = sum_of_pair(totals[r, 0], totals[r, 1], rank, 2)
                total += cuda.shfl_xor_sync(FULL_MASK, total, 1)
                here = i + r * n_teams
                if rank & 1 == 0 and here < n_rows:
                    out[place + (rank >> 1) * step + here] = total
            i += n_rows_at_once * n_teams

    return layer


first_layer = layer_of_samples(4, 1)
second_layer = layer_of_samples(3, 2)


@cuda.jit(device=True)
def held_of(s, n_held, n_mine):
    """How many of the block's planes of its sample `s` it holds: they come first."""
    return min(max(n_held - s * n_mine, 0), n_mine)


@cuda.jit(device=True)
def fetch_planes(held, place, x, start, count):
    """Begin to copy x[start : start + count] to `held`, from `place` on; whole vectors."""
    i = np.int64(cuda.threadIdx.x) * vector_width(x)
    while i < count:
        copy_async(held, place + i, x, start + i)
        i += cuda.blockDim.x * vector_width(x)


@cuda.jit(device=True)
def scale_held_planes(held, place, y, start, count, factors, plane, multiplier):
    """y[start : start + count] = what is held from `place` on times the planes' factors."""
    width = vector_width(y)
    values = cuda.local.array((HELD_UNROLL, MAX_WIDTH), np.float32)
    stride = np.int64(cuda.blockDim.x) * width
    i = np.int64(cuda.threadIdx.x) * width
    while i < count:
        for u in range(HELD_UNROLL):
            here = i + u * stride
            if here < count:
                load_vector(values[u], held, place + here)
                factor = factors[plane + planes.plane_of(here, 0, multiplier)]
                for k in range(width):
                    values[u, k] *= factor
                store_vector_once(y, start + here, values[u])
        i += HELD_UNROLL * stride


@cuda.jit(launch_bounds=(BLOCK_SIZE, BLOCKS))
def batch_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, slots, counters,
    N, n_pixels, C, R, scale, activation, gate, aligned1, aligned2,
    n_groups, group, n_held, team, multiplier, offset, vectors,
):  # fmt: skip
    if vector_width(x) == 0:  # never; but that it is written makes the launch a cooperative one
        cuda.cg.this_grid()
    values = cuda.shared.array(MOST_VALUES, np.float32, alignment=VECTOR_BYTES)
    totals = cuda.shared.array(PARTIALS, np.float32, alignment=VECTOR_BYTES)
    biases1 = cuda.local.array(PER_THREAD, np.float32)
    biases2 = cuda.local.array(PER_THREAD, np.float32)
    held = dynamic_shared(x)
    tid, block = np.int64(cuda.threadIdx.x), np.int64(cuda.blockIdx.x)
    warp = tid // WARP
    batch = quotient(block, n_groups)
    g = block - batch * n_groups
    n, c = batch * SAMPLES, g * group
    n_samples, n_mine = min(SAMPLES, N - n), min(group, C - c)
    wait_for_previous_kernel()
    for s in range(n_samples):
        first, count = (n + s) * C + c, held_of(s, n_held, n_mine)
        fetch_planes(held, s * n_mine * n_pixels, x, first * n_pixels, count * n_pixels)
    for s in range(n_samples):
        first, count = (n + s) * C + c, held_of(s, n_held, n_mine)
        if count < n_mine:
            planes.sum_by_warps(
                values, s * n_mine + count, x, x, first + count, n_mine - count, n_pixels, offset,
                True, team, totals, warp, WARPS,
            )  # fmt: skip
    wait_for_copies()
    cuda.syncthreads()
    if n_held > 0:
        planes.sum_by_warps(values, 0, held, held, 0, min(n_held, n_samples * n_mine), n_pixels, 0,
                            True, team, totals, warp, WARPS)  # fmt: skip
        cuda.syncthreads()
    i = tid
    while i < SAMPLES * n_mine:
        s = quotient(i, n_mine)
        if s < n_samples:
            values[i] *= scale
            mean[(n + s) * C + c + i - s * n_mine] = values[i]
        else:
            values[i] = ZERO
        i += BLOCK_SIZE
    cuda.syncthreads()
    first_layer(slots, block * SAMPLES * R, R, weight1, C, 0, R, c, n_mine, values, n_mine,
                aligned1)  # fmt: skip
    for u in range(PER_THREAD):  # they come while the block waits
        i = min(tid + u * BLOCK_SIZE, SAMPLES * R - 1)
        biases1[u] = load(bias1, i - quotient(i, R) * R)
        i = min(tid + u * BLOCK_SIZE, SAMPLES * n_mine - 1)
        biases2[u] = load(bias2, c + i - quotient(i, n_mine) * n_mine)
    counted = meet(counters, batch, n_groups)
    sum_slots(totals, slots, batch, n_groups, SAMPLES * R, 0, SAMPLES * R)
    for u in range(PER_THREAD):
        i = tid + u * BLOCK_SIZE
        if i < SAMPLES * R:
            h = totals[i] + biases1[u]
            if g == 0 and i < n_samples * R:
                hidden[n * R + i] = h
            totals[i] = activate(h, activation)
    cuda.syncthreads()
    second_layer(values, 0, n_mine, weight2, R, c, n_mine, 0, R, totals, R, aligned2)
    cuda.syncthreads()
    for u in range(PER_THREAD):
        i = tid + u * BLOCK_SIZE
        if i < n_samples * n_mine:
            s = quotient(i, n_mine)
            z = values[i] + biases2[u]
            logit[(n + s) * C + c + i - s * n_mine] = z
            values[i] = gate_of(z, gate)
    cuda.syncthreads()
    for s in range(n_samples):  # first what may be lost from the cache
        count = held_of(s, n_held, n_mine)
        start = ((n + s) * C + c) * n_pixels
        if count < n_mine:
            planes.scale_share(
                x, y, start + count * n_pixels, start + n_mine * n_pixels, offset, vectors, values,
                values, s * n_mine + count, n_pixels, multiplier, tid, BLOCK_SIZE,
            )  # fmt: skip
    for s in range(n_samples):
        first, count = (n + s) * C + c, held_of(s, n_held, n_mine)
        scale_held_planes(held, s * n_mine * n_pixels, y, first * n_pixels, count * n_pixels,
                          values, s * n_mine, multiplier)  # fmt: skip
    leave(counters, batch, n_groups, counted)
    allow_next_kernel()


FORWARD_KERNELS = (batch_kernel,)


class Plan(NamedTuple):
    """SAMPLES samples are cut into n_groups of `group` channels, a block for each.

    A block holds `n_held` planes, as long as they are whole vectors. `team` lanes sum a plane; for
    `multiplier`, see `planes.plane_of`.
    """

    n_groups: int
    group: int
    n_held: int
    team: int
    multiplier: int


@functools.lru_cache(maxsize=4096)
def plan_of(problem, n_multiprocessors, shared_bytes):
    """The `Plan` for images with a pixel at least, or None where it can't be.

    That is for channels-last images, for more than MOST_HIDDEN hidden channels, and for so many
    samples that not all of their blocks could run at the same time.
    """
    N, C, n_pixels, R, channels_last, *_, itemsize = problem
    budget = (shared_bytes + RESERVED_BYTES) // BLOCKS - RESERVED_BYTES - STATIC_BYTES
    most_groups = BLOCKS * n_multiprocessors // ceil_div(N, SAMPLES)
    if channels_last or not 0 < R <= MOST_HIDDEN or budget < 0 or most_groups == 0:
        return None
    width = VECTOR_BYTES // itemsize
    group = min(ceil_div(ceil_div(C, most_groups), width) * width, C)
    # `plane_of` wants elements of a block times pixels of a plane below 2³².
    if group > MOST_CHANNELS or (group > 1 and group * n_pixels**2 >= 2**32):
        return None
    team = LANES[0]
    while team < LANES[1] and team * 6 < ceil_div(n_pixels, width):
        team *= 2
    n_held = 0 if n_pixels % width else min(budget // (n_pixels * itemsize), SAMPLES * group)
    multiplier = ceil_div(2**32, n_pixels) if group > 1 else 0
    return Plan(ceil_div(C, group), group, n_held, team, multiplier)


def worthwhile(problem, room):
    """Whether `auto` takes this rung, on a device of this `resident_plan.room_of`."""
    N, C, n_pixels, R, *_, itemsize = problem
    if room[1] < MEASURED_BYTES or plan_of(problem, *room) is None:
        return False
    large = itemsize * N * C * R >= LARGE_LAYERS and n_pixels <= PIXELS * R
    return large and itemsize * N >= MANY_SAMPLES


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit. Raises ValueError where there is no `Plan`."""
    plan = plan_of(problem, *room_of(x))
    if plan is None:
        raise ValueError(
            "batched takes contiguous images, of no more samples and channels than all blocks have "
            f"room for, and 1 to {MOST_HIDDEN} hidden channels; use variant='auto'"
        )
    N, R = problem.N, problem.R
    offset, vectors = boundaries(problem, x, y)
    n_held = plan.n_held if vectors and offset == 0 else 0
    n_batches = ceil_div(N, SAMPLES)
    slots = workspace((n_batches, plan.n_groups, SAMPLES * R), mean)
    launch(
        batch_kernel, n_batches * plan.n_groups, BLOCK_SIZE,
        x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, slots,
        counters(n_batches, mean), N, problem.n_pixels, problem.C, R, scale_of(problem),
        problem.activation, problem.gate, aligned(weight1, problem.C), aligned(weight2, R),
        *plan._replace(n_held=n_held), offset, vectors,
        shared_bytes=n_held * problem.n_pixels * problem.itemsize, flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    types = [image, *[weight] * 4, image, *[sums] * 4, ("int32", 1), *["int64"] * 4, "float32"]
    types += ["int64", "int64", "boolean", "boolean", *["int64"] * 6, "boolean"]
    label = f"squeeze_excite.forward batched, {dtype} with {weight_dtype} weights"
    yield label, batch_kernel, types
