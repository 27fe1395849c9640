import numpy as np
from numba import cuda, float32

TILE = 8


@cuda.jit
def multiply(a, b, c):
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    row, col = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for k in range(0, a.shape[1], TILE):
        inside = row < a.shape[0] and k + ty < a.shape[1]
        left[tx, ty] = a[row, k + ty] if inside else float32(0)
        inside = k + tx < b.shape[0] and col < b.shape[1]
        right[tx, ty] = b[k + tx, col] if inside else float32(0)
        cuda.syncthreads()
        for j in range(TILE):
            total += left[tx, j] * right[j, ty]
        cuda.syncthreads()  # before the next tile
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = total


rng = np.random.default_rng(0)
a, b = rng.random((17, 20), np.float32), rng.random((20, 9), np.float32)
c = np.zeros((17, 9), np.float32)
multiply[(3, 2), (TILE, TILE)](a, b, c)
np.testing.assert_allclose(c, a @ b, rtol=1e-5)
