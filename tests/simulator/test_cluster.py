"""Clusters in the simulator: ranks, barriers, reads of other blocks, and what goes wrong."""

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import cuda, errors
from course_lib.simulator.cuda_api import cluster
from course_lib.simulator.observe.observer import Observer
from course_lib.simulator.observe.real import observing_with

ORDERS = ["forward", "reverse", "random"]
N = 8


@cuda.jit
def rotate(x, y):
    """y: the next block's x, three times over, so that one barrier a round would not do."""
    part = cuda.shared.array(N, np.float32)
    i, tid = cuda.grid(1), cuda.threadIdx.x
    value = x[i]
    for _ in range(3):
        part[tid] = value
        cluster.sync()
        value = cluster.load(part, tid, (cluster.rank() + 1) % cluster.size())
        cluster.sync()
    y[i] = value


def rotated(x, size, turns=3):
    return np.roll(x.reshape(-1, size, N), -turns, axis=1).ravel()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_blocks_of_a_cluster_read_each_other(size, order):
    x = np.arange(3 * size * N, dtype=np.float32)
    y = np.zeros_like(x)
    simulator.run(rotate, 3 * size, N, x, y, cluster=size, order=order)
    assert np.array_equal(y, rotated(x, size))
    with simulator.options(order=order), simulator.sanitize() as report:
        simulator.run(rotate, 3 * size, N, x, y, cluster=size)
    assert not report, report


def test_configured_kernels_have_clusters_too():
    x = np.arange(4 * N, dtype=np.float32)
    y = np.zeros_like(x)
    rotate.configure(4, N, cluster=2)(x, y)
    assert np.array_equal(y, rotated(x, 2))
    rotate[4, N](x, y)
    assert np.array_equal(y, x)


def test_ranks_in_grids_of_several_dimensions():
    @cuda.jit
    def kernel(ranks, sizes):
        place = cuda.blockIdx.z, cuda.blockIdx.y, cuda.blockIdx.x
        ranks[place[0], place[1], place[2]] = cluster.rank()
        sizes[place[0], place[1], place[2]] = cluster.size()

    ranks, sizes = (np.full((2, 3, 8), -1) for _ in range(2))
    simulator.run(kernel, (8, 3, 2), (2, 2), ranks, sizes, cluster=4)
    assert np.array_equal(ranks, np.broadcast_to(np.arange(8) % 4, (2, 3, 8)))
    assert (sizes == 4).all()


def test_blocks_of_other_rows_are_no_neighbours():
    @cuda.jit
    def kernel(y):
        part = cuda.shared.array(1, np.int32)
        part[0] = 100 * cuda.blockIdx.y + cuda.blockIdx.x
        cluster.sync()
        y[cuda.blockIdx.y, cuda.blockIdx.x] = cluster.load(part, 0, 1 - cluster.rank())
        cluster.sync()

    y = np.zeros((2, 4), np.int32)
    simulator.run(kernel, (4, 2), 1, y, cluster=2)
    assert y.tolist() == [[1, 0, 3, 2], [101, 100, 103, 102]]


@pytest.mark.parametrize("watched", [False, True])
def test_slices_of_dynamic_memory(watched):
    @cuda.jit
    def kernel(x, y):
        floats = cuda.shared.array(0, np.float32)
        i, tid = cuda.grid(1), cuda.threadIdx.x
        part = floats[N:]
        part[tid] = x[i]
        cluster.sync()
        y[i] = cluster.load(part, tid, 1 - cluster.rank())
        cluster.sync()

    x = np.arange(4 * N, dtype=np.float32)
    y = np.zeros_like(x)
    if watched:
        with simulator.sanitize() as report:
            simulator.run(kernel, 4, N, x, y, shared=2 * N * 4, cluster=2)
        assert not report, report
    else:
        simulator.run(kernel, 4, N, x, y, shared=2 * N * 4, cluster=2)
    assert np.array_equal(y, rotated(x, 2, turns=1))


def test_arrays_that_functions_share():
    @cuda.jit(device=True)
    def keep(value, part):
        part[cuda.threadIdx.x] = value
        cluster.sync()

    @cuda.jit(device=True)
    def fetch(part, rank):
        value = cluster.load(part, cuda.threadIdx.x, rank)
        cluster.sync()
        return value

    @cuda.jit
    def kernel(x, y):
        part = cuda.shared.array(N, np.float32)
        other = cuda.shared.array(N, np.float32)
        i = cuda.grid(1)
        keep(x[i], part)
        keep(-x[i], other)
        y[i] = fetch(part, 1 - cluster.rank()) + 10 * fetch(other, 1 - cluster.rank())

    x = np.arange(4 * N, dtype=np.float32)
    y = np.zeros_like(x)
    simulator.run(kernel, 4, N, x, y, cluster=2)
    assert np.array_equal(y, -9 * rotated(x, 2, turns=1))


def test_functions_without_source():
    namespace = {"cuda": cuda, "cluster": cluster, "np": np}
    exec("def kernel(x, y):\n"
         "    part = cuda.shared.array(8, np.float32)\n"
         "    i = cuda.grid(1)\n"
         "    part[cuda.threadIdx.x] = x[i]\n"
         "    cluster.sync()\n"
         "    y[i] = cluster.load(part, cuda.threadIdx.x, 1 - cluster.rank())\n"
         "    cluster.sync()\n", namespace)
    x = np.arange(4 * N, dtype=np.float32)
    y = np.zeros_like(x)
    simulator.run(cuda.jit(namespace["kernel"]), 4, N, x, y, cluster=2)
    assert np.array_equal(y, rotated(x, 2, turns=1))


@pytest.mark.parametrize("order", ORDERS)
def test_barriers_of_block_cluster_and_grid_together(order):
    @cuda.jit
    def kernel(x, y, z):
        part = cuda.shared.array(N, np.float32)
        grid = cuda.cg.this_grid()
        i, tid = cuda.grid(1), cuda.threadIdx.x
        part[tid] = x[i]
        cuda.syncthreads()
        y[i] = part[N - 1 - tid]
        cluster.sync()
        y[i] += cluster.load(part, tid, 1 - cluster.rank())
        grid.sync()
        z[i] = y[x.size - 1 - i]
        cluster.sync()
        part[tid] = z[i]
        cluster.sync()
        z[i] -= cluster.load(part, tid, 1 - cluster.rank())
        cluster.sync()

    x = np.arange(6 * N, dtype=np.float32) ** 2
    y, z = np.zeros_like(x), np.zeros_like(x)
    with simulator.options(order=order), simulator.sanitize() as report:
        simulator.run(kernel, 6, N, x, y, z, cluster=2)
    assert not report, report
    blocks = x.reshape(6, N)
    swapped = blocks.reshape(3, 2, N)[:, ::-1].reshape(6, N)
    expected = blocks[:, ::-1] + swapped
    assert np.array_equal(y.reshape(6, N), expected)
    turned = expected.ravel()[::-1].reshape(3, 2, N)
    assert np.array_equal(z.reshape(3, 2, N), turned - turned[:, ::-1])


@pytest.mark.parametrize("order", ORDERS)
def test_threads_that_have_returned_are_not_waited_for(order):
    @cuda.jit
    def kernel(y):
        if cluster.rank() == 1:
            return
        cluster.sync()
        y[cuda.grid(1)] = 1
        cluster.sync()

    y = np.zeros(4 * N, np.float32)
    with simulator.options(order=order), simulator.sanitize() as report:
        simulator.run(kernel, 4, N, y, cluster=2)
    assert not report, report
    assert np.array_equal(y.reshape(4, N)[:, 0], [1, 0, 1, 0])


@pytest.mark.parametrize("watched", [False, True])
def test_a_block_that_never_declares_the_array(watched):
    """Its memory is there, and nobody has written it."""
    @cuda.jit
    def kernel(y):
        if cluster.rank() == 0:
            part = cuda.shared.array(4, np.float32)
            part[0] = 1
            y[0] = cluster.load(part, 0, 1)
        cluster.sync()

    y = np.zeros(1, np.float32)
    if watched:
        with simulator.sanitize() as report:
            simulator.run(kernel, 2, 1, y, cluster=2)
        assert report.kinds() == ["uninitialised-read"]
        assert "no thread ever writes it" in str(report)
    else:
        simulator.run(kernel, 2, 1, y, cluster=2)
    assert np.isnan(y[0])


@pytest.mark.parametrize("size, grid, message", [
    (0, 4, "integer from 1 to 16"), (17, 17, "integer from 1 to 16"),
    (2.0, 4, "integer from 1 to 16"),
    (3, 4, "gridDim.x is 4, which clusters of 3 blocks do not divide"),
    (2, (3, 2), "gridDim.x is 3"),
])
def test_impossible_clusters(size, grid, message):
    x = np.zeros(64, np.float32)
    with pytest.raises(simulator.LaunchError, match=message):
        simulator.run(rotate, grid, N, x, x, cluster=size)


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_ranks_that_do_not_exist(rank):
    @cuda.jit
    def kernel(y, rank):
        part = cuda.shared.array(4, np.float32)
        part[0] = 1
        cluster.sync()
        y[cuda.grid(1)] = cluster.load(part, 0, rank)
        cluster.sync()

    y = np.zeros(2, np.float32)
    with pytest.raises(errors.Unreachable, match=f"rank {rank} of its cluster, which has 2 blocks"):
        simulator.run(kernel, 2, 1, y, rank, cluster=2)
    with simulator.sanitize() as report:
        simulator.run(kernel, 2, 1, y, rank, cluster=2)
    assert report.kinds() == ["out-of-bounds"]
    assert np.isnan(y).all()
    with pytest.raises(errors.Unreachable, match="has 1 block$"):
        simulator.run(kernel, 2, 1, y, 1)


@pytest.mark.parametrize("i", [-1, 4])
def test_indices_outside(i):
    @cuda.jit
    def kernel(y, i):
        part = cuda.shared.array(4, np.float32)
        part[0] = 1
        cluster.sync()
        y[cuda.grid(1)] = cluster.load(part, i, 1 - cluster.rank())
        cluster.sync()

    y = np.zeros(2, np.float32)
    with pytest.raises(simulator.OutOfBounds, match=rf"index {i}\b"):
        simulator.run(kernel, 2, 1, y, i, cluster=2)
    with simulator.sanitize() as report:
        simulator.run(kernel, 2, 1, y, i, cluster=2)
    assert report.kinds() == ["out-of-bounds"]
    assert f"`part[{i}]`" in str(report)


def test_global_arrays_belong_to_no_block():
    @cuda.jit
    def kernel(y):
        y[0] = cluster.load(y, 0, 0)

    with pytest.raises(TypeError, match="this is no shared array"):
        simulator.run(kernel, 2, 1, np.zeros(4, np.float32), cluster=2)


def test_a_block_that_has_exited_cannot_be_read():
    @cuda.jit
    def kernel(y):
        part = cuda.shared.array(1, np.float32)
        part[0] = 1
        cluster.sync()
        y[cuda.grid(1)] = cluster.load(part, 0, 1 - cluster.rank())

    with pytest.raises(errors.Unreachable, match="block \\(0, 0, 0\\), which has exited"):
        simulator.run(kernel, 2, 1, np.zeros(2, np.float32), cluster=2)
    with pytest.raises(errors.Unreachable, match="block \\(1, 0, 0\\), which has exited"):
        simulator.run(kernel, 2, 1, np.zeros(2, np.float32), cluster=2, order="reverse")


def test_a_flag_may_keep_a_block_from_exiting():
    """Fences and atomics are as good as a barrier of the cluster, only slower."""
    @cuda.jit
    def kernel(y, done):
        part = cuda.shared.array(1, np.float32)
        part[0] = cuda.blockIdx.x
        cluster.sync()
        y[cuda.blockIdx.x] = cluster.load(part, 0, 1 - cluster.rank())
        cuda.threadfence()
        cuda.atomic.add(done, 1 - cluster.rank(), 1)
        while cuda.atomic.add(done, cluster.rank(), 0) == 0:
            pass
        cuda.threadfence()

    y, done = np.zeros(2, np.float32), np.zeros(2, np.int32)
    with simulator.sanitize() as report:
        simulator.run(kernel, 2, 1, y, done, cluster=2)
    assert not report, report
    assert y.tolist() == [1, 0]


def test_who_waits_for_the_cluster_is_told():
    @cuda.jit
    def kernel(x):
        if cluster.rank() == 0:
            if cuda.threadIdx.x < 2:
                cuda.syncthreads()
        cluster.sync()

    with pytest.raises(simulator.Deadlock) as caught:
        simulator.run(kernel, 4, 4, np.zeros(1), cluster=2)
    text = str(caught.value)
    assert "block (0, 0, 0): threads 0-1 wait at a block barrier at" in text
    assert "block (0, 0, 0): threads 2-3 wait at the barrier of the cluster at" in text
    assert "block (1, 0, 0): threads 0-3 wait at the barrier of the cluster at" in text
    assert "block (2, 0, 0)" not in text  # the next cluster has not started


def test_threads_that_run_past_the_barrier():
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x != 3:
            cluster.sync()

    with simulator.sanitize() as report:
        simulator.run(kernel, 2, 4, np.zeros(1), cluster=2)
    assert report.kinds() == ["barrier-mismatch"]
    assert "thread 3 never reaches the barrier" in str(report)


def test_a_race_in_global_memory_names_the_barrier_of_the_cluster():
    @cuda.jit
    def kernel(x):
        i = cuda.grid(1)
        x[i] = i
        cuda.syncthreads()
        value = x[i + 4 if cluster.rank() == 0 else i - 4]
        cluster.sync()
        x[i] = value

    with simulator.sanitize() as report:
        simulator.run(kernel, 2, 4, np.zeros(8), cluster=2)
    assert report.kinds() == ["race-between-blocks"]
    assert "no barrier of the cluster between; put cluster_sync() between them" in str(report)


def test_clusters_do_not_wait_for_each_other():
    """A barrier of the cluster orders nothing between blocks of two clusters."""
    @cuda.jit
    def kernel(x, total):
        x[cuda.blockIdx.x] = 1
        cluster.sync()
        if cuda.blockIdx.x == 3:
            total[0] = x[0]
        cluster.sync()

    with simulator.sanitize() as report:
        simulator.run(kernel, 4, 1, np.zeros(4), np.zeros(1), cluster=2)
    assert report.kinds() == ["race-between-blocks"]
    assert "blocks 0 and 3" in str(report) and "blocks run in any order" in str(report)


def test_observers_are_told():
    class Listener(Observer):
        def __init__(self):
            self.waits, self.releases, self.reads = 0, [], []

        def on_cluster_barrier(self, thread, site):
            assert site.kind == "cluster" and site.text == "cluster.sync()"
            self.waits += 1

        def on_cluster_release(self, threads):
            self.releases.append({thread.b.index[0] for thread in threads})

        def on_load(self, thread, site, memory, offset, size):
            if memory.space == "shared":
                self.reads.append((thread.b.index[0], memory.owner.index[0], offset, size))

    x = np.arange(4 * N, dtype=np.float32)
    with observing_with(Listener()) as listener:
        simulator.run(rotate, 4, N, x, np.zeros_like(x), cluster=2)
    assert listener.waits == 4 * N * 6
    assert listener.releases == [{0, 1}] * 6 + [{2, 3}] * 6
    assert sorted(set(listener.reads)) == sorted(
        (block, block ^ 1, 4 * i, 4) for block in range(4) for i in range(N))


def test_reads_of_the_cluster_are_traced():
    x = np.arange(4 * N, dtype=np.float32)
    with simulator.trace() as t:
        simulator.run(rotate, 4, N, x, np.zeros_like(x), cluster=2)
    (site,) = [site for site in t.sites if site.source.startswith("cluster.load")]
    assert (site.op, site.space, site.requests, site.lanes) == ("load", "shared", 12, 96)
    with simulator.trace(blocks=1) as t:
        simulator.run(rotate, 4, N, x, np.zeros_like(x), cluster=2)
    (site,) = [site for site in t.sites if site.source.startswith("cluster.load")]
    assert site.requests == 3
