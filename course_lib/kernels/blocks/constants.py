"""Numbers that most kernels need. A bare 0.0 would make float64 of what it meets."""

import math

import numpy as np

ZERO, ONE = np.float32(0), np.float32(1)
NAN, INF = np.float32(math.nan), np.float32(math.inf)
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
