"""Products of bfloat16 numbers that a kernel has made itself, of float32 in its registers.

`matrix.multiply_add` multiplies what the arrays of a kernel hold. A float32 that is split into a
large part and a rest needs fewer digits of the rest than TF32 has; as bfloat16 twice as many of
them go into one instruction.

================================================ ==============================================
`pack_halves(low, high)`                         two float32, as the words of their bits, rounded
                                                 to bfloat16: a word, `low` in its lower 16 bits
                                                 (PTX cvt.rn.bf16x2.f32)
`multiply_add_halves(acc, c, a, i, b, j)`        as `matrix.multiply_add` for bfloat16, whatever
                                                 the kernel's arrays are made of
================================================ ==============================================

Machine code in `ptx.halves`, and twins, as told in `intrinsics`. Needs sm_80, as `matrix` does.
"""

import ml_dtypes
import numpy as np

from course_lib.runtime.intrinsics import twins
from course_lib.runtime.intrinsics.matrix import _multiply_together

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _pack_halves(low, high):
    pair = np.array([low, high], np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return pair.astype(_BFLOAT16).view(np.uint32)[0]


def _multiply_add_halves(acc, c, a, i, b, j):
    mine = (
        [acc[c], acc[c + 1], acc[c + 2], acc[c + 3]],
        [a[i], a[i + 1], a[i + 2], a[i + 3]],
        [b[j], b[j + 1]],
        _BFLOAT16,
    )
    found = _multiply_together(mine)
    for r in range(4):
        acc[c + r] = found[r]


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"pack_halves": _pack_halves, "multiply_add_halves": _multiply_add_halves}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.halves")
pack_halves, multiply_add_halves = _here["pack_halves"], _here["multiply_add_halves"]
