"""Arrays for functions that could not be rewritten: they check each index themselves."""

import numpy as np

from .guards import check_index


class CheckedArray(np.ndarray):
    """An ndarray that refuses negative indices; NumPy refuses those past the end."""

    def __getitem__(self, index):
        array = self
        check_index(array, index)
        return np.ndarray.__getitem__(array, index)

    def __setitem__(self, index, value):
        array = self
        check_index(array, index)
        np.ndarray.__setitem__(array, index, value)
