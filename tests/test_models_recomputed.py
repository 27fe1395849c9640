"""What networks for images compute again, and what they keep: checkpointing and constants."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, randn
from test_models_images import pytestmark, two_pathways  # noqa: F401 - the same seed
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import nn
from course_lib.models import continuous_integration, pathways

# ── gradient checkpointing ───────────────────────────────────────────────────────────────────────


def kept_bytes(model, x):
    """(bytes that autograd keeps for the backward pass, beside weights; the logits)."""
    seen = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers(), x)}
    total = 0

    def pack(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(x)
    return total, logits


def test_recomputing_keeps_less_and_changes_nothing():
    x, target, found = torch.randn(4, 3, 32, 32), torch.arange(4), []
    model = two_pathways("medium", dropout=0.5)
    for enable in (False, True):
        other = copy.deepcopy(model)
        other.set_grad_checkpointing(enable)
        torch.manual_seed(8)
        kept, logits = kept_bytes(other, x)
        loss = F.cross_entropy(logits, target)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients = [p.grad for p in other.parameters()]
        found.append((kept, logits, gradients, other.state_dict()))
    (kept, *expected), (kept_less, *others) = found
    assert kept_less < 0.5 * kept
    torch.testing.assert_close(others, expected, rtol=0, atol=0)  # statistics, and their counts
    assert found[1][3]["colour.0.1.num_batches_tracked"] == 1


def test_an_error_in_recomputation_leaves_batch_norms_as_they_were():
    class Fails(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = torch.nn.BatchNorm2d(2), 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return self.norm(x).exp()

    module = Fails()
    y = pathways.recomputed(module, torch.randn(2, 2, 3, 3))
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert module.norm.momentum == 0.1 and module.norm.num_batches_tracked == 1


# ── constants in eval mode ───────────────────────────────────────────────────────────────────────


class Counted(TorchDispatchMode):
    """Counts how often the three weights are computed, and how often a batch norm runs."""

    def __enter__(self):
        self.softmax = self.norms = 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.softmax += "softmax" in str(function)
        self.norms += "batch_norm" in str(function)
        return function(*args, **(kwargs or {}))


def runs(model, x):
    """(softmaxes, batch norms) of a forward pass without gradients."""
    with torch.no_grad(), Counted() as counted:
        model(x)
    return counted.softmax, counted.norms


def plain(model, x):
    """What `model` computes where nothing is folded."""
    return copy.deepcopy(model)(x).detach()


def test_constants_are_used_and_go_with_the_weights():
    model, x = two_pathways("shallow").train(), torch.randn(4, 3, 8, 8)
    model(x)  # statistics of its own
    model.eval()
    point = model.integrations["stage2"]

    def step(kind, **options):
        model(x).sum().backward()
        kind(model.parameters(), 0.1, **options).step()

    def replace_layer():
        point.mlp[1] = copy.deepcopy(point.mlp[1])
        point.mlp[1].weight.data.mul_(3)

    def edit():
        point.mlp[0].weight.add_(0.1)

    def edit_data():
        point.scalars.data.add_(torch.tensor([0.0, 1.0, 0.0]))
        model.eval()

    def move(to):
        return lambda: model.to(to)

    state = copy.deepcopy(model.state_dict())
    larger = {k: v * 1.5 if v.is_floating_point() else v for k, v in state.items()}
    changes = {
        "edited": torch.no_grad()(edit),
        "edited in inference mode": torch.inference_mode()(edit),
        "statistics edited": lambda: point.mlp[1].running_var.mul_(2),
        "stepped": lambda: step(torch.optim.SGD),
        "stepped by Adam": lambda: step(torch.optim.Adam),
        "stepped by fused Adam": lambda: step(torch.optim.Adam, fused=True),
        "loaded": lambda: model.load_state_dict(state),
        "assigned": lambda: model.load_state_dict(larger, assign=True),
        "layer replaced": replace_layer,
        "data edited, then eval": edit_data,
        "given other data": lambda: setattr(point.scalars, "data", torch.tensor([3.0, 0.0, 1.0])),
        "trained": lambda: model.train()(x) if model.train() else None,
        "float64 and back": lambda: (move(torch.float64)(), move(torch.float32)()),
    }
    n_norms = runs(model, x)[1]
    everywhere = sum(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    assert n_norms == everywhere - 4  # two of each of two points
    for name, change in changes.items():
        assert runs(model, x)[0] == 0, name  # those of before are used
        before = plain(model, x)
        change()
        model.eval() if model.training else None
        with torch.no_grad(), Counted() as counted:
            found = model(x)
        assert counted.softmax >= 1, name
        expected = plain(model, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if name != "float64 and back":
            assert not torch.allclose(before, expected, rtol=1e-3), name


def test_constants_are_left_where_they_would_be_missed():
    model, x = two_pathways().eval(), torch.randn(2, 3, 8, 8)
    with Counted() as counted:
        logits = model(x)
    logits.sum().backward()  # gradients of the scalars need the softmax
    assert counted.softmax == 3 and all(p.grad is not None for p in model.parameters())
    assert runs(model, x)[0] == 3 and runs(model, x)[0] == 0
    copied = copy.deepcopy(model)
    assert all(point._constants is None for point in copied.integrations.values())
    assert runs(copied, x)[0] == 3 and runs(model, x)[0] == 0
    model.integrations["stage1"].mlp[1].train()  # statistics of each batch
    assert runs(model, x)[0] == 1 and runs(model, x)[0] == 1
    model.eval()
    seen = []
    model.integrations["stage1"].mlp[0].register_forward_hook(lambda *_: seen.append(1))
    runs(model, x), runs(model, x)
    assert seen == [1, 1]
    with torch.inference_mode():
        made_there = two_pathways().eval()
    assert runs(made_there, x)[0] == 3 and runs(made_there, x)[0] == 3  # no changes are counted


def test_constants_are_those_of_one_network_under_vmap():
    networks, x = [two_pathways("medium").eval() for _ in range(2)], torch.randn(2, 3, 16, 16)
    parameters, buffers = torch.func.stack_module_state(networks)
    one = copy.deepcopy(networks[0])

    def of(parameters, buffers):
        return torch.func.functional_call(one, (parameters, buffers), (x,))

    with torch.no_grad():
        expected = [network(x) for network in networks]
        for _ in range(2):  # without constants, and with those of the last line
            torch.testing.assert_close(torch.vmap(of)(parameters, buffers), torch.stack(expected))
            torch.testing.assert_close(torch.vmap(one)(torch.stack([x, -x]))[0], expected[0])
            torch.testing.assert_close(one(x), expected[0])


def test_function_transforms_pass_through_what_is_kept_alone():
    model, x = two_pathways(dropout=0.0).eval(), torch.randn(2, 3, 8, 8)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    model.set_grad_checkpointing(True)
    expected = torch.autograd.grad(model(x).sum(), list(parameters.values()))
    of_all, of_each = torch.func.grad(loss), torch.vmap(torch.func.grad(loss), (None, 0))
    for transform, images in ((of_all, x), (of_each, x[:, None])):
        with pytest.raises(RuntimeError, match="computed again: set memory_efficient = False"):
            transform(parameters, images)
    model.set_grad_checkpointing(False)
    found, of_each = of_all(parameters, x), of_each(parameters, x[:, None])
    for name, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_each[name].sum(0), wanted, rtol=1e-4, atol=1e-4)


def test_mixed_precision_changes_what_is_multiplied_in(monkeypatch):
    """On a GPU. Here the choice of dtype is a stand-in's."""
    monkeypatch.setattr(continuous_integration, "mixed_dtype", lambda device: torch.bfloat16)
    model, x, seen = two_pathways(), torch.randn(2, 3, 8, 8), []
    model.colour[1][0].conv2.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    assert model(x).dtype is torch.float32
    model.enable_mixed_precision = False
    model(x)
    with torch.autocast("cpu", torch.float16):
        model.enable_mixed_precision = True
        assert model(x).dtype is torch.float16  # the caller's goes before
    assert seen == [torch.bfloat16, torch.float32, torch.float16]


def test_mixed_precision_is_what_the_device_has(monkeypatch):
    assert continuous_integration.mixed_dtype(torch.device("cpu")) is None
    gpu, capability = torch.device("cuda"), [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert continuous_integration.mixed_dtype(gpu) is torch.bfloat16
    capability[0] = (7, 5)
    assert continuous_integration.mixed_dtype(gpu) is None  # gradients would need a scaler
    with torch.no_grad():
        assert continuous_integration.mixed_dtype(gpu) is torch.float16


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_graph_has_no_constants_that_could_be_dropped():
    model = two_pathways("medium", base_channels=8, layers=nn).to(PLACE).eval()
    x = randn(4, 3, 32, 32)
    model.enable_mixed_precision = False
    model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(x)
    for change in (0.0, 3.0):
        for point in model.integrations.values():
            point.scalars[0].add_(change)
        graph.replay()
        torch.testing.assert_close(logits, model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_recomputing_lowers_the_peak():
    model = two_pathways("medium", base_channels=32, layers=nn).to(PLACE)
    x, peaks = randn(32, 3, 64, 64), []
    for enable in (True, False, True):  # the first compiles
        model.memory_efficient = enable
        torch.cuda.reset_peak_memory_stats()
        before = model.get_memory_usage()["allocated"]
        model(x).sum().backward()
        peaks.append(model.get_memory_usage()["peak"] - before)
    assert peaks[2] < 0.7 * peaks[1]
