"""The bits of a number in a register.

================== =============================================================================
`as_word(value)`   the 32 bits of a float32, as uint32: what `matrix` splits and multiplies
================== =============================================================================

Machine code in `ptx.bits`, and a twin, as told in `intrinsics`.
"""

import numpy as np

from course_lib.runtime.intrinsics import twins


def _as_word(value):
    return np.float32(value).view(np.uint32)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"as_word": _as_word}

as_word = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.bits")["as_word"]
