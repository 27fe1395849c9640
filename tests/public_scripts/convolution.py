import numpy as np
from numba import cuda, float32

WIDTH, WINDOW = 32, 4
NEAR = WIDTH + WINDOW


@cuda.jit
def convolve(signal, window, out):
    near = cuda.shared.array(NEAR, float32)
    tid, i = cuda.threadIdx.x, cuda.grid(1)
    near[tid] = signal[i] if i < signal.size else float32(0)
    if tid < WINDOW:
        far = i + WIDTH
        near[tid + WIDTH] = signal[far] if far < signal.size else float32(0)
    cuda.syncthreads()  # the block has read its part
    if i < out.size:
        total = float32(0)
        for k in range(WINDOW):
            total += near[tid + k] * window[k]
        out[i] = total


signal, window = np.arange(75, dtype=np.float32), np.array([1, 2, 0, -1], np.float32)
out = np.zeros(75, np.float32)
convolve[3, WIDTH](signal, window, out)
padded = np.append(signal, np.zeros(3))
np.testing.assert_allclose(out, np.convolve(padded, window[::-1], "valid"))
