"""`hint`, `solution` and `progress`."""

from __future__ import annotations

import re

from course_lib.teach.checking.check import lesson_of_session
from course_lib.teach.display import show_rich, show_table, user_facing
from course_lib.teach.exercise import exercises, find
from course_lib.teach.keeping import record


@user_facing
def hint(name: str) -> None:
    """Show the next hint for an exercise: a nudge, then the idea, then nearly the code.

    After the last one, all are shown again.

    Raises UnknownExercise when there is no exercise called `name`.
    """
    hints = find(name).hints
    seen = min(record.load().get(name, {}).get("hints", 0), len(hints))
    entry = {"hints": min(seen + 1, len(hints))}
    record.update(name, lambda old: old.update(entry))
    if seen == len(hints):
        parts = [_titled(f"Hint {n}.", each) for n, each in enumerate(hints, 1)]
        parts.append(f"These were all {len(hints)}. `solution({name!r})` shows the finished code.")
    else:
        parts = [_titled(f"Hint {seen + 1} of {len(hints)}.", hints[seen])]
        left = len(hints) - seen - 1
        parts.append(f"{left} left." if left else f"That was the last: see `solution({name!r})`.")
    plain = "\n\n".join(parts)
    text = _without_marks(plain)
    # In a notebook it is behind a click: who runs cell after cell has not asked for it.
    title = "All hints" if seen == len(hints) else f"Hint {seen + 1} of {len(hints)}"
    folded = f"<details><summary>{title}: click to read</summary>\n\n{plain}\n\n</details>"
    show_rich(text, markdown=folded)


def _without_marks(markdown: str) -> str:
    """Return Markdown as text: without bold and fences. In code `**` is a power, and stays."""
    prose_and_code = re.split(r"(```.*?```|`[^`]*`)", markdown, flags=re.DOTALL)
    prose_and_code[::2] = [prose.replace("**", "") for prose in prose_and_code[::2]]
    return "".join(prose_and_code).replace("```python\n", "").replace("\n```", "")


def _titled(title: str, text: str) -> str:
    """Return Markdown that begins with the title in bold; a code block starts on its own line."""
    return f"**{title}**" + ("\n\n" if text.startswith("```") else " ") + text


@user_facing
def solution(name: str) -> None:
    """Show the finished code of an exercise.

    Raises UnknownExercise when there is no exercise called `name`.
    """
    source = find(name).source().rstrip()
    record.update(name, lambda entry: entry.update(solution_seen=True))
    show_rich(source, markdown=f"```python\n{source}\n```")


@user_facing
def progress(
    lesson: int | str | None = None, *, reset: str | None = None, sure: bool = False
) -> None:
    """Show which exercises are solved, and when, with the hints used.

    Those of one `lesson`, 3 for example, or of "all"; left out, those of the lesson that was
    checked last in this session.

    `reset="relu"` forgets what is recorded of that exercise. `reset="all"` forgets everything,
    and wants `sure=True` as well.

    Raises UnknownExercise when `reset` names no exercise, and ValueError for a lesson that there is
    not.
    """
    if reset == "all":
        if not sure:
            count = len(record.load())
            print(
                f"This would forget {count} exercise{'s' if count != 1 else ''}. "
                "To do so: progress(reset='all', sure=True)"
            )
            return
        record.forget()
    elif reset is not None:
        record.forget(find(reset).name)
    rows = _rows()
    wanted = lesson_of_session() if lesson is None else lesson
    if wanted is None or wanted == "all":
        shown, here = rows, ""
    else:
        number = f"{wanted:>02}"
        shown = [row for row in rows if row[0] == number]
        if not shown:
            raise ValueError(f"lesson must be 'all' or from 0 to {int(rows[-1][0])}: {lesson!r}")
        here = f"Lesson {int(number)}: {_solved(shown)} of {len(shown)}. In all, "
    total = f"{_solved(rows)} of {len(rows)} exercises solved"
    more = "." if shown is rows else "; progress('all') shows them."
    show_table(_HEADER, shown, f"{here}{total}{more}")


def _solved(rows: list[tuple[str, ...]]) -> int:
    return sum(row[3].startswith("✓") for row in rows)


_HEADER = ("lesson", "exercise", "title", "state", "date", "hints")


def _rows() -> list[tuple[str, ...]]:
    """Return the table's rows, as text."""
    entries = record.load()
    rows = []
    for exercise in exercises().values():
        entry = entries.get(exercise.name, {})
        if entry.get("solved"):
            state, date = "✓ solved", entry["solved"]
        elif entry.get("tried"):
            state, date = "… tried", entry["tried"]
        else:
            state, date = "not started", ""
        helped = f"{entry.get('hints', 0)} of {len(exercise.hints)}"
        if entry.get("solution_seen"):
            helped += ", solution"
        rows.append((exercise.lesson, exercise.name, exercise.title, state, date, helped))
    return rows
