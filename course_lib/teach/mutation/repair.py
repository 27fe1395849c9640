"""Where the mistake is in the learner's own code: where undoing it makes every case right.

Once it is known which change makes a right kernel behave like the learner's, the opposite is done
to the learner's kernel. That it then passes every case proves the place.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import linecache
import re

from course_lib.teach.deadline import TimeUp
from course_lib.teach.exercise import Case, python_function
from course_lib.teach.mutation.changes import EVERY, Change, built, changes, changes_alike, parsed
from course_lib.teach.mutation.lines import lines_of, patched, written
from course_lib.teach.mutation.matching import STEPS, fresh
from course_lib.teach.running import Attempt, Simulator, attempt_case

#: How many changes are undone that agree on no words: each takes its time.
MOST = 4

#: What turns the words for a change into those for its opposite.
_OPPOSITES = (
    (r"with (?:a )?(.+) in place of (.+)", r"with \2 in place of \1"),
    (r"(.+) one too large", r"\1 one too small"),
    (r"(.+) one too small", r"\1 one too large"),
    (r"(.+) one too early", r"\1 one too late"),
    (r"(.+) one too late", r"\1 one too early"),
    ("divided once too often by a size", "without one of its divisions"),
    ("with a size too much as a factor", "without one of its factors"),
    ("without one of its divisions", "divided once too often by a size"),
    ("without one of its factors", "with a size too much as a factor"),
    ("without a minus sign", "with a minus sign too much"),
    ("with a minus sign too much", "without a minus sign"),
)


def place(attempt: Attempt, found: list[Change]) -> int | None:
    """Return the number of the line in which one of the changes can be undone; None if unknown.

    First the learner's code takes over what the change does away with, line for line; then what is
    told in the opposite words is tried everywhere.
    """
    own = parsed(attempt.obj)
    for change in found:
        line = _patched_in(attempt, own, change)
        if line is not None:
            return line
    wanted = {opposite(change.words) for change in found}
    for undo in (*changes(attempt.obj, EVERY), *changes_alike(attempt.obj, EVERY)):
        if _bare(undo.words) in wanted and passes(attempt, undo.text):
            return _line_of(undo)
    return None


def place_of_all(attempt: Attempt, found: list[Change]) -> int | None:
    """Return the number of the line in which each of the changes is undone, if it is the same."""
    own = parsed(attempt.obj)
    lines = {_patched_in(attempt, own, change) for change in found[:MOST]}
    return lines.pop() if len(lines) == 1 else None


def only_place(attempt: Attempt, failing: Case) -> int | None:
    """Return the number of the only line in which a change makes every case right; None if unknown.

    For code of another form than the solution's, which nothing done to the solution resembles.
    Lines that the solution has as well, such as those given, are not to blame. What the time does
    not reach is not tried.
    """
    file = python_function(attempt.obj).__code__.co_filename
    solution = inspect.getsource(python_function(attempt.exercise.solution))
    right = {_code(line) for line in solution.splitlines()}
    cases = [failing, *(case for case in attempt.cases if case is not failing)]
    failing_first, lines = dataclasses.replace(attempt, cases=cases), set()
    with contextlib.suppress(TimeUp):
        for change in changes(attempt.obj, EVERY):
            line = _line_of(change)
            if _code(linecache.getline(file, line)) not in right:
                if passes(failing_first, change.text):
                    lines.add(line)
    return lines.pop() if len(lines) == 1 else None


def _code(line: str) -> str:
    """Return a line without what is around the code."""
    return line.partition("  #")[0].strip()


def opposite(words: str) -> str:
    """Return the words for what undoes a change; the same where it undoes itself."""
    words = _bare(words)
    for pattern, other in _OPPOSITES:
        if re.fullmatch(pattern, words):
            return re.sub(pattern, other, words)
    return words


def _bare(words: str) -> str:
    return words.partition(", at all ")[0]


def passes(attempt: Attempt, text: str) -> bool:
    """Tell whether the learner's object, with this text, is right on every case."""
    try:
        again = Attempt(attempt.exercise, built(text, attempt.obj), attempt.cases, attempt.seed)
    except (SyntaxError, NameError):
        return False
    for case in (*attempt.cases, fresh(attempt, 2)[-1]):
        for order in ("forward", "reverse"):
            engine = Simulator(order, attempt.seed, sanitized=True, max_steps=STEPS)
            failure = attempt_case(again, case, engine)
            if failure is not None:
                if isinstance(failure.error, TimeUp):
                    raise failure.error
                return False
    return True


def _patched_in(attempt: Attempt, own: ast.Module, change: Change) -> int | None:
    """Return the line in which the learner's code takes over the opposite of the change.

    None if it can't, or if it is not right after that.
    """
    wrong = lines_of(ast.parse(change.text).body[0])
    right = lines_of(change.tree.body[0])
    function = own.body[0]
    outcome = patched(lines_of(function), wrong, right)
    if outcome is not None and outcome[1]:
        lines, numbers = outcome
        head = ast.unparse(function).splitlines()
        end = next(k for k, line in enumerate(head) if line.startswith("def "))
        if passes(attempt, written("\n".join(head[: end + 1]), lines)):
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
