"""Three kernels that sum the rows of a matrix and give the same result. One of them is slow.

They are for the exercise `find_the_slow_one` of lesson 2: find out which, and why, from what each
does to memory, before you read on. A warp sums a row; the number of columns must be a multiple
of 32. `course_lib/benchmarks/lesson_02.py` measures copies of them.
"""

import numpy as np

from course_lib import cuda

FULL_MASK = 0xFFFFFFFF


@cuda.jit
def first(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        rounds = x.shape[1] // 32
        total = np.float32(0)
        for k in range(rounds):
            total += x[row, 32 * k + 31 - lane]
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(FULL_MASK, total, step)
        if lane == 0:
            y[row] = total


@cuda.jit
def second(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        rounds = x.shape[1] // 32
        total = np.float32(0)
        for k in range(rounds):
            total += x[row, rounds * lane + k]
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(FULL_MASK, total, step)
        if lane == 0:
            y[row] = total


@cuda.jit
def third(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        rounds = x.shape[1] // 32
        total = np.float32(0)
        for k in range(rounds):
            total += x[row, 32 * k + (5 * lane + k) % 32]
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(FULL_MASK, total, step)
        if lane == 0:
            y[row] = total
