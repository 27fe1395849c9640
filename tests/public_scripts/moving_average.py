import numpy as np
from numba import cuda, float32


@cuda.jit("void(float32[:], float32[:], int32)")
def average(x, y, reach):
    i = cuda.grid(1)
    if i < x.size:
        first, last = max(0, i - reach), min(x.size, i + reach + 1)
        total = float32(0)
        for k in range(first, last):
            total += x[k]
        y[i] = total / float32(last - first)


x, y = np.arange(100, dtype=np.float32), np.empty(100, np.float32)
start, end = cuda.event(), cuda.event()
start.record()
average[4, 32](x, y, 2)
end.record()
end.synchronize()
assert y[50] == 50 and y[0] == 1 and np.isfinite(cuda.event_elapsed_time(start, end))
