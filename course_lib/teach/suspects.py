"""Three kernels that copy a matrix and give the same result. One of them is slow.

They are for the exercise `find_the_slow_one` of lesson 2: find out which, and why, from what each
does to memory, before you read on.
"""

from course_lib import cuda


@cuda.jit
def first(x, y):
    """Copy a matrix."""
    n_rows, n_cols = x.shape
    i = cuda.grid(1)
    if i < n_rows * n_cols:
        row, col = i // n_cols, n_cols - 1 - i % n_cols
        y[row, col] = x[row, col]


@cuda.jit
def second(x, y):
    """Copy a matrix."""
    n_rows, n_cols = x.shape
    i = cuda.grid(1)
    if i < n_rows * n_cols:
        row, col = i % n_rows, i // n_rows
        y[row, col] = x[row, col]


@cuda.jit
def third(x, y):
    """Copy a matrix."""
    n_rows, n_cols = x.shape
    i = cuda.grid(1)
    if i < n_rows * n_cols:
        row, col = n_rows - 1 - i // n_cols, i % n_cols
        y[row, col] = x[row, col]
