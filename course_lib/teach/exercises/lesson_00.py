"""Lesson 00: the first kernel."""

from course_lib import cuda
from course_lib.teach.cases import numbers
from course_lib.teach.exercise import EXACT, Exercise, case


@cuda.jit
def double(x, y):
    i = cuda.grid(1)
    y[i] = x[i] + x[i]


def _cases(rng):
    # As many threads as elements: the guard is the subject of lesson 01.
    launches = [(1, 1), (1, 2), (1, 5), (5, 1), (1, 33), (3, 31), (4, 32), (2, 100)]
    return [case(grid, block, x=numbers(rng, grid * block)) for grid, block in launches]


DOUBLE = Exercise(
    name="double",
    title="One thread, one element",
    solution=double,
    reference=lambda x: 2 * x,
    cases=_cases,
    tolerance=EXACT,
    hints=(
        "Each thread handles one element. Which one? `cuda.grid(1)` gives a thread its number "
        "among all threads of the launch.",
        "Put that number in a variable `i`. The thread reads `x[i]` and writes `y[i]`. There is "
        "no loop: the launch starts one thread for each element.",
        "```python\ni = cuda.grid(1)\ny[i] = ...  # x[i], doubled\n```",
    ),
)
