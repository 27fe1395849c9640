import numpy as np
from numba import cuda, float32
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32


@cuda.jit
def estimate_pi(states, tries, out):
    i = cuda.grid(1)
    inside = 0
    for _ in range(tries):
        x = xoroshiro128p_uniform_float32(states, i)
        y = xoroshiro128p_uniform_float32(states, i)
        if x * x + y * y <= float32(1):
            inside += 1
    out[i] = float32(4) * float32(inside) / float32(tries)


states = create_xoroshiro128p_states(64, seed=1)
out = np.zeros(64, np.float32)
estimate_pi[2, 32](states, 50, out)
assert abs(out.mean() - np.pi) < 0.3
