"""The stage of a check that compiles for a GPU, on a machine without one."""

import math
import sys
import threading

import numpy as np
import pytest

from course_lib import cuda
from course_lib.simulator.linting.lint import LintError, LintUnavailable
from course_lib.teach import CheckFailed, check
from course_lib.teach.checking import compiling
from course_lib.teach.exercise import EXACT, Exercise, exercises
from course_lib.teach.keeping import record

ONE, ZERO = np.float32(1), np.float32(0)
needs_compiler = pytest.mark.skipif(
    sys.platform == "darwin", reason="numba-cuda can't be installed on macOS"
)


@pytest.fixture(autouse=True)
def own_record(tmp_path, patience, monkeypatch):
    """A progress record of the test's own, and nothing told yet."""
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(compiling, "_told_missing", False)


@cuda.jit
def plain_relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], ZERO)


@cuda.jit
def relu_with_an_attribute(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i].clip(0, None)


@cuda.jit
def relu_with_two_types(x, y):
    i = cuda.grid(1)
    if i < x.size:
        pair = (x, i)
        for _part in pair:
            y[i] = max(x[i], ZERO)


@cuda.jit
def relu_with_numpy(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = np.maximum.reduce([x[i], ZERO])


@cuda.jit
def relu_with_shape_of_shared(x, y):
    scratch = cuda.shared.array(len(x.shape), np.float32)
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], ZERO)
        scratch[0] = 0


@needs_compiler
@pytest.mark.parametrize(
    "kernel, line",
    [
        (relu_with_an_attribute, "y[i] = x[i].clip(0, None)"),
        (relu_with_two_types, "for _part in pair:"),
        (relu_with_numpy, "y[i] = np.maximum.reduce([x[i], ZERO])"),
        (relu_with_shape_of_shared, "scratch = cuda.shared.array(len(x.shape), np.float32)"),
    ],
)
def test_what_numba_cannot_compile_is_refused_with_its_line(kernel, line):
    with pytest.raises(CheckFailed, match="cannot (be compiled|compile line)") as caught:
        check("relu", kernel)
    message = str(caught.value)
    print(message)
    assert f"`{line}`" in message
    assert len(message.splitlines()) < 8 and "Traceback" not in message
    assert "solved" not in record.load()["relu"]


@cuda.jit
def columns_in_float64(x, y):
    col = cuda.grid(1)
    if col < x.shape[1]:
        total = 0.0
        for row in range(x.shape[0]):
            total += x[row, col]
        y[col] = total


@needs_compiler
def test_float64_is_noted(capsys):
    check("column_sum", columns_in_float64)
    first, note = capsys.readouterr().out.splitlines()
    assert first.startswith("✓ column_sum") and first.endswith("compiled for a GPU")
    assert "`total += x[row, col]`" in note and "computed in float64" in note


@cuda.jit
def sigmoid_in_float64(x, y):
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(-abs(x[i]))
        y[i] = 1.0 / (1.0 + e) if x[i] >= 0 else e / (1.0 + e)


@needs_compiler
def test_float64_is_refused_where_the_exercise_says_so():
    assert "float64-promotion" in exercises()["sigmoid"].forbids
    with pytest.raises(CheckFailed, match=r"float64-promotion in line \d+, `y\[i\] = 1\.0"):
        check("sigmoid", sigmoid_in_float64)


@needs_compiler
def test_launchers_kernels_are_compiled(monkeypatch, capsys):
    relu = exercises()["relu"]

    def launch(kernel):
        def launcher(x):
            y = np.empty_like(x)
            kernel[max(1, -(-x.size // 64)), 64](x, y)
            return y

        return launcher

    made = Exercise(
        "launch_relu", "A launcher", launch(plain_relu), relu.reference, relu.cases, relu.hints,
        EXACT, kind="launcher",
    )  # fmt: skip
    monkeypatch.setitem(exercises(), "launch_relu", made)
    check("launch_relu", launch(plain_relu))
    assert "compiled for a GPU" in capsys.readouterr().out
    with pytest.raises(CheckFailed, match="numba cannot compile line .*clip"):
        check("launch_relu", launch(relu_with_an_attribute))


def test_without_numba_cuda_it_is_said_once(monkeypatch, capsys):
    def missing(*_):
        raise LintUnavailable("not installed")

    monkeypatch.setattr(compiling, "lint", missing)
    monkeypatch.setattr(compiling, "prepare", missing)
    for _ in range(2):
        check("relu", plain_relu)
    out = capsys.readouterr().out
    assert out.count("✓ relu") == 2 and out.count("numba-cuda is not installed") == 1
    assert "compiled for a GPU\n" not in out.replace("not compiled for a GPU", "")


@pytest.mark.parametrize(
    "text", ["the process that compiles kernels has ended", "Traceback (most\nKeyError: 3"]
)
def test_a_compiler_that_breaks_down_is_not_the_learners_fault(monkeypatch, capsys, text):
    def fail(*_):
        raise LintError(text)

    monkeypatch.setattr(compiling, "lint", fail)
    check("relu", plain_relu)
    assert f"not compiled for a GPU: {text.splitlines()[-1]}" in capsys.readouterr().out


def test_a_compiler_that_is_not_ready_is_not_waited_for(monkeypatch, capsys):
    ready = threading.Event()
    monkeypatch.setattr(compiling, "lint", lambda *_: ready.wait(60))
    monkeypatch.setattr(compiling, "WAIT", 0.05)
    check("relu", plain_relu)
    assert "the compiler is still starting" in capsys.readouterr().out
    ready.set()
