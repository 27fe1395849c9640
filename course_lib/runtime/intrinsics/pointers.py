"""Arrays found by their address: what a kernel needs that takes any number of arrays.

A kernel's parameters are counted when it is compiled. One that works on a whole list of arrays, as
an optimiser does on a network's parameters, takes a table of their addresses instead, and makes
arrays of them again.

================================ =================================================================
`array_at(address, n, like)`     the array of `n` elements, of the dtype of `like`, that begins at
                                 `address`, an int64; one dimension, in the GPU's global memory
================================ =================================================================

Nothing keeps such an array alive: whoever fills the table must. Machine code in `ptx.pointers`,
and a twin, as told in `intrinsics`. The twin takes addresses of the host's memory, so such kernels
can't be observed on a GPU's arrays.
"""

import ctypes

import numpy as np

from course_lib.runtime.intrinsics import twins


def _array_at(address, n, like):
    n_bytes = int(n) * like.dtype.itemsize
    memory = (ctypes.c_char * n_bytes).from_address(int(address))
    return np.frombuffer(memory, dtype=np.uint8).view(like.dtype)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"array_at": _array_at}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.pointers")
array_at = _here["array_at"]
