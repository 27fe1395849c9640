"""Calls of functions that take plain numbers, as a notebook makes them: an Exercise's `call`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from course_lib.teach.checking.running import Run


def number_of(function: Callable, run: Run) -> object:
    """Call a function of numbers that returns a whole one."""
    found = function(*_numbers(run))
    return np.int64(found) if type(found) is int else found


def pair_of(function: Callable, run: Run) -> object:
    """Call a function of numbers that returns two of them."""
    found = function(*_numbers(run))
    if not isinstance(found, tuple | list):
        return found
    return tuple(np.float64(each) if isinstance(each, int | float) else each for each in found)


def with_plain_numbers(function: Callable, run: Run, *names: str) -> object:
    """Call it with these inputs in order: arrays as they are, numbers as Python's."""
    inputs = run.case.inputs
    return function(
        *(getattr(run, name) if np.ndim(inputs[name]) else inputs[name].item() for name in names)
    )


def _numbers(run: Run) -> list[object]:
    return [value.item() for value in run.case.inputs.values()]
