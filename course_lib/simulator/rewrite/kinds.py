"""What is known of the numbers in a function before it runs: so that most operations cost nothing.

The kind of an expression is one of

- `Whole(bits)`: a Python int (an int64) whose magnitude is at most 2**bits
- `float`: a float64, Python's or NumPy's; `bool`: a truth value, Python's or NumPy's
- another class of NumPy's, `np.float32`: exactly that class
- `Cells(class, ndim)`: an array
- a tuple of kinds
- None: unknown. Then what an operation does is decided each time it runs.
"""

import ast
from typing import NamedTuple

import numpy as np

from course_lib.simulator.rewrite.number_types import CLASSES, COMPARISONS, NAMES, OPERATORS
from course_lib.simulator.rewrite.resolve import UNRESOLVED

SYMBOLS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|",
    ast.BitXor: "^", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==",
    ast.NotEq: "!=", ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert",
}


class Whole(NamedTuple):
    """A Python int: -2**bits <= value < 2**bits; 63 bits are those of an int64."""

    bits: int


class Cells(NamedTuple):
    """An array of numbers."""

    kind: type
    ndim: int


def kind_of_class(kind):
    """The kind of a value of this class."""
    if kind in (int, np.int64):
        return Whole(63) if kind is int else kind
    return {np.float64: float, np.bool_: bool}.get(kind, kind) if kind in NAMES else None


def kind_of_value(value):
    """The kind of an argument or a global."""
    kind = value.__class__
    if kind is int:
        return Whole(31 if -(2**31) <= value < 2**31 else 63) if -(2**63) <= value < 2**63 else (
            np.uint64)
    if isinstance(value, np.ndarray):
        element = value.dtype.type
        return Cells(element, value.ndim) if element in NAMES and value.ndim else None
    if kind is tuple:
        return tuple(map(kind_of_value, value))
    return kind_of_class(kind)


def general(kind):
    """The kind with integers of 31 or 63 bits alone, so that few copies of a function are made."""
    if kind.__class__ is tuple:
        return tuple(map(general, kind))
    return Whole(31 if kind.bits <= 31 else 63) if kind.__class__ is Whole else kind


def is_number(kind):
    """True for the kinds of numbers."""
    return isinstance(kind, (Whole, type))


def name_of(kind):
    """numba's name of a kind of number."""
    return "int64" if kind.__class__ is Whole else NAMES[kind]


def folded(node):
    """The value of an expression of literals, which Python computes before numba sees it."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) in (bool, int, float) else UNRESOLVED
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = folded(node.operand)
        return value if value is UNRESOLVED else not value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
        operands = [folded(node.operand)]
    elif isinstance(node, ast.BinOp):
        operands = [folded(node.left), folded(node.right)]
    else:
        return UNRESOLVED
    if UNRESOLVED in operands or isinstance(getattr(node, "op", None), (ast.Pow, ast.LShift)) and (
            abs(operands[-1]) > 128):
        return UNRESOLVED
    try:
        return OPERATORS[SYMBOLS[node.op.__class__]](*operands)
    except (ArithmeticError, TypeError, KeyError):
        return UNRESOLVED


def kind_of_name(name):
    """The kind of a result of this numba type."""
    return kind_of_class(CLASSES[name]) if name in CLASSES else None


def whole_bits(kind):
    """The bits of an integer that an int64 holds; None for other kinds."""
    if kind.__class__ is Whole:
        return kind.bits
    if isinstance(kind, type) and issubclass(kind, np.integer) and kind is not np.uint64:
        return 8 * np.dtype(kind).itemsize - issubclass(kind, np.signedinteger)
    return None


def whole_operation(symbol, left, right, value):
    """The kind of an operation on two int64; `value` is the right one if it is a literal."""
    if symbol in COMPARISONS:
        return bool
    if symbol in ("<<", "**"):
        literal_shift = symbol == "<<" and value is not None and value >= 0
        return Whole(min(63, left + value) if literal_shift else 63)
    most = {"+": max(left, right) + 1, "-": max(left, right) + 1, "*": left + right + 1,
            "//": left + 1, "%": right, ">>": left}
    return float if symbol == "/" else Whole(min(63, most.get(symbol, max(left, right))))
