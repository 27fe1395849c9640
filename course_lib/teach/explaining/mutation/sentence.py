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

import ast
import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
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
    located,
    parsed,
    program,
)
from course_lib.teach.explaining.mutation.grafts import Graft, definitions, grafts
from course_lib.teach.explaining.mutation.likeness import nearest_first, nearest_form, same_code
from course_lib.teach.explaining.mutation.lines import lines_of
from course_lib.teach.explaining.mutation.matching import Reproduction
from course_lib.teach.explaining.mutation.repair import (
    failing_before_others,
    mended_lines,
    passes,
    place,
    place_of_all,
)
from course_lib.teach.explaining.mutation.words import words_for

Found = TypeVar("Found")

#: Seconds of the processor to try the solution's lines in the learner's code, to look for changes
#: that match, for the line after that, and for the line alone where that led nowhere.
GRAFTING, MATCHING, REPAIR, ALONE = 0.85, 0.2, 0.15, 0.35


def cause(attempt: Attempt, failure: Failure, operators=EVERY, *, thorough: bool = True) -> str:
    """Return the sentence, empty if nothing matches or what matches does not agree.

    Where the failure tells its cause as a rule, the search need not be `thorough`: pieces of the
    solution are tried, and what they show is told if it is something else.
    """
    try:
        own = program(attempt.obj)
    except (OSError, SyntaxError):  # without its source there is nothing to compare
        return ""
    if failure.run.engine.order not in attempt.orders:
        attempt = replace(attempt, orders=(failure.run.engine.order, *attempt.orders))
    experiments = (Grafting, GRAFTING), (Matching, MATCHING), (Mending, ALONE)
    told, left = Told(), 0.0  # seconds that an experiment leaves are the next one's
    with forgotten():
        solution = nearest_form(attempt.exercise, own)
        attempt = replace(attempt, exercise=replace(attempt.exercise, solution=solution))
        for kind, seconds in experiments if thorough else experiments[:1]:
            if not told.words or not told.sure:
                experiment = kind(attempt, failure, own, operators, told)
                end = time.process_time() + seconds + left
                found = _in_time(seconds + left, experiment.found())
                left = max(0.0, end - time.process_time())
                told = experiment.conclusion(found)
        if not thorough and _is_told_anyhow(failure, told):
            told = Told()
        return _sentence(attempt, told)


def _in_time(seconds: float, found: Iterable[Found]) -> list[Found]:
    """Return what is found until the time is up."""
    kept = []
    with contextlib.suppress(TimeUp), deadline(seconds):
        for each in found:
            kept.append(each)  # noqa: PERF402 - what comes before the time is up stays
    return kept


@dataclass(frozen=True)
class Told:
    """What is known: the line, and what is wrong in it; or `missing` before it.

    It is `sure` if what makes it right belongs there; `twins` if other lines change with it.
    """

    line: int | None = None
    words: str = ""
    sure: bool = False
    missing: bool = False
    twins: bool = False


@dataclass(frozen=True)
class Experiment:
    """One way to look for the cause; `told` is what is known before."""

    attempt: Attempt
    failure: Failure
    own: ast.Module
    operators: Iterable[Callable]
    told: Told


class Grafting(Experiment):
    """Each difference between the learner's code and the solution is undone in the learner's."""

    def found(self) -> Iterator[Graft]:
        """Yield the pieces of the solution with which every case is right."""
        failing_first = failing_before_others(self.attempt, self.failure.run.case)
        for graft in grafts(self.own, self.attempt.exercise.solution):
            if passes(failing_first, graft.text):
                yield graft

    def conclusion(self, found: list[Graft]) -> Told:
        """Return the only line that a piece makes right, and what is wrong in it.

        Where several lines may be made right in the same words, the last of them.
        """
        lines: dict[int, list[Graft]] = {}
        sure = any(graft.sure for graft in found)
        for graft in found:
            if graft.sure == sure:
                lines.setdefault(graft.line, []).append(graft)
        for function in self.own.body:
            for line, source in definitions(function).items():
                if source in lines:  # what is wrong there is only seen in the line
                    lines.pop(line, None)
        told = []
        for line, those in sorted(lines.items()):
            words = next(iter(_in_time(REPAIR, self._words(those))), "")
            missing, twins = all(each.missing for each in those), all(map(self._twins, those))
            told.append(Told(line, words, sure, missing, twins))
        if len({each.words for each in told}) != 1 or len(told) > 1 and not told[0].words:
            return Told()
        return told[-1]

    def _twins(self, graft: Graft) -> bool:
        """Tell whether the piece stands in several lines."""
        both = [ast.unparse(each).splitlines() for each in (self.own, ast.parse(graft.text))]
        return len(both[0]) == len(both[1]) and sum(a != b for a, b in zip(*both, strict=True)) > 1

    def _words(self, found: list[Graft]) -> Iterator[str]:
        """Yield the words for the pieces that have any, from the smallest on."""
        about = self.own, self.attempt.obj, self.operators
        return filter(None, (words_for(graft.text, *about) for graft in reversed(found)))


class Matching(Experiment):
    """The solution is changed until it is wrong as the learner's code is."""

    def found(self) -> Iterator[Change]:
        """Yield the changes of the solution that match; the one that makes the very code last."""
        solution = self.attempt.exercise.solution
        about = solution, self.operators, program(solution)
        experiment, seen = Reproduction(self.attempt, self.failure.run.case), set()
        for change in nearest_first((*changes(*about), *changes_alike(*about)), self.own):
            if change.text not in seen:
                seen.add(change.text)
                if experiment.reproduced(change.build):
                    yield change
                    if same_code(change.text, self.own):
                        return

    def conclusion(self, found: list[Change]) -> Told:
        """Return the line that the changes point to, and what they do if they agree."""
        if found and same_code(found[-1].text, self.own):
            found = found[-1:]
        words = {change.words for change in found}
        look = place if len(words) == 1 else place_of_all
        lines = (look(self.attempt, each) for each in [found] if each)
        line = next(iter(_in_time(REPAIR, lines)), None)
        if self.told.line not in (None, line):
            return self.told
        agreed = line is not None and len(words) == 1
        return Told(line, words.pop() if agreed else "", sure=line is not None)


class Mending(Experiment):
    """What is changed is the learner's code itself."""

    @property
    def known(self) -> int | None:
        """The line that is sure to be wrong, if there is one."""
        return self.told.line if self.told.sure else None

    def found(self) -> Iterator[tuple[int, str]]:
        """Yield the lines in which a change makes every case right, with the words."""
        found = mended_lines(self.attempt, self.failure, self.operators, self.own, self.known)
        return found if self.known is None else itertools.islice(found, 1)

    def conclusion(self, found: list[tuple[int, str]]) -> Told:
        """Return the line if there is but one, and none is known that every case is right with."""
        line, words = found[0] if len(found) == 1 else (self.known, "")
        if line is None or self.told.line not in (None, line):
            return self.told
        return replace(self.told, line=line, words=self.told.words or words)


def _is_told_anyhow(failure: Failure, told: Told) -> bool:
    """Tell whether a finding, which has its line and often a cure, says as much."""
    if told.words.startswith(("without one of its cuda.sync", "without the atomic")):
        return True
    return failure.problem == "finding" and not (told.words and told.sure)


def _sentence(attempt: Attempt, told: Told) -> str:
    if told.line is None:
        return ""
    function, line = located(attempt.obj, told.line)
    called = function.__name__ if function is not python_function(attempt.obj) else ""
    where = quote(function.__code__.co_filename, line, called)
    if not told.words:
        where = f"one more before {where}" if told.missing else f"another line in place of {where}"
        others = "" if told.missing else _own_calls(function, line, attempt.exercise.solution)
        twins = " with the same in another line," if told.twins else ""
        return f"{where},{others}{twins} makes every case right"
    what = "code" if attempt.exercise.kind == "launcher" else attempt.exercise.kind
    where = f"it is missing before {where}" if told.missing else where
    return f"your {what} behaves exactly like the right one {told.words}; {where}"


def _own_calls(function: Callable, line: int, solution: Callable) -> str:
    """Return " or another `f`," for what a line calls of the learner's own: it may be wrong too.

    What the solution has as well, such as a function that is given, is not.
    """
    texts = [each.text for each in lines_of(parsed(function).body[0]) if each.number <= line]
    called = dict.fromkeys(re.findall(r"(?<![.\w])\w+(?=\()", texts[-1] if texts else ""))
    right = set(map(ast.unparse, program(solution).body[1:]))
    helpers = program(function).body[1:]
    own = {each.name for each in helpers if ast.unparse(each) not in right}
    return "".join(f" or another `{name}`," for name in called if name in own)
