"""Cases that a GPU runs in every combination, and the simulator, which is slower, in turns."""

import itertools

from course_lib import SIMULATED, simulator


def in_turns(cases, *others):
    """Rows for `parametrize`: each of `cases` with every combination of `others`.

    In the simulator each case comes with one combination: the first with the first, and so on
    around; where there are fewer cases than combinations, the cases go around.
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    combinations = list(itertools.product(*others))
    if not SIMULATED:
        return [case + rest for case, rest in itertools.product(cases, combinations)]
    count = max(len(cases), len(combinations))
    return [
        cases[number % len(cases)] + combinations[number % len(combinations)]
        for number in range(count)
    ]


def as_twin(function):
    """`function`, which kernels in the simulator may call as it is: what a test puts in them."""
    simulator.register_twin(function, function)
    return function
