"""The first rungs of the matrix product: what a thread reads, and how often."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.gemm.epilogue import finish
from course_lib.runtime.intrinsics import load, store

ZERO = np.float32(0)
#: Threads of a block of `naive`: along n, so that neighbours write neighbours, and along m.
NAIVE_N, NAIVE_M = 32, 8


@cuda.jit
def naive_kernel(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options):
    n_tiles = (N + NAIVE_N - 1) // NAIVE_N
    m = cuda.blockIdx.x // n_tiles * NAIVE_M + cuda.threadIdx.y
    n = cuda.blockIdx.x % n_tiles * NAIVE_N + cuda.threadIdx.x
    if m < M and n < N:
        total = ZERO
        for k in range(K):
            total += load(a, m * a_m + k * a_k) * load(b, n * b_n + k * b_k)
        store(c, m * N + n, finish(total, bias, n, options))
