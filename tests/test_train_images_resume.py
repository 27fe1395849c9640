"""`train images` that is stopped, however, goes on to the same bits; and what only a GPU shows."""

import json
import os
import signal
import time

import pytest
from image_runs import at_step, command, made, run
from kill_and_resume import differences
from stopped_runs import killed_until_done, one_thread

from course_lib import train
from course_lib.train import checkpoint, image_classifier, images, loop


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory):
    """The folder of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    with one_thread():
        run(root, folder)
    return folder


class Stop(Exception):
    pass


def stop():
    raise Stop


def test_a_stopped_run_ends_with_the_same_bits(root, whole, tmp_path, monkeypatch):
    with one_thread():
        with monkeypatch.context() as patch, pytest.raises(Stop):
            at_step(patch, 6, stop)
            run(root, tmp_path)
        assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == 6
        run(root, tmp_path, resume=True)
    assert differences(whole / "checkpoint.pt", tmp_path / "checkpoint.pt") == []


def test_a_killed_run_ends_with_the_same_bits(root, whole, tmp_path):
    folder = tmp_path / "run"
    assert killed_until_done(lambda resume: run(root, folder, resume=resume), folder) >= 1
    assert differences(whole / "checkpoint.pt", folder / "checkpoint.pt") == []


@pytest.mark.usefixtures("in_the_background")
def test_ctrl_c_keeps_the_step_in_hand(root, tmp_path, monkeypatch, capsys):
    words = "--epochs", 2, "--output", tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert command(root, *words) == 130
    assert "the last checkpoint is whole. To go on, add --resume" in capsys.readouterr().err
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["step"] == 3  # of 4 in an epoch
    assert command(root, *words, "--resume") == 0
    assert command(root, "--epochs", 2, "--output", tmp_path / "other") == 0
    found = [tmp_path / name / "checkpoint.pt" for name in ("run", "other")]
    assert differences(*found) == []


@pytest.mark.usefixtures("in_the_background")
def test_a_second_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), loop._put_off() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it goes on")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_max_minutes_stops_after_an_epoch_and_the_same_command_goes_on(
    root, whole, tmp_path, monkeypatch, capsys
):
    clock, step = [0.0], image_classifier.ImageClassifier.train_step

    def slow(self, number):
        clock[0] += 15.0  # four steps: a minute for an epoch
        step(self, number)

    monkeypatch.setattr(image_classifier.ImageClassifier, "train_step", slow)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    words = ["--epochs", 4, "--mixup", 0.2, "--cutmix", 1.0, "--model-ema", "--model-ema-decay",
             0.9, "--max-minutes", 2.5, "--output", tmp_path / "run"]  # fmt: skip
    with one_thread():
        assert command(root, *words) == 0
        assert "Stopped after epoch 2 of 4, as max_minutes says" in capsys.readouterr().out
        assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["step"] == 8
        assert command(root, *words) == 0
        assert "Stopped" not in capsys.readouterr().out
        assert command(root, *words) == 0  # of a run that has ended
    assert differences(whole / "checkpoint.pt", tmp_path / "run" / "checkpoint.pt") == []


def test_another_runs_checkpoint_is_refused(root, whole, tmp_path):
    before = (whole / "checkpoint.pt").read_bytes()
    for other, words in (
        ({"mixup": 0.5}, "mixup was 0.2, and is now 0.5"), ({"load_subset": 2.0}, "load_subset"),
    ):  # fmt: skip
        with pytest.raises(train.CheckpointError, match=words):
            run(root, whole, resume=True, **other)
    with pytest.raises(train.CheckpointError, match="was trained with other images"):
        images.load_images(whole / "checkpoint.pt", device_name="cpu")
    assert (whole / "checkpoint.pt").read_bytes() == before
    task, part, _ = images.load_images(whole / "checkpoint.pt", str(root), device_name="cpu")
    history = json.loads((whole / "history.json").read_text())
    right = (task.predict(part.images).argmax(1) == part.labels).double().mean()
    assert right == history[-1]["validation_accuracy"]


# ------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernels", ["ours", "torch"])
def test_a_gpu_trains_and_resumes_to_the_same_bits(root, tmp_path, kernels):
    options = dict(device="cuda", deterministic=True, kernels=kernels, epochs=2)
    _, history = run(root, tmp_path / "whole", **options)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        at_step(patch, 5, stop)
        run(root, tmp_path / "stopped", **options)
    run(root, tmp_path / "stopped", resume=True, **options)
    found = [tmp_path / name / "checkpoint.pt" for name in ("whole", "stopped")]
    assert differences(*found) == [] and len(history) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, None])
def test_a_gpu_captures_steps_unless_told_not_to(root, capture):
    task = made(root, device="cuda", capture=capture)
    for step in range(3):
        task.train_step(step)
    assert bool(task.trainer.graphs) == (capture is None)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [
    {"precision": "bfloat16", "channels_last": True}, {"precision": "float16", "clip_grad": 1.0},
    {"precision": "tf32", "compile": True, "kernels": "torch"}, {"memory_fraction": 0.5},
    {"optimizer": "sgd", "learning_rate": 0.01, "grad_accum_steps": 2},
    {"capture": False, "kernels": "torch"}, {"mixup": 0.2, "cutmix": 1.0, "model_ema": True},
    {"model": "continuous_integration", "enable_gradient_checkpointing": True},
])
def test_a_gpu_learns_with_each_switch(root, options):
    settings = dict(device="cuda", epochs=6, model_ema=False, mixup=0.0, cutmix=0.0)
    _, history = run(root, **settings | options)
    assert history[-1]["loss"] < history[0]["loss"]
