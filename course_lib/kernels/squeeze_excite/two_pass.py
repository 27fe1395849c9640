"""The rung `two_pass`: sums in a first kernel, all the rest in a second.

Both cut an image into the same parts, a block for each (`parts`, `plan`). The second kernel goes
through them in reverse, so that it begins with what the first read last: that may still be in the
L2 cache.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH
from course_lib.kernels.squeeze_excite import pixels, planes
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, MOST_CHANNELS, TOTALS
from course_lib.kernels.squeeze_excite.operands import (
    boundaries,
    scale_of,
    workspace,
    workspaces,
)
from course_lib.kernels.squeeze_excite.parts import (
    find_gates,
    find_shifts,
    finish_sums,
    logit_of,
    place_of_block,
    write_dlogits,
    write_means,
)
from course_lib.kernels.squeeze_excite.pixels import SCRATCH
from course_lib.kernels.squeeze_excite.plan import Cut, plan_of
from course_lib.kernels.squeeze_excite.planes import DOT_PARTIALS, PARTIALS
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel

#: Three blocks for each of the 132 multiprocessors of the largest chip of today, 4 vectors or more
#: for each of a block's threads.
CUT = Cut(enough_blocks=132 * 3, least_bytes=16 << 10, most_bytes=128 << 10, most_slots=132 * 2)
BLOCKS = 3  # on a multiprocessor, that sums have registers for


@cuda.jit(launch_bounds=(BLOCK_SIZE, BLOCKS))
def pool_planes_kernel(
    x, weight1, sums, slots, n_pixels, C, R, scale, aligned,
    n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.blockIdx.x)
    values = cuda.shared.array(MOST_CHANNELS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(PARTIALS, np.float32)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    planes.sum_planes(
        values, x, x, n * C + c, n_mine, n_pixels, low, high, offset, True, team, scratch
    )
    write_means(values, sums, slots, weight1, scale, R, C, block, n, part, n_parts, c, n_mine,
                aligned)  # fmt: skip


@cuda.jit
def scale_planes_kernel(
    x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit, n_pixels, C, R,
    activation, gate, aligned,
    n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.gridDim.x - 1 - cuda.blockIdx.x)
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, mean, C, n, part, n_parts, c, n_mine)
    find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate, aligned)  # fmt: skip
    start = (n * C + c) * n_pixels
    # Several parts are of one plane.
    stop = start + min((part + 1) * length, n_pixels) + (n_mine - 1) * n_pixels
    planes.scale_planes(
        x, y, start + part * length, stop, offset, vectors, factors, factors, n_pixels, multiplier
    )


@cuda.jit(launch_bounds=(BLOCK_SIZE, BLOCKS))
def dlogit_planes_kernel(
    dy, x, weight2, logit, sums, slots, n_pixels, C, R, gate, aligned,
    n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.blockIdx.x)
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(DOT_PARTIALS, np.float32)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    z = logit_of(logit, C, n, c, n_mine)
    planes.dot_planes(
        values, dy, x, n * C + c, n_mine, n_pixels, low, high, offset, vectors, team, scratch
    )
    write_dlogits(values, sums, slots, weight2, z, R, C, block, n, part, n_parts, c, n_mine,
                  gate, scratch, aligned)  # fmt: skip


@cuda.jit
def dx_planes_kernel(
    dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden, n_pixels, C, R, scale,
    activation, gate, aligned,
    n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.gridDim.x - 1 - cuda.blockIdx.x)
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, dlogit, C, n, part, n_parts, c, n_mine)
    find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate, aligned)  # fmt: skip
    start = (n * C + c) * n_pixels
    # Several parts are of one plane.
    stop = start + min((part + 1) * length, n_pixels) + (n_mine - 1) * n_pixels
    planes.scale_and_shift_planes(
        dy, dx, start + part * length, stop, offset, vectors, factors, shifts, n_pixels, multiplier
    )


@cuda.jit
def pool_pixels_kernel(
    x, weight1, sums, slots, n_pixels, C, R, scale, aligned,
    n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.blockIdx.x)
    values = cuda.shared.array(MOST_CHANNELS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.sum_pixels(values, x, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
    write_means(values, sums, slots, weight1, scale, R, C, block, n, part, n_parts, c, n_mine,
                aligned)  # fmt: skip


@cuda.jit
def scale_pixels_kernel(
    x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit, n_pixels, C, R,
    activation, gate, aligned,
    n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.gridDim.x - 1 - cuda.blockIdx.x)
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, mean, C, n, part, n_parts, c, n_mine)
    find_gates(factors, totals, slots, bias1, weight2, bias2, hidden, logit, R, C, n_slots,
               n, slot, part, c, n_mine, activation, gate, aligned)  # fmt: skip
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.scale_pixels(x, y, start, low, high, C, n_mine, n_columns, vectors, factors, factors)


@cuda.jit
def dlogit_pixels_kernel(
    dy, x, weight2, logit, sums, slots, n_pixels, C, R, gate, aligned,
    n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.blockIdx.x)
    values = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    z = logit_of(logit, C, n, c, n_mine)
    start = n * n_pixels * C + c
    pixels.dot_pixels(values, dy, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
    write_dlogits(values, sums, slots, weight2, z, R, C, block, n, part, n_parts, c, n_mine,
                  gate, scratch, aligned)  # fmt: skip


@cuda.jit
def dx_pixels_kernel(
    dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden, n_pixels, C, R, scale,
    activation, gate, aligned,
    n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    block = np.int64(cuda.gridDim.x - 1 - cuda.blockIdx.x)
    factors = cuda.shared.array(MOST_CHANNELS, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    totals = cuda.shared.array(TOTALS, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    n, slot, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    finish_sums(sums, dlogit, C, n, part, n_parts, c, n_mine)
    find_shifts(factors, shifts, totals, scratch, slots, weight1, hidden, logit, dhidden, R, C,
                n_slots, n, slot, c, n_mine, scale, activation, gate, aligned)  # fmt: skip
    low, high = part * length, min((part + 1) * length, n_pixels)
    start = n * n_pixels * C + c
    pixels.scale_and_shift_pixels(
        dy, dx, start, low, high, C, n_mine, n_columns, vectors, factors, shifts
    )


FORWARD_KERNELS = (pool_planes_kernel, scale_planes_kernel, pool_pixels_kernel, scale_pixels_kernel)
BACKWARD_KERNELS = (dlogit_planes_kernel, dx_planes_kernel, dlogit_pixels_kernel, dx_pixels_kernel)


def cut_of(problem):
    """The `Plan`: groups of many channels begin where 16 bytes of a row of weights may.

    Channels-last they are as many as a block's columns hold, and remain so.
    """
    plan = plan_of(problem, CUT)
    group = -(-plan.group // MAX_WIDTH) * MAX_WIDTH
    if problem.channels_last or plan.n_parts > 1 or plan.group < MAX_WIDTH:
        return plan
    if group * problem.n_pixels**2 >= 2**32:
        return plan
    return plan._replace(group=group, n_slots=-(-problem.C // group))


def aligned(weight, length):
    """Whether all rows of `weight`, `length` long, begin on 16-byte boundaries."""
    row_bytes = length * weight.dtype.itemsize
    return (arrays.address_of(weight) | row_bytes) % VECTOR_BYTES == 0


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit."""
    pool_kernel, scale_kernel = FORWARD_KERNELS[2 * problem.channels_last :][:2]
    plan = cut_of(problem)
    slots, sums = workspaces(problem, plan, mean)
    sizes, cut = (problem.n_pixels, problem.C, problem.R), (*plan, *boundaries(problem, x, y))
    launch(
        pool_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        x, weight1, sums, slots, *sizes, scale_of(problem), aligned(weight1, problem.C), *cut,
        flat=True, overlap=True,
    )  # fmt: skip
    launch(
        scale_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        x, slots, sums, bias1, weight2, bias2, y, mean, hidden, logit,
        *sizes, problem.activation, problem.gate, aligned(weight2, problem.R), *cut,
        flat=True, overlap=True,
    )  # fmt: skip


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2."""
    dlogit_kernel, dx_kernel = BACKWARD_KERNELS[2 * problem.channels_last :][:2]
    plan = cut_of(problem)
    dlogit = workspace((problem.N, problem.C), mean)
    dhidden = workspace((problem.N, problem.R), mean)
    slots, sums = workspaces(problem, plan, dlogit)
    sizes, cut = (problem.n_pixels, problem.C, problem.R), (*plan, *boundaries(problem, x, dy, dx))
    launch(
        dlogit_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        dy, x, weight2, logit, sums, slots, *sizes, problem.gate, aligned(weight2, problem.R), *cut,
        flat=True, overlap=True,
    )  # fmt: skip
    launch(
        dx_kernel, problem.N * plan.n_slots, BLOCK_SIZE,
        dy, slots, sums, weight1, hidden, logit, dx, dlogit, dhidden,
        *sizes, scale_of(problem), problem.activation, problem.gate, aligned(weight1, problem.C),
        *cut, flat=True, overlap=True,
    )  # fmt: skip
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    sizes, cut = ["int64"] * 3, ["boolean", *["int64"] * 7, "boolean"]
    first = [image, weight, sums, sums, *sizes, "float32", *cut]
    second = [image, sums, sums, weight, weight, weight, image, sums, sums, sums]
    second += [*sizes, "int64", "int64", *cut]
    first_back = [image, image, weight, sums, sums, sums, *sizes, "int64", *cut]
    second_back = [image, sums, sums, weight, sums, sums, image, sums, sums]
    second_back += [*sizes, "float32", "int64", "int64", *cut]
    rows = zip(FORWARD_KERNELS, (first, second) * 2, strict=True)
    back = zip(BACKWARD_KERNELS, (first_back, second_back) * 2, strict=True)
    for direction, found in (("forward", rows), ("backward", back)):
        for kernel, types in found:
            name = kernel.py_func.__name__.removesuffix("_kernel")
            label = f"squeeze_excite.{direction} two_pass, {name}, {dtype}"
            yield f"{label} with {weight_dtype} weights", kernel, types
