"""`replace_layers`: what is replaced, what is left, and what is given back."""

import copy
import pickle

import pytest
import timm
import torch
import torchvision
from tensors import PLACE, randn
from torch import nn as torch_nn
from torch.nn.utils import parametrizations

from course_lib import nn
from course_lib.nn.layer import Layer
from course_lib.nn.replacing import LAYERS

FORMATS = [torch.contiguous_format, torch.channels_last]
pytestmark = pytest.mark.seed(7)


def network():
    """Every kind of layer that torchvision's networks have, and few of each."""
    return torch_nn.Sequential(
        torch_nn.Conv2d(3, 4, 3, stride=2, bias=False), torch_nn.BatchNorm2d(4),
        torch_nn.ReLU(inplace=True), torch_nn.MaxPool2d(3, 2, 1),
        torch_nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), torch_nn.BatchNorm2d(4),
        torch_nn.ReLU6(inplace=True), torchvision.ops.SqueezeExcitation(4, 2),
        torch_nn.Conv2d(4, 6, 1), torch_nn.BatchNorm2d(6), torch_nn.Hardswish(inplace=True),
        torchvision.ops.SqueezeExcitation(6, 2, scale_activation=torch_nn.Hardsigmoid),
        torch_nn.Conv2d(6, 4, 1), torch_nn.SiLU(inplace=True), torch_nn.GELU(),
        torch_nn.LeakyReLU(0.2, inplace=True), torch_nn.AdaptiveAvgPool2d(1), torch_nn.Flatten(),
        torch_nn.Dropout(0.0), torch_nn.Linear(4, 5), torch_nn.Sigmoid(), torch_nn.LogSoftmax(1),
    ).to(PLACE)  # fmt: skip


def gradients(model, x, dy):
    """The output, the gradients of x and of every parameter, one after another."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    found = torch.autograd.grad(y, [x, *model.parameters()], dy.to(y.dtype))
    return torch.cat([each.double().flatten() for each in (y, *found)])


def error(found, true):
    return ((found - true).norm() / true.norm()).item()


@pytest.mark.parametrize("layout", FORMATS, ids=["contiguous", "channels-last"])
def test_a_network_is_as_exact_as_pytorch(layout):
    theirs = network().to(memory_format=layout)
    x, dy = randn(2, 3, 9, 9).to(memory_format=layout), randn(2, 5)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double().cpu()
    swapped = nn.replace_layers(ours)
    assert swapped.left == [] and all(
        isinstance(module, Layer | torch_nn.Sequential) for module in ours.modules()
    )
    true = gradients(exact, x.double().cpu(), dy.cpu()).to(PLACE)
    found, peer = (gradients(model, x, dy) for model in (ours, theirs))
    assert 0 < error(found, true) <= 2 * error(peer, true)


def test_everything_but_the_class_stays_the_same():
    model = network().eval()
    model[0].register_forward_hook(lambda *_: called.append(1))
    called, x = [], randn(1, 3, 9, 9)
    state = dict(model.state_dict())
    held = [*model.parameters(), *model.buffers(), *model.modules()]
    kinds = [type(module) for module in model.modules()]
    swapped = nn.replace_layers(model)
    assert repr(swapped) == "<Replacement: 32 layers replaced, 0 left>"
    names = [name for name, module in model.named_modules() if isinstance(module, Layer)]
    assert [each.name for each in swapped.replaced] == names
    for name, module, kind in swapped.replaced:
        assert model.get_submodule(name) is module and isinstance(module, kind)
        assert type(module).__module__.startswith("course_lib.nn.") and not module.training
    now = [*model.parameters(), *model.buffers(), *model.modules()]
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert list(model.state_dict()) == list(state)
    model(x)
    assert called == [1]
    model.load_state_dict(state)

    second = nn.replace_layers(model)
    assert second.replaced == second.left == []
    second.restore()
    assert isinstance(model[0], nn.Conv2d)
    swapped.restore()
    swapped.restore()
    assert [type(module) for module in model.modules()] == kinds
    assert len(nn.replace_layers(model).replaced) == len(swapped.replaced)


def test_copies_and_pickles_run_our_kernels_too():
    model = network().eval()
    swapped = nn.replace_layers(model)
    x = randn(1, 3, 9, 9)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(map(type, other.modules())) == list(map(type, model.modules()))
        assert torch.equal(other(x), expected)
    other, theirs = copy.deepcopy((model, swapped))
    theirs.restore()
    assert type(other[0]) is torch_nn.Conv2d and type(model[0]) is nn.Conv2d


def test_only_the_types_asked_for():
    model = network().eval()
    swapped = nn.replace_layers(model, types=[torch_nn.Conv2d, nn.ReLU])
    assert {type(each.module) for each in swapped.replaced} == {nn.Conv2d, nn.ReLU}
    assert {each.kind for each in swapped.replaced} == {torch_nn.Conv2d, torch_nn.ReLU}
    assert type(model[1]) is torch_nn.BatchNorm2d and swapped.left == []
    # Convolutions inside of the blocks are ours now; the blocks themselves can follow.
    blocks = nn.replace_layers(model, types=[nn.SqueezeExcitation])
    assert [each.name for each in blocks.replaced] == ["7", "11"]
    x = randn(1, 3, 9, 9)
    found = model(x)
    blocks.restore()
    swapped.restore()
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


def test_a_single_layer_and_one_with_two_names():
    conv = torch_nn.Conv2d(3, 3, 1)
    assert [each.name for each in nn.replace_layers(conv).replaced] == [""]
    relu = torch_nn.ReLU()
    swapped = nn.replace_layers(torch_nn.Sequential(relu, torch_nn.Identity(), relu))
    assert [each.name for each in swapped.replaced] == ["0", "2"] and type(relu) is nn.ReLU
    swapped.restore()
    assert type(relu) is torch_nn.ReLU


class OwnConv(torch_nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class OwnNorm(torch_nn.Module):
    def forward(self, x):
        return x / x.norm()


def patched():
    layer = torch_nn.ReLU()
    layer.forward = lambda x: x
    return layer


class Quantised(torch.Tensor):
    """A weight that is stored in another way."""


def with_strange_weights():
    layer = torch_nn.Linear(2, 2)
    del layer.weight
    layer.weight = torch_nn.Parameter(torch.randn(2, 2).as_subclass(Quantised))
    return layer


LEFT = {
    "it is a OwnConv, which may compute something else": lambda: OwnConv(3, 3, 1),
    "its forward is one of its own": patched,
    "it is parametrised: replace layers first": lambda: parametrizations.weight_norm(
        torch_nn.Linear(2, 2)
    ),
    "it is not initialised yet: give the network a batch": lambda: torch_nn.LazyConv2d(4, 3),
    "its weight is a Quantised, which our kernels can't read": with_strange_weights,
    "there are kernels for an output_size of 1 alone, not 7": lambda: torch_nn.AdaptiveAvgPool2d(7),
    "there are kernels for the modes nearest and bilinear, not for bicubic": lambda: (
        torch_nn.Upsample(scale_factor=2, mode="bicubic")
    ),
    "it is a GELU of timm.layers.activations, which may compute": timm.layers.GELU,
    "course_lib.nn has nothing for GroupNorm": lambda: torch_nn.GroupNorm(1, 3),
    "course_lib.nn has nothing for OwnNorm": OwnNorm,
    "course_lib.nn has nothing for Linear": lambda: torch.ao.nn.quantized.dynamic.Linear(2, 2),
    "it is a Linear, which may compute": lambda: torch.ao.nn.qat.Linear(
        2, 2, qconfig=torch.ao.quantization.get_default_qat_qconfig()
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_says_why(reason):
    layer = LEFT[reason]()
    kind = type(layer)
    swapped = nn.replace_layers(torch_nn.Sequential(torch_nn.Identity(), layer, torch_nn.ReLU()))
    assert [each.name for each in swapped.replaced] == ["2"]
    (left,) = swapped.left
    assert (left.name, left.module) == ("1", layer) and left.reason.startswith(reason)
    assert type(layer) is kind


def test_options_that_are_not_in_our_kernels_alone():
    """Padding modes and the old way to norm weights come before the kernel."""
    layers = [
        torch_nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        torch_nn.utils.weight_norm(torch_nn.Conv2d(3, 4, 3, dilation=2, padding="same")),
        torch_nn.MaxPool2d(2, dilation=2, ceil_mode=True),
        torch_nn.BatchNorm2d(3, affine=False, track_running_stats=False),
    ]
    x = randn(2, 3, 7, 7)
    for layer in layers:
        layer.to(PLACE)
        expected = layer(x)
        assert nn.replace_layers(layer).left == [] and isinstance(layer, Layer)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_a_lazy_layer_is_taken_once_it_has_seen_a_batch():
    model = torch_nn.Sequential(torch_nn.LazyConv2d(4, 3), torch_nn.LazyBatchNorm2d())
    model(torch.randn(2, 3, 5, 5))
    assert len(nn.replace_layers(model).replaced) == 2


def test_a_layer_may_be_parametrised_afterwards_and_then_not_restored():
    model = torch_nn.Sequential(torch_nn.Linear(3, 4), torch_nn.ReLU()).to(PLACE)
    x, expected = randn(2, 3), copy.deepcopy(model)
    swapped = nn.replace_layers(model)
    parametrizations.weight_norm(model[0])
    torch.testing.assert_close(model(x), expected(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="'0' was made a Linear of course_lib, but is a Para"):
        swapped.restore()
    assert type(model[1]) is nn.ReLU
    torch_nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    swapped.restore()
    assert [type(layer) for layer in model] == [torch_nn.Linear, torch_nn.ReLU]


def test_all_layers_or_none():
    """Ctrl-C halfway."""
    model = torch_nn.Sequential(torch_nn.ReLU(), torch_nn.Sigmoid())
    changed = []

    def refuse(layer, name, value):
        if name == "__class__" and issubclass(value, Layer):
            changed.append(value)
            raise KeyboardInterrupt
        torch_nn.Module.__setattr__(layer, name, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_nn.Sigmoid, "__setattr__", refuse)
        with pytest.raises(KeyboardInterrupt):
            nn.replace_layers(model)
    assert changed == [nn.Sigmoid]
    assert [type(layer) for layer in model] == [torch_nn.ReLU, torch_nn.Sigmoid]


def test_what_cannot_be_asked_for():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not a dict"):
        nn.replace_layers({})
    for types in (torch_nn.Conv2d, [torch_nn.Conv2d(1, 1, 1)], "Conv2d"):
        with pytest.raises(TypeError, match="types must be a list of classes"):
            nn.replace_layers(network(), types=types)
    with pytest.raises(ValueError, match="no layer for a torch.nn.modules.conv.Conv3d; it has"):
        nn.replace_layers(network(), types=[torch_nn.Conv3d])
    assert nn.replace_layers(network(), types=[]).replaced == []


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_class_swap_is_all_it_takes(kind):
    """Nothing is kept that PyTorch's constructor does not make; and the other way round."""
    arguments = {
        "Conv2d": (3, 4, 3), "ConvTranspose2d": (3, 4, 3), "Linear": (3, 4), "BatchNorm2d": (3,),
        "MaxPool2d": (2,), "AdaptiveAvgPool2d": (1,), "Softmax": (1,), "LogSoftmax": (1,),
        "LayerNorm": (3,), "MultiheadAttention": (4, 2), "TransformerEncoderLayer": (4, 2),
        "TransformerEncoder": (torch_nn.TransformerEncoderLayer(4, 2, batch_first=True), 1),
    }.get(kind.__name__, ())  # fmt: skip
    ours, theirs = LAYERS[kind](*arguments), kind(*arguments)
    assert vars(ours).keys() == vars(theirs).keys() and repr(ours) == repr(theirs)
    assert isinstance(ours, kind) and list(ours.state_dict()) == list(theirs.state_dict())
    theirs.__class__ = LAYERS[kind]
    assert type(theirs).forward is LAYERS[kind].forward


# ── torch.fx ─────────────────────────────────────────────────────────────────────────────────────


def test_a_layer_is_one_node_of_a_traced_graph():
    model = network().eval()
    model[2].register_forward_hook(lambda module, inputs, y: y * 2)  # runs once, with its layer
    x = randn(1, 3, 9, 9)
    names = [
        str(node.target) for node in torch.fx.symbolic_trace(model).graph.nodes
        if node.op == "call_module"
    ]  # fmt: skip
    nn.replace_layers(model)
    traced = torch.fx.symbolic_trace(model)
    ours = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert len(traced.graph.nodes) == len(ours) + 2
    blocks = {name.partition(".")[0] for name in names if "." in name}
    whole = [name for name in names if "." not in name]
    assert {node.target for node in ours} == {*whole, *blocks}
    assert all(isinstance(traced.get_submodule(node.target), Layer) for node in ours)
    assert torch.equal(traced(x), model(x))
    model[2]._forward_hooks.clear()
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x), model(x))


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:Implicit dimension")
def test_a_softmax_without_dim_compiles(kind, shape):
    x = randn(*shape)
    compiled = torch.compile(getattr(nn, kind)(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), getattr(torch_nn, kind)()(x))
