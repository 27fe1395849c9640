"""What the text of a kernel tells about an error in it, or about NaN in its result.

The simulator runs a kernel as Python, where NumPy computes with whole arrays, and where generators
work. A GPU does neither, and what Python says of them is about NumPy, not about the kernel.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType

import numpy as np

from course_lib import simulator
from course_lib.simulator.linting.lint import global_names
from course_lib.simulator.rewrite.source import function_tree
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.running import Attempt, Failure, Run
from course_lib.teach.exercise import Exercise, exercises, python_function
from course_lib.teach.explaining.places import where
from course_lib.teach.todo import StillTodo

#: Functions of Python that a kernel calls with numbers.
_OF_NUMBERS = ("abs", "float", "int", "max", "min", "round", "sum")


def meaning(function, error: BaseException) -> tuple[str, str, str] | None:
    """Return (what it is, what is seen, a fix) where the line that raised tells; None else.

    Only of kernels: a function for the CPU may compute with whole arrays.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    for frame, line in zip(reversed(frames), reversed(lines), strict=True):
        code = frame.f_code
        if code.co_filename == function.__code__.co_filename and "__unit__" in frame.f_globals:
            statement = _statement(function, line)
            return None if statement is None else _meaning(statement, frame)
    return None


def is_unfinished(error: BaseException | None) -> bool:
    """Tell whether it is about a name that nothing has, or about a TODO."""
    return type(error) is NameError or isinstance(error, StillTodo)


def of_a_missing_name(error: NameError, exercise: Exercise) -> str:
    """Return what to do about a name that is not defined: which exercise gives it, or what cell."""
    name = error.name or re.search("'(.*?)'", str(error))[1]
    known = exercises().get(name)
    if known is not None and known is not exercise:
        return (
            f"`{name}` is not defined: it is the exercise {name} of lesson {int(known.lesson)}, "
            f"and {name} = use({name!r}) takes it"
        )
    if name in python_function(exercise.solution).__globals__:
        return f"`{name}` is not defined: run the cell above that defines it"
    return f"`{name}` is not defined: nothing in the cells that have run is called so"


def generator_expression() -> tuple[str, str, str]:
    """Return what is wrong with a generator expression in a kernel."""
    return "a generator expression", "a kernel has no generator expressions", "write a loop"


def _meaning(statement: ast.stmt, frame: FrameType) -> tuple[str, str, str] | None:
    if any(isinstance(node, ast.GeneratorExp) for node in ast.walk(statement)):
        return generator_expression()
    for node in _operands(statement):
        missing = _missing_indices(node, frame)
        if missing and isinstance(node, ast.Name):
            index = _index_of_others(statement, missing, frame)
            meant = f"write `{node.id}[{index}]`" if index else "give its index"
            return (
                "a whole array in arithmetic",
                f"`{node.id}` is an array, and a kernel computes with one number at a time",
                f"{meant}, if an element of it is meant",
            )
        if missing:
            return (
                "a part of an array in arithmetic",
                f"`{ast.unparse(node)}` lacks an index and so is many numbers, and a kernel "
                "computes with one at a time: it has no arithmetic on whole rows",
                "write a loop over them, and give every index",
            )
    return None


def _statement(function, line: int) -> ast.stmt | None:
    """Return the innermost statement around a line of a function."""
    tree = function_tree(function)
    found = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno
    ]
    simple = [node for node in found if not hasattr(node, "body")]
    return max(simple, key=lambda node: node.lineno, default=None)


def _operands(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield what a statement computes with: operands, and arguments of math's functions."""
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp):
            yield from (node.left, node.right)
        elif isinstance(node, ast.UnaryOp):
            yield node.operand
        elif isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.AugAssign):
            yield from (node.target, node.value)
        elif isinstance(node, ast.Call) and _takes_numbers(node.func):
            yield from node.args


def _takes_numbers(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id in ("math", "np")
    return isinstance(function, ast.Name) and function.id in _OF_NUMBERS


def _missing_indices(node: ast.expr, frame: FrameType) -> int:
    """Return how many indices an array, or a part of one, lacks to be a number."""
    array, given = node, 0
    if isinstance(node, ast.Subscript):
        array, given = node.value, len(_indices(node))
    value = frame.f_locals.get(array.id) if isinstance(array, ast.Name) else None
    return max(0, value.ndim - given) if isinstance(value, np.ndarray) else 0


def _indices(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _index_of_others(statement: ast.stmt, dimensions: int, frame: FrameType) -> str:
    """Return the index that all other arrays of so many dimensions have here, "" if none."""
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            value = frame.f_locals.get(node.value.id)
            if isinstance(value, np.ndarray) and value.ndim == dimensions:
                found.add(ast.unparse(node.slice).strip("()"))
    return found.pop() if len(found) == 1 else ""


#: What can make NaN of finite numbers, by the names of functions. Products and sums overflow too,
#: but seldom, and NaN may come from elsewhere: bits that are read as another type, for instance.
_OVERFLOWS = {"exp", "exp2", "expm1", "pow", "cosh", "sinh"}
_NOT_OF_NEGATIVES = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p"}


def origin_of_nan(attempt: Attempt, failure: Failure) -> str:
    """Return what led to NaN, where finite numbers went in: as the run shows, or as it may be."""
    lines: dict[str, dict[tuple[str, int], None]] = {"overflow": {}, "invalid value": {}}

    def note(kind):
        if kind in lines and not lines["invalid value"]:  # what comes later leads to nothing
            frame = sys._getframe(1)
            while frame is not None and "__unit__" not in frame.f_globals:
                frame = frame.f_back
            if frame is not None:
                lines[kind][frame.f_code.co_filename, frame.f_lineno] = None

    engine = Simulator(failure.run.engine.order, attempt.seed)
    with simulator.options(float_error=note), contextlib.suppress(Exception):
        Run(attempt.exercise, failure.run.case, engine).execute(attempt.obj)
    overflow, computed = (where(attempt.obj, *next(iter(each), ("", 0))) for each in lines.values())
    if not overflow or len(lines["overflow"]) > 1:
        ways = _ways_to_nan(attempt.obj)
        return f"{computed}{': ' * bool(ways)}{ways}"
    then = f", before NaN is computed{computed}" if computed not in ("", overflow) else ""
    return f": an intermediate result overflows to infinity{overflow}{then}"


def _ways_to_nan(obj: Callable) -> str:
    """Return how a kernel, or what it calls, can make NaN of finite numbers; "" if hardly."""
    nodes = [node for tree in _trees(python_function(obj), set()) for node in ast.walk(tree)]
    called = {_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    signs = {type(n.op) for n in nodes if isinstance(n, ast.BinOp | ast.AugAssign)}
    ways = []
    if called & _OVERFLOWS or signs & {ast.Div, ast.Pow}:
        ways.append("an intermediate result overflows to infinity")
    if ast.Div in signs:
        ways.append("0 is divided by 0")
    if any(isinstance(n, ast.Attribute) and n.attr == "inf" for n in nodes) or any(
        isinstance(value, float | np.floating) and np.isinf(value)
        for value in _globals(python_function(obj))
    ):
        ways.append("one infinite number is taken from another")
    if called & _NOT_OF_NEGATIVES:
        ways.append("a root or logarithm is taken of a negative number")
    return ", or ".join(ways)


def _trees(function: FunctionType, seen: set) -> Iterator[ast.AST]:
    """Yield the syntax trees of a function and of all that it calls."""
    if function in seen or not isinstance(function, FunctionType):
        return
    seen.add(function)
    tree = function_tree(function)
    if tree is not None:
        yield tree
    for value in _globals(function):
        yield from _trees(python_function(value), seen)


def _globals(function: FunctionType) -> list:
    """Return what the names stand for that a function looks up outside itself."""
    return [function.__globals__.get(name) for name in global_names(function.__code__)]


def _name(function: ast.expr) -> str:
    """Return the last part of a function's name: "exp" of math.exp."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
