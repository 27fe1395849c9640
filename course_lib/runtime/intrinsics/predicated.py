"""16 bytes, or one element, loaded where a condition holds, without a branch.

A load behind an `if` holds up the loads that follow: the compiler converts 16-bit elements right
there, and so waits for them. These have the condition in the instruction itself, so that the loads
of a loop can all be on their way before the first is used.

=================================================== ============================================
`load_vector_if(target, array, i, valid)`           as `load_vector` if `valid`; else zeros, and
                                                    `i` is not looked at (PTX @p ld.global)
`load_vector_once_if(target, array, i, valid)`      the same, as `load_vector_once`
`load_if(array, i, valid)`                          array[i], as `load`, if `valid`; else 0
=================================================== ============================================

Machine code in `ptx.predicated`, and twins, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import VECTOR_BYTES, _check_alignment, twins


def _load_vector_if(target, array, i, valid):
    width = VECTOR_BYTES // array.dtype.itemsize
    if valid:
        _check_alignment(array, i)
        values = simulator.read_elements(array, i, width)
    for k in range(width):
        target[k] = np.float32(values[k]) if valid else np.float32(0)


def _load_vector_once_if(target, array, i, valid):
    width = VECTOR_BYTES // array.dtype.itemsize
    if valid:
        _check_alignment(array, i)
        values = simulator.read_elements(array, i, width)
    for k in range(width):
        target[k] = np.float32(values[k]) if valid else np.float32(0)


def _load_if(array, i, valid):
    return np.float32(array[i]) if valid else np.float32(0)


#: Name of an intrinsic -> what it does in the simulator, which has no cache.
TWINS = {
    "load_vector_if": _load_vector_if,
    "load_vector_once_if": _load_vector_once_if,
    "load_if": _load_if,
}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.predicated")
load_vector_if, load_vector_once_if = _here["load_vector_if"], _here["load_vector_once_if"]
load_if = _here["load_if"]
