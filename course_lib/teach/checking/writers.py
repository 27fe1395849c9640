"""Which threads write an element of the output, and whether any writes what it must leave alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

import numpy as np

from course_lib.simulator.observe.observer import Observer, pointer
from course_lib.simulator.rewrite.source import function_tree
from course_lib.teach.checking.fences import FencedArray
from course_lib.teach.exercise import python_function


class Writers(Observer):
    """Watches launches and notes the first element that two threads write.

    Attributes
    ----------
    twice: (name of the array, flat index, a thread, another, site), None while there is none. A
        thread is named by its block's index and its own.
    borrowed: (name of the array, site) of the first write to an input, None while there is none:
        it is one even if the old number is put back later.
    foreign: (name of the array, flat index, site) of the first write to an element that is
        somebody else's, as the masks `others` tell; None while there is none.
    """

    def __init__(
        self,
        outputs: dict[str, FencedArray],
        inputs: dict[str, FencedArray],
        others: dict[str, np.ndarray] | None = None,
    ):
        self.twice = self.borrowed = self.foreign = None
        self._others = others or {}
        self._names = {pointer(a.view): (n, a.view.itemsize) for n, a in outputs.items() if a.size}
        self._inputs = {pointer(a.view): n for n, a in inputs.items() if a.size}
        self._written = {}

    def wrote(self, name: str, place: int) -> bool:
        """Tell whether any thread wrote that element of that output."""
        return (name, place) in self._written

    def on_store(self, thread, site, memory, offset, size):
        """Note who writes; an observer's hook."""
        self._note_input(site, memory)
        name, itemsize = self._names.get(memory.base, (None, 1))
        if name is None:
            return
        self._note_foreign(site, name, offset // itemsize, size // itemsize)
        me = thread.b.index, thread.index
        for place in range(offset // itemsize, (offset + size) // itemsize):  # a vector has several
            first = self._written.setdefault((name, place), me)
            if first != me and self.twice is None:
                self.twice = name, place, first, me, site

    def on_atomic(self, thread, site, memory, offset, size):
        """Note an input that is added to; several threads may add to an output."""
        self._note_input(site, memory)
        name, itemsize = self._names.get(memory.base, (None, 1))
        self._note_foreign(site, name, offset // itemsize, size // itemsize)

    def _note_foreign(self, site, name, first, count):
        if self.foreign is None and name in self._others:
            places = np.flatnonzero(self._others[name].flat[first : first + count])
            if places.size:
                self.foreign = name, first + int(places[0]), site

    def _note_input(self, site, memory):
        if self.borrowed is None and memory.base in self._inputs:
            self.borrowed = self._inputs[memory.base], site

def stored_in_order(kernel: Callable, parameters: Sequence[str]) -> list[str]:
    """Return which of the parameters a kernel stores into, in the order of the lines that do.

    `parameters` are the exercise's names for them; the kernel may have its own.
    """
    tree = function_tree(python_function(kernel))
    if tree is None:
        return []
    names = dict(zip((each.arg for each in tree.args.args), parameters, strict=False))
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            name = names.get(getattr(node.value, "id", ""))
            if name is not None:
                lines[name] = min(node.lineno, lines.get(name, node.lineno))
    return sorted(lines, key=lines.get)
