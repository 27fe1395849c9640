"""Numbers along an axis that is not the last: how a thread finds, loads and stores them.

A *column* is the numbers along the axis at one place of all others: `length` numbers, `step`
elements from one to the next, where step is the product of the sizes behind the axis. Columns are
counted in the order in which their first numbers lie in memory. Neighbouring columns lie side by
side, so neighbouring threads take them, and memory is read in order although each column is not.

A thread takes `width` neighbouring columns. `values` is its local array: number c of its column k
in values[c, k]. There are two ways:

============ ========= ======================================================
`vectors`    width     needs
============ ========= ======================================================
True         16 bytes  `step` a multiple of it, arrays on 16-byte boundaries
False        1         nothing
============ ========= ======================================================
"""

import math
from typing import NamedTuple

from course_lib import cuda
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
)

BLOCK_SIZE = 128


class Access(NamedTuple):
    """Device functions of one of the two ways."""

    width: object  # (x) -> columns of a thread
    load_some: object  # (values, n_slots, x, start, step, first, length, beyond)
    store_one: object  # (y, i, values_of_one_number)


@cuda.jit(device=True)
def start_of(column, length, step):
    """Where the first number of a column lies."""
    return column + column // step * (length - 1) * step


@cuda.jit(device=True)
def _one(x):
    return 1


@cuda.jit(device=True)
def _vector_width(x):
    return vector_width(x)


@cuda.jit(device=True)
def _load_one(target, x, i):
    target[0] = load(x, i)


@cuda.jit(device=True)
def _store_one(y, i, source):
    store(y, i, source[0])


@cuda.jit(device=True)
def _load_vector(target, x, i):
    load_vector(target, x, i)


@cuda.jit(device=True)
def _store_vector(y, i, source):
    store_vector(y, i, source)


def access(vectors):
    """The `Access` of one of the two ways."""
    width = _vector_width if vectors else _one
    load_numbers = _load_vector if vectors else _load_one

    @cuda.jit(device=True)
    def load_some(values, n_slots, x, start, step, first, length, beyond):
        """Numbers `first` to `first + n_slots` of the columns; past their end, `beyond`."""
        for c in range(n_slots):
            for k in range(width(x)):
                values[c, k] = beyond
        for c in range(n_slots):
            if first + c < length:
                load_numbers(values[c], x, start + (first + c) * step)

    return Access(width, load_some, _store_vector if vectors else _store_one)


def fit_vectors(step, operands):
    """Whether threads may take 16 bytes at a time of each of the arrays."""
    itemsize = operands[0].dtype.itemsize
    addresses = (arrays.address_of(operand) for operand in operands)
    return not any(number % VECTOR_BYTES for number in (step * itemsize, *addresses))


def width_of(array, vectors):
    """Columns that a thread takes, for the launcher."""
    return VECTOR_BYTES // array.dtype.itemsize if vectors else 1


def seen_from(shape, axis):
    """(columns, their length, their step) of a contiguous array of `shape` along `axis`."""
    step = math.prod(shape[axis + 1 :])
    return math.prod(shape[:axis]) * step, shape[axis], step


#: Numbers of each column that a thread may hold, and of all its columns and arrays together.
SLOTS, MOST_VALUES = (4, 8, 16), 128
STREAM_SLOTS = 4  # numbers of each column that are read at a time, where they are not held


def slots_for(length, each, most=MOST_VALUES, slots=SLOTS):
    """The least of `slots` that hold a column of `length`, with `each` values for a number of it.

    None if there is none, or if they would be more than `most` values.
    """
    return next((n for n in slots if length <= n and n * each <= most), None)
