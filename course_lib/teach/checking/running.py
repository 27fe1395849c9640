"""Running the learner's object once, on one case, and judging what came out."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from course_lib.simulator.errors import NotCompilable
from course_lib.teach.checking.deadline import TimeUp
from course_lib.teach.checking.engines import Gpu, Simulator
from course_lib.teach.checking.fences import (
    HUGE,
    NAN,
    FencedArray,
    poison,
    poisoned_allocation,
    same_bits,
)
from course_lib.teach.checking.snapshot import Changed, Watched
from course_lib.teach.checking.writers import stored_in_order
from course_lib.teach.exercise import Case, Exercise
from course_lib.teach.explaining.places import element

RACES = "race", "race-between-blocks"  # kinds of findings


@dataclass
class Attempt:
    """One check of one object."""

    exercise: Exercise
    obj: Callable
    cases: Sequence[Case]
    seed: int
    #: The thread orders in which what is tried in place of `obj` must be right.
    orders: tuple[str, ...] = ("forward", "reverse")
    #: What to tell beside a pass, and whether it was compiled for a GPU.
    notes: list[str] = field(default_factory=list)
    compiled: bool = False

    @property
    def largest(self) -> Case:
        """The case with the most elements."""
        return max(self.cases, key=lambda case: case.size[1:])


@dataclass
class Failure:
    """The first thing that went wrong, with what is known about it.

    `problem` is one of "finding" (the sanitizer's), "raised", "endless", "outside", "input",
    "returned" (`text` says what is wrong with what came, or with how it was made), "values",
    "twice" (two threads write an element, in vain), "compile" (numba cannot) and "forbidden" (the
    compiler's finding). The sanitizer's goes first: what else is wrong may follow from it, and is
    then in `also`.
    """

    problem: str
    run: Run
    finding: object = None
    also: Failure | None = None
    text: str = ""
    error: BaseException | None = None
    array: str = ""
    index: tuple[int, ...] = ()
    wrong: np.ndarray | None = None
    seen: str = ""
    cause: str = ""


class Exit(Exception):
    """The learner's code has called `sys.exit`, which would end the session without a verdict."""


@dataclass
class Run:
    """One run on one case. `run.x` is the array called x, as the learner's code gets it.

    Attributes
    ----------
    arrays: the fenced arrays, by name: inputs, and for a kernel the outputs.
    expected, got: the outputs by name; `got` is complete once `execute` has returned. `expected`
        is worked out unless it is given.
    """

    exercise: Exercise
    case: Case
    engine: Simulator | Gpu
    poison: int = NAN
    arrays: dict[str, FencedArray] = field(default_factory=dict)
    expected: dict[str, np.ndarray] | None = None
    got: dict[str, object] = field(default_factory=dict)
    watched: Watched | None = None

    def __post_init__(self):
        if self.expected is None:
            self.expected = self.exercise.expected(self.case)
        self._given = {}
        for name, value in self.case.inputs.items():
            if np.ndim(value):
                self.arrays[name] = FencedArray(value.shape, value.dtype, value)
            else:
                self._given[name] = value
        if self.exercise.kind == "kernel":
            for name, values in self.expected.items():
                dtype, start = self.exercise.output_dtype(self.case, name), self.exercise.start
                fill = poison(dtype, self.poison) if start is None else dtype.type(start)
                self.arrays[name] = FencedArray(values.shape, dtype, fill)
        for name, array in self.arrays.items():
            self._given[name] = self.engine.prepare(array)

    @property
    def others(self) -> dict[str, np.ndarray]:
        """Which elements of each output are somebody else's: those that are to stay as they are.

        That can be told where the outputs hold something before the launch, and each element is the
        business of one thread at most.
        """
        exercise = self.exercise
        if exercise.start is None or not exercise.once:
            return {}
        return {name: values == exercise.start for name, values in self.expected.items()}

    def __getattr__(self, name: str):
        try:
            return self.__dict__["_given"][name]
        except KeyError:
            raise AttributeError(f"this run has no array {name!r}") from None

    def launch(self, kernel, *arguments) -> None:
        """Launch `kernel` on the case's grid and block."""
        self.engine.launch(kernel, self.case.grid, self.case.block, *arguments)

    def execute(self, obj: Callable) -> None:
        """Run the learner's object and collect the outputs. Lets its errors through."""
        exercise = self.exercise
        if exercise.kind != "kernel" and self.engine.simulated:
            obj = self.watched = Watched(obj, beside=[*self._given.values()])
        with self.engine.active(self), poisoned_allocation(self.poison), _grad_mode_kept():
            try:
                returned = self._call(obj)
            except SystemExit as error:
                raise Exit(
                    "this ends Python itself: return, or raise an error"
                ).with_traceback(error.__traceback__) from None
            except Exception:
                self._require_unchanged()  # what was changed may have led to it
                raise
            self._require_unchanged()
        for name, array in self.arrays.items():
            self.engine.finish(array, self._given[name])
        if self.watched is not None:
            self.engine.results = self.watched.results(exercise.outputs)
        if exercise.kind == "kernel":
            self.got = {name: self.arrays[name].view for name in exercise.outputs}
        else:
            several = (tuple, list) if len(exercise.outputs) > 1 else tuple
            values = tuple(returned) if isinstance(returned, several) else (returned,)
            if len(values) == len(exercise.outputs):
                self.got = dict(zip(exercise.outputs, map(_to_numpy, values), strict=True))
            else:
                self.got = {exercise.outputs[0]: returned}

    def _require_unchanged(self) -> None:
        if self.watched is not None and self.watched.changed:
            raise Changed(f"it changes its input {self.watched.changed}, which others still need")

    def _call(self, obj: Callable):
        if self.exercise.call is not None:
            return self.exercise.call(obj, self)
        if self.exercise.kind == "kernel":
            return self.launch(obj, *self._given.values())
        return obj(*self._given.values())


@contextlib.contextmanager
def _grad_mode_kept() -> Iterator[None]:
    """Leave PyTorch's tape switched on or off as it was, whatever the code inside is stopped in."""
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(before)


def _to_numpy(value):
    """Return an array from whichever library as a NumPy array, anything else as it is."""
    if hasattr(value, "copy_to_host"):
        return value.copy_to_host()
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value


def attempt_case(attempt: Attempt, case: Case, engine: Simulator | Gpu) -> Failure | None:
    """Run the object once and return what is wrong, None if nothing is."""
    # A NaN that the kernel reads from its output is lost in `max`; a huge number is not.
    run = Run(attempt.exercise, case, engine, HUGE if engine.order == "reverse" else NAN)
    try:
        run.execute(attempt.obj)
        failure = _first_written(attempt, run, judge(run))
    except TimeUp as error:
        failure = Failure("endless", run, error=error)
    except NotCompilable as error:  # whatever else stood there would not make it right
        failure = Failure("compile", run, error=error)
    except Changed as error:
        failure = Failure("returned", run, text=str(error))
    except Exception as error:  # whatever the learner's code raises is the finding
        failure = Failure("raised", run, error=error)
    if engine.findings:
        told = _telling(engine.findings)
        changed = failure.array if failure is not None and failure.problem == "input" else None
        if changed and told.kind in RACES and re.search(rf"\b{changed}\b", told.message):
            return failure  # no barrier would mend that
        return Failure("finding", run, finding=told, also=failure)
    if failure is None and engine.twice:
        name, place, *_ = engine.twice
        index = np.unravel_index(place, run.arrays[name].shape)
        return Failure("twice", run, array=name, index=tuple(map(int, index)))
    if failure is None and engine.borrowed:
        name, site = engine.borrowed
        text = f"it changes its input {name}, which others may read meanwhile, in line "
        return Failure("returned", run, text=f"{text}{site.line}, `{site.source}`")
    if failure is None and engine.foreign:
        name, place, site = engine.foreign
        index = np.unravel_index(place, run.arrays[name].shape)
        text = (
            f"it writes {element(name, index)}, which belongs to somebody else, in line "
            f"{site.line}, `{site.source}`: the same number again is a write, too"
        )
        return Failure("returned", run, text=text)
    if failure is None:
        engine.got = {name: np.copy(value) for name, value in run.got.items()}
    return failure


def _first_written(attempt: Attempt, run: Run, failure: Failure | None) -> Failure | None:
    """Return how the first wrong output fails, in the order in which the kernel stores them.

    What is wrong in later ones often follows.
    """
    if failure is None or failure.problem != "values" or run.exercise.kind != "kernel":
        return failure
    for name in stored_in_order(attempt.obj, run.exercise.parameters):
        found = _judge_output(run, name, run.expected[name]) if name in run.expected else None
        if found is not None:
            return found
    return failure


def _telling(findings: Sequence):
    """Return the finding to tell: the first, or that which explains it."""
    first = findings[0]
    if first.kind in ("race", "uninitialised-read"):
        # Threads that wait at different barriers race past both of them.
        apart = next((each for each in findings if each.kind == "barrier-divergence"), None)
        if apart is not None:
            return apart
    if first.kind == "uninitialised-read":
        # Memory that is written too late is not yet written when it is read too early.
        races = (each for each in findings if each.kind == "race" and first.line in each.lines)
        return next(races, first)
    return first


def judge(run: Run) -> Failure | None:
    """Return what is wrong with what a run left, None if nothing is."""
    for name, array in run.arrays.items():
        index = array.broken_at()
        if index is not None:
            return Failure("outside", run, array=name, index=(index,))
    for name, value in run.case.inputs.items():
        if name not in run.arrays:
            continue
        changed = ~same_bits(run.arrays[name].view, value)
        if changed.any():
            return Failure("input", run, array=name, index=_first(changed), wrong=changed)
    if text := _miscounted(run):
        return Failure("returned", run, text=text)
    found = (_judge_output(run, *each) for each in run.expected.items())
    return next((failure for failure in found if failure is not None), None)


def _miscounted(run: Run) -> str:
    """Return what to say where another number of things was returned than there are outputs."""
    if _returned_nothing(run) or run.got.keys() >= run.expected.keys():
        return ""
    names = ", ".join(run.expected)
    (found,) = run.got.values()
    what = f"{len(found)}" if isinstance(found, tuple | list) else f"one, of type {_kind(found)}"
    return f"it should return {len(run.expected)} values, {names}; it returned {what}"


def _returned_nothing(run: Run) -> bool:
    """Tell whether the learner's function itself did, whatever was made of that."""
    return run.watched is not None and any(each is None for each in run.watched.returned[-1:])


def _judge_output(run: Run, name: str, expected: np.ndarray) -> Failure | None:
    got = run.got.get(name)
    dtype = run.exercise.output_dtype(run.case, name)
    nothing = got is None or _returned_nothing(run)
    if nothing or not isinstance(got, np.ndarray | np.generic):
        what = "nothing (None): is the return missing?" if nothing else f"a {_kind(got)}"
        return Failure("returned", run, array=name, text=f"it returned {what}")
    if got.shape != expected.shape:
        text = f"{name} has shape {got.shape}, and should have {expected.shape}"
        return Failure("returned", run, array=name, text=text)
    if got.dtype != dtype:
        text = f"{name} is {got.dtype}, and should be {dtype}"
        return Failure("returned", run, array=name, text=text)
    wrong = ~close(run, expected, got)
    if wrong.any():
        return Failure("values", run, array=name, index=_first(wrong), wrong=wrong)
    return None


def close(run: Run, expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Return where `got` is within the exercise's tolerance. NaN is close to nothing."""
    inputs = [a.view for name, a in run.arrays.items() if name in run.case.inputs]
    allowed = run.exercise.tolerance.allowed(expected, inputs)
    with np.errstate(invalid="ignore"):
        got = got.astype(np.float64)
        return (got == expected) | (np.abs(got - expected) <= allowed)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(np.flatnonzero(mask)[0], mask.shape))


def _kind(value: object) -> str:
    return type(value).__name__
