"""The rung `two_pass`: sums in a first kernel, all the rest in a second.

Forward the first kernel takes the means and what they add to the hidden layer (`dense`), the second
finds the hidden layer and its own channels' gates, and scales. Backward the first sums dy·x, the
second makes dx. Both cut an image into the same parts, a block for each (`plan`). The second kernel
goes through them in reverse, so that it begins with what the first read last: that may still be in
the L2 cache.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite import pixels, planes
from course_lib.kernels.squeeze_excite.dense import (
    BLOCK_SIZE,
    CHUNK,
    MOST_CHANNELS,
    QUAD,
    TOTALS,
    by_columns,
    by_rows,
    slot_size,
    sum_slots,
)
from course_lib.kernels.squeeze_excite.formulas import (
    ZERO,
    activate,
    activation_gradient,
    gate_gradient,
    gate_of,
)
from course_lib.kernels.squeeze_excite.pixels import SCRATCH
from course_lib.kernels.squeeze_excite.repeat import workspace
from course_lib.kernels.squeeze_excite.two_pass_plan import plan_pixels, plan_planes
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime import arrays
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    wait_for_previous_kernel,
)
from course_lib.runtime.launch import launch


@cuda.jit(device=True)
def place_of_block(block, C, n_slots, group, n_parts):
    """(sample, slot, part, first channel, number of channels) of block `block`."""
    n, slot = block // n_slots, block % n_slots
    c = slot // n_parts * group
    return n, slot, slot % n_parts, c, min(group, C - c)


@cuda.jit(device=True)
def write_means(values, sums, slots, weight1, scale, R, C, n, part, n_parts, c, n_mine):
    """The block's share of the means, from the sums in `values`, and of the hidden layer."""
    tid = cuda.threadIdx.x
    start = np.int64(cuda.blockIdx.x) * slot_size(R)
    if tid < n_mine:
        values[tid] *= scale
        sums[(n * n_parts + part) * C + c + tid] = values[tid]
    cuda.syncthreads()
    by_rows(slots, start, weight1, C, 0, R, c, n_mine, values, False)


@cuda.jit(device=True)
def write_dlogits(values, sums, slots, weight2, logit, R, C, n, part, n_parts, c, n_mine, gate,
                  scratch):  # fmt: skip
    """The block's share of dlogit, from the sums of dy·x in `values`, and of the hidden layer's."""
    tid = cuda.threadIdx.x
    start = np.int64(cuda.blockIdx.x) * slot_size(R)
    if tid < n_mine:
        values[tid] = gate_gradient(values[tid], logit[n * C + c + tid], gate)
        sums[(n * n_parts + part) * C + c + tid] = values[tid]
    cuda.syncthreads()
    by_columns(slots, start, weight2, R, c, n_mine, 0, R, values, scratch, False)


@cuda.jit(device=True)
def finish_sums(sums, total, C, n, part, n_parts, c, n_mine):
    """total[n, c] from the sums of the parts, where there are several; by the first one's block."""
    tid = cuda.threadIdx.x
    if n_parts > 1 and part == 0 and tid < n_mine:
        value = ZERO
        for other in range(n_parts):
            value += sums[(n * n_parts + other) * C + c + tid]
        total[n * C + c + tid] = value


@cuda.jit(device=True)
def find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate):  # fmt: skip
    """factors[i] = the gate of channel c + i; notes hidden and logit. For totals: `sum_slots`."""
    tid = cuda.threadIdx.x
    if tid < n_mine:
        factors[tid] = load(bias2, c + tid)
    first = 0
    while first < R:
        count = min(CHUNK, R - first)
        sum_slots(totals, slots, n, n_slots, R, first, count)
        i = tid
        while i < count:
            h = totals[i] + load(bias1, first + i)
            if slot == 0:
                hidden[n * R + first + i] = h
            totals[i] = activate(h, activation)
            i += BLOCK_SIZE
        cuda.syncthreads()
        by_rows(factors, 0, weight2, R, c, n_mine, first, count, totals, True)
        first += CHUNK
    cuda.syncthreads()
    if tid < n_mine:
        if part == 0:
            logit[n * C + c + tid] = factors[tid]
        factors[tid] = gate_of(factors[tid], gate)
    cuda.syncthreads()


@cuda.jit(device=True)
def find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate):  # fmt: skip
    """dx = dy · factors + shifts, for channels c + i; notes dhidden."""
    tid = cuda.threadIdx.x
    if tid < n_mine:
        shifts[tid] = ZERO
    first = 0
    while first < R:
        count = min(CHUNK, R - first)
        sum_slots(totals, slots, n, n_slots, R, first, count)
        i = tid
        while i < count:
            d = activation_gradient(totals[i], hidden[n * R + first + i], activation)
            if slot == 0:
                dhidden[n * R + first + i] = d
            totals[i] = d
            i += BLOCK_SIZE
        cuda.syncthreads()
        by_columns(shifts, 0, weight1, C, first, count, c, n_mine, totals, scratch, True)
        first += CHUNK
    if tid < n_mine:
        shifts[tid] *= scale
        factors[tid] = gate_of(logit[n * C + c + tid], gate)
    cuda.syncthreads()


@cuda.jit
def pool_planes_kernel(x, weight1, sums, slots, n_pixels, C, R, scale, n_slots, group, n_parts,
                       length, team, multiplier, offset, vectors):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(32, np.float32)
    n, _, part, c, n_mine = place_of_block(cuda.blockIdx.x, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    planes.sum_planes(
        values, x, x, n * C + c, n_mine, n_pixels, low, high, offset, True, team, scratch
    )
    write_means(values, sums, slots, weight1, scale, R, C, n, part, n_parts, c, n_mine)


@cuda.jit
def pool_pixels_kernel(x, weight1, sums, slots, n_pixels, C, R, scale, n_slots, group, n_parts,
                       length, n_columns, multiplier, offset, vectors):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    n, _, part, c, n_mine = place_of_block(cuda.blockIdx.x, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.sum_pixels(values, x, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
    write_means(values, sums, slots, weight1, scale, R, C, n, part, n_parts, c, n_mine)


@cuda.jit
def scale_planes_kernel(
    x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit, n_pixels, C, R, activation,
    gate, n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32)
    block = cuda.gridDim.x - 1 - cuda.blockIdx.x
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, mean, C, n, part, n_parts, c, n_mine)
    find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate)  # fmt: skip
    start = (n * C + c) * n_pixels
    # Several parts are of one plane.
    stop = start + min((part + 1) * length, n_pixels) + (n_mine - 1) * n_pixels
    planes.scale_planes(
        x, y, start + part * length, stop, offset, vectors, factors, factors, n_pixels, multiplier
    )


@cuda.jit
def scale_pixels_kernel(
    x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit, n_pixels, C, R, activation,
    gate, n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32)
    block = cuda.gridDim.x - 1 - cuda.blockIdx.x
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, mean, C, n, part, n_parts, c, n_mine)
    find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate)  # fmt: skip
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.scale_pixels(
        x, y, start, low, high, C, n_mine, n_columns, vectors, factors, factors
    )  # fmt: skip


@cuda.jit
def dlogit_planes_kernel(dy, x, weight2, logit, sums, slots, n_pixels, C, R, gate, n_slots, group,
                         n_parts, length, team, multiplier, offset, vectors):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    n, _, part, c, n_mine = place_of_block(cuda.blockIdx.x, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    planes.dot_planes(
        values, dy, x, n * C + c, n_mine, n_pixels, low, high, offset, vectors, team, scratch
    )
    write_dlogits(values, sums, slots, weight2, logit, R, C, n, part, n_parts, c, n_mine, gate,
                  scratch)  # fmt: skip


@cuda.jit
def dlogit_pixels_kernel(dy, x, weight2, logit, sums, slots, n_pixels, C, R, gate, n_slots, group,
                         n_parts, length, n_columns, multiplier, offset, vectors):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    n, _, part, c, n_mine = place_of_block(cuda.blockIdx.x, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.dot_pixels(values, dy, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
    write_dlogits(values, sums, slots, weight2, logit, R, C, n, part, n_parts, c, n_mine, gate,
                  scratch)  # fmt: skip


@cuda.jit
def dx_planes_kernel(
    dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden, n_pixels, C, R, scale, activation,
    gate, n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    block = cuda.gridDim.x - 1 - cuda.blockIdx.x
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, dlogit, C, n, part, n_parts, c, n_mine)
    find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate)  # fmt: skip
    start = (n * C + c) * n_pixels
    # Several parts are of one plane.
    stop = start + min((part + 1) * length, n_pixels) + (n_mine - 1) * n_pixels
    planes.scale_and_shift_planes(
        dy, dx, start + part * length, stop, offset, vectors, factors, shifts, n_pixels, multiplier
    )


@cuda.jit
def dx_pixels_kernel(
    dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden, n_pixels, C, R, scale, activation,
    gate, n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    block = cuda.gridDim.x - 1 - cuda.blockIdx.x
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, dlogit, C, n, part, n_parts, c, n_mine)
    find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate)  # fmt: skip
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.scale_and_shift_pixels(
        dy, dx, start, low, high, C, n_mine, n_columns, vectors, factors, shifts
    )


FORWARD = (pool_planes_kernel, scale_planes_kernel, pool_pixels_kernel, scale_pixels_kernel)
BACKWARD = (dlogit_planes_kernel, dx_planes_kernel, dlogit_pixels_kernel, dx_pixels_kernel)


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit."""
    pool_kernel, scale_kernel = FORWARD[2:] if problem.channels_last else FORWARD[:2]
    plan = plan_of(problem)
    slots, sums = _workspace(problem, plan, mean)
    sizes, cut = (problem.n_pixels, problem.C, problem.R), (*plan, *_boundaries(problem, x, y))
    launch(
        pool_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        x, weight1, sums, slots, *sizes, _scale(problem), *cut, flat=True, overlap=True,
    )  # fmt: skip
    launch(
        scale_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit,
        *sizes, problem.activation, problem.gate, *cut, flat=True, overlap=True,
    )  # fmt: skip


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2."""
    dlogit_kernel, dx_kernel = BACKWARD[2:] if problem.channels_last else BACKWARD[:2]
    plan = plan_of(problem)
    dlogit = workspace((problem.N, problem.C), mean)
    dhidden = workspace((problem.N, problem.R), mean)
    slots, sums = _workspace(problem, plan, dlogit)
    sizes, cut = (problem.n_pixels, problem.C, problem.R), (*plan, *_boundaries(problem, x, dy, dx))
    launch(
        dlogit_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        dy, x, weight2, logit, sums, slots, *sizes, problem.gate, *cut, flat=True, overlap=True,
    )  # fmt: skip
    launch(
        dx_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden,
        *sizes, _scale(problem), problem.activation, problem.gate, *cut, flat=True, overlap=True,
    )  # fmt: skip
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)


def plan_of(problem):
    """The `Plan` of images with a pixel at least."""
    planned = plan_pixels if problem.channels_last else plan_planes
    return planned(problem.N, problem.C, problem.n_pixels, problem.itemsize)


def _scale(problem):
    return np.float32(1 / problem.n_pixels)


def _workspace(problem, plan, total):
    """(slots, sums): sums of each part of the planes, or `total` itself where there is one part."""
    shape = (problem.N, plan.n_slots, -(-problem.R // QUAD) * QUAD)
    slots = workspace(shape, total)
    if plan.n_parts == 1:
        return slots, total
    return slots, workspace((problem.N, plan.n_parts, problem.C), total)


def _boundaries(problem, *images):
    """(elements from the last 16-byte boundary to the images' first, whether vectors can be used).

    Vectors need images that agree in that, and planes or pixels as `planes` or `pixels` says.
    """
    offsets = [arrays.address_of(x) % VECTOR_BYTES // problem.itemsize for x in images]
    if problem.channels_last:
        return 0, not any(offsets) and problem.C * problem.itemsize % VECTOR_BYTES == 0
    whole = problem.n_pixels * problem.itemsize >= VECTOR_BYTES
    return offsets[0], whole and len(set(offsets)) == 1


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    sizes, cut = ["int64"] * 3, [*["int64"] * 7, "boolean"]
    first = [image, weight, sums, sums, *sizes, "float32", *cut]
    second = [image, sums, sums, weight, weight, weight, image, sums, sums, sums]
    second += [*sizes, "int64", "int64", *cut]
    first_back = [image, image, weight, sums, sums, sums, *sizes, "int64", *cut]
    second_back = [image, sums, sums, weight, sums, sums, image, sums, sums]
    second_back += [*sizes, "float32", "int64", "int64", *cut]
    rows = zip(FORWARD, (first, second) * 2, strict=True)
    back = zip(BACKWARD, (first_back, second_back) * 2, strict=True)
    for direction, found in (("forward", rows), ("backward", back)):
        for kernel, types in found:
            name = kernel.py_func.__name__.removesuffix("_kernel")
            label = f"squeeze_excite.{direction} two_pass, {name}, {dtype}"
            yield f"{label} with {weight_dtype} weights", kernel, types
