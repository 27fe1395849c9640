"""Whole networks by name, before and after the swap."""

import copy
import logging
import os
import subprocess
import sys

import pytest
import torch
import torchvision
from drop_in import GRADIENT, OUTPUT, apart, compare, passes, prepared
from tensors import PLACE, randn

from course_lib import models, nn
from course_lib.models import creating
from course_lib.nn.fused import Fused

pytestmark = pytest.mark.seed(5)


def n_fused(model):
    return sum(isinstance(module, Fused) for module in model.modules())


# ── by name ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "library", "n_blocks"),
    [
        ("small_se_net", "course_lib", 2),
        ("tiny_cnn", "course_lib", 0),
        ("resnet18_small", "course_lib", 0),
        ("continuous_integration", "course_lib", 0),
        ("mobilenet_v3_small", "torchvision", 9),
        ("regnet_y_400mf", "torchvision", 16),
        ("timm/efficientnet_b0", "timm", 16),
        ("tf_efficientnet_b0_ns", "timm", 16),  # as it was called once
        ("seresnet18", "timm", 8),
        ("resnet18", "torchvision", 0),
    ],
)
def test_networks_of_every_library(name, library, n_blocks):
    found = []
    for use in (True, False):
        torch.manual_seed(1)
        model = models.create_model(name, 7, use_cuda_kernels=use)
        assert type(model).__module__.startswith(library)
        assert n_fused(model) == (n_blocks if use else 0)
        found.append(model.state_dict())
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert next(reversed(found[0].values())).shape == (7,)


def test_options_go_to_the_network():
    assert models.create_model("mobilenet_v3_small", 3, dropout=0.7).classifier[2].p == 0.7
    assert models.create_model("seresnet18", 3, drop_rate=0.6).drop_rate == 0.6
    assert len(models.create_model("continuous_integration", 3, depth="deep").integrations) == 5
    with pytest.raises(TypeError, match="width"):
        models.create_model("small_se_net", 3, width=2)


@pytest.mark.parametrize(
    ("name", "num_classes", "error", "words"),
    [
        ("efficientnet_b9", 5, ValueError, "no network 'efficientnet_b9'; .*efficientnet_b7"),
        ("small_senet", 5, ValueError, "the most like it: small_se_net"),
        ("timm/seresnet5", 5, ValueError, "the most like it: .*seresnet50"),
        ("tf_efficientnet_b4.nobody", 5, ValueError, "like it: tf_efficientnet_b4, "),
        ("?", 5, ValueError, r"there is no network '\?'; there are small_se_net, .*vit_b_16"),
        (None, 5, TypeError, "name must be a string, not a NoneType"),
        ("small_se_net", 0, ValueError, "num_classes must be a whole number from 1 on, not 0"),
        ("small_se_net", 2.0, ValueError, "from 1 on, not 2.0"),
    ],
)
def test_errors(name, num_classes, error, words):
    with pytest.raises(error, match=words):
        models.create_model(name, num_classes)


def test_without_timm(monkeypatch):
    monkeypatch.setattr(creating.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="like it: efficientnet_b4, .*; timm, .* is not installed"):
        models.create_model("tf_efficientnet_b4_ns", 5)
    assert n_fused(models.create_model("mobilenet_v3_small", 5)) == 9


def test_the_path_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(creating, "_said", set())
    for _ in range(2):
        models.create_model("small_se_net", 5)
        models.create_model("small_se_net", 3, use_cuda_kernels=False)
    model = models.create_model("timm/resnet18", 3)
    assert n_fused(model) == 0
    where = "CUDA kernels on a GPU" if PLACE == "cuda" else "kernels in the simulator"
    models.create_model("tiny_cnn", 5)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and all(record.levelno == logging.WARNING for record in caplog.records)
    assert where in lines[0]
    assert lines[1] == "small_se_net: PyTorch's operators"
    assert lines[2].endswith("the network has no squeeze and excitation")
    assert where in lines[3] and lines[3].startswith("tiny_cnn: every layer runs")


def test_pretrained_weights_but_for_the_last_layer(monkeypatch):
    state = torchvision.models.mobilenet_v3_small(num_classes=1000).state_dict()
    asked = []

    def get_state_dict(self, *args, **options):
        asked.append(self)
        return dict(state)

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get_state_dict)
    for num_classes in (6, 1000):
        model = models.create_model("mobilenet_v3_small", num_classes, pretrained=True)
        assert model.classifier[3].out_features == num_classes
        for key, value in model.state_dict().items():
            if num_classes == 1000 or not key.startswith("classifier.3"):
                assert torch.equal(value, state[key])
    assert asked == [torchvision.models.MobileNet_V3_Small_Weights.DEFAULT] * 2
    del state["features.0.0.weight"]
    with pytest.raises(ValueError, match="do not fit classifier.3.bias, .*features.0.0.weight"):
        models.create_model("mobilenet_v3_small", 6, pretrained=True)
    with pytest.raises(ValueError, match="small_se_net has no pretrained weights"):
        models.create_model("small_se_net", 5, pretrained=True)


# ── the same numbers ─────────────────────────────────────────────────────────────────────────────


def test_small_network_in_both_passes():
    """On our kernels, in the simulator or on a GPU, and training: batch statistics and all."""
    model = models.create_model("small_se_net", 5, use_cuda_kernels=False).to(PLACE)
    assert 50_000 < sum(parameter.numel() for parameter in model.parameters()) < 150_000
    x = randn(4, 3, 16, 16)
    for each in (prepared(copy.deepcopy(model), x), model.train()):
        output, gradient, name = compare(each, x, 2)
        assert output <= OUTPUT and gradient <= GRADIENT, (output, gradient, name)


def test_whole_networks_without_a_gpu():
    """Drop-in proof on PyTorch's operators, which a CPU takes where nothing is simulated."""
    code = """
import sys
import torch, torchvision
from course_lib import models, nn
from drop_in import GRADIENT, OUTPUT, compare, prepared
torch.manual_seed(5)
model = torchvision.models.mobilenet_v3_small()
blocks = nn.replace_layers(model, types=[torchvision.ops.SqueezeExcitation]).replaced
assert len(blocks) == 9 and "timm" not in sys.modules
for name, n_blocks in (
    ("regnet_y_400mf", 16), ("efficientnet_b4", 32), ("tf_efficientnet_b0_ns", 16),
    ("legacy_seresnet18", 8), ("timm/regnety_002", 13), ("timm/mobilenetv3_small_100", 9),
):
    model = models.create_model(name, 5, use_cuda_kernels=False)
    x = torch.randn(2, 3, 48, 48)
    output, gradient, worst = compare(prepared(model, x), x, n_blocks)
    assert output <= OUTPUT and gradient <= GRADIENT, (name, output, gradient, worst)
    print(name, output, gradient, file=sys.stderr)
print("fine")
"""
    environment = {k: v for k, v in os.environ.items() if k != "COURSE_LIB_SIMULATOR"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.stdout.strip() == "fine", done.stderr


# ── EfficientNet-B4 on a GPU ─────────────────────────────────────────────────────────────────────

B4 = pytest.mark.parametrize("name", ["efficientnet_b4", "tf_efficientnet_b4_ns"])


@pytest.fixture
def exact(monkeypatch):
    """The same convolutions each time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def images(batch, side, memory_format=torch.contiguous_format):
    return randn(batch, 3, side, side).contiguous(memory_format=memory_format)


def b4(name, x, num_classes=5, **options):
    memory_format = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    model = models.create_model(name, num_classes, use_cuda_kernels=False, **options)
    return prepared(model.to(x.device, memory_format=memory_format), x)


def swapped_copy(model):
    model = copy.deepcopy(model)
    assert len(nn.replace_layers(model, types=[Fused]).replaced) == 32
    return model


@pytest.mark.gpu
@B4
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("batch, side", [(4, 380), (1, 380), (3, 97)])
def test_b4_gives_the_same(exact, name, batch, side, memory_format):
    """float32: outputs within 1e-5, the gradient of each of the parameters within 1e-4.

    In evaluation mode, with statistics and biases as `prepared` says.
    """
    x = images(batch, side, memory_format)
    output, gradient, worst = compare(b4(name, x), x, 32)
    print(f"\n{name} {batch}×{side}²: output {output:.1e}, gradient {gradient:.1e} ({worst})")
    assert output <= OUTPUT and gradient <= GRADIENT, (output, gradient, worst)


def _total(gradients):
    return torch.cat([gradient.double().flatten() for gradient in gradients.values()])


@pytest.mark.gpu
@B4
def test_b4_in_training_is_no_further_from_float64(exact, name):
    """Statistics of the batch, which magnify rounding: output and all gradients as one vector.

    A thousand outputs, so that the error is no matter of a few of them by chance. Without dropout
    and stochastic depth, whose masks float64 would draw otherwise.
    """
    x = images(8, 128)
    model = b4(name, x, 1000).train()
    for module in model.modules():
        for chance in ("p", "drop_prob"):
            if isinstance(getattr(module, chance, None), float):
                setattr(module, chance, 0.0)
        if hasattr(module, "drop_rate"):
            module.drop_rate = 0.0
    dy = randn(8, 1000)
    peers = swapped_copy(model), copy.deepcopy(model), copy.deepcopy(model).double()
    (ours, theirs, truth) = (
        passes(each, x.to(next(each.parameters()).dtype), dy) for each in peers
    )
    for a, b, c in (
        (ours[0], theirs[0], truth[0]),
        tuple(_total(each[1]) for each in (ours, theirs, truth)),
    ):
        print(f"\n{name}: ours {apart(a, c):.1e}, PyTorch {apart(b, c):.1e} from float64")
        assert apart(a, c) <= 1.25 * apart(b, c)


@pytest.mark.gpu
@B4
def test_b4_under_autocast_is_no_worse_than_pytorch(exact, name):
    """bfloat16 against float32 by PyTorch: output and all gradients as one vector."""
    x = images(8, 224)
    model = b4(name, x, 1000)
    swapped, dy = swapped_copy(model), randn(8, 1000)
    truth = passes(model, x, dy)
    ours, theirs = (passes(each, x, dy, torch.bfloat16) for each in (swapped, model))
    assert ours[0].dtype == theirs[0].dtype
    for a, b, c in (
        (ours[0], theirs[0], truth[0]),
        tuple(_total(each[1]) for each in (ours, theirs, truth)),
    ):
        print(f"\n{name}: ours {apart(a, c):.2e}, PyTorch {apart(b, c):.2e} from float32")
        assert apart(a, c) <= 1.05 * apart(b, c)  # the rest of the network rounds otherwise too


@pytest.mark.gpu
@B4
def test_b4_draws_the_same_dropout_and_depth(exact, name):
    """In training: our kernels leave the generator alone."""
    x, found = images(8, 96), []
    # timm drops nothing unless it is asked to.
    options = {"drop_rate": 0.3, "drop_path_rate": 0.2} if name.startswith("tf_") else {}
    model = b4(name, x, **options).train()
    for each in (swapped_copy(model), model):
        torch.manual_seed(9)
        y = each(x)
        found.append((y, torch.rand(4, device=x.device)))
    assert torch.equal(found[0][1], found[1][1])
    assert apart(found[0][0], found[1][0]) <= 1e-2  # with other masks it is about 1
    torch.manual_seed(10)
    assert apart(model(x), found[1][0]) > 0.1


@pytest.mark.gpu
@B4
def test_b4_compiled_checkpointed_copied_and_exported(exact, name, tmp_path):
    x = images(2, 96)
    model = b4(name, x)
    swapped, dy = swapped_copy(model), randn(2, 5)
    truth = passes(model, x, dy)

    def near(found, tolerance=1):
        assert apart(found[0], truth[0]) <= tolerance * OUTPUT
        worst = max(apart(found[1][key], truth[1][key]) for key in found[1])
        assert worst <= tolerance * GRADIENT, worst

    torch.save(swapped, tmp_path / "model.pt")
    near(passes(torch.load(tmp_path / "model.pt", weights_only=False), x, dy))
    near(passes(copy.deepcopy(swapped), x, dy))

    y = torch.utils.checkpoint.checkpoint(swapped, x, use_reentrant=False)
    gradients = torch.autograd.grad(y, list(swapped.parameters()), dy)
    near((y, dict(zip(truth[1], gradients, strict=True))))

    program = torch.export.export(swapped, (x,))
    assert sum("squeeze_excite" in str(node.target) for node in program.graph.nodes) == 32
    assert apart(program.module()(x), truth[0]) <= OUTPUT

    torch.compiler.reset()
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    gradients = torch.autograd.grad(y, list(swapped.parameters()), dy)
    near((y, dict(zip(truth[1], gradients, strict=True))))


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_b4_compiled_by_the_default_backend(exact):
    x = images(2, 96)
    model = b4("efficientnet_b4", x)
    swapped = swapped_copy(model)
    torch.compiler.reset()
    y = torch.compile(swapped, fullgraph=True)(x)
    assert apart(y, model(x)) <= 10 * OUTPUT  # its kernels for all other layers round otherwise
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in swapped.parameters())
