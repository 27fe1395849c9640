"""What is generated of CONTRIBUTING.md: what may import what, and the ways to a kernel."""

import ast
import re
from pathlib import Path

import test_architecture as architecture
from figures import walks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
TOURS = ("nn.Linear", "nn.Softmax")


def parts():
    """The table of the arrows that tests/test_architecture.py holds."""
    yield "| part | what | imports of the project | from outside |"
    yield "|---|---|---|---|"
    for part, floor in architecture.FLOORS.items():
        others = sorted(floor, key=list(architecture.FLOORS).index)
        inside = ", ".join(f"`{each}`" for each in others) or "nothing"
        yield f"| `{part}` | {architecture.ABOUT[part]} | {inside} | {_outside(part)} |"


def _outside(part):
    if part in architecture.FORBIDDEN:
        never = " or ".join(f"`{each}`" for each in sorted(architecture.FORBIDDEN[part]))
        return f"not {never}"
    if part not in architecture.OUTSIDE:
        return "anything"
    return ", ".join(f"`{each}`" for each in sorted(architecture.OUTSIDE[part])) or "nothing"


def tour(frames):
    """A numbered list of the files that a call runs through until its kernel starts."""
    first = {}
    for file, function in walks.outside_simulator(frames):
        first.setdefault(file, function.replace(".<locals>", ""))
    for number, (file, function) in enumerate(first.items(), 1):
        path = ROOT / "course_lib" / file
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        sentence = re.split(r"(?<=[.:;])\s", " ".join(said.split("\n\n")[0].split()))[0]
        yield f"{number}. [`{file}`](course_lib/{file}), `{function}`: {sentence.rstrip('.:;')}."


def filled(text, found):
    """`text` with its generated parts written again; `found` is what `walks` printed."""
    made = {"parts": parts()} | {f"tour of {name}": tour(found[name]["frames"]) for name in TOURS}
    for name, rows in made.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not closed:
            raise LookupError(f"{PAGE.name} has no part between {begin.strip()} and {end}")
        text = before + begin + "\n".join(rows) + "\n" + end + after
    return text


def write(found):
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
