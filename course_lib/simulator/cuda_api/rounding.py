"""Exact results rounded the way the hardware is asked to: nearest, down, up, towards zero."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

MODES = ("rn", "rd", "ru", "rz")


def _step(value, kind, upwards):
    goal = kind(math.inf if upwards else -math.inf)
    if kind is ml_dtypes.bfloat16 or kind is np.float16:
        return np.nextafter(value, goal)
    return np.nextafter(value, goal, dtype=kind)


def exact(value):
    """The value as a Fraction; None if it is infinite or NaN."""
    value = float(value) if not isinstance(value, (int, np.integer)) else int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return Fraction(value)


def round_exact(value, kind, mode="rn", sign=1.0):
    """The Fraction `value` as floating-point type `kind`, rounded by `mode`.

    `sign` is the sign of a zero result.
    """
    if value == 0:
        return kind(math.copysign(0.0, sign))
    largest = Fraction(float(ml_dtypes.finfo(kind).max))
    if abs(value) > largest:
        return _overflowed(value, kind, mode, largest)
    nearest = kind(float(value))
    if not math.isfinite(float(nearest)):
        nearest = kind(math.copysign(float(largest), value))
    below = above = nearest
    while Fraction(float(below)) > value:
        below = _step(below, kind, False)
    while Fraction(float(above)) < value:
        above = _step(above, kind, True)
    if Fraction(float(below)) < value and below == nearest and above == nearest:
        above = _step(below, kind, True)
    if mode == "rz":
        mode = "rd" if value > 0 else "ru"
    if mode == "rd":
        return below
    if mode == "ru":
        return above
    low, high = value - Fraction(float(below)), Fraction(float(above)) - value
    if low == high:
        return nearest if low == 0 else _even(below, above, kind)
    return below if low < high else above


def _even(below, above, kind):
    bits = {8: np.uint64, 4: np.uint32, 2: np.uint16}[np.dtype(kind).itemsize]
    return below if int(np.array(below, kind).view(bits)) % 2 == 0 else above


def _overflowed(value, kind, mode, largest):
    top = kind(float(largest))
    if mode == "rn":
        nearest = kind(float(value)) if abs(value) < 10**300 else kind(math.inf)
        return nearest if value > 0 else kind(-abs(float(nearest)))
    if mode == "rz" or (mode == "rd") == (value > 0):
        return kind(math.copysign(float(top), value))
    return kind(math.copysign(math.inf, value))


def to_integer(value, bits, signed, mode, double=False):
    """A float as an integer of so many bits, clamped to its range (PTX cvt).

    A NaN gives 0; if it is a float64 (`double`) or the integer has 64 bits, the highest bit alone.
    """
    value = float(value)
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - (1 if signed else 0))) - 1
    if math.isnan(value):
        return 0 if bits < 64 and not double else low or 1 << (bits - 1)
    if math.isinf(value):
        return high if value > 0 else low
    whole = {"rn": round, "rd": math.floor, "ru": math.ceil, "rz": math.trunc}[mode](value)
    return min(max(whole, low), high)


def compiled_integer(value, bits, signed):
    """What numba's `int32(value)` and its kin compile to, for a float `value`.

    It cuts off what follows the point. One of 8 bits is the low half of one of 16. A float16 is
    rounded to the nearest integer, ties to even.
    """
    half = value.__class__ is np.float16
    wide = bits if half else max(bits, 16)
    double = value.__class__ in (float, np.float64)
    whole = to_integer(value, wide, signed, "rn" if half else "rz", double)
    if wide > bits:
        whole &= (1 << bits) - 1
        whole -= (signed and whole >> (bits - 1)) << bits
    return whole


def fused(a, b, c):
    """a * b + c of float32 numbers, rounded once."""
    product, addend = float(a) * float(b), float(c)  # the product is exact
    total = product + addend
    if math.isfinite(total):
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        # Rounded to odd, so that rounding once more is rounding once.
        if lost and not np.float64(total).view(np.int64) & 1:
            total = math.nextafter(total, math.copysign(math.inf, lost))
    return np.float32(total)


def arithmetic(operation, kind, mode, *operands):
    """add, sub, mul, div, fma, rcp or sqrt of `operands`, rounded once by `mode`."""
    operands = [kind(operand) for operand in operands]
    parts = [exact(operand) for operand in operands]
    with np.errstate(all="ignore"):
        plain = kind(_PLAIN[operation](*(np.float64(operand) for operand in operands)))
    divisor = parts[-1] if operation in ("div", "rcp") else 1
    if None in parts or divisor == 0 or operation == "sqrt" and parts[0] <= 0:
        return plain
    if operation == "sqrt":
        return _square_root(parts[0], kind, mode)
    value = _EXACT[operation](*parts)
    sign = -1.0 if value == 0 and mode == "rd" and operation in ("add", "sub", "fma") and (
        any(parts)) else math.copysign(1.0, float(plain))
    return round_exact(value, kind, mode, sign)


_PLAIN = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "fma": lambda a, b, c: a * b + c, "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
}
_EXACT = {**_PLAIN, "rcp": lambda a: 1 / a}


def _square_root(value, kind, mode):
    # Scaled so that the integer root has far more bits than any float type keeps.
    shift = 2 * 200
    numerator = value.numerator << shift
    root = math.isqrt(numerator // value.denominator)
    result = Fraction(root, 1 << (shift // 2))
    if result * result != value:
        result += Fraction(1, 1 << (shift // 2 + 2))
    return round_exact(result, kind, mode)
