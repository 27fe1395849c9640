"""`train images` as a user starts it: what it tells, keeps, goes on from, and refuses."""

import dataclasses
import json
import os
import signal

import pytest
import torch
from image_runs import OPTIONS, at_step, command, made
from image_sets import NUMBERS, class_folders, tiny_imagenet
from kill_and_resume import differences

from course_lib import cli
from course_lib.runtime.host import device as here
from course_lib.train import checkpoint, config, device, images
from course_lib.train.image_settings import ImageSettings

# ----------------------------------------------------------------- what is told and kept


def test_the_command_trains_tells_and_evaluates(root, tmp_path, capsys):
    output = tmp_path / "run"
    words = "--epochs", 6, "--padding", 0, "--learning-rate", "2e-3", "--output", output
    assert command(root, *words) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[:4] == [
        "Device: cpu", "Model: tiny_cnn, PyTorch's layers, float32",
        "Classes: 3 (goldfish, salamander, bullfrog)",
        "Data: 24 images to train on, 6 to validate; as bytes of shape (3, 16, 16) they take "
        "0.00 GB of memory",
    ]  # fmt: skip
    assert lines[4].startswith("epoch 1: loss ") and lines[4].endswith(" images/s")
    history = json.loads((output / "history.json").read_text())
    assert [entry["epoch"] for entry in history] == list(range(1, 7))
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["validation_accuracy"] >= 0.6  # each class has its colour; 1/3 by chance
    assert "images_per_second" not in history[0]  # which no two runs have alike
    assert lines[10] == "The classes it knows least, of 3:"
    assert {line.split()[0] for line in lines[11:14]} == {"goldfish", "salamander", "bullfrog"}
    assert {f.name for f in output.iterdir()} == {"checkpoint.pt", "history.json", "history.png"}
    assert command(root, "--evaluate", output / "checkpoint.pt") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"{history[-1]['validation_accuracy']:.1%} of 6 validation images."
    assert told[1:-1] == lines[11:14]


def test_the_worst_classes_are_the_worst():
    class Knows:
        def predict(self, images):
            return torch.eye(3)[images[:, 0, 0, 0].long()]

    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    found = torch.tensor([0, 0, 2, 2, 2, 0], dtype=torch.uint8)
    pixels, names = found[:, None, None, None].expand(6, 3, 1, 1), tuple("abcdef")
    part = images.data.DecodedImages(pixels, labels, ("ant", "bee", "cat"), names)
    assert list(images.worst_classes(Knows(), part, 2)) == [
        "The classes it knows least, of 3:", "bee     0.0%  2 taken for cat",
        "cat    50.0%  1 taken for ant",
    ]  # fmt: skip


def test_a_network_of_two_pathways_shows_its_weights(root, tmp_path):
    output = tmp_path / "run"
    words = "--model", "continuous_integration", "--base-channels", 2, "--epochs", 1
    assert command(root, *words, "--enable-gradient-checkpointing", "--output", output) == 0
    (entry,) = json.loads((output / "history.json").read_text())
    assert entry["integration_weights"].keys() == {"stage1", "stage2", "pooled"}
    assert (output / "integration.png").read_bytes()[:4] == b"\x89PNG"


def test_two_pathways_learn_the_same_bits_on_two_devices(root, tmp_path, monkeypatch, capsys):
    words = "--model", "continuous_integration", "--base-channels", 2, "--epochs", 1, "--output"
    assert command(root, *words, tmp_path / "one") == 0
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        two = *words, tmp_path / "two", "--checkpoint-steps", 1, "--device"
        assert command(root, *two, "cpu,cpu") == 130
    assert "Device: cpu, cpu\n" in capsys.readouterr().out
    assert command(root, *two, "cpu", "--resume") == 0
    files = [tmp_path / name / "checkpoint.pt" for name in ("one", "two")]
    assert differences(*files) == []
    assert command(root, "--device", "cpu,cpu", "--evaluate", files[0]) == 0


@pytest.mark.parametrize("name", ["small_se_net", "squeezenet1_1"])
def test_any_network_by_name(tmp_path, name):
    root = class_folders(tmp_path / "set")
    settings = ImageSettings(model=name, data=str(root), device="cpu", image_size=32, epochs=1)
    model, history = images.train_images(settings, tell=str)
    assert len(history) == 1 and not model.training
    assert model(torch.ones(1, 3, 32, 32)).shape == (1, 2)


def test_a_profile_is_kept(root, tmp_path, capsys):
    assert command(root, "--epochs", 2, "--profile", "--output", tmp_path / "run") == 0
    assert "Self CPU" in capsys.readouterr().err
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::convolution_backward" in names or "aten::convolution" in names
    assert "aten::" in (tmp_path / "run" / "profile.txt").read_text()
    one_step = ImageSettings(
        data=str(root), device="cpu", image_size=16, epochs=1, profile=True, padding=1
    )
    images.train_images(one_step, output=tmp_path / "short", tell=str)
    assert (tmp_path / "short" / "trace.json").exists()


# ------------------------------------------------------------------ settings and switches


def test_settings_come_from_a_file_and_over_it_from_options(root, tmp_path, capsys):
    file = tmp_path / "images.yaml"
    file.write_text(f"model: tiny_cnn\nepochs: 1\nlearning_rate: 1e-2\ndata: {root}\nseed: 5\n")
    words = "train", "images", *OPTIONS, "--config", str(file), "--seed", "7", "--output"
    assert cli.main([*words, str(tmp_path / "run")]) == 0
    kept = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["settings"]
    assert (kept["epochs"], kept["learning_rate"], kept["seed"]) == (1, 0.01, 7)
    for text, told in (
        ("epochs: 1\nepochs: 2\n", "line 2: epochs is given twice"),
        ("modle: tiny_cnn\n", "line 1: unknown key 'modle'; there are model, depth"),
        ("\nepochs: many\n", "line 2: epochs must be a whole number, not 'many'"),
        ("batch_size: 0\n", "batch_size must be 1 or more"),
        ("schedule: linear\n", "schedule must be cosine | one_cycle | constant, not 'linear'"),
    ):
        file.write_text(text)
        assert cli.main([*words, str(tmp_path / "none")]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("words, told", [
    ("--epochs 2.5", "argument --epochs: epochs must be a whole number, not 2.5"),
    ("--epochs 0", "epochs must be 1 or more, not 0"),
    ("--learning-rate fast", "learning_rate must be a number, not 'fast'"),
    ("--depth deeper", "depth must be shallow | medium | deep, not 'deeper'"),
    ("--optimizer lion", "optimizer must be sgd | adam | adamw, not 'lion'"),
    ("--precision int8", "precision must be float32 | tf32 | bfloat16 | float16 or null"),
])
def test_options_are_as_strict_as_the_file(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "images", *words.split()])
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("words, told", [
    ("--label-smoothing 1", "label_smoothing must be from 0 to below 1"),
    ("--learning-rate 0", "learning_rate must be above 0"),
    ("--learning-rate .nan", "learning_rate must be above 0, not nan"),
    ("--mixup .nan", "mixup must be a number, not nan"),
    ("--grad-accum-steps 7", "grad_accum_steps (7) must not be above batch_size (6)"),
    ("--warm-up-epochs 30", "warm_up_epochs (30.0) must not be above epochs (20)"),
    ("--enable-mixed-precision --precision float32", "contradict each other"),
    ("--device cuda:7", "there is no cuda:7 here"),
    ("--device mps", "there is no mps here"),
    ("--device cpu,cuda:3", "there is no cuda:3 here"),
    ("--device cpu,cpu", "in `train images`, and TinyImageNetCNN has none: name one device"),
    ("--device cpu,cpu --compile", "--compile needs one device, and 'cpu,cpu' names two"),
    ("--precision tf32", "tf32 needs an NVIDIA GPU, and this run is on cpu"),
    ("--capture", "capture needs an NVIDIA GPU, and this run is on cpu"),
    ("--memory-fraction 0.5", "memory_fraction is for a GPU's memory"),
    ("--enable-gradient-checkpointing", "TinyImageNetCNN has no switch"),
    ("--model resnet_18", "there is no network 'resnet_18'; the most like it: resnet18"),
    ("--load-subset 1", "load_subset must be a number of classes"),
    ("--image-size 4", "image_size must be at least 8"),
    ("--memory-limit 8XB", "memory_limit must be such as 8GB or 500MiB, not '8XB'"),
    ("--memory-limit 1KB", "Six batches of 6 images take 27,648 bytes"),
])
def test_what_cannot_be_used_is_one_sentence(root, tmp_path, capsys, words, told):
    output = tmp_path / "run"
    assert command(root, *words.split(), "--output", output) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said
    assert not (output / "checkpoint.pt").exists()


def test_an_unreadable_image_is_named_and_nothing_lost(tmp_path, capsys):
    root, output = tiny_imagenet(tmp_path / "set"), tmp_path / "run"
    assert command(root, "--epochs", 1, "--output", output) == 0
    before = (output / "checkpoint.pt").read_bytes()
    spoilt = root / "train" / NUMBERS[0] / "images" / f"{NUMBERS[0]}_3.JPEG"
    spoilt.write_bytes(b"spoilt")
    assert command(root, "--epochs", 1, "--output", output, "--resume") == 2
    assert f"{spoilt} is no whole image" in capsys.readouterr().err
    assert (output / "checkpoint.pt").read_bytes() == before


def test_out_of_memory_says_what_to_reduce(root, tmp_path, capsys, monkeypatch):
    output = tmp_path / "run"

    def full():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        at_step(patch, 5, full)
        assert command(root, "--epochs", 2, "--output", output) == 1
    said = capsys.readouterr().err
    assert "There is not enough memory" in said and "batch size (it is 6)" in said
    assert "grad_accum_steps" in said
    assert checkpoint.load(output / "checkpoint.pt")["step"] == 4


def test_switches_reach_the_task(root, monkeypatch):
    calls = []

    def compiled(model, example, **options):
        calls.append((tuple(example.shape), options["precision"]))
        return torch.nn.Sequential(model)

    monkeypatch.setattr(device, "compiled", compiled)
    task = made(root, compile=True, enable_mixed_precision=True, grad_accum_steps=2)
    assert calls == [((3, 3, 16, 16), "bfloat16")] and task.network[0] is task.model
    assert task.trainer.train_step.precision == "bfloat16"
    assert task.trainer.train_step.accumulate == 2 and task.precision == "bfloat16"
    task = made(root, channels_last=True, clip_grad=0.5, schedule="one_cycle")
    assert task.model.features[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert task.trainer.train_step.max_norm == 0.5 and task.average is not None
    assert task.trainer.rates.schedule(0) == pytest.approx(1 / 25)  # where one_cycle begins
    model = "continuous_integration"
    for on in (False, True):
        task = made(root, model=model, enable_gradient_checkpointing=on)
        assert task.model.memory_efficient is on and not task.model.enable_mixed_precision
    for name, kind in (("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")):
        for kernels, library in (("torch", "torch.optim"), ("ours", "course_lib.optim")):
            task = made(root, optimizer=name, kernels=kernels)
            found = type(task.optimizer)
            assert found.__name__ == kind and found.__module__.startswith(library)
            assert type(task.model.features[0]).__module__.startswith(
                "torch.nn" if kernels == "torch" else "course_lib.nn"
            )


def test_switches_reach_pytorch(monkeypatch):
    seen = []
    monkeypatch.setattr(device, "settled", lambda place, **options: seen.append(options))
    settings = ImageSettings(precision="tf32", deterministic=True, memory_fraction=0.5)
    images.settled(settings, torch.device("cuda"))
    images.settled(ImageSettings(cudnn_benchmark=False, precision="float32"), torch.device("cuda"))
    assert [list(options.values()) for options in seen] == [
        ["tf32", True, True, 0.5], ["float32", False, False, None]
    ]
    assert list(seen[0]) == ["precision", "benchmark", "deterministic", "memory_fraction"]


def test_switches_reach_the_set(root, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(images.data, "images", lambda root, **options: seen.append((root, options)))
    images.read(ImageSettings(
        data="set", num_workers=3, prefetch_factor=5, load_subset=0.5, cache=tmp_path, seed=9,
        image_size=20, validation_fraction=0.3, download=True, memory_limit="7MB",
    ), "downloads")  # fmt: skip
    assert seen == [("set", {
        "workers": 3, "prefetch": 5, "subset": 0.5, "cache": tmp_path, "seed": 9, "image_size": 20,
        "validation_fraction": 0.3, "download": True, "downloads": "downloads", "progress": None,
        "memory": 7_000_000,
    })]  # fmt: skip


def test_on_apples_gpu_by_a_stand_in(monkeypatch):
    monkeypatch.setattr(here, "_mps_available", lambda: True)
    settings, (place,) = images.decided(ImageSettings(enable_mixed_precision=True))
    assert place == torch.device("mps")
    assert (settings.precision, settings.kernels, settings.capture) == ("float16", "torch", False)


def test_large_sets_stay_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (1000, 2000))
    said, gpu = [], torch.device("cuda")
    assert images.fits(torch.zeros(500, dtype=torch.uint8), gpu, said.append) and said == []
    assert not images.fits(torch.zeros(501, dtype=torch.uint8), gpu, said.append)
    assert "they stay on the host, and each batch crosses over" in said[0]
    assert images.fits(torch.zeros(501), torch.device("cpu"), None)


def test_every_key_is_an_option_with_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "images", "--help"])
    told = capsys.readouterr().out
    for field in dataclasses.fields(ImageSettings):
        assert f"--{field.name.replace('_', '-')} " in told or f"--{field.name}" in told
    assert config.converted(ImageSettings, "load_subset", 20) == 20.0
