"""A row, or one block's part of it, in registers: how threads load, reduce and store it.

`values` is a local array of (V, MAX_WIDTH) float32 numbers, V fixed when the kernel is compiled, so
that every index is a constant and the array lives in registers. Slot (u, k) of the thread of rank
`rank` among `n_ranks` holds element

    (rank + u·n_ranks)·width + k     where rows start on 16-byte boundaries (`vectors` is True):
                                     each u is one access of 16 bytes
    (u·width + k)·n_ranks + rank     elsewhere: each slot is an access of its own, and neighbouring
                                     threads still take neighbouring elements

All loads come before the first use, so that they are in flight together (notebook 04).
"""


from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    LOWEST,
    VECTOR_BYTES,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    warp_max,
    warp_sum,
)


@cuda.jit(device=True)
def load_row(values, n_slots, x, start, n_cols, rank, n_ranks, vectors, beyond):
    """Fill the slots from x[start:start + n_cols]; those past the end get `beyond`."""
    width = vector_width(x)
    for u in range(n_slots):
        for k in range(width):
            values[u, k] = beyond
    if vectors:
        for u in range(n_slots):
            col = (rank + u * n_ranks) * width
            if col < n_cols:
                load_vector(values[u], x, start + col)
    else:
        for u in range(n_slots):
            for k in range(width):
                col = (u * width + k) * n_ranks + rank
                if col < n_cols:
                    values[u, k] = load(x, start + col)


@cuda.jit(device=True)
def store_row(values, n_slots, y, start, n_cols, rank, n_ranks, vectors):
    """The reverse of `load_row`."""
    width = vector_width(y)
    if vectors:
        for u in range(n_slots):
            col = (rank + u * n_ranks) * width
            if col < n_cols:
                store_vector(y, start + col, values[u])
    else:
        for u in range(n_slots):
            for k in range(width):
                col = (u * width + k) * n_ranks + rank
                if col < n_cols:
                    store(y, start + col, values[u, k])


@cuda.jit(device=True)
def my_part(n_cols, length, part_bits):
    """(first element, number of elements) of this block's part of its row."""
    row, part = cuda.blockIdx.x >> part_bits, cuda.blockIdx.x & ((1 << part_bits) - 1)
    first = min(part * length, n_cols)
    return row * n_cols + first, min(length, n_cols - first)


@cuda.jit(device=True)
def team_max(value, team):
    """Largest `value` of `team` neighbouring lanes, a power of two; all 32 lanes must call."""
    step = team >> 1
    while step > 0:
        value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, step))
        step >>= 1
    return value


@cuda.jit(device=True)
def team_sum(value, team):
    """Sum of `value` over `team` neighbouring lanes, a power of two; all 32 lanes must call."""
    step = team >> 1
    while step > 0:
        value += cuda.shfl_xor_sync(FULL_MASK, value, step)
        step >>= 1
    return value


@cuda.jit(device=True)
def block_max_once(value, scratch):
    """As `intrinsics.block_max`, with a `scratch` that is used for this alone: one barrier less."""
    lane_id, warp_id = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    value = warp_max(value)
    if lane_id == 0:
        scratch[warp_id] = value
    cuda.syncthreads()
    value = scratch[lane_id] if lane_id < cuda.blockDim.x >> 5 else LOWEST
    return warp_max(value)


@cuda.jit(device=True)
def block_sum_once(value, scratch):
    """As `intrinsics.block_sum`, with a `scratch` that is used for this alone: one barrier less."""
    lane_id, warp_id = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    value = warp_sum(value)
    if lane_id == 0:
        scratch[warp_id] = value
    cuda.syncthreads()
    value = scratch[lane_id] if lane_id < cuda.blockDim.x >> 5 else ZERO
    return warp_sum(value)


def on_boundaries(n_cols, operands):
    """Whether every row of every operand begins on a 16-byte boundary."""
    row_bytes = n_cols * operands[0].dtype.itemsize
    addresses = [arrays.address_of(operand) for operand in operands]
    return not any(number % VECTOR_BYTES for number in (row_bytes, *addresses))
