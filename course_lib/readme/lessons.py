"""The map of the lessons, from what each notebook says of itself."""

import json
import re

from course_lib.readme.places import ROOT

ROOM = 125  # letters of a goal: two lines of the table


def lessons():
    """Of each lesson: (number, title, file name, what one can do afterwards, minutes)."""
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield _read(path.name, "".join(cells[0]["source"]))


def table():
    """The map as a Markdown table, and how long all of it takes."""
    found = list(lessons())
    lines = ["| lesson | afterwards you can, among other things | minutes |", "|---|---|--:|"]
    for number, title, name, goal, minutes in found:
        link = f"[{number} · {title}](notebooks/{name})"
        lines.append(f"| {link} | {_first_of(goal)} | {minutes} |")
    hours = round(sum(minutes for *_, minutes in found) / 60)
    return "\n".join(lines) + f"\n\n{len(found)} lessons, about {hours} hours in all."


def _first_of(goal):
    """The first parts of a goal: as many as there is room for."""
    first, *others = goal.split(", ")
    while others and len(first) + len(others[0]) + 2 <= ROOM:
        first = f"{first}, {others.pop(0)}"
    return first


def _read(name, text):
    """What the first cell of a lesson says. Raises LookupError where something is missing."""
    title = re.match(r"# (\d+) · (.+)", text)
    goal = re.search(r"\*\*After this lesson\*\* you can\s+(.+?)\.?\n\n", text, flags=re.DOTALL)
    minutes = re.search(r"\*\*Time:\*\*\s+(\d+)\s+minutes", text)
    if not (title and goal and minutes):
        raise LookupError(f"the first cell of {name} lacks its title, its goal or its time")
    return int(title[1]), title[2], name, " ".join(goal[1].split()), int(minutes[1])
