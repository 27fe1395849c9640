"""numba's typing of operations on numbers as rules, for where numba cannot be installed: a browser.

A test holds them against numba's own typing, operation by operation and type by type.
"""

import numpy as np

_INTEGERS = ("boolean", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
#: Numbers that keep float32 and complex64 as they are; beside others these widen.
_NARROW = ("boolean", "int8", "int16", "uint8", "float32", "complex64")
_ORDERS = frozenset(["<", "<=", ">", ">="])


def signature(symbol, *names):
    """As `number_types.signature`, for all types but float16."""
    if len(names) == 1:
        return _unary(symbol, *names)
    a, b = names
    integers = a in _INTEGERS and b in _INTEGERS
    if symbol in ("<<", ">>"):
        if not integers:
            return None
        count = "uint64" if b == "boolean" else _word(b)
        return ("int8" if a == "boolean" else a, count), _word(a)
    if symbol in ("&", "|", "^"):
        if a == b == "boolean":
            return names, a
        return _of_words(a, b) if integers else None
    if symbol in ("==", "!=") or symbol in _ORDERS:
        common = _common(a, b)
        if common.startswith("complex") and symbol in _ORDERS:
            return None
        return (common, common), "boolean"
    if symbol == "**" and b in _INTEGERS and (power := _power(a, b)):
        return power
    if integers:
        found, result = _of_words(a, b)
        return found, "float64" if symbol == "/" else result
    common = _common(a, b)
    if common.startswith("complex") and symbol in ("//", "%"):
        return None
    return (common, common), common


def unified(*names):
    """As `number_types.unified`, two by two."""
    first, *others = names
    for name in others:
        kinds = {"float16": np.float16, "boolean": np.bool_}
        pair = [np.dtype(kinds.get(each, each)) for each in (first, name)]
        first = {"bool": "boolean"}.get(found := np.promote_types(*pair).name, found)
    return first


def _word(name):
    return "uint64" if name.startswith("uint") else "int64"


def _of_words(a, b):
    found = _word(a), _word(b)
    return found, "uint64" if found == ("uint64", "uint64") else "int64"


def _common(a, b):
    """The type in which two numbers are compared, and in which added where one is no integer."""
    found = unified(a, b)
    if found in ("float32", "complex64") and not (a in _NARROW and b in _NARROW):
        return {"float32": "float64", "complex64": "complex128"}[found]
    return found


def _power(a, b):
    """A number to an integer power; None where the power becomes a number like the first."""
    if (a, b) == ("boolean", "int32"):  # numba takes the first overload that fits
        return ("float32", b), "float32"
    if a in ("float32", "float64"):
        count = {"int64": "int64"}.get(b, "uint64" if b.startswith("uint") else "int32")
        return (a, count), a
    return None


def _unary(symbol, name):
    integer, complex_ = name in _INTEGERS, name.startswith("complex")
    if symbol in ("neg", "pos"):
        return (name,), _word(name) if integer else name
    if symbol == "invert":
        return ((name,), name if name == "boolean" else _word(name)) if integer else None
    if symbol == "abs":
        found = "int8" if name == "boolean" else name
        return (found,), {"complex64": "float32", "complex128": "float64"}.get(name, found)
    if complex_ or (symbol, name) == ("float", "boolean"):
        return None
    if symbol == "int":
        return (name,), "int64" if name == "boolean" or not integer else name
    if symbol == "float":
        return (name,), "float64" if integer else name
    return ("float32" if name in _NARROW else "float64",), "int64"  # round
