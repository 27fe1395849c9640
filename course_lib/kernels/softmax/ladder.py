"""The first four rungs of softmax, element by element: `naive`, `shared`, `warp`, `online`.

All take x and y flat, rows of `n_cols` one after another. `naive` has a thread for each row, the
others a block of BLOCK_SIZE threads.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.sums import careful_add
from course_lib.runtime.intrinsics import (
    LOWEST,
    block_max,
    block_online,
    block_sum,
    load,
    online_add,
    online_merge,
    store,
)

BLOCK_SIZE = 256
CHUNK = 16


@cuda.jit(device=True)
def tree_max(partial, tid):
    """Largest of the BLOCK_SIZE numbers of `partial`, a shared array; in every thread."""
    cuda.syncthreads()
    step = BLOCK_SIZE // 2
    while step > 0:
        if tid < step:
            partial[tid] = max(partial[tid], partial[tid + step])
        cuda.syncthreads()
        step //= 2
    return partial[0]


@cuda.jit(device=True)
def tree_sum(partial, tid):
    """Sum of the BLOCK_SIZE numbers of `partial`, a shared array; in every thread."""
    cuda.syncthreads()
    step = BLOCK_SIZE // 2
    while step > 0:
        if tid < step:
            partial[tid] += partial[tid + step]
        cuda.syncthreads()
        step //= 2
    return partial[0]


def forward_kernels(formulas):
    """{rung: kernel(x, y, n_cols)} for one operation."""
    keep, row_factor, finish = formulas.keep, formulas.row_factor, formulas.finish

    @cuda.jit
    def naive_kernel(x, y, n_cols):
        row = cuda.grid(1)
        start = row * n_cols
        if start < x.shape[0]:
            m, total, lost = LOWEST, ZERO, ZERO
            for i in range(start, start + n_cols):
                m = max(m, load(x, i))
            for i in range(start, start + n_cols):
                total, lost = careful_add(total, lost, math.exp(load(x, i) - m))
            factor = row_factor(total)
            for i in range(start, start + n_cols):
                difference = load(x, i) - m
                store(y, i, finish(keep(difference, math.exp(difference)), factor))

    @cuda.jit
    def shared_kernel(x, y, n_cols):
        partial = cuda.shared.array(BLOCK_SIZE, np.float32)
        tid = cuda.threadIdx.x
        start = cuda.blockIdx.x * n_cols
        largest = LOWEST
        for col in range(tid, n_cols, BLOCK_SIZE):
            largest = max(largest, load(x, start + col))
        partial[tid] = largest
        m = tree_max(partial, tid)
        total, lost = ZERO, ZERO
        for col in range(tid, n_cols, BLOCK_SIZE):
            total, lost = careful_add(total, lost, math.exp(load(x, start + col) - m))
        cuda.syncthreads()  # every thread must have read the maximum
        partial[tid] = total
        factor = row_factor(tree_sum(partial, tid))
        for col in range(tid, n_cols, BLOCK_SIZE):
            difference = load(x, start + col) - m
            store(y, start + col, finish(keep(difference, math.exp(difference)), factor))

    @cuda.jit
    def warp_kernel(x, y, n_cols):
        scratch = cuda.shared.array(32, np.float32)
        tid = cuda.threadIdx.x
        start = cuda.blockIdx.x * n_cols
        m = LOWEST
        for col in range(tid, n_cols, BLOCK_SIZE):
            m = max(m, load(x, start + col))
        m = block_max(m, scratch)
        total, lost = ZERO, ZERO
        for col in range(tid, n_cols, BLOCK_SIZE):
            total, lost = careful_add(total, lost, math.exp(load(x, start + col) - m))
        factor = row_factor(block_sum(total, scratch))
        for col in range(tid, n_cols, BLOCK_SIZE):
            difference = load(x, start + col) - m
            store(y, start + col, finish(keep(difference, math.exp(difference)), factor))

    @cuda.jit
    def online_kernel(x, y, n_cols):
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        tid = cuda.threadIdx.x
        start = cuda.blockIdx.x * n_cols
        m, s = LOWEST, ZERO
        for begin in range(tid, n_cols, BLOCK_SIZE * CHUNK):
            # A pair for each chunk: few roundings in it, and few when the pairs are merged.
            chunk_m, chunk_s = LOWEST, ZERO
            for col in range(begin, min(begin + BLOCK_SIZE * CHUNK, n_cols), BLOCK_SIZE):
                chunk_m, chunk_s = online_add(chunk_m, chunk_s, load(x, start + col))
            m, s = online_merge(m, s, chunk_m, chunk_s)
        m, s = block_online(m, s, scratch_m, scratch_s)
        factor = row_factor(s)
        for col in range(tid, n_cols, BLOCK_SIZE):
            difference = load(x, start + col) - m
            store(y, start + col, finish(keep(difference, math.exp(difference)), factor))

    return {
        "naive": naive_kernel,
        "shared": shared_kernel,
        "warp": warp_kernel,
        "online": online_kernel,
    }


def backward_kernels(formulas):
    """{rung: kernel(dy, y, dx, n_cols)} for one operation."""
    term, gradient = formulas.term, formulas.gradient

    @cuda.jit
    def naive_backward_kernel(dy, y, dx, n_cols):
        row = cuda.grid(1)
        start = row * n_cols
        if start < dy.shape[0]:
            total, lost = ZERO, ZERO
            for i in range(start, start + n_cols):
                total, lost = careful_add(total, lost, term(load(dy, i), load(y, i)))
            for i in range(start, start + n_cols):
                store(dx, i, gradient(load(dy, i), load(y, i), total))

    @cuda.jit
    def shared_backward_kernel(dy, y, dx, n_cols):
        partial = cuda.shared.array(BLOCK_SIZE, np.float32)
        tid = cuda.threadIdx.x
        start = cuda.blockIdx.x * n_cols
        total, lost = ZERO, ZERO
        for i in range(start + tid, start + n_cols, BLOCK_SIZE):
            total, lost = careful_add(total, lost, term(load(dy, i), load(y, i)))
        partial[tid] = total
        total = tree_sum(partial, tid)
        for i in range(start + tid, start + n_cols, BLOCK_SIZE):
            store(dx, i, gradient(load(dy, i), load(y, i), total))

    @cuda.jit
    def warp_backward_kernel(dy, y, dx, n_cols):
        scratch = cuda.shared.array(32, np.float32)
        tid = cuda.threadIdx.x
        start = cuda.blockIdx.x * n_cols
        total, lost = ZERO, ZERO
        for i in range(start + tid, start + n_cols, BLOCK_SIZE):
            total, lost = careful_add(total, lost, term(load(dy, i), load(y, i)))
        total = block_sum(total, scratch)
        for i in range(start + tid, start + n_cols, BLOCK_SIZE):
            store(dx, i, gradient(load(dy, i), load(y, i), total))

    return {
        "naive": naive_backward_kernel,
        "shared": shared_backward_kernel,
        "warp": warp_backward_kernel,
    }
