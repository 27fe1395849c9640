"""What the functions of this package share."""

import numpy as np


def double(*arrays):
    """The arrays as float64."""
    return tuple(np.asarray(array, dtype=np.float64) for array in arrays)
