"""The rung `fused`: one kernel that walks the samples, so that x comes from L2 the second time.

Each block does one task: it sums a part of a sample, or scales one (`plan`). Blocks take their
tasks in the order in which they start, by a *ticket*: a number in memory, to which each adds one.
The order runs through all parts twice, as `two_pass` does, but the second time follows a few
samples behind the first (`lead` parts), before the L2 cache has forgotten them:

    ticket      0 ... lead - 1       lead      lead + 1   lead + 2       lead + 3   ...
    task        sum 0 ... lead - 1   sum lead  scale 0    sum lead + 1   scale 1    ...

The block that sums the last part of a sample does its small layers (`excite`), and those that scale
the sample wait for that. All that they wait for has smaller tickets: other blocks have started on
it, and never wait themselves. So no promise is needed of how many blocks run at once. And it does
not matter who does a task, or when: two runs agree bit for bit.

What is read for the last time, and y, leave the cache first (`intrinsics.streaming`).
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite import pixels, planes
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, CHUNK, MOST_CHANNELS
from course_lib.kernels.squeeze_excite.excite import find_dmeans, find_logits
from course_lib.kernels.squeeze_excite.formulas import ONE, gate_of
from course_lib.kernels.squeeze_excite.operands import boundaries, scale_of, workspace
from course_lib.kernels.squeeze_excite.parts import place_of_block
from course_lib.kernels.squeeze_excite.pixels import SCRATCH
from course_lib.kernels.squeeze_excite.plan import Cut, plan_of
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime.host.counters import counters
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.signals import count, look

#: Small parts: what lies between summing a part and scaling it must fit in the cache.
CUT = Cut(enough_blocks=132 * 4, least_bytes=8 << 10, most_bytes=32 << 10, most_slots=132 * 4)
#: Parts that are summed ahead, beside those of one sample: fewer, and blocks wait for each other.
LEAD, BACKWARD_LEAD = 300, 700
MOST_REGISTERS = 64  # of the kernels for planes: four blocks on a multiprocessor
READY = 32  # where in the counters the samples' own begin: the ticket has 128 bytes to itself


@cuda.jit(device=True)
def draw(drawn, counters):
    """The block's ticket, by way of `drawn`, a shared int32."""
    if cuda.threadIdx.x == 0:
        drawn[0] = cuda.atomic.add(counters, 0, 1)
        if drawn[0] == cuda.gridDim.x - 1:  # the last
            cuda.atomic.exch(counters, 0, 0)  # as the next launch expects it
    cuda.syncthreads()
    return np.int64(drawn[0])


@cuda.jit(device=True)
def task_of(ticket, n_tasks, lead):
    """(whether to sum a part, or else to scale it; the part)."""
    n_parts, step = n_tasks >> 1, ticket - lead
    if step < 0:
        return True, ticket
    if step >= 2 * (n_parts - lead):  # nothing is left to sum
        return False, step - (n_parts - lead)
    return step & 1 == 0, (step >> 1) + (0 if step & 1 else lead)


@cuda.jit(device=True)
def is_last(counters, n, n_slots, drawn):
    """Count a part of sample `n` as summed. Whether it was the last: then all sums can be read."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        drawn[0] = count(counters, READY + n, 1)
    cuda.syncthreads()
    return drawn[0] == n_slots - 1


@cuda.jit(device=True)
def tell_ready(counters, n):
    """All that the blocks that scale sample `n` need has been written."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        count(counters, READY + n, 1)


@cuda.jit(device=True)
def wait_until_ready(counters, n, n_slots):
    """Wait for `tell_ready`. Returns what `leave` wants to know."""
    if cuda.threadIdx.x == 0:
        while look(counters, READY + n) <= n_slots:
            pass
    cuda.syncthreads()
    return cuda.atomic.add(counters, READY + n, 1) if cuda.threadIdx.x == 0 else 0


@cuda.jit(device=True)
def leave(counters, n, n_slots, counted):
    """The last block that waited for sample `n` sets its counter back to 0."""
    if cuda.threadIdx.x == 0 and counted == 2 * n_slots:
        cuda.atomic.exch(counters, READY + n, 0)


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
        )  # fmt: skip
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


@cuda.jit
def fused_pixels_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, sums, counters, lead,
    n_pixels, C, R, scale, activation, gate,
    n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    drawn = cuda.shared.array(1, np.int32)
    values = cuda.shared.array(CHUNK, np.float32)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    summing, block = task_of(draw(drawn, counters), np.int64(cuda.gridDim.x), lead)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    if summing:
        start = n * n_pixels * C + c
        pixels.sum_pixels(values, x, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
        note_sums(sums, values, scale, C, n, part, n_parts, c, n_mine)
        if is_last(counters, n, n_slots, drawn):
            find_logits(values, sums, weight1, bias1, weight2, bias2, mean, hidden, logit, R, C,
                        n, n_parts, activation)  # fmt: skip
            tell_ready(counters, n)
    else:
        counted = wait_until_ready(counters, n, n_slots)
        factors = values
        take_gates(factors, logit, C, n, c, n_mine, gate)
        start = n * n_pixels * C + c
        pixels.scale_pixels(x, y, start, low, high, C, n_mine, n_columns, vectors, factors, factors)
        leave(counters, n, n_slots, counted)


@cuda.jit
def fused_pixels_backward_kernel(
    dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden, dmean, sums, counters, lead,
    n_pixels, C, R, scale, activation, gate,
    n_slots, group, n_parts, length, n_columns, multiplier, offset, vectors,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    drawn = cuda.shared.array(1, np.int32)
    values = cuda.shared.array(CHUNK, np.float32)
    shifts = cuda.shared.array(MOST_CHANNELS, np.float32)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    summing, block = task_of(draw(drawn, counters), np.int64(cuda.gridDim.x), lead)
    n, _, part, c, n_mine = place_of_block(block, C, n_slots, group, n_parts)
    low, high = part * length, min((part + 1) * length, n_pixels)
    if summing:
        start = n * n_pixels * C + c
        pixels.dot_pixels(values, dy, x, start, low, high, C, n_mine, n_columns, vectors, scratch)
        note_sums(sums, values, ONE, C, n, part, n_parts, c, n_mine)
        if is_last(counters, n, n_slots, drawn):
            find_dmeans(values, scratch, sums, weight1, weight2, hidden, logit, dlogit, dhidden,
                        dmean, R, C, n, n_parts, activation, gate)  # fmt: skip
            tell_ready(counters, n)
    else:
        counted = wait_until_ready(counters, n, n_slots)
        factors = values
        take_shifts(factors, shifts, logit, dmean, scale, C, n, c, n_mine, gate)
        start = n * n_pixels * C + c
        pixels.scale_and_shift_pixels(
            dy, dx, start, low, high, C, n_mine, n_columns, vectors, factors, shifts
        )
        leave(counters, n, n_slots, counted)


FORWARD_KERNELS = fused_planes_kernel, fused_pixels_kernel
BACKWARD_KERNELS = fused_planes_backward_kernel, fused_pixels_backward_kernel


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit."""
    plan = plan_of(problem, CUT)
    sums = workspace((problem.N, plan.n_parts, problem.C), mean)
    operands = x, weight1, bias1, weight2, bias2, y, mean, hidden, logit, sums
    _launch(FORWARD_KERNELS, problem, plan, LEAD, (x, y), *operands)


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2."""
    plan = plan_of(problem, CUT)
    dlogit = workspace((problem.N, problem.C), mean)
    dhidden = workspace((problem.N, problem.R), mean)
    dmean = workspace((problem.N, problem.C), mean)
    sums = workspace((problem.N, plan.n_parts, problem.C), mean)
    operands = dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden, dmean, sums
    _launch(BACKWARD_KERNELS, problem, plan, BACKWARD_LEAD, (dy, x, dx), *operands)
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)


def _launch(kernels, problem, plan, lead, images, *operands):
    n_parts = problem.N * plan.n_slots
    zeros = counters(READY + problem.N, operands[-1])
    launch(
        kernels[problem.channels_last], 2 * n_parts, BLOCK_SIZE,
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
    for number, name in enumerate(("planes", "pixels")):
        yield f"squeeze_excite.forward fused, {name}, {suffix}", FORWARD_KERNELS[number], first
        yield f"squeeze_excite.backward fused, {name}, {suffix}", BACKWARD_KERNELS[number], second
