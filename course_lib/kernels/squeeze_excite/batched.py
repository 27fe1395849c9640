"""The rung `batched`: blocks that take the same channels of several samples.

Where the small layers are large, their weights weigh as much as a sample's image, and `two_pass`
reads them anew for each sample. Here

1. a block sums `group` channels of SAMPLES samples, and writes what their means add to the hidden
   layer of each sample: a *slot* (`dense`). It reads its columns of weight1 once;
2. a small kernel adds the slots up, of which there are many: the hidden layer;
3. a block finds the gates of `group` channels of SAMPLES samples, and scales them. It reads its
   rows of weight2 once, and goes through the images in reverse, as that of `two_pass`.

Slots lie as (group, sample, R). Forward alone, and contiguous float32 images alone: those of 16
bits are half as large, and `two_pass` is no slower there. An H200 needs 54 µs for 32 samples of the
last block of EfficientNet-B4, where `two_pass` needs 57, and 36 rather than 37 for that before.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite import planes
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, QUAD, WARP, in_vectors, quotient
from course_lib.kernels.squeeze_excite.formulas import ZERO, activate, gate_of
from course_lib.kernels.squeeze_excite.operands import boundaries, scale_of, workspace
from course_lib.kernels.squeeze_excite.plan import LANES, ceil_div
from course_lib.kernels.squeeze_excite.planes import PARTIALS
from course_lib.kernels.squeeze_excite.two_pass import aligned
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    wait_for_previous_kernel,
)
from course_lib.runtime.launch import launch

SAMPLES = 4  # of a block
PER_SAMPLE = BLOCK_SIZE // SAMPLES  # threads
WARPS_PER_SAMPLE = PER_SAMPLE // WARP
TEAM = 8  # lanes that share a row of weights: two for each sample
GRAIN, MOST_CHANNELS = 8, 64  # of a block: it has a multiple of the one, and no more than the other
MOST_VALUES = SAMPLES * MOST_CHANNELS
CHUNK = 256  # hidden numbers of a sample that are worked on at a time
ACTS = SAMPLES * CHUNK
COLUMNS = 16  # of a block that adds slots up
SLOTS = 8  # in flight per thread
BLOCKS = 3  # on a multiprocessor
N_BLOCKS = 132 * BLOCKS  # that run at the same time on the largest chip of today
#: `auto` takes this rung for float32 images of so many samples or more, with C·R no less than
#: LARGE_LAYERS and planes of no more than 3·R pixels: it gains where both layers' weights weigh
#: nearly as much as a sample's image. Measured on an H200.
MANY_SAMPLES, LARGE_LAYERS = 32, 100_000


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
    def layer(out, place, step, weight, length, row, n_rows, col, n_cols, vectors, stride, n,
              added, aligned):  # fmt: skip
        """out[place + s·step + i] = Σ weight[row + i, col + j] · vectors[s·stride + j], for s < n.

        Over j < n_cols, for i < n_rows; `vectors` is shared, and has SAMPLES of them. Otherwise
        as `dense.by_rows`.
        """
        values = cuda.local.array((n_at_once, QUAD), np.float32)
        factors = cuda.local.array(QUAD, np.float32)
        totals = cuda.local.array((n_rows_at_once, SAMPLES), np.float32)
        tid = np.int64(cuda.threadIdx.x)
        rank, team, n_teams = tid & (TEAM - 1), tid // TEAM, BLOCK_SIZE // TEAM
        whole = in_vectors(weight, col, n_cols, aligned)
        width = QUAD if whole else 1
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
                                load_vector(factors, vectors, s * stride + there)
                                for k in range(QUAD):
                                    for r in range(n_rows_at_once):
                                        value = values[r * n_cols_at_once + q, k]
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
                s, here = rank >> 1, i + r * n_teams
                if rank & 1 == 0 and s < n and here < n_rows:
                    there = place + s * step + here
                    out[there] = out[there] + total if added else total
            i += n_rows_at_once * n_teams

    return layer


first_layer = layer_of_samples(2, 1)
second_layer = layer_of_samples(1, 2)


@cuda.jit(device=True)
def place_of_block(block, N, C, n_groups, group):
    """(first sample, samples, group, first channel, channels) of block `block`."""
    batch = quotient(block, n_groups)
    g = block - batch * n_groups
    n, c = batch * SAMPLES, g * group
    return n, min(SAMPLES, N - n), g, c, min(group, C - c)


@cuda.jit(launch_bounds=(BLOCK_SIZE, BLOCKS))
def pool_batch_kernel(
    x, weight1, mean, slots, N, n_pixels, C, R, scale, aligned, n_groups, group, team, offset
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.shared.array(MOST_VALUES, np.float32, alignment=VECTOR_BYTES)
    partials = cuda.shared.array(PARTIALS, np.float32)
    tid, block = np.int64(cuda.threadIdx.x), np.int64(cuda.blockIdx.x)
    n, n_samples, g, c, n_mine = place_of_block(block, N, C, n_groups, group)
    count, warp = n_samples * n_mine, tid // WARP
    s = quotient(warp, WARPS_PER_SAMPLE)
    if s < n_samples:
        planes.sum_by_warps(
            values, s * n_mine, x, x, (n + s) * C + c, n_mine, n_pixels, offset, True, team,
            partials, warp - s * WARPS_PER_SAMPLE, WARPS_PER_SAMPLE,
        )  # fmt: skip
    cuda.syncthreads()
    if tid < SAMPLES * n_mine:
        if tid < count:
            values[tid] *= scale
            s = quotient(tid, n_mine)
            mean[(n + s) * C + c + tid - s * n_mine] = values[tid]
        else:
            values[tid] = ZERO
    cuda.syncthreads()
    first_layer(slots, (g * N + n) * R, R, weight1, C, 0, R, c, n_mine, values, n_mine, n_samples,
                False, aligned)  # fmt: skip


@cuda.jit
def hidden_kernel(slots, bias1, hidden, n_groups, N, R):
    # A thread adds up every n-th slot of one number, a block those of COLUMNS numbers.
    allow_next_kernel()
    wait_for_previous_kernel()
    partial = cuda.shared.array(BLOCK_SIZE, np.float32)
    values = cuda.local.array(SLOTS, np.float32)
    tid, n_numbers = np.int64(cuda.threadIdx.x), N * R
    i, slot = np.int64(cuda.blockIdx.x) * COLUMNS + tid % COLUMNS, tid // COLUMNS
    step = BLOCK_SIZE // COLUMNS
    here = min(i, n_numbers - 1)
    total, bias = ZERO, load(bias1, here % R)
    while slot < n_groups:
        for u in range(SLOTS):
            values[u] = slots[min(slot + u * step, n_groups - 1) * n_numbers + here]
        for u in range(SLOTS):
            total += values[u] if slot + u * step < n_groups else ZERO
        slot += SLOTS * step
    partial[tid] = total
    cuda.syncthreads()
    half = BLOCK_SIZE // 2
    while half >= COLUMNS:
        if tid < half:
            partial[tid] += partial[tid + half]
        cuda.syncthreads()
        half //= 2
    if tid < COLUMNS and i < n_numbers:
        hidden[i] = partial[tid] + bias


@cuda.jit(launch_bounds=(BLOCK_SIZE, BLOCKS))
def scale_batch_kernel(
    x, hidden, weight2, bias2, y, logit, N, n_pixels, C, R, activation, gate, aligned,
    n_groups, group, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    factors = cuda.shared.array(MOST_VALUES, np.float32)
    acts = cuda.shared.array(ACTS, np.float32, alignment=VECTOR_BYTES)
    tid, block = np.int64(cuda.threadIdx.x), np.int64(cuda.gridDim.x - 1 - cuda.blockIdx.x)
    n, n_samples, _, c, n_mine = place_of_block(block, N, C, n_groups, group)
    s, rank = tid // PER_SAMPLE, tid & (PER_SAMPLE - 1)
    mine = quotient(tid, n_mine)
    if mine < n_samples:
        factors[tid] = load(bias2, c + tid - mine * n_mine)
    first = 0
    while first < R:
        count = min(CHUNK, R - first)
        i = rank
        while i < count:
            h = ZERO
            if s < n_samples:
                h = activate(hidden[(n + s) * R + first + i], activation)
            acts[s * CHUNK + i] = h
            i += PER_SAMPLE
        cuda.syncthreads()
        second_layer(factors, 0, n_mine, weight2, R, c, n_mine, first, count, acts, CHUNK,
                     n_samples, True, aligned)  # fmt: skip
        cuda.syncthreads()
        first += CHUNK
    if mine < n_samples:
        z = factors[tid]
        logit[(n + mine) * C + c + tid - mine * n_mine] = z
        factors[tid] = gate_of(z, gate)
    cuda.syncthreads()
    start = ((n + s) * C + c) * n_pixels
    stop = start + (n_mine * n_pixels if s < n_samples else 0)
    planes.scale_share(x, y, start, stop, offset, vectors, factors, factors, s * n_mine, n_pixels,
                       multiplier, rank, PER_SAMPLE)  # fmt: skip


FORWARD = (pool_batch_kernel, hidden_kernel, scale_batch_kernel)


class Plan(NamedTuple):
    """SAMPLES samples are cut into n_groups of `group` channels, a block for each.

    `team` lanes sum a plane; for `multiplier`, see `planes.plane_of`.
    """

    n_groups: int
    group: int
    team: int
    multiplier: int


@functools.lru_cache(maxsize=4096)
def plan_of(problem):
    """The `Plan` for images with a pixel at least, or None where it can't be."""
    N, C, n_pixels, _, channels_last, *_, itemsize = problem
    if channels_last or itemsize != np.dtype(np.float32).itemsize:
        return None
    # All blocks run at once: those that had to wait would find the memory idle around them.
    group = ceil_div(C, max(1, N_BLOCKS // ceil_div(N, SAMPLES)))
    group = min(ceil_div(group, GRAIN) * GRAIN, MOST_CHANNELS, C)
    # `plane_of` wants elements of a block times pixels of a plane below 2³².
    group = max(1, min(group, (2**32 - 1) // n_pixels**2))
    team = LANES[0]
    while team < LANES[1] and team * 6 < ceil_div(n_pixels, QUAD):
        team *= 2
    multiplier = ceil_div(2**32, n_pixels) if group > 1 else 0
    return Plan(ceil_div(C, group), group, team, multiplier)


def worthwhile(problem):
    """Whether `auto` takes this rung where it doesn't take `resident`."""
    large = problem.C * problem.R >= LARGE_LAYERS and problem.n_pixels <= 3 * problem.R
    return large and problem.N >= MANY_SAMPLES and plan_of(problem) is not None


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit. Raises ValueError where there is no `Plan`."""
    plan = plan_of(problem)
    if plan is None:
        raise ValueError("batched takes contiguous float32 images; use variant='auto'")
    n_groups, group, team, multiplier = plan
    N, R, n_blocks = problem.N, problem.R, ceil_div(problem.N, SAMPLES) * n_groups
    sizes = N, problem.n_pixels, problem.C, R
    offset, vectors = boundaries(problem, x, y)
    slots = workspace((n_groups, N, R), mean)
    launch(
        pool_batch_kernel, n_blocks, BLOCK_SIZE,
        x, weight1, mean, slots, *sizes, scale_of(problem), aligned(weight1, problem.C),
        n_groups, group, team, offset, flat=True, overlap=True,
    )  # fmt: skip
    launch(
        hidden_kernel, ceil_div(N * R, COLUMNS), BLOCK_SIZE,
        slots, bias1, hidden, n_groups, N, R, flat=True, overlap=True,
    )  # fmt: skip
    launch(
        scale_batch_kernel, n_blocks, BLOCK_SIZE,
        x, hidden, weight2, bias2, y, logit, *sizes, problem.activation, problem.gate,
        aligned(weight2, R), n_groups, group, multiplier, offset, vectors, flat=True, overlap=True,
    )  # fmt: skip


def specialisations():
    """(label, kernel, argument types): one for each kernel."""
    array, sizes = ("float32", 1), ["int64"] * 4
    first = [*[array] * 4, *sizes, "float32", "boolean", *["int64"] * 4]
    second = [*[array] * 3, *["int64"] * 3]
    third = [*[array] * 6, *sizes, "int64", "int64", "boolean", *["int64"] * 4, "boolean"]
    for kernel, types in zip(FORWARD, (first, second, third), strict=True):
        name = kernel.py_func.__name__.removesuffix("_kernel")
        yield f"squeeze_excite.forward batched, {name}, float32", kernel, types
