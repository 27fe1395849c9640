"""Whether a kernel whose blocks stand for devices passes things on in a ring.

Row r of each array stands for the memory of device r. In the simulator a block can reach every row,
so that a kernel which reads or writes another device's memory directly has the right result, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from course_lib.teach.checking.work import Work


class Visits(Work):
    """Counts what launches do, and whose rows each block reads and writes in global memory.

    Attributes
    ----------
    ranks: how many blocks the last launch had.
    visits: the first site of each ("reads" or "writes", name of the array, block, row).
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.ranks, self.visits = 0, {}

    def on_launch(self, launch):
        """An observer's hook, as the others."""
        super().on_launch(launch)
        self.ranks = int(np.prod(launch.grid_dim))

    def on_load(self, thread, site, memory, offset, size):
        """Note whose row is read."""
        super().on_load(thread, site, memory, offset, size)
        self._visit("reads", thread, site, memory, offset)

    def on_store(self, thread, site, memory, offset, size):
        """Note whose row is written; an atomic is a store as well."""
        super().on_store(thread, site, memory, offset, size)
        self._visit("writes", thread, site, memory, offset)

    def _visit(self, verb, thread, site, memory, offset):
        if memory.space == "global":
            row = offset * memory.shape[0] // memory.nbytes
            self.visits.setdefault((verb, memory.name, thread.b.index[0], row), site)

    def ahead(self, device: int, row: int) -> int:
        """Return how many steps to the right the row's device is, round the ring."""
        return (row - device) % self.ranks


@dataclass(frozen=True)
class RingAlone:
    """The exercise is about a ring of devices, each of which knows its neighbour alone.

    A device may read its own row, and write to its own and to its right neighbour's. A ring may
    also go to the left, if all of it does.
    """

    counts: ClassVar[type[Work]] = Visits

    def objection(self, mine: Visits, lessons: Visits) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        visits, left = mine.visits, mine.ranks - 1
        sent = {mine.ahead(*who) for verb, _, *who in visits if verb == "writes"} - {0}
        allowed = {"reads": {0}, "writes": {0, left} if sent == {left} else {0, 1}}
        for (verb, name, device, row), site in visits.items():
            if mine.ahead(device, row) not in allowed[verb]:
                return (
                    f"device {device} {verb} {name}[{row}], the memory of device {row},"
                    f"{mine.where(site)}: a device may read its own row alone, and write to its "
                    "own and to its right neighbour's"
                ), True
        return "", False
