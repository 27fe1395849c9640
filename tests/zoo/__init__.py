"""A zoo of CUDA kernels: every kind of parallel code the simulator must run as a GPU does.

Plain module-level `@cuda.jit` code; nothing here knows whether it runs on a GPU or not. What single
instructions do (atomics, votes, bits, math, records) is left to numba-cuda's own tests, which
`stock_suite.py` runs.
`CASES` maps a name to a function that, given a `numpy.random.Generator`, builds a `Plan`.
"""

from zoo import atomics, grids, locks, memory, numbers_, scans, sorts, tiles, warps
from zoo.plan import CASES

__all__ = ["CASES", "atomics", "grids", "locks", "memory", "numbers_", "scans", "sorts"]
__all__ += ["tiles", "warps"]
