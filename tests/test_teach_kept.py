"""What passed its check in one lesson is what another lesson runs, in another process."""

import functools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - a solution of lesson 4 reaches it
from test_jupyter import Session

from course_lib import cuda
from course_lib.teach import CheckFailed, check, progress, use
from course_lib.teach.checking import check as checking
from course_lib.teach.exercise import exercises
from course_lib.teach.keeping import kept, record
from course_lib.teach.keeping.written import NotKept, digest, rebuilt, written_out

ROOT = Path(__file__).resolve().parents[1]
KEEPABLE = [name for name, exercise in exercises().items() if exercise.kind != "answer"]
COURSES = exercises()["relu"].solution
ZERO, TABLE = np.float32(0), np.array([[0.5, np.inf]], np.float32)


@pytest.fixture(autouse=True)
def restart(tmp_path, monkeypatch):
    """A progress record of the test's own. What it returns makes this process as good as new."""

    def forget():
        monkeypatch.setattr(checking, "_passed", {})
        monkeypatch.setattr(kept, "_built", {})

    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(record, "_unsaved", {})
    monkeypatch.setattr(record, "_told", set())
    monkeypatch.delenv("COURSE_LIB_STRICT", raising=False)
    forget()
    return forget


@cuda.jit(device=True)
def positive(value):
    return max(value, ZERO)


@cuda.jit
def relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = positive(x[i])


@cuda.jit
def wrong_relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i]


def another_relu():
    @cuda.jit
    def relu(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] if x[i] > ZERO else ZERO

    return relu


def ran(kernel):
    x = np.array([-1, 2, -3], np.float32)
    y = np.zeros_like(x)
    kernel[1, 32](x, y)
    return y.tolist()


# ---- from one process to another -------------------------------------------------------------

SOLVES = """
import operator
from math import sqrt as root
import numpy as np
from course_lib import cuda as c
from course_lib.teach import check
from numpy import float32 as f32

LANES: int = 32
TABLE = np.array([[1.5, np.nan]], f32)
BIG, SMALL, SIGN = float("inf"), np.float64(1e-320), np.int8(-3)
ZERO = f32(0)

@c.jit(device=True)
def second(value, least=f32(0)):
    '''Docs of
        two lines.'''
    return max(value, least)

first = second

@c.jit(fastmath=True)
def relu(x, y):
    i = c.grid(1)  # Zeile für Zeile
    limit = root(f32(x.size)) * root(f32(x.size)) + f32(0.5)
    if i < x.size and i < limit and SIGN < 0 and BIG > SMALL:
        y[i] = first(x[i], least=f32(TABLE[0, 0] - f32(1.5)))
"""

USES = """
import numpy as np
from course_lib import SIMULATED, simulator
from course_lib.teach import check, use

kernel = use("relu")
print(type(kernel).__name__, kernel.targetoptions.get("fastmath"))
x, y = np.arange(-2, 3, dtype=np.float32), np.zeros(5, np.float32)
simulator.run(kernel, 1, 8, x, y)
print(y.tolist())
check("relu", kernel)
with simulator.trace() as t:
    simulator.run(kernel, 1, 8, x, y)
print(t.table())
with simulator.sanitize() as report:
    simulator.run(kernel, 1, 8, x, y[:3])
print(report)
try:
    simulator.run(kernel, 1, 8, x, y[:3])
except Exception as error:
    print(error)
"""


def run(text, folder, name="lesson.py", **environment):
    """Run a program as a process of its own; return what it prints."""
    program = folder / name
    program.write_text(text, encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OTHER = """
import numpy as np
from course_lib.teach import check

TWO = np.int64(2)

def bytes_in_flight(gbps, latency_ns, n, threads):
    share = gbps * latency_ns / n
    return share, TWO // 2 * share / threads

check("bytes_in_flight", bytes_in_flight)
"""


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """The text of a record in which two notebooks have solved something at the same time."""
    folder = tmp_path_factory.mktemp("solved")
    place = {"COURSE_LIB_PROGRESS": str(folder / "progress.json"), "COURSE_LIB_STRICT": ""}
    with ThreadPoolExecutor(2) as both:
        texts = SOLVES + 'check("relu", relu)', OTHER
        runs = [both.submit(run, text, folder, f"{n}.py", **place) for n, text in enumerate(texts)]
        shown = [each.result() for each in runs]
    assert all("✓" in each and "not kept" not in each for each in shown), shown
    for n in range(2):
        (folder / f"{n}.py").unlink()
    return (folder / "progress.json").read_text()


def test_round_trip(solved, tmp_path):
    record.path().write_text(solved)
    out = run(USES, tmp_path)
    assert out.startswith("Using the relu that you wrote in lesson 1.\nKernel True\n")
    assert "[0.0, 0.0, 0.0, 1.0, 2.0]\n✓ relu" in out
    assert "y[i]" in out and "out-of-bounds" in out, "the tracer and the sanitizer show its lines"
    assert "of your relu" in out, out
    assert use("bytes_in_flight")(8, 2, 4, 2) == (4, 2)


@pytest.mark.skipif(sys.platform == "darwin", reason="numba-cuda can't be installed on macOS")
def test_round_trip_to_the_real_numba(solved, tmp_path):
    record.path().write_text(solved)
    out = run(USES, tmp_path, COURSE_LIB_SIMULATOR="0", CUDA_VISIBLE_DEVICES="-1")
    assert out.startswith("Using the relu that you wrote in lesson 1.\nCUDADispatcher True\n")
    assert "[0.0, 0.0, 0.0, 1.0, 2.0]\n✓ relu" in out
    assert "not kept" not in out


def test_every_solution_can_be_kept():
    for name in KEEPABLE:
        exercise = exercises()[name]
        text = written_out(exercise.solution)
        again = rebuilt(text, name)
        assert written_out(again) == text, name
        assert digest(exercise, again) == digest(exercise, rebuilt(text, name)), name


CONSTANTS = {
    "none": None, "yes": True, "text": "a\n'b'", "far": -math.inf, "odd": complex(1, math.nan),
    "half": np.float16(0.1), "single": np.float32(0.1), "wide": np.uint64(2**64 - 1),
    "flag": np.bool_(True), "kind": np.dtype(">i2"), "table": TABLE, "nothing": np.zeros((0, 3)),
    "alone": (1,), "nested": {"a": ([1], {2}), 3: set()}, "np": np.ones(1)[0],
}  # fmt: skip


def test_what_was_kept_before_modules_were_renamed_is_built():
    text = (
        "from course_lib.runtime.launch import launch\n"
        "from course_lib.runtime.matrix import load_word, multiply_add\n"
        "from course_lib.runtime.philox import philox_one\n"
        "from course_lib.runtime.intrinsics import warp_sum\n\n"
        "def relu(x):\n    return launch, load_word, multiply_add, philox_one, warp_sum\n"
    )
    assert all(map(callable, rebuilt(text, "relu")(0)))


def test_constants_are_exact(tmp_path):
    body = "\n".join(f"    {name}" for name in CONSTANTS)
    path = tmp_path / "f.py"
    path.write_text(f"def f():\n{body}\n")
    space = {**CONSTANTS, "__name__": "somewhere"}
    exec(compile(path.read_text(), path, "exec"), space)
    again = rebuilt(written_out(space["f"]), "f").__globals__
    for name, value in CONSTANTS.items():
        assert type(again[name]) is type(value)
        assert repr(again[name]) == repr(value) and np.shape(again[name]) == np.shape(value)


# ---- what can't be kept ----------------------------------------------------------------------


def closes_over():
    scale = np.float32(1)

    @cuda.jit
    def relu(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = scale * positive(x[i])

    return relu


def bare(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = positive(x[i])


class Mine:
    """What no file can be written of."""

    zero = ZERO


MINE, TOO_LARGE = functools.partial(positive), np.zeros(5000)


def uses_a_partial(x):
    return MINE(x)


def uses_a_large_array():
    return TOO_LARGE


def has_a_default(x, unlike=Mine()):  # noqa: B008
    return unlike


def without_source():
    space = {}
    exec("def f():\n    return 1", space)
    return space["f"]


def uses_two_of_one_name():
    return renamed(bare)


def renamed(f):
    return f


renamed.__name__ = "bare"

UNKEEPABLE = {
    "a closure": (closes_over(), "relu uses `scale`, which the function around it defines"),
    "no decorator": (cuda.jit(bare), "the decorator of bare does not stand above it"),
    "an object": (uses_a_partial, "it uses `MINE`, a partial, which is neither imported nor a co"),
    "an array": (uses_a_large_array, "it uses `TOO_LARGE`, a ndarray, which is neither"),
    "a default": (has_a_default, "a default value of has_a_default is no constant"),
    "no source": (without_source(), "the source of f can't be found"),
    "a lambda": (lambda x: x, "it is a lambda, which has no name"),
    "two names": (uses_two_of_one_name, "can't be found|two functions"),
}


@pytest.mark.parametrize("obj, says", UNKEEPABLE.values(), ids=UNKEEPABLE)
def test_what_cannot_be_kept(obj, says):
    with pytest.raises(NotKept, match=says):
        written_out(obj)


def test_a_closure_passes_and_is_told(capsys, restart):
    check("relu", relu)
    check("relu", closes_over())
    assert "  note      not kept for later lessons: relu uses `scale`" in capsys.readouterr().out
    assert record.load()["relu"]["solved"]
    use("relu")
    assert capsys.readouterr().out == "Using your relu.\n"
    restart()
    assert use("relu") is COURSES
    out = capsys.readouterr().out
    assert out.startswith("Using the course's relu: yours has passed its check, and is not kept: ")
    progress()
    assert "✓ solved" in capsys.readouterr().out


# ---- which one -------------------------------------------------------------------------------


def test_the_last_that_passed_wins(capsys, restart):
    assert use("relu") is COURSES
    line = "Using the course's relu: yours has not passed its check yet.\n"
    assert capsys.readouterr().out == line
    check("relu", relu)
    check("relu", another_relu())
    with pytest.raises(CheckFailed):
        check("relu", wrong_relu)
    found = use("relu")
    assert "if x[i] > ZERO else ZERO" in "".join(record.load()["relu"]["kept"]["lines"])
    assert ran(found) == [0, 2, 0] and use("relu") is found
    restart()
    assert ran(use("relu")) == [0, 2, 0]
    assert capsys.readouterr().out.endswith("Using the relu that you wrote in lesson 1.\n")
    progress(reset="relu")
    assert use("relu") is COURSES


def test_with_an_object_it_is_that_one_or_the_courses(capsys, restart):
    check("relu", relu)
    restart()
    capsys.readouterr()
    assert use("relu", relu) is relu  # the cell has run again, its check has not
    assert use("relu", wrong_relu) is COURSES
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Using your relu."
    assert "is not this one: check it again" in lines[1]  # progress() says that one has passed
    assert lines[1].endswith("An earlier one has: use('relu') takes it.")


def test_one_that_fails_after_all_is_not_kept(capsys, restart, monkeypatch):
    check("relu", relu)
    failing = checking.STAGES[0]
    with monkeypatch.context() as patch:
        patch.setattr(checking, "explain", lambda _, failure: failure)
        patch.setattr(checking, "_first_failure", lambda attempt: failing(
            checking._attempt(attempt.exercise, wrong_relu, attempt.seed)))  # fmt: skip
        with pytest.raises(CheckFailed):
            check("relu", relu)
    restart()
    assert use("relu") is COURSES
    assert "is not kept: its check failed" in capsys.readouterr().out


def test_what_was_solved_before_solutions_were_kept(capsys):
    record.update("relu", lambda entry: entry.update(solved="2026-01-01"))
    assert use("relu") is COURSES
    assert "was not kept. Check it in lesson 1 again, and it is." in capsys.readouterr().out


def test_what_has_not_changed_is_not_checked_again(capsys, restart, monkeypatch):
    check("relu", relu)
    restart()
    runs = []
    monkeypatch.setattr(checking, "STAGES", [lambda attempt: runs.append(attempt)])
    use("relu")
    assert not runs
    record.update("relu", lambda entry: entry["kept"].update(digest="of an older course"))
    use("relu")
    use("relu")
    assert len(runs) == 1, "once more, and then it is as good as before"
    monkeypatch.setattr(kept.Gpu, "available", lambda: True)
    use("relu")
    use("relu")
    assert len(runs) == 2, "where it has never been on a GPU, it is checked there"
    assert "course's" not in capsys.readouterr().out


def test_solved_notebooks_take_nothing_that_was_kept(capsys, restart, monkeypatch):
    check("relu", relu)
    restart()
    monkeypatch.setenv("COURSE_LIB_STRICT", "1")
    capsys.readouterr()
    assert use("relu") is COURSES
    assert capsys.readouterr().out == "Using the course's relu.\n"
    before = record.load()["relu"]["kept"]
    check("relu", another_relu())
    assert record.load()["relu"]["kept"] == before


# ---- a record that somebody has edited -------------------------------------------------------

WRONG = written_out(wrong_relu).replace("wrong_relu", "relu").splitlines()
RIGHT = written_out(relu).splitlines()
EDITED = {
    "a number": (3, "is left out"),
    "nothing": ({}, "can't be built any more: the progress record has no text of it"),
    "text": ({"name": "relu", "lines": "def relu"}, "the progress record has no text of it"),
    "numbers": ({"name": "relu", "lines": [1]}, "a line of its text in the progress record is no"),
    "no name": ({"lines": RIGHT}, "the progress record has no text of it"),
    "another name": ({"name": "f", "lines": RIGHT}, "its text defines no function called f"),
    "half of it": ({"name": "relu", "lines": RIGHT[:-3]}, "be built any more: IndentationError"),
    "an error": ({"name": "relu", "lines": ["1 / 0"]}, "be built any more: ZeroDivisionError"),
    "an exit": ({"name": "relu", "lines": ["raise SystemExit"]}, "be built any more: SystemExit"),
    "a gap": ({"name": "relu", "lines": ["import not_there"]}, "ModuleNotFoundError: No module"),
    "a mistake": ({"name": "relu", "lines": WRONG}, "no longer passes its check: wrong values in"),
    "no kernel": ({"name": "relu", "lines": ["def relu(x, y): pass"]}, "it got a plain function"),
    "a todo": (
        {"name": "relu", "lines": [*RIGHT, "from course_lib.teach import TODO", "ZERO = TODO"]},
        "no longer passes its check: it still holds TODO"),
}  # fmt: skip


@pytest.mark.parametrize("content, says", EDITED.values(), ids=EDITED)
def test_edited_by_hand(content, says, capsys):
    record.update("relu", lambda entry: entry.update(solved="2026-01-01", kept=content, hints=2))
    assert use("relu") is COURSES
    out = capsys.readouterr().out
    assert says in out and out.splitlines()[-1].startswith("Using the course's relu: ")
    progress()
    assert "✓ solved     2026-01-01  2 of 3" in capsys.readouterr().out
    check("relu", relu)
    assert ran(use("relu")) == [0, 2, 0]


def test_a_better_one_written_into_the_record_is_taken(capsys):
    entry = {"name": "relu", "lines": RIGHT, "digest": "", "gpu": False}
    record.update("relu", lambda old: old.update(kept=entry))
    assert ran(use("relu")) == [0, 2, 0]
    assert capsys.readouterr().out == "Using the relu that you wrote in lesson 1.\n"


ODD = {"tried": 3, "solved": ["x"], "attempts": "three", "hints": -1, "solution_seen": "no"}


def test_odd_fields_are_left_out_and_the_rest_stays(capsys):
    record.update("relu", lambda entry: entry.update(ODD))
    record.update("sigmoid", lambda entry: entry.update(solved="2026-01-01", attempts=2))
    progress()
    out = capsys.readouterr().out
    assert out.count("which is not") == len(ODD) and "✓ solved     2026-01-01" in out
    check("relu", relu)
    assert "which is not" not in capsys.readouterr().out, "each is told once"
    assert record.load()["relu"]["attempts"] == 1


def test_reading_runs_nothing(tmp_path, capsys):
    mark = tmp_path / "it_ran"
    lines = [f"open({str(mark)!r}, 'w')"]
    record.update("relu", lambda entry: entry.update(kept={"name": "relu", "lines": lines}))
    progress()
    check("sigmoid", exercises()["sigmoid"].solution)
    assert not mark.exists()
    use("relu")
    assert mark.exists()


# ---- in notebooks ----------------------------------------------------------------------------

CELL = """
from course_lib import cuda, simulator
from course_lib.teach import check, progress, use
import numpy as np
from course_lib.runtime.intrinsics import warp_sum
WARP = 32

@cuda.jit(device=True)
def share(x, row):
    total = np.float32(0)
    for col in range(cuda.threadIdx.x % WARP, x.shape[1], WARP):
        total += x[row, col]
    return warp_sum(total)
"""
SOLVED = """
@cuda.jit
def conv2d_dbias(dy, dbias):
    total = np.float32(0)
    for i in range(cuda.threadIdx.x % WARP, dy.shape[0] * dy.shape[2] * dy.shape[3], WARP):
        n, rest = divmod(i, dy.shape[2] * dy.shape[3])
        total += dy[n, cuda.blockIdx.x, rest // dy.shape[3], rest % dy.shape[3]]
    total = warp_sum(total)
    if cuda.threadIdx.x == 0:
        dbias[cuda.blockIdx.x] = total

check("conv2d_dbias", conv2d_dbias)
"""
LATER = """
from course_lib import simulator
from course_lib.teach import progress, use
import numpy as np
mine, n = use("conv2d_dbias"), 3
dy, dbias = np.ones((2, n, 4, 4), np.float32), np.zeros(n, np.float32)
with simulator.trace() as t:
    mine[n, 64](dy, dbias)
print(dbias.tolist(), "dbias[cuda.blockIdx.x]" in str(t.table()))
mine[n + 1, 64](dy, dbias)
"""


def test_from_notebook_to_notebook(tmp_path):
    first = Session(tmp_path)
    try:
        assert first.run(CELL) == (None, "")
        error, shown = first.run(SOLVED)
        assert error is None and shown.startswith("✓ conv2d_dbias — ") and "not kept" not in shown
    finally:
        first.close()
    second = Session(tmp_path)
    try:
        error, shown = second.run(LATER)
        assert shown.startswith("Using the conv2d_dbias that you wrote in lesson 9.\n")
        assert "[32.0, 32.0, 32.0] True" in shown
        assert error == "OutOfBounds" and "of your conv2d_dbias" in shown, shown
        assert "total += dy[n, cuda.blockIdx.x, " in shown and "course_lib/" not in shown
        assert "✓ solved" in second.run("progress()")[1]
    finally:
        second.close()
