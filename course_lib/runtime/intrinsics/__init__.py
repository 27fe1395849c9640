"""Device functions that plain numba.cuda lacks: what the chip offers below Python.

Each is two things of one name: machine code for the GPU, made of LLVM or PTX (the PTX ISA manual
is the source of every instruction named below), and a *twin*, plain Python that does the same in
the simulator. Data movement is bit-equal between the two; `fast_exp` and `fast_reciprocal` differ
by the error the PTX manual allows, stated with each.

======================================= ===============================================
`load(array, i)`                        one element as float32, from float32/16 or bfloat16
`store(array, i, value)`                the reverse, rounded to nearest even
`vector_width(array)`                   how many elements make 16 bytes
`load_vector(target, array, i)`         16 bytes at once into a local float32 array
`store_vector(array, i, source)`        the reverse
`fast_exp(x)`, `fast_reciprocal(x)`     the special-function unit, without fix-ups
`wait_for_previous_kernel()`            wait here, when launched with ``overlap=True``
`allow_next_kernel()`                   let the next such kernel's blocks get ready
`warp_sum, warp_max(value)`             over the 32 lanes of a warp
`block_sum, block_max(value, scratch)`  over all threads of a block
`online_add, online_merge`              a maximum and a sum of exponentials in one pass
`warp_online, block_online`             the same over a warp, over a block
======================================= ===============================================
"""

import math

import numpy as np

from course_lib import simulator
from course_lib.runtime.host import device
from course_lib.runtime.intrinsics import twins

FULL_MASK = 0xFFFFFFFF
VECTOR_BYTES = 16
_LOG2_E = np.float32(1.4426950408889634)
LOWEST = np.float32(-np.inf)


# --- twins: what each intrinsic does, in Python -------------------------------------------------


def _load(array, i):
    return np.float32(array[i])


def _store(array, i, value):
    array[i] = value


def _vector_width(array):
    return VECTOR_BYTES // array.dtype.itemsize


def _check_alignment(array, i):
    address = array.__array_interface__["data"][0] + i * array.dtype.itemsize
    if address % VECTOR_BYTES:
        raise ValueError(
            f"misaligned 16-byte access: element {i} lies {address % VECTOR_BYTES} bytes past a "
            "multiple of 16; a GPU stops with a misaligned address error here"
        )


def _load_vector(target, array, i):
    _check_alignment(array, i)
    values = simulator.read_elements(array, i, VECTOR_BYTES // array.dtype.itemsize)
    for k in range(len(values)):
        target[k] = np.float32(values[k])


def _store_vector(array, i, source):
    _check_alignment(array, i)
    values = [source[k] for k in range(VECTOR_BYTES // array.dtype.itemsize)]
    simulator.write_elements(array, i, values)


def _fast_exp(x):
    return np.exp2(np.float32(x) * _LOG2_E)


def _fast_reciprocal(x):
    return np.float32(1) / np.float32(x)


def _wait_for_previous_kernel():
    """PTX griddepcontrol.wait. In the simulator one kernel always ends before the next begins."""


def _allow_next_kernel():
    """PTX griddepcontrol.launch_dependents; nothing to do in the simulator."""


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {
    "load": _load,
    "store": _store,
    "vector_width": _vector_width,
    "load_vector": _load_vector,
    "store_vector": _store_vector,
    "fast_exp": _fast_exp,
    "fast_reciprocal": _fast_reciprocal,
    "wait_for_previous_kernel": _wait_for_previous_kernel,
    "allow_next_kernel": _allow_next_kernel,
}

if device.use_simulator():
    cuda = simulator.cuda
else:
    from numba import cuda

_here = twins.in_use(
    TWINS, "course_lib.runtime.intrinsics.ptx.base", {"vector_width": int, "load": np.float32}
)
load, store, vector_width = _here["load"], _here["store"], _here["vector_width"]
load_vector, store_vector = _here["load_vector"], _here["store_vector"]
fast_exp, fast_reciprocal = _here["fast_exp"], _here["fast_reciprocal"]
wait_for_previous_kernel = _here["wait_for_previous_kernel"]
allow_next_kernel = _here["allow_next_kernel"]


# --- reductions, made of shuffles and shared memory ---------------------------------------------


@cuda.jit(device=True)
def warp_sum(value):
    """Sum of `value` over the 32 lanes of a warp, in every lane (PTX: shfl.sync.bfly)."""
    for step in range(5):
        value += cuda.shfl_xor_sync(FULL_MASK, value, 16 >> step)
    return value


@cuda.jit(device=True)
def warp_max(value):
    """Largest `value` of the 32 lanes of a warp, in every lane. NaN is not propagated."""
    for step in range(5):
        value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, 16 >> step))
    return value


@cuda.jit(device=True)
def block_sum(value, scratch):
    """Sum of the float32 `value` over a block, in every thread.

    `scratch` is a shared array of 32 float32 elements. For one-dimensional blocks of a multiple of
    32 threads; every thread must call it.
    """
    lane_id, warp_id = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    value = warp_sum(value)
    cuda.syncthreads()  # an earlier call may still be reading scratch
    if lane_id == 0:
        scratch[warp_id] = value
    cuda.syncthreads()
    value = scratch[lane_id] if lane_id < cuda.blockDim.x // 32 else np.float32(0)
    return warp_sum(value)


@cuda.jit(device=True)
def block_max(value, scratch):
    """Largest `value` of a block, in every thread; `scratch` and blocks as in `block_sum`."""
    lane_id, warp_id = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    value = warp_max(value)
    cuda.syncthreads()  # an earlier call may still be reading scratch
    if lane_id == 0:
        scratch[warp_id] = value
    cuda.syncthreads()
    # Lanes beyond the last warp repeat the first warp's value, which changes no maximum.
    value = scratch[lane_id if lane_id < cuda.blockDim.x // 32 else 0]
    return warp_max(value)


# --- the online-softmax pair: Milakov and Gimelshein, 2018; derived in notebook 03 ---------------
#
# A pair (m, s) stands for some numbers x: m is their largest, s the sum of exp(x - m). No numbers
# are (-inf, 0). NaN and +inf among them make s NaN, as PyTorch's softmax would have it.


@cuda.jit(device=True)
def online_add(m, s, x):
    """The pair of the numbers behind (m, s) and of `x`: one step of the online pass."""
    if x > m:
        return x, s * math.exp(m - x) + np.float32(1) + (x - x)  # x - x: 0, or NaN for +inf
    # Equal maxima need no correction, and -inf - -inf would be NaN.
    return m, s + (math.exp(x - m) if x != LOWEST else np.float32(0))


@cuda.jit(device=True)
def online_merge(m1, s1, m2, s2):
    """The pair of the numbers behind both pairs. Associative up to rounding, and commutative."""
    m = max(m1, m2)
    first = s1 if m1 == m else s1 * math.exp(m1 - m)
    second = s2 if m2 == m else s2 * math.exp(m2 - m)
    return m, first + second


@cuda.jit(device=True)
def warp_online(m, s):
    """The pair of all lanes of a warp, in every lane.

    As merging the pairs one by one would give, but each sum is corrected, and rounded, only once.
    """
    largest = warp_max(m)
    if m != largest:  # -inf - -inf would be NaN
        s *= math.exp(m - largest)
    return largest, warp_sum(s)


@cuda.jit(device=True)
def block_online(m, s, scratch_m, scratch_s):
    """The pair of all threads of a block, in every thread; scratch and blocks as in `block_sum`."""
    lane_id, warp_id = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    m, s = warp_online(m, s)
    cuda.syncthreads()  # an earlier call may still be reading scratch
    if lane_id == 0:
        scratch_m[warp_id] = m
        scratch_s[warp_id] = s
    cuda.syncthreads()
    inside = lane_id < cuda.blockDim.x // 32
    m = scratch_m[lane_id] if inside else LOWEST
    s = scratch_s[lane_id] if inside else np.float32(0)
    return warp_online(m, s)
