"""Shared memory beyond numba's: dynamic arrays of any dtype, and copies that no thread waits for.

`cuda.shared.array(0, dtype)` is numba's own way to the memory that a launch's `shared_bytes` asks
for. It refuses bfloat16, wants the dtype written down in the kernel, and promises no 16-byte
boundary; `dynamic_shared` does what it says for every dtype that kernels take.

A load brings a number into a register, and the thread that wants to store it in shared memory must
wait for it first. `copy_async` goes from global to shared memory directly: a thread can have a
whole row on its way, and needs no register for it. What it copied it can read after
`wait_for_copies`; other threads, after a barrier that follows.

============================================ ==================================================
`dynamic_shared(like)`                       the block's dynamic shared memory as an array of the
                                             dtype of `like`, from a 16-byte boundary on
`copy_async(target, i, source, j)`           16 bytes from source[j] on to target[i], of one dtype,
                                             both on 16-byte boundaries (PTX cp.async, from sm_80
                                             on; before, a load and a store)
`wait_for_copies()`                          until all that this thread copied has arrived
============================================ ==================================================

Each is machine code (`ptx.shared`) and a twin, as told in `intrinsics`. The twin of a copy writes
when it is waited for, so that reading too early shows.
"""

from course_lib import simulator
from course_lib.runtime.intrinsics import VECTOR_BYTES, _check_alignment, twins


def _dynamic_shared(like):
    return simulator.cuda.shared.array(0, like.dtype, alignment=VECTOR_BYTES)


def _copy_async(target, i, source, j):
    _check_alignment(target, i)
    _check_alignment(source, j)
    n = VECTOR_BYTES // source.dtype.itemsize
    values = simulator.read_elements(source, j, n)
    simulator.postponed.begin(target, i, values, source, j, n)


def _wait_for_copies():
    for copy in simulator.postponed.take():
        simulator.postponed.finish(copy)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {
    "dynamic_shared": _dynamic_shared,
    "copy_async": _copy_async,
    "wait_for_copies": _wait_for_copies,
}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.shared")
dynamic_shared = _here["dynamic_shared"]
copy_async, wait_for_copies = _here["copy_async"], _here["wait_for_copies"]
