"""Lesson 00: negative(x, y), as many threads as pixels."""

from bank import right
from bank.mistakes import mistakes
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


mistakes("negative",
    ("wrong_way_round", "two sides of a `-` the other way round", "np.float32(1) - x[row, col]",
     "x[row, col] - np.float32(1)"),
    ("rows_for_columns", OUTSIDE, "col, row =", "row, col ="),
    ("written_transposed", OUTSIDE, "y[row, col]", "y[col, row]"),
    ("first_block_only", r"y\[.*never written", "cuda.grid(2)",
     "cuda.threadIdx.x, cuda.threadIdx.y"),
    ("in_place", "changes its input x", "y[row, col] =", "x[row, col] = y[row, col] ="),
    ("subtracts_from_y", "depends on what y held before", "np.float32(1)", "y[row, col]"),
    ("nothing_stored", r"y\[0, 0\] was never written", "y[row, col] =", "value ="),
    ("upside_down", "in place of `row`; line", "y[row,", "y[x.shape[0] - 1 - row,"),
    ("for_bytes", "wrong values in y", "float32(1)", "float32(255)"),
    ("blocks_of_four", OUTSIDE + "|never written", by_hand, "cuda.blockDim.x", "4",
     "cuda.blockDim.y", "4"))
