"""Elementwise work on rows with gaps between them, such as `x[:, 1:-1]`: nothing is copied first.

Element i of the result, which is dense, is made of column i % n_cols of row i // n_cols of each
input. A thread makes a vector of the result; it reads vectors where the input has them there, and
else single elements, which neighbouring threads find in the same cache lines. An input that is one
row, and begins off the result's boundaries, is read like that, too.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
)

INT32_MAX = 2**31 - 1


@cuda.jit(device=True)
def load_across(values, x, i, n, n_cols, step, vectors):
    """values[:width] = the elements of x for the result's from `i` on, those that there are.

    step     elements of x from one row to the next
    vectors  whether each vector of the result is one of x, in one row and on a boundary
    """
    width = vector_width(x)
    row = np.int64(divided(i, n_cols)[0]) if n <= INT32_MAX else i // n_cols
    col, at = i - row * n_cols, i + row * (step - n_cols)
    if vectors and i + width <= n:
        load_vector(values, x, at)
    elif col + width <= n_cols and i + width <= n:
        for k in range(width):
            values[k] = load(x, at + k)
    else:
        for k in range(width):
            values[k] = load(x, at + k) if i + k < n else ZERO
            col += 1
            if col == n_cols:
                col, at = np.int64(0), at + step - n_cols


@cuda.jit(device=True)
def store_whole(y, i, n, values):
    """y[i:] = values[:width], up to y[n - 1]; y[i] is on a boundary."""
    if i + vector_width(y) <= n:
        store_vector(y, i, values)
    else:
        for k in range(vector_width(y)):
            if i + k < n:
                store(y, i + k, values[k])


# --- for launchers


def in_rows(n, operands):
    """(n_cols, step and `vectors` of each input): what a kernel takes of `n` elements.

    None where the result has no vectors, where an input lies in another order than the result, in
    rows of another length, or in no rows; and where the inputs have vectors in common with it.
    """
    *inputs, result = operands
    width, places = VECTOR_BYTES // result.dtype.itemsize, [*map(arrays.address_of, operands)]
    if places.pop() % VECTOR_BYTES:
        return None
    found = [_rows_of(x) for x in operands]
    *_, (_, _, order) = found
    if any(row is None or row[2] != order for row in found):
        return None
    n_cols = min(row[0] for row in found)
    if n_cols == n and not any(place % VECTOR_BYTES for place in places):
        return None
    if n_cols > INT32_MAX or any(row[0] not in (n_cols, n) for row in found):
        return None
    numbers = [n_cols]
    for place, (length, step, _) in zip(places, found[:-1], strict=True):
        whole = length == n or not (n_cols % width or step % width)
        numbers += n_cols if length == n else step, whole and not place % VECTOR_BYTES
    return numbers


def _rows_of(array):
    """(numbers of a row, elements from one row to the next, axes as memory has them), or None.

    A dense array is one row. Others than PyTorch and NumPy can't say what lies between rows.
    """
    extents, strides = tuple(array.shape), arrays.strides_of(array)
    order = sorted((a for a, n in enumerate(extents) if n != 1), key=lambda a: (-strides[a], a))
    axes, n_cols = list(order), 1
    while axes and strides[axes[-1]] == n_cols:
        n_cols *= extents[axes.pop()]
    step = expected = strides[axes[-1]] if axes else n_cols
    for axis in reversed(axes):
        if strides[axis] != expected:
            return None
        expected *= extents[axis]
    known = not axes or arrays.is_tensor(array) or isinstance(array, np.ndarray)
    return (n_cols, step, order) if known and step >= n_cols else None
