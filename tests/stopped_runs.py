"""What tests of stopped runs have in common: one thread, and being killed again and again."""

import contextlib
import multiprocessing
import random
import signal
import time

import torch

from course_lib.train import checkpoint

FURTHER = 4  # steps that a run must get on before it is killed


@contextlib.contextmanager
def one_thread():
    """PyTorch adds up in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def killed_until_done(train, folder, seconds=90):
    """Run `train(resume)`, which writes to `folder`, in processes that are killed; how many were.

    Each is killed once it has gone further than the one before it, at a moment that may lie
    anywhere in a step. The last comes to its end.
    """

    def in_a_process():
        torch.set_num_threads(1)
        train(folder.exists())

    fork = multiprocessing.get_context("fork")  # a process without a second import of torch
    chance, killed, deadline = random.Random(), 0, time.monotonic() + seconds
    while True:
        process = fork.Process(target=in_a_process)
        process.start()
        before = _steps_done(folder)
        while process.is_alive() and _steps_done(folder) < before + FURTHER:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        if process.exitcode == 0:
            return killed
        assert process.exitcode == -signal.SIGKILL
        killed += 1


def _steps_done(folder):
    path = folder / "checkpoint.pt"
    return checkpoint.load(path)["step"] if path.exists() else 0
