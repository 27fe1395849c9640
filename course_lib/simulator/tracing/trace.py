"""What the warps of a kernel ask of memory: requests, sectors, bank conflicts, divergence.

    with simulator.trace() as t:
        kernel[grid, block](x, y)
    print(t.table())

Counts are of the accesses in the Python source. A compiler may merge some, keep values in
registers or hoist loads out of loops; and a GPU serves some of the sectors from its caches. The
counts agree with Nsight Compute's where the compiler keeps the accesses
(`python -m course_lib.benchmarks.tracer`). Local arrays are not counted: they live in registers.
A launch that needs a function whose source cannot be found raises SourceMissing.
"""

import contextlib
import html
import itertools
from dataclasses import dataclass, field

import numpy as np

from course_lib.simulator.observe.observer import Observer, Watched
from course_lib.simulator.observe.real import observing_with
from course_lib.simulator.tracing.align import requests, split
from course_lib.simulator.tracing.counts import (
    IDLE,
    SECTOR_BYTES,
    WARP_SIZE,
    atomic_sectors,
    sectors,
    wavefronts,
)
from course_lib.simulator.tracing.log import ATOMIC, BRANCH, LOAD, LOOP, SIZES, STORE, Tracing

_OPS = {LOAD: "load", STORE: "store", ATOMIC: "atomic"}
#: Requests of each site kept with their addresses, for pictures. All are counted.
KEPT_REQUESTS = 4096
#: Events kept before they are counted, so that long launches take little memory.
_MOST_EVENTS = 400_000


@dataclass
class TracedSite:
    """One access of the source, and what it asked of memory.

    Attributes
    ----------
    source : str
        The expression, such as "x[row, col]".
    line, filename, function : where it stands
    op : "load", "store" or "atomic"
    space : "global" or "shared"
    array : str
        The array's name in the source.
    requests : int
        Instructions of a warp: one for all its lanes that are there.
    sectors : int
        32-byte sectors of global memory that they touch, counted for each request.
    wavefronts, fewest_wavefronts : int
        Turns that shared memory needs, and would need without conflicts.
    lanes : int
        Lanes that took part, summed over the requests.
    size, itemsize : int
        Bytes that each lane asks for, and bytes of one element.
    base : int
        Address of the array's first element; `addresses` count from the same zero.
    addresses : int array (kept requests, 32)
        Bytes, -1 where a lane took no part: the first 4,096 requests.
    warps : int array (kept requests, 2)
        Numbers of the block in its grid and of the warp in its block.
    """

    source: str
    line: int
    filename: str
    function: str
    op: str
    space: str
    array: str
    size: int
    itemsize: int
    base: int
    requests: int = 0
    sectors: int = 0
    wavefronts: int = 0
    fewest_wavefronts: int = 0
    lanes: int = 0
    addresses: np.ndarray = field(default=None, repr=False)
    warps: np.ndarray = field(default=None, repr=False)

    @property
    def sectors_per_request(self):
        """Mean sectors of a request; 0 for shared memory, which has none."""
        return self.sectors / self.requests

    @property
    def bank_ways(self):
        """Lanes that queue for one bank, on average: 1 is free of conflicts; 0 in global memory."""
        return self.wavefronts / self.fewest_wavefronts if self.fewest_wavefronts else 0.0

    @property
    def bank_conflicts(self):
        """Turns of the shared memory beyond the fewest."""
        return self.wavefronts - self.fewest_wavefronts

    @property
    def active_lanes(self):
        """Mean lanes of a request that take part, 32 at most."""
        return self.lanes / self.requests

    @property
    def bytes(self):
        """Bytes asked for."""
        return self.lanes * self.size

    @property
    def bytes_moved(self):
        """Bytes that global memory sends or takes: whole sectors."""
        return SECTOR_BYTES * self.sectors


@dataclass
class TracedBranch:
    """One condition or loop of the source.

    Attributes
    ----------
    source : str
        The condition of an `if` or `while`, or what a `for` loops over.
    executions : int
        How often a warp came to it; a loop comes once for each iteration and once at its end.
    divergent : int
        In how many of those some lanes went one way and some the other.
    """

    source: str
    line: int
    filename: str
    function: str
    executions: int = 0
    divergent: int = 0


class Trace(Observer):
    """What `trace` gives. `sites` and `branches` are in the order of the source."""

    wants_branches = wants_loops = True

    def __init__(self, blocks=None):
        self.blocks = blocks
        self._sites, self._branches = {}, {}
        self._sizes = list(SIZES)
        self._pending, self._events = [], 0
        self._launch, self._started = None, 0

    def execution(self, launch):
        """What carries out a launch (see `observe`)."""
        if len(launch.observers) > 1:
            raise RuntimeError("a launch can be traced or sanitized, not both at once: launch it "
                               "once inside each")
        self._count()
        self._launch, self._started = launch, itertools.count()
        return Tracing(launch, self._sizes, self._wanted(launch), self._block_done)

    def _wanted(self, launch):
        if self.blocks is None:
            return lambda block: True
        if isinstance(self.blocks, int):
            return lambda block: next(self._started) < self.blocks
        wanted = {index if isinstance(index, tuple) else (index,) for index in self.blocks}
        wanted = {(*index, 0, 0)[:3] for index in wanted}
        return lambda block: block.index in wanted

    def _block_done(self, block, logs):
        x, y, z = block.index
        gx, gy, _ = self._launch.grid_dim
        number = x + gx * (y + gy * z)
        for warp, first in enumerate(range(0, len(logs), WARP_SIZE)):
            self._pending.append((number, warp, logs[first:first + WARP_SIZE]))
        self._events += sum(map(len, logs))
        if self._events > _MOST_EVENTS:
            self._count()

    def _count(self):
        """Count what is pending."""
        pending, self._pending, self._events = self._pending, [], 0
        if not pending:
            return
        ids = np.array([entry[:2] for entry in pending])
        for signature, (warps, steps, values) in requests(
                [entry[2] for entry in pending]).items():
            number, action, code = split(signature)
            observed = self._launch.sites[number]
            if action in (BRANCH, LOOP):
                self._count_branch(observed, values)
                continue
            order = np.lexsort((steps, *ids[warps].T[::-1]))
            warps, values = ids[warps[order]], values[order]
            memory = self._memory(values)
            self._count_access(observed, _OPS[action], self._sizes[code], memory, warps, values)

    def _count_branch(self, observed, values):
        key = _place(observed)
        branch = self._branches.get(key)
        if branch is None:
            branch = self._branches[key] = TracedBranch(
                observed.text, observed.line, observed.filename, observed.function)
        branch.executions += len(values)
        branch.divergent += int(((values == 1).any(axis=1) & (values == 0).any(axis=1)).sum())

    def _memory(self, values):
        """(name, address, itemsize, space) of the array that the first address lies in."""
        address = int(values[values != IDLE][0])
        if address < _LEAST_GLOBAL:
            return "", 0, None, "shared"
        for memory in _memories(self._launch.args):
            if memory.address <= address < memory.address + memory.nbytes:
                return memory.name, memory.address, memory.itemsize, "global"
        raise AssertionError(f"address {address} lies in no array of the launch")

    def _count_access(self, observed, op, size, memory, warps, values):
        name, base, itemsize, space = memory
        key = *_place(observed), op, space, size
        site = self._sites.get(key)
        if site is None:
            itemsize = itemsize if itemsize and size % itemsize == 0 else size
            site = self._sites[key] = TracedSite(
                observed.text, observed.line, observed.filename, observed.function, op, space,
                observed.array or name, size, itemsize, base)
            site.addresses = np.empty((0, WARP_SIZE), np.int64)
            site.warps = np.empty((0, 2), np.int64)
        site.requests += len(values)
        site.lanes += int((values != IDLE).sum())
        if space == "global":
            count = atomic_sectors if site.op == "atomic" else sectors
            site.sectors += int(count(values, size).sum())
        else:
            turns, fewest = wavefronts(values, size)
            site.wavefronts += int(turns.sum())
            site.fewest_wavefronts += int(fewest.sum())
        room = KEPT_REQUESTS - len(site.addresses)
        if room > 0:
            site.addresses = np.concatenate([site.addresses, values[:room]])
            site.warps = np.concatenate([site.warps, warps[:room]])

    @property
    def sites(self):
        """The accesses, as a list of `TracedSite`, in the order of the source."""
        self._count()
        return [self._sites[key] for key in sorted(self._sites)]

    @property
    def branches(self):
        """The conditions and loops, as a list of `TracedBranch`, in the order of the source."""
        self._count()
        return [self._branches[key] for key in sorted(self._branches)]

    def _cells(self, wanted=lambda site: True):
        heads = ("line", "access", "", "memory", "requests", "lanes", "sectors/request", "bytes",
                 "moved", "bank ways")
        rows = []
        for site in filter(wanted, self.sites):
            cells = [str(site.line), _short(site.source), site.op, site.space, f"{site.requests:,}",
                     _mean(site.active_lanes)]
            if site.space == "global":
                cells += [_mean(site.sectors_per_request), f"{site.bytes:,}",
                          f"{site.bytes_moved:,}", ""]
            else:
                cells += ["", f"{site.bytes:,}", "", _mean(site.bank_ways)]
            rows.append(cells)
        branches = [[str(b.line), _short(b.source), f"{b.executions:,}", f"{b.divergent:,}"]
                    for b in filter(wanted, self.branches)]
        return (heads, rows), (("line", "branch", "executions", "divergent"), branches)

    def table(self, wanted=lambda site: True):
        """The sites, and below them the branches, as text for a fixed-width font.

        wanted  a function of a site or branch: whether it is in the table
        """
        return "\n\n".join(_text_table(*part) for part in self._cells(wanted) if part[1]) or (
            "nothing was traced: no kernel ran inside the `with` block")

    def _repr_html_(self):
        return "".join(_html_table(*part) for part in self._cells() if part[1])

    def __repr__(self):
        return f"<trace of {len(self.sites)} sites and {len(self.branches)} branches>"


#: Arguments of a kernel start here (`observe`); shared memory lies below.
_LEAST_GLOBAL = 1 << 20


def _memories(args):
    """The Memory of every array among a launch's arguments."""
    for value in args:
        if isinstance(value, Watched):
            yield value.memory
        elif isinstance(value, tuple):
            yield from _memories(value)


def _place(site):
    return site.filename, site.line, site.col, site.end_line, site.end_col


def _short(text):
    return text if len(text) <= 48 else text[:47] + "…"


def _mean(value):
    return f"{value:.0f}" if abs(value - round(value)) < 0.005 else f"{value:.2f}"


def _text_table(heads, rows):
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    texts = {column for column, head in enumerate(heads) if head in ("access", "", "memory",
                                                                     "branch")}
    return "\n".join("  ".join(
        cell.ljust(width) if column in texts else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines)


def _html_table(heads, rows):
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(heads, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


@contextlib.contextmanager
def trace(blocks=None):
    """Trace every kernel launched inside the `with` block; gives a `Trace`.

    Parameters
    ----------
    blocks : int, iterable or None
        Which blocks to trace: the first so many of each launch, or those with the given indices
        (integers, or tuples as in `cuda.blockIdx`). None traces all. The others run untraced, and
        are not counted.

    Raises
    ------
    RuntimeError at a launch that is also watched by `sanitize`.
    """
    if blocks is not None and not isinstance(blocks, int):
        blocks = list(blocks)
    found = Trace(blocks)
    try:
        with observing_with(found):
            yield found
    finally:
        found._count()
