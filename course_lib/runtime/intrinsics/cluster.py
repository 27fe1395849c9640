"""Thread-block clusters: blocks that run side by side and read each other's shared memory.

Blocks of a grid usually know nothing of each other: they may run at the same time or one after
another, and what one has found reaches another only through global memory and, as a rule, a second
launch. A *cluster* is a group of up to eight neighbouring blocks which the chip (from sm_90 on)
promises to run at the same time and close together. They can wait for each other, and read each
other's shared memory directly: *distributed shared memory*. A row too long for one block's
registers or shared memory can then be shared by a cluster, each block reducing its part:

    scratch[0] = part                     # one thread of each block
    cluster_sync()                        # now every block's scratch can be read
    total = np.float32(0)
    for rank in range(cluster_size()):
        total += load_from_cluster(scratch, 0, rank)
    cluster_sync()                        # no block may exit, or write scratch, before all read

`launch(..., cluster=n)` makes clusters of `n` consecutive blocks in x. Without it, and on chips
before sm_90, every block is a cluster of its own, so that the same kernel runs there too.

============================== ====================================================================
`cluster_rank()`               which block of its cluster this is, from 0 (PTX %cluster_ctarank)
`cluster_size()`               how many blocks its cluster has (PTX %cluster_nctarank)
`cluster_sync()`               wait for all threads of all its blocks (PTX barrier.cluster); what
                               they wrote before, all see afterwards, as after `cuda.syncthreads`
`load_from_cluster(            element `i` of the same shared float32 array in the block of rank
array, i, rank)`               `rank`, one dimension (PTX mapa, ld)
============================== ====================================================================

Two rules, both checked by the simulator. As with `cuda.syncthreads`, every thread of every block of
the cluster must reach every `cluster_sync`. And the shared memory of a block that has exited is
gone: after the last read from another block, a `cluster_sync` keeps all of them until all have
read.

Each intrinsic is machine code (`ptx.cluster`) and a twin, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import twins


def _cluster_rank():
    return simulator.cluster.rank()


def _cluster_size():
    return simulator.cluster.size()


def _cluster_sync():
    simulator.cluster.sync()


def _check_array(array):
    if array.dtype != np.float32 or array.ndim != 1:
        raise TypeError(
            f"load_from_cluster needs a shared array of float32 with one dimension, not "
            f"{array.ndim} of {array.dtype}"
        )


def _load_from_cluster(array, i, rank):
    _check_array(array)
    return simulator.cluster.load(array, i, rank)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {
    "cluster_rank": _cluster_rank,
    "cluster_size": _cluster_size,
    "cluster_sync": _cluster_sync,
    "load_from_cluster": _load_from_cluster,
}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.cluster")
cluster_rank, cluster_size = _here["cluster_rank"], _here["cluster_size"]
cluster_sync, load_from_cluster = _here["cluster_sync"], _here["load_from_cluster"]
