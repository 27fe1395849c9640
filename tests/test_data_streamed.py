"""Sets that memory does not hold: what is streamed is what is held, and a run on it ends alike."""

import multiprocessing
import os
import signal
from unittest import mock

import pytest
import torch
from image_runs import at_step, command, run
from image_sets import NUMBERS, class_folders, tiny_imagenet
from kill_and_resume import differences
from stopped_runs import one_thread
from test_data import zipped

from course_lib import cli, data
from course_lib.data import decoded, streamed
from course_lib.train import checkpoint, classifier, image_classifier, images

LIMIT = "20KB"  # the set takes 23, and a batch of two images 1.5


def parts(root, **options):
    return data.images(root, image_size=16, memory=20_000, **options)


@pytest.mark.parametrize("options, shared", [
    ({"workers": 0}, True), ({"workers": 2, "prefetch": 1}, True), ({}, False),
])
def test_what_is_streamed_is_what_is_held(root, tmp_path, monkeypatch, options, shared):
    monkeypatch.setattr(streamed, "_is_shared", lambda n_bytes: shared)
    held = data.images(root, image_size=16)
    for place in (root, zipped(root, tmp_path / "set.zip")):
        for one, other in zip(parts(place, **options), held, strict=True):
            assert isinstance(one.images, data.Streamed) and one.names == other.names
            assert one.images.shape == other.images.shape
            assert one.images.nbytes == other.images.nbytes
            for mine, theirs in zip(one.images.split(4), other.images.split(4), strict=True):
                assert torch.equal(mine, theirs)
            assert torch.equal(one.images[3], other.images[3]) and one[3][1] == other[3][1]
            assert one.digest() == other.digest() != one.digest(pixels=False)
    spawning = mock.Mock(get_start_method=lambda: "spawn")
    monkeypatch.setattr(multiprocessing, "get_context", lambda: spawning)
    assert parts(place, workers=2)[0].images.workers == 0 and parts(root)[0].images.workers > 0


def test_sets_that_fit_are_held(root):
    (exactly, _), (more, _) = (
        data.images(root, image_size=16, memory=30 * 768 - less) for less in (0, 1)
    )
    assert isinstance(exactly.images, torch.Tensor) and isinstance(more.images, data.Streamed)
    drawn, _ = data.images(image_size=16, memory=100_000, workers=0)  # of no files
    assert torch.equal(drawn.images[7], data.images(image_size=16)[0].images[7])


def test_batches_ahead_fit_into_the_limit(root, monkeypatch):
    asked = []

    class Loader(list):
        def __init__(self, dataset, *, num_workers, prefetch_factor=0, **options):
            asked.append((num_workers, prefetch_factor))

    monkeypatch.setattr(streamed, "DataLoader", Loader)
    for n, limit in ((2, 20_000), (2, 10_000), (1, 20_000), (1, 10**9)):
        options = {"workers": 3, "ahead": 4, "limit": limit}
        each = streamed.Streamed([root] * 30, 16, decoded.read, **options)
        assert list(each.split(n)) == []
        workers, ahead = asked[-1]
        assert (2 * workers * ahead + 4) * n * 768 <= limit
    assert asked == [(3, 1), (1, 1), (3, 3), (3, 4)]
    each = streamed.Streamed([root] * 30, 16, decoded.read, workers=3, ahead=4, limit=9215)
    with pytest.raises(data.DataError, match="Six batches of 2 images take 9,216 bytes"):
        next(each.split(2))


def test_a_limit_in_words():
    texts = "8GB", "1.5 gib", "500m", "2e3", "64"
    found = [8 * 10**9, 3 * 2**29, 5 * 10**8, 2000, 64]
    assert [streamed.limit_of(text)[0] for text in texts] == found
    for text in ("", "GB", "-1GB", "0", "1.2.3", "8 PB", "inf", "1e30"):
        with pytest.raises(ValueError, match="memory_limit must be such as 8GB or 500MiB"):
            streamed.limit_of(text)


def test_what_is_free_is_the_machines_or_the_containers(tmp_path, monkeypatch):
    for name in ("MEMINFO", "OWN", "CGROUP"):
        monkeypatch.setattr(streamed, name, tmp_path / name)
    assert streamed.free() == streamed.memory()  # of a system that tells nothing
    streamed.MEMINFO.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert streamed.limit_of(None)[0] == 3000 * 1024
    streamed.OWN.write_text("0::/job/step\n")  # Slurm's, whose limit is the job's
    (tmp_path / "CGROUP" / "job" / "step").mkdir(parents=True)
    (tmp_path / "CGROUP" / "memory").mkdir()
    for folder, limit, used, prefix in (
        ("job", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # of version 1
    ):  # fmt: skip
        folder = tmp_path / "CGROUP" / folder
        (folder / used).write_text("1024000\n")
        (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file 24000\n")
        for most, left in (("max", 4_096_000), ("2048000", 1_048_000), ("1000", 0)):
            (folder / limit).write_text(most + "\n")
            assert streamed.free() == left
        (folder / limit).unlink()


# ------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory):
    """The folder of a run that was left alone, and held its images in memory."""
    folder = tmp_path_factory.mktemp("whole")
    with one_thread():
        streaming(root, folder, memory_limit=None)
    return folder


def streaming(root, output, **options):
    settings = {"batch_size": 2, "epochs": 2, "checkpoint_steps": 8, "memory_limit": LIMIT}
    return run(root, output, **settings | options)


class Stop(Exception):
    pass


def stop():
    raise Stop


def stopped(monkeypatch, step, *given, **options):
    with monkeypatch.context() as patch, pytest.raises(Stop):
        at_step(patch, step, stop)
        streaming(*given, **options)


def test_a_run_ends_with_the_bits_of_one_that_holds_its_images(root, whole, tmp_path, monkeypatch):
    """Stopped within an epoch, it goes on where there is enough memory, and where there isn't."""
    for first, then, name in (
        (LIMIT, LIMIT, "streamed"), (LIMIT, None, "then held"), (None, LIMIT, "then streamed"),
    ):  # fmt: skip
        with one_thread():
            stopped(monkeypatch, 17, root, tmp_path / name, memory_limit=first)
            streaming(root, tmp_path / name, resume=True, memory_limit=then)
        found = differences(whole / "checkpoint.pt", tmp_path / name / "checkpoint.pt")
        assert found == (["checkpoint.settings.images"] if first else [])
    assert multiprocessing.active_children() == []
    other = class_folders(tmp_path / "other")
    with pytest.raises(checkpoint.CheckpointError, match="images was 'names "):
        streaming(other, tmp_path / "streamed", resume=True)
    path = tmp_path / "streamed" / "checkpoint.pt"
    for limit in (LIMIT, None):
        task, part, _ = images.load_images(path, str(root), device_name="cpu", memory_limit=limit)
        assert task.predict(part.images).shape == (6, 3)


def test_the_command_says_why_and_ctrl_c_leaves_the_processes_alone(
    root, tmp_path, monkeypatch, capsys
):
    def interrupt():
        children = multiprocessing.active_children()
        assert len(children) == 2
        for child in children:  # as a terminal does
            os.kill(child.pid, signal.SIGINT)

    words = "--memory-limit", LIMIT, "--batch-size", 2, "--num-workers", 2, "--epochs", 2
    with monkeypatch.context() as patch:
        at_step(patch, 3, interrupt)
        assert command(root, *words, "--output", tmp_path / "run") == 0
    assert capsys.readouterr().out.splitlines()[3:5] == [
        "Data: 24 images to train on, 6 to validate",
        "Streamed: as bytes of shape (3, 16, 16) they would take 23,040 bytes, and may take "
        "20,000 bytes (as memory_limit says). Each epoch decodes them anew, by 2 processes.",
    ]


def test_leaves_that_are_streamed_give_the_bits_of_held_ones(root, tmp_path, monkeypatch, capsys):
    def leaves(name, *words):
        options = "--model small_se_net --no-cuda-kernels --device cpu --image-size 16 --epochs 2"
        given = "--data", root, "--batch-size", 2, "--checkpoint-steps", 8, *words
        output = () if name is None else ("--output", tmp_path / name)
        return cli.main(["train", "leaves", *options.split(), *map(str, (*given, *output))])

    def interrupted(task, step):
        if step == 17:
            raise KeyboardInterrupt
        train_step(task, step)

    train_step, streams = classifier.Classifier.train_step, ("--memory-limit", LIMIT)
    with one_thread():
        assert leaves("held") == 0 and "Streamed" not in capsys.readouterr().err
        with monkeypatch.context() as patch:
            patch.setattr(classifier.Classifier, "train_step", interrupted)
            assert leaves("run", *streams) == 130
        assert "they would take 23,040 bytes, and may take 20,000" in capsys.readouterr().err
        assert leaves("run", *streams, "--resume") == 0
    assert multiprocessing.active_children() == []
    files = [tmp_path / name / "checkpoint.pt" for name in ("held", "run")]
    assert differences(*files) == ["checkpoint.settings.images"]
    capsys.readouterr()
    for words in (streams, ()):
        assert leaves(None, "--evaluate", files[1], *words) == 0
    one, other = (half.splitlines()[-1] for half in capsys.readouterr().out.split("images.")[:2])
    assert one == other and "of 6 validation" in one


def test_a_killed_process_is_told_and_the_checkpoint_whole(root, tmp_path, monkeypatch):
    def kill():
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        at_step(patch, 9, kill)
        with pytest.raises(ChildProcessError, match="A process that decodes images was ended"):
            streaming(root, tmp_path, num_workers=1)
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == 8
    assert len(streaming(root, tmp_path, resume=True)[1]) == 2


def test_an_image_that_spoils_is_named_and_nothing_lost(root, tmp_path, capsys):
    kept = tiny_imagenet(tmp_path / "set", train=8)
    spoilt = kept / "train" / NUMBERS[0] / "images" / f"{NUMBERS[0]}_3.JPEG"
    words = "--memory-limit", LIMIT, "--batch-size", 2, "--epochs", 1, "--output", tmp_path / "run"
    good = spoilt.read_bytes()
    spoilt.write_bytes(good[:100])
    assert command(kept, *words, "--checkpoint-steps", 6) == 2
    assert f"{spoilt} is no whole image" in capsys.readouterr().err
    spoilt.write_bytes(good + b" ")  # a good copy, not the same bytes
    assert command(kept, *words, "--resume") == 0


def test_images_on_the_host_follow_the_steps_wherever_these_begin():
    part = data.DecodedImages(
        torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1).expand(12, 3, 2, 2).contiguous(),
        torch.zeros(12, dtype=torch.int64), ("a",), tuple("abcdefghijkl"),
    )  # fmt: skip
    one, other = (
        image_classifier.ImageClassifier(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 1)), part, part, epochs=3,
            batch_size=5, learning_rate=0.1, seed=0, keep_on_device=keep, padding=None,
        ) for keep in (True, False)
    )  # fmt: skip
    for step in (0, 1, 2, 5, 1, 2, 3):
        assert torch.equal(one._inputs(step)[0][0], other._inputs(step)[0][0])


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [LIMIT, None])
def test_a_gpu_trains_on_what_crosses_over(root, tmp_path, monkeypatch, limit):
    options = {"device": "cuda", "deterministic": True}
    streaming(root, tmp_path / "whole", memory_limit=None, **options)
    monkeypatch.setattr(images, "fits", lambda *given: False)
    streaming(root, tmp_path / "crossing", memory_limit=limit, **options)
    found = [tmp_path / name / "checkpoint.pt" for name in ("whole", "crossing")]
    assert differences(*found) == (["checkpoint.settings.images"] if limit else [])
