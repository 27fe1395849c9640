"""`train.device`: each switch has its effect, and PyTorch is afterwards as it was before.

MPS is tested with stand-ins: no Apple hardware is here.
"""

import contextlib

import pytest
import timm
import torch
import torchvision
from torch import nn

from course_lib import models
from course_lib.runtime.host import device as here
from course_lib.train import device, images, step
from course_lib.train.image_settings import ImageSettings

CPU, MPS, CUDA = torch.device("cpu"), torch.device("mps"), torch.device("cuda", 0)


def has(monkeypatch, gpus=0, mps=False, capability=(9, 0)):
    monkeypatch.setattr(here, "count", lambda: gpus)
    monkeypatch.setattr(here, "_mps_available", lambda: mps)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "Tesla T4")


def net(features=6):
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 5), nn.BatchNorm1d(5), nn.ReLU())


# -------------------------------------------------------------------------- the device


def test_mps_comes_first_then_cuda_then_the_cpu(monkeypatch):
    for gpus, mps, best in ((2, True, MPS), (2, False, torch.device("cuda")), (0, False, CPU)):
        has(monkeypatch, gpus, mps)
        assert device.choose("auto") == device.choose(None) == best
    has(monkeypatch, 2, True)
    for name in ("cpu", "mps", "cuda", "cuda:1"):
        assert device.choose(name) == torch.device(name)


@pytest.mark.parametrize("name, words", [
    ("cuda", "there is no cuda here: the CUDA driver reports 0 GPUs"),
    ("cuda:3", "there is no cuda:3 here"),
    ("mps", "there is no mps here"),
    ("tpu", "must be auto, mps, cpu, cuda, or a GPU by number"),
    ("cuda:x", "not 'cuda:x'"),
    ("cpu,cpu", "two devices are for a network of two pathways, in `train images`: name one here"),
    ("", "not ''"),
])
def test_a_device_that_is_not_there(monkeypatch, name, words):
    has(monkeypatch)
    with pytest.raises(ValueError, match=words):
        device.choose(name)


def test_two_devices(monkeypatch):
    has(monkeypatch, 2, mps=True)
    assert device.choose_all("cpu,cpu") == (CPU, CPU) and device.choose_all(None) == (MPS,)
    assert device.choose_all("cuda:1, cuda") == (torch.device("cuda:1"), torch.device("cuda"))
    for name in ("cuda:1,cuda:1", "cuda,cuda:0", "mps,mps"):
        with pytest.raises(ValueError, match=f"'{name}' names one GPU twice: name two, such as"):
            device.choose_all(name)
    for name in ("cpu,cuda", "cuda:0,cuda:1,cuda:0"):
        with pytest.raises(ValueError, match=f"must be two of one kind, .* not '{name}'"):
            device.choose_all(name)
    with pytest.raises(ValueError, match="must be auto, .* not ''"):
        device.choose_all("cpu,")
    settings, places = images.decided(ImageSettings(device="cuda:0,cuda:1"))
    assert len(places) == 2 and settings.capture is False
    for options in ({"compile": True}, {"kernels": "faster"}, {"memory_fraction": 0.5}):
        with pytest.raises(ValueError, match="needs one device, and 'cuda:0,cuda:1' names two"):
            images.decided(ImageSettings(device="cuda:0,cuda:1", **options))


def test_precisions_that_a_chip_lacks(monkeypatch):
    has(monkeypatch, 1, capability=(7, 5))
    for precision in ("bfloat16", "tf32"):
        with pytest.raises(ValueError, match=f"Tesla T4 has no {precision}: choose float32"):
            device.choose("cuda", precision)
    assert device.choose("cuda", "float16") == torch.device("cuda")
    assert device.half_of(CUDA) == "float16" and device.half_of(MPS) == "float16"
    has(monkeypatch, 1)
    assert device.half_of(CUDA) == device.half_of(CPU) == "bfloat16"
    with pytest.raises(ValueError, match="precision must be float32 or .*, not 'int8'"):
        device.choose("cpu", "int8")


def test_mps_sums_in_what_it_has():
    assert device.sums_dtype(MPS) == torch.float32 and device.sums_dtype(CUDA) == torch.float64


def test_channels_last_is_refused_on_mps_where_its_gradients_are_wrong(monkeypatch):
    device.require_channels_last(CPU)
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    device.require_channels_last(MPS)
    for version in ("2.11.0", "2.13.1+cpu"):
        monkeypatch.setattr(torch, "__version__", version)
        device.require_channels_last(CUDA)
        with pytest.raises(ValueError, match="leave channels_last out, or install PyTorch 2.14"):
            device.require_channels_last(MPS)
    has(monkeypatch, mps=True)
    with pytest.raises(ValueError, match="leave channels_last out"):
        images.decided(ImageSettings(device="mps", channels_last=True))


# ------------------------------------------------------------------------ what is set up


def switches():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.benchmark, cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@pytest.mark.parametrize("options, wanted", [
    ({"precision": "tf32", "deterministic": False}, ("tf32", "tf32", True, False, False)),
    ({"precision": "float32", "deterministic": False}, ("ieee", "ieee", True, False, False)),
    ({"precision": "float32", "deterministic": False, "benchmark": False},
     ("ieee", "ieee", False, False, False)),
    ({"precision": "tf32", "deterministic": True}, ("tf32", "tf32", False, True, True)),
])
def test_switches_are_set_and_set_back(options, wanted):
    before = switches()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(KeyError), device.settled(CPU, **options):
        assert switches() == wanted
        torch.rand(5)
        raise KeyError  # an error, too, leaves things as they were
    assert switches() == before
    assert torch.equal(torch.rand(2), expected)
    assert torch.backends.cuda.matmul.allow_tf32 in (True, False)  # readable, not mixed


def test_leaves_keep_the_tf32_that_is_set():
    before = switches()[:2]
    with device.settled(CPU):
        assert switches()[:2] == before and switches()[4]


def test_the_memory_fraction_reaches_the_allocator(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda place: 0.75)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction",
                        lambda *given: calls.append(given))  # fmt: skip
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", calls.append)
    monkeypatch.setattr(device, "repeatable", lambda place: contextlib.nullcontext())
    with device.settled(CUDA, memory_fraction=0.5):
        assert calls == [(0.5, 0)]
    assert calls == [(0.5, 0), (0.75, 0)]
    with device.settled(MPS, memory_fraction=0.8):
        assert calls[2:] == [0.8]
    with pytest.raises(ValueError, match="is for a GPU's memory"), device.settled(
        CPU, memory_fraction=0.5
    ):
        pass
    with pytest.raises(ValueError, match="above 0 and 1 at most, not 1.5"), device.settled(
        CUDA, memory_fraction=1.5
    ):
        pass


def test_deterministic_refuses_what_is_not():
    with device.settled(CPU), pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


@pytest.mark.parametrize("precision, dtype", [
    ("float32", torch.float32), ("tf32", torch.float32), ("bfloat16", torch.bfloat16),
    ("float16", torch.float16),
])
def test_autocast_changes_the_dtype_of_products(precision, dtype):
    layer, seen = nn.Linear(4, 3), []
    layer.register_forward_hook(lambda _, given, found: seen.append(found.dtype))
    with step.autocast(CPU, precision):
        layer(torch.ones(2, 4))
    assert seen == [dtype]


# ------------------------------------------------------------------ compiling, recomputing


def test_compiling_gives_a_compiled_module_and_changes_nothing_else():
    graphs, model, said = [], net(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model[1].weight.grad = torch.ones(5, 6)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = device.compiled(model, torch.randn(4, 6), say=said.append, backend=backend)
    assert found is not model and isinstance(found, torch._dynamo.OptimizedModule)
    assert len(graphs) >= 2 and said == []  # of training and of evaluation
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model[1].weight.grad, torch.ones(5, 6)) and model[1].bias.grad is None
    assert found.training
    x = torch.randn(4, 6)
    torch.testing.assert_close(found(x), net_like(model)(x))


def net_like(model):
    other = net()
    other.load_state_dict(model.state_dict())
    return other


def test_a_compiler_that_fails_is_told_and_gone_on_without():
    def broken(graph, inputs):
        raise RuntimeError("no compiler here\nand more")

    model, said = net(), []
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = device.compiled(model.eval(), torch.randn(4, 6), say=said.append, backend=broken)
    assert found is model and not model.training
    assert len(said) == 1 and "torch.compile does not work here" in said[0]
    assert "no compiler here" in said[0] and "and more" not in said[0]
    assert "the run goes on without" in said[0] and "\n" not in said[0]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model(torch.randn(4, 6))  # and it computes


def saved_bytes(model, x):
    """Bytes that autograd keeps for the backward pass, beside the parameters; and the gradients."""
    kept = {}
    own = {p.data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    return sum(kept.values()), [p.grad.clone() for p in model.parameters()]


def continuous():
    torch.manual_seed(0)
    return models.ContinuousIntegrationModel(
        4, base_channels=4, memory_efficient=False, dropout=0.0, layers=nn
    )  # fmt: skip


def test_checkpointing_keeps_fewer_bytes_and_gives_the_same_gradients():
    x = torch.randn(2, 3, 16, 16)
    bytes_before, expected = saved_bytes(continuous(), x)
    bytes_after, found = saved_bytes(device.checkpointed(continuous()), x)
    assert bytes_after < 0.5 * bytes_before
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_checkpointing_moves_statistics_once_a_step(library):
    found = []
    for wanted in (False, True):
        torch.manual_seed(3)
        model = (
            timm.create_model("densenet121", num_classes=3, growth_rate=4, block_config=(2, 1))
            if library == "timm"
            else torchvision.models.DenseNet(4, (2, 1), 8, num_classes=3)
        )
        model = device.checkpointed(model) if wanted else model
        for _ in range(2):
            model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        found.append((dict(model.named_buffers()), [p.grad for p in model.parameters()]))
    assert {int(x) for name, x in found[1][0].items() if "num_batches" in name} == {2}
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_network_without_the_switch_is_refused():
    with pytest.raises(ValueError, match="Sequential has no switch for gradient checkpointing"):
        device.checkpointed(net())
    dense = nn.Module()
    dense.layer = nn.Identity()
    dense.layer.memory_efficient = False  # as torchvision's DenseNet
    assert device.checkpointed(dense).layer.memory_efficient is True

    class Timms(nn.Module):
        def set_grad_checkpointing(self, enable):
            assert not enable, "gradient checkpointing not supported"

    with pytest.raises(ValueError, match="Timms has no switch .*not supported"):
        device.checkpointed(Timms())
