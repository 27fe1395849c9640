"""Memory accesses of the source: what the reports, and later the tracer, go by."""

import ast
from dataclasses import dataclass, field


@dataclass
class Site:
    """One memory access of the source: what the reports, and later the tracer, go by."""

    text: str
    array_text: str
    kind: str  # "load", "store", "update" or "atomic"
    lineno: int
    col: int
    base: ast.expr = None
    elements: list = field(default_factory=list)
    is_tuple: bool = False
    shape: tuple = None  # of an array kept as lists

    def base_value(self, frame):
        """The array indexed, as the frame has it after the error; None if it cannot be told."""
        return _evaluate(self.base, frame)

    def index_value(self, frame, upto=None):
        """The index used; parts not computed before the error are Ellipsis."""
        parts = []
        for axis, element in enumerate(self.elements):
            known = upto is None or axis <= upto
            parts.append(_evaluate(element, frame, Ellipsis) if known else Ellipsis)
        return tuple(parts) if self.is_tuple else parts[0]


def _evaluate(node, frame, default=None):
    if node is None:
        return default
    expression = ast.fix_missing_locations(ast.Expression(node))
    try:
        return eval(compile(expression, "<site>", "eval"), frame.f_globals, dict(frame.f_locals))
    except Exception:
        return default


def is_pure(node):
    """True if a rewritten expression may be evaluated again; arithmetic may."""
    return not any(isinstance(part, (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await))
                   or isinstance(part, ast.Call) and not (
                       isinstance(part.func, ast.Name) and "_number_" in part.func.id)
                   for part in ast.walk(node))


def position(node):
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
