"""Showing things in a notebook, and printing them elsewhere."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import course_lib
from course_lib.simulator.tracebacks import shows_user_lines

#: Decorates what notebooks call: a notebook shows its errors without the course's own lines.
user_facing = shows_user_lines(Path(course_lib.__file__).parent)


def in_notebook() -> bool:
    """Tell whether there is a Jupyter front end to show rich output in."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def show_rich(text: str, *, markdown: str | None = None, html: str | None = None) -> None:
    """Show Markdown or HTML in a notebook, and print `text` elsewhere."""
    if not in_notebook():
        print(text)
        return
    from IPython.display import display

    bundle = {"text/plain": text}
    if markdown is not None:
        bundle["text/markdown"] = markdown
    if html is not None:
        bundle["text/html"] = html
    display(bundle, raw=True)


def quote(file: str, line: int) -> str:
    """Return "line 4, `while i < n:`". In a notebook the line is counted from the cell's top."""
    text = linecache.getline(file, line).strip()
    return f"line {line}, `{text}`" if text else f"line {line}"
