"""What the learner's code prints while it is checked: a few lines of it, as they come."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

#: Lines that are shown: each thread prints its own.
MOST = 8


class _FirstLines(io.TextIOBase):
    """Hands the first lines on to another stream at once, and counts the others."""

    def __init__(self, stream):
        self.stream, self.lines = stream, 0

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            if self.lines < MOST:
                self.stream.write(line)
            self.lines += line.endswith("\n")
        return len(text)

    def flush(self):
        self.stream.flush()


@contextlib.contextmanager
def printing_little() -> Iterator[None]:
    """Show the first lines that are printed inside, and how many more there were."""
    first = _FirstLines(sys.stdout)
    try:
        with contextlib.redirect_stdout(first):
            yield
    finally:
        if first.lines > MOST:
            more = first.lines - MOST
            print(f"… and {more:,} more lines that your code printed while it was checked")
