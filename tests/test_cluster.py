"""`intrinsics.cluster`: blocks that share a row, in the simulator, in machine code and on a GPU."""

import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda, simulator
from course_lib.runtime.host.launch import LaunchError, launch
from course_lib.runtime.host.specialisation import Specialisation, _attributes
from course_lib.runtime.intrinsics import allow_next_kernel, block_sum, wait_for_previous_kernel
from course_lib.runtime.intrinsics.cluster import (
    cluster_rank,
    cluster_size,
    cluster_sync,
    load_from_cluster,
)

PLACE = "cpu" if SIMULATED else "cuda"
simulated_only = pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive this")
needs_clusters = pytest.mark.skipif(
    not SIMULATED and torch.cuda.get_device_capability() < (9, 0),
    reason="clusters need compute capability 9.0",
)
SIZES = [1, 2, 4, 8]


@cuda.jit
def add_row_sums_kernel(x, y):
    """y[row] += the sum of row `row` of x; a cluster for each row."""
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(32, np.float32)
    part = cuda.shared.array(4, np.float32)
    tid, rank, size = cuda.threadIdx.x, cluster_rank(), cluster_size()
    row = cuda.blockIdx.x // size
    total = np.float32(0)
    for col in range(rank * cuda.blockDim.x + tid, x.shape[1], size * cuda.blockDim.x):
        total += x[row, col]
    total = block_sum(total, scratch)
    if tid == 0:
        part[3] = total
    cluster_sync()
    total = np.float32(0)
    for other in range(size):
        total += load_from_cluster(part, 3, other)
    cluster_sync()
    if tid == 0 and rank == 0:
        y[row] += total


@cuda.jit
def places_kernel(ranks, sizes):
    if cuda.threadIdx.x == 0:
        block = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
        ranks[block] = cluster_rank()
        sizes[block] = cluster_size()


@cuda.jit
def rotate_kernel(x, y, first):
    """Each block's elements from the next block, through a slice of dynamic shared memory."""
    dynamic = cuda.shared.array(0, np.float32)
    tid = cuda.threadIdx.x
    part = dynamic[first:]
    rank, size = cluster_rank(), cluster_size()
    i = cuda.grid(1)
    for turn in range(4):
        part[tid] = x[i] if turn == 0 else y[i]
        cluster_sync()
        value = load_from_cluster(part, tid, (rank + 1) % size)
        cluster_sync()
        y[i] = value


def row_sums(x, cluster, block=64, **options):
    y = torch.zeros(len(x), device=x.device)
    launch(add_row_sums_kernel, len(x) * cluster, block, x, y, cluster=cluster, **options)
    return y


def check_sums(found, x):
    assert torch.allclose(found.double(), x.double().sum(1), atol=1e-5 * x.shape[1] ** 0.5)


@needs_clusters
@pytest.mark.parametrize("cluster", SIZES)
@pytest.mark.parametrize("shape", [(3, 1000), (1, 1), (2, 5), (5, 513)])
def test_a_cluster_adds_up_a_row(shape, cluster):
    x = torch.randn(shape, device=PLACE)
    check_sums(row_sums(x, cluster), x)
    x[0, -1] = float("nan")
    assert row_sums(x, cluster)[0].isnan()


@needs_clusters
@pytest.mark.parametrize("cluster", SIZES)
def test_ranks_count_consecutive_blocks_in_x(cluster):
    ranks, sizes = (torch.full((48,), -1, dtype=torch.int32, device=PLACE) for _ in range(2))
    launch(places_kernel, (24, 2), 32, ranks, sizes, cluster=cluster)
    assert ranks.tolist() == [block % cluster for block in range(24)] * 2
    assert sizes.eq(cluster).all()


@needs_clusters
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("cluster", SIZES)
def test_elements_of_dynamic_shared_memory(cluster, first):
    x = torch.randn(16, 32, device=PLACE)
    y = torch.empty_like(x)
    launch(rotate_kernel, 16, 32, x.view(-1), y.view(-1), first, shared_bytes=(32 + first) * 4,
           cluster=cluster)  # fmt: skip
    groups = x.view(-1, cluster, 32)
    assert torch.equal(y.view(-1, cluster, 32), groups.roll(-4, dims=1))


def test_the_same_kernel_runs_without_clusters():
    x = torch.randn(4, 300, device=PLACE)
    y = torch.zeros(4, device=PLACE)
    launch(add_row_sums_kernel, 4, 64, x, y)
    check_sums(y, x)


@pytest.mark.parametrize("cluster", [0, -1, 17, 32, 2.0, "2", None])
def test_impossible_cluster_sizes_are_refused(cluster):
    x = torch.zeros(16, 4, device=PLACE)
    with pytest.raises(LaunchError, match="cluster must be an int from 1 to 16, not"):
        launch(add_row_sums_kernel, 144, 32, x, x[:, 0], cluster=cluster)


def test_a_grid_that_clusters_do_not_divide_is_refused():
    x = torch.zeros(16, 4, device=PLACE)
    with pytest.raises(LaunchError, match="has 6 blocks in x, which clusters of 4 do not divide"):
        launch(add_row_sums_kernel, (6, 4), 32, x, x[:, 0], cluster=4)


def specialised(capability):
    compiled = SimpleNamespace(compute_capability=capability, cooperative=False)
    return SimpleNamespace(compiled=compiled, title="kernel")


@pytest.mark.parametrize(
    "capability, asked, has",
    [((8, 6), 2, r"capability 8.6 has none: it takes 9.0 or more"),
     ((9, 0), 17, "has clusters of 16 at most"), ((12, 0), 9, "has clusters of 8 at most")],
)  # fmt: skip
def test_a_gpu_refuses_clusters_that_it_has_not(capability, asked, has):
    with pytest.raises(LaunchError, match=f"kernel: clusters of {asked} blocks.*{has}"):
        Specialisation.allow_clusters(specialised(capability), asked)
    assert _attributes(specialised((7, 5)), True, 1) == b""


def test_launch_attributes_are_laid_out_as_the_driver_reads_them():
    packed = bytes(_attributes(specialised((9, 0)), True, 4))
    assert len(packed) == 2 * 72  # a number, padded to 8 bytes, and a value of 64
    overlap, cluster = packed[:72], packed[72:]
    assert struct.unpack_from("@I4xI", overlap) == (6, 1)
    assert struct.unpack_from("@I4x3I", cluster) == (4, 4, 1, 1)
    assert bytes(_attributes(specialised((9, 0)), False, 1)) == b""


# --- in the simulator: what is wrong is found ----------------------------------------------------


@cuda.jit
def exits_too_early_kernel(x):
    part = cuda.shared.array(32, np.float32)
    tid = cuda.threadIdx.x
    part[tid] = x[cuda.grid(1)]
    cluster_sync()
    x[cuda.grid(1)] = load_from_cluster(part, tid, cluster_size() - 1 - cluster_rank())


@cuda.jit
def index_outside_kernel(x):
    part = cuda.shared.array(32, np.float32)
    part[cuda.threadIdx.x] = 0
    cluster_sync()
    x[cuda.grid(1)] = load_from_cluster(part, 32, 0)
    cluster_sync()


@cuda.jit
def wrong_array_kernel(x):
    part = cuda.shared.array(32, np.int32)
    part[cuda.threadIdx.x] = 0
    cluster_sync()
    x[cuda.grid(1)] = load_from_cluster(part, 0, 0)


@cuda.jit
def stuck_kernel(x):
    if cuda.threadIdx.x < 8:
        cuda.syncthreads()
    cluster_sync()


def line_of(kernel, text):
    from inspect import getsourcelines

    lines, first = getsourcelines(kernel.py_func)
    return next(first + k for k, line in enumerate(lines) if text in line)


@simulated_only
def test_the_simulator_refuses_what_breaks_a_gpu():
    x = torch.zeros(64)
    with pytest.raises(simulator.SimulatorError, match=r"block \(0, 0, 0\), which has exited"):
        launch(exits_too_early_kernel, 2, 32, x, cluster=2)
    line = line_of(index_outside_kernel, "load_from_cluster")
    with pytest.raises(simulator.OutOfBounds, match=rf"index 32.*test_cluster.py:{line}"):
        launch(index_outside_kernel, 2, 32, x, cluster=2)
    with pytest.raises(TypeError, match="needs a shared array of float32 with one dimension"):
        launch(wrong_array_kernel, 2, 32, x, cluster=2)
    line = line_of(stuck_kernel, "cluster_sync")
    with pytest.raises(simulator.Deadlock, match=rf"barrier of the cluster at .*py:{line}"):
        launch(stuck_kernel, 2, 32, x, cluster=2)


def test_the_sanitizer_sees_through_the_intrinsics():
    x = torch.zeros(64, device=PLACE)
    y = torch.zeros(3, device=PLACE)
    with simulator.sanitize() as report:
        launch(add_row_sums_kernel, 12, 64, torch.ones(3, 77, device=PLACE), y, cluster=4)
    assert not report, report
    assert y.tolist() == [77] * 3
    with simulator.sanitize() as report:
        launch(exits_too_early_kernel, 2, 32, x, cluster=2)
    assert report.kinds() == ["read-after-exit"]
    (finding,) = report
    assert finding.line == line_of(exits_too_early_kernel, "load_from_cluster")
    assert "shared `part[" in finding.message


def test_the_tracer_counts_reads_from_the_cluster():
    with simulator.trace() as t:
        launch(add_row_sums_kernel, 8, 64, torch.ones(2, 77, device=PLACE),
               torch.zeros(2, device=PLACE), cluster=4)  # fmt: skip
    (site,) = [site for site in t.sites if "load_from_cluster" in site.source]
    assert (site.op, site.space, site.requests) == ("load", "shared", 8 * 2 * 4)


# --- machine code --------------------------------------------------------------------------------

COMPILE = """
import json, re
import numpy as np
from course_lib import cuda
from course_lib.runtime.compile import compiler
from course_lib.runtime.intrinsics.cluster import (
    cluster_rank, cluster_size, cluster_sync, load_from_cluster)
from course_lib.runtime.host.launch import array_type
@cuda.jit
def kernel(x, y):
    part = cuda.shared.array(40, np.float32)
    part[cuda.threadIdx.x] = x[cuda.grid(1)]
    cluster_sync()
    before = load_from_cluster(part, 3, 1)
    cluster_sync()
    part[cuda.threadIdx.x] = before
    cluster_sync()
    y[cuda.grid(1)] = load_from_cluster(part, 3, 1) + before
    cluster_sync()
    y[0] = cluster_rank() + cluster_size()
@cuda.jit
def wrong(x, y):
    y[0] = load_from_cluster(cuda.shared.array(4, np.int32), 0, 0)
types = [array_type("float32")] * 2
for chip, found, text in compiler.survey(kernel, types, [(7, 5), (8, 0), (9, 0)]):
    print(json.dumps([chip, found["stack_bytes"], text]))
try:
    compiler.compile_kernel(wrong, types, (9, 0))
except Exception as error:
    print(json.dumps("needs a shared array of float32" in str(error)))
"""


def test_machine_code(tmp_path):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
    from test_compiler import run

    turing, ampere, hopper, refused = map(json.loads, run(COMPILE, tmp_path).splitlines())
    assert refused
    for chip, stack_bytes, text in (turing, ampere):
        assert stack_bytes == 0, chip
        assert "cluster" not in text and "mapa" not in text
        assert text.count("bar.sync") == 4
    text = hopper[2]
    lines = [line.strip() for line in text.splitlines()]
    marks = [
        word
        for line in lines
        for word in ("mapa.u64", "arrive.release", "st.shared.f32", "cluster_ctarank")
        if word in line
    ]
    # The second read of the same element is neither merged with the first nor moved.
    sync = "arrive.release"
    assert marks == [
        "st.shared.f32", sync, "mapa.u64", sync, "st.shared.f32", sync, "mapa.u64", sync,
        "cluster_ctarank",
    ]  # fmt: skip
    assert text.count("barrier.cluster.wait.acquire") == 4
    # Element 3 lies 12 bytes into the array; the address is a generic one.
    (address,) = {line.split("there, ")[1].split(",")[0] for line in lines if "mapa" in line}
    assert any(line.startswith("add.s64") and f"{address}," in line and line.endswith("12;")
               for line in lines)  # fmt: skip


KERNEL = """
from course_lib import cuda
from course_lib.runtime.intrinsics.cluster import cluster_sync, load_from_cluster
@cuda.jit
def kernel(x):
    cluster_sync()
"""
FINGERPRINT = """
import os, sys
os.environ["COURSE_LIB_SIMULATOR"] = sys.argv[1]
sys.path.insert(0, sys.argv[2])
import user_kernel
from course_lib.runtime.intrinsics import cluster, twins
from course_lib.runtime.compile.fingerprint import fingerprint
print(fingerprint(user_kernel.kernel))
twin, files = twins.find(cluster._cluster_sync)
print(twin is cluster._cluster_sync, [file.name for file in files])
"""


def test_fingerprints_cover_both_halves_of_the_intrinsics(tmp_path):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
    from test_compiler import run

    (tmp_path / "user_kernel.py").write_text(KERNEL)
    real, simulated = (run(FINGERPRINT, tmp_path, mode, tmp_path) for mode in ("0", "1"))
    assert real == simulated
    assert real.splitlines()[1] == "True ['cluster.py', 'base.py']"


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("block", [256, 1024])
def test_long_rows(cluster, block):
    x = torch.randn(64, 131_072, device="cuda")
    for _ in range(3):
        check_sums(row_sums(x, cluster, block), x)


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_overlapping_launches_of_clusters(cluster):
    x = torch.randn(128, 4096, device="cuda")
    y = torch.zeros(128, device="cuda")
    for _ in range(200):  # each must see what the one before it added
        launch(add_row_sums_kernel, 128 * cluster, 256, x, y, cluster=cluster, overlap=True)
    expected = 200 * x.double().sum(1)
    assert torch.allclose(y.double(), expected, rtol=1e-3, atol=0.1)


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize("overlap", [False, True])
def test_clusters_in_a_captured_graph(overlap):
    x = torch.randn(32, 10_000, device="cuda")
    y = torch.zeros(32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(add_row_sums_kernel, 32 * 4, 256, x, y, cluster=4, overlap=overlap)
        launch(add_row_sums_kernel, 32 * 8, 256, x, y, cluster=8, overlap=overlap)
    assert y.eq(0).all()  # captured, not run
    graph.replay()
    assert torch.allclose(y.double(), 2 * x.double().sum(1), atol=1e-2)


@pytest.mark.gpu
@needs_clusters
def test_the_size_of_the_cluster_is_part_of_what_is_remembered():
    x = torch.randn(8, 5000, device="cuda")
    ranks, sizes = (torch.zeros(8, dtype=torch.int32, device="cuda") for _ in range(2))
    for cluster in (1, 2, 4, 8, 1, 4):
        launch(places_kernel, 8, 32, ranks, sizes, cluster=cluster)
        assert sizes.eq(cluster).all()
        check_sums(row_sums(x, cluster), x)


@pytest.mark.gpu
@needs_clusters
def test_most_shared_memory_in_every_block_of_a_cluster():
    x = torch.randn(16, 32, device="cuda")
    y = torch.empty_like(x)
    launch(rotate_kernel, 16, 32, x.view(-1), y.view(-1), 50_000, shared_bytes=50_032 * 4,
           cluster=8)  # fmt: skip
    assert torch.equal(y.view(2, 8, 32), x.view(2, 8, 32).roll(-4, dims=1))
