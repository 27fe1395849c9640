"""What a failed check says."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import numpy as np

from course_lib.simulator import SimulatorError
from course_lib.teach.checking.running import Attempt, Failure, Run
from course_lib.teach.display import quote
from course_lib.teach.exercise import python_function
from course_lib.teach.explaining.places import COURSE, element, where
from course_lib.teach.explaining.raised import meaning, of_a_missing_name

MOST_SHOWN = 24  # numbers of a two-dimensional input, of which a message has all


class CheckFailed(AssertionError):
    """The object under check is wrong; the message holds all there is to say."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of the frames, which all belong to the check.
        return ["\x1b[31mCheckFailed\x1b[0m " + str(self)]


def describe(attempt: Attempt, failure: Failure) -> str:
    """Return the message: the case, expected and got, and the cause where it is known."""
    exercise, run = attempt.exercise, failure.run
    lines = [f"{exercise.name}: {_headline(attempt, failure)}", *_launch(run)]
    if failure.problem == "values":
        lines += _values(failure)
    elif failure.problem == "finding":
        lines += _consequence(failure)
    elif failure.problem == "input":
        before = run.case.inputs[failure.array][failure.index]
        after = run.arrays[failure.array].view[failure.index]
        lines.append(_line("was", f"{element(failure.array, failure.index)} = {number(before)}"))
        lines.append(_line("became", f"{element(failure.array, failure.index)} = {number(after)}"))
    if failure.seen:
        lines.append(_line("seen", failure.seen))
    if failure.cause:
        lines.append(_line("cause", failure.cause))
    lines.append(_line("again", f"check({exercise.name!r}, ..., seed={attempt.seed})"))
    return "\n".join(lines)


def _headline(attempt: Attempt, failure: Failure) -> str:
    on = "" if failure.run.engine.simulated else " (on the GPU; the simulator found it right)"
    if failure.problem == "finding":
        finding = failure.finding
        way = failure.run.engine.findings.way(finding)
        place = where(attempt.obj, finding.filename, finding.line, way)
        seen, _, cure = finding.message.partition("; ")
        lines = [f"{finding.title or finding.kind}{place}", _line("seen", seen)]
        # What the experiment finds is surer than what often helps.
        return "\n".join(lines + [_line("fix", cure)] * bool(cure and not failure.cause))
    if failure.problem == "forbidden":
        finding = failure.finding
        place = where(attempt.obj, finding.filename, finding.line)
        return f"{finding.kind}{place}\n{_line('cause', finding.message)}"
    if failure.problem == "values":
        return f"wrong values in {failure.array}{on}"
    if failure.problem == "outside":
        return f"it writes outside {failure.array}{on}"
    if failure.problem == "input":
        name, site = failure.run.engine.borrowed or ("", None)
        line = where(attempt.obj, site.filename, site.line) if name == failure.array else ""
        text = f"it changes its input {failure.array}, which others still need{on}"
        return f"{text},{line}" if line else text
    if failure.problem == "twice":
        _, _, first, second, site = failure.run.engine.twice
        place = f"{element(failure.array, failure.index)} is written by more than one thread"
        who = f"{_thread(*first)}, then {_thread(*second)}"
        in_line = where(attempt.obj, site.filename, site.line)
        return f"{place},{in_line}\n{_line('by', who)}"
    if failure.text and failure.problem != "endless":
        return failure.text
    if isinstance(failure.error, SimulatorError):
        return _simulators_words(attempt, failure.error)
    line = _learners_line(attempt, failure.error)
    if failure.problem == "endless":
        return f"stopped, because it did not end {failure.text}{line}"
    if type(failure.error) is NameError:
        return f"NameError{line}: {of_a_missing_name(failure.error, attempt.exercise)}"
    if told := meaning(python_function(attempt.obj), failure.error):
        what, seen, fix = told
        return "\n".join([f"{what}{line}", _line("seen", seen), _line("fix", fix)])
    if not line and _is_courses(failure.error):  # an objection of the exercise, and no accident
        return str(failure.error)
    return f"{type(failure.error).__name__}{line}: {failure.error}"


def _is_courses(error: BaseException) -> bool:
    """Tell whether the check itself has raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and COURSE / "teach" in Path(frames[-1].filename).parents


def _launch(run: Run) -> list[str]:
    case = run.case
    arguments = ", ".join(run.exercise.parameters)
    if run.exercise.kind == "kernel":
        shown = f"{run.exercise.name}[{case.grid}, {case.block}]({arguments})"
    else:
        shown = f"{run.exercise.name}({arguments})"
    if run.engine.order != "forward":
        shown += f", with the threads in {run.engine.order} order"
    lines = [_line("call" if run.exercise.kind == "function" else "launch", shown)]
    for name in _shown(run):
        lines.append(_line(name, _summary(np.asarray(case.inputs[name]))))
    return lines


def _shown(run: Run) -> list[str]:
    """Return the names of the inputs that the learner's code gets; all if it calls them else."""
    given = [name for name in run.case.inputs if name in run.exercise.parameters]
    return given or list(run.case.inputs)


def _values(failure: Failure) -> list[str]:
    name, index, run = failure.array, failure.index, failure.run
    expected, got = run.expected[name], run.got[name]
    place = element(name, index)
    lines = [
        _line("wrong", f"{int(failure.wrong.sum())} of {_count(got.size)}, the first is {place}"),
        _line("expected", f"{place} = {_result(got.dtype.type(expected[index]))}"),
        _line("got", f"{place} = {_result(got[index])}"),
    ]
    same_place = [
        f"{element(other, index)} = {_result(run.case.inputs[other][index])}"
        for other in _shown(run)
        if np.shape(run.case.inputs[other]) == got.shape and got.size > 1
    ]
    if same_place:
        lines.append(_line("where", ", ".join(same_place)))
    difference = abs(float(got[index]) - float(expected[index]))
    with np.errstate(invalid="ignore"):
        near = np.abs(got.astype(np.float64) - expected) <= 1e-3 * np.abs(expected)
    if got.dtype.kind == "f" and not failure.cause and near[failure.wrong].all():
        lines.append(_line("off by", f"{difference:.2g}, more than the rounding of right answers"))
    return lines


def _thread(block: tuple[int, ...], thread: tuple[int, ...]) -> str:
    return f"thread {thread} of block {block}"


def _consequence(failure: Failure) -> list[str]:
    """Return what the finding did to the result: nothing, or the first wrong element."""
    also = failure.also
    if also is not None:
        return _values(also) if also.problem == "values" else []
    if failure.finding.kind == "deadlock":
        return []
    if failure.finding.kind == "out-of-bounds":
        return [_line("result", "right here; on a GPU that memory may belong to somebody else")]
    return [_line("result", "right this time; nothing makes it so, and a GPU's may differ")]


def _line(label: str, text: str) -> str:
    return f"  {label:<9} {text}"


def number(value: np.generic | float) -> str:
    """Return a number with as many digits as its type can tell apart."""
    value = np.asarray(value)[()]
    return str(value)


def _result(value: np.generic) -> str:
    """Return a number of the output's: as for `number`, but the bits of a float32 as such."""
    if isinstance(value, np.uint32):
        return f"{int(value):#010x}, the bits of {number(value.view(np.float32))}"
    return number(value)


def _count(elements: int) -> str:
    return "1 element" if elements == 1 else f"{elements} elements"


def _summary(value: np.ndarray) -> str:
    if value.ndim == 0:
        return number(value)
    if value.ndim == 1:
        shape = _count(value.size)
    else:
        shape = " × ".join(map(str, value.shape))
    if value.ndim == 2 and 6 < value.size <= MOST_SHOWN:  # a row a line, to reckon with
        rows = np.array2string(value, separator=", ", max_line_width=200, prefix=" " * 12)
        return f"{value.dtype}, {shape}:\n{' ' * 12}{rows}"
    if value.size == 0 or (value.ndim > 1 and value.size > 6):
        return f"{value.dtype}, {shape}"
    values = np.array2string(
        value.ravel(), threshold=6, edgeitems=3, separator=", ", max_line_width=200
    )
    return f"{value.dtype}, {shape}: {values}"


def _learners_line(attempt: Attempt, error: BaseException) -> str:
    """Return " in line 4, `y[i] = z`" for the innermost line the learner wrote, "" if unknown."""
    own = python_function(attempt.obj).__code__.co_filename
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # What a launcher launches may be in another cell.
        if frame.filename == own or "ipykernel_" in frame.filename:
            return where(attempt.obj, frame.filename, frame.lineno)
    return ""


def _simulators_words(attempt: Attempt, error: SimulatorError) -> str:
    """Return the simulator's message, with the learner's line in place of the file's path.

    Where the fault is, and in which thread, goes on a line of its own.
    """
    own = python_function(attempt.obj).__code__.co_filename
    file = getattr(error, "filename", None)
    message = re.sub(
        re.escape(file or own) + r":(\d+)", lambda m: quote(file or own, int(m[1])), str(error)
    )
    if file:  # which cell, "of the cell" doesn't say
        message = re.sub(r"line (\d+) of the cell", lambda m: quote(file, int(m[1])), message)
    return message.replace("; thread ", "\n" + _line("by", "thread "), 1)
