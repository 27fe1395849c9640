"""A table of addresses: how one launch works on all of a network's tensors.

A row describes a tensor that is to be updated: where it, its gradient, its states and its count of
steps lie, how many elements it has, and the first block that works on it. A *chunk* says which row
a block works on, and from which element on. The table lies in the GPU's memory and is filled by
kernels, which take the addresses as arguments: nothing is copied from the host, nobody waits, and a
CUDA graph that is being captured can hold it. It is filled once, and again where an address is a
new one; gradients often come to lie elsewhere.
"""

import contextlib
import functools
import math
from dataclasses import dataclass
from threading import get_ident

import numpy as np

from course_lib import cuda
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch, on_gpu
from course_lib.runtime.intrinsics import VECTOR_BYTES

BLOCK_SIZE = 256
UNROLL = 2  # vectors of each array in flight per thread
WAVE = 132 * 8  # blocks that the largest chip of today runs at once
MOST_TILES = 8  # of a chunk
#: Columns of a row.
PARAMETER, GRADIENT, STATES, STEP, SIZE, FIRST_BLOCK, ROW = 0, 1, 2, 5, 6, 7, 8
AT_ONCE = 16  # numbers that one launch puts into the table


@cuda.jit
def fill_kernel(table, start, stride, n, a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r):
    # Thread t takes the t-th of the numbers, if there are as many.
    t = cuda.threadIdx.x
    low = a if t == 0 else b if t == 1 else c if t == 2 else d
    low = low if t < 4 else e if t == 4 else f if t == 5 else g if t == 6 else h
    high = i if t == 8 else j if t == 9 else k if t == 10 else m
    high = high if t < 12 else o if t == 12 else p if t == 13 else q if t == 14 else r
    if t < n:
        table[start + t * stride] = low if t < 8 else high


@cuda.jit
def chunks_kernel(table, chunks, length):
    # A block for each row: one pair (row, first element) for each block that will work on it.
    row = cuda.blockIdx.x
    size, first = table[row * ROW + SIZE], table[row * ROW + FIRST_BLOCK]
    for i in range(cuda.threadIdx.x, (size + length - 1) // length, cuda.blockDim.x):
        chunks[2 * (first + i)] = row
        chunks[2 * (first + i) + 1] = i * length


def plan(n_elements, itemsize):
    """Elements of a chunk: as many as a block's threads have in flight, or more of these tiles."""
    tile = BLOCK_SIZE * UNROLL * VECTOR_BYTES // itemsize
    return tile * max(1, min(MOST_TILES, n_elements // (tile * WAVE)))


@dataclass
class Part:
    """The tensors of one dtype: what a launch takes."""

    members: list  # their numbers in the caller's lists
    sizes: list
    length: int  # elements of a chunk
    n_blocks: int
    table: object  # int64: the rows, then the addresses of the counts of steps
    chunks: object  # int64
    ticket: object  # uint32: how many blocks of a launch have come to their end
    unused: object  # float32, one element: what a launch takes in an array's stead
    n_steps: int = 0  # counts of steps that the launch counts on

    @property
    def n_rows(self):
        return len(self.members)


class Table:
    """The addresses of tensors that are updated together; to be kept from one step to the next.

    Keeps no tensor alive. It must outlive a CUDA graph in which it was used.
    """

    def __init__(self):
        self.parts = ()
        self._looks = self._addresses = None

    def prepare(self, parameters, gradients, states, steps):
        """Fill the table where that is still to be done; its parts, one for each dtype.

        states  up to three lists of tensors, as long as the others
        steps   float32 arrays of one element each, or None
        """
        lists = [parameters, gradients, *states, *([] if steps is None else [steps])]
        addresses = [[_address_of(x) for x in tensors] for tensors in lists]
        looks = [(arrays.dtype_name(p), arrays.size_of(p)) for p in parameters]
        if (looks, len(states), steps is None) != self._looks:
            self._lay_out(parameters, looks)
            self._addresses = None
            self._looks = looks, len(states), steps is None
        if addresses != self._addresses:
            before = self._addresses or [None] * len(addresses)
            for part in self.parts:
                self._fill(part, before, addresses, len(states), steps is not None)
            self._addresses = addresses
        return self.parts

    def move_gradients(self, addresses):
        """Write down where the gradients lie now; all else is as it was prepared."""
        for part in self.parts:
            _put(part.table, GRADIENT, ROW, [addresses[i] for i in part.members])
        self._addresses[1] = addresses

    def _lay_out(self, parameters, looks):
        parts = []
        for dtype in dict.fromkeys(dtype for dtype, _ in looks):
            members = [i for i, look in enumerate(looks) if look[0] == dtype and look[1]]
            if not members:
                continue
            sizes = [looks[i][1] for i in members]
            like = parameters[members[0]]
            length = plan(sum(sizes), like.dtype.itemsize)
            n_blocks = sum(math.ceil(size / length) for size in sizes)
            numbers = len(members) * ROW + len(parameters)
            later = _waiting.get(get_ident())
            empty = functools.partial(arrays.empty, like=like) if later is None else later.empty
            parts.append(
                Part(
                    members,
                    sizes,
                    length,
                    n_blocks,
                    table=empty((numbers,), dtype="int64"),
                    chunks=empty((2 * n_blocks,), dtype="int64"),
                    ticket=empty((1,), dtype="uint32"),
                    unused=empty((1,), dtype="float32"),
                )
            )
        self.parts = tuple(parts)

    def _fill(self, part, before, addresses, n_states, has_steps):
        """Put into `part` what of `addresses` is not what was there `before`."""
        columns = [PARAMETER, GRADIENT, *range(STATES, STATES + n_states)]
        columns += [STEP] if has_steps else []
        for column, old, new in zip(columns, before, addresses, strict=True):
            if old != new:
                _put(part.table, column, ROW, [new[i] for i in part.members])
        if before[0] is None:
            firsts = np.cumsum([0, *(math.ceil(size / part.length) for size in part.sizes)])
            _put(part.table, SIZE, ROW, part.sizes)
            _put(part.table, FIRST_BLOCK, ROW, firsts[:-1].tolist())
            _fill(chunks_kernel, part.n_rows, BLOCK_SIZE, part.table, part.chunks, part.length)
            _put(part.ticket, 0, 1, [0])
        # Parts may have a count in common, so none may count before all have read.
        if has_steps and part is self.parts[-1] and before[-1] != addresses[-1]:
            counts = list(dict.fromkeys(addresses[-1]))
            _put(part.table, part.n_rows * ROW, 1, counts)
            part.n_steps = len(counts)


def _address_of(array):
    found = arrays.address_of(array)
    if found == 0 and arrays.size_of(array):
        where = getattr(array, "device", "the host")
        raise arrays.ArrayError(
            f"a {type(array).__name__} on {where} has no address to put into a table: pass PyTorch "
            "tensors or NumPy arrays"
        )
    if _lies_on_a_gpu(array) and not on_gpu():
        raise arrays.ArrayError(
            "a fused optimiser finds its arrays by address, so it can't be observed on a GPU's "
            "arrays: pass tensor.cpu()"
        )
    return found


def _lies_on_a_gpu(array):
    # A parameter would refuse the attribute: it wants a gradient.
    if arrays.is_tensor(array):
        return array.is_cuda
    return hasattr(array, "__cuda_array_interface__")


def _put(table, start, stride, values):
    """table[start], table[start + stride], … = values."""
    for first in range(0, len(values), AT_ONCE):
        some = list(values[first : first + AT_ONCE])
        padded = some + [0] * (AT_ONCE - len(some))
        _fill(fill_kernel, 1, 32, table, start + first * stride, stride, len(some), *padded)


_waiting = {}  # thread -> the `_Later` of its `filled_later`


class _Later:
    """Memory for the tables of one update, taken beforehand, and the launches that fill them."""

    def __init__(self, parameters):
        n = len(parameters)
        n_blocks = n + sum(map(arrays.size_of, parameters)) // (BLOCK_SIZE * UNROLL * 4)
        sizes = {"int64": (ROW + 3) * n + 2 * n_blocks, "uint32": n, "float32": n}
        self.free = {
            dtype: arrays.empty((size,), like=parameters[0], dtype=dtype)
            for dtype, size in sizes.items()
        }
        self.launches = []

    def empty(self, shape, dtype):
        (n,) = shape
        if arrays.size_of(self.free[dtype]) < n:
            raise RuntimeError("there is room for the tables of one update of the parameters")
        found, self.free[dtype] = self.free[dtype][:n], self.free[dtype][n:]
        return found


def _fill(*launched):
    later = _waiting.get(get_ident())
    if later is None:
        launch(*launched)
    else:
        later.launches.append(launched)


@contextlib.contextmanager
def filled_later(parameters):
    """Tables that are prepared in this block, by this thread, are filled as it ends.

    parameters  those that the block updates, once; at least one

    For a block that captures a CUDA graph: the graph then holds none of these launches, and reads
    what is there when it is replayed. So the tables lie in memory that was taken before the block:
    what is allocated while a graph is captured, the graph's earlier kernels may write into. Where
    the block raises, nothing is filled. Gives what memory is left, by dtype.
    """
    before, _waiting[get_ident()] = _waiting.get(get_ident()), (later := _Later(parameters))
    try:
        yield later.free
    finally:
        del _waiting[get_ident()]
        if before is not None:
            _waiting[get_ident()] = before
    for launched in later.launches:
        _fill(*launched)
