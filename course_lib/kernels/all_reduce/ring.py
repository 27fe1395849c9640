"""All-reduce in a ring: each rank sends to its right neighbour alone, a chunk at a time.

A buffer is `world` chunks. In step s rank r sends chunk r − s, counted round the ring:

- *reduce-scatter*, the first world − 1 steps: it adds its own numbers to the chunk that has come
  into its inbox in the step before, and sends the sum into the neighbour's inbox. The inbox has
  a slot for each step;
- then it has chunk r + 1 whole: the sum over all ranks, in the order r + 1, r + 2, …, r;
- *all-gather*, the other world − 1 steps: it sends that chunk, and then each one that it received
  in the step before, to the place in the neighbour's buffer where it belongs.

Block b of a rank has one part of every chunk, and waits for block b of the left neighbour alone.

Why nothing is overwritten before it is read, although no rank asks whether its neighbour is ready:
a chunk that is written into a buffer is a sum that the neighbour has added its own numbers to. And
the last chunk that a rank receives has come round the ring from the neighbour, which sent it on
when it had read its whole inbox: whoever has finished a call may write there in the next one.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.all_reduce.memory import (
    ARRIVED,
    N_FLAGS,
    ROW,
    STEPS,
    raise_flag,
    wait_for_flag,
)
from course_lib.runtime.intrinsics import load_vector, store_vector
from course_lib.runtime.intrinsics.pointers import array_at

WIDTH = 4  # float32 of a vector


@cuda.jit(device=True)
def copy(target, t, source, s, length):
    """target[t + k] = source[s + k], for k < length."""
    for k in range(cuda.threadIdx.x, length, cuda.blockDim.x):
        target[t + k] = source[s + k]


@cuda.jit(device=True)
def add(target, t, source, s, received, r, length):
    """target[t + k] = received[r + k] + source[s + k], for k < length."""
    for k in range(cuda.threadIdx.x, length, cuda.blockDim.x):
        target[t + k] = received[r + k] + source[s + k]


@cuda.jit(device=True)
def copy_vectors(target, t, source, s, length):
    """`copy` of float32, 16 bytes at a time."""
    values = cuda.local.array(WIDTH, np.float32)
    whole = length // WIDTH * WIDTH
    for k in range(cuda.threadIdx.x * WIDTH, whole, cuda.blockDim.x * WIDTH):
        load_vector(values, source, s + k)
        store_vector(target, t + k, values)
    copy(target, t + whole, source, s + whole, length - whole)


@cuda.jit(device=True)
def add_vectors(target, t, source, s, received, r, length):
    """`add` of float32, 16 bytes at a time."""
    values = cuda.local.array(WIDTH, np.float32)
    others = cuda.local.array(WIDTH, np.float32)
    whole = length // WIDTH * WIDTH
    for k in range(cuda.threadIdx.x * WIDTH, whole, cuda.blockDim.x * WIDTH):
        load_vector(values, source, s + k)
        load_vector(others, received, r + k)
        for i in range(WIDTH):
            values[i] = others[i] + values[i]
        store_vector(target, t + k, values)
    add(target, t + whole, source, s + whole, received, r + whole, length - whole)


def ring_kernel_of(vectors):
    """The kernel that moves `vectors` of float32, or single elements of any dtype."""
    copy_some, add_some = (copy_vectors, add_vectors) if vectors else (copy, add)

    @cuda.jit
    def ring_kernel(buffer, inbox, flags, buffers, inboxes, all_flags, shares):
        """A group of blocks for each rank.

        buffer, inbox, flags          arrays of the dtypes of all ranks' ones, which alone are used
        buffers, inboxes, all_flags   `Ranks`: addresses of (n,) numbers to sum, of `world` - 1
                                      slots of a chunk, and of (N_FLAGS,) int64
        shares                        `Shares`: `part` is one of a chunk
        """
        rank = shares.first + cuda.blockIdx.x // shares.n_blocks
        block = cuda.blockIdx.x % shares.n_blocks
        n, chunk, world = shares.n, shares.chunk, shares.world
        right, n_slots = (rank + 1) % world, (world - 1) * chunk
        own, sent = array_at(buffers[rank], n, buffer), array_at(buffers[right], n, buffer)
        received = array_at(inboxes[rank], n_slots, inbox)
        passed_on = array_at(inboxes[right], n_slots, inbox)
        own_flags = array_at(all_flags[rank], N_FLAGS, flags)
        right_flags = array_at(all_flags[right], N_FLAGS, flags)
        steps = own_flags[block * ROW + STEPS]

        for step in range(2 * (world - 1)):
            first = (rank + 2 * world - step) % world * chunk  # of the chunk
            start = first + block * shares.part
            length = max(0, min(n, first + chunk, start + shares.part) - start)
            slot = step * chunk + block * shares.part
            if step == 0:
                copy_some(passed_on, slot, own, start, length)
            elif step < world - 1:
                add_some(passed_on, slot, own, start, received, slot - chunk, length)
            else:
                if step == world - 1:
                    add_some(own, start, own, start, received, slot - chunk, length)
                copy_some(sent, start, own, start, length)
            raise_flag(right_flags, block * ROW + ARRIVED, steps + step + 1)
            wait_for_flag(own_flags, block * ROW + ARRIVED, steps + step + 1)
        if cuda.threadIdx.x == 0:
            own_flags[block * ROW + STEPS] = steps + 2 * (world - 1)

    return ring_kernel
