"""Single elements gathered into shared memory, without a thread that waits for each.

`shared.copy_async` takes 16 bytes that lie side by side. A convolution reads its input at places
that a filter's taps decide, some of them outside the image, where zeros stand.

======================================= ========================================================
`gather_async(target, i, source, j,     target[i] = source[j] as float32, or 0 where not `valid`;
valid)`                                 `target` is float32. From float32 on sm_80 and later a copy
                                        that no thread waits for (PTX cp.async, 4 bytes, zeros for
                                        what is not read); else a load and a store
======================================= ========================================================

What was gathered is there after `pipeline.end_group` and `pipeline.wait_for_groups_but`, and a
barrier for other threads. Where it is not valid, `j` is not looked at. Machine code
(`ptx.gather`) and a twin, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import twins


def _gather_async(target, i, source, j, valid):
    value = np.float32(source[j]) if valid else np.float32(0)
    simulator.postponed.begin(target, i, [value], source, j, 1 if valid else 0)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"gather_async": _gather_async}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.gather")
gather_async = _here["gather_async"]
