"""The table of all checks: ``python tests/bank``, or ``python tests/bank relu block_sum -v``.

For every exercise: how many known-wrong kernels are rejected for the right reason, what became of
the mutants of its solution, how many right kernels are accepted, and the seconds of a check. With
-v also each kernel and the first line of what the check said. Exit status 1 when a wrong one
passes, a reason is wrong, or a right one fails.

``python tests/bank --messages`` judges what the checks say instead: see messages.py.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent.parent)]

from bank import messages  # noqa: E402
from bank.judge import own_record, rows  # noqa: E402
from course_lib.teach.exercise import exercises  # noqa: E402

HEADER = f"{'exercise':<26}{'wrong':>9}{'mutants':>9}{'equal':>7}{'missed':>8}{'right':>8}" + (
    f"{'s right':>9}{'s worst':>9}"
)


def main(arguments):
    """Print the table, and return the exit status."""
    verbose = "-v" in arguments
    names = [each for each in arguments if not each.startswith("-")] or [
        name for name, exercise in exercises().items() if exercise.kind != "answer"
    ]
    for option in arguments:
        if option.startswith("--messages"):
            sample = option.partition("=")[2]
            return messages.table(names, int(sample) if sample else None, verbose)
    bad = []
    print(HEADER)
    for name in names:
        found = list(rows(name))
        bad += [row for row in found if not row.good]
        print(summary(name, found), flush=True)
        for row in found if verbose else ():
            print(f"    {row.outcome:<10} {row.name}\n{'':15}{said(row)}")
    for row in bad:
        print(f"{row.outcome.upper()}: {row.exercise}, {row.kind} {row.name}\n    {said(row)}")
    print("all as it should be" if not bad else f"{len(bad)} not as they should be")
    return bool(bad)


def summary(name, found):
    """One line of the table."""
    kinds = ("wrong", "mutant", "right")
    wrong, mutants, right = ([row for row in found if row.kind == kind] for kind in kinds)
    rejected = sum(row.outcome == "rejected" for row in mutants)
    equal = sum(row.outcome == "equivalent" for row in mutants)
    return (
        f"{name:<26}{share(wrong):>9}{rejected:>9}{equal:>7}"
        f"{len(mutants) - rejected - equal:>8}{share(right):>8}"
        f"{max(row.seconds for row in right):>9.2f}{max(row.seconds for row in found):>9.2f}"
    )


def share(part):
    """How many are good, of how many."""
    return f"{sum(row.good for row in part)}/{len(part)}"


def said(row):
    """The first line of the message, and the cause."""
    lines = row.message.splitlines()
    return " | ".join(x.strip() for x in lines[:1] + [x for x in lines if "  cause" in x])


if __name__ == "__main__":
    with own_record():
        status = main(sys.argv[1:])
    sys.exit(status)
