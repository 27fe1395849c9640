"""The course's own exercises, and how checks, hints and progress behave."""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - lesson 04 needs it, and importing it is no check's time

from course_lib import cuda, simulator
from course_lib.teach import (
    TODO,
    CheckFailed,
    UnknownExercise,
    causes,
    check,
    checking,
    hint,
    progress,
    record,
    solution,
    suspects,
    use,
)
from course_lib.teach.deadline import AGAIN_SECONDS, TimeUp, deadline
from course_lib.teach.exercise import EXACT, Case, Exercise, Tolerance, case, exercises
from course_lib.teach.fences import FENCE, FencedArray
from course_lib.teach.late_torch import warm_up
from course_lib.teach.running import Attempt, Gpu, attempt_case
from course_lib.teach.todo import contains_todo

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A progress record of the test's own, empty, and nothing passed yet."""
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(record, "_unsaved", {})
    monkeypatch.setattr(record, "_told", set())
    monkeypatch.setattr(checking, "_passed", {})
    monkeypatch.delenv("COURSE_LIB_STRICT", raising=False)
    return tmp_path / "progress.json"


@cuda.jit
def good_relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], np.float32(0))


@cuda.jit
def bad_relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i]


# ---- the exercises ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_kernel_has_run():
    """On a GPU, the first kernel of a process pays for the CUDA context and loads the compiler.

    A learner pays for both before the first exercise: the lesson launches kernels of its own. So it
    does for PyTorch's import and first gradient.
    """
    x = np.ones(32, np.float32)
    good_relu[1, 32](x, np.empty_like(x))
    warm_up()


@pytest.mark.parametrize("name", exercises())
def test_solution_passes_within_two_seconds(name, a_kernel_has_run, capsys):
    seconds = []
    while not seconds or min(seconds) >= 2 and len(seconds) < 3:  # again, on a busy machine
        begin = time.process_time()
        check(name, exercises()[name].solution)
        seconds.append(time.process_time() - begin)
        assert capsys.readouterr().out.startswith(f"✓ {name} — ")
    assert min(seconds) < 2


KERNELS = [name for name, exercise in exercises().items() if exercise.kind != "answer"]
#: Inputs with equal numbers on purpose: counts (of no pixels all are 0), sums that are 1 beside a
#: large number, ties, calls that begin or end together.
EQUAL = {
    "dice_gradient": ("sums",), "cross_entropy_backward": ("s",),
    "softmax_dropout_backward": ("s",), "top_k": ("logits",), "self_times": ("begin", "end"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_cases_are_many_and_only_their_values_are_random(name):
    exercise = exercises()[name]
    one, other = (exercise.cases(np.random.default_rng(seed)) for seed in (1, 2))
    assert len(one) >= 8
    alike = [_launch(a) == _launch(b) for a, b in zip(one, other, strict=True)]
    assert alike.count(False) <= 2  # those whose size is drawn, the largest among them
    for a in one:
        assert a.threads <= 1024
        for value in exercise.expected(a).values():
            assert not np.isnan(value).any()
        for argument, x in a.inputs.items():
            if x.dtype.kind == "f" and argument not in EQUAL.get(name, ()):
                # Two zeros are equal, masked elements are, and a few that were rounded at 1e5.
                finite = x[np.isfinite(x)]
                assert np.unique(finite).size >= 0.9 * finite.size - 1


def _launch(case):
    return case.grid, case.block, {key: np.shape(value) for key, value in case.inputs.items()}


@pytest.mark.parametrize("name", exercises())
def test_hints_are_three_and_do_not_give_all_away(name):
    exercise = exercises()[name]
    assert len(exercise.hints) == 3 and len(set(exercise.hints)) == 3
    body = exercise.source().split(":\n", 1)[1].strip()
    assert all(body not in text for text in exercise.hints)
    assert exercise.tolerance.reason
    assert exercise.lesson.isdigit()


BACKWARD = [name for name, exercise in exercises().items() if exercise.primal]


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_reference_agrees_with_finite_differences(name):
    exercise, step = exercises()[name], 1e-6
    for each in exercise.cases(np.random.default_rng(3)):
        dy, *inputs = (np.asarray(x, np.float64) for x in each.inputs.values())
        if sum(x.size for x in inputs) > 400:  # each element moves by itself
            continue
        names = list(each.inputs)[1:]
        if not all(x.size for x in (dy, *inputs)) or max(np.abs(x).max() for x in inputs) > 100:
            continue
        for output, values in exercise.expected(each).items():
            position = names.index(output.removeprefix("d"))
            numeric = np.zeros_like(values)
            for index in np.ndindex(values.shape):
                sides = []
                for sign in (step, -step):
                    moved = [x.copy() for x in inputs]
                    moved[position][index] += sign
                    sides.append((dy * exercise.primal(*moved)).sum())
                numeric[index] = (sides[0] - sides[1]) / (2 * step)
            np.testing.assert_allclose(values, numeric, rtol=1e-4, atol=1e-5)


def test_some_exercise_is_backward():
    assert BACKWARD


# ---- check -----------------------------------------------------------------------------------


def test_failure_tells_case_expected_and_got():
    with pytest.raises(CheckFailed) as caught:
        check("relu", bad_relu, seed=5)
    message = str(caught.value)
    for label in ("launch", "x", "wrong", "expected", "got", "again"):
        assert f"\n  {label:<9} " in message
    assert "seed=5" in message and "relu[" in message
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_seed_repeats_a_failure(monkeypatch):
    def message(**options):
        with pytest.raises(CheckFailed) as caught:
            check("relu", bad_relu, **options)
        return str(caught.value)

    assert message(seed=11) == message(seed=11) != message(seed=12)
    assert message() != message()
    monkeypatch.setenv("COURSE_LIB_SEED", "11")
    assert message() == message(seed=11)


def test_smallest_case_is_reported():
    @cuda.jit
    def fails_from_three(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = max(x[i], np.float32(0)) if x.size < 3 else np.float32(-5)

    with pytest.raises(CheckFailed, match=r"x +float32, 5 elements"):
        check("relu", fails_from_three)


def test_in_jupyter_only_the_message_is_shown():
    lines = CheckFailed("relu: wrong values in y")._render_traceback_()
    assert len(lines) == 1 and lines[0].endswith("relu: wrong values in y")


def test_fresh_inputs_leave_numpys_own_generator_alone():
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    check("relu", good_relu)
    assert np.random.rand() == expected


def test_error_in_the_kernel_is_told_with_its_line():
    @cuda.jit
    def divides(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] / undefined_name  # noqa: F821

    with pytest.raises(CheckFailed, match="undefined_name.*|line") as caught:
        check("relu", divides)
    assert "undefined_name" in str(caught.value)


@pytest.mark.parametrize("loop", ["while True:\n        y[0] = 1", "while i < 5:\n        pass"])
def test_endless_loop_is_stopped(loop, tmp_path):
    code = f"def endless(x, y):\n    i = cuda.grid(1) * 0\n    {loop}\n"
    path = tmp_path / "endless.py"
    path.write_text("from course_lib import cuda\n@cuda.jit\n" + code)
    space = {}
    exec(compile(path.read_text(), path, "exec"), space)
    begin = time.monotonic()
    with pytest.raises(CheckFailed, match="for ever|did not end"):
        check("relu", space["endless"])
    assert time.monotonic() - begin < checking.TIME_LIMIT + 5


def test_a_kernel_may_not_be_too_slow(monkeypatch):
    monkeypatch.setattr(checking, "TIME_LIMIT", 0.2)

    @cuda.jit
    def slow(x, y):
        for _ in range(10**9):
            y[0] = x[0]

    with pytest.raises(CheckFailed, match="did not end"):
        check("relu", slow)


@pytest.mark.skipif(not hasattr(signal, "ITIMER_VIRTUAL"), reason="rings by signal on POSIX only")
def test_a_ring_that_gets_lost_comes_again(monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: lost.append(found.exc_type))

    def work(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    class Swallows:
        """As a garbage collector's callback: what is raised in here goes nowhere."""

        def __del__(self):
            work(5)  # until it rings

    with pytest.raises(TimeUp), deadline(0.01):
        Swallows()
        work(5)
    assert lost == [TimeUp]


@pytest.mark.parametrize("limit", [0.002, 0.004, 0.006])
def test_time_that_is_up_between_two_runs_is_told_as_well(monkeypatch, limit):
    monkeypatch.setattr(checking, "TIME_LIMIT", limit)
    gc.disable()  # a ring in a collector's callback is lost, and the next comes too late here
    try:
        with pytest.raises(CheckFailed, match="did not end"):
            check("global_avg_pool", exercises()["global_avg_pool"].solution)
    finally:
        gc.enable()


# ---- what is no solution ---------------------------------------------------------------------


@cuda.jit
def stub(x, y):
    i = cuda.grid(1)
    if TODO:
        y[i] = x[i]


@cuda.jit(device=True)
def stub_helper(v):
    return TODO


@cuda.jit
def calls_stub(x, y):
    i = cuda.grid(1)
    y[i] = stub_helper(x[i])


def launcher_stub(x):
    def inner():
        return TODO

    return inner()


def closure_stub():
    missing = TODO

    @cuda.jit
    def kernel(x, y):
        y[0] = missing

    return kernel


def renamed_stub():
    space = {"later": TODO, "__name__": "somewhere"}
    exec("def kernel(x, y):\n    y[0] = later", space)
    return space["kernel"]


STUBS = [TODO, stub, calls_stub, launcher_stub, closure_stub(), renamed_stub()]


@pytest.mark.parametrize("obj", STUBS, ids=range(len(STUBS)))
def test_todo_is_not_solved_yet(obj, capsys, monkeypatch, file):
    check("relu", obj)
    assert "relu: not solved yet" in capsys.readouterr().out
    assert not file.exists()
    monkeypatch.setenv("COURSE_LIB_STRICT", "1")
    with pytest.raises(CheckFailed, match="not solved yet"):
        check("relu", obj)


def test_finished_code_has_no_todo():
    for exercise in exercises().values():
        assert not contains_todo(exercise.solution)
    assert not contains_todo(np.maximum)


def test_todo_used_as_a_number_says_so():
    for use_it in (float, int, bool, lambda t: t + 1, lambda t: 2 * t, lambda t: t < 3):
        with pytest.raises(TypeError, match="still TODO"):
            use_it(TODO)
    assert repr(TODO) == "TODO"


@cuda.jit
def three_arguments(x, y, n):
    y[0] = n


@pytest.mark.parametrize(
    "obj, says",
    [
        (None, "None, which is what relu"),
        (good_relu[1, 32], "leave the brackets away"),
        (good_relu.py_func, "@cuda.jit missing"),
        (np.zeros(3), "type ndarray"),
        ("relu", "type str"),
        (three_arguments, r"relu takes \(x, y\), and yours takes \(x, y, n\)"),
    ],
    ids=["none", "configured", "plain", "array", "text", "arguments"],
)
def test_wrong_kind_of_object(obj, says):
    with pytest.raises(TypeError, match=says):
        check("relu", obj)


def test_unknown_name_gets_near_ones():
    with pytest.raises(UnknownExercise, match="'relu'") as caught:
        check("relo", good_relu)
    assert not str(caught.value).startswith(("'", '"'))
    with pytest.raises(UnknownExercise, match="there are"):
        hint("zzzzzz")
    with pytest.raises(TypeError, match="comes first"):
        check(good_relu, "relu")
    for function in (solution, hint):
        with pytest.raises(UnknownExercise):
            function("relo")


# ---- functions that launch nothing -----------------------------------------------------------


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


# ---- launchers -------------------------------------------------------------------------------


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


# ---- answers ---------------------------------------------------------------------------------


def test_answer_is_accepted(capsys, file):
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


@pytest.mark.parametrize("answer", [(TODO, TODO), ("second", TODO), lambda: (TODO, TODO)])
def test_unfinished_answer(answer, capsys):
    check("find_the_slow_one", answer)
    assert "not solved yet" in capsys.readouterr().out


# ---- arrays and time -------------------------------------------------------------------------


def test_fence_tells_where_it_was_hit():
    array = FencedArray((2, 3), np.float32, np.nan)
    assert array.broken_at() is None and array.view.shape == (2, 3)
    array.buffer[FENCE + 6] = 0
    assert array.broken_at() == 6
    array.buffer[FENCE - 2] = 0
    assert array.broken_at() == -2


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint8", "bool"])
def test_fences_take_every_dtype(dtype):
    array = FencedArray((3,), dtype, np.zeros(3, dtype))
    assert array.view.dtype == dtype and array.broken_at() is None


def test_write_past_the_end_is_seen(monkeypatch):
    # The simulator stops such a write itself, a GPU doesn't: write the way a GPU would.
    def writes_past_the_end(run, kernel, grid, block, x, y):
        y[...] = np.maximum(x, 0)
        run_y = y.base if y.base is not None else y
        run_y[FENCE + y.size] = 1

    exercise = exercises()["relu"]
    cases = [case(1, 32, x=np.ones(3, np.float32))]
    attempt = Attempt(exercise, good_relu, cases, 0)
    monkeypatch.setattr(checking.Simulator, "launch", writes_past_the_end)
    failure = attempt_case(attempt, cases[0], checking.Simulator("forward", 0))
    assert failure.problem == "outside" and failure.index == (3,)
    assert "past the end of y, which has 3 elements" in causes.observed(attempt, failure)


def test_nan_never_passes():
    exercise = exercises()["relu"]
    tolerance = Tolerance(1e6, 1e6, "anything goes")
    attempt_case_exercise = Exercise(
        "any", "t", good_relu, exercise.reference, exercise.cases, exercise.hints, tolerance
    )

    @cuda.jit
    def nan(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = np.float32(math.nan)

    each = case(1, 32, x=np.ones(3, np.float32))
    attempt = Attempt(attempt_case_exercise, nan, [each], 0)
    assert attempt_case(attempt, each, checking.Simulator("forward", 0)).problem == "values"


def test_gpu_stage_copies_there_and_back():
    # The steps of the GPU stage, with the simulator's own device arrays.
    exercise = exercises()["nchw_index"]
    cases = exercise.cases(np.random.default_rng(0))
    attempt = Attempt(exercise, exercise.solution, cases, 0)
    assert all(attempt_case(attempt, each, Gpu()) is None for each in cases)


def test_cases_sort_by_size_and_empty_ones_last():
    sizes = [case(1, 32, x=np.zeros(n)) for n in (0, 5, 1)]
    assert [each.inputs["x"].size for each in sorted(sizes, key=lambda c: c.size)] == [1, 5, 0]
    assert Case((2, 3), 4, {}).threads == 24


def spin():
    while True:
        pass


def test_deadline_leaves_the_alarm_clock_alone():
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    with pytest.raises(TimeUp), deadline(0.05):
        spin()
    assert before == (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0)


def test_a_deadline_lets_the_code_inside_clean_up():
    def burn(seconds):
        begin = time.process_time()
        while time.process_time() - begin < seconds:
            pass

    restored = []
    with pytest.raises(TimeUp), deadline(0.02):
        try:
            burn(10)
        finally:
            burn(3 * AGAIN_SECONDS)
            restored.append(True)
    assert restored == [True]


def test_deadlines_nest():
    with pytest.raises(TimeUp), deadline(0.2):
        with pytest.raises(TimeUp), deadline(0.05):
            spin()
        with deadline(60):
            pass
        spin()
    with deadline(0.05):
        time.sleep(0.1)  # waiting is not working


def test_deadline_in_another_thread():
    result = []

    def work():
        try:
            with deadline(0.05):
                spin()
        except TimeUp:
            result.append("stopped")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert result == ["stopped"]


# ---- use, hint, solution, progress -----------------------------------------------------------


def test_use_returns_what_passed_last(capsys):
    course = exercises()["relu"].solution
    assert use("relu", good_relu) is course
    check("relu", good_relu)
    assert use("relu", good_relu) is good_relu
    with pytest.raises(CheckFailed):
        check("relu", bad_relu)
    assert use("relu", good_relu) is course
    check("relu", good_relu)
    check("relu", stub)
    assert use("relu", stub) is course
    assert "Using your relu." in capsys.readouterr().out


def test_hints_go_on_and_end(capsys):
    hints = exercises()["relu"].hints
    for number, left in ((1, "2 left"), (2, "1 left"), (3, "the last")):
        hint("relu")
        out = capsys.readouterr().out
        assert f"Hint {number} of 3." in out and left in out
        assert record.load()["relu"]["hints"] == number
    hint("relu")
    out = capsys.readouterr().out
    assert "These were all 3" in out and hints[0] in out
    assert record.load()["relu"]["hints"] == 3


def test_solution_shows_its_source_and_is_recorded(capsys):
    solution("relu")
    assert capsys.readouterr().out.startswith("@cuda.jit\ndef relu(x, y):\n")
    assert record.load()["relu"]["solution_seen"] is True


def rows(text):
    return {line.split()[1]: line for line in text.splitlines()[2:-1]}


def test_progress_table(capsys, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    check("relu", good_relu)
    hint("relu")
    with pytest.raises(CheckFailed):
        check("sigmoid", good_relu)
    capsys.readouterr()
    progress()
    out = capsys.readouterr().out
    assert f"1 of {len(exercises())} exercises solved" in out
    table = rows(out)
    assert "✓ solved" in table["relu"] and "1970-01-01" in table["relu"]
    assert "1 of 3" in table["relu"]
    assert "tried" in table["sigmoid"] and "not started" in table["column_sum"]


def test_solved_stays_solved(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    check("relu", good_relu)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    with pytest.raises(CheckFailed):
        check("relu", bad_relu)
    check("relu", good_relu)
    entry = record.load()["relu"]
    assert entry.pop("kept")["name"] == "good_relu"
    assert entry == {"attempts": 3, "tried": "1970-01-02", "solved": "1970-01-01"}


def test_reset(capsys):
    check("relu", good_relu)
    hint("sigmoid")
    progress(reset="relu")
    assert set(record.load()) == {"sigmoid"}
    progress(reset="all")
    assert "sure=True" in capsys.readouterr().out and record.load()
    progress(reset="all", sure=True)
    assert record.load() == {}
    with pytest.raises(UnknownExercise):
        progress(reset="relo")
    for lesson in (99, -1, "relu"):
        with pytest.raises(ValueError, match="lesson must be 'all' or from 0 to"):
            progress(lesson)


# ---- the progress file -----------------------------------------------------------------------


def mark(name):
    record.update(name, lambda entry: entry.update(solved="2026-01-01"))


BROKEN = {
    "empty": b"",
    "cut short": b'{"course": "course_lib", "format": 1, "exerc',
    "binary": bytes(range(256)),
    "another's": b'{"my": "thesis"}',
    "a list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "no entries": b'{"course": "course_lib", "format": 1, "exercises": 3}',
    "bad entry": b'{"course": "course_lib", "format": 1, "exercises": {"relu": 1}}',
    "odd version": b'{"course": "course_lib", "format": "x", "exercises": {}}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("first", [record.load, lambda: mark("new")], ids=["read", "write"])
def test_broken_file_is_moved_aside_and_its_backup_used(file, content, first, capsys):
    mark("relu")
    mark("sigmoid")
    file.write_bytes(content)
    first()
    assert "can't be read" in capsys.readouterr().out
    (aside,) = file.parent.glob("progress.broken-*.json")
    assert aside.read_bytes() == content
    # The backup is the version before the last; at most the last change is lost.
    assert "relu" in record.load()
    mark("double")
    assert {"relu", "double"} <= set(json.loads(file.read_text())["exercises"])


def test_broken_files_are_all_kept(file):
    for content in (b"one", b"two"):
        file.write_bytes(content)
        record.load()
    assert {p.read_bytes() for p in file.parent.glob("progress.broken-*")} == {b"one", b"two"}


def test_newer_file_is_left_alone(file, capsys):
    content = b'{"course": "course_lib", "format": 2, "exercises": {}, "more": 1}'
    file.write_bytes(content)
    check("relu", good_relu)
    hint("relu")
    out = capsys.readouterr().out
    assert out.count("newer version") == 1
    assert file.read_bytes() == content and not list(file.parent.glob("*broken*"))
    assert record.load()["relu"]["hints"] == 1


def test_unwritable_place_keeps_progress_in_memory(tmp_path, monkeypatch, capsys):
    blocker = tmp_path / "a_file"
    blocker.write_text("")
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(blocker / "progress.json"))
    check("relu", good_relu)
    hint("relu")
    out = capsys.readouterr().out
    assert out.count("only until the kernel stops") == 1
    assert record.load()["relu"]["hints"] == 1 and "solved" in record.load()["relu"]


def test_read_only_file_keeps_what_it_has(file, monkeypatch, capsys):
    mark("relu")
    before = file.read_bytes()

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    # Not by chmod: the tests may run as root, whom it doesn't stop.
    with monkeypatch.context() as patch:
        patch.setattr(record.os, "replace", refuse)
        mark("sigmoid")
        assert set(record.load()) == {"relu", "sigmoid"}
        assert "Permission denied" in capsys.readouterr().out
    assert file.read_bytes() == before
    assert sorted(p.name for p in file.parent.iterdir() if p.name.startswith(".")) == []
    mark("column_sum")
    assert set(json.loads(file.read_text())["exercises"]) == {"relu", "sigmoid", "column_sum"}


def test_ctrl_c_while_saving_leaves_the_old_file(file, monkeypatch):
    mark("relu")
    before = file.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(record.os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mark("sigmoid")
    assert file.read_bytes() == before
    mark("sigmoid")
    assert set(record.load()) == {"relu", "sigmoid"}


WRITER = """
import sys
sys.path.insert(0, {root!r})
from course_lib.teach import record
for number in range({count}):
    record.update(f"{{sys.argv[1]}}{{number}}", lambda entry: entry.update(hints=1))
    if number == 0:
        print("writing", flush=True)
"""


def writer(name, count):
    code = WRITER.format(root=str(ROOT), count=count)
    return subprocess.Popen(
        [sys.executable, "-c", code, name], env=os.environ, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_lose_nothing(file):
    processes = [writer(name, 40) for name in "ab"]
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "can't be used" not in out
    assert set(record.load()) == {f"{name}{number}" for name in "ab" for number in range(40)}


def test_killed_while_writing(file):
    mark("relu")
    for attempt in range(3):
        process = writer(f"k{attempt}_", 100_000)
        assert process.stdout.readline() == "writing\n"
        time.sleep(0.03 * attempt)
        process.kill()
        process.wait()
        process.stdout.close()
        entries = json.loads(file.read_text())["exercises"]
        assert "relu" in entries and f"k{attempt}_0" in entries
    mark("sigmoid")  # the lock died with its owner
    assert "sigmoid" in json.loads(file.read_text())["exercises"]


def test_default_place_is_the_project(monkeypatch):
    monkeypatch.delenv("COURSE_LIB_PROGRESS")
    assert record.path() == ROOT / "progress.json"
    monkeypatch.setattr(record.os, "access", lambda *_: False)
    assert record.path().parent.name == "course_lib" and ROOT not in record.path().parents


# ---- real kernels ----------------------------------------------------------------------------

REAL = """
import course_lib
import numpy as np
from course_lib import cuda
from course_lib.teach import check
from course_lib.teach.exercise import EXACT, Exercise, exercises

assert not course_lib.SIMULATED
relu = exercises()["relu"]
assert type(relu.solution).__name__ == "CUDADispatcher"
check("relu", relu.solution)

def launch(x):
    y = np.empty_like(x)
    relu.solution[max(1, -(-x.size // 32)), 32](x, y)
    relu.solution.forall(x.size)(x, y)
    return y

exercises()["launch"] = Exercise("launch", "t", launch, relu.reference, relu.cases, relu.hints,
                                 EXACT, kind="launcher")
check("launch", launch)
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="numba-cuda can't be installed on macOS")
def test_real_kernels_are_checked_in_the_simulator():
    environment = {**os.environ, "COURSE_LIB_SIMULATOR": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    paths = filter(None, [os.environ.get("PYTHONPATH")])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].startswith("✓ relu")
    assert run.stdout.splitlines()[1].startswith("✓ launch")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in KERNELS if exercises()[n].kind != "function"])
def test_solution_passes_on_the_gpu(name, capsys, recwarn):
    check(name, exercises()[name].solution)
    assert not recwarn.list
    assert capsys.readouterr().out.splitlines()[0].endswith(", then on the GPU")
