"""What an edit may need to know of the kernel around it: its parameters, and what its names are."""

from __future__ import annotations

import ast
from functools import cached_property

from course_lib.teach.explaining.mutation.trees import called, is_shape, names_in

#: How the kinds of names are called in a sentence.
KINDS = ("array", "size", "index", "constant", "number")


class Frame:
    """One function. `kinds` are its names by kind: array, size, index, constant, number.

    `parameters` are the names that everybody knows: one that a kernel calls has none.
    """

    def __init__(self, function: ast.FunctionDef, called: bool = False):
        self.function, self.called = function, called
        arguments = function.args
        given = () if called else (*arguments.posonlyargs, *arguments.args)
        self.parameters = [a.arg for a in given]

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of each name that is read as a value."""
        found: dict[str, str] = {}
        for node in ast.walk(self.function):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                found[node.value.id] = "array"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = node.value.id in ("cuda", "np", "math")
                found[node.value.id] = "module" if module else "array"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found[node.func.id] = "function"
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                found.update(dict.fromkeys(names_in(node.type), "exception"))
        for node in ast.walk(self.function):
            if isinstance(node, ast.Assign):
                kind = "size" if _is_size(node.value, found) else "number"
                for target in node.targets:
                    for name in names_in(target):
                        found.setdefault(name, kind)
            if isinstance(node, ast.For):
                for name in names_in(node.target):
                    found[name] = "index"
        for node in ast.walk(self.function):
            if isinstance(node, ast.Subscript) and not is_shape(node.value):
                for name in names_in(node.slice):
                    if found.get(name, "number") == "number":
                        found[name] = "index"
        for name in names_in(self.function):
            found.setdefault(name, "constant" if name.isupper() else "number")
        return found

    def alike(self, name: str) -> list[str]:
        """Return the other names of the kind of `name`, in the order of the alphabet."""
        kind = self.kinds.get(name)
        if kind not in KINDS:
            return []
        return sorted(each for each, its in self.kinds.items() if its == kind and each != name)

    def sizes(self) -> list[ast.expr]:
        """Return expressions for the sizes that the function knows by name."""
        return [ast.Name(name) for name, kind in sorted(self.kinds.items()) if kind == "size"]

    def array(self, node: ast.AST) -> str:
        """Return how a sentence calls an array: by its name only where everybody knows that."""
        if isinstance(node, ast.Name) and node.id in self.parameters:
            return node.id
        return "an array" if self.called else "an array made inside"


def _is_size(value: ast.expr, known: dict[str, str]) -> bool:
    if is_shape(value) or isinstance(value, ast.Attribute) and value.attr == "size":
        return True
    if isinstance(value, ast.Subscript):
        return is_shape(value.value)
    if isinstance(value, ast.Tuple):
        return all(_is_size(each, known) for each in value.elts)
    if isinstance(value, ast.BinOp):
        return all(_is_size(s, known) for s in (value.left, value.right))
    if isinstance(value, ast.Name):
        return known.get(value.id) == "size"
    return called(value) == "len" or isinstance(value, ast.Constant) and type(value.value) is int
