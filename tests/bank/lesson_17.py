"""Lesson 17: brightness of any layout, two pathways weighed, and what streams and memory cost.

Most wrong kernels are the solution with one mistake in it, and `mistake` says which text stands in
place of which. The right ones are written out.
"""

import math

import numpy as np

from bank import right, wrong
from bank.equivalent import EQUIVALENT
from bank.mistakes import mistakes
from course_lib import cuda

OUTSIDE, VALUES, NEVER = "out-of-bounds|negative", "wrong values", "never written"
ZERO, ONE = np.float32(0), np.float32(1)

# ---- brightness(x, step_n, step_c, step_p, weight, y) ----------------------------------------


@right("brightness")
@cuda.jit
def brightness_written_out(x, step_n, step_c, step_p, weight, y):
    i = cuda.grid(1)
    while i < y.shape[0] * y.shape[1]:
        n, p = divmod(i, y.shape[1])
        red = n * step_n + p * step_p
        green, blue = red + step_c, red + 2 * step_c
        y[n, p] = x[red] * weight[0] + (x[green] * weight[1] + x[blue] * weight[2])
        i += cuda.gridsize(1)


@right("brightness")
@cuda.jit
def brightness_from_blue(x, step_n, step_c, step_p, weight, y):
    # A thread goes through the pixels of all images by adding steps, from blue to red.
    for p in range(cuda.grid(1), y.shape[1], cuda.gridsize(1)):
        for n in range(y.shape[0]):
            at, total = n * step_n + p * step_p + 2 * step_c, ZERO
            for c in range(2, -1, -1):
                total = total + x[at] * weight[c]
                at -= step_c
            y[n, p] = total


TERM, FIRST = "weight[c] * x[first + c * step_c]", "first = n * step_n + p * step_p"
LOOP = "range(cuda.grid(1), y.size, cuda.gridsize(1))"
mistakes("brightness",
    ("brightness_mean_of_three", VALUES, TERM, "x[first + c * step_c] / np.float32(3)"),
    ("brightness_of_the_standard", VALUES, TERM,
     "(np.float32(0.299), np.float32(0.587), np.float32(0.114))[c] * x[first + c * step_c]"),
    ("brightness_blue_for_red", VALUES, "weight[c]", "weight[2 - c]"),
    ("brightness_of_green_alone", VALUES, "range(3)", "range(1, 2)"),
    ("brightness_without_blue", VALUES, "range(3)", "range(2)"),
    ("brightness_a_fourth_colour", VALUES + "|" + OUTSIDE, "range(3)", "range(4)"),
    ("brightness_channels_first", VALUES + "|" + OUTSIDE, TERM, "weight[c] * x[first + c * P]"),
    ("brightness_channels_last", VALUES + "|" + OUTSIDE, TERM, "weight[c] * x[first + c]"),
    ("brightness_pixels_are_neighbours", VALUES, FIRST, "first = n * step_n + p"),
    ("brightness_images_are_packed", VALUES + "|" + OUTSIDE, FIRST,
     "first = n * 3 * P + p * step_p"),
    ("brightness_of_the_first_image", VALUES, FIRST, "first = p * step_p"),
    ("brightness_steps_changed_over", VALUES + "|" + OUTSIDE, FIRST,
     "first = n * step_p + p * step_n"),
    ("brightness_no_loop", NEVER, LOOP, "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("brightness_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("brightness_every_thread_all_images", "more than one thread|race", LOOP, "range(y.size)"),
    ("brightness_in_float64", "float64-promotion", "total = ZERO", "total = 0.0"))


# ---- integrate(scalars, colour, brightness, integrated, y) -----------------------------------


@right("integrate")
@cuda.jit
def integrate_by_three_threads(scalars, colour, brightness, integrated, y):
    # Three threads fetch a scalar each; every thread takes the softmax of what lies in shared.
    shared = cuda.shared.array(3, np.float32)
    for k in range(cuda.threadIdx.x, 3, cuda.blockDim.x):
        shared[k] = scalars[k]
    cuda.syncthreads()
    top, total = max(max(shared[0], shared[1]), shared[2]), ZERO
    for k in range(3):
        total += math.exp(shared[k] - top)
    i = cuda.grid(1)
    while i < y.size:
        found = math.exp(shared[0] - top) * colour[i]
        found += math.exp(shared[1] - top) * brightness[i]
        found += math.exp(shared[2] - top) * integrated[i]
        y[i] = found / total
        i += cuda.gridsize(1)


@right("integrate")
@cuda.jit
def integrate_by_the_last_thread(scalars, colour, brightness, integrated, y):
    # Seen from each scalar itself: 1 over the sum of exponentials of differences.
    weight = cuda.shared.array(4, np.float32)
    if cuda.threadIdx.x == cuda.blockDim.x - 1:
        for k in range(3):
            weight[k] = scalars[k]
        top = max(weight[0], max(weight[1], weight[2]))
        for k in range(3):
            weight[k] = math.exp(weight[k] - top)
        weight[3] = ONE / (weight[0] + weight[1] + weight[2])
    cuda.syncthreads()
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        found = weight[2] * weight[3] * integrated[i]
        found += weight[1] * weight[3] * brightness[i]
        y[i] = found + weight[0] * weight[3] * colour[i]


@wrong("integrate", "reads scalars")
@cuda.jit
def integrate_reads_for_every_number(scalars, colour, brightness, integrated, y):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        top = max(scalars[0], max(scalars[1], scalars[2]))
        a, b = math.exp(scalars[0] - top), math.exp(scalars[1] - top)
        c = math.exp(scalars[2] - top)
        y[i] = (a * colour[i] + b * brightness[i] + c * integrated[i]) / (a + b + c)


MAXIMUM, QUOTIENTS = "top = max(a, max(b, c))", "a / total, b / total, c / total"
mistakes("integrate",
    ("integrate_without_the_maximum", VALUES, MAXIMUM, "top = ZERO"),
    ("integrate_maximum_of_two", VALUES, MAXIMUM, "top = max(a, b)"),
    ("integrate_smallest", VALUES, MAXIMUM, "top = min(a, min(b, c))"),
    ("integrate_no_softmax", VALUES, QUOTIENTS, "scalars[0], scalars[1], scalars[2]"),
    ("integrate_not_divided", VALUES, QUOTIENTS, "a, b, c"),
    ("integrate_mean", VALUES, QUOTIENTS, "total / total / np.float32(3), "
     "total / total / np.float32(3), total / total / np.float32(3)"),
    ("integrate_by_every_thread", "reads scalars|race", "    if cuda.threadIdx.x == 0:",
     "    if True:"),
    ("integrate_sum_of_two", VALUES, "total = a + b + c", "total = a + b"),
    ("integrate_pathways_changed_over", VALUES, "weight[0] * colour[i] + weight[1] * brightness",
     "weight[1] * colour[i] + weight[0] * brightness"),
    ("integrate_forgets_what_was_before", VALUES, " + weight[2] * integrated[i]", ""),
    ("integrate_no_barrier", "race|uninitialised", "    cuda.syncthreads()\n", ""),
    ("integrate_one_warp_waits", "race|uninitialised", "cuda.syncthreads()", "cuda.syncwarp()"),
    ("integrate_in_the_first_block_only", "uninitialised|" + VALUES, "cuda.threadIdx.x == 0",
     "cuda.grid(1) == 0"),
    ("integrate_no_loop", NEVER, LOOP, "range(cuda.grid(1), min(y.size, cuda.grid(1) + 1))"),
    ("integrate_one_too_many", OUTSIDE, "y.size", "y.size + 1"),
    ("integrate_in_float64", "float64-promotion", "y[i] = weight[0]", "y[i] = 1.0 * weight[0]"))


# ---- mutants that are right as well ----------------------------------------------------------

EQUIVALENT.update({
    ("integrate", "change constant: 3 → 4"): "shared memory that nobody uses does no harm",
})  # fmt: skip
