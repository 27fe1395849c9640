"""Results that lie anywhere: an array with gaps, as a kernel of one-dimensional arrays takes it."""

import sys

import numpy as np

from course_lib.runtime.host import arrays


def whole_memory(array):
    """(one dimension over all memory from the first element of `array` to its last, strides).

    So a kernel may write to a slice of a larger array, whose other elements stay as they are. The
    strides are counted in elements; none may be negative.
    """
    strides = arrays.strides_of(array)
    if min(strides, default=0) < 0:
        raise arrays.ArrayError(f"out must not have negative strides, but has {strides}")
    last = sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
    if arrays.is_tensor(array):
        return array.detach().as_strided((last + 1,), (1,)), strides
    if isinstance(array, np.ndarray):
        library = np
    else:
        library = sys.modules[type(array).__module__.partition(".")[0]]
        if not hasattr(library, "lib"):
            if arrays.is_dense(array):
                return array, strides  # which a launch makes flat by itself
            raise arrays.ArrayError(
                f"out must be dense, being a {type(array).__name__}; its strides are {strides}"
            )
    as_strided = library.lib.stride_tricks.as_strided
    return as_strided(array, (last + 1,), (array.dtype.itemsize,)), strides
