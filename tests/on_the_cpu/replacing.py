"""torchvision's networks by our layers and by PyTorch's: the same, to the last few digits."""

import torch
import torchvision
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.feature_extraction import create_feature_extractor

from course_lib import nn

#: Network: (what stays PyTorch's, a layer whose output is taken out).
NETWORKS = {
    "resnet18": (set(), "layer2.0.conv1"),
    "resnet50": (set(), "layer1.2.bn3"),
    "vgg11_bn": ({"AdaptiveAvgPool2d"}, "features.3"),
    "mobilenet_v2": (set(), "features.2"),
    "mobilenet_v3_small": (set(), "features.1.block.1"),
    "efficientnet_b0": ({"StochasticDepth"}, "features.2.0.block.2"),
    "convnext_tiny": ({"StochasticDepth", "LayerNorm2d", "Permute"}, "features.0"),
}


def network(name):
    """In double precision, training, and without chance."""
    torch.manual_seed(3)
    options = {"init_weights": False, "dropout": 0.0} if name == "vgg11_bn" else {}
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=5, **options)
    if name == "vgg11_bn":  # its classifier has a hundred million weights, all of one kind
        model.classifier[0], model.classifier[3] = (
            torch.nn.Linear(25088, 64), torch.nn.Linear(64, 4096)
        )  # fmt: skip
    model = model.to_empty(device="cpu").double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torchvision.ops.StochasticDepth):
            module.p = 0.0
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif hasattr(module, "layer_scale"):
            torch.nn.init.ones_(module.layer_scale)
    return model


def passes(model, x, dy):
    """(the output and all gradients, {operator: FLOPs})."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with FlopCounterMode(display=False) as counted:
        y = model(x)
        y.backward(dy)
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    return found, {str(name): n for name, n in counted.get_flop_counts()["Global"].items()}


def together(tensors):
    return torch.stack([each.norm() for each in tensors]).norm()


for name, (stay, inner) in NETWORKS.items():
    model = network(name)
    x, dy = torch.randn(3, 3, 64, 64).double(), torch.randn(3, 5).double()
    things = [*model.parameters(), *model.buffers(), *model.modules()]
    kinds, keys = [type(module) for module in model.modules()], list(model.state_dict())
    expected, flops = passes(model, x, dy)
    swapped = nn.replace_layers(model)
    assert {type(each.module).__name__ for each in swapped.left} == stay, (name, swapped.left)
    now = [*model.parameters(), *model.buffers(), *model.modules()]
    assert all(map(lambda a, b: a is b, things, now)) and list(model.state_dict()) == keys
    found, our_flops = passes(model, x, dy)
    differences = [ours - theirs for ours, theirs in zip(found, expected, strict=True)]
    assert together(differences) <= 1e-9 * together(expected), name
    assert sum(flops.values()) == sum(our_flops.values()) > 0, (name, flops, our_flops)
    assert all(counted.startswith("course_lib.") for counted in our_flops), our_flops
    traced = torch.fx.symbolic_trace(model)
    called = {type(traced.get_submodule(node.target))
              for node in traced.graph.find_nodes(op="call_module")}  # fmt: skip
    assert not called & nn.replacing.LAYERS.keys() - {torch.nn.AdaptiveAvgPool2d}, called
    with torch.no_grad():
        assert torch.equal(traced(x), found[0]), name
        assert create_feature_extractor(model, {inner: "inner"})(x)["inner"].shape[0] == 3
    swapped.restore()
    assert [type(module) for module in model.modules()] == kinds
