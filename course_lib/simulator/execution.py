"""Carrying out what an observed kernel does, and telling the observers.

Rewritten code of the observed flavour calls `_t.o.load1(_t, number, x, i)` and its kin, where
`_t.o` is an `Execution`. `number` is the place of the site in `launch.sites`.
"""

import contextlib
import math

import numpy as np

from . import engine, errors, guards
from .cluster import elsewhere
from .observe import Memory, Watched, watch
from .primitives import Primitive

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
            if not isinstance(part, (int, np.integer)):
                break
            if not 0 <= part < size:
                raise IndexError("negative index" if part < 0 else "index out of range")
            offset += int(part) * stride
        else:
            return (offset,), array.itemsize
    guards.check_index(array, index)
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


class Execution:
    """Carries out every action of an observed launch. This one checks bounds and raises."""

    def __init__(self, launch):
        self.launch = launch

    # -- accesses --------------------------------------------------------------------------------

    def load(self, thread, number, array, index):
        """`array[index]`."""
        guards.check_index(array, index)
        return array[index]

    def load1(self, thread, number, array, i):
        """`array[i]`."""
        return self.load(thread, number, array, i)

    def load2(self, thread, number, array, i, j):
        """`array[i, j]`."""
        return self.load(thread, number, array, (i, j))

    def store(self, thread, number, value, array, index):
        """`array[index] = value`."""
        guards.check_index(array, index)
        array[index] = value

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
            self.shared_declared(thread, number, array)
        return array

    def shared_declared(self, thread, number, array):
        """The first thread of the block has met a declaration."""

    def local(self, thread, number, name, shape, dtype, alignment=None):
        """A thread's own array."""
        array = guards.local_array(shape, dtype, alignment)
        return watch(array, Memory("local", name, array, 0, owner=thread))

    # -- waiting, and everything else ------------------------------------------------------------

    def wait(self, thread, number, operation):
        """The operation that the thread is going to wait for."""
        thread.at = number
        return operation

    def fence(self, thread, number, scope):
        """Order this thread's accesses before against those after."""

    def branch(self, thread, number, condition):
        """The condition of an `if`, a `while` or a conditional expression."""
        return condition

    def loop(self, thread, number, iterable):
        """What a `for` loop goes over."""
        return iterable

    def returning(self, thread, number):
        """A `return` of the kernel itself."""
        thread.left_at = number

    @staticmethod
    def calling(thread, number):
        """An intrinsic's twin is going to be called: its accesses belong to the call."""
        before, thread.caller = thread.caller, number
        return before

    @staticmethod
    def called(thread, before, result):
        """The twin has returned."""
        thread.caller = before
        return result

    # -- the scheduler's news --------------------------------------------------------------------

    def launch_start(self):
        """Before the first block."""

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


def _name_of(operation):
    return getattr(operation, "__name__", "")


class Reporting(Execution):
    """Tells observers what happens, then lets another Execution carry it out."""

    def __init__(self, launch, observers, inner):
        super().__init__(launch)
        self.inner = inner
        for hook in ("load", "store", "atomic", "barrier", "barrier_release", "warp_op",
                     "warp_release", "cluster_barrier", "cluster_release", "grid_barrier",
                     "grid_release", "fence", "branch", "exit", "shared_declaration",
                     "block_start", "block_end", "launch", "launch_end"):
            found = [getattr(observer, f"on_{hook}") for observer in observers
                     if hasattr(observer, f"on_{hook}")]
            setattr(self, f"on_{hook}", found)
        # What nobody listens to goes straight to what carries it out.
        for hooks, names in ((self.on_load, LOADS), (self.on_store, STORES),
                             (self.on_branch, ("branch", "loop"))):
            if not hooks:
                for name in names:
                    setattr(self, name, getattr(inner, name))

    def touch(self, hooks, thread, number, array, index, count=None):
        """Tell of an access, unless it is outside or only makes a view of the array."""
        if not hooks or array.__class__ is not Watched:
            return
        try:
            offsets, size = elements(array, index)
        except (IndexError, TypeError):
            return
        if count is not None:
            offsets, size = offsets[:1], size * count
        site = self.launch.sites[number]
        for offset in offsets:
            for hook in hooks:
                hook(thread, site, array.memory, offset, size)

    def load(self, thread, number, array, index):
        if not is_view(array, index):
            self.touch(self.on_load, thread, number, array, index)
        return self.inner.load(thread, number, array, index)

    def store(self, thread, number, value, array, index):
        self.touch(self.on_store, thread, number, array, index)
        self.inner.store(thread, number, value, array, index)

    def store1(self, thread, number, value, array, i):
        self.touch(self.on_store, thread, number, array, i)
        self.inner.store1(thread, number, value, array, i)

    def store2(self, thread, number, value, array, i, j):
        self.touch(self.on_store, thread, number, array, (i, j))
        self.inner.store2(thread, number, value, array, i, j)

    def atomic(self, thread, number, operation, array, *args):
        first = (0,) * array.ndim if _name_of(operation) == "_compare_and_swap" else args[0]
        self.touch(self.on_atomic, thread, number, array, first)
        return self.inner.atomic(thread, number, operation, array, *args)

    def relaxed_load(self, thread, number, array, index):
        if not is_view(array, index):
            self.touch(self.on_load, thread, number, array, index)
        return self.inner.relaxed_load(thread, number, array, index)

    def relaxed_store(self, thread, number, array, index, value):
        self.touch(self.on_store, thread, number, array, index)
        self.inner.relaxed_store(thread, number, array, index, value)

    def load_cluster(self, thread, number, array, i, rank):
        with contextlib.suppress(errors.Unreachable):  # for whoever carries it out to say
            self.touch(self.on_load, thread, number, elsewhere(thread, array, rank), i)
        return self.inner.load_cluster(thread, number, array, i, rank)

    def load_many(self, thread, number, array, index, count):
        self.touch(self.on_load, thread, number, array, index, count)
        return self.inner.load_many(thread, number, array, index, count)

    def store_many(self, thread, number, array, index, values):
        self.touch(self.on_store, thread, number, array, index, len(values))
        self.inner.store_many(thread, number, array, index, values)

    def shared(self, thread, number, name, key, shape, dtype, alignment=None):
        is_new = key not in thread.b.watched
        array = self.inner.shared(thread, number, name, key, shape, dtype, alignment)
        if is_new:
            for hook in self.on_shared_declaration:
                hook(thread, self.launch.sites[number], array.memory)
        return array

    def local(self, thread, number, name, shape, dtype, alignment=None):
        return self.inner.local(thread, number, name, shape, dtype, alignment)

    def wait(self, thread, number, operation):
        site = self.launch.sites[number]
        handler = operation if operation is engine.BARRIER else operation[0] if (
            type(operation) is tuple) else None
        if handler is engine.BARRIER or handler is engine.vote_at_barrier:
            for hook in self.on_barrier:
                hook(thread, site)
        elif handler is engine.warp_operation:
            kind = site.text.partition("(")[0].rpartition(".")[2]
            for hook in self.on_warp_op:
                hook(thread, site, kind, operation[2])
        elif handler is engine.wait_for_cluster:
            for hook in self.on_cluster_barrier:
                hook(thread, site)
        elif handler is engine.wait_for_grid:
            for hook in self.on_grid_barrier:
                hook(thread, site)
        return self.inner.wait(thread, number, operation)

    def fence(self, thread, number, scope):
        for hook in self.on_fence:
            hook(thread, self.launch.sites[number], scope)
        self.inner.fence(thread, number, scope)

    def branch(self, thread, number, condition):
        taken = bool(condition)
        for hook in self.on_branch:
            hook(thread, self.launch.sites[number], taken)
        return condition

    def loop(self, thread, number, iterable):
        site = self.launch.sites[number]
        for value in iterable:
            for hook in self.on_branch:
                hook(thread, site, True)
            yield value
        for hook in self.on_branch:
            hook(thread, site, False)

    def returning(self, thread, number):
        self.inner.returning(thread, number)

    def launch_start(self):
        for hook in self.on_launch:
            hook(self.launch)
        self.inner.launch_start()

    def launch_end(self):
        self.inner.launch_end()
        for hook in self.on_launch_end:
            hook(self.launch)

    def block_start(self, block):
        for hook in self.on_block_start:
            hook(block)
        self.inner.block_start(block)

    def block_end(self, block):
        self.inner.block_end(block)
        for hook in self.on_block_end:
            hook(block)

    def barrier_released(self, block, threads):
        for hook in self.on_barrier_release:
            hook(block, threads)
        self.inner.barrier_released(block, threads)

    def warp_released(self, block, group):
        for hook in self.on_warp_release:
            hook(block, [entry[0] for entry in group.values()])
        self.inner.warp_released(block, group)

    def cluster_released(self, cluster, threads):
        for hook in self.on_cluster_release:
            hook([thread for group in threads for thread in group])
        self.inner.cluster_released(cluster, threads)

    def grid_released(self, threads):
        for hook in self.on_grid_release:
            hook(threads)
        self.inner.grid_released(threads)

    def exited(self, thread):
        for hook in self.on_exit:
            hook(thread)
        self.inner.exited(thread)

    def stuck(self, block):
        return self.inner.stuck(block)

    def absorbs(self, error):
        return self.inner.absorbs(error)


def is_view(array, index):
    """True if `array[index]` is no element but another array."""
    if not isinstance(array, np.ndarray):
        return False
    if type(index) is not tuple:
        return array.ndim > 1 or isinstance(index, slice) or index is Ellipsis
    return len(index) < array.ndim or any(
        isinstance(part, slice) or part is Ellipsis for part in index)


def fence_scope(primitive):
    """The scope of a fence of `cuda`, or None if the primitive is none."""
    if isinstance(primitive, Primitive):
        return FENCES.get(primitive.name.removeprefix("cuda."))
    return None


def aligned(offset, alignment):
    """`offset` rounded up to a multiple of `alignment`."""
    return math.ceil(offset / alignment) * alignment
