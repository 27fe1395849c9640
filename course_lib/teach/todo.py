"""`TODO`: what stands where the learner's code will go."""

from __future__ import annotations

import types
from collections.abc import Iterator

from course_lib.teach.exercise import python_function


class StillTodo(TypeError):
    """`TODO` was used as if it had a value."""


class _Todo:
    """The one `TODO`. It has no value, so using it as a number says what is missing."""

    def __repr__(self) -> str:
        return "TODO"

    def _not_a_number(self, *_args):
        raise StillTodo("this is still TODO: put your own code in its place")

    __float__ = __int__ = __index__ = __bool__ = __call__ = __getitem__ = _not_a_number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _not_a_number
    __truediv__ = __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = _not_a_number


TODO = _Todo()


def contains_todo(obj: object) -> bool:
    """Tell whether `obj`, or a function that it calls or defines, still holds `TODO`.

    Nothing is run: the names in the code are enough.
    """
    return unfinished(obj) is not None


def unfinished(obj: object) -> str | None:
    """Return the name of the function that `obj` calls and that still holds `TODO`; None if none.

    "" where that is `obj` itself.
    """
    if obj is TODO or isinstance(obj, tuple | list) and any(part is TODO for part in obj):
        return ""  # a tuple is an answer in parts
    function = python_function(obj)
    if not isinstance(function, types.FunctionType):
        return None
    for each in own_functions(function):
        if _names_todo(each):
            return "" if each is function else each.__name__
    return None


def own_functions(function: types.FunctionType) -> list[types.FunctionType]:
    """Return `function` and the functions of the same file that it refers to, each once.

    Course and library functions are finished; only the learner's own can hold TODO, or a mistake.
    """
    found = [function]
    for each in found:  # which grows meanwhile
        for _, value in _references(each):
            helper = python_function(value)
            if isinstance(helper, types.FunctionType) and helper.__module__ == function.__module__:
                if helper not in found:
                    found.append(helper)
    return found


def _references(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the names that `function` and the code inside it use, each with its value."""
    for code in _codes(function.__code__):
        for name in code.co_names:
            yield name, function.__globals__.get(name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable has no value yet
            yield name, None


def _names_todo(function: types.FunctionType) -> bool:
    return any(name == "TODO" or value is TODO for name, value in _references(function))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
