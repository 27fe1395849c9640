"""The stage of a check that compiles: for a real GPU, and without one.

numba's compiler runs in a process of its own, which also works where kernels are simulated. Where
numba-cuda is not installed (it cannot be on macOS) the stage says so once and lets everything pass.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from pathlib import Path

import course_lib
from course_lib.simulator.linting.lint import LintError, LintUnavailable, lint, prepare
from course_lib.simulator.observe.observer import Observer
from course_lib.simulator.observe.real import observing_with
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.running import Attempt, Failure, Run
from course_lib.teach.display import quote
from course_lib.teach.exercise import python_function

#: Seconds to wait for the compiler. Only its start takes more than a fraction of one.
WAIT = 10.0

#: What is worth telling about a kernel that passes. Wide integers seldom matter to a beginner.
TOLD = ("float64-promotion", "spill")

_told_missing = False


@functools.cache
def prepare_compiler() -> None:
    """Start the compiler in the background, where there is one, so that no check has to wait.

    Once in a session: `lint` itself starts one in the place of one that has ended.
    """
    with contextlib.suppress(LintUnavailable, OSError):
        prepare()


def compile_for_gpu(attempt: Attempt) -> Failure | None:
    """Compile every kernel of the attempt, and note in `attempt` how that went.

    Fails where numba cannot compile a kernel, or finds in it what the exercise forbids.
    """
    global _told_missing
    if attempt.exercise.kind == "function":
        return None
    run = Run(attempt.exercise, attempt.cases[0], Simulator("forward", attempt.seed))
    launches = _Launches()
    with observing_with(launches):
        run.execute(attempt.obj)
    attempt.compiled = True
    for function, arguments in launches.seen.items():
        mine = function is python_function(attempt.obj)
        kernel = attempt.obj if mine else function
        try:
            prepare()  # says that there is no compiler before a thread waits for one
            findings = _within(WAIT, kernel, arguments)
        except LintUnavailable:
            attempt.compiled = False
            if not _told_missing:
                attempt.notes.append("not compiled for a GPU: numba-cuda is not installed here")
                _told_missing = True
            return None
        except LintError as error:
            if not _is_numbas(error):
                attempt.compiled = False
                attempt.notes.append(f"not compiled for a GPU: {str(error).splitlines()[-1]}")
                return None
            return Failure("compile", run, text=_refusal(error, function))
        if findings is None:
            attempt.compiled = False
            attempt.notes.append("not compiled for a GPU this time: the compiler is still starting")
            return None
        for finding in findings:
            if finding.kind in attempt.exercise.forbidden and _is_learners(finding, function):
                return Failure("forbidden", run, finding=finding)
            if finding.kind in TOLD and _is_learners(finding, function):
                attempt.notes.append(
                    f"line {finding.line}, `{finding.source}`: {finding.message}"
                )
    return None


class _Launches(Observer):
    """Notes which functions are launched, each with its first arguments."""

    def __init__(self):
        self.seen = {}

    def on_launch(self, launch):
        """An observer's hook."""
        self.seen.setdefault(launch.program.root, launch.args)


def _within(seconds: float, kernel, arguments) -> list | None:
    """Return what `lint` finds, None if it takes longer; what it raises is raised."""
    outcome = []

    def work():
        try:
            outcome.append((lint(kernel, *arguments), None))
        except Exception as error:
            outcome.append((None, error))

    # A thread that is left behind ends with the compiler's answer, which nobody reads.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        return None
    findings, error = outcome[0]
    if error is not None:
        raise error
    return findings


def _is_learners(finding, function) -> bool:
    """Tell whether a finding is in the kernel's own file, not in the course's building blocks."""
    if finding.filename == function.__code__.co_filename:
        return True
    return Path(course_lib.__file__).parent not in Path(finding.filename).parents


def _is_numbas(error: LintError) -> bool:
    """Tell whether numba refused the kernel: a compiler that breaks down says nothing about it."""
    text = str(error)
    return "\nDuring: " in text or not text.startswith(("Traceback", "the process that compiles"))


def _refusal(error: LintError, function) -> str:
    """Return what is wrong and in which line, in few words of numba's many."""
    file = function.__code__.co_filename
    name = re.escape(Path(file).name)
    found = re.search(rf"{re.escape(file)} \((\d+)\)|File \"[^\"]*{name}\", line (\d+)", str(error))
    where = quote(file, int(found[1] or found[2])) if found else "it for a GPU"
    return f"numba cannot compile {where}\n  cause     {_essence(str(error).strip())}"


#: Python that works in no kernel: what numba's message has in it, and what to say instead.
_NO_PYTHON = [
    (r"exception_match", "try and except do not work in a kernel"),
    (r"DictType|Numba type of <class 'dict'>", "dicts do not work in a kernel"),
    (r"use of yield in a closure", "a kernel has no generator expressions: write a loop"),
    (r"Unknown attribute 'append' of type list",
     "a kernel has no lists, and no list comprehensions: write a loop"),
    (r"type list\(|build_list|\(List\(",
     "lists do not work in a kernel; tuples do, and cuda.local.array"),
    (r"Function\(<class 'str'>\)|mod\(Literal\[str\]|printing .* unicode_type",
     "a kernel cannot make text: give print the numbers themselves"),
    (r"_ol_array_allocate|>>> (zeros|ones|empty|full)\(|NRT required",
     "a kernel cannot make arrays, or compute with whole ones; cuda.local.array does for a few"),
]  # fmt: skip


def _essence(text: str) -> str:
    """Return the one sentence that says what is wrong: the course's, or else numba's."""
    for pattern, meaning in _NO_PYTHON:
        if re.search(pattern, text):
            return meaning
    if found := re.search(r"global name '(\w+)'.*Numba type of <class 'function'>", text):
        return f"{found[1]} is plain Python: it needs @cuda.jit(device=True) above it"
    missing = re.search(
        r"No implementation of function Function\(<\S+ (?:function )?([\w.]+).*\s*>>> \w+(.*)", text
    )
    if missing and missing[1] in ("shared.array", "local.array"):
        return f"the shape in cuda.{missing[1]} must be known when the kernel is compiled"
    if missing:
        types = re.sub(r"Literal\[(\w+)\]\([^)]*\)", r"\1", missing[2])
        name = missing[1].removeprefix("npy_")
        return f"numba has no {name}{types}, for values of these types"
    if ufunc := re.search(r"KeyError: <ufunc '(\w+)'>", text):
        return _of_one_number(ufunc[1])
    lines = [line for line in text.splitlines() if not line.startswith(("Failed in ", "During: "))]
    if text.startswith("Traceback"):
        return [line for line in lines if line.strip()][-1]
    return lines[0]


#: Functions of numbers that numba has for a GPU, under the names that NumPy's have, too.
_OF_MATH = (
    "ceil", "copysign", "cos", "cosh", "exp", "expm1", "fabs", "floor", "fmod", "hypot", "isfinite",
    "isinf", "isnan", "log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip


def _of_one_number(name: str) -> str:
    """Return what to say of NumPy's function of arrays, called with a number."""
    if name in _OF_MATH:
        return f"np.{name} is for arrays; for one number, write math.{name}"
    if name == "absolute":
        return "np.abs is for arrays; for one number, write abs"
    return f"numba has no np.{name} of a number in a kernel"
