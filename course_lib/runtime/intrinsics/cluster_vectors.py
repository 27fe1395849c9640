"""16 bytes at a time from the shared memory of another block of the cluster.

`cluster.load_from_cluster` reads one number. Who adds up a tile of sums reads four, which takes a
quarter of the instructions, and of the requests that cross from one multiprocessor to the other.

======================================== =======================================================
`load_vector_from_cluster(target, k,     target[k : k+4] = the shared array's elements i to i+3 in
array, i, rank)`                         the block of rank `rank`; float32, `target` a local array,
                                         element i on a 16-byte boundary (PTX mapa, ld.v4)
======================================== =======================================================

The rules of `cluster` hold. Machine code in `ptx.cluster_vectors`, and a twin, as told in
`intrinsics`.
"""

from course_lib import simulator
from course_lib.runtime.intrinsics import _check_alignment, twins
from course_lib.runtime.intrinsics.cluster import _check_array

WIDTH = 4  # float32 in 16 bytes


def _load_vector_from_cluster(target, k, array, i, rank):
    _check_array(array)
    _check_alignment(array, int(i))
    for e in range(WIDTH):
        target[k + e] = simulator.cluster.load(array, i + e, rank)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"load_vector_from_cluster": _load_vector_from_cluster}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.cluster_vectors")
load_vector_from_cluster = _here["load_vector_from_cluster"]
