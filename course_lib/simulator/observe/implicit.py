"""Accesses without brackets: iteration, unpacking, `in`, methods of arrays, fields of records.

numba compiles `for v in x`, `a, b = x[i]`, `v in x`, `x.sum()`, `np.argmax(x)`, `x.flat`,
`np.ndenumerate(x)`, `x[i].field` and their kin. Each becomes loads and stores of single elements
here, at the site of the expression, so that whoever carries out an access sees all of them.
"""

import builtins

import numpy as np

from course_lib.simulator.engine import arithmetic
from course_lib.simulator.observe.observer import Watched

#: Methods that give another view of the array, and read nothing.
_VIEWS = frozenset({"reshape", "transpose", "view", "ravel", "squeeze", "swapaxes"})
#: Functions that take their arguments' elements one after another, as a loop does.
ITERATING = frozenset(getattr(builtins, name) for name in (
    "all", "any", "enumerate", "filter", "iter", "list", "map", "max", "min", "reversed", "set",
    "sorted", "sum", "tuple", "zip"))


def reads_arrays(function):
    """True if `function`, of Python or NumPy, may read elements of the arrays it is given."""
    if isinstance(function, type) and function.__module__ != "builtins":
        return function in (np.ndenumerate, np.nditer)
    if function.__class__ is np.ufunc:
        return False
    return function in ITERATING or (
        callable(function) and (getattr(function, "__module__", None) or "").startswith("numpy"))


class Flat:
    """`x.flat`: the elements of an array in order, loaded and stored one by one."""

    def __init__(self, execution, thread, number, array):
        self.execution, self.thread, self.number = execution, thread, number
        self.array, self.size = array, array.size

    def place(self, i):
        """The index in the array of element `i`, inside or not."""
        if 0 <= i < self.size:
            return tuple(int(part) for part in np.unravel_index(i, self.array.shape))
        # As far outside along the first axis as `i` is outside of all.
        row = self.size // self.array.shape[0] if self.size else 1
        return (int(i) // row, *(0,) * (self.array.ndim - 1))

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.execution.load(self.thread, self.number, self.array, self.place(i))

    def __setitem__(self, i, value):
        self.execution.store(self.thread, self.number, value, self.array, self.place(i))

    def __iter__(self):
        return (self[i] for i in range(self.size))


class Implicit:
    """The part of `execution.Execution` for accesses without brackets."""

    def over(self, thread, number, value):
        """What a loop or an unpacking goes over: rows, or elements that are loaded in turn."""
        if value.__class__ is Watched and value.ndim:
            return (self.load1(thread, number, value, i) for i in range(len(value)))
        return value

    def every(self, thread, number, value):
        """What `in` looks at: every element of an array."""
        if value.__class__ is Watched:
            return (self.load(thread, number, value, index) for index in np.ndindex(value.shape))
        return value

    def call(self, thread, number, function, *args, **kwargs):
        """A call of a function for which `reads_arrays`."""
        if function in ITERATING:
            args = [self.over(thread, number, value) for value in args]
        elif args and args[0].__class__ is Watched and function is np.ndenumerate:
            return ((index, self.load(thread, number, args[0], index))
                    for index in np.ndindex(args[0].shape))
        elif args and args[0].__class__ is Watched and function is np.nditer:
            # Each is an array without axes: nothing is read until its element is asked for.
            return (args[0][(*index, ...)] for index in np.ndindex(args[0].shape))
        else:
            args = [self.whole(thread, number, value) for value in args]
        return function(*args, **kwargs)

    def whole(self, thread, number, value):
        """`value`; if it is an array, every element of it has been loaded."""
        if value.__class__ is not Watched:
            return value
        for name in value.dtype.names or ():
            self.whole(thread, number, value[name])
        if value.dtype.names is None:
            for _ in self.every(thread, number, value):
                pass
        return value.view(np.ndarray)

    def method(self, thread, number, value, name, *args, **kwargs):
        """`value.name(*args)`."""
        if value.__class__ is not Watched or name in _VIEWS:
            return getattr(value, name)(*args, **kwargs)
        if name == "fill":
            self.store(thread, number, args[0], value, ...)
            return None
        return getattr(self.whole(thread, number, value), name)(*args, **kwargs)

    # -- fields of records -----------------------------------------------------------------------

    def field(self, thread, number, value, name):
        """`value.name`, and `value["name"]` of a record or an array of records."""
        if not isinstance(value, np.ndarray):
            return getattr(value, name)
        if value.dtype.names is None or name not in value.dtype.names:
            if name == "flat" and value.__class__ is Watched:
                return Flat(self, thread, number, value)
            return getattr(value, name)
        part = value[name]
        if part.ndim or part.dtype.names is not None:
            return part
        return self.load(thread, number, part, ())

    def store_field(self, thread, number, stored, value, name):
        """`value.name = stored`."""
        if isinstance(value, np.ndarray) and name in (value.dtype.names or ()):
            part = value[name]
            self.store(thread, number, stored, part, ... if part.ndim else ())
        else:
            arithmetic.store_field(value, name, stored)
