"""Lesson 00: negative(x, y), as many threads as pixels."""

from bank import right, wrong
from course_lib import cuda

OUTSIDE = "out-of-bounds"


@right("negative")
@cuda.jit
def guarded(x, y):
    col, row = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        y[row, col] = 1 - x[row, col]


@right("negative")
@cuda.jit
def by_hand(x, y):
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    y[row, col] = -x[row, col] + 1


@wrong("negative", "the right size and the wrong sign")
@cuda.jit
def wrong_way_round(x, y):
    col, row = cuda.grid(2)
    y[row, col] = x[row, col] - 1


@wrong("negative", OUTSIDE)
@cuda.jit
def rows_for_columns(x, y):
    row, col = cuda.grid(2)
    y[row, col] = 1 - x[row, col]


@wrong("negative", OUTSIDE)
@cuda.jit
def written_transposed(x, y):
    col, row = cuda.grid(2)
    y[col, row] = 1 - x[row, col]


@wrong("negative", r"y\[.*never written")
@cuda.jit
def first_block_only(x, y):
    col, row = cuda.threadIdx.x, cuda.threadIdx.y
    y[row, col] = 1 - x[row, col]


@wrong("negative", "changes its input x")
@cuda.jit
def in_place(x, y):
    col, row = cuda.grid(2)
    x[row, col] = 1 - x[row, col]
    y[row, col] = x[row, col]


@wrong("negative", "depends on what y held before")
@cuda.jit
def subtracts_from_y(x, y):
    col, row = cuda.grid(2)
    y[row, col] = y[row, col] - x[row, col]


@wrong("negative", r"y\[0, 0\] was never written")
@cuda.jit
def nothing_stored(x, y):
    col, row = cuda.grid(2)
    value = 1 - x[row, col]
    value += 0


@wrong("negative", "the right values at the wrong places")
@cuda.jit
def upside_down(x, y):
    col, row = cuda.grid(2)
    y[x.shape[0] - 1 - row, col] = 1 - x[row, col]


@wrong("negative", "wrong values in y")
@cuda.jit
def for_bytes(x, y):
    col, row = cuda.grid(2)
    y[row, col] = 255 - x[row, col]


@wrong("negative", OUTSIDE + "|never written")
@cuda.jit
def blocks_of_four(x, y):
    col = cuda.blockIdx.x * 4 + cuda.threadIdx.x
    row = cuda.blockIdx.y * 4 + cuda.threadIdx.y
    y[row, col] = 1 - x[row, col]
