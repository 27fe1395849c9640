"""`host.replay`: which calls are repeated without their launcher, and which never are."""

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host import launch as launching
from course_lib.runtime.host import replay
from course_lib.runtime.host.launch import launch

PLACE = "cpu" if SIMULATED else "cuda"


@cuda.jit
def scale_kernel(x, y, factor):
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i] = x[i] * factor


@cuda.jit
def difference_kernel(x, y, z):
    i = cuda.grid(1)
    if i < x.shape[0]:
        z[i] = x[i] - y[i]


class Scale:
    """A launcher that counts how often it had to think."""

    def __init__(self, factor, launches=1):
        self.factor, self.launches, self.thought = factor, launches, 0

    @replay.replayed
    def forward(self, x, *, variant="plain", out=None):
        """y = factor · x."""
        self.thought += 1
        x = x.contiguous()
        y = torch.empty_like(x) if out is None else out
        for _ in range(self.launches if x.numel() else 0):
            launch(scale_kernel, -(-x.numel() // 64), 64, x, y, self.factor, flat=True)
        return y


@pytest.fixture(autouse=True, scope="module")
def a_tensor_is_known():
    """The first launch of a process learns what a tensor is, and so is not remembered."""
    if not SIMULATED:
        Scale(1.0).forward(aligned(1))


@pytest.fixture
def stream(monkeypatch):
    """Where there is no GPU: CPU tensors count as a GPU's, and a repeated launch is worked out.

    Everything but the driver's call is then the real thing. Returns what tells the stream.
    """
    state = SimpleNamespace(current=0)
    if SIMULATED:

        def prepare(kernel, grid, block, *args, **options):
            x, _, factor = args
            n, number = x.numel(), ctypes.c_float * x.numel()

            def run(addresses):
                source, target = (np.ctypeslib.as_array(number.from_address(a)) for a in addresses)
                target[:n] = source * factor

            return SimpleNamespace(launch=run)

        monkeypatch.setattr(launching, "on_gpu", lambda: True)
        monkeypatch.setattr(launching, "prepare", prepare)
        monkeypatch.setattr(launching, "tensor_types", {torch.Tensor, torch.nn.Parameter})
        monkeypatch.setattr(launching, "_stream_of", lambda index: state.current)
    return state


def aligned(*shape):
    return torch.randn(*shape, device=PLACE)


def thoughts(scale, *calls):
    """How often `scale` thinks about calls with these tensors, all of which must come out right."""
    before = scale.thought
    for x in calls:
        y = scale.forward(x)
        assert torch.equal(y, x * scale.factor) and y.is_contiguous()
        assert type(y) is torch.Tensor and not y.requires_grad
    return scale.thought - before


def test_repeats_what_looks_alike(stream):
    scale = Scale(3.0)
    assert thoughts(scale, *(aligned(5, 8) for _ in range(4))) == 1
    assert thoughts(scale, torch.nn.Parameter(aligned(5, 8)).detach()) == 0
    assert scale.forward.__doc__ == "y = factor · x."


def test_thinks_anew_of_another_shape_variant_launcher_or_number(stream):
    scale, other = Scale(3.0), Scale(5.0)
    x = aligned(5, 8)
    assert thoughts(scale, x) == 1
    assert thoughts(scale, aligned(8, 5), aligned(40)) == 2
    assert thoughts(other, x) == 1
    scale.forward(x, variant="plain")
    scale.forward(x, variant="other")
    assert scale.thought == 5
    assert thoughts(scale, x, aligned(8, 5), aligned(40)) == 0


def test_runs_the_launcher_where_it_has_more_to_do(stream):
    scale = Scale(2.0)
    gaps, off = aligned(8, 8)[:, ::2], aligned(41)[1:]
    assert thoughts(scale, gaps, gaps, off, off) == 4
    assert thoughts(scale, aligned(40), off, aligned(40)) == 2
    x, out = aligned(40), torch.empty(40, device=PLACE)
    assert scale.forward(x, out=out) is out and torch.equal(out, x * 2)
    assert thoughts(scale, aligned(0, 4), aligned(0, 4)) == 2
    for _ in range(2):
        assert torch.equal(scale.forward(x=x), x * 2)
    assert scale.thought == 11


def test_several_launches_are_not_repeated(stream):
    scale = Scale(2.0, launches=2)
    assert thoughts(scale, *(aligned(6),) * 3) == 3


def test_another_array_in_the_launch_is_not_repeated(stream):
    class Through:
        @replay.replayed
        def forward(self, x, *, variant=None, out=None):
            scratch = torch.empty_like(x)
            launch(scale_kernel, 1, 64, x, scratch, 2.0, flat=True)
            return scratch.clone()

    through = Through()
    for _ in range(3):
        x = aligned(7)
        assert torch.equal(through.forward(x), x * 2)


def test_two_inputs(stream, monkeypatch):
    def prepare(kernel, grid, block, x, y, z, **options):
        shape = (len(x),)

        def run(addresses):
            x, y, z = (
                np.ctypeslib.as_array((ctypes.c_float * shape[0]).from_address(a))
                for a in addresses
            )
            z[:] = x - y

        return SimpleNamespace(launch=run)

    if SIMULATED:
        monkeypatch.setattr(launching, "prepare", prepare)

    class Difference:
        thought = 0

        @replay.replayed
        def backward(self, x, y, *, variant=None, out=None):
            self.thought += 1
            z = torch.empty_like(y)
            launch(difference_kernel, 1, 64, x, y, z)
            return z

    difference = Difference()
    for n in (8, 8, 12, 12):
        x, y = aligned(n), aligned(n)
        assert torch.equal(difference.backward(x, y), x - y)
        assert torch.equal(difference.backward(x, aligned(n + 1)[1:] * 0), x)
    assert difference.thought == 2
    gaps = aligned(16)[::2]
    for x, y in ((gaps, aligned(8)), (aligned(8), gaps), (aligned(9)[1:], aligned(8))):
        assert torch.equal(difference.backward(x, y), x - y)
    assert difference.thought == 5


def test_threads_do_not_share(stream):
    scale, x = Scale(3.0), aligned(16)
    assert thoughts(scale, x, x) == 1
    thread = threading.Thread(target=lambda: scale.forward(x))
    thread.start()
    thread.join()
    assert scale.thought == 2


def test_forgets_rather_than_grows(stream, monkeypatch):
    monkeypatch.setattr(replay, "MOST_REMEMBERED", 2)
    scale = Scale(3.0)
    tensors = [aligned(n) for n in (4, 8, 12)]
    assert thoughts(scale, *tensors) == 3
    assert thoughts(scale, tensors[2], tensors[0]) == 1


def test_an_error_is_raised_each_time(stream):
    class Refusing:
        @replay.replayed
        def forward(self, x, *, variant=None, out=None):
            raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            Refusing().forward(aligned(4))
    assert not launching._recorders


@pytest.mark.skipif(not SIMULATED, reason="in the simulator")
def test_in_the_simulator_the_launcher_always_runs():
    assert thoughts(Scale(3.0), *(aligned(5),) * 3) == 3


@pytest.mark.skipif(not SIMULATED, reason="tells streams by a stand-in")
def test_another_stream(stream):
    scale, x = Scale(3.0), aligned(16)
    assert thoughts(scale, x, x) == 1
    stream.current = 7
    assert thoughts(scale, x, x) == 1


def test_records_launches_of_this_thread_only():
    x, y = aligned(8), aligned(8)

    def elsewhere():
        launch(scale_kernel, 1, 64, y, y, 1.0)

    with launching.recorded() as outer:
        with launching.recorded() as record:
            launch(scale_kernel, 1, 64, x, y, 2.0, flat=True)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
    assert outer == record and len(record) == 1
    kernel, grid, block, args, options = record[0]
    assert (kernel, grid, block, args[0] is x, options["flat"]) == (scale_kernel, 1, 64, True, True)


@pytest.mark.gpu
def test_streams_of_a_gpu():
    scale, streams = Scale(3.0), [torch.cuda.Stream() for _ in range(2)]
    x = aligned(1 << 20)
    for _ in range(3):
        for each in streams:
            each.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(each):
                torch.cuda._sleep(2_000_000)
                moved = x + 1
                y = scale.forward(moved)
            torch.cuda.current_stream().wait_stream(each)
            assert torch.equal(y, (x + 1) * 3)
    assert scale.thought == 2


@pytest.mark.gpu
def test_in_a_captured_graph():
    scale = Scale(3.0)
    x = aligned(64)
    scale.forward(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):  # launched, then repeated, both into the graph
            y = scale.forward(x)
    x.fill_(2)
    graph.replay()
    assert y.eq(6).all()


@pytest.mark.gpu
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    scale = Scale(3.0)
    for _ in range(2):
        for place in ("cuda:1", "cuda:0"):
            x = torch.randn(100, device=place)
            y = scale.forward(x)
            assert y.device == x.device and torch.equal(y, x * 3)
    assert scale.thought == 2 and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_under_the_sanitizer_the_launcher_runs():
    from course_lib import simulator

    scale, x = Scale(3.0), aligned(64)
    thoughts(scale, x, x)
    with simulator.sanitize() as report:
        thoughts(scale, x)
    assert scale.thought == 2 and not report.findings
