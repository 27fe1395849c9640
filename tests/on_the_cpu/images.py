"""The three networks for images: ours, and the same on PyTorch's layers, in each way of use."""

import copy
import itertools

import torch
import torch.nn.functional as F
import torchvision
from counted_norms import counted_norms
from no_launches import refuse_launches

from course_lib import models, nn
from course_lib.kernels import batch_norm, conv2d, max_pool2d
from course_lib.models.integration import Integration

refuse_launches(max_pool2d.launching, batch_norm.ladder, batch_norm.vectorised, conv2d.launching)

torch.manual_seed(0)
#: In channels-last, PyTorch on a CPU writes beyond tensors of 4 channels: 8 at least.
NETWORKS = {
    "tiny_cnn": dict(widths=(8, 8, 16), hidden=12, image_size=16),
    "resnet18_small": dict(widths=(8, 8, 16, 16)),
    "continuous_integration": dict(depth="medium", base_channels=8),
}
N_CLASSES = 5


def network(name, layers, seed=3):
    torch.manual_seed(seed)
    return models.create_model(name, N_CLASSES, layers is nn, **NETWORKS[name])


def step(model, x, target):
    """Logits and {parameter: its gradient}."""
    logits, named = model(x), dict(model.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(logits, target), list(named.values()))
    names = (name.removeprefix("_orig_mod.") for name in named)
    return logits.detach(), dict(zip(names, gradients, strict=True))


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def without_dropout(model):
    """Ours draws other masks than PyTorch's."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    return model


target = torch.tensor([0, 1, 4, 2])
for name in NETWORKS:
    ours, twin = network(name, nn), network(name, torch.nn)
    assert list(ours.state_dict()) == list(twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), twin.parameters(), strict=True))
    assert not [m for m in twin.modules() if isinstance(m, nn.layer.Layer)]
    assert nn.replace_layers(copy.deepcopy(ours)).replaced == []  # no layer but ours
    without_dropout(ours), without_dropout(twin)
    for training, form in itertools.product(
        (True, False), (torch.contiguous_format, torch.channels_last)
    ):
        ours.train(training), twin.train(training)
        x = torch.randn(4, 3, 16, 16).contiguous(memory_format=form)
        for found, expected in zip(step(ours, x, target), step(twin, x, target), strict=True):
            near(found, expected)
        with torch.no_grad():
            near(ours(x), twin(x))
        near(list(ours.buffers()), list(twin.buffers()))  # running statistics

    # Traced, compiled, exported, and under autocast.
    statistics = copy.deepcopy(ours.state_dict())
    for training in (True, False):
        ours.train(training)
        x = torch.randn(4, 3, 16, 16)
        expected, gradients = step(ours, x, target)
        after = copy.deepcopy(dict(ours.named_buffers()))
        # Compiling takes long: once, and not a network of layers that others have.
        compiles = training and name != "resnet18_small"
        for way in ("traced", "compiled") if compiles else ("traced",):
            ours.load_state_dict(statistics)
            torch.compiler.reset()
            other = (
                torch.fx.symbolic_trace(ours) if way == "traced"
                else torch.compile(ours, fullgraph=True, backend="aot_eager")
            )  # fmt: skip
            near(step(other, x, target), (expected, gradients))
            near(dict(ours.named_buffers()), after)
        statistics = copy.deepcopy(ours.state_dict())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = ours(x)
            assert y.dtype is torch.bfloat16 and (y.float() - expected).abs().max() < 0.3
        ours.load_state_dict(statistics)
    program = torch.export.export(ours, (x,))
    near(program.module()(x), expected)
    half = copy.deepcopy(ours).bfloat16()
    with torch.no_grad():
        y = half(x.bfloat16())
        assert y.dtype is torch.bfloat16 and (y.float() - expected).abs().max() < 0.3
    double = copy.deepcopy(ours).double()
    with torch.no_grad():
        near(double(x.double()).float(), expected)

# torchvision's ResNet-18, adapted by hand, takes ours' weights and computes the same.
theirs = torchvision.models.resnet18(num_classes=7)
theirs.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
theirs.maxpool = torch.nn.Identity()
model = models.resnet18_small(7)
assert list(model.state_dict()) == list(theirs.state_dict())
x = torch.randn(2, 3, 16, 16)
for a, b in ((model, theirs), (theirs, model)):
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(a(x), b(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.state_dict(), b.state_dict())  # statistics of the batch
torch.testing.assert_close(model.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)

# Batch norm and ReLU are one operator wherever one follows the other.
for name, fused, others in (("tiny_cnn", 3, 0), ("resnet18_small", 9, 11)):
    with counted_norms() as calls:
        network(name, nn)(torch.randn(2, 3, 16, 16))
    assert (calls.count(True), calls.count(False)) == (fused, others)

# Constants of the integration, on our layers: no batch norm is called where they are folded.
model = network("continuous_integration", nn).eval()
x = torch.randn(2, 3, 16, 16)
with torch.no_grad():
    expected = copy.deepcopy(model)(x)
    seen = []
    for module in model.modules():
        if isinstance(module, Integration):
            for layer in module.mlp:
                if isinstance(layer, torch.nn.BatchNorm2d):
                    layer.register_forward_hook(lambda *_: seen.append(1))
    near(model(x), expected)
    assert len(seen) == 6  # hooked ones are called, at each of the three points with maps
