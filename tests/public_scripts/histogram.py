import numpy as np
from numba import cuda, float32, int32


@cuda.jit
def histogram(x, low, high, bins):
    width = (high - low) / float32(bins.shape[0])
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        place = int32((x[i] - low) / width)
        if 0 <= place < bins.shape[0]:
            cuda.atomic.add(bins, place, 1)


x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
bins = cuda.to_device(np.zeros(10, np.int32))
stream = cuda.stream()
histogram[4, 64, stream](x, np.float32(-4), np.float32(4), bins)
stream.synchronize()
assert bins.copy_to_host().sum() == 1000
