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
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from course_lib.teach.checking.deadline import TimeUp, deadline
from course_lib.teach.checking.running import Attempt, Failure
from course_lib.teach.display import quote
from course_lib.teach.exercise import python_function
from course_lib.teach.explaining.mutation.changes import (
    EVERY,
    Change,
    changes,
    changes_alike,
    forgotten,
    parsed,
)
from course_lib.teach.explaining.mutation.grafts import Graft, definitions, grafts
from course_lib.teach.explaining.mutation.likeness import nearest_first, same_code
from course_lib.teach.explaining.mutation.lines import lines_of
from course_lib.teach.explaining.mutation.matching import Experiment
from course_lib.teach.explaining.mutation.repair import (
    failing_before_others,
    only_place,
    passes,
    place,
    place_of_all,
)
from course_lib.teach.explaining.mutation.words import words_for

Found = TypeVar("Found")

#: Seconds of the processor to try the solution's lines in the learner's code, to look for changes
#: that match, for the line after that, and for the line alone where that led nowhere.
GRAFTING, MATCHING, REPAIR, ALONE = 0.55, 0.45, 0.15, 0.4


def cause(attempt: Attempt, failure: Failure, operators=EVERY, *, thorough: bool = True) -> str:
    """Return the sentence, empty if nothing matches or what matches does not agree.

    Where the failure tells its cause as a rule, the search need not be `thorough`: pieces of the
    solution are tried, and what they show is told if it is something else.
    """
    try:
        own = parsed(attempt.obj)
    except (OSError, SyntaxError):  # without its source there is nothing to compare
        return ""
    if failure.run.engine.order not in attempt.orders:
        attempt = replace(attempt, orders=(failure.run.engine.order, *attempt.orders))
    with forgotten():
        told = _grafted(attempt, failure, own, operators)
        if thorough:
            told = _looked_further(attempt, failure, own, operators, told)
        elif _is_told_anyhow(failure, told):
            told = Told()
    return _sentence(attempt, told)


@dataclass(frozen=True)
class Told:
    """What is known: the line, and what is wrong in it; or `missing` before it.

    It is `sure` if what makes it right belongs there.
    """

    line: int | None = None
    words: str = ""
    sure: bool = False
    missing: bool = False


def _looked_further(attempt: Attempt, failure: Failure, own, operators, told: Told) -> Told:
    """Return what is known after the solution, and then the learner's code, have been changed."""
    if not told.words:
        line, words = _matched(attempt, failure, own, operators)
        if told.line in (None, line):
            told = Told(line, words, sure=line is not None)
    if not told.words or not told.sure:
        known = told.line if told.sure else None
        found = _in_time(ALONE, lambda: only_place(attempt, failure, operators, known))
        line, words = found or (None, "")
        if line is not None:
            agreed = told.line in (None, line)
            told = replace(told, line=line, words=told.words or words) if agreed else Told()
    return told


def _is_told_anyhow(failure: Failure, told: Told) -> bool:
    """Tell whether a finding, which has its line and often a cure, says as much."""
    if told.words.startswith(("without one of its cuda.sync", "without the atomic")):
        return True
    return failure.problem == "finding" and not (told.words and told.sure)


def _sentence(attempt: Attempt, told: Told) -> str:
    if told.line is None:
        return ""
    where = quote(python_function(attempt.obj).__code__.co_filename, told.line)
    if not told.words:
        where = f"one more before {where}" if told.missing else f"another line in place of {where}"
        others = "" if told.missing else _own_calls(attempt, told.line)
        return f"{where},{others} makes every case right"
    what = "code" if attempt.exercise.kind == "launcher" else attempt.exercise.kind
    where = f"it is missing before {where}" if told.missing else where
    return f"your {what} behaves exactly like the right one {told.words}; {where}"


def _own_calls(attempt: Attempt, line: int) -> str:
    """Return " or another `f`," for what a line calls of the learner's own: it may be wrong too."""
    function = python_function(attempt.obj)
    texts = [each.text for each in lines_of(parsed(attempt.obj).body[0]) if each.number <= line]
    called = dict.fromkeys(re.findall(r"(?<![.\w])\w+(?=\()", texts[-1] if texts else ""))
    own = [name for name in called if _file(function.__globals__.get(name)) == _file(function)]
    return "".join(f" or another `{name}`," for name in own)


def _file(obj: object) -> str:
    return getattr(getattr(python_function(obj), "__code__", None), "co_filename", "")


def _grafted(attempt: Attempt, failure: Failure, own, operators) -> Told:
    """Return the only line that a piece of the solution makes right, and what is wrong in it.

    Where several lines may be made right in the same words, the last of them.
    """
    found: dict[bool, dict[int, list[Graft]]] = {True: {}, False: {}}
    with contextlib.suppress(TimeUp), deadline(GRAFTING):
        failing_first = failing_before_others(attempt, failure.run.case)
        for graft in grafts(own, attempt.exercise.solution):
            if passes(failing_first, graft.text):
                found[graft.sure].setdefault(graft.line, []).append(graft)
    sure = bool(found[True])
    for line, source in definitions(own.body[0]).items():
        if source in found[sure]:  # what is wrong there is only seen in the line
            found[sure].pop(line, None)
    told = []
    for line, those in sorted(found[sure].items()):
        words = _in_time(REPAIR, lambda those=those: _first_words(those, own, attempt, operators))
        told.append(Told(line, words or "", sure, all(graft.missing for graft in those)))
    if len({each.words for each in told}) != 1 or len(told) > 1 and not told[0].words:
        return Told()
    return told[-1]


def _first_words(found: list[Graft], own, attempt: Attempt, operators) -> str:
    """Return the words for the smallest piece that has any."""
    also = attempt.exercise.solution
    told = (words_for(graft.text, own, attempt.obj, operators, also) for graft in reversed(found))
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


def _in_time(seconds: float, look: Callable[[], Found]) -> Found | None:
    with contextlib.suppress(TimeUp), deadline(seconds):
        return look()
    return None
