import numpy as np
from numba import cuda, int32


@cuda.jit
def total(values, out):
    kept = cuda.shared.array(128, int32)
    tid = cuda.threadIdx.x
    kept[tid] = values[tid]
    cuda.syncthreads()
    step = 1
    while step < cuda.blockDim.x:
        if tid % (2 * step) == 0:
            kept[tid] += kept[tid + step]
        step *= 2
        cuda.syncthreads()  # after each round
    if tid == 0:
        out[0] = kept[0]


values, out = cuda.to_device(np.arange(128, dtype=np.int32)), cuda.device_array(1, np.int32)
total[1, 128](values, out)
assert out.copy_to_host()[0] == 128 * 127 // 2
