"""`numba.cuda.libdevice`: every function numba exposes, with libdevice's argument and result types.

Functions that CUDA C gives pointers return tuples, as numba's do: `sincosf(x)` is (sin, cos).
"""

import math as _math
from fractions import Fraction as _Fraction

import numpy as _np

from course_lib.simulator.cuda_api import special as _special
from course_lib.simulator.cuda_api.mathlib import math as _gpu
from course_lib.simulator.cuda_api.rounding import MODES as _MODES
from course_lib.simulator.cuda_api.rounding import arithmetic as _arithmetic
from course_lib.simulator.cuda_api.rounding import round_exact as _round_exact
from course_lib.simulator.cuda_api.rounding import to_integer as _to_integer
from course_lib.simulator.rewrite.resolve import cast as _cast

_i16, _i32, _i64 = _cast(_np.int16), _cast(_np.int32), _cast(_np.int64)
_f32, _f64 = _np.float32, _np.float64
_made = {}


def _define(name, function, result, *arguments):
    """Add a function that converts its arguments and its result."""

    def call(*values):
        if len(values) != len(arguments):
            raise TypeError(f"libdevice.{name} takes {len(arguments)} arguments; got {len(values)}")
        with _np.errstate(all="ignore"):
            answer = function(*(kind(v) for kind, v in zip(arguments, values, strict=True)))
            if isinstance(result, tuple):
                return tuple(kind(part) for kind, part in zip(result, answer, strict=True))
            return result(answer)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"libdevice's __nv_{name}."
    _made[name] = call


def _float_pair(name, function, arguments="x", result=None, single=None):
    """Add the double function `name` and its float form; "x" is a float argument, "i" an int."""
    for kind, full in ((_f64, name), (_f32, single or name + "f")):
        kinds = [kind if letter == "x" else _i32 for letter in arguments]
        outcome = kind if result is None else tuple(
            kind if letter == "x" else _i32 for letter in result) if len(result) > 1 else _i32
        _define(full, _wide(function), outcome, *kinds)


def _wide(function):
    """Compute in double precision, in Python floats."""
    def call(*values):
        return function(*(float(v) if isinstance(v, _np.floating) else int(v) for v in values))

    return call


def _round_away(x):
    return x if not _math.isfinite(x) else _math.copysign(_math.floor(abs(x) + 0.5), x) if (
        abs(x) < 2**52) else x


def _rint(x):
    return _math.copysign(float(round(x)), x) if _math.isfinite(x) and abs(x) < 2**52 else x


def _integral(function):
    def call(x):
        return _math.copysign(float(function(x)), x) if _math.isfinite(x) else x

    return call


def _divide(a, b):
    return float(_f64(a) / _f64(b))


def _power(x, y):
    return float(_gpu.pow(_f64(x), _f64(y)))


def _exp10(x):
    return _power(10.0, x)


def _exp2(x):
    return _power(2.0, x)


def _fmax(x, y):
    return y if x != x or y > x else x


def _fmin(x, y):
    return y if x != x or y < x else x


def _fdim(x, y):
    return _math.nan if x != x or y != y else max(x - y, 0.0)


def _ilogb(x):
    if x == 0 or x != x:
        return -(2**31)
    return 2**31 - 1 if _math.isinf(x) else _math.frexp(x)[1] - 1


def _logb(x):
    if x == 0:
        return -_math.inf
    return abs(x) if not _math.isfinite(x) else float(_math.frexp(x)[1] - 1)


def _remquo(x, y):
    if not (_math.isfinite(x) and y == y and y != 0):
        return _math.nan, 0
    if _math.isinf(y):
        return x, 0
    remainder = _math.remainder(x, y)
    quotient = int((_Fraction(x) - _Fraction(remainder)) / _Fraction(y))
    return remainder, (abs(quotient) & 7) * (-1 if quotient < 0 else 1)


def _frexp(x):
    return _math.frexp(x) if _math.isfinite(x) else (x, 0)


def _inverse(function):
    def call(x):
        return _divide(1.0, function(x))

    return call


def _cosine(x):
    return float(_gpu.cos(x))


def _sine(x):
    return float(_gpu.sin(x))


def _tgamma(x):
    return float(_gpu.gamma(x))


def _modf(x):
    whole = _math.copysign(0.0, x) if _math.isinf(x) else None
    return (whole, x) if whole is not None else _math.modf(x)


for _name in ("acos acosh asin asinh atan atanh cbrt cos cosh erf erfc exp expm1 fabs log log10 "
              "log1p log2 sin sinh sqrt tan tanh lgamma").split():
    _float_pair(_name, getattr(_gpu, _name))
for _name in ("erfcinv", "erfinv", "erfcx", "normcdf", "normcdfinv", "sinpi", "cospi"):
    _float_pair(_name, getattr(_special, _name))
for _name in ("atan2", "copysign", "fmod", "hypot", "nextafter", "remainder"):
    if _name != "nextafter":
        _float_pair(_name, getattr(_gpu, _name), "xx")
for _name, _kind in (("nextafter", _f64), ("nextafterf", _f32)):
    _define(_name, _np.nextafter, _kind, _kind, _kind)
_float_pair("ceil", _integral(_math.ceil))
_float_pair("floor", _integral(_math.floor))
_float_pair("trunc", _integral(_math.trunc))
_float_pair("rint", _rint)
_float_pair("nearbyint", _rint)
_float_pair("round", _round_away)
_float_pair("exp10", _exp10)
_float_pair("exp2", _exp2)
_float_pair("fdim", _fdim, "xx")
_float_pair("fmax", _fmax, "xx")
_float_pair("fmin", _fmin, "xx")
_float_pair("pow", _power, "xx")
_float_pair("powi", _power, "xi", single="powif")
_float_pair("ldexp", lambda x, n: float(_gpu.ldexp(x, n)), "xi")
_float_pair("scalbn", lambda x, n: float(_gpu.ldexp(x, n)), "xi")
_float_pair("frexp", _frexp, "x", "xi")
_float_pair("modf", _modf, "x", "xx", single="modff")
_float_pair("remquo", _remquo, "xx", "xi")
_float_pair("sincos", lambda x: (_sine(x), _cosine(x)), "x", "xx")
_float_pair("sincospi", lambda x: (_special.sinpi(x), _special.cospi(x)), "x", "xx")
_float_pair("ilogb", _ilogb, "x", "i")
_float_pair("logb", _logb)
_float_pair("tgamma", _tgamma)
_float_pair("rsqrt", _inverse(lambda x: float(_gpu.sqrt(x))))
_float_pair("rcbrt", _inverse(lambda x: float(_gpu.cbrt(x))))
_float_pair("j0", lambda x: _special.jn(0, x))
_float_pair("j1", lambda x: _special.jn(1, x))
_float_pair("y0", lambda x: _special.yn(0, x))
_float_pair("y1", lambda x: _special.yn(1, x))
_float_pair("jn", _special.jn, "ix")
_float_pair("yn", _special.yn, "ix")
for _name, _single, _test in (("isfinited", "finitef", _math.isfinite),
                              ("isinfd", "isinff", _math.isinf), ("isnand", "isnanf", _math.isnan),
                              ("signbitd", "signbitf", lambda x: _math.copysign(1.0, x) < 0)):
    _float_pair(_name, _test, "x", "i", single=_single)

# The fast float forms: results here are the accurate ones.
for _name in ("cosf", "exp10f", "expf", "log10f", "log2f", "logf", "powf", "sinf", "tanf",
              "sincosf"):
    _made["fast_" + _name] = _made[_name]
_define("fast_fdividef", _divide, _f32, _f32, _f32)
_define("saturatef", lambda x: 0.0 if x != x else min(max(float(x), 0.0), 1.0), _f32, _f32)

# Arithmetic with a stated rounding.
for _mode in _MODES:
    for _operation in ("add", "sub", "mul", "div", "rcp", "sqrt", "fma"):
        for _letter, _kind in (("f", _f32), ("d", _f64)):
            if (_operation, _letter) == ("sub", "d"):
                continue
            _count = {"rcp": 1, "sqrt": 1, "fma": 3}.get(_operation, 2)
            _name = f"{_letter}{_operation}_{_mode}"
            if _operation == "fma":
                _name = f"fma{'f' if _letter == 'f' else ''}_{_mode}"
            _define(_name, lambda *v, o=_operation, k=_kind, m=_mode: _arithmetic(o, k, m, *v),
                    _kind, *[_kind] * _count)
_made["fma"], _made["fmaf"] = _made["fma_rn"], _made["fmaf_rn"]
_define("frsqrt_rn", _inverse(lambda x: float(_gpu.sqrt(float(x)))), _f32, _f32)

# Conversions with a stated rounding. Unsigned results come back as signed bits, as numba types
# them.
for _mode in _MODES:
    for _source, _kind in (("float", _f32), ("double", _f64)):
        for _goal, _bits, _signed in (("int", 32, True), ("uint", 32, False), ("ll", 64, True),
                                      ("ull", 64, False)):
            _define(f"{_source}2{_goal}_{_mode}",
                    lambda x, b=_bits, s=_signed, m=_mode, d=_kind is _f64: _to_integer(
                        x, b, s, m, d),
                    _i32 if _bits == 32 else _i64, _kind)
    for _source, _kind, _mask in (("int", _i32, None), ("uint", _i32, 2**32 - 1),
                                  ("ll", _i64, None), ("ull", _i64, 2**64 - 1)):
        for _goal, _result in (("float", _f32), ("double", _f64)):
            if _goal == "double" and _kind is _i32 and _mode != "rn":
                continue
            _define(f"{_source}2{_goal}_{_mode}",
                    lambda x, r=_result, m=_mode, k=_mask: _round_exact(
                        _Fraction(int(x) if k is None else int(x) & k), r, m),
                    _result, _kind)
    _define(f"double2float_{_mode}", lambda x, m=_mode: _arithmetic("add", _f64, "rn", x, 0.0) if (
        not _math.isfinite(x)) else _round_exact(_Fraction(float(x)), _f32, m, float(x)),
        _f32, _f64)


def _bits(value, kind):
    return _np.array(value).view(kind)[()]


_define("float_as_int", lambda x: _bits(x, _np.int32), _i32, _f32)
_define("int_as_float", lambda x: _bits(x, _np.float32), _f32, _i32)
_define("double_as_longlong", lambda x: _bits(x, _np.int64), _i64, _f64)
_define("longlong_as_double", lambda x: _bits(x, _np.float64), _f64, _i64)
_define("double2hiint", lambda x: int(_bits(x, _np.int64)) >> 32, _i32, _f64)
_define("double2loint", lambda x: int(_bits(x, _np.int64)) & 0xFFFFFFFF, _i32, _f64)
_define("hiloint2double",
        lambda high, low: _bits(_np.uint64((int(high) & 0xFFFFFFFF) << 32 | int(low) & 0xFFFFFFFF),
                                _np.float64), _f64, _i32, _i32)
_define("float2half_rn", lambda x: _bits(_np.float16(x), _np.int16), _i16, _f32)
_define("half2float", lambda x: _bits(x, _np.float16), _f32, _i16)


# Integers.
def _u32(value):
    return int(value) & 0xFFFFFFFF


def _u64(value):
    return int(value) & 0xFFFFFFFFFFFFFFFF


def _low24(value, signed):
    value = int(value) & 0xFFFFFF
    return value - (1 << 24) if signed and value >> 23 else value


def _byte_perm(x, y, selector):
    data = (_u32(y) << 32 | _u32(x)).to_bytes(8, "little")
    return sum(data[_u32(selector) >> 4 * place & 7] << 8 * place for place in range(4))


_define("abs", lambda x: abs(int(x)), _i32, _i32)
_define("llabs", lambda x: abs(int(x)), _i64, _i64)
_define("brev", lambda x: int(f"{_u32(x):032b}"[::-1], 2), _i32, _i32)
_define("brevll", lambda x: int(f"{_u64(x):064b}"[::-1], 2), _i64, _i64)
_define("clz", lambda x: 32 - _u32(x).bit_length(), _i32, _i32)
_define("clzll", lambda x: 64 - _u64(x).bit_length(), _i32, _i64)
_define("ffs", lambda x: (_u32(x) & -_u32(x)).bit_length(), _i32, _i32)
_define("ffsll", lambda x: (_u64(x) & -_u64(x)).bit_length(), _i32, _i64)
_define("popc", lambda x: _u32(x).bit_count(), _i32, _i32)
_define("popcll", lambda x: _u64(x).bit_count(), _i32, _i64)
_define("byte_perm", _byte_perm, _i32, _i32, _i32, _i32)
_define("mul24", lambda x, y: _low24(x, True) * _low24(y, True), _i32, _i32, _i32)
_define("umul24", lambda x, y: _low24(x, False) * _low24(y, False), _i32, _i32, _i32)
_define("mulhi", lambda x, y: int(x) * int(y) >> 32, _i32, _i32, _i32)
_define("umulhi", lambda x, y: _u32(x) * _u32(y) >> 32, _i32, _i32, _i32)
_define("mul64hi", lambda x, y: int(x) * int(y) >> 64, _i64, _i64, _i64)
_define("umul64hi", lambda x, y: _u64(x) * _u64(y) >> 64, _i64, _i64, _i64)
_define("hadd", lambda x, y: int(x) + int(y) >> 1, _i32, _i32, _i32)
_define("rhadd", lambda x, y: int(x) + int(y) + 1 >> 1, _i32, _i32, _i32)
_define("uhadd", lambda x, y: _u32(x) + _u32(y) >> 1, _i32, _i32, _i32)
_define("urhadd", lambda x, y: _u32(x) + _u32(y) + 1 >> 1, _i32, _i32, _i32)
_define("sad", lambda x, y, z: abs(int(x) - int(y)) + int(z), _i32, _i32, _i32, _i32)
_define("usad", lambda x, y, z: abs(_u32(x) - _u32(y)) + _u32(z), _i32, _i32, _i32, _i32)
for _name, _function in (("max", max), ("min", min)):
    _define(_name, _function, _i32, _i32, _i32)
    _define("ll" + _name, _function, _i64, _i64, _i64)
    _define("u" + _name, lambda x, y, f=_function: f(_u32(x), _u32(y)), _i32, _i32, _i32)
    _define("ull" + _name, lambda x, y, f=_function: f(_u64(x), _u64(y)), _i64, _i64, _i64)
for _name in ("llrint", "llround"):
    for _kind, _full in ((_f64, _name), (_f32, _name + "f")):
        _define(_full, lambda x, f=_rint if _name == "llrint" else _round_away: _to_integer(
            f(float(x)), 64, True, "rz"), _i64, _kind)

#: name -> function. Not put into this module itself, whose code needs Python's own abs and max.
functions = dict(sorted(_made.items()))
