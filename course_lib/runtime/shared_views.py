"""A block's dynamic shared memory a second time, as an array of another dtype.

Where a kernel keeps 16-bit images, weights of one dtype and float32 tables in one shared memory, it
sees that memory through an array for each: the first from `shared.dynamic_shared`, another one from

============================== =================================================================
`dynamic_shared_view(like)`    the block's dynamic shared memory as an array of the dtype of
                               `like`, from the same 16-byte boundary on; once in a kernel
============================== =================================================================

It is machine code (`nvvm_shared_views`) and a twin, as told in `intrinsics`.
"""

from course_lib import simulator
from course_lib.runtime import twins
from course_lib.runtime.intrinsics import VECTOR_BYTES


def _dynamic_shared_view(like):
    return simulator.cuda.shared.array(0, like.dtype, alignment=VECTOR_BYTES)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"dynamic_shared_view": _dynamic_shared_view}

dynamic_shared_view = twins.in_use(TWINS, "course_lib.runtime.nvvm_shared_views")[
    "dynamic_shared_view"
]
