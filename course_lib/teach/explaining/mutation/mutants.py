"""Wrong versions of a right kernel, made by small changes to its syntax tree.

    for mutant in mutants(kernel):
        print(mutant.name)          # "drop guard: if i < x.size"
        mutant.build()              # the changed kernel, decorated like the original

A mutant may be right by chance: `tests/bank/equivalent.py` lists those.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from course_lib.teach.explaining.mutation import edits
from course_lib.teach.explaining.mutation.changes import Change, changes
from course_lib.teach.explaining.mutation.trees import at


@dataclass(frozen=True)
class Mutant:
    """A changed function. `name` says what was changed, and is the same in every run."""

    name: str
    change: Change

    @property
    def text(self) -> str:
        """The changed source."""
        return self.change.text

    def build(self) -> Callable:
        """Compile it in the original's module, so that it is what a learner could have typed."""
        return self.change.build()


def mutants(kernel: Callable, operators: Iterable[Callable] = edits.OPERATORS) -> list[Mutant]:
    """Return every mutant of a kernel, each text once."""
    found, seen, names = [], set(), set()
    for change in changes(kernel, operators):
        if not seen:
            seen.add(ast.unparse(change.tree))
        if change.text not in seen:
            seen.add(change.text)
            found.append(Mutant(_named(names, change), change))
    return found


def _named(names: set[str], change: Change) -> str:
    ((path, new),) = change.places
    name = f"{change.operator.replace('_', ' ')}: {_label(at(change.tree, path), new)}"
    while name in names:  # the same expression stands in the kernel twice
        name += ", again"
    names.add(name)
    return name


def _label(node: ast.AST, replacement: ast.AST | list) -> str:
    before = ast.unparse(node).splitlines()[0].rstrip(":")
    if isinstance(replacement, list) or isinstance(node, ast.If):
        return before
    return f"{before} → {ast.unparse(ast.fix_missing_locations(replacement)).splitlines()[0]}"
