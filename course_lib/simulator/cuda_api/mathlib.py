"""Python's `math` as a GPU computes it: float32 in, float32 out; infinities and NaNs, no errors."""

import math as _math

import ml_dtypes
import numpy as np

from course_lib.simulator.cuda_api.primitives import Namespace
from course_lib.simulator.cuda_api.rounding import to_integer

_float32 = np.float32
_INF, _NAN, _HUGE = _math.inf, _math.nan, np.float64(1e300)
#: Types whose results keep the type. Python numbers give Python floats.
_KEEP = {np.float32, np.float64, np.float16, ml_dtypes.bfloat16}


def _overflow(name, x):
    return float((-_HUGE if name == "sinh" and x < 0 else _HUGE) * _HUGE)  # NumPy reports it


def _pole(name, x):
    """The value where Python raises ValueError."""
    if name in ("log", "log2", "log10", "log1p"):
        return -_INF if x == (-1 if name == "log1p" else 0) else _NAN
    if name == "atanh" and abs(x) == 1:
        return _math.copysign(_INF, x)
    if name in ("gamma", "lgamma"):
        if name == "lgamma":
            return _INF
        return _math.copysign(_INF, x) if x == 0 else _NAN
    return _NAN


def _unary(name):
    function = getattr(_math, name)

    def compute(x):
        kind = x.__class__
        try:
            result = function(x)
        except OverflowError:
            result = _overflow(name, float(x))
        except ValueError:
            result = _pole(name, float(x))
        except TypeError:
            got = "a whole array" if issubclass(kind, np.ndarray) else kind.__name__
            raise TypeError(f"math.{name} takes one number; got {got}") from None
        return kind(result) if kind in _KEEP else result

    compute.__name__ = compute.__qualname__ = name
    compute.__doc__ = f"math.{name}(x) without exceptions; the result has the type of x."
    return compute


def _widest(x, y):
    """The type of a two-argument result: the wider float type; None for Python's float."""
    first, second = x.__class__, y.__class__
    if first in _KEEP and (first is second or second in (float, int)):
        return first
    if second in _KEEP and first in (float, int):
        return second
    if first in _KEEP or second in _KEEP:
        return np.result_type(x, y).type
    return None


def _binary(name, where_error):
    function = getattr(_math, name)

    def compute(x, y):
        try:
            result = function(x, y)
        except (OverflowError, ValueError) as error:
            result = where_error(x, y, error)
        kind = _widest(x, y)
        return result if kind is None else kind(result)

    compute.__name__ = compute.__qualname__ = name
    compute.__doc__ = f"math.{name}(x, y) without exceptions."
    return compute


def _pow_error(x, y, error):
    with np.errstate(all="ignore"):
        return float(np.power(np.float64(x), np.float64(y)))


def log(x, base=None):
    """math.log, of any base."""
    if base is None:
        return _log(x)
    bottom = _log(base)
    top = _log(x)
    if bottom == 0:
        return top.__class__(_NAN if top == 0 else _math.copysign(_INF, top))
    return top / bottom


def _to_integer(name):
    function = getattr(_math, name)

    def compute(x):
        # numba gives an int64. Only NumPy's float64 has `__trunc__`, so that Python's float does
        # the work.
        if -9e18 < x < 9e18:
            return function(float(x))
        return to_integer(x, 64, True, "rz")

    compute.__name__ = compute.__qualname__ = name
    compute.__doc__ = f"math.{name}(x) as an integer."
    return compute


def ldexp(x, exponent):
    """x * 2**exponent."""
    try:
        result = _math.ldexp(x, int(exponent))
    except OverflowError:
        result = _math.copysign(_INF, x)
    return x.__class__(result) if x.__class__ in _KEEP else result


def frexp(x):
    """(mantissa, exponent)."""
    mantissa, exponent = _math.frexp(x)
    return (x.__class__(mantissa) if x.__class__ in _KEEP else mantissa), exponent


def modf(x):
    """(fractional part, integral part)."""
    parts = _math.modf(x)
    return tuple(x.__class__(part) for part in parts) if x.__class__ in _KEEP else parts


def _first(x, y, error):
    return _NAN


_UNARY = ("acos acosh asin asinh atan atanh cos cosh degrees erf erfc exp expm1 fabs gamma lgamma "
          "log10 log1p log2 radians sin sinh sqrt tan tanh cbrt exp2").split()

_functions = {name: _unary(name) for name in _UNARY}
_log = _unary("log")
_functions.update(
    log=log, ldexp=ldexp, frexp=frexp, modf=modf,
    pow=_binary("pow", _pow_error), atan2=_binary("atan2", _first),
    fmod=_binary("fmod", _first), hypot=_binary("hypot", lambda x, y, error: _INF),
    copysign=_binary("copysign", _first), remainder=_binary("remainder", _first),
    nextafter=_binary("nextafter", _first),
    floor=_to_integer("floor"), ceil=_to_integer("ceil"), trunc=_to_integer("trunc"),
)
for _name in ("isnan", "isinf", "isfinite", "pi", "e", "tau", "inf", "nan", "gcd", "isclose",
              "comb", "perm", "factorial", "fsum", "isqrt", "lcm", "prod", "dist"):
    _functions.setdefault(_name, getattr(_math, _name))

#: What a kernel finds under the name `math`.
math = Namespace("math", **_functions)

#: math.exp -> our exp, for kernels that say `from math import exp`
by_builtin = {id(getattr(_math, name)): function for name, function in _functions.items()
              if callable(function)}
