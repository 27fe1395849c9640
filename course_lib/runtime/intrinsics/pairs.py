"""Pairs of 16-bit numbers, made of float32 in registers: what a tensor core takes.

================================ ==============================================================
`as_pair(like, low, high)`       two float32 as numbers of the 16-bit dtype of the array `like`,
                                 rounded to nearest even, in a word: `low` in its lower half
                                 (PTX cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32)
================================ ==============================================================

Machine code in `ptx.pairs`, and a twin, as told in `intrinsics`.
"""

import numpy as np

from course_lib.runtime.intrinsics import twins

CERTAIN = 1 << 15  # what is smaller overflows in no 16-bit type


def _as_pair(like, low, high):
    pair = np.array((low, high), np.float32)
    if -CERTAIN < low < CERTAIN and -CERTAIN < high < CERTAIN:
        return pair.astype(like.dtype).view(np.uint32)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        return pair.astype(like.dtype).view(np.uint32)[0]


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"as_pair": _as_pair}

as_pair = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.pairs")["as_pair"]
