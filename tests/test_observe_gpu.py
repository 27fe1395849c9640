"""One process on a machine with a GPU: kernels are watched in the simulator, then run for real."""

import numpy as np
import pytest

from course_lib import cuda, simulator
from course_lib.runtime.host.launch import launch
from course_lib.teach import CheckFailed, check

pytestmark = pytest.mark.gpu
N = 64


@cuda.jit
def erase_mirrored(x, y):
    i = cuda.grid(1)
    y[i] = x[i]
    x[63 - i] = 0  # another thread of the block may have read it, or not


@cuda.jit
def shift(to, source):
    i = cuda.grid(1)
    to[i] = source[i]


@cuda.jit
def scale(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] * 2.1


def on_the_gpu(kind, array):
    """A copy of a NumPy array in the GPU's memory."""
    if kind == "numba":
        return cuda.to_device(array)
    return pytest.importorskip("torch").from_numpy(array).cuda()


def on_the_host(array):
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array.cpu().numpy()


def numba_launch(kernel, grid, block, *arrays):
    kernel[grid, block](*arrays)


def assert_the_gpu_still_works(kind):
    """A kernel of its own is compiled and runs there, with the right result."""

    @cuda.jit
    def add_one(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] + np.float32(1)

    x = np.arange(N, dtype=np.float32)
    for start in (numba_launch, launch):
        there = on_the_gpu(kind, x), on_the_gpu(kind, np.zeros_like(x))
        start(add_one, 2, 32, *there)
        cuda.synchronize()
        assert (on_the_host(there[1]) == x + 1).all()
    assert add_one.overloads, "numba_launch went elsewhere"


@pytest.mark.parametrize("start", [numba_launch, launch])
@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_the_sanitizer_finds_a_race_and_the_arrays_on_the_gpu_get_the_results(kind, start):
    values = np.arange(1, N + 1, dtype=np.float32)
    x, y = on_the_gpu(kind, values), on_the_gpu(kind, np.full_like(values, -1))
    with simulator.options(order="forward"), simulator.sanitize() as report:
        start(erase_mirrored, 1, N, x, y)
    assert report.kinds() == ["race"], report
    assert report.findings[0].kernel == "erase_mirrored"
    # In this order the first half of the threads erases what the second half is to read.
    assert (on_the_host(y) == np.where(np.arange(N) < N // 2, values, 0)).all()
    assert (on_the_host(x) == 0).all()
    assert not erase_mirrored.overloads, "it was compiled for the GPU, and so ran there"
    assert_the_gpu_still_works(kind)


@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_views_of_one_array_on_the_gpu_share_its_copy(kind):
    values = np.arange(2 * N, dtype=np.float32)
    base = on_the_gpu(kind, values)
    with simulator.options(order="forward"), simulator.sanitize() as report:
        shift[1, 32](base[:64:2], base[2:66:2])  # each thread reads what its neighbour writes
    assert report.kinds() == ["race"], report
    expected = values.copy()
    expected[:64:2] = values[2:66:2]
    assert (on_the_host(base) == expected).all()
    assert_the_gpu_still_works(kind)


@pytest.mark.parametrize("start", [numba_launch, launch])
@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_the_tracer_counts_and_the_arrays_on_the_gpu_get_the_results(kind, start):
    values = np.arange(N, dtype=np.float32)
    x, y = on_the_gpu(kind, values), on_the_gpu(kind, np.zeros_like(values))
    with simulator.trace() as trace:
        start(scale, 2, 32, x, y)
    found = [(site.source, site.op, site.requests, site.sectors) for site in trace.sites]
    assert found == [("y[i]", "store", 2, 8), ("x[i]", "load", 2, 8)] or found == [
        ("x[i]", "load", 2, 8), ("y[i]", "store", 2, 8)]
    assert (on_the_host(y) == (values * np.float64(2.1)).astype(np.float32)).all()
    assert_the_gpu_still_works(kind)


@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_lint_takes_arrays_on_the_gpu(kind):
    x = on_the_gpu(kind, np.zeros(N, np.float32))
    assert [finding.kind for finding in simulator.lint(scale, x, x)] == ["float64-promotion"]
    assert simulator.lint(erase_mirrored, x, x) == []
    assert_the_gpu_still_works(kind)


@cuda.jit
def endless(x, y):
    i = cuda.grid(1)
    while i < x.size:
        y[i] = x[i]


@cuda.jit
def far_outside(x, y):
    i = cuda.grid(1)
    y[i + 2**30] = x[i]


@pytest.mark.parametrize("kernel, says", [(endless, "while i < x.size"),
                                          (far_outside, "out-of-bounds")])
def test_check_keeps_what_harms_away_from_the_gpu(kernel, says):
    with pytest.raises(CheckFailed, match=says):
        check("relu", kernel)
    assert not kernel.overloads, "it was compiled for the GPU, and so ran there"
    assert_the_gpu_still_works("numba")
    assert_the_gpu_still_works("torch")
