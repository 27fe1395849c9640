"""Arithmetic in the simulator is that of the compiled kernel."""

import importlib.util
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import cuda
from tests.simulator import drawn_expressions

EXPRESSIONS = {  # numba's results; NumPy's wrap or refuse
    "min(255, u8 + 100)": 255, "(u8 + u8 + u8) // 3": 200, "i32 * 1000000000 * 3": 6 * 10**18,
    "u32 - 5": -2, "i8 << 10": 3072, "np.int32(2147483647) + np.int32(i32 >= 0)": 2**31,
    "(u8 - 1) * (u8 - 1)": 199**2, "-u8": 56, "~u32": 2**32 - 4, "u32 * u32 * u32": 27,
    "big * 4": 0, "(big * 3 + big) // 2": 0, "big * 2 - 1 < 0": 0, "(u8 == 200) + (u8 == 200)": 2,
    "f32 * 3 == 0.3": 0, "f32 + u8 > 200.1": 1, "5 // zero": 0, "5 % zero": 0, "u8 >> 3": 25,
    "abs(i8 - 128)": 125, "-7 // u8": -1, "max(u8, -1)": 200, "int(f32 * 30)": 3,
}


def results(flavour, texts, **values):
    """The texts computed by a kernel whose arguments are `values`, as a list."""
    stores = "\n".join(f"    out[{place}] = {text}" for place, text in enumerate(texts))
    kernel = drawn_expressions.compiled_source(
        f"def function(out, {', '.join(values)}):\n{stores}\n", f"<arithmetic {hash(stores)}>",
        np=np, math=math)
    out = np.zeros(len(texts), np.int64)
    with flavour():
        cuda.jit(kernel)[1, 1](out, *values.values())
    return out.tolist()


@pytest.mark.parametrize("flavour", [simulator.options, simulator.sanitize, simulator.trace])
def test_integers_widen(flavour):
    assert results(flavour, EXPRESSIONS, u8=np.uint8(200), u32=np.uint32(3), i8=np.int8(3),
                   i32=np.int32(2 * 10**9), f32=np.float32(0.1), big=2**62, zero=0) == [
        *EXPRESSIONS.values()]


def test_elements_are_updated_in_the_compiled_type():
    @cuda.jit
    def kernel(small, wide, shared_out):
        tile = cuda.shared.array(2, np.uint8)
        tile[0] = 250
        tile[0] += 10
        tile[1] = 1000
        small[0] += 300
        small[1] -= 1
        small[2] = wide[0] * 3
        small[3], small[4] = -1, 256 + 7
        small[5] = small[6] = 511
        wide[1] += 0.75
        shared_out[0], shared_out[1] = tile[0], tile[1]

    small, wide, out = np.zeros(7, np.uint8), np.array([100, 1], np.int32), np.zeros(2, np.int64)
    for flavour in (simulator.options, simulator.sanitize):
        small[:], wide[1] = 0, 1
        with flavour():
            kernel[1, 1](small, wide, out)
        assert small.tolist() == [44, 255, 44, 255, 7, 255, 255]
        assert wide.tolist() == [100, 1] and out.tolist() == [4, 232]


TOP, LOW, HIGH = 2**63, -2**63, 2**63 - 1
#: what `cvt` gave on an H200, as numba's conversions use it
FLOATS = [1e10, -1e10, math.nan, math.inf, 300.7, -1.5, 2.5]
CONVERTED = {
    ("float16", "int8"): [127, -128, 0, 127, 127, -2, 2],
    ("float16", "uint16"): [65535, 0, 0, 65535, 301, 0, 2],
    ("float16", "int64"): [HIGH, LOW, LOW, HIGH, 301, -2, 2],
    ("float32", "int8"): [-1, 0, 0, -1, 44, -1, 2],
    ("float32", "uint8"): [255, 0, 0, 255, 44, 0, 2],
    ("float32", "int16"): [32767, -32768, 0, 32767, 300, -1, 2],
    ("float32", "int32"): [2**31 - 1, -2**31, 0, 2**31 - 1, 300, -1, 2],
    ("float32", "uint32"): [2**32 - 1, 0, 0, 2**32 - 1, 300, 0, 2],
    ("float32", "int64"): [10**10, -10**10, LOW, HIGH, 300, -1, 2],
    ("float32", "uint64"): [10**10, 0, TOP, 2**64 - 1, 300, 0, 2],
    ("float64", "uint8"): [255, 0, 0, 255, 44, 0, 2],
    ("float64", "uint16"): [65535, 0, 32768, 65535, 300, 0, 2],
    ("float64", "int32"): [2**31 - 1, -2**31, -2**31, 2**31 - 1, 300, -1, 2],
    ("float64", "int64"): [10**10, -10**10, LOW, HIGH, 300, -1, 2],
}


@pytest.mark.parametrize("source, goal", CONVERTED)
def test_floats_become_integers_as_on_a_gpu(source, goal):
    """Cut off and clamped, whether converted, stored, added to 0 or exchanged."""
    kind = getattr(np, goal)

    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        tile, kept = cuda.shared.array(8, kind), cuda.shared.array(8, kind)
        tile[i], view = x[i], kept[1:]
        view[i] = kind(x[i])
        cuda.atomic.exch(out[0], i, x[i])
        out[1, i], out[2, i], out[3, i] = x[i], tile[i], view[i]
        if i == 0:
            for j in range(x.size):
                store(out, j, x[j])

    @cuda.jit(device=True)
    def store(out, j, value):
        out[4, j] = value

    with np.errstate(over="ignore"):
        x = np.array(FLOATS).astype(source)
    for flavour in (simulator.options, simulator.sanitize):
        out = np.zeros((5, x.size), goal)
        with flavour():
            kernel[1, x.size](x, out)
        assert out.tolist() == [CONVERTED[source, goal]] * 5


def test_floors_of_what_no_integer_holds():
    texts = ["math.floor(v)", "math.ceil(v)", "math.trunc(v)", "int(v)", "round(v)"]
    for kind in (float, np.float32):
        for value, whole in ((math.nan, LOW), (math.inf, HIGH), (-math.inf, LOW), (1e30, HIGH)):
            assert results(simulator.options, texts, v=kind(value)) == [whole] * 5


def test_device_functions_get_what_is_passed():
    @cuda.jit(device=True)
    def triple(value):
        value *= 3
        return value

    @cuda.jit
    def kernel(x, out):
        out[0], out[1] = triple(x[0]), triple(2**62)
        out[2] = triple(triple(x[0]))

    out = np.zeros(3, np.int64)
    kernel[1, 1](np.array([200], np.uint8), out)
    assert out.tolist() == [600, 3 * 2**62 - 2**64, 1800]


def test_float64_where_numba_has_it():
    @cuda.jit
    def kernel(x, out):
        out[0] = 0.1 * x[0] + x[1]
        total = 0.0
        for i in range(x.size):
            total += x[i]
        out[1] = total
        out[2] = x[0] > 0.1

    x, out = np.array([0.1, 1e8], np.float32), np.zeros(3)
    kernel[1, 1](x, out)
    wide = x.astype(np.float64)
    assert out.tolist() == [0.1 * wide[0] + wide[1], wide[0] + wide[1], 1]


def test_what_numba_refuses_is_refused():
    @cuda.jit
    def kernel(x, out):
        out[0] = x[0] & 1

    with pytest.raises(TypeError, match="float32 & int64"):
        kernel[1, 1](np.ones(1, np.float32), np.zeros(1))


def test_drawn_expressions():
    """A sample; the command `python tests/simulator/drawn_expressions.py 2000` takes more."""
    total, lines = drawn_expressions.compare(60, seed=7, batch=30, draws=3)
    assert total > 200 and lines == []


needs_numba_cuda = pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None,
                                      reason="numba-cuda isn't installed")


@needs_numba_cuda
def test_a_gpus_compiler_has_these_types():
    """`number_types` asks plain numba, and has its own rules for float16."""
    from course_lib.simulator.rewrite import number_types

    names = [name for name in dict.fromkeys(number_types.NAMES.values())
             if not name.startswith("complex")]
    asked = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name("gpu_types.py")], input=json.dumps(
            [names, [*number_types.OPERATORS]]), text=True, capture_output=True, check=True)
    answers = json.loads(asked.stdout)
    assert len(answers) > 1500
    wrong = [(symbol, operands, found, theirs) for symbol, operands, *theirs in answers
             if (found := number_types.signature(symbol, *operands)) != (
                 theirs[0] and (tuple(theirs[0]), theirs[1]))]
    assert wrong == []


@pytest.mark.gpu
def test_drawn_expressions_on_a_gpu():
    total, lines = drawn_expressions.compare_on_a_gpu(100, seed=11)
    assert total > 300 and lines == []
