"""The rung `online`: a block of BLOCK_SIZE threads takes a row, element by element, twice."""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.softmax_steps import shift_for
from course_lib.kernels.scaled_softmax.scores import KINDS, factor_of, mask_of_row, seen_of_row
from course_lib.runtime.intrinsics import LOWEST, block_online, block_sum, load, online_add, store

BLOCK_SIZE = 64


def forward_kernel(kind):
    """The kernel for one kind of mask."""
    read, masked = KINDS[kind]

    @cuda.jit(device=True)
    def score_of(col, x, start, mask, at, rows):
        return masked(load(x, start + col) * rows.scale, read(mask, at + col * rows.col))

    @cuda.jit
    def online_kernel(x, mask, y, rows):
        """Maximum and sum of a row in one pass, its softmax in another.

        x, y  (B, H, T, S), flat; mask  the memory that it lies in, uint8 or x's dtype, x itself if
              there is none; rows  `scores.Rows`
        """
        scratch_m, scratch_s = cuda.shared.array(32, np.float32), cuda.shared.array(32, np.float32)
        start, tid = np.int64(cuda.blockIdx.x) * rows.n_cols, cuda.threadIdx.x
        seen, at = seen_of_row(cuda.blockIdx.x, rows), mask_of_row(cuda.blockIdx.x, rows)
        m, total = LOWEST, ZERO
        for col in range(tid, seen, BLOCK_SIZE):
            m, total = online_add(m, total, score_of(col, x, start, mask, at, rows))
        m, total = block_online(m, total, scratch_m, scratch_s)
        shift, factor = shift_for(m), factor_of(total)
        for col in range(tid, rows.n_cols, BLOCK_SIZE):
            score = score_of(col, x, start, mask, at, rows) if col < seen else LOWEST
            store(y, start + col, math.exp(score - shift) * factor)

    return online_kernel


@cuda.jit
def online_backward_kernel(dy, y, dx, rows):
    """Σ y·dy of a row in one pass, its dx in another.

    dy, y, dx  (B, H, T, S), flat; rows  `scores.Rows`
    """
    scratch = cuda.shared.array(32, np.float32)
    start, tid = np.int64(cuda.blockIdx.x) * rows.n_cols, cuda.threadIdx.x
    seen = seen_of_row(cuda.blockIdx.x, rows)
    total = ZERO
    for i in range(start + tid, start + seen, BLOCK_SIZE):
        total += load(dy, i) * load(y, i)
    total = block_sum(total, scratch)
    for col in range(tid, rows.n_cols, BLOCK_SIZE):
        g, p = ZERO, ZERO
        if col < seen:
            g, p = load(dy, start + col), load(y, start + col)
        store(dx, start + col, p * (g - total) * rows.scale)
