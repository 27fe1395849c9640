"""The U-Net for PyTorch: its twins, on the tape and in plain PyTorch, and weights that move.

`on_the_cpu/unet.py` compares the three at every size; here our module runs our kernels.
"""

import sys
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from tensors import PLACE, choosing, randn
from torch.nn import functional as F

from course_lib import SIMULATED, backend, models, nn, ops, optim, train
from course_lib import autograd as ag
from course_lib.kernels import conv2d, conv_transpose2d
from course_lib.runtime.host import launch
from course_lib.train import CheckpointError, weights
from course_lib.train.folder import FolderError


@pytest.fixture(autouse=True)
def on_numpy():
    backend.set_backend(False, library="numpy")
    torch.manual_seed(0)


@pytest.fixture
def cheap_rungs():
    """The simulator is slow: the rungs that it takes least time for."""
    with choosing("tiled", conv2d), choosing("gather", conv_transpose2d):
        yield


def tape_of(depth=2, use_batchnorm=True, channels=4, seed=0):
    random = np.random.default_rng(seed)
    return ag.UNet(2, 2, depth, channels, use_batchnorm, random=random)


def losses_on_the_tape(model, x, target, steps, lr):
    optimizer, losses = ag.Adam(model.parameters(), lr=lr), []
    here = backend.get_backend()
    x, target = here.to_device(x), here.to_device(target)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ag.weighted_cross_entropy(model(ag.tensor(x)), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of_the_module(model, x, target, steps, lr):
    place = next(model.parameters()).device
    optimizer, losses = optim.Adam(model.parameters(), lr=lr), []
    x, target = torch.from_numpy(x).to(place), torch.from_numpy(target).to(place)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ops.cross_entropy(model(x), target, ignore_index=-1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch(n, size, seed=1):
    random = np.random.default_rng(seed)
    x = random.standard_normal((n, 2, *size)).astype(np.float32)
    target = random.integers(-1, 2, (n, *size))
    return x, target


def test_two_steps_on_our_kernels_are_numpys(cheap_rungs):
    tape = tape_of(channels=2)
    model = models.UNet.of_weights(tape.state_dict()).to("cpu" if SIMULATED else "cuda")
    data = batch(1, (8, 8))
    expected = losses_on_the_tape(tape, *data, 2, 1e-3)
    found = losses_of_the_module(model, *data, 2, 1e-3)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[1] < expected[0]


def steps_of(network, optimizer, loss_of, to_cpu, n_steps=20):
    """Yield (loss, weights before the step, gradients, weights after it) of each step, in float64.

    to_cpu  makes a NumPy array of a weight's data
    """
    weights = list(network.parameters())

    def copied(of):
        return [torch.tensor(np.asarray(to_cpu(of(w)), np.float64)) for w in weights]

    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        before, gradients = copied(lambda w: w.data), copied(lambda w: w.grad)
        optimizer.step()
        yield loss.item(), before, gradients, copied(lambda w: w.data)


def steps_on_the_tape(library, case, x, target, lr):
    here = backend.set_backend(library=library)
    tape = tape_of(*case)
    x, target = here.to_device(x), here.to_device(target)
    return steps_of(
        tape, ag.Adam(tape.parameters(), lr=lr),
        lambda: ag.weighted_cross_entropy(tape(ag.tensor(x)), target), here.to_cpu,
    )  # fmt: skip


def steps_of_the_module(layers, place, state, x, target, lr):
    model = models.UNet.of_weights(state, layers=layers).to(place)
    x, target = torch.from_numpy(x).to(place), torch.from_numpy(target).to(place)
    loss, adam = (F.cross_entropy, torch.optim.Adam) if layers is torch.nn else (
        ops.cross_entropy, optim.Adam)  # fmt: skip
    return steps_of(
        model, adam(model.parameters(), lr=lr),
        lambda: loss(model(x), target, ignore_index=-1), lambda a: a.detach().cpu().numpy(),
    )  # fmt: skip


def distances(steps, state, x, target, lr):
    """‖found − true‖ ÷ ‖true‖ of each step: {"loss", "gradients", "weights": [number]}.

    True is what float64 makes of the same weights, and of the same gradients.
    """
    truth = models.UNet.of_weights(state, layers=torch.nn).double()
    weights, found = list(truth.parameters()), {"loss": [], "gradients": [], "weights": []}
    adam = torch.optim.Adam(weights, lr=lr)
    x, target = torch.from_numpy(x).double(), torch.from_numpy(target)

    def whole(arrays):
        return torch.cat([array.flatten() for array in arrays])

    def keep(name, mine, true):
        found[name].append((torch.dist(mine, true) / true.norm()).item())

    for loss, before, gradients, after in steps:
        for weight, value in zip(weights, before, strict=True):
            weight.data.copy_(value)
        true = F.cross_entropy(truth(x), target, ignore_index=-1)
        keep("loss", torch.tensor(loss).double(), true)
        keep("gradients", whole(gradients), whole(torch.autograd.grad(true, weights)))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        adam.step()
        keep("weights", whole(after), whole(weights))
    return found


@pytest.mark.parametrize("library", [
    "numpy", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("torch", "cupy", "module")),
])  # fmt: skip
@pytest.mark.parametrize("depth, size, use_batchnorm", [
    (2, (32, 32), True), (2, (32, 48), False), (3, (29, 35), True),
])  # fmt: skip
def test_twenty_steps_are_as_exact_as_pytorchs(library, depth, size, use_batchnorm):
    """Each step is compared with float64 from where it starts, not with another run.

    In a step now and then rounding moves an activation across the kink of ReLU, for PyTorch too.
    The gradients of that step jump by 1e-2, and from there on two runs go apart.
    """
    if library == "cupy":
        pytest.importorskip("cupy", reason="CuPy is not installed: pip install cupy-cuda13x")
    case, data, lr = (depth, use_batchnorm), batch(4, size), 1e-3
    state, place = tape_of(*case).state_dict(), "cpu" if library == "numpy" else "cuda"
    theirs = steps_of_the_module(torch.nn, place, state, *data, lr)
    if library == "module":
        steps = list(steps_of_the_module(nn, place, state, *data, lr))
    else:
        steps = list(steps_on_the_tape(library, case, *data, lr))
    ours, peer = (distances(each, state, *data, lr) for each in (steps, theirs))
    assert max(ours["loss"]) <= 1e-6 and max(ours["weights"]) <= 1e-6
    assert np.median(ours["gradients"]) <= 4 * np.median(peer["gradients"]) <= 1e-5
    assert max(ours["gradients"]) <= 0.1
    assert steps[-1][0] < steps[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(32, 32), (29, 35)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_gpu_is_as_exact_as_float64(size, memory_format):
    x, target = batch(2, size)
    state = tape_of(3, channels=16).state_dict()
    found = []
    for layers, dtype in ((nn, torch.float32), (torch.nn, torch.float64)):
        model = models.UNet.of_weights(state, layers=layers).to("cuda", dtype)
        model = model.to(memory_format=memory_format)
        images = torch.from_numpy(x).to("cuda", dtype).contiguous(memory_format=memory_format)
        logits = model(images)
        loss = F.cross_entropy(logits, torch.from_numpy(target).cuda(), ignore_index=-1)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        whole = torch.cat([g.double().flatten() for g in gradients])
        found.append((logits.double(), loss.double(), whole))
    for ours, truth in zip(*found, strict=True):
        assert torch.linalg.norm(ours - truth) <= 1e-3 * torch.linalg.norm(truth)


@pytest.mark.gpu
@pytest.mark.parametrize("layout, dtype", [
    (torch.contiguous_format, torch.float32), (torch.channels_last, torch.bfloat16),
])  # fmt: skip
def test_steps_on_a_gpu_are_repeated(layout, dtype):
    """From the fifth step on no launcher thinks: Python repeats the launches that it has noted."""
    model = models.UNet(2, 2, depth=2, initial_channels=16).to("cuda", memory_format=layout)
    x, target = (torch.from_numpy(each).cuda() for each in batch(2, (64, 64)))
    x = x.contiguous(memory_format=layout)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = ops.cross_entropy(model(x), target, ignore_index=-1)
        return torch.autograd.grad(loss, list(model.parameters()))

    for _ in range(4):
        step()
    thought = []

    class Prepared(dict):
        def get(self, key):
            thought.append(key[0].__name__)
            return super().get(key)

    with mock.patch.object(launch, "_prepared", Prepared()):
        step()
    assert thought == []


def test_one_class_two_kinds_of_layers():
    kinds = []
    for layers in (nn, torch.nn):
        torch.manual_seed(3)
        kinds.append(models.UNet(3, 5, 2, 4, layers=layers))
    ours, twin = (model.state_dict() for model in kinds)
    assert list(ours) == list(twin) and all(torch.equal(ours[name], twin[name]) for name in ours)
    assert [name for name in ours if "num_batches" not in name] == list(
        ag.UNet(3, 5, 2, 4).state_dict()
    )
    assert not [m for m in kinds[1].modules() if isinstance(m, nn.layer.Layer)]
    replacement = nn.replace_layers(kinds[1])
    assert not replacement.left
    leaves = [[type(m) for m in model.modules() if not next(m.children(), None)] for model in kinds]
    assert leaves[0] == leaves[1] and len(replacement.replaced) == len(leaves[0])


@pytest.mark.parametrize("make", [models.UNet, lambda **o: models.UNet(layers=torch.nn, **o)],
                         ids=["ours", "torch"])  # fmt: skip
def test_wrong_calls(make):
    for depth in (1, 6):
        with pytest.raises(ValueError, match=f"depth must be from 2 to 5, not {depth}"):
            make(depth=depth)
    model = make(depth=3, initial_channels=2)
    for shape in ((1, 3, 16, 16), (2, 16, 16), (1, 2, 16, 7)):
        with pytest.raises(ValueError, match=r"expects \(N, 2, H, W\) of at least 8 pixels each"):
            model(torch.zeros(shape))
    with pytest.raises(ValueError, match="not the weights of a U-Net"):
        models.UNet.of_weights(torch.nn.Conv2d(2, 2, 3).state_dict())


def test_state_dicts_fit_each_other():
    tape, module = tape_of(), models.UNet(2, 2, 2, 4)
    module.load_state_dict(tape.state_dict())
    tape_of(seed=1).load_state_dict(module.state_dict())
    for name, value in tape.state_dict().items():
        assert np.array_equal(value, module.state_dict()[name].numpy())
    with pytest.raises(RuntimeError, match="size mismatch"):
        models.UNet(2, 2, 2, 5).load_state_dict(tape.state_dict())


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def drawn(model):
    """`model` with statistics of its own, so that every number counts."""
    random = np.random.default_rng(9)
    state = models.arrays_of(model)
    for name, value in state.items():
        state[name] = np.asarray(random.uniform(0.5, 2, value.shape) * 3, value.dtype)
    models.load_arrays(model, state)
    return model


KINDS = {
    "tape": tape_of,
    "ours": lambda **o: models.UNet(2, 2, 2, 4, **o),
    "torch": lambda **o: models.UNet(2, 2, 2, 4, layers=torch.nn, **o),
}


@pytest.mark.parametrize("use_batchnorm", [True, False])
def test_every_kind_reads_what_every_kind_writes(tmp_path, use_batchnorm):
    path = tmp_path / "weights.npz"
    for make in KINDS.values():
        model = drawn(make(use_batchnorm=use_batchnorm))
        train.save_weights(path, model)
        assert [p.name for p in tmp_path.iterdir()] == ["weights.npz"]
        written = models.arrays_of(model)
        for other in KINDS.values():
            found = models.arrays_of(train.load_weights(path, other(use_batchnorm=use_batchnorm)))
            for name in found.keys() & written.keys():
                assert np.array_equal(found[name], written[name]), name
            assert {*found} ^ {*written} <= {n for n in (*found, *written) if "num_batch" in n}
            if "down.0.steps.1.num_batches_tracked" in found.keys() - written.keys():
                assert found["down.0.steps.1.num_batches_tracked"] == 0


def test_other_dtypes_are_rounded(tmp_path):
    path = tmp_path / "weights.npz"
    model = drawn(KINDS["torch"]()).bfloat16()
    train.save_weights(path, model)
    found = train.load_weights(path, KINDS["ours"]().double())
    for name, value in model.state_dict().items():
        assert torch.equal(value.double(), found.state_dict()[name].double())
    assert found.head.weight.dtype is torch.float64


def test_files_that_cannot_be_used_change_nothing(tmp_path):
    path = tmp_path / "weights.npz"
    train.save_weights(path, tape_of())
    good, state = path.read_bytes(), tape_of().state_dict()

    def of(state):
        np.savez(path, **state)
        return path.read_bytes()

    missing = of({k: v for k, v in state.items() if k != "head.bias"})
    unknown = of(state | {"tail.bias": np.zeros(2)})
    misshapen = of(state | {"head.bias": np.zeros(3)})
    words_instead = of(state | {"head.bias": np.array(["a", "b"])})
    np.save(path.with_suffix(".npy"), np.zeros(3))
    turned = bytearray(good)
    turned[len(good) // 2] ^= 1
    for content, words in (
        (good[: len(good) // 2], "no whole file of weights"), (bytes(turned), "no whole file"),
        (b"", "no whole file"), (b"weights", "no whole file"),
        (path.with_suffix(".npy").read_bytes(), "no whole file .*not a zip file"),
        (of({"a": np.array([{}], object)}), "no whole file"),
        (missing, r"another network: missing: \['head.bias'\]; unknown: \[\]"),
        (unknown, r"another network: missing: \[\]; unknown: \['tail.bias'\]"),
        (misshapen, r"head.bias must have shape \(2,\), not \(3,\)"),
        (words_instead, "head.bias must be of numbers, not of <U1"),
    ):  # fmt: skip
        path.write_bytes(content)
        for make in KINDS.values():
            model = make()
            before = models.arrays_of(model)
            before = {name: value.copy() for name, value in before.items()}
            with pytest.raises(CheckpointError, match=f"weights.npz.*{words}"):
                train.load_weights(path, model)
            after = models.arrays_of(model)
            assert all(np.array_equal(before[name], after[name]) for name in after)
    with pytest.raises(CheckpointError, match="There is no file of weights"):
        train.load_weights(tmp_path / "other.npz", tape_of())


def test_files_are_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "weights.npz"
    train.save_weights(path, tape_of())
    before = path.read_bytes()

    def full(file, **_):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.np, "savez", full)
    with pytest.raises(FolderError, match="weights.npz .*No space left"):
        train.save_weights(path, tape_of(seed=5))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
    for wrong in (tmp_path, tmp_path / "no" / "weights.npz"):
        with pytest.raises(FolderError, match="cannot be written"):
            train.save_weights(wrong, tape_of())


# ── ONNX ─────────────────────────────────────────────────────────────────────────────────────────


def test_onnx_finds_the_same(tmp_path):
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    reference = pytest.importorskip("onnx.reference", reason="the extra onnx is not installed")
    path, model = tmp_path / "unet.onnx", tape_of()
    x, _ = batch(3, (9, 14))
    model(ag.tensor(x))  # statistics that are not those of the start
    train.export_onnx(path, model, (9, 14))
    with ag.no_grad():
        expected = model.eval()(ag.tensor(x)).data
    for images in (x, x[:1]):
        (found,) = reference.ReferenceEvaluator(str(path)).run(["logits"], {"images": images})
        np.testing.assert_allclose(found, expected[: len(images)], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="at least 4 pixels"):
        train.export_onnx(path, model, (3, 14))
    with pytest.raises(ValueError, match="Linear has no convolution"):
        train.export_onnx(path, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("make", [
    lambda: models.create_model("tiny_cnn", 3, widths=(4, 4, 8), hidden=6, image_size=16),
    lambda: timm.create_model("test_efficientnet", num_classes=3),
], ids=["the course's", "timm's"])  # fmt: skip
def test_onnx_of_networks_by_our_layers(make, tmp_path):
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    reference = pytest.importorskip("onnx.reference", reason="the extra onnx is not installed")
    model, x = make().to(PLACE).eval(), randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = model(x).cpu().numpy()
    nn.replace_layers(model)
    train.export_onnx(tmp_path / "net.onnx", model, (16, 16))
    evaluator = reference.ReferenceEvaluator(str(tmp_path / "net.onnx"))
    (found,) = evaluator.run(["logits"], {"images": x.cpu().numpy()})
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_without_the_extra_its_name_is_told(tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    find = weights.importlib.util.find_spec
    monkeypatch.setattr(
        weights.importlib.util, "find_spec", lambda n: None if n == "onnxscript" else find(n)
    )
    with pytest.raises(ImportError, match=r"onnxscript must be .*pip install onnx onnxscript"):
        train.export_onnx(tmp_path / "unet.onnx", tape_of())
    assert not list(tmp_path.iterdir())
