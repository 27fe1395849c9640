"""The rung `fused`: one kernel that walks the samples, so that x comes from L2 the second time.

Each block takes one task from a queue (`blocks.work_queue`): it sums a part of a sample, or scales
one (`plan`). The order runs through all parts twice, as `two_pass` does, but the second time
follows a few samples behind the first (`lead` parts). The block that sums the last part of a sample
does its small layers (`excite`), and those that scale the sample wait for that.

What is read for the last time, and y, leave the cache first (`intrinsics.streaming`).
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ONE
from course_lib.kernels.blocks.work_queue import (
    READY,
    draw,
    is_last,
    leave,
    task_of,
    tell_ready,
    wait_until_ready,
)
from course_lib.kernels.squeeze_excite import planes
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, CHUNK, MOST_CHANNELS
from course_lib.kernels.squeeze_excite.excite import find_dmeans, find_logits
from course_lib.kernels.squeeze_excite.formulas import gate_of
from course_lib.kernels.squeeze_excite.operands import boundaries, scale_of, workspace
from course_lib.kernels.squeeze_excite.parts import place_of_block
from course_lib.kernels.squeeze_excite.plan import Cut, plan_of
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime.host.counters import counters
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel

#: Small parts: what lies between summing a part and scaling it must fit in the cache.
CUT = Cut(enough_blocks=132 * 4, least_bytes=8 << 10, most_bytes=32 << 10, most_slots=132 * 4)
#: Parts that are summed ahead, beside those of one sample: fewer, and blocks wait for each other.
LEAD, BACKWARD_LEAD = 300, 700
MOST_REGISTERS = 64  # of the kernels for planes: four blocks on a multiprocessor


@cuda.jit(device=True)
def note_sums(sums, values, scale, C, n, part, n_parts, c, n_mine):
    tid = cuda.threadIdx.x
    if tid < n_mine:
        sums[(n * n_parts + part) * C + c + tid] = values[tid] * scale


@cuda.jit(device=True)
def take_gates(factors, logit, C, n, c, n_mine, gate):
    tid = cuda.threadIdx.x
    if tid < n_mine:
        factors[tid] = gate_of(logit[n * C + c + tid], gate)
    cuda.syncthreads()


@cuda.jit(device=True)
def take_shifts(factors, shifts, logit, dmean, scale, C, n, c, n_mine, gate):
    tid = cuda.threadIdx.x
    if tid < n_mine:
        shifts[tid] = dmean[n * C + c + tid] * scale
    take_gates(factors, logit, C, n, c, n_mine, gate)


@cuda.jit(device=True)
def run_of(plane, n_mine, n_pixels, low, high):
    """(first element, last) of pixels `low` to `high` of one plane, or of several whole planes."""
    start = plane * n_pixels
    return start + low, start + high + (n_mine - 1) * n_pixels


@cuda.jit(max_registers=MOST_REGISTERS)
def fused_planes_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, sums, counters, lead,
    n_pixels, C, R, scale, activation, gate,
    n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    drawn = cuda.shared.array(1, np.int32)
    values = cuda.shared.array(CHUNK, np.float32)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    summing, block = task_of(draw(drawn, counters), np.int64(cuda.gridDim.x), lead)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    if summing:
        planes.sum_long_planes(
            values, x, x, n * C + c, n_mine, n_pixels, low, high, offset, True, team, scratch
        )
        note_sums(sums, values, scale, C, n, part, n_parts, c, n_mine)
        if is_last(counters, n, n_slots, drawn):
            find_logits(values, sums, weight1, bias1, weight2, bias2, mean, hidden, logit, R, C,
                        n, n_parts, activation)  # fmt: skip
            tell_ready(counters, n)
    else:
        counted = wait_until_ready(counters, n, n_slots)
        factors = values
        take_gates(factors, logit, C, n, c, n_mine, gate)
        start, stop = run_of(n * C + c, n_mine, n_pixels, low, high)
        planes.scale_long_planes(
            x, y, start, stop, offset, vectors, factors, factors, n_pixels, multiplier
        )
        leave(counters, n, n_slots, counted)


@cuda.jit(max_registers=MOST_REGISTERS)
def fused_planes_backward_kernel(
    dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden, dmean, sums, counters, lead,
    n_pixels, C, R, scale, activation, gate,
    n_slots, group, n_parts, length, team, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    drawn = cuda.shared.array(1, np.int32)
    values = cuda.shared.array(CHUNK, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    summing, block = task_of(draw(drawn, counters), np.int64(cuda.gridDim.x), lead)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    if summing:
        planes.dot_long_planes(
            values, dy, x, n * C + c, n_mine, n_pixels, low, high, offset, vectors, team, scratch
        )
        note_sums(sums, values, ONE, C, n, part, n_parts, c, n_mine)
        if is_last(counters, n, n_slots, drawn):
            find_dmeans(values, scratch, sums, weight1, weight2, hidden, logit, dlogit, dhidden,
                        dmean, R, C, n, n_parts, activation, gate)  # fmt: skip
            tell_ready(counters, n)
    else:
        counted = wait_until_ready(counters, n, n_slots)
        factors = values
        take_shifts(factors, shifts, logit, dmean, scale, C, n, c, n_mine, gate)
        start, stop = run_of(n * C + c, n_mine, n_pixels, low, high)
        planes.scale_and_shift_long_planes(
            dy, dx, start, stop, offset, vectors, factors, shifts, n_pixels, multiplier
        )
        leave(counters, n, n_slots, counted)


FORWARD_KERNELS, BACKWARD_KERNELS = (fused_planes_kernel,), (fused_planes_backward_kernel,)


def contiguous(problem):
    """The problem, of images that lie plane by plane, as those of one channel or pixel do in either
    format; ValueError for others."""
    if problem.channels_last and problem.C > 1 and problem.n_pixels > 1:
        raise ValueError("variant 'fused' takes contiguous images: use 'two_pass'")
    return problem._replace(channels_last=False)


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit."""
    problem = contiguous(problem)
    plan = plan_of(problem, CUT)
    sums = workspace((problem.N, plan.n_parts, problem.C), mean)
    operands = x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, sums
    _launch(fused_planes_kernel, problem, plan, LEAD, (x, y), *operands)


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2."""
    problem = contiguous(problem)
    plan = plan_of(problem, CUT)
    dlogit = workspace((problem.N, problem.C), mean)
    dhidden = workspace((problem.N, problem.R), mean)
    dmean = workspace((problem.N, problem.C), mean)
    sums = workspace((problem.N, plan.n_parts, problem.C), mean)
    operands = dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden, dmean, sums
    _launch(fused_planes_backward_kernel, problem, plan, BACKWARD_LEAD, (dy, x, dx), *operands)
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)


def _launch(kernel, problem, plan, lead, images, *operands):
    n_parts = problem.N * plan.n_slots
    zeros = counters(READY + problem.N, operands[-1])
    launch(
        kernel, 2 * n_parts, BLOCK_SIZE,
        *operands, zeros, min(n_parts, plan.n_slots + lead),
        problem.n_pixels, problem.C, problem.R, scale_of(problem), problem.activation, problem.gate,
        *plan, *boundaries(problem, *images), flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    rest, cut = [sums, ("int32", 1), *["int64"] * 4, "float32", "int64", "int64"], ["int64"] * 7
    first = [image, *[weight] * 4, image, *[sums] * 3, *rest, *cut, "boolean"]
    second = [image, image, weight, weight, sums, sums, image, *[sums] * 3, *rest, *cut, "boolean"]
    suffix = f"{dtype} with {weight_dtype} weights"
    yield f"squeeze_excite.forward fused, planes, {suffix}", fused_planes_kernel, first
    yield f"squeeze_excite.backward fused, planes, {suffix}", fused_planes_backward_kernel, second
