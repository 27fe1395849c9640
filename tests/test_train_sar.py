"""Training on radar images: as a command, resumed exactly, and with all that can be wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sar_files import arrays, save, tile_file

from course_lib import autograd as ag
from course_lib import backend, cli, plot
from course_lib.train import checkpoint, sar
from course_lib.train.sar import SarSettings, train_sar

ROOT = Path(__file__).resolve().parent.parent
SMALL = SarSettings(
    use_cuda=False, depth=2, initial_channels=4, image_size=16, num_synthetic_samples=12,
    batch_size=4, num_epochs=3, learning_rate=5e-3,
)  # fmt: skip
TEXT = (
    "use_cuda: false\ndepth: 2\ninitial_channels: 4\nimage_size: 16\nnum_synthetic_samples: 12\n"
    "batch_size: 4\nnum_epochs: 3\nlearning_rate: 5e-3\n"
)


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    monkeypatch.delenv("COURSE_LIB_SIMULATOR", raising=False)
    monkeypatch.setattr(backend, "_chosen", None)


def command(*options, folder, **environment):
    """(exit status, standard output, standard error) of `train sar` with these options."""
    environment = {k: v for k, v in os.environ.items() if k != "COURSE_LIB_SIMULATOR"} | environment
    done = subprocess.run(
        [sys.executable, "-m", "course_lib", "train", "sar", *map(str, options)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_as_a_command(tmp_path, capsys):
    config, output = tmp_path / "sar.yaml", tmp_path / "run"
    config.write_text(TEXT)
    status, out, err = command("--config", config, "--output", output, folder=tmp_path)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0] == "Device: CPU"
    assert lines[1] == "Model: UNet (depth=2, channels=4, classes=2)"
    assert "tiles to train on" in lines[2] and "water" in lines[2]
    assert lines[3].startswith("To beat: the best threshold on VV")
    history = json.loads((output / "history.json").read_text())
    assert [entry["epoch"] for entry in history] == [1, 2, 3]
    assert history[-1]["loss"] < history[0]["loss"]
    assert {"checkpoint.pt", "history.png", "masks.png"} <= {p.name for p in output.iterdir()}
    assert cli.main(["train", "sar", "--evaluate", str(output / "checkpoint.pt")]) == 0
    assert f"{history[-1]['validation_iou']:.4f}" in capsys.readouterr().out


def test_a_network_beats_the_best_threshold():
    """Small, so that it takes seconds; 64 scenes of 64×64 and 16 channels reach 0.75."""
    told = []
    settings = SarSettings(
        use_cuda=False, depth=2, initial_channels=8, image_size=32, num_synthetic_samples=48,
        batch_size=4, num_epochs=10, learning_rate=5e-3,
    )  # fmt: skip
    _, history = train_sar(settings, tell=told.append)
    to_beat = float(told[-1].rpartition(" ")[2])
    assert to_beat > 0.4 and history[-1]["iou_1"] > to_beat + 0.03


@pytest.mark.parametrize("text, words", [
    ("use_cuda: true\n", "use_cuda is True, but there is no NVIDIA driver here"),
    ("depht: 2\n", "line 1: unknown key 'depht'"),
    ("data_dir: /no/such/folder\n", "There is no /no/such/folder: name a folder of images"),
    ("unit: watts\n", "unit"),
    ("in_channels: 3\nuse_cuda: false\n", "in_channels is 3, but the scenes have 2"),
    ("num_classes: 5\nuse_cuda: false\n", "num_classes is 5, but the scenes have 2"),
    ("image_size: 2\ndepth: 5\nuse_cuda: false\n", "at least 32 pixels"),
    ("depth: 6\nuse_cuda: false\n", "depth must be from 2 to 5"),
    ("precision: float16\nuse_cuda: false\n", "float16 needs a GPU"),
    ("train_ratio: 1.0\nuse_cuda: false\n", "train_ratio"),
])
def test_what_is_wrong_is_one_sentence(tmp_path, text, words, capsys):
    from course_lib import device

    if "true" in text and device.count():
        pytest.skip("there is a GPU here")
    config, output = tmp_path / "sar.yaml", tmp_path / "run"
    config.write_text(text)
    status = cli.main(["train", "sar", "--config", str(config), "--output", str(output)])
    err = capsys.readouterr().err
    assert status == 2 and words in err and "Traceback" not in err and err.count("\n") == 1
    assert not (output / "checkpoint.pt").exists()


def test_linear_power_is_trained_on(tmp_path):
    arrays(tmp_path)
    for file in (tmp_path / "images").iterdir():
        save(file, 10 ** (np.load(file).astype(np.float64) / 10))
    scenes = sar.load(SarSettings(data_dir=tmp_path, unit="power", image_size=12))
    assert scenes.images.std() < 2 and "unit" not in sar.kept_settings(SMALL, scenes)


def test_files_that_are_wrong_are_one_sentence(tmp_path, capsys):
    tiles, config, output = tmp_path / "t.npz", tmp_path / "sar.yaml", tmp_path / "run"
    config.write_text(f"use_cuda: false\nimage_size: 8\ndata_dir: {tiles}\n")
    masks = np.zeros((4, 8, 8), np.int8)
    masks[2, 3, 5] = 7
    whole = tile_file(tiles).read_bytes()
    for content, words in (
        (whole[: len(whole) // 2], ["t.npz"]),
        (tile_file(tiles, masks=masks).read_bytes(), ["t.npz", "7"]),
    ):
        tiles.write_bytes(content)
        status = cli.main(["train", "sar", "--config", str(config), "--output", str(output)])
        err = capsys.readouterr().err
        assert status == 2 and all(word in err for word in words), err
        assert "Traceback" not in err and err.count("\n") == 1
        assert not (output / "checkpoint.pt").exists()


@pytest.mark.parametrize("place", ["__init__", "forward"])
@pytest.mark.parametrize("kind", [MemoryError, torch.cuda.OutOfMemoryError])
def test_out_of_memory_loses_nothing(tmp_path, monkeypatch, capsys, place, kind):
    config, output = tmp_path / "sar.yaml", tmp_path / "run"
    config.write_text(TEXT)
    arguments = ["train", "sar", "--config", str(config), "--output", str(output)]
    calls, real = [], getattr(ag.UNet, place)
    last = 0 if place == "__init__" else 5  # steps, validation and steps again: the second epoch

    def full(*inputs, **options):
        calls.append(1)
        if len(calls) > last:
            raise kind("out of memory")
        return real(*inputs, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ag.UNet, place, full)
        assert cli.main(arguments) == 1
    err = capsys.readouterr().err
    assert "There is not enough memory" in err and "batch size (it is 4)" in err
    assert "Traceback" not in err
    assert (output / "checkpoint.pt").exists() == (place == "forward")
    assert cli.main([*arguments, "--resume"]) == 0
    _, history = train_sar(SMALL, tell=str)
    assert json.loads((output / "history.json").read_text()) == history


def weights_of(model):
    return np.concatenate([p.data.ravel() for p in model.parameters()])


def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path):
    whole, history = train_sar(SMALL, output=tmp_path / "whole", tell=str)

    class Stop(Exception):
        pass

    def stop(entry):
        if entry["epoch"] == 2:
            raise Stop

    with pytest.raises(Stop):
        train_sar(SMALL, output=tmp_path / "stopped", tell=str, report=stop)
    resumed, again = train_sar(SMALL, output=tmp_path / "stopped", tell=str, resume=True)
    assert again == history
    assert np.array_equal(weights_of(whole), weights_of(resumed))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    train_sar(SMALL, output=tmp_path, tell=str)
    other = SarSettings(**(vars(SMALL) | {"depth": 3}))
    with pytest.raises(checkpoint.CheckpointError, match="depth was 2, and is now 3"):
        train_sar(other, output=tmp_path, tell=str, resume=True)
    kept = checkpoint.load(tmp_path / "checkpoint.pt")
    checkpoint.save(tmp_path / "c.pt", settings={"task": "leaves"}, step=1, history=[],
                    state=kept["state"])  # fmt: skip
    with pytest.raises(checkpoint.CheckpointError, match="not on sar"):
        sar.load_sar(tmp_path / "c.pt")


@pytest.mark.parametrize("loss", ["dice", "cross_entropy", "combined", "focal"])
def test_every_loss_is_learned(loss):
    settings = SarSettings(**(vars(SMALL) | {"loss_function": loss, "augment": False}))
    _, history = train_sar(settings, tell=str)
    assert history[-1]["loss"] < history[0]["loss"]


def test_the_picture_of_masks(tmp_path):
    random = np.random.default_rng(0)
    labels = random.integers(-1, 2, (2, 8, 8))
    found = np.where(labels == -1, 0, labels)
    picture = plot.segmentation(labels * 1.0, labels, found, ("land", "water"), title="Water")
    assert picture.alt == "Right pixels: image 0 100%, image 1 100%"
    assert picture.png()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="one shape"):
        plot.segmentation(labels, labels, found[:1], ("land", "water"))
    with pytest.raises(ValueError, match="1 to 8 images"):
        plot.segmentation(labels[:0], labels[:0], found[:0], ("land", "water"))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_gpu_finds_the_losses_that_numpy_finds(library, monkeypatch):
    if library == "cupy":
        pytest.importorskip("cupy")
    losses = {}
    for name in ("numpy", library):
        monkeypatch.setattr(sar, "set_backend", lambda _: backend.set_backend(library=name))  # noqa: B023
        settings = SarSettings(**(vars(SMALL) | {"num_epochs": 10, "learning_rate": 1e-3}))
        _, history = train_sar(settings, tell=str)
        losses[name] = [entry["loss"] for entry in history]
    np.testing.assert_allclose(losses["numpy"], losses[library], rtol=1e-4)


def first_losses(library, seed, steps=20, size=(32, 40)):
    """The losses of the first steps, on as many batches, of one network."""
    here, random = backend.set_backend(library=library), np.random.default_rng(seed)
    model = ag.UNet(2, 2, depth=2, initial_channels=8, random=np.random.default_rng(seed))
    optimizer, losses = ag.SGD(model.parameters(), lr=1e-3, momentum=0.9), []
    for _ in range(steps):
        x = here.to_device(random.standard_normal((4, 2, *size), dtype=np.float32))
        target = here.to_device(random.integers(-1, 2, (4, *size)))
        optimizer.zero_grad()
        loss = ag.combined_loss(model(ag.tensor(x)), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_the_first_20_steps_are_numpys(library):
    """Of noise, by SGD; above, drawn scenes are learned by Adam.

    Adam makes a whole step of any gradient, however small. So where a number that ReLU cuts off
    lies within a rounding of zero, even NumPy's float32 leaves its float64, by up to 6e-4 of noise.
    """
    if library == "cupy":
        pytest.importorskip("cupy")
    for seed in range(3):
        losses = [first_losses(name, seed) for name in ("numpy", library)]
        np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.gpu
def test_a_gpu_that_is_full_is_one_sentence(tmp_path, capsys):
    config, output = tmp_path / "sar.yaml", tmp_path / "run"
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.01)
    config.write_text(TEXT.replace("false", "true").replace(
        "initial_channels: 4", "initial_channels: 512"))  # fmt: skip
    try:
        arguments = ["train", "sar", "--config", str(config), "--output", str(output)]
        assert cli.main(arguments) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
    err = capsys.readouterr().err
    assert "There is not enough memory (" in err and "more were asked for" in err
    config.write_text(TEXT.replace("false", "true"))
    assert cli.main(arguments) == 0  # the process, and its GPU, go on


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_on_a_gpu(precision):
    changed = {"precision": precision, "use_cuda": True, "num_epochs": 6}
    model, history = train_sar(SarSettings(**(vars(SMALL) | changed)), tell=str)
    assert history[-1]["loss"] < history[0]["loss"]
    assert all(p.data.dtype is torch.float32 for p in model.parameters())
