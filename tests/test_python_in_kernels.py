"""The box "Which Python works in a kernel" of lesson 1: each of its lines is true.

What works runs in the simulator and compiles for a GPU; what does not is refused by the compiler
that checks use, in words that help. The compiler needs no GPU.
"""

import importlib.util
import itertools
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator.linting.lint import LintError, lint
from course_lib.teach.checking import compiling

ROOT = Path(__file__).resolve().parents[1]
LESSON = (ROOT / "notebooks" / "src" / "01_threads_and_memory.py").read_text(encoding="utf-8")
needs_compiler = pytest.mark.skipif(
    sys.platform == "darwin", reason="numba-cuda can't be installed on macOS"
)
_numbers = itertools.count()

#: Each line of the first table: a kernel's lines (x is 1, 2, 3, 4), and what is then in y.
WORKS = {
    "math.exp(v)": ("y[i] = math.log(math.exp(v)) + min(abs(-v), v) - max(v, v)", [1, 2, 3, 4]),
    "for k in range(4)": (
        """
        k = 0
        while True:
            k += 1
            if k == 2 or not v > 1:
                break
        for j in range(4):
            if j > 0 and j < 4:
                continue
            y[i] = k
        """,
        [1, 2, 2, 2],
    ),
    "pair = (v, i)": ("pair = (v, i)\na, b = pair\ny[i] = a + pair[1] - b", [1, 2, 3, 4]),
    "values = cuda.local.array(4, np.float32)": (
        "values = cuda.local.array(4, np.float32)\nvalues[1] = v\ny[i] = values[1]", [1, 2, 3, 4]
    ),
    "v * TWO": ("y[i] = v * TWO + PAIR[1] + ARRAY[0]", [12, 14, 16, 18]),
    "scale(v)": ("y[i] = scale(v)", [2, 4, 6, 8]),
    'print("element", i, v)': ('print("element", i, v)\ny[i] = v', [1, 2, 3, 4]),
    "return": ("if i == 2:\n    return\ny[i] = v", [1, 2, 0, 4]),
    "assert v > 0": ("assert v > 0\nif v < 0:\n    raise ValueError(3)\ny[i] = v", [1, 2, 3, 4]),
}  # fmt: skip

#: Each line of the second table: a kernel's lines, and what the check says about them.
REFUSED = {
    "np.exp(v)": ("y[i] = np.exp(v)", "np.exp is for arrays; for one number, write math.exp"),
    "x.max()": ("y[i] = x.max()", "numba has no max(array(float32"),
    'f"{v}"': ('print(f"{v}")', "a kernel cannot make text"),
    "[v, v]": ("a = [v, v]\ny[i] = a[0]", "lists do not work in a kernel"),
    '{"a": v}': ('a = {"a": v}\ny[i] = a["a"]', "dicts do not work in a kernel"),
    "try": ("try:\n    y[i] = v\nexcept IndexError:\n    pass", "try and except do not work"),
    "np.zeros(4)": ("a = np.zeros(4)\ny[i] = a[0]", "a kernel cannot make arrays"),
    "y[:] = x": ("y[:] = x", "or compute with whole ones"),
    "helper(v)": ("y[i] = helper(v)", "helper is plain Python: it needs @cuda.jit(device=True)"),
}

MODULE = """
import math

import numpy as np

from course_lib import cuda

TWO, PAIR, ARRAY = np.float32(2), (3, 4), np.array([6.0], dtype=np.float32)


@cuda.jit(device=True)
def scale(v):
    return v * TWO


def helper(v):
    return v * TWO


@cuda.jit
def kernel(x, y):
    i = cuda.grid(1)
    if i < x.size:
        v = x[i]
"""


def module_with(lines, tmp_path):
    """A module with `lines` in a kernel, in a file: the simulator reads the source."""
    name = f"kernels_of_the_box_{next(_numbers)}"
    path = tmp_path / f"{name}.py"
    path.write_text(MODULE + textwrap.indent(textwrap.dedent(lines).strip("\n"), " " * 8) + "\n")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arrays():
    return np.arange(1, 5, dtype=np.float32), np.zeros(4, dtype=np.float32)


def refusal(kernel):
    """What a check says of a kernel that numba does not compile."""
    with pytest.raises(LintError) as caught:
        lint(kernel, *arrays())
    assert compiling._is_numbas(caught.value), "the compiler broke down: nothing was refused"
    return compiling._refusal(caught.value, kernel.py_func)


def box():
    """The first column of the box's two tables."""
    text = LESSON.split("### Which Python works in a kernel")[1].split("# %%")[0]
    works, refused = text.split("| does not work | instead |")
    return [re.findall(r"^# \| `([^`]+)`", part, re.MULTILINE) for part in (works, refused)]


def test_every_line_of_the_box_is_tried_here():
    assert box() == [list(WORKS), list(REFUSED)]


@pytest.mark.parametrize("what", WORKS)
def test_what_works_runs_in_the_simulator(what, tmp_path):
    lines, expected = WORKS[what]
    x, y = arrays()
    simulator.run(module_with(lines, tmp_path).kernel, 1, 32, x, y)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("what", WORKS)
def test_what_works_compiles(what, tmp_path):
    lint(module_with(WORKS[what][0], tmp_path).kernel, *arrays())


@pytest.mark.parametrize("what", REFUSED)
def test_the_simulator_refuses_it(what, tmp_path):
    kernel = module_with(REFUSED[what][0], tmp_path).kernel
    with pytest.raises(simulator.NotCompilable, match=r"cannot be compiled for a GPU: .*\.py:25"):
        simulator.run(kernel, 1, 1, *arrays())


@needs_compiler
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_work_is_refused_in_words_that_help(what, tmp_path):
    lines, says = REFUSED[what]
    message = refusal(module_with(lines, tmp_path).kernel)
    assert says in message, message
    assert "numba cannot compile line" in message and len(message.splitlines()) == 2


# ---- what the box says beside its code ---------------------------------------------------------


def test_the_simulator_prints_as_python_does(tmp_path, capsys):
    simulator.run(module_with('print("element", i, v)', tmp_path).kernel, 1, 32, *arrays())
    assert capsys.readouterr().out.splitlines()[1] == "element 1 2.0"
    assert "`element 1 2.0`" in LESSON and "`element 1 2.000000`" in LESSON


@needs_compiler
def test_a_gpu_prints_floats_with_six_decimals(tmp_path):
    """C's printf does it, whose %f has six decimals; the compiled kernel holds its format."""
    from test_compiler import run

    path = module_with('print("element", i, v)', tmp_path).__file__
    code = """
import runpy, sys
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import array_type
kernel = runpy.run_path(sys.argv[1])["kernel"]
print(compiler.ptx(kernel, [array_type("float32")] * 2, (9, 0)))
"""
    wanted = ", ".join(str(byte) for byte in b"%s %lld %f\n")
    assert wanted in run(code, tmp_path, path)


def test_constants_are_frozen_and_the_simulator_warns(tmp_path):
    module = module_with("y[i] = v * TWO", tmp_path)
    x, y = arrays()
    module.kernel[1, 32](x, y)
    module.TWO = np.float32(3)
    with pytest.warns(UserWarning, match="A GPU would keep the old value"):
        module.kernel[1, 32](x, y)


def test_the_simulator_stops_at_an_assert(tmp_path):
    with pytest.raises(AssertionError):
        simulator.run(module_with("assert v > 2", tmp_path).kernel, 1, 32, *arrays())


def test_a_kernel_returns_no_value(tmp_path):
    with pytest.raises(TypeError, match="returns a value"):
        simulator.run(module_with("return v", tmp_path).kernel, 1, 32, *arrays())


#: What section 7 says of float64: a kernel's line, and whether its machine code has any.
WIDE = {
    "y[i] = v * 2.0 / 3.0": True,
    "y[i] = 2 * v / 3": True,
    "y[i] = v if v > 0 else TWO": False,
    "y[i] = v * TWO": False,
}


@needs_compiler
@pytest.mark.parametrize("line", WIDE)
def test_comparisons_are_harmless_and_formulas_are_not(line, tmp_path):
    kinds = {each.kind for each in lint(module_with(line, tmp_path).kernel, *arrays())}
    assert ("float64-promotion" in kinds) == WIDE[line]
