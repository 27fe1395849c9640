"""Showing things in a notebook, and printing them elsewhere."""

from __future__ import annotations

import html
import linecache
import sys
from collections.abc import Sequence
from pathlib import Path

import course_lib
from course_lib.simulator.engine.tracebacks import shows_user_lines

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


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], summary: str) -> None:
    """Show a table with a line below it: in a notebook as HTML, as text elsewhere."""
    text, page = _as_text(header, rows), _as_html(header, rows)
    show_rich(f"{text}\n{summary}", html=f"{page}<p>{html.escape(summary, quote=False)}</p>")


def _as_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _as_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, row: Sequence[str]) -> str:
        style = ' style="text-align:left"'
        cells = "".join(f"<{tag}{style}>{html.escape(str(cell))}</{tag}>" for cell in row)
        return f"<tr>{cells}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"


def quote(file: str, line: int, function: str = "") -> str:
    """Return "line 4, `while i < n:`", or "line 4 of f, …" with the name of the function around.

    In a notebook the line is counted from the cell's top.
    """
    place, text = f"line {line}", linecache.getline(file, line).strip()
    place += f" of {function}" * bool(function)
    return f"{place}, `{text}`" if text else place
