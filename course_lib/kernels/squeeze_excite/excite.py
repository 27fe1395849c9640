"""The small layers of one sample by one block: the rung `fused` has the last one to sum do them.

In chunks of CHUNK numbers, so that any number of channels fits. Results go to global memory at
once, for the blocks that scale. Every thread of a block of BLOCK_SIZE must call these functions.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE, CHUNK, by_columns, by_rows
from course_lib.kernels.squeeze_excite.formulas import activate, activation_gradient, gate_gradient
from course_lib.runtime.intrinsics import load


@cuda.jit(device=True)
def total_of(sums, C, n, n_parts, c):
    """The sum over the parts of a plane of what they found for channel `c` of sample `n`."""
    value = ZERO
    for part in range(n_parts):
        value += sums[(n * n_parts + part) * C + c]
    return value


@cuda.jit(device=True)
def find_logits(vector, sums, weight1, bias1, weight2, bias2, mean, hidden, logit, R, C, n, n_parts,
                activation):  # fmt: skip
    """mean, hidden and logit of sample `n`, from its sums. `vector` is shared, of CHUNK float32."""
    tid, first = np.int64(cuda.threadIdx.x), 0
    while first < C:
        i, count = tid, min(CHUNK, C - first)
        while i < count:
            vector[i] = total_of(sums, C, n, n_parts, first + i)
            mean[n * C + first + i] = vector[i]
            i += BLOCK_SIZE
        cuda.syncthreads()
        by_rows(hidden, n * R, weight1, C, 0, R, first, count, vector, first > 0)
        cuda.syncthreads()
        first += CHUNK
    first = 0
    while first < R:
        i, count = tid, min(CHUNK, R - first)
        while i < count:
            h = hidden[n * R + first + i] + load(bias1, first + i)
            hidden[n * R + first + i] = h
            vector[i] = activate(h, activation)
            i += BLOCK_SIZE
        cuda.syncthreads()
        by_rows(logit, n * C, weight2, R, 0, C, first, count, vector, first > 0)
        cuda.syncthreads()
        first += CHUNK
    i = tid
    while i < C:
        logit[n * C + i] += load(bias2, i)
        i += BLOCK_SIZE


@cuda.jit(device=True)
def find_dmeans(vector, scratch, sums, weight1, weight2, hidden, logit, dlogit, dhidden, dmean,
                R, C, n, n_parts, activation, gate):  # fmt: skip
    """dlogit, dhidden and dmean of sample `n`; `scratch` is shared, of BLOCK_SIZE float32."""
    tid, first = np.int64(cuda.threadIdx.x), 0
    while first < C:
        i, count = tid, min(CHUNK, C - first)
        while i < count:
            d = total_of(sums, C, n, n_parts, first + i)
            vector[i] = gate_gradient(d, logit[n * C + first + i], gate)
            dlogit[n * C + first + i] = vector[i]
            i += BLOCK_SIZE
        cuda.syncthreads()
        by_columns(dhidden, n * R, weight2, R, first, count, 0, R, vector, scratch, first > 0)
        first += CHUNK
    first = 0
    while first < R:
        i, count = tid, min(CHUNK, R - first)
        while i < count:
            d = activation_gradient(
                dhidden[n * R + first + i], hidden[n * R + first + i], activation
            )
            dhidden[n * R + first + i] = d
            vector[i] = d
            i += BLOCK_SIZE
        cuda.syncthreads()
        by_columns(dmean, n * C, weight1, C, first, count, 0, C, vector, scratch, first > 0)
        first += CHUNK
