"""16 bytes read for the last time, or written and not read soon: the L2 cache may forget them.

The L2 cache keeps what came last, whether it is needed again or not. A kernel that knows says so,
and leaves the cache to the data that comes back.

========================================= ======================================================
`load_vector_once(target, array, i)`      as `load_vector`, for what is not read again (PTX
                                          ld.global.cs: first to go)
`store_vector_once(array, i, source)`     as `store_vector`, for what is not read soon (PTX
                                          st.global.cs)
========================================= ======================================================

Machine code in `ptx.streaming`, and twins, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import VECTOR_BYTES, _check_alignment, twins


def _load_vector_once(target, array, i):
    _check_alignment(array, i)
    values = simulator.read_elements(array, i, VECTOR_BYTES // array.dtype.itemsize)
    for k in range(len(values)):
        target[k] = np.float32(values[k])


def _store_vector_once(array, i, source):
    _check_alignment(array, i)
    values = [source[k] for k in range(VECTOR_BYTES // array.dtype.itemsize)]
    simulator.write_elements(array, i, values)


#: Name of an intrinsic -> what it does in the simulator, which has no cache.
TWINS = {"load_vector_once": _load_vector_once, "store_vector_once": _store_vector_once}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.streaming")
load_vector_once, store_vector_once = _here["load_vector_once"], _here["store_vector_once"]
