"""What launchers hand to the kernels of `two_pass` and `fused` beside the images and weights."""

import numpy as np

from course_lib.kernels.squeeze_excite.dense import QUAD
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES


def scale_of(problem):
    return np.float32(1 / problem.n_pixels)


def workspace(shape, like):
    """A float32 array for what one launch leaves to the next; library and device of `like`."""
    return arrays.empty(shape, like=like, dtype="float32")


def workspaces(problem, plan, total):
    """(slots, sums): sums of each part of the planes, or `total` itself where there is one part."""
    shape = (problem.N, plan.n_slots, -(-problem.R // QUAD) * QUAD)
    slots = workspace(shape, total)
    if plan.n_parts == 1:
        return slots, total
    return slots, workspace((problem.N, plan.n_parts, problem.C), total)


def boundaries(problem, *images):
    """(elements from the last 16-byte boundary to the images' first, whether vectors can be used).

    Vectors need images that agree in that, and planes or pixels as `planes` or `pixels` says.
    """
    offsets = [arrays.address_of(x) % VECTOR_BYTES // problem.itemsize for x in images]
    if problem.channels_last:
        return 0, not any(offsets) and problem.C * problem.itemsize % VECTOR_BYTES == 0
    whole = problem.n_pixels * problem.itemsize >= VECTOR_BYTES
    return offsets[0], whole and len(set(offsets)) == 1
