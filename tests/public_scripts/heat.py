import numpy as np
from numba import cuda, float32


@cuda.jit
def diffuse(now, then, steps, speed):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    for step in range(steps):
        old, new = (now, then) if step % 2 == 0 else (then, now)
        if 0 < i < now.size - 1:
            new[i] = old[i] + speed * (old[i - 1] - old[i] - old[i] + old[i + 1])
        grid.sync()  # all blocks have written


now = np.zeros(128, np.float32)
now[60] = 100
then = cuda.to_device(now)
device = cuda.to_device(now)
diffuse[4, 32](device, then, 6, float32(0.25))
heat = device.copy_to_host()
assert abs(heat.sum() - 100) < 1e-3 and heat[60] == heat.max() < 30
