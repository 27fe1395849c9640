"""Atomic operations on more than one number.

=============================== ================================================================
`add_four(array, i, source, k)` array[i : i+4] += source[k : k+4], each number atomically. `array`
                                is of float32 in global memory, `source` a local one; i is a
                                multiple of 4 (PTX red.global.add.v4.f32, before compute
                                capability 9.0 four red.global.add.f32)
=============================== ================================================================

The order in which threads add is not fixed, and so are not the last bits of a sum. Machine code in
`ptx.atomics`, and a twin, as told in `intrinsics`.
"""

from course_lib import simulator
from course_lib.runtime.intrinsics import _check_alignment, twins


def _add_four(array, i, source, k):
    _check_alignment(array, i)
    for r in range(4):
        simulator.cuda.atomic.add(array, i + r, source[k + r])


_add_four.relaxed = True  # the sanitizer takes what it does for atomics


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"add_four": _add_four}

add_four = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.atomics")["add_four"]
