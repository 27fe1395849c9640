"""`host.launch`: what it takes, what it refuses, and where the kernel runs."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host.launch import ArrayError, LaunchError, launch, type_names

PLACE = "cpu" if SIMULATED else "cuda"
simulated_only = pytest.mark.skipif(not SIMULATED, reason="about NumPy arrays in the simulator")


@cuda.jit
def scale_kernel(x, y, factor):
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i] = x[i] * factor


@cuda.jit
def transpose_kernel(x, y):
    row, col = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        y[col, row] = x[row, col]


@cuda.jit
def reverse_kernel(x, y):
    scratch = cuda.shared.array(0, np.float32)
    i = cuda.threadIdx.x
    scratch[i] = x[i]
    cuda.syncthreads()
    y[i] = scratch[cuda.blockDim.x - 1 - i]


def scaled(x, factor=3.0, **options):
    y = torch.empty_like(x)
    launch(scale_kernel, -(-x.numel() // 64), 64, x, y, factor, **options)
    return y


def test_tensors_parameters_and_strides():
    x = torch.randn(130, device=PLACE)
    assert torch.equal(scaled(x), x * 3)
    assert torch.equal(scaled(torch.nn.Parameter(x)), x * 3)
    assert torch.equal(scaled(x[::2]), x[::2] * 3)
    wide = torch.randn(5, 40, device=PLACE)
    out = torch.empty(40, 5, device=PLACE)
    launch(transpose_kernel, (1, 5), (8, 8), wide, out)
    assert torch.equal(out, wide.t())
    launch(transpose_kernel, (5, 1), (8, 8), wide.t(), out.t())  # both views transposed
    assert torch.equal(out.t(), wide)


def test_flat_takes_any_dense_layout():
    x = torch.randn(2, 3, 4, 5, device=PLACE).to(memory_format=torch.channels_last)
    assert torch.equal(scaled(x, flat=True), x * 3)
    with pytest.raises(ArrayError, match="has gaps"):
        launch(scale_kernel, 1, 64, x[..., ::2], x[..., ::2], 2.0, flat=True)

class Line(NamedTuple):
    start: int
    is_down: bool
    slope: float
    seed: np.uint32


@cuda.jit
def line_kernel(y, line, n):
    i = cuda.grid(1)
    if i < n:
        rise = line.slope * np.float32(i + line.start) + np.float32(line.seed)
        y[i] = -rise if line.is_down else rise


def test_named_numbers():
    y = torch.empty(5, device=PLACE)
    for is_down, sign in ((False, 1), (True, -1)):
        launch(line_kernel, 1, 8, y, Line(2, is_down, 0.1, 3), 5)
        expected = sign * (np.float32(0.1) * np.arange(2, 7, dtype=np.float32) + np.float32(3))
        assert y.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    name = "Line(int64, bool, float32, uint32) of start, is_down, slope, seed"
    assert type_names([Line(2, True, 0.1, 3)]) == [name]


@pytest.mark.parametrize("factor", [2, 2.0, True, np.float32(2), np.int8(2), np.float64(2)])
def test_scalars(factor):
    x = torch.randn(10, device=PLACE)
    assert torch.allclose(scaled(x, factor), x * float(factor))


def test_dynamic_shared_memory():
    x = torch.randn(96, device=PLACE)
    y = torch.empty_like(x)
    launch(reverse_kernel, 1, 96, x, y, shared_bytes=96 * 4)
    assert torch.equal(y, x.flip(0))


def test_inference_mode():
    with torch.inference_mode():
        x = torch.randn(70, device=PLACE)
        assert torch.equal(scaled(x), x * 3)


def test_other_libraries_arrays():
    x = np.random.default_rng().normal(size=77).astype(np.float32)
    source, target = cuda.to_device(x), cuda.device_array(77, np.float32)
    launch(scale_kernel, 2, 64, source, target, 2.0)
    assert np.array_equal(target.copy_to_host(), x * 2)


@pytest.mark.parametrize("size", [0, -1, (1, 0), (), (1, 1, 1, 1), 1.5, "64", None])
def test_impossible_sizes(size):
    x = torch.zeros(4, device=PLACE)
    with pytest.raises((LaunchError, TypeError)):
        launch(scale_kernel, size, 32, x, x, 1.0)
    with pytest.raises((LaunchError, TypeError)):
        launch(scale_kernel, 1, size, x, x, 1.0)


def test_too_many_threads_are_refused_and_the_next_launch_works():
    x = torch.ones(4, device=PLACE)
    with pytest.raises((LaunchError, ValueError), match="2,?048"):
        launch(scale_kernel, 1, 2048, x, x, 1.0)
    assert torch.equal(scaled(x), x * 3)


@simulated_only
def test_numpy_arrays_in_place():
    x = np.arange(9, dtype=np.float32)
    launch(scale_kernel, 1, 16, x, x, 2.0)
    assert np.array_equal(x, np.arange(9) * 2)


@pytest.mark.gpu
def test_cpu_arrays_are_refused_on_a_gpu():
    x = torch.zeros(4, device="cuda")
    with pytest.raises(ArrayError, match=r'pass an argument.to\("cuda"\)'):
        launch(scale_kernel, 1, 32, x.cpu(), x, 1.0)
    with pytest.raises(ArrayError, match=r"pass cuda.to_device\(array\)"):
        launch(scale_kernel, 1, 32, np.zeros(4, np.float32), x, 1.0)
    with pytest.raises(ArrayError, match="is a builtins.list"):
        launch(scale_kernel, 1, 32, [1.0], x, 1.0)


@pytest.mark.gpu
def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(77, dtype=cupy.float32)
    y = cupy.empty_like(x)
    launch(scale_kernel, 2, 64, x, y, 2.0)
    assert bool((y == x * 2).all())
    launch(scale_kernel, 2, 64, x[::3], y[:26], 2.0)
    assert bool((y[:26] == x[::3] * 2).all())


@pytest.mark.gpu
def test_current_stream():
    x = torch.randn(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: what runs elsewhere would be done before
        x.mul_(2)
        y = scaled(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(y, x * 3)


@pytest.mark.gpu
def test_first_launch_inside_a_graph_capture():
    @cuda.jit
    def fresh_kernel(x, y):
        i = cuda.grid(1)
        if i < x.shape[0]:
            y[i] = x[i] + 1

    x, y = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(fresh_kernel, 4, 32, x, y)
    assert y.eq(0).all()  # captured, not run
    x.fill_(41)
    graph.replay()
    assert y.eq(42).all()


@pytest.mark.gpu
def test_launches_from_several_threads():
    from concurrent.futures import ThreadPoolExecutor

    def work(seed):
        x = torch.full((1000,), float(seed), device="cuda")
        for _ in range(200):
            y = scaled(x)
        return bool(y.eq(seed * 3).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(1, 33)))


@pytest.mark.gpu
def test_readonly_array_is_refused():
    class Frozen:
        def __init__(self, tensor):
            self.tensor, self.dtype, self.shape = tensor, np.dtype(np.float32), tuple(tensor.shape)
            pointer = tensor.data_ptr()
            self.__cuda_array_interface__ = {
                "shape": self.shape, "typestr": "<f4", "data": (pointer, True), "version": 3,
            }  # fmt: skip

    x = torch.zeros(8, device="cuda")
    with pytest.raises(Exception, match="[Rr]ead-?only|readonly|modify"):
        launch(scale_kernel, 1, 32, x, Frozen(x), 1.0)


@pytest.mark.gpu
def test_more_shared_memory_than_the_default_allows():
    @cuda.jit
    def wide_kernel(y):
        scratch = cuda.shared.array(0, np.float32)
        scratch[25_000 + cuda.threadIdx.x] = cuda.threadIdx.x
        cuda.syncthreads()
        y[cuda.threadIdx.x] = scratch[25_000 + cuda.blockDim.x - 1 - cuda.threadIdx.x]

    y = torch.empty(32, device="cuda")
    launch(wide_kernel, 1, 32, y, shared_bytes=101_000)
    assert torch.equal(y.cpu(), torch.arange(31.0, -1, -1))
    with pytest.raises(LaunchError, match="of dynamic shared memory asked for; this GPU allows"):
        launch(wide_kernel, 1, 32, y, shared_bytes=1 << 20)


@pytest.mark.gpu
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    x = torch.randn(100, device="cuda:1")
    assert torch.equal(scaled(x), x * 3)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ArrayError, match="two GPUs, cuda:1 and cuda:0"):
        launch(scale_kernel, 1, 32, x, torch.zeros(4, device="cuda:0"), 1.0)


@pytest.mark.gpu
def test_launch_overhead_is_that_of_a_torch_operator():
    from course_lib import bench

    x = torch.randn(128, 200, device="cuda")
    y = torch.empty_like(x)
    times = bench.host_times(
        {
            "softmax": lambda: torch.softmax(x, -1),
            "launch": lambda: launch(transpose_kernel, (1, 1, 1), (1, 1, 1), x, y),
        }
    )
    assert times["launch"].microseconds <= 1.3 * times["softmax"].microseconds, times


@pytest.mark.gpu
def test_cooperative_kernel_synchronises_the_grid():
    @cuda.jit
    def two_phase_kernel(x, y):
        grid = cuda.cg.this_grid()
        i = cuda.grid(1)
        x[i] = i
        grid.sync()
        y[i] = x[x.shape[0] - 1 - i]

    x, y = torch.zeros(64 * 32, device="cuda"), torch.zeros(64 * 32, device="cuda")
    launch(two_phase_kernel, 64, 32, x, y)
    assert torch.equal(y.cpu(), torch.arange(64 * 32 - 1, -1, -1).float())
