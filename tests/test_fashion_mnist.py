"""Fashion-MNIST: the set, the network, and training on it."""

import functools
import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from course_lib import SIMULATED, cli, data, models, nn, ops, optim, train
from course_lib.models import fashion_mnist_pass
from course_lib.runtime.host import launch as launching
from course_lib.train import fashion_mnist as training

REAL = os.environ.get("COURSE_DATA")
needs_real = pytest.mark.skipif(
    REAL is None or not Path(REAL, "fashion-mnist").is_dir(),
    reason="COURSE_DATA names no folder with fashion-mnist",
)


def idx(array):
    """The bytes of an IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(folder, packed=True):
    """The drawn set as the four files that the real one has."""
    folder.mkdir(parents=True, exist_ok=True)
    for train_part, name in ((True, "train"), (False, "t10k")):
        images, labels = data.fashion_mnist(train=train_part)
        for array, kind in ((images, "images-idx3"), (labels.to(torch.uint8), "labels-idx1")):
            content = idx(array.numpy())
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content, 1) if packed else content)
    return folder


# ------------------------------------------------------------------------------- the set


def test_the_drawn_set_is_the_same_everywhere():
    images, labels = data.fashion_mnist()
    assert images.shape == (1000, 28, 28) and images.dtype == torch.uint8
    assert labels.dtype == torch.int64 and labels.bincount().tolist() == [100] * 10
    assert training.digest(images, labels)[:16] == "49ecf4a8cee199d1"
    test_images, test_labels = data.fashion_mnist(train=False)
    assert len(test_images) == len(test_labels) == 200
    images.zero_()  # nobody else's
    assert data.fashion_mnist()[0].any()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "raw", "FashionMNIST/raw"])
def test_the_files_are_read_wherever_they_lie(tmp_path, below, packed):
    write(tmp_path / below, packed)
    for part in (True, False):
        found, drawn = data.fashion_mnist(tmp_path, train=part), data.fashion_mnist(train=part)
        assert all(torch.equal(*pair) for pair in zip(found, drawn, strict=True))


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("t10k-images-idx3-ubyte", lambda b: b[:-1], "t10k-images-idx3-ubyte is no whole IDX"),
        ("t10k-images-idx3-ubyte", lambda b: b[:7], "is no whole IDX file of bytes: fetch it"),
        ("t10k-labels-idx1-ubyte", lambda b: b + b"\0", "t10k-labels-idx1-ubyte is no whole IDX"),
        ("t10k-labels-idx1-ubyte", lambda b: b"\0\0\x0d\1" + b[4:], "is no whole IDX file"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "has the label 10; there are 0"),
        ("t10k-labels-idx1-ubyte", lambda b: idx(np.zeros(3, np.uint8)), "has 3 labels and images"),
    ],
)
def test_spoilt_files_are_named(tmp_path, name, change, words):
    path = write(tmp_path, packed=False) / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(data.DataError, match=words):
        data.fashion_mnist(tmp_path, train=False)


def test_a_packed_file_that_is_cut_short_and_files_that_are_missing(tmp_path):
    path = write(tmp_path) / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(data.DataError, match="train-labels-idx1-ubyte.gz is no whole IDX file"):
        data.fashion_mnist(tmp_path)
    path.unlink()
    with pytest.raises(data.DataError, match="lacks train-labels-idx1-ubyte or"):
        data.fashion_mnist(tmp_path)
    with pytest.raises(data.DataError, match="has no Fashion-MNIST: name the folder with train"):
        data.fashion_mnist(tmp_path / "elsewhere")


def test_no_more_is_unpacked_than_the_header_says(tmp_path):
    path = write(tmp_path) / "train-images-idx3-ubyte.gz"
    header = struct.pack(">HBB3I", 0, 8, 3, 2, 28, 28)
    bomb = gzip.compress(header + bytes(1 << 20)) + gzip.compress(bytes(1 << 24)) * 1000  # 16 GB
    vast = struct.pack(">HBB3I", 0, 8, 3, 1 << 31, 28, 28)
    for content in (bomb, gzip.compress(vast + bytes(100))):
        path.write_bytes(content)
        with pytest.raises(data.DataError, match="train-images-idx3-ubyte.gz is no whole IDX file"):
            data.fashion_mnist(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(data.DataError, match="lacks train-images-idx3-ubyte or"):
        data.fashion_mnist(tmp_path)


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    import torchvision

    def offline(*_, **__):
        raise RuntimeError("no connection")

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", offline)
    with pytest.raises(data.DataError, match=r"not be downloaded to .*no connection.*fetch its"):
        data.fashion_mnist(tmp_path, download=True)


@needs_real
def test_the_real_set():
    images, labels = data.fashion_mnist(Path(REAL, "fashion-mnist"))
    assert images.shape == (60_000, 28, 28) and labels.bincount().tolist() == [6000] * 10
    assert labels[:5].tolist() == [9, 0, 0, 3, 0] and images[0].sum() == 76_247


# --------------------------------------------------------------------------- the network


def test_the_network_and_its_twin():
    torch.manual_seed(3)
    ours = models.FashionMNISTCNN()
    torch.manual_seed(3)
    theirs = models.FashionMNISTCNN(layers=torch.nn)
    assert sum(p.numel() for p in ours.parameters()) == 896_522
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    theirs.load_state_dict(models.FashionMNISTCNN().state_dict())
    for name in ("conv1", "conv2", "pool", "relu", "flatten", "fc1", "fc2"):
        assert type(getattr(ours, name)).__module__.startswith(nn.__name__)


def test_steps_on_our_kernels_are_pytorchs_and_the_loss_falls(first_rungs):
    place = "cpu" if SIMULATED else "cuda"
    torch.manual_seed(1)
    widths = (2, 3, 8) if SIMULATED else (64, 128, 256)
    ours = models.FashionMNISTCNN(widths=widths).to(place)
    theirs = models.FashionMNISTCNN(widths=widths, layers=torch.nn).to(place)
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.rand(2, 1, 28, 28).to(place), torch.tensor([4, 7]).to(place)
    options = dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    sides = [
        (ours, optim.SGD(ours.parameters(), **options), ops.cross_entropy),
        (theirs, torch.optim.SGD(theirs.parameters(), **options), F.cross_entropy),
    ]
    losses = []
    for _ in range(3):
        for model, optimizer, criterion in sides:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.linalg.norm(p - q) <= 1e-4 * torch.linalg.norm(q), name
    assert losses[0] > losses[2] > losses[4]
    assert np.allclose(losses[::2], losses[1::2], rtol=1e-4)


@pytest.mark.skipif(not SIMULATED, reason="a GPU without clusters copies them")
@pytest.mark.parametrize("exactness", ["float32", "tf32"])
def test_inference_copies_no_weights(monkeypatch, exactness):
    """All that is laid out are the images before the first linear layer."""
    monkeypatch.setattr(launching, "_simulate", lambda *_: None)  # what is launched is enough
    model = models.FashionMNISTCNN()
    layers = fashion_mnist_pass.weights_of(model)  # which lays conv2's out, once
    weight, bias = layers["conv2"]
    for last in (False, True):
        layers["conv2"] = (weight if last else weight.contiguous()), bias
        with launching.recorded() as launches:
            fashion_mnist_pass.forward(layers, torch.rand(1, 1, 28, 28), precision=exactness)
        names = [kernel.py_func.__name__ for kernel, *_ in launches]
        assert names[2:5] == ["halo_kernel", names[1], "transpose_kernel"] and len(names) == 7
        assert launches[2][3][1] is layers["conv2"][0]


@pytest.mark.parametrize("last", [False, True])
def test_gradients_of_weights_as_they_lie(first_rungs, last):
    """`backward` also takes what `weights_of` has not laid out; gradients lie as weights do."""
    place = "cpu" if SIMULATED else "cuda"
    widths = (2, 3, 8) if SIMULATED else (64, 128, 256)
    theirs = models.FashionMNISTCNN(widths=widths, layers=torch.nn).to(place)
    if last:
        theirs.conv2.to(memory_format=torch.channels_last)
    layers = {
        name: tuple(p.detach() for p in getattr(theirs, name).parameters())
        for name in fashion_mnist_pass.NAMES
    }
    x, dlogits = torch.rand(2, 1, 28, 28, device=place), torch.randn(2, 10, device=place)
    expected = torch.autograd.grad(theirs(x), list(theirs.parameters()), dlogits)
    logits, kept = fashion_mnist_pass.forward(layers, x)
    torch.testing.assert_close(logits, theirs(x), rtol=1e-3, atol=1e-4)
    found = fashion_mnist_pass.backward(layers, dlogits, kept)
    found = [gradient for layer in found.values() for gradient in layer]
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)
    assert found[2].is_contiguous() != last


def test_hooks_and_other_layers_are_called(first_rungs):
    place = "cpu" if SIMULATED else "cuda"
    widths = (2, 3, 8) if SIMULATED else (64, 128, 256)
    x, seen = torch.rand(1, 1, 28, 28, device=place), []

    def made(**changed):
        model = models.FashionMNISTCNN(widths=widths).to(place)
        for name, layer in changed.items():
            setattr(model, name, layer)
        return model

    with torch.no_grad():
        hooked = made()
        hooked.fc1.register_forward_hook(lambda *_: seen.append(1))
        hooked(x)
        assert seen == [1]
        everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(2))
        made()(x)
        everywhere.remove()
        assert seen[1:].count(2) > 7
        tanh = made(relu=torch.nn.Tanh())
        expected = tanh.fc2(tanh.relu(tanh.fc1(tanh.flatten(tanh.relu(tanh.pool(tanh.conv2(
            tanh.relu(tanh.pool(tanh.conv1(x))))))))))  # fmt: skip
        assert torch.equal(tanh(x), expected)
        with pytest.raises(Exception, match="shape|size|dimension"):
            made()(x[:, :, 4:])
        assert made().to(memory_format=torch.channels_last)(x[:0]).shape == (0, 10)


# ---------------------------------------------------------------------------- the training


def parts():
    return *data.fashion_mnist(), *data.fashion_mnist(train=False)


def on_the_cpu(**options):
    given = dict(epochs=1, use_cuda_kernels=False, device_name="cpu")
    return train.train_fashion_mnist(*parts(), **given | options)


def test_the_drawn_clothes_are_learnt():
    model, history = on_the_cpu(epochs=2)
    assert isinstance(model, models.FashionMNISTCNN) and not model.training
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert history[-1]["validation_accuracy"] >= 0.85
    test = data.fashion_mnist(train=False)
    assert train.evaluate_accuracy(model, *test) == history[-1]["validation_accuracy"]
    part = dict(zip(("images", "labels"), test, strict=True)) | {"classes": data.FASHION_CLASSES}
    shares = train.accuracy_by_class(model, type("Part", (), part))
    assert list(shares) == list(data.FASHION_CLASSES)


def test_a_stopped_run_ends_with_the_same_bits(tmp_path):
    images, labels = data.fashion_mnist()
    small = images[:96], labels[:96], *data.fashion_mnist(train=False)
    options = dict(epochs=2, use_cuda_kernels=False, device_name="cpu", checkpoint_steps=2)
    whole, _ = train.train_fashion_mnist(*small, **options)

    class Killed(Exception):
        pass

    steps = training.Classifier.train_step
    with pytest.MonkeyPatch.context() as patch:

        def killed(self, step):
            if step == 3:
                raise Killed
            steps(self, step)

        patch.setattr(training.Classifier, "train_step", killed)
        with pytest.raises(Killed):
            train.train_fashion_mnist(*small, **options, output=tmp_path)
    resumed, history = train.train_fashion_mnist(*small, **options, output=tmp_path, resume=True)
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
    with pytest.raises(train.CheckpointError, match="belongs to another run: .*images was"):
        changed = 255 - small[0]
        train.train_fashion_mnist(changed, *small[1:], **options, output=tmp_path, resume=True)


@pytest.mark.parametrize(
    "place, change, words",
    [
        (0, lambda t: t.float(), r"train_images must be uint8 \(N, 28, 28\), not torch.float32"),
        (2, lambda t: t[:, 1:], r"test_images must be uint8 \(N, 28, 28\), .* \(200, 27, 28\)"),
        (1, lambda t: t[1:], r"train_labels must be int64 \(1000,\), .* \(999,\)"),
        (3, lambda t: t + 1, "test_labels must be numbers from 0 to 9"),
    ],
)
def test_what_cannot_be_trained_on(place, change, words):
    given = list(parts())
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=words):
        train.train_fashion_mnist(*given)


def test_arrays_are_no_tensors():
    given = list(parts())
    for place, name in enumerate(("train_images", "train_labels", "test_images", "test_labels")):
        wrong = [*given[:place], given[place].numpy(), *given[place + 1 :]]
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, not a numpy.ndarray"):
            train.train_fashion_mnist(*wrong)


@pytest.mark.parametrize(
    "options, words",
    [({"epochs": 0}, "epochs must be"), ({"batch_size": 1.5}, "batch_size must be a whole"),
     ({"learning_rate": -1}, "learning_rate must be above 0"), ({"precision": "int8"}, "precision"),
     ({"device_name": "tpu"}, "the device must be auto, mps, cpu, cuda")],
)  # fmt: skip
def test_senseless_options(options, words):
    with pytest.raises(ValueError, match=words):
        on_the_cpu(**options)


def test_the_command_trains_and_evaluates(tmp_path, capsys):
    folder, run = write(tmp_path / "set"), tmp_path / "run"
    command = ["train", "fashion-mnist", "--data", str(folder), "--device", "cpu"]
    options = ["--output", str(run), "--epochs", "1", "--batch-size", "100", "--no-cuda-kernels"]
    assert cli.main([*command, *options]) == 0
    told = capsys.readouterr()
    assert "epoch 1: loss" in told.out and "No GPU is used" in told.err
    assert {path.name for path in run.iterdir()} == {"checkpoint.pt", "history.json", "history.png"}
    assert cli.main([*command, "--evaluate", str(run / "checkpoint.pt")]) == 0
    assert "of 200 test images" in capsys.readouterr().out
    assert cli.main([*command, *options]) == 2
    assert "is of an earlier run: resume that run, or name another" in capsys.readouterr().err
    assert cli.main(["train", "leaves", "--evaluate", str(run / "checkpoint.pt")]) == 2
    assert "is of a run on fashion-mnist, not on leaves" in capsys.readouterr().err


# ---------------------------------------------------------------- the captured trainer


CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    "asked, place, precision, ours, chosen",
    [
        (None, GPU, "float32", True, "captured"),
        (None, GPU, "tf32", True, "captured"),
        (None, GPU, "bfloat16", True, "modules"),
        (None, GPU, "float32", False, "modules"),
        (None, CPU, "float32", True, "modules"),
        ("modules", GPU, "float32", True, "modules"),
        ("captured", GPU, "tf32", True, "captured"),
        ("modules", GPU, "tf32", True, "tf32 is for the captured trainer on a GPU"),
        (None, CPU, "tf32", True, "tf32 is for the captured trainer on a GPU"),
        ("captured", GPU, "bfloat16", True, "computes in float32 or tf32, not bfloat16"),
        ("captured", GPU, "float32", False, "is made of our kernels"),
        ("captured", CPU, "float32", True, "needs a GPU, and this run is on cpu"),
        ("graph", GPU, "float32", True, "trainer must be captured or modules, not 'graph'"),
    ],
)
def test_the_fastest_trainer_that_can_is_chosen(
    monkeypatch, asked, place, precision, ours, chosen
):
    monkeypatch.setattr(training, "SIMULATED", False)
    monkeypatch.setattr(training, "simulate_on_cpu", False)
    if chosen in training.TRAINERS:
        assert training.choose_trainer(asked, place, precision, ours) == chosen
    else:
        with pytest.raises(ValueError, match=chosen):
            training.choose_trainer(asked, place, precision, ours)


@pytest.fixture
def small(monkeypatch):
    """(images and labels to train on and test with, options): what the simulator can do."""
    if SIMULATED:
        networks = functools.partial(models.FashionMNISTCNN, widths=(2, 3, 8))
        monkeypatch.setattr(models, "FashionMNISTCNN", networks)
    n, batch = (2, 1) if SIMULATED else (960, 32)
    given = [part[:n] for part in parts()]
    return given, dict(epochs=2, batch_size=batch, checkpoint_steps=1)


class Killed(Exception):
    pass


def killed_at(patch, kind, at):
    steps = kind.train_step

    def train_step(self, step):
        if step == at:
            raise Killed
        steps(self, step)

    patch.setattr(kind, "train_step", train_step)


def check_resuming(small, folder, **options):
    """A captured run that is killed goes on to the same bits."""
    given, fixed = small
    options = fixed | dict(trainer="captured") | options
    whole, history = train.train_fashion_mnist(*given, **options)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, training.FashionMNISTPass, options["epochs"] + 1)
        with pytest.raises(Killed):
            train.train_fashion_mnist(*given, **options, output=folder)
    del options["trainer"]  # it goes on as it was begun
    said = []
    resumed, found = train.train_fashion_mnist(
        *given, **options, output=folder, resume=True, say=said.append
    )
    assert found == history and not resumed.training
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
    assert "a step of our kernels in one captured graph, float32" in said[0]
    kept = train.checkpoint.load(folder / "checkpoint.pt")
    assert kept["settings"]["trainer"] == "captured"
    assert kept["state"]["step"].item() == kept["step"] == options["epochs"] * (
        len(given[0]) // options["batch_size"]
    )
    model, settings = train.load_fashion_mnist(folder / "checkpoint.pt")
    assert all(map(torch.equal, whole.state_dict().values(), model.state_dict().values()))
    for other, words in (
        (dict(trainer="modules"), "trainer was 'captured', and is now 'modules'"),
        (dict(precision="tf32"), "precision was 'float32', and is now 'tf32'"),
    ):
        with pytest.raises(train.CheckpointError, match=words):
            train.train_fashion_mnist(*given, **options | other, output=folder, resume=True)


def test_a_captured_run_that_is_killed_ends_with_the_same_bits(small, first_rungs, tmp_path):
    check_resuming(small, tmp_path)


def test_a_captured_state_that_is_edited_is_refused(small, first_rungs, tmp_path):
    given, options = small
    options |= dict(epochs=1, trainer="captured")
    train.train_fashion_mnist(*given, **options, output=tmp_path)
    kept = train.checkpoint.load(tmp_path / "checkpoint.pt")
    for name, wrong in (("losses", torch.zeros(())), ("step", torch.zeros(1)), ("buffers", {})):
        spoilt = kept | {"state": kept["state"] | {name: wrong}}
        torch.save(spoilt, tmp_path / "checkpoint.pt")
        with pytest.raises(train.CheckpointError, match="does not fit this network"):
            train.train_fashion_mnist(*given, **options, output=tmp_path, resume=True)


def test_older_checkpoints_go_on_by_modules(tmp_path):
    images, labels = data.fashion_mnist()
    given = images[:64], labels[:64], images[:8], labels[:8]
    options = dict(epochs=2, use_cuda_kernels=False, device_name="cpu")
    whole, _ = train.train_fashion_mnist(*given, **options)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, training.Classifier, 3)
        with pytest.raises(Killed):
            train.train_fashion_mnist(*given, **options, output=tmp_path)
    path = tmp_path / "checkpoint.pt"
    kept = train.checkpoint.load(path)
    assert kept["settings"].pop("trainer") == "modules"
    torch.save(kept, path)
    with pytest.MonkeyPatch.context() as patch:
        # Also where a new run would be captured.
        choose = training.choose_trainer
        patch.setattr(training, "SIMULATED", False)
        patch.setattr(
            training, "choose_trainer", lambda asked, _, precision, ours: choose(
                asked, GPU, precision, True
            ),
        )  # fmt: skip
        resumed, _ = train.train_fashion_mnist(*given, **options, output=tmp_path, resume=True)
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
    assert train.checkpoint.load(path)["settings"]["trainer"] == "modules"


def test_the_command_asks_for_modules(monkeypatch, tmp_path, capsys):
    asked = []

    def instead(*_, **options):
        asked.append(options.get("trainer"))
        raise ValueError("enough")

    monkeypatch.setattr(training, "train_fashion_mnist", instead)
    folder = write(tmp_path / "set")
    for words in ([], ["--modules"], ["--precision", "tf32"]):
        command = ["train", "fashion-mnist", "--data", folder, "--output", tmp_path / "run", *words]
        assert cli.main(list(map(str, command))) == 2
    assert asked == [None, "modules", None]
    with pytest.raises(SystemExit):
        cli.main(["train", "leaves", "--modules"])
    capsys.readouterr()


@pytest.mark.gpu
def test_a_killed_run_on_a_gpu_is_captured_and_ends_with_the_same_bits(small, tmp_path):
    check_resuming(small, tmp_path, trainer=None)


@pytest.mark.gpu
def test_bfloat16_on_a_gpu_takes_modules_and_says_so(small):
    said = []
    train.train_fashion_mnist(*small[0], epochs=1, precision="bfloat16", say=said.append)
    assert "our modules through autograd, bfloat16, which the captured graph has not" in said[0]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@needs_real
def test_the_real_clothes_are_learnt_on_a_gpu():
    root = Path(REAL, "fashion-mnist")
    real = *data.fashion_mnist(root), *data.fashion_mnist(root, train=False)
    found = {}
    for trainer, precision in (("captured", "float32"), ("captured", "tf32"),
                               ("modules", "float32")):  # fmt: skip
        _, history = train.train_fashion_mnist(
            *real, epochs=2, trainer=trainer, precision=precision
        )
        found[trainer, precision] = history[-1]["validation_accuracy"]
    assert min(found.values()) >= 0.88, found
    assert max(found.values()) - min(found.values()) < 0.015, found
