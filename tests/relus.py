"""A right ReLU and a wrong one, for tests of what a check does with them."""

import numpy as np

from course_lib import cuda


@cuda.jit
def good_relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], np.float32(0))


@cuda.jit
def bad_relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i]
