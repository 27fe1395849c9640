"""Planted and correct: clusters of blocks that read each other's shared memory."""

from numba import cuda, float32

from course_lib.simulator.cuda_api import cluster
from sanitizer_cases.case import correct, floats, planted

N = 32
NAMELESS = "numba.cuda has no names for clusters, so there is nothing to run on a GPU"


@planted("race-between-blocks", 8, N, floats(8 * N, 8), cluster=4, reason=NAMELESS,
         mended="cluster_total")
@cuda.jit
def cluster_total_after_a_block_barrier(x, y, mended):
    """Every block adds up the parts of all blocks of its cluster."""
    part = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    part[tid] = x[cuda.grid(1)]
    if mended:
        cluster.sync()
    else:
        cuda.syncthreads()
    total = float32(0)
    if tid == 0:
        for rank in range(cluster.size()):
            for i in range(N):
                total += cluster.load(part, i, rank)  # BUG: waits for its own block alone
    cluster.sync()
    if tid == 0:
        y[cuda.blockIdx.x] = total


@planted("read-after-exit", 4, N, floats(4 * N, 4 * N), cluster=2, reason=NAMELESS)
@cuda.jit
def cluster_exits_after_the_read(x, y):
    part = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    part[tid] = x[cuda.grid(1)]
    cluster.sync()
    y[cuda.grid(1)] = cluster.load(part, tid, 1 - cluster.rank())  # BUG: the other may be gone


@planted("race-between-blocks", 4, N, floats(4 * N, 4 * N), cluster=2, reason=NAMELESS,
         mended="cluster_overwrites_what_was_read")
@cuda.jit
def cluster_overwrites_what_is_read(x, y, mended):
    part = cuda.shared.array(N, float32)
    i, tid = cuda.grid(1), cuda.threadIdx.x
    other = 1 - cluster.rank()
    part[tid] = x[i]
    cluster.sync()
    value = cluster.load(part, tid, other)
    if mended:
        cluster.sync()
    part[tid] = value * value  # BUG: the other block may not have read it
    cluster.sync()
    y[i] = value + cluster.load(part, tid, other)
    cluster.sync()


@planted("race-between-blocks", 4, N, floats(4 * N, 4), cluster=4, reason=NAMELESS)
@cuda.jit
def cluster_ring_in_one_buffer(x, y):
    last = cuda.shared.array(1, float32)
    tid = cuda.threadIdx.x
    value = x[cuda.grid(1)]
    for _ in range(3):
        if tid == 0:
            last[0] = value
        cluster.sync()
        value += cluster.load(last, 0, (cluster.rank() + 1) % cluster.size())  # BUG: in each round
    cluster.sync()
    if tid == 0:
        y[cuda.blockIdx.x] = value


@correct(4, N, floats(4 * N, 4), cluster=4, shared=2 * N * 4)
@cuda.jit
def cluster_ring_in_two_buffers(x, y):
    """One barrier for each round is enough, because the next round writes elsewhere."""
    dynamic = cuda.shared.array(0, float32)
    tid = cuda.threadIdx.x
    value = x[cuda.grid(1)]
    for step in range(3):
        last = dynamic[step % 2 * N:step % 2 * N + N]
        last[tid] = value
        cluster.sync()
        value += cluster.load(last, tid, (cluster.rank() + 1) % cluster.size())
    cluster.sync()
    if tid == 0:
        y[cuda.blockIdx.x] = value


@correct(4, N, floats(4 * N, 4 * N), cluster=2)
@cuda.jit
def cluster_hands_over_global_memory(x, y):
    """The barrier of a cluster orders global memory too."""
    i = cuda.grid(1)
    y[i] = x[i]
    cluster.sync()
    value = y[i + N if cluster.rank() == 0 else i - N]
    cluster.sync()
    y[i] = value


@planted("barrier-mismatch", 4, N, floats(4 * N, 4), cluster=2, reason=NAMELESS)
@cuda.jit
def cluster_barrier_for_one_block(x, y):
    if cluster.rank() == 0:
        y[cuda.blockIdx.x] = x[cuda.blockIdx.x * N]
        cluster.sync()  # BUG: the other block never comes


@planted("barrier-divergence", 4, N, floats(4 * N), cluster=2, reason=NAMELESS)
@cuda.jit
def cluster_barrier_in_both_branches(x):
    if cuda.threadIdx.x < N // 2:
        x[cuda.grid(1)] = 0
        cluster.sync()  # BUG: half of the warp waits here, half below
    else:
        cluster.sync()


@planted("deadlock", 4, N, floats(4 * N), cluster=2, reason=NAMELESS)
@cuda.jit
def cluster_barrier_against_block_barrier(x):
    if cuda.threadIdx.x < N // 2:
        cuda.syncthreads()  # BUG: the others wait for the whole cluster
    x[cuda.grid(1)] = 0
    cluster.sync()


@planted("out-of-bounds", 4, N, floats(4 * N, 4 * N), cluster=2, reason=NAMELESS)
@cuda.jit
def cluster_neighbour_past_the_last(x, y):
    part = cuda.shared.array(N, float32)
    i, tid = cuda.grid(1), cuda.threadIdx.x
    part[tid] = x[i]
    cluster.sync()
    y[i] = cluster.load(part, tid, cluster.rank() + 1)  # BUG: the last rank has no neighbour
    cluster.sync()
