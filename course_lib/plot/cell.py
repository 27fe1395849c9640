"""A notebook cell as a picture: its code, the lines that matter, and what came of it."""

import io
import keyword
import textwrap
import tokenize

from matplotlib.patches import FancyBboxPatch, Rectangle

from .picture import INK, LIMIT, Picture

_WIDTH = 0.602  # of a character of DejaVu Sans Mono, in times of the font's size
_COLOURS = {"keyword": "#0b5394", "string": "#7a3e00", "comment": "0.42", "number": "#0b5394"}


def cell(source, output, *, marked=(), title="", alt=None, width_inches=9.0, height_inches=None):
    """Draw code in a grey box, as a notebook shows it, with its output underneath.

    Args:
        source: the code.
        output: what the cell printed; long lines are wrapped.
        marked: numbers of lines, from 1, to be pointed at; all lines are numbered then.
        title: heading of the picture.
        alt: alternative text; by default the code and the output.
        width_inches, height_inches: of the picture; by default as high as its text.

    Raises:
        ValueError: no code, or a marked line that is not there.
    """
    lines = source.strip("\n").split("\n")
    if not source.strip():
        raise ValueError("a cell needs code")
    if not set(marked) <= set(range(1, len(lines) + 1)):
        raise ValueError(f"lines {sorted(marked)} are marked, of {len(lines)}")
    alt = alt or f"{title + ': ' if title else ''}a cell with the code\n{source}\nand its " \
                 f"output\n{output}"
    margin = 0.1
    gutter = 3 if marked else 0  # characters
    across = max(max(map(len, lines)) + gutter, 38) + 1
    size = min(11.0, (width_inches - 2 * margin) * 72 / across / _WIDTH)  # points
    step = size * 1.42 / 72  # inches from line to line
    printed = [part for line in output.strip().split("\n")
               for part in textwrap.wrap(line, int(across / 0.97)) or [""]]
    needed = (len(lines) + len(printed) + 2.2) * step + (0.22 if title else 0) + 0.1
    height = height_inches or needed
    figure = Picture(height, alt, width_inches=width_inches)
    figure.set_layout_engine("none")
    page = _Page(figure, width_inches, height, margin, size, step)
    if title:
        figure.text(margin / width_inches, 1 - 0.05 / height, title, fontweight="bold",
                    fontsize=9.5 if width_inches < 5 else 12, va="top", color=INK)
        page.y -= 0.22
    page.box(len(lines))
    for number, (text, parts) in enumerate(zip(lines, _parts(source.strip("\n")), strict=True), 1):
        page.line(text, parts, number if marked else None, number in marked, gutter)
    page.y -= 0.9 * step
    for text in printed:
        page.line(text, [(0, text, LIMIT if marked else INK)], None, False, 0)
    return figure


class _Page:
    """Where the next line goes, in inches from the figure's lower left corner."""

    def __init__(self, figure, width, height, margin, size, step):
        self.figure, self.width, self.height = figure, width, height
        self.margin, self.size, self.step, self.y = margin, size, step, height - 0.08

    def box(self, n_lines):
        """A grey box behind the next `n_lines`."""
        tall = (n_lines + 0.6) * self.step
        self.figure.add_artist(FancyBboxPatch(
            (self.margin * 0.5 / self.width, (self.y - tall) / self.height),
            1 - self.margin / self.width, tall / self.height, boxstyle="square,pad=0",
            transform=self.figure.transFigure, facecolor="#f2f3f5", edgecolor="0.78",
            linewidth=0.8, zorder=0))
        self.y -= 0.3 * self.step

    def line(self, text, parts, number, marked, gutter):
        """One line of text, in coloured parts: (column, text, colour)."""
        middle = (self.y - 0.5 * self.step) / self.height
        if marked:
            self.figure.add_artist(Rectangle(
                (self.margin * 0.5 / self.width, (self.y - self.step) / self.height),
                1 - self.margin / self.width, self.step / self.height,
                transform=self.figure.transFigure, facecolor="#fbe0dc", edgecolor=LIMIT,
                linewidth=0.8, zorder=1))
        if number is not None:
            self._write(f"{number:2}", 0, middle, LIMIT if marked else "0.5", bold=marked)
        for column, part, colour in parts:
            self._write(part, column + gutter, middle, colour)
        self.y -= self.step

    def _write(self, text, column, middle, colour, *, bold=False):
        x = self.margin + column * self.size * _WIDTH / 72
        self.figure.text(x / self.width, middle, text, family="DejaVu Sans Mono",
                         fontsize=self.size, color=colour, va="center_baseline",
                         fontweight="bold" if bold else "normal", zorder=2, parse_math=False)


def _parts(source):
    """For each line of Python: [(column, text, colour)]."""
    found = [[] for _ in source.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if not token.string.strip() or "\n" in token.string:
            continue
        kind = tokenize.tok_name[token.type].lower()
        if keyword.iskeyword(token.string):
            kind = "keyword"
        row, column = token.start
        found[row - 1].append((column, token.string, _COLOURS.get(kind, INK)))
    return found
