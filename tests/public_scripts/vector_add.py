import numpy as np
from numba import cuda


@cuda.jit
def add(a, b, c):
    i = cuda.grid(1)
    if i < c.size:
        c[i] = a[i] + b[i]


a, b = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
c = cuda.device_array_like(a)
add.forall(len(a))(cuda.to_device(a), cuda.to_device(b), c)
assert (c.copy_to_host() == a + 1).all()
