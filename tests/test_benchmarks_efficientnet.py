"""The benchmark of a whole network: what it times, and how it explains what it finds."""

import importlib
import operator
import time

import pytest
import torch
import torchvision
from benched import set_all, without_a_gpu
from torch import nn
from torch.profiler import ProfilerActivity, profile

from course_lib import bench, benchmarks
from course_lib.benchmarks import efficientnet as benchmark
from course_lib.benchmarks import network_profile
from course_lib.benchmarks.network_profile import BLOCK
from course_lib.kernels import squeeze_excite


def compute_by_torch(monkeypatch):
    """Let PyTorch compute what the launchers give: they have tests, and are slow when simulated."""
    operator = importlib.import_module("course_lib.ops.squeeze_excite")

    def forward(*inputs, activation, gate, variant="auto", out=None):
        y, *saved = operator._by_torch(*inputs, activation, gate)
        return (y if out is None else out.copy_(y)), *saved

    def backward(*inputs, activation, gate, variant="auto", out=None):
        dx, *gradients = operator._backward_by_torch(*inputs, activation, gate)
        return (dx if out is None else out.copy_(dx)), *gradients

    monkeypatch.setattr(squeeze_excite, "forward", forward)
    monkeypatch.setattr(squeeze_excite, "backward", backward)


def block(channels=8):
    return torchvision.ops.SqueezeExcitation(channels, 2, nn.SiLU)


def network():
    """What stands in for EfficientNet-B4: a few layers of every kind that it has."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True), block(),
        nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.SiLU(inplace=True), block(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, benchmark.N_CLASSES),
    )  # fmt: skip


class Event:
    """Stands in for torch.cuda.Event, by the host's clock."""

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        return (end.seconds - self.seconds) * 1e3


# ----------------------------------------------------------------------- where time goes


def profiled(model, *shape):
    blocks = benchmark.blocks_of(model)
    with network_profile.marked(blocks), profile(activities=[ProfilerActivity.CPU]) as found:
        model(torch.randn(shape, requires_grad=True)).sum().backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return found.events()


def own_time(event):
    return event.self_cpu_time_total


def test_every_group_has_its_share_of_a_step():
    events = profiled(network(), 2, 3, 9, 9)
    sums = network_profile.grouped(events, own_time)
    assert list(sums) == list(network_profile.GROUPS) and min(sums.values()) > 0
    assert sum(sums.values()) == pytest.approx(sum(map(own_time, events)))


def counted(events, *words):
    """{group: how many operations there are whose names have all of the words}."""
    found = network_profile.grouped(
        events, lambda event: all(word in event.name for word in words) and event.scope == 1
    )
    return {group: number for group, number in found.items() if number}


def test_what_runs_backward_belongs_to_what_ran_forward():
    events = profiled(network(), 2, 3, 9, 9)
    assert counted(events, "ConvolutionBackward") == {"convolution": 2, BLOCK: 4}
    assert counted(events, "BatchNormBackward") == {"batch norm": 2}
    assert counted(events, "SiluBackward") == {"activation": 2, BLOCK: 2}
    assert counted(events, "SigmoidBackward") == counted(events, "MulBackward") == {BLOCK: 2}
    # Pooling at the network's end is not the blocks'.
    assert counted(events, "MeanBackward") == {BLOCK: 2, "other": 1}


def test_without_blocks_nothing_is_theirs():
    events = profiled(nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU()), 2, 3, 9, 9)
    assert network_profile.grouped(events, own_time)[BLOCK] == 0


def test_removed_blocks_do_nothing_and_come_back():
    model, x = network().eval(), torch.randn(2, 3, 9, 9)
    blocks = benchmark.blocks_of(model)
    without = nn.Sequential(*(m for m in model if m not in blocks))
    expected = model(x)
    with network_profile.removed(blocks):
        assert torch.equal(model(x), without(x)) and not torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


# ------------------------------------------------------------------------- Amdahl's law


def test_amdahls_law():
    found = benchmark.amdahl(before=100.0, after=88.0, block_before=20.0, block_after=5.0)
    assert found == {
        "share": 0.2, "block_speedup": 4.0, "predicted_ratio": round(100 / 85, 4),
        "limit_ratio": 1.25, "measured_ratio": round(100 / 88, 4),
        "possible_microseconds": 15.0, "saved_microseconds": 12.0, "saved_of_possible": 0.8,
    }  # fmt: skip


def test_blocks_that_gain_nothing_promise_nothing():
    found = benchmark.amdahl(before=100.0, after=100.0, block_before=20.0, block_after=20.0)
    assert found["predicted_ratio"] == 1 and found["saved_of_possible"] is None


# --------------------------------------------------------------------------- the record


def by_the_clock(candidates, *, calls, rounds):
    """`bench.device_times` without a device: each candidate once."""
    assert calls == 1 and rounds == 2
    found = {}
    for label, function in candidates.items():
        begun = time.perf_counter()
        function(0)
        found[label] = bench.Timing((time.perf_counter() - begun) * 1e6, (0, 0))
    return found


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmark run a small network without a GPU; the profile is made up."""
    without_a_gpu(monkeypatch)
    compute_by_torch(monkeypatch)
    made_up = dict.fromkeys(network_profile.GROUPS, 10.0) | {"all": 50.0}
    shares = iter([made_up, made_up | {BLOCK: 4.0}] * 2)
    set_all(
        monkeypatch, benchmark, DEVICE="cpu", SHAPE=(2, 3, 5, 5), WARM_UP=1, network=network,
        _event=Event,
    )  # fmt: skip
    monkeypatch.setattr(bench, "device_times", by_the_clock)
    monkeypatch.setattr(network_profile, "groups", lambda step, blocks: (step(), next(shares))[1])


def test_before_and_after_are_timed_in_both_layouts(on_the_cpu):
    found = benchmark.run(rounds=2)
    assert [(record["name"], record["dtype"]) for record in found] == [
        (name, dtype) for dtype in benchmark.DTYPES
        for name in ("efficientnet.step", "efficientnet.inference")
    ]  # fmt: skip
    hashes = benchmark.kernel_hashes()
    for record in found:
        layouts = record["layouts"]
        other = {"contiguous": "channels-last", "channels-last": "contiguous"}
        rows = {row["label"]: row for row in record["rows"]}
        assert list(rows) == [
            "PyTorch eager", "ours", *(f"{who}, {other[layouts[who]]}" for who in layouts)
        ]  # fmt: skip
        for who in layouts:  # the better layout stands first
            slower = rows[f"{who}, {other[layouts[who]]}"]
            assert rows[who]["microseconds"] <= slower["microseconds"]
        assert record["kernel_hash"] == hashes[record["name"]]
        assert record["autocast"] is (record["dtype"] == "bfloat16")
        eager, ours = rows["PyTorch eager"]["microseconds"], rows["ours"]["microseconds"]
        assert record["ratio"] == pytest.approx(eager / ours, abs=1e-4)
        if record["name"] == "efficientnet.step":
            assert record["profile_layout"] == layouts["PyTorch eager"]
            assert record["profile"]["after"] == dict.fromkeys(network_profile.GROUPS, 10) | {
                BLOCK: 4.0}  # fmt: skip
            assert record["kernel_microseconds"] == {"before": 50.0, "after": 50.0}
            assert record["amdahl"]["block_speedup"] == 2.5
            graphs = record["graph_microseconds"]
            measured, expected = record["amdahl"]["measured_ratio"], graphs.values()
            assert measured == pytest.approx(operator.truediv(*expected), rel=1e-3)
            assert set(record["blocks_by_removal"]) == {"before", "after"}
    assert "efficientnet.step 2x3x5x5 bfloat16: PyTorch eager " in benchmarks.table(found)


def test_settings_are_put_back(on_the_cpu, monkeypatch):
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    monkeypatch.setattr(benchmark, "_measure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        benchmark.run()
    assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == before


def test_a_network_that_says_something_else_is_not_timed(on_the_cpu, monkeypatch):
    swap = benchmark.swap_blocks

    def wrong(model):
        n_swapped = swap(model)
        model[3].fc2.bias.data += 0.1
        return n_swapped

    monkeypatch.setattr(benchmark, "swap_blocks", wrong)
    with pytest.raises(AssertionError, match="outputs are wrong, so nothing is timed"):
        benchmark.run()
    monkeypatch.setattr(benchmark, "swap_blocks", lambda model: 0)
    with pytest.raises(AssertionError, match="only 0 of 2 blocks were swapped"):
        benchmark.run()


def test_all_the_networks_blocks_are_found():
    with torch.device("meta"):
        assert len(benchmark.blocks_of(benchmark.network())) == 32


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_efficientnet_on_a_gpu(monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPE", (4, 3, 128, 128))
    for record in benchmark.run(dtypes=["float32"], rounds=2):
        if record["name"] == "efficientnet.step":
            for when, found in record["profile"].items():
                total = record["kernel_microseconds"][when]
                assert 0 < found[BLOCK] < total and min(found.values()) > 0
                assert sum(found.values()) == pytest.approx(total, rel=1e-3)
                assert record["graph_microseconds"][when] > 0
