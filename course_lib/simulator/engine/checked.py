"""Indices that are checked, and arrays that check their own: for functions without source."""

import numpy as np

from course_lib.simulator.engine import greenlets


def check_index(array, index, axis=None):
    """`index` if it is allowed for `array`, else IndexError. Called when a fast check did not pass.

    Python takes a negative index for one from the end; a kernel that computes one has a bug.
    Tuples and other Python objects keep Python's meaning.
    """
    if not isinstance(array, np.ndarray):
        return index
    if type(index) is not tuple:
        if isinstance(index, (int, np.integer)) and index < 0:
            raise IndexError("negative index")
        return index
    for part in index:
        if isinstance(part, (int, np.integer)) and part < 0:
            raise IndexError("negative index")
    return index


def pause():
    """Called at each access of a function that could not be rewritten: see `Thread.pause`."""
    thread = greenlets.current()
    if thread is not None:
        thread.pause()


class CheckedArray(np.ndarray):
    """An ndarray that refuses negative indices; NumPy refuses those past the end."""

    def __getitem__(self, index):
        array = self
        pause()
        check_index(array, index)
        return np.ndarray.__getitem__(array, index)

    def __setitem__(self, index, value):
        array = self
        check_index(array, index)
        np.ndarray.__setitem__(array, index, value)

    def __repr__(self):
        return repr(self.view(np.ndarray))

    def __str__(self):
        return str(self.view(np.ndarray))


def checked(value):
    """`value`, checking its indices if it is an array."""
    return value.view(CheckedArray) if type(value) is np.ndarray else value
