"""Runs the bank against `check`: each entry gives a row that says whether it came out right."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import bank
from bank.equivalent import EQUIVALENT
from course_lib.teach import CheckFailed, check
from course_lib.teach.checking import check as checking
from course_lib.teach.checking import compiling
from course_lib.teach.checking.deadline import TimeUp, deadline
from course_lib.teach.exercise import exercises
from course_lib.teach.explaining import causes, report
from course_lib.teach.explaining.mutation import sentence
from course_lib.teach.explaining.mutation.mutants import mutants

for _file in sorted(Path(__file__).parent.glob("lesson_*.py")):
    importlib.import_module(f"bank.{_file.stem}")

#: Inputs of every check here, so that the table is the same in every run.
SEED = 1

#: Seconds for what is seen of a failure, as in a check.
LOOKING = causes.LOOKING / 2

#: What is looked for in a message, where it is of the work of a kernel whose result may be right.
OF_ITS_WORK = re.compile("(is|are|threads) .?read|float64|should|touch|shuffles|everything|memory")

#: The limits of the search for its cause.
SEARCHES = ("GRAFTING", "MATCHING", "REPAIR", "ALONE")


@dataclass(frozen=True)
class Row:
    """One kernel and what the check made of it.

    `kind` is "wrong", "mutant" or "right"; `outcome` "rejected", "accepted", "equivalent",
    "missed" (a wrong one passed), "cause" (rejected, for another reason than it should be),
    "refused" (a right one failed) or "uncompiled" (it passed, and the compiler broke down).
    """

    exercise: str
    kind: str
    name: str
    outcome: str
    seconds: float
    message: str = ""

    @property
    def good(self) -> bool:
        """Tell whether the check did what it should."""
        return self.outcome in ("rejected", "accepted", "equivalent")


def rows(exercise: str) -> Iterator[Row]:
    """Judge every kernel of one exercise: known wrong, mutants, right."""
    for name, kernel, says in bank.WRONG:
        if name == exercise:
            yield judge_wrong(exercise, kernel, says)
    for mutant in mutants(exercises()[exercise].solution):
        yield judge_mutant(exercise, mutant)
    for kernel in (exercises()[exercise].solution, *(k for n, k in bank.RIGHT if n == exercise)):
        yield judge_right(exercise, kernel)


def judge_wrong(exercise: str, kernel, says: str, thorough: bool = True) -> Row:
    """Check a kernel that must be rejected with a message in which `says` is found.

    To look for the cause takes longer than the verdict: where `says` is found in the message
    without it, nobody waits for it, and only those who are `thorough` for what is seen, no longer
    than a learner does. Nor does anybody wait long for what never ends, or, where the kernel's work
    is wrong and its result may be right, for every order of threads, but those who are thorough. A
    busy machine may be too slow to find the cause in a learner's time: it gets four times as much,
    once, and thoroughly.
    """
    patience = 0.1 if "did not end" in says else 2
    row = _judged(exercise, kernel, says, thorough, patience)
    in_full = thorough or not OF_ITS_WORK.search(says)
    if row.outcome == "rejected" or row.outcome == "missed" and in_full:
        return row
    longer = {name: 4 * getattr(sentence, name) for name in SEARCHES}
    with mock.patch.multiple(sentence, **longer):
        return _judged(exercise, kernel, says, True, patience)


def _judged(exercise: str, kernel, says: str, thorough: bool, patience: float) -> Row:
    observed, telling_more = causes.observed, causes._telling_more

    def needed_cause(attempt, failure):
        def found():
            return re.search(says, report.describe(attempt, failure))

        def observed_once(attempt, other):
            return failure.seen if other is failure else observed(attempt, other)

        def needed_more(attempt, failure):
            return failure if not thorough and found() else telling_more(attempt, failure)

        if not found():
            failure.seen = observed(attempt, failure)
        elif thorough:
            with contextlib.suppress(TimeUp), deadline(LOOKING):
                failure.seen = observed(attempt, failure)
        if found():
            return failure
        with mock.patch.multiple(causes, observed=observed_once, _telling_more=needed_more):
            return causes.explain(attempt, failure)

    in_one_order = not thorough and OF_ITS_WORK.search(says)
    orders = mock.patch.object(checking, "ORDERS", checking.ORDERS[: 1 if in_one_order else None])
    with orders, mock.patch.object(checking, "explain", needed_cause):
        seconds, message, _ = _checked(exercise, kernel, patience)
    outcome = "missed"
    if message:
        outcome = "rejected" if re.search(says, message) else "cause"
    return Row(exercise, "wrong", kernel.__name__, outcome, seconds, message)


def judge_right(exercise: str, kernel, thorough: bool = True) -> Row:
    """Check a kernel that must be accepted.

    Where `thorough`, it is compiled, and its threads run in each order; else in a random one.
    """
    shorter = {} if thorough else {"STAGES": checking.STAGES[:1], "ORDERS": ("random",)}
    with contextlib.ExitStack() as stack:
        for name, value in shorter.items():
            stack.enter_context(mock.patch.object(checking, name, value))
        seconds, message, printed = _checked(exercise, kernel)
    outcome = "refused" if message else "accepted"
    if "not compiled" in printed and "not installed" not in printed:
        outcome, message = "uncompiled", printed
    return Row(exercise, "right", kernel.__name__, outcome, seconds, message)


def judge_mutant(exercise: str, mutant) -> Row:
    """Check a mutant. One that is listed as equivalent must pass, any other must not.

    Nobody asks for the cause, and to look for it takes ten times as long as the verdict. What an
    equivalent one computes is seen in the simulator; the compiler has seen the solution.
    """
    equivalent = (exercise, mutant.name) in EQUIVALENT
    patience = 4 if equivalent else 1
    stages = checking.STAGES[:1] if equivalent else checking.STAGES
    with (
        mock.patch.object(checking, "explain", lambda _, failure: failure),
        mock.patch.object(checking, "STAGES", stages),
    ):
        seconds, message, _ = _checked(exercise, mutant.build(), patience)
    if equivalent:
        outcome = "refused" if message else "equivalent"
    else:
        outcome = "rejected" if message else "missed"
    return Row(exercise, "mutant", mutant.name, outcome, seconds, message)


def _checked(exercise: str, kernel, patience: float = 2) -> tuple[float, str, str]:
    """Return the seconds that a check took, what it objected to ("": nothing), what it printed.

    It may take `patience` times as long as a learner's: on a busy machine processors are slower,
    and the verdict should be the same.
    """
    begin = time.perf_counter()
    message = ""
    seconds = patience * checking.SLOWER * checking.TIME_LIMIT
    patient = mock.patch.multiple(checking, TIME_LIMIT=seconds, SLOWER=1)
    compiler = mock.patch.object(compiling, "WAIT", 10 * compiling.WAIT)
    with patient, compiler, contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            check(exercise, kernel, seed=SEED)
        except CheckFailed as error:
            message = str(error)
    return time.perf_counter() - begin, message, printed.getvalue()


@contextlib.contextmanager
def own_record() -> Iterator[None]:
    """Keep what is solved here out of the developer's own progress."""
    before = os.environ.get("COURSE_LIB_PROGRESS")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COURSE_LIB_PROGRESS"] = str(Path(folder) / "progress.json")
        try:
            yield
        finally:
            del os.environ["COURSE_LIB_PROGRESS"]
            if before is not None:
                os.environ["COURSE_LIB_PROGRESS"] = before
