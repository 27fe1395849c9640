"""Thread-block clusters: neighbouring blocks that read each other's shared memory.

The blocks of a cluster run at the same time. numba.cuda has no names for what they can do; whoever
gives it some registers twins (`register_twin`) made of these, which kernels may also use directly:

    simulator.cluster.rank()                which block of its cluster this is, from 0
    simulator.cluster.size()                how many blocks its cluster has
    simulator.cluster.sync()                wait for every live thread of the cluster
    simulator.cluster.load(array, i, rank)  element i of the same shared array in block `rank`

`simulator.run(..., cluster=n)` makes clusters of n consecutive blocks in x. A block's shared memory
is gone when the block has exited: reading it then is an error, as on a GPU.
"""

import numbers

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.engine import guards, scheduler
from course_lib.simulator.engine.checked import check_index
from course_lib.simulator.engine.report import place
from course_lib.simulator.observe.observer import Watched, pointer, watch

#: What the largest clusters have; all chips with clusters can do 8.
MOST_BLOCKS = 16


class Cluster:
    """The blocks of a cluster, by rank."""

    def __init__(self, blocks):
        self.blocks = blocks
        for block in blocks:
            block.cluster = self

    def has_met(self):
        """True if every live thread waits at the barrier of the cluster."""
        waiting = 0
        for block in self.blocks:
            if len(block.at_cluster) != block.live:
                return False
            waiting += block.live
        return waiting > 0


def check_size(cluster, grid):
    """`cluster` as an int; LaunchError if it is none, too large, or does not divide the grid."""
    if not isinstance(cluster, numbers.Integral) or not 1 <= cluster <= MOST_BLOCKS:
        raise errors.LaunchError(
            f"cluster must be an integer from 1 to {MOST_BLOCKS}; got {cluster!r}")
    if grid[0] % cluster:
        raise errors.LaunchError(
            f"gridDim.x is {grid[0]:,}, which clusters of {cluster} blocks do not divide")
    return int(cluster)


def elsewhere(thread, array, rank):
    """`array`, a shared array of this thread's block, in the block of `rank`: the same view of it.

    Raises
    ------
    TypeError if `array` is no shared array, Unreachable if there is no such block.
    """
    block = thread.b
    key, own = _declared(block, array)
    size = block.launch.cluster
    if not 0 <= rank < size:
        raise errors.Unreachable(
            f"{place(thread)} reads from rank {rank} of its cluster, which has "
            f"{size} block{'s' if size > 1 else ''}")
    if rank == block.rank:
        return array
    peer = block.cluster.blocks[rank]
    if peer.live == 0:
        raise errors.Unreachable(
            f"{place(thread)} reads shared memory of block {peer.index}, which has exited: all "
            f"blocks of a cluster must wait for each other after the last such read", peer)
    there = _arrays(peer, array).get(key)
    if there is None:
        there = _declare(peer, key, own, block)
    if array is own:
        return there
    # A part of the declared array, or another type over its bytes.
    view = np.ndarray(array.shape, array.dtype, there.view(np.ndarray).view(np.uint8),
                      pointer(array) - pointer(own), array.strides)
    if there.__class__ is Watched:
        view = watch(view, there.memory)
        view.declared = array.declared
    return view


def _arrays(block, like):
    """The block's shared arrays by declaration: watched ones if `like` is."""
    return block.watched if like.__class__ is Watched else block.arrays


def _declared(block, array):
    """(key, array) of the declaration that `array` is, or is a part of."""
    if isinstance(array, np.ndarray):
        arrays = _arrays(block, array)
        for key, own in arrays.items():
            if own is array:
                return key, own
        start = pointer(array)
        for key, own in arrays.items():
            if isinstance(own, np.ndarray) and 0 <= start - pointer(own) < own.nbytes:
                return key, own
    raise TypeError(f"a cluster reads the shared arrays of its blocks; this is "
                    f"{'no shared array' if isinstance(array, np.ndarray) else repr(array)}")


def _declare(peer, key, own, block):
    """What `peer`, which has not come to the declaration yet, will find there."""
    dynamic = block.dynamic is not None and np.may_share_memory(own, block.dynamic)
    shape, thread = 0 if dynamic else own.shape, peer.threads[0]
    if own.__class__ is Watched:
        return thread.o.shared(thread, own.declared, own.memory.name, key, shape, own.dtype)
    return guards.shared_array(thread, key, shape, own.dtype)


def _rank(thread):
    """Which block of its cluster this thread's is, from 0."""
    return thread.b.rank


def _size(thread):
    """How many blocks the cluster has."""
    return thread.b.launch.cluster


def _sync(thread):
    """Wait for every thread of the cluster that has not exited."""
    return (scheduler.wait_for_cluster,)


def _load(thread, array, i, rank):
    """Element `i` of the same shared array in the block of `rank`."""
    array, index = elsewhere(thread, array, rank), i
    check_index(array, index)
    return array[index]


rank = Primitive("simulator.cluster.rank", _rank, "thread")
size = Primitive("simulator.cluster.size", _size, "thread")
sync = Primitive("simulator.cluster.sync", _sync, "blocking")
load = Primitive("simulator.cluster.load", _load, "thread", access="load_cluster")
