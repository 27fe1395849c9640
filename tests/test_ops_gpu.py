"""Operators on a GPU: streams, captured graphs, other devices, and what a call costs the host."""

import pytest
import torch
from tensors import close, never_waiting

from course_lib import nn, ops

pytestmark = pytest.mark.gpu
SHAPE = (128, 200)


def cuda(*shape, **options):
    return torch.randn(*shape, device="cuda", **options)


def backward(function, x):
    """Both passes: (y, dx)."""
    y = function(x)
    return y, torch.autograd.grad(y, x, torch.ones_like(y) if y.dim() == 0 else y.detach() + 1)[0]


def test_two_streams_in_turns():
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [cuda(1000, 200) for _ in streams]
    torch.cuda.synchronize()
    found = []
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            torch.cuda._sleep(1_000_000)
            found.append(ops.log_softmax(inputs[turn % 2].add(turn)))
    torch.cuda.synchronize()
    for turn, y in enumerate(found):
        close(y, torch.log_softmax(inputs[turn % 2].add(turn), -1), scale=4)


def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for place in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(SHAPE, device=place, requires_grad=True)
        y, dx = backward(ops.softmax, x)
        assert y.device == dx.device == x.device
        expected = backward(lambda x: torch.softmax(x, -1), x)
        close(y, expected[0])
        close(dx, expected[1], scale=8)
        z = ops.softmax_dropout(x, 0.5)
        close(z, torch.softmax(x, -1) * (z != 0) * 2)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    layer = torch.nn.Linear(50, 100, device="cuda")
    x, target = cuda(32, 50), torch.randint(100, (32,), device="cuda")
    loss = nn.CrossEntropyLoss(weight=torch.rand(100)).cuda()
    peer = torch.nn.CrossEntropyLoss(weight=loss.weight)
    found = []
    for softmax, entropy in ((nn.Softmax(-1), loss), (torch.nn.Softmax(-1), peer)):
        with torch.autocast("cuda", dtype=dtype):
            logits = layer(x)
            y, value = softmax(logits), entropy(logits, target)
        gradient = torch.autograd.grad(value + y.square().sum(), layer.weight)[0]
        found.append((y, value, gradient))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    close(found[0][0], found[1][0])


def test_compiles_with_the_default_backend():
    statistics = torch.zeros(100, device="cuda"), torch.ones(100, device="cuda")
    weight, bias = torch.ones(100, device="cuda"), torch.zeros(100, device="cuda")
    target = torch.randint(100, (64,), device="cuda")

    def network(x):
        y = ops.softmax(x * 2 - 1) + ops.log_softmax(x, 0)
        z = ops.bn_relu_softmax(x, *statistics, weight, bias) + ops.softmax_dropout(x, 0.0)
        return (y * z).sum() + ops.cross_entropy(x, target)

    x = cuda(64, 100, requires_grad=True)
    torch.compiler.reset()
    found = [backward(f, x) for f in (torch.compile(network, fullgraph=True), network)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_wait_for_the_gpu():
    x = cuda(SHAPE, requires_grad=True)

    def work():
        for dim in (-1, 0):
            ops.softmax(x, dim).sum().backward()
            ops.log_softmax(x, dim).sum().backward()

    work()  # the first time, kernels are loaded
    with never_waiting():
        work()


def test_one_launch_in_each_direction():
    x = cuda(SHAPE, requires_grad=True)
    dy = torch.randn_like(x)
    torch.autograd.grad(ops.softmax(x), x, dy)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(ops.softmax(x), x, dy)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(kernels) == 2, [event.name for event in kernels]


@pytest.mark.parametrize(("recording", "limit"), [(False, 1.5), (True, 2.5)])
def test_host_time_of_the_module(recording, limit):
    from course_lib import bench

    x = cuda(SHAPE, requires_grad=recording)
    ours, theirs = nn.Softmax(dim=-1), torch.nn.Softmax(dim=-1)
    with torch.set_grad_enabled(recording):
        times = bench.host_times({"ours": lambda: ours(x), "theirs": lambda: theirs(x)})
    assert times["ours"].microseconds <= limit * times["theirs"].microseconds, times
