"""Watching a launch: what an observer is told, and about which memory.

An observer is an object with some of the methods of `Observer`; `observing_with(observer)`, in
`real`, makes it watch every launch inside the `with` block (`simulator.sanitize()` and
`simulator.trace()` are made of it). Several may watch at once. Under an
observer a kernel is rebuilt in the *observed* flavour: no array is kept as lists, and every access,
wait and fence passes through the launch's `Execution`, which carries it out; a `Reporting` one
tells the observers first. Without an observer nothing of this runs, and kernels cost what they
always cost.

What is told, in the order in which it happens:

    on_launch(launch)                      before the first thread; `launch.sites[number]` are the
                                           `ObservedSite`s, `launch.grid_dim`, `.block_dim`, `.name`
    on_block_start(block), on_block_end(block)      `block.index` is (x, y, z)
    on_shared_declaration(thread, site, memory)     the first thread that reaches it
    on_load(thread, site, memory, offset, size)     a read of `size` bytes, `offset` bytes into
    on_store(thread, site, memory, offset, size)    `memory`; a vector access is one event; a slice
    on_atomic(thread, site, memory, offset, size)   is one event for each element
    on_barrier(thread, site), on_barrier_release(block, threads)
    on_warp_op(thread, site, kind, mask)   kind "shfl_sync", "syncwarp", "ballot_sync" …
    on_warp_release(block, threads)        the lanes of the mask have met and go on
    on_cluster_barrier(thread, site), on_cluster_release(threads)
    on_grid_barrier(thread, site), on_grid_release(threads)
    on_fence(thread, site, scope)          scope "block", "grid" or "system"
    on_branch(thread, site, taken)         `if`, `while`, conditional expression: the outcome, a
                                           bool; `for`: True per iteration, False at its end. Only
                                           if some observer has `wants_branches = True`
    on_exit(thread)                        the thread has finished
    on_launch_end(launch)                  also after an error

`thread` has `tx, ty, tz` (`.index`), `tid` (its number in the block), `lane`, `b` (its block,
`b.index`), and is the same object for the whole life of the CUDA thread; an observer may set
attributes on it. `site` is an `ObservedSite`. An augmented assignment (`x[i] += 1`) is an on_load
and then an on_store, at two sites of the same place. A vector access inside an intrinsic's twin
has the site of the *call* in the caller's source (kind "call"). Accesses outside an array are not
told: without a sanitizer they raise, with one they are its finding.

`memory` is a `Memory`: one allocation. Kernel arguments that overlap are one Memory; its `address`
is where a GPU would have put it (512-byte aligned), so that `memory.address + offset` counts
sectors as a GPU does; shared memory starts at address 0 of each block.
"""

import contextvars
import linecache
from dataclasses import dataclass

import numpy as np

observers = contextvars.ContextVar("simulator_observers", default=())  # noqa: B039


class Observer:
    """Base of observers. Define the hooks of the module's docstring that you need, and no more.

    Attributes
    ----------
    wants_branches : bool
        Whether `on_branch` is to be called.
    wants_loops : bool
        Whether the execution is to be told of loops and calls (`tracing_rewrite`).
    """

    wants_branches = False
    wants_loops = False

    def wants_launch(self, kernel, grid, block, values):
        """Whether this launch of `kernel` on its arguments `values` is to be observed at all."""
        return True

    def wants_block(self, block):
        """Whether the threads of this block are to be observed; others run without reports."""
        return True

    def execution(self, launch):
        """The `Execution` that is to carry out `launch`, or None for the ordinary one."""
        return None


#: ``current_observers()`` gives the observers of launches that start here, outermost first;
#: ``observing()`` asks whether there are any, as inside `sanitize()` or `trace()`. No function is
#: written around the one call, because every launch makes it.
observing = current_observers = observers.get


@dataclass(frozen=True)
class ObservedSite:
    """One place in the source where something happens that observers are told of.

    Attributes
    ----------
    number : int
        Its place in `launch.sites`.
    kind : str
        "load", "store", "atomic", "call" (of an intrinsic), "barrier", "warp", "cluster",
        "grid", "fence", "branch", "shared", "local", "return".
    text, array : str
        The expression, and the name of the array in it ("" where there is none).
    filename, line, col, end_line, end_col
        Where it stands; lines from 1, columns from 0.
    relaxed : bool
        True for loads that a loop waits on, for stores right after a fence, and for atomics whose
        answer is used.
    polled : bool
        True for loads and atomics that a loop waits on.
    """

    number: int
    kind: str
    text: str
    array: str
    filename: str
    function: str
    line: int
    col: int
    end_line: int
    end_col: int
    relaxed: bool = False
    polled: bool = False

    @property
    def source(self):
        """The line of source, without indentation."""
        return linecache.getline(self.filename, self.line).strip()


class Memory:
    """One allocation.

    Attributes
    ----------
    space : "global", "shared" or "local"
    name : str
        The parameter's or variable's name.
    address : int
        Where a GPU would have put it.
    nbytes, itemsize : int
    owner : Block for shared memory, Thread for local memory, else None
    shape, dtype : of the array as it was first named
    """

    __slots__ = ("space", "name", "address", "nbytes", "itemsize", "owner", "shape", "dtype",
                 "base", "dynamic", "shadow", "keep")

    def __init__(self, space, name, array, address, owner=None, base=None, nbytes=None):
        self.space, self.name, self.address, self.owner = space, name, address, owner
        self.shape, self.dtype, self.itemsize = array.shape, array.dtype, array.itemsize
        self.base = pointer(array) if base is None else base
        self.nbytes = array.nbytes if nbytes is None else nbytes
        self.dynamic = False
        self.shadow = None
        self.keep = array  # its bytes must outlive this object

    def __repr__(self):
        return f"<{self.space} memory {self.name}: {self.nbytes} bytes>"


class Watched(np.ndarray):
    """An array in observed memory: `memory` is its allocation, `start` its first byte there,
    `declared` the number of the site that declared it, if a kernel did.

    `granule`, `one` and `two` belong to the execution: what it keeps about this very view, the last
    ones if that has one dimension or two.
    """

    memory = None
    declared = 0
    _start = None
    granule = one = two = None

    def __array_finalize__(self, source):
        if source is not None and source.__class__ is Watched:
            self.memory, self.declared = source.memory, source.declared

    @property
    def start(self):
        """Bytes from the start of the memory to this array's first element."""
        if self._start is None:
            self._start = pointer(self) - self.memory.base
        return self._start


def pointer(array):
    """The address of an array's first element."""
    return array.__array_interface__["data"][0]


def watch(array, memory):
    """A view of `array` that knows its memory."""
    view = array.view(Watched)
    view.memory = memory
    return view


def watch_arguments(values, names):
    """Kernel arguments with every array watched; arrays that overlap share their Memory.

    Parameters
    ----------
    values : list
        What `arrays.kernel_argument` gave; tuples may hold arrays.
    names : list of str
    """
    found = []
    for value, name in zip(values, names, strict=True):
        _collect(value, name, found)
    memories = _memories(found)

    def wrap(value):
        if isinstance(value, np.ndarray):
            memory = memories.get(id(value))
            return value if memory is None else watch(value, memory)
        if isinstance(value, tuple):
            parts = [wrap(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    return [wrap(value) for value in values]


def memories_of(values):
    """The memories of what `watch_arguments` gave, each once."""
    found = []
    for value in values:
        if value.__class__ is Watched:
            found.append(value.memory)
        elif isinstance(value, tuple):
            found += memories_of(value)
    return list(dict.fromkeys(found))


def watch_within(array, memories):
    """`array`, watched if all of it lies in one of `memories`; it is contiguous."""
    first = pointer(array)
    for memory in memories if array.size else ():
        if memory.base <= first and first + array.nbytes <= memory.base + memory.nbytes:
            return watch(array, memory)
    return array


def _collect(value, name, found):
    if isinstance(value, np.ndarray) and value.ndim and value.size and not value.dtype.hasobject:
        low, high = np.lib.array_utils.byte_bounds(value)
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        first = np.lib.array_utils.byte_bounds(owner)[0] if owner.size else low
        found.append((min(first, low), low, high, name, value))
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            _collect(part, f"{name}[{place}]", found)


def _memories(found):
    """id(array) -> Memory. `found` holds (start of allocation, low, high, name, array)."""
    result, address, end, memory = {}, 1 << 20, None, None
    order = {id(entry[4]): place for place, entry in enumerate(found)}
    for first, low, high, name, array in sorted(found, key=lambda entry: entry[:3]):
        if memory is not None and low < end:
            end = max(end, high)
            memory.nbytes = end - memory.base
            if order[id(array)] < order[id(memory.keep)]:
                memory.name, memory.keep = name, array
        else:
            # The start of the allocation is aligned; a view keeps its distance from it.
            memory = Memory("global", name, array, address + low - first, base=low,
                            nbytes=high - low)
            end = high
        address = -(-(memory.address + memory.nbytes) // 512) * 512 + 512
        result[id(array)] = memory
    return result
