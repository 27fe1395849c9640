"""Arrays that refuse to become float64, and say why they would: for lesson 12.

NumPy's rules of promotion make float64 in many ways, none of which says a word. `without_float64`
is the `call` of an exercise: it runs the learner's function on arrays that raise `Float64` in the
line where the first of them would be made.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import numpy as np

_asarray = np.asarray  # which stays what it is while NumPy's functions are watched


class Float64(TypeError):
    """An array of float64 was about to be made."""


class Narrow(np.ndarray):
    """An array that raises `Float64` where something computed with it would be float64."""

    def __array_finalize__(self, other):
        if other is not None and self.dtype == np.float64:
            raise Float64(f"here {other.dtype} is turned into float64")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        inputs = [_plain(x) for x in inputs]
        if "out" in options:
            options["out"] = tuple(map(_plain, options["out"]))
        found = getattr(ufunc, method)(*inputs, **options)
        if found is None:  # of `at`
            return None
        several = found if isinstance(found, tuple) else (found,)
        if any(_asarray(each).dtype == np.float64 for each in several):
            raise Float64(_why(ufunc, method, inputs))
        several = tuple(_asarray(each).view(Narrow) for each in several)
        return several if isinstance(found, tuple) else several[0]


def _plain(x):
    return x.view(np.ndarray) if isinstance(x, Narrow) else x


def _why(ufunc, method, inputs) -> str:
    """Return what in the operation made it float64."""
    if method == "reduce":
        return (
            f"this mean or sum of {inputs[0].dtype} is float64, as every mean of whole numbers is "
            "that is not told its dtype"
        )
    for x in inputs:
        if isinstance(x, np.float64):  # a kind of Python's float, too, so it comes first
            return (
                f"np.float64({x:.4g}) is a number of NumPy, with a dtype, and makes float64 of "
                "what it meets; a number of Python has none"
            )
        if isinstance(x, np.ndarray) and x.dtype == np.float64:
            return "an array of float64 that was made before makes float64 of what it meets"
    dtypes = [str(x.dtype) for x in inputs if isinstance(x, np.ndarray | np.generic)]
    if len(dtypes) == 1:
        return f"{ufunc.__name__} of {dtypes[0]} gives float64"
    return f"{' and '.join(dtypes)} together give float64"


class _Watched:
    """One of NumPy's functions: whatever array it makes for the learner's lines is looked at.

    What it makes of no array that refuses, of a list or of a number, would refuse nothing itself.
    """

    def __init__(self, name, function):
        self.name, self.function = name, function

    def __call__(self, *args, **options):
        found = self.function(*args, **options)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "numpy":
            return found
        return _looked_at(found, self.name)

    def __getattr__(self, name):  # of ufuncs: np.add.reduce
        value = getattr(self.function, name)
        return _Watched(f"{self.name}.{name}", value) if callable(value) else value


def _looked_at(found, name):
    """Return what a function of NumPy made as arrays that refuse. Raises Float64."""
    if isinstance(found, tuple | list):
        several = [_looked_at(each, name) for each in found]
        return found._make(several) if hasattr(found, "_make") else type(found)(several)
    if not isinstance(found, np.ndarray):
        return found
    if found.dtype == np.float64:
        raise Float64(f"np.{name} makes an array of float64 here")
    return found.view(Narrow)


@contextlib.contextmanager
def _numpy_watched() -> Iterator[None]:
    """Let all functions of NumPy raise `Float64` as well."""
    before = {
        name: value
        for name, value in vars(np).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("_")
    }
    for name, value in before.items():
        setattr(np, name, _Watched(name, value))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(np, name, value)


def without_float64(function, run):
    """Call it with the case's arrays, each of which refuses to become float64."""
    with _numpy_watched():
        found = function(*(getattr(run, name).view(Narrow) for name in run.case.inputs))
    return _plain(found)
