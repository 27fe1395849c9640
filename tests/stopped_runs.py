"""What tests of stopped runs have in common: one thread, and being killed again and again."""

import contextlib
import multiprocessing
import random
import signal

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


def killed_until_done(train, folder):
    """Run `train(resume)`, which writes to `folder`, in processes that are killed; how many were.

    Each is killed once it has gone further than the one before it, at a moment that may lie
    anywhere in a step. The last comes to its end.
    """

    def in_a_process(seconds):
        torch.set_num_threads(1)
        save, enough = checkpoint.save, _steps_done(folder) + FURTHER

        def save_and_go_on(path, **content):
            save(path, **content)
            if content["step"] >= enough and not signal.getitimer(signal.ITIMER_PROF)[0]:
                signal.setitimer(signal.ITIMER_PROF, seconds)  # of work; then the system ends it

        checkpoint.save = save_and_go_on
        train(folder.exists())

    fork = multiprocessing.get_context("fork")  # a process without a second import of torch
    chance, killed = random.Random(), 0
    while True:
        process = fork.Process(target=in_a_process, args=(chance.uniform(0.0001, 0.02),))
        process.start()
        process.join()
        if process.exitcode == 0:
            return killed
        assert process.exitcode == -signal.SIGPROF
        killed += 1


def _steps_done(folder):
    path = folder / "checkpoint.pt"
    return checkpoint.load(path)["step"] if path.exists() else 0
