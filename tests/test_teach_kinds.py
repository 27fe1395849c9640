"""Checks of what is no kernel: functions for the CPU, launchers, and answers."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - lesson 04 needs it, and importing it is no check's time
from relus import good_relu

from course_lib import simulator
from course_lib.teach import TODO, CheckFailed, check
from course_lib.teach.exercise import EXACT, Exercise, exercises
from course_lib.teach.exercises import suspects
from course_lib.teach.keeping import record

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("progress_file")


# ---- functions that launch nothing ---------------------------------------------------------


def in_flight(gbps, latency_ns, n_multiprocessors, n_threads):
    share = gbps * latency_ns / n_multiprocessors
    return share, share / n_threads


def test_function_is_accepted(capsys):
    check("bytes_in_flight", in_flight)
    assert capsys.readouterr().out == "✓ bytes_in_flight — 10 cases\n"


def test_function_is_told_what_it_was_given():
    with pytest.raises(CheckFailed) as caught:
        check("bytes_in_flight", lambda gbps, ns, chips, threads: (gbps, gbps), seed=3)
    message = str(caught.value)
    assert "call      bytes_in_flight(gbps, latency_ns" in message and "launch" not in message
    assert "expected  per_multiprocessor = " in message and "gbps      " in message


def test_function_is_no_kernel():
    with pytest.raises(TypeError, match="a function for the CPU"):
        check("bytes_in_flight", good_relu)


# ---- launchers -----------------------------------------------------------------------------


def launch_relu(x):
    y = np.empty_like(x)
    good_relu[max(1, math.ceil(x.size / 64)), 64](x, y)
    return y


@pytest.fixture
def launcher(monkeypatch):
    """An exercise whose object is a launcher."""
    relu = exercises()["relu"]
    made = Exercise(
        "launch_relu", "A launcher", launch_relu, relu.reference, relu.cases, relu.hints,
        EXACT, kind="launcher",
    )  # fmt: skip
    monkeypatch.setitem(exercises(), "launch_relu", made)
    return made


def test_launcher_is_accepted(launcher, capsys):
    check("launch_relu", launch_relu)
    assert "✓ launch_relu" in capsys.readouterr().out


def forgets_return(x):
    launch_relu(x)


def gives_float64(x):
    return launch_relu(x).astype(np.float64)


def gives_row(x):
    return launch_relu(x)[None]


def gives_list(x):
    return list(launch_relu(x))


def one_block_only(x):
    y = np.empty_like(x)
    good_relu[1, 64](x, y)
    return y


def own_input(x):
    good_relu[max(1, math.ceil(x.size / 64)), 64](x, x)
    return x


@pytest.mark.parametrize(
    "obj, says",
    [
        (forgets_return, "is the return missing"),
        (gives_float64, "y is float64, and should be float32"),
        (gives_row, r"shape \(1, 1\), and should have \(1,\)"),
        (gives_list, "returned a list"),
        (one_block_only, "never written"),
        (own_input, "changes its input x"),
    ],
)
def test_wrong_launcher(launcher, obj, says):
    with pytest.raises(CheckFailed, match=says):
        check("launch_relu", obj)


def test_kernel_is_no_launcher(launcher):
    with pytest.raises(TypeError, match="got a kernel"):
        check("launch_relu", good_relu)


# ---- answers -------------------------------------------------------------------------------


def test_answer_is_accepted(capsys):
    check("find_the_slow_one", exercises()["find_the_slow_one"].solution)
    name, sectors = exercises()["find_the_slow_one"].solution()
    check("find_the_slow_one", (f" {name.upper()} ", float(sectors)))  # the answer itself will do
    assert capsys.readouterr().out.count("✓ find_the_slow_one — found") == 2
    assert record.load()["find_the_slow_one"]["attempts"] == 2


def test_of_several_numbers_the_wrong_ones_are_named():
    right = exercises()["count_the_bytes"].solution()
    with pytest.raises(CheckFailed, match="wrong is bytes with two passes$"):
        check("count_the_bytes", (right[0], right[1] + 4, right[2]))


@pytest.mark.parametrize(
    "answer",
    [("first", 32), ("third", 32), ("second", 4), ("second", None), (32, "second")],
)
def test_wrong_answer_is_refused_and_does_not_tell(answer):
    right = str(exercises()["find_the_slow_one"].solution())
    with pytest.raises(CheckFailed, match="is not the answer") as caught:
        check("find_the_slow_one", lambda: answer)
    assert right not in str(caught.value)
    assert "solved" not in record.load()["find_the_slow_one"]


def test_the_answer_is_what_the_tracer_finds():
    x = np.arange(8 * 512, dtype=np.float32).reshape(8, 512) % 7
    found = {}
    for name in ("first", "second", "third"):
        y = np.zeros(8, np.float32)
        with simulator.trace() as trace:
            getattr(suspects, name)[2, 128](x, y)
        np.testing.assert_array_equal(y, x.sum(axis=1))
        (load,) = (site for site in trace.sites if site.op == "load")
        found[name] = load.sectors_per_request
    slow, sectors = exercises()["find_the_slow_one"].solution()
    assert found.pop(slow) == sectors and set(found.values()) == {4}


def test_answer_with_a_part_missing():
    with pytest.raises(CheckFailed, match="has 2 parts: name, sectors"):
        check("find_the_slow_one", "second")


def test_answer_that_ends_python():
    with pytest.raises(CheckFailed, match="this ends Python itself"):
        check("find_the_slow_one", lambda: sys.exit())


@pytest.mark.parametrize("answer", [(TODO, TODO), ("second", TODO), lambda: (TODO, TODO)])
def test_unfinished_answer(answer, capsys):
    check("find_the_slow_one", answer)
    assert "not solved yet" in capsys.readouterr().out
