"""How good the messages are: does a check tell the line and the cause of a mistake, or less?

    python tests/bank --messages               # every wrong kernel and every mutant: hours
    python tests/bank --messages=4 relu iou    # a sample: four of each

Of each kernel it is known where it differs from a right one. A mutant is judged without the
operator that made it, as if nobody had thought of that mistake.

"both": the cause is told, and a line that differs. "line": only that. "nothing": no more than was
seen. "false": a line that is none of them for the cause, or a cure for something else.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import re
import time
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import bank
from bank.judge import SEED
from course_lib.teach.checking import check as checking
from course_lib.teach.exercise import exercises, python_function
from course_lib.teach.explaining import causes, mutation
from course_lib.teach.explaining.mutation.changes import EVERY, located, parsed, program
from course_lib.teach.explaining.mutation.lines import Line, lines_of
from course_lib.teach.explaining.mutation.mutants import mutants
from course_lib.teach.explaining.report import describe

KINDS = ("both", "line", "nothing", "false")


@dataclass(frozen=True)
class Told:
    """What the check said of one kernel. `seconds` are those of the verdict and of the cause."""

    name: str
    kind: str
    seconds: tuple[float, float]
    message: str


def table(names: list[str], sample: int | None, verbose: bool) -> bool:
    """Print the table; return whether more than 3 % of the messages are false."""
    total: Counter = Counter()
    slowest = [0.0, 0.0]
    print(f"{'exercise':<26}" + "".join(f"{kind:>9}" for kind in KINDS))
    for name in names:
        told = [each for each in map(_judged, *_subjects(name, sample)) if each is not None]
        count = Counter(each.kind for each in told)
        total += count
        slowest = [max(a, b) for a, b in zip(slowest, _slowest(told), strict=True)]
        print(f"{name:<26}" + "".join(f"{count[kind]:>9}" for kind in KINDS), flush=True)
        for each in told:
            if verbose or each.kind == "false":
                print(f"  {each.kind}: {each.name}\n{each.message}")
    all_ = max(1, total.total())
    print(f"{'total':<26}" + "".join(f"{total[kind]:>9}" for kind in KINDS))
    print(f"{'':<26}" + "".join(f"{total[kind] / all_:>9.1%}" for kind in KINDS))
    print("slowest: {:.2f} s for a verdict, {:.2f} s more for the cause".format(*slowest))
    return total["false"] > 0.03 * all_


def _slowest(told: list[Told]) -> list[float]:
    return [max((each.seconds[k] for each in told), default=0.0) for k in (0, 1)]


def _subjects(name: str, sample: int | None):
    """Return what is judged: lists of exercises, names, kernels, right ones and operators."""
    solution = exercises()[name].solution
    wrong = [(kernel.__name__, kernel, None) for n, kernel, _ in bank.WRONG if n == name]
    made = [(each.name, each, each.change.operator) for each in mutants(solution, EVERY)]
    if sample is not None:
        wrong, made = (sorted(each, key=_by_chance)[:sample] for each in (wrong, made))
    rows = [(name, *each) for each in (*wrong, *made)]
    return zip(*rows, strict=True)


def _by_chance(entry) -> bytes:
    return hashlib.sha256(entry[0].encode()).digest()


def _judged(exercise: str, name: str, kernel, operator: str | None) -> Told | None:
    """Return what is told of a kernel; None if it passes, as some mutants do."""
    right = exercises()[exercise].solution
    if operator is None:
        right = getattr(python_function(kernel), "made_from", None) or _nearest(exercise, kernel)
    else:
        kernel = kernel.build()
    attempt = checking._attempt(exercises()[exercise], kernel, SEED)
    begin = time.process_time()
    failure = checking._first_failure(attempt)
    verdict = time.process_time() - begin
    if failure is None:
        return None
    others = tuple(each for each in EVERY if each.__name__ != operator)
    limited = functools.partial(mutation.cause, operators=others)
    begin = time.process_time()
    with mock.patch.object(causes.mutation, "cause", limited):
        failure = causes.explain(attempt, failure)
    seconds = verdict, time.process_time() - begin
    message = describe(attempt, failure)
    kind = _kind(failure, _differing(kernel, right), message.partition("\n")[0])
    return Told(f"{exercise}, {name}", kind, seconds, message)


def _kind(failure, differing: dict[int, str], headline: str) -> str:
    """Return how good it is, where the lines that differ are known, and what they should be."""
    if failure.cause:
        form = (
            r"(another line in place of|one more before|; it is missing before|;) "
            r"line (\d+)(?: of \w+)?,"
        )
        before, line = re.search(form, failure.cause).groups()
        if int(line) not in differing:
            return "false"
        return "both" if before.startswith(";") else "line"
    finding = failure.finding
    if finding is None:
        told = re.findall(r" in line (\d+)", f"{headline} {failure.seen}")
        lines = {_line_of_error(failure), *map(int, told)}
        return "line" if lines & set(differing) else "nothing"
    lines = {finding.line, *getattr(finding, "lines", ())}
    cure = finding.message.partition("; ")[2]
    if "guard" in cure and not any(re.match("if|while|for", s) for s in differing.values()):
        return "false"
    if not lines & set(differing):
        return "nothing"
    return "line" if finding.kind == "out-of-bounds" else "both"


def _line_of_error(failure) -> int:
    line, trace = 0, getattr(failure.error, "__traceback__", None)
    while trace is not None:
        line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _differing(kernel, right) -> dict[int, str]:
    """Return the lines of a kernel that differ from the right one's, and those beside a gap.

    Of the functions that it calls, those that the right one has in none of its own.
    """
    own, its = ([lines_of(each) for each in program(k).body] for k in (kernel, right))
    found = {own[0][n].number: text for n, text in _differences(own[0], its[0])}
    known = {line.text for lines in its for line in lines}
    found |= {line.number: "" for lines in own[1:] for line in lines if line.text not in known}
    return {located(kernel, number)[1]: text for number, text in found.items()}


def _differences(own: list[Line], right: list[Line]):
    texts = [[(each.depth, each.text) for each in lines] for lines in (own, right)]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            continue
        beside = range(i, j) if j > i else [n for n in (i - 1, i) if 0 <= n < len(own)]
        for n in beside:
            yield n, " ".join(each.text for each in (*right[k:m], own[n]))


def _nearest(exercise: str, kernel):
    """Return the right kernel that is most like one that was written out."""
    rights = [exercises()[exercise].solution, *(k for n, k in bank.RIGHT if n == exercise)]
    text = ast.unparse(parsed(kernel))
    return max(
        rights, key=lambda k: difflib.SequenceMatcher(None, text, ast.unparse(parsed(k))).ratio()
    )
