"""What is installed here, what is wrong with it, and the one command that mends it.

Three steps, so that each can be tested without the hardware or the damage it is about::

    facts = collect()             # asks the machine, and imports nothing that could be broken
    problems = diagnose(facts)    # facts in, `Problem`s out
    print(report(facts, problems))

`python -m course_lib` does all three.
"""

from course_lib.doctor.facts import (
    BASE,
    EXTRAS,
    MODULES,
    REQUIREMENTS,
    Facts,
    Gpu,
    collect,
    this_python,
)
from course_lib.doctor.problems import Missing, Problem, adding, diagnose, missing
from course_lib.doctor.report import report

__all__ = [
    "BASE",
    "EXTRAS",
    "REQUIREMENTS",
    "Facts",
    "Gpu",
    "Missing",
    "Problem",
    "collect",
    "diagnose",
    "main",
    "missing",
    "report",
    "without",
]


def without(module):
    """Say how to add what could not be imported; None for what comes with no extra."""
    top = (module or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if top in modules:
            return f"{top} is not installed. Add it with:  {adding(extra, *this_python())}"
    return None


def main():
    """Print the report; return the exit status, 0 when all is well and 1 when not."""
    facts = collect()
    problems = diagnose(facts)
    print(report(facts, problems))
    return 1 if problems else 0
