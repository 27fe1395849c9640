import numpy as np
from numba import cuda


@cuda.jit
def suppress(wave, threshold, reach, out):
    i = cuda.grid(1)
    if i < wave.size:
        keep = False
        for k in range(max(0, i - reach), min(wave.size, i + reach + 1)):
            keep = keep or wave[k] > threshold
        if not keep:
            out[i] = 0


wave = np.zeros(90, np.float32) + 0.1
wave[40:43] = 9
out = wave.copy()
wave, out = cuda.to_device(wave), cuda.to_device(out)
suppress[3, 32](wave, np.float32(1), 5, out)
assert np.count_nonzero(out.copy_to_host()) == 13
