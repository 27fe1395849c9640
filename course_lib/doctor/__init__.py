"""What is installed here, what is wrong with it, and the one command that mends it.

Three steps, so that each can be tested without the hardware or the damage it is about::

    facts = collect()             # asks the machine, and imports nothing that could be broken
    problems = diagnose(facts)    # facts in, `Problem`s out
    print(report(facts, problems))

`python -m course_lib` does all three.
"""

from course_lib.doctor.facts import BASE, EXTRAS, MODULES, REQUIREMENTS, Facts, Gpu, collect
from course_lib.doctor.problems import Missing, Problem, diagnose, missing
from course_lib.doctor.report import report

__all__ = [
    "BASE", "EXTRAS", "REQUIREMENTS", "Facts", "Gpu", "Missing", "Problem", "collect", "diagnose",
    "extra_of", "main", "missing", "report",
]  # fmt: skip


def extra_of(module):
    """Return the extra that a module which could not be imported comes with; None for others."""
    top = (module or "").partition(".")[0]
    return next((extra for extra, modules in MODULES.items() if top in modules), None)


def main():
    """Print the report; return the exit status, 0 when all is well and 1 when not."""
    facts = collect()
    problems = diagnose(facts)
    print(report(facts, problems))
    return 1 if problems else 0
