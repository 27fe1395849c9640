"""One GPU tells another that what it has written can be read, while kernels run on both.

`signals` orders what blocks of one GPU see. These two hold for all GPUs of one program that can
reach each other's memory, and for the host: the flag is written with *release*, and read with
*acquire*, at the scope of the system.

    cuda.syncthreads()                            # the whole block has written
    if cuda.threadIdx.x == 0:
        store_release(flags, i, 1)                # flags may lie in another GPU's memory

    if cuda.threadIdx.x == 0:                     # on the GPU that waits
        while load_acquire(flags, i) < 1:
            pass
    cuda.syncthreads()                            # now the whole block may read

================================== =================================================================
`store_release(flags, i, value)`   flags[i] = value, after all that was written (PTX st.release.sys)
`load_acquire(flags, i)`           flags[i] as it is now; what is read afterwards is no older (PTX
                                   ld.acquire.sys)
================================== =================================================================

`flags` is an int64 array of one dimension in global memory. Two threads that store to one flag
overwrite each other's value: each flag has one writer. `cuda.threadfence_system` before a store,
and after a load by an atomic, do the same with stronger and slower fences.

Machine code in `ptx.system_signals`, and twins, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import twins


def _store_release(flags, i, value):
    simulator.cuda.threadfence_system()
    simulator.cuda.atomic.exch(flags, i, np.int64(value))


def _load_acquire(flags, i):
    found = simulator.cuda.ldcv(flags, i)
    simulator.cuda.threadfence_system()
    return found


_store_release.relaxed = _load_acquire.relaxed = True  # made to be raced, as those of `signals`
#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"store_release": _store_release, "load_acquire": _load_acquire}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.system_signals")
store_release, load_acquire = _here["store_release"], _here["load_acquire"]
