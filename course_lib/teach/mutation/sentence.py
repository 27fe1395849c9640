"""The sentence: what would make a right kernel behave like the learner's, and in which line it is.

A cause is named only if all changes that reproduce the learner's behaviour are told in the same
words, or if one of them makes the learner's very code, up to names; and only with the line in which
undoing it makes every case right. Where they agree on the line alone, no more than that is told;
nor where nothing matches, and a change in one line only makes the learner's code right.

Time is short: the changes that bring the solution nearest to the learner's code come first, and
when the time is up, what was not tried has no say.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from course_lib.teach.deadline import TimeUp, deadline
from course_lib.teach.display import quote
from course_lib.teach.exercise import python_function
from course_lib.teach.mutation.changes import (
    EVERY,
    Change,
    changes,
    changes_alike,
    forgotten,
    parsed,
)
from course_lib.teach.mutation.likeness import nearest_first, same_code
from course_lib.teach.mutation.matching import Experiment
from course_lib.teach.mutation.repair import only_place, place, place_of_all
from course_lib.teach.running import Attempt, Failure

#: Seconds of the processor to look for changes that match, for the line after that, and for the
#: line alone where that led nowhere.
MATCHING, REPAIR, ALONE = 1.1, 0.4, 0.8


def cause(attempt: Attempt, failure: Failure, operators=EVERY) -> str:
    """Return the sentence, empty if nothing matches or what matches does not agree."""
    try:
        own = parsed(attempt.obj)
    except (OSError, SyntaxError):  # without its source there is nothing to compare
        return ""
    with forgotten(), _uncollected():
        found = _matching(attempt, failure, own, operators)
        words = {change.words for change in found}
        look = place if len(words) == 1 else place_of_all
        line = _in_time(REPAIR, lambda: look(attempt, found)) if found else None
        if line is None:
            words = set()
            line = _in_time(ALONE, lambda: only_place(attempt, failure.run.case))
    if line is None:
        return ""
    where = quote(python_function(attempt.obj).__code__.co_filename, line)
    if len(words) != 1:
        return f"a small change in {where}, makes every case right"
    what = "code" if attempt.exercise.kind == "launcher" else attempt.exercise.kind
    return f"your {what} behaves exactly like the right one {words.pop()}; {where}"


def _matching(attempt: Attempt, failure: Failure, own, operators) -> list[Change]:
    """Return the changes that match, as far as the time goes."""
    found: list[Change] = []
    with contextlib.suppress(TimeUp), deadline(MATCHING):
        solution = attempt.exercise.solution
        tried = (*changes(solution, operators), *changes_alike(solution, operators))
        experiment, seen = Experiment(attempt, failure.run.case), set()
        for change in nearest_first(tried, own, solution):
            if change.text not in seen:
                seen.add(change.text)
                if experiment.reproduced(change.build):
                    if same_code(change.text, own):
                        return [change]
                    found.append(change)
    return found


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from spending the time on all that a notebook holds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _in_time(seconds: float, look: Callable[[], int | None]) -> int | None:
    with contextlib.suppress(TimeUp), deadline(seconds):
        return look()
    return None
