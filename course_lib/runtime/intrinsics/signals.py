"""One block tells others that what it has written can be read, while all of them run.

What a block writes to memory, others see in no promised order: a flag may arrive before the data
that it announces. So the flag is written with *release*, and read with *acquire*: whoever sees it
sees also what was written before it.

    cuda.syncthreads()                    # the whole block has written
    if cuda.threadIdx.x == 0:
        count(flags, i, 1)

    if cuda.threadIdx.x == 0:             # in another block
        while look(flags, i) < 1:
            pass
    cuda.syncthreads()                    # now the whole block may read

============================= ====================================================================
`count(flags, i, value)`      add `value` to flags[i], after all that was written; returns what it
                              was before, and what is read afterwards is no older than that (PTX
                              atom.acq_rel.gpu)
`look(flags, i)`              flags[i] as it is now; what is read afterwards is no older (PTX
                              ld.acquire.gpu)
============================= ====================================================================

`flags` is an int32 array of one dimension in global memory. `cuda.threadfence` and an atomic do
the same, with a stronger and slower fence. A loop that waits must look in this way or with an
atomic: the compiler takes an ordinary load out of the loop, and those of `cuda.ldcv` too.

Machine code in `ptx.signals`, and twins, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import twins


def _count(flags, i, value):
    simulator.cuda.threadfence()
    before = simulator.cuda.atomic.add(flags, i, np.int32(value))
    simulator.cuda.threadfence()
    return before


def _look(flags, i):
    found = simulator.cuda.ldcv(flags, i)
    simulator.cuda.threadfence()
    return found


_count.relaxed = _look.relaxed = True  # made to be raced: the sanitizer takes them for atomics
#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"count": _count, "look": _look}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.signals")
count, look = _here["count"], _here["look"]
