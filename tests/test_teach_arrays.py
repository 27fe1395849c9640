"""What a check stands on: fenced arrays, NaN, and the time that code may take."""

import contextlib
import gc
import math
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from relus import good_relu

from course_lib import cuda
from course_lib.teach.checking import check as checking
from course_lib.teach.checking.deadline import AGAIN_SECONDS, TimeUp, deadline
from course_lib.teach.checking.engines import Gpu
from course_lib.teach.checking.fences import FENCE, NAN, FencedArray, poisoned_allocation
from course_lib.teach.checking.running import Attempt, attempt_case
from course_lib.teach.exercise import Case, Exercise, Tolerance, case, exercises
from course_lib.teach.explaining import causes

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("progress_file")


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


def test_what_a_launcher_allocates_holds_no_result_of_an_earlier_run():
    with poisoned_allocation(NAN):
        made = np.empty(3), torch.empty(3), torch.empty_like(torch.ones(3, dtype=torch.float16))
        assert all(np.isnan(np.asarray(each)).all() for each in made)
        assert torch.empty(2, dtype=torch.int32, device="meta").shape == (2,)
    assert torch.empty is EMPTY


EMPTY = torch.empty


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

def test_a_ring_leaves_no_poisoned_allocation_behind():
    """Whenever it comes: while allocations are exchanged, while they are put back, or between."""
    places = [(library, name) for library in (np, torch) for name in ("empty", "empty_like")]
    original = [getattr(*place) for place in places]
    for rings in range(150):
        with contextlib.suppress(TimeUp), deadline(2e-3 + rings * 1e-5):
            while True:
                with poisoned_allocation(NAN):
                    pass
    gc.collect()  # what a ring between two calls has left to be put back
    assert [getattr(*place) for place in places] == original


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
    begin = time.monotonic()
    with pytest.raises(TimeUp), deadline(0.3):
        with deadline(60):
            time.sleep(100)  # no work, and time all the same
    assert time.monotonic() - begin < 60


def test_deadline_in_another_thread():
    result = []

    def work():
        try:
            with deadline(0.05):
                spin()
        except TimeUp:
            result.append("stopped")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(250)
    assert result == ["stopped"]
