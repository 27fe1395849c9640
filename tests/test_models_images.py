"""The networks for images: what they promise beside numbers, which `on_the_cpu/images.py` compares.

On PyTorch's layers, where the simulator would only take time.
"""

import copy
import functools
import itertools
import math
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import two_processes
from tensors import PLACE, choosing, randn
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import models, nn
from course_lib.kernels import conv2d
from course_lib.models import pathways
from course_lib.models.continuous_integration import DEPTHS, INTEGRATION_POINTS, brightness_of
from course_lib.train.randomness import repeatable

POINTS = list(itertools.product(DEPTHS, INTEGRATION_POINTS))
pytestmark = pytest.mark.seed(5)


def two_pathways(depth="shallow", *, num_classes=5, base_channels=4, layers=torch.nn, **options):
    return models.ContinuousIntegrationModel(
        num_classes, depth, base_channels, layers=layers, **options
    )


# ── on our kernels ───────────────────────────────────────────────────────────────────────────────


def one_step(make, x, target, layers, dtype=torch.float32):
    """(loss, gradients, statistics) of a network of `make`."""
    torch.manual_seed(1)
    model = make(layers=layers, dropout=0.0).to(PLACE, dtype)
    model.enable_mixed_precision = False
    loss = F.cross_entropy(model(x.to(dtype)), target)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), gradients, [b for b in model.buffers() if b.is_floating_point()]


def test_one_step_on_our_kernels_is_pytorchs():
    """Recomputed, too: what our kernels write to statistics, they write once."""
    make = functools.partial(two_pathways, base_channels=1, integration_points="early")
    x, target = randn(2, 3, 4, 4), torch.tensor([0, 2], device=PLACE)
    with choosing("tiled", conv2d):
        ours, theirs = (one_step(make, x, target, layers) for layers in (nn, torch.nn))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make",
    [
        models.TinyImageNetCNN,
        lambda dropout, **o: models.resnet18_small(**o),
        functools.partial(two_pathways, "deep", base_channels=16),
    ],
    ids=["tiny_cnn", "resnet18_small", "two pathways"],
)
def test_one_step_at_full_size_on_our_kernels_is_pytorchs(make):
    """As near to float64 as PyTorch's float32, which ReLU leads away by up to 0.5 %."""
    x, target = randn(8, 3, 64, 64), torch.arange(8, device=PLACE) % 5
    true = one_step(make, x, target, torch.nn, torch.float64)
    ours, theirs = (one_step(make, x, target, layers) for layers in (nn, torch.nn))
    torch.testing.assert_close(ours[0].double(), true[0], rtol=1e-4, atol=1e-5)
    for found, peer, expected in zip(ours[1:], theirs[1:], true[1:], strict=True):
        found, peer, expected = map(flat, (found, peer, expected))
        error, allowed = ((each - expected).norm() for each in (found, peer))
        assert error <= 2 * allowed + 1e-5 * expected.norm()


def flat(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors])


# ── Tiny-ImageNet ────────────────────────────────────────────────────────────────────────────────


def test_tiny_imagenet_as_it_stands():
    model = models.TinyImageNetCNN(layers=torch.nn).eval()
    assert sum(p.numel() for p in model.parameters()) == 4_390_888
    assert model.classifier[1].weight.shape == (512, 8192)
    x = torch.randn(2, 3, 64, 64)
    logits, probabilities = model(x), model.probabilities(x)
    assert logits.shape == (2, 200)
    torch.testing.assert_close(probabilities, logits.softmax(1))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(2))
    assert type(models.TinyImageNetCNN().softmax) is nn.Softmax


def test_a_softmax_before_the_loss_is_a_fault():
    """A network that is sure and right keeps most of its loss; others get next to no gradient."""
    n, right, wrong = 200, 3, 7

    def loss_and_gradient(favourite, height, doubled):
        logits = torch.zeros(1, n).index_fill_(1, torch.tensor(favourite), height)
        logits.requires_grad_()
        loss = F.cross_entropy(logits.softmax(1) if doubled else logits, torch.tensor([right]))
        loss.backward()
        return loss.item(), logits.grad.norm().item()

    floor = math.log(1 + (n - 1) / math.e)
    assert floor == pytest.approx(4.31, abs=0.01)
    assert loss_and_gradient(right, 30.0, True)[0] == pytest.approx(floor, abs=1e-5)
    assert loss_and_gradient(right, 30.0, False)[0] == pytest.approx(0, abs=1e-5)
    for height in (0.0, 12.0):  # at the start, and sure of another class
        doubled, once = (loss_and_gradient(wrong, height, each) for each in (True, False))
        assert floor < doubled[0] and doubled[1] < 0.01 * once[1]


# ── two pathways ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("depth", "points"), POINTS)
def test_every_parameter_learns(depth, points):
    """So DistributedDataParallel waits for none in vain; with and without recomputation.

    In float64: in float32, gradients that should be 0 are not, by rounding.
    """
    model = two_pathways(depth, integration_points=points, dropout=0.0).double()
    model.memory_efficient = points != "early"
    logits = model(torch.randn(4, 3, 16, 16, dtype=torch.float64))
    assert logits.shape == (4, 5)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 4])).backward()
    without = [
        name for name, p in model.named_parameters() if p.grad is None or p.grad.norm() < 1e-9
    ]
    assert without == []


def test_where_maps_are_integrated():
    found = {each: list(two_pathways(each[0], integration_points=each[1]).integrations)
             for each in POINTS}  # fmt: skip
    assert all(points[-1] == "pooled" for points in found.values())
    assert len({(depth, *points) for (depth, _), points in found.items()}) == len(POINTS)
    assert found["deep", "all"] == ["stage1", "stage2", "stage3", "stage4", "pooled"]
    assert found["medium", "middle"] == ["stage2", "pooled"] and found["medium", "late"] == [
        "pooled"
    ]
    blocks = [len(stage) for stage in two_pathways("deep").colour[1:]]
    widths = [stage[0].conv1.out_channels for stage in two_pathways("deep").brightness[1:]]
    assert blocks == [2, 3, 4, 2] and widths == [8, 16, 32, 64]


def test_weights_and_contributions():
    model = two_pathways()
    first = torch.tensor([0.5, 0.5, 0.0]).softmax(0).tolist()
    weights = model.get_integration_weights()
    assert list(weights) == ["stage1", "stage2", "pooled"]
    for each in weights.values():
        assert list(each) == ["colour", "brightness", "integrated"]
        assert list(each.values()) == pytest.approx(first)
    assert model.get_pathway_contributions()["colour"] == pytest.approx(0.5)
    only_colour, only_integrated, only_pathways = (40, 0, 0), (0, 0, 40), (0, 0, -40)
    scalars = dict(stage1=only_colour, stage2=only_integrated, pooled=only_pathways)
    with torch.no_grad():
        for name, three in scalars.items():
            model.integrations[name].scalars.copy_(torch.tensor(three))
    assert model.get_pathway_contributions() == pytest.approx({"colour": 0.5, "brightness": 0.5})
    with torch.no_grad():
        model.integrations["pooled"].scalars.zero_()
    found = model.get_pathway_contributions()
    assert found == pytest.approx({"colour": 2 / 3, "brightness": 1 / 3})
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.tensor([0, 1, 2, 4])).backward()
    optimizer.step()
    assert model.get_integration_weights() != weights  # learned


def test_memory_usage_counts_bytes():
    model = two_pathways()
    found = model.get_memory_usage()
    n = sum(p.numel() for p in model.parameters())
    assert found["parameters"] == 4 * n and found["gradients"] == 0 and found["buffers"] > 0
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert model.get_memory_usage()["gradients"] == 4 * n
    assert model.double().get_memory_usage()["parameters"] == 8 * n
    assert model.device == torch.device("cpu") and model.to("meta").device.type == "meta"


def test_brightness_given_or_computed():
    model = two_pathways().eval()
    images = torch.rand(2, 3, 9, 7)
    luma = images[:, :1] * 0.299 + images[:, 1:2] * 0.587 + images[:, 2:] * 0.114
    torch.testing.assert_close(brightness_of(images), luma)
    torch.testing.assert_close(brightness_of(torch.ones(1, 3, 2, 2)), torch.ones(1, 1, 2, 2))
    assert torch.equal(model(images), model(images, brightness_of(images)))
    assert not torch.equal(model(images), model(images, torch.zeros(2, 1, 9, 7)))


WRONG = [
    (torch.zeros(2, 1, 16, 16), None, r"deep expects \(N, 3, H, W\) of at least 8 pixels each way, "
     r"not \(2, 1, 16, 16\)"),
    (torch.zeros(2, 3, 16, 7), None, r"at least 8 pixels each way, not \(2, 3, 16, 7\)"),
    (torch.zeros(3, 16, 16), None, r"not \(3, 16, 16\)"),
    (torch.zeros(2, 3, 16, 16), torch.zeros(2, 1, 8, 8), r"brightness must be \(2, 1, 16, 16\), as "
     r"colour is \(2, 3, 16, 16\), not \(2, 1, 8, 8\)"),
    (torch.zeros(2, 3, 16, 16), torch.zeros(2, 3, 16, 16), r"must be \(2, 1, 16, 16\)"),
    (torch.zeros(2, 3, 16, 16), torch.zeros(2, 1, 16, 16).double(), "dtype, torch.float32, not "
     "torch.float64"),
    (torch.zeros(2, 3, 16, 16), torch.zeros(2, 1, 16, 16, device="meta"), "device, cpu, not meta"),
]  # fmt: skip


@pytest.mark.parametrize(("colour", "brightness", "words"), WRONG)
def test_wrong_images(colour, brightness, words):
    with pytest.raises(ValueError, match=words):
        two_pathways("deep")(colour, brightness)


def test_wrong_networks():
    for options, words in (
        (dict(depth="flat"), "depth must be one of shallow, medium, deep, not 'flat'"),
        (dict(integration_points="end"), "one of early, middle, late, all, not 'end'"),
        (dict(base_channels=0), "base_channels must be a whole number from 1 on, not 0"),
        (dict(num_classes=2.5), "num_classes must be a whole number from 1 on, not 2.5"),
        (dict(num_classes=True), "num_classes must be a whole number from 1 on, not True"),
    ):
        with pytest.raises(ValueError, match=words):
            two_pathways(**options)
    for network, n in ((models.TinyImageNetCNN, 3), (models.resnet18_small, 4)):
        for classes in (0, -3, 2.0, "5", None):
            words = f"num_classes must be a whole number from 1 on, not {classes!r}"
            with pytest.raises(ValueError, match=words):
                network(classes)
        for widths in ((8,) * (n - 1), (8,) * (n + 1), (0, *(8,) * (n - 1)), 8):
            words = f"widths must be {n} whole numbers from 1 on, not {widths!r}"
            with pytest.raises(ValueError, match=re.escape(words)):
                network(5, widths=widths)
    with pytest.raises(ValueError, match="hidden must be a whole number from 1 on, not 0"):
        models.TinyImageNetCNN(hidden=0)
    with pytest.raises(ValueError, match=r"expects \(N, 3, 64, 64\), not \(2, 3, 32, 32\)"):
        models.TinyImageNetCNN(layers=torch.nn)(torch.zeros(2, 3, 32, 32))
    with pytest.raises(ValueError, match="image_size must be at least 8"):
        models.TinyImageNetCNN(image_size=7)
    with pytest.raises(ValueError, match=r"resnet18_small expects .*8 pixels.*not \(2, 3, 4, 4\)"):
        models.resnet18_small(5, widths=(2, 2, 2, 2), layers=torch.nn)(torch.zeros(2, 3, 4, 4))


def test_one_image_of_the_smallest_size_can_be_learned_from():
    """As the last batch of a set may be: means over planes have no statistics of a batch."""
    for points in INTEGRATION_POINTS:
        model = two_pathways("medium", integration_points=points)
        model(torch.randn(1, 3, 8, 8)).sum().backward()
        assert torch.isfinite(model.integrations["pooled"].scalars.grad).all()


# ── two devices ──────────────────────────────────────────────────────────────────────────────────


class Crossings(TorchDispatchMode):
    """Notes copies from device to device. From the meta device, which has no values, come zeros."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch.ops.aten._to_copy.default or "device" not in kwargs:
            return function(*args, **kwargs)
        ends = args[0].device.type, torch.device(kwargs["device"]).type
        self.found.append(ends)
        return torch.zeros_like(args[0], **kwargs)


@pytest.mark.parametrize("points, n", [("all", 5), ("late", 2)])
def test_pathways_on_two_devices_meet_at_the_points_alone(points, n):
    model = two_pathways("medium", integration_points=points).spread("cpu", "meta")
    assert [place.type for place in model.devices] == ["cpu", "meta"]
    for training in (True, False):
        with torch.set_grad_enabled(training), Crossings() as crossings:
            logits = model.train(training)(torch.zeros(2, 3, 16, 16))
            assert logits.device.type == "cpu"  # operations on tensors of both give the meta device
            assert crossings.found == [("cpu", "meta")] + [("meta", "cpu")] * n
            if training:
                logits.sum().backward()
                assert crossings.found[n + 1 :] == [("cpu", "meta")] * n
                assert all(p.grad.device == p.device for p in model.parameters())
    assert {p.device.type for p in model.brightness.parameters()} == {"meta"}
    assert model.to("meta").devices == (torch.device("meta"),) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [nn, torch.nn])
def test_two_gpus_learn_the_bits_of_one(layers):
    if torch.cuda.device_count() < 2:
        pytest.skip("only one GPU here")
    places, found = ("cuda:0", "cuda:1"), []
    x, target = randn(8, 3, 32, 32).to(places[0]), torch.arange(8, device=places[0]) % 5
    first = two_pathways("medium", base_channels=8, dropout=0.0, layers=layers)
    for second in (places[0], places[1], places[1]):  # twice: what ran first may be repeated
        model = copy.deepcopy(first).spread(places[0], second)
        with repeatable(torch.device(places[0])):
            loss = F.cross_entropy(model(x), target)
            loss.backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


# ── several processes, and a GPU ─────────────────────────────────────────────────────────────────


def test_two_processes_are_one(tmp_path):
    """DistributedDataParallel, beside one process that averages the gradients of both halves."""
    environment = {k: v for k, v in os.environ.items() if k != "COURSE_LIB_SIMULATOR"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, two_processes.__file__]
    started = [
        subprocess.Popen([*script, str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    try:
        expected = {
            name: two_processes.by_one(model)
            for name, model in two_processes.networks(layers=torch.nn).items()
        }
        assert [process.wait(timeout=250) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, state in expected.items():
        torch.testing.assert_close(first[name], state, rtol=1e-4, atol=1e-5)
        differ = [key for key in state if not torch.equal(first[name][key], second[name][key])]
        assert differ and all("running" in key for key in differ)  # of its own half


@pytest.mark.gpu
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_two_streams_give_the_bits_of_one(memory_efficient):
    """Also from a captured graph."""
    x, target, found = randn(8, 3, 32, 32), torch.arange(8, device=PLACE) % 5, {}
    model = two_pathways("medium", base_channels=8, dropout=0.0, layers=nn).to(PLACE)
    model.memory_efficient = memory_efficient
    parameters, state = list(model.parameters()), copy.deepcopy(model.state_dict())

    def step():
        logits = model(x)
        gradients = torch.autograd.grad(F.cross_entropy(logits, target), parameters)
        return logits.detach(), gradients  # a kept graph would keep the stream it was made on

    for parallel in (False, True):
        model.parallel_pathways = parallel
        model.load_state_dict(state)
        found[parallel] = step()
    model.load_state_dict(state)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    model.load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found["captured"] = step()
    graph.replay()
    torch.cuda.synchronize()
    for other in (True, "captured"):
        torch.testing.assert_close(found[other], found[False], rtol=0, atol=0)


@pytest.mark.gpu
def test_streams_wait_for_what_crosses_them_and_hold_its_memory(monkeypatch):
    recorded, cycles = [], 50_000_000  # tens of milliseconds
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: recorded.append((x.data_ptr(), stream))
    )

    def late_double(y):
        torch.cuda._sleep(cycles)
        return y * 2

    here, x, y = torch.cuda.current_stream(), randn(4), torch.zeros(4, device=PLACE)
    late_double(y)  # both streams have done so once
    pathways.both(lambda x: x + 1, late_double, x, y)
    torch.cuda.synchronize()
    recorded.clear()
    torch.cuda._sleep(cycles)
    y.fill_(3)
    _, there = pathways.both(lambda x: x + 1, late_double, x, y)
    assert there.tolist() == [6.0] * 4
    (first, beside), last = recorded
    assert first == y.data_ptr() and beside != here
    assert last == (there.data_ptr(), here)


@pytest.mark.gpu
def test_pathways_overlap():
    """In a graph, where no host makes one wait until the other is done."""
    model = two_pathways("medium", base_channels=32, layers=nn).to(PLACE).eval()
    x = randn(8, 3, 64, 64)

    def overlaps(parallel):
        model.parallel_pathways = parallel
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        graph.replay()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            graph.replay()
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end) for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )  # fmt: skip
        assert len(spans) > 20
        return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))

    with torch.no_grad():
        assert overlaps(True) > overlaps(False) + 3
