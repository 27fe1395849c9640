"""The type that numba gives the result of an operation on numbers: asked of numba's own typing.

numba widens integers to 64 bits before it operates on them, keeps float32 only beside float32 and
integers of 16 bits, and takes every Python integer for an int64. A GPU's compiler types as plain
numba does, but for float16, of which plain numba knows little; its rules are written down here.
"""

import functools
import importlib.util
import operator

import numpy as np

from course_lib.simulator.rewrite import number_rules

#: class of a value in a kernel -> numba's name of its type
NAMES = {
    bool: "boolean", np.bool_: "boolean", int: "int64", float: "float64", complex: "complex128",
    **{getattr(np, name): name for name in (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
        "float32", "float64", "complex64", "complex128")},
}
#: numba's name -> the class that results of this type have: Python's own where there is one
CLASSES = {
    **{name: kind for kind, name in NAMES.items()}, "boolean": bool, "int64": int,
    "float64": float, "complex128": np.complex128,
}
#: symbol -> the function that numba types
OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow, "<<": operator.lshift,
    ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
    "neg": operator.neg, "pos": operator.pos, "invert": operator.invert,
    "abs": abs, "int": int, "float": float, "round": round,
}
COMPARISONS = frozenset(["<", "<=", ">", ">=", "==", "!="])

# What float16 becomes beside another type, when a GPU's compiler adds, compares and so on.
_HALF_STAYS = frozenset(["boolean", "int8", "float16"])
_HALF_WIDENS = frozenset(["uint8", "int16", "float32"])
_HALF_OPERATORS = frozenset(["+", "-", "*", "/", *COMPARISONS])
_HALF_UNARY = {"neg": "float16", "pos": "float16", "abs": "float16", "float": "float16",
               "int": "int64", "round": "int64"}


@functools.cache
def _without_numba():
    return importlib.util.find_spec("numba") is None


@functools.cache
def context():
    """numba's typing context."""
    from numba.core import typing

    context = typing.Context()
    context.refresh()
    return context


def _types(names):
    from numba.core import types

    return tuple(getattr(types, name) for name in names)


@functools.cache
def signature(symbol, *names):
    """(types that the operands are converted to, type of the result) by numba's names, or None.

    None is for what numba refuses, such as `float32 & float32`.
    """
    if "float16" in names:
        return _half(symbol, names)
    if _without_numba():
        return number_rules.signature(symbol, *names)
    from numba.core.errors import NumbaError

    try:
        found = context().resolve_function_type(OPERATORS[symbol], _types(names), {})
    except NumbaError:
        return None
    if found is None:
        return None
    return tuple(map(_name, found.args)), _name(found.return_type)


def _name(found):
    return "boolean" if str(found) == "bool" else str(found)


def _half(symbol, names):
    if len(names) == 1:
        result = _HALF_UNARY.get(symbol)
        wide = "float32" if symbol == "round" else "float16"
        return result and ((wide,), result)
    other = names[1] if names[0] == "float16" else names[0]
    if symbol == "**" and names[0] == "float16" and (other == "boolean" or "int" in other):
        power = other if "64" in other else "uint64" if other[0] == "u" else "int32"
        return ("float32", power), "float32"
    if other in _HALF_STAYS and symbol in _HALF_OPERATORS:
        wide = "float16"
    elif other in _HALF_WIDENS or other in _HALF_STAYS:
        wide = "float32"
    else:
        wide = other if other.startswith("complex") else "float64"
    if symbol not in _HALF_OPERATORS and symbol not in ("//", "%", "**"):
        return None
    return (wide, wide), "boolean" if symbol in COMPARISONS else wide


@functools.cache
def unified(*names):
    """The type of a value that is one of several: of `min`, `max` and `a if b else c`; or None."""
    if len(set(names)) == 1:
        return names[0]
    if _without_numba():
        return number_rules.unified(*names)
    found = context().unify_types(*_types(names))
    return None if found is None else _name(found)
