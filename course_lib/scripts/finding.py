"""What the commands find in a script: `Found`, and the launch that it was found in."""

import os
from dataclasses import asdict, dataclass, replace

#: The folder in which the command was started; the script may go to another.
START = os.getcwd()
#: Levels of a finding. A note is for information: it does not change the exit status.
LEVELS = "error", "warning", "note"


@dataclass(frozen=True)
class LaunchPlace:
    """One launch of a kernel.

    Attributes
    ----------
    number : int
        Of the launches of its process, from 1.
    kernel : str
    grid, block : (x, y, z)
    filename, line : str, int
        Where the script launches it.
    process : int
        0 in the script's own process, else the number of the forked one.
    """

    number: int
    kernel: str
    grid: tuple
    block: tuple
    filename: str
    line: int
    process: int = 0

    def __str__(self):
        process = f" in process {self.process}" if self.process else ""
        return (f"launch {self.number}{process}: {self.kernel}, grid {extent(self.grid)}, block "
                f"{extent(self.block)}, at {shown_path(self.filename)}:{self.line}")


@dataclass(frozen=True)
class Found:
    """One thing that is wrong with a kernel, or with how it is launched.

    Attributes
    ----------
    kind : str
        One of the sanitizer's or of lint's kinds, or "not-compilable", "launch-error".
    level : one of LEVELS
    message, source : str
        A sentence, and the line of source.
    filename, line : str, int
        Where a fix belongs.
    lines : tuple of int
        Further lines of the file that it is about.
    launch : LaunchPlace or None
        The first launch in which it was seen.
    count : int
        How often it was seen.
    """

    kind: str
    level: str
    message: str
    filename: str
    line: int
    source: str = ""
    lines: tuple = ()
    launch: LaunchPlace | None = None
    count: int = 1

    def as_data(self):
        """A dictionary that JSON can hold."""
        return asdict(self)

    @classmethod
    def of_data(cls, data):
        """The finding that `as_data` gave, after JSON."""
        launch = data["launch"]
        if launch is not None:
            launch = LaunchPlace(**launch | {key: tuple(launch[key]) for key in ("grid", "block")})
        return cls(**data | {"launch": launch, "lines": tuple(data["lines"])})

    @property
    def key(self):
        """The same for findings of two processes that are one mistake."""
        return self.kind, self.filename, self.line, self.lines, self.launch and self.launch.kernel


def joined(own, others):
    """The findings `own`, and those of `others` that are new; the rest are counted to `own`."""
    found, first = list(own), {}
    for position, each in enumerate(own):
        first.setdefault(each.key, position)
    for each in others:
        position = first.setdefault(each.key, len(found))
        if position == len(found):
            found.append(each)
        else:
            known = found[position]
            found[position] = replace(known, count=known.count + each.count)
    return found


def extent(dims):
    """(4, 1, 1) as "4", (4, 2, 1) as "4x2"."""
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]
    return "x".join(map(str, dims))


def shown_path(filename):
    """The file as a reader here names it: relative to START where it is below it."""
    if filename.startswith("<"):
        return filename
    try:
        relative = os.path.relpath(filename, START)
    except ValueError:  # on another drive
        return filename
    return filename if relative.startswith(os.pardir) else relative
