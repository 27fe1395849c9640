"""The rung `fused`: one kernel that reads each image once.

A sample is cut into parts, one for each block of a *team*, and each block holds its part in shared
memory from the pooling to the scaling. In between the team exchanges one short vector
(`fused_exchange`). Teams walk the samples: while a block waits for the others' numbers for one
sample, it pools the next, and copies of those after that are on their way.

Blocks that wait for each other must all be running, or the last ones would never get the place that
the first ones hold while they wait. A cooperative launch starts all blocks at once or none. Then no
block waits for ever: of the samples whose numbers are not all posted take the first of each team.
A block waits only once it has posted its numbers for that sample, or while it waits for copies;
and it comes to that sample, because all before it are complete.

A sample that all blocks together could not hold goes to the kernels of `two_pass`.
"""

import numpy as np

from course_lib.kernels.squeeze_excite import two_pass
from course_lib.kernels.squeeze_excite.fused_backward import backward_kernel
from course_lib.kernels.squeeze_excite.fused_exchange import HEADER
from course_lib.kernels.squeeze_excite.fused_forward import forward_kernel
from course_lib.kernels.squeeze_excite.fused_layouts import PIXELS, PLANES
from course_lib.kernels.squeeze_excite.fused_plan import BLOCK_SIZE, Room, plan_of
from course_lib.kernels.squeeze_excite.repeat import workspace
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime import arrays, device
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.launch import SIMULATED_CHIP, launch, on_gpu
from course_lib.runtime.mailboxes import mailbox

forward_kernels = {False: forward_kernel(PLANES), True: forward_kernel(PIXELS)}
backward_kernels = {False: backward_kernel(PLANES), True: backward_kernel(PIXELS)}
FORWARD, BACKWARD = tuple(forward_kernels.values()), tuple(backward_kernels.values())
#: The simulator stands for a small chip here: its time goes with the number of threads.
SIMULATED_ROOM = Room(4, SIMULATED_CHIP[1], 64)


def room_of(x):
    """The `Room` of the chip that `x` lies on: one block for each multiprocessor."""
    if not on_gpu():
        return SIMULATED_ROOM
    chip = device.properties(arrays.describe(x).device)
    return Room(chip.multiprocessors, chip.shared_bytes_per_block_optin, BLOCK_SIZE)


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit."""
    operands = x, weight1, bias1, weight2, bias2, y, mean, hidden, logit
    room = room_of(x)
    plan = plan_of(problem, 1, room)
    if plan is None:
        two_pass.forward(problem, *operands)
    else:
        launch_forward(problem, plan, room, *operands)


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2."""
    room = room_of(x)
    plan = plan_of(problem, 2, room)
    if plan is None:
        two_pass.backward(
            problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients
        )  # fmt: skip
        return
    dlogit = workspace((problem.N, problem.C), mean)
    dhidden = workspace((problem.N, problem.R), mean)
    operands = dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden
    launch_backward(problem, plan, room, *operands)
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)


def launch_forward(problem, plan, room, x, weight1, bias1, weight2, bias2, y, *saved):
    """Launch the forward kernel as `plan` has it."""
    operands = x, weight1, bias1, weight2, bias2, y, *saved
    box = mailbox(x, words_of(problem, plan))
    launch(
        forward_kernels[problem.channels_last], plan.n_parts * plan.n_teams, room.block_size,
        *operands, box, *_sizes(problem, plan), plan.n_stages, *_rest(problem, plan),
        vectors_fit(problem, x, y), np.float32(1 / problem.n_pixels), problem.activation,
        problem.gate, flat=True, cooperative=True, shared_bytes=plan.shared_bytes,
    )  # fmt: skip


def launch_backward(problem, plan, room, dy, x, weight1, weight2, hidden, logit, dx, *found):
    """Launch the backward kernel as `plan` has it; `found` are dlogit and dhidden."""
    operands = dy, x, weight1, weight2, hidden, logit, dx, *found
    box = mailbox(x, words_of(problem, plan))
    launch(
        backward_kernels[problem.channels_last], plan.n_parts * plan.n_teams, room.block_size,
        *operands, box, *_sizes(problem, plan), plan.n_stages, plan.n_others,
        *_rest(problem, plan), vectors_fit(problem, dy, x, dx),
        np.float32(1 / problem.n_pixels), problem.activation, problem.gate,
        flat=True, cooperative=True, shared_bytes=plan.shared_bytes,
    )  # fmt: skip


def words_of(problem, plan):
    """Words that the mailbox must have."""
    return HEADER + problem.N * plan.n_parts * plan.n_words


def vectors_fit(problem, *images):
    """Whether every sample's memory, or every pixel's, begins on a 16-byte boundary."""
    step = problem.C if problem.channels_last else problem.C * problem.n_pixels
    aligned = all(arrays.address_of(image) % VECTOR_BYTES == 0 for image in images)
    return aligned and step * problem.itemsize % VECTOR_BYTES == 0


def _sizes(problem, plan):
    cut = plan.n_parts, plan.n_groups, plan.group, plan.n_words
    return problem.N, problem.C, problem.n_pixels, problem.R, *cut


def _rest(problem, plan):
    lanes = plan.n_channels, plan.lanes, plan.word_lanes
    return plan.lag, plan.stage, *lanes, plan.tables_bytes


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums, box = (dtype, 1), (weight_dtype, 1), ("float32", 1), ("int64", 1)
    suffix = dtype if dtype == weight_dtype else f"{dtype} with {weight_dtype} weights"
    last = ["boolean", "float32", "int64", "int64"]
    for channels_last, name in ((False, "planes"), (True, "pixels")):
        types = [image, *[weight] * 4, image, *[sums] * 3, box, *["int64"] * 15, *last]
        label = f"squeeze_excite.forward fused, {name}, {suffix}"
        yield label, forward_kernels[channels_last], types
        types = [image, image, weight, weight, sums, sums, image, sums, sums, box]
        types += [*["int64"] * 16, *last]
        label = f"squeeze_excite.backward fused, {name}, {suffix}"
        yield label, backward_kernels[channels_last], types
