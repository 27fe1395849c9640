"""What the sanitizer found: `Report` and `Finding`, and how places and threads are named."""

from dataclasses import dataclass, field

BETWEEN = "race-between-blocks"
KINDS = ("race", BETWEEN, "uninitialised-read", "out-of-bounds",
         "barrier-divergence", "barrier-mismatch", "exited-before-barrier",
         "shuffle-inactive-lane", "shared-aliasing", "read-after-exit", "deadlock",
         "endless-poll")


@dataclass
class Finding:
    """One thing that is wrong; seen `count` times, described as it was seen first.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    line, filename, source : int, str, str
        Where a fix belongs, and the source there. A missing barrier belongs right before or after
        the line, whichever lies between the two accesses.
    threads : tuple
        The threads concerned: their numbers in a one-dimensional block, else (x, y, z).
    block : int, tuple
        The block, in a one-dimensional grid its number, else (x, y, z). A race between blocks has
        a tuple of two.
    lines : tuple of int
        All lines concerned, in the order of the sentence.
    message : str
        One sentence: what is wrong and what would mend it.
    kernel : str
    count : int
    title : str
        What a headline calls it, where that is not its kind: "endless loop".
    """

    kind: str
    line: int
    filename: str
    source: str
    threads: tuple
    block: object
    message: str
    lines: tuple = ()
    kernel: str = ""
    count: int = 1
    title: str = ""

    def __str__(self):
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.title or self.kind}, line {self.line}: {self.message}{times}"


@dataclass
class Report:
    """What `sanitize` found. True if it found something; printing it lists the findings."""

    findings: list = field(default_factory=list)
    _known: dict = field(default_factory=dict, repr=False)

    def __bool__(self):
        return bool(self.findings)

    def __len__(self):
        return len(self.findings)

    def __iter__(self):
        return iter(self.findings)

    def __str__(self):
        return "\n".join(map(str, self.findings)) or "nothing found"

    def kinds(self):
        """The kinds found, without repetition, in the order they were found."""
        return list(dict.fromkeys(finding.kind for finding in self.findings))

    def again(self, key, kind=None):
        """True if `key` was reported before: it is only counted.

        A race between blocks is told in place of one within a block: what mends it mends both.
        """
        finding = self._known.get(key)
        if finding is None or kind == BETWEEN != finding.kind:
            return False
        finding.count += 1
        return True

    def add(self, key, finding):
        """Note a new finding under `key`, in place of the one that was there."""
        if key in self._known:
            self.findings.remove(self._known[key])
        self._known[key] = finding
        self.findings.append(finding)


def name_of(index, dims):
    """A thread's or block's index as a number where there is one dimension, else (x, y, z)."""
    return index[0] if dims[1] == dims[2] == 1 else tuple(index)


def index_of(number, dims):
    """(x, y, z) of thread `number` of a block."""
    dx, dy, _ = dims
    return number % dx, number // dx % dy, number // (dx * dy)


def listed(names):
    """'0, 1 and 5', '0-15'; long lists are cut."""
    names = list(names)
    if all(isinstance(name, int) for name in names) and len(names) > 2:
        runs, start = [], None
        for name in sorted(names):
            if start is None or name != last + 1:  # noqa: F821
                if start is not None:
                    runs.append((start, last))  # noqa: F821
                start = name
            last = name
        runs.append((start, last))
        names = [str(a) if a == b else f"{a} and {b}" if b == a + 1 else f"{a}-{b}"
                 for a, b in runs]
    names = [str(name) for name in names]
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def plural(names):
    """'thread 3 waits' needs another verb than 'threads 3 and 4 wait'."""
    return len(list(names)) != 1


def threads_text(names):
    """'thread 3', 'threads 0-15'."""
    names = list(names)
    return f"thread{'s' if plural(names) else ''} {listed(names)}"


def element_text(name, index):
    """`s[0]`, `x[1, 2]`."""
    parts = index if isinstance(index, tuple) else (index,)
    texts = [str(int(part)) if hasattr(part, "__index__") else ":" for part in parts]
    return f"{name}[{', '.join(texts)}]"
