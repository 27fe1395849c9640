"""Lesson 00: the first kernel.

| exercise | the kernel gets | what is new |
|---|---|---|
| negative | x, y of (n_rows, n_cols), float32 | a thread asks which pixel is its own |
"""

import numpy as np

from course_lib import cuda
from course_lib.teach.checking.cases import drawn
from course_lib.teach.exercise import Exercise, Tolerance, case


@cuda.jit
def negative(x, y):
    col, row = cuda.grid(2)
    y[row, col] = np.float32(1) - x[row, col]


def _negative_cases(rng):
    # As many threads as pixels: the guard is the subject of lesson 01. Grids and blocks are given
    # as (along the columns, along the rows), and most pictures are not square.
    launches = [
        ((1, 1), (1, 1)),
        ((1, 1), (2, 1)),
        ((1, 1), (1, 3)),
        ((2, 1), (2, 3)),
        ((1, 3), (4, 1)),
        ((2, 2), (3, 5)),
        ((3, 2), (8, 4)),
        ((2, 2), (8, 8)),
        ((1, 2), (drawn(rng, 25, 31), drawn(rng, 9, 12))),
        ((1, 5), (1, drawn(rng, 206, 215))),  # more than 1,024 rows, and as many columns
        ((4, 1), (drawn(rng, 340, 380), 1)),
    ]
    return [
        case(grid, block, x=_picture(rng, (grid[1] * block[1], grid[0] * block[0])))
        for grid, block in launches
    ]


def _picture(rng, shape):
    """Return a dark picture, in which a pixel is black and one white if it has more than one."""
    x = rng.beta(1, 2, shape).astype(np.float32)
    if x.size > 2:
        x.flat[rng.choice(x.size, 2, replace=False)] = 0, 1
    return x


NEGATIVE = Exercise(
    name="negative",
    title="The negative of a picture",
    solution=negative,
    reference=lambda x: 1 - x,
    cases=_negative_cases,
    once=True,
    tolerance=Tolerance(0.0, 1e-7, "one subtraction, rounded once to float32"),
    hints=(
        "There is no loop to write. A thread handles one pixel, and `row` and `col` already say "
        "which. What is black, 0, should become 1, and what is white, 1, should become 0.",
        "The thread reads `x[row, col]`, subtracts it from 1, and writes the result to the same "
        "place in `y`.",
        "```python\ny[row, col] = 1 - ...  # the same place in x\n```",
    ),
)
