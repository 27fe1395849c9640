"""Where the mistake is in the learner's own code: where undoing it makes every case right.

Once it is known which change makes a right kernel behave like the learner's, the opposite is done
to the learner's kernel. That it then passes every case proves the place.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import linecache
import re
from collections.abc import Iterable, Iterator

from course_lib.teach.checking.deadline import TimeUp
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.running import Attempt, Failure, attempt_case
from course_lib.teach.exercise import Case, python_function
from course_lib.teach.explaining.mutation.changes import (
    EVERY,
    Change,
    built,
    changes,
    changes_alike,
    in_place,
    located,
    program,
)
from course_lib.teach.explaining.mutation.likeness import nearest_first
from course_lib.teach.explaining.mutation.lines import head, lines_of, patched, written
from course_lib.teach.explaining.mutation.matching import STEPS, fresh

#: How many changes are undone that agree on no words: each takes its time.
MOST = 4

#: What turns the words for a change into those for its opposite.
_OPPOSITES = (
    (r"(with one \w+ in place of another)", r"\1"),
    (r"with (?:a )?(.+) in place of (.+)", r"with \2 in place of \1"),
    (r"(.+) one too large", r"\1 one too small"),
    (r"(.+) one too small", r"\1 one too large"),
    (r"(.+) one too early", r"\1 one too late"),
    (r"(.+) one too late", r"\1 one too early"),
    ("divided once too often by a size", "without one of its divisions"),
    ("with a size too much as a factor", "without one of its factors"),
    ("without one of its divisions", "divided once too often by a size"),
    ("without one of its factors", "with a factor too much"),
    ("without a minus sign", "with a minus sign too much"),
    ("with a minus sign too much", "without a minus sign"),
    ("without the condition of an `if`", "with an `if` too much"),
    ("without one of its statements", "with a statement too much"),
    ("with a (factor) too much (in an index of .+)", r"without a \1 \2"),
    (
        "with a start set inside the loop, not before it",
        "with a start set before the loop only, not in each round",
    ),
    (
        "with a start set before the loop only, not in each round",
        "with a start set inside the loop, not before it",
    ),
    (
        "with what comes after a loop done in each round",
        "with what each round does done once, after the loop",
    ),
    (
        "with what each round does done once, after the loop",
        "with what comes after a loop done in each round",
    ),
    (r"without (one (?:part|of its) .+|\w+)", r"with \1 too much"),
    (r"with 0 for an index of (.+)", r"with another index than 0 of \1"),
)

#: What is undone by doing it again.
_THEIR_OWN = "swapped$|mixed up$|the other way round$|elsewhere$|in the other order$|its opposite$"


def place(attempt: Attempt, found: list[Change]) -> int | None:
    """Return the number of the line in which one of the changes can be undone; None if unknown.

    First the learner's code takes over what the change does away with, line for line; then what is
    told in the opposite words is tried everywhere.
    """
    own = program(attempt.obj)
    for change in found:
        line = _patched_in(attempt, own, change)
        if line is not None:
            return line
    wanted = {opposite(change.words) for change in found}
    about = attempt.obj, EVERY, own
    for undo in (*changes(*about), *changes_alike(*about)):
        if _bare(undo.words) in wanted and passes(attempt, undo.text):
            return _line_of(undo)
    return None


def place_of_all(attempt: Attempt, found: list[Change]) -> int | None:
    """Return the number of the line in which each of the changes is undone, if it is the same."""
    own = program(attempt.obj)
    lines = {_patched_in(attempt, own, change) for change in found[:MOST]}
    return lines.pop() if len(lines) == 1 else None


def mended_lines(
    attempt: Attempt, failure: Failure, operators: Iterable, own: ast.Module, known: int | None
) -> Iterator[tuple[int, str]]:
    """Yield the number of each line in which a change makes every case right, and the words.

    For code of another form than the solution's, which nothing done to the solution resembles.
    Lines that the solution has as well, such as those given, are not to blame. What brings the code
    nearest to the solution comes first. Where the line is `known`, it is looked for what is wrong
    there.
    """
    solution = attempt.exercise.solution
    about = attempt.obj, operators, own
    right = {_code(line) for line in inspect.getsource(python_function(solution)).splitlines()}
    failing_first = failing_before_others(attempt, failure.run.case)
    seen: set[int] = set()
    tried = (*changes(*about), *changes_alike(*about))
    for change in nearest_first(tried, program(solution)):
        line = _line_of(change)
        if line in seen or known not in (None, line):
            continue
        function, number = located(attempt.obj, line)
        text = linecache.getline(function.__code__.co_filename, number)
        if line == known or _code(text) not in right:
            if passes(failing_first, change.text):
                seen.add(line)
                yield line, reverse(change.words)


def failing_before_others(attempt: Attempt, failing: Case) -> Attempt:
    """Return the attempt with the case that fails before the others, which many don't reach."""
    cases = [failing, *(case for case in attempt.cases if case is not failing)]
    return dataclasses.replace(attempt, cases=cases)


def _code(line: str) -> str:
    """Return a line without what is around the code."""
    return line.partition("  #")[0].strip()


def opposite(words: str) -> str:
    """Return the words for what undoes a change; the same where it undoes itself, or may."""
    return reverse(words) or _bare(words)


def reverse(words: str) -> str:
    """Return the words for what is wrong where this change makes it right; "" if it has none."""
    words = _bare(words)
    for pattern, other in _OPPOSITES:
        if re.fullmatch(pattern, words):
            return re.sub(pattern, other, words)
    return words if re.search(_THEIR_OWN, words) else ""


def _bare(words: str) -> str:
    return words.partition(", at all ")[0]


def passes(attempt: Attempt, text: str) -> bool:
    """Tell whether the learner's object, with this text, is right on every case."""
    try:
        obj = built(text, attempt.obj, attempt.exercise.solution)
        again = dataclasses.replace(attempt, obj=obj)
    except (SyntaxError, NameError):
        return False
    for case, order, sanitized in _runs(attempt):
        engine = Simulator(order, attempt.seed, sanitized, max_steps=STEPS)
        failure = attempt_case(again, case, engine)
        if failure is not None:
            if isinstance(failure.error, TimeUp):
                raise failure.error
            return False
    return True


def _runs(attempt: Attempt) -> Iterator[tuple[Case, str, bool]]:
    """Yield what must be right, as (case, order, under the sanitizer)."""
    yield attempt.cases[0], "forward", False  # which is quick, and most go wrong there
    yield from itertools.product(attempt.cases, attempt.orders, [True])
    yield from itertools.product(fresh(attempt, 2)[-1:], attempt.orders, [True])


def _patched_in(attempt: Attempt, own: ast.Module, change: Change) -> int | None:
    """Return the line in which the learner's code takes over the opposite of the change.

    None if it can't, or if it is not right after that.
    """
    changed = change.places[0][0][1]
    wrong = lines_of(ast.parse(change.text).body[changed])
    right = lines_of(change.tree.body[changed])
    for k, function in enumerate(own.body):
        outcome = patched(lines_of(function), wrong, right)
        if outcome is not None and outcome[1]:
            lines, numbers = outcome
            if passes(attempt, in_place(own, k, written(head(function), lines))):
                return numbers[0]
    return None


def _line_of(change: Change) -> int:
    """Return the number of the first line that a change is about."""
    tree: ast.AST | list = change.tree
    line = 0
    for step in change.places[0][0]:
        tree = tree[step] if isinstance(step, int) else getattr(tree, step)
        line = getattr(tree, "lineno", line)
    return line
