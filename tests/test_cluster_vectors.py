"""`intrinsics.cluster_vectors`: 16 bytes from another block's shared memory, on both sides."""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda, simulator
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics.cluster import cluster_rank, cluster_size, cluster_sync
from course_lib.runtime.intrinsics.cluster_vectors import load_vector_from_cluster

PLACE = "cpu" if SIMULATED else "cuda"
simulated_only = pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive this")
needs_clusters = pytest.mark.skipif(
    not SIMULATED and torch.cuda.get_device_capability() < (9, 0), reason="no clusters here"
)
BLOCK = 32
CACHE = BLOCK * 4


@cuda.jit
def rotate_kernel(x, y, distance):
    """Each block writes what the one `distance` ranks on has, its threads in reverse."""
    cache = cuda.shared.array(CACHE, np.float32, alignment=16)
    found = cuda.local.array(8, np.float32)
    tid = cuda.threadIdx.x
    first = (cuda.blockIdx.x * BLOCK + tid) * 4
    for e in range(4):
        cache[tid * 4 + e] = x[first + e]
    cluster_sync()
    there = (cluster_rank() + distance) % cluster_size()
    load_vector_from_cluster(found, 4, cache, (BLOCK - 1 - tid) * 4, there)
    for e in range(4):
        y[first + e] = found[4 + e]
    cluster_sync()


@cuda.jit
def misaligned_kernel(y):
    cache = cuda.shared.array(8, np.float32, alignment=16)
    found = cuda.local.array(4, np.float32)
    load_vector_from_cluster(found, 0, cache, 1, 0)
    y[0] = found[0]


@cuda.jit
def hasty_kernel(x, y):
    """Without the last barrier: a block may be gone when another reads its memory."""
    cache = cuda.shared.array(4, np.float32, alignment=16)
    found = cuda.local.array(4, np.float32)
    for e in range(4):
        cache[e] = x[e]
    cluster_sync()
    if cluster_rank() == 0:
        return
    load_vector_from_cluster(found, 0, cache, 0, 0)
    y[0] = found[0]


@needs_clusters
@pytest.mark.parametrize("cluster", [1, 2, 8])
@pytest.mark.parametrize("distance", [0, 1, 5])
def test_vectors_of_another_block(cluster, distance):
    x = torch.randn(16 * BLOCK * 4).to(PLACE)
    y = torch.full_like(x, torch.nan)
    launch(rotate_kernel, 16, BLOCK, x, y, distance, cluster=cluster)
    blocks = x.view(16 // cluster, cluster, BLOCK, 4)
    assert torch.equal(y.view(blocks.shape), blocks.roll(-distance, dims=1).flip(2))


@simulated_only
def test_only_whole_vectors():
    with pytest.raises(ValueError, match="misaligned 16-byte access"):
        launch(misaligned_kernel, 1, 1, np.zeros(1, np.float32))


@simulated_only
def test_who_has_left_is_not_read():
    x, y = np.ones(4, np.float32), np.zeros(1, np.float32)
    with pytest.raises(Exception, match="has exited"):
        launch(hasty_kernel, 2, 1, x, y, cluster=2)
    with simulator.sanitize() as report:
        launch(rotate_kernel, 2, BLOCK, *np.zeros((2, 256), np.float32), 1, cluster=2)
    assert not report, str(report)
