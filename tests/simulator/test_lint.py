"""Lint: float64 promotions, wide integers and spills, told from numba's own types and code."""

import math
import os
import pickle
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from course_lib import simulator
from course_lib.runtime.intrinsics import load_vector, store_vector, warp_sum
from course_lib.simulator import cuda
from course_lib.simulator.linting.lint import _WORKER, ENVIRONMENT, _process, _Shipment, prepare

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")

X = np.ones(64, np.float32)
INTS = np.ones(64, np.int32)
HALF = 0.5
SINGLE_HALF = np.float32(0.5)


@pytest.fixture(scope="module", autouse=True)
def _ready():
    prepare()


def kinds(findings):
    return [finding.kind for finding in findings]


def line_of(function, text):
    """Where `text` stands in the source of `function`."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return next(first + place for place, line in enumerate(lines) if text in line)


def constant(x, y):
    i = cuda.grid(1)
    y[i] = x[i] * 2.1 + x[i + 1] / 3.3


def global_constant(x, y):
    i = cuda.grid(1)
    y[i] = x[i] * HALF + math.exp(x[i] * HALF)


def accumulator(x, y):
    total = 0.0
    for k in range(x.size):
        total += x[k]
    y[0] = total


def largest(x, y):
    top = -math.inf
    for k in range(x.size):
        top = max(top, x[k])
    y[0] = top


def with_integer(x, y):
    i = cuda.grid(1)
    y[i] = x[i] * i + x[i]


def integer_division(x, y):
    i = cuda.grid(1)
    y[i] = i / 7 + math.sqrt(i) * i


@pytest.mark.parametrize("function, line, words", [
    (constant, "y[i] =", ["`x[i] * 2.1`", "np.float32(2.1)"]),
    (global_constant, "y[i] =", ["global HALF = 0.5", "np.float32(0.5)"]),
    (accumulator, "total += ", ["`total` is float64", "total = np.float32(0)"]),
    (largest, "top = max", ["`top` is float64", "top = np.float32(-math.inf)"]),
    (with_integer, "y[i] =", ["`x[i] * i`", "the integer `i`", "np.float32(i)"]),
    (integer_division, "y[i] =", ["`i / 7`", "operands are integers"]),
])
def test_float64_is_told_with_its_line_and_what_mends_it(function, line, words):
    found = simulator.lint(cuda.jit(function), X, X)
    assert set(kinds(found)) == {"float64-promotion"}
    assert {finding.line for finding in found} == {line_of(function, line)}
    assert line in found[0].source and found[0].filename == __file__
    text = " ".join(finding.message for finding in found)
    assert all(word in text for word in words), text
    assert str(found[0]).startswith(f"line {found[0].line}: float64-promotion: ")


def sigmoid(x, y):
    i = cuda.grid(1)
    e = math.exp(-abs(x[i]))
    y[i] = 1.0 / (1.0 + e) if x[i] >= 0 else e


def running_mean(x, y):
    n, m = 0, np.float32(0)
    for k in range(x.size):
        n += 1
        m += (x[k] - m) / n
    y[0] = m


def counted_in_float64(x, y):
    n = 0.0
    m = np.float32(0)
    for k in range(x.size):
        n += 1
        m += (x[k] - m) / n
    y[0] = m


def two_sizes(x, y):
    y[0] = x[0] / (x.size * 2)


@pytest.mark.parametrize("function, words", [
    (sigmoid, "`1.0 + e` is computed in float64: numba makes the constant 1.0 float64"),
    (running_mean, "/ n` is computed in float64: float32 with the integer `n` gives"),
    (counted_in_float64, "`n` is float64, because it starts as a Python float"),
    (two_sizes, "`x[0] / (x.size * 2)` is computed"),
])
def test_what_brings_float64_in_is_blamed_first(function, words):
    assert words in simulator.lint(cuda.jit(function), X, X)[0].message


def test_a_python_float_as_argument():
    @cuda.jit
    def scale(x, y, by):
        i = cuda.grid(1)
        y[i] = x[i] * by + x[i]

    assert "argument `by`" in simulator.lint(scale, X, X, 2.5)[0].message
    assert simulator.lint(scale, X, X, np.float32(2.5)) == []


@cuda.jit
def mended(x, y):
    i = cuda.grid(1)
    total = np.float32(0)
    for k in range(x.size):
        if x[k] > 0.5:  # a comparison with a constant costs nothing: the compiler narrows it
            total += x[k] * SINGLE_HALF
    y[i] = total * np.float32(2) + math.exp(x[i]) + x[i] * np.float32(i)


@cuda.jit
def meant(x, y):
    total = np.float64(0)
    for k in range(x.size):
        total += x[k]
    y[0] = total


@cuda.jit
def double(x, y):
    i = cuda.grid(1)
    y[i] = x[i] * 2.1 + x[i]


@pytest.mark.parametrize("kernel, args", [
    (mended, (X, X)), (meant, (X, X)), (double, (X.astype(float), X.astype(float))),
    (simulator.cuda.jit(lambda x: None), (X,)),
])
def test_clean_kernels_stay_clean(kernel, args):
    assert simulator.lint(kernel, *args) == []


def test_device_functions_closures_and_intrinsics():
    factor = 0.3

    @cuda.jit(device=True)
    def scaled(value):
        return value * factor

    @cuda.jit
    def apply(x, y):
        i = 4 * cuda.grid(1)
        values = cuda.local.array(4, np.float32)
        load_vector(values, x, i)
        for k in range(4):
            values[k] = scaled(values[k]) + scaled(values[k] + values[0])
        values[0] = warp_sum(values[0])
        store_vector(y, i, values)

    (found,) = simulator.lint(apply, X, X)
    assert found.kind == "float64-promotion" and "factor = 0.3" in found.message
    assert found.source == "return value * factor"


def test_vectors_of_16_bits():
    @cuda.jit
    def copy(x, y):
        i = 8 * cuda.grid(1)
        values = cuda.local.array(8, np.float32)
        load_vector(values, x, i)
        store_vector(y, i, values)

    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert simulator.lint(copy, np.zeros(8, dtype), np.zeros(8, dtype)) == []


def test_integers_that_numba_widens():
    @cuda.jit
    def hashes(x, y, wide, seed):
        i = cuda.grid(1)
        wide[i] = x[i] * x[i]
        if np.uint32(7) + seed > 8:
            y[x[i] + 1] = 0
        # Cut to 32 bits in the end, or 64 bits by name, or a thread's index: no difference.
        y[i] = (x[i] + 1) * 3 ^ seed
        wide[i] = np.int32(x[i] * 5)
        wide[i] = np.int64(x[i]) * x[i]
        y[cuda.threadIdx.x + 1] = 0

    found = simulator.lint(hashes, INTS, INTS, INTS.astype(np.int64), np.uint32(3))
    assert kinds(found) == ["integer-width"] * 3
    assert "`x[i] * x[i]` is int64" in found[0].message and "np.int32(" in found[0].message
    assert "uint64" in found[1].message and "`x[i] + 1`" in found[2].message


def test_an_argument_that_makes_everything_float64():
    @cuda.jit
    def powers(y, base):
        y[0] = base * base + base

    (found,) = simulator.lint(powers, X, 1.5)
    assert "argument `base` is a Python float" in found.message


def test_parts_of_numba_imported_by_name():
    from course_lib.simulator.cuda_api.modules import submodule

    uniform = submodule("numba.cuda.random").xoroshiro128p_uniform_float64
    states = submodule("numba.cuda.random").create_xoroshiro128p_states(32, seed=1)

    @cuda.jit
    def throw(states, y):
        cuda.atomic.add(y, 0, uniform(states, cuda.grid(1)))

    assert simulator.lint(throw, states, np.zeros(1)) == []


def test_modules_of_numba_under_another_name():
    from course_lib.simulator.cuda_api.modules import submodule

    nr = submodule("numba.cuda.random")
    states = nr.create_xoroshiro128p_states(32, seed=1)

    @cuda.jit
    def throw(states, y):
        cuda.atomic.add(y, 0, nr.xoroshiro128p_uniform_float64(states, cuda.grid(1)))

    assert simulator.lint(throw, states, np.zeros(1)) == []


def test_what_is_linked_for_a_launch_hides_nothing():
    @cuda.jit
    def flattened(x, y):
        i = cuda.grid(1)
        y[i] = x.reshape(x.size)[i] * 2.0

    (found,) = simulator.lint(flattened, X.reshape(8, 8), X)
    assert found.message.startswith("`x.reshape(x.size)[i] * 2.0` is computed in float64")


C64, C128 = np.ones(4, np.complex64), np.ones(4, np.complex128)


@pytest.mark.parametrize("text, args, words", [
    ("x[0] * x[1] + abs(x[2])", (C64,), None), ("x[0] * x[1] + 1j", (C128,), None),
    ("x[0] * np.complex64(1j)", (C64,), None),
    ("x[0] * 1j", (C64,), "`x[0] * 1j` is computed in float64: numba makes the constant 1j "
                          "complex128. Write np.complex64(1j)"),
    ("x[0] * 2.5", (C64,), "np.float32(2.5)"), ("x[0] ** 2", (C64,), "Write np.float32(2)"),
    ("x[0] * a", (C64, 2j), "`a` is a Python complex, which is complex128"),
])
def test_complex_numbers(text, args, words):
    space = {"np": np}
    names = "y, x, a" if len(args) > 1 else "y, x"
    exec(f"def kernel({names}):\n    y[0] = {text}", space)
    found = simulator.lint(cuda.jit(space["kernel"]), args[0].copy(), *args)
    assert [words in each.message for each in found] == [True] * (words is not None), found


WITHOUT_LINES = """
import pickle, runpy, sys
import numba.cuda.compiler as compiler
plain = compiler.compile_cuda
def compile_cuda(*args, lineinfo, **options):  # as NVVM fails with large records
    assert not lineinfo
    return plain(*args, lineinfo=lineinfo, **options)
compiler.compile_cuda = compile_cuda
worker = runpy.run_path(sys.argv[1])
print(worker["answer"](pickle.load(sys.stdin.buffer)))
"""


def test_a_kernel_that_compiles_without_lines_alone():
    """Its float64 is still told."""
    @cuda.jit
    def half(x, y):
        y[0] = x[0] * 1.7 + x[1]

    request = pickle.dumps(_Shipment().request(half, (X, X)))
    done = subprocess.run([sys.executable, "-c", WITHOUT_LINES, _WORKER], input=request,
                          env=os.environ | ENVIRONMENT, capture_output=True, check=True)
    assert b"findings" in done.stdout and b"`x[0] * 1.7` is computed in float64" in done.stdout


def test_spills():
    def crowded(x, y):
        i = cuda.grid(1)
        values = cuda.local.array(64, np.float32)
        for k in range(64):
            values[k] = x[i + k]
        for k in range(64):
            for m in range(64):
                values[k] = values[k] * values[m] + x[i + m]
        for k in range(64):
            y[i + k] = values[k]

    (found,) = simulator.lint(cuda.jit(max_registers=24)(crowded), X, X)
    assert found.kind == "spill" and "24 registers" in found.message
    assert found.line == line_of(crowded, "def crowded")


def test_a_kernel_typed_into_a_cell():
    source = "@cuda.jit\ndef cell(x, y):\n    i = cuda.grid(1)\n    y[i] = x[i] + x[i] * 1.7\n"
    namespace = {"cuda": cuda, "__name__": "__main__"}
    exec(compile(source, "<ipython-input-1>", "exec"), namespace)
    (found,) = simulator.lint(namespace["cell"], X, X)
    assert (found.line, found.kind) == (4, "float64-promotion")


def test_arrays_of_every_layout_and_tuples():
    @cuda.jit
    def many(image, pair, n):
        i = cuda.grid(1)
        image[i, 0] = pair[0][i] * n + pair[1][i, 1]

    square = np.ones((8, 8), np.float32)
    for image in (square, square.T, square[::2, 1:]):
        assert simulator.lint(many, image, (X, square), np.float32(2)) == []


def test_numba_says_why_it_cannot_compile():
    @cuda.jit
    def undefined(x):
        x[0] = nowhere  # noqa: F821

    with pytest.raises(simulator.LintError, match="nowhere"):
        simulator.lint(undefined, X)


def test_it_goes_on_after_its_process_was_ended():
    simulator.lint(mended, X, X)
    os.kill(_process.running.pid, signal.SIGKILL)
    _process.running.wait()
    assert simulator.lint(mended, X, X) == []


def test_without_numba_cuda_it_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(simulator.LintUnavailable, match="not installed"):
        simulator.lint(mended, X, X)


def test_with_the_real_numba_cuda_in_the_same_process():
    code = """
import numpy as np
from course_lib import cuda, simulator
from course_lib.runtime.intrinsics import load_vector, store_vector
assert not simulator.is_installed()

@cuda.jit(device=True)
def twice(value):
    return value * 2.1

def double(x, y):
    values = cuda.local.array(4, np.float32)
    load_vector(values, x, 0)
    values[0] = twice(values[0]) + values[1]
    store_vector(y, 0, values)

x = np.ones(8, np.float32)
for finding in simulator.lint(cuda.jit(double), x, x):
    print(finding.kind, finding.line)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=250, env=os.environ | {"COURSE_LIB_SIMULATOR": "0"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["float64-promotion", "9"]
