"""Partial sums of a matrix product, added up."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import finish
from course_lib.runtime.intrinsics import allow_next_kernel, store, wait_for_previous_kernel

BLOCK_SIZE = 128
UNROLL = 8  # loads in flight per thread


@cuda.jit
def finish_kernel(partial, bias, c, N, n_splits, options):
    """c[i] = the sum of partial[split, i] over the splits, in their order; a thread for each i."""
    allow_next_kernel()
    wait_for_previous_kernel()
    values = cuda.local.array(UNROLL, np.float32)
    i, size = cuda.grid(1), c.shape[0]
    if i < size:
        total = ZERO
        for split in range(0, n_splits, UNROLL):
            for u in range(UNROLL):
                values[u] = ZERO
                if split + u < n_splits:
                    values[u] = partial[(split + u) * size + i]
            for u in range(UNROLL):
                total += values[u]
        store(c, i, finish(total, bias, i % N, options))
