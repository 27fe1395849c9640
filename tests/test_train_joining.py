"""Ranks join; one that is lost ends the others with a sentence, and torchrun goes on."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from pairs import in_ranks
from test_train_reliability import clothes, words  # noqa: F401

from course_lib import cli
from course_lib.runtime.host import device
from course_lib.train import checkpoint, joining, memory, ranks

#: A rank that acts in step 5, and then the command as it is.
SCRIPT = """
import os, signal, sys
from course_lib import cli
from course_lib.train import classifier

step = classifier.Classifier.train_step

def train_step(task, number):
    here = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if number == 5 and here == ("1", "0"):
        os.kill({whom}, {signal})
    step(task, number)

classifier.Classifier.train_step = train_step
sys.exit(cli.main())
"""


def started(monkeypatch, n=2, rank=0, gpus=0, port=1):
    told = rank, n, rank, n, "localhost", port
    for name, value in zip(joining.VARIABLES, told, strict=True):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(device, "count", lambda: gpus)


# ------------------------------------------------------------------------------- joining


def test_each_rank_has_a_device_of_its_own(monkeypatch):
    with joining.joined("mps") as name:
        assert name == "mps" and ranks.count() == 1 and ranks.is_first()
    for gpus, asked, found in (
        (0, None, "cpu"), (0, "cpu", "cpu"), (2, "cpu", "cpu"), (2, None, "cuda:1"),
        (4, "cuda", "cuda:1"), (2, "auto", "cuda:1"),
    ):  # fmt: skip
        started(monkeypatch, rank=1, gpus=gpus)
        assert joining.place_of(asked) == found
    for gpus, asked, told in (
        (2, "cuda:0", "not on 'cuda:0': leave the device out"), (2, "mps", "not on 'mps'"),
        (1, None, "2 ranks on this host want a GPU each, and it has 1: choose --nproc-per-node 1"),
        (0, "cuda", "no cuda here for 2 ranks: choose the device cpu"),
    ):  # fmt: skip
        started(monkeypatch, rank=1, gpus=gpus)
        with pytest.raises(ValueError, match=told), joining.joined(asked):
            pass


def test_a_port_in_use_is_told(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started(monkeypatch, port=port)
        told = rf"rank 0 of 2 does not find the others at localhost:{port} \(address already in use"
        with pytest.raises(memory.TrainingError, match=told), joining.joined("cpu", 20):
            pass


def test_a_rank_that_is_lost_is_told():
    def lost():
        with joining.joined("cpu"):
            if ranks.number() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.total(torch.zeros(1))

    error, killed = in_ranks(2, lost, join=False)
    assert killed == -signal.SIGKILL and isinstance(error, memory.TrainingError)
    assert str(error).startswith("rank 0 of 2 has lost another (")
    assert str(error).endswith("with --resume.") and "\n" not in str(error)


def test_sigterm_ends_a_rank_that_waits_for_another(tmp_path):
    said = tmp_path / "said"
    said.touch()

    def waits():
        with joining.joined("cpu"), open(said, "w") as file:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            child.start()
            child.terminate()
            child.join()
            assert child.exitcode == -signal.SIGTERM  # as that of a process that decodes images
            if ranks.number() == 0:
                os.dup2(file.fileno(), 2)
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            while ranks.number() == 1 and not said.read_text():
                time.sleep(0.02)
            ranks.total(torch.zeros(1))

    ended, error = in_ranks(2, waits, join=False)
    assert ended == 128 + signal.SIGTERM and isinstance(error, memory.TrainingError)
    assert said.read_text().startswith("python -m course_lib train: rank 0 was ended from outside")


# ------------------------------------------------------------------------------- torchrun


def torchrun(tmp_path, whom, number, *arguments):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(whom=whom, signal=int(number)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_killed_rank_ends_the_others_and_torchrun_goes_on(clothes, tmp_path):  # noqa: F811
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert cli.main(list(map(str, words(clothes, whole)))) == 0
    status, out, err = torchrun(
        tmp_path, "os.getpid()", signal.SIGKILL, "--max-restarts=1", tmp_path / "train.py",
        *words(clothes, run),
    )  # fmt: skip
    assert status == 0, err
    (told,) = [line for line in err.splitlines() if line.startswith("python -m course_lib")]
    assert "rank 0 " in told and told.endswith("start the same command again with --resume.")
    assert out.splitlines()[-1].endswith(f"Kept in {run}.") and out.count("epoch 1: ") == 1
    one, other = (checkpoint.load(folder / "checkpoint.pt") for folder in (whole, run))
    for name, weight in one["state"]["model"].items():
        torch.testing.assert_close(other["state"]["model"][name], weight, rtol=1e-5, atol=1e-6)
    assert one["step"] == other["step"] and len(other["history"]) == 2


def test_ctrl_c_stops_all_ranks_with_a_checkpoint(clothes, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    status, out, err = torchrun(
        tmp_path, "os.getppid()", signal.SIGINT, tmp_path / "train.py",
        *words(clothes, run, "--epochs", "1000"),
    )  # fmt: skip
    assert status != 0 and err.count(" images, PyTorch's modules") == 1
    (told,) = [line for line in err.splitlines() if line.startswith("Stopped.")]
    assert told == f"Stopped. {run}: the last checkpoint is whole. To go on, add --resume to the " \
        "same command."
    assert checkpoint.load(run / "checkpoint.pt")["step"] >= 5
    assert {f.name for f in run.iterdir()} == {"checkpoint.pt", "history.json"}
