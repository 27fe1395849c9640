"""Training on leaves: what is learnt, computed, told and refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.functional import to_tensor

from course_lib import cli, data, models, plot, train
from course_lib.train import classifier, leaves, loop, randomness

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("leaves_drawn_once")


def linear(n_pixels=3 * 8 * 8):
    return nn.Sequential(nn.Flatten(), nn.Linear(n_pixels, 5))


def short(model=None, **options):
    given = dict(image_size=8, epochs=1, batch_size=128, learning_rate=1e-3, device_name="cpu")
    return train.train_leaves(model or linear(), **given | options)


# --------------------------------------------------------------------------- learning


def test_the_small_network_learns_the_drawn_leaves():
    model, history = train.train_leaves(
        "small_se_net", image_size=32, epochs=8, batch_size=16,
        use_cuda_kernels=False, device_name="cpu",
    )  # fmt: skip
    assert isinstance(model, models.SmallSENet) and not model.training
    assert [entry["epoch"] for entry in history] == list(range(1, len(history) + 1))
    assert history[-1]["validation_accuracy"] >= 0.5  # by mean colour: < 0.45
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    held = data.leaves(image_size=32, train=False)
    accuracy = train.evaluate_accuracy(model, held.images, held.labels)
    assert accuracy == history[-1]["validation_accuracy"]
    shares = train.accuracy_by_class(model, held)
    assert shares.keys() == set(held.classes)
    assert sum(shares.values()) / 5 == pytest.approx(accuracy)  # as many images of each class


def test_the_same_seed_gives_the_same_network_and_another_seed_another():
    # Compared with each other, not with what another version of PyTorch would make.
    def weights(seed):
        model, _ = short("small_se_net", seed=seed, image_size=16, use_cuda_kernels=False)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = weights(0)
    torch.manual_seed(99)
    assert torch.equal(first, weights(0)) and not torch.equal(first, weights(1))


def test_training_leaves_the_callers_settings_alone():
    model = linear()
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    short(model)
    assert torch.equal(torch.rand(3), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.backends.cudnn.deterministic


def test_one_step_is_what_pytorch_computes():
    part = data.leaves(image_size=8)
    with randomness.repeatable(CPU):
        torch.manual_seed(0)
        ours, twin = linear(), linear()
        twin.load_state_dict(ours.state_dict())
        task = classifier.Classifier(
            ours, part.images, part.labels, (part.images, part.labels), epochs=2, batch_size=50,
            learning_rate=1e-2, seed=3,
        )  # fmt: skip
        seen = []
        ours.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        task.train_step(0)
    order = randomness.permutation(400, 3, "order", 0)[:50]
    x, labels = part.images[order] / 127.5 - 1, part.labels[order]
    assert torch.equal(seen[0], x)
    loss = nn.functional.cross_entropy(twin(x), labels, label_smoothing=0.1)
    loss.backward()
    rate = 1e-2 * 1 / 2  # 16 steps, the first two of which warm up
    for ((name, p), q) in zip(twin.named_parameters(), ours.parameters(), strict=True):
        decay = 0.05 if name.endswith("weight") else 0.0
        torch.optim.AdamW([p], lr=rate, weight_decay=decay).step()
        torch.testing.assert_close(q, p)
    assert task.totals[0].item() == pytest.approx(loss.item(), rel=1e-6)


def test_every_image_is_seen_once_in_an_epoch_in_another_order():
    part = data.leaves(image_size=8)
    images, numbers = part.images.clone(), torch.arange(400)  # each image brings its number
    images[:, 0, 0, 0], images[:, 0, 0, 1] = numbers // 256, numbers % 256
    seen = []
    model = linear()
    task = classifier.Classifier(
        model, images, part.labels, (images, part.labels), epochs=2, batch_size=40,
        learning_rate=1e-2, seed=0,
    )  # fmt: skip
    model.register_forward_pre_hook(lambda _, given: seen.append((given[0] + 1) * 127.5))
    for step in range(20):
        task.train_step(step)
    numbers = [(256 * x[:, 0, 0, 0] + x[:, 0, 0, 1]).round().long().tolist() for x in seen]
    epochs = [sum(numbers[:10], []), sum(numbers[10:], [])]
    assert all(sorted(epoch) == list(range(400)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("name", leaves.AUGMENTATIONS)
def test_augmentation_follows_from_seed_epoch_and_image_alone(name):
    part = data.leaves(image_size=16)
    task = classifier.Classifier(
        linear(3 * 256), part.images, part.labels, (part.images, part.labels), epochs=2,
        batch_size=8, learning_rate=1e-2, seed=0, augment=leaves.augmentation(name),
    )  # fmt: skip
    batch = lambda rows, epoch: task._augmented(part.images[rows], rows, epoch)  # noqa: E731
    rows = torch.tensor([5, 9, 300, 17, 60, 61, 62, 63])
    first = batch(rows, 0)
    assert first.shape == (8, 3, 16, 16) and first.dtype == torch.uint8
    assert torch.equal(batch(rows.flip(0), 0).flip(0), first)
    assert not torch.equal(batch(rows, 1), first)


@pytest.mark.parametrize("epochs, batch_size", [(1, 400), (1, 10_000), (3, 33)])
def test_the_learning_rate_rises_and_falls(epochs, batch_size):
    part = data.leaves(image_size=8)
    task = classifier.Classifier(
        linear(), part.images, part.labels, (part.images, part.labels), epochs=epochs,
        batch_size=batch_size, learning_rate=2.0, seed=0,
    )  # fmt: skip
    rates = [task._learning_rate(step) for step in range(epochs * task.steps_per_epoch)]
    peak = rates.index(max(rates))
    assert max(rates) == 2.0 and min(rates) > 0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_bfloat16_trains_too():
    _, history = short("small_se_net", precision="bfloat16", image_size=16, use_cuda_kernels=False)
    _, plain = short("small_se_net", image_size=16, use_cuda_kernels=False)
    assert history[0]["loss"] == pytest.approx(plain[0]["loss"], rel=0.02)
    assert history != plain


def test_the_last_layer_begins_undecided():
    settings = {"seed": 0, "model": "efficientnet_b0", "classes": range(5)}
    with randomness.repeatable(CPU):
        model = leaves.create(settings | {"use_cuda_kernels": False}, CPU)
    x = torch.randn(4, 3, 32, 32)
    assert nn.functional.cross_entropy(model(x), torch.arange(4)).item() < 2


# ------------------------------------------------------------------------- evaluating


@pytest.mark.parametrize("shape", [(7, 3, 8, 8), (7, 8, 24)])
def test_accuracy_counts_right_answers(shape):
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    model = linear().train()
    found = model(classifier.scale(images).reshape(7, 3, 8, 8)).argmax(1)
    labels = found.clone()
    labels[:2] = (labels[:2] + 1) % 5
    assert train.evaluate_accuracy(model, images, labels, batch_size=2) == 5 / 7
    assert model.training  # as it was


def test_accuracy_of_nothing_is_refused():
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="3 and 2 came"):
        train.evaluate_accuracy(linear(), images, torch.zeros(2))
    with pytest.raises(ValueError, match="3 and 0 came"):
        train.evaluate_accuracy(linear(), images)
    with pytest.raises(ValueError, match="0 and 0 came"):
        train.evaluate_accuracy(linear(), images[:0], torch.zeros(0))


class Items(list):
    """A data set as torchvision's are: nothing but a length and items."""


def test_accuracy_on_a_data_set_is_that_on_its_tensors():
    images = torch.randint(0, 256, (7, 3, 8, 8), dtype=torch.uint8)
    model, labels = linear().train(), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    expected = train.evaluate_accuracy(model, images, labels)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    for kind in (images, pictures, list(map(to_tensor, pictures))):
        items = Items(zip(kind, labels.tolist(), strict=True))
        assert train.evaluate_accuracy(model, items, batch_size=3) == expected
    assert model.training
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    train.evaluate_accuracy(model, Items([(to_tensor(pictures[0]), labels[0])]))
    torch.testing.assert_close(seen[0], classifier.scale(images[:1]), atol=1e-6, rtol=0)
    grey = Items([(Image.new("L", (24, 8), 255), 2)])
    train.evaluate_accuracy(model, grey)
    assert torch.equal(seen[1], torch.ones(1, 1, 8, 24))


@pytest.mark.parametrize("items, words", [
    ([], "the data set has no images"),
    ([(torch.full((3, 8, 8), -1.0), 0)], "from 0 to 1 as ToTensor makes them; not torch.float32"),
    ([(torch.zeros(3, 8, 8, dtype=torch.int64), 0)], "must be bytes, or numbers from 0 to 1"),
    ([(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 8, 9), 0)], "images of one shape are needed"),
    ([("a path", 0)], "must be tensors or PIL's"),
])
def test_data_sets_of_something_else_are_refused(items, words):
    with pytest.raises(ValueError, match=words):
        train.evaluate_accuracy(linear(), Items(items))


def test_scaling_makes_bytes_numbers_from_minus_1_to_1():
    images = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    assert classifier.scale(images).tolist() == [[[[-1.0, 1.0]]]]
    ready = torch.randn(2, 3, 4, 4)
    assert classifier.scale(ready) is ready


# -------------------------------------------------------------------------- histories


HISTORY = [
    {"epoch": 1, "loss": 1.5, "accuracy": 0.3, "validation_loss": 1.4, "validation_accuracy": 0.4},
    {"epoch": 2, "loss": 1.0, "accuracy": 0.6, "validation_loss": 1.1, "validation_accuracy": 0.5},
]


def test_the_curves_show_both_parts():
    figure = plot.learning_curves(HISTORY, title="leaves")
    loss, accuracy = figure.axes
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[30, 60], [40, 50]]
    assert [list(line.get_ydata()) for line in loss.lines] == [[1.5, 1.0], [1.4, 1.1]]
    assert "%" in accuracy.get_ylabel() and loss.get_xlabel() == "epoch"
    assert "validation accuracy from 0.4 to 0.5" in figure.alt
    single = plot.learning_curves([{"epoch": 1, "loss": 0.0, "accuracy": 1.0}])
    assert single.png()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="at least one epoch"):
        plot.learning_curves([])


def test_an_epoch_in_words():
    assert loop.sentence(HISTORY[0]) == (
        "epoch 1: loss 1.5000, accuracy 30.0%, validation loss 1.4000, validation accuracy 40.0%"
    )


# --------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("options, words", [
    ({"epochs": 0}, "epochs must be a whole number"),
    ({"batch_size": 2.5}, "batch_size must be"),
    ({"image_size": -1}, "image_size must be"),
    ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
    ({"precision": "float16"}, "precision must be float32 or bfloat16"),
    ({"checkpoint_steps": 0}, "checkpoint_steps must be 1 or more"),
    ({"model": "efficientnet_b99"}, "efficientnet_b99"),
    ({"device_name": "tpu"}, "cpu, cuda, or a GPU by number"),
    ({"device_name": "mps"}, "there is no mps here"),
    ({"device_name": "cuda:99"}, "there is no cuda:99 here"),
])
def test_senseless_options(options, words):
    with pytest.raises(ValueError, match=words):
        short(**options)


def test_a_loss_that_is_not_finite_ends_training(tmp_path):
    with pytest.raises(train.TrainingError, match="epoch 1 the loss is nan: start again"):
        short(nn.Sequential(linear(), nn.Threshold(1e30, float("nan"))), output=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------ the command


def command(*words):
    fixed = "train leaves --model small_se_net --no-cuda-kernels --device cpu --image-size 16"
    return cli.main([*fixed.split(), "--batch-size", "128", *map(str, words)])


def test_the_command_trains_and_evaluates(tmp_path, capsys):
    assert command("--epochs", 2, "--output", tmp_path / "run") == 0
    said = capsys.readouterr()
    assert said.err.count("PyTorch's operators run on the CPU") == 1
    assert said.out.startswith("epoch 1: loss ") and f"Kept in {tmp_path / 'run'}" in said.out
    files = {file.name for file in (tmp_path / "run").iterdir()}
    assert files == {"checkpoint.pt", "history.json", "history.png"}
    [_, last] = json.loads((tmp_path / "run" / "history.json").read_text())

    assert command("--evaluate", tmp_path / "run" / "checkpoint.pt") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{last['validation_accuracy']:.1%} of 100 validation images."
    assert [line.split()[0] for line in lines[:-1]] == list(data.leaves().classes)


def test_the_command_says_what_cannot_be_used(tmp_path, capsys):
    assert command("--data", tmp_path / "absent", "--output", tmp_path / "run") == 2
    assert "There is no" in capsys.readouterr().err
    assert command("--evaluate", tmp_path / "absent.pt") == 2
    assert "There is no checkpoint" in capsys.readouterr().err
    assert command("--epochs", 0, "--output", tmp_path / "run") == 2
    short(output=tmp_path / "own")
    assert command("--evaluate", tmp_path / "own" / "checkpoint.pt") == 2
    assert "Sequential" in capsys.readouterr().err


def test_a_checkpoint_is_evaluated_on_its_own_images_alone(tmp_path, capsys):
    assert command("--epochs", 1, "--output", tmp_path / "run") == 0
    root = tmp_path / "set"
    part = data.leaves(image_size=16, train=False)
    for name, image in zip(part.names, part.images, strict=True):
        path = root / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    assert command("--evaluate", checkpoint, "--data", root) == 2
    assert "other images" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_the_real_leaves_are_learnt_on_a_gpu(tmp_path):
    packed = Path(os.environ.get("COURSE_DATA", "absent")) / "plantvillage5.zip"
    if not packed.is_file():
        pytest.skip("COURSE_DATA names no folder with plantvillage5.zip")
    command = [sys.executable, "-m", "course_lib", "train", "leaves", "--model", "efficientnet_b4"]
    command += ["--precision", "bfloat16", "--data", packed, "--output", tmp_path]
    subprocess.run(command, check=True, timeout=500)
    history = json.loads((tmp_path / "history.json").read_text())
    assert history[-1]["validation_accuracy"] >= 0.85
