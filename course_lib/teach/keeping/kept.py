"""Solutions that passed their check are kept, so that later lessons run the learner's own.

The progress record holds the text (`written.written_out`) of the last one that passed, for each
exercise. Nobody runs it but `use`, and that only as long as it is what passed: when its text, a
part of the course that it calls, or its exercise has changed since, it is checked again first, and
so is on a GPU what has passed in the simulator alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from course_lib.teach.checking.engines import Gpu
from course_lib.teach.exercise import Exercise, python_function
from course_lib.teach.keeping import record
from course_lib.teach.keeping.written import NotKept, digest, rebuilt, written_out

#: What has been built from texts in this session: a GPU compiles each kernel once.
_built: dict[tuple[str, str], Callable] = {}


def keep(exercise: Exercise, obj: Callable) -> list[str]:
    """Record that `obj` has passed, and keep it. Return what to tell: why it can't be kept."""
    notes = []
    try:
        page = _page(exercise, obj)
    except NotKept as error:
        page = {"not": str(error)}
        notes.append(f"not kept for later lessons: {error}")

    def passed(entry):
        entry.setdefault("solved", record.today())
        if not _strict():
            entry["kept"] = page

    record.update(exercise.name, passed)
    return [] if _strict() else notes


def drop(exercise: Exercise, obj: Callable) -> None:
    """Keep `obj` no longer, which has just failed, if it is the one that is kept."""
    entry = record.load().get(exercise.name, {})
    if _is_kept(entry, obj) and not _strict():
        record.update(exercise.name, lambda entry: entry.update(kept={"not": "its check failed"}))


def take(
    exercise: Exercise,
    obj: Callable | None,
    checked_here: bool,
    check: Callable[[Exercise, Callable], str],
) -> tuple[Callable | None, str]:
    """Return the learner's own, or None for the course's, and the line that says which.

    With `obj`, it is that one or none; `checked_here` tells that a check of this session has
    decided already. `check` says what is wrong with an object, "" if nothing is.
    """
    name, entry = exercise.name, {} if _strict() else record.load().get(exercise.name, {})
    if obj is not None:
        if not checked_here and _is_kept(entry, obj) and not _trouble(exercise, entry, check):
            return obj, f"Using your {name}."
        earlier = f" An earlier one has: use({name!r}) takes it." if _has_text(entry) else ""
        why = f"since yours has not passed check({name!r}, ...) yet"
        if entry.get("solved"):
            why = f"since what passed on {entry['solved']} is not this one: check it again"
        return None, f"Using the course's {name}, {why}.{earlier}"
    trouble = _trouble(exercise, entry, check)
    if trouble:
        return None, " ".join(f"Using the course's {name}: {trouble}".split())
    if _strict():
        return None, f"Using the course's {name}."
    return _build(entry), f"Using the {name} that you wrote in {_lesson(exercise)}."


def _strict() -> bool:
    """Tell whether solutions run, which neither keep anything nor take what a learner kept."""
    return os.environ.get("COURSE_LIB_STRICT") == "1"


def _lesson(exercise: Exercise) -> str:
    number = exercise.lesson
    return f"lesson {int(number)}" if number.isdigit() else "its lesson"


def _page(exercise: Exercise, obj: Callable) -> dict:
    """Return what the record holds of `obj`. Raises NotKept."""
    text, name = written_out(obj), python_function(obj).__name__
    return {
        "name": name,
        "lines": text.splitlines(),
        "digest": digest(exercise, rebuilt(text, name)),
        "gpu": Gpu.available(),
    }


def _text(entry: dict) -> tuple[str, str]:
    """Return the text that is kept and the name of what it defines. Raises NotKept."""
    kept = entry["kept"]
    lines, name = kept.get("lines"), kept.get("name")
    if not isinstance(name, str) or not isinstance(lines, list) or not lines:
        raise NotKept("the progress record has no text of it")
    if not all(isinstance(line, str) for line in lines):
        raise NotKept("a line of its text in the progress record is no text")
    return "\n".join(lines) + "\n", name


def _has_text(entry: dict) -> bool:
    return "lines" in entry.get("kept", {})


def _is_kept(entry: dict, obj: Callable) -> bool:
    """Tell whether `obj` is, word for word, what is kept."""
    if not _has_text(entry):
        return False
    try:
        return written_out(obj).splitlines() == entry["kept"]["lines"]
    except NotKept:
        return False


def _build(entry: dict) -> Callable:
    """Return what is kept, built once in this session. Raises NotKept."""
    place = _text(entry)
    if place not in _built:
        _built[place] = rebuilt(*place)
    return _built[place]


def _trouble(exercise: Exercise, entry: dict, check: Callable) -> str:
    """Return why the kept one can't be used, as a sentence; "" if it can.

    What has changed since it passed is checked again, and that is recorded.
    """
    if _strict():
        return ""
    kept = entry.get("kept")
    if kept is None and entry.get("solved"):
        again = f"Check it in {_lesson(exercise)} again, and it is."
        return f"yours has passed its check, and was not kept. {again}"
    if kept is None or exercise.kind == "answer":
        return "yours has not passed its check yet."
    if "not" in kept:
        return f"yours has passed its check, and is not kept: {kept['not']}."
    yours = f"the one that you wrote in {_lesson(exercise)}"
    try:
        obj = _build(entry)
    except NotKept as error:
        return f"{yours} can't be built any more: {error}."
    now = {"digest": digest(exercise, obj), "gpu": Gpu.available()}
    if kept.get("digest") == now["digest"] and (kept.get("gpu") is True or not now["gpu"]):
        return ""
    if wrong := check(exercise, obj):
        return f"{yours} no longer passes its check: {wrong.removeprefix(exercise.name + ': ')}."

    def trust(entry):
        if entry.get("kept", {}).get("lines") == kept["lines"]:  # else another one has passed
            entry["kept"].update(now)

    record.update(exercise.name, trust)
    return ""
