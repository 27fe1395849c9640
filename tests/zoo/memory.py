"""Arrays in local memory, and half precision."""

import numpy as np
from numba import float32, float64
from numba.types import float16

from course_lib import cuda
from zoo.plan import Launch, Plan, case


@cuda.jit
def local_matrix_kernel(x, y):
    """Cholesky factors of 3 x 3 matrices, one per thread."""
    n = cuda.grid(1)
    if n < x.shape[0]:
        factor = cuda.local.array((3, 3), float64)
        for i in range(3):
            for j in range(i + 1):
                total = x[n, i, j]
                for k in range(j):
                    total -= factor[i, k] * factor[j, k]
                if i == j:
                    factor[i, j] = total**0.5
                else:
                    factor[i, j] = total / factor[j, j]
        for i in range(3):
            for j in range(3):
                y[n, i, j] = factor[i, j] if j <= i else 0.0


@case
def local_matrices(rng):
    half = rng.standard_normal((21, 3, 3))
    x = half @ half.transpose(0, 2, 1) + 0.1 * np.eye(3)
    y = np.full_like(x, np.nan)
    plan = Plan([Launch(local_matrix_kernel, 1, 32, (x, y))])
    return plan.expect(y, np.linalg.cholesky(x), 1e-7)


@cuda.jit
def half_kernel(x, y, z, extremes):
    i = cuda.grid(1)
    if i < x.size:
        a, b = x[i], y[i]
        z[i, 0] = a + b
        z[i, 1] = a * b
        z[i, 2] = cuda.fp16.hfma(a, b, a)
        z[i, 3] = cuda.fp16.hsub(a, b)
        z[i, 4] = -abs(a)
        z[i, 5] = float16(float32(a) * float32(0.1))
        extremes[i] = cuda.fp16.hmax(a, b) if a > b else cuda.fp16.hmin(a, b)


@case
def half_precision(rng):
    x, y = rng.standard_normal((2, 75)).astype(np.float16)
    z, extremes = np.full((75, 6), np.nan, np.float16), np.full(75, np.nan, np.float16)
    fused = (x.astype(np.float64) * y + x).astype(np.float16)
    scaled = (x.astype(np.float32) * np.float32(0.1)).astype(np.float16)
    wanted = np.stack([x + y, x * y, fused, x - y, -np.abs(x), scaled], axis=1)
    plan = Plan([Launch(half_kernel, 2, 64, (x, y, z, extremes))])
    return plan.expect(z, wanted).expect(extremes, x)
