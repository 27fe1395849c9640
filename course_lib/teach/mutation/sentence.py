"""The sentence: what would make a right kernel behave like the learner's, and in which line it is.

First each difference between the learner's code and the solution is undone in the learner's code:
if only in one line that makes every case right, the mistake is there. Then the solution is changed:
a cause is named if all changes that reproduce the learner's behaviour are told in the same words,
or if one of them makes the learner's very code, up to names; and only with the line in which
undoing it makes every case right. Where they agree on the line alone, no more than that is told.
Last, for code of another form, what is changed is the learner's code itself.

Time is short: the changes that bring the solution nearest to the learner's code come first, and
when the time is up, what was not tried has no say.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

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
from course_lib.teach.mutation.grafts import grafts
from course_lib.teach.mutation.likeness import nearest_first, same_code
from course_lib.teach.mutation.matching import Experiment
from course_lib.teach.mutation.repair import (
    failing_before_others,
    only_place,
    passes,
    place,
    place_of_all,
)
from course_lib.teach.mutation.words import words_for
from course_lib.teach.running import Attempt, Failure

Found = TypeVar("Found")

#: Seconds of the processor to try the solution's lines in the learner's code, to look for changes
#: that match, for the line after that, and for the line alone where that led nowhere.
GRAFTING, MATCHING, REPAIR, ALONE = 0.6, 0.6, 0.2, 0.5


def cause(attempt: Attempt, failure: Failure, operators=EVERY) -> str:
    """Return the sentence, empty if nothing matches or what matches does not agree."""
    try:
        own = parsed(attempt.obj)
    except (OSError, SyntaxError):  # without its source there is nothing to compare
        return ""
    with forgotten(), _uncollected():
        line, words, sure = _grafted(attempt, failure, own, operators)
        if not words:
            other, its_words = _matched(attempt, failure, own, operators)
            if line is None or line == other:
                line, words = other, its_words
        if not words or not sure:
            known = line if sure else None
            found = _in_time(ALONE, lambda: only_place(attempt, failure, operators, known))
            other, its_words = found or (None, "")
            if line is None or line == other:
                line, words = other, words or its_words
            elif other is not None:
                line, words = None, ""
    return _sentence(attempt, line, words)


def cause_by_grafts(attempt: Attempt, failure: Failure, operators=EVERY) -> str:
    """Return the sentence if a piece of the solution mends it, and it isn't what is told anyhow."""
    try:
        own = parsed(attempt.obj)
    except (OSError, SyntaxError):
        return ""
    with forgotten(), _uncollected():
        line, words, sure = _grafted(attempt, failure, own, operators)
    told = words.startswith(("without one of its cuda.sync", "without the atomic"))
    # A finding has its line, and often a cure.
    told |= failure.problem == "finding" and not (words and sure)
    return "" if told else _sentence(attempt, line, words)


def _sentence(attempt: Attempt, line: int | None, words: str) -> str:
    if line is None:
        return ""
    where = quote(python_function(attempt.obj).__code__.co_filename, line)
    if not words:
        return f"a small change in {where}, makes every case right"
    what = "code" if attempt.exercise.kind == "launcher" else attempt.exercise.kind
    return f"your {what} behaves exactly like the right one {words}; {where}"


def _grafted(attempt: Attempt, failure: Failure, own, operators) -> tuple[int | None, str, bool]:
    """Return the only line that a piece of the solution makes right, what is wrong in it, and
    whether the piece belongs there.

    Where several lines may be made right in the same words, the last of them.
    """
    found: dict[bool, dict[int, list[str]]] = {True: {}, False: {}}
    with contextlib.suppress(TimeUp), deadline(GRAFTING):
        failing_first = failing_before_others(attempt, failure.run.case)
        for graft in grafts(own, attempt.exercise.solution):
            if passes(failing_first, graft.text):
                found[graft.sure].setdefault(graft.line, []).append(graft.text)
    sure = bool(found[True])
    told = {
        line: _in_time(REPAIR, lambda texts=texts: _first_words(texts, own, attempt, operators))
        for line, texts in found[sure].items()
    }
    if len(set(told.values())) != 1:
        return None, "", False
    line, words = max(told.items())
    return (line, words or "", sure) if len(told) == 1 or words else (None, "", False)


def _first_words(texts: list[str], own, attempt: Attempt, operators) -> str:
    """Return the words for the smallest piece that has any."""
    told = (words_for(text, own, attempt.obj, operators) for text in reversed(texts))
    return next(filter(None, told), "")


def _matched(attempt: Attempt, failure: Failure, own, operators) -> tuple[int | None, str]:
    """Return the line that changes of the solution point to, and what they do if they agree."""
    found = _matching(attempt, failure, own, operators)
    words = {change.words for change in found}
    look = place if len(words) == 1 else place_of_all
    line = _in_time(REPAIR, lambda: look(attempt, found)) if found else None
    return line, words.pop() if line is not None and len(words) == 1 else ""


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


def _in_time(seconds: float, look: Callable[[], Found]) -> Found | None:
    with contextlib.suppress(TimeUp), deadline(seconds):
        return look()
    return None
