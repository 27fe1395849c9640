"""Arithmetic as on a GPU: math, libdevice, 16-bit floats, bits, casts, vectors, random numbers."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.simulator import cuda
from course_lib.simulator.cuda_api import random
from course_lib.simulator.cuda_api.mathlib import math as gpu_math

INF, NAN = math.inf, math.nan
bf16, fp16, libdevice = cuda.bf16, cuda.fp16, cuda.libdevice


def compute(function, *values):
    """function(*values), computed in a kernel; returned as the kernel had it."""
    results = []

    @cuda.jit
    def kernel():
        results.append(function(*values))

    kernel[1, 1]()
    return results[0]


@pytest.mark.parametrize("name, value, expected", [
    ("exp", 1000.0, INF), ("exp", -1000.0, 0), ("log", 0.0, -INF), ("log", -1.0, NAN),
    ("log2", 0.0, -INF), ("log10", 0.0, -INF), ("log1p", -1.0, -INF), ("log1p", -2.0, NAN),
    ("sqrt", -1.0, NAN), ("acos", 2.0, NAN), ("acosh", 0.5, NAN), ("atanh", 1.0, INF),
    ("atanh", -1.0, -INF), ("atanh", 2.0, NAN), ("sinh", 1000.0, INF), ("sinh", -1000.0, -INF),
    ("cosh", -1000.0, INF), ("sin", INF, NAN), ("expm1", 1000.0, INF), ("gamma", 0.0, INF),
    ("gamma", -1.0, NAN), ("gamma", 500.0, INF), ("lgamma", 0.0, INF), ("tan", INF, NAN),
])
@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_math_has_no_errors(name, value, expected, kind):
    function = getattr(math, name)
    results = []

    @cuda.jit
    def kernel(x):
        results.append(function(x))

    kernel[1, 1](kind(value))
    assert type(results[0]) is kind
    np.testing.assert_equal(float(results[0]), float(expected))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_math_keeps_the_type(kind):
    results = []

    @cuda.jit
    def kernel(x):
        results.append((math.exp(x), math.sqrt(x), math.pow(x, 2), math.atan2(x, x),
                        math.fabs(x), x * x + x))

    kernel[1, 1](kind(0.5))
    # A float64 is NumPy's or Python's.
    assert {np.float64 if type(value) is float else type(value) for value in results[0]} == {kind}
    assert results[0][0] == kind(math.exp(0.5))


def test_math_two_arguments_and_integers():
    assert gpu_math.pow(0.0, -1.0) == INF and gpu_math.pow(10.0, 400) == INF
    assert math.isnan(gpu_math.pow(-1.0, 0.5)) and math.isnan(gpu_math.fmod(1.0, 0.0))
    assert type(gpu_math.pow(np.float32(2), np.float64(3))) is np.float64
    assert type(gpu_math.hypot(np.float32(3), 4)) is np.float32
    assert gpu_math.floor(-1.5) == -2 and gpu_math.ceil(np.float32(1.2)) == 2
    assert gpu_math.log(8, 2) == 3 and gpu_math.ldexp(np.float32(1.5), 3) == 12
    assert gpu_math.ldexp(1.0, 5000) == INF
    mantissa, exponent = gpu_math.frexp(np.float32(6))
    assert (mantissa, exponent, type(mantissa)) == (0.75, 3, np.float32)
    assert gpu_math.isnan(NAN) and gpu_math.isinf(INF) and gpu_math.pi == math.pi


def test_division_by_zero_and_overflow_are_silent():
    @cuda.jit
    def kernel(x, out):
        out[0] = x[0] / x[1]
        out[1] = x[1] / x[1]
        out[2] = x[0] * np.float32(3e38) * x[0]

    out = np.zeros(3, np.float32)
    kernel[1, 1](np.array([9, 0], np.float32), out)
    np.testing.assert_equal(out, np.array([INF, NAN, INF], np.float32))


def test_python_numbers_divide_as_on_a_gpu():
    @cuda.jit
    def kernel(a, zero, out):
        out[0] = a / zero
        out[1] = (a - a) / zero
        a /= -zero
        out[2] = a
        out[3] = 3 / (zero + 2)

    out = np.zeros(4)
    kernel[1, 1](1.0, 0.0, out)
    np.testing.assert_equal(out, [INF, NAN, -INF, 1.5])


@pytest.mark.parametrize("first, second, larger, smaller", [
    (1.0, 2.0, 2.0, 1.0), (NAN, 1.0, 1.0, 1.0), (1.0, NAN, 1.0, 1.0), (NAN, NAN, NAN, NAN),
    (INF, -INF, INF, -INF),
])
def test_min_and_max_drop_a_nan(jit, first, second, larger, smaller):
    @jit
    def kernel(x, out):
        out[0] = max(x[0], x[1])
        out[1] = min(x[0], x[1])
        out[2] = max(x[0], x[1], x[0])

    out = np.zeros(3, np.float32)
    kernel[1, 1](np.array([first, second], np.float32), out)
    np.testing.assert_equal(out[:2], np.array([larger, smaller], np.float32))


def test_fused_multiply_add_and_roots():
    a = np.float32(1 + 2**-12)
    fused = compute(cuda.fma.impl, a, a, np.float32(-1))
    assert fused == np.float32(float(a) * float(a) - 1) != a * a - np.float32(1)
    assert type(fused) is np.float32
    # By 2**-64 nearer to the lower neighbour: rounded to a float64 first, it would be a tie.
    x, y, odd = map(np.float32, (1 + 2**-20, 2**-24 - 2**-44, 1 + 2**-23))
    assert compute(cuda.fma.impl, x, y, odd) == odd
    assert compute(cuda.fma.impl, np.float32(3e38), np.float32(2), odd) == INF
    big = 1 + 2.0**-30
    assert compute(cuda.fma.impl, big, big, -1.0) == 2.0**-29 + 2.0**-60 != big * big - 1
    assert type(compute(cuda.fma.impl, a, 2.0, a)) is float  # as numba types a bare 2.0
    assert cuda.cbrt.impl(np.float32(27)) == 3 and cuda.rsqrt.impl(np.float32(0.25)) == 2
    assert cuda.rsqrt.impl(np.float32(0)) == INF


# -- libdevice ---------------------------------------------------------------------------------


SCIENCE = {  # name: value, result to ten digits (NIST Digital Library, or arithmetic)
    "j0": (1.0, 0.7651976866), "j1": (2.5, 0.4970941025), "y0": (1.0, 0.0882569642),
    "y1": (0.1, -6.4589510947), "erfinv": (0.5, 0.4769362762), "erfcinv": (1.5, -0.4769362762),
    "normcdfinv": (0.975, 1.9599639845), "normcdf": (1.0, 0.8413447461),
    "erfcx": (30.0, 0.01879588886), "sinpi": (0.25, math.sqrt(0.5)), "cospi": (1 / 3, 0.5),
    "rcbrt": (8.0, 0.5), "exp10": (3.0, 1000.0), "tgamma": (5.0, 24.0), "logb": (10.0, 3.0),
}


@pytest.mark.parametrize("name", SCIENCE)
def test_libdevice_values_and_types(name):
    value, expected = SCIENCE[name]
    double, single = getattr(libdevice, name)(value), getattr(libdevice, name + "f")(value)
    assert (type(double), type(single)) == (np.float64, np.float32)
    np.testing.assert_allclose(double, expected, rtol=1e-9)
    np.testing.assert_allclose(single, expected, rtol=1e-6)


def test_libdevice_names_agree_with_numba():
    """All of numba's libdevice functions are here, with the types numba gives them."""
    import ast
    import importlib.util
    import pathlib

    spec = importlib.util.find_spec("numba_cuda")
    if spec is None:
        pytest.skip("numba-cuda isn't installed")
    folder = pathlib.Path(spec.submodule_search_locations[0]) / "numba" / "cuda"
    tree = ast.parse((folder / "libdevicefuncs.py").read_text())
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign)
                 and getattr(node.targets[0], "id", "") == "functions")
    kinds = {"int16": np.int16, "int32": np.int32, "int64": np.int64, "float32": np.float32,
             "float64": np.float64}
    checked = 0
    for key, value in zip(table.keys, table.values, strict=True):
        name = key.value.removeprefix("__nv_")
        results = [] if value.elts[0].id == "void" else [value.elts[0].id]
        count = 0
        for argument in value.elts[1].elts:
            given = {keyword.arg: keyword.value for keyword in argument.keywords}
            if given["is_ptr"].value:
                results.append(given["ty"].id)
            else:
                count += 1
        answer = getattr(libdevice, name)(*[1] * count)
        answer = answer if isinstance(answer, tuple) else (answer,)
        assert [type(part) for part in answer] == [kinds[kind] for kind in results], name
        checked += 1
    assert checked == len([name for name in vars(libdevice) if not name.startswith("__")])


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, FLOATS, st.sampled_from(["add", "mul", "div", "sub"]))
@settings(max_examples=200, deadline=None)
def test_rounding_modes(a, b, operation):
    if operation == "div" and b == 0:
        return
    exact = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__,
             "div": Fraction.__truediv__}[operation](Fraction(a), Fraction(b))
    down, up, zero, nearest = (getattr(libdevice, f"f{operation}_{mode}")(a, b)
                               for mode in ("rd", "ru", "rz", "rn"))
    with np.errstate(all="ignore"):
        a, b = np.float32(a), np.float32(b)
        expected = {"add": a + b, "sub": a - b, "mul": a * b}.get(operation)
        assert nearest == (a / b if expected is None else expected)
        if np.isfinite(down) and np.isfinite(up):
            assert Fraction(float(down)) <= exact <= Fraction(float(up))
            assert up == down if Fraction(float(down)) == exact else (
                np.nextafter(down, np.float32(INF)) == up)
    assert zero == (down if exact > 0 else up)


def test_rounding_square_roots_and_conversions():
    assert float(libdevice.fsqrt_rd(2)) < math.sqrt(2) < float(libdevice.fsqrt_ru(2))
    assert libdevice.dsqrt_rn(2.0) == math.sqrt(2)
    assert libdevice.float2int_rn(2.5) == 2 and libdevice.float2int_ru(2.1) == 3
    assert libdevice.float2int_rz(1e20) == 2**31 - 1 and libdevice.float2int_rz(NAN) == 0
    assert libdevice.double2int_rz(NAN) == -2**31 and libdevice.float2ll_rz(NAN) == -2**63
    assert libdevice.double2uint_rz(3e9) == 3_000_000_000 - 2**32
    assert libdevice.int2float_rz(2**24 + 3) == 2**24 + 2
    assert libdevice.ull2float_rn(-1) == np.float32(2.0**64)
    assert float(libdevice.double2float_rd(0.1)) < 0.1 < float(libdevice.double2float_ru(0.1))
    assert libdevice.remquof(5.0, 3.0) == (-1, 2)
    assert libdevice.byte_perm(0x33221100, 0x77665544, 0x7140) == 0x77114400
    assert libdevice.mulhi(2**30, 8) == 2 and libdevice.umulhi(-1, 2) == 1
    assert libdevice.float_as_int(1.0) == 0x3F800000
    assert libdevice.int_as_float(0x3F800000) == 1
    with pytest.raises(TypeError, match="expf takes 1 arguments; got 2"):
        libdevice.expf(1, 2)


# -- 16-bit floats -----------------------------------------------------------------------------


def test_bf16():
    bfloat16 = cuda.types.bfloat16

    @cuda.jit
    def kernel(x, out):
        value = bfloat16(x[0])
        out[0] = value
        out[1] = bf16.hmul(value, value)
        out[2] = bf16.float32_to_bfloat16_ru(x[0])
        out[3] = bf16.bfloat16_to_int32_rz(bf16.hneg(value * bfloat16(30)))
        out[4] = bf16.hmax_nan(value, bfloat16(NAN))

    x, out = np.array([0.1], np.float32), np.zeros(5, np.float32)
    kernel[1, 1](x, out)
    value = ml_dtypes.bfloat16(0.1)
    np.testing.assert_equal(out.tolist(), [
        float(value), float(value * value), float(value), -3.0, NAN])


def test_half_conversions():
    names = vars(fp16)
    assert names["__float2half_rd"](65519.0) == 65504
    assert names["__int2half_rn"](2049) == 2048 and names["__half2int_ru"](np.float16(2.25)) == 3
    assert names["__half_as_short"](np.float16(1)) == 0x3C00
    assert names["__short_as_half"](0x3C00) == 1
    assert names["__hadd_sat"](0.75, 0.75) == 1 and names["__hfma_relu"](1, -2, 1) == 0




# -- random numbers ----------------------------------------------------------------------------


# What numba 0.68 gives: init_xoroshiro128p_states_cpu(states, 1, 0), then for each state one
# uniform_float32, one uniform_float64, one next; then per state normal_float32, normal_float64.
NUMBA_STATES = ([10451216379200822465, 8341117667364343960, 809817624983272012],
                [10451216379200822465, 7824662623250379246, 15258973161149853818])
NUMBA_DRAWS = [[0.13312314450740814, 0.37805969057650834],
               [0.8763487339019775, 0.21028068449282],
               [0.8710908889770508, 0.4541151748849914]]
NUMBA_WORDS = [4252928205129544925, 7730684755345050747, 15986200443645443102]
NUMBA_NORMALS = [(-0.035259541124105453, -0.4768434309704988),
                 (-0.2083137333393097, -1.7033355790721814),
                 (0.3560832738876343, 0.6168423117293171)]


def test_random_numbers_are_numbas():
    """The states after seeding and the draws, as numba 0.68 gives them for seed 1."""
    states = random.create_xoroshiro128p_states(3, seed=1)
    host = states.copy_to_host()
    assert host["s0"].tolist() == NUMBA_STATES[0] and host["s1"].tolist() == NUMBA_STATES[1]

    @cuda.jit
    def kernel(states, out, words):
        i = cuda.grid(1)
        out[i, 0] = random.xoroshiro128p_uniform_float32(states, i)
        out[i, 1] = random.xoroshiro128p_uniform_float64(states, i)
        words[i] = random.xoroshiro128p_next(states, i)

    out, words = np.zeros((3, 2)), np.zeros(3, np.uint64)
    kernel[1, 3](states, out, words)
    np.testing.assert_allclose(out, NUMBA_DRAWS, rtol=1e-15)
    assert words.tolist() == NUMBA_WORDS
    normals = [random.xoroshiro128p_normal_float32(states, i) for i in range(3)], [
        random.xoroshiro128p_normal_float64(states, i) for i in range(3)]
    np.testing.assert_allclose(normals[0], [pair[0] for pair in NUMBA_NORMALS], rtol=2e-6)
    np.testing.assert_allclose(normals[1], [pair[1] for pair in NUMBA_NORMALS], rtol=1e-6)


def test_normal_random_numbers():
    @cuda.jit
    def kernel(states, out):
        i = cuda.grid(1)
        out[i, 0] = random.xoroshiro128p_normal_float32(states, i)
        out[i, 1] = random.xoroshiro128p_normal_float64(states, i)

    out = np.zeros((4000, 2))
    kernel[40, 100](random.create_xoroshiro128p_states(4000, 7, subsequence_start=2), out)
    assert np.abs(out.mean(axis=0)).max() < 0.06 and np.abs(out.std(axis=0) - 1).max() < 0.05
