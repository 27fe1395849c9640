"""The rung `fused`: one kernel that reads each image once, for chips with clusters (sm_90).

A cluster of blocks works on one sample, and its blocks hold their parts of it in shared memory from
the pooling to the scaling. In between they exchange one short vector by reading each other's
shared memory (`fused_dense`). While some clusters wait for memory or for each other, others on the
same multiprocessors go on: the chip walks the samples by itself.

What does not fit in shared memory is read again when it is scaled: a few clusters are at work at a
time, so that the L2 cache still has it.
"""

import numpy as np

from course_lib.kernels.squeeze_excite.fused_pixels import (
    fused_pixels_backward_kernel,
    fused_pixels_kernel,
)
from course_lib.kernels.squeeze_excite.fused_plan import Room, plan_of
from course_lib.kernels.squeeze_excite.fused_planes import (
    fused_planes_backward_kernel,
    fused_planes_kernel,
)
from course_lib.kernels.squeeze_excite.repeat import workspace
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime import arrays, device
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.launch import (
    SIMULATED_CHIP,
    LaunchError,
    launch,
    most_blocks_in_cluster,
    on_gpu,
)

LEAST_CAPABILITY = (9, 0)
FORWARD = fused_planes_kernel, fused_pixels_kernel
BACKWARD = fused_planes_backward_kernel, fused_pixels_backward_kernel
#: The simulator stands for a small chip here: its time goes with the number of threads.
SIMULATED_ROOM = Room(4, 4, SIMULATED_CHIP[1], (64, 64))


def room_of(x):
    """The `Room` of the chip that `x` lies on; LaunchError where it has no clusters."""
    if not on_gpu():
        return SIMULATED_ROOM
    chip = device.properties(arrays.describe(x).device)
    if chip.compute_capability < LEAST_CAPABILITY:
        found = ".".join(map(str, chip.compute_capability))
        raise LaunchError(
            f"squeeze_excite: the variant 'fused' needs a GPU of compute capability 9.0 or more, "
            f"which has clusters of blocks; this one has {found}: take 'two_pass'"
        )
    return Room(
        chip.multiprocessors, most_blocks_in_cluster(chip.compute_capability),
        chip.shared_bytes_per_block_optin,
    )  # fmt: skip


def _planned(problem, weight1, n_arrays, room):
    plan = plan_of(problem, weight1.dtype.itemsize, n_arrays, room)
    if plan is None:
        raise LaunchError(
            f"squeeze_excite: the variant 'fused' keeps its small vectors in shared memory, and "
            f"those of C = {problem.C:,} and R = {problem.R:,} do not fit: take 'two_pass'"
        )
    return plan


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit."""
    plan = _planned(problem, weight1, 1, room_of(x))
    operands = x, weight1, bias1, weight2, bias2, y, mean, hidden, logit
    launch_forward(problem, plan, *operands)


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2."""
    plan = _planned(problem, weight1, 2, room_of(x))
    dlogit = workspace((problem.N, problem.C), mean)
    dhidden = workspace((problem.N, problem.R), mean)
    launch_backward(problem, plan, dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden)
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)


def launch_forward(problem, plan, x, weight1, bias1, weight2, bias2, y, *saved):
    """Launch the forward kernel as `plan` has it."""
    launch(
        FORWARD[problem.channels_last], problem.N * plan.cluster, plan.block_size,
        x, weight1, bias1, weight2, bias2, y, *saved, *_sizes(problem, plan), plan.held,
        *_rest(problem, plan, (weight1, weight2), (x, y)), **_options(plan),
    )  # fmt: skip


def launch_backward(problem, plan, dy, x, weight1, weight2, hidden, logit, dx, *found):
    """Launch the backward kernel as `plan` has it; `found` are dlogit and dhidden."""
    launch(
        BACKWARD[problem.channels_last], problem.N * plan.cluster, plan.block_size,
        dy, x, weight1, weight2, hidden, logit, dx, *found, *_sizes(problem, plan), plan.held,
        plan.other, *_rest(problem, plan, (weight1, weight2), (dy, x, dx)), **_options(plan),
    )  # fmt: skip


def _options(plan):
    return dict(flat=True, overlap=True, cluster=plan.cluster, shared_bytes=plan.shared_bytes)


def _sizes(problem, plan):
    sizes = problem.C, problem.n_pixels, problem.R, plan.n_most
    return sizes if problem.channels_last else (*sizes, plan.n_pieces, plan.lanes)


def _rest(problem, plan, weights, images):
    vectors = _aligned(images) and (
        not problem.channels_last or problem.C * problem.itemsize % VECTOR_BYTES == 0
    )
    factor = np.float32(1 / problem.n_pixels)
    places = plan.first, plan.second, _aligned(weights), plan.place, vectors
    return *places, factor, problem.activation, problem.gate


def _aligned(operands):
    return all(arrays.address_of(operand) % VECTOR_BYTES == 0 for operand in operands)


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    last = ["int64", "int64", "boolean", "int64", "boolean", "float32", "int64", "int64"]
    suffix = dtype if dtype == weight_dtype else f"{dtype} with {weight_dtype} weights"
    for number, (name, n_sizes) in enumerate((("planes", 6), ("pixels", 4))):
        sizes = ["int64"] * n_sizes
        label = f"squeeze_excite.forward fused, {name}, {suffix}"
        types = [image, *[weight] * 4, image, *[sums] * 3, *sizes, "int64", *last]
        yield label, FORWARD[number], types
        label = f"squeeze_excite.backward fused, {name}, {suffix}"
        types = [image, image, weight, weight, sums, sums, image, sums, sums]
        yield label, BACKWARD[number], [*types, *sizes, "int64", "int64", *last]
