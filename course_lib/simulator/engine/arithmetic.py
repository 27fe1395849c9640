"""Arithmetic on the numbers of a kernel, as the compiled kernel does it.

`operators["+"](a, b)` gives what numba's `a + b` gives: the operands are converted to the types
that numba chooses, and the result wraps where its type ends. What is to be done for two classes of
operands is worked out once (`number_types`) and kept.

An int64 is a Python int here, a float64 a Python float, as both are fastest; other numbers are
NumPy's. What is no number (an array, a vector, a bfloat16) is left to Python's operator.

Four things have no result of their own on a GPU: a shift by 64 bits or more (here it shifts all
bits out, as the hardware's instruction does), a float too large for the integer it is converted to
(here what the instruction gives, see `rounding.compiled_integer`), an integer power above 65,536
that overflows, and what follows from an int64 that overflowed: the compiler may take it that none
does, so that `abs(2**63 - 1 + i)` may come out negative (here every one wraps).
"""

import math
import operator

import numpy as np

from course_lib.simulator.cuda_api.mathlib import math as gpu_math
from course_lib.simulator.cuda_api.rounding import compiled_integer
from course_lib.simulator.rewrite.number_types import (
    CLASSES,
    COMPARISONS,
    NAMES,
    OPERATORS,
    signature,
    unified,
)
from course_lib.simulator.rewrite.resolve import FLOATS, cast

LOWEST, HIGHEST = -(2**63), 2**63 - 1
_MASK = 2**64 - 1
_float32, _uint64 = np.float32, np.uint64
_REAL = frozenset([float, np.float32, np.float64])


def wrapped(value):
    """A Python integer as an int64 holds it."""
    value &= _MASK
    return value - 2**64 if value >> 63 else value


def _wrapped_unsigned(value):
    return _uint64(int(value) & _MASK)


# -- one operation on operands of the result's type ---------------------------------------------


def _floor_divide(a, b):
    return a // b if b else 0


def _remainder(a, b):
    return a % b if b else 0


def _shift_left(a, b):
    return a << b if 0 <= b < 64 else 0


def _shift_right(a, b):
    return a >> b if 0 <= b < 64 else -1 if a < 0 else 0


def _integer_power(a, b):
    if b >= 0:
        return pow(a, b, 2**64)
    if a == 0:
        return LOWEST
    return 0 if a not in (1, -1) else a if b % 2 else 1


def divide(a, b):
    """a / b of Python's floats; a division by zero gives an infinity or a NaN, as on a GPU."""
    try:
        return a / b
    except ZeroDivisionError:
        if a == 0 or a != a:
            return math.nan
        return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _fmod(a, b):
    return math.fmod(a, b) if b and math.isfinite(a) and not math.isnan(b) else math.nan


def _float_remainder(a, b):
    kind = a.__class__
    rest = kind(_fmod(a, b))
    if not b:
        return rest
    if rest:
        return rest + b if (b < 0) != (rest < 0) else rest
    return kind(math.copysign(0.0, b))


def _float_floor_divide(a, b):
    if not b:
        return divide(a, b)
    kind = a.__class__
    rest = kind(_fmod(a, b))
    quotient = divide(a - rest, b)
    if rest and (b < 0) != (rest < 0):
        quotient -= kind(1)
    if not quotient:
        return kind(math.copysign(0.0, divide(a, b)))
    if not math.isfinite(quotient):
        return quotient
    whole = kind(math.floor(quotient))
    return whole + kind(1) if quotient - whole > 0.5 else whole


def _float_power(a, b):
    """A float to the power of a float, or of an integer: then by squaring, as numba does."""
    if isinstance(b, float) or isinstance(b, np.floating):
        return a.__class__(gpu_math.pow(float(a), float(b)))
    kind, steps, result = a.__class__, abs(b), a.__class__(1)
    if steps > 0x10000:
        return kind(gpu_math.pow(float(a), float(b)))
    while steps:
        if steps & 1:
            result = result * a
        steps >>= 1
        a = a * a
    return kind(divide(1.0, float(result))) if b < 0 else result


_ON_INTEGERS = {
    **OPERATORS, "//": _floor_divide, "%": _remainder, "<<": _shift_left, ">>": _shift_right,
    "**": _integer_power,
}
_ON_FLOATS = {**OPERATORS, "/": divide, "//": _float_floor_divide, "%": _float_remainder,
              "**": _float_power}


# -- conversions ----------------------------------------------------------------------------------


def to_integer(value):
    """`int(value)` of a float: cut off, and the nearest int64 where it does not fit."""
    if -9e18 < value < 9e18 and value.__class__ is not np.float16:
        return int(value)
    return compiled_integer(value, 64, True)


def _signed_of(value):
    return wrapped(int(value))


def _unsigned_of(value):
    return int(value) & _MASK


#: type -> what makes an operand of that type, as the functions above take it
_OPERAND = {"int64": _signed_of, "uint64": _unsigned_of, "float64": float, "boolean": bool}
#: type -> what makes a result of that type of what the functions above give
_RESULT = {"int64": wrapped, "uint64": _wrapped_unsigned, "float64": float, "boolean": bool}


def _converter(goal, table):
    if goal in table:
        return table[goal]
    if "int" in goal:
        return cast(CLASSES[goal])
    return CLASSES[goal]


def conversion(source, goal):
    """What converts a value of class `source` to the type `goal`; None if it is of that type."""
    if NAMES[source] == goal:
        return None
    if goal == "int64":
        return to_integer if "float" in NAMES[source] else _signed_of
    return _converter(goal, _RESULT if goal == "uint64" else _OPERAND)


# -- what is done for the classes of the operands -------------------------------------------------


def _binary(symbol, first, second, fallback):
    names = NAMES.get(first), NAMES.get(second)
    if None in names:
        return fallback
    found = signature(symbol, *names)
    if found is None:
        return _refuse(symbol, names)
    (one, other), result = found
    if "complex" in one + other + result:
        one, other, finish = CLASSES[one], CLASSES[other], bool if result == "boolean" else complex
        if result == "complex64":
            finish = np.complex64
        return lambda a, b: finish(fallback(one(a), other(b)))
    if "int" in result:
        compute, one, other = _ON_INTEGERS[symbol], result, result
        if symbol == "**" or symbol in ("<<", ">>") and second is not _uint64:
            other = "int64"  # so that a negative power is seen as one
    else:
        compute = _ON_FLOATS[symbol]
    if one == "boolean" and symbol in "&|^":
        return lambda a, b: bool(compute(bool(a), bool(b)))
    if one == other == "int64" and result != "float64" and _uint64 not in (first, second):
        return _on_whole(compute, first is second is int, symbol in COMPARISONS)
    one, other = _converter(one, _OPERAND), _converter(other, _OPERAND)
    finish = _converter(result, _RESULT)
    if result == "float64" and symbol in ("+", "-", "*", "/"):
        return lambda a, b: compute(float(a), float(b))
    if symbol in COMPARISONS:
        return lambda a, b: compute(one(a), other(b))
    return lambda a, b: finish(compute(one(a), other(b)))


def _on_whole(compute, are_int, compares):
    """`compute` for two numbers whose values an int64 holds; the most frequent of all."""
    if compares:
        return compute if are_int else lambda a, b: compute(int(a), int(b))

    def of_int(a, b):
        value = compute(a, b)
        return value if LOWEST <= value <= HIGHEST else wrapped(value)

    return of_int if are_int else lambda a, b: of_int(int(a), int(b))


def _refuse(symbol, names):
    def refuse(*values):
        what = f"{names[0]} {symbol} {names[1]}" if len(names) == 2 else f"{symbol}({names[0]})"
        raise TypeError(f"a kernel cannot compute {what}: numba has no such operation")

    return refuse


def _unary(symbol, kind):
    fallback = OPERATORS[symbol]
    name = NAMES.get(kind)
    if name is None:
        return fallback
    found = signature(symbol, name)
    if found is None:
        return _refuse(symbol, (name,))
    (operand,), result = found
    if "complex" in result:
        return fallback
    if symbol in ("int", "float"):
        convert = conversion(kind, result)
        # NumPy's int64 becomes Python's, which a twin that calls Python's libraries needs.
        return convert or (int if result == "int64" else lambda value: value)
    if symbol == "round":
        return lambda value: to_integer(np.rint(float(value)))
    if symbol == "invert" and result == "boolean":
        return lambda value: not value
    # Done in the operand's own type, and widened afterwards: -int8(-128) is -128.
    narrow = int if operand == "boolean" else _converter(operand, _RESULT)
    finish = _converter(result, _RESULT)
    if "int" in result:
        return lambda value: finish(int(narrow(fallback(int(value)))))
    return lambda value: finish(fallback(narrow(value)))


def _extremum(symbol, first, second):
    test = OPERATORS[symbol]
    names = NAMES.get(first), NAMES.get(second)
    goal = None if None in names else unified(*names)
    if goal is None or "complex" in goal:
        return lambda a, b: a if test(a, b) or b != b else b
    one, other = (conversion(kind, goal) or (lambda value: value) for kind in (first, second))

    def call(a, b):
        a, b = one(a), other(b)
        return a if test(a, b) or b != b else b

    return call


def _convert_to_common(kind, other):
    names = NAMES.get(kind), NAMES.get(other)
    goal = None if None in names else unified(*names)
    convert = None if goal is None else conversion(kind, goal)
    return convert or (lambda value: value)


# -- the call targets of rewritten kernels --------------------------------------------------------


def _make_binary(symbol, fallback):
    known = {}
    plain = _REAL if symbol in ("+", "-", "*", *COMPARISONS) else frozenset()
    plain |= {int} if symbol in COMPARISONS else frozenset()
    on_int = _ON_INTEGERS[symbol] if symbol in ("+", "-", "*", "//", "%", "<<", ">>") else None

    def operate(a, b):
        kind, other = a.__class__, b.__class__
        if kind is other:
            if kind in plain:
                return fallback(a, b)
            if kind is int and on_int is not None:
                value = on_int(a, b)
                return value if LOWEST <= value <= HIGHEST else wrapped(value)
        found = known.get((kind, other))
        if found is None:
            found = known[kind, other] = _binary(symbol, kind, other, fallback)
        return found(a, b)

    return operate


def _make(maker, symbol, count):
    known = {}

    def one(value):
        found = known.get(value.__class__)
        if found is None:
            found = known[value.__class__] = maker(symbol, value.__class__)
        return found(value)

    def two(a, b):
        found = known.get((a.__class__, b.__class__))
        if found is None:
            found = known[a.__class__, b.__class__] = maker(symbol, a.__class__, b.__class__)
        return found(a, b)

    return one if count == 1 else two


_UNARY = ("neg", "pos", "invert", "abs", "int", "float", "round")
_IN_PLACE = {"+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv,
             "//": operator.ifloordiv, "%": operator.imod, "**": operator.ipow,
             "<<": operator.ilshift, ">>": operator.irshift, "&": operator.iand,
             "|": operator.ior, "^": operator.ixor}

#: symbol -> function of two numbers; "+=" and its kin change what is no number in place
operators = {symbol: _make_binary(symbol, function) for symbol, function in OPERATORS.items()
             if symbol not in _UNARY}
operators.update({f"{symbol}=": _make_binary(symbol, function)
                  for symbol, function in _IN_PLACE.items()})
#: name -> function of one number
unary = {symbol: _make(_unary, symbol, 1) for symbol in _UNARY}
#: `max` and `min` of two: the result has the type of both together; a NaN loses against a number
extrema = {max: _make(_extremum, ">=", 2), min: _make(_extremum, "<=", 2)}


def like(value, kind):
    """`value` as the type that it and a value of class `kind` have together."""
    return _convert_to_common(value.__class__, kind)(value)


def as_element(array, value):
    """`value`, a float, converted if `array` is one of integers."""
    dtype = getattr(array, "dtype", None)
    return value if dtype is None or dtype.kind not in "iu" else cast(dtype.type)(value)


def store(array, index, value):
    """`array[index] = value`, converted to the element's type as numba converts it.

    Of an integer that does not fit the lowest bits are stored.
    """
    if value.__class__ in FLOATS:
        value = _cut(array, index, value)
    try:
        array[index] = value
    except OverflowError:
        array[index] = _cut(array, index, value)


def store_field(record, name, value):
    """`record.name = value`, likewise."""
    if value.__class__ in FLOATS:
        value = _cut(record, name, value)
    try:
        setattr(record, name, value)
    except OverflowError:
        setattr(record, name, _cut(record, name, value))


def _cut(array, index, value):
    """A number as the element type of an array, or of a field of a record, holds it."""
    dtype = getattr(array, "dtype", None)
    if isinstance(index, str) and dtype is not None and dtype.names:
        dtype = dtype[index].base
    return value if dtype is None or dtype.kind not in "iu" else cast(dtype.type)(value)
