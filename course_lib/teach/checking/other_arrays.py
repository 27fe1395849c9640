"""The same lines with another library's arrays: for the derivatives of lesson 12.

A function that takes any library's arrays is run three times: with NumPy's, with PyTorch's on the
device "meta", which are like a GPU's in that no function of NumPy can read them, and with
PyTorch's on the CPU, which have the numbers that the results are compared by.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from course_lib.teach.checking.running import Run
from course_lib.teach.late_torch import torch


class OtherArrays(TypeError):
    """What was right with NumPy's arrays is not with another library's."""


def on_both_kinds(function: Callable, *arguments: object) -> object:
    """Call it with NumPy's arrays, then with PyTorch's; return the first result."""
    found = function(*arguments)
    for device in ("meta", "cpu"):
        other = [
            torch.from_numpy(a.copy()).to(device) if isinstance(a, np.ndarray) else a
            for a in arguments
        ]
        try:
            theirs = function(*other)
        except Exception as error:
            text = f"right with NumPy's arrays, but with another library's: {error}"
            raise OtherArrays(text).with_traceback(error.__traceback__) from None
        if len(several(found)) != len(several(theirs)):
            raise OtherArrays("with another library's arrays it returned another number of them")
        for one, two in zip(several(found), several(theirs), strict=True):
            if isinstance(one, np.ndarray | np.generic) and one.dtype == arguments[0].dtype:
                _require_same(one, two)  # else it is wrong with NumPy's arrays already
    return found


def _require_same(one: np.ndarray, two: object) -> None:
    """Raise unless a result with PyTorch's arrays is what it is with NumPy's."""
    if not isinstance(two, torch.Tensor):
        raise OtherArrays(
            f"with another library's arrays it returned {kind_of(two)}, which is not one of them"
        )
    if (tuple(two.shape), str(two.dtype)) != (one.shape, f"torch.{one.dtype}"):
        raise OtherArrays(
            f"with another library's arrays its result is {two.dtype} of shape "
            f"{tuple(two.shape)}, with NumPy's {one.dtype} of shape {one.shape}"
        )
    if two.device.type == "cpu":
        theirs, size = two.detach().numpy(), np.abs(one).max(initial=0)
        wrong = np.flatnonzero(~(np.abs(theirs - one) <= 1e-4 * size) & np.isfinite(one))
        if wrong.size:
            place = tuple(map(int, np.unravel_index(wrong[0], one.shape)))
            raise OtherArrays(
                "with another library's arrays of the same numbers it finds others: at "
                f"{list(place)} {theirs[place]:.6g}, with NumPy's {one[place]:.6g}"
            )


def several(found: object) -> tuple:
    """Return what a function returned as a tuple, also where it is one thing alone."""
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def backward_on_both_kinds(function: Callable, run: Run) -> object:
    """Call a backward function with the case's arrays."""
    return on_both_kinds(function, *(getattr(run, name) for name in run.case.inputs))


def summed_on_both_kinds(function: Callable, run: Run) -> object:
    """Call it with dy and the shape of the input that was broadcast, as a tuple."""
    dy = np.asarray(run.dy)
    shape = tuple(int(n) for n in run.like.shape)
    found = on_both_kinds(function, dy, shape)
    if not isinstance(found, np.ndarray | np.generic):
        return found
    if found.dtype != dy.dtype:
        raise ValueError(f"dy is {dy.dtype}, and dx is {found.dtype}")
    return found.astype(np.float32)


def kind_of(value: object) -> str:
    """Return what kind of thing it is, in words."""
    return "nothing (None)" if value is None else f"one of type {type(value).__name__}"
