"""The module in torchvision's place, and the swap: nothing but who computes is changed."""

import copy
import inspect
import io
import pickle
from functools import partial

import pytest
import torch
import torchvision
from tensors import PLACE, randn
from torch import nn as torch_nn
from torch.nn.utils import prune

from course_lib import nn
from course_lib.nn.fused import Fused

SE = torchvision.ops.SqueezeExcitation
FORMATS = [torch.contiguous_format, torch.channels_last]
pytestmark = pytest.mark.seed(7)


def timm_blocks():
    from timm.layers import SEModule, create_act
    from timm.layers.activations import HardSigmoid, Sigmoid, Swish
    from timm.layers.activations_me import HardSigmoidMe, SwishMe
    from timm.models._efficientnet_blocks import SqueezeExcite
    from timm.models.senet import SEModule as LegacySEModule

    gate = create_act.get_act_layer("hard_sigmoid")
    return {
        "timm SqueezeExcite": lambda: SqueezeExcite(8, act_layer=torch_nn.SiLU),
        "timm SqueezeExcite hard": lambda: SqueezeExcite(8, rd_channels=3, gate_layer=gate),
        "timm SqueezeExcite own": lambda: SqueezeExcite(8, act_layer=Swish, gate_layer=Sigmoid),
        "timm SqueezeExcite me": lambda: SqueezeExcite(
            8, act_layer=SwishMe, gate_layer=HardSigmoidMe
        ),
        "timm SEModule": lambda: SEModule(8, rd_channels=4, gate_layer=HardSigmoid),
        "timm legacy SEModule": lambda: LegacySEModule(8, 2),
    }


BLOCKS = {
    "torchvision": lambda: SE(8, 4),
    "torchvision efficientnet": lambda: SE(8, 2, activation=partial(torch_nn.SiLU, inplace=True)),
    "torchvision mobilenet": lambda: SE(8, 3, scale_activation=torch_nn.Hardsigmoid),
    **dict.fromkeys([
        "timm SqueezeExcite", "timm SqueezeExcite hard", "timm SqueezeExcite own",
        "timm SqueezeExcite me", "timm SEModule", "timm legacy SEModule",
    ]),
}  # fmt: skip
every_block = pytest.mark.parametrize("kind", BLOCKS)


def make(kind):
    return (BLOCKS[kind] or timm_blocks()[kind])().to(PLACE)


def network(block):
    """A little network around `block` (8 channels)."""
    return torch_nn.Sequential(
        torch_nn.Conv2d(3, 8, 3, bias=False), torch_nn.BatchNorm2d(8), torch_nn.SiLU(), block,
        torch_nn.Conv2d(8, 4, 3), torch_nn.AdaptiveAvgPool2d(1), torch_nn.Flatten(),
    ).to(PLACE)  # fmt: skip


def passes(model, x, dy=None):
    """The output and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = model(x)
    dy = torch.linspace(-1, 2, y.numel(), device=y.device).reshape(y.shape) if dy is None else dy
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], dy.to(y.dtype))]


def near(found, expected, tolerance=1e-5):
    """‖a − b‖ ≤ tolerance·‖b‖ for each pair."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        gap, size = (ours.double() - theirs.double()).norm(), theirs.double().norm()
        assert gap <= tolerance * size, (gap, size)


# ── the module ───────────────────────────────────────────────────────────────────────────────────


def test_signature_and_children_are_torchvisions():
    ours, theirs = (inspect.signature(each).parameters for each in (nn.SqueezeExcitation, SE))
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]
    torch.manual_seed(3)
    block = nn.SqueezeExcitation(6, 2)
    torch.manual_seed(3)
    peer = SE(6, 2)
    assert repr(block) == repr(peer)
    assert list(block.state_dict()) == list(peer.state_dict())
    for ours, theirs in zip(block.parameters(), peer.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # drawn in the same order


@pytest.mark.parametrize("activation", [torch_nn.ReLU, torch_nn.SiLU, nn.ReLU, nn.SiLU])
@pytest.mark.parametrize("gate", [torch_nn.Sigmoid, torch_nn.Hardsigmoid, nn.Sigmoid])
def test_module_equals_torchvisions(activation, gate):
    ours = nn.SqueezeExcitation(6, 3, activation, gate).to(PLACE)
    theirs = SE(6, 3, activation, gate).to(PLACE)
    theirs.load_state_dict(ours.state_dict())
    x = randn(6, 4, 4) if gate is nn.Sigmoid else randn(2, 6, 5, 4)
    near(passes(ours, x), passes(theirs, x))


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"activation": torch_nn.GELU}, "ReLU and SiLU.* as activation, not for GELU; torchvision"),
        ({"scale_activation": torch_nn.Tanh}, "Sigmoid and Hardsigmoid.* as gate, not for Tanh"),
    ],
)
def test_functions_without_a_kernel_are_refused(functions, words):
    with pytest.raises(ValueError, match=words):
        nn.SqueezeExcitation(8, 2, **functions)


def test_what_is_changed_later_is_seen():
    block, x = nn.SqueezeExcitation(6, 3).to(PLACE), randn(2, 6, 4, 4)
    before = block(x)
    block.activation = torch_nn.SiLU()
    assert not torch.allclose(block(x), before)
    block.activation = torch_nn.ELU()
    with pytest.raises(ValueError, match="as activation, not for ELU"):
        block(x)

    class Adapter(torch_nn.Module):
        """Adds to a layer, as those of low rank do, and shows its weights."""

        def __init__(self, layer):
            super().__init__()
            self.layer, self.weight, self.bias = layer, layer.weight, layer.bias

        def forward(self, x):
            return self.layer(x) + 1

    for change in (
        lambda block: setattr(block, "fc1", Adapter(block.fc1)),
        lambda block: prune.random_unstructured(block.fc2, "weight", 0.5),
    ):
        block = nn.SqueezeExcitation(6, 3).to(PLACE)
        change(block)
        with pytest.raises(ValueError, match="restore the block before you change it"):
            block(x)


def test_parametrised_weights():
    block, peer, x = nn.SqueezeExcitation(6, 3).to(PLACE), SE(6, 3).to(PLACE), randn(2, 6, 4, 4)
    for each in (block, peer):
        torch_nn.utils.parametrizations.weight_norm(each.fc1)
    peer.load_state_dict(block.state_dict())
    near(passes(block, x), passes(peer, x))


# ── the swap ─────────────────────────────────────────────────────────────────────────────────────


@every_block
def test_swap_and_restore(kind):
    model = network(make(kind))
    block, x = model[3], randn(2, 3, 8, 7)
    called = []
    block.register_forward_hook(lambda *_: called.append(1))
    parameters, children = list(model.named_parameters()), list(model.named_modules())
    original, expected = type(block), passes(model, x)
    state = copy.deepcopy(model.state_dict())

    swapped = nn.replace_layers(model, types=[Fused])
    now = model.state_dict()
    assert list(state) == list(now) and all(torch.equal(state[key], now[key]) for key in state)
    assert [(name, kind) for name, _, kind in swapped.replaced] == [("3", original)]
    assert swapped.replaced[0].module is block and swapped.left == []
    assert type(block) is not original and isinstance(block, original)
    near(passes(model, x), expected)
    assert len(called) == 2

    for before, now in ((parameters, model.named_parameters()), (children, model.named_modules())):
        for (name, thing), (other, same) in zip(before, now, strict=True):
            assert name == other and thing is same

    swapped.restore()
    assert type(block) is original
    assert all(torch.equal(a, b) for a, b in zip(passes(model, x), expected, strict=True))


def test_the_kernels_run(monkeypatch):
    from course_lib.kernels import squeeze_excite as kernels

    launched = []
    for name in ("forward", "backward"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, n=name, k=kernel, **o: (launched.append(n), k(*a, **o))[1]
        )
    model = network(make("torchvision"))
    passes(model, randn(1, 3, 6, 6))
    assert launched == []
    nn.replace_layers(model, types=[SE])
    passes(model, randn(1, 3, 6, 6))
    assert launched == ["forward", "backward"]


def left_alone():
    from timm.layers import EffectiveSEModule, SEModule
    from timm.layers.squeeze_excite import SqueezeExciteCl

    class Doubled(SE):
        def forward(self, input):
            return super().forward(input) * 2

    patched, hooked, strided, biasless = (SE(8, 4) for _ in range(4))
    patched.forward = lambda input: input

    class Own(torch_nn.Module):
        """Squeeze and excitation as many write it."""

        def __init__(self):
            super().__init__()
            self.avg_pool = torch_nn.AdaptiveAvgPool2d(1)
            self.fc = torch_nn.Sequential(
                torch_nn.Linear(8, 2), torch_nn.ReLU(), torch_nn.Linear(2, 8), torch_nn.Sigmoid()
            )

    class SELayer(torch_nn.Module):
        """The same, by functions."""

        def __init__(self):
            super().__init__()
            self.squeeze, self.excite = torch_nn.Conv2d(8, 2, 1), torch_nn.Conv2d(2, 8, 1)
    hooked.fc1.register_forward_hook(lambda *_: None)
    strided.fc1.stride = (2, 2)
    biasless.fc2.bias = None
    return [
        (
            SE(8, 4, activation=torch_nn.GELU),
            "for ReLU and SiLU.* as activation, not.*GELU",
        ),
        (SE(8, 4, scale_activation=torch_nn.Tanh), "as gate, not for Tanh"),
        (Doubled(8, 4), "it is a Doubled, which may compute something else"),
        (patched, "its forward is one of its own"),
        (hooked, "fc1 has hooks, which would not be called"),
        (strided, "fc1 must be a 1×1 convolution with a bias, not .*stride"),
        (biasless, "fc2 must be a 1×1 convolution with a bias, not .*Conv2d"),
        (SEModule(8, bias=False), "fc1 must be a 1×1 convolution with a bias, not .*bias=False"),
        (SEModule(8, add_maxpool=True), "it adds the maximum to the mean"),
        (SEModule(8, norm_layer=torch_nn.BatchNorm2d), "it has a BatchNorm2d between its layers"),
        (EffectiveSEModule(8), "it has another formula"),
        (SqueezeExciteCl(8), "it takes images N·H·W·C"),
        (Own(), "it looks like squeeze and excitation, but course_lib.nn has nothing for Own"),
        (SELayer(), "it looks like squeeze and excitation, but course_lib.nn has nothing for SEL"),
    ]


def test_what_is_left_alone_and_why():
    import re

    cases = left_alone()
    others = torch_nn.Linear(8, 2), torch_nn.Sequential(torch_nn.Conv2d(8, 8, 1), torch_nn.ReLU())
    model = torch_nn.Sequential(*(block for block, _ in cases), SE(8, 4), *others)
    classes = [type(block) for block in model]
    swapped = nn.replace_layers(model, types=[Fused])
    assert [entry.name for entry in swapped.replaced] == [str(len(cases))]
    assert [each.name for each in swapped.left] == [str(i) for i in range(len(cases))]
    for each, (_, words) in zip(swapped.left, cases, strict=True):
        assert re.search(words, each.reason, re.DOTALL), each
    del classes[len(cases)], model[len(cases)]
    assert [type(block) for block in model] == classes


# ── who else has a say ───────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["torchvision efficientnet", "timm SqueezeExcite"])
def pair(request):
    """(the network as it was, a swapped copy)."""
    model = network(make(request.param))
    swapped = copy.deepcopy(model)
    assert len(nn.replace_layers(swapped, types=[Fused]).replaced) == 1
    return model, swapped


def test_an_optimiser_goes_on(pair):
    model, _ = pair
    x, found = randn(2, 3, 8, 8), []
    for swap in (False, True):
        each = copy.deepcopy(model)
        optimiser = torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            if swap and step == 1:
                nn.replace_layers(each, types=[Fused])
            optimiser.zero_grad()
            each(x).square().sum().backward()
            optimiser.step()
        found.append([each(x), *each.state_dict().values()])
    near(found[1], found[0], 1e-4)


def test_copies_and_pickles(pair):
    _, swapped = pair
    x = randn(1, 3, 8, 8)
    expected = passes(swapped, x)
    buffer = io.BytesIO()
    torch.save(swapped, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(swapped),
        pickle.loads(pickle.dumps(swapped)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other[3]) is type(swapped[3])
        assert all(torch.equal(a, b) for a, b in zip(passes(other, x), expected, strict=True))


@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
def test_memory_formats(pair, memory_format):
    model, swapped = (each.to(memory_format=memory_format) for each in pair)
    x = randn(1, 3, 8, 8).contiguous(memory_format=memory_format)
    near(passes(swapped, x), passes(model, x))
    inner = swapped[:4](x)
    assert inner.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_models_and_autocast(pair, dtype):
    model, swapped = pair
    x = randn(2, 3, 8, 8)
    with torch.autocast(PLACE, dtype=dtype):
        found, expected = passes(swapped, x), passes(model, x)
    near(found, expected, 16 * torch.finfo(dtype).eps)
    model, swapped = model.to(dtype), swapped.to(dtype)
    near(passes(swapped, x.to(dtype)), passes(model, x.to(dtype)), 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(pair, reentrant):
    model, swapped = pair
    x = randn(1, 3, 8, 8)

    class Checkpointed(torch_nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = swapped

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    found, expected = ([], [])
    for module, results in ((Checkpointed(), found), (model, expected)):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        y = module(leaf)
        y.square().sum().backward()
        results += [y, leaf.grad, *(parameter.grad for parameter in module.parameters())]
    near(found, expected, 2e-5)


def test_compiles_without_a_graph_break(pair):
    model, swapped = pair
    x = randn(2, 3, 8, 8)
    torch.compiler.reset()
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    near(passes(compiled, x), passes(model, x))
    with torch.autocast(PLACE, dtype=torch.bfloat16):
        near(passes(compiled, x), passes(swapped, x), 2**-4)


def test_a_compiled_network_sees_the_swap():
    targets = []

    def backend(graph, inputs):
        targets.append({str(node.target) for node in graph.graph.nodes})
        return graph

    torch.compiler.reset()
    model, x = network(make("torchvision")), randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend=backend)
    expected = compiled(x)
    swapped = nn.replace_layers(compiled, types=[SE])
    near([compiled(x)], [expected])
    swapped.restore()
    near([compiled(x)], [expected])
    ours = ["course_lib.squeeze_excite.default" in each for each in targets]
    assert ours == [False, True, False]


@pytest.mark.parametrize("strict", [False, True])
def test_export(pair, strict):
    model, swapped = pair
    program = torch.export.export(
        swapped.eval(), (randn(2, 3, 8, 8),), strict=strict,
        dynamic_shapes=({0: torch.export.Dim("n", min=2, max=1000)},),
    )  # fmt: skip
    assert any("squeeze_excite" in str(node.target) for node in program.graph.nodes)
    x = randn(5, 3, 8, 8)
    near([program.module()(x)], [model.eval()(x)])


def test_functional_call(pair):
    model, swapped = pair
    x = randn(2, 3, 8, 8)
    other = {name: value * 1.5 for name, value in model.named_parameters()}
    found = [torch.func.functional_call(each, other, (x,)) for each in (swapped, model)]
    near(found[:1], found[1:])


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_distributed_data_parallel(pair, backend, tmp_path):
    model, swapped = pair
    x = randn(4, 3, 8, 8)
    expected = copy.deepcopy(model)
    expected(x).square().sum().backward()
    torch.distributed.init_process_group(
        backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        parallel = torch_nn.parallel.DistributedDataParallel(swapped)
        parallel(x).square().sum().backward()
        assert nn.replace_layers(parallel, types=[Fused]).replaced == []
    finally:
        torch.distributed.destroy_process_group()
    near([p.grad for p in swapped.parameters()], [p.grad for p in expected.parameters()], 2e-5)
