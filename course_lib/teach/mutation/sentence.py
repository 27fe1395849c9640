"""The sentence: what would make a right kernel behave like the learner's, and in which line it is.

A cause is named only if all changes that reproduce the learner's behaviour are told in the same
words, or if one of them makes the learner's very code, up to names; and only with the line in which
undoing it makes every case right. Where they agree on the line alone, no more than that is told.

Time is short: the changes that bring the solution nearest to the learner's code come first, and
when the time is up, what was not tried has no say.
"""

from __future__ import annotations

import contextlib

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
from course_lib.teach.mutation.repair import place, place_of_all
from course_lib.teach.running import Attempt, Failure

#: Seconds of the processor to look for changes that match, and for the line after that.
MATCHING, REPAIR = 1.1, 0.4


def cause(attempt: Attempt, failure: Failure, operators=EVERY) -> str:
    """Return the sentence, empty if nothing matches or what matches does not agree."""
    try:
        own = parsed(attempt.obj)
    except (OSError, SyntaxError):  # without its source there is nothing to compare
        return ""
    with forgotten():
        found = _matching(attempt, failure, own, operators)
        words = {change.words for change in found}
        line = _place(attempt, found, place if len(words) == 1 else place_of_all)
    if line is None:
        return ""
    where = quote(python_function(attempt.obj).__code__.co_filename, line)
    if len(words) > 1:
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


def _place(attempt: Attempt, found: list[Change], look) -> int | None:
    with contextlib.suppress(TimeUp), deadline(REPAIR):
        return look(attempt, found)
    return None
