"""The functions of `numba.cuda.fp16` and `numba.cuda.bf16`: arithmetic on 16-bit floats.

Each operation computes exactly enough and rounds once, as the hardware does.
"""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

from course_lib.simulator.cuda_api.mathlib import math as gpu
from course_lib.simulator.cuda_api.rounding import MODES, arithmetic, round_exact, to_integer
from course_lib.simulator.rewrite.resolve import cast

_INTEGERS = {"int8": (8, True), "uint8": (8, False), "int16": (16, True), "uint16": (16, False),
             "int32": (32, True), "uint32": (32, False), "int64": (64, True),
             "uint64": (64, False)}
#: CUDA C's names of the integer types
_C_NAMES = {"int8": "char", "uint8": "uchar", "int16": "short", "uint16": "ushort",
            "int32": "int", "uint32": "uint", "int64": "ll", "uint64": "ull"}


def _saturate(value, kind):
    value = float(value)
    return kind(0.0 if value != value else min(max(value, 0.0), 1.0))


def _common(kind):
    """Names shared by both types -> functions."""
    def unary(function):
        return lambda a: kind(function(float(kind(a))))

    def binary(operation, finish=None):
        def call(*operands):
            result = arithmetic(operation, kind, "rn", *operands)
            return result if finish is None else finish(result, kind)

        return call

    def compare(function, unordered=False):
        def call(a, b):
            a, b = float(kind(a)), float(kind(b))
            if a != a or b != b:
                return unordered
            return function(a, b)

        return call

    def relu(value, kind):
        return value if value != value or value > 0 else kind(0)

    def pick(larger, nan_wins):
        def call(a, b):
            a, b = kind(a), kind(b)
            if a != a or b != b:
                return kind(math.nan) if nan_wins or a != a and b != b else (b if a != a else a)
            return a if (a >= b) == larger else b

        return call

    def whole(function):
        return lambda x: math.copysign(float(function(x)), x) if math.isfinite(x) else x

    names = {
        "habs": unary(abs), "hneg": unary(lambda x: -x),
        "hadd": binary("add"), "hsub": binary("sub"), "hmul": binary("mul"),
        "hdiv": binary("div"), "hfma": binary("fma"),
        "hadd_rn": binary("add"), "hsub_rn": binary("sub"), "hmul_rn": binary("mul"),
        "hadd_sat": binary("add", _saturate), "hsub_sat": binary("sub", _saturate),
        "hmul_sat": binary("mul", _saturate), "hfma_sat": binary("fma", _saturate),
        "hfma_relu": binary("fma", relu),
        "heq": compare(lambda a, b: a == b), "hne": compare(lambda a, b: a != b),
        "hgt": compare(lambda a, b: a > b), "hge": compare(lambda a, b: a >= b),
        "hlt": compare(lambda a, b: a < b), "hle": compare(lambda a, b: a <= b),
        "hequ": compare(lambda a, b: a == b, True), "hneu": compare(lambda a, b: a != b, True),
        "hgtu": compare(lambda a, b: a > b, True), "hgeu": compare(lambda a, b: a >= b, True),
        "hltu": compare(lambda a, b: a < b, True), "hleu": compare(lambda a, b: a <= b, True),
        "hmax": pick(True, False), "hmin": pick(False, False),
        "hmax_nan": pick(True, True), "hmin_nan": pick(False, True),
        "hisnan": lambda a: math.isnan(kind(a)),
        "hisinf": lambda a: int(math.copysign(1, kind(a))) if math.isinf(kind(a)) else 0,
        "htrunc": unary(whole(math.trunc)), "hceil": unary(whole(math.ceil)),
        "hfloor": unary(whole(math.floor)), "hrint": unary(whole(round)),
        "hrcp": binary("rcp"), "hsqrt": binary("sqrt"),
        "hrsqrt": unary(lambda x: float(np.float64(1) / np.float64(gpu.sqrt(x)))),
        "hexp10": unary(lambda x: float(gpu.pow(10.0, x))),
        "htanh_approx": unary(gpu.tanh), "hlog2": unary(gpu.log2),
    }
    for name in ("log", "log10", "cos", "sin", "tanh", "exp", "exp2"):
        names["h" + name] = unary(getattr(gpu, name))
    return names


def _from_integer(kind, bits, signed, mode):
    def convert(value):
        value = int(value) & ((1 << bits) - 1)
        if signed and value >> (bits - 1):
            value -= 1 << bits
        return round_exact(Fraction(value), kind, mode)

    return convert


def _from_float(kind, source, mode):
    def convert(value):
        value = float(source(value))
        return round_exact(Fraction(value), kind, mode, value) if math.isfinite(value) else (
            kind(value))

    return convert


def _to_integer(kind, name, mode):
    bits, signed = _INTEGERS[name]
    result = getattr(np, name)
    return lambda value: result(to_integer(kind(value), bits, signed, mode))


def _reinterpret(source, goal):
    convert = cast(source)
    return lambda value: np.array(convert(value), source).view(goal)[()]


def fp16_names():
    """name -> function, for numba.cuda.fp16."""
    kind, common = np.float16, _common(np.float16)
    names = dict(common)
    names.update({"__" + name: function for name, function in common.items()})
    names.update(__half=kind, __half2float=lambda value: np.float32(kind(value)),
                 __float2half=_from_float(kind, np.float32, "rn"),
                 __double2half=_from_float(kind, np.float64, "rn"),
                 __short_as_half=_reinterpret(np.int16, kind),
                 __ushort_as_half=_reinterpret(np.uint16, kind),
                 __half_as_short=_reinterpret(kind, np.int16),
                 __half_as_ushort=_reinterpret(kind, np.uint16))
    for mode in MODES:
        names[f"__float2half_{mode}"] = _from_float(kind, np.float32, mode)
        for name, (bits, signed) in _INTEGERS.items():
            names[f"__{_C_NAMES[name]}2half_{mode}"] = _from_integer(kind, bits, signed, mode)
            names[f"__half2{_C_NAMES[name]}_{mode}"] = _to_integer(kind, name, mode)
    return names


def bf16_names():
    """name -> function, for numba.cuda.bf16."""
    kind = ml_dtypes.bfloat16
    names = _common(kind)
    names.update(bfloat16=kind, bfloat16_to_float32=lambda value: np.float32(kind(value)),
                 float32_to_bfloat16=_from_float(kind, np.float32, "rn"),
                 float64_to_bfloat16=_from_float(kind, np.float64, "rn"),
                 int16_as_bfloat16=_reinterpret(np.int16, kind),
                 uint16_as_bfloat16=_reinterpret(np.uint16, kind),
                 bfloat16_as_int16=_reinterpret(kind, np.int16),
                 bfloat16_as_uint16=_reinterpret(kind, np.uint16))
    for mode in MODES:
        names[f"float32_to_bfloat16_{mode}"] = _from_float(kind, np.float32, mode)
        for name, (bits, signed) in _INTEGERS.items():
            names[f"{name}_to_bfloat16_{mode}"] = _from_integer(kind, bits, signed, mode)
            names[f"bfloat16_to_{name}_{mode}"] = _to_integer(kind, name, mode)
    return names
