"""Which wrong versions of the solution behave exactly like the learner's object, on every input.

To behave alike is to give the same results within rounding, the same findings of the sanitizer and
the same errors: on every case of the exercise, with outputs that start as NaN and as -777, and on
larger inputs that are drawn afresh.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from course_lib.teach.checking.deadline import TimeUp
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.fences import NAN, SMALL
from course_lib.teach.checking.running import Attempt, Failure, Run, judge
from course_lib.teach.exercise import Case

#: Loop iterations after which a changed kernel counts as endless: right ones take a few hundred.
STEPS = 10_000

#: How far results of sums in another order may be apart, relative to their size.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Behaviour:
    """What a run did: the outputs, or the kind of error that ended it, and the findings.

    It is `telling` if it is wrong in more than numbers that overflow, as many wrong ones do alike.
    """

    outputs: dict[str, np.ndarray]
    error: str
    findings: tuple
    right: bool
    telling: bool

    def same(self, other: Behaviour, run: Run) -> bool:
        """Tell whether two runs on one case did the same."""
        if (self.error, self.findings) != (other.error, other.findings):
            return False
        if self.outputs.keys() != other.outputs.keys():
            return False
        return all(_alike(run, self.outputs[n], other.outputs[n]) for n in self.outputs)


def fresh(attempt: Attempt, stream: int) -> list[Case]:
    """Return other cases of the exercise, from small to large.

    The largest is left out: it is there for the verdict, and takes too long to be run often.
    """
    drawn = attempt.exercise.cases(np.random.default_rng([attempt.seed, stream]))
    return sorted(drawn, key=lambda case: case.size[1:])[:-1]


class Reproduction:
    """The learner's object on every case, each run once, to compare others with it."""

    def __init__(self, attempt: Attempt, failing: Case):
        self.attempt = attempt
        filled = [case for case in fresh(attempt, 1) if not case.size[0]]
        rest = [case for case in attempt.cases if case is not failing]
        #: What is run, in this order: most others differ in the first, which is quick.
        self.trials = [
            (failing, NAN, False),
            *itertools.product((failing, *rest, *filled[-2:]), (NAN, SMALL), [True]),
        ]
        self._own: dict[int, tuple[Behaviour, Run]] = {}
        self._expected: dict[int, dict] = {}

    def reproduced(self, build: Callable[[], Callable]) -> bool:
        """Tell whether what is built is wrong exactly as the learner's object is."""
        try:
            obj = build()
        except SyntaxError:  # such a change makes no kernel
            return False
        wrong = telling = False
        for number in range(len(self.trials)):
            other, _ = self._behaviour(obj, number)
            own, run = self._learners(number)
            sanitized = self.trials[number][2]
            wrong |= sanitized and not other.right
            telling |= sanitized and other.telling
            if not other.same(own, run) or sanitized and not wrong:
                return False  # a right one that is near enough is no cause
        return telling

    def _learners(self, number: int):
        if number not in self._own:
            self._own[number] = self._behaviour(self.attempt.obj, number)
        return self._own[number]

    def _behaviour(self, obj: Callable, number: int) -> tuple[Behaviour, Run]:
        case, poison, sanitized = self.trials[number]
        engine = Simulator("forward", self.attempt.seed, sanitized, max_steps=STEPS)
        key = id(case)
        run = Run(self.attempt.exercise, case, engine, poison, expected=self._expected.get(key))
        self._expected[key] = run.expected
        error, right, telling = "", False, True
        try:
            with warnings.catch_warnings(action="ignore"):  # nobody asked for what is tried
                run.execute(obj)
            problem = judge(run)
            right = not engine.findings and not engine.twice and problem is None
            if right or problem and problem.problem == "values" and not engine.findings:
                telling = not right and _is_telling(run, problem)
        except TimeUp:
            raise
        except Exception as raised:  # whatever it raises, the other must raise as well
            error = type(raised).__name__
        outputs = {n: v for n, v in run.got.items() if isinstance(v, np.ndarray | np.generic)}
        return Behaviour(outputs, error, _found(engine), right, telling), run


def _is_telling(run: Run, problem: Failure) -> bool:
    got = run.got[problem.array]
    return got.dtype.kind != "f" or bool(np.isfinite(got[problem.wrong]).any())


def _found(engine: Simulator) -> tuple:
    """Return what the sanitizer found; of accesses outside arrays also how often, at the least."""
    outside = [each.count for each in engine.findings if each.kind == "out-of-bounds"]
    kinds = frozenset(each.kind for each in engine.findings)
    return kinds, min(outside, default=0), bool(engine.twice)


def _alike(run: Run, one: np.ndarray, other: np.ndarray) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind not in "f":
        return np.array_equal(one, other)
    one, other = one.astype(np.float64), other.astype(np.float64)
    inputs = [a.view for name, a in run.arrays.items() if name in run.case.inputs]
    with np.errstate(invalid="ignore"), contextlib.suppress(ValueError):
        allowed = run.exercise.tolerance.allowed(other, inputs) + ROUNDING * np.abs(other)
        near = (one == other) | (np.abs(one - other) <= allowed)
        return bool((near | np.isnan(one) & np.isnan(other)).all())
    return False
