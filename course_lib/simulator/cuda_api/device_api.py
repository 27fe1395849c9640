"""The names of `numba.cuda` that mean something inside a kernel."""

import math

import numpy as np

from course_lib.simulator.cuda_api import rounding
from course_lib.simulator.cuda_api.atomics import atomic
from course_lib.simulator.cuda_api.mathlib import math as gpu_math
from course_lib.simulator.cuda_api.primitives import Dim3, Index, LaneId, Namespace, Primitive
from course_lib.simulator.cuda_api.warp import primitives as warp_primitives
from course_lib.simulator.engine import arithmetic, guards, scheduler
from course_lib.simulator.engine.checked import check_index
from course_lib.simulator.rewrite.resolve import as_dtype


def _grid(thread, ndim):
    """This thread's place in the whole grid."""
    block = thread.b
    parts = block.ox + thread.tx, block.oy + thread.ty, block.oz + thread.tz
    return _dimensional(parts, ndim)


def _gridsize(thread, ndim):
    """How many threads the whole grid has."""
    block = thread.b
    return _dimensional((block.dx * block.gx, block.dy * block.gy, block.dz * block.gz), ndim)


def _dimensional(parts, ndim):
    if ndim == 1:
        return parts[0]
    if ndim in (2, 3):
        return parts[:ndim]
    raise ValueError(f"ndim must be 1, 2 or 3; got {ndim!r}")


def _syncthreads(thread):
    """Wait for every thread of the block that has not exited."""
    return scheduler.BARRIER


def _barrier_vote(kind, text):
    def vote(thread, predicate):
        return scheduler.vote_at_barrier, kind, bool(predicate)

    vote.__doc__ = text
    return Primitive(f"cuda.syncthreads_{kind}", vote, "blocking")


def _fence():
    """Orders memory accesses; they are in order here anyway."""


def _array_like(array):
    """A read-only copy of a constant array."""
    frozen = np.array(array)
    frozen.flags.writeable = False
    return frozen


def _bits_of(value, least=32):
    """(bit pattern as a non-negative int, number of bits)."""
    if isinstance(value, np.integer):
        bits = max(value.dtype.itemsize * 8, least)
    else:
        bits = 32 if -(2**31) <= int(value) < 2**32 else 64
    return int(value) & ((1 << bits) - 1), bits


def _popc(value):
    """The number of bits that are set."""
    return _bits_of(value)[0].bit_count()


def _brev(value):
    """The bits in reverse order."""
    pattern, bits = _bits_of(value)
    result = int(f"{pattern:0{bits}b}"[::-1], 2)
    if isinstance(value, np.integer):
        return np.array(result, f"u{bits // 8}").astype(
            value.dtype if value.dtype.itemsize * 8 == bits else f"u{bits // 8}")[()]
    return result


def _clz(value):
    """The number of zero bits before the highest one."""
    pattern, bits = _bits_of(value)
    return bits - pattern.bit_length()


def _ffs(value):
    """The place of the lowest bit that is set, counted from 1; 0 if there is none."""
    pattern, _ = _bits_of(value)
    return (pattern & -pattern).bit_length()


def _selp(predicate, first, second):
    """`first` if the predicate holds, else `second`."""
    return first if predicate else second


#: The types that numba's fma computes with in float32; one of another makes it float64.
_SINGLE = {bool, np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.float16, np.float32}


def _fma(a, b, c):
    """a * b + c, rounded once."""
    if _SINGLE.issuperset((a.__class__, b.__class__, c.__class__)):
        return rounding.fused(a, b, c)
    return rounding.arithmetic("fma", float, "rn", a, b, c)


def _cbrt(value):
    """The cube root."""
    return gpu_math.cbrt(value)


def _rsqrt(value):
    """1 / sqrt(x)."""
    root = gpu_math.sqrt(value)
    if root == 0:
        result = math.copysign(math.inf, root)
        return root.__class__(result)
    return root.__class__(1) / root


def _load(array, index):
    """A load with a cache hint; the hint does nothing."""
    check_index(array, index)
    return array[index]


def _store(array, index, value):
    """A store with a cache hint; the hint does nothing."""
    check_index(array, index)
    arithmetic.store(array, index, value)


def _pure(name, impl, **more):
    return Primitive(f"cuda.{name}", impl, **more)


#: For twins of intrinsics that access several elements at once.
read_elements = Primitive("simulator.read_elements", guards.read_elements, access="load_many")
write_elements = Primitive("simulator.write_elements", guards.write_elements,
                           access="store_many")

shared = Namespace("cuda.shared", array=Primitive("cuda.shared.array", guards.shared_array_here,
                                                  "thread", inline="shared"))
local = Namespace("cuda.local", array=Primitive("cuda.local.array", guards.local_array))
const = Namespace("cuda.const", array_like=Primitive("cuda.const.array_like", _array_like))

#: name -> object, under `cuda`
names = {
    **{name: Index(name) for name in Index.FIELDS},
    "laneid": LaneId(),
    "warpsize": 32,
    "grid": Primitive("cuda.grid", _grid, "thread", inline="grid"),
    "gridsize": Primitive("cuda.gridsize", _gridsize, "thread", inline="grid"),
    "syncthreads": Primitive("cuda.syncthreads", _syncthreads, "blocking", inline="barrier"),
    "syncthreads_count": _barrier_vote("count", "Wait; how many threads' predicate holds."),
    "syncthreads_and": _barrier_vote("and", "Wait; 1 if the predicate holds in every thread."),
    "syncthreads_or": _barrier_vote("or", "Wait; 1 if the predicate holds in some thread."),
    "shared": shared, "local": local, "const": const, "atomic": atomic,
    "threadfence": _pure("threadfence", _fence),
    "threadfence_block": _pure("threadfence_block", _fence),
    "threadfence_system": _pure("threadfence_system", _fence),
    "popc": _pure("popc", _popc), "brev": _pure("brev", _brev), "clz": _pure("clz", _clz),
    "ffs": _pure("ffs", _ffs), "selp": _pure("selp", _selp), "fma": _pure("fma", _fma),
    "cbrt": _pure("cbrt", _cbrt), "rsqrt": _pure("rsqrt", _rsqrt),
    **{name: _pure(name, _load, access="load") for name in
       ("ldca", "ldcg", "ldcs", "ldlu", "ldcv")},
    **{name: _pure(name, _store, access="store") for name in ("stcg", "stcs", "stwb", "stwt")},
    **warp_primitives,
}
__all__ = ["Dim3", "as_dtype", "names"]
