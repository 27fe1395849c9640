"""What is counted of the project, each figure beside its ceiling: ``python tests/house.py``.

    python tests/house.py            the table; exit status 1 where a figure is above its ceiling
    python tests/house.py --where    below each figure, what was counted
    python tests/house.py --lower    write figures that fell as ceilings, which only fall
    python tests/house.py --all      draw anew what AUTO launches, which takes minutes
    python tests/house.py --docs     write CONTRIBUTING.md's table of parts and tours to a kernel

Ceilings stand in `FIGURES`; tests/test_house.py fails above one. What is read from the reports of
the last `make test` is printed and not tested, as that run may be of other sources.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from figures import documents, reports, sources, walks  # noqa: E402


class Figure(NamedTuple):
    """What is counted, the most that it may be, and what it is to become: None, no more than that.

    least  the ceiling is a floor: the least that it may be
    """

    name: str
    ceiling: float
    bar: float | None = None
    least: bool = False

    def is_kept(self, value):
        return value >= self.ceiling if self.least else value <= self.ceiling

    def verdict(self, value):
        """What to say of a value, in words; nothing of one that is as it was."""
        if isinstance(value, str) or value == self.ceiling:
            return ""
        way = "lower the ceiling" if not self.least else "raise the floor"
        if self.is_kept(value):
            return f"{way} to {value}"
        return f"{'BELOW' if self.least else 'ABOVE'} {self.ceiling:,}"


FIGURES = (
    Figure("circles of files, function-level imports included", 0, 0),
    Figure("files of the largest circle", 0, 0),
    Figure("parts that import the root, which imports them", 0, 0),
    Figure("paths from the package into tests", 0, 0),
    Figure("arrows allowed and unused", 0, 0),
    Figure("files from nn.Softmax to the kernel", 12, 9),
    Figure("files from kernels.softmax.forward to the kernel", 7, 5),
    Figure("files from nn.Linear to the kernel", 13, 12),
    # Three of the files and twelve of the calls choose between the ways of a convolution.
    Figure("files from nn.Conv2d to the kernel", 27),
    Figure("calls of a first nn.Conv2d", 578),
    Figure("files of a first check", 27, 25),
    Figure("files of a later check", 19, 16),
    Figure("modules that a first check loads for nothing", 12, 0),
    Figure("functions that choose in linear and softmax", 0, 0),
    Figure("kernel functions behind a way of linear or softmax", 5, 4),
    Figure("kernel functions behind any way", 44),
    Figure("files of device code behind a way", 50),
    Figure("literal 132 in linear and softmax", 0, 0),
    Figure("literal 132 in kernels", 25),
    # Gathering convolutions and attention's way `wide` wait to be timed; draws have no slices and
    # no windows of 5 × 5.
    Figure("kernel functions that neither AUTO nor a lesson takes", 4, 0),
    Figure("kernel objects that neither AUTO nor a lesson takes", 104, 0),
    Figure("operations that import inner files of others", 0, 0),
    Figure("kernels without a docstring of their parameters", 201),
    Figure("lines that the formatter is told to leave", 1487),
    Figure("files of kernels over 300 lines", 7),
    # Not yet in the bar: 3,680 lines of attention, 445 of scaled_softmax, 2,150 of convolutions
    # that are gathered, joined, or products of matrices, 590 of rows off boundaries, 330 of streams
    # of tiles, 500 of all_reduce.
    Figure("lines of kernels", 36747, 26609),
    # Nor are 3,300 lines of attention's tests and of the wrong kernels of its lessons, 750 of
    # scaled_softmax's, of the audit of plans and of the choice of faster layers, and 2,700 of the
    # commands for others' scripts, of ranks, of streamed sets and of the wheel. 280 are the wrong
    # kernels of lesson 21.
    Figure("lines of tests", 72588, 52000),
    Figure("contract proofs", 6129, 6129, least=True),
    Figure("planted mistakes rejected", 26, 26, least=True),
    Figure("known-wrong kernels rejected", 1490, 1490, least=True),
    Figure("minutes of make test", 21, 16),
)


def measure(draw=False):
    """({name of a figure: (value, what was counted)}, {walk: what it met}).

    A value that is not known is a text that says why.
    """
    kernels = started("kernels", *["--all"] * draw)
    walking = started("walks")
    found = sources.figures() | reports.figures()
    walked = said_by(walking)
    found |= walks.figures(walked) | said_by(kernels)
    return {figure.name: found[figure.name] for figure in FIGURES}, walked


def started(name, *options):
    """A script of the folder figures in a process of its own, which prints JSON."""
    command = [sys.executable, str(ROOT / "tests" / "figures" / f"{name}.py"), *options]
    environment = os.environ | {"COURSE_LIB_SIMULATOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def said_by(script):
    """What a started script printed. Raises CalledProcessError where it failed."""
    text, _ = script.communicate()
    if script.returncode:
        raise subprocess.CalledProcessError(script.returncode, script.args)
    return json.loads(text)


def lowered(text, found):
    """`text`, the source of this file, with the ceilings of figures that fell."""
    for figure in FIGURES:
        value, _ = found[figure.name]
        if not isinstance(value, str) and figure.is_kept(value):
            row = re.escape(f'Figure("{figure.name}", ') + r"[\d.]+"
            text = re.sub(row, lambda row, v=value: re.sub(r"[\d.]+$", str(v), row[0]), text)
    return text


def table(found, where=False):
    """The table as text."""
    yield f"{'':54}{'today':>9}{'ceiling':>9}{'to be':>9}"
    for figure in FIGURES:
        value, counted = found[figure.name]
        shown = value if isinstance(value, str) else f"{value:,}"
        met = figure.bar is None or figure._replace(ceiling=figure.bar).is_kept(
            figure.ceiling if isinstance(value, str) else value
        )
        bar = "" if met else f"{figure.bar:,}"
        row = f"{figure.name:54}{shown:>9}{figure.ceiling:>9,}{bar:>9}  {figure.verdict(value)}"
        yield row.rstrip()
        yield from (f"        {each}" for each in counted if where)


def main(arguments=None):
    """Print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for option in ("where", "lower", "all", "docs"):
        parser.add_argument(f"--{option}", action="store_true")
    options = parser.parse_args(arguments)
    if options.docs:
        documents.write(said_by(started("walks")))
        return 0
    found, _ = measure(options.all)
    print(*table(found, options.where), sep="\n")
    if options.lower:
        path = Path(__file__)
        path.write_text(lowered(path.read_text(encoding="utf-8"), found), encoding="utf-8")
    kept = (isinstance(v, str) or figure.is_kept(v)
            for figure in FIGURES for v, _ in [found[figure.name]])  # fmt: skip
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
