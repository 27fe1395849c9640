"""Arrays for functions that could not be rewritten: they check each index themselves."""

import greenlet
import numpy as np

from . import engine
from .guards import check_index


def pause():
    """Called at each access of such a function: let other threads run now and then.

    Its loops cannot be seen, and one of them may wait for another thread to write.
    """
    thread = getattr(greenlet.getcurrent(), "thread", None)
    if thread is not None:
        thread.accesses += 1
        if thread.accesses % engine.SPIN_STRIDE == 0:
            thread.switch(engine.SPIN)


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
