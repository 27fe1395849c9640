"""Names that are set once, and code with what they are set to in their place."""

from __future__ import annotations

import ast

from course_lib.simulator.rewrite.tree import copied
from course_lib.teach.explaining.mutation.lines import lines_of
from course_lib.teach.explaining.mutation.trees import is_shape, is_store


def set_once(
    function: ast.FunctionDef, lines: set[int], known: set[str]
) -> dict[str, ast.expr]:
    """Return what each name that is set only once, in one of the lines, is set to.

    Also what sizes are that are set in any line, and go by no name that is known.
    """
    stores = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and is_store(n)]
    numbers = {line.text: n for n, line in enumerate(lines_of(function))}
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, text = node.targets[0].id, ast.unparse(node)
            if stores.count(name) == 1 and "shfl" not in text and "array(" not in text:
                if numbers.get(text) in lines:
                    found[name] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            for k, each in enumerate(node.targets[0].elts):
                if is_shape(node.value) and stores.count(name := ast.unparse(each)) == 1:
                    if name not in known:
                        found[name] = ast.Subscript(node.value, ast.Constant(k), ast.Load())
    return found


def inlined(function: ast.FunctionDef, values: dict[str, ast.expr]) -> ast.FunctionDef:
    """Return a function with what each name is set to in the name's place."""
    return _Inlined(values).visit(copied(function))


class _Inlined(ast.NodeTransformer):
    """Puts what a name is set to in the name's place."""

    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node):
        value = None if is_store(node) else self.values.get(node.id)
        return node if value is None else self.visit(copied(value))

    def visit_Assign(self, node):
        self.generic_visit(node)
        target = node.targets[0]
        return None if isinstance(target, ast.Name) and target.id in self.values else node
