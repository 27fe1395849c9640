"""Where a line is: in the learner's own function, in another of theirs, or in one of the course's.

Two cells may both have a line 12, and a line of the course's is none that the learner can change:
then the line is told that calls it.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import course_lib
from course_lib.simulator.linting.lint import global_names
from course_lib.simulator.rewrite.source import function_tree
from course_lib.teach.display import quote
from course_lib.teach.exercise import python_function

COURSE = Path(course_lib.__file__).parent


def where(obj: Callable, filename: str, line: int, way: Sequence[tuple[str, int]] = ()) -> str:
    """Return " in line 4, `y[i] = z`", with the function's name unless it is `obj` itself.

    `way` are the (file, line) through which the run came there, if that is known. "" where no line
    is known.
    """
    if not line:
        return ""
    for function, callers in _reached(python_function(obj)):
        if _holds(function, filename, line):
            return _told(function, callers, filename, line, way)
    return f" in {quote(filename, line)}"


def _told(function, callers, filename, line, way) -> str:
    inside = ""
    while callers and _is_courses(function):
        caller, called_in = callers[-1]
        called_in = next((n for file, n in way if _holds(caller, file, n)), called_in)
        inside = inside or f", in {function.__name__}, which it calls"
        function, callers = caller, callers[:-1]
        filename, line = function.__code__.co_filename, called_in
    name = function.__name__ if callers else ""  # else it is the object itself
    return f" in {quote(filename, line, name)}{inside}"


def _reached(function, callers=(), seen=None) -> Iterator[tuple[types.FunctionType, tuple]]:
    """Yield a function and all that it calls, each with its callers and the lines of the calls."""
    seen = set() if seen is None else seen
    if function in seen:
        return
    seen.add(function)
    yield function, callers
    around = inspect.getclosurevars(function).nonlocals
    for name in sorted(global_names(function.__code__)) + sorted(around):
        value = python_function(around.get(name, function.__globals__.get(name)))
        if isinstance(value, types.FunctionType):
            yield from _reached(value, (*callers, (function, _line_with(function, name))), seen)


def _line_with(function, name: str) -> int:
    """Return the number of the first line of a function in which a name occurs."""
    tree = function_tree(function)
    found = ast.walk(tree) if tree is not None else ()
    lines = [node.lineno for node in found if isinstance(node, ast.Name) and node.id == name]
    return min(lines, default=function.__code__.co_firstlineno)


def _holds(function, filename: str, line: int) -> bool:
    code = function.__code__
    if code.co_filename != filename:
        return False
    last = max((number for *_, number in code.co_lines() if number), default=0)
    return code.co_firstlineno <= line <= last


def _is_courses(function) -> bool:
    return COURSE in Path(function.__code__.co_filename).parents


def element(name: str, index: tuple[int, ...]) -> str:
    """Return "y[1, 2]", or just "y" for an array without dimensions."""
    return f"{name}[{', '.join(map(str, map(int, index)))}]" if len(index) else name
