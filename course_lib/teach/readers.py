"""How often each block reads an input: for exercises in which a block should read it once."""

from __future__ import annotations

from course_lib.simulator.observe import Observer, pointer
from course_lib.teach.fences import FencedArray


class Readers(Observer):
    """Watches launches and counts the elements of some inputs that each block reads.

    arrays  the inputs, by name
    most    for each name, how many reads of a block are enough
    """

    def __init__(self, arrays: dict[str, FencedArray], most: dict[str, int]):
        self._most, self._count, self._site = most, {}, {}
        self._names = {pointer(a.view): (n, a.view.itemsize) for n, a in arrays.items() if a.size}

    def on_load(self, thread, site, memory, offset, size):
        """Note who reads; an observer's hook."""
        name, itemsize = self._names.get(memory.base, (None, 1))
        if name is not None:
            key = name, thread.b.index
            self._count[key] = self._count.get(key, 0) + size // itemsize
            self._site[key] = site

    @property
    def too_many(self) -> tuple[str, str] | None:
        """(the input, a sentence) of the first block that reads too often, None if none does."""
        for (name, block), count in self._count.items():
            if count > self._most[name]:
                site = self._site[name, block]
                return name, (
                    f"block {block[0]} reads {name} {count} times, the last time in line "
                    f"{site.line}, `{site.source}`; {self._most[name]} times are enough"
                )
        return None
