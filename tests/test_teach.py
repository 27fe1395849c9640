"""The course's own exercises, and how a check behaves."""

import cProfile
import gc
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - lesson 04 needs it, and importing it is no check's time
from relus import bad_relu, good_relu

from course_lib import cuda
from course_lib.simulator.engine.options import ORDERS
from course_lib.teach import TODO, CheckFailed, UnknownExercise, check, hint, solution
from course_lib.teach import exercises as lessons
from course_lib.teach.checking import check as checking
from course_lib.teach.checking.deadline import TimeUp, deadline
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.exercise import Exercise, exercises
from course_lib.teach.late_torch import warm_up
from course_lib.teach.todo import contains_todo

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def file(progress_file):
    return progress_file


# ---- the exercises -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_kernel_has_run():
    """On a GPU, the first kernel of a process pays for the CUDA context and loads the compiler.

    A learner pays for both before the first exercise: the lesson launches kernels of its own. So it
    does for PyTorch's import and first gradient.
    """
    x = np.ones(32, np.float32)
    good_relu[1, 32](x, np.empty_like(x))
    warm_up()


#: Calls of Python functions in 2 seconds of a check on a laptop: 6.0 to 6.9 million a second.
CALLS = 12_500_000


def slowness():
    """How many times as long as usual small checks take on this core now, at least 1."""
    begin = time.process_time()
    for _ in range(5):
        check("negative", exercises()["negative"].solution)
    return max(1, (time.process_time() - begin) / 0.65)  # seconds on a laptop


@pytest.mark.parametrize("name", exercises())
def test_solution_passes_within_two_seconds(name, a_kernel_has_run, capsys, monkeypatch):
    # A check that its limit stops begins again, and would count twice on a slow machine.
    monkeypatch.setattr("course_lib.teach.checking.check.TIME_LIMIT", 60)
    begin = time.process_time()
    check(name, exercises()[name].solution)
    seconds = time.process_time() - begin
    assert capsys.readouterr().out.startswith(f"✓ {name} — ")
    if seconds >= 2:  # it may be the machine, which others slow down
        assert seconds / slowness() < 3  # of whatever is no call, too
        profile = cProfile.Profile(builtins=False, subcalls=False)
        profile.runcall(check, name, exercises()[name].solution)
        assert sum(each.callcount for each in profile.getstats()) < CALLS


KERNELS = [name for name, exercise in exercises().items() if exercise.kind != "answer"]
#: Inputs with equal numbers on purpose: counts (of no pixels all are 0), sums that are 1 beside a
#: large number, ties, calls that begin or end together, weights of 0.
EQUAL = {
    "dice_gradient": ("sums",), "cross_entropy_backward": ("s",), "scaled_softmax_backward": ("y",),
    "merge_attention": ("o1", "o2"),  # 0 where a part has seen nothing
    "flash_attention_dkdv": ("delta",), "flash_attention_dq": ("delta",),  # the same
    "softmax_dropout_backward": ("s",), "top_k": ("logits",), "self_times": ("begin", "end"),
    "adam_step": ("g", "m", "v"), "unscale": ("g",),  # gradients of 0
    "tile_step": ("s",),  # 0 where nothing was seen yet
    "mma_tile": ("a", "b"),  # of ten bits, of which there are not so many
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_cases_are_many_and_only_their_values_are_random(name):
    exercise = exercises()[name]
    one, other = (exercise.cases(np.random.default_rng(seed)) for seed in (1, 2))
    assert len(one) >= 8
    alike = [_launch(a) == _launch(b) for a, b in zip(one, other, strict=True)]
    assert alike.count(False) <= len(alike) / 2  # those whose size is drawn, the largest among them
    for a in one:
        assert a.threads <= 2048  # the simulator's time; and more than any round number below
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


# ---- check ---------------------------------------------------------------------------------


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


def test_kernels_run_in_every_thread_order_of_the_simulator(monkeypatch, capsys):
    orders = Counter()

    def counted(order, *arguments, **options):
        orders[order] += 1
        return Simulator(order, *arguments, **options)

    monkeypatch.setattr(checking, "Simulator", counted)
    monkeypatch.setattr(checking, "STAGES", checking.STAGES[:1])
    check("relu", good_relu)
    assert set(orders) == set(ORDERS)
    assert f"{orders.total()} cases: {orders['forward']} inputs, " in capsys.readouterr().out


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
    begin = time.process_time()
    with pytest.raises(CheckFailed, match="for ever|did not end"):
        check("relu", space["endless"])
    assert time.process_time() - begin < checking.TIME_LIMIT + 5


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
    """But not before the lost one has been told."""
    lost = []

    def tell(found):
        work(0.3)  # it would ring several times
        lost.append(found.exc_type)

    monkeypatch.setattr(sys, "unraisablehook", tell)

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


@pytest.mark.skipif(not hasattr(signal, "ITIMER_VIRTUAL"), reason="rings by signal on POSIX only")
def test_a_callback_of_the_garbage_collector_is_not_interrupted():
    """Python would lose the exception, and tell of it in whatever made the garbage."""
    finished = []

    def work(phase, _):
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        finished.append(phase)

    gc.callbacks.append(work)
    try:
        with pytest.raises(TimeUp), deadline(0.05):
            gc.collect()
            time.sleep(5)
    finally:
        gc.callbacks.remove(work)
    assert finished == ["start", "stop"]


@pytest.mark.skipif(not hasattr(signal, "ITIMER_VIRTUAL"), reason="rings by signal on POSIX only")
def test_what_other_threads_take_does_not_count():
    def work():
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass

    other = threading.Thread(target=work)
    with deadline(0.2):
        other.start()
        other.join()


@pytest.mark.skipif(not hasattr(signal, "ITIMER_VIRTUAL"), reason="rings by signal on POSIX only")
def test_what_sleeps_for_long_is_stopped():
    with pytest.raises(TimeUp), deadline(0.05):
        time.sleep(60)


@pytest.mark.parametrize("limit", [0.002, 0.004, 0.006])
def test_time_that_is_up_between_two_runs_is_told_as_well(monkeypatch, limit):
    monkeypatch.setattr(checking, "TIME_LIMIT", limit)
    gc.disable()  # a ring in a collector's callback is lost, and the next comes too late here
    try:
        with pytest.raises(CheckFailed, match="did not end"):
            check("global_avg_pool", exercises()["global_avg_pool"].solution)
    finally:
        gc.enable()


# ---- what is no solution -------------------------------------------------------------------


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


def test_every_exercise_of_the_lessons_is_found_by_its_name():
    found = {}
    for lesson in sorted(each.name for each in pkgutil.iter_modules(lessons.__path__)):
        values = vars(importlib.import_module(f"{lessons.__name__}.{lesson}")).values()
        found |= {each.name: each for each in values if isinstance(each, Exercise)}
    assert list(exercises().items()) == list(found.items())


FIRST = """
import sys
from course_lib.teach import check
from course_lib.teach.exercise import exercises

check("relu", exercises()["relu"].solution)
loaded = {name for name in sys.modules if "lesson_" in name}
assert loaded == {"course_lib.teach.exercises.lesson_01"}, loaded
assert not {"numba", "torch", "course_lib.autograd"} & sys.modules.keys()
assert list(exercises()["relu"].solution.overloads)
assert "numba.core.types" in sys.modules
"""


def test_a_first_check_imports_its_own_lesson_and_not_numba():
    run = subprocess.run(
        [sys.executable, "-c", FIRST], env={**os.environ, "COURSE_LIB_SIMULATOR": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


# ---- real kernels --------------------------------------------------------------------------

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
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].startswith("✓ relu")
    assert run.stdout.splitlines()[1].startswith("✓ launch")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in KERNELS if exercises()[n].kind != "function"])
def test_solution_passes_on_the_gpu(name, capsys, recwarn):
    check(name, exercises()[name].solution)
    assert not [str(warning.message) for warning in recwarn.list]
    assert capsys.readouterr().out.splitlines()[0].endswith(", then on the GPU")
