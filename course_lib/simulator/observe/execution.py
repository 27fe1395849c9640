"""Carrying out what an observed kernel does.

Rewritten code of the observed flavour calls `_t.o.load1(_t, number, x, i)` and its kin, where
`_t.o` is an `Execution`. `number` is the place of the site in `launch.sites`.
"""

import math

import numpy as np

from course_lib.simulator.cuda_api import unwritten
from course_lib.simulator.cuda_api.cluster import elsewhere
from course_lib.simulator.cuda_api.postponed import Copy
from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.engine import arithmetic, guards
from course_lib.simulator.engine.checked import check_index
from course_lib.simulator.observe.implicit import Implicit
from course_lib.simulator.observe.observer import Memory, Watched, watch

#: ways to load and to store
LOADS = ("load", "load1", "load2", "relaxed_load", "load_cluster", "load_many")
STORES = ("store", "store1", "store2", "relaxed_store", "store_many")
#: names of the fences -> whom they reach
FENCES = {"threadfence": "grid", "threadfence_block": "block", "threadfence_system": "system"}


def elements(array, index):
    """(offsets in bytes, size of each) of what `array[index]` touches; raises IndexError outside.

    `array` is Watched. A view that is only made, not read, touches nothing: that is for the
    caller to know.
    """
    shape, strides = array.shape, array.strides
    parts = index if type(index) is tuple else (index,)
    offset = array.start
    if len(parts) == len(shape):
        for part, size, stride in zip(parts, shape, strides, strict=True):
            if part.__class__ is not int:
                if not isinstance(part, (int, np.integer)):
                    break
                part = int(part)
            if not 0 <= part < size:
                raise IndexError("negative index" if part < 0 else "index out of range")
            offset += part * stride
        else:
            return (offset,), array.itemsize
    check_index(array, index)
    view = np.ndarray.__getitem__(array, index)
    if not isinstance(view, np.ndarray):
        return (array.start,), array.itemsize
    view = view if view.__class__ is Watched else watch(view, array.memory)
    return all_elements(view), array.itemsize


def all_elements(view):
    """The byte offsets of all elements of a Watched array, in order."""
    offsets = np.array([view.start], np.int64)
    for size, stride in zip(view.shape, view.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return offsets.tolist()


class Execution(Implicit):
    """Carries out every action of an observed launch. This one checks bounds and raises."""

    def __init__(self, launch):
        self.launch = launch

    # -- accesses --------------------------------------------------------------------------------

    def load(self, thread, number, array, index):
        """`array[index]`."""
        if index.__class__ is str:
            return self.load_named(thread, number, array, index)
        check_index(array, index)
        return part_of(array, index)

    def load_named(self, thread, number, array, name):
        """`array["name"]`, where `array` is a record, or an array of records, or neither."""
        if isinstance(array, np.ndarray) and name in (array.dtype.names or ()):
            return self.field(thread, number, array, name)
        return array[name]

    def load1(self, thread, number, array, i):
        """`array[i]`."""
        return self.load(thread, number, array, i)

    def load2(self, thread, number, array, i, j):
        """`array[i, j]`."""
        return self.load(thread, number, array, (i, j))

    def store(self, thread, number, value, array, index):
        """`array[index] = value`."""
        if index.__class__ is str:
            self.store_named(thread, number, value, array, index)
            return
        check_index(array, index)
        arithmetic.store(array, index, self.whole(thread, number, value))

    def store_named(self, thread, number, value, array, name):
        """`array["name"] = value`."""
        if isinstance(array, np.ndarray):
            self.store_field(thread, number, value, array, name)
        else:
            arithmetic.store(array, name, value)

    def store1(self, thread, number, value, array, i):
        """`array[i] = value`."""
        self.store(thread, number, value, array, i)

    def store2(self, thread, number, value, array, i, j):
        """`array[i, j] = value`."""
        self.store(thread, number, value, array, (i, j))

    def atomic(self, thread, number, operation, array, *args):
        """An atomic operation; `args` are the index, unless it means the first element, and more.
        """
        return operation(array, *args)

    def relaxed_load(self, thread, number, array, index):
        """A load with a cache hint, or one that a loop waits on."""
        return self.load(thread, number, array, index)

    def relaxed_store(self, thread, number, array, index, value):
        """A store with a cache hint."""
        self.store(thread, number, value, array, index)

    def load_cluster(self, thread, number, array, i, rank):
        """`array[i]` in the block of `rank` of the cluster."""
        return self.load1(thread, number, elsewhere(thread, array, rank), i)

    def load_many(self, thread, number, array, index, count):
        """`count` elements from `index` on, as one access."""
        return guards.read_elements(array, index, count)

    def store_many(self, thread, number, array, index, values):
        """Store `values` from `index` on, as one access."""
        guards.write_elements(array, index, values)

    def begin_copy(self, thread, number, target, i, values, source, j, n):
        """An asynchronous copy begins (`postponed.begin`)."""
        thread.postponed.append(Copy(target, i, values, source, j, n))

    def finish_copy(self, thread, number, copy):
        """The thread has waited for it."""
        self.store_many(thread, number, copy.target, copy.i, copy.values)

    # -- declarations ----------------------------------------------------------------------------

    def shared(self, thread, number, name, key, shape, dtype, alignment=None):
        """The block's shared array declared at `key`."""
        block = thread.b
        array = block.watched.get(key)
        if array is None:
            static = block.static_bytes
            array = guards.shared_array(thread, key, shape, dtype, alignment)
            if block.static_bytes == static and array.size:  # a view of the dynamic bytes
                memory = block.dynamic_memory
                if memory is None:
                    memory = Memory("shared", name, array, 0, owner=block,
                                    nbytes=block.dynamic.nbytes)
                    memory.dynamic, block.dynamic_memory = True, memory
            else:
                memory = Memory("shared", name, array, block.place_static(array, alignment),
                                owner=block)
            array = block.watched[key] = watch(array, memory)
            array.declared = number
        return array

    def local(self, thread, number, name, shape, dtype, alignment=None):
        """A thread's own array."""
        array = guards.local_array(shape, dtype, alignment)
        return watch(array, Memory("local", name, array, 0, owner=thread))

    # -- waiting, and everything else ------------------------------------------------------------

    def wait(self, thread, number, operation, rounds=()):
        """The operation that the thread is going to wait for, in which rounds of the loops around.
        """
        thread.at, thread.where = number, (number, rounds, thread.calls)
        return operation

    @staticmethod
    def enter_call(thread, number, rounds=()):
        """A device function that may wait is going to be called."""
        before = thread.calls
        thread.calls = number, rounds, before
        return before

    @staticmethod
    def leave_call(thread, before, result):
        """It has returned."""
        thread.calls = before
        return result

    def fence(self, thread, number, scope):
        """Order this thread's accesses before against those after."""

    def branch(self, thread, number, condition):
        """The condition of an `if`, a `while` or a conditional expression."""
        return condition

    def loop(self, thread, number, iterable):
        """What a `for` loop goes over."""
        return iterable

    def endless_poll(self, thread, number, array):
        """A loop begins that a compiler may turn into a jump to itself; it waits for `array`."""

    def returning(self, thread, number):
        """A `return` of the kernel itself."""
        thread.left_at = number

    @staticmethod
    def calling(thread, number):
        """An intrinsic's twin is going to be called: its accesses belong to the call."""
        before, thread.caller = thread.caller, number
        return before

    def called(self, thread, before, result):
        """The twin has returned. An array that it found by its address is observed from here on."""
        thread.caller = before
        return self.launch.watched(result) if result.__class__ is np.ndarray else result

    # -- the scheduler's news --------------------------------------------------------------------

    def launch_start(self):
        """Before the first block."""
        unwritten.forget(self.launch.args)

    def launch_end(self):
        """After the last block, or an error."""

    def block_start(self, block):
        """A block begins."""

    def block_end(self, block):
        """All threads of a block have exited."""

    def barrier_released(self, block, threads):
        """All live threads of a block have met at a barrier."""

    def warp_released(self, block, group):
        """Lanes have met at a warp operation: group maps a lane to (thread, payload)."""

    def cluster_released(self, cluster, threads):
        """All live threads of a cluster have met: `threads` holds a list for each block."""

    def grid_released(self, threads):
        """All live threads of the grid have met."""

    def exited(self, thread):
        """A thread has finished."""

    def stuck(self, block):
        """No thread of `block` can go on: True if something was done about it."""
        return False

    def absorbs(self, error):
        """True if the launch is to end here without raising `error`."""
        return False


def is_view(array, index):
    """True if `array[index]` is no element but another array, or a record, read by its fields."""
    if not isinstance(array, np.ndarray):
        return False
    if array.dtype.names is not None or index.__class__ is str:
        return True
    if type(index) is not tuple:
        return array.ndim > 1 or isinstance(index, slice) or index is Ellipsis
    if len(index) < array.ndim:
        return True
    for part in index:
        if part.__class__ is not int and (isinstance(part, slice) or part is Ellipsis):
            return True
    return False


def part_of(array, index):
    """`array[index]`; of an array of records, the record as a view in the same memory."""
    if array.__class__ is not Watched or array.dtype.names is None:
        return array[index]
    return array[(*index, ...) if type(index) is tuple else (index, ...)]


def fence_scope(primitive):
    """The scope of a fence of `cuda`, or None if the primitive is none."""
    if isinstance(primitive, Primitive):
        return FENCES.get(primitive.name.removeprefix("cuda."))
    return None


def aligned(offset, alignment):
    """`offset` rounded up to a multiple of `alignment`."""
    return math.ceil(offset / alignment) * alignment
