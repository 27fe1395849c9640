"""A run that is stopped, however, goes on to the same bits; what is spoilt is refused by name."""

import functools
import json

import pytest
import torch
from kill_and_resume import differences, prove
from stopped_runs import killed_until_done, one_thread
from torch import nn

from course_lib import cli, train
from course_lib.train import checkpoint, classifier, loop

pytestmark = pytest.mark.usefixtures("leaves_drawn_once")


class Tiny(nn.Sequential):
    """Has what makes resuming hard: running statistics, and dropout."""

    def __init__(self, width=8):
        super().__init__(
            nn.Conv2d(3, width, 3, stride=4), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.3),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5),
        )  # fmt: skip


def run(output=None, **options):
    """Train a tiny network for 3 epochs of 6 steps; (model, history)."""
    torch.manual_seed(0)
    model = options.pop("model", None) or Tiny()
    given = dict(image_size=20, epochs=3, batch_size=32, learning_rate=1e-2, device_name="cpu")
    given |= dict(validation_fraction=0.6)
    return train.train_leaves(model, output=output, **given | options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    with one_thread():
        run(folder)
    return folder


class Stop(Exception):
    pass


def stop_at(monkeypatch, steps, error=Stop):
    """Let training steps begin `steps` times, and raise `error` instead of the next."""
    left, step = [steps], classifier.Classifier.train_step

    def train_step(self, number):
        if left[0] == 0:
            step(self, number)  # spoils the state, as a stop in the middle of a step does
            raise error()
        left[0] -= 1
        step(self, number)

    monkeypatch.setattr(classifier.Classifier, "train_step", train_step)


# ------------------------------------------------------------------------- going on


@pytest.mark.parametrize("steps, every", [(0, None), (4, 1), (14, 5)])
def test_a_stopped_run_ends_with_the_same_bits(whole, tmp_path, monkeypatch, steps, every):
    with one_thread():
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_at(patch, steps)
            run(tmp_path, checkpoint_steps=every)
        if every == 1:
            assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == steps
        torch.rand(7)  # generators elsewhere do not matter
        run(tmp_path, resume=True, checkpoint_steps=every)
    assert differences(whole / "checkpoint.pt", tmp_path / "checkpoint.pt") == []
    assert (whole / "history.json").read_text() == (tmp_path / "history.json").read_text()


def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path):
    folder = tmp_path / "run"
    train = functools.partial(run, folder, checkpoint_steps=1)
    assert killed_until_done(lambda resume: train(resume=resume), folder) >= 2
    assert differences(whole / "checkpoint.pt", folder / "checkpoint.pt") == []
    assert not list(folder.glob("*.part"))


def test_the_comparison_sees_a_single_bit(whole, tmp_path):
    kept = checkpoint.load(whole / "checkpoint.pt")
    kept["state"]["model"]["0.weight"].view(torch.int32)[0, 0, 0, 0] ^= 1
    checkpoint.save(tmp_path / "other.pt", **{k: v for k, v in kept.items() if k != "format"})
    found = differences(whole / "checkpoint.pt", tmp_path / "other.pt")
    assert found == ["checkpoint.state.model.0.weight"]


def test_a_finished_run_is_left_as_it_is(whole):
    before = (whole / "checkpoint.pt").read_bytes()
    model, history = run(whole, resume=True)
    assert (whole / "checkpoint.pt").read_bytes() == before
    assert history == json.loads((whole / "history.json").read_text())
    assert not model.training


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_killed_run_on_a_gpu_ends_with_the_same_bits(tmp_path):
    options = "--model efficientnet_b0 --image-size 64 --epochs 4 --precision bfloat16"
    assert prove(tmp_path, options.split(), kills=2) == []


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("spoil", [
    lambda content: b"",
    lambda content: content[: len(content) // 2],
    lambda content: content[:-1],
    lambda content: content[:2000] + bytes([content[2000] ^ 1]) + content[2001:],
    lambda content: b"no checkpoint",
])
def test_a_spoilt_checkpoint_is_refused_and_kept(whole, tmp_path, spoil):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(spoil((whole / "checkpoint.pt").read_bytes()))
    before = path.read_bytes()
    with pytest.raises(train.CheckpointError, match="checkpoint.pt is no whole checkpoint"):
        run(tmp_path, resume=True)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("content, word", [
    ({"format": 99}, "format 99"),
    ({"weights": 1}, "no whole checkpoint"),
    ([1, 2], "no whole checkpoint"),
    ({"format": 1}, "no whole checkpoint"),
])
def test_something_else_that_torch_saved(tmp_path, content, word):
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(train.CheckpointError, match=word):
        run(tmp_path, resume=True)


def test_a_checkpoint_runs_no_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    torch.save({"format": 1, "trap": Trap()}, tmp_path / "checkpoint.pt")
    with pytest.raises(train.CheckpointError, match="no whole checkpoint"):
        run(tmp_path, resume=True)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("other, words", [
    ({"epochs": 4}, "epochs was 3, and is now 4"),
    ({"learning_rate": 0.5}, "learning_rate was 0.01, and is now 0.5"),
    ({"seed": 1}, "images was .* seed was 0, and is now 1"),
    ({"model": nn.Sequential(nn.Flatten(), nn.Linear(1200, 5))}, "model was 'Tiny'"),
    ({"model": Tiny(12)}, "does not fit this network"),
])
def test_another_runs_checkpoint_is_refused_and_kept(whole, other, words):
    before = (whole / "checkpoint.pt").read_bytes()
    with pytest.raises(train.CheckpointError, match=words) as caught:
        run(whole, resume=True, **other)
    assert str(whole) in str(caught.value)
    assert (whole / "checkpoint.pt").read_bytes() == before


def test_a_folder_with_a_run_is_not_overwritten(whole, tmp_path):
    before = (whole / "checkpoint.pt").read_bytes()
    with pytest.raises(train.CheckpointError, match="of an earlier run"):
        run(whole)
    assert (whole / "checkpoint.pt").read_bytes() == before
    with pytest.raises(train.CheckpointError, match="no folder"):
        run(tmp_path / "absent", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(train.CheckpointError, match="is a file"):
        run(tmp_path / "file")


def test_a_failed_write_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, settings={}, step=1, history=[], state={})

    def fail(file):
        file.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        checkpoint.write_whole(path, fail)
    assert checkpoint.load(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


# ------------------------------------------------------------------------ Ctrl-C


def test_ctrl_c_keeps_the_last_checkpoint_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    arguments = "train leaves --model small_se_net --no-cuda-kernels --device cpu".split()
    arguments += "--image-size 20 --epochs 1 --batch-size 64".split()
    arguments += "--validation-fraction 0.2 --output".split()
    with monkeypatch.context() as patch:
        stop_at(patch, 3, KeyboardInterrupt)
        assert cli.main([*arguments, str(tmp_path / "a")]) == 130
    assert "holds no checkpoint yet" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        stop_at(patch, 3, KeyboardInterrupt)
        assert cli.main([*arguments, str(tmp_path / "b"), "--checkpoint-steps", "2"]) == 130
    said = capsys.readouterr().err
    assert "last checkpoint is whole" in said and "add --resume" in said
    assert checkpoint.load(tmp_path / "b" / "checkpoint.pt")["step"] == 2
    assert not list(tmp_path.rglob("*.part"))
    for folder in "ab":
        assert cli.main([*arguments, str(tmp_path / folder), "--resume"]) == 0
    assert "no checkpoint yet: the run starts from its beginning" in capsys.readouterr().out
    found = [tmp_path / folder / loop.CHECKPOINT for folder in "ab"]
    assert differences(*found) == []
