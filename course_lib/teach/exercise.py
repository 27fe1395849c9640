"""What an exercise is: one object, in the file of its lesson.

A lesson's exercises live in `course_lib/teach/exercises/lesson_NN.py`. Each is an `Exercise` at
module level; the finished code is an ordinary function or kernel in the same file. Nothing else
has to be registered: `find("relu")` looks for the line `name="relu",` in those files, and imports
the one that has it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the float64 reference, and why.

    An element passes when `|got - expected| <= relative * |expected| + absolute * scale`, where
    `scale` is 1, or the largest input if `scaled` (for sums, whose rounding grows with the
    numbers added and not with their total).
    """

    relative: float
    absolute: float
    reason: str
    scaled: bool = False

    def allowed(self, expected: np.ndarray, inputs: Iterable[np.ndarray]) -> np.ndarray:
        """Return the allowed absolute difference of each element, float64, shaped as expected."""
        scale = 1.0
        if self.scaled:
            scale = max((float(np.abs(x).max()) for x in inputs if x.size), default=0.0)
        expected = np.where(np.isfinite(expected), expected, 0.0)  # what is infinite is exact
        return self.relative * np.abs(expected) + self.absolute * scale


#: The lesson that explains where float64 comes from.
FLOAT64_LESSON = "03"

EXACT = Tolerance(0.0, 0.0, "the result is a copy or a single rounding, so it is exact")


@dataclass(frozen=True)
class Case:
    """One launch on one set of inputs. Build it with `case(grid, block, x=..., y=...)`."""

    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    inputs: dict[str, np.ndarray]

    @property
    def threads(self) -> int:
        """Number of threads the launch starts."""
        return int(np.prod(self.grid)) * int(np.prod(self.block))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs."""
        return [np.shape(x) for x in self.inputs.values()]

    @property
    def size(self) -> tuple[bool, int, int]:
        """Sort key: input elements, then threads. Empty inputs tell least and come last."""
        elements = sum(np.size(x) for x in self.inputs.values())
        empty = any(np.size(x) == 0 for x in self.inputs.values())
        return empty, elements, self.threads


def case(grid: int | tuple[int, ...], block: int | tuple[int, ...], **inputs) -> Case:
    """Return the case of launching `[grid, block]` on the named inputs.

    Inputs are NumPy arrays, or plain numbers for scalar arguments.
    """
    return Case(grid, block, inputs)


@dataclass(frozen=True)
class Exercise:
    """One exercise and everything that checks it.

    Attributes
    ----------
    name: what learners pass to `check`, and the name of the kernel in the lesson.
    title: half a line for the progress table.
    solution: the finished kernel or launcher; `solution(name)` shows its source.
    reference: takes the case's inputs by position, arrays as float64, and returns the expected
        output, or a tuple of them in the order of `outputs`.
    cases: takes a NumPy `Generator` and returns the cases. Their number must not depend on it; the
        values do, the scalars, and the size of the largest case, which exceeds all others.
    hints: three, from a nudge over the idea to nearly the code. Markdown.
    tolerance: an allowed difference that comes with its reason.
    kind: "kernel" for a `@cuda.jit` kernel, "launcher" for a function that starts kernels and
        returns its outputs, "function" for one that computes without any, "answer" for one that
        returns what the learner found out. An answer is compared with what `solution` returns; it
        has no reference and no cases.
    outputs: the names of the outputs. A kernel gets one poisoned array for each.
    dtype: dtype of the outputs, or a dict of them by name; that of the first input when left out.
    start: what the outputs hold before the launch, where the kernel adds to them. Poison when
        left out.
    once: whether each element of the outputs is one thread's business, so that a kernel in which
        several threads do the same work over and over is refused although its result is right.
    about: what the answer is to do beside its result, as `course_lib.teach.checking.work` counts
        it: spare readings of an array, read it in neighbouring pieces, use shuffles, do without
        atomics, keep no more memory where an array is longer; as `rings` does: touch no device's
        row but one's own and a neighbour's.
    repeatable: whether the same bits must come in whatever order the threads run.
    forbids: what the compiler must not find, such as "float64-promotion"; see `simulator.lint`.
        From lesson 3 on no kernel may have that one.
    call: `call(obj, run)` runs the object once. A `Run` holds the case's arrays as attributes and
        `run.launch(kernel, *arguments)`. The default gives a kernel the inputs and then the
        outputs, and a launcher the inputs.
    primal: for a backward exercise, the float64 forward function of the inputs other than `dy`.
        Each output `dx` is the gradient of `(dy * primal(x, ...)).sum()` with respect to `x`;
        tests compare `reference` with finite differences of it.
    forms: other ways to write it, each as pieces of its source and what stands there instead, in
        turn. The cause of a mistake is looked for with the form most like the learner's code.
    """

    name: str
    title: str
    solution: Callable
    reference: Callable | None = None
    cases: Callable[[np.random.Generator], Sequence[Case]] | None = None
    hints: tuple[str, ...] = ()
    tolerance: Tolerance = EXACT
    kind: str = "kernel"
    outputs: tuple[str, ...] = ("y",)
    dtype: np.dtype | dict[str, np.dtype] | None = None
    start: float | None = None
    once: bool = False
    about: tuple[object, ...] = ()
    repeatable: bool = False
    forbids: tuple[str, ...] = ()
    call: Callable | None = None
    primal: Callable | None = None
    forms: tuple[tuple[str, ...], ...] = ()

    @property
    def forbidden(self) -> tuple[str, ...]:
        """What the compiler must not find: in kernels, float64 from the lesson on that tells it."""
        told = self.kind == "kernel" and self.lesson >= FLOAT64_LESSON
        return (*self.forbids, *(("float64-promotion",) if told else ()))

    @property
    def lesson(self) -> str:
        """The lesson's number as text, "01", taken from the file the solution is in."""
        return python_function(self.solution).__module__.rpartition("lesson_")[2]

    @property
    def parameters(self) -> list[str]:
        """Names of the solution's parameters."""
        return list(inspect.signature(python_function(self.solution)).parameters)

    def expected(self, case: Case) -> dict[str, np.ndarray]:
        """Return the float64 reference of each output."""
        exact = [
            np.asarray(x, dtype=np.float64) if np.asarray(x).dtype.kind == "f" else x
            for x in case.inputs.values()
        ]
        values = self.reference(*exact)
        if not isinstance(values, tuple):
            values = (values,)
        return dict(zip(self.outputs, map(np.asarray, values), strict=True))

    def output_dtype(self, case: Case, name: str | None = None) -> np.dtype:
        """Return the dtype that the output called `name` must have, or all of them."""
        found = self.dtype.get(name) if isinstance(self.dtype, dict) else self.dtype
        if found is not None:
            return np.dtype(found)
        return next(np.asarray(x).dtype for x in case.inputs.values() if np.ndim(x))

    def source(self) -> str:
        """Return the finished code as text."""
        return inspect.getsource(python_function(self.solution))


def python_function(obj: Callable) -> Callable:
    """Return the Python function inside a kernel; anything else is returned as it is.

    A module is not asked: its attributes may have to be imported first.
    """
    return getattr(obj, "py_func", obj) if callable(obj) else obj


class _Course(MutableMapping):
    """The exercises by name, in the order of the course.

    The names are read in the text of the lessons' files, which takes a few milliseconds. A lesson
    is imported when one of its exercises is asked for.
    """

    def __init__(self):
        from course_lib.teach import exercises as package

        self._found: dict[str, Exercise | str] = {}  # the name of its module until it is imported
        (folder,) = package.__path__
        for file in sorted(Path(folder).glob("lesson_*.py")):
            for name in re.findall(_NAME, file.read_text(encoding="utf-8"), re.MULTILINE):
                if name in self._found:
                    raise ValueError(f"two exercises are called {name!r}")
                self._found[name] = f"{package.__name__}.{file.stem}"

    def __getitem__(self, name: str) -> Exercise:
        found = self._found[name]
        if isinstance(found, str):
            values = vars(importlib.import_module(found)).values()
            self._found |= {each.name: each for each in values if isinstance(each, Exercise)}
        return self._found[name]

    def __setitem__(self, name: str, exercise: Exercise):
        self._found[name] = exercise

    def __delitem__(self, name: str):
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found


#: The line of a lesson's file that names an exercise.
_NAME = r'^    name="(\w+)",$'

#: All exercises by name.
exercises = cache(_Course)


def find(name: str) -> Exercise:
    """Return the exercise called `name`.

    Raises
    ------
    TypeError: `name` is not text (the arguments of `check` were swapped, for example).
    KeyError: there is no such exercise; the message names the nearest ones.
    """
    if not isinstance(name, str):
        raise TypeError(
            "the name of the exercise comes first, as text: check('relu', relu), "
            f"but the first argument is a {type(name).__name__}"
        )
    if name not in exercises():
        near = difflib.get_close_matches(name, exercises(), n=3, cutoff=0.5)
        if near:
            advice = "did you mean " + " or ".join(repr(other) for other in near) + "?"
        else:
            advice = "there are " + ", ".join(exercises())
        raise UnknownExercise(f"no exercise is called {name!r}: {advice}")
    return exercises()[name]


class UnknownExercise(KeyError):
    """No exercise has that name."""

    def __str__(self) -> str:
        # KeyError would show its message in quotes.
        return self.args[0]
