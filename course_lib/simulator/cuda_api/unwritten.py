"""Which bytes of the arrays that `cuda.device_array` made nobody has written.

Only what writes in sight is followed: copies and assignments of the host, and kernels under the
sanitizer. Whatever else may write an array makes it count as written.
"""

import weakref

import numpy as np

_kept = {}  # id of the array that owns the memory -> (weak reference to it, a bool for each byte)


def begin(array):
    """`array`, fresh from its allocation, has been written nowhere."""
    owner = _owner(array)
    key = id(owner)
    _kept[key] = weakref.ref(owner, lambda _: _kept.pop(key, None)), np.ones(owner.nbytes, bool)


def of(array, first, nbytes):
    """The bools of `nbytes` bytes of `array`'s allocation, from the address `first`, to be read and
    changed; None if nothing is known of it.
    """
    owner = _owner(array)
    found = _kept.get(id(owner))
    if found is None:
        return None
    offset = first - _address(owner)
    return found[1][offset:offset + nbytes]


def written(array):
    """All elements of `array` have been written; they lie together, in any order."""
    marks = of(array, _address(array), array.nbytes)
    if marks is not None:
        marks[...] = False


def forget(values):
    """Somebody out of sight may write the arrays among `values`, and those in its tuples."""
    if _kept:
        for value in values:
            if isinstance(value, np.ndarray):
                _kept.pop(id(_owner(value)), None)
            elif isinstance(value, tuple):
                forget(value)


def _owner(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array):
    return array.__array_interface__["data"][0]
