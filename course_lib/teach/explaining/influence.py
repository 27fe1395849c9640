"""Which inputs have a part in a wrong result, and how large a part: found by changing them.

Each element of an input is changed in turn, and the change of the output compared with what it
should be. That says something where the right result is linear in the input, as sums are, and of
histograms, whose inputs are integers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from course_lib.simulator.errors import OutOfBounds
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.running import Attempt, Failure, Run
from course_lib.teach.exercise import Case

#: More elements than this would take too long: each is a launch.
MOST = 256


def influence(attempt: Attempt, failure: Failure, name: str) -> np.ndarray | None:
    """Return how much each element of the input `name` counts, relative to how much it should.

    0 where a change changes nothing, 1 where all is well, 2 where an element counts twice; NaN
    where the reference doesn't depend on it. None if it can't be told.
    """
    run, x = failure.run, np.asarray(failure.run.case.inputs[name])
    if not isinstance(run.engine, Simulator) or x.ndim == 0 or not 0 < x.size <= MOST:
        return None  # a plain number says how large something is: it has no part in a sum
    counted = x.dtype.kind != "f"
    if counted and not _counts(run, x):
        return None  # nor has an integer, where nothing is counted: it may be a place, or a choice
    before = {key: np.asarray(run.got[key], np.float64) for key in run.expected}
    if not all(np.isfinite(each).all() for each in before.values()) or not _linear(run, name):
        return None
    shares = np.full(x.shape, np.nan)
    step = x.dtype.type(1) if counted else np.float32(1) + abs(x).max()
    for place in np.ndindex(x.shape):
        again = _again(attempt, run, name, place, step)
        if again is None:
            return None  # the integers are places, such as a row's class: one more is none
        shares[place] = _share(run, before, again, counted)
        if shares[place] == 0 and not counted:
            # What is compared may move nothing on its way up, and all on its way down.
            again = _again(attempt, run, name, place, -step)
            if again is None or any((again.got[key] != before[key]).any() for key in before):
                shares[place] = np.nan
    return shares


def _again(attempt: Attempt, run: Run, name: str, place: tuple[int, ...], step) -> Run | None:
    """Run it with one element of an input changed by `step`; None for what it can't take."""
    changed = np.asarray(run.case.inputs[name]).copy()
    if changed.dtype.kind == "f":
        changed[place] += step
    else:
        changed[place] ^= step
    case = _changed(run, name, changed)
    try:
        again = Run(run.exercise, case, Simulator(run.engine.order, attempt.seed))
        again.execute(attempt.obj)
    except (OutOfBounds, IndexError, ValueError):
        return None
    return again


def _counts(run: Run, x: np.ndarray) -> bool:
    """Tell whether a result counts the elements of `x`, as a histogram does."""
    return run.exercise.kind != "function" and any(
        each.size > 1 and (each >= 0).all() and each.sum() == x.size
        for each in run.expected.values()
    )


def _linear(run: Run, name: str) -> bool:
    """Tell whether the reference goes as far up as down when the input does; True for integers."""
    x = run.case.inputs[name]
    if x.dtype.kind in "iu":
        return True
    if x.dtype.kind != "f" or not np.isfinite(x).all():
        return False
    step = 1 + np.abs(x).max()
    with np.errstate(all="ignore"):  # so far from the inputs there may be no number
        up, down = (
            run.exercise.expected(_changed(run, name, x + sign * step)) for sign in (1, -1)
        )
    # Twice the middle, up to the rounding of the steps themselves.
    return all(
        np.allclose(up[key] + down[key], 2 * expected, rtol=1e-4, atol=1e-4 * float(step))
        for key, expected in run.expected.items()
    )


def _changed(run: Run, name: str, values: np.ndarray) -> Case:
    return dataclasses.replace(run.case, inputs={**run.case.inputs, name: values})


def _share(run: Run, before: dict[str, np.ndarray], again: Run, counted: bool) -> float:
    """Return the change of the result over the change of the reference, where that is largest.

    counted  the input is an integer: what counts it changes by one
    """
    for name, expected in run.expected.items():
        if expected.size == 0:
            continue
        with np.errstate(invalid="ignore"):
            wanted = again.expected[name] - expected
        wanted = np.where(np.isnan(wanted), 0, wanted)  # what is infinite stays infinite
        at = np.unravel_index(np.argmax(np.abs(wanted)), wanted.shape)
        if counted and abs(wanted[at]) != 1:
            return np.nan
        if abs(wanted[at]) > 1e-4:  # less could be lost in rounding
            with np.errstate(invalid="ignore"):
                moved = np.asarray(again.got[name], np.float64) - before[name]
            # A change somewhere else is no part of this element, and still not nothing.
            return float(moved[at] / wanted[at]) if moved[at] or not moved.any() else np.nan
    return np.nan
